"""The user's cache on disk, which nobody else may be able to write to."""

import os
import stat
from functools import cache
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0


def cache_folder() -> Path:
    """The folder of the cache; it need not exist. RuntimeError where the user has none.

    A relative DUALINFER_CACHE belongs to the working folder in which it was first asked for.
    """
    if own := os.environ.get("DUALINFER_CACHE"):
        return _absolute(own)
    shared = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "dualinfer"


@cache
def _absolute(path: str) -> Path:
    try:
        return Path(os.path.abspath(Path(path).expanduser()))
    except FileNotFoundError as error:
        raise RuntimeError(
            f"DUALINFER_CACHE={path!r} is relative, and the working folder is gone"
        ) from error


def make_private(folder: Path, *, closed: bool = False) -> None:
    """Make the folder, for the user alone, if it is not there. ValueError if it is not safe.

    A `closed` one must not even be open to others: whatever modes its files have, by the umask of
    those who write them, nobody else reaches them.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):  # by mkdir's `parents` those above would get the umask's mode
        path.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status, what = folder.stat(), f"the folder {folder}"
    check_owner(status, what)
    check_parents(folder)
    if closed and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(f"{what} is open to others (mode {status.st_mode & 0o777:o}; 700 is safe)")


def check_owner(status: os.stat_result, what: str) -> None:
    """Raise ValueError if somebody else can have written it."""
    if status.st_uid != os.geteuid():
        raise ValueError(f"{what} belongs to user {status.st_uid}, not to you")
    if status.st_mode & _OTHERS_WRITE:
        raise ValueError(
            f"{what} can be written by others (mode {status.st_mode & 0o777:o}; 700 is safe)"
        )


def check_parents(folder: Path) -> None:
    """Raise ValueError if somebody else could put another folder in the place of this one.

    Whoever may write a folder above may rename what is in it, unless it is sticky, as /tmp is. What
    root and its group own is root's to keep.
    """
    for parent in folder.resolve().parents:
        status = parent.stat()
        mode = status.st_mode
        if status.st_uid not in (_ROOT, os.geteuid()):
            raise ValueError(
                f"the folder {folder} lies in {parent}, which belongs to user {status.st_uid}, not "
                "to you or root"
            )
        by_group = mode & stat.S_IWGRP and status.st_gid != _ROOT
        if not mode & stat.S_ISVTX and (by_group or mode & stat.S_IWOTH):
            raise ValueError(
                f"the folder {folder} lies in {parent}, where others can put another in its place "
                f"(mode {mode & 0o777:o}; 755 is safe)"
            )

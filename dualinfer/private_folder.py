"""The user's cache on disk, which nobody else may be able to write to."""

import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """Where the cache is; it need not exist. RuntimeError where the user has no home."""
    if own := os.environ.get("DUALINFER_CACHE"):
        return Path(own).expanduser()
    shared = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "dualinfer"


def make_private(folder: Path, *, closed: bool = False) -> None:
    """Make the folder, for the user alone, if it is not there. ValueError if it is not safe.

    A `closed` one must not even be open to others: whatever modes its files have, by the umask of
    those who write them, nobody else reaches them.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status, what = folder.stat(), f"the folder {folder}"
    check_owner(status, what)
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

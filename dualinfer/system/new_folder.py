"""A folder that appears at once, when it is whole, and what killed processes have left of such."""

import errno
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: nothing tells there whether an owner lives
    fcntl = None

_OWNER = "owner"
_THERE = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
_UNSYNCED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # file systems without fsync of folders


class TakenError(OSError):
    """Another process is filling the folder, or has filled it meanwhile; says what to do."""


class NewFolder:
    """A private folder beside `target`, to be filled in `content`; for as long as it is open.

    Making one removes those of the same target whose processes were killed. Raises OSError, and
    TakenError where a process that began before this one is still at it.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        _make_parents(target.parent)
        _remove_leftovers(target)
        self.path = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        self.content = self.path / "content"
        self._owner = None
        try:
            self._owner = _mark(self.path)
            self.content.mkdir()
            if _is_behind(self.path, target):
                raise TakenError(
                    "another process is writing it at this moment. Wait until that has ended, or "
                    "pass another path"
                )
        except BaseException:
            self.close()
            raise

    def publish(self) -> None:
        """Let what is whole appear; on a disk that loses power, whole or not at all.

        Raises TakenError where something else has appeared there meanwhile, which stays.
        """
        _sync(self.content)
        try:
            os.rename(self.content, self._target)
        except OSError as error:
            if error.errno not in _THERE:
                raise
            raise TakenError(
                "another process has written there meanwhile, and what it wrote stays. Use that, "
                "or pass another path"
            ) from error
        try:
            _sync(self._target.parent)
        except OSError:
            shutil.rmtree(self._target, ignore_errors=True)
            raise

    def close(self) -> None:
        """Remove what was not published."""
        if self._owner is not None:  # first: NFS keeps the name of a file that is open
            os.close(self._owner)
            self._owner = None
        shutil.rmtree(self.path, ignore_errors=True)


def write_synced(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a new file, of `mode` narrowed by the user's umask; it is on the disk afterwards."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, or replace it, at once: it is whole or as before, however the process ends."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        write_synced(beside, content)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _make_parents(folder: Path) -> None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        _sync(path.parent)


def _sync(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSYNCED:
            raise
    finally:
        os.close(descriptor)


def _mark(folder: Path) -> int:
    """A file that says whose the folder is, locked until its descriptor is closed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(folder / f".{_OWNER}", flags, 0o600)
    try:
        if fcntl is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # a file system without locks, where nothing is ever taken for left
                return descriptor
        os.write(descriptor, _host())
        os.rename(folder / f".{_OWNER}", folder / _OWNER)  # nobody sees it before it is locked
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _host() -> bytes:
    return socket.gethostname().encode()


def _folders_of(target: Path) -> list[Path]:
    """The private folders of all processes that fill it, or were killed while they did."""
    ours = re.compile(re.escape(f".{target.name}-") + "[a-z0-9_]{8}")
    return [path for path in target.parent.iterdir() if ours.fullmatch(path.name)]


def _remove_leftovers(target: Path) -> None:
    for path in _folders_of(target):
        if _is_left(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_behind(own: Path, target: Path) -> bool:
    """True where another process of this host began before and is still at it."""
    begun = _begun(own)
    return any(
        (other := _begun(path)) is not None and begun is not None and other < begun
        for path in _folders_of(target)
        if path != own and not _is_left(path)
    )


def _begun(folder: Path) -> tuple[int, str] | None:
    """When its process began, and the name, so that one of two is first; None where not known."""
    try:
        place = folder / _OWNER
        ours = place.read_bytes() == _host()
        return (place.stat().st_mtime_ns, folder.name) if ours else None
    except OSError:
        return None


def _is_left(folder: Path) -> bool:
    """True where the process that made the folder is gone for certain: it held a lock.

    Of another host that is not certain, since not every shared file system shares its locks.
    """
    if fcntl is None or folder.is_symlink():
        return False
    try:
        descriptor = os.open(
            folder / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        )
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return False
        if os.read(descriptor, 1024) != _host():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)

"""The amount of the host's memory that is free."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def host_free_bytes(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int | None:
    """Bytes that this process can still allocate in host memory, None where nothing tells.

    Linux' own estimate, which counts caches that can be dropped, and what the process' cgroups (v2)
    leave of their limits, whichever is least. `proc` and `cgroup` are where those are mounted.
    """
    known = [_system_free(proc), *_cgroups_free(proc, cgroup)]
    return min((n for n in known if n is not None), default=None)


def _system_free(proc: Path) -> int | None:
    try:
        for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024  # in kB
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _cgroups_free(proc: Path, cgroup: Path) -> Iterator[int]:
    """The bytes that each cgroup with a limit has left, from the process' own up to the root."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    own = next((line[3:] for line in lines if line.startswith("0::")), None)
    if own is None:
        return
    path = PurePosixPath(own.lstrip("/"))
    for group in (path, *path.parents):
        try:
            limit = (cgroup / group / "memory.max").read_text(encoding="ascii").strip()
            used = int((cgroup / group / "memory.current").read_text(encoding="ascii"))
            if limit != "max":
                yield max(0, int(limit) - used + _droppable(cgroup / group))
        except (OSError, ValueError):
            continue


def _droppable(group: Path) -> int:
    """Bytes of the group's file cache, which go when memory is asked for."""
    for line in (group / "memory.stat").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return 0

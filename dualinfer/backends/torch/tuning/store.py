"""Kernel configurations measured before: the user's private cache on disk, and the package's own.

A file of the cache serves one kind of device, version of torch and Triton, and state of the
kernels' sources, all of which its name tells apart. It is data from outside: only the user may be
able to write it, and every value is checked before a kernel sees it.
"""

import fcntl
import hashlib
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import triton

from ....errors import warn_caller
from ....kernels.triton import tuning
from ....kernels.triton.tuning import Configurations, Table
from ....system.private_folder import cache_folder, check_owner, check_parents, make_private
from ..device import device_name

HERE = "tuned on this machine"
_MOST_BYTES = 16 << 20
_PATIENCE, _PAUSE = 10.0, 0.02  # seconds, for the lock


@dataclass(frozen=True)
class Machine:
    """The machine that a measurement holds for; `kernels` is a hash of their sources."""

    device: str
    processors: int
    torch: str
    triton: str
    kernels: str

    @classmethod
    def of(cls, device: torch.device) -> "Machine":
        """This machine with `device`."""
        processors = 1
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        versions = torch.__version__, triton.__version__
        return cls(device_name(device), processors, *versions, _hash_of_kernels())

    @property
    def file_name(self) -> str:
        """Name of its file in the cache."""
        facts = json.dumps(asdict(self), sort_keys=True)
        name = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")
        return f"{name}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"


@cache
def _hash_of_kernels() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(tuning.__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def load_configurations(device: torch.device) -> Configurations:
    """Load configurations for `device`: the user's cache, then the package's for its kinds."""
    if device.type != "cuda":
        return Configurations()
    machine = Machine.of(device)
    capability = torch.cuda.get_device_capability(device)
    kinds = tuning.device_kinds(machine.device, capability, machine.processors)
    shipped = [(f"shipped for {kind}", table) for kind, table in tuning.shipped(kinds)]
    return Configurations([(HERE, load_cache(machine)), *shipped])


def load_cache(machine: Machine) -> Table:
    """The table measured on `machine`: empty, with one warning, if the file cannot be trusted."""
    try:
        path = cache_folder().resolve() / machine.file_name
    except (OSError, RuntimeError):
        return {}
    try:
        return _read(path, machine)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        warn_caller(
            f"The kernel configurations in {path} are not used: {error}. Delete the file, or set "
            "DUALINFER_CACHE to a folder of your own, and tune again with triton_autotune=True."
        )
        return {}


def save_cache(machine: Machine, table: Table) -> bool:
    """Add `table` to the cache; other keys stay in it. False, with a warning, if that fails."""
    folder = None
    try:
        folder = cache_folder().resolve()  # a link might lead elsewhere later
        make_private(folder)
        with _locked(folder):
            _write(folder / machine.file_name, machine, table)
    except (OSError, ValueError, RuntimeError) as error:
        warn_caller(
            f"The tuned kernel configurations are used now, but cannot be kept in {folder}: "
            f"{error}. Set DUALINFER_CACHE to a folder of your own that can be written."
        )
        return False
    return True


def _read(path: Path, machine: Machine) -> Table:
    # Never waits for a FIFO, and follows no link that somebody may have laid there.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        check_owner(path.parent.stat(), "its folder")
        check_parents(path.parent)
        check_owner(status, "it")
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
            raise ValueError("it is no file of ours")
        content = json.loads(file.read(_MOST_BYTES))
    if not isinstance(content, dict) or len(content) != 1:
        raise ValueError("it holds no table")
    facts = next(iter(content.values()))
    if not isinstance(facts, dict):
        raise ValueError("it holds no table")
    entries = facts.pop("entries", None)
    if facts != asdict(machine):
        raise ValueError("it was measured on another machine or by other kernels")
    return tuning.to_table(entries)


def _write(path: Path, machine: Machine, table: Table) -> None:
    """Replace the file at once by what it holds, if that is sound, and `table`."""
    try:
        known = _read(path, machine)
    except (OSError, ValueError, RecursionError):
        known = {}
    facts = {**asdict(machine), "entries": tuning.to_entries(known | table)}
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mode 0600
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(tuning.to_json({machine.device: facts}))
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time: two that add to a file must not lose each other's.

    TimeoutError where another one has the lock for too long: it may have been stopped.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    path = folder / ".lock"
    descriptor = os.open(path, flags, 0o600)
    try:
        deadline = time.monotonic() + _PATIENCE
        while not _locks(descriptor):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{path} has been held for {_PATIENCE:g} seconds by {_holder(descriptor)}"
                )
            time.sleep(_PAUSE)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)  # gives the lock back


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(descriptor: int) -> str:
    """Who has the lock, as it wrote there itself."""
    content = os.pread(descriptor, 20, 0)
    return f"process {int(content)}" if content.isdigit() else "another process"

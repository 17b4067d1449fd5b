"""JAX's persistent compilation cache in a folder that the user alone can write to.

An entry is machine code that a later process runs as it is: whoever can write one runs as the user.
What is compiled for the host may hold instructions that another one of the same home does not know,
so that every kind of processor has a folder of its own, and every jaxlib.
"""

import hashlib
import os
import platform
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.metadata import version
from pathlib import Path

import jax
from jax._src import config as jax_config  # nothing public sets an option for one thread

from ...errors import warn_caller
from ...system.private_folder import cache_folder, make_private

SWITCH = "DUALINFER_COMPILATION_CACHE"
_OFF = ("0", "false", "off", "no")
# What compilers choose instructions by, as Linux names it on x86 and on Arm.
_OF_A_CORE = {
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
}
_SLOW = 1.0  # seconds from which on JAX itself, where nobody tells it more, keeps an executable


def use_compilation_cache(device: jax.Device) -> None:
    """Have JAX keep its executables on disk, unless it has a folder already or is told not to.

    `jax_compilation_cache_dir` is the one setting of JAX that dualinfer changes for the whole
    process; the caller's own functions profit as well. Not for a CPU of which nothing tells what
    instructions it knows.
    """
    if os.environ.get(SWITCH, "").lower() in _OFF:
        return
    if device.platform == "cpu" and _processor() is None:
        return
    values = jax.config.values
    if values["jax_compilation_cache_dir"] or not values["jax_enable_compilation_cache"]:
        return
    try:
        folder = _folder()
        shared = folder.parent
        make_private(shared.parent)
        for part in (shared, folder):
            if part.is_symlink():
                raise ValueError(f"{part} is a link")
            make_private(part, closed=True)
    except (OSError, ValueError, RuntimeError) as error:
        warn_caller(
            f"What XLA compiles is not kept on disk: {error}. Set DUALINFER_CACHE to a folder of "
            f"your own that can be written, or {SWITCH}=0 to keep nothing."
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))


def _folder() -> Path:
    kind = f"{version('jaxlib')} {platform.machine()} {_processor()}"
    name = hashlib.sha256(kind.encode()).hexdigest()[:16]
    return cache_folder().resolve() / "jax" / name  # a link might lead elsewhere later


@cache
def _processor(described: Path = Path("/proc/cpuinfo")) -> str | None:
    """Linux's facts of the kinds of cores and their instructions; None where it tells none."""
    try:
        lines = described.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    pairs = (line.partition(":") for line in lines)
    facts = {f"{key.strip()}:{value}" for key, _, value in pairs if key.strip() in _OF_A_CORE}
    knows = any(line.startswith(("flags:", "Features:")) for line in facts)
    return "\n".join(sorted(facts)) if knows else None


def keep_all() -> AbstractContextManager[object]:
    """Within it, what this thread compiles is kept in our folder however quickly it compiled.

    Where the folder, or the least time, is the user's choice, that stands.
    """
    try:
        ours = jax.config.values["jax_compilation_cache_dir"] == str(_folder())
    except (OSError, RuntimeError):
        return nullcontext()
    least = getattr(jax_config, "persistent_cache_min_compile_time_secs", None)
    if not ours or least is None or least.value != _SLOW:
        return nullcontext()
    return least(0.0)

"""JAX's persistent compilation cache in a folder that the user alone can write to.

An entry is machine code that a later process runs as it is: whoever can write one runs as the user.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import jax
from jax._src import config as jax_config  # nothing public sets an option for one thread

from ...errors import warn_caller
from ...system.private_folder import cache_folder, make_private

SWITCH = "DUALINFER_COMPILATION_CACHE"
_OFF = ("0", "false", "off", "no")
_SLOW = 1.0  # seconds from which on JAX itself, where nobody tells it more, keeps an executable


def use_compilation_cache(device: jax.Device) -> None:
    """Have JAX keep its executables on disk, unless it has a folder already or is told not to.

    `jax_compilation_cache_dir` is the one setting of JAX that dualinfer changes for the whole
    process; the caller's own functions profit as well. Not for the CPU, where machine code may hold
    instructions that another machine with the same home does not know.
    """
    if device.platform == "cpu" or os.environ.get(SWITCH, "").lower() in _OFF:
        return
    values = jax.config.values
    if values["jax_compilation_cache_dir"] or not values["jax_enable_compilation_cache"]:
        return
    try:
        folder = _folder()
        make_private(folder.parent)
        if folder.is_symlink():
            raise ValueError(f"{folder} is a link")
        make_private(folder, closed=True)
    except (OSError, ValueError, RuntimeError) as error:
        warn_caller(
            f"What XLA compiles is not kept on disk: {error}. Set DUALINFER_CACHE to a folder of "
            f"your own that can be written, or {SWITCH}=0 to keep nothing."
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))


def _folder() -> Path:
    return cache_folder().resolve() / "jax"  # a link might lead elsewhere later


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

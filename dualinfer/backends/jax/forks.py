"""True if this process was forked from one that had begun to use JAX: then JAX hangs in it."""

import os

from jax._src import xla_bridge  # nothing public tells without a lock, which may be held for ever

from ...errors import UnsupportedError

_forked = False


def _note() -> None:
    global _forked
    _forked = _forked or bool(getattr(xla_bridge, "_backends", None))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note)


def is_forked() -> bool:
    """True in a process that has its parent's JAX, without the threads that do the work."""
    return _forked


def check_process() -> None:
    """Raise UnsupportedError in such a process."""
    if _forked:
        raise UnsupportedError(
            f"Process {os.getpid()} was forked from one that had begun to use JAX, whose threads "
            "did not come along: JAX would hang here. Start processes that use JAX by 'spawn' or "
            "'forkserver' (multiprocessing.get_context), or fork them before JAX is used."
        )

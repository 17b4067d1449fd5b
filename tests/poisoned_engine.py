"""The process of an engine that a prompt which begins with `POISON` kills, at some place.

Where the environment's LOSES names a file, it goes and takes the device with it: each call fails
from then on, as after an error of CUDA's that stays.
"""

import os
import signal
from pathlib import Path
from typing import Any

POISON = [666, 667, 668]  # and behind it the number of new tokens before it kills


def lose(runner: Any) -> None:
    """Let each call of the device fail."""

    def failing(*args: Any, **how: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for name in ("prefill", "extend", "decode", "release", "copy", "save", "restore", "probe"):
        setattr(runner, name, failing)


def run() -> None:
    """Serve as `dualinfer.cli.engine_process` does."""
    from dualinfer.cli import engine_process
    from dualinfer.engine.loop import Loop

    enqueue = Loop._enqueue

    def poisoned(self: Loop, steps: int) -> None:
        for live in list(self._live.values()):
            *begins, place = live.request.tokens.tolist()[:4]
            if begins == POISON and len(live.tokens) >= place and not live.ended:
                if "LOSES" not in os.environ:
                    os.kill(os.getpid(), signal.SIGKILL)
                if (file := Path(os.environ["LOSES"])).exists():
                    file.unlink()
                    lose(self._runner)
        enqueue(self, steps)

    Loop._enqueue = poisoned
    engine_process.run()


if __name__ == "__main__":
    run()

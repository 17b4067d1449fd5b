"""The process of an engine that a prompt which begins with `POISON` kills, at some place."""

import os
import signal

POISON = [666, 667, 668]  # and behind it the number of new tokens before it kills


def run() -> None:
    """Serve as `dualinfer.cli.engine_process` does."""
    from dualinfer.cli import engine_process
    from dualinfer.engine.loop import Loop

    enqueue = Loop._enqueue

    def poisoned(self: Loop, steps: int) -> None:
        for live in list(self._live.values()):
            *begins, place = live.request.tokens.tolist()[:4]
            if begins == POISON and len(live.tokens) >= place and not live.ended:
                os.kill(os.getpid(), signal.SIGKILL)
        enqueue(self, steps)

    Loop._enqueue = poisoned
    engine_process.run()


if __name__ == "__main__":
    run()

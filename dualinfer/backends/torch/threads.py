"""Choose how many of torch's threads a pass on the CPU takes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Multiplications of a pass from which a second thread is worth waking at every product: below, two
# cores that nobody shares are no faster than one, and shared ones are several times slower.
_LEAST = 1 << 23


@contextmanager
def few_threads(device: torch.device, parameters: int, tokens: int) -> Iterator[None]:
    """One thread within, for a pass of few multiplications; the caller's number stands after it."""
    before = torch.get_num_threads()
    if device.type != "cpu" or before == 1 or parameters * tokens >= _LEAST:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_note(device: torch.device, parameters: int) -> tuple[str, ...]:
    """A report's note of threads, where it concerns a model of so many parameters."""
    most = (_LEAST - 1) // max(1, parameters)
    if device.type != "cpu" or not most or torch.get_num_threads() == 1:
        return ()
    tokens = f"{most} tokens" if most > 1 else "one token"
    return (
        f"a pass over at most {tokens} takes one of torch's {torch.get_num_threads()} threads: "
        "waking the others would take longer than the pass",
    )

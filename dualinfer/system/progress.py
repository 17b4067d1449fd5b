"""Progress bars on the terminal's stderr; nothing where stderr is no terminal."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


def track(items: Sequence[T], description: str) -> Iterator[T]:
    """Iterate over `items`, showing how far it is."""
    from rich.console import Console
    from rich.progress import track as rich_track

    console = Console(stderr=True)
    return iter(
        rich_track(
            items,
            description=description,
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
    )


@contextmanager
def track_bytes(
    description: str, total: int, shown: bool = True
) -> Iterator[Callable[[int], None]]:
    """A bar of `total` bytes with their rate; the function given counts bytes as done."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (shown and console.is_terminal),
    )
    with bar:
        task = bar.add_task(description, total=total)
        yield lambda count: bar.advance(task, count)

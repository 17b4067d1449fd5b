"""A progress bar on the terminal's stderr; nothing where stderr is no terminal."""

from collections.abc import Iterator, Sequence
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

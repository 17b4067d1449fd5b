"""Tables for people, on the terminal or in a pipe."""

from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table as RichTable


class Table(RichTable):
    """rich's table, of which a narrow terminal loses nothing: what is too wide is folded.

    It has no blanks behind the last letter of a line.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines of the table."""
        fits = self.__rich_measure__(console, options).minimum <= options.max_width
        for column in self.columns:
            column.overflow, column.no_wrap = "fold", column.no_wrap and fits
        drawn: Any = super().__rich_console__(console, options)
        for line in Segment.split_lines(drawn):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                last = line.pop()
                line.append(Segment(last.text.rstrip(), last.style))
            yield from line
            yield Segment.line()

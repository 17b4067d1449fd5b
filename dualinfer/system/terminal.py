"""The style that commands share on the terminal: lines of its width, and help."""

import pydoc
import re
import shutil
import sys
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from ..errors import printable

# A word, or what is copied as a whole: within `...`, "..." or '...' blanks are no places to break.
_PIECE = re.compile(r"""(?:`[^`\n]*`|"[^"\n]*"|(?<!\w)'[^'\n]*'(?!\w)|\S)+""")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline


def fold(text: str, width: int) -> str:
    """`text` in lines of `width` columns, broken between words, each as far in as its first.

    A longer word, a quoted path or a command in backticks stays whole.
    """
    lines = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        row = ""
        for piece in _PIECE.findall(line):
            if row and cell_len(indent) + cell_len(f"{row} {piece}") > width:
                lines.append(indent + row)
                row = ""
            row = f"{row} {piece}" if row else piece
        lines.append(indent + row)
    return "\n".join(lines)


def print_folded(console: Console, text: str, style: str = "", head: str = "") -> None:
    """Print lines of the console's width in which nothing is markup; `head` of it is bold."""
    shown = Text(fold(printable(text), console.width), style)
    if head:
        shown.stylize(head, 0, text.index(" "))
    console.print(shown, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """Lines for the reader, beside what was asked for."""
    print_folded(Console(stderr=True), text, style="dim")


def without_controls(text: str) -> str:
    """A model's text as a terminal may get it: control characters but tab and newline are named."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Command(TyperCommand):
    """A command whose usage and help show an argument by its metavar, and nothing beside it."""

    def get_help_option(self, ctx: Any) -> Any:
        """The option that shows the help."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.callback = _show_help
        return option

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line behind the command's name."""
        arguments = [p for p in self.get_params(ctx) if p.param_type_name == "argument"]
        return ["[OPTIONS]", *(str(p.metavar) for p in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """The sections of arguments and of options."""
        for title, kind in (("Arguments", "argument"), ("Options", "option")):
            rows = []
            for param in self.get_params(ctx):
                record = param.get_help_record(ctx)
                if param.param_type_name == kind and record is not None:
                    name = record[0] if kind == "option" else str(param.metavar)
                    rows.append((name, record[1]))
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _show_help(ctx: Any, _: Any, asked: bool) -> None:
    """Print the help, and end; in a pager where it is longer than the terminal."""
    if not asked or ctx.resilient_parsing:
        return
    text = ctx.get_help()
    is_long = text.count("\n") + 2 > shutil.get_terminal_size().lines
    (pydoc.pager if is_long and sys.stdout.isatty() else typer.echo)(text)
    ctx.exit()

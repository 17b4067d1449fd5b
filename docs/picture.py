"""Draws docs/demo.svg: what `dualinfer demo` prints on a terminal of 110 columns.

`python docs/picture.py` makes it anew.
"""

import io
from pathlib import Path

from rich.console import Console

from dualinfer.cli import main

console = Console(record=True, width=110, file=io.StringIO())
main.Console = lambda: console  # the command prints to a console that remembers
main.app(["demo"], standalone_mode=False)
console.save_svg(str(Path(__file__).with_name("demo.svg")), title="dualinfer demo")

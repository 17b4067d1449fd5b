"""Draws docs/*.svg: what commands print on a terminal, as they print it here.

`python docs/picture.py` makes them anew: the demo, a chat, and a server that is asked. The model is
the embedded one with a template that passes a message on; it continues Python and knows no talk.
"""

import io
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

import dualinfer
from dualinfer.cli import main

HERE, PORT = Path(__file__).parent, "8123"
COMMAND = [sys.executable, "-m", "dualinfer"]


def screen():
    """A terminal of 100 columns that remembers."""
    return Console(record=True, width=100, file=io.StringIO())


def typed(console, line):
    """Show a line as somebody has typed it."""
    console.print(Text(f"$ {line}", style="bold green"))


console = Console(record=True, width=110, file=io.StringIO())
main.Console = lambda: console  # the command prints to a console that remembers
main.app(["demo"], standalone_mode=False)
console.save_svg(str(HERE / "demo.svg"), title="dualinfer demo")

with tempfile.TemporaryDirectory() as folder:
    model = Path(folder) / "tiny"
    shutil.copytree(dualinfer.embedded_model(), model)
    template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    log = Path(folder) / "log"
    command = [*COMMAND, "serve", "tiny", "--port", PORT]
    with log.open("w") as out:
        server = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT)
    try:
        while "listening" not in log.read_text():
            if server.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.2)
        time.sleep(1)
        console = screen()
        typed(console, f"dualinfer serve tiny --port {PORT} &")
        console.print(Text(log.read_text().strip()))
        body = {"model": "tiny", "prompt": "import os\n", "max_tokens": 12}
        curl = ["curl", "-s", f"http://127.0.0.1:{PORT}/v1/completions"]
        curl += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        said = subprocess.run(curl, capture_output=True, text=True, check=True).stdout
        typed(console, f"{' '.join(curl[:3])} -H 'Content-Type: application/json' -d '{curl[-1]}'")
        console.print_json(said)
        console.save_svg(str(HERE / "serve.svg"), title="dualinfer serve")

        console = screen()
        typed(console, f"dualinfer chat --url http://127.0.0.1:{PORT} --temperature 0.01 --seed 1")
        chat = [*COMMAND, "chat", "--url", f"http://127.0.0.1:{PORT}", "--max-new-tokens", "24"]
        chat += ["--temperature", "0.01", "--seed", "1"]
        for message in ("import os", "def add(a, b):"):
            done = subprocess.run(chat, input=f"{message}\n", capture_output=True, text=True)
            console.print(Text(f"> {message}", style="bold"))
            console.print(Text(done.stdout.rstrip()))
            console.print(Text(done.stderr.strip(), style="dim"))
        console.save_svg(str(HERE / "chat.svg"), title="dualinfer chat")
    finally:
        server.terminate()
        server.wait()

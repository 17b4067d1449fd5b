"""`dualinfer serve` as a user starts it: its front, and the process of its engine."""

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import dualinfer


class ServerProcess:
    """A server that runs; `said` is what it has written to standard error."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process, self.said = process, ""
        self.url = ""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line

    def wait_for(self, pattern: str, seconds: float = 60) -> re.Match[str]:
        """What it has written that matches."""
        begun = time.monotonic()
        while not (found := re.search(pattern, self.said)):
            assert self.process.poll() is None or self._thread.is_alive(), self.said
            assert time.monotonic() - begun < seconds, self.said
            time.sleep(0.02)
        return found

    def end(self, seconds: float = 30) -> int:
        """Its exit code, once it has ended."""
        code = self.process.wait(seconds)
        self._thread.join(5)
        return code

    @property
    def engine(self) -> int:
        """The process of the engine; 0 if there is none now."""
        return next(iter(engines_of(self.process.pid)), 0)


def engines_of(process: int) -> list[int]:
    """The processes with an engine that a front has started."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        return [int(x) for x in children if b"engine" in Path(f"/proc/{x}/cmdline").read_bytes()]
    return []


def is_there(process: int) -> bool:
    """True while a process runs, or is not buried."""
    return Path(f"/proc/{process}").exists()


@contextlib.contextmanager
def server_process(
    *options: str, backend: str = "torch", model: Path | None = None
) -> Iterator[ServerProcess]:
    """A server, of the embedded model unless told, killed at the end if it runs then."""
    folder = model or dualinfer.embedded_model()
    command = [sys.executable, "-m", "dualinfer", "serve", str(folder)]
    command += ["--backend", backend, "--port", "0", "--name", "small", "--dtype", "fp32", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            server = ServerProcess(process)
            server.url = server.wait_for(r"listening on (http://[\d.:]+);")[1]
            yield server
        finally:
            process.kill()

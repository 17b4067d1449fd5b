"""A headless Chromium, driven over a pipe by its own protocol: https://chromedevtools.github.io."""

import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


class Page:
    """A page that is open. `bodies` are the addresses of its answers, by the ids of requests."""

    def __init__(self, process: "subprocess.Popen[bytes]", reads: int, writes: int) -> None:
        self._process, self._reads, self._writes = process, reads, writes
        self._rest, self._number, self._session = b"", 0, ""
        self.bodies: dict[str, str] = {}

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a call of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") == "Network.responseReceived":
                told = answer["params"]
                self.bodies[told["requestId"]] = told["response"]["url"]

    def _next(self, seconds: float = 60) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._reads], [], [], seconds)[0], "Chromium says nothing."
            data = os.read(self._reads, 65536)
            assert data, f"Chromium has ended: {self._process.poll()}"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, url: str) -> None:
        """Open an address, and note what it asks for."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.call("Network.enable")
        self.call("Page.navigate", url=url)
        self.wait("document.readyState == 'complete' && location.href != 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of a script."""
        made = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in made, made
        return made["result"].get("value")

    def wait(self, script: str, seconds: float = 60) -> None:
        """Wait until a script is true."""
        begun = time.monotonic()
        while not self.run(script):
            assert time.monotonic() - begun < seconds, script
            time.sleep(0.05)

    def body(self, end: str) -> str:
        """The last answer of an address with this end."""
        request = [name for name, url in self.bodies.items() if url.endswith(end)][-1]
        return self.call("Network.getResponseBody", requestId=request)["body"]


@contextlib.contextmanager
def opened(url: str, folder: Path) -> Iterator[Page]:
    """A page in a Chromium of its own, whose files are in a folder."""
    (takes, writes), (reads, gives) = os.pipe(), os.pipe()
    assert CHROMIUM is not None
    # It reads from 3 and writes to 4.
    command = f'exec "$@" 3<&{takes} 4>&{gives}'
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    flags += ["--disable-dev-shm-usage", "--disable-background-networking", "--no-first-run"]
    process = subprocess.Popen(
        ["bash", "-c", command, "chromium", CHROMIUM, *flags, f"--user-data-dir={folder}"],
        pass_fds=[takes, gives],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(takes)
    os.close(gives)
    try:
        page = Page(process, reads, writes)
        page.open(url)
        yield page
    finally:
        process.kill()
        process.wait()
        os.close(writes)
        os.close(reads)

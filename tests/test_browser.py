"""examples/chat.html in a real browser, before a real server."""

import functools
import http.server
import itertools
import json
import threading
import time
from pathlib import Path

import pytest

import dualinfer
from dualinfer.serving.http.app import Server
from dualinfer.serving.http.beside import served
from dualinfer.serving.http.engines import LocalEngine

from . import browser
from .test_serve import TEMPLATE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.CHROMIUM is None, reason="there is no Chromium"),
]
EXAMPLES = Path(__file__).parents[1] / "examples"
# What the page shows of an answer, each time that it changes; `more` goes into what it asks.
WATCH = """
  window.seen = [];
  window.more = { seed: 1 };
  const fetched = window.fetch;
  window.fetch = (url, how) => {
    if (how) how.body = JSON.stringify({ ...JSON.parse(how.body), ...window.more });
    return fetched(url, how);
  };
  new MutationObserver(() => {
    const line = [...document.querySelectorAll("#log .assistant")].at(-1);
    if (line && window.seen.at(-1) !== line.textContent) window.seen.push(line.textContent);
  }).observe(document.getElementById("log"), { childList: true, subtree: true });
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def pages():
    """The address of the examples' folder."""
    handler = functools.partial(Quiet, directory=str(EXAMPLES))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def send(page, text):
    page.run(f"document.getElementById('text').value = {json.dumps(text)}")
    page.run("document.getElementById('send').click()")


def told(body):
    """The text of a stream."""
    lines = [x[6:] for x in body.split("\n") if x.startswith("data: {")]
    choices = [choice for x in lines for choice in json.loads(x)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_the_page_shows_answers_as_they_come_and_ends_them(backend, pages, tmp_path):
    model = dualinfer.embedded_model()
    with dualinfer.init_inference(model, backend=backend, dtype="fp32") as engine:
        engine.tokenizer.chat_template = TEMPLATE
        engine.reserve(2, 1024)
        server = Server(LocalEngine(engine), "small", origins=[pages])
        with (
            served(server) as url,
            browser.opened(f"{pages}/chat.html?server={url}", tmp_path / "1") as page,
        ):
            page.run(WATCH)
            send(page, "copy a <b>file</b>")
            page.wait("window.seen.length > 3 && !document.getElementById('send').disabled")
            seen = page.run("window.seen")
            assert all(b.startswith(a) for a, b in itertools.pairwise(seen))
            assert seen[-1] == told(page.body("/chat/completions")) != ""
            assert page.run("document.querySelector('#log .user').textContent").endswith("</b>")
            assert page.run("document.querySelectorAll('#log .error').length") == 0
            page.run("messages.splice(0); window.more.ignore_eos = true")
            send(page, "once more")
            page.wait("!!document.querySelectorAll('#log .assistant')[1]?.textContent")
            page.run("document.getElementById('stop').click()")
            page.wait("!document.getElementById('send').disabled")
            begun = time.monotonic()
            while engine.traffic().live:  # it does not go on for nobody
                assert time.monotonic() - begun < 20
                time.sleep(0.02)
            assert page.run("document.querySelectorAll('#log .error').length") == 0
            assert page.run("messages.length") == 2
        with (
            served(Server(LocalEngine(engine), "small")) as url,  # which no page may ask
            browser.opened(f"{pages}/chat.html?server={url}", tmp_path / "2") as page,
        ):
            send(page, "copy a file")
            page.wait("document.querySelectorAll('#log .error').length == 1")

"""The server of `dualinfer serve` in this process, for a client that measures it."""

import importlib.util
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import BackendNotAvailableError, DualinferError

_NEEDED = "starlette", "uvicorn"
_BACKLOG = 2048  # connections that wait to be taken


@contextmanager
def running(engine: Any, vocab: int) -> Iterator[str]:
    """The URL of a server around an engine, on a free port of this machine.

    An engine without a tokenizer gets one that has a word for each id.
    """
    if absent := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise BackendNotAvailableError(
            f"A server needs {' and '.join(absent)}. Install `dualinfer[serve]`, or pass --no-http."
        )
    import uvicorn

    from ..serving.http.app import Server

    try:
        _ = engine.tokenizer
    except DualinferError:
        engine.tokenizer = word_tokenizer(vocab)
    server = Server(engine, "bench")
    # Uvicorn's own logging would close the handlers of others, and absl's closes its stream then.
    runs = uvicorn.Server(server.config(backlog=_BACKLOG, log_config=None))
    with socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG) as listener:
        thread = threading.Thread(target=runs.run, args=([listener],), name="bench-server")
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.is_draining = runs.should_exit = True
            thread.join()


def word_tokenizer(vocab: int) -> Any:
    """A tokenizer that has a word for each id."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))

"""The server of `dualinfer serve` in this process, for a client that measures it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import DualinferError
from ..serving.http.needed import check_needed


@contextmanager
def running(engine: Any, vocab: int) -> Iterator[str]:
    """The URL of a server around an engine, on a free port of this machine.

    An engine without a tokenizer gets one that has a word for each id.
    """
    check_needed("A server needs", ", or pass --no-http")
    from ..serving.http.app import Server
    from ..serving.http.beside import served
    from ..serving.http.engines import LocalEngine

    try:
        _ = engine.tokenizer
    except DualinferError:
        engine.tokenizer = word_tokenizer(vocab)
    # Uvicorn's own logging would close the handlers of others, and absl's closes its stream then.
    with served(Server(LocalEngine(engine), "bench"), log_config=None) as url:
        yield url


def word_tokenizer(vocab: int) -> Any:
    """A tokenizer that has a word for each id."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))

"""The process of an engine with random weights: `opens` names a shape, as benchmarks do."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dualinfer


@contextmanager
def opened(opens: dict[str, Any], tell_lost: Any = None) -> Iterator[Any]:
    """An engine of `shape`, whose tokenizer has a word for each id; it shares it with nobody."""
    from dualinfer.bench.local_server import word_tokenizer
    from dualinfer.bench.random_weights import random_model
    from dualinfer.bench.shapes import open_model

    model, dtype = open_model(opens["shape"]), opens["dtype"]
    how = {"dtype": dtype, "replace_with_kernel_inject": True}
    weights = random_model(model, dtype)
    with dualinfer.init_inference(weights, backend=opens["backend"], **how) as engine:
        engine.tokenizer = word_tokenizer(model.vocab)
        yield engine


if __name__ == "__main__":
    from dualinfer.cli import engine_process

    engine_process.run(opened)

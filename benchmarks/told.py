"""What log-probabilities, a bias and penalties that count add to a token, on both backends.

    python benchmarks/told.py [--shape llama-3-8b:8]

Milliseconds a token of 1 and of 32 sequences: plain, with `logprobs`, with penalties and a bias.
Without a GPU the shape is tiny and no number means anything.
"""

import argparse
import subprocess
import sys
import time
from typing import Any

import numpy as np

import dualinfer
from dualinfer.bench.random_weights import random_model
from dualinfer.bench.shapes import open_model

NEW = 129
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs=5": {"logprobs": 5, "return_dict_in_generate": True},
    "penalties, bias": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {7: 2.0}},
}


def milliseconds(engine: Any, rows: int, **how: Any) -> float:
    """A token's milliseconds, without those of the prompts: the best of three calls."""
    vocab = engine.runner.spec.vocab
    ids = np.random.default_rng(0).integers(5, vocab, (rows, 64)).tolist()

    def seconds(count: int) -> float:
        start = time.perf_counter()
        engine.generate(ids, max_new_tokens=count, eos_token_id=None, pad_token_id=0, **how)
        return time.perf_counter() - start

    for count in (NEW, 1):
        seconds(count)
    return min((seconds(NEW) - seconds(1)) / (NEW - 1) for _ in range(3)) * 1e3


def measure(backend: str, shape: str) -> None:
    """One backend, in this process."""
    dtype = "bfloat16" if shape.startswith("llama") else "float32"
    model = random_model(open_model(shape), dtype)
    engine: Any = dualinfer.init_inference(
        model, backend=backend, dtype=dtype, replace_with_kernel_inject=True
    )
    for rows in (1, 32):
        for name, how in WAYS.items():
            print(f"{backend} {shape}, {rows}: {name}: {milliseconds(engine, rows, **how):.3f} ms")
    engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="llama-3-8b:8")
    parser.add_argument("--backend", choices=["torch", "jax"])
    options = parser.parse_args()
    if options.backend:
        measure(options.backend, options.shape)
    else:
        for one in ("torch", "jax"):
            subprocess.run([sys.executable, *sys.argv, "--backend", one], check=True)

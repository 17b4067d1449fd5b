"""Rates of layers that are streamed from the host's memory, on one GPU, beside a plain copy.

    python benchmarks/streaming.py torch|jax [layers] [scheme of quant]

The resident engine comes first, for the tokens and logits that must be equal.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import numpy as np

import dualinfer
from dualinfer.bench.random_weights import random_model
from dualinfer.bench.shapes import open_model

SIZE = 1 << 30  # bytes of the plain copy
PROMPT, NEW = 96, 17  # one size of cache


def best(call: Callable[[], Any], count: int = 5) -> float:
    """Seconds of the fastest call."""
    times = []
    for _ in range(count + 2):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times[2:])


def host_rate(backend: str) -> float:
    """Bytes a second of a copy from pinned host memory."""
    if backend == "torch":
        import torch

        host = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(SIZE, dtype=torch.uint8, device="cuda")

        def copy() -> None:
            there.copy_(host, non_blocking=True)
            torch.cuda.synchronize()

        return SIZE / best(copy)
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    device = jax.devices()[0]
    on_host = SingleDeviceSharding(device, memory_kind="pinned_host")
    on_device = SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
    data = jax.device_put(jnp.zeros(SIZE, jnp.uint8), on_host).block_until_ready()
    return SIZE / best(lambda: jax.device_put(data, on_device).block_until_ready())


def main(backend: str, layers: int = 8, quant: str | None = None) -> None:
    """Print the copy's rate, whether answers are equal, and the rate at each batch."""
    model = open_model(f"llama-3-8b:{layers}")
    rng = np.random.default_rng(0)
    rate = host_rate(backend)
    print(f"{backend}: host to device {rate / 1e9:.2f} GB/s", flush=True)

    def make(**more: Any) -> Any:
        weights = random_model(model, "bfloat16")
        how: dict[str, Any] = {"backend": backend, "dtype": "bf16", "quant": quant, **more}
        return dualinfer.init_inference(weights, replace_with_kernel_inject=True, **how)

    def generate(engine: Any, ids: np.ndarray, new: int) -> np.ndarray:
        how = {"do_sample": False, "eos_token_id": None}
        return np.asarray(engine.generate(ids, max_new_tokens=new, **how))

    def answers(engine: Any) -> tuple[np.ndarray, np.ndarray]:
        ids = np.random.default_rng(1).integers(0, 128000, (2, 64))
        return generate(engine, ids, 12), np.asarray(engine(ids).logits).astype(np.float32)

    with make() as engine:
        expected = answers(engine)
    with make(keep_module_on_host=True, resident_layers=0) as engine:
        same = [np.array_equal(*pair) for pair in zip(expected, answers(engine), strict=True)]
        print(f"tokens equal {same[0]}, logits bitwise equal {same[1]}", flush=True)
        least = engine.report().streamed_bytes / rate * 1e3
        for batch in (1, 8, 32, 128):
            ids = rng.integers(0, 128000, (batch, PROMPT))
            generate(engine, ids, 3)
            first = best(lambda ids=ids: generate(engine, ids, 1), 2)
            ms = (best(lambda ids=ids: generate(engine, ids, NEW), 2) - first) / (NEW - 1) * 1e3
            print(
                f"batch {batch:4d}: {ms:8.2f} ms a token, {batch * 1e3 / ms:9.1f} tokens/s, "
                f"{least / ms:.1%} of the rate",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1], *(int(n) for n in sys.argv[2:3]), *sys.argv[3:4])

"""One forward pass in every mode, with and without graphs, beside HF in the same invocation.

    python benchmarks/forward.py --out results.json

For each model, random weights in float16 and one sequence of 128 tokens on the card: HF's own
forward, eager and compiled by torch.compile; module mode and fused mode on torch, with and without
graphs of forward; fused mode on JAX, with and without XLA's command buffers. Milliseconds from call
to finished result, median of 50, and the fraction of the limit: the larger of weights over the
read-only stream and FLOPs over the rate of a large matrix product, both measured in the same
process. Beside them, with profiling on, the same median and that of `model_times()`; the ms of the
first call (warm-up, capture, compilation), and the bytes on the device before, during and after the
engine. JAX runs in a process of its own.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualinfer.bench.counts import Counts
from dualinfer.bench.limits import TorchDevice
from dualinfer.bench.peers import HfCompiled, HfEager
from dualinfer.bench.random_weights import make_module, plan_weights
from dualinfer.bench.runs import worker_environment
from dualinfer.bench.shapes import Model, open_model

TOKENS, REPEATS = 128, 50
VARIANTS = {
    "torch": {
        "module": {},
        "module, graphs": {"enable_cuda_graph": True},
        "fused": {"replace_with_kernel_inject": True, "enable_cuda_graph": False},
        "fused, graphs": {"replace_with_kernel_inject": True, "enable_cuda_graph": True},
    },
    "jax": {
        "fused, no command buffers": {"enable_cuda_graph": False},
        "fused": {},
    },
}


def limit_ms(model: Model) -> float:
    """Least time of one pass: of reading what it multiplies with, and of multiplying."""
    limits = TorchDevice().limits("float16")
    counts = Counts.of(plan_weights(model, "float16", None), "float16")
    read = counts.weight_bytes / limits.read_bandwidth
    return max(read, counts.flops(1, TOKENS, TOKENS) / limits.matrix_rate) * 1e3


def median_ms(call: Callable[[], Any], wait: Callable[[Any], Any]) -> tuple[float, float]:
    """The first call's ms, and the median of those after it."""
    times = []
    for _ in range(REPEATS + 6):
        start = time.perf_counter()
        wait(call())
        times.append((time.perf_counter() - start) * 1e3)
    return times[0], statistics.median(times[6:])


def run(backend: str, name: str) -> list[dict[str, Any]]:
    """Every variant of one backend for one model."""
    import dualinfer

    shape = open_model(name)
    limit = limit_ms(shape)
    model = make_module(shape, "float16", "cuda")
    host_ids = np.random.default_rng(0).integers(5, 20000, (1, TOKENS))
    ids = torch.from_numpy(host_ids).cuda()
    with torch.no_grad():
        reference = model.float()(ids).logits.cpu()
        model.half()
        own = _error(model(ids).logits, reference)
    rows = []

    def add(variant: str, first: float, ms: float, error: float, **more: Any) -> None:
        row = {"model": name, "backend": backend, "variant": variant, "ms": ms, "first_ms": first}
        rows.append(
            row | {"of_limit": limit / ms, "limit_ms": limit, "error_over_hf": error} | more
        )

    if backend == "torch":
        wait: Callable[[Any], Any] = lambda out: torch.cuda.synchronize()  # noqa: E731
        for variant, peer in (
            ("HF eager", HfEager(shape, "float16")),
            ("HF torch.compile", HfCompiled(shape, "float16", "forward")),
        ):
            add(variant, *median_ms(peer.forward(host_ids), lambda out: None), 1.0)
            peer.close()
        array: Any = ids
    else:
        import jax.numpy as jnp

        wait = lambda out: out.logits.block_until_ready()  # noqa: E731
        array = jnp.asarray(host_ids, jnp.int32)
    for variant, options in VARIANTS[backend].items():
        before = _held(backend)
        engine = dualinfer.init_inference(model, backend=backend, dtype="fp16", **options)
        first, ms = median_ms(lambda engine=engine: engine(array), wait)
        captures = engine.report().compilations
        engine.profile_model_time()
        _, profiled = median_ms(lambda engine=engine: engine(array), wait)
        model_ms = statistics.median(engine.model_times()[6:])
        logits = engine(array).logits
        logits = torch.from_numpy(np.array(logits, np.float32)) if backend == "jax" else logits
        error = _error(logits, reference) / own
        during = _held(backend)
        engine.close()
        engine = logits = None
        more = {"model_ms": model_ms, "profiled_ms": profiled, "captures": captures}
        held = {"before": before, "during": during, "after": _held(backend)}
        add(variant, first, ms, error, **more, bytes_held=held)
    return rows


def _error(logits: torch.Tensor, reference: torch.Tensor) -> float:
    difference = logits.float().cpu() - reference
    return float(difference.square().mean().sqrt() / reference.square().mean().sqrt())


def _held(backend: str) -> int:
    """Bytes allocated on the card by the backend's framework."""
    gc.collect()
    if backend == "torch":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    import jax

    return (jax.devices()[0].memory_stats() or {})["bytes_in_use"]


def main() -> None:
    """Run each backend in its own process and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["bert-large", "gpt2"])
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.backend:
        for name in args.models:
            for row in run(args.backend, name):
                print("RESULT " + json.dumps(row), flush=True)
        return
    rows = []
    for backend in VARIANTS:
        command = [sys.executable, __file__, "--backend", backend, "--models", *args.models]
        done = subprocess.run(
            command, capture_output=True, text=True, env=worker_environment(), check=False
        )
        found = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
        rows += [json.loads(x.removeprefix("RESULT ")) for x in found]
        if done.returncode:
            print(f"{backend} failed:\n{done.stderr[-3000:]}")
    if args.out:
        device = torch.cuda.get_device_name()
        args.out.write_text(json.dumps({"device": device, "rows": rows}, indent=1))
    for row in rows:
        held = row.get("bytes_held", {})
        print(
            f"{row['model']:10} {row['backend']:5} {row['variant']:26} {row['ms']:7.3f} ms "
            f"{row['of_limit']:6.1%} of {row['limit_ms']:.3f}  profiled "
            f"{row.get('profiled_ms', 0):6.3f} model {row.get('model_ms', 0):6.3f} "
            f"first {row['first_ms']:8.1f}  error/HF {row['error_over_hf']:.2f} "
            f"captures {row.get('captures', '')} MB {[v // 2**20 for v in held.values()]}"
        )


if __name__ == "__main__":
    main()

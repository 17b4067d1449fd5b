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
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from accuracy import read_bandwidth

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


def make_model(name: str) -> Any:
    """A random model in float16 on the card."""
    torch.manual_seed(0)
    if name == "bert-large":
        config: Any = hf.BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
        )
        kind: Any = hf.BertForMaskedLM
    else:
        config, kind = hf.GPT2Config(), hf.GPT2LMHeadModel
    return kind(config).eval().half().cuda()


def matrix_rate() -> float:
    """FLOP/s of a float16 product of 8192 x 8192 matrices."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        a @ a
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * 8192**3 / statistics.median(times)


def limit_ms(model: Any, bandwidth: float, rate: float) -> float:
    """Least time of one pass: of reading what it multiplies with, and of multiplying."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    head = model.get_output_embeddings().weight
    read = [p for p in model.parameters() if id(p) not in embeddings or p is head]
    count = sum(p.numel() for p in read)
    return max(2 * count / bandwidth, 2 * count * TOKENS / rate) * 1e3


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

    model = make_model(name)
    ids = torch.from_numpy(np.random.default_rng(0).integers(5, 20000, (1, TOKENS))).cuda()
    limit = limit_ms(model, read_bandwidth() or 1, matrix_rate())
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
        with torch.no_grad():
            add("HF eager", *median_ms(lambda: model(ids), wait), 1.0)
            compiled = torch.compile(model, mode="reduce-overhead")
            add("HF torch.compile", *median_ms(lambda: compiled(ids), wait), 1.0)
        torch.compiler.reset()
        array: Any = ids
    else:
        import jax.numpy as jnp

        wait = lambda out: out.logits.block_until_ready()  # noqa: E731
        array = jnp.asarray(ids.cpu().numpy(), jnp.int32)
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
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
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

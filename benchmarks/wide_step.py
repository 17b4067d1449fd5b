"""Where a decode step of 64 to 256 sequences spends its time, kernel by kernel.

    python benchmarks/wide_step.py                      # torch; then cuBLAS beside our tiles
    python benchmarks/wide_step.py --backend jax
    python benchmarks/wide_step.py --batch 256 --no-products

A kernel's time in a step is what a longer text takes more of it than a shorter one of the same
prompts, over the steps between them: prompts and first tokens drop out. Under it stand the step by
the clock without a profiler, and the limits: bytes over the read bandwidth, and products over the
matrix rate, both measured in the same process.

Products are timed over the weights of all layers in turn, captured in a CUDA graph: cuBLAS alone,
cuBLAS with its epilogue (norm in front; activation, gate and residual behind), and our tile
kernel, which has activation, gate and residual in its end, by its own rule and by the configuration
that is best of a few. Microseconds a call.
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from dualinfer import init_inference
from dualinfer.bench.limits import Limits, open_device
from dualinfer.bench.random_weights import RandomSource
from dualinfer.bench.shapes import open_model
from dualinfer.opening import Opened

SHORT, LONG, REPEATS = 8, 24, 3
ROWS = (64, 128, 256)


def torch_kernels(run: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of each kernel of a run."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    found: dict[str, float] = defaultdict(float)
    for event in profile.events() or ():
        if str(event.device_type).endswith("CUDA"):
            found[event.name] += event.time_range.elapsed_us()
    return found


def jax_kernels(run: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of each kernel of a run, outside of command buffers."""
    import jax
    from step import events  # beside this script

    found: dict[str, float] = defaultdict(float)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        for event in events(Path(folder)):
            found[event.name] += event.duration / 1e3
    return found


def step(engine: Any, batch: int, prompt: int, backend: str, limits: Limits) -> None:
    """Print the kernels of a step."""
    vocab = engine.config.vocab_size
    ids = np.random.default_rng(0).integers(0, vocab, (batch, prompt)).tolist()

    def run(count: int) -> float:
        start = time.perf_counter()
        engine.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None)
        return time.perf_counter() - start

    for count in (LONG, SHORT, LONG):
        run(count)
    steps = LONG - SHORT
    clock = statistics.median((run(LONG) - run(SHORT)) / steps for _ in range(REPEATS))
    kernels = torch_kernels if backend == "torch" else jax_kernels
    longer, shorter = kernels(lambda: run(LONG)), kernels(lambda: run(SHORT))
    spent = {name: (us - shorter[name]) / steps for name, us in longer.items()}
    total = sum(spent.values())
    what = f"{batch} x {prompt}, {backend}"
    print(f"\n{what}: {clock * 1e3:.3f} ms a step, {total / 1e3:.3f} in kernels")
    for name, us in sorted(spent.items(), key=lambda pair: -pair[1]):
        if us > 0.002 * total:
            print(f"  {us:9.1f} us {us / total:6.1%}  {name[:90]}")
    spec = engine.runner.spec
    body = sum(_sizes(layer, spec.embed) for layer in spec.layers)
    weights = 2 * (body + spec.vocab * spec.embed)
    cached = sum(4 * x.attention.kv_heads * x.attention.head_dim for x in spec.layers)
    cached *= batch * (prompt + (SHORT + LONG) // 2)
    read = (weights + cached) / limits.read_bandwidth
    multiplied = weights * batch / limits.matrix_rate
    attended = cached / limits.read_bandwidth
    share = max(read, multiplied + attended) / clock
    print(
        f"  limits, ms: all bytes {read * 1e3:.3f}; products {multiplied * 1e3:.3f} and bytes of "
        f"the cache {attended * 1e3:.3f}; the step reaches {share:.1%}"
    )


def _sizes(layer: Any, embed: int) -> int:
    a, mlp = layer.attention, layer.mlp
    heads = (2 * a.heads + 2 * a.kv_heads) * a.head_dim
    return embed * (heads + mlp.ffn * (3 if mlp.gated else 2))


def products(engine: Any, limits: Limits) -> None:
    """Print what a layer's products and the head take by cuBLAS and by our tiles."""
    import torch

    from dualinfer.backends.torch.ops import kernels
    from dualinfer.backends.torch.tuning.search import graph_seconds
    from dualinfer.kernels.triton.linear import TileConfig

    class Fixed(kernels.KernelOps):
        """All products by our kernel if `narrow`, else by cuBLAS."""

        def __init__(self, device: Any, narrow: bool):
            super().__init__(device)
            self.narrow = narrow

        def linear(self, *args: Any, **more: Any) -> Any:
            with patch.object(kernels, "serves_product", lambda *_: self.narrow):
                return super().linear(*args, **more)

    device = engine.device
    wide, tiles, clock = Fixed(device, False), Fixed(device, True), graph_seconds(device)

    def us(call: Callable[[Any, Any], Any], group: list[Any]) -> float:
        with torch.inference_mode():
            for _ in range(2):
                call(*group[0])
            return clock(lambda: [call(*one) for one in group], 5) / len(group) * 1e6

    print("\nproduct, rows: limit | cuBLAS | with epilogue | our tiles | best of a few")
    for rows in ROWS:
        for name, group, x in _cases(engine, rows):
            weight = group[0][0]
            flops = 2 * rows * weight.shape[0] * weight.shape[1]
            limit = (
                max(flops / limits.matrix_rate, weight.data.nbytes / limits.read_bandwidth) * 1e6
            )
            alone = us(lambda w, _, x=x: torch.nn.functional.linear(x, w.data), group)
            beside = us(lambda w, epilogue, x=x: wide.linear(x, w, epilogue), group)
            ours = us(lambda w, epilogue, x=x: tiles.linear(x, w, epilogue), group)
            timed = {}
            for config in _configs(rows, group[0][1].gated, TileConfig):
                try:
                    timed[config] = us(
                        lambda w, epilogue, x=x, c=config: tiles.linear(x, w, epilogue, c), group
                    )
                except Exception as error:  # beyond shared memory or registers
                    print(f"  {tuple(config)}: {type(error).__name__}")
            best = min(timed, key=lambda c: timed[c])
            print(
                f"  {name:5} {rows:4}: {limit:7.1f} | {alone:7.1f} | {beside:7.1f} | {ours:7.1f} | "
                f"{timed[best]:7.1f} {tuple(best)}",
                flush=True,
            )


def _configs(rows: int, gated: bool, kind: Any) -> Iterator[Any]:
    """Tiles that read weights once or twice, and fill the matrix units."""
    yield kind(64, 64, 64, 4, 4)
    yield kind(64, 64 if gated else 128, 128, 4, 3)
    if rows > 64:
        yield kind(128, 64, 64, 4, 4)
        yield kind(128, 128, 64, 8, 3)
        yield kind(128, 64 if gated else 256, 64, 8, 4 if gated else 3)


def _cases(engine: Any, rows: int) -> Iterator[tuple[str, list[Any], Any]]:
    """Name, weights with their epilogues, and x of each product."""
    import torch

    from dualinfer.ops.contract import Epilogue, NormOf

    spec, params = engine.runner.spec, engine.runner.params

    def rows_of(width: int) -> Any:
        return torch.randn(rows, width, dtype=engine.dtype, device=engine.device)

    def norm(name: str, group: Any) -> Any:
        bias = group.get(f"{name}.bias")
        return NormOf(spec.layers[0].norm, group[f"{name}.weight"], bias)

    mlp, residual = spec.layers[0].mlp, rows_of(spec.embed)
    nearby: dict[str, Callable[[Any], Epilogue]] = {
        "qkv": lambda w: Epilogue(norm=norm("attn_norm", w)),
        "out": lambda _: Epilogue(residual=residual, spend=True),
        "up": lambda w: Epilogue(
            norm=norm("mlp_norm", w), activation=mlp.activation, gated=mlp.gated
        ),
        "down": lambda _: Epilogue(residual=residual, spend=True),
    }
    for name, epilogue in nearby.items():
        group = [(w[f"{name}.weight"], epilogue(w)) for w in params.layers]
        yield name, group, rows_of(group[0][0].shape[1])
    head = params.outer.get("head.weight", params.outer["embed.weight"])
    epilogue = Epilogue(norm=norm("final_norm", params.outer), wide=True)
    yield "head", [(head, epilogue)], rows_of(spec.embed)


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description="A decode step of many sequences.")
    parser.add_argument("--backend", default="torch", choices=["torch", "jax"])
    parser.add_argument("--shape", default="llama-3-8b:8", help="of the Llama kind")
    parser.add_argument("--batch", action="append", type=int)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--no-products", action="store_true")
    options = parser.parse_args()
    model, device = open_model(options.shape), open_device(options.backend)
    if device.kind == "cpu":
        parser.error("kernels are timed on a GPU only")
    limits = device.limits("bfloat16")
    source = RandomSource(model, "bfloat16")
    how: dict[str, Any] = {"dtype": "bfloat16", "replace_with_kernel_inject": True}
    given = Opened(model.config, [model.class_name], source)
    with init_inference(given, backend=options.backend, **how) as engine:
        print(
            f"{options.shape} on {device.name}: reads {limits.read_bandwidth / 1e12:.2f} TB/s, "
            f"multiplies {limits.matrix_rate / 1e12:.0f} TFLOP/s"
        )
        for batch in options.batch or ROWS:
            step(engine, batch, options.prompt, options.backend, limits)
        if options.backend == "torch" and not options.no_products:
            products(engine, limits)


if __name__ == "__main__":
    main()

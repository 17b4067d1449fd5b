"""Attention of prompts on JAX, by everyone who can: cuDNN, our Triton kernel, JAX's Mosaic kernel.

    python benchmarks/jax_kernels.py [--only mosaic] [--seconds 540]

For each problem a table of TFLOP/s (visible pairs only) and the relative RMS of the difference to a
float32 reference. A variant that cannot run prints the first line of its error, and the others go
on. Times are those of many calls in one executable (`dualinfer/bench/chain.py`), the median.

The Mosaic GPU kernel is `jax.experimental.pallas.ops.gpu.attention_mgpu`, FlashAttention-3's plan.
In jax 0.10.2 it is `attention(q, k, v, config)` with `TuningConfig(block_q, block_kv,
max_concurrent_steps, use_schedule_barrier, causal)`: q [B, T, H, D] comes already scaled, T is a
multiple of 2 block_q and of block_kv, causal refuses CUDA from 12.8.0 to 12.9.0, and its shared
memory is declared float16, so that it refuses bfloat16; 64 by 256 tokens have no room in it. Later
versions may differ: fields that are unknown there are left out. On a CPU, with TRITON_INTERPRET=1,
our kernel is interpreted, on a tiny problem, to try the script.
"""

import argparse
import dataclasses
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dualinfer.bench.case import TracedCall
from dualinfer.bench.chain import chain_seconds
from dualinfer.kernels.triton.attention import attention
from dualinfer.kernels.triton.attention_choice import Config
from dualinfer.kernels.xla.launches import call

RIGHT = 1e-2  # relative RMS; rounding to bfloat16 alone gives about 2e-3
FASTEST = 1e15  # FLOP/s
Run = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Problem(NamedTuple):
    """Causal attention of whole prompts."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    dim: int

    @property
    def flops(self) -> int:
        """Of both products, over visible pairs."""
        pairs = self.tokens * (self.tokens + 1) // 2
        return 4 * self.batch * self.heads * self.dim * pairs

    def inputs(self, dtype: str) -> tuple[jax.Array, ...]:
        """Normal q, k and v, [B, T, heads, D]."""
        keys = jax.random.split(jax.random.key(0), 3)
        counts = self.heads, self.kv_heads, self.kv_heads
        shapes = [(self.batch, self.tokens, heads, self.dim) for heads in counts]
        return tuple(
            jax.random.normal(key, shape).astype(dtype)
            for key, shape in zip(keys, shapes, strict=True)
        )


PROBLEMS = (
    Problem(2, 4096, 16, 16, 128),
    Problem(4, 4096, 16, 16, 128),
    Problem(2, 4096, 32, 8, 128),
    Problem(1, 2048, 32, 8, 128),
)
TINY = (Problem(1, 128, 4, 2, 16),)
CONFIGS = (
    *(Config(64, 64, 4, 2), Config(64, 64, 4, 3), Config(128, 64, 4, 2), Config(128, 64, 4, 3)),
    *(Config(128, 64, 8, 2), Config(128, 64, 8, 3), Config(128, 128, 8, 2), Config(64, 128, 4, 2)),
    *(Config(128, 32, 4, 3), Config(128, 32, 8, 3)),
)
MOSAIC = tuple(
    {"block_q": 64, "block_kv": block, "max_concurrent_steps": steps, "causal": True}
    for block, steps in ((128, 2), (128, 3), (64, 2), (64, 4))
)


@jax.jit
def reference(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention in float32, a sequence and a KV head at a time."""
    batch, tokens, heads, dim = q.shape
    grouped = q.reshape(batch, tokens, k.shape[2], -1, dim)
    visible = jnp.tril(jnp.ones((tokens, tokens), bool))

    def one(part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, k, v = (x.astype(jnp.float32) for x in part)
        scores = jnp.einsum("tgd,sd->gts", q, k, precision="highest") * dim**-0.5
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        return jnp.einsum("gts,sd->tgd", weights, v, precision="highest")

    def sequence(part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return jax.lax.map(one, tuple(x.swapaxes(0, 1) for x in part)).swapaxes(0, 1)

    return jax.lax.map(sequence, (grouped, k, v)).reshape(batch, tokens, heads, dim)


def variants(problem: Problem, on_cpu: bool) -> Iterator[tuple[str, str, Callable[[], Run]]]:
    """Name, dtype, and what makes the function; making it may fail, as its call may."""
    scale = problem.dim**-0.5
    device = jax.devices()[0]
    sms = getattr(device, "core_count", None) or 132
    capability = int(str(getattr(device, "compute_capability", "9.0")).replace(".", ""))

    def by_jax(implementation: str) -> Run:
        return lambda q, k, v: jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=scale,
            is_causal=True,
            implementation=implementation,  # type: ignore
        )

    def ours(config: Config) -> Run:
        how = {"scale": scale, "causal": True, "config": config, "sms": sms}
        return lambda q, k, v: call(attention, q, k, v, capability=capability, **how)[0]

    def mosaic(fields: dict[str, Any]) -> Run:
        from jax.experimental.pallas.ops.gpu import attention_mgpu

        known = {field.name for field in dataclasses.fields(attention_mgpu.TuningConfig)}
        config = attention_mgpu.TuningConfig(**{k: v for k, v in fields.items() if k in known})
        return lambda q, k, v: attention_mgpu.attention(q, k, v, config)

    for dtype in ("bfloat16", "float16"):
        yield "cuDNN", dtype, lambda: by_jax("cudnn")
    yield "XLA, dense", "bfloat16", lambda: by_jax("xla")
    for config in CONFIGS[:1] if on_cpu else CONFIGS:
        yield f"dualinfer Triton {tuple(config)}", "bfloat16", lambda c=config: ours(c)
    yield f"dualinfer Triton {tuple(CONFIGS[0])}", "float16", lambda: ours(CONFIGS[0])
    for dtype in ("float16", "bfloat16"):
        for fields in MOSAIC:
            name = f"Mosaic q {fields['block_q']}, kv {fields['block_kv']}, "
            name += f"steps {fields['max_concurrent_steps']}"
            yield name, dtype, lambda f=fields: mosaic(f)


def measure(problem: Problem, dtype: str, run: Run, wanted: jax.Array, scaled: bool) -> str:
    """The line of one variant; it gets its queries `scaled`, rounded once more, if it asks."""

    @jax.jit
    def traced(state: None, *inputs: jax.Array) -> tuple[jax.Array, None]:
        return run(*inputs), state

    def prepare() -> TracedCall:
        q, k, v = problem.inputs(dtype)
        if scaled:
            q = (q * problem.dim**-0.5).astype(dtype)
        return TracedCall(traced, None, (q, k, v))

    found = prepare()().astype(jnp.float32)
    error = float(jnp.sqrt(jnp.mean((found - wanted) ** 2) / jnp.mean(wanted**2)))
    del found
    seconds = statistics.median(chain_seconds(prepare, 2, problem.flops / FASTEST))
    verdict = "right" if error < RIGHT else "WRONG"
    rate = problem.flops / seconds / 1e12
    return f"{seconds * 1e6:10.1f} {rate:8.1f} {error:10.2e}  {verdict}"


def main() -> None:
    """Print a table for each problem."""
    parser = argparse.ArgumentParser(description="Causal attention by several kernels.")
    parser.add_argument("--only", default="", help="variants whose name holds this")
    parser.add_argument("--seconds", type=float, default=540.0, help="begin none after this")
    arguments = parser.parse_args()
    started = time.monotonic()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    print(f"jax {jax.__version__}, {device.device_kind}")
    for problem in TINY if on_cpu else PROBLEMS:
        print(f"\n{problem}: {problem.flops / 1e12:.3f} TFLOP")
        print(f"{'by':42} {'dtype':9} {'µs':>10} {'TFLOP/s':>8} {'error':>10}")
        references: dict[str, jax.Array] = {}
        for name, dtype, make in variants(problem, on_cpu):
            if arguments.only.lower() not in name.lower():
                continue
            if time.monotonic() - started > arguments.seconds:
                print("Out of time.")
                return
            try:
                if dtype not in references:
                    references[dtype] = reference(*problem.inputs(dtype))
                scaled = name.startswith("Mosaic")
                line = measure(problem, dtype, make(), references[dtype], scaled)
            except Exception as failure:
                lines = str(failure).strip().splitlines() or [""]
                line = f"  {type(failure).__name__}: {lines[0][:150]}"
            print(f"{name:42} {dtype:9} {line}", flush=True)


if __name__ == "__main__":
    main()

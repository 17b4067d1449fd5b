"""The launches of a layer for one token on JAX, by several ways of launching them.

    python benchmarks/launches/chain.py --way engine [--shape 7b] [--no-graphs] [--no-early]

A chain of layers with weights of their own runs in one compiled loop of decode steps, as a step of
an engine does; then each kind of launch alone, one after another over the layers' weights. A line
of JSON says microseconds a layer and a launch, the chain's fraction of the read bandwidth, and the
relative RMS error against float32. Ways:

- engine: what an engine launches (dualinfer/kernels/xla), a step in one custom call;
- ptx: our Triton kernels, each by XLA's call of PTX (ours.py);
- jax-triton: the same by jax_triton 0.3.1, or with `--ffi` as 0.4 calls XLA;
- program: the same, a step in `--calls` custom calls of our own (ours.py).

`--no-early` turns early starts off where a way has them, `--no-graphs` XLA's command buffers.
Configurations are those for an H100.
"""

import argparse
import functools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ours
from jax import lax

from dualinfer.kernels.triton import decode_attention as triton_attention
from dualinfer.kernels.triton import linear as triton_linear
from dualinfer.kernels.triton.linear_kernels import matvec_kernel
from dualinfer.kernels.triton.tuning import Configurations, shipped
from dualinfer.kernels.xla import launches
from dualinfer.kernels.xla.grouping import grouped

SHAPES = {  # embed, heads, KV heads, dim, ffn, layers; gpt2 has its sizes, not its norms and biases
    "7b": (4096, 32, 32, 128, 11008, 16),
    "1b": (2048, 32, 8, 64, 8192, 16),
    "gpt2": (768, 12, 12, 64, 3072, 12),
    "tiny": (1024, 8, 8, 128, 2816, 2),
}
CAPACITY, LENGTH, EPS, STEPS, REPEATS, SMS = 512, 192, 1e-5, 32, 7, 132
BF = jnp.bfloat16
TABLE = Path(triton_linear.__file__).with_name("tuned.json")
State = tuple[jax.Array, list[list[jax.Array]], jax.Array]


class Shape:
    def __init__(self, name: str) -> None:
        self.name = name
        self.embed, self.heads, self.kv, self.dim, self.ffn, self.layers = SHAPES[name]
        self.qkv = (self.heads + 2 * self.kv) * self.dim
        self.kinds = {  # features, width, gated, residual; a norm where there is no residual
            "qkv": (self.qkv, self.embed, False, False),
            "out": (self.embed, self.heads * self.dim, False, True),
            "up": (self.ffn, self.embed, name != "gpt2", False),
            "down": (self.embed, self.ffn, False, True),
        }
        self.nbytes = sum(2 * f * w * (1 + g) for f, w, g, _ in self.kinds.values())

    @property
    def frequencies(self) -> jax.Array:
        return 1e4 ** (-jnp.arange(0, self.dim, 2, dtype=jnp.float32) / self.dim)


def made(shape: Shape) -> tuple[list[dict[str, jax.Array]], list[list[jax.Array]]]:
    """Weights and caches of all layers, random."""

    @jax.jit
    def layer(key: jax.Array) -> tuple[dict[str, jax.Array], list[jax.Array]]:
        keys = iter(jax.random.split(key, 12))
        found = {}
        for kind, (features, width, gated, residual) in shape.kinds.items():
            size = (features * (1 + gated), width)
            found[kind] = (jax.random.normal(next(keys), size) * width**-0.5).astype(BF)
            if not residual:
                gain = 1 + 0.1 * jax.random.normal(next(keys), (width,))
                found[kind + "_norm"] = gain.astype(BF)
        size = (1, shape.kv, CAPACITY, shape.dim)
        return found, [jax.random.normal(next(keys), size).astype(BF) for _ in "kv"]

    parts = [layer(key) for key in jax.random.split(jax.random.key(0), shape.layers)]
    return [part[0] for part in parts], [part[1] for part in parts]


def reference(shape: Shape, params: Any, caches: Any, x: jax.Array) -> jax.Array:
    """One step in float32."""
    wide = functools.partial(jnp.matmul, precision="highest")

    def normed(x: jax.Array, gain: jax.Array) -> jax.Array:
        return x * lax.rsqrt((x * x).mean() + EPS) * gain

    @jax.jit
    def layer(x: jax.Array, p: Any, cache: Any) -> jax.Array:
        p, (k, v) = jax.tree.map(lambda a: a.astype(jnp.float32), (p, cache))
        heads = wide(p["qkv"], normed(x, p["qkv_norm"])).reshape(-1, shape.dim)
        angle = jnp.tile(LENGTH * shape.frequencies, 2)
        first, second = jnp.split(heads, 2, -1)
        turned = heads * jnp.cos(angle) + jnp.concatenate([-second, first], -1) * jnp.sin(angle)
        q, new = jnp.split(turned[: shape.heads + shape.kv], [shape.heads])
        k = k[0].at[:, LENGTH].set(new)[:, : LENGTH + 1]
        v = v[0].at[:, LENGTH].set(heads[-shape.kv :])[:, : LENGTH + 1]
        q = q.reshape(shape.kv, -1, shape.dim)
        scores = jnp.einsum("kgd,ksd->kgs", q, k, precision="highest") * shape.dim**-0.5
        y = jnp.einsum("kgs,ksd->kgd", jax.nn.softmax(scores), v, precision="highest")
        x = x + wide(p["out"], y.reshape(-1))
        h = wide(p["up"], normed(x, p["up_norm"]))
        if shape.kinds["up"][2]:
            h = jax.nn.silu(h[: shape.ffn]) * h[shape.ffn :]
        return x + wide(p["down"], h)

    x = x.astype(jnp.float32)
    for p, cache in zip(params, caches, strict=True):
        x = layer(x, p, cache)
    return x


class Engine:
    """What an engine launches; the other ways replace what they do differently."""

    def __init__(self, shape: Shape, options: argparse.Namespace) -> None:
        self.shape, self.options, self.early = shape, options, not options.no_early
        self.configurations = Configurations(shipped(("H100",)))

    def call(self, function: Any, *args: Any, **how: Any) -> Any:
        return launches.call(function, *args, sms=SMS, pdl=self.early, capability=90, **how)

    def product(self, kind: str, x: jax.Array, p: Any, residual: Any = None) -> jax.Array:
        features, width, gated, _ = self.shape.kinds[kind]
        key = triton_linear.tuning_key(1, features, width, 2, gated)
        gain = p.get(kind + "_norm")
        norm = None if gain is None else triton_linear.NormArguments("rms", gain, None, EPS)
        how: dict[str, Any] = {"norm": norm, "activation": "silu" if gated else None}
        how |= {"gated": gated, "config": self.configurations.find(key)}
        how["residual"] = None if residual is None else residual.reshape(1, -1)
        return self.call(triton_linear.linear, x.reshape(1, -1), p[kind], **how)[0].reshape(-1)

    def attention(self, qkv: jax.Array, cache: Any, lengths: Any, counters: Any) -> Any:
        y, (*cache, counters) = self.call(
            triton_attention.decode_attention,
            qkv.reshape(1, -1),
            tuple(cache),
            lengths,
            heads=self.shape.heads,
            scale=self.shape.dim**-0.5,
            counters=counters,
            inv_freq=self.shape.frequencies,
            written=(*cache, counters),
        )
        return y.reshape(-1), cache, counters

    def step(self, params: Any, caches: Any, x: Any, lengths: Any, counters: Any) -> State:
        after = []
        for p, cache in zip(params, caches, strict=True):
            y = self.product("qkv", x, p)
            if not self.options.skip_attention:
                y, cache, counters = self.attention(y, cache, lengths, counters)
            x = self.product("out", y, p, x)
            x = self.product("down", self.product("up", x, p), p, x)
            after.append(cache)
        return x, after, counters

    def alone(
        self, kind: str, params: Any, caches: Any, x: Any, wide: Any, lengths: Any, counters: Any
    ) -> State:
        """Launches of one kind over all layers, each behind the one before; `wide` is down's x."""
        y, after = jnp.zeros(self.shape.heads * self.shape.dim, BF), []
        if kind == "attention":
            for cache in caches:
                x, y = lax.optimization_barrier((x, y))
                y, cache, counters = self.attention(x, cache, lengths, counters)
                after.append(cache)
            return y, after, counters
        for p in params:
            residual = x if self.shape.kinds[kind][3] else None
            x = self.product(kind, wide if kind == "down" else x, p, residual)
        return x, caches, counters


class Ptx(Engine):
    """Our Triton kernels."""

    def __init__(self, shape: Shape, options: argparse.Namespace) -> None:
        super().__init__(shape, options)
        self.early = False
        self.entries = json.loads(TABLE.read_text())["H100"]["entries"]

    def plan(self, kind: str) -> tuple[int, int, int, int]:
        """Rows, warps, programs of a product, 0 for one a block of rows; and the grid's size."""
        features, width, gated, _ = self.shape.kinds[kind]
        rows, warps, per_sm = triton_linear.default_config(1, features, width, 2, gated, SMS)[:3]
        wanted = {"op": "linear", "rows": 1, "features": features, "width": width, "itemsize": 2}
        wanted["gated"] = gated
        for entry in self.entries:
            if wanted.items() <= entry.items():
                config = entry["config"]
                rows, warps, per_sm = (config[name] for name in ("rows", "warps", "per_sm"))
        blocks = -(-features // rows)
        programs = min(per_sm * SMS, blocks)
        return rows, warps, programs, programs or blocks

    def compiled(self, kind: str) -> tuple[ours.Compiled, tuple[int, int, int]]:
        features, width, gated, residual = self.shape.kinds[kind]
        rows, warps, programs, grid = self.plan(kind)
        pointers = dict.fromkeys(("x_ptr", "weight_ptr", "y_ptr"), "*bf16")
        pointers["residual_ptr" if residual else "norm_weight_ptr"] = "*bf16"
        constants = {
            **{"features": features, "x_stride": width, "residual_stride": features, "eps": EPS},
            **{"K": width, "COUNT": 1, "ROWS": rows, "BLOCK_K": 1 << (width - 1).bit_length()},
            **{"PROGRAMS": programs, "NORM": None if residual else "rms", "GATED": gated},
            **{"ACTIVATION": "silu" if gated else None, "PDL": self.early},
        }
        return ours.compiled(
            matvec_kernel, _named(matvec_kernel, pointers | constants), warps, self.early
        ), (grid, 1, 1)

    def config(self) -> Any:
        return triton_attention.default_config(self.shape.kv, CAPACITY, self.shape.dim, 2, SMS)

    def attention_plan(self) -> tuple[ours.Compiled, tuple[int, int, int], tuple[int, ...]]:
        s, c, kernel = self.shape, self.config(), triton_attention.decode_attention_kernel
        given = dict.fromkeys(("qkv_ptr", "k_ptr", "v_ptr", "y_ptr"), "*bf16")
        given |= {"lengths_ptr": "*i32", "counter_ptr": "*i32"}
        given |= {"partial_ptr": "*fp32", "frequencies_ptr": "*fp32"}
        constants = {
            **{"qkv_stride": s.qkv, "slot_stride": s.kv * CAPACITY * s.dim, "capacity": CAPACITY},
            **{"head_stride": CAPACITY * s.dim, "token_stride": s.dim, "scale": s.dim**-0.5},
            **{"softcap": 0.0, "window": 0, "eps": 0.0, "rotary_scale": 1.0, "KV_HEADS": s.kv},
            **{
                "GROUP": s.heads // s.kv,
                "EACH": s.heads // s.kv,
                "DIM": s.dim,
                "ROTARY": s.dim,
                "INTERLEAVED": False,
            },
            **{"NORM_OFFSET": False, "WINDOWED": False, "SOFTCAP": False, "SPLITS": c.splits},
            **{"SPLIT_BLOCK": 1 << (c.splits - 1).bit_length(), "STAGES": c.stages, "BLOCK_G": 16},
            **{"BLOCK_S": c.block, "BLOCK_D": s.dim, "PDL": self.early},
        }
        done = ours.compiled(kernel, _named(kernel, given | constants), c.warps, self.early)
        return done, (s.kv, c.splits, 1), (s.heads, c.splits, s.dim + 2)

    def product(self, kind: str, x: jax.Array, p: Any, residual: Any = None) -> jax.Array:
        kernel, grid = self.compiled(kind)
        args = [x, p[kind], p[kind + "_norm"] if residual is None else residual]
        out = [jax.ShapeDtypeStruct((self.shape.kinds[kind][0],), BF)]
        return ours.ptx_call(kernel, grid, args, out, [3])[0]

    def attention(self, qkv: jax.Array, cache: Any, lengths: Any, counters: Any) -> Any:
        """Cache and counters change behind XLA's back: good enough in this loop only."""
        kernel, grid, partial = self.attention_plan()
        out = [jax.ShapeDtypeStruct((self.shape.heads * self.shape.dim,), BF)]
        out.append(jax.ShapeDtypeStruct(partial, jnp.float32))
        args = [qkv, *cache, lengths, counters, self.shape.frequencies]
        return ours.ptx_call(kernel, grid, args, out, [4, 5])[0], cache, counters


def _named(kernel: Any, values: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """In the kernel's order; what is not given is None."""
    return tuple((name, values.get(name)) for name in kernel.arg_names)


class JaxTriton(Ptx):
    """The same by jax_triton."""

    def __init__(self, shape: Shape, options: argparse.Namespace) -> None:
        super().__init__(shape, options)
        import by_jax_triton

        self.by = by_jax_triton
        if options.ffi:
            by_jax_triton.use_ffi()

    def product(self, kind: str, x: jax.Array, p: Any, residual: Any = None) -> jax.Array:
        features, width, gated, _ = self.shape.kinds[kind]
        plan = (features, width, *self.plan(kind)[:3], gated)
        return self.by.product(x, p[kind], p.get(kind + "_norm"), residual, plan)

    def attention(self, qkv: jax.Array, cache: Any, lengths: Any, counters: Any) -> Any:
        how = self.shape.frequencies, self.shape.heads, self.config()
        return self.by.attention(qkv, cache, lengths, counters, *how)


class Program(Ptx):
    """The same, several launches to a custom call, each of which may start early."""

    def __init__(self, shape: Shape, options: argparse.Namespace) -> None:
        super().__init__(shape, options)
        self.early = not options.no_early

    def _product(self, kind: str, x: int, weights: dict[str, int], y: int, residual: int) -> Any:
        added = residual if self.shape.kinds[kind][3] else weights[kind + "_norm"]
        return ours.Launch(*self.compiled(kind), (x, weights[kind], added, y), self.early)

    def step(self, params: Any, caches: Any, x: Any, lengths: Any, counters: Any) -> State:
        share = -(-len(params) // self.options.calls)
        after = []
        for first in range(0, len(params), share):
            some = slice(first, first + share)
            x, part, counters = self.several(params[some], caches[some], x, lengths, counters)
            after += part
        return x, after, counters

    def several(self, params: Any, caches: Any, x: Any, lengths: Any, counters: Any) -> State:
        s = self.shape
        kernel, grid, partial = self.attention_plan()
        args, places = [x, lengths, counters, s.frequencies], []
        for p, cache in zip(params, caches, strict=True):
            named = {**p, **dict(zip("kv", cache, strict=True))}
            places.append({name: len(args) + i for i, name in enumerate(named)})
            args += named.values()
        sizes = [s.embed, s.embed, s.qkv, s.heads * s.dim, s.ffn]
        out = [jax.ShapeDtypeStruct((size,), BF) for size in sizes]
        out += [jax.ShapeDtypeStruct(partial, jnp.float32)]
        out += [jax.ShapeDtypeStruct(counters.shape, counters.dtype)]
        between, last, qkv, y, h, sums, count = range(len(args), len(args) + len(out))
        aliases = {2: 6}
        for at in places:
            for name in "kv":
                aliases[at[name]] = len(out)
                out.append(jax.ShapeDtypeStruct(caches[0][0].shape, BF))
        commands, now = [], 0
        for at in places:
            commands.append(self._product("qkv", now, at, qkv, -1))
            if not self.options.skip_attention:
                buffers = (qkv, at["k"], at["v"], 1, y, sums, count, 3)
                commands.append(ours.Launch(kernel, grid, buffers, self.early))
            seen = qkv if self.options.skip_attention else y
            commands.append(self._product("out", seen, at, between, now))
            commands.append(self._product("up", between, at, h, -1))
            commands.append(self._product("down", h, at, last, between))
            now = last
        found = list(ours.program_call(ours.program(commands), args, out, aliases))
        return found[1], [found[i : i + 2] for i in range(7, len(found), 2)], found[6]

    def alone(
        self, kind: str, params: Any, caches: Any, x: Any, wide: Any, lengths: Any, counters: Any
    ) -> State:
        if kind == "attention":
            kernel, grid, partial = self.attention_plan()
            args = [x, lengths, counters, self.shape.frequencies]
            args += [array for cache in caches for array in cache]
            n = len(args)
            out = [jax.ShapeDtypeStruct((self.shape.heads * self.shape.dim,), BF)]
            out += [jax.ShapeDtypeStruct(partial, jnp.float32)]
            out += [jax.ShapeDtypeStruct(counters.shape, counters.dtype)]
            commands = [
                ours.Launch(kernel, grid, (0, i, i + 1, 1, n, n + 1, n + 2, 3), self.early)
                for i in range(4, n, 2)
            ]
            y, _, counters = ours.program_call(ours.program(commands), args, out, {2: 2})
            return y, caches, counters
        args, commands, last = [x, wide], [], 0
        for p in params:
            args += [p[kind], p.get(kind + "_norm", x)]
        for i in range(len(params)):
            weights = {kind: 2 + 2 * i, kind + "_norm": 3 + 2 * i}
            y, source = len(args) + i % 2, 1 if kind == "down" else last
            commands.append(self._product(kind, source, weights, y, last))
            last = y
        out = [jax.ShapeDtypeStruct((max(self.shape.kinds[kind][0], x.size),), BF)] * 2
        found = ours.program_call(ours.program(commands), args, out)
        return found[last - len(args)], caches, counters


WAYS = {"engine": Engine, "ptx": Ptx, "jax-triton": JaxTriton, "program": Program}


def read_bandwidth() -> float:
    """Bytes a second, the best of two reductions of 4 GiB."""
    best = 0.0
    for reduce, dtype in ((jnp.sum, jnp.float32), (jnp.max, jnp.int32)):
        x, run = jnp.ones(1 << 30, dtype), jax.jit(reduce)
        run(x).block_until_ready()
        for _ in range(8):
            start = time.perf_counter()
            for _ in range(8):
                last = run(x)
            last.block_until_ready()
            best = max(best, 8 * x.nbytes / (time.perf_counter() - start))
    return best


def compiled_loop(step: Callable[..., State], options: dict[str, Any]) -> Callable[..., State]:
    """STEPS steps from the same x, each behind the one before."""

    def run(params: Any, caches: Any, x: Any, counters: Any, lengths: Any) -> State:
        def turn(_: Any, carry: State) -> State:
            last, caches, counters = carry
            first, _ = lax.optimization_barrier((x, last))
            return step(params, caches, first, lengths, counters)

        size = jax.eval_shape(step, params, caches, x, lengths, counters)[0]
        return lax.fori_loop(0, STEPS, turn, (jnp.zeros(size.shape, BF), caches, counters))

    return jax.jit(grouped(run), donate_argnums=(1, 3), compiler_options=options)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A layer's launches on JAX, by several ways.")
    parser.add_argument("--way", default="engine", choices=WAYS)
    parser.add_argument("--shape", default="7b", choices=SHAPES)
    parser.add_argument("--calls", type=int, default=1, help="custom calls a step, of 'program'")
    for flag in ("no-early", "no-graphs", "ffi", "skip-attention", "only-step"):
        parser.add_argument("--" + flag, action="store_true")
    return parser.parse_args(given)


def main() -> None:
    """Print a line of JSON."""
    options = arguments()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    shape = Shape(options.shape)
    way = WAYS[options.way](shape, options)
    flags: dict[str, Any] = {"xla_gpu_enable_command_buffer": ""} if options.no_graphs else {}
    if options.way in ("engine", "program") and not options.no_graphs:
        flags = {"xla_gpu_graph_min_graph_size": 1}
    bandwidth = read_bandwidth()
    params, caches = made(shape)
    x = jax.random.normal(jax.random.key(1), (shape.embed,)).astype(BF)
    lengths, counters = jnp.full((1,), LENGTH, jnp.int32), jnp.zeros(4096, jnp.int32)
    wanted = reference(shape, params, caches, x)

    def timed(step: Callable[..., State], x: jax.Array) -> tuple[jax.Array, float, float]:
        nonlocal caches, counters
        run, times = compiled_loop(step, flags), []
        for _ in range(REPEATS + 1):
            start = time.perf_counter()
            y, caches, counters = run(params, caches, x, counters, lengths)
            y.block_until_ready()
            times.append(time.perf_counter() - start)
        return y, statistics.median(times[1:]) / STEPS, times[0]

    y, seconds, first = timed(way.step, x)
    error = jnp.sqrt(jnp.mean((y.astype(jnp.float32) - wanted) ** 2) / jnp.mean(wanted**2))
    found: dict[str, Any] = {
        **{"argv": sys.argv[1:], "device": jax.devices()[0].device_kind, "jax": jax.__version__},
        **{"error": float(error), "layer_us": seconds / shape.layers * 1e6, "first_s": first},
        **{"of_read": shape.nbytes * shape.layers / seconds / bandwidth, "read": bandwidth / 1e12},
    }
    if not options.only_step:
        wide = jax.random.normal(jax.random.key(2), (shape.ffn,)).astype(BF)
        packed = jax.random.normal(jax.random.key(3), (shape.qkv,)).astype(BF)
        for kind in (*shape.kinds, "attention"):

            def alone(params: Any, caches: Any, x: Any, *rest: Any, kind: str = kind) -> State:
                return way.alone(kind, params, caches, x, wide, *rest)

            _, seconds, _ = timed(alone, packed if kind == "attention" else x)
            found[kind] = seconds / shape.layers * 1e6
    if options.way == "program":
        found |= {"handler_calls": ours.calls, "handler_ms": 1e3 * ours.spent / max(ours.calls, 1)}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

"""Ops for `dualinfer bench ops`: those of a step as the engine calls them, beside XLA's and cuDNN.

A reference gets what it needs ready, so that it may do less than our op does, never more. Shapes by
letter: see `model/spec`.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ...backends.jax.device import has_triton, runs_kernels
from ...backends.jax.ops.plain import PlainOps
from ...model.spec import Attention
from ...ops.contract import Epilogue
from ..case import (
    EPS,
    QUANTIZED_ROWS,
    OpCase,
    Recipe,
    Shape,
    TracedCall,
    bytes_of,
    fillings,
    make_norm,
    make_weight,
    quantized_weight,
    recipe_of,
    rows_of,
    scheme_of,
)
from ..mixtures import mixture_ops
from .attention import decode, prompts
from .inputs import Bench, Op
from .mixtures import mixture

SHAPES = (
    Shape("8B", 4096, 32, 8, 128, 14336, 128256),
    Shape("7B", 4096, 32, 32, 128, 11008, 32000),
    Shape("GPT-2", 768, 12, 12, 64, 3072, 50257, gated=False),
)
TINY = Shape("tiny", 64, 4, 2, 16, 96, 101)
_PROMPT = 128  # rows up to which the engine's norms are kernels
_WIDTH = 8192  # of the matrix whose product with a vector is a stream


def bench_cases(dtype: str, quant: str | None = None) -> list[OpCase]:
    """All cases in `dtype`, or products with weights that are quantized so.

    On a CPU tiny ones, which show only that bench runs.
    """
    from ...backends.jax import default_device

    device = default_device()
    bench, recipe = Bench(dtype, device), recipe_of(quant)
    if recipe is not None:
        is_cpu = device.platform == "cpu"
        shapes, many = ((TINY,), (8,)) if is_cpu else (SHAPES, QUANTIZED_ROWS)
        return [
            *(case for shape in shapes for case in products(bench, shape, 1, recipe)),
            *(case for rows in many for case in products(bench, shapes[0], rows, recipe)),
            *mixtures(bench, recipe, is_cpu),
        ]
    if device.platform == "cpu":
        return [
            *(case for rows in (1, 8) for case in products(bench, TINY, rows)),
            *decode(bench, TINY, 2, 64),
            *prompts(bench, 1, 64, Attention(4, 2, 16, 0.25)),
            *prompts(bench, 1, 64, Attention(4, 2, 16, 0.25, near=16)),
            *mixtures(bench, is_tiny=True),
            *norms_of(bench, 64, 1),
        ]
    large, older, small = SHAPES
    return [
        *(case for shape in SHAPES for case in products(bench, shape, 1)),
        *(case for rows in (8, 32) for s in (large, small) for case in products(bench, s, rows)),
        *(case for tokens in (256, 1024, 8192) for case in decode(bench, large, 1, tokens)),
        *decode(bench, large, 32, 1024),
        *decode(bench, older, 8, 1024),
        *decode(bench, small, 1, 1024),
        *prompts(bench, 1, 4096, Attention(32, 8, 128, 128**-0.5)),
        *prompts(bench, 4, 4096, Attention(16, 16, 128, 128**-0.5)),
        *prompts(bench, 1, 2048, Attention(32, 8, 128, 128**-0.5)),
        *prompts(bench, 1, 4096, Attention(32, 8, 128, 128**-0.5, near=1024)),
        *prompts(bench, 1, 2048, Attention(8, 4, 256, 256**-0.5, softcap=50.0)),
        *prompts(bench, 1, 128, Attention(16, 16, 64, 0.125, causal=False)),
        *mixtures(bench),
        *(case for rows in (1, 32, 2048) for case in norms_of(bench, large.embed, rows)),
    ]


def mixtures(bench: Bench, recipe: Recipe | None = None, is_tiny: bool = False) -> Iterator[OpCase]:
    """Routers and experts, see `mixture_ops`."""
    for own in mixture_ops(bench.dtype.itemsize, recipe, is_tiny):
        yield from mixture(bench, own)


def products(
    bench: Bench, shape: Shape, rows: int, recipe: Recipe | None = None
) -> Iterator[OpCase]:
    """A layer's four products and the head's, with all that is fused with them.

    With a `recipe` the weights are quantized, and one of the references has them plain.
    """
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    product = partial(_product, bench, shape, rows, recipe)
    activation, up = ("silu", "gate and up") if shape.gated else ("gelu_tanh", "up")
    ffn = 2 * shape.ffn if shape.gated else shape.ffn
    yield from product("qkv", q + 2 * kv, shape.embed, norm=True)
    yield from product("out", shape.embed, q, residual=True)
    yield from product(up, ffn, shape.embed, norm=True, activation=activation)
    yield from product("down", shape.embed, shape.ffn, residual=True)
    yield from product("head", shape.vocab, shape.embed, norm=True, wide=True)


def _product(
    bench: Bench,
    shape: Shape,
    rows: int,
    recipe: Recipe | None,
    part: str,
    features: int,
    width: int,
    norm: bool = False,
    activation: Any = None,
    residual: bool = False,
    wide: bool = False,
) -> Iterator[OpCase]:
    gated = shape.gated and activation is not None
    biased = not shape.gated and not wide
    size, results = bench.dtype.itemsize, features // 2 if gated else features
    vectors = norm * (1 if shape.gated else 2) * width + biased * features
    scheme = scheme_of(recipe, part, (features, width))
    codes = None if scheme is None else fillings(scheme, features, width)
    given = rows * width + vectors + residual * rows * results
    moved = given * size + rows * results * (4 if wide else size)
    moved += features * width * size if codes is None else bytes_of(codes)

    def inputs(is_quantized: bool) -> tuple[None, tuple[Any, ...]]:
        draw = bench.draws()
        scale = draw(width) if norm else None
        shift = draw(width) if norm and not shape.gated else None
        bias = draw(features) if biased else None
        added = draw(rows, 1, results) if residual else None
        x = draw(rows, 1, width)
        if is_quantized and codes is not None:
            weight: Any = {name: bench.fill(own) for name, own in codes.items()}
        else:
            weight = draw(features, width, scale=0.02)
        return None, (x, weight, bias, scale, shift, added)

    def run(ops: PlainOps, state: None, *given: Any) -> tuple[jax.Array, None]:
        x, weight, bias, scale, shift, added = given
        epilogue = Epilogue(
            bias,
            None if scale is None else make_norm(scale, shift),
            activation=activation,
            gated=gated,
            residual=added,
            wide=wide,
        )
        if scheme is not None and isinstance(weight, dict):
            held = quantized_weight(scheme, width, weight, bench.dtype)
        else:
            held = make_weight(weight)
        return ops.linear(x, held, epilogue), state

    names = {"norm": norm, "bias": biased, "SiLU gate": gated, "residual": residual}
    names |= {"GELU": activation is not None and not gated, "float32": wide}
    around = ", ".join(name for name, there in names.items() if there)
    description = f"{shape.name} {part} {features} x {width}, {rows_of(rows)}, {around}"
    flops = 2 * rows * features * width
    if scheme is not None:
        description += f"{', ' if around else ''}{scheme.name}"
    op = Op(bench, "linear", description, moved, flops, partial(inputs, True))
    yield op.by_kernels("", run)
    yield op.by_plain(run)
    if scheme is not None:
        plain = replace(op, inputs=partial(inputs, False))
        yield plain.by_kernels("dualinfer, plain weights", run)


def norms_of(bench: Bench, width: int, rows: int) -> Iterator[OpCase]:
    """RMSNorm and LayerNorm; with many rows, as in prompts, the engine's own is XLA's."""
    for name, vectors in (("rms_norm", 1), ("layer_norm", 2)):

        def inputs(vectors: int = vectors) -> tuple[None, tuple[Any, ...]]:
            draw = bench.draws()
            return None, (draw(1, rows, width), *(draw(width) for _ in range(vectors)))

        def run(
            ops: PlainOps, state: None, x: Any, weight: Any, bias: Any = None
        ) -> tuple[jax.Array, None]:
            return ops.norm(x, make_norm(weight, bias)), state

        def our_kernel(
            ops: PlainOps, state: None, x: Any, weight: Any, bias: Any = None
        ) -> tuple[jax.Array, None]:
            from ...kernels.triton import norm

            how = {"pdl": bench.kernels.starts_early(rows)}
            if bias is None:
                return bench.launch(norm.rms_norm, x, weight, EPS, **how), state
            return bench.launch(norm.layer_norm, x, weight, bias, EPS, **how), state

        moved = (2 * rows + vectors) * width * bench.dtype.itemsize
        op = Op(bench, name, f"{rows_of(rows)} of {width}", moved, 0, inputs)
        yield op.by_kernels("", run)
        if rows <= _PROMPT:
            yield op.by_plain(run)
        else:
            yield op.by_kernels("dualinfer's Triton kernel", our_kernel)


def read_streams(nbytes: int, device: jax.Device) -> dict[str, Callable[[], TracedCall]]:
    """Ways to read `nbytes` once and write next to nothing; the best shows the read bandwidth.

    XLA's sums of float32 and of the same bytes as int32, its maximum, and, where our kernels run,
    the products of a vector with two bfloat16 matrices, half of the bytes each. The values are
    ones: random ones would take several times the memory for a moment, and hide rows' peaks.
    """

    def stream(read: Callable[..., Any], *shapes: tuple[int, ...]) -> Callable[[], TracedCall]:
        dtype = jnp.float32 if len(shapes) == 1 else jnp.bfloat16

        @jax.jit
        def call(state: None, *arrays: jax.Array) -> tuple[Any, None]:
            return read(*arrays), state

        def prepare() -> TracedCall:
            arrays = tuple(jnp.ones(shape, dtype, device=device) for shape in shapes)
            return TracedCall(call, None, arrays)

        return prepare

    def whole_numbers(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x, jnp.int32).sum()

    def product(x: jax.Array, *matrices: jax.Array) -> list[jax.Array]:
        ops = bench.kernels.using(bench.kernels.make_scratch(1))
        return [ops.linear(x, make_weight(matrix)) for matrix in matrices]

    bench = Bench(jnp.bfloat16, device)
    floats, matrix = (nbytes // 4,), (nbytes // 4 // _WIDTH, _WIDTH)
    streams = {
        "sum of float32": stream(jnp.sum, floats),
        "sum of int32": stream(whole_numbers, floats),
        "maximum of float32": stream(jnp.max, floats),
    }
    if runs_kernels(device) and has_triton():
        streams["matrix-vector products"] = stream(product, (1, _WIDTH), matrix, matrix)
    return streams

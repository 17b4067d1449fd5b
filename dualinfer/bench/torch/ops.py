"""Ops for `dualinfer bench ops`: the kernels as a step calls them, each beside torch's own.

A reference gets what it needs ready and is launched as torch's user would, so that it may do less
than our op does, never more. Shapes by letter: see `model/spec`.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from ...backends.base import SamplingFeatures
from ...backends.torch.device import default_device, device_name, has_triton, runs_kernels
from ...backends.torch.maths import MATHS
from ...backends.torch.sampler import SlotState
from ...errors import UnsupportedError
from ...model.spec import Attention, ModelSpec
from ...model.weights import Weight
from ...ops.contract import Epilogue
from ...ops.sampling import filter_logits
from ..case import (
    EPS,
    QUANTIZED_ROWS,
    OpCase,
    Recipe,
    Shape,
    bytes_of,
    fillings,
    make_norm,
    make_weight,
    quantized_weight,
    recipe_of,
    rows_of,
    scheme_of,
)
from ..mixtures import RouterOp, mixture_ops
from .attention import decode, prompts, rotary
from .inputs import Bench, Op
from .mixtures import experts, router

SHAPES = (
    Shape("8B", 4096, 32, 8, 128, 14336, 128256),
    Shape("7B", 4096, 32, 32, 128, 11008, 32000),
    Shape("1B", 2048, 32, 8, 64, 8192, 128256),
)


def bench_cases(dtype: str, quant: str | None = None) -> list[OpCase]:
    """All cases in `dtype`, or products with weights that are quantized so.

    UnsupportedError where the kernels cannot run.
    """
    device = default_device()
    if not has_triton() or not runs_kernels(device):
        here = device_name(device) + ("" if has_triton() else ", without Triton")
        raise UnsupportedError(
            "bench ops measures Triton kernels, which run on CUDA devices from Ampere on, and this "
            f"is {here}. Measure the whole here: bench decode, prefill or forward."
        )
    bench = Bench(getattr(torch, dtype), device)
    large, older, small = SHAPES
    recipe = recipe_of(quant)
    if recipe is not None:
        return [
            *(case for shape in SHAPES for case in products(bench, shape, 1, recipe)),
            *(case for rows in QUANTIZED_ROWS for case in products(bench, large, rows, recipe)),
            *experts_and_routers(bench, recipe),
        ]
    return [
        *(case for shape in SHAPES for case in products(bench, shape, 1)),
        *(case for rows in (8, 32) for case in products(bench, large, rows)),
        *(case for tokens in (256, 1024, 8192) for case in decode(bench, large, 1, tokens)),
        *decode(bench, large, 32, 1024),
        *decode(bench, older, 8, 1024),
        *decode(bench, small, 1, 1024),
        *prompts(bench, 4, 4096, Attention(16, 16, 128, 128**-0.5), dispatched=True),
        *prompts(bench, 1, 2048, Attention(32, 8, 128, 128**-0.5), dispatched=True),
        *prompts(bench, 1, 4096, Attention(32, 8, 128, 128**-0.5, near=1024)),
        *prompts(bench, 1, 2048, Attention(8, 4, 256, 256**-0.5, softcap=50.0)),
        *prompts(bench, 1, 128, Attention(16, 16, 64, 0.125, causal=False)),
        *(case for rows in (1, 2048) for case in between_products(bench, large, rows)),
        *experts_and_routers(bench),
        *(case for slots in (1, 32) for case in samples(bench, slots, large.vocab)),
    ]


def experts_and_routers(bench: Bench, recipe: Recipe | None = None) -> Iterator[OpCase]:
    """Cases of mixtures, see `mixture_ops`."""
    for own in mixture_ops(bench.dtype.itemsize, recipe):
        yield from router(bench, own) if isinstance(own, RouterOp) else experts(bench, own)


def products(
    bench: Bench, shape: Shape, rows: int, recipe: Recipe | None = None
) -> Iterator[OpCase]:
    """A layer's four products and the head's, with all that is fused with them.

    With a `recipe` the weights are quantized, and the references' are not.
    """
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    product = partial(_product, bench, shape.name, rows, recipe)
    yield from product("qkv", q + 2 * kv, shape.embed, norm=True)
    yield from product("out", shape.embed, q, residual=True)
    yield from product("gate and up", 2 * shape.ffn, shape.embed, norm=True, gated=True)
    yield from product("down", shape.embed, shape.ffn, residual=True)
    yield from product("head", shape.vocab, shape.embed, norm=True, wide=True)


def _product(
    bench: Bench,
    model: str,
    rows: int,
    recipe: Recipe | None,
    part: str,
    features: int,
    width: int,
    norm: bool = False,
    gated: bool = False,
    residual: bool = False,
    wide: bool = False,
) -> Iterator[OpCase]:
    size, results = bench.dtype.itemsize, features // 2 if gated else features
    scheme = scheme_of(recipe, part, (features, width))
    codes = None if scheme is None else fillings(scheme, features, width)
    given = rows * width + norm * width + residual * rows * results
    moved = given * size + rows * results * (4 if wide else size)
    moved += features * width * size if codes is None else bytes_of(codes)

    def inputs(is_quantized: bool) -> tuple[Any, ...]:
        draw = bench.draws()
        x = draw(rows, 1, width)
        if is_quantized and scheme is not None and codes is not None:
            arrays = {name: bench.fill(own) for name, own in codes.items()}
            weight: Any = quantized_weight(scheme, width, arrays, bench.dtype)
        else:
            weight = draw(features, width, scale=0.02)
        scale = draw(width) if norm else None
        return x, weight, scale, draw(rows, 1, results) if residual else None

    def ours(x: Any, weight: Any, scale: Any, added: Any) -> torch.Tensor:
        epilogue = Epilogue(
            norm=None if scale is None else make_norm(scale),
            activation="silu" if gated else None,
            gated=gated,
            residual=added,
            wide=wide,
        )
        held = weight if isinstance(weight, Weight) else make_weight(weight)
        return bench.ops.linear(x, held, epilogue)

    def theirs(x: Any, weight: Any, scale: Any, added: Any) -> torch.Tensor:
        y = x if scale is None else F.rms_norm(x, (width,), scale, EPS)
        y = F.linear(y, weight)
        if gated:
            gate, up = y.chunk(2, -1)
            y = F.silu(gate) * up
        if added is not None:
            y = added + y
        return y.float() if wide else y

    fused = [("norm", norm), ("SiLU gate", gated), ("residual", residual), ("float32", wide)]
    around = ", ".join(name for name, there in fused if there)
    description = f"{model} {part} {features} x {width}, {rows_of(rows)}, {around}"
    if scheme is not None:
        description += f"{', ' if around else ''}{scheme.name}"
    work = moved, 2 * rows * features * width
    yield Op("linear", description, *work, partial(inputs, True)).by("", ours)
    plain = Op("linear", description, *work, partial(inputs, False))
    if scheme is not None:
        yield plain.by("dualinfer, plain weights", ours)
    yield plain.by("torch, cuBLAS" + ("" if scheme is None else ", plain weights"), theirs)


def between_products(bench: Bench, shape: Shape, rows: int) -> Iterator[OpCase]:
    """Cases of the ops between products: embedding, norms, rotary with append, activation."""
    yield from _embed(bench, shape, rows)
    yield from _norms(bench, shape, rows)
    yield from rotary(bench, shape, rows)
    yield from _gate(bench, shape, rows)


def _embed(bench: Bench, shape: Shape, rows: int) -> Iterator[OpCase]:
    vocab, width = 32000, shape.embed  # of a size that leaves room for many sets of inputs
    spec = ModelSpec("llama", "", vocab, width, (), rows)

    def inputs() -> tuple[Any, ...]:
        generator = torch.Generator(bench.device).manual_seed(0)
        ids = torch.randint(vocab, (1, rows), generator=generator, device=bench.device)
        return ids, bench.draws()(vocab, width)

    def ours(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return bench.ops.embed(spec, {"embed.weight": make_weight(table)}, ids, ids, None)

    moved = rows * (8 + 2 * width * bench.dtype.itemsize)
    op = Op("embed", f"{rows_of(rows)} of {vocab} x {width}", moved, 0, inputs)
    yield op.by("", ours)
    yield op.by("torch", F.embedding)


def _norms(bench: Bench, shape: Shape, rows: int) -> Iterator[OpCase]:
    width = shape.embed
    for name, vectors in (("rms_norm", 1), ("layer_norm", 2)):

        def inputs(vectors: int = vectors) -> tuple[Any, ...]:
            draw = bench.draws()
            return draw(1, rows, width), *(draw(width) for _ in range(vectors))

        def ours(x: Any, weight: Any, bias: Any = None) -> torch.Tensor:
            return bench.ops.norm(x, make_norm(weight, bias))

        def theirs(x: Any, weight: Any, bias: Any = None) -> torch.Tensor:
            if bias is None:
                return F.rms_norm(x, (width,), weight, EPS)
            return F.layer_norm(x, (width,), weight, bias, EPS)

        moved = (2 * rows + vectors) * width * bench.dtype.itemsize
        op = Op(name, f"{rows_of(rows)} of {width}", moved, 0, inputs)
        yield op.by("", ours)
        yield op.by("torch", theirs)


def _gate(bench: Bench, shape: Shape, rows: int) -> Iterator[OpCase]:
    def inputs() -> tuple[Any, ...]:
        return (bench.draws()(1, rows, 2 * shape.ffn),)

    def ours(x: torch.Tensor) -> torch.Tensor:
        from ...kernels.triton.activation import gated_activation

        return gated_activation(x, "silu", pdl=bench.ops.pdl)

    def theirs(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    moved = 3 * rows * shape.ffn * bench.dtype.itemsize
    description = f"{rows_of(rows)} of 2 x {shape.ffn}, SiLU"
    op = Op("gated_activation", description, moved, 0, inputs)
    yield op.by("", ours)
    yield op.by("torch", theirs)


def samples(bench: Bench, slots: int, vocab: int) -> Iterator[OpCase]:
    """The next token of each slot; torch's noise is another one, of the same distribution."""
    kinds = {
        "greedy": SamplingFeatures(),
        "noise": SamplingFeatures(noise=True),
        "noise, top-k 50, top-p 0.9": SamplingFeatures(noise=True, filters=True),
    }
    for kind, features in kinds.items():

        def inputs(features: SamplingFeatures = features) -> tuple[Any, ...]:
            logits = bench.draws(torch.float32)(slots, vocab, scale=4.0)
            state = SlotState.make(slots, 1, vocab, bench.device)
            state.active.fill_(True)
            state.noise.fill_(features.noise)
            values = (state.temperature, 0.8), (state.top_k, 50), (state.top_p, 0.9)
            for column, value in (*values, (state.min_p, 0.0)):
                column.fill_(value)
            return logits, state, torch.arange(slots, device=bench.device) + 100

        def ours(
            logits: Any, state: Any, position: Any, features: SamplingFeatures = features
        ) -> torch.Tensor:
            return bench.ops.sample(logits, state, position, features)

        def theirs(
            logits: Any, state: Any, position: Any, features: SamplingFeatures = features
        ) -> torch.Tensor:
            if not features.noise:
                return logits.argmax(-1)
            logits = logits / state.temperature[:, None]
            if features.filters:
                logits = filter_logits(MATHS, logits, state.top_k, state.top_p, state.min_p)
            chances = logits.softmax(-1)
            return (chances / torch.empty_like(chances).exponential_()).argmax(-1)

        moved = slots * (4 * vocab + 8)
        op = Op("sample", f"{rows_of(slots)} of {vocab}, {kind}", moved, 0, inputs)
        yield op.by("", ours)
        yield op.by("torch, sort" if features.filters else "torch", theirs)

"""Mixtures for `dualinfer bench ops`: their sizes, whom rows choose, and what that asks for."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..blocks.clamped import Clamped
from ..model.spec import Experts, Mlp, Router
from ..ops.contract import Epilogue, Routing
from ..quantization import BlockScheme
from .case import (
    Filling,
    Recipe,
    bytes_of,
    fillings,
    make_norm,
    make_weight,
    quantized_weight,
    rows_of,
)


class MixtureShape(NamedTuple):
    """A layer of experts of a model; its weights have `scheme` where they are published so."""

    name: str
    embed: int
    experts: Experts
    biased: bool = False
    scheme: BlockScheme | None = None


def _experts(count: int, ffn: int, router: Router) -> Experts:
    return Experts(count, Mlp(ffn, "silu", gated=True), router)


MXFP4 = BlockScheme("fp4_e2m1", columns=32, scale_dtype="float8_e8m0fnu")
SHAPES = (
    MixtureShape("Qwen3-30B-A3B", 2048, _experts(128, 768, Router(8, over_sum=0.0))),
    MixtureShape("OLMoE-1B-7B", 2048, _experts(64, 1024, Router(8))),
    MixtureShape("Mixtral-8x7B", 4096, _experts(8, 14336, Router(2, over_sum=0.0))),
    MixtureShape(
        *("gpt-oss-20b", 2880),
        Experts(
            32, Mlp(2880, "quick_gelu", gated=True), Router(4, "chosen"), mixing=Clamped(7.0, 1.0)
        ),
        biased=True,
        scheme=MXFP4,
    ),
)
TINY = MixtureShape("tiny", 32, _experts(6, 24, Router(3, over_sum=0.0)))
ROWS = (1, 8, 32, 512, 2048, 8192)
"""Of the first shape; the others have the first of them and the last but one."""
QUANTIZED_ROWS = (1, 8, 64, 2048)


class Bench(Protocol):
    """A maker of arrays, see `inputs.py` of each backend."""

    dtype: Any

    def draws(self) -> Any:
        """A function that makes normal numbers of a shape."""
        ...

    def fill(self, part: Filling) -> Any:
        """An array of a quantized matrix."""
        ...

    def put(self, array: np.ndarray) -> Any:
        """An array of the host's, on the device."""
        ...


@dataclass(frozen=True)
class RouterOp:
    """A router over so many rows, with its norm."""

    shape: MixtureShape
    rows: int
    itemsize: int

    @property
    def about(self) -> tuple[str, str, int, int]:
        """Name, description, bytes and FLOPs."""
        name, width, own, biased, _ = self.shape
        k, elements = own.router.chosen, (own.count + self.rows + 1) * width
        moved = (elements + biased * own.count) * self.itemsize + self.rows * k * 8
        described = f"{name}, {rows_of(self.rows)}, {k} of {own.count} experts x {width}, norm"
        return "router", described, moved, 2 * self.rows * own.count * width

    def inputs(self, bench: Bench) -> tuple[Any, ...]:
        """The arguments of `run` behind the ops."""
        draw, (count, width) = bench.draws(), (self.shape.experts.count, self.shape.embed)
        bias = draw(count) if self.shape.biased else None
        return draw(self.rows, 1, width), draw(count, width, scale=0.02), bias, draw(width)

    def run(self, ops: Any, x: Any, weight: Any, bias: Any, scale: Any) -> Routing:
        """As a step calls it."""
        how = {"bias": bias, "norm": make_norm(scale)}
        return ops.route(x, make_weight(weight), self.shape.experts.router, **how)


@dataclass(frozen=True)
class ExpertsOp:
    """The op of rows' experts, with norm and residual; weights plain or in codes."""

    shape: MixtureShape
    rows: int
    itemsize: int
    recipe: Recipe | None = None

    def scheme_of(self, part: str) -> BlockScheme | None:
        """Of the weights "up" or "down"."""
        if self.recipe is None:
            return self.shape.scheme
        return self.recipe.scheme_of(part, self.matrices[part][1:])

    @property
    def is_quantized(self) -> bool:
        """True if the weights are codes."""
        return self.scheme_of("up") is not None

    @property
    def matrices(self) -> dict[str, tuple[int, int, int]]:
        """Shapes of the weights."""
        own, width = self.shape.experts, self.shape.embed
        up = own.ffn * (2 if own.gated else 1)
        return {"up": (own.count, up, width), "down": (own.count, width, own.ffn)}

    @property
    def chosen(self) -> np.ndarray:
        """The experts of each row, int32 [rows, 1, k], ascending; the same ones, every time."""
        own, random = self.shape.experts, np.random.default_rng(0)
        drawn = random.random((self.rows, 1, own.count)).argpartition(own.router.chosen - 1)
        return np.sort(drawn[..., : own.router.chosen], -1).astype(np.int32)

    @property
    def about(self) -> tuple[str, str, int, int]:
        """Name, description, bytes and FLOPs; of the weights those that some row chose count."""
        own, k, elements, moved = self.shape.experts, self.shape.experts.router.chosen, 0, 0
        distinct, width = np.unique(self.chosen).size, self.shape.embed
        for part, (_, *shape) in self.matrices.items():
            scheme = self.scheme_of(part)
            elements += prod(shape)
            moved += bytes_of(fillings(scheme, *shape)) if scheme else prod(shape) * self.itemsize
            moved += self.shape.biased * shape[0] * self.itemsize
        moved = distinct * moved + self.rows * k * 8
        moved += (3 * self.rows + 1) * width * self.itemsize
        described = f"{self.shape.name}, {rows_of(self.rows)}, {distinct} of {own.count} experts"
        described += f" of {own.ffn} x {width}, norm, residual"
        if (scheme := self.scheme_of("up")) is not None:
            described += f", {scheme.name}"
        return "experts", described, moved, 2 * self.rows * k * elements

    def inputs(self, bench: Bench, is_quantized: bool = True) -> tuple[Any, ...]:
        """The arguments of `run` behind the ops; with plain weights unless `is_quantized`."""
        draw = bench.draws()
        x, residual = (draw(self.rows, 1, self.shape.embed) for _ in range(2))
        scale, matrices, biases = draw(self.shape.embed), {}, {}
        for part, shape in self.matrices.items():
            biases[part] = draw(*shape[:2]) if self.shape.biased else None
            scheme = self.scheme_of(part)
            if scheme is None or not is_quantized:
                matrices[part] = draw(*shape, scale=0.02)
            else:
                held = fillings(scheme, *shape)
                matrices[part] = {name: bench.fill(own) for name, own in held.items()}
        weights = np.random.default_rng(1).random(self.chosen.shape, np.float32)
        weights /= weights.sum(-1, keepdims=True)
        return x, residual, scale, matrices, biases, bench.put(self.chosen), bench.put(weights)

    def run(
        self,
        ops: Any,
        x: Any,
        residual: Any,
        scale: Any,
        matrices: dict[str, Any],
        biases: dict[str, Any],
        chosen: Any,
        weights: Any,
    ) -> Any:
        """As a step calls it."""
        w = {f"experts.{part}.bias": bias for part, bias in biases.items() if bias is not None}
        for part, held in matrices.items():
            scheme, width = self.scheme_of(part), self.matrices[part][-1]
            w[f"experts.{part}.weight"] = (
                quantized_weight(scheme, width, held, x.dtype)
                if scheme and isinstance(held, dict)
                else make_weight(held)
            )
        epilogue = Epilogue(norm=make_norm(scale), residual=residual)
        return ops.experts(x, self.shape.experts, w, Routing(chosen, weights), epilogue)


def mixture_ops(
    itemsize: int, recipe: Recipe | None = None, is_tiny: bool = False
) -> Iterator[RouterOp | ExpertsOp]:
    """The ops that are measured, all by kernels; with a `recipe` experts of quantized weights.

    There are none where inputs are quantized, too: those experts run by plain ops.
    """
    if recipe is not None and recipe.scheme.activation is not None:
        return
    first, *others = (TINY,) if is_tiny else SHAPES
    many = QUANTIZED_ROWS if recipe else ROWS
    sizes = [(first, rows) for rows in (many[:2] if is_tiny else many)]
    if recipe is not None:
        sizes += [(shape, 1) for shape in others if shape.scheme is None]
    else:
        sizes += [(shape, rows) for shape in others for rows in (ROWS[0], ROWS[-2])]
    for shape, rows in sizes:
        if recipe is None:
            yield RouterOp(shape, rows, itemsize)
        yield ExpertsOp(shape, rows, itemsize, recipe)

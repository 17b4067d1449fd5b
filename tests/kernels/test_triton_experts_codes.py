"""Experts of quantized weights by Triton's kernels."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from .cases import assert_close, normal
from .implementations import meaning
from .tensors import get, needs_triton, put, strict, torch
from .test_triton_experts import (
    EPS,
    FLOAT32,
    GPT_OSS,
    TILES,
    counters,
    gain,
    make_routing,
    wanted_of,
)
from .test_triton_quantized import make as make_matrix

from dualinfer.kernels.triton import experts as module  # isort: skip
from dualinfer.kernels.triton.experts import experts  # isort: skip
from dualinfer.kernels.triton.mixture import Mixture  # isort: skip
from dualinfer.kernels.triton.experts_choice import (  # isort: skip
    ExpertsFragmentConfig,
    ExpertsStreamConfig,
    ExpertsTileConfig,
    ExpertsVectorConfig,
)
from dualinfer.kernels.triton.linear import NormArguments  # isort: skip
from dualinfer.kernels.triton.quantized import Packed  # isort: skip
from dualinfer.kernels.triton.routing import Routing  # isort: skip

pytestmark = [needs_triton, pytest.mark.usefixtures(strict.__name__)]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ONE = ExpertsFragmentConfig(1, 4, 2, 1, 1, 2)
STREAM = ExpertsStreamConfig(2, 1, 2, 1, 1, 2)
FRAGMENTS = "nvfp4", "int4", "int8", "int4 zeros", "fp8 blocks", "int8 zeros"
FEW, MANY = ExpertsVectorConfig(16, 4, 32, 32, 4), ExpertsTileConfig(16, 16, 64, 4, 2, 32, 4)
USED = ("mxfp4", "int8", "int4 zeros", "fp8 blocks")
OTHERS = ("int4", "fp8", "nvfp4", "int8 zeros", "table")
slow = [pytest.param(form, marks=pytest.mark.slow) for form in OTHERS]


def make(form: str, total: int, rows: int, width: int) -> tuple[Packed, np.ndarray]:
    """A weight of experts, and what its codes mean."""
    matrices, meant = zip(*(make_matrix(form, rows, width, i) for i in range(total)), strict=True)
    stacked = (
        None if parts[0] is None else torch.stack(parts)
        for parts in zip(*(matrix[:4] for matrix in matrices), strict=True)
    )  # fmt: skip
    return Packed(*stacked, *matrices[0][4:]), np.stack(meant).astype(np.float32)


def layer(form: str, width: int, features: int, dtype: np.dtype) -> tuple[dict, dict]:
    """Weights of five experts as the kernels take them, and as the reference does."""
    up, up_meant = make(form, 5, 2 * features, width)
    down, down_meant = make(form, 5, width, features)
    biases = {
        "up_bias": normal(4, 5, 2 * features, dtype=dtype),
        "down_bias": normal(5, 5, width, dtype=dtype),
    }
    placed = {name: put(bias) for name, bias in biases.items()}
    return {"up": up, "down": down} | placed, {"up": up_meant, "down": down_meant} | biases


def run(x: np.ndarray, w: dict, routing: tuple, **options: Any) -> np.ndarray:
    """`experts`; its counters end at 0."""
    how = {name: options.pop(name) for name in GPT_OSS if name in options}
    work = counters()
    options = {n: put(v) if isinstance(v, np.ndarray) else v for n, v in options.items()}
    routing = Routing(*map(put, routing))
    y = experts(put(x), Mixture(**w, **how), routing, counters=work, **options)
    assert not work.any()
    return get(y)


@pytest.mark.parametrize("config", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("form", [*USED, *slow])
def test_experts_in_float32_are_the_products_with_what_codes_mean(form, config):
    w, meant = layer(form, 100, 40, FLOAT32)
    x, residual = 0.1 * normal(2, 2, 100, dtype=FLOAT32), normal(3, 2, 100, dtype=FLOAT32)
    routing = make_routing(2, 5, 2)
    found = run(x, w, routing, residual=residual, config=config, **GPT_OSS)
    expected = wanted_of(x, meant, routing, residual, **GPT_OSS)
    assert_close(found, expected, FLOAT32, length=140)


@pytest.mark.parametrize("form", ["mxfp4", "fp8 tensor", "int4 zeros"])
def test_many_rows_take_values_of_some_experts_after_others(form, monkeypatch):
    w, meant = layer(form, 96, 40, FLOAT32)
    x = 0.1 * normal(2, 6, 96, dtype=FLOAT32)
    routing = make_routing(6, 5, 3)
    monkeypatch.setattr(module, "_VALUES_LOAD", 1)
    monkeypatch.setattr(module, "_VALUES_BYTES", 2 * 80 * 96 * 4)
    found = run(x, w, routing, config=TILES, **GPT_OSS)
    assert_close(found, wanted_of(x, meant, routing, **GPT_OSS), FLOAT32, length=136)


@pytest.mark.parametrize("config", [FEW, MANY], ids=["few", "many"])
def test_experts_in_16_bits_err_by_their_roundings(config):
    w, meant = layer("mxfp4", 96, 40, BFLOAT16)
    x = normal(2, 3, 96, dtype=BFLOAT16, scale=0.1)
    routing = make_routing(3, 5, 3)
    found = run(x, w, routing, config=config)
    assert_close(found, wanted_of(x, meant, routing), BFLOAT16, length=136, roundings=3)


@pytest.mark.parametrize(
    ("form", "config"),
    [
        ("mxfp4", ONE),
        *(pytest.param(form, ONE, marks=pytest.mark.slow) for form in FRAGMENTS),
        ("int8", STREAM),
        *(pytest.param(f, STREAM, marks=pytest.mark.slow) for f in ("fp8 blocks", "int8 zeros")),
    ],
)
def test_one_token_goes_to_the_matrix_units_by_fragments(form, config):
    """Its norm is fused, and rounds less than bfloat16 does."""
    w, meant = layer(form, 64, 48, BFLOAT16)
    x, g = normal(2, 1, 64, dtype=BFLOAT16), gain(BFLOAT16, 64)
    residual, (chosen, weights) = normal(3, 1, 64, dtype=BFLOAT16), make_routing(1, 5, 3)
    norm = NormArguments("rms", put(g), None, EPS)
    own = put(np.array([0, 5], np.int32))
    how = {"residual": residual, "norm": norm, "config": config, "sms": 1}
    found = run(x, w | {"own": own}, (chosen, weights), **how, **GPT_OSS)
    exact = meaning.rms_norm(x.astype(FLOAT32), g.astype(FLOAT32), EPS)
    wide = {name: part.astype(FLOAT32) for name, part in meant.items()}
    expected = wanted_of(exact, wide, (chosen, weights), residual.astype(FLOAT32), **GPT_OSS)
    error = found.astype(FLOAT32) - expected
    assert np.sqrt((error**2).mean() / (expected**2).mean()) < 4e-3


@pytest.mark.slow
@pytest.mark.parametrize(("form", "config"), [("mxfp4", ONE), ("int8", STREAM)])
def test_devices_that_share_experts_out_add_up_by_fragments(form, config):
    w, _ = layer(form, 64, 48, BFLOAT16)
    x, routing = normal(2, 1, 64, dtype=BFLOAT16, scale=0.1), make_routing(1, 5, 3)
    how = {"config": config, "dtype": "float32"}
    whole = run(x, w, routing, **how)

    def part(first: int, stop: int) -> np.ndarray:
        def cut(weight: Any) -> Any:
            if not isinstance(weight, Packed):
                return weight[first:stop].contiguous()
            arrays = (None if a is None else a[first:stop].contiguous() for a in weight[:4])
            return Packed(*arrays, *weight[4:])

        own = {name: cut(weight) for name, weight in w.items()}
        own["own"] = put(np.array([first, stop], np.int32))
        return run(x, own, routing, **how)

    assert_close(part(0, 2) + part(2, 5), whole, FLOAT32, length=140)


def test_a_norm_is_fused():
    w, meant = layer("mxfp4", 100, 40, FLOAT32)
    x, g = normal(2, 2, 100, dtype=FLOAT32), gain(FLOAT32, 100) * np.float32(0.1)
    norm = NormArguments("rms", put(g), None, EPS)
    routing = make_routing(2, 5, 2)
    found = run(x, w, routing, norm=norm, config=FEW)
    expected = wanted_of(meaning.rms_norm(x, g, EPS), meant, routing)
    assert_close(found, expected, FLOAT32, length=140)


@pytest.mark.parametrize("config", [FEW, MANY], ids=["few", "many"])
def test_no_bit_depends_on_experts_that_are_not_chosen(config):
    w, _ = layer("int8", 96, 40, FLOAT32)
    x, (chosen, weights) = normal(1, 3, 96, dtype=FLOAT32), make_routing(3, 4, 2)
    found = run(x, w, (chosen, weights), config=config)
    for part in (w["up"].scale, w["down"].scale, w["up_bias"], w["down_bias"]):
        part[4] = math.nan
    np.testing.assert_array_equal(run(x, w, (chosen, weights), config=config), found)


@pytest.mark.parametrize("config", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize(
    "form",
    ["int4 zeros", *(pytest.param(f, marks=pytest.mark.slow) for f in ("mxfp4", "fp8 blocks"))],
)
def test_devices_that_share_experts_out_add_up_to_all(form, config):
    w, meant = layer(form, 100, 40, FLOAT32)
    x, routing = 0.1 * normal(1, 2, 100, dtype=FLOAT32), make_routing(2, 4, 2)
    expected = wanted_of(x, meant, routing)
    for part in (w["up"].scale, w["down"].scale, w["up_bias"], w["down_bias"]):
        if part.dtype.is_floating_point:
            part[4] = math.nan

    def part(first: int, stop: int) -> np.ndarray:
        def cut(weight: Any) -> Any:
            if not isinstance(weight, Packed):
                return weight[first:stop].contiguous()
            arrays = (None if a is None else a[first:stop].contiguous() for a in weight[:4])
            return Packed(*arrays, *weight[4:])

        own = {name: cut(weight) for name, weight in w.items()}
        own["own"] = put(np.array([first, stop], np.int32))
        return run(x, own, routing, config=config)

    assert_close(part(0, 1) + part(1, 4) + part(4, 5), expected, FLOAT32, length=140)


def test_what_cannot_be_read_is_refused():
    w, _ = layer("mxfp4", 96, 40, FLOAT32)
    x, routing = normal(1, 3, 96, dtype=FLOAT32), make_routing(3, 5, 2)
    with pytest.raises(ValueError, match="are expected"):
        run(x, w | {"down": w["down"]._replace(width=30)}, routing)
    with pytest.raises(ValueError, match="all or none"):
        run(x, w | {"down": put(np.zeros((5, 96, 40), np.float32))}, routing)

"""Triton's products with few rows, with norm, bias, activation, gate and residual."""

from typing import Any

import numpy as np
import pytest

from .cases import DTYPES, assert_close, normal
from .implementations import meaning
from .tensors import get, needs_triton, put, strict, strided, torch
from .test_norms import gain

from dualinfer.kernels.triton.activation import KINDS  # isort: skip
from dualinfer.kernels.triton.launch import INTERPRETED, has_pdl  # isort: skip
from dualinfer.kernels.triton.linear_kernels import parts  # isort: skip
from dualinfer.kernels.triton.linear import (  # isort: skip
    MOST_ROWS,
    MOST_TILES,
    NormArguments,
    TileConfig,
    VectorConfig,
    default_config,
    linear,
    serves,
)

pytestmark = [needs_triton, pytest.mark.usefixtures(strict.__name__)]

FLOAT32 = np.dtype(np.float32)
EPS = 1e-5
NORMS = (None, "rms", "rms_offset", "layer")
FEW_DTYPES = [FLOAT32] if INTERPRETED else DTYPES  # each program takes the interpreter 4 ms
few_dtypes = pytest.mark.parametrize("dtype", FEW_DTYPES, ids=str)
# Width, features, configuration.
ONE_ROW = [
    (1, 1, VectorConfig(4, 4)),
    (63, 63, VectorConfig(8, 4)),
    (63, 21, VectorConfig(1, 2)),
    (1000, 42, VectorConfig(4, 4, 1)),
    (80, 1000, VectorConfig(32, 4)),
]
# Exact parts of two sizes, alike, with a rest that is masked, and both ways through blocks.
IN_PARTS = [
    (2560, 9, VectorConfig(4, 4, 1, 2048)),
    (2560, 9, VectorConfig(4, 4, 0, 512)),
    (5120, 7, VectorConfig(2, 8, 1, 1024)),
    (3072, 7, VectorConfig(4, 8, 0, 2048)),
    (96, 21, VectorConfig(2, 2, 1, 64)),
    (1000, 21, VectorConfig(4, 4, 1, 512)),
    (63, 42, VectorConfig(8, 4, 0, 32)),
]
MORE_ROWS = [
    (2, 63, 63, VectorConfig(8, 4)),
    (3, 1000, 33, VectorConfig(4, 4)),
    (1, 63, 63, TileConfig(16, 32, 32, 4, 2)),
    (2, 1000, 33, TileConfig(16, 16, 64, 4, 3, 3)),
    (16, 80, 1000, TileConfig(16, 64, 32, 4, 3)),
    (33, 1, 1, TileConfig(16, 16, 16, 4, 3)),
    (33, 63, 63, TileConfig(32, 32, 64, 4, 3, 2)),
    (33, 1000, 63, TileConfig(32, 32, 128, 4, 2, 4)),
]
WAYS = {
    "one row": (1, VectorConfig(8, 4)),
    "one row, few programs": (1, VectorConfig(4, 4, 1)),
    "one row, in parts": (1, VectorConfig(8, 4, 0, 32)),
    "one row, in parts, few programs": (1, VectorConfig(4, 4, 1, 16)),
    "two rows": (2, VectorConfig(8, 4)),
    "tile": (5, TileConfig(16, 32, 32, 4, 2)),
    "tile, split": (5, TileConfig(16, 32, 32, 4, 3, 3)),
}
ways = pytest.mark.parametrize(("count", "config"), WAYS.values(), ids=WAYS)


def make(dtype: np.dtype, count: int, width: int, features: int, gated: bool = False) -> dict:
    """x, weight, bias and residual; x is no unit normal, so that a norm shows."""
    out = 2 * features if gated else features
    return {
        "x": (2 * normal(1, count, width, dtype=FLOAT32) + 0.5).astype(dtype),
        "weight": normal(2, out, width, dtype=dtype, scale=width**-0.5),
        "bias": normal(3, out, dtype=dtype),
        "residual": normal(4, count, features, dtype=dtype),
    }


def norm_of(kind: str | None, dtype: np.dtype, width: int) -> tuple[Any, ...] | None:
    """A norm's kind, weight and bias as arrays."""
    bias = normal(6, width, dtype=dtype) if kind == "layer" else None
    return None if kind is None else (kind, gain(dtype, width), bias)


def wanted(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    norm: tuple[Any, ...] | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> np.ndarray:
    """The reference's ops, one after another."""
    if norm is not None:
        kind, norm_weight, norm_bias = norm
        if kind == "layer":
            x = meaning.layer_norm(x, norm_weight, norm_bias, EPS)
        else:
            x = meaning.rms_norm(x, norm_weight, EPS, unit_offset=kind == "rms_offset")
    y = meaning.matmul(x, weight, bias)
    if activation is not None:
        act = meaning.gated_activation if gated else meaning.activation
        y = act(y, activation)
    return y if residual is None else y + residual.astype(np.float32)


def run(x: Any, weight: Any, norm: tuple[Any, ...] | None = None, **options: Any) -> np.ndarray:
    """`linear` of arrays or tensors; its bits do not depend on PDL, and its counters end at 0."""

    def placed(value: Any) -> Any:
        return put(value) if isinstance(value, np.ndarray) else value

    x, weight = placed(x), placed(weight)
    options = {"sms": 5} | {name: placed(value) for name, value in options.items()}
    if norm is not None:
        kind, norm_weight, norm_bias = norm
        options["norm"] = NormArguments(kind, placed(norm_weight), placed(norm_bias), EPS)
    counters = torch.zeros(MOST_TILES, dtype=torch.int32, device=x.device)
    y = linear(x, weight, counters=counters, **options)
    if has_pdl(x):
        early = linear(x, weight, counters=counters, pdl=True, **options)
        torch.testing.assert_close(early, y, rtol=0, atol=0, equal_nan=True)
    assert not counters.any()
    return tuple(map(get, y)) if isinstance(y, tuple) else get(y)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(("width", "features", "config"), [*ONE_ROW, *IN_PARTS], ids=str)
def test_one_row_with_any_norm_is_the_reference(dtype, width, features, config, kind):
    a, norm = make(dtype, 1, width, features), norm_of(kind, dtype, width)
    expected = wanted(**a, norm=norm)
    assert_close(run(**a, norm=norm, config=config), expected, dtype, length=width)


@few_dtypes
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(
    ("width", "features", "config"), [*ONE_ROW[2:4], IN_PARTS[4], IN_PARTS[-1]], ids=str
)
def test_a_norm_over_a_sum_comes_along(dtype, width, features, config, kind):
    a, norm = make(dtype, 1, width, features), norm_of(kind, dtype, width)
    before = normal(7, 1, width, dtype=dtype)
    found, normed = run(**a, norm=norm, before=before, config=config)
    a["x"] = (a["x"].astype(np.float32) + before.astype(np.float32)).astype(dtype)
    assert_close(found, wanted(**a, norm=norm), dtype, length=width)
    assert_close(normed, wanted(a["x"], np.eye(width, dtype=dtype), norm=norm), dtype)
    with pytest.raises(ValueError, match="without a norm"):
        run(**a, before=before, config=config)


@pytest.mark.parametrize(("count", "width", "features", "config"), MORE_ROWS, ids=str)
def test_more_rows_are_the_reference(dtype, count, width, features, config):
    a = make(dtype, count, width, features)
    assert_close(run(**a, config=config), wanted(**a), dtype, length=width)


@ways
def test_wide_results_are_float32_and_not_rounded(dtype, count, config):
    a = make(dtype, count, 100, 63)
    found = run(**a, config=config, dtype=torch.float32)
    assert_close(found, wanted(**a), FLOAT32, length=100)


@pytest.mark.parametrize("activation", KINDS)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@ways
@few_dtypes
def test_activations_and_gates_are_the_reference(dtype, count, config, gated, activation):
    a = make(dtype, count, 100, 33, gated)
    how = {"activation": activation, "gated": gated}
    assert_close(run(**a, **how, config=config), wanted(**a, **how), dtype, length=100)


@pytest.mark.parametrize("given", [(), ("bias",), ("residual",)], ids=str)
@ways
@few_dtypes
def test_bias_and_residual_are_optional(dtype, count, config, given):
    a = make(dtype, count, 63, 40, gated=True)
    a = {name: a[name] for name in ("x", "weight", *given)}
    how = {"activation": "silu", "gated": True}
    assert_close(run(**a, **how, config=config), wanted(**a, **how), dtype, length=63)


@pytest.mark.parametrize("count", [1, 2, 9, 40, 100])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("sms", [1, 132])
def test_default_configurations_are_the_reference(count, gated, sms):
    dtype = DTYPES[1]
    a = make(dtype, count, 1000, 33, gated)
    how = {"activation": "gelu" if gated else None, "gated": gated}
    found = run(**a, **how, sms=sms)
    assert_close(found, wanted(**a, **how), dtype, length=1000)


@ways
@few_dtypes
def test_strided_rows_and_leading_axes_agree_with_contiguous_rows(dtype, count, config):
    a = make(dtype, count, 63, 33)
    expected = run(**a, config=config)
    views = {"x": strided(a["x"]), "residual": strided(a["residual"])}
    np.testing.assert_array_equal(run(**a | views, config=config), expected)
    split = {name: a[name].reshape(count, 1, -1) for name in views}
    found = run(**a | split, config=config)
    np.testing.assert_array_equal(found, expected.reshape(count, 1, -1))


@ways
@few_dtypes
def test_results_are_the_same_bits_every_time(dtype, count, config):
    """Split sums too: they are added in their order, whichever program ends last."""
    a = make(dtype, count, 500, 40 if INTERPRETED else 2000)
    first = run(**a, config=config)
    for _ in range(1 if INTERPRETED else 20):
        np.testing.assert_array_equal(run(**a, config=config), first)


# Features, width, gated, norm: shapes of 7B, 8B and 70B models, and odd ones.
LARGE = [
    (12288, 4096, False, "rms"),
    (11008, 4096, True, "rms"),
    (4096, 11008, False, None),
    (32001, 4097, False, "layer"),
    (6144, 4096, False, "rms_offset"),
    (5000, 2049, True, "layer"),
    (14336, 8192, True, "rms"),
]


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="no GPU: interpreted it would take minutes")
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(("features", "width", "gated", "kind"), LARGE)
def test_a_row_of_large_matrices_is_the_reference(features, width, gated, kind, dtype):
    """What a token of a large model runs, with and without blocks in turn."""
    a = make(dtype, 1, width, features, gated)
    how: dict[str, Any] = {"activation": "silu", "gated": True} if gated else {}
    how["norm"] = norm_of(kind, dtype, width)
    default = default_config(1, features, width, 2, gated, 132)
    widest = 1 << (width.bit_length() - 1)
    for config in (default, default._replace(per_sm=2), default._replace(columns=widest)):
        found = run(**a, **how, config=config, sms=132)
        assert_close(found, wanted(**a, **how), dtype, length=width)
        np.testing.assert_array_equal(run(**a, **how, config=config, sms=132), found)


@pytest.mark.parametrize(
    ("width", "columns", "sizes"),
    [
        (2560, 2048, [2048, 512]),
        (2560, 4096, [2048, 512]),
        (2560, 512, [512] * 5),
        (5120, 4096, [4096, 1024]),
        (3072, 2048, [2048, 1024]),
        (96, 64, [64, 32]),
        (4096, 4096, [4096]),
        (11008, 8192, [8192, 2048, 1024]),  # 768 are left, which are few
        (2600, 512, [512] * 5 + [64]),
    ],
)
def test_parts_are_exact_but_for_a_small_rest(width, columns, sizes):
    found = parts(width, columns)
    assert [size for _, size in found] == sizes
    assert [begin for begin, _ in found] == [sum(sizes[:i]) for i in range(len(sizes))]


def test_split_sums_without_counters_are_not_split():
    a = make(FLOAT32, 5, 100, 63)
    x, weight = put(a["x"]), put(a["weight"])
    found = linear(x, weight, config=WAYS["tile, split"][1])
    assert_close(get(found), wanted(a["x"], a["weight"]), FLOAT32, length=100)


def test_no_rows_and_no_features_are_fine():
    weight = put(np.ones((6, 4), np.float32))
    assert linear(weight[:0], weight[:, :4].contiguous()).shape == (0, 6)
    assert linear(weight, weight[:0]).shape == (6, 0)


@pytest.mark.parametrize("activation", [None, *KINDS])
@ways
def test_nan_stays_nan(count, config, activation):
    a = make(FLOAT32, count, 63, 33)
    a["x"][-1, 5] = np.nan
    found = run(**a, config=config, activation=activation)
    assert np.isnan(found[-1]).all() and np.isfinite(found[:-1]).all()


def test_many_rows_are_left_to_cublas():
    assert serves(1, 4096, 4096, 2, False) and serves(64, 4096, 4096, 2, False)
    assert not serves(MOST_ROWS + 1, 63, 63, 2, True)
    assert serves(1, 4096, 4096, 4, False) and not serves(2, 4096, 4096, 4, False)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("width", [1, 63, 1000, 4096, 16384])
def test_every_shape_has_a_configuration(width, gated, itemsize):
    for count in (1, 2, 3, 16, 17, 64, 128):
        for features in (1, 63, 1000, 4096, 128256):
            config = default_config(count, features, width, itemsize, gated, 132)
            assert min(config[:2]) >= 1
            assert isinstance(config, VectorConfig if count <= 2 else TileConfig)


def test_what_cannot_be_run_is_refused():
    x, weight = put(np.zeros((2, 6), np.float32)), put(np.ones((5, 6), np.float32))
    norm = NormArguments("rms", x[0], None, EPS)
    refused = {
        "x is torch.float32 and weight torch.float16": (x, weight.half(), {}),
        "The norm is 'l2'": (x[:1], weight, {"norm": norm._replace(kind="l2")}),
        "kind 'layer' has a bias": (x[:1], weight, {"norm": norm._replace(kind="layer")}),
        r"weights are \(5,\); \(6,\)": (x[:1], weight, {"norm": norm._replace(weight=x[0, :5])}),
        "no place for a norm": (
            *(x[:1], weight),
            {"norm": norm, "config": TileConfig(16, 16, 16, 4, 2)},
        ),
        r"weight \(5, 4\) with strides": (x, weight[:, :4].contiguous(), {}),
        r"a contiguous \[out, 6\] is expected": (x, put(np.ones((6, 6), np.float32)).T, {}),
        "gate and up; it has 'silu' and 5": (x, weight, {"gated": True, "activation": "silu"}),
        "needs an activation": (x, weight[:4], {"gated": True}),
        "'swish'; one of silu": (x, weight, {"activation": "swish"}),
        "x has stride 2": (put(np.zeros((2, 12), np.float32))[:, ::2], weight, {}),
        r"bias \(4,\) does not fit": (x, weight, {"bias": weight[0, :4]}),
        r"residual is \(2, 6\); \(2, 5\)": (x, weight, {"residual": x}),
        "x has 2 rows; a norm": (x, weight, {"norm": norm}),
        "x has 2 rows; .* columns": (x, weight, {"config": VectorConfig(1, 1, 0, 4)}),
    }
    for message, (value, matrix, options) in refused.items():
        with pytest.raises(ValueError, match=message):
            linear(value, matrix, **options)

"""Pallas' products with few rows, with norm, bias, activation, gate and residual."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from dualinfer.kernels import reference

from .arrays import INTERPRETED, check_lowers, get, jax, put, struct
from .cases import DTYPES, assert_close, normal
from .test_norms import gain

from dualinfer.kernels.pallas.activation import KINDS  # isort: skip
from dualinfer.kernels.pallas.linear import (  # isort: skip
    MOST_ROWS,
    MOST_TILES,
    NormArguments,
    TileConfig,
    VectorConfig,
    default_config,
    linear,
    serves,
)

FLOAT32, BFLOAT16, FLOAT16 = DTYPES
EPS = 1e-5
WAYS = {
    "one row": (1, VectorConfig(8, 4)),
    "one row, several turns": (1, VectorConfig(4, 4, 3)),
    "two rows": (2, VectorConfig(4, 4)),
    "tile": (5, TileConfig(16, 32, 32, 4, 2)),
    "tile, split": (5, TileConfig(16, 32, 32, 4, 3, 3)),
}
ways = pytest.mark.parametrize(("count", "config"), WAYS.values(), ids=WAYS)
two_dtypes = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
interpreted = partial(linear, interpret=INTERPRETED)


def make(dtype: np.dtype, count: int, width: int, features: int, gated: bool = False) -> dict:
    """x, weight, bias and residual; x is no unit normal, so that a norm shows."""
    out = 2 * features if gated else features
    return {
        "x": (2 * normal(1, count, width, dtype=FLOAT32) + 0.5).astype(dtype),
        "weight": normal(2, out, width, dtype=dtype, scale=width**-0.5),
        "bias": normal(3, out, dtype=dtype),
        "residual": normal(4, count, features, dtype=dtype),
    }


def wanted(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    norm: NormArguments | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> np.ndarray:
    """The reference's ops, one after another."""
    if norm is not None and norm.kind == "layer":
        x = reference.layer_norm(x, norm.weight, norm.bias, norm.eps)
    elif norm is not None:
        offset = norm.kind == "rms_offset"
        x = reference.rms_norm(x, norm.weight, norm.eps, unit_offset=offset)
    y = reference.matmul(x, weight, bias)
    if activation is not None:
        act = reference.gated_activation if gated else reference.activation
        y = act(y, activation)
    return y if residual is None else y + residual.astype(np.float32)


def placed(value: Any) -> Any:
    if isinstance(value, NormArguments):
        return NormArguments(*(placed(part) for part in value))
    return put(value) if isinstance(value, np.ndarray) else value


def run(**options: Any) -> np.ndarray:
    """`linear` of arrays; its counters end at 0."""
    given = {name: placed(value) for name, value in options.items()}
    y, counters = interpreted(counters=put(np.zeros(MOST_TILES, np.int32)), **given)
    assert counters is not None and counters.dtype == np.int32
    np.testing.assert_array_equal(counters, np.zeros(MOST_TILES))
    return get(y)


@pytest.mark.parametrize("kind", ["rms", "rms_offset", "layer"])
@pytest.mark.parametrize(
    ("count", "width", "features", "rows"),
    [(1, 1, 1, 4), (2, 200, 7, 2), (1, 64, 8, 4)],
)
@two_dtypes
def test_a_norm_in_front_is_the_reference(dtype, count, width, features, rows, kind):
    a = make(dtype, count, width, features)
    bias = normal(6, width, dtype=dtype) if kind == "layer" else None
    norm = NormArguments(kind, gain(dtype, width), bias, EPS)
    found = run(**a, norm=norm, config=VectorConfig(rows, 4))
    assert_close(found, wanted(**a, norm=norm), dtype, length=width)


@pytest.mark.parametrize(
    ("count", "width", "features", "config"),
    [
        (1, 200, 65, VectorConfig(8, 4)),
        (3, 96, 7, VectorConfig(2, 2)),
        (1, 63, 65, TileConfig(16, 32, 32, 4, 2)),
        (2, 200, 33, TileConfig(16, 16, 64, 4, 3, 3)),
        (16, 96, 64, TileConfig(16, 64, 32, 4, 3, 2)),
        (17, 1, 1, TileConfig(16, 16, 16, 4, 3)),
        (33, 200, 65, TileConfig(32, 32, 64, 4, 3, 2)),
    ],
    ids=str,
)
@two_dtypes
def test_products_are_the_reference(dtype, count, width, features, config):
    a = make(dtype, count, width, features)
    assert_close(run(**a, config=config), wanted(**a), dtype, length=width)


@ways
def test_wide_results_are_float32_and_not_rounded(count, config):
    a = make(BFLOAT16, count, 96, 63)
    assert_close(run(**a, config=config, dtype=FLOAT32), wanted(**a), FLOAT32, length=96)


@pytest.mark.parametrize("activation", KINDS)
@pytest.mark.parametrize(("gated", "way"), [(False, "one row"), (True, "tile, split")])
def test_activations_and_gates_are_the_reference(gated, way, activation):
    count, config = WAYS[way]
    a = make(FLOAT32, count, 96, 33, gated)
    how = {"activation": activation, "gated": gated}
    assert_close(run(**a, **how, config=config), wanted(**a, **how), FLOAT32, length=96)


@pytest.mark.parametrize("given", [(), ("bias",)], ids=str)
@ways
def test_bias_and_residual_are_optional(count, config, given):
    a = make(BFLOAT16, count, 63, 40, gated=True)
    a = {name: a[name] for name in ("x", "weight", *given)}
    how = {"activation": "silu", "gated": True}
    assert_close(run(**a, **how, config=config), wanted(**a, **how), BFLOAT16, length=63)


@pytest.mark.parametrize("count", [1, 2, 17, 100])
def test_default_configurations_are_the_reference(count):
    a = make(FLOAT16, count, 200, 33, gated=True)
    how = {"activation": "silu", "gated": True}
    assert_close(run(**a, **how), wanted(**a, **how), FLOAT16, length=200)


# Features, width, gated, norm: shapes of 7B, 8B and 70B models, and odd ones.
LARGE = [
    (12288, 4096, False, "rms"),
    (4096, 4096, False, None),
    (11008, 4096, True, "rms"),
    (4096, 11008, False, None),
    (32001, 4097, False, "layer"),
    (6144, 4096, False, "rms_offset"),
    (4096, 14336, False, None),
    (5000, 2049, True, "layer"),
    (4097, 2500, False, "rms"),
    (8192, 3584, False, None),
    (14336, 8192, True, "rms"),
]


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="no GPU")
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize(("features", "width", "gated", "kind"), LARGE)
def test_rows_of_large_matrices_in_turn_are_the_reference(features, width, gated, kind, dtype):
    """What a token of a large model runs, on the GPU; interpreted it would take minutes."""
    assert default_config(1, features, width, 2, gated, 132).turns > 1
    a = make(dtype, 1, width, features, gated)
    how: dict[str, Any] = {"activation": "silu", "gated": True} if gated else {}
    if kind is not None:
        bias = normal(6, width, dtype=dtype) if kind == "layer" else None
        how["norm"] = NormArguments(kind, gain(dtype, width), bias, EPS)
    found = run(**a, **how)
    assert_close(found, wanted(**a, **how), dtype, length=width)
    np.testing.assert_array_equal(run(**a, **how), found)


def test_leading_axes_are_rows():
    count, config = WAYS["tile"]
    a = make(FLOAT32, count, 63, 33)
    expected = run(**a, config=config)
    split = {name: a[name].reshape(count, 1, -1) for name in ("x", "residual")}
    np.testing.assert_array_equal(
        run(**a | split, config=config), expected.reshape(count, 1, -1), strict=True
    )


@pytest.mark.parametrize("splits", [2, 3])
def test_counters_go_from_launch_to_launch(splits):
    """Split sums are added in their order: the same bits, under jit too."""
    a = {name: put(value) for name, value in make(BFLOAT16, 5, 200, 65, gated=True).items()}
    config = TileConfig(16, 32, 32, 4, 3, splits)
    call = jax.jit(partial(interpreted, activation="silu", gated=True, config=config))
    first, counters = call(**a, counters=put(np.zeros(MOST_TILES, np.int32)))
    second, counters = call(**a, counters=counters)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(counters, np.zeros(MOST_TILES))
    whole, none = call(**a)
    assert none is None
    assert_close(get(whole), get(first).astype(np.float32), BFLOAT16, roundings=2, length=200)


def test_sums_are_split_where_each_tile_has_a_counter():
    a = {name: put(value) for name, value in make(FLOAT32, 5, 200, 65).items()}
    call = jax.jit(partial(interpreted, config=TileConfig(16, 32, 32, 4, 3, 3)))
    whole, _ = call(**a)
    for size in (1, 2, 3):  # of three tiles
        found, counters = call(**a, counters=put(np.zeros(size, np.int32)))
        np.testing.assert_array_equal(counters, np.zeros(size))
        assert np.array_equal(found, whole) == (size < 3)


def test_no_rows_and_no_features_are_fine():
    weight = put(np.ones((6, 4), np.float32))
    assert linear(weight[:0], weight)[0].shape == (0, 6)
    assert linear(weight, weight[:0])[0].shape == (6, 0)


@ways
def test_nan_stays_nan(count, config):
    a = make(FLOAT32, count, 63, 33)
    a["x"][-1, 5] = np.nan
    found = run(**a, config=config, activation="relu")
    assert np.isnan(found[-1]).all() and np.isfinite(found[:-1]).all()


def test_many_or_very_wide_rows_are_left_to_cublas():
    assert serves(1, 4096, 4096, 2, False) and serves(64, 4096, 4096, 2, False)
    assert not serves(MOST_ROWS + 1, 63, 63, 2, True)
    assert serves(1, 4096, 4096, 4, False) and not serves(2, 4096, 4096, 4, False)
    assert serves(1, 8192, 28672, 2, False) and not serves(1, 8192, 28672, 4, False)
    assert not serves(1, 1 << 19, 1 << 12, 2, False)  # more than a kernel can address


def test_measured_configurations_are_the_defaults():
    def best(features: int, width: int, itemsize: int = 2, gated: bool = False) -> Any:
        return default_config(1, features, width, itemsize, gated, 132)

    assert best(12288, 4096) == best(6144, 4096) == best(32000, 4096) == VectorConfig(4, 8, 2)
    assert best(4096, 4096) == best(4096, 11008) == best(4096, 5504) == VectorConfig(1, 8, 8)
    assert best(4096, 2048) == VectorConfig(2, 8, 4)
    assert best(4096, 14336) == VectorConfig(1, 16, 4)
    assert best(11008, 4096, gated=True) == best(8192, 2048, gated=True) == VectorConfig(1, 8, 2)
    assert best(3072, 2048) == VectorConfig(2, 4)
    assert best(2048, 2048) == VectorConfig(1, 4)
    assert best(50257, 768) == VectorConfig(8, 4)
    assert best(4096, 16384) == VectorConfig(1, 8)
    assert best(12288, 4096, itemsize=4) == VectorConfig(1, 4)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("width", [1, 63, 1000, 4096, 16384])
def test_every_shape_has_a_configuration(width, gated, itemsize):
    for count in (1, 2, 3, 16, 17, 64, 128):
        for features in (1, 63, 1000, 4096, 128256):
            config = default_config(count, features, width, itemsize, gated, 132)
            assert min(config) >= 1
            assert isinstance(config, VectorConfig if count <= 2 else TileConfig)


# Count, features, width, gated: Llama 7B's, then GPT-2's, then an odd one.
LOWERED = [
    (12288, 4096, False),
    (4096, 11008, False),
    (11008, 4096, True),
    (2304, 768, False),
    (768, 3072, False),
    (65, 200, True),
]


@pytest.mark.parametrize("count", [1, 2, 8, 32])
@pytest.mark.parametrize(("features", "width", "gated"), LOWERED, ids=str)
@two_dtypes
def test_products_lower_for_a_gpu(dtype, count, features, width, gated):
    out = 2 * features if gated else features
    shaped = partial(struct, dtype=dtype)

    def call(x: Any, weight: Any, bias: Any, residual: Any, counters: Any, *norm: Any) -> Any:
        kind = NormArguments("layer", norm[0], norm[1], EPS) if norm else None
        options = {"activation": "silu" if gated else None, "gated": gated, "norm": kind}
        plain, counters = linear(x, weight, **options, counters=counters)
        return plain, linear(
            x, weight, bias, residual=residual, **options, dtype="float32", counters=counters
        )

    norm = [shaped(width)] * 2 if count <= 2 else []  # its weight and bias
    arrays = shaped(count, width), shaped(out, width), shaped(out), shaped(count, features)
    check_lowers(call, *arrays, struct(MOST_TILES, dtype=np.int32), *norm)


@pytest.mark.parametrize("activation", KINDS)
@ways
def test_activations_lower_for_a_gpu(count, config, activation):
    shaped = partial(struct, dtype=FLOAT16)
    call = partial(linear, activation=activation, gated=True, config=config)
    arrays = shaped(count, 200), shaped(66, 200), struct(MOST_TILES, dtype=np.int32)
    check_lowers(lambda x, weight, counters: call(x, weight, counters=counters), *arrays)


def test_what_cannot_be_run_is_refused():
    x, weight = put(np.zeros((3, 6), np.float32)), put(np.ones((5, 6), np.float32))
    vector, bad = x[0], NormArguments("l2", x[0], None, EPS)
    short, norm = NormArguments("rms", x[0, :5], None, EPS), NormArguments("rms", vector, None, EPS)
    refused = {
        r"weight \(5, 4\) does not fit x \(3, 6\)": (x, weight[:, :4], {}),
        "gate and up; it has 'silu' and 5": (x, weight, {"gated": True, "activation": "silu"}),
        "needs an activation": (x, weight[:4], {"gated": True}),
        "'swish'; one of silu": (x, weight, {"activation": "swish"}),
        r"bias \(4,\) does not fit": (x, weight, {"bias": weight[0, :4]}),
        r"residual is \(3, 6\); \(3, 5\)": (x, weight, {"residual": x}),
        "x is float32 and weight float16": (x, weight.astype(np.float16), {}),
        "counters are float32": (x, weight, {"counters": vector}),
        "x has 3 rows; a norm": (x, weight, {"norm": norm}),
        "The norm is 'l2'": (x[:1], weight, {"norm": bad}),
        "kind 'layer' has a bias": (x[:1], weight, {"norm": norm._replace(kind="layer")}),
        r"weights are \(5,\); \(6,\)": (x[:1], weight, {"norm": short}),
        "no place for a norm": (
            *(x[:1], weight),
            {"norm": norm, "config": TileConfig(16, 16, 16, 4, 2)},
        ),
    }
    for message, (value, matrix, options) in refused.items():
        with pytest.raises(ValueError, match=message):
            linear(value, matrix, **options)
    large = struct(1, 1 << 13, dtype=FLOAT32), struct(1 << 18, 1 << 13, dtype=FLOAT32)
    with pytest.raises(ValueError, match=r"2\*\*31"):
        jax.eval_shape(linear, *large)

"""Triton's products with quantized weights, and the matrices that it makes of codes."""

import itertools
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dualinfer.quantization import BlockScheme

from ..quantized import NF, NVFP4, SCHEMES, dequantize, quantize
from .cases import DTYPES, assert_close, normal
from .tensors import get, needs_triton, put, strict, torch
from .test_triton_linear import EPS, FLOAT32, few_dtypes, norm_of, wanted

from dualinfer.kernels.triton.launch import INTERPRETED, has_pdl  # isort: skip
from dualinfer.kernels.triton.linear import MOST_TILES, NormArguments  # isort: skip
from dualinfer.kernels.triton.operands import Recording  # isort: skip
from dualinfer.kernels.triton.quantized import (  # isort: skip
    TUNABLE,
    Packed,
    QuantizedFragmentConfig,
    QuantizedStreamConfig,
    QuantizedTileConfig,
    QuantizedVectorConfig,
    default_config,
    linear,
    serves,
    tuning_key,
    values,
)

pytestmark = [needs_triton, pytest.mark.usefixtures(strict.__name__)]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FORMS = {
    "int8": SCHEMES["int8"],
    "int8 zeros": BlockScheme("uint8", zeros=True),
    "int8 groups": BlockScheme("uint8", columns=32, scale_dtype="float16", zeros=True),
    "int4": BlockScheme("int4", columns=64, scale_dtype="bfloat16"),
    "int4 rows": BlockScheme("int4", scale_dtype="float16"),
    "int4 groups of 16": SCHEMES["int4"],
    "int4 zeros": SCHEMES["int4 zeros"],
    "uint4": SCHEMES["uint4 zeros"],
    "uint4 rows": BlockScheme("uint4", zeros=True),
    "fp8": BlockScheme("fp8_e4m3"),
    "fp8 e5m2": BlockScheme("fp8_e5m2"),
    "fp8 blocks": SCHEMES["fp8 blocks"],
    "fp8 tensor": SCHEMES["fp8 tensor"],
    "nvfp4": NVFP4,
    "mxfp4": SCHEMES["mxfp4"],
    "table": replace(SCHEMES["table"], table=NF),
}
STREAM = QuantizedStreamConfig(2, 2, 1)
FRAGMENT = QuantizedFragmentConfig(2, 1, 2, 2)
VECTOR, TILE = QuantizedVectorConfig(4, 2, 1, 2), QuantizedTileConfig(16, 16, 4, 4, 2, 2)
forms = pytest.mark.parametrize("form", FORMS)


def make(
    form: str | BlockScheme, features: int, width: int, seed: int = 1
) -> tuple[Packed, np.ndarray]:
    """A weight as a device holds it, and what its codes mean, in float32."""
    scheme = FORMS[form] if isinstance(form, str) else form
    arrays = quantize(scheme, normal(seed, features, width, dtype=FLOAT32))
    meant = dequantize(scheme, arrays)
    arrays["codes"] = scheme.code.pack(arrays["codes"])
    if scheme.codes == "int4" and scheme.zeros:
        arrays["zero"] = arrays["zero"].view(np.uint8) + np.uint8(scheme.code.raised)
    if scheme.scale_dtype.startswith("float8"):
        arrays["scale"] = arrays["scale"].view(np.uint8)
    names = ("codes", "scale", "zero", "outer")
    tensors = (put(arrays[name]) if name in arrays else None for name in names)
    about = scheme.codes, scheme.scale_dtype, scheme.rows, scheme.columns, width, scheme.table
    return Packed(*tensors, *about), meant


def run(x: Any, weight: Packed, norm: tuple[Any, ...] | None = None, **options: Any) -> np.ndarray:
    """`linear`; its bits do not depend on PDL, and its counters end at 0."""
    options = {k: put(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    if norm is not None:
        kind, *arrays = norm
        gain, bias = (None if a is None else put(a) for a in arrays)
        options["norm"] = NormArguments(kind, gain, bias, EPS)
    x = put(x)
    counters = torch.zeros(MOST_TILES, dtype=torch.int32, device=x.device)
    y = linear(x, weight, counters=counters, sms=5, **options)
    if has_pdl(x):
        early = linear(x, weight, counters=counters, sms=5, pdl=True, **options)
        torch.testing.assert_close(early, y, rtol=0, atol=0, equal_nan=True)
    assert not counters.any()
    return get(y)


@pytest.mark.parametrize("config", [STREAM, VECTOR], ids=["stream", "vector"])
@forms
def test_a_row_in_float32_is_the_product_with_what_codes_mean(form, config):
    weight, meant = make(form, 38, 100)
    x, residual = normal(2, 1, 100, dtype=FLOAT32), normal(3, 1, 38, dtype=FLOAT32)
    found = run(x, weight, residual=residual, config=config)
    assert_close(found, wanted(x, meant, residual=residual), FLOAT32, length=100)


@pytest.mark.parametrize("dtype", [BFLOAT16] if INTERPRETED else DTYPES[1:], ids=str)
@forms
def test_a_row_in_16_bits_errs_by_less_than_its_rounding(form, dtype):
    weight, meant = make(form, 38, 160)
    x, bias = normal(2, 1, 160, dtype=dtype), normal(3, 38, dtype=dtype)
    fragments = (QuantizedFragmentConfig(1, 1, 2, 1),) if form != "table" else ()
    for config in (QuantizedVectorConfig(8, 4, 1), STREAM, *fragments):
        found = run(x, weight, bias=bias, dtype=torch.float32, config=config)
        error = found - wanted(x, meant, bias)
        assert np.sqrt((error**2).mean()) < 3e-4 * meant.std() * 160**0.5


@pytest.mark.parametrize("kind", ["rms", "rms_offset", "layer"])
@pytest.mark.parametrize("form", ["int8", "uint4", "nvfp4"])
@pytest.mark.parametrize(
    "config", [STREAM, QuantizedVectorConfig(4, 2, 1)], ids=["stream", "vector"]
)
def test_norms_activations_and_gates_are_fused(form, kind, config):
    weight, meant = make(form, 38, 100)
    x, norm = normal(2, 1, 100, dtype=FLOAT32, scale=2), norm_of(kind, FLOAT32, 100)
    how = {"norm": norm, "activation": "silu", "gated": True}
    found = run(x, weight, **how, config=config)
    assert_close(found, wanted(x, meant, **how), FLOAT32, length=100)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("form", [form for form in FORMS if form != "table"])
def test_codes_of_few_rows_go_to_the_matrix_units_in_registers(form, dtype):
    """Their values are exact, so that a result errs by the order of its sum alone."""
    weight, meant = make(form, 22, 160)
    bias = normal(3, 22, dtype=dtype)
    narrow = weight.bits == 4 and weight.columns in (16, 32)
    count, tiles = (3, 1) if narrow or dtype == BFLOAT16 else (16, 2)
    x, residual = normal(2, count, 160, dtype=dtype), normal(4, count, 11, dtype=dtype)
    how = {"activation": "silu", "gated": True, "residual": residual}
    config = QuantizedFragmentConfig(1, tiles, 1, 2)
    found = run(x, weight, bias=bias, dtype=torch.float32, config=config, **how)
    expected = wanted(x, meant, bias, **how)
    assert np.sqrt(((found - expected) ** 2).mean()) < 3e-4 * expected.std()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_default_serves_the_product_that_it_is_for(bits):
    codes = ("int4", "fp4_e2m1") if bits == 4 else ("uint8", "fp8_e4m3")
    about = [
        Packed(None, None, None, None, code, "float16", 1, columns, width)
        for code in codes
        for columns in (16, 32, 64, 128, 0)
        for width in (48, 992, 1024, 2048, 2880, 4096, 14336)
    ]
    for rows, features, gated, normed in itertools.product(
        (1, 3, 8, 16), (64, 2048, 16384), (False, True), (False, True)
    ):
        for weight in about:
            key = tuning_key(rows, features, weight, 2, gated, normed and rows == 1)
            config = default_config(key, 132)
            assert not isinstance(config, QuantizedFragmentConfig) or TUNABLE.fits(key, config)


def test_powers_of_two_for_blocks_wider_than_a_chunk_are_those_of_all_rows_of_x():
    """As fp8 checkpoints with scales of 8 bits have them, with a column of products for each."""
    scheme = BlockScheme("fp8_e4m3", rows=16, columns=128, scale_dtype="float8_e8m0fnu")
    weight, meant = make(scheme, 22, 160)
    x = normal(2, 5, 160, dtype=BFLOAT16)
    found = run(x, weight, dtype=torch.float32, config=QuantizedFragmentConfig(1, 1, 1, 1))
    expected = wanted(x, meant)
    assert np.sqrt(((found - expected) ** 2).mean()) < 3e-4 * expected.std()


@pytest.mark.parametrize("codes", ["int4", "uint8"])
def test_a_group_of_the_whole_row_may_end_within_a_chunk(codes):
    weight, meant = make(BlockScheme(codes, columns=160, zeros=codes == "uint8"), 22, 160)
    x = normal(2, 3, 160, dtype=BFLOAT16)
    found = run(x, weight, dtype=torch.float32, config=QuantizedFragmentConfig(1, 1, 1, 1))
    expected = wanted(x, meant)
    assert np.sqrt(((found - expected) ** 2).mean()) < 3e-4 * expected.std()


@pytest.mark.parametrize(
    ("form", "kind", "config"),
    [
        ("int8", "layer", FRAGMENT._replace(warps=4)),
        ("uint4", "rms_offset", FRAGMENT._replace(warps=4)),
        ("nvfp4", "rms", QuantizedFragmentConfig(1, 1, 1, 2)),  # in two turns
        ("mxfp4", "rms", QuantizedFragmentConfig(1, 1, 1, 1)),
    ],
)
def test_norms_are_fused_with_products_of_fragments(form, kind, config):
    weight, meant = make(form, 22, 160)
    x, norm = normal(2, 1, 160, dtype=BFLOAT16, scale=2), norm_of(kind, BFLOAT16, 160)
    found = run(x, weight, norm=norm, dtype=torch.float32, config=config)
    expected = wanted(x, meant, norm=norm)
    # The normed row is rounded to float16.
    assert np.sqrt(((found - expected) ** 2).mean()) < 5e-4 * expected.std()


@few_dtypes
@forms
def test_more_rows_go_to_the_matrix_units(form, dtype):
    weight, meant = make(form, 38, 300 if form == "int4" else 100)
    x = normal(2, 5, weight.width, dtype=dtype)
    how: dict[str, Any] = {"activation": "gelu", "gated": True} if form == "uint4" else {}
    found = run(x, weight, **how, config=TILE)
    # The values are rounded to 16 bits, as those of a dequantized matrix.
    rounded = get(put(meant).to(put(x).dtype)).astype(np.float32)
    scaled_later = not FORMS[form].columns or FORMS[form].outer
    expected = wanted(x, meant if scaled_later else rounded, **how)
    assert_close(found, expected, dtype, length=weight.width, roundings=2)


@pytest.mark.parametrize("dtype", [FLOAT32] if INTERPRETED else DTYPES, ids=str)
@pytest.mark.parametrize("width", [97, 98, 100])
def test_tiles_take_rows_of_codes_that_begin_anywhere(width, dtype):
    """Threads have columns of such rows in another order, where a program has 64 results."""
    scheme = BlockScheme("int8", columns=16, scale_dtype="float16")
    weight, meant = make(scheme, 70, width)
    x = normal(2, 5, width, dtype=dtype)
    found = run(x, weight, config=QuantizedTileConfig(16, 64, 4, 4, 2))
    rounded = get(put(meant).to(put(x).dtype)).astype(np.float32)
    assert_close(found, wanted(x, rounded), dtype, length=width, roundings=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@forms
def test_values_are_rounded_once(form, dtype):
    weight, meant = make(form, 38, 100)
    like = put(np.zeros(1, dtype))
    np.testing.assert_array_equal(get(values(weight, like)), get(put(meant).to(like.dtype)))


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("count", [1, 9, 40])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_defaults_serve_any_shape(form, count, dtype):
    weight, meant = make(form, 33, 144)
    key = tuning_key(count, 33, weight, dtype.itemsize, False, False)
    x, config = normal(2, count, 144, dtype=dtype), default_config(key, 132)
    fragments = dtype == BFLOAT16 and (count == 9 or (count == 1 and form == "int4"))
    assert isinstance(config, QuantizedFragmentConfig) == fragments
    found = run(x, weight, config=config)
    assert_close(found, wanted(x, meant), dtype, length=144, roundings=2)


@pytest.mark.parametrize(
    ("features", "warps", "early"), [(512, 4, False), (512, 8, True), (4096, 4, True)]
)
def test_tiles_start_early_where_their_programs_fill_the_device(features, warps, early):
    """With 16 multiprocessors. What orders x always starts early."""
    recording = Recording()
    data = recording.operand((features, 64), "uint8")
    scale = recording.operand((features, 1), "float16")
    x = recording.operand((32, 128), "bfloat16")
    weight = Packed(data, scale, None, None, "int4", "float16", 1, 128, 128)
    config = QuantizedTileConfig(32, 64, 4, warps, 2)
    linear(x, weight, config=config, sms=16, pdl=True)
    assert [launch.early for launch in recording.launches] == [True, early]
    assert all(dict(launch.arguments)["PDL"] for launch in recording.launches)


def test_codes_at_their_limits():
    """Every code there is, and scales of zero."""
    for form in ("int8", "int4", "fp8", "mxfp4"):
        weight, _ = make(form, 16, 256)
        every = np.arange(256, dtype=np.uint8)
        if form == "fp8":
            every[[0x7F, 0xFF]] = 0  # NaN
        data = np.tile(every[: weight.data.shape[1]], (16, 1))
        data = data.view(np.int8) if form == "int8" else data
        scale = get(weight.scale).copy()
        scale[3] = 0
        weight = weight._replace(data=put(data), scale=put(scale))
        meant = get(values(weight, put(np.zeros(1, np.float32))))
        assert np.isfinite(meant).all() and (form == "mxfp4" or not meant[3].any())
        group = meant[0] if weight.bits == 8 else meant[0, :32]  # has one scale
        assert len(np.unique(group)) == {"int8": 256, "int4": 16, "fp8": 253, "mxfp4": 15}[form]
        x = normal(2, 1, 256, dtype=FLOAT32)
        found, sizes = run(x, weight, config=VECTOR), np.abs(x) @ np.abs(meant).T
        assert_close(found, wanted(x, meant), FLOAT32, length=256, scale=sizes + 1)


def test_what_kernels_do_not_know_is_refused():
    assert serves("int4", 64, True) and serves("fp4_e2m1", 16, False) and serves("int8", 0, True)
    assert not serves("int4", 24, False) and not serves("int4", 16, True)
    weight, _ = make("int4", 38, 64)
    x = put(normal(2, 1, 64, dtype=FLOAT32))
    with pytest.raises(ValueError, match="blocks of 24 columns"):
        linear(x, weight._replace(columns=24))
    with pytest.raises(ValueError, match="do not fit x"):
        linear(x, weight._replace(width=96))
    with pytest.raises(ValueError, match="up to 128 rows"):
        linear(x.expand(200, 64), weight)
    with pytest.raises(ValueError, match="no place for a norm"):
        linear(x, weight, norm=NormArguments("rms", x[0], None, EPS), config=TILE)
    with pytest.raises(ValueError, match="does not serve"):
        linear(x, weight, config=FRAGMENT)

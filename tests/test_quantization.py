"""Codes mean what their definitions say, and quantizers find scales as good as any."""

import threading

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales
from hypothesis import given, settings
from hypothesis import strategies as st

from dualinfer import CheckpointError
from dualinfer.quantization import BlockScheme
from dualinfer.quantization import quantize as quantizers
from dualinfer.quantization.meaning import dequantize, spread
from dualinfer.quantization.quantize import SCHEMES, Quantizing, outer_factor, quantize

INT4 = [
    BlockScheme(codes, columns=columns, zeros=codes == "uint4", scale_dtype=dtype)
    for codes in ("int4", "uint4")
    for columns in (0, 32, 64)
    for dtype in ("float32", "bfloat16")
]


class Plain:
    """A source of arrays."""

    description, notes = "the arrays", ()

    def __init__(self, **arrays):
        self._arrays = arrays

    def names(self):
        return [*self._arrays]

    def shape(self, name):
        return self._arrays[name].shape

    def dtype(self, name):
        return self._arrays[name].dtype.name

    def read(self, name, index=None):
        return self._arrays[name][index if index is not None else ...]


def weights(rows=13, width=150, seed=0):
    rng = np.random.default_rng(seed)
    matrix = rng.standard_t(4, (rows, width)).astype(np.float32) / 50
    matrix[1], matrix[2] = 0, 1e-30 * matrix[2]
    matrix[3] = abs(matrix[3])
    return matrix


def values_of(scheme, made, outer=None):
    plain = scheme.code.decode(made.codes)
    if made.zero is not None:
        plain = plain - spread(scheme, made.zero, plain.shape)
    values = plain * spread(scheme, made.scale, plain.shape)
    return values if outer is None else values * outer


@pytest.mark.parametrize("codes", ["fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "int8", "uint4", "table"])
def test_every_code_is_the_nearest_to_what_it_means(codes):
    table = tuple(np.linspace(-1, 1, 16).tolist()) if codes == "table" else ()
    scheme = BlockScheme(codes, table=table)
    every = np.arange(1 << scheme.code.bits, dtype=np.uint8).view(scheme.code.stored)
    values = scheme.code.decode(every)
    finite = np.isfinite(values) & (np.abs(values) > 0)
    assert np.array_equal(scheme.code.encode(values[finite]), every[finite])
    assert np.isnan(BlockScheme("fp8_e4m3").code.decode(np.uint8([0x7F]))).all()


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(["fp8_e4m3", "fp4_e2m1", "int8"]), st.floats(-1000, 1000, width=32))
def test_no_code_is_nearer(codes, value):
    code = BlockScheme(codes).code
    every = code.decode(np.arange(1 << code.bits, dtype=np.uint8).view(code.stored))
    every = every[np.isfinite(every)].astype(np.float64)
    own = float(code.decode(code.encode(np.float32([value])))[0])
    assert abs(own - value) == abs(every - value).min()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_scales_of_rows_are_those_of_compressed_tensors(kind, dtype):
    matrix = torch.tensor(weights()).to(getattr(torch, dtype))
    how = {"int8": "int", "fp8": "float"}[kind]
    args = QuantizationArgs(num_bits=8, type=how, strategy="channel")
    expected, _ = calculate_qparams(matrix.amin(-1), matrix.amax(-1), args)
    array = matrix.float().numpy().astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    made = Quantizing(Plain(w=array), "w", SCHEMES[kind])
    assert made.scale().dtype.name == dtype
    assert np.array_equal(made.scale()[:, 0].astype(np.float32), expected.float().numpy())
    step = abs(dequantize(made) - array.astype(np.float32)) / made.scale().astype(np.float32)
    assert step.max() <= (1 if kind == "int8" else 17)


@pytest.mark.parametrize("scheme", INT4, ids=lambda s: s.name + s.scale_dtype)
@pytest.mark.parametrize("seed", range(2))
def test_no_group_of_int4_errs_more_than_by_min_and_max(scheme, seed):
    matrix = weights(seed=seed)
    made = quantize(matrix, scheme)
    columns = scheme.columns or matrix.shape[1]
    args = QuantizationArgs(num_bits=4, symmetric=not scheme.zeros, strategy="channel")
    errors = [0.0, 0.0]
    for start in range(0, matrix.shape[1], columns):
        group = matrix[:, start : start + columns]
        low, high = (torch.tensor(f(group, 1)) for f in (np.min, np.max))
        scale, zero = calculate_qparams(low, high, args)
        scale = scale.numpy().astype(made.scale.dtype).astype(np.float32)[:, None]
        scale = np.where(scale == 0, np.float32(ml_dtypes.finfo(made.scale.dtype).eps), scale)
        zero = zero.numpy().astype(np.float32)[:, None]
        codes = np.rint(group / scale + zero).clip(-8, 7)
        plain = ((group - (codes - zero) * scale) ** 2).sum(1)
        own = ((group - values_of(scheme, made)[:, start : start + columns]) ** 2).sum(1)
        assert (own <= plain * (1 + 1e-5)).all()
        errors[0] += float(own.sum())
        errors[1] += float(plain.sum())
    assert errors[0] < (0.97 if not scheme.zeros else 1) * errors[1]


def test_scales_of_nvfp4_are_those_of_compressed_tensors():
    matrix = weights(width=160)
    matrix[2] *= 1e30
    scheme = SCHEMES["nvfp4"]
    whole = generate_gparam(torch.tensor(matrix.min()), torch.tensor(matrix.max()))
    outer = outer_factor(float(abs(matrix).max()))
    np.testing.assert_allclose(1 / outer, whole.item(), rtol=1e-6)
    made = quantize(matrix, scheme, outer)
    args = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16,
        scale_dtype=torch.float8_e4m3fn, zp_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    groups = torch.tensor(matrix).reshape(13, 10, 16)
    expected, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=whole)
    same = made.scale.astype(np.float32) == expected.float().numpy()
    assert same.mean() > 0.99  # a rounding of the second factor apart
    values = values_of(scheme, made, outer)
    assert np.sqrt(((values - matrix) ** 2).mean() / (matrix**2).mean()) < 0.12


def test_scales_of_mxfp4_are_those_of_compressed_tensors():
    matrix = weights(width=160) * np.float32(2) ** np.arange(-100, 95, 15, np.float32)[:, None]
    matrix[3, :32] = 0
    made = quantize(matrix, SCHEMES["mxfp4"])
    most = abs(matrix).reshape(13, 5, 32).max(-1)
    expected = generate_mx_scales(torch.tensor(most)).clamp(0, 254).numpy()
    assert np.array_equal(made.scale.view(np.uint8)[most > 0], expected[most > 0])
    assert not made.codes[3, :32].any()


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "nvfp4", "mxfp4"])
def test_slices_and_transposes_are_parts_of_the_whole(name, monkeypatch):
    matrix = weights(37, 81)
    one = Quantizing(Plain(w=matrix), "w", SCHEMES[name])
    other = Quantizing(Plain(w=np.ascontiguousarray(matrix.T)), "w", SCHEMES[name], True)
    monkeypatch.setattr("dualinfer.quantization.quantize._READ", 200)
    whole = dequantize(one)
    assert np.array_equal(whole, dequantize(other)) and other.shape == (37, 81)
    part = other.codes(slice(5, 9), slice(3, 70))
    assert np.array_equal(part, one.codes(slice(0, 37), slice(0, 81))[5:9, 3:70])
    error = np.sqrt(((whole - matrix) ** 2).sum() / (matrix**2).sum())
    assert error < {"int8": 0.02, "int4": 0.13, "fp8": 0.04, "nvfp4": 0.13, "mxfp4": 0.16}[name]


def test_rows_are_quantized_in_several_threads_at_once(monkeypatch):
    monkeypatch.setattr(quantizers, "_THREADS", 2)
    monkeypatch.setattr(quantizers, "_READ", 500)
    meeting, own = threading.Barrier(2, timeout=60), quantizers.quantize
    monkeypatch.setattr(quantizers, "quantize", lambda *given: meeting.wait() * 0 or own(*given))
    matrix = weights(12, 250)
    made = Quantizing(Plain(w=matrix), "w", SCHEMES["int4"])
    assert np.array_equal(made.scale(), own(matrix, SCHEMES["int4"]).scale)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_no_scale_can_hold_is_refused(value):
    matrix = weights()
    matrix[4, 4] = value
    with pytest.raises(CheckpointError, match="w of the arrays has values that are no finite"):
        Quantizing(Plain(w=matrix), "w", SCHEMES["int8"]).scale()

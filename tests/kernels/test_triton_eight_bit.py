"""Triton's products of codes with codes: inputs become codes as plain ops make them."""

import importlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dualinfer
from dualinfer.arrays import to_numpy
from dualinfer.model.weights import Weight
from dualinfer.quantization import Activation, BlockScheme

from ..cases import make_model
from ..models import relative_rms
from .cases import normal
from .jax_ops import interpreted_ops
from .tensors import INTERPRETED, get, needs_triton, put, strict, torch
from .test_triton_linear import EPS, FLOAT32, norm_of, wanted
from .test_triton_quantized import BFLOAT16, FORMS, make

from dualinfer.kernels.triton import eight_bit, linear, norm as norms  # isort: skip

pytestmark = [needs_triton, pytest.mark.usefixtures(strict.__name__)]

BLOCKS = BlockScheme("fp8_e4m3", rows=24, columns=128)
CASES = [(FORMS["int8"], 0), (FORMS["fp8"], 0), (FORMS["fp8 tensor"], 0), (BLOCKS, 128)]
SMALL = eight_bit.EightBitConfig(64, 32, 128, 4, 2)


def meant_by(codes: str, x: eight_bit.Codes) -> np.ndarray:
    """float64 of codes and their scales."""
    data, scale = get(x.data), get(x.scale).astype(np.float64)
    values = data if codes == "int8" else data.view(ml_dtypes.float8_e4m3fn)
    scale = scale.reshape(*data.shape[:-1], -1)
    width = data.shape[-1]
    each = eight_bit.GROUP if scale.shape[-1] > 1 else width
    return values.astype(np.float64) * np.repeat(scale, each, -1)[..., :width]


def inputs(dtype: Any, *shape: int) -> np.ndarray:
    """Rows of several sizes, one of zeros, and one with ties and an outlier."""
    x = normal(4, *shape, dtype=FLOAT32) * np.logspace(-3, 3, shape[0], dtype=FLOAT32)[:, None]
    x[1] = 0
    x[2, :] = np.arange(shape[1]) % 9 - 4.5
    x[2, 0] = 127.5
    return x.astype(dtype)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize("how", ["token", "group", "given"])
@pytest.mark.parametrize("codes", ["int8", "fp8_e4m3"])
def test_codes_of_inputs_are_those_of_plain_ops(codes, how, dtype):
    from dualinfer.backends.torch.ops.schemes import SCHEMES

    x = inputs(dtype, 7, 304)
    block = 128 if how == "group" else 0
    given = put(np.float32(0.37)) if how == "given" else None
    scheme = BlockScheme(codes, activation=Activation(codes, given is None, block))
    beside = {} if given is None else {"input": given}
    weight = Weight(put(np.zeros((1, 304), np.uint8)), ("out", "in"), scheme=scheme, beside=beside)
    expected = get(SCHEMES.quantize_input(put(x), weight)).astype(FLOAT32)
    found = eight_bit.quantize(put(x), codes, block, scale=given)
    values = get(put(meant_by(codes, found).astype(FLOAT32)).to(put(x).dtype)).astype(FLOAT32)
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("kind", ["rms", "rms_offset", "layer"])
def test_a_norm_in_front_is_rounded_as_one_on_its_own(kind):
    x = put(inputs(BFLOAT16, 7, 304))
    kind, *arrays = norm_of(kind, BFLOAT16, 304)
    gain, bias = (None if a is None else put(a) for a in arrays)
    if bias is None:
        normed = norms.rms_norm(x, gain, EPS, unit_offset=kind == "rms_offset")
    else:
        normed = norms.layer_norm(x, gain, bias, EPS)
    apart = eight_bit.quantize(normed, "fp8_e4m3")
    fused = eight_bit.quantize(x, "fp8_e4m3", norm=linear.NormArguments(kind, gain, bias, EPS))
    np.testing.assert_array_equal(get(fused.data), get(apart.data))
    np.testing.assert_array_equal(get(fused.scale), get(apart.scale))


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(("scheme", "block"), CASES, ids=["int8", "fp8", "tensor", "blocks"])
def test_products_are_those_of_what_codes_mean(scheme, block, gated):
    codes = scheme.codes
    weight, meant = make(scheme, 136 if gated else 68, 304)
    x = eight_bit.quantize(put(normal(2, 70, 304, dtype=BFLOAT16)), codes, block)
    how: dict[str, Any] = {"activation": "silu", "gated": True} if gated else {}
    how["residual"] = normal(5, 70, 68, dtype=BFLOAT16)
    bias = normal(3, weight.data.shape[0], dtype=BFLOAT16)
    expected = wanted(meant_by(codes, x), meant, bias, **how)
    given = {k: put(v) if isinstance(v, np.ndarray) else v for k, v in how.items()}
    y = eight_bit.linear(x, weight, put(bias), dtype=torch.bfloat16, config=SMALL, **given)
    error = get(y).astype(np.float64) - expected
    assert np.sqrt((error**2).mean()) < 4e-3 * np.sqrt((expected**2).mean())


def test_sums_of_int8_are_exact():
    weight, _ = make("int8", 40, 304)
    one = put(np.ones((40, 1), FLOAT32))
    x = eight_bit.quantize(put(normal(2, 70, 304, dtype=BFLOAT16)), "int8")
    x = x._replace(scale=put(np.ones((70, 1), FLOAT32)))
    weight = weight._replace(scale=one, scale_dtype="float32")
    y = get(eight_bit.linear(x, weight, dtype=torch.float32, config=SMALL))
    exact = get(x.data).astype(np.int64) @ get(weight.data).astype(np.int64).T
    np.testing.assert_array_equal(y, exact.astype(FLOAT32))


def test_what_the_kernels_do_not_know_is_refused():
    weight, _ = make("int8", 40, 304)
    assert not eight_bit.serves(weight, "fp8_e4m3", 0) and not eight_bit.serves(weight, "int8", 64)
    x = eight_bit.quantize(put(normal(2, 70, 304, dtype=BFLOAT16)), "int8")
    with pytest.raises(ValueError, match="No kernel multiplies"):
        eight_bit.linear(x, weight._replace(columns=64), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="do not fit codes"):
        eight_bit.linear(x._replace(scale=x.scale[:5]), weight, dtype=torch.bfloat16)


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="compares with plain ops on a CPU")
@pytest.mark.filterwarnings("ignore:.*encountered in .*:RuntimeWarning")
@pytest.mark.parametrize(("backend", "quant"), [("torch", "fp8_w8a8"), ("jax", "int8_w8a8")])
def test_prompts_of_engines_are_multiplied_in_8_bits(backend, quant, monkeypatch):
    """66 rows of a model quantized while it is loaded, as near to the whole one as plain ops."""
    module = importlib.import_module(f"dualinfer.backends.{backend}")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = make_model("llama-gqa", vocab_size=97, **sizes)
    how = {"backend": backend, "dtype": "bf16", "replace_with_kernel_inject": True}
    ids = np.random.default_rng(1).integers(3, 97, (1, 66))
    plain = dualinfer.init_inference(model, use_triton=False, quant=quant, **how)

    def make_ops(*args: Any) -> Any:
        if backend == "jax":
            return interpreted_ops()
        kernels = importlib.import_module("dualinfer.backends.torch.ops.kernels")
        return kernels.KernelOps(args[2])

    shapes, product = [], eight_bit.product
    monkeypatch.setattr(module, "_make_ops", make_ops)

    def noted(x: Any, *args: Any, **options: Any) -> Any:
        shapes.append((x.shape[-1], options["norm"] is not None))
        return product(x, *args, **options)

    monkeypatch.setattr(eight_bit, "product", noted)
    fast = dualinfer.init_inference(model, quant=quant, **how)
    exact = dualinfer.init_inference(model, use_triton=False, **how | {"dtype": "fp32"})
    found, same, whole = (to_numpy(e(ids).logits).astype(FLOAT32) for e in (fast, plain, exact))
    heads = model.config.num_attention_heads * model.config.head_dim
    assert set(shapes) == {(32, True), (heads, False), (48, False)}
    assert relative_rms(found, whole) < 1.15 * relative_rms(same, whole) < 0.2

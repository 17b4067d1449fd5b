"""torchao checkpoints mean what torchao takes them for, in every plain layout."""

import json

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from torchao import quantization as ao
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization.quantize_.common import KernelPreference
from torchao.quantization.quantize_.workflows import (
    Float8Tensor,
    Int4Tensor,
    Int8Tensor,
    QuantizeTensorToFloat8Kwargs,
    QuantizeTensorToInt8Kwargs,
)

import dualinfer
from dualinfer import CheckpointError, UnsupportedError
from dualinfer.checkpoint.sources import open_checkpoint
from dualinfer.quantization.scheme import Activation

from .formats import (
    check_logits,
    check_shapes,
    check_slices,
    dense_model,
    edit,
    open_folder,
    values,
)
from .models import BACKENDS, VOCAB, on_backends, random_ids, relative_rms

pytestmark = pytest.mark.usefixtures("greedy")

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
# What transformers quantizes with: the codes, and how inputs are quantized.
FORMS = {
    "int8": (ao.Int8WeightOnlyConfig(version=2), "int8", None),
    "int8-groups": (
        ao.Int8WeightOnlyConfig(version=2, granularity=ao.PerGroup(32)),
        "int8",
        None,
    ),
    "int8-dynamic": (
        ao.Int8DynamicActivationInt8WeightConfig(version=2),
        "int8",
        Activation("int8"),
    ),
    "fp8": (ao.Float8WeightOnlyConfig(), "fp8_e4m3", None),
    "int4-unpacked": (
        ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(32)),
        "int4",
        None,
    ),
    "int4-unpacked-asymmetric": (
        ao.IntxWeightOnlyConfig(
            torch.int4, ao.PerGroup(16), mapping_type=ao.MappingType.ASYMMETRIC
        ),
        "int4",
        None,
    ),
    "int8-unpacked-asymmetric": (
        ao.IntxWeightOnlyConfig(torch.int8, ao.PerAxis(0), mapping_type=ao.MappingType.ASYMMETRIC),
        "uint8",
        None,
    ),
    "int8-unpacked-dynamic": (
        ao.Int8DynamicActivationIntxWeightConfig(torch.int8, ao.PerAxis(0)),
        "int8",
        Activation("int8", zeros=True),
    ),
}
Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A function from a form to a folder that transformers wrote."""
    top = tmp_path_factory.mktemp("torchao")
    torch.manual_seed(0)
    hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)).save_pretrained(top / "plain")

    def make(form):
        if not (top / form).exists():
            config = hf.TorchAoConfig(FORMS[form][0], modules_to_not_convert=["lm_head", UP])
            model = hf.AutoModelForCausalLM.from_pretrained(
                top / "plain", quantization_config=config, dtype=torch.float32
            )
            model.save_pretrained(top / form)
        return top / form

    return make


@pytest.mark.parametrize("form", FORMS)
def test_matrices_are_what_torchao_dequantizes(form, folders):
    folder = folders(form)
    oracle = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    opener = open_folder(folder)
    _, codes, activation = FORMS[form]
    for module in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
        name = f"model.layers.0.{module}"
        matrix = opener(f"{name}.weight")
        assert (matrix.scheme.codes, matrix.scheme.activation) == (codes, activation)
        assert matrix.scheme.zeros == form.endswith("asymmetric")
        expected = oracle.get_submodule(name).weight.dequantize().numpy()
        np.testing.assert_array_equal(values(matrix), expected)
        check_slices(matrix)
    check_shapes(folder, f"{name}.weight")
    assert opener(f"{UP}.weight") is None
    assert opener("model.embed_tokens.weight") is None


@pytest.mark.parametrize(
    ("form", "backend"),
    on_backends(
        ["int8-groups", "fp8", "int4-unpacked-asymmetric", "int8-unpacked-asymmetric"],
        ["int8-groups", "fp8", "int4-unpacked-asymmetric"],
    ),
)
def test_logits_are_those_of_the_dequantized_weights(form, backend, folders):
    check_logits(folders(form), backend)


@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_written_for_devices_says_what_its_tensors_are(tp, folders, tmp_path):
    ids, saved = random_ids(2, 9), str(tmp_path / "out")
    settings = {"tensor_parallel": {"tp_size": tp}, "save_mp_checkpoint_path": saved}
    folder = folders("int4-unpacked-asymmetric")
    with dualinfer.init_inference(str(folder), backend="jax", dtype="fp32", **settings) as engine:
        expected = np.asarray(engine(ids).logits)
    with dualinfer.init_inference(saved, backend="torch", dtype="fp32") as engine:
        assert relative_rms(engine(ids).logits, expected) < 1e-5
        assert "int4, groups of 16, zero points" in engine.report().weights
    if tp == 1:
        oracle = hf.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
        with torch.no_grad():
            assert relative_rms(oracle(torch.as_tensor(ids)).logits.numpy(), expected) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_in_int8_are_as_torchao_rounds_them(backend, folders):
    folder, ids = folders("int8-dynamic"), random_ids(2, 9)
    oracle = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with (
        torch.no_grad(),
        dualinfer.init_inference(str(folder), backend=backend, dtype="fp32") as engine,
    ):
        expected = oracle(torch.as_tensor(ids)).logits.numpy()
        weights_only = dense_model(folder)(torch.as_tensor(ids)).logits.numpy()
        found = relative_rms(engine(ids).logits, expected)
    # The largest input of a token lies at -127.5 steps or beside it: torchao multiplies by the
    # scale's reciprocal, which is another rounding, where this divides as compressed-tensors does.
    assert found < relative_rms(weights_only, expected) / 1.5


def write(folder, tensor, **config):
    """A folder whose only weight is a tensor of torchao's, which this CPU could not quantize."""
    folder.mkdir()
    tensors, metadata = flatten_tensor_state_dict({"layer.weight": tensor})
    save_file(tensors, folder / "model.safetensors", metadata)
    config = {"quantization_config": {"quant_method": "torchao", "quant_type": {}, **config}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def fp8(weight, granularity, **fields):
    kwargs = QuantizeTensorToFloat8Kwargs(granularity=granularity, **fields)
    return Float8Tensor.from_hp(
        weight,
        granularity=granularity,
        act_quant_kwargs=kwargs,
        kernel_preference=KernelPreference.TORCH,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_with_inputs_in_fp8(dtype, tmp_path):
    weight = torch.randn(24, 40, dtype=dtype)
    tensor = fp8(weight, ao.PerRow())
    matrix = open_folder(write(tmp_path / "rows", tensor))("layer.weight")
    assert matrix.scheme.activation == Activation("fp8_e4m3")
    np.testing.assert_array_equal(values(matrix), tensor.dequantize(torch.float32).numpy())
    check_slices(matrix)
    with pytest.raises(UnsupportedError, match=r"(?s)PerTensor.*PerRow"):
        open_folder(write(tmp_path / "tensor", fp8(weight, ao.PerTensor())))("layer.weight")


def test_int8_with_a_static_scale_of_inputs(tmp_path):
    weight = torch.randn(24, 40)
    static = QuantizeTensorToInt8Kwargs(granularity=ao.PerTensor())
    tensor = Int8Tensor.from_hp(
        weight, ao.PerRow(), act_quant_kwargs=static, act_quant_scale=torch.tensor([[0.125]])
    )
    matrix = open_folder(write(tmp_path / "static", tensor))("layer.weight")
    assert matrix.scheme.activation == Activation("int8", dynamic=False)
    assert matrix.input_scale() == np.float32(0.125)
    np.testing.assert_array_equal(values(matrix), tensor.dequantize().numpy())


@pytest.mark.parametrize("asymmetric", [False, True])
def test_plain_int4(asymmetric, tmp_path):
    """As mslk defines it, which has no kernels for a CPU: q * scale + zero, low nibbles first."""
    q = torch.randint(-8, 8, (24, 64))
    scale = (torch.rand(2, 24) * 0.1 + 0.01).bfloat16()
    steps = torch.randint(-8, 8, (2, 24)) if asymmetric else torch.zeros(2, 24)
    # a power of two, so that the zero point is a code's whole number of scales in bfloat16
    scale = torch.exp2(torch.floor(torch.log2(scale.float()))).bfloat16()
    zero = (-steps * scale).bfloat16()
    packed = ((q[:, ::2] & 15) | ((q[:, 1::2] & 15) << 4)).to(torch.uint8).view(torch.int8)
    tensor = Int4Tensor(packed, scale, zero, [1, 32], torch.Size([24, 64]))
    matrix = open_folder(write(tmp_path / "int4", tensor))("layer.weight")
    assert matrix.scheme.zeros == asymmetric
    spread = [x.float().T.repeat_interleave(32, 1) for x in (scale, zero)]
    expected = q.float() * spread[0] + spread[1]
    np.testing.assert_array_equal(values(matrix), expected.numpy())
    check_slices(matrix)
    odd = Int4Tensor(packed, scale, zero + scale / 2, [1, 32], torch.Size([24, 64]))
    with pytest.raises(UnsupportedError, match=r"_weight_zero_point.*IntxWeightOnlyConfig"):
        open_folder(write(tmp_path / "odd", odd))("layer.weight")


@pytest.mark.parametrize("kind", ["Int4TilePackedTo4dTensor", "MXTensor", "NVFP4Tensor"])
def test_kernel_layouts_are_refused_by_name(kind, folders):
    described = {f"{Q}.weight": json.dumps({"_type": kind, "_data": {}})}
    opener = open_folder(edit(folders("int8"), lambda tensors: None, described))
    with pytest.raises(UnsupportedError, match=f"{kind}.*plain"):
        opener(f"{Q}.weight")


@pytest.mark.parametrize("text", ["", "[]", '{"_type": 3}', "[" * 5000])
def test_a_header_that_describes_no_tensor_is_an_error(text, folders):
    opener = open_folder(edit(folders("int8"), lambda tensors: None, {f"{Q}.weight": text}))
    with pytest.raises(CheckpointError, match="the header describes"):
        opener(f"{Q}.weight")


def test_what_is_not_served_is_refused_by_name(folders, tmp_path):
    with pytest.raises(UnsupportedError, match="tomorrow"):
        open_folder(folders("int8"), tomorrow=1)
    with pytest.raises(CheckpointError, match="modules_to_not_convert"):
        open_folder(folders("int8"), modules_to_not_convert=[Q])(f"{Q}.weight")
    pre = Int8Tensor.from_hp(torch.randn(8, 16), ao.PerRow(), act_pre_scale=torch.ones(16))
    with pytest.raises(UnsupportedError, match="act_pre_scale"):
        open_folder(write(tmp_path / "scaled", pre))("layer.weight")
    bounded = fp8(torch.randn(8, 16), ao.PerRow(), hp_value_ub=3.0)
    with pytest.raises(UnsupportedError, match="hp_value_ub"):
        open_folder(write(tmp_path / "bounded", bounded))("layer.weight")
    two = Int8Tensor.from_hp(torch.randn(8, 16), ao.PerRow())
    folder = write(tmp_path / "pickled", two)
    save_file({"layer._weight_qdata": two.qdata}, folder / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"pickled.*Save it as safetensors"):
        open_folder(folder)


def test_a_pickled_checkpoint_is_refused(tmp_path):
    weight = Int8Tensor.from_hp(torch.randn(8, 16), ao.PerRow())
    torch.save({"layer.weight": weight}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"torchao's are not\. .* as safetensors"):
        open_checkpoint(tmp_path)


DAMAGE = {
    "no scale": (lambda t: t.pop(f"{Q}._weight_scale"), "_weight_scale is missing"),
    "no codes": (lambda t: t.pop(f"{Q}._weight_qdata"), "_weight_qdata is missing"),
    "NaN": (lambda t: t[f"{Q}._weight_scale"].fill_(torch.nan), "_weight_scale holds nan"),
    "fewer scales": (
        lambda t: t.update({f"{Q}._weight_scale": t[f"{Q}._weight_scale"][:-1].clone()}),
        "_weight_scale has the shape",
    ),
    "codes of another dtype": (
        lambda t: t.update({f"{Q}._weight_qdata": t[f"{Q}._weight_qdata"].float()}),
        "_weight_qdata is float32",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_tensors_are_named(case, folders):
    change, message = DAMAGE[case]
    with pytest.raises(CheckpointError, match=message):
        open_folder(edit(folders("int8"), change))(f"{Q}.weight").scale()

"""fp8, ModelOpt and mxfp4 checkpoints mean what transformers and compressed-tensors say."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as hf
from compressed_tensors.entrypoints.convert import FP8BlockDequantizer, ModelOptNvfp4Converter
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import dualinfer
from dualinfer import CheckpointError, UnsupportedError
from dualinfer.checkpoint.described.hf_config import read_config
from dualinfer.checkpoint.sources import open_checkpoint
from dualinfer.quantization import read_quantization
from dualinfer.quantization.formats import METHODS, find_method
from dualinfer.quantization.formats.modelopt import FILE
from dualinfer.quantization.scheme import Activation

from .compressed import SIZES
from .compressed import write as write_compressed
from .formats import (
    check_logits,
    check_shapes,
    check_slices,
    dense_model,
    edit,
    open_folder,
    values,
)
from .models import on_backends, random_ids, relative_rms
from .test_compressed_tensors import emulated, logits_of_hf, scheme, unrest

pytestmark = pytest.mark.usefixtures("greedy")

Q = "model.layers.0.self_attn.q_proj"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
BYTES = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A function to write a tiny Llama's folder, `change`d, with a quantization_config or none."""
    torch.manual_seed(4)  # so that no input lies near a tie
    config = hf.LlamaConfig(**SIZES)
    model = hf.LlamaForCausalLM(config).eval()
    top = tmp_path_factory.mktemp("fp8")

    def write(name, change, quantization=None):
        folder = top / name
        if not folder.exists():
            model.save_pretrained(folder)
            tensors = load_file(folder / "model.safetensors")
            for key in [k for k in tensors if k.endswith("_proj.weight")]:
                change(key.removesuffix(".weight"), tensors)
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
            fields = json.loads((folder / "config.json").read_text())
            if quantization:
                fields["quantization_config"] = quantization
            (folder / "config.json").write_text(json.dumps(fields))
        return folder

    return write


def blocks_of(size, scale_fmt="float"):
    """What quantizes as transformers does."""
    config = hf.FineGrainedFP8Config(weight_block_size=size, scale_fmt=scale_fmt)
    quantizer = Fp8Quantize(SimpleNamespace(quantization_config=config))

    def change(module, tensors):
        made = quantizer._quantize_one(f"{module}.weight", tensors[f"{module}.weight"])
        tensors |= {key: value.contiguous() for key, value in made.items()}

    return change


def one_scale(module, tensors, *, weight="weight_scale_inv", given="activation_scale"):
    matrix = tensors[f"{module}.weight"]
    scale = matrix.abs().amax() / 448
    tensors[f"{module}.weight"] = (matrix / scale).to(BYTES)
    tensors[f"{module}.{weight}"] = scale
    # one of a fused projection has another, so that they are multiplied one by one
    tensors[f"{module}.{given}"] = torch.tensor(0.025 if "v_proj" in module else 0.02)


def mistral(module, tensors):
    one_scale(module, tensors, weight="qscale_weight", given="qscale_act")


def auto_fp8(module, tensors):
    one_scale(module, tensors, weight="weight_scale", given="input_scale")


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_blocks_are_what_transformers_dequantizes(scale_fmt, llama):
    config = FP8 | {"scale_fmt": scale_fmt}
    folder = llama(f"blocks-{scale_fmt}", blocks_of((16, 32), scale_fmt), config)
    opener, tensors = open_folder(folder), load_file(folder / "model.safetensors")
    dequantizer = Fp8Dequantize(None)
    count = 0
    for name in [key for key in tensors if key.endswith("_proj.weight")]:
        scale = tensors[name.replace(".weight", ".weight_scale_inv")]
        expected = dequantizer._dequantize_one(tensors[name], scale, torch.float32)
        np.testing.assert_array_equal(values(opener(name)), expected)
        count += 1
    assert count == 14 and opener("lm_head.weight") is None
    first = opener(f"{Q}.weight")
    assert first.scheme.activation == Activation("fp8_e4m3", block=32)
    check_slices(first)
    check_shapes(folder, f"{Q}.weight")
    loaded = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    np.testing.assert_allclose(
        values(first), loaded.get_submodule(Q).weight.detach().float(), rtol=2**-8
    )


ODD = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def odd_blocks(module, tensors):
    """Blocks of 128 x 128 of matrices that have no whole number of them."""
    matrix = tensors[f"{module}.weight"]
    rows, columns = (torch.arange(size) // 128 for size in matrix.shape)
    scale = torch.zeros(rows.max() + 1, columns.max() + 1)
    for i in range(len(scale)):
        for j in range(scale.shape[1]):
            scale[i, j] = matrix[rows == i][:, columns == j].abs().amax() / 448
    tensors[f"{module}.weight"] = (matrix / scale[rows][:, columns]).to(BYTES)
    tensors[f"{module}.weight_scale_inv"] = scale


def test_blocks_that_do_not_divide_the_matrix_end_with_it(llama):
    folder = llama("odd", odd_blocks, ODD)
    tensors = load_file(folder / "model.safetensors")
    converter = FP8BlockDequantizer(targets=["re:.*_proj$"], weight_block_size=(128, 128))
    opener, expected = open_folder(folder), converter.process(dict(tensors))
    for kind in ("self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"):
        name = f"model.layers.1.{kind}.weight"
        matrix = opener(name)
        assert max(matrix.scale().shape) == (1 if "attn" in kind else 2)
        np.testing.assert_allclose(values(matrix), expected[name].float(), rtol=2**-8)
        check_slices(matrix)
        assert matrix.scheme.activation.block == 128


@pytest.mark.parametrize("change", [one_scale, mistral, auto_fp8])
def test_one_scale_of_weights_and_of_inputs_whatever_they_are_called(change, llama):
    folder = llama(change.__name__, change, STATIC)
    matrix = open_folder(folder)(f"{Q}.weight")
    tensors = load_file(folder / "model.safetensors")
    scale = next(t for n, t in tensors.items() if n.startswith(Q) and "weight" in n and not t.dim())
    expected = tensors[f"{Q}.weight"].float() * scale
    np.testing.assert_array_equal(values(matrix), expected)
    check_shapes(folder, f"{Q}.weight")
    np.testing.assert_allclose(matrix.input_scale(), 0.02, rtol=1e-6)
    assert matrix.scheme.activation == Activation("fp8_e4m3", dynamic=False)
    assert len(matrix.stored) == 3
    dynamic = open_folder(folder, activation_scheme="dynamic")(f"{Q}.weight")
    assert dynamic.scheme.activation == Activation("fp8_e4m3")
    assert dynamic.input_scale() is None and dynamic.stored == matrix.stored


@pytest.mark.parametrize("field", ["modules_to_not_convert", "ignored_layers"])
def test_modules_that_are_left_out_are_told_as_transformers_does(field, llama):
    def change(module, tensors):
        if not module.startswith("model.layers.1."):
            blocks_of((16, 32))(module, tensors)

    folder = llama("left-out", change, FP8)
    opener = open_folder(folder, **{field: ["model.layers.1", "lm_head"]})
    assert opener("model.layers.1.mlp.up_proj.weight") is None
    assert opener(f"{Q}.weight") is not None
    for patterns in (["q_proj"], ["model.layers.0"], ["model.*attn"], ["model.layers.[0]"]):
        with pytest.raises(CheckpointError, match="is not quantized"):
            open_folder(folder, **{field: patterns})(f"{Q}.weight")
    assert open_folder(folder, **{field: ["model.layers.0.self_attn.q"]})(f"{Q}.weight")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"activation_scheme": "none"}, "activation_scheme"),
        ({"weight_block_size": [128]}, "weight_block_size"),
        ({"expert_dtype": "fp4"}, "expert_dtype"),
        ({"fmt": "e5m2"}, "fmt"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        ({"kv_cache_quant": True}, "kv_cache_quant"),
    ],
)
def test_fields_of_fp8_that_are_not_served_are_refused(fields, match, llama):
    folder = llama("blocks-float", blocks_of((16, 32)), FP8 | {"scale_fmt": "float"})
    with pytest.raises(UnsupportedError, match=match):
        open_folder(folder, **fields)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (None, "weight_scale_inv is missing"),
        (torch.full((6, 3), torch.inf), "inf at"),
        (torch.ones(3, 6), r"expected \(6, 3\)"),
        (torch.ones(6, 3, dtype=torch.int32), "is int32"),
    ],
)
def test_scales_that_do_not_fit_are_refused(value, match, llama):
    folder = llama("blocks-float", blocks_of((16, 32)), FP8 | {"scale_fmt": "float"})

    def change(tensors):
        tensors.pop(f"{Q}.weight_scale_inv")
        if value is not None:
            tensors[f"{Q}.weight_scale_inv"] = value

    opener = open_folder(edit(folder, change))
    with pytest.raises(CheckpointError, match=match):
        values(opener(f"{Q}.weight"))


ROWS, BLOCKS = "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"


def by_rows(module, tensors):
    matrix = tensors[f"{module}.weight"]
    scale = matrix.abs().amax(1) / 448
    tensors[f"{module}.weight"] = (matrix / scale[:, None]).to(BYTES)
    tensors[f"{module}.weight_scale"] = scale


def by_blocks(module, tensors):
    odd_blocks(module, tensors)
    scale = tensors.pop(f"{module}.weight_scale_inv")
    tensors[f"{module}.weight_scale"] = scale[:, None, :, None].contiguous()


MODELOPT = {
    "FP8": (auto_fp8, Activation("fp8_e4m3", dynamic=False)),
    ROWS: (by_rows, Activation("fp8_e4m3")),
    BLOCKS: (by_blocks, None),
}


@pytest.mark.parametrize("algorithm", MODELOPT)
def test_fp8_of_modelopt_is_told_by_its_own_file(algorithm, llama):
    change, activation = MODELOPT[algorithm]
    folder = llama(f"modelopt-{algorithm}", change)
    told = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    (folder / FILE).write_text(json.dumps({"producer": {}, "quantization": told}))
    config = read_config(folder).to_dict()["quantization_config"]
    opener = METHODS[find_method(config)](config, open_checkpoint(folder))
    check_shapes(folder, "model.layers.1.mlp.down_proj.weight")
    tensors = load_file(folder / "model.safetensors")
    for module in (Q, "model.layers.1.mlp.down_proj"):
        matrix, scale = opener(f"{module}.weight"), tensors[f"{module}.weight_scale"]
        if algorithm == BLOCKS:
            scale = scale.squeeze((1, 3))
            rows, columns = (torch.arange(size) // 128 for size in matrix.shape)
            scale = scale[rows][:, columns]
        scale = scale[:, None] if algorithm == ROWS else scale
        np.testing.assert_array_equal(values(matrix), tensors[f"{module}.weight"].float() * scale)
        assert matrix.scheme.activation == activation
        assert (matrix.input_scale() is None) == (algorithm != "FP8")
    assert opener("lm_head.weight") is None


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory):
    """A folder of compressed-tensors' NVFP4, and the same in ModelOpt's form."""
    top = tmp_path_factory.mktemp("nvfp4")
    compressed = write_compressed(top / "ct", {"group_0": scheme("NVFP4")})
    tensors = load_file(compressed / "model.safetensors")
    for name in list(tensors):
        module, _, part = name.rpartition(".")
        if part == "weight_packed":
            tensors[f"{module}.weight"] = tensors.pop(name)
        elif part == "weight_global_scale":
            tensors[f"{module}.weight_scale_2"] = 1 / tensors.pop(name)[0]
        elif part == "input_global_scale":
            tensors[f"{module}.input_scale"] = 1 / tensors.pop(name)[0]
    folder = top / "modelopt"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((compressed / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "producer": {"name": "modelopt", "version": "0.40"},
        "config_groups": {"group_0": {"targets": ["Linear"]}},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return compressed, folder


def test_nvfp4_of_modelopt_is_what_its_converter_makes_of_it(nvfp4):
    compressed, folder = nvfp4
    tensors = load_file(folder / "model.safetensors")
    converter = ModelOptNvfp4Converter(targets=["re:.*_proj$"], ignore=["lm_head"])
    converted = converter.process(dict(tensors))
    original = load_file(compressed / "model.safetensors")
    assert converted.keys() == original.keys()
    ours, theirs = (open_folder(f)(f"{Q}.weight") for f in (folder, compressed))
    assert ours.scheme == theirs.scheme
    np.testing.assert_allclose(values(ours), values(theirs), rtol=1e-6)
    np.testing.assert_allclose(ours.input_scale(), theirs.input_scale(), rtol=1e-6)
    check_slices(ours)
    check_shapes(folder, f"{Q}.weight")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"quant_algo": "W4A16_AWQ"}, "W4A16_AWQ"),
        ({"quant_algo": "MIXED_PRECISION"}, "MIXED_PRECISION"),
        ({"quant_algo": None}, "quant_algo"),
        ({"group_size": 32}, "group_size=32"),
        ({"pre_quant_scale": True}, "pre_quant_scale"),
        ({"other": 1}, "other"),
    ],
)
def test_what_modelopt_has_beside_is_refused_by_name(fields, match, nvfp4):
    with pytest.raises(UnsupportedError, match=match):
        open_folder(nvfp4[1], **fields)


def test_modelopts_patterns_and_caches(nvfp4):
    config = json.loads((nvfp4[1] / "config.json").read_text())
    config["quantization_config"] |= {"kv_cache_quant_algo": "FP8"}
    opener = read_quantization(config)(open_checkpoint(nvfp4[1]))
    assert "cache keeps its dtype" in opener.notes[0]
    for pattern in ("*q_proj", "model.layers.0*", "model.layers.0.self_attn"):
        with pytest.raises(CheckpointError, match="is not quantized"):
            open_folder(nvfp4[1], exclude_modules=[pattern])(f"{Q}.weight")


def rounded(folder, block=None):
    """The HF model of a folder's dequantized weights, whose linear layers have inputs in e4m3.

    These are in blocks of a token, or else by the scales that the folder has.
    """
    model, opener = dense_model(folder), open_folder(folder)

    def hook(module, inputs):
        (x,), width = inputs, inputs[0].shape[-1]
        parts = torch.nn.functional.pad(x, (0, -width % (block or width)))
        parts = parts.unflatten(-1, (-1, block or width))
        scale = module.static if block is None else parts.abs().amax(-1, keepdim=True) / 448
        codes = (parts / scale).clamp(-448, 448).to(BYTES).float()
        return (codes * scale).flatten(-2)[..., :width]

    for name, module in model.named_modules():
        matrix = opener(f"{name}.weight") if isinstance(module, torch.nn.Linear) else None
        if matrix is not None:
            module.static = None if block else torch.tensor(float(matrix.input_scale()))
            module.register_forward_pre_hook(hook)
    return model


RUN = {"fp8 blocks": 128, "fp8 static": None, "ModelOpt FP8": None, "ModelOpt NVFP4": None}


@pytest.mark.parametrize(("form", "backend"), on_backends(RUN, ["fp8 blocks", "ModelOpt FP8"]))
def test_logits_are_those_of_the_dequantized_weights_and_rounded_inputs(
    form, backend, llama, request
):
    """transformers dequantizes weights and leaves inputs as they are.

    Of blocks that do not divide a matrix it takes others than those that have a scale.
    """
    if form == "ModelOpt NVFP4":
        compressed, folder = request.getfixturevalue("nvfp4")
        model = emulated(compressed)
    elif form == "fp8 blocks":
        folder = llama("odd", odd_blocks, ODD)
    elif form == "fp8 static":
        folder = llama("one_scale", one_scale, STATIC)
    else:
        folder = llama("modelopt-run", auto_fp8)
        told = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
        (folder / FILE).write_text(json.dumps({"quantization": told}))
    if form != "ModelOpt NVFP4":
        model = rounded(folder, RUN[form])
    ids = random_ids(2, 9)
    with torch.no_grad():
        expected = model(torch.as_tensor(ids)).logits.numpy()
        weights_only = dense_model(folder)(torch.as_tensor(ids)).logits.numpy()
        assert unrest(model, ids, expected) < 5e-6  # else a model with another seed is wanted
        assert relative_rms(weights_only, expected) > 1e-2
        if form == "fp8 static":
            theirs = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            assert relative_rms(weights_only, theirs(torch.as_tensor(ids)).logits.numpy()) < 1e-5
    check_logits(folder, backend, model)


def test_blocks_are_written_with_scales_that_compressed_tensors_has(llama, tmp_path):
    """Those that are powers of two as floats; groups of inputs that do not divide a row not."""
    ids, out = random_ids(2, 9), tmp_path / "out"
    folder = llama("blocks-ue8m0", blocks_of((16, 32), "ue8m0"), FP8 | {"scale_fmt": "ue8m0"})
    with dualinfer.init_inference(str(folder), backend="torch", dtype="fp32") as engine:
        expected = np.asarray(engine(ids).logits)
        engine.save_pretrained(out)
    with dualinfer.init_inference(str(out), backend="torch", dtype="fp32") as engine:
        assert relative_rms(engine(ids).logits, expected) < 1e-6
    assert relative_rms(logits_of_hf(out, ids, dequantize=False), expected) < 1e-5
    folder = llama("odd", odd_blocks, ODD)
    with (
        dualinfer.init_inference(str(folder), backend="torch", dtype="fp32") as engine,
        pytest.raises(UnsupportedError, match=r"rows of 160 elements.*whole groups"),
    ):
        engine.save_pretrained(tmp_path / "odd")


def test_experts_are_what_transformers_unpacks(tmp_path):
    """Of a gpt-oss checkpoint's layout, each one its own matrix, [out, in]."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in {"gate_up_proj": (5, 42, 3), "down_proj": (5, 96, 2)}.items():
        low, high = {"generator": generator, "dtype": torch.uint8}, (*shape, 16)
        tensors[f"e.experts.{name}_blocks"] = torch.randint(0, 256, high, **low)
        tensors[f"e.experts.{name}_scales"] = torch.randint(110, 130, shape, **low)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    fields = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["r"]}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    opener = open_folder(tmp_path)
    for name in ("gate_up_proj", "down_proj"):
        whole = f"e.experts.{name}"
        expected = convert_moe_packed_tensors(
            tensors[f"{whole}_blocks"], tensors[f"{whole}_scales"], dtype=torch.float32
        )
        for expert in (0, 4):
            matrix = opener(f"e.experts.{expert}.{name}.weight")
            np.testing.assert_array_equal(values(matrix), expected[expert].T)
            assert matrix.stored == (f"{whole}_blocks", f"{whole}_scales")
        check_shapes(tmp_path, f"e.experts.4.{name}.weight")
        check_slices(matrix)
    assert opener("e.experts.router.weight") is None
    with pytest.raises(CheckpointError, match="no number 5"):
        opener("e.experts.5.down_proj.weight")

    def wrong(tensors):
        tensors["e.experts.down_proj_scales"][3, 1, 1] = 255

    opener = open_folder(edit(tmp_path, wrong))
    opener("e.experts.2.down_proj.weight").scale()
    with pytest.raises(CheckpointError, match="which is no scale"):
        opener("e.experts.3.down_proj.weight").scale()
    with pytest.raises(UnsupportedError, match="other"):
        open_folder(tmp_path, other=1)

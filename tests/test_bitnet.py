"""BitNet checkpoints, packed, as floats or to be rounded, mean what transformers takes them for."""

import json

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import dualinfer
from dualinfer import CheckpointError, UnsupportedError
from dualinfer.quantization.scheme import Activation

from .formats import check_logits, check_shapes, check_slices, open_folder, values
from .models import EOS, PAD, VOCAB, on_backends, random_ids, randomize, relative_rms

pytestmark = pytest.mark.usefixtures("greedy")

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(torch, "compile", lambda function: function)  # which takes long on a CPU
    from transformers.integrations.bitnet import pack_weights, replace_with_bitnet_linear

SIZES = {
    **{"hidden_size": 96, "intermediate_size": 100, "num_hidden_layers": 2, "vocab_size": VOCAB},
    **{"num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 64},
    **{"bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": PAD},
}
# The layers that transformers makes, and whether a file holds their weights packed.
FORMS = {
    "packed": ({"linear_class": "autobitlinear", "quantization_mode": "offline"}, True),
    "floats": ({"linear_class": "autobitlinear", "quantization_mode": "offline"}, False),
    "online": ({"linear_class": "autobitlinear", "quantization_mode": "online"}, False),
    "bitlinear": ({"modules_to_not_convert": ["lm_head"]}, True),
}
UP = "model.layers.1.mlp.up_proj.weight"


def write(folder, form):
    """A folder of that form, and the module that transformers makes of it."""
    fields, packs = FORMS[form]
    torch.manual_seed(0)
    model = hf.BitNetForCausalLM(hf.BitNetConfig(**SIZES)).eval()
    randomize(model)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    held = {}
    for name, tensor in list(tensors.items()):
        if not name.endswith("_proj.weight"):
            continue
        if form != "online":
            scale = tensor.abs().mean().reshape(1)
            held[name] = tensor = (tensor / scale).round().clamp(-1, 1)
            own = 1 / scale if form == "bitlinear" else scale
            tensors[name] = pack_weights(tensor.clone()) if packs else tensor
            tensors |= {name.replace("weight", "weight_scale"): own}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitnet", **fields}
    (folder / "config.json").write_text(json.dumps(config))
    how = hf.BitNetQuantConfig(**fields)
    replace_with_bitnet_linear(model, ["lm_head"], how)
    if form != "bitlinear":
        tensors |= held  # which transformers unpacks as it loads
    model.load_state_dict(tensors, assign=True)
    return model.eval()


@pytest.mark.parametrize("form", FORMS)
def test_matrices_are_those_of_transformers(form, tmp_path):
    module = write(tmp_path, form).get_submodule(UP.removesuffix(".weight"))
    matrix = open_folder(tmp_path)(UP)
    eye = torch.eye(96)  # each of whose rows is a code and zeros, as it was
    expected = module(eye).detach().numpy().T
    np.testing.assert_allclose(values(matrix), expected, rtol=1e-6)
    rounding = "rounded" if form == "bitlinear" else "wide"
    assert matrix.scheme.activation == Activation("int8", inverse=rounding)
    check_slices(matrix)
    if form != "online":  # whose scale is made of the matrix
        check_shapes(tmp_path, UP)


def test_matrices_of_a_base_model_are_rounded_too(tmp_path):
    write(tmp_path, "online")
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, tmp_path / "model.safetensors")
    assert open_folder(tmp_path)(UP.removeprefix("model.")) is not None


@pytest.mark.parametrize(("form", "backend"), on_backends(FORMS, {*FORMS}))
def test_logits_are_those_of_transformers(form, backend, tmp_path):
    """Inputs of linear layers are of 8 bits in both."""
    report = check_logits(tmp_path, backend, write(tmp_path, form))
    assert any("as BitNet's" in op for op in report.ops)


def test_compressed_tensors_has_no_such_inputs(tmp_path):
    write(tmp_path / "from", "packed")
    with (
        dualinfer.init_inference(str(tmp_path / "from"), dtype="fp32") as engine,
        pytest.raises(UnsupportedError, match="rounded as BitNet's"),
    ):
        engine.save_pretrained(tmp_path / "to")


def shared(folder, backend, devices):
    how = {"dtype": "fp32", "backend": backend, "tensor_parallel": {"tp_size": devices}}
    with dualinfer.init_inference(folder, **how) as engine:
        return np.asarray(engine(random_ids(2, 9)).logits)


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_several_devices_give_what_one_gives(backend, crew, tmp_path):
    """Their shares of what is normed and quantized as one have one scale."""
    write(tmp_path, "packed")
    expected = shared(str(tmp_path), backend, 1)
    if backend == "torch":
        found = crew.run(shared, str(tmp_path), backend, 2, world=2)
    else:
        found = [shared(str(tmp_path), backend, 2)]
    for ours in found:
        assert relative_rms(ours, expected) < 1e-5


def test_what_is_not_served_is_refused(tmp_path):
    write(tmp_path, "packed")
    for field, value in (
        ("use_rms_norm", True),
        ("linear_class", "other"),
        ("quantization_mode", "other"),
        ("modules_to_not_convert", []),
    ):
        with pytest.raises(UnsupportedError, match=field):
            open_folder(tmp_path, **{field: value})
    skipped = open_folder(tmp_path, modules_to_not_convert=["lm_head", "up_proj"])
    with pytest.raises(UnsupportedError, match="modules_to_not_convert"):
        skipped(UP)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[UP.replace("weight", "bias")] = torch.zeros(100)
    del tensors[UP.replace("1.mlp.up", "0.mlp.up").replace("weight", "weight_scale")]
    tensors[UP.replace("up", "down")] = torch.full((96, 100), 0.5)
    save_file(tensors, tmp_path / "model.safetensors")
    opener = open_folder(tmp_path)
    with pytest.raises(UnsupportedError, match=r"up_proj\.bias, which transformers multiplies"):
        opener(UP)
    with pytest.raises(CheckpointError, match="weight_scale is missing"):
        opener(UP.replace("1.mlp", "0.mlp"))
    with pytest.raises(CheckpointError, match="others than -1, 0 and 1"):
        opener(UP.replace("up", "down")).codes(slice(None), slice(None))

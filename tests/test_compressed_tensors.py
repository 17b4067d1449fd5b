"""compressed-tensors checkpoints mean what compressed-tensors, which wrote them, takes them for."""

import json
import warnings

import numpy as np
import pytest
import torch
import transformers as hf
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    apply_quantization_config,
)
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from safetensors.torch import load_file

import dualinfer
from dualinfer import CheckpointError, UnsupportedError
from dualinfer.quantization.scheme import Activation

from .cases import make_model
from .compressed import write
from .formats import (
    check_logits,
    check_shapes,
    check_slices,
    dense_model,
    edit,
    open_folder,
    values,
)
from .models import BACKENDS, on_backends, random_ids, relative_rms

pytestmark = pytest.mark.usefixtures("greedy")

Q = "model.layers.0.self_attn.q_proj"


def scheme(preset, targets=("Linear",), *, size=None, inputs=True, **weights):
    """A preset's group, with other fields of its weights, and groups of so many inputs."""
    fields = preset_name_to_scheme(preset, list(targets)).model_dump()
    if not inputs:
        fields["input_activations"] = None
    for args in (fields["weights"], fields["input_activations"]):
        if args and args["group_size"] and size:
            args["group_size"] = size
    fields["weights"] = QuantizationArgs(**fields["weights"] | weights).model_dump()
    return fields


def eight(strategy, **more):
    return {"num_bits": 8, "strategy": strategy, "group_size": None, **more}


CHANNEL = {"strategy": "channel", "group_size": None}
BLOCK = {"block_structure": [32, 24]}
# The groups of a config, the codes of the first q projection, and how its inputs are quantized.
FORMS = {
    "W4A16": ([scheme("W4A16", size=32)], "int4", None),
    "W4A16-rows": ([scheme("W4A16", **CHANNEL)], "int4", None),
    "W4A16-tensor": ([scheme("W4A16", strategy="tensor", group_size=None)], "int4", None),
    "W4A16-asymmetric": ([scheme("W4A16_ASYM", size=16)], "uint4", None),
    "W4A16-rows-asymmetric": ([scheme("W4A16_ASYM", **CHANNEL)], "uint4", None),
    "W8A16": ([scheme("W8A16", size=32)], "int8", None),
    "W8A16-asymmetric": ([scheme("W8A16", size=32, symmetric=False)], "uint8", None),
    "W4AFP8": ([scheme("W4AFP8", size=32)], "int4", Activation("fp8_e4m3")),
    "W8A8": ([scheme("W8A8")], "int8", Activation("int8")),
    "W8A8-asymmetric": ([scheme("W8A8", symmetric=False)], "uint8", Activation("int8")),
    "FP8": ([scheme("FP8")], "fp8_e4m3", Activation("fp8_e4m3", dynamic=False)),
    "FP8-dynamic": ([scheme("FP8_DYNAMIC")], "fp8_e4m3", Activation("fp8_e4m3")),
    "FP8-blocks": ([scheme("FP8_BLOCK", size=32)], "fp8_e4m3", Activation("fp8_e4m3", block=32)),
    "FP8-odd-blocks": ([scheme("FP8_BLOCK", inputs=False, **BLOCK)], "fp8_e4m3", None),
    "NVFP4A16": ([scheme("NVFP4A16")], "fp4_e2m1", None),
    "NVFP4": ([scheme("NVFP4")], "fp4_e2m1", Activation("fp4_e2m1", block=16, outer=True)),
    "MXFP4A16": ([scheme("MXFP4A16")], "fp4_e2m1", None),
    "MXFP4": ([scheme("MXFP4")], "fp4_e2m1", Activation("fp4_e2m1", block=32, powers=True)),
    "MXFP8": ([scheme("MXFP8")], "fp8_e4m3", Activation("fp8_e4m3", block=32, powers=True)),
    "mixed": (
        [
            scheme("W4A16_ASYM", ["re:.*layers.0.*[qk]_proj"], size=16),
            scheme("FP8_DYNAMIC", ["re:.*down_proj", "re:.*layers.0.*v_proj"]),
            scheme("W8A8", ["Linear"]),
        ],
        "uint4",
        None,
    ),
}
IGNORED = {"mixed": ("lm_head", "re:.*layers.1.*o_proj")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A function from a form to its folder."""
    top, made = tmp_path_factory.mktemp("ct"), {}

    def make(form, dtype=torch.float32):
        key = f"{form}-{dtype}".removeprefix("torch.")
        if key not in made:
            groups = {f"group_{i}": group for i, group in enumerate(FORMS[form][0])}
            ignore = IGNORED.get(form, ("lm_head",))
            seed = 3 if form in ("FP8-blocks", "W4AFP8") else 0  # so that no input lies near a tie
            made[key] = write(top / key, groups, ignore=ignore, seed=seed, dtype=dtype)
        return made[key]

    return make


def decompressed(folder):
    """What compressed-tensors makes of each quantized module, and the dtype that it rounds to."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    groups = QuantizationConfig(**config).config_groups.values()
    modules = sorted({n.rpartition(".")[0] for n in tensors if n.endswith(".weight_scale")})
    for module in modules:
        own = {n.rpartition(".")[2]: t for n, t in tensors.items() if n.startswith(f"{module}.")}
        for group in groups:
            stored = "weight_packed" in own, "weight" in own and own["weight"].dtype == torch.int8
            meant = group.format == "pack-quantized", group.format == "int-quantized"
            if len(groups) == 1 or stored == meant:
                compressor = BaseCompressor.get_value_from_registry(group.format)
                break
        yield module, compressor.decompress(own, group)["weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_matrices_are_what_compressed_tensors_decompresses(form, dtype, folders):
    opener = open_folder(folders(form, dtype))
    count = 0
    for module, expected in decompressed(folders(form, dtype)):
        matrix = opener(f"{module}.weight")
        step = torch.finfo(expected.dtype).eps
        np.testing.assert_allclose(values(matrix), expected.float(), rtol=step, atol=0)
        count += 1
    assert count == (13 if form == "mixed" else 14)
    assert opener("lm_head.weight") is opener("model.embed_tokens.weight") is None
    first = opener(f"{Q}.weight")
    assert (first.scheme.codes, first.scheme.activation) == FORMS[form][1:]
    if dtype == torch.float32:
        check_slices(first)
        check_shapes(folders(form), f"{Q}.weight")


def test_a_group_is_chosen_by_name_then_pattern_then_class(folders):
    opener = open_folder(folders("mixed"))
    found = {
        name: opener(f"model.layers.{name}.weight").scheme.codes
        for name in ("0.self_attn.k_proj", "0.self_attn.v_proj", "1.self_attn.v_proj")
    }
    assert list(found.values()) == ["uint4", "fp8_e4m3", "int8"]
    assert opener("model.layers.1.self_attn.o_proj.weight") is None


def test_inputs_have_the_scales_of_the_checkpoint(folders):
    fp8, fp4 = (open_folder(folders(form))(f"{Q}.weight") for form in ("FP8", "NVFP4"))
    np.testing.assert_allclose(fp8.input_scale(), 0.02, rtol=1e-6)
    np.testing.assert_allclose(fp4.input_scale(), 3 / (448 * 6), rtol=1e-6)
    assert f"{Q}.input_global_scale" in fp4.stored


def test_columns_by_activation_order_have_the_scales_of_their_groups(folders):
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0)) // 32

    def change(tensors):
        tensors[f"{Q}.weight_g_idx"] = order.to(torch.int32)

    plain = open_folder(folders("W4A16"))(f"{Q}.weight")
    matrix = open_folder(edit(folders("W4A16"), change))(f"{Q}.weight")
    expected = plain.codes(slice(None), slice(None)) * plain.scale()[:, order.numpy()]
    np.testing.assert_array_equal(values(matrix), expected)
    check_slices(matrix)
    assert matrix.scheme.groups == 3

    def unordered(tensors):
        tensors[f"{Q}.weight_g_idx"] = torch.full((96,), -1, dtype=torch.int32)

    assert open_folder(edit(folders("W4A16"), unordered))(f"{Q}.weight").group() is None


def used(opener):
    """Reads all of a matrix."""
    matrix = opener(f"{Q}.weight")
    values(matrix)
    matrix.input_scale()


def changed(tensors, name, value):
    tensors.pop(name)
    if value is not None:
        tensors[name] = value


@pytest.mark.parametrize(
    ("form", "part", "value", "match"),
    [
        ("W4A16", "weight_scale", None, "weight_scale is missing"),
        ("W4A16", "weight_packed", None, "weight_packed is missing"),
        ("W4A16", "weight_shape", None, "weight_shape is missing"),
        ("W4A16", "weight_shape", torch.tensor([96, 128]), r"says \[96, 128\]"),
        (
            "W4A16",
            "weight_scale",
            torch.full((96, 3), torch.nan),
            "nan at .0, 0., which is no scale",
        ),
        ("W4A16", "weight_scale", torch.ones(96, 4), r"\(96, 4\)"),
        ("W4A16", "weight_packed", torch.ones(96, 12), "float32, expected int32"),
        ("W4A16-asymmetric", "weight_zero_point", None, "weight_zero_point is missing"),
        ("W8A8", "weight_scale", None, "weight_scale is missing"),
        ("W8A8", "weight", torch.ones(96, 96), "never compressed"),
        ("FP8", "input_scale", None, "input_scale is missing"),
        ("FP8", "input_scale", torch.tensor([-1.0]), "expected a positive number"),
        ("NVFP4", "weight_global_scale", None, "weight_global_scale is missing"),
        ("NVFP4", "weight_global_scale", torch.zeros(1), "expected a positive number"),
        ("MXFP4", "weight_scale", torch.full((96, 3), 255, dtype=torch.uint8), "no scale"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(form, part, value, match, folders):
    folder = edit(folders(form), lambda tensors: changed(tensors, f"{Q}.{part}", value))
    with pytest.raises(CheckpointError, match=match):
        used(open_folder(folder))


def test_a_file_that_is_cut_short_is_refused(folders, tmp_path):
    folder = edit(folders("W4A16"), lambda tensors: None)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_folder(folder)


def weights(**fields):
    group = scheme("W4A16", size=32)
    group["weights"] = group["weights"] | fields
    return {"config_groups": {"group_0": group}}


def inputs(**fields):
    group = scheme("W8A8")
    group["input_activations"] = group["input_activations"] | fields
    return {"config_groups": {"group_0": group}, "format": "int-quantized"}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"new_field": 1}, "new_field"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"format": "marlin-24"}, "marlin-24"),
        ({"ignore": ["re:("]}, "no regular expression"),
        ({"config_groups": {}}, "config_groups"),
        ({"config_groups": {"W4A16": ["Linear"]}}, "preset"),
        *[(weights(num_bits=bits), f"num_bits={bits}") for bits in (2, 3, 5, 6, 7)],
        (weights(group_size=0), "group_size=0"),
        (weights(strategy="head"), "strategy='head'"),
        (weights(dynamic=True), "dynamic=True"),
        (weights(new=1), "new"),
        (inputs(num_bits=4), "input_activations.num_bits=4"),
        (inputs(strategy="tensor"), "sequences change each other"),
        (inputs(dynamic=False), "strategy='token'"),
        (inputs(strategy="tensor", dynamic=False, symmetric=False), "symmetric=False"),
        (
            {"config_groups": {"g": scheme("W8A8") | {"output_activations": {"num_bits": 8}}}},
            "output_activations",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields, match, folders):
    with pytest.raises(UnsupportedError, match=match):
        open_folder(folders("W4A16"), **fields)


def test_static_inputs_have_no_zero_point(folders):
    """Zeros may be written for what is symmetric; others would shift every input."""
    zero = f"{Q}.input_zero_point"
    for value in (0, 1):
        folder = edit(
            folders("FP8"), lambda t, v=value: t.update({zero: torch.tensor([v], dtype=torch.int8)})
        )
        if not value:
            assert zero in open_folder(folder)(f"{Q}.weight").stored
            continue
        with pytest.raises(CheckpointError, match=f"{zero} is not zero"):
            open_folder(folder)(f"{Q}.weight")
    inputs = eight("tensor", type="int", dynamic=False, symmetric=False)
    group = {"targets": ["Linear"], "weights": eight("channel"), "input_activations": inputs}
    with pytest.raises(UnsupportedError, match=r"input_activations\.symmetric=False"):
        open_folder(folders("W8A8"), config_groups={"g": group})


def test_a_module_in_codes_that_the_config_leaves_out_is_an_error(folders):
    with pytest.raises(CheckpointError, match="is not quantized"):
        open_folder(folders("W4A16"), ignore=["re:.*q_proj"])(f"{Q}.weight")


# As compressed-tensors, older and newer, ModelOpt, AutoFP8 and Quark call them.
CACHES = (
    *("self_attn.k_scale", "self_attn.v_zero_point", "self_attn.kv_scale"),
    *("self_attn.k_proj.output_scale", "self_attn.v_proj.v_scale", "self_attn.prob_output_scale"),
)
FP8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}


def with_scales_of_a_cache(tensors):
    tensors |= {f"model.layers.0.{name}": torch.ones(1) for name in CACHES}


def test_what_changes_nothing_is_noted(folders):
    """Scales of a cache, by any format's names, and a block that says that nothing is sparse."""
    folder = edit(folders("W4A16"), with_scales_of_a_cache)
    config = json.loads((folder / "config.json").read_text())
    dense = {"format": "dense", "global_sparsity": 0.15, "ignore": ["lm_head"], "targets": [Q]}
    more = {"kv_cache_scheme": FP8_CACHE, "sparsity_config": dense}
    config["quantization_config"] |= more
    config["quantization_config"]["config_groups"]["kv_cache"] = {
        "targets": ["re:.*k_proj", "re:.*v_proj"],
        "output_activations": FP8_CACHE,
    }
    (folder / "config.json").write_text(json.dumps(config))
    notes = check_logits(folder, "torch").notes
    assert any("cache keeps its dtype" in note for note in notes)
    assert any("weights without use here, 6: " in note for note in notes)
    with pytest.raises(UnsupportedError, match="sparsity_config"):
        open_folder(folder, sparsity_config=dense | {"format": "sparse-24-bitmask"})


@pytest.mark.parametrize(
    "fields",
    [
        {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": []}}},
        {"quant_method": "modelopt", "quant_algo": None},
    ],
    ids=["no groups", "an empty group", "modelopt"],
)
def test_weights_beside_a_quantized_cache_are_plain(fields, tmp_path):
    """They can be quantized here, and what is saved says nothing of the cache."""
    model = make_model("llama-gqa", num_hidden_layers=1)
    model.save_pretrained(tmp_path / "kv")
    folder = edit(tmp_path / "kv", with_scales_of_a_cache)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = fields | {"kv_cache_scheme": FP8_CACHE}
    (folder / "config.json").write_text(json.dumps(config))
    ids, out = random_ids(2, 7), str(tmp_path / "out")
    how = {"backend": "torch", "dtype": "fp32"}
    with dualinfer.init_inference(str(folder), save_mp_checkpoint_path=out, **how) as engine:
        assert relative_rms(engine(ids).logits, model(torch.tensor(ids)).logits.detach()) < 1e-5
        assert any("cache keeps its dtype" in note for note in engine.report().notes)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    with dualinfer.init_inference(str(folder), quant="int8", **how) as engine:
        assert engine.report().weights["head"] == "int8, rows"


def logits_of_hf(folder, ids, *, dequantize, model_class=hf.AutoModelForCausalLM):
    config = hf.utils.quantization_config.CompressedTensorsConfig(dequantize=dequantize)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the folder's own config is there, too
        model = model_class.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
        return model.eval()(torch.as_tensor(ids)).logits.numpy()


@pytest.mark.parametrize(
    ("form", "backend"),
    on_backends(
        ["W4A16-asymmetric", "W8A16", "FP8-odd-blocks", "NVFP4A16", "MXFP4A16"],
        ["W8A16", "MXFP4A16"],
    ),
)
def test_logits_are_those_of_the_dequantized_weights(form, backend, folders):
    """And of the model that transformers dequantizes, which it rounds to bfloat16 of fp4."""
    check_logits(folders(form), backend)
    if backend == BACKENDS[0]:
        ids = random_ids(2, 9)
        expected = logits_of_hf(folders(form), ids, dequantize=True)
        with torch.no_grad():
            dense = dense_model(folders(form))(torch.as_tensor(ids)).logits.numpy()
        assert relative_rms(dense, expected) < (3e-2 if "FP4" in form else 1e-5)


def emulated(folder):
    """The HF model of a folder's dequantized weights, whose inputs compressed-tensors quantizes.

    transformers' own loading cannot do it of all: fp4 comes in bfloat16, zero points not at all.
    """
    model, tensors = dense_model(folder), load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig(**config | {"quantization_status": "compressed"})
    apply_quantization_config(model, config)
    for name, module in model.named_modules():
        for part in ("input_scale", "input_global_scale"):
            if f"{name}.{part}" in tensors:
                getattr(module, part).data = tensors[f"{name}.{part}"]
    return model


def unrest(model, ids, expected):
    """How far noise of 1e-6 in the embedding moves a model's logits, relative RMS of eight draws.

    It is 1e-6, too, if no input lies near a tie between two codes. Of a token's largest value,
    if negative, int8's code is -127.5, so that some codes of int8 always fall by chance.
    """
    rows = model.get_input_embeddings()(torch.as_tensor(ids))
    noise = torch.Generator().manual_seed(0)
    return max(
        relative_rms(
            model(
                inputs_embeds=rows * (1 + 1e-6 * torch.randn(rows.shape, generator=noise))
            ).logits.numpy(),
            expected,
        )
        for _ in range(8)
    )


@pytest.mark.parametrize(
    "form", ["W8A8", "FP8", "FP8-blocks", "NVFP4", "MXFP4", "MXFP8", "W4AFP8", "mixed"]
)
def test_inputs_are_rounded_as_compressed_tensors_does(form, folders):
    folder, ids = folders(form), random_ids(2, 9)
    with torch.no_grad():
        model = emulated(folder)
        expected = model(torch.as_tensor(ids)).logits.numpy()
        weights_only = dense_model(folder)(torch.as_tensor(ids)).logits.numpy()
        bound = max(1e-5, 1.5 * unrest(model, ids, expected))
    assert bound == 1e-5 or form in ("W8A8", "mixed")  # else a model with another seed is wanted
    assert bound < relative_rms(weights_only, expected) / 2
    for backend in BACKENDS:
        with dualinfer.init_inference(str(folder), backend=backend, dtype="fp32") as engine:
            assert relative_rms(engine(ids).logits, expected) < bound
    if form in ("W8A8", "FP8", "FP8-blocks", "W4AFP8"):
        assert relative_rms(expected, logits_of_hf(folder, ids, dequantize=False)) < bound


@pytest.mark.parametrize("form", ["W4A16-asymmetric", "FP8-odd-blocks"])
def test_two_devices_give_what_one_gives(form, folders):
    check_logits(folders(form), "jax", tensor_parallel={"tp_size": 2})

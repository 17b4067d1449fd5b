"""GPTQ and AWQ checkpoints mean what gptqmodel, which packed them, takes them for."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import save_file

import dualinfer
from dualinfer import CheckpointError, UnsupportedError
from dualinfer.checkpoint.files.safetensors import TensorFile
from dualinfer.checkpoint.sources import FilesSource
from dualinfer.quantization.formats import METHODS, find_method

from .formats import check_logits, check_shapes_in, check_slices, dense_model, edit, values
from .models import VOCAB, on_backends

pytestmark = pytest.mark.usefixtures("greedy")

GOLDEN = {path.stem: path for path in (Path(__file__).parent / "data" / "gptq").glob("*.safeten*")}
CODES = {
    "gptq-v1": "int4",
    "gptq-v1-asymmetric": "uint4",
    "gptq-v2": "uint4",
    "gptq-act-order": "uint4",
    "gptq-act-order-v2": "int4",
    "gptq-8-bits": "int8",
    "gptq-8-bits-asymmetric": "uint8",
    "awq": "uint4",
    "awq-one-group": "uint4",
}


class Golden:
    """A file of tests/data/gptq as a source, with changed tensors."""

    description = "golden"

    def __init__(self, name, **changes):
        self.file = TensorFile(GOLDEN[name])
        self.config = json.loads(self.file.metadata["quantization_config"])
        self.tensors = {n: self.file.read(n) for n in self.file.names()}
        for part, tensor in changes.items():
            self.tensors.pop(f"layer.{part}")
            if tensor is not None:
                self.tensors[f"layer.{part}"] = tensor

    def names(self):
        return self.tensors

    def shape(self, name):
        return self.tensors[name].shape

    def dtype(self, name):
        return self.tensors[name].dtype.name

    def read(self, name, index=None):
        return self.tensors[name][index or ()]

    def open(self, name="layer.weight", **fields):
        config = self.config | fields
        return METHODS[find_method(config)](config, self)(name)


def test_every_golden_file_is_compared():
    assert GOLDEN.keys() == CODES.keys()


@pytest.mark.parametrize("name", CODES)
def test_matrices_are_what_gptqmodel_dequantizes(name):
    file = TensorFile(GOLDEN[name])
    config = json.loads(file.metadata["quantization_config"])
    source = FilesSource({name: file}, name)
    matrix = METHODS[config["quant_method"]](config, source)("layer.weight")
    assert matrix.scheme.codes == CODES[name]
    assert bool(matrix.scheme.groups) == ("act-order" in name) == (matrix.group() is not None)
    assert set(matrix.stored) == {n for n in source.names() if n != "expected"}
    expected = file.read("expected")
    assert matrix.shape == expected.shape
    np.testing.assert_array_equal(values(matrix).astype(np.float16), expected)
    check_slices(matrix)
    check_shapes_in(METHODS[config["quant_method"]], config, source, "layer.weight")


def pack(codes, bits):
    """Codes [rows, columns] in words along the columns, the first in the lowest bits."""
    held = 32 // bits
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % held))).astype(np.uint32)
    shifts = np.arange(held, dtype=np.uint32) * np.uint32(bits)
    words = (codes.reshape(len(codes), -1, held) << shifts).sum(-1, dtype=np.uint32)
    return words.view(np.int32)


FORMS = {
    "gptq": {"bits": 4, "group_size": 32, "checkpoint_format": "gptq", "lm_head": True},
    "act-order": {"bits": 4, "group_size": 16, "checkpoint_format": "gptq_v2", "desc_act": True},
    "8-bits": {"bits": 8, "group_size": -1, "checkpoint_format": "gptq", "lm_head": False},
    "awq": {"bits": 4, "group_size": 32, "version": "gemm", "modules_to_not_convert": ["lm_head"]},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A function from a form to the folder of a tiny Llama with random codes."""
    top = tmp_path_factory.mktemp("gptq")

    def make(form):
        if not (top / form).exists():
            write(top / form, form, np.random.default_rng(0))
        return top / form

    return make


def random_parts(shape, form, random, middle=False):
    """What a file holds in the place of a matrix [N, K], by name, and the matrix that it means.

    With `middle` its zero points are the codes' middle.
    """
    fields = FORMS[form]
    bits, (n, k) = fields["bits"], shape
    size = fields["group_size"] if fields["group_size"] > 0 else k
    groups = -(-k // size)
    codes = random.integers(0, 1 << bits, (k, n))
    zeros = random.integers(1, 1 << bits, (groups, n))
    if middle:
        zeros[:] = 1 << (bits - 1)
    group = np.arange(k, dtype=np.int32) // size
    parts = {"scales": random.uniform(0.5, 1.5, (groups, n)) * 0.3 / (1 << bits)}
    parts["scales"] = parts["scales"].astype(np.float16)
    if form == "awq":
        order = np.arange(n).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].ravel()
        parts |= {"qweight": pack(codes[:, order], 4), "qzeros": pack(zeros[:, order], 4)}
    else:
        stored = zeros - (fields["checkpoint_format"] == "gptq")
        parts |= {"qweight": pack(codes.T, bits).T.copy(), "qzeros": pack(stored, bits)}
        parts["g_idx"] = group = random.permutation(group) if fields.get("desc_act") else group
    means = ((codes - zeros[group]) * parts["scales"].astype(np.float32)[group]).T
    return {part: torch.from_numpy(a).contiguous() for part, a in parts.items()}, torch.from_numpy(
        means
    ).float()


def write(folder, form, random):
    fields, awq = FORMS[form], form == "awq"
    config = hf.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=104,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    tensors = hf.LlamaForCausalLM(config).state_dict()
    for name in [n for n in tensors if n.endswith(("_proj.weight", "lm_head.weight"))]:
        if "lm_head" in name and not fields.get("lm_head"):
            continue
        if name.endswith("0.self_attn.v_proj.weight"):
            continue  # plain, in a fused row of others
        shape, module = tensors.pop(name).shape, name.removesuffix(".weight")
        parts, _ = random_parts(shape, form, random, "k_proj" in name)
        tensors |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
    config.quantization_config = {"quant_method": "awq" if awq else "gptq", **fields}
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(("form", "backend"), on_backends(FORMS, ["8-bits", "gptq"]))
def test_logits_are_those_of_the_dequantized_weights(form, backend, folders):
    check_logits(folders(form), backend)


Q = "model.layers.0.self_attn.q_proj"
# The file beside config.json, what it holds of a form's own fields, and the file of weights.
BESIDE = {
    "gptq": (
        "quantize_config.json",
        {"bits": 4, "group_size": 32, "damp_percent": 0.01, "lm_head": True, "sym": False}
        | {"true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model"},
        "gptq_model-4bit-32g.safetensors",
    ),
    "awq": (
        "quant_config.json",
        {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"},
        "model.safetensors",
    ),
}


@pytest.mark.parametrize("form", BESIDE)
def test_a_file_beside_the_config_says_how_weights_are_quantized(form, folders, tmp_path):
    """As AutoGPTQ and AutoAWQ wrote it before transformers knew them; biases of zeros as well."""
    name, fields, weights = BESIDE[form]
    zeros = {f"{Q}.bias": torch.zeros(96, dtype=torch.float16)}
    folder = edit(folders(form), lambda tensors: tensors.update(zeros)).rename(tmp_path / form)
    (folder / "model.safetensors").rename(folder / weights)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / name).write_text(json.dumps(fields))
    notes = check_logits(folder, "torch", dense_model(folders(form))).notes
    assert f"config.json says nothing of quantization, and {name} was read for it" in notes
    assert f"weights without use here, 1: {Q}.bias" in notes
    assert any(weights in note for note in notes) == (weights != "model.safetensors")


def test_a_bias_that_is_not_zero_is_left_over(folders):
    ones = {f"{Q}.bias": torch.ones(96, dtype=torch.float16)}
    folder = edit(folders("gptq"), lambda tensors: tensors.update(ones))
    with pytest.raises(CheckpointError, match=rf"left over 1: {Q}\.bias"):
        dualinfer.init_inference(str(folder), backend="torch")


@pytest.mark.parametrize("form", ["act-order", "awq"])
def test_two_devices_give_what_one_gives(form, folders):
    check_logits(folders(form), "jax", tensor_parallel={"tp_size": 2})


def test_awq_is_what_compressed_tensors_converts_it_to():
    from compressed_tensors.compressors import unpack_from_int32
    from compressed_tensors.entrypoints.convert import AutoAWQConverter

    golden = Golden("awq")
    stored = {
        f"{n}": torch.from_numpy(golden.tensors[f"layer.{n}"])
        for n in ("qweight", "qzeros", "scales")
    }
    converter = AutoAWQConverter(targets=["re:.*layer"])
    out = converter.process({f"layer.{n}": t for n, t in stored.items()})
    shape = torch.Size(out["layer.weight_shape"].tolist())
    codes = unpack_from_int32(out["layer.weight_packed"], 4, shape).numpy()
    matrix = golden.open()
    np.testing.assert_array_equal(codes, matrix.codes(slice(None), slice(None)).astype(int) - 8)
    np.testing.assert_array_equal(out["layer.weight_scale"].numpy(), matrix.scale())


def test_awq_without_zero_points_has_the_middle_as_zero():
    golden = Golden("awq", qzeros=None)
    matrix = golden.open(zero_point=False)
    assert matrix.scheme.codes == "int4" and matrix.zero() is None
    codes = Golden("awq").open().codes(slice(None), slice(None))
    np.testing.assert_array_equal(matrix.codes(slice(None), slice(None)), codes.astype(int) - 8)
    check_slices(matrix)


def test_dynamic_rules_choose_bits_and_groups_and_what_is_left_out():
    eight = Golden("gptq-8-bits-asymmetric")
    plain = eight.open()
    rules = {"+:.*other": {"bits": 4}, "+:lay": {"bits": 8, "group_size": 16}, "layer": {"bits": 4}}
    ruled = eight.open(bits=4, group_size=32, dynamic=rules)
    np.testing.assert_array_equal(values(ruled), values(plain))
    with pytest.raises(CheckpointError, match="layer is not quantized"):
        eight.open(dynamic={"-:lay": {}})
    with pytest.raises(UnsupportedError, match="bits=3"):
        eight.open(dynamic={"+:lay": {"bits": 3}})
    with pytest.raises(UnsupportedError, match="no regular expression"):
        eight.open(dynamic={"+:(": {}})


def test_plain_weights_are_none():
    golden = Golden("gptq-v1")
    assert golden.open("norm.weight") is None
    golden.tensors = {n.replace("layer", "lm_head"): t for n, t in golden.tensors.items()}
    assert golden.open("lm_head.weight", lm_head=True).shape == (24, 80)
    with pytest.raises(CheckpointError, match="lm_head is not quantized"):
        golden.open("lm_head.weight", lm_head=False)


REFUSED = {
    "bits of 2": ("gptq-v1", {"bits": 2}, "bits=2"),
    "bits of 3": ("gptq-v1", {"bits": 3}, "bits=3"),
    "marlin": ("gptq-v1", {"checkpoint_format": "marlin"}, "marlin.*gptq_v2"),
    "words of 16 bits": ("gptq-v1", {"pack_dtype": "int16"}, "int16"),
    "a field of tomorrow": ("gptq-v1", {"planes": 2}, "planes"),
    "a group of 0": ("gptq-v1", {"group_size": 0}, "group_size=0"),
    "awq gemv": ("awq", {"version": "gemv"}, "gemv.*GEMM"),
    "awq exllama": ("awq", {"version": "exllama"}, "exllama"),
    "awq marlin": ("awq", {"version": "marlin"}, "marlin"),
    "llm-awq": ("awq", {"backend": "llm-awq"}, "GEMM"),
    "awq of 8 bits": ("awq", {"bits": 8}, "bits=8"),
    "aqlm": ("awq", {"quant_method": "aqlm"}, "aqlm.*Pass the model"),
    "hqq": ("awq", {"quant_method": "hqq"}, "hqq"),
    "auto-round": ("gptq-v1", {"quant_method": "auto-round"}, "auto_gptq"),
    "tomorrow's": ("gptq-v1", {"quant_method": "tomorrow"}, "tomorrow"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_refused_by_name(case):
    name, fields, message = REFUSED[case]
    with pytest.raises(UnsupportedError, match=f"(?s){message}"):
        Golden(name).open(**fields)


NAN = np.full((3, 24), np.nan, np.float16)
WRONG = {
    "no scales": ("gptq-v1", {"scales": None}, "layer.scales is missing"),
    "no zeros": ("awq", {"qzeros": None}, "layer.qzeros is missing"),
    "NaN": ("gptq-v1", {"scales": NAN}, "layer.scales holds nan at"),
    "infinite": ("gptq-v1", {"scales": -NAN * 0 - np.inf}, "layer.scales holds"),
    "fewer scales": ("gptq-v1", {"scales": NAN[:2]}, r"layer.scales has the shape \(2, 24\)"),
    "integers": ("gptq-v1", {"scales": NAN.view(np.int16)}, "layer.scales is int16"),
    "a group too high": ("gptq-v1", {"g_idx": np.full(80, 3, np.int32)}, "layer.g_idx names"),
    "groups of others": ("gptq-v1", {"g_idx": np.zeros(72, np.int32)}, "layer.g_idx has"),
}


@pytest.mark.parametrize("case", WRONG)
def test_damaged_tensors_are_named(case):
    name, changes, message = WRONG[case]
    with pytest.raises(CheckpointError, match=message):
        Golden(name, **changes).open().scale()


def test_awq_leaves_out_modules_as_transformers_does():
    golden = Golden("awq")
    for pattern in ("layer", "la.*", "yer", "model.layer"):
        if pattern == "model.layer":
            assert golden.open(modules_to_not_convert=[pattern]) is not None
            continue
        with pytest.raises(CheckpointError, match="modules_to_not_convert"):
            golden.open(modules_to_not_convert=[pattern])

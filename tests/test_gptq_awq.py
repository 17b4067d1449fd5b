"""GPTQ and AWQ checkpoints mean what gptqmodel, which packed them, takes them for."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dualinfer import CheckpointError, UnsupportedError
from dualinfer.checkpoint.files import TensorFile
from dualinfer.checkpoint.sources import FilesSource
from dualinfer.quantization.formats import METHODS, find_method

from .formats import check_slices, values

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

"""InferenceConfig: fields, aliases, spellings, merging."""

import copy
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pydantic
import pytest
import torch

from dualinfer import ConfigError, InferenceConfig
from dualinfer.config import make_config


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        (
            "float32",
            ["fp32", "float", "float32", "Float32", " fp32 ", "torch.float32", torch.float32],
        ),
        ("float32", [torch.float, np.float32, np.dtype("float32"), jnp.float32, "jnp.float32"]),
        ("float16", ["fp16", "half", torch.half, np.float16, np.dtype("f2"), jnp.float16]),
        ("bfloat16", ["bf16", "bfloat16", torch.bfloat16, jnp.bfloat16, ml_dtypes.bfloat16]),
        ("bfloat16", [np.dtype(ml_dtypes.bfloat16), jnp.dtype("bfloat16"), "torch.bfloat16"]),
    ],
)
def test_dtype_may_be_spelled_in_every_way(name, spellings):
    for spelling in spellings:
        assert make_config({"dtype": spelling}, {}).dtype == name
        assert make_config(None, {"dtype": spelling}).dtype == name


@pytest.mark.parametrize("value", ["int8", "fp8", "float64", torch.int8, np.int32, 16, "", object])
def test_dtype_that_is_not_served_is_refused(value):
    with pytest.raises(ConfigError, match="dtype"):
        make_config(None, {"dtype": value})


def test_unset_fields_keep_their_defaults():
    config = make_config(None, {})
    assert (config.backend, config.dtype, config.max_out_tokens) == ("torch", None, None)
    assert config.replace_with_kernel_inject is False and config.return_tuple is True
    assert config.tensor_parallel.tp_size == 1


def test_aliases_name_the_same_fields():
    config = make_config({"kernel_inject": True, "max_tokens": 7, "tp": {"tp_size": 1}}, {})
    assert config.replace_with_kernel_inject and config.max_out_tokens == 7
    assert make_config({"max_tokens": 7}, {"max_out_tokens": 7}).max_out_tokens == 7
    assert make_config({"kernel_inject": True}, {"replace_with_kernel_inject": True})


def test_field_given_by_name_and_alias_at_once_is_refused():
    for first, second in (("max_tokens", 8), ("max_tokens", 7)):
        with pytest.raises(ConfigError, match=r"max_out_tokens.*twice|given twice"):
            make_config({first: second, "max_out_tokens": 7}, {})


def test_config_and_arguments_are_joined():
    given = {"dtype": "bf16", "tensor_parallel": {"tp_size": 1}}
    before = copy.deepcopy(given)
    config = make_config(given, {"backend": "jax", "dtype": torch.bfloat16, "max_out_tokens": 9})
    assert (config.backend, config.dtype, config.max_out_tokens) == ("jax", "bfloat16", 9)
    assert given == before


def test_config_object_is_taken_and_not_changed():
    first = InferenceConfig(dtype="fp16", max_tokens=5)
    config = make_config(first, {"backend": "jax"})
    assert (config.backend, config.dtype, config.max_out_tokens) == ("jax", "float16", 5)
    assert first.backend == "torch" and first.model_fields_set == {"dtype", "max_out_tokens"}
    with pytest.raises(ConfigError, match="max_out_tokens is 5 in config and 6"):
        make_config(first, {"max_out_tokens": 6})


def test_explicit_default_conflicts_with_another_value():
    with pytest.raises(ConfigError, match="return_tuple"):
        make_config({"return_tuple": True}, {"return_tuple": False})
    with pytest.raises(ConfigError, match="backend"):
        make_config(InferenceConfig(backend="torch"), {"backend": "jax"})


def test_config_is_frozen():
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        make_config(None, {}).dtype = "bf16"


def test_config_is_read_from_a_json_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"dtype": "fp16", "backend": "jax"}))
    for given in (path, str(path)):
        config = make_config(given, {})
        assert (config.backend, config.dtype) == ("jax", "float16")
    for text in ("", "[]", "{", '"x"'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json"):
            make_config(path, {})
    with pytest.raises(ConfigError, match="nowhere"):
        make_config(tmp_path / "nowhere.json", {})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"backend": "numpy"}, "backend"),
        ({"max_out_tokens": 0}, "max_out_tokens"),
        ({"max_out_tokens": -1}, "max_out_tokens"),
        ({"max_out_tokens": "many"}, "max_out_tokens"),
        ({"max_out_tokens": 2.5}, "max_out_tokens"),
        ({"return_tuple": "perhaps"}, "return_tuple"),
        ({"replace_with_kernel_inject": 7}, "replace_with_kernel_inject|kernel_inject"),
        ({"tensor_parallel": {"tp_size": 2}}, "tp_size=2.*one device"),
        ({"tensor_parallel": {"tp_size": 0}}, "tp_size"),
        ({"tensor_parallel": 2}, "tensor_parallel"),
        ({"enable_cuda_graph": True}, "enable_cuda_graph.*not supported in this version"),
        ({"use_triton": True}, "use_triton.*not supported in this version"),
        ({"mp_size": 2}, "mp_size=2.*DeepSpeed"),
        ({"injection_policy": {int: "x"}}, "injection_policy.*DeepSpeed"),
        ({"triangular_masking": False}, "triangular_masking=False.*DeepSpeed"),
        ({"quant": {"enabled": True}}, "quant.*DeepSpeed"),
        ({"checkpoint": "x.json"}, "checkpoint.*DeepSpeed"),
        ({"zzz": 1}, "unknown key 'zzz'; known: .*dtype"),
        ({5: 1}, "5"),
        ({"dtype": "int8", "zzz": 1}, "dtype.*zzz"),
    ],
    ids=str,
)
def test_bad_value_is_refused_by_name(values, message):
    with pytest.raises(ConfigError, match=message):
        make_config(values, {})


@pytest.mark.parametrize("value", [5, ["dtype"], b"x", object()])
def test_config_of_another_type_is_refused(value):
    with pytest.raises(ConfigError, match=type(value).__name__):
        make_config(value, {})


def test_false_and_none_leave_what_is_not_there_off():
    for value in (None, False):
        config = make_config({"enable_cuda_graph": value, "use_triton": value}, {})
        assert not config.enable_cuda_graph and not config.use_triton


@pytest.mark.parametrize(
    "values",
    [
        {"mp_size": 1},
        {"replace_method": "auto"},
        {"injection_policy": None},
        {"quant": {}},
        {"moe": False},
        {"checkpoint": None},
        {"triangular_masking": True},
    ],
    ids=str,
)
def test_deepspeed_field_that_asks_for_nothing_passes_with_a_warning(values):
    before = copy.deepcopy(values)
    with pytest.warns(UserWarning, match=f"{next(iter(values))}.*no effect"):
        config = make_config(values, {"dtype": "fp32"})
    assert config.dtype == "float32" and values == before

"""InferenceConfig: fields, aliases, spellings, old names, merging; its page is complete."""

import ast
import copy
import inspect
import json
import re
import warnings
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pydantic
import pytest
import torch

from dualinfer import ConfigError, ConfigNotFoundError, InferenceConfig
from dualinfer.config import (
    DTYPES,
    ActivationQuantConfig,
    CheckpointConfig,
    MoEConfig,
    OffloadParamConfig,
    QKVQuantConfig,
    QuantizationConfig,
    TensorParallelConfig,
    WeightQuantConfig,
    ZeroConfig,
    default_inference_config,
    dtype_name,
    make_config,
)

PAGE = Path(__file__).parents[1] / "docs" / "config.md"


class Handle:
    """A process group: an object that the config keeps as it is."""

    def __repr__(self):
        return "Handle()"


GROUP = Handle()
ZERO = {"stage": 3, "offload_param": {"device": "cpu"}}

# Name, alias, a value other than the default, and what the config then holds.
FIELDS = [
    ("backend", None, "jax", "jax"),
    ("replace_with_kernel_inject", "kernel_inject", True, True),
    ("dtype", None, "bf16", "bfloat16"),
    ("tensor_parallel", "tp", {"tp_size": 4}, TensorParallelConfig(tp_size=4)),
    ("enable_cuda_graph", None, True, True),
    ("use_triton", None, True, True),
    ("kernels", None, "pallas", "pallas"),
    ("triton_autotune", None, True, True),
    ("moe", None, {"ep_size": 2}, MoEConfig(ep_size=2)),
    ("keep_module_on_host", None, True, True),
    ("resident_layers", None, 3, 3),
    ("kv_cache_dtype", None, "fp8", "fp8_e4m3"),
    ("state_dtype", None, "bf16", "bfloat16"),
    ("zero", None, ZERO, ZeroConfig(**ZERO)),
    ("quant", None, {"enabled": False}, QuantizationConfig(enabled=False)),
    ("checkpoint", None, Path("some") / "folder", "some/folder"),
    ("adapter", None, [Path("one"), "two"], {"one": 1.0, "two": 1.0}),
    ("base_dir", None, Path("some"), "some"),
    ("save_mp_checkpoint_path", None, Path("some"), "some"),
    ("return_tuple", None, False, False),
    ("injection_policy", "injection_dict", {int: ("a", "b")}, {int: ("a", "b")}),
    ("config", "args", {"vocab_size": 7}, {"vocab_size": 7}),
    ("max_out_tokens", "max_tokens", 7, 7),
    ("min_out_tokens", "min_tokens", 7, 7),
]
# Name, alias, default, its harmless values, and values that are refused.
STALE = [
    ("triangular_masking", "tm", True, [True, "true", None], [False]),
    ("set_empty_params", None, False, [False, None], [True]),
    (
        *("checkpoint_config", "ckpt_config", CheckpointConfig()),
        *([{}, {"base_dir": None}, CheckpointConfig(), None], [{"base_dir": "x"}, "x"]),
    ),
    ("training_mp_size", None, 1, [1, "1", None], [2, True]),
    ("replace_method", None, "auto", ["auto", "", None], ["kernel", 3]),
    ("injection_policy_tuple", None, None, [None, (), []], [("a",), "a"]),
    ("transposed_mode", None, False, [False, None], [True]),
]
MOVED = [
    ("mp_size", ("tensor_parallel", "tp_size"), 2, 4),
    ("mpu", ("tensor_parallel", "mpu"), GROUP, Handle()),
    ("ep_size", ("moe", "ep_size"), 2, 4),
    ("ep_group", ("moe", "ep_group"), GROUP, Handle()),
    ("expert_group", ("moe", "ep_group"), GROUP, Handle()),
    ("ep_mp_group", ("moe", "ep_mp_group"), GROUP, Handle()),
    ("expert_mp_group", ("moe", "ep_mp_group"), GROUP, Handle()),
    ("moe_experts", ("moe", "moe_experts"), [8], [8, 16]),
    ("moe_type", ("moe", "type"), "residual", "standard"),
]
NESTED = {
    "zero": ZeroConfig,
    "zero.offload_param": OffloadParamConfig,
    "tensor_parallel": TensorParallelConfig,
    "moe": MoEConfig,
    "quant": QuantizationConfig,
    "quant.activation": ActivationQuantConfig,
    "quant.weight": WeightQuantConfig,
    "quant.qkv": QKVQuantConfig,
    "checkpoint_config": CheckpointConfig,
}


def keys_of(fields):
    """(a key, its field's row) for each name and alias."""
    return [pytest.param(key, row, id=key) for row in fields for key in row[:2] if key]


def at(config, place):
    for part in place:
        config = getattr(config, part)
    return config


def test_lists_of_this_file_cover_every_field():
    fields = InferenceConfig.model_fields
    assert [*fields] == sorted((n for n, *_ in [*FIELDS, *STALE]), key=[*fields].index)
    assert {n: a for n, a, *_ in [*FIELDS, *STALE]} == {
        name: field.validation_alias for name, field in fields.items()
    }
    assert {name: place for name, place, *_ in MOVED} == dict(InferenceConfig.moved)


# Fields


@pytest.mark.parametrize(("key", "row"), keys_of(FIELDS))
def test_field_is_given_by_name_or_alias(key, row):
    name, _, value, held = row
    assert getattr(InferenceConfig(), name) != held
    for config in (
        InferenceConfig(**{key: value}),
        InferenceConfig.model_validate({key: value}),
        make_config({key: value}, {}),
        make_config(None, {key: value}),
    ):
        assert getattr(config, name) == held
        assert config.model_fields_set == {name}


def test_unset_fields_keep_their_defaults():
    config = make_config(None, {})
    assert (config.backend, config.dtype, config.max_out_tokens) == ("torch", None, None)
    assert (config.enable_cuda_graph, config.use_triton, config.quant) == (None, None, None)
    assert config.replace_with_kernel_inject is None and config.return_tuple is True
    assert config.tensor_parallel.degree == 1 and config.min_out_tokens == 1
    assert config.moe.enabled and config.moe.moe_experts == [1]
    assert config.model_fields_set == set()


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        (
            "float32",
            ["fp32", "float", "float32", "Float32", " fp32 ", "torch.float32", "torch.float"],
        ),
        ("float32", [torch.float, torch.float32, np.float32, np.dtype("float32"), jnp.float32]),
        ("float16", ["fp16", "half", "HALF", "float16", "torch.half", "torch.float16"]),
        ("float16", [torch.half, np.float16, np.dtype("f2"), jnp.float16, "jnp.float16"]),
        ("bfloat16", ["bf16", "bfloat16", "bfloat", "torch.bfloat16", "BF16", torch.bfloat16]),
        ("bfloat16", [jnp.bfloat16, ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)]),
        ("bfloat16", [jnp.dtype("bfloat16"), "jax.numpy.bfloat16"]),
    ],
)
def test_dtype_may_be_spelled_in_every_way(name, spellings):
    for spelling in spellings:
        assert dtype_name(spelling) == name
        assert make_config({"dtype": spelling}, {}).dtype == name
        assert make_config(None, {"dtype": spelling}).dtype == name


@pytest.mark.parametrize(
    "value", ["fp8", "float64", torch.float64, 16, "", object, float, True, [], GROUP], ids=str
)
def test_dtype_that_is_not_served_is_refused(value):
    with pytest.raises(ConfigError, match=r"dtype=.*float32, float16 or bfloat16"):
        make_config(None, {"dtype": value})


@pytest.mark.parametrize("value", ["int16", "torch.int4", "INT4", torch.int16, np.uint8])
def test_integer_dtype_points_to_quant(value):
    with pytest.raises(ConfigError, match=r"dtype=.*int8 or int4 are asked for by `quant`"):
        make_config({"dtype": value}, {})


@pytest.mark.parametrize("value", ["int8", "torch.int8", torch.int8, np.int8, np.dtype("int8")])
def test_int8_as_a_dtype_is_quant(value):
    config = make_config({"dtype": value}, {})
    assert config.dtype == "int8"
    config = config.with_int8_as_quant()
    assert (config.dtype, config.quant) == (None, QuantizationConfig(scheme="int8"))
    with pytest.raises(ConfigError, match="dtype=int8 asks for weights of 8 bits, and quant"):
        make_config({"dtype": value, "quant": "int4"}, {})


def test_quant_in_short_is_its_scheme():
    assert make_config({"quant": "INT4"}, {}).quant == QuantizationConfig(scheme="int4")
    assert make_config({"quant": True}, {}).quant == QuantizationConfig()
    with pytest.raises(ConfigError, match=r"scheme=.int3.*, .int8_w8a8. or .fp8_w8a8.\."):
        make_config({"quant": "int3"}, {})


def test_degree_is_one_unless_tensor_parallelism_is_enabled():
    assert TensorParallelConfig(tp_size=4).degree == 4
    assert TensorParallelConfig(tp_size=4, enabled=False).degree == 1


def test_bool_and_numbers_of_experts_are_taken_for_moe():
    assert make_config({"moe": False}, {}).moe == MoEConfig(enabled=False)
    assert make_config(None, {"moe": True}).moe == MoEConfig()
    for value in (8, "8", [8], (8,), ["8"], np.int64(8)):
        assert MoEConfig(moe_experts=value).moe_experts == [8]
        assert make_config({"moe": {"num_experts": value}}, {}).moe.moe_experts == [8]


def test_numbers_and_words_are_read_leniently():
    config = make_config(
        {"max_tokens": "12", "min_tokens": np.int32(3), "tp": {"tp_size": 2.0}},
        {"moe": {"type": "Residual"}, "kernel_inject": "yes", "enable_cuda_graph": "false"},
    )
    assert (config.max_out_tokens, config.min_out_tokens) == (12, 3)
    assert (config.tensor_parallel.tp_size, config.moe.type) == (2, "residual")
    assert config.replace_with_kernel_inject is True and config.enable_cuda_graph is False
    weight = QuantizationConfig(weight={"num_bits": "4", "q_type": "Asymmetric"}).weight
    assert weight == WeightQuantConfig(num_bits=4, q_type="asymmetric")


def test_empty_values_ask_for_nothing():
    given = {"quant": {}, "checkpoint": {}, "config": {}, "injection_policy": {}, "tp": {}}
    assert make_config(given, {}) == InferenceConfig()
    assert make_config({"checkpoint": ""}, {}).checkpoint is None
    assert make_config({"checkpoint": ""}, {"checkpoint": "x"}).checkpoint == "x"
    assert make_config({"quant": {}}, {"quant": None}).quant is None


def test_quantization_config_without_arguments_asks_for_quantization():
    assert InferenceConfig(quant=QuantizationConfig()).quant == QuantizationConfig()
    assert make_config(None, {"quant": QuantizationConfig()}).quant == QuantizationConfig()


def test_config_is_frozen_and_nested_configs_too():
    config = make_config(None, {})
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.dtype = "bf16"
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.tensor_parallel.tp_size = 2


def test_equality_is_of_values_not_of_what_was_given():
    assert InferenceConfig(return_tuple=True, tensor_parallel={"tp_size": 1}) == InferenceConfig()
    assert InferenceConfig(dtype="fp16") == InferenceConfig(dtype=torch.half)
    assert InferenceConfig(dtype="fp16") != InferenceConfig()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"backend": "numpy"}, "backend='numpy'.*'torch' or 'jax'"),
        ({"backend": "JAX"}, "backend='JAX'"),
        ({"max_out_tokens": 0}, "max_out_tokens=0.*greater than or equal to 1"),
        ({"max_tokens": -1}, r"max_out_tokens=-1 \(given as max_tokens\)"),
        ({"max_out_tokens": "many"}, "max_out_tokens='many'"),
        ({"max_out_tokens": 2.5}, "max_out_tokens=2.5"),
        ({"max_out_tokens": True}, "max_out_tokens=True.*not a bool"),
        ({"max_out_tokens": [3]}, r"max_out_tokens=\[3\]"),
        ({"max_out_tokens": {}}, "max_out_tokens={}"),
        ({"min_out_tokens": 0}, "min_out_tokens=0"),
        ({"min_out_tokens": None}, "min_out_tokens=None"),
        ({"min_out_tokens": 5, "max_out_tokens": 4}, "min_out_tokens=5 is more .*max_out_tokens=4"),
        ({"return_tuple": "perhaps"}, "return_tuple='perhaps'"),
        ({"return_tuple": None}, "return_tuple=None"),
        ({"kernel_inject": 7}, r"replace_with_kernel_inject=7 \(given as kernel_inject\)"),
        ({"enable_cuda_graph": "maybe"}, "enable_cuda_graph='maybe'"),
        ({"tensor_parallel": {"tp_size": 0}}, "tensor_parallel.tp_size=0"),
        ({"tensor_parallel": {"tp_size": True}}, "tensor_parallel.tp_size=True"),
        ({"tp": {"tp_grain_size": 0}}, "tensor_parallel.tp_grain_size=0"),
        ({"tp": {"timeout": True}}, "tensor_parallel.timeout=True.*no bool"),
        ({"tensor_parallel": 2}, "tensor_parallel=2.*dict or a TensorParallelConfig"),
        ({"tp": None}, "tp=None.*dict or a TensorParallelConfig"),
        ({"moe": 3}, "moe=3.*bool, a dict or a MoEConfig"),
        ({"moe": {"ep_size": 0}}, "moe.ep_size=0"),
        ({"moe": {"moe_experts": []}}, "moe.moe_experts"),
        ({"moe": {"moe_experts": [4, 0]}}, "moe.moe_experts.1=0"),
        ({"moe": {"moe_experts": True}}, "moe.moe_experts"),
        ({"moe": {"type": "dense"}}, "moe.type='dense'.*'standard' or 'residual'"),
        ({"quant": {"weight": {"num_bits": 3}}}, "quant.weight.num_bits=3.*4 or 8"),
        ({"quant": {"weight": {"q_groups": 0}}}, "quant.weight.q_groups=0"),
        ({"quant": {"activation": {"q_type": "x"}}}, "quant.activation.q_type='x'"),
        ({"quant": 4}, "quant=4.*a bool, a str, a dict or a QuantizationConfig"),
        ({"checkpoint": ["a"]}, r"checkpoint=\['a'\].*path or a dict"),
        ({"adapter": ["a", Path("b"), "a"]}, "a is there twice; .*a factor of 2"),
        ({"base_dir": None}, "base_dir=None"),
        ({"save_mp_checkpoint_path": ""}, "save_mp_checkpoint_path=''.*empty path.*or None"),
        ({"config": "x.json"}, "config='x.json'"),
        ({"injection_policy": ("a",)}, "injection_policy"),
        ({"mp_size": 0}, r"tensor_parallel.tp_size=0 \(given as mp_size\)"),
    ],
    ids=str,
)
def test_bad_value_is_refused_by_name(values, message):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in (lambda: make_config(values, {}), lambda: make_config(None, values)):
            with pytest.raises(ConfigError, match=message):
                call()
    with pytest.raises(pydantic.ValidationError):
        InferenceConfig(**values)


def test_every_problem_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        make_config(
            {"dtype": "int4", "zzz": 1, "tm": False, "tp": {"tp_size": -1, "yyy": 1}},
            {"max_tokens": 0, "moe": 3, "return_tuple": "perhaps"},
        )
    lines = str(caught.value).splitlines()
    assert lines[0] == "The config has 8 problems:" and len(lines) == 9
    for part in (
        *("dtype='int4'", "'zzz'", "triangular_masking=False", "tensor_parallel.tp_size=-1"),
        *("'tp.yyy'", "max_out_tokens=0", "moe=3", "return_tuple='perhaps'"),
    ):
        assert sum(part in line for line in lines) == 1, part


def test_hand_made_config_tells_every_problem_as_well():
    with pytest.raises(pydantic.ValidationError) as caught:
        InferenceConfig(dtyp="fp16", max_tokens=0, tp={"tp_sise": 2})
    text = str(caught.value)
    assert caught.value.error_count() == 3
    assert "did you mean 'dtype'" in text and "'tp.tp_sise'; did you mean 'tp_size'" in text
    assert "max_out_tokens=0" in text


def test_long_values_are_cut_in_messages():
    with pytest.raises(ConfigError) as caught:
        make_config({"checkpoint": list(range(10**5)), "dtype": "x" * 10**5, "moe": GROUP}, {})
    assert len(str(caught.value)) < 1000


# Unknown keys


@pytest.mark.parametrize(
    ("values", "key", "hint"),
    [
        ({"dtyp": "fp16"}, "dtyp", "dtype"),
        ({"kernel_injection": True}, "kernel_injection", "kernel_inject"),
        ({"max_token": 3}, "max_token", "max_tokens"),
        ({"mp_sise": 3}, "mp_sise", "mp_size"),
        ({"num_experts": 3}, "num_experts", "moe.num_experts"),
        ({"tp_size": 3}, "tp_size", "tensor_parallel.tp_size"),
        ({"quantization_setting": (True, 8)}, "quantization_setting", "quant"),
        ({"tensor_parallel": {"tp_sise": 3}}, "tensor_parallel.tp_sise", "tp_size"),
        ({"tp": {"mp_size": 3}}, "tp.mp_size", "tp_size"),
        ({"moe": {"num_expert": 3}}, "moe.num_expert", "num_experts"),
        ({"moe": {"expert_groups": 3}}, "moe.expert_groups", "expert_group"),
        ({"quant": {"weights": {}}}, "quant.weights", "weight"),
        ({"quant": {"num_bits": 8}}, "quant.num_bits", "activation.num_bits"),
        ({"quant": {"weight": {"bits": 8}}}, "quant.weight.bits", "num_bits"),
        ({"quant": {"qkv": {"enable": 8}}}, "quant.qkv.enable", "enabled"),
        ({"ckpt_config": {"dir": ""}}, "ckpt_config.dir", "base_dir"),
        ({"dtyp": "auto"}, "dtyp", "dtype"),
    ],
    ids=str,
)
def test_unknown_key_is_refused_with_the_nearest_known_one(values, key, hint):
    with pytest.raises(ConfigError) as caught:
        make_config(values, {})
    assert f"unknown key '{key}'; did you mean '{hint}'" in str(caught.value)
    with pytest.raises(pydantic.ValidationError, match=f"'{key}'"):
        InferenceConfig(**values)


def test_unknown_key_with_no_near_one_is_refused_with_all_of_its_level():
    with pytest.raises(ConfigError, match=r"unknown key '\?'; known are .*dtype.*max_tokens"):
        make_config({"?": 1}, {})
    with pytest.raises(ConfigError, match=r"'\?'; known are .*\bparams, .*\brevision\b"):
        make_config({"?": 1}, {})
    with pytest.raises(ConfigError, match="did you mean 'revision'"):
        make_config(None, {"revison": "main"})
    with pytest.raises(ConfigError, match="revision is an argument of init_inference"):
        make_config({"revision": "main"}, {})
    with pytest.raises(ConfigError, match=r"'device'; no field chooses .*CUDA_VISIBLE_DEVICES"):
        make_config(None, {"device": "cuda"})
    with pytest.raises(ConfigError, match=r"unknown key 'tp\.\?'; known are axis, enabled, mesh"):
        make_config({"tp": {"?": 1}}, {})
    with pytest.raises(ConfigError, match="unknown key '5'"):
        make_config({5: 1}, {})
    with pytest.raises(pydantic.ValidationError, match="did you mean 'tp_size'"):
        TensorParallelConfig(tp_sise=3)


# Stale fields


@pytest.mark.parametrize(("key", "row"), keys_of(STALE))
def test_stale_field_at_a_harmless_value_passes_with_one_warning(key, row):
    name, _, default, harmless, _ = row
    for value in harmless:
        for call in (
            lambda value=value: InferenceConfig(**{key: value}, dtype="fp32"),
            lambda value=value: make_config({key: value, "dtype": "fp32"}, {}),
            lambda value=value: make_config({key: value}, {key: value, "dtype": "fp32"}),
        ):
            with pytest.warns(UserWarning, match=f"^{key}=.*no effect and can be removed") as seen:
                config = call()
            assert len(seen) == 1 and seen[0].filename == __file__
            assert getattr(config, name) == default and config == InferenceConfig(dtype="fp32")


@pytest.mark.parametrize(("key", "row"), keys_of(STALE))
def test_stale_field_at_another_value_is_refused(key, row):
    for value in row[4]:
        with pytest.raises(ConfigError, match=rf"{row[0]}\b|{key}\b"):
            make_config({key: value}, {})
        with pytest.raises(pydantic.ValidationError):
            InferenceConfig(**{key: value})


def test_reason_is_given_with_a_stale_field():
    with pytest.raises(ConfigError, match=r"triangular_masking=False \(given as tm\): .*the model"):
        make_config({"tm": False}, {})
    with pytest.raises(ConfigError, match=r"checkpoint_config.*use the fields `checkpoint`"):
        make_config({"checkpoint_config": {"checkpoint_dir": "x"}}, {})


def test_built_config_does_not_warn_again():
    with pytest.warns(UserWarning, match="no effect") as seen:
        first = InferenceConfig(tm=True, replace_method="auto")
    assert len(seen) == 2
    assert make_config(first, {"dtype": "fp16"}).dtype == "float16"


# Deprecated fields


@pytest.mark.parametrize(("old", "place", "value", "other"), MOVED)
def test_deprecated_field_moves_with_a_warning_at_the_callers_line(old, place, value, other):
    new = ".".join(place)
    for call in (
        lambda: InferenceConfig(**{old: value}),
        lambda: make_config({old: value}, {}),
        lambda: make_config({old: value}, {old: [*value] if isinstance(value, list) else value}),
        lambda: make_config({}, {old: value, place[0]: {place[1]: value}}),
        lambda: make_config({place[0]: {place[1]: value}}, {old: value}),
    ):
        with pytest.warns(DeprecationWarning, match=f"^{old} is deprecated.*{new}") as seen:
            config = call()
        assert len(seen) == 1 and seen[0].filename == __file__
        assert at(config, place) == value
        assert not hasattr(config, old)


@pytest.mark.parametrize(("old", "place", "value", "other"), MOVED)
def test_deprecated_field_and_another_value_in_its_new_place_conflict(old, place, value, other):
    new = ".".join(place)
    pattern = rf"{re.escape(new)}: (?=.*\b{old}=)(?=.*{re.escape(new)}=).* differ"
    for config, overrides in (
        ({old: value, place[0]: {place[1]: other}}, {}),
        ({old: value}, {place[0]: {place[1]: other}}),
        ({place[0]: {place[1]: other}}, {old: value}),
    ):
        with pytest.raises(ConfigError, match=pattern):
            make_config(config, overrides)
    with pytest.raises(pydantic.ValidationError, match=pattern):
        InferenceConfig(**{old: value, place[0]: {place[1]: other}})


def test_deprecated_field_joins_nested_configs_of_every_form():
    with pytest.warns(DeprecationWarning, match="deprecated"):
        config = InferenceConfig(mp_size=2, tp={"tp_grain_size": 1})
    assert config.tensor_parallel == TensorParallelConfig(tp_size=2, tp_grain_size=1)
    with pytest.warns(DeprecationWarning, match="deprecated"):
        config = InferenceConfig(mp_size="2", tensor_parallel=TensorParallelConfig(tp_grain_size=8))
    assert config.tensor_parallel == TensorParallelConfig(tp_size=2, tp_grain_size=8)
    with pytest.warns(DeprecationWarning, match="deprecated"):
        config = make_config({"moe": False}, {"ep_size": 2})
    assert config.moe == MoEConfig(enabled=False, ep_size=2)
    with pytest.raises(ConfigError, match=r"mp_size=1 .*tensor_parallel.tp_size=4"):
        make_config({"mp_size": 1}, {"tensor_parallel": TensorParallelConfig(tp_size=4)})


def test_none_for_a_deprecated_field_is_not_given():
    given = {old: None for old, *_ in MOVED if not old.startswith("expert")}
    config = make_config({**given, "tp": {"tp_size": 2}}, {})
    assert config.model_fields_set == {"tensor_parallel"}


# "auto"


@pytest.mark.parametrize(("key", "row"), keys_of(FIELDS))
def test_auto_is_unset(key, row):
    assert make_config({key: "auto"}, {}).model_fields_set == set()
    assert InferenceConfig(**{key: "auto"}).model_fields_set == set()
    assert getattr(make_config({key: "auto"}, {row[0]: row[2]}), row[0]) == row[3]


def test_auto_is_unset_in_nested_and_deprecated_fields():
    config = make_config({"tp": {"tp_size": "auto", "tp_grain_size": 2}, "mp_size": "auto"}, {})
    assert config.tensor_parallel == TensorParallelConfig(tp_grain_size=2)
    assert make_config({"quant": {"weight": {"num_bits": "auto"}}}, {}).quant is None
    assert TensorParallelConfig(tp_size="auto") == TensorParallelConfig()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dtype": "auto"}, "dtype='auto'"),
        ({"max_tokens": "auto"}, "max_out_tokens='auto'"),
        ({"tp": {"tp_size": "auto"}}, "tp.tp_size='auto'"),
        ({"moe": {"type": "auto"}}, "moe.type='auto'"),
        ({"mp_size": "auto"}, "mp_size='auto'"),
    ],
    ids=str,
)
def test_strict_takes_auto_as_a_value(values, message):
    with pytest.raises(ConfigError, match=message):
        make_config({**values, "strict": True}, {})
    with pytest.raises(ConfigError, match=message):
        make_config(values, {"strict": True})
    with pytest.raises(pydantic.ValidationError, match=re.escape(message.split("=")[0])):
        InferenceConfig(**values, strict=True)
    assert make_config({**values, "strict": False}, {}) == InferenceConfig()


def test_strict_is_reserved_and_a_bool():
    config = make_config({"strict": True, "base_dir": "auto", "dtype": "fp16"}, {"strict": True})
    assert (config.base_dir, config.dtype) == ("auto", "float16")
    assert not hasattr(config, "strict") and "strict" not in config.model_dump()
    for first, second in ((1, 1), (None, None), (True, False)):
        with pytest.raises(ConfigError, match="strict"):
            make_config({"strict": first}, {"strict": second})
    with pytest.raises(ConfigError, match="strict"):
        make_config({"tp": {"strict": True}}, {})


# Merging


def test_config_and_arguments_are_joined():
    config = make_config({"dtype": "bf16"}, {"backend": "jax", "max_out_tokens": 9})
    assert (config.backend, config.dtype, config.max_out_tokens) == ("jax", "bfloat16", 9)
    assert config.model_fields_set == {"backend", "dtype", "max_out_tokens"}


def test_callers_dicts_never_change_and_are_not_shared():
    given = {
        "dtype": "bf16",
        "mp_size": 2,
        "tensor_parallel": {"tp_size": "auto", "tp_grain_size": 2},
        "config": {"rope_scaling": {"factor": 2.0, "list": [1]}},
        "replace_method": "auto",
        "strict": False,
    }
    overrides = {"tp": {"mpu": None}, "args": {"rope_scaling": {"type": "linear"}}}
    before = copy.deepcopy((given, overrides))
    with pytest.warns((UserWarning, DeprecationWarning)):
        config = make_config(given, overrides)
    assert (given, overrides) == before
    assert config.config == {"rope_scaling": {"factor": 2.0, "list": [1], "type": "linear"}}
    given["config"]["rope_scaling"]["list"].append(2)
    overrides["args"]["rope_scaling"]["type"] = "yarn"
    assert config.config == {"rope_scaling": {"factor": 2.0, "list": [1], "type": "linear"}}
    assert (
        InferenceConfig(config=given["config"]).config["rope_scaling"]
        is not (given["config"]["rope_scaling"])
    )


def test_nested_configs_are_merged_key_by_key():
    config = make_config(
        {"tp": {"tp_size": 2}, "quant": {"weight": {"num_bits": 4}}, "moe": {"ep_size": 2}},
        {
            "tensor_parallel": {"tp_grain_size": 8},
            "quant": {"weight": {"q_groups": 2, "post_init_quant": {"a": 1}}, "enabled": False},
            "moe": MoEConfig(type="residual"),
        },
    )
    assert config.tensor_parallel == TensorParallelConfig(tp_size=2, tp_grain_size=8)
    assert config.quant == QuantizationConfig(
        enabled=False, weight={"num_bits": 4, "q_groups": 2, "post_init_quant": {"a": 1}}
    )
    assert config.moe == MoEConfig(ep_size=2, type="residual")
    assert config.tensor_parallel.model_fields_set == {"tp_size", "tp_grain_size"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"dtype": "fp32"}, {"dtype": torch.float32}),
        ({"dtype": np.float16}, {"dtype": "torch.half"}),
        ({"max_tokens": 7}, {"max_out_tokens": 7}),
        ({"max_out_tokens": "12"}, {"max_out_tokens": 12}),
        ({"kernel_inject": True}, {"replace_with_kernel_inject": "true"}),
        ({"tp": {"tp_size": 2}}, {"tensor_parallel": TensorParallelConfig(tp_size=2)}),
        ({"moe": True}, {"moe": {"enabled": True}}),
        ({"moe": {"num_experts": 8}}, {"moe": {"moe_experts": [8]}}),
        ({"moe": {"expert_group": GROUP}}, {"moe": {"ep_group": GROUP}}),
        ({"checkpoint": Path("x")}, {"checkpoint": "x"}),
        ({"checkpoint": {"a": 1, "b": [2]}}, {"checkpoint": {"b": [2], "c": 3}}),
        ({"injection_dict": {int: "a"}}, {"injection_policy": {int: "a"}}),
        ({"config": {"a": {"b": 1}}}, {"args": {"a": {"b": 1}}}),
        (InferenceConfig(dtype="fp16"), {"dtype": "half"}),
        (MappingProxyType({"dtype": "fp16"}), {"dtype": "half"}),
        (OrderedDict(dtype="fp16", tp=OrderedDict(tp_size=2)), {"tp": {"tp_size": 2}}),
    ],
    ids=str,
)
def test_same_meaning_twice_is_no_conflict(first, second):
    both = make_config(first, second)
    for name in make_config(None, second).model_fields_set - {"checkpoint"}:
        assert getattr(both, name) == getattr(make_config(first, {}), name)


@pytest.mark.parametrize(
    ("first", "second", "key", "shown"),
    [
        ({"dtype": "fp32"}, {"dtype": torch.half}, "dtype", ("'fp32'", "torch.float16")),
        ({"max_tokens": 7}, {"max_out_tokens": "8"}, "max_out_tokens", ("max_tokens=7", "'8'")),
        ({"return_tuple": True}, {"return_tuple": False}, "return_tuple", ("True", "False")),
        (InferenceConfig(backend="torch"), {"backend": "jax"}, "backend", ("'torch'", "'jax'")),
        (InferenceConfig(max_tokens=5), {"max_tokens": 6}, "max_out_tokens", ("=5", "=6")),
        (
            *({"tp": {"tp_size": 2}}, {"tensor_parallel": {"tp_size": 4}}),
            *("tensor_parallel.tp_size", ("tp.tp_size=2", "tensor_parallel.tp_size=4")),
        ),
        ({"moe": True}, {"moe": {"enabled": False}}, "moe.enabled", ("moe=True", "=False")),
        ({"config": {"a": {"b": 1}}}, {"args": {"a": {"b": 2}}}, "config.a.b", ("=1", "=2")),
        ({"checkpoint": {"a": 1}}, {"checkpoint": "a"}, "checkpoint", ("{'a': 1}", "'a'")),
        (
            *({"injection_policy": {int: "a"}}, {"injection_policy": {int: "b"}}),
            *("injection_policy.<class 'int'>", ("'a'", "'b'")),
        ),
        (
            *({"tp": {"mpu": np.zeros(2)}}, {"tp": {"mpu": np.ones(2)}}),
            *("tensor_parallel.mpu", ("array", "array")),
        ),
    ],
    ids=str,
)
def test_conflict_names_the_key_and_both_values_as_given(first, second, key, shown):
    with pytest.raises(ConfigError) as caught:
        make_config(first, second)
    text = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert text.startswith(f"{key}: ") and text.endswith("differ; give one of them.")
    one, two = text.split(" in config and ")
    assert shown[0] in one and shown[1] in two and "as a keyword argument" in two


def test_config_object_is_taken_and_not_changed():
    first = InferenceConfig(dtype="fp16", max_tokens=5)
    config = make_config(first, {"backend": "jax"})
    assert (config.backend, config.dtype, config.max_out_tokens) == ("jax", "float16", 5)
    assert first.backend == "torch" and first.model_fields_set == {"dtype", "max_out_tokens"}


@pytest.mark.parametrize("make", [lambda v: make_config(v, {}), lambda v: InferenceConfig(**v)])
def test_field_given_by_name_and_alias_at_once_is_refused(make):
    for name, alias, value, _ in FIELDS:
        if alias:
            with pytest.raises(ValueError, match=f"{name}: given twice, as {alias} and as {name}"):
                make({alias: value, name: value})
    for values in (
        {"tm": True, "triangular_masking": True},
        {"moe": {"num_experts": 2, "moe_experts": 2}},
        {"ep_group": GROUP, "expert_group": GROUP},
    ):
        with pytest.raises(ValueError, match="given twice"):
            make(values)


def test_none_is_not_given_where_it_is_the_default():
    config = make_config(
        {"dtype": None, "max_tokens": None, "tp": {"mpu": None}, "use_triton": None, "quant": None},
        {"dtype": "fp16", "max_tokens": 7, "tp": {"mpu": GROUP}},
    )
    assert (config.dtype, config.max_out_tokens) == ("float16", 7)
    assert config.tensor_parallel.mpu is GROUP
    assert config.model_fields_set == {"dtype", "max_out_tokens", "tensor_parallel"}


def test_fields_of_both_sources_are_checked_together():
    with pytest.raises(ConfigError, match="min_out_tokens=5 is more than max_out_tokens=4"):
        make_config({"min_tokens": 5}, {"max_tokens": 4})
    assert make_config({"min_tokens": 5}, {"max_tokens": 5}).min_out_tokens == 5


@pytest.mark.parametrize("value", [5, ["dtype"], b"x", Handle(), True])
def test_config_of_another_type_is_refused(value):
    with pytest.raises(ConfigError, match=type(value).__name__):
        make_config(value, {})


def test_config_is_read_from_a_json_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"dtype": "fp16", "tp": {"tp_size": 2}}))
    for given in (path, str(path)):
        config = make_config(given, {"backend": "jax", "tp": {"tp_grain_size": 2}})
        assert (config.backend, config.dtype) == ("jax", "float16")
        assert config.tensor_parallel == TensorParallelConfig(tp_size=2, tp_grain_size=2)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'"x"', b"null", b'{"dtype": "\xff"}'])
def test_file_that_holds_no_json_object_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        make_config(path, {})


def test_path_that_is_no_file_is_refused(tmp_path):
    with pytest.raises(ConfigNotFoundError, match=r"nowhere\.json"):
        make_config(tmp_path / "nowhere.json", {})
    for path in (tmp_path, json.dumps({"dtype": "fp16" * 1000})):
        with pytest.raises(ConfigError, match="config="):
            make_config(path, {})


# Round trips


def test_default_config_round_trips_and_takes_arguments():
    default = default_inference_config()
    assert json.loads(json.dumps(default)) == default
    assert not default.keys() & {"backend", *(name for name, *_ in STALE)}
    assert InferenceConfig(**default) == InferenceConfig() == make_config(default, {})
    overrides = {"dtype": "fp16", "backend": "jax", "max_out_tokens": 7}
    assert make_config(default, overrides) == InferenceConfig(**overrides)
    default["tensor_parallel"]["tp_size"] = 8
    assert default_inference_config()["tensor_parallel"]["tp_size"] == 1


def test_config_round_trips_through_json():
    values = {
        name: value for name, _, value, _ in FIELDS if name not in ("injection_policy", "config")
    }
    config = InferenceConfig(
        **values | {"max_out_tokens": 9, "moe": {"num_experts": [4, 8]}, "config": {"a": [1]}},
        injection_policy={"Layer": "wo"},
    )
    assert InferenceConfig(**json.loads(json.dumps(config.model_dump(mode="json")))) == config
    assert InferenceConfig.model_validate_json(config.model_dump_json()) == config
    assert copy.deepcopy(config) == config


# DeepSpeed's own cases of its config test, which reads them from init_inference


def test_overlapping_keys_of_equal_value_are_accepted():
    config = {"replace_with_kernel_inject": True, "dtype": torch.float32}
    kwargs = {"replace_with_kernel_inject": True}
    assert make_config(config, kwargs).replace_with_kernel_inject is True


def test_overlapping_keys_of_different_value_are_a_value_error():
    with pytest.raises(ValueError, match="replace_with_kernel_inject"):
        make_config({"replace_with_kernel_inject": True}, {"replace_with_kernel_inject": False})


def test_arguments_and_config_are_merged():
    config = make_config({"replace_with_kernel_inject": True}, {"dtype": torch.float32})
    assert config.replace_with_kernel_inject and config.dtype == "float32"


def test_json_config_and_arguments_are_merged(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"replace_with_kernel_inject": True}))
    config = make_config(str(path), {"dtype": torch.float32})
    assert config.replace_with_kernel_inject and config.dtype == "float32"


@pytest.mark.parametrize("moe", [True, False])
def test_bool_moe_is_accepted(moe):
    assert make_config({"moe": moe}, {}).moe.enabled is moe


# The page


def tables():
    """{heading: rows of its tables as lists of cells, without head and ruler}."""
    found, heading = {}, ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.strip("# ")
        elif line.startswith("| `") or line.startswith(("| float", "| bfloat")):
            found.setdefault(heading, []).append([c.strip() for c in line.strip("|").split("|")])
    return found


def documented(rows):
    """{field: (alias, default)} of a table's rows."""
    return {row[0].strip("`"): (row[1].strip("`"), row[2].strip("`")) for row in rows}


def expected(model):
    """The same from the model; a nested config's default is {} in the page."""
    result = {}
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        shown = "{}" if isinstance(default, pydantic.BaseModel) else repr(default)
        result[name] = (field.validation_alias or "", shown)
    return result


def test_page_holds_every_field_with_alias_and_default():
    found = tables()
    stale = {name for name, *_ in STALE}
    fields = expected(InferenceConfig)
    assert documented(found["Fields"]) == {n: v for n, v in fields.items() if n not in stale}
    assert documented(found["Stale fields"]) == {n: v for n, v in fields.items() if n in stale}
    for place, model in NESTED.items():
        headings = [h for h in found if place in h.split(", ")]
        assert len(headings) == 1, place
        rows = documented(found[headings[0]])
        if model is ActivationQuantConfig:  # shares its table with the weights, which have more
            rows = {n: v for n, v in rows.items() if n in model.model_fields}
        assert rows == expected(model), place


def test_page_holds_every_deprecated_field_and_dtype():
    rows = tables()["Deprecated fields"]
    assert {old.strip("`"): tuple(new.strip("`").split(".")) for old, new in rows} == dict(
        InferenceConfig.moved
    )
    spellings = {
        spelling.strip("` "): name
        for name, cell in tables()["dtype"]
        for spelling in cell.split(",")
    }
    assert spellings == dict(DTYPES)


@pytest.mark.parametrize("model", [InferenceConfig, *NESTED.values()], ids=lambda m: m.__name__)
def test_every_field_has_a_docstring(model):
    """Or a description, where a table makes it."""
    explained = {name for name, field in model.model_fields.items() if field.description}
    for owner in model.__mro__:
        if owner.__module__.startswith("dualinfer.") and owner.__name__ != "StaleFields":
            (body,) = (node.body for node in ast.parse(inspect.getsource(owner)).body)
            explained |= {
                ast.unparse(field.target)
                for field, text in pairwise(body)
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
            }
    assert model.model_fields.keys() <= explained


def test_auto_beside_an_alias_is_unset_and_a_tilde_is_the_home(tmp_path, monkeypatch):
    config = make_config({"tensor_parallel": "auto", "tp": {"tp_size": 2}}, {})
    assert config.tensor_parallel.tp_size == 2
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.json").write_text('{"dtype": "bf16"}')
    assert make_config("~/c.json", {}).dtype == "bfloat16"


def test_hints_point_to_fields_that_work():
    with pytest.raises(ConfigError) as caught:
        make_config({"train_batch_size": 1, "zero_stage": 0, "torch_dtype": 1, "mp": 2}, {})
    text = str(caught.value)
    assert "training_mp_size" not in text and "did you mean 'zero'" in text
    assert "did you mean 'dtype'" in text and "did you mean 'tensor_parallel'" in text


def test_json_with_a_name_twice_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"dtype": "fp32", "tensor_parallel": {"tp_size": 1, "tp_size": 2}}')
    with pytest.raises(ConfigError, match="names tp_size twice"):
        make_config(str(path), {})

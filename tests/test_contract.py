"""The contract's single-device rows that no other file proves, by the inventory's sections.

Where the other rows are proved (files of tests/, by the part that owns the behaviour):
1.1-1.3  here; test_config (merging); test_errors (conflicts, unknown keys); test_limits (models
         that are none, injection that would replace nothing)
2.1-2.6  test_config; what a mode, device or version refuses: test_limits. 2.7 here
3.1-3.3  test_engine, test_module_torch, test_module_jax, parity/test_logits; here: what stays as
         it was. 3.4 test_errors (fused lengths), test_pipelines (beams); here: module mode
3.5      test_module_torch (keys, copies, bound), test_module_jax (executables), test_gpu_torch
3.6      test_engine, test_module_torch, test_module_jax, test_gpu_*; here: a pipeline
3.7      several devices are refused: test_limits. 3.8 here and test_errors
4        test_deepspeed_checkpoints; test_checkpoint and test_module_torch (HF's files)
9        test_limits, test_module_torch, test_module_jax (bytes); test_errors (lengths);
         test_generate (growth)
10.1     TestInferenceConfig, TestModelProfiling: here, through init_inference
10.4     padding: parity/test_logits, test_generate. length, batch, multi-engine: here too. graph:
         as 3.5. backends: parity/test_torch_vs_jax. beams: test_pipelines
10.5     here, one test a quirk; a checkpoint that does not fit: test_errors; memory while
         loading: test_checkpoint (mapped)
"""

import copy
import gc
import json
import logging
import os
import random
import time
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers as hf
from flax import nnx

import dualinfer
from dualinfer import init_inference

from .cases import make_model
from .cases.decoders import CASES
from .models import BACKENDS, random_ids
from .test_engine import make_module
from .test_pipelines import make_bert, make_gpt2, make_tokenizer

CAUSAL = "llama-gqa"
INJECT = {"replace_with_kernel_inject": True}


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


class Successor(nnx.Module):
    """A Flax module with a generate: each token is followed by the next id."""

    def __init__(self):
        self.table = nnx.Param(jnp.roll(jnp.eye(101), 1, axis=1))

    def __call__(self, ids):
        return self.table[...][ids]

    def generate(self, input_ids=None, generation_config=None, max_new_tokens=None, **options):
        given = options if generation_config is None else generation_config | options
        if input_ids is None:
            input_ids = jnp.array([[1]])
        width = input_ids.shape[1]
        length = given.get("max_length", width + (given.get("max_new_tokens") or 20))
        for _ in range(max_new_tokens or length - width):
            input_ids = jnp.column_stack((input_ids, self(input_ids)[:, -1].argmax(-1)))
        return input_ids


def make_generating(mode, hf_model, **fields):
    """An engine that generates, in one of the modes fused-torch, fused-jax, module-torch, ..."""
    kind, _, backend = mode.partition("-")
    if kind == "fused":
        return init_inference(hf_model("gpt2"), backend=backend, dtype="fp32", **INJECT, **fields)
    module = copy.deepcopy(hf_model("gpt2")) if backend == "torch" else Successor()
    return init_inference(module, backend=backend, dtype="fp32", **fields)


MODES = [f"{kind}-{backend}" for kind in ("fused", "module") for backend in BACKENDS]


# 1.1-1.3 and 10.1 TestInferenceConfig: the call's forms


def test_every_form_of_the_call_gives_the_same_engine(backend, hf_model, tmp_path):
    fields = {"dtype": "fp32", "tensor_parallel": {"tp_size": 1}, "max_out_tokens": 40, **INJECT}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    rest = {name: value for name, value in fields.items() if name != "dtype"}
    calls = [
        ((fields,), {}),
        ((str(path),), {}),
        ((Path(path),), {}),
        ((dualinfer.InferenceConfig(**fields),), {}),
        ((), fields),
        ((), {"config": fields}),
        ((rest,), {"dtype": torch.float32}),
        ((str(path),), {"tp": {"tp_grain_size": 64}, "kernel_inject": True, "dtype": np.float32}),
        (({**fields, "moe": "auto", "checkpoint": "auto"},), {}),
    ]
    ids, seen = random_ids(1, 5), []
    for args, kwargs in calls:
        with init_inference(hf_model(CAUSAL), *args, backend=backend, **kwargs) as engine:
            seen.append((engine.inference_config, np.asarray(engine(ids).logits)))
    for config, logits in seen:
        assert config == seen[0][0]
        np.testing.assert_array_equal(logits, seen[0][1])


def test_no_config_at_all_serves(backend, hf_model):
    engine = init_inference(model=hf_model(CAUSAL), backend=backend)
    assert engine.inference_config.tensor_parallel.tp_size == 1
    assert engine.generate(torch.tensor(random_ids(1, 4)), max_new_tokens=2).shape == (1, 6)


@pytest.mark.parametrize("make", [lambda: torch.nn.Module(), make_gpt2], ids=["bare", "hf"])
def test_deepspeeds_own_config_cases(make, tmp_path):
    """TestInferenceConfig; a bare module is injected with nothing, so that we refuse to try."""
    inject = {"replace_with_kernel_inject": make is make_gpt2}
    config = {**inject, "dtype": torch.float32}
    assert init_inference(make(), config, **config).inference_config.dtype == "float32"
    for other in ({"dtype": torch.float16}, {"kernel_inject": not config[next(iter(inject))]}):
        with pytest.raises(ValueError, match=next(iter(other))):
            init_inference(make(), config, **other)
    engine = init_inference(make(), inject, dtype=torch.float32)
    assert engine.inference_config == init_inference(make(), config).inference_config
    path = tmp_path / "config.json"
    path.write_text(json.dumps(inject))
    built = init_inference(make(), str(path), dtype=torch.float32).inference_config
    assert built == engine.inference_config
    for moe in (True, False):
        engine = init_inference(make(), {**config, "moe": moe})
        assert engine.inference_config.moe.enabled is moe
    if not inject["replace_with_kernel_inject"]:
        with pytest.raises(dualinfer.ModelError, match="Leave replace_with_kernel_inject unset"):
            init_inference(make(), replace_with_kernel_inject=True)


def test_callers_config_stays_as_it_was(backend, hf_model):
    inner = {"tp_size": 1}
    config = {"tensor_parallel": inner, "moe": {"ep_size": 1}, "config": {"rms_norm_eps": 1e-5}}
    kwargs = {"tp": {"tp_grain_size": 2}, "mp_size": 1, "dtype": torch.float32, **INJECT}
    before = copy.deepcopy((config, kwargs))
    with pytest.deprecated_call(match="mp_size"):
        engine = init_inference(hf_model(CAUSAL), config, backend=backend, **kwargs)
    assert (config, kwargs) == before and config["tensor_parallel"] is inner
    inner["tp_size"] = 2
    assert engine.inference_config.tensor_parallel.tp_size == 1


def test_default_config_makes_an_engine(backend, hf_model):
    config = dualinfer.default_inference_config() | {"dtype": "fp32", **INJECT}
    engine = init_inference(hf_model(CAUSAL), json.loads(json.dumps(config)), backend=backend)
    assert engine.report().mode == "fused"


# 2.2: the dtype and the device


def test_dtype_that_the_card_lacks_is_found_before_loading(tmp_path, monkeypatch):
    """A card before Ampere, which no machine here has, is made up."""
    CASES[CAUSAL].make_config().save_pretrained(tmp_path)  # no weights: reading fails otherwise
    monkeypatch.setattr("dualinfer.backends.torch.default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old Card")
    with pytest.raises(dualinfer.ConfigError, match=r"'bfloat16': Old Card.*Use float16"):
        init_inference(tmp_path, dtype="bf16")
    module, _ = make_module("torch")
    with pytest.raises(dualinfer.ConfigError, match="Old Card"):
        init_inference(module, dtype=torch.bfloat16)
    assert module.training


# 2.7: what stale documents tell users to write


OLD = {
    "0.5": dict(mp_size=1, dtype=torch.float, replace_method="auto", kernel_inject=True),
    "0.7": dict(
        mp_size=1,
        mpu=None,
        checkpoint=None,
        dtype=torch.float,
        injection_policy=None,
        replace_method="auto",
        return_tuple=True,
        ep_size=1,
        moe=False,
        moe_experts=1,
        moe_type="standard",
        training_mp_size=1,
        enable_cuda_graph=False,
        max_tokens=64,
        replace_with_kernel_inject=True,
    ),
    "json": dict(
        config={
            "tensor_parallel": {"enabled": True, "tp_size": 1},
            "dtype": "float",
            "replace_method": "auto",
            "enable_cuda_graph": False,
            "min_out_tokens": 1,
            "triangular_masking": True,
            "zero": {"stage": 0},
            "quant": {"enabled": False},
            "ckpt_config": {},
            "kernel_inject": True,
        }
    ),
    "engine test": dict(
        mp_size=os.getenv("WORLD_SIZE", "1"),
        dtype="torch.float",
        use_triton=False,
        triton_autotune=False,
        save_mp_checkpoint_path=None,
        base_dir="",
        transposed_mode=False,
        set_empty_params=False,
        kernel_inject=True,
    ),
}


@pytest.mark.parametrize("call", OLD.values(), ids=OLD)
def test_old_calls_run_and_warn_at_the_callers_line(call, backend, hf_model):
    ids = torch.tensor(random_ids(1, 5))
    with torch.no_grad():
        expected = hf_model("gpt2")(ids).logits
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = init_inference(hf_model("gpt2"), backend=backend, **call)
    assert caught and {w.filename for w in caught} == {__file__}
    assert {w.category for w in caught} <= {DeprecationWarning, UserWarning}
    texts = [str(w.message) for w in caught]
    assert len(set(texts)) == len(texts)
    torch.testing.assert_close(engine(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert engine.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 8)


@pytest.mark.filterwarnings("ignore:mp_size is deprecated")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantization_setting": (True, 64)}, "'quantization_setting'; did you mean 'quant'"),
        ({"dtype": torch.int4}, r"dtype=torch\.int4.*`quant`"),
        ({"dtype": torch.float64}, r"dtype=torch\.float64.*use float32"),
        ({"num_experts": 2}, r"did you mean 'moe\.num_experts'"),
        ({"tp_size": 1}, r"did you mean 'tensor_parallel\.tp_size'"),
        ({"tensor_parallel": 1}, "tensor_parallel=1.*expected a dict"),
        ({"mp_size": 99}, r"tp_size=99"),  # processes on torch, devices on JAX
        ({"zero": {"stage": 2}}, r"zero\.stage=2.*expected 0 or 3"),
        ({"fp16": {"enabled": True}}, "unknown key 'fp16'"),
        ({"cpu_offload": True}, "unknown key 'cpu_offload'"),
        ({"max_out_tokens": -1}, "max_out_tokens=-1"),
    ],
    ids=str,
)
def test_stale_documents_get_an_answer(fields, message, backend, hf_model):
    with pytest.raises(dualinfer.ConfigError, match=message):
        init_inference(hf_model(CAUSAL), backend=backend, **fields)


def test_policy_classes_as_values_are_refused_by_name():
    """DeepSpeed's config page shows {layer class: policy class}, which fails there as well."""

    class HFBertLayerPolicy:
        pass

    layer = hf.models.bert.modeling_bert.BertLayer
    with pytest.raises(dualinfer.ConfigError, match=r"HFBertLayerPolicy.*names of the linear"):
        init_inference(make_bert(hf.BertModel), injection_policy={layer: HFBertLayerPolicy})


# 3.4 and 10.4 length: the guard in module mode, and the same table in fused mode

AT_CAPACITY = [
    (lambda ids: ((ids,), {"max_new_tokens": 7})),
    (lambda ids: ((), {"input_ids": ids, "max_new_tokens": 7})),
    (lambda ids: ((ids,), {"max_length": 12})),
    (lambda ids: ((ids, {"max_new_tokens": 7}), {})),
    (lambda ids: ((ids,), {"generation_config": {"max_length": 12}})),
    (lambda ids: ((ids, {"max_new_tokens": 99}), {"max_new_tokens": 7})),
    (lambda ids: ((ids,), {})),  # HF's 20 are a default, which gives way
]
BEYOND = [
    (lambda ids: ((ids,), {"max_new_tokens": 8})),
    (lambda ids: ((), {"input_ids": ids, "max_new_tokens": 8})),
    (lambda ids: ((ids,), {"max_length": 13})),
    (lambda ids: ((ids, {"max_new_tokens": 8}), {})),
    (lambda ids: ((ids,), {"generation_config": {"max_length": 13}})),
    (lambda ids: ((ids, {"max_new_tokens": 1}), {"max_new_tokens": 8})),
    (lambda ids: ((ids[:, :1].repeat(1, 12),), {"max_new_tokens": 1})),
    (lambda ids: ((ids[:, :1].repeat(1, 40),), {})),
]


def as_called(call, mode):
    """The call's arguments as the mode's own generate takes them."""
    args, kwargs = call(torch.tensor(random_ids(2, 5, vocab=100)))
    to = jnp.asarray if mode == "module-jax" else (lambda x: x)
    config = hf.GenerationConfig if mode == "module-torch" else (lambda **fields: fields)

    def translate(value):
        if isinstance(value, torch.Tensor):
            return to(value)
        return config(**value) if isinstance(value, dict) else value

    return [translate(a) for a in args], {name: translate(v) for name, v in kwargs.items()}


@pytest.mark.parametrize("mode", MODES)
def test_prompt_and_new_tokens_are_held_to_the_limit_however_they_are_asked_for(mode, hf_model):
    engine = make_generating(mode, hf_model, max_out_tokens=12)
    # No EOS may end a text early; the id is one that never comes.
    more = {} if mode == "module-jax" else {"eos_token_id": 1000, "pad_token_id": 0}
    for call in AT_CAPACITY:
        args, kwargs = as_called(call, mode)
        assert engine.generate(*args, **kwargs, **more).shape == (2, 12)
    engine.profile_model_time()
    for call in BEYOND:
        args, kwargs = as_called(call, mode)
        with pytest.raises(dualinfer.LengthError, match=r"max_out_tokens \(12\)") as error:
            engine.generate(*args, **kwargs)
        assert isinstance(error.value, RuntimeError) and isinstance(error.value, ValueError)
    assert engine.model_times() == []  # nothing ran


@pytest.mark.parametrize("name", ["max_length", "max_new_tokens"])
@pytest.mark.parametrize("mode", ["fused-torch", "fused-jax", "module-torch"])
def test_models_own_length_gives_way_to_the_limit(name, mode, hf_model):
    engine = make_generating(mode, hf_model, max_out_tokens=12)
    own = hf.GenerationConfig(pad_token_id=0, **{name: 40})
    if mode == "module-torch":
        engine.module.generation_config = own
    engine.generation_config = own
    assert engine.generate(torch.tensor(random_ids(2, 5))).shape == (2, 12)


def test_module_mode_has_no_limit_unless_it_is_set(hf_model):
    engine = make_generating("module-torch", hf_model)
    ids = torch.tensor(random_ids(1, 90))
    out = engine.generate(ids, max_new_tokens=30, min_new_tokens=30, do_sample=False)
    assert out.shape == (1, 120)
    expected = hf_model("gpt2").generate(ids, max_new_tokens=30, min_new_tokens=30, do_sample=False)
    assert torch.equal(out, expected)


def test_encoder_and_decoder_are_each_held_to_the_limit():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4}
    config = hf.T5Config(vocab_size=99, decoder_start_token_id=0, **sizes)
    model = hf.T5ForConditionalGeneration(config)
    engine = init_inference(model, dtype="fp32", max_out_tokens=8)
    ids = torch.tensor(random_ids(2, 8, vocab=99))
    assert engine.generate(ids, max_new_tokens=7, min_new_tokens=7).shape == (2, 8)
    for arguments, options in [
        ((ids,), {"max_new_tokens": 8}),
        ((), {"input_ids": torch.tensor(random_ids(1, 9, vocab=99)), "max_new_tokens": 1}),
        ((ids,), {"decoder_input_ids": ids[:, :5], "max_new_tokens": 4}),
    ]:
        with pytest.raises(dualinfer.LengthError, match=r"max_out_tokens \(8\)"):
            engine.generate(*arguments, **options)


def test_without_a_prompt_generate_starts_as_the_module_does(backend, hf_model):
    model = hf_model("llama-gqa")
    bos = {"bos_token_id": 1, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    engine = init_inference(model, backend=backend, dtype="fp32", **INJECT)
    expected = model.generate(**bos)
    np.testing.assert_array_equal(np.asarray(engine.generate(**bos)), expected.numpy())
    with pytest.raises(dualinfer.ArgumentError, match="input_ids is missing"):
        make_generating(f"fused-{backend}", hf_model).generate(bos_token_id=None)
    engine = make_generating(f"module-{backend}", hf_model, max_out_tokens=9)
    out = engine.generate(input_ids=None, max_new_tokens=4)
    np.testing.assert_array_equal(out, engine.module.generate(max_new_tokens=4))


# 3.6 and 10.1 TestModelProfiling


@pytest.mark.parametrize("events", [True, False])
@pytest.mark.parametrize("graphs", [None, False, True])
@pytest.mark.parametrize("mode", ["fused-torch", "fused-jax", "module-torch"])
def test_ten_runs_of_a_pipeline_take_longer_than_the_model(mode, graphs, events):
    kind, _, backend = mode.partition("-")
    model = make_bert(hf.BertForMaskedLM)
    fields = {"dtype": "fp16", "enable_cuda_graph": graphs, "kernel_inject": kind == "fused"}
    if graphs and backend == "torch" and not torch.cuda.is_available():
        with pytest.raises(dualinfer.ConfigError, match="enable_cuda_graph=True needs a CUDA"):
            init_inference(model, backend=backend, **fields)
        return
    pipe = hf.pipeline("fill-mask", model=model, tokenizer=make_tokenizer(), device=-1)
    pipe.model = init_inference(pipe.model, backend=backend, **fields)
    pipe.model.profile_model_time(use_cuda_events=events)
    end_to_end, model_times = [], []
    for _ in range(10):
        start = time.perf_counter()
        pipe("the cat [MASK] on a mat")
        end_to_end.append((time.perf_counter() - start) * 1e3)
        model_times += pipe.model.model_times()
    assert len(model_times) == 10
    assert all(0 < one <= whole for one, whole in zip(model_times, end_to_end, strict=True))


# 3.8 and 10.5: combinations that cannot work are found before anything is loaded


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_cuda_graph": True, "tensor_parallel": {"tp_size": 99}},
        {"tensor_parallel": {"tp_size": 99}},
        {"injection_policy": {torch.nn.Linear: "out"}, **INJECT},
        {"use_triton": True},
        {"min_out_tokens": 9, "max_out_tokens": 8},
        {"checkpoint": {"type": "ds_model", "checkpoints": ["a.bin"], "version": 1.0}},
        {"quant": {"weight": {"enabled": False}}},
    ],
    ids=str,
)
def test_combination_that_cannot_work_is_found_before_loading(fields, backend, tmp_path):
    CASES[CAUSAL].make_config().save_pretrained(tmp_path)  # no weights: reading fails otherwise
    with pytest.raises(dualinfer.ConfigError):
        init_inference(tmp_path, backend=backend, **fields)
    with pytest.raises(dualinfer.CheckpointError):
        init_inference(tmp_path, backend=backend)


def test_graph_on_the_host_is_found_before_the_module_is_touched(monkeypatch):
    """With a GPU `keep_module_on_host` is what stands in the way; here the GPU is made up."""
    monkeypatch.setattr("dualinfer.backends.device_kind", lambda backend: "cuda")
    module, _ = make_module("torch")
    with pytest.raises(dualinfer.ConfigError, match="stays on cpu"):
        init_inference(module, dtype="bf16", enable_cuda_graph=True, keep_module_on_host=True)
    assert module.training and next(module.parameters()).dtype == torch.float32


def test_engine_without_generate_has_none(backend):
    module, _ = make_module(backend)
    engine = init_inference(module, backend=backend, dtype="fp32")
    with pytest.raises(AttributeError, match="generate"):
        engine.generate(np.ones((1, 2), int))
    assert not hasattr(engine, "generate") and not engine.can_generate()


# 10.4 batch: first a small one, then a large one, and back


@pytest.mark.parametrize("mode", MODES)
def test_large_batch_after_a_small_one(mode, hf_model):
    engine = make_generating(mode, hf_model)
    to = torch.tensor if mode.endswith("torch") else jnp.asarray
    options = {"max_new_tokens": 6}
    if mode != "module-jax":
        options |= {"do_sample": False, "min_new_tokens": 6}
    wide = random_ids(9, 40, vocab=90)
    for rows, width in ((1, 2), (9, 40), (2, 3), (9, 40)):
        ids = wide[:rows, :width]
        text = np.asarray(engine.generate(to(ids), **options))
        np.testing.assert_array_equal(text[:, :width], ids)
        out = engine(to(ids))
        logits = np.asarray(getattr(out, "logits", out))
        assert text.shape == (rows, width + 6) and logits.shape[:2] == (rows, width)
        if mode == "module-jax":
            np.testing.assert_array_equal(text[:, -1], ids[:, -1] + 6)
            continue
        with torch.no_grad():
            wanted = hf_model("gpt2")(torch.tensor(ids)).logits
        np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4)
        expected = hf_model("gpt2").generate(torch.tensor(ids), **options, pad_token_id=0)
        np.testing.assert_array_equal(text, expected)


# 10.4 multi-engine: modes side by side, one destroyed


def test_one_engine_destroyed_leaves_those_of_other_modes(backend, hf_model):
    ids = torch.tensor(random_ids(2, 6))
    model = make_model(CAUSAL)
    options = {"max_new_tokens": 5, "do_sample": False}
    expected = hf_model(CAUSAL).generate(ids, **options)
    fused = [
        init_inference(model, backend=backend, dtype=dtype, **INJECT, max_out_tokens=limit)
        for dtype, limit in (("fp32", None), ("bf16", 30), ("fp32", 11))
    ]
    module = init_inference(model, dtype="fp32")
    stream = fused[2].stream(ids, **options)
    first = next(stream)
    fused[0].destroy()
    del fused[0]
    gc.collect()
    assert torch.equal(module.generate(ids, **options), expected)
    tokens = np.array([first, *stream]).T
    np.testing.assert_array_equal(tokens, expected[:, 6:])
    module.destroy()
    assert torch.equal(fused[1].generate(ids, **options), expected)
    fused[0].destroy()
    assert torch.equal(fused[1].generate(ids, **options), expected)
    assert torch.equal(model.generate(ids, **options), expected)  # the caller's own


# 10.5: quirks


def surface(module):
    """Names and identities of what a module and its classes hold, and of its hooks."""
    return {
        name: (
            type(part),
            vars(part).keys(),
            {k: id(v) for k, v in vars(type(part)).items()},
            [dict(v) for k, v in vars(part).items() if k.endswith("_hooks")],
        )
        for name, part in module.named_modules()
    }


def test_fused_mode_plants_nothing_on_the_module_or_its_classes(backend):
    """Neither reset_cache, nor another method, nor a hook; weights that are tied stay so."""
    model = make_model("llama-mqa")
    before, parameters = surface(model), [id(p) for p in model.parameters()]
    engine = init_inference(model, backend=backend, dtype="bf16", **INJECT)
    engine.profile_model_time()
    engine.generate(random_ids(1, 4), max_new_tokens=2)
    engine(random_ids(1, 4))
    assert engine.report().parameters == sum(p.numel() for p in model.parameters())
    engine.close()
    assert surface(model) == before and [id(p) for p in model.parameters()] == parameters
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(hasattr(part, "reset_cache") for part in model.modules())


def test_module_mode_leaves_no_hooks_and_unties_nothing(hf_model):
    model = copy.deepcopy(hf_model("gpt2"))
    before = surface(model)
    with init_inference(model, dtype="bf16") as engine:
        engine.profile_model_time()
        engine.generate(torch.tensor(random_ids(1, 4)), max_new_tokens=2)
        assert engine.module is model
        count = engine.report().parameters
    assert surface(model) == before
    assert model.lm_head.weight is model.transformer.wte.weight
    assert count == sum(p.numel() for p in hf_model("gpt2").parameters())
    assert not any(hasattr(part, "reset_cache") for part in model.modules())


@pytest.mark.parametrize("mode", ["fused-torch", "fused-jax", "module-torch", "meta"])
def test_callers_random_state_and_environment_stay(mode, hf_model, tmp_path):
    if mode == "meta":
        hf_model("gpt2").save_pretrained(tmp_path)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)

    def state():
        return (
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.random.get_rng_state().tolist(),
            dict(os.environ),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            logging.getLogger().level,
            logging.getLogger().handlers[:],
            warnings.filters[:],
        )

    if mode == "module-torch":
        module = copy.deepcopy(hf_model("gpt2"))
    before = state()
    if mode == "meta":
        with torch.device("meta"):
            module = hf.GPT2LMHeadModel(hf_model("gpt2").config)
        engine = init_inference(module, checkpoint=tmp_path, dtype="fp32")
    elif mode == "module-torch":
        engine = init_inference(module, dtype="bf16")
    else:
        engine = make_generating(mode, hf_model)
    ids = torch.tensor(random_ids(2, 5))
    engine(ids)
    engine.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    engine.profile_model_time()
    engine(ids)
    engine.close()
    assert state() == before


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_callers_default_device_is_not_the_engines(family, hf_model):
    """As `torch.set_default_device("cuda")`, which scripts begin with, or a context of meta."""
    ids = torch.tensor(random_ids(2, 5))

    def results():
        with init_inference(hf_model(family), replace_with_kernel_inject=True) as engine:
            torch.manual_seed(1)
            yield engine(ids).logits
            for asked in ({}, {"do_sample": True, "top_k": 3}, {"no_repeat_ngram_size": 2}):
                yield engine.generate(ids, max_new_tokens=4, pad_token_id=0, **asked)

    expected = list(results())
    with torch.device("meta"):
        found = list(results())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_compile_leaves_the_process_as_it_was(hf_model):
    engine = make_generating("module-torch", hf_model)
    ids = torch.tensor(random_ids(1, 4))
    expected = engine(ids).logits
    settings = torch._dynamo.config.get_config_copy(), torch._inductor.config.get_config_copy()
    nvtx = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    engine.compile(backend="eager")
    engine.compile(backend="no such backend")  # the second call does nothing
    assert engine.is_compiled
    torch.testing.assert_close(engine(ids).logits, expected)
    now = torch._dynamo.config.get_config_copy(), torch._inductor.config.get_config_copy()
    assert now == settings
    assert nvtx == (torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_printed_or_logged(mode, hf_model, capfd, caplog):
    caplog.set_level(logging.INFO)
    with make_generating(mode, hf_model, max_out_tokens=12) as engine:
        ids = random_ids(1, 4, vocab=90)
        ids = torch.tensor(ids) if mode.endswith("torch") else jnp.asarray(ids)
        engine(ids)
        engine.generate(ids, max_new_tokens=2)
        engine.report()
    assert capfd.readouterr() == ("", "")
    assert not [r for r in caplog.records if r.name.startswith("dualinfer")]


@pytest.mark.parametrize("mode", ["fused-torch", "fused-jax", "module-torch", "module-jax"])
def test_dropout_is_off_and_gradients_are_not_made(mode):
    kind, _, backend = mode.partition("-")
    if mode == "module-jax":
        rngs = nnx.Rngs(0)
        module = nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
        module.train()
        x = jnp.ones((8, 4))
        engine = init_inference(module, backend="jax", dtype="fp32")
        results = engine(x), engine(x)
        module.eval()
        expected = module(x)
    else:
        pdrop = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
        module = make_model("gpt2", **pdrop).train()
        x = torch.tensor(random_ids(2, 5))
        with torch.no_grad():
            expected = copy.deepcopy(module).eval()(x).logits
        engine = init_inference(
            module, backend=backend, dtype="fp32", kernel_inject=kind == "fused"
        )
        results = engine(x).logits, engine(x).logits
        assert not any(r.requires_grad for r in results) and torch.is_grad_enabled()
        assert module.training == (kind == "fused")  # in module mode the module itself is turned
    np.testing.assert_array_equal(*results)
    np.testing.assert_allclose(results[0], expected, rtol=1e-4, atol=1e-4)

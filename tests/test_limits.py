"""init_inference: what it takes, and what it refuses before anything is loaded."""

import importlib.util
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import accelerate
import numpy as np
import peft
import pytest
import torch
import transformers as hf

import dualinfer
from dualinfer.backends import find_mixtures
from dualinfer.config import InferenceConfig
from dualinfer.config.refusals import check_config
from dualinfer.model.hf_module import check_parts
from dualinfer.parallel.agreement import Peers, fingerprint, share_inputs

from .cases import make_model
from .cases.decoders import ALL, CASES
from .models import BACKENDS, random_ids, relative_rms
from .test_engine import Perceptron, make_module

CAUSAL = "llama-gqa"


class Group:
    """A process group of `n` ranks, and a Megatron-style model-parallel unit."""

    def __init__(self, n):
        self.n = n

    def __repr__(self):
        return f"Group({self.n})"

    def size(self):
        return self.n

    def get_model_parallel_world_size(self):
        return self.n


ANYWHERE = [
    ({"tensor_parallel": {"tp_group": "world"}}, r"tp_group.*(no size|processes in groups)"),
    ({"tensor_parallel": {"mpu": 3}}, r"mpu.*(no get_model_parallel|processes in groups)"),
    ({"tensor_parallel": {"axis": ""}}, "axis=''.*at least 1"),
    ({"tensor_parallel": {"mesh": "here"}}, r"mesh.*(JAX's|jax\.sharding\.Mesh)"),
    (
        {"moe": {"ep_size": 2}},
        r"ep_size=2.*(no experts|module mode)|moe.ep_size=2 needs 2|ep_size=2, but JAX has 1",
    ),
    ({"moe": {"moe_experts": 8}}, r"moe_experts=\[8\]"),
    ({"moe": {"type": "residual"}}, "moe.type='residual'"),
    ({"moe": {"ep_group": Group(1)}}, "ep_group"),
    ({"moe": {"ep_mp_group": Group(1)}}, "ep_mp_group"),
    ({"quant": {"weight": {"enabled": False}}}, "quant"),
    ({"quant": {"weight": {"post_init_quant": {"fc": {"num_bits": 4}}}}}, "quant"),
    ({"use_triton": True}, "use_triton=True"),
    ({"triton_autotune": True}, "triton_autotune=True"),
    ({"base_dir": "/shards"}, "base_dir='/shards'"),
]
FUSED = [
    ({"use_triton": True}, "use_triton=True.*CUDA"),
    ({"triton_autotune": True}, "triton_autotune=True.*(the search is torch's|CUDA)"),
    ({"injection_policy": {torch.nn.Linear: "out"}}, "injection_policy.*fused"),
]
MODULE = [
    ({"min_out_tokens": 5}, "min_out_tokens=5.*module mode"),
    ({"return_tuple": False}, "return_tuple=False.*module mode"),
    ({"save_mp_checkpoint_path": "x"}, "save_mp_checkpoint_path='x'.*module mode"),
    ({"replace_with_kernel_inject": True}, "no HF model|runs as it is"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("fields", "message"), ANYWHERE + FUSED, ids=str)
def test_what_fused_mode_cannot_honour_is_refused(backend, fields, message, hf_model):
    with pytest.raises((dualinfer.ConfigError, dualinfer.ModelError), match=message):
        dualinfer.init_inference(hf_model(CAUSAL), backend=backend, kernel_inject=True, **fields)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("fields", "message"), ANYWHERE + MODULE, ids=str)
def test_what_module_mode_cannot_honour_is_refused(backend, fields, message):
    module, _ = make_module(backend)
    with pytest.raises((dualinfer.ConfigError, dualinfer.ModelError), match=message):
        dualinfer.init_inference(module, backend=backend, **fields)
    if backend == "torch":
        assert module.training  # not touched


def test_refusal_comes_before_anything_is_read(tmp_path):
    # The folder has no weights: reading them would be another error.
    CASES[CAUSAL].make_config().save_pretrained(tmp_path)
    with pytest.raises(dualinfer.ConfigError, match="enable_cuda_graph=True needs a CUDA device"):
        dualinfer.init_inference(tmp_path, enable_cuda_graph=True)


@pytest.mark.parametrize("name", ["use_triton", "triton_autotune"])
def test_kernels_are_refused_where_they_cannot_run(name, monkeypatch):
    def check(mode="fused", device="cuda", **fields):
        check_config(InferenceConfig(**{name: True, **fields}), mode, device)

    kernels = {"replace_with_kernel_inject": True}
    if importlib.util.find_spec("triton") is not None:
        check(**kernels)
    for device, fields, message in [
        ("cuda", {}, "those of replace_with_kernel_inject=True. Set it"),
        ("cpu", kernels, "needs a CUDA device, and torch runs on cpu"),
    ]:
        with pytest.raises(dualinfer.ConfigError, match=f"{name}=True: .*{message}"):
            check(device=device, **fields)
    with pytest.raises(dualinfer.ConfigError, match="those of replace_with_kernel_inject=True"):
        check("module", **kernels)
    with pytest.raises(dualinfer.ConfigError, match=r"needs a CUDA device.*Leave it unset"):
        check("module", "cpu")  # where kernels would be no way
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(dualinfer.ConfigError, match="Triton is not installed"):
        check(**kernels)


def test_the_search_is_torchs():
    fields = {"backend": "jax", "replace_with_kernel_inject": True}
    with pytest.raises(dualinfer.ConfigError, match="triton_autotune=True: the search is torch's"):
        check_config(InferenceConfig(triton_autotune=True, **fields), "fused", "gpu")
    if importlib.util.find_spec("triton") is not None:
        check_config(InferenceConfig(use_triton=True, **fields), "fused", "gpu")


def test_tuning_without_kernels_is_refused():
    config = InferenceConfig(
        use_triton=False, triton_autotune=True, replace_with_kernel_inject=True
    )
    with pytest.raises(dualinfer.ConfigError, match=r"(no kernels to tune|not installed)"):
        check_config(config, "fused", "cuda")


@pytest.mark.parametrize("backend", BACKENDS)
def test_fields_that_ask_for_nothing_pass(backend, hf_model):
    harmless = {
        "tensor_parallel": {"tp_size": 1, "mpu": Group(1), "tp_group": Group(1)},
        "moe": False,
        "quant": {"enabled": False},
        "enable_cuda_graph": False,
        "use_triton": False,
        "keep_module_on_host": True,  # where it is
        "min_out_tokens": 8,
        "max_out_tokens": 32,
    }
    engine = dualinfer.init_inference(
        hf_model(CAUSAL), harmless, backend=backend, dtype="fp32", kernel_inject=True
    )
    assert engine.generate(random_ids(1, 4), max_new_tokens=2).shape == (1, 6)
    off = {"tensor_parallel": {"tp_size": 4, "enabled": False}}
    dualinfer.init_inference(hf_model(CAUSAL), off, backend=backend, kernel_inject=True).close()


def test_enable_cuda_graph_is_met_on_jax(hf_model):
    for value in (True, False, None):
        with dualinfer.init_inference(
            hf_model(CAUSAL), backend="jax", dtype="fp32", enable_cuda_graph=value
        ) as engine:
            ids = random_ids(1, 4)
            engine.generate(ids, max_new_tokens=3)
            made = engine.report().compilations
            engine.generate(ids, max_new_tokens=3)
            assert engine.report().compilations == made > 0


def test_old_scripts_run(hf_model):
    """The forms of call that DeepSpeed's tutorials and forum posts show."""
    model = hf_model("gpt2")
    ids = torch.from_numpy(random_ids(1, 5))
    calls = [
        dict(mp_size=1, dtype=torch.float32, replace_with_kernel_inject=True),
        dict(
            mp_size=1,
            dtype=torch.float32,
            replace_method="auto",
            replace_with_kernel_inject=True,
            triangular_masking=True,
            max_tokens=40,
        ),
        dict(tensor_parallel={"tp_size": 1}, dtype="fp32", kernel_inject=True),
        dict(config={"tp": {"tp_size": 1}, "dtype": "fp32", "replace_with_kernel_inject": True}),
        dict(dtype=torch.float32, checkpoint=None, injection_policy=None, moe_experts=1),
        dict(dtype=torch.float, injection_dict={}, ep_size=1, mpu=None, zero={}, quant={}),
    ]
    with torch.no_grad():
        expected = model(ids).logits
    for arguments in calls:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated and stale fields warn
            engine = dualinfer.init_inference(model, **arguments)
        engine.module.eval()
        torch.testing.assert_close(engine(ids).logits, expected, rtol=1e-4, atol=1e-4)
        text = engine.module.generate(ids, max_new_tokens=3, do_sample=False)
        assert text.shape == (1, 8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_config_fields_are_laid_over_the_models_own(backend, hf_model):
    model = hf_model(CAUSAL)
    engine = dualinfer.init_inference(
        model,
        {"config": {"rms_norm_eps": 0.5}},
        backend=backend,
        dtype="fp32",
        kernel_inject=True,
    )
    assert engine.config.rms_norm_eps == 0.5 and model.config.rms_norm_eps != 0.5
    other = hf.LlamaForCausalLM(hf.LlamaConfig(**model.config.to_dict() | {"rms_norm_eps": 0.5}))
    other.load_state_dict(model.state_dict())
    ids = torch.from_numpy(random_ids(2, 5))
    with torch.no_grad():
        expected = other.eval()(ids).logits
    torch.testing.assert_close(engine(ids).logits, expected, rtol=1e-4, atol=1e-4)
    for fields, message in [
        ({"rms_norm_epsilon": 1}, "rms_norm_eps"),
        ({"model_type": "gpt2"}, "model_type"),
    ]:
        with pytest.raises(dualinfer.ConfigError, match=message):
            dualinfer.init_inference(model, backend=backend, kernel_inject=True, args=fields)
    if backend == "torch":  # in module mode it is what engine.config says, as in DeepSpeed
        module, _ = make_module("torch")
        assert dualinfer.init_inference(module, args={"a": 1}).config == {"a": 1}


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoint_fills_a_meta_model_in_fused_mode(backend, tmp_path, hf_model):
    model = hf_model(CAUSAL)
    model.save_pretrained(tmp_path / "folder")
    torch.save({"module": model.state_dict()}, tmp_path / "state.pt")
    ids = torch.from_numpy(random_ids(2, 5))
    with torch.no_grad():
        expected = model(ids).logits
    for checkpoint in (tmp_path / "folder", str(tmp_path / "folder" / "model.safetensors"),
                       tmp_path / "state.pt"):  # fmt: skip
        with torch.device("meta"):
            empty = hf.LlamaForCausalLM(CASES[CAUSAL].make_config())
        engine = dualinfer.init_inference(
            empty, backend=backend, dtype="fp32", kernel_inject=True, checkpoint=checkpoint
        )
        torch.testing.assert_close(engine(ids).logits, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(dualinfer.ConfigError, match="folder already"):
        dualinfer.init_inference(tmp_path / "folder", backend=backend, checkpoint=tmp_path)
    (tmp_path / "weights.zip").touch()
    for bad, message in [("nowhere", "does not exist"), ("weights.zip", "no checkpoint by its")]:
        with pytest.raises(dualinfer.CheckpointError, match=message):
            dualinfer.init_inference(
                empty, backend=backend, kernel_inject=True, checkpoint=tmp_path / bad
            )


def test_state_dict_file_with_two_models_is_refused(tmp_path, hf_model):
    state = hf_model(CAUSAL).state_dict()
    torch.save({"module": state, "model": state}, tmp_path / "state.pt")
    with pytest.raises(dualinfer.CheckpointError, match="module and model"):
        dualinfer.init_inference(
            hf_model(CAUSAL), kernel_inject=True, checkpoint=tmp_path / "state.pt"
        )


def test_model_of_the_wrong_framework_is_refused():
    from flax import nnx

    with pytest.raises(dualinfer.ModelError, match="backend='jax'"):
        dualinfer.init_inference(Perceptron(nnx.Rngs(0)))
    with pytest.raises(dualinfer.ModelError, match="no HF model"):
        dualinfer.init_inference(torch.nn.Linear(2, 2), backend="jax")
    for model in (None, 5, object(), {"a": 1}, torch.nn.Linear):
        for backend in BACKENDS:
            with pytest.raises(dualinfer.ModelError, match="expected the folder of a HF"):
                dualinfer.init_inference(model, backend=backend)


def test_linen_module_takes_its_variables_in_every_form():
    import jax
    from flax import linen

    module = linen.Dense(4)
    x = np.ones((2, 3), np.float32)
    variables = module.init(jax.random.key(0), x)
    expected = np.asarray(module.apply(variables, x))
    for arguments in (
        ((module, variables),),
        (module.bind(variables),),
    ):
        engine = dualinfer.init_inference(*arguments, backend="jax", dtype="fp32")
        np.testing.assert_allclose(engine(x), expected, rtol=1e-6)
    engine = dualinfer.init_inference(module, backend="jax", dtype="fp32", params=variables)
    np.testing.assert_allclose(engine(x), expected, rtol=1e-6)
    with pytest.raises(dualinfer.ModelError, match="variables"):
        dualinfer.init_inference(module, backend="jax")
    with pytest.raises(dualinfer.ModelError, match="params"):
        dualinfer.init_inference(torch.nn.Linear(2, 2), params=variables)


@pytest.mark.parametrize("backend", BACKENDS)
def test_min_out_tokens_is_promised_or_refused_with_bytes(backend, hf_model):
    model = hf_model(CAUSAL)
    options = dict(backend=backend, dtype="fp32", kernel_inject=True)
    with dualinfer.init_inference(model, **options) as e:
        free = e.runner.free_bytes()
        if free is None:
            pytest.skip("this system does not say what is free")
        a = e.runner.spec.layers[0].attention
        one = len(e.runner.spec.layers) * 2 * a.kv_heads * a.head_dim * 4
        assert e.runner.cache_bytes_for(1, 10) == 64 * one  # the smallest cache
    count = 1 << (10 * free // one).bit_length()
    with pytest.raises(dualinfer.OutOfMemoryError, match=rf"{count * one:,} bytes") as caught:
        dualinfer.init_inference(model, min_out_tokens=count, max_out_tokens=count, **options)
    assert isinstance(caught.value, RuntimeError) and "free on" in str(caught.value)
    engine = dualinfer.init_inference(model, max_out_tokens=count, **options)
    assert any(f"{count * one:,} bytes" in note for note in engine.report().notes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_an_engine_that_could_not_be_made_held_is_let_go(backend, hf_model, monkeypatch):
    module = importlib.import_module(f"dualinfer.backends.{backend}.runner")
    runner = {"torch": "TorchRunner", "jax": "JaxRunner"}[backend]
    close, closed = getattr(module, runner).close, []
    monkeypatch.setattr(getattr(module, runner), "free_bytes", lambda self: 1000)
    monkeypatch.setattr(getattr(module, runner), "close", lambda s: (closed.append(s), close(s)))
    with pytest.raises(dualinfer.OutOfMemoryError, match="1,000"):
        dualinfer.init_inference(
            hf_model(CAUSAL), backend=backend, dtype="fp32", kernel_inject=True, min_out_tokens=100
        )
    assert len(closed) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_min_out_tokens_promises_nothing_that_generate_refuses(backend, hf_model):
    options = dict(backend=backend, dtype="fp32", kernel_inject=True)
    positions = hf_model("gpt2").config.n_positions
    for name, fields, message in [
        ("bert", {"min_out_tokens": 5}, "does not generate"),
        (CAUSAL, {"min_out_tokens": 514}, "takes at most 513"),
        ("gpt2", {"min_out_tokens": positions + 2}, f"at most {positions + 1}"),
        ("gpt2", {"min_out_tokens": positions + 2, "max_out_tokens": 999}, f"most {positions + 1}"),
    ]:
        with pytest.raises(dualinfer.ConfigError, match=message):
            dualinfer.init_inference(hf_model(name), **fields, **options)
    engine = dualinfer.init_inference(hf_model("gpt2"), max_out_tokens=9999, **options)
    assert engine.max_tokens == engine.report().max_tokens == positions + 1
    prompt = random_ids(1, positions - 3)
    assert engine.generate(prompt, eos_token_id=None).shape == (1, positions)
    with pytest.raises(dualinfer.LengthError, match=f"positions \\({positions}\\)"):
        engine.generate(prompt, max_new_tokens=5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_cache_that_does_not_fit_is_refused_before_it_is_allocated(backend, hf_model, monkeypatch):
    with dualinfer.init_inference(
        hf_model(CAUSAL), backend=backend, dtype="fp32", kernel_inject=True
    ) as engine:
        small = random_ids(1, 4)
        expected = np.asarray(engine.generate(small, max_new_tokens=3, do_sample=False))
        with monkeypatch.context() as patch:
            patch.setattr(f"dualinfer.backends.{backend}.cache.free_bytes", lambda device: 10_000)
            with pytest.raises(dualinfer.OutOfMemoryError, match=r"10,000") as caught:
                engine.generate(random_ids(16, 300), max_new_tokens=200)
        assert isinstance(caught.value, RuntimeError) and "bytes" in str(caught.value)
        np.testing.assert_array_equal(
            np.asarray(engine.generate(small, max_new_tokens=3, do_sample=False)), expected
        )
        assert engine.generate(random_ids(16, 30), max_new_tokens=5).shape == (16, 35)


def test_messages_name_what_was_given_and_the_way_on(hf_model, tmp_path):
    layer = torch.nn.Linear
    cases = [
        (dict(backend="jax", injection_policy={layer: "x"}), r"backend='torch'(?!.*kernel_inject)"),
        (dict(kernel_inject=True, injection_policy={layer: "x"}), "replace_with_kernel_inject"),
        (dict(kernel_inject=True, checkpoint="model.safetensors.index.json"), "Pass its folder"),
        (
            dict(kernel_inject=True, checkpoint="x.bin", base_dir="/x"),
            "DeepSpeed's checkpoint JSON, and checkpoint names none",
        ),
    ]
    for arguments, message in cases:
        with pytest.raises(dualinfer.ConfigError, match=message):
            dualinfer.init_inference(hf_model(CAUSAL), **arguments)
    config = hf.XLNetConfig(vocab_size=9, d_model=8, d_inner=8, n_layer=1, n_head=2)
    xlnet = hf.XLNetLMHeadModel(config)
    with pytest.raises(dualinfer.ModelError, match="Leave replace_with_kernel_inject unset"):
        dualinfer.init_inference(xlnet, kernel_inject=True)
    with pytest.raises(dualinfer.ModelError, match="backend='torch' any module"):
        dualinfer.init_inference(xlnet, backend="jax")


def test_forward_set_on_an_instance_is_not_passed_over(hf_model):
    model = hf.LlamaForCausalLM(CASES[CAUSAL].make_config())
    model.forward = lambda *args, **kwargs: None
    with pytest.raises(dualinfer.ModelError, match="a forward of its own set on it"):
        dualinfer.init_inference(model, kernel_inject=True)


def _with(change):
    model = hf.LlamaForCausalLM(CASES[CAUSAL].make_config())
    change(model, model.model.layers[0])
    return model


class _Attention(hf.models.llama.modeling_llama.LlamaAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


_LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}


def _own_attention():
    def attend(*args, **kwargs):
        return hf.integrations.sdpa_attention.sdpa_attention_forward(*args, **kwargs)

    hf.AttentionInterface.register("own-of-tests", attend)
    return "own-of-tests"


class _Double(accelerate.hooks.ModelHook):
    def post_forward(self, module, output):
        return output * 2


class _Placed(accelerate.hooks.AlignDevicesHook):
    pass


def _hooked(*hooks):
    model = hf.LlamaForCausalLM(CASES[CAUSAL].make_config())
    for hook in hooks:
        accelerate.hooks.add_hook_to_module(model.model.layers[0].mlp, hook, append=True)
    return model


def test_only_hooks_of_accelerate_that_place_are_passed_over():
    place = accelerate.hooks.AlignDevicesHook
    check_parts(_hooked(place()), "", find_mixtures)
    check_parts(_hooked(place(), place(), place()), "", find_mixtures)
    for hooks in ((_Double(),), (place(), _Double()), (_Placed(),)):
        with pytest.raises(
            dualinfer.ModelError, match=r"layers\.0\.mlp .* a hook .*test_limits\._"
        ):
            check_parts(_hooked(*hooks), "", find_mixtures)
    model = _hooked(place())
    model.model.layers[0].mlp.forward = lambda x: x
    with pytest.raises(dualinfer.ModelError, match="a forward of its own"):
        check_parts(model, "", find_mixtures)
    model = hf.LlamaForCausalLM(CASES[CAUSAL].make_config())
    model.model.layers[0].mlp.forward = lambda x: x
    accelerate.hooks.add_hook_to_module(model.model.layers[0].mlp, place())
    with pytest.raises(dualinfer.ModelError, match="a forward of its own"):
        check_parts(model, "", find_mixtures)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_that_accelerate_keeps_elsewhere_are_named(backend):
    model = make_model(CAUSAL)
    ids = torch.from_numpy(random_ids(2, 7))
    with torch.no_grad():
        expected = model(ids).logits
    accelerate.cpu_offload(model, torch.device("cpu"))
    how = {"backend": backend, "dtype": "fp32", "replace_with_kernel_inject": True}
    with pytest.raises(dualinfer.CheckpointError, match=r"accelerate keeps .*remove_hook_from"):
        dualinfer.init_inference(model, **how)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    with dualinfer.init_inference(model, **how) as engine:
        assert relative_rms(np.asarray(engine(ids).logits), expected) < 1e-5


def _everywhere(hook):
    return torch.nn.modules.module.register_module_forward_hook(hook)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("register", "where"),
    [
        (lambda m, f: m.model.norm.register_forward_hook(f), r"model\.norm"),
        (lambda m, f: m.register_forward_pre_hook(f, with_kwargs=True), "LlamaForCausalLM"),
        (lambda m, f: _everywhere(f), "every module"),
    ],
    ids=["hook", "pre-hook", "global"],
)
def test_hooks_that_do_not_run_are_warned_of(backend, register, where):
    model = make_model(CAUSAL)
    with torch.no_grad():  # transformers sets hooks of its own, which change nothing
        model(torch.from_numpy(random_ids(2, 7)), output_hidden_states=True)
    how = {"backend": backend, "dtype": "fp32", "replace_with_kernel_inject": True}
    with dualinfer.init_inference(model, **how) as engine:
        assert not any("hooks" in note for note in engine.report().notes)
    handle = register(model, lambda *args: None)
    try:
        with pytest.warns(UserWarning, match=f"does not run: those of {where}") as warned:
            engine = dualinfer.init_inference(model, **how)
    finally:
        handle.remove()
    assert warned[0].filename == __file__
    assert any(re.search(f"hooks.*{where}", note) for note in engine.report().notes)
    engine.close()


def _with_adapter(config):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's own use of transformers
        return peft.get_peft_model(make_model(CAUSAL), config)


_LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


@pytest.mark.parametrize("backend", BACKENDS)
def test_adapters_are_run_merged_or_not(backend):
    model, ids = _with_adapter(peft.LoraConfig(**_LORA)).eval(), torch.from_numpy(random_ids(2, 7))
    with torch.no_grad():
        expected = model(ids).logits
    how = {"backend": backend, "dtype": "fp32", "replace_with_kernel_inject": True}
    for part in (lambda: model, model.get_base_model, model.merge_and_unload):
        with dualinfer.init_inference(part(), **how) as engine:
            assert relative_rms(np.asarray(engine(ids).logits), expected) < 1e-5


def test_wrappers_of_a_model_are_refused_with_the_way_to_it():
    model, odd = make_model(CAUSAL), make_model(CAUSAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to take some of them away
        compiled = torch.compile(model)
        spread = torch.nn.DataParallel(model)
        odd.model.layers[0].self_attn.q_proj = torch.ao.nn.quantized.dynamic.Linear(84, 84)
        prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        prompted = peft.get_peft_model(make_model(CAUSAL), prompts)
    for wrapped, message in (
        (compiled, r"torch\.compile\(\) made of a Llama.*model\._orig_mod"),
        (spread, r"DataParallel wraps a LlamaForCausalLM.*model\.module"),
        (prompted, "PeftModelForCausalLM adds to its inputs"),
        (odd, r"q_proj of this .* is torch\.ao\.nn\.quantized.*\.Linear, and torch\.nn\.modules"),
    ):
        with pytest.raises(dualinfer.ModelError, match=message):
            dualinfer.init_inference(wrapped, kernel_inject=True, dtype="fp32")


def test_an_attention_kernel_of_the_hub_is_hfs():
    kernel = partial(hf.integrations.flash_attention.flash_attention_forward, implementation=None)
    hf.AttentionInterface.register("hub-of-tests", kernel)
    model = make_model("llama-gqa")
    model.config._attn_implementation_internal = "hub-of-tests"
    assert model.config._attn_implementation == "hub-of-tests"
    check_parts(model, "", find_mixtures)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["llama-gqa", "gpt2"])
def test_resized_and_shortened_models_are_taken(backend, name):
    model, ids = make_model(name), random_ids(2, 7)
    model.resize_token_embeddings(model.config.vocab_size + 7)
    inner = model.base_model
    layers = inner.layers if name == "llama-gqa" else inner.h
    del layers[0]
    model.config.num_hidden_layers = len(layers)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids), use_cache=False).logits.numpy()
    how = {"backend": backend, "dtype": "fp32", "replace_with_kernel_inject": True}
    with dualinfer.init_inference(model, **how) as engine:
        assert relative_rms(np.asarray(engine(ids).logits), expected) < 1e-5


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_what_a_config_makes_is_taken(name, half):
    model = make_model(name)
    check_parts(model.half() if half else model, "", find_mixtures)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, layer: setattr(layer.mlp, "forward", layer.forward), "forward of its own"),
        (lambda m, layer: setattr(layer.self_attn, "__class__", _Attention), "is _Attention"),
        (lambda m, layer: setattr(layer.mlp, "act_fn", torch.nn.Tanh()), "act_fn .* is Tanh"),
        (lambda m, layer: setattr(layer.self_attn, "scaling", 0.5), "scaling .* is 0.5"),
        (lambda m, layer: setattr(m.config, "rms_norm_eps", 0.5), "and 0.5 by its config"),
        (lambda m, layer: setattr(layer.self_attn, "is_causal", False), "is False, and True by"),
        (lambda m, layer: m.model.rotary_emb.inv_freq.mul_(0.5), "inv_freq .* of other values"),
        (
            lambda m, layer: setattr(m.config, "rope_parameters", _LINEAR),
            "rope_type .* is default, and linear by",
        ),
        (lambda m, layer: m.set_attn_implementation(_own_attention()), "attends by 'own-of-tests'"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_that_the_config_does_not_make_are_not_passed_over(backend, change, message):
    with pytest.raises(dualinfer.ModelError, match=message):
        dualinfer.init_inference(_with(change), backend=backend, kernel_inject=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_takes_none_of_the_default_length(backend, hf_model):
    ids = random_ids(1, 10)
    padded, mask = (np.pad(x, ((0, 0), (5, 0))) for x in (ids, np.ones_like(ids)))
    how = {"backend": backend, "dtype": "fp32", "kernel_inject": True, "max_out_tokens": 16}
    with dualinfer.init_inference(hf_model(CAUSAL), **how) as engine:
        alone = engine.generate(ids, do_sample=False, eos_token_id=None, pad_token_id=0)
        other = engine.generate(
            padded, attention_mask=mask, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    np.testing.assert_array_equal(alone[:, 10:], other[:, 15:])
    assert alone.shape == (1, 16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile_refuses_what_is_none_of_its_arguments(backend, hf_model):
    with dualinfer.init_inference(
        hf_model(CAUSAL), backend=backend, dtype="fp32", kernel_inject=True
    ) as engine:
        with pytest.raises(dualinfer.ArgumentError, match="a dict of names"):
            engine.compile(compile_kwargs=5)
        if backend == "torch":
            with pytest.raises(dualinfer.ArgumentError, match="batch_sizes, and torch"):
                engine.compile(compile_kwargs={"batch_sizes": [1]})
            with pytest.raises(dualinfer.ArgumentError, match="backend='nope'"):
                engine.compile("nope")
    with pytest.raises(dualinfer.ClosedError):
        engine.model_times()


def test_state_dict_file_of_something_else_is_told(tmp_path, hf_model):
    torch.save({"model_state_dict": {"a": torch.zeros(1)}}, tmp_path / "odd.pt")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "whole.pt")
    (tmp_path / "empty.pt").touch()
    for name, message in [
        ("odd.pt", "no tensors by name, but 'model_state_dict'"),
        (
            "whole.pt",
            r"linear\.Linear makes, as of a whole pickled module; .*Save module\.state_dict\(\)",
        ),
        ("empty.pt", "0 bytes"),
    ]:
        with pytest.raises(dualinfer.CheckpointError, match=message):
            dualinfer.init_inference(
                hf_model(CAUSAL), kernel_inject=True, checkpoint=tmp_path / name
            )


@pytest.mark.parametrize("backend", BACKENDS)
def test_minimum_above_the_maximum_is_told(backend, hf_model):
    engine = dualinfer.init_inference(
        hf_model(CAUSAL), backend=backend, dtype="fp32", kernel_inject=True
    )
    with pytest.warns(UserWarning, match="At least 30 .* at most 5"):
        ids = engine.generate(random_ids(1, 4), min_new_tokens=30, max_new_tokens=5)
    assert ids.shape == (1, 9)


def test_checkpoint_for_a_flax_module_is_refused_before_it_is_opened(tmp_path):
    module, _ = make_module("jax")
    with pytest.raises(dualinfer.ConfigError, match="no convention"):
        dualinfer.init_inference(module, backend="jax", checkpoint=tmp_path)


def test_lists_are_told_apart_by_how_they_are_nested():
    lists = ([[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]], [[1], 2, 3], [1, [2, 3]], [1, 2, 3])
    assert len({fingerprint(x) for x in lists}) == len(lists)


class Together:
    """Peers of one process, each in a thread."""

    def __init__(self, size):
        self.size, self.barrier, self.said = size, threading.Barrier(size), [b""] * size

    def run(self, work):
        """What `work(peers)` gives, for each."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(lambda rank: work(self.peer(rank)), range(self.size)))

    def peer(self, rank):
        def exchange(message):
            self.said[rank] = message
            self.barrier.wait(10)
            found = list(self.said)
            self.barrier.wait(10)
            return found

        peers = Peers()
        peers.rank, peers.size, peers.exchange = rank, self.size, exchange
        return peers


def test_inputs_of_rank_0_go_to_those_who_have_none_alone():
    own = [np.array([[1, 2]]), None, np.array([[3]]), None]

    def work(peers):
        inputs = {"ids": own[peers.rank], "mask": None}
        how = lambda x: x is not None, lambda: None
        return share_inputs(peers, "generate()", inputs, *how)["ids"].tolist()

    assert Together(4).run(work) == [[[1, 2]], [[1, 2]], [[3]], [[1, 2]]]


def test_generation_configs_are_told_apart_by_what_they_say():
    one, other = (hf.GenerationConfig(max_new_tokens=n) for n in (3, 5))
    assert fingerprint({"g": one}) != fingerprint({"g": other})
    assert fingerprint({"g": one}) == fingerprint({"g": hf.GenerationConfig(max_new_tokens=3)})


@pytest.mark.parametrize("field", ["mpu", "tp_group"])
def test_groups_of_processes_are_torchs(field, hf_model):
    with pytest.raises(dualinfer.ConfigError, match=rf"{field}=Group\(4\): processes in groups"):
        dualinfer.init_inference(hf_model(CAUSAL), backend="jax", tensor_parallel={field: Group(4)})


def test_an_axis_of_a_mesh_is_jaxs(hf_model):
    with pytest.raises(dualinfer.ConfigError, match=r"axis='model'.*meshes are JAX's"):
        dualinfer.init_inference(hf_model(CAUSAL), tensor_parallel={"axis": "model"})

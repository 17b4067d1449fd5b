"""Fused mode of HF models with DeepSpeed's MoE layers in the place of MLPs, on both backends."""

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

import dualinfer
from dualinfer import CheckpointError, ConfigError, ModelError

from . import deepspeed_files, deepspeed_moe
from .deepspeed_moe import Feed, MoE, Odd
from .models import on_backends, relative_rms

pytestmark = pytest.mark.usefixtures("greedy")

VOCAB = 61
COMMON = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GREEDY = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
IDS = torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(1))
MASK = torch.ones(2, 11, dtype=torch.int64)
MASK[1, :4] = 0
TWO = {"num_experts": 3, "k": 2, "use_residual": True}


class Expert(nn.Module):
    """An expert of a user's own, of the activation that it is told."""

    def __init__(self, width, ffn, activation=F.relu):
        super().__init__()
        self.wi, self.wo = nn.Linear(width, ffn), nn.Linear(ffn, width)
        self.activation = activation

    def forward(self, x):
        """x [..., width] to the same."""
        return self.wo(self.activation(self.wi(x)))


def plain(width):
    """An expert of torch's layers, of which the second one has no bias."""
    return nn.Sequential(nn.Linear(width, 20), nn.SiLU(), nn.Linear(20, width, bias=False))


def layers_of(model):
    """The blocks of a HF model."""
    base = model.base_model
    found = getattr(base, "h", None) or getattr(base, "layers", None)
    return found if found is not None else base.decoder.layers


def replace_mlp(model, expert=None, wrap=Feed, at=1, **fields):
    """Put a MoE layer in the place of a layer's MLP; of OPT of three parts."""
    layer, width = layers_of(model)[at], model.config.hidden_size
    loose = not hasattr(layer, "mlp")
    own = expert(width) if expert else layer.mlp
    moe = wrap(MoE(width, own, drop_tokens=False, **{**TWO, **fields}))
    setattr(layer, "fc1" if loose else "mlp", moe)
    if loose:
        layer.activation_fn, layer.fc2 = nn.Identity(), nn.Identity()
    return model


CASES = {
    "gpt2": (hf.GPT2LMHeadModel, {"n_positions": 80}, {}),
    "gpt2, top-1": (
        hf.GPT2LMHeadModel,
        {"n_positions": 32},
        {"k": 1, "use_residual": False, "at": 0},
    ),
    "opt": (
        hf.OPTForCausalLM,
        {"ffn_dim": 36, "word_embed_proj_dim": 24},
        {"expert": lambda width: Expert(width, 36), "use_residual": False},
    ),
    "opt, post": (
        hf.OPTForCausalLM,
        {"ffn_dim": 36, "word_embed_proj_dim": 24, "do_layer_norm_before": False},
        {"expert": lambda width: Expert(width, width), "k": 1},
    ),
    "bloom": (hf.BloomForCausalLM, {}, {"expert": lambda w: Expert(w, 40, F.gelu)}),
    "gpt_neo": (
        hf.GPTNeoForCausalLM,
        {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4},
        {"expert": plain, "k": 3, "num_experts": 5},
    ),
    "gptj": (hf.GPTJForCausalLM, {"rotary_dim": 4, "n_positions": 32}, {"k": 1}),
    "gpt_neox": (
        hf.GPTNeoXForCausalLM,
        {"intermediate_size": 44},
        {"k": 3, "num_experts": 4, "use_residual": False},
    ),
    "llama": (
        hf.LlamaForCausalLM,
        {"intermediate_size": 44, "num_key_value_heads": 1, "mlp_bias": True},
        {"num_experts": 4},
    ),
}
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}


def make(case, seed=0):
    """A model of a case with random weights, biases among them."""
    kind, sizes, fields = CASES[case]
    sizes = {**COMMON, **SIZES, **sizes}
    if "num_layers" in sizes:
        del sizes["num_hidden_layers"]
    torch.manual_seed(seed)
    model = replace_mlp(kind(kind.config_class(**sizes)).eval(), **fields)
    for name, parameter in model.named_parameters():
        if "norm" not in name and "ln_" not in name:
            nn.init.normal_(parameter, std=0.5 if "wg" in name else 0.2)
    return model


def serve(model, backend="torch", **fields):
    """An engine of fused mode in float32."""
    how = {"dtype": "fp32", "backend": backend, "replace_with_kernel_inject": True}
    return dualinfer.init_inference(model, **how, **fields)


def answers(model):
    """Logits of real tokens, and text."""
    with torch.no_grad():
        logits = model(IDS, attention_mask=MASK).logits
        text = model.generate(IDS, attention_mask=MASK, **GREEDY)
    return logits[MASK > 0].numpy(), text.numpy()


def check(engine, expected, texts=True):
    """An engine's logits and text are those of the module."""
    logits, text = expected
    found = np.asarray(engine(IDS.numpy(), attention_mask=MASK.numpy()).logits)
    assert relative_rms(found[MASK.numpy() > 0], logits) < 1e-5
    if texts:
        own = engine.generate(IDS.numpy(), attention_mask=MASK.numpy(), **GREEDY)
        np.testing.assert_array_equal(np.asarray(own), text)


@pytest.mark.parametrize(("case", "backend"), on_backends(CASES, CASES))
def test_a_model_with_moe_layers_is_itself(case, backend):
    model = make(case)
    expected = answers(model)
    with serve(model, backend) as engine:  # text on JAX of two: what the layers do in steps
        check(engine, expected, texts=backend == "torch" or case in ("gpt2", "gpt_neox"))
        notes = "\n".join(engine.report().notes)
        assert "DeepSpeed's MoE layers: 1 of " in notes and "no token is dropped" in notes


def test_a_forward_on_jax_is_the_modules():
    model = make("gpt2, top-1")
    with serve(model, "jax") as engine, torch.no_grad():
        assert relative_rms(np.asarray(engine(IDS.numpy()).logits), model(IDS).logits) < 1e-5


def shared(case, backend, devices, parts, quant=None):
    """The errors of a model that so many devices share, whether its text is, and notes."""
    model = make(case)
    expected = answers(model)
    how = {"tensor_parallel": {"tp_size": devices, "tp_grain_size": 4}, "moe": {"ep_size": parts}}
    with serve(model, backend, **how, quant=quant) as engine:
        check(engine, expected, texts=backend == "torch")
        return "\n".join(engine.report().notes)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("case", "backend", "devices", "parts"),
    [
        ("gpt2", "torch", 2, 1),
        ("gpt2", "torch", 2, 2),
        pytest.param("gpt_neox", "torch", 3, 3, marks=pytest.mark.slow),
        pytest.param("llama", "torch", 4, 2, marks=pytest.mark.slow),
        pytest.param("gpt2", "jax", 2, 1, marks=pytest.mark.slow),
        pytest.param("opt, post", "jax", 2, 2, marks=pytest.mark.slow),
        pytest.param("bloom", "jax", 4, 2, marks=pytest.mark.slow),
    ],
)
def test_several_devices_give_what_the_module_gives(case, backend, devices, parts, crew):
    if backend == "torch":
        found = crew.run(shared, case, backend, devices, parts, world=devices)
    else:
        found = [shared(case, backend, devices, parts)]
    residual = CASES[case][2].get("use_residual", True)
    for notes in found:
        assert f"experts (ep_size {parts})" in notes
        assert ("one of which is the dense MLP of all tokens" in notes) == residual


@pytest.mark.parametrize(
    ("case", "backend"), [("gpt2", "torch"), pytest.param("opt", "jax", marks=pytest.mark.slow)]
)
def test_a_checkpoint_of_a_training_fills_a_module(case, backend, tmp_path):
    model = make(case)
    expected = answers(model)
    folder = deepspeed_files.save_moe_training(tmp_path / "run", model)
    with torch.device("meta"):
        empty = make(case, seed=1)
    part = make(case, seed=1)  # as a process of several has it: with one expert of three
    part_of = next(m for m in part.modules() if isinstance(m, deepspeed_moe.Experts))
    part_of.deepspeed_experts = part_of.deepspeed_experts[:1]
    for module in (empty, part):
        with serve(module, backend, checkpoint=str(folder)) as engine:
            check(engine, expected, texts=False)
    with pytest.raises(
        ModelError, match=r"ep_size=3 and holds 1 of its 3 experts\. Pass checkpoint="
    ):
        serve(part, backend)
    (folder / "global_step7/layer_0_expert_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="has 3 experts in the model and 2 in the files"):
        serve(empty, backend, checkpoint=str(folder))


def test_layers_are_saved_quantized_streamed_and_read_again(tmp_path):
    model = make("gpt2")
    logits, _ = expected = answers(model)
    with serve(model) as engine:
        engine.save_pretrained(tmp_path / "saved")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "deepspeed_experts.1." in name or "coefficient" in name:
                    parameter.mul_(-1)
        engine.refresh()
        check(engine, answers(model))
    with serve(model, checkpoint=str(tmp_path / "saved")) as engine:
        check(engine, expected)
    with pytest.raises(CheckpointError, match="make the module that has them, and pass it with"):
        serve(str(tmp_path / "saved"))
    with serve(make("gpt2"), zero={"stage": 3, "offload_param": {"device": "cpu"}}) as engine:
        check(engine, expected)
    with serve(make("gpt2"), quant="int8") as engine:
        found = np.asarray(engine(IDS.numpy(), attention_mask=MASK.numpy()).logits)
        assert 1e-5 < relative_rms(found[MASK.numpy() > 0], logits) < 0.05
        scaled = [n.split("layers.1.")[-1] for n, _ in engine.named_parameters() if "_scale" in n]
        own = [f"{name}.weight_scale" for name in ("qkv", "out", "experts.up", "experts.down")]
        assert scaled[-4:] == own


def test_a_layer_without_a_wrapper_is_served():
    """HF's own block cannot add the tuple that it gives, but by a hook."""
    model = make("gpt2")
    layers_of(model)[1].mlp.register_forward_hook(lambda _, args, output: output)
    expected = answers(model)
    layer = layers_of(model)[1]
    layer.mlp = layer.mlp.moe
    with serve(model) as engine:
        check(engine, expected)


def test_an_engine_of_module_mode_may_be_open():
    model = make("gpt2")
    expected = answers(model)
    with dualinfer.init_inference(model, dtype="fp32") as other:
        other(IDS)
        with serve(model) as engine:
            check(engine, expected)


def changed(change, **fields):
    """A GPT-2 in whose second layer something of the MoE layer is of another kind."""
    model = replace_mlp(hf.GPT2LMHeadModel(hf.GPT2Config(**COMMON, **SIZES)), **fields)
    change(layers_of(model)[1])
    return model


class Twice(Feed):
    """A wrapper that does more."""

    def forward(self, x):
        return 2 * super().forward(x)


class Masked(Feed):
    """A wrapper that takes more."""

    def forward(self, x, mask):
        return super().forward(x) * mask


class Gate(deepspeed_moe.TopKGate):
    """A gate of a user's own."""

    def forward(self, x):
        return super().forward(-x)


def other_gate(layer):
    layer.mlp.moe.deepspeed_moe.gate.__class__ = Gate


def other_place(layer):
    layer.attn, layer.mlp = layer.mlp, nn.Identity()


def other_expert(layer):
    experts = layer.mlp.moe.deepspeed_moe.experts.deepspeed_experts
    experts[1].act = nn.ReLU()


def more_parts(layer):
    layer.more = Feed(MoE(24, plain(24), num_experts=2))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda: changed(lambda layer: None, wrap=Twice), "a Twice, gives something else than"),
        (lambda: changed(other_gate), "its forward, or that of its gate or experts, is not Deep"),
        (lambda: changed(other_place), "attn is a GPT2Attention by the config, which takes"),
        (lambda: changed(other_expert), "its experts.*differ in more than values"),
        (lambda: changed(more_parts), "stands where the model's config has no part"),
        (
            lambda: changed(lambda layer: None, expert=lambda width: Odd(width, 20)),
            "an expert is an Odd, and no feed-forward that is known",
        ),
        (
            lambda: changed(lambda layer: None, expert=lambda width: Expert(width, 9, F.relu6)),
            "an expert is an Expert, and no feed-forward that is known",
        ),
        (lambda: changed(lambda layer: None, wrap=Masked), "a trial of Masked failed.*'mask'"),
    ],
)
def test_what_fused_mode_does_not_run_is_refused(model, text):
    with pytest.raises(ModelError, match=rf"{text}.*Module mode does, on torch"):
        serve(model())


def test_opts_other_parts_must_do_nothing():
    model = make("opt")
    layers_of(model)[1].activation_fn = nn.ReLU()
    with pytest.raises(ModelError, match=r"layers\.1\.activation_fn would follow or precede it"):
        serve(model)


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize(
    ("case", "moe", "text"),
    [
        ("gpt2", {"drop_tokens": True}, r"moe\.drop_tokens=True.*fused mode drops no token"),
        ("gpt2", {"type": "standard"}, "of the 1 MoE layers of GPT2LMHeadModel 1 are residual"),
        ("opt", {"type": "residual"}, "of the 1 MoE layers of OPTForCausalLM 0 are residual"),
        ("gpt2", {"moe_experts": 4}, "has 3 experts in its only layer with some. Use 3"),
    ],
)
def test_what_the_layers_do_not_allow_is_refused(case, moe, text, backend):
    with pytest.raises(ConfigError, match=text):
        serve(make(case), backend, moe=moe)


def test_what_the_layers_have_may_be_said():
    for case, kind in (("gpt2", "residual"), ("opt", "standard")):
        with serve(make(case), moe={"type": kind, "moe_experts": 3}) as engine:
            assert engine(IDS.numpy()).logits.shape == (2, 11, VOCAB)


def test_of_what_a_part_of_the_experts_has_most():
    """Two of three chosen, and one that every token has, in parts of two: counted out."""
    from dualinfer.parallel.experts import most_chosen

    # Choices are {0, 1}, {0, 2}, {1, 2} of parts {0, 1} and {2, 3}, and 3 is every token's.
    assert most_chosen([2, 2], 2, always=True) == pytest.approx((2 + 2 + 2) / 3)
    assert most_chosen([1, 1, 1, 1], 2, always=True) == 1

"""Fused mode of HF models with DeepSpeed's MoE layers in the place of MLPs, on both backends."""

import copy

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

import dualinfer
from dualinfer import CheckpointError, ConfigError, ModelError

from . import deepspeed_files, deepspeed_moe
from .deepspeed_moe import Feed, MoE, Odd
from .models import on_backends, relative_rms

VOCAB = 61
COMMON = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GREEDY = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
IDS = torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(1))
MASK = torch.ones(2, 11, dtype=torch.int64)
MASK[1, :4] = 0
TWO = {"num_experts": 3, "k": 2, "use_residual": True}


class Expert(nn.Module):
    """An expert of a user's own, of the activation that it is told."""

    def __init__(self, width, ffn, activation=nn.functional.relu):
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
    "gpt2": (hf.GPT2LMHeadModel, {"n_positions": 32}, {}),
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
    "bloom": (hf.BloomForCausalLM, {}, {"expert": lambda w: Expert(w, 40, nn.functional.gelu)}),
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
QUICK = ("gpt2",)
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


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param(*own.values, marks=[] if own.values[0] in QUICK else [pytest.mark.slow])
        for own in on_backends(CASES)
    ],
)
def test_a_model_with_moe_layers_is_itself(case, backend):
    model = make(case)
    expected = answers(model)
    with serve(model, backend) as engine:
        check(engine, expected)
        notes = "\n".join(engine.report().notes)
        assert "DeepSpeed's MoE layers: 1 of " in notes and "no token is dropped" in notes

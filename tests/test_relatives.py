"""Llama's relatives: each family against HF's own class, on both backends."""

import numpy as np
import pytest
import torch
import transformers as hf

import dualinfer

from .models import BACKENDS, EOS, PAD, VOCAB, random_ids, randomize, relative_rms

SIZES = {
    "hidden_size": 84,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "vocab_size": VOCAB,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
PARTIAL["rope_parameters"]["partial_rotary_factor"] = 0.5
TURNS = ["sliding_attention", "full_attention"]
# HF's class, and what makes it odd.
CASES = {
    "arcee": ("Arcee", {"head_dim": 14, "mlp_bias": True}),
    "cohere": ("Cohere", {"logit_scale": 0.3, "attention_bias": True}),
    "cohere2": (
        "Cohere2",
        {"logit_scale": 2.0, "head_dim": 14, "sliding_window": 5, "layer_types": TURNS},
    ),
    "ernie4_5": ("Ernie4_5", {"head_dim": 22, "use_bias": True}),
    "exaone4": ("Exaone4", {"sliding_window": 5, "layer_types": TURNS}),
    "exaone4 without windows": (
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "gemma": ("Gemma", {"head_dim": 22}),
    "glm": ("Glm", {"head_dim": 16, "attention_bias": True, **PARTIAL}),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": False, **PARTIAL}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.3,
            "logits_scaling": 2.5,
        },
    ),
    "helium": ("Helium", {"head_dim": 14, "num_key_value_heads": 2}),
    "ministral": ("Ministral", {"head_dim": 22, "sliding_window": 5, "layer_types": TURNS}),
    "olmo": ("Olmo", {"attention_bias": True}),
    "phi": ("Phi", {**PARTIAL, "num_attention_heads": 3, "num_key_value_heads": 3}),
    "phi3": ("Phi3", {"sliding_window": 5, "num_attention_heads": 3, **PARTIAL}),
    "seed_oss": ("SeedOss", {"head_dim": 22, "attention_out_bias": True, "mlp_bias": True}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0], "attention_bias": True}),
    "smollm3 with windows": (
        "SmolLM3",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": TURNS},
    ),
    "stablelm": ("StableLm", {"use_qkv_bias": True, **PARTIAL, "num_attention_heads": 3}),
    "stablelm, parallel": (
        "StableLm",
        {
            "use_parallel_residual": True,
            **PARTIAL,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
        },
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 5, "tie_word_embeddings": False}),
}


def make(case, headless=False):
    name, fields = CASES[case]
    config = getattr(hf, f"{name}Config")(**{**SIZES, **fields})
    torch.manual_seed(0)
    model = getattr(hf, f"{name}Model" if headless else f"{name}ForCausalLM")(config)
    randomize(model)
    return model.eval()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_a_relative_gives_what_hf_gives(case, backend):
    """Logits and hidden states, padded on the left, past the window; and text through the cache."""
    model, ids = make(case), random_ids(2, 11)
    mask = np.ones_like(ids)
    mask[1, :4] = 0
    how = {"replace_with_kernel_inject": True, "dtype": "fp32", "backend": backend}
    kept = {"output_hidden_states": True, "use_cache": False}
    with torch.no_grad():
        expected = model(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), **kept)
    with dualinfer.init_inference(model, **how) as engine:
        assert engine.report().mode == "fused"
        found = engine(ids, attention_mask=mask, output_hidden_states=True)
        real = mask.astype(bool)
        assert relative_rms(np.asarray(found.logits)[real], expected.logits.numpy()[real]) < 1e-5
        for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
            assert relative_rms(np.asarray(ours)[real], theirs.numpy()[real]) < 1e-5
        text = engine.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": PAD}
    with torch.no_grad():
        whole = model.generate(
            torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), **options
        )
    np.testing.assert_array_equal(np.asarray(text), whole.numpy())

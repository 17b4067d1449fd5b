"""Families: the configs that real checkpoints ship give a spec, and rotary frequencies are HF's."""

import json
import re

import numpy as np
import pytest
import torch
import transformers as hf

import dualinfer
from dualinfer.checkpoint.described.hf_config import read_config
from dualinfer.errors import ModelError
from dualinfer.model.families import describe_model, fairseq, mpt, served_types
from dualinfer.model.families.bloom import alibi_slopes

from .cases import early, make_model
from .models import random_ids

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0",
    "use_cache": True,
    "vocab_size": 100,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
QWEN = {
    **LLAMA,
    "attention_dropout": 0.0,
    "max_window_layers": 2,
    "rope_theta": 1e6,
    "sliding_window": 32768,
    "use_sliding_window": False,
}
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 99,
    "embd_pdrop": 0.1,
    "eos_token_id": 99,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 100,
}
BERT = {
    "architectures": ["BertForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 100,
}
OPT = {
    "_remove_final_layer_norm": False,
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "eos_token_id": 2,
    "ffn_dim": 96,
    "hidden_size": 64,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 1,
    "prefix": "</s>",
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 100,
    "word_embed_proj_dim": 64,
}
GPTJ = {
    **{k: v for k, v in GPT2.items() if k != "n_ctx"},
    "architectures": ["GPTJForCausalLM"],
    "gradient_checkpointing": False,
    "model_type": "gptj",
    "n_inner": None,
    "rotary": True,
    "rotary_dim": 8,
    "scale_attn_weights": True,
    "tie_word_embeddings": False,
    "tokenizer_class": "GPT2Tokenizer",
}
NEO = {
    "activation_function": "gelu_new",
    "architectures": ["GPTNeoForCausalLM"],
    "attention_dropout": 0,
    "attention_layers": ["global", "local"],
    "attention_types": [[["global", "local"], 1]],
    "embed_dropout": 0,
    "gradient_checkpointing": False,
    "hidden_size": 64,
    "intermediate_size": None,
    "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neo",
    "num_heads": 4,
    "num_layers": 2,
    "resid_dropout": 0,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 100,
    "window_size": 256,
}
NEOX = {
    "architectures": ["GPTNeoXForCausalLM"],
    "hidden_act": "gelu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "vocab_size": 100,
}
BLOOM = {
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["BloomForCausalLM"],
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "hidden_dropout": 0.0,
    "layer_norm_epsilon": 1e-05,
    "masked_softmax_fusion": True,
    "model_type": "bloom",
    "n_embed": 66,
    "n_inner": None,
    "n_layer": 2,
    "num_attention_heads": 6,
    "offset_alibi": 100,
    "pretraining_tp": 4,
    "seq_length": 4096,
    "skip_bias_add": True,
    "skip_bias_add_qkv": False,
    "slow_but_exact": False,
    "unk_token_id": 0,
    "vocab_size": 100,
}
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 100,
}
WRITTEN = {
    "Llama-2": {**LLAMA, "pretraining_tp": 2, "rope_scaling": None, "tie_word_embeddings": False},
    "Llama-1": {**LLAMA, "architectures": ["LLaMAForCausalLM"], "max_sequence_length": 2048},
    "Llama-3.1": {
        **LLAMA,
        "attention_bias": False,
        "eos_token_id": [97, 98, 99],
        "mlp_bias": False,
        "rope_scaling": LLAMA3_ROPE,
        "rope_theta": 500000.0,
    },
    "Vicuna-16k": {**LLAMA, "rope_scaling": {"factor": 4.0, "type": "linear"}},
    "Yarn-Llama-2": {
        **LLAMA,
        "rope_scaling": {
            "factor": 16.0,
            "finetuned": True,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
    },
    "SmolLM2": {
        **LLAMA,
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    },
    "Mistral-v0.1": {
        **LLAMA,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 4096,
    },
    "Qwen2.5": {
        **QWEN,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_mrope": False,
    },
    "Qwen3": {
        **QWEN,
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 32,
        "model_type": "qwen3",
        "rope_scaling": None,
        "sliding_window": None,
    },
    "gpt2": GPT2,
    "distilgpt2": {**GPT2, "_num_labels": 1, "id2label": {"0": "LABEL_0"}},
    "gpt2-xl": {**GPT2, "output_past": True},
    "opt-125m": OPT,
    "opt-350m": {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32},
    "galactica": {**OPT, "enable_bias": False, "layer_norm_elementwise_affine": False},
    "gpt-j-6B": GPTJ,
    "gpt-neo-1.3B": NEO,
    "pythia": NEOX,
    "gpt-neox-20b": {
        **NEOX,
        "attention_probs_dropout_prob": 0.1,
        "hidden_dropout_prob": 0.1,
        "hidden_act": "gelu_fast",
    },
    "RedPajama-INCITE": {**NEOX, "rotary_pct": 1.0, "use_parallel_residual": False},
    "bloom-560m": BLOOM,
    "gemma-2-2b": GEMMA2,
    "gemma-2-9b": {**GEMMA2, "sliding_window_size": 4096},
    "pythia, saved again": {
        **NEOX,
        "attention_bias": True,
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 10000,
    },
    "h2ogpt": {**NEOX, "custom_pipelines": {"text-generation": {"impl": "a.B", "pt": "C"}}},
    "aitextgen": {**GPT2, "line_by_line": True, "n_inner": None, "n_vocab": 100},
    "ALLaM": {**LLAMA, "internal_version": "7b-alpha-v2.33.0.30"},
    "Falcon3": {**LLAMA, "activation": "swiglu", "head_dim": 32},
    "unsloth's Llama": {**LLAMA, "unsloth_fixed": True, "unsloth_version": "2025.12.5"},
    "bert-base-uncased": BERT,
    "bert-base-multilingual": {
        **BERT,
        "directionality": "bidi",
        "pooler_fc_size": 768,
        "pooler_num_attention_heads": 12,
        "pooler_num_fc_layers": 3,
        "pooler_size_per_head": 128,
        "pooler_type": "first_token_transform",
    },
}


ESM2 = {
    "architectures": ["EsmForMaskedLM"],
    "attention_probs_dropout_prob": 0.0,
    "classifier_dropout": None,
    "emb_layer_norm_before": False,
    "esmfold_config": None,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "is_folding_model": False,
    "layer_norm_eps": 1e-05,
    "mask_token_id": 32,
    "max_position_embeddings": 1026,
    "model_type": "esm",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 1,
    "position_embedding_type": "rotary",
    "token_dropout": True,
    "use_cache": True,
    "vocab_list": None,
    "vocab_size": 100,
}
XLM = {
    "architectures": ["XLMWithLMHeadModel"],
    "asm": False,
    "attention_dropout": 0.1,
    "bos_index": 0,
    "causal": False,
    "dropout": 0.1,
    "emb_dim": 64,
    "embed_init_std": 0.02,
    "end_n_top": 5,
    "eos_index": 1,
    "gelu_activation": True,
    "init_std": 0.02,
    "is_encoder": True,
    "layer_norm_eps": 1e-12,
    "mask_index": 5,
    "max_position_embeddings": 512,
    "max_vocab": -1,
    "min_count": 0,
    "model_type": "xlm",
    "n_heads": 4,
    "n_langs": 1,
    "n_layers": 2,
    "pad_index": 2,
    "same_enc_dec": True,
    "share_inout_emb": True,
    "sinusoidal_embeddings": False,
    "start_n_top": 5,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "first",
    "summary_use_proj": True,
    "unk_index": 3,
    "use_lang_emb": True,
    "vocab_size": 100,
}
T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 96,
    "d_kv": 16,
    "d_model": 64,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "n_positions": 512,
    "num_heads": 4,
    "num_layers": 2,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "task_specific_params": {"summarization": {"early_stopping": True, "num_beams": 4}},
    "vocab_size": 100,
}
WRITTEN |= early.WRITTEN | {"esm2": ESM2, "xlm-mlm-en": XLM, "t5-small": T5}


def read(tmp_path, written):
    (tmp_path / "config.json").write_text(json.dumps(written))
    return read_config(tmp_path).to_dict()


@pytest.mark.parametrize("name", WRITTEN)
def test_config_of_a_real_checkpoint_is_taken(tmp_path, name):
    config = read(tmp_path, WRITTEN[name])
    spec, table = describe_model(config, config["architectures"])
    assert len(spec.layers) == 2 and spec.vocab == 100
    assert len(table.rows) > 10


@pytest.mark.parametrize(
    ("name", "tokens"), [("Llama-2", 4096), ("Vicuna-16k", 16384), ("Yarn-Llama-2", 65536)]
)
def test_limit_counts_the_scaling_of_rope(tmp_path, name, tokens):
    config = read(tmp_path, WRITTEN[name])
    assert describe_model(config, config["architectures"])[0].max_positions == tokens


REFUSED = {
    "opt heads": (OPT, {"num_attention_heads": 3}, "hidden_size=64 is no multiple"),
    "opt activation": (OPT, {"activation_function": "mish"}, "activation_function='mish'"),
    "opt unknown": (OPT, {"alignment": 3}, "alignment=3"),
    "gptj odd": (GPTJ, {"rotary_dim": 7}, "rotary_dim=7; expected an even number up to 16"),
    "gptj wide": (GPTJ, {"rotary_dim": 64}, "rotary_dim=64"),
    "gptj none": (GPTJ, {"rotary_dim": 0}, "rotary_dim=0"),
    "neox twice": (NEOX, {"rope_theta": 500.0}, "rope_theta=500.0"),
    "neox odd": (NEOX, {"rotary_pct": 0.2}, "partial_rotary_factor=0.2, which rotates 3 of the 16"),
    "neox nothing": (NEOX, {"rotary_pct": 0.0}, "partial_rotary_factor=0.0"),
    "neox rope": (NEOX, {"rope_scaling": {"type": "proportional", "factor": 2.0}}, "proportional"),
    "bloom residual": (
        BLOOM,
        {"apply_residual_connection_post_layernorm": True},
        "apply_residual_connection_post_layernorm=True",
    ),
    "bloom exact": (BLOOM, {"slow_but_exact": True}, "slow_but_exact=True"),
    "gemma2 encoder": (
        GEMMA2,
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention=True",
    ),
    "gemma2 layers": (
        GEMMA2,
        {"layer_types": ["full_attention", "chunked_attention"]},
        "one of full_attention and sliding_attention for each of 2 layers",
    ),
    "gemma2 window": (GEMMA2, {"sliding_window": None}, "sliding_window=None"),
    "gemma2 cap": (GEMMA2, {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping=-1.0"),
}


REFUSED |= {
    name: (early.WRITTEN[model], changes, message)
    for name, (model, changes, message) in early.REFUSED.items()
}


@pytest.mark.parametrize("name", REFUSED)
def test_field_that_is_not_honoured_is_refused_by_name(tmp_path, name):
    written, changes, message = REFUSED[name]
    config = read(tmp_path, {**written, **changes})
    with pytest.raises(ModelError, match=message):
        describe_model(config, config["architectures"])


def test_exact_bloom_that_was_not_split_is_an_ordinary_one(tmp_path):
    config = read(tmp_path, {**BLOOM, "pretraining_tp": 1, "slow_but_exact": True})
    assert describe_model(config)[0].family == "bloom"


def test_fields_of_parts_that_a_model_has_not_are_read():
    """Biases of recurrences where all layers attend, and of a head that a base class leaves out."""
    jamba = hf.JambaConfig(attn_layer_period=1, attn_layer_offset=0, mamba_proj_bias=True)
    assert all(layer.attention for layer in describe_model(jamba.to_dict())[0].layers)
    kinds = ["full_attention", "mlp"]
    nemotron = hf.NemotronHConfig(layers_block_type=kinds, use_bias=True).to_dict()
    assert [bool(layer.attention) for layer in describe_model(nemotron)[0].layers] == [True, False]
    phi = hf.PhimoeConfig(lm_head_bias=True).to_dict()
    assert describe_model(phi, ["PhimoeModel"])[0].head is None


def test_gpt_neo_windows_come_from_attention_types_where_no_layers_are_listed(tmp_path):
    config = {k: v for k, v in read(tmp_path, NEO).items() if k != "attention_layers"}
    spec, _ = describe_model(config)
    assert [layer.attention.window for layer in spec.layers] == [None, 256]
    with pytest.raises(ModelError, match="for each of 2 layers"):
        describe_model({**config, "attention_types": [[["global", "banded"], 1]]})


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 8, 12, 16, 25, 112])
def test_alibi_slopes_are_those_of_hf(heads):
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

    theirs = _get_alibi_slopes(heads, torch.device("cpu")).numpy()
    np.testing.assert_allclose(alibi_slopes(heads), theirs, rtol=1.2e-7 * heads)


@pytest.mark.parametrize("heads", [1, 3, 8, 71])
def test_alibi_slopes_of_mpt_are_those_of_hf(heads):
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    theirs = -build_mpt_alibi_tensor(heads, 2)[:, 0, 0].numpy()
    np.testing.assert_allclose(mpt.alibi_slopes(heads), theirs, rtol=1.2e-7)


@pytest.mark.parametrize(("width", "padding"), [(64, 1), (13, None), (1024, 7)])
def test_sinusoids_are_those_of_hf(width, padding):
    from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding

    theirs = XGLMSinusoidalPositionalEmbedding.get_embedding(2050, width, padding).numpy()
    ours = fairseq.Sinusoids(padding)((2050, width))
    np.testing.assert_allclose(ours, theirs, atol=5e-4)
    assert np.abs(ours - theirs)[:130].max() < 2e-5


def test_gptj_frequencies_are_those_of_hf():
    from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions

    spec, _ = describe_model(hf.GPTJConfig(rotary_dim=64).to_dict())
    rope = spec.layers[0].attention.rope
    angles = np.arange(2048, dtype=np.float32)[:, None] * np.array(rope.inv_freq, np.float32)
    theirs = create_sinusoidal_positions(2048, 64).numpy()
    ours = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    np.testing.assert_allclose(ours, theirs, atol=5e-4)
    assert rope.interleaved


def test_gptj_that_turns_whole_heads_gives_hfs_logits():
    model = make_model("gptj", rotary_dim=28)  # hidden_size 84, 3 heads
    ids = torch.from_numpy(random_ids(2, 9))
    with torch.no_grad():
        expected = model(ids).logits
    logits = dualinfer.init_inference(model, kernel_inject=True)(ids).logits
    assert (logits - expected).norm() / expected.norm() < 1e-5


def test_llama_whose_window_is_its_length_is_taken(tmp_path):
    for window, taken in ((512, True), (511, False)):
        fields = {"max_position_embeddings": 512, "sliding_window": window}
        config = hf.LlamaConfig(**fields, num_hidden_layers=1).to_dict() | fields
        if taken:
            assert describe_model(config)[0].layers[0].attention.window is None
        else:
            with pytest.raises(ModelError, match="sliding_window=511"):
                describe_model(config)


def test_config_without_a_model_type_says_so(tmp_path):
    with pytest.raises(ModelError, match="no model_type"):
        read(tmp_path, {k: v for k, v in BERT.items() if k != "model_type"})


def test_family_newer_than_transformers_says_so(tmp_path, monkeypatch):
    monkeypatch.delitem(hf.CONFIG_MAPPING._mapping, "bert")
    with pytest.raises(ModelError, match=r"has no model_type 'bert'.* newer transformers"):
        read(tmp_path, BERT)


@pytest.mark.parametrize("head_dim", [6, 80, 128])
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
@pytest.mark.parametrize(
    "kind",
    [
        *("default", "linear", "llama3", "llama3 without a band"),
        *("yarn", "yarn of one step", "yarn between dimensions"),
    ],
)
def test_rotary_frequencies_are_those_of_hf(kind, theta, head_dim):
    """To a unit in the last place of few: a position of some thousands multiplies the error."""
    scaling = {
        "default": {},
        "linear": {"factor": 4.0},
        "llama3": LLAMA3_ROPE,
        "llama3 without a band": {**LLAMA3_ROPE, "high_freq_factor": 1.0},  # Llama 4 Scout's
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 2048},
        "yarn of one step": {"factor": 4.0, "beta_fast": 9, "beta_slow": 9, "truncate": False},
        "yarn between dimensions": {"factor": 4.0, "truncate": False},
    }[kind]
    config = hf.LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        rope_parameters={**scaling, "rope_type": kind.split()[0], "rope_theta": theta},
    )
    embedding = hf.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    spec, _ = describe_model(config.to_dict(), ["LlamaForCausalLM"])
    rope = spec.layers[0].attention.rope
    ours, theirs = np.array(rope.inv_freq, np.float32), embedding.inv_freq.numpy()
    # llama3 and yarn subtract, which makes a unit in the last place a few.
    np.testing.assert_allclose(ours, theirs, rtol=1.2e-7 if kind in ("default", "linear") else 1e-6)
    assert rope.scaling == pytest.approx(embedding.attention_scaling)


@pytest.mark.parametrize("theta", [10.0, 50.0])
def test_yarn_of_a_small_base_keeps_its_band_within_the_head(theta):
    """Both ends of the blend would lie outside of the head's elements."""
    parameters = {"rope_type": "yarn", "rope_theta": theta, "factor": 4.0}
    parameters["original_max_position_embeddings"] = 128
    config = hf.LlamaConfig(hidden_size=16, num_attention_heads=2, rope_parameters=parameters)
    embedding = hf.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    spec, _ = describe_model(config.to_dict(), ["LlamaForCausalLM"])
    ours = np.array(spec.layers[0].attention.rope.inv_freq, np.float32)
    np.testing.assert_allclose(ours, embedding.inv_freq.numpy(), rtol=1e-6)


@pytest.mark.parametrize(("original", "reach"), [(1024, 4096), (512, 4096), (2048, 8192)])
def test_yarn_reaches_no_less_than_max_position_embeddings(original, reach):
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    parameters["original_max_position_embeddings"] = original
    config = hf.LlamaConfig(max_position_embeddings=4096, rope_parameters=parameters)
    spec, _ = describe_model({**config.to_dict(), "num_hidden_layers": 1})
    assert spec.max_positions == reach


def test_logits_at_far_positions_are_those_of_hf(hf_model, engine_of):
    model = hf_model("llama-gqa")
    ids = torch.arange(3, 19)[None]
    positions = torch.arange(0, 16 * 700, 700)[None]
    mask = torch.ones_like(ids)  # with a mask, positions apart are no packed sequences
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, position_ids=positions).logits
    for backend in ("torch", "jax"):
        engine = engine_of("llama-gqa", backend)
        logits = engine(ids, attention_mask=mask, position_ids=positions).logits
        assert (logits - expected).norm() / expected.norm() < 1e-4


def test_numbers_that_json_has_not_are_read_as_transformers_writes_them(tmp_path):
    written = hf.GraniteMoeHybridConfig(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    written.save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert tuple(read_config(tmp_path).to_dict()["time_step_limit"]) == (0.0, float("inf"))


_OF_ROUTERS = re.compile("expert|top_?k|rout|scor|n_group|shared|dense|moe|aux")


def test_fields_of_routers_that_a_config_lacks_are_what_transformers_takes(tmp_path):
    """Each by itself, of every mixture; and of every family all fields at once."""
    tried = 0
    for family in served_types():
        whole = hf.CONFIG_MAPPING[family]().to_dict()
        try:
            expected = describe_model(whole)
        except dualinfer.DualinferError:
            continue  # a family whose own defaults make no model
        names = [name for name in whole if _OF_ROUTERS.search(name) and whole[name] is not None]
        kept = [{n: v for n, v in whole.items() if n != name} for name in names]
        same = read(tmp_path, whole)
        for written in ({"model_type": family}, *kept):
            if (found := read(tmp_path, written)) != same:
                lacking = whole.keys() - written.keys()
                assert describe_model(found) == expected, (family, lacking)
        tried += len(kept)
    assert tried > 300

"""Decoders and BERT as DeepSpeed serves them, in all that their configs may say."""

import zlib

import torch
import transformers as hf

from ..models import EOS, PAD, STRONG, VOCAB, randomize
from .case import Case, Table


def _draw(case: Case, model: hf.PreTrainedModel) -> None:
    draw = "e" if case.family in STRONG else "b"
    torch.manual_seed(zlib.crc32(f"{case.name}/{draw}".encode()))
    randomize(model)


_IDS = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": EOS}
TABLE = Table(_IDS, _draw)


def _llama(model="LlamaForCausalLM", **fields):
    sizes = {
        "hidden_size": 84,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "max_position_embeddings": 512,
    }
    return model, {**sizes, **fields}


def _rope(kind, theta=10000.0, **fields):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **fields}}


def _mistral(**fields):
    return _llama("MistralForCausalLM", **fields)


def _qwen2(**fields):
    return _llama("Qwen2ForCausalLM", **fields)


def _qwen3(**fields):
    return _llama("Qwen3ForCausalLM", **fields)


def _gpt2(model="GPT2LMHeadModel", **fields):
    sizes = {"n_embd": 60, "n_layer": 2, "n_head": 5, "n_positions": 128}
    return model, {**sizes, **fields}


def _bert(model, **fields):
    sizes = {
        "hidden_size": 60,
        "num_hidden_layers": 2,
        "num_attention_heads": 5,
        "intermediate_size": 77,
        "max_position_embeddings": 63,
    }
    return model, {**sizes, **fields}


def _opt(model="OPTForCausalLM", **fields):
    sizes = {
        "hidden_size": 60,
        "num_hidden_layers": 2,
        "num_attention_heads": 5,
        "ffn_dim": 77,
        "max_position_embeddings": 128,
        "word_embed_proj_dim": 60,
    }
    return model, {**sizes, **fields}


def _gptj(model="GPTJForCausalLM", **fields):
    sizes = {"n_embd": 84, "n_layer": 2, "n_head": 3, "n_positions": 128, "rotary_dim": 10}
    return model, {**sizes, **fields}


def _neo(model="GPTNeoForCausalLM", **fields):
    sizes = {
        "hidden_size": 60,
        "num_layers": 2,
        "num_heads": 5,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 5,
        "max_position_embeddings": 128,
    }
    return model, {**sizes, **fields}


def _neox(model="GPTNeoXForCausalLM", **fields):
    sizes = {
        "hidden_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 5,
        "intermediate_size": 77,
        "max_position_embeddings": 128,
    }
    return model, {**sizes, **fields}


def _bloom(model="BloomForCausalLM", **fields):
    return model, {"hidden_size": 60, "n_layer": 2, "n_head": 5, **fields}


def _gemma2(model="Gemma2ForCausalLM", **fields):
    sizes = {
        "hidden_size": 60,
        "intermediate_size": 99,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 22,
        "sliding_window": 5,
        "query_pre_attn_scalar": 13,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
        "max_position_embeddings": 128,
    }
    return model, {**sizes, **fields}


def _gemma3(model="Gemma3ForCausalLM", **fields):
    """Layers in turns: a window, and all of the past with rotary angles of its own."""
    sizes = {
        "hidden_size": 60,
        "intermediate_size": 99,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 22,
        "sliding_window": 5,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 13,
        "max_position_embeddings": 128,
    }
    return model, {**sizes, **fields}


_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}

CASES: dict[str, Case] = {
    name: Case(name, model, fields, TABLE, *config)
    for name, (model, fields, *config) in {
        # heads of 14, no GQA, weights of its own in the head
        "llama-mha": _llama(num_key_value_heads=6, tie_word_embeddings=False),
        # head_dim 80 makes the attention wider than the model
        "llama-gqa": _llama(hidden_size=96, head_dim=80, num_hidden_layers=3),
        "llama-mqa": _llama(
            hidden_size=60,
            num_attention_heads=5,
            num_key_value_heads=1,
            num_hidden_layers=1,
            tie_word_embeddings=True,
        ),
        "llama-bias": _llama(
            num_attention_heads=3,
            num_key_value_heads=3,
            attention_bias=True,
            mlp_bias=True,
            hidden_act="gelu_pytorch_tanh",
            rms_norm_eps=1e-3,
        ),
        "llama-linear": _llama(**_rope("linear", factor=2.5)),
        "llama-llama3": _llama(
            hidden_size=96,
            head_dim=80,
            **_rope(
                "llama3",
                500000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        ),
        "llama-yarn": _llama(head_dim=32, **_rope("yarn", **_YARN)),
        "llama-yarn-factor": _llama(
            head_dim=32,
            **_rope("yarn", 50000.0, **_YARN, attention_factor=1.3, beta_fast=16.0, beta_slow=2.0),
        ),
        "llama-yarn-mscale": _llama(
            head_dim=32,
            **_rope("yarn", **_YARN, mscale=1.2, mscale_all_dim=0.7, truncate=False),
        ),
        "llama-headless": _llama("LlamaModel", num_hidden_layers=5),
        "mistral": _mistral(sliding_window=None, head_dim=20),
        "mistral-window": _mistral(sliding_window=7, num_hidden_layers=3),
        "qwen2": _qwen2(tie_word_embeddings=True),
        "qwen2-mixed": _qwen2(
            num_hidden_layers=4, use_sliding_window=True, sliding_window=7, max_window_layers=2
        ),
        "qwen3": _qwen3(head_dim=80, num_attention_heads=4, num_key_value_heads=2),
        "qwen3-mixed": _qwen3(
            head_dim=10,
            attention_bias=True,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
        ),
        "gpt2": _gpt2(),
        "gpt2-inverse": _gpt2(
            n_layer=3,
            n_inner=50,
            scale_attn_by_inverse_layer_idx=True,
            reorder_and_upcast_attn=True,
            activation_function="relu",
            tie_word_embeddings=False,
        ),
        "gpt2-unscaled": _gpt2(
            n_layer=1, n_head=3, scale_attn_weights=False, layer_norm_epsilon=1e-2
        ),
        "gpt2-headless": _gpt2("GPT2Model"),
        "opt": _opt(),
        # as OPT-350m
        "opt-post": _opt(
            do_layer_norm_before=False, word_embed_proj_dim=36, activation_function="tanh"
        ),
        # as Galactica, with a head of its own
        "opt-bare": _opt(
            enable_bias=False,
            layer_norm_elementwise_affine=False,
            activation_function="gelu",
            tie_word_embeddings=False,
        ),
        # an old fine-tune without its last norm
        "opt-headless": _opt("OPTModel", _remove_final_layer_norm=True, word_embed_proj_dim=36),
        "gptj": _gptj(),
        "gptj-tied": _gptj(
            n_head=6, rotary_dim=14, n_inner=77, n_layer=1, tie_word_embeddings=True
        ),
        "gptj-headless": _gptj("GPTJModel", n_head=6, rotary_dim=2),
        "gpt-neo": _neo(),
        "gpt-neo-untied": _neo(
            intermediate_size=77, tie_word_embeddings=False, activation_function="relu"
        ),
        "gpt-neo-headless": _neo(
            "GPTNeoModel",
            num_layers=3,
            attention_types=[[["local"], 2], [["global"], 1]],
            window_size=1,
        ),
        "neox": _neox(),
        "neox-sequential": _neox(
            use_parallel_residual=False,
            attention_bias=False,
            tie_word_embeddings=True,
            hidden_act="gelu_fast",
            rotary_pct=1.0,
            rotary_emb_base=5000,
        ),
        "neox-headless": _neox(
            "GPTNeoXModel",
            num_attention_heads=2,
            rope_scaling={"rope_type": "linear", "factor": 2.5, "partial_rotary_factor": 0.5},
        ),
        "bloom": _bloom(),
        "bloom-untied": _bloom(n_head=12, n_layer=1, tie_word_embeddings=False),
        "bloom-headless": _bloom("BloomModel", n_head=1),
        "gemma2": _gemma2(),
        "gemma2-uncapped": _gemma2(
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            attention_bias=True,
            tie_word_embeddings=False,
            num_key_value_heads=1,
            layer_types=["full_attention", "sliding_attention"],
        ),
        "gemma2-headless": _gemma2("Gemma2Model", num_hidden_layers=1),
        "gemma3": _gemma3(),
        # scaled where it sees all of the past; its cap of scores is one that HF does not read
        "gemma3-scaled": _gemma3(
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            rope_scaling={"rope_type": "linear", "factor": 8.0},
            attn_logit_softcapping=3.0,
            final_logit_softcapping=5.0,
            attention_bias=True,
            tie_word_embeddings=False,
        ),
        "bert": _bert("BertModel"),
        "bert-types": _bert(
            "BertModel", num_hidden_layers=1, type_vocab_size=3, hidden_act="gelu_new"
        ),
        "bert-masked": _bert("BertForMaskedLM", layer_norm_eps=1e-3),
        "bert-masked-untied": _bert(
            "BertForMaskedLM", tie_word_embeddings=False, hidden_act="relu"
        ),
    }.items()
}

ALL = tuple(CASES)
CAUSAL = tuple(name for name, case in CASES.items() if not case.architecture.startswith("Bert"))
GENERATING = tuple(name for name, case in CASES.items() if case.generates)

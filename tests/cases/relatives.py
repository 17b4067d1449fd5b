"""Llama's relatives, and those before it: by HF's word of the family."""

from typing import Any

from ..models import EOS, PAD, VOCAB
from . import early, latent
from .case import Case, Table

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
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
TURNS = ["sliding_attention", "full_attention"]
ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
FEW = {"num_attention_heads": 3, "num_key_value_heads": 3}
MULTIPLIED = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.3,
    "logits_scaling": 2.5,
}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 14}
LONG |= {"short_factor": [1.0, 1.1, 1.3, 1.2, 1.5, 1.1, 2.0]}
LONG |= {"long_factor": [1.5, 2.0, 4.0, 3.0, 7.0, 9.0, 16.0]}
# What Phi-4-multimodal has beside its text.
SEEN = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
SEEN |= {"num_attention_heads": 2, "image_size": 28, "crop_size": 28}
HEARD = {"hidden_size": 16, "intermediate_size": 20, "num_blocks": 1, "num_attention_heads": 2}
HEARD |= {"ext_pw_out_channel": 16, "nemo_conv_channels": 16, "depthwise_separable_out_channel": 16}
# Heads of two sizes, the last two layers with the keys of the first ones.
GEMMA4 = {"num_hidden_layers": 4, "layer_types": TURNS * 2, "num_kv_shared_layers": 2}
GEMMA4 |= {"head_dim": 12, "global_head_dim": 20, "sliding_window": 5, "use_double_wide_mlp": True}
GEMMA4 |= {"hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": VOCAB}
GEMMA4 |= {"final_logit_softcapping": 5.0}
# Three streams, gates that are shut, ids without an embedding for layers, shared keys.
GEMMA3N = {**GEMMA4, "altup_num_inputs": 3, "laurel_rank": 7, "vocab_size_per_layer_input": 990}
GEMMA3N = {n: v for n, v in GEMMA3N.items() if "global" not in n and "double" not in n}
GEMMA3N |= {"activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0]}
# HF's word of the family, and what makes it odd.
ROWS = {
    "apertus": ("Apertus", {"rope_parameters": LLAMA3}),
    "arcee": ("Arcee", {"head_dim": 14, "mlp_bias": True}),
    "bitnet": ("BitNet", {"attention_bias": True}),
    "cohere": ("Cohere", {"logit_scale": 0.3, "attention_bias": True}),
    "cohere, normed": ("Cohere", {"logit_scale": 0.3, "use_qk_norm": True}),
    "cohere2": (
        "Cohere2",
        {"logit_scale": 2.0, "head_dim": 14, "sliding_window": 5, "layer_types": TURNS},
    ),
    "cohere_compass_text": (
        "CohereCompassText",
        {"logit_scale": None, "head_dim": 14, "sliding_window": 5, "layer_types": TURNS}
        | {"rope_parameters": {TURNS[0]: {**DEFAULT, "mrope_section": [3, 2, 2]}, TURNS[1]: None}},
    ),
    "cwm": ("Cwm", {"head_dim": 14, "sliding_window": 1, "layer_types": TURNS}),
    "diffllama": (
        "DiffLlama",
        {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 8},
    ),
    "ernie4_5": ("Ernie4_5", {"head_dim": 22, "use_bias": True}),
    "exaone4": ("Exaone4", {"sliding_window": 5, "layer_types": TURNS}),
    "exaone4 without windows": (
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "gemma": ("Gemma", {"head_dim": 22}),
    "gemma3n": ("Gemma3nText", GEMMA3N),
    "gemma4": ("Gemma4Text", GEMMA4),
    "glm": ("Glm", {"head_dim": 16, "attention_bias": True, **PARTIAL}),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": False, **PARTIAL}),
    "granite": ("Granite", MULTIPLIED),
    "granite_swa": (
        "GraniteSWA",
        {**MULTIPLIED, "mlp_bias": True, "sliding_window": 5, "layer_types": TURNS}
        | {"layer_rope_theta": [1e4, 0]},
    ),
    "granitemoehybrid without states": (
        "GraniteMoeHybrid",
        {**MULTIPLIED, "layer_types": ["full_attention"] * 2, "position_embedding_type": "rope"}
        | {"num_local_experts": 0, "shared_intermediate_size": 90, "mamba_n_heads": 6},
    ),
    "helium": ("Helium", {"head_dim": 14, "num_key_value_heads": 2}),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1",
        {"head_dim": 14, "rope_parameters": ALPHA},
    ),
    "hyperclovax": ("HyperCLOVAX", {**MULTIPLIED, "tie_word_embeddings": False}),
    "hyperclovax without norms behind": ("HyperCLOVAX", {"use_post_norm": False}),
    "internlm3": ("InternLM3", {"head_dim": 14, "attention_bias": True, "mlp_bias": True}),
    "jais2": ("Jais2", {"head_dim": 14}),
    "ministral": ("Ministral", {"head_dim": 22, "sliding_window": 5, "layer_types": TURNS}),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 22,
            "sliding_window": 7,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 4,
                "llama_4_scaling_beta": 0.6,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "nanochat": ("NanoChat", {"final_logit_softcapping": 20.0}),
    "nemotron": ("Nemotron", {**PARTIAL, "head_dim": 16, "mlp_bias": True}),
    "olmo": ("Olmo", {"attention_bias": True}),
    "olmo, clipped": ("Olmo", {"clip_qkv": 0.7}),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 5,
            "layer_types": TURNS,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
            },
        },
    ),
    "phi": ("Phi", {**PARTIAL, **FEW}),
    "phi4_multimodal": (
        "Phi4Multimodal",
        {"num_attention_heads": 3, **PARTIAL, "vision_config": SEEN, "audio_config": HEARD},
    ),
    "phi, normed": ("Phi", {"qk_layernorm": True, **FEW}),
    "phi3": ("Phi3", {"sliding_window": 5, "num_attention_heads": 3, **PARTIAL}),
    "phi3, long": (
        "Phi3",
        {
            "num_attention_heads": 3,
            "original_max_position_embeddings": 14,
            "rope_parameters": {**LONG, "partial_rotary_factor": 0.5},
        },
    ),
    "seed_oss": ("SeedOss", {"head_dim": 22, "attention_out_bias": True, "mlp_bias": True}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0], "attention_bias": True}),
    "smollm3 with windows": (
        "SmolLM3",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": TURNS},
    ),
    "stablelm": ("StableLm", {"use_qkv_bias": True, **PARTIAL, "num_attention_heads": 3}),
    "stablelm, normed": ("StableLm", {"qk_layernorm": True, **PARTIAL, "num_attention_heads": 3}),
    "stablelm, parallel": (
        "StableLm",
        {"use_parallel_residual": True, **PARTIAL, **FEW},
    ),
    "vaultgemma": (
        "VaultGemma",
        {"head_dim": 22, "sliding_window": 5, "layer_types": TURNS, "query_pre_attn_scalar": 13}
        | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 20.0},
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 5, "tie_word_embeddings": False}),
}

TABLE = Table(SIZES)


def _case(name: str, kind: str, fields: dict[str, Any]) -> Case:
    own = "Llama" if kind == "InternLM3" else kind.removesuffix("Text")
    end = "LMHeadModel" if kind in ("CTRL", "OpenAIGPT") else "ForCausalLM"
    return Case(name, f"{own}{end}", fields, TABLE, f"{kind}Config")


ROWS |= early.ROWS | latent.ROWS
CASES = {name: _case(name, *row) for name, row in ROWS.items()}

OF_ALL = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.44.0",
    "use_cache": True,
    "vocab_size": 100,
}
# Fields of config.json as the makers wrote them, beside those that all have.
WRITTEN = {
    "apertus": {
        **{"hidden_act": "xielu", "hidden_dropout": 0.0, "post_norm": False, "qk_norm": True},
        **{"mlp_bias": False, "rms_norm_eps": 1e-5},
    },
    "hunyuan_v1_dense": {
        **{"attention_head_dim": 16, "cla_share_factor": 2, "class_num": 0, "head_dim": 16},
        **{"dense_list": [4096, 0], "eod_token_id": 3, "norm_type": "rms", "org_vocab_size": 100},
        **{"pad_id": 1, "pool_type": "last", "use_cla": False, "use_qk_norm": True},
        **{"use_rotary_pos_emb": True, "mlp_bias": False, "rms_norm_eps": 1e-5},
        "rope_scaling": {
            **{"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0},
            **{"mscale_all_dim": 1.0, "type": "dynamic"},
        },
    },
    "internlm3": {
        **{"bias": False, "head_dim": 16, "qkv_bias": False, "rms_norm_eps": 1e-5},
        "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"},
    },
    "cohere": {"attention_bias": False, "layer_norm_eps": 1e-05, "logit_scale": 0.0625},
    "cohere2": {
        "cache_implementation": "hybrid",
        "head_dim": 16,
        "layer_norm_eps": 1e-05,
        "logit_scale": 0.25,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_switch": 4,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": True,
    },
    "gemma": {"head_dim": 32, "hidden_act": "gelu", "hidden_activation": None},
    "gemma4_text": {
        **{"attention_k_eq_v": False, "enable_moe_block": False, "global_head_dim": 32},
        **{"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "rope_theta": None},
        **{"final_logit_softcapping": 30.0, "layer_types": TURNS, "num_kv_shared_layers": 0},
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100},
        **{"num_global_key_value_heads": None, "use_bidirectional_attention": None},
        "per_layer_config": {"01": {"head_dim": 32}},  # as transformers writes global_head_dim
        "rope_parameters": {
            "full_attention": {
                **{"partial_rotary_factor": 0.25, "rope_type": "proportional"},
                "rope_theta": 1e6,
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    },
    "glm": {"attention_bias": True, "head_dim": 16, "partial_rotary_factor": 0.5},
    "granite": {
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
        "rope_scaling": None,
    },
    "mistral3": {
        **{"image_token_index": 10, "multimodal_projector_bias": False, "spatial_merge_size": 2},
        **{"projector_hidden_act": "gelu", "vision_feature_layer": -1, "rope_theta": None},
        **dict.fromkeys(("hidden_size", "intermediate_size", "max_position_embeddings")),
        **dict.fromkeys(("num_attention_heads", "num_hidden_layers", "num_key_value_heads")),
        "vocab_size": None,
        "vision_config": {"model_type": "pixtral", "head_dim": 64, "patch_size": 14},
        "text_config": {
            **{"model_type": "mistral", "head_dim": 16, "hidden_act": "silu", "hidden_size": 64},
            **{"intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2},
            **{"num_key_value_heads": 2, "rms_norm_eps": 1e-05, "rope_theta": 1e9},
            **{"attention_dropout": 0.0, "sliding_window": None, "vocab_size": 100},
            **{"max_position_embeddings": 4096, "use_cache": True, "initializer_range": 0.02},
        },
    },
    "granitemoehybrid": {
        **{"attention_multiplier": 0.015625, "embedding_multiplier": 12, "logits_scaling": 10},
        **{"residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "shared_intermediate_size": 96},
        **{"layer_types": ["attention"] * 2, "num_experts_per_tok": 0, "num_local_experts": 0},
        **{"init_method": "mup", "normalization_function": "rmsnorm", "mamba_n_heads": 8},
        **{"mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 256},
        **{"position_embedding_type": "rope", "router_aux_loss_coef": 0.01},
    },
    "hyperclovax": {"end_token_id": 3, "head_dim": 16, "use_post_norm": True},
    "nemotron": {"head_dim": 16, "kv_channels": 16, "partial_rotary_factor": 0.5}
    | {"rope_percent": 0.5, "norm_eps": 1e-5, "hidden_act": "relu2"},
    "phi": {
        "attention_dropout": 0.0,
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-05,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": False,
        "resid_pdrop": 0.1,
        "rope_scaling": None,
    },
    "phi3": {
        "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "original_max_position_embeddings": 4096,
        "rope_scaling": None,
        "sliding_window": 2047,
    },
    "smollm3": {"max_window_layers": 28, "no_rope_layers": [1, 0], "pretraining_tp": 2},
    "stablelm": {
        **{"norm_eps": 1e-05, "num_heads": 4, "partial_rotary_factor": 0.25, "rope_pct": 0.25},
        **{"rotary_scaling_factor": 1.0, "use_qkv_bias": True},
    },
    "starcoder2": {
        "activation_function": "gelu",
        "attention_softmax_in_fp32": True,
        "layer_norm_epsilon": 1e-05,
        "mlp_type": "default",
        "norm_epsilon": 1e-05,
        "norm_type": "layer_norm",
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
        "sliding_window": 4096,
        "use_bias": True,
    },
}

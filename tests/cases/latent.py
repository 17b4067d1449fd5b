"""Models with latent attention."""

from typing import Any

_SIZES = {
    "hidden_size": 60,
    "intermediate_size": 77,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "kv_lora_rank": 22,
    "qk_rope_head_dim": 10,
    "qk_nope_head_dim": 14,
    "v_head_dim": 18,
    "q_lora_rank": 26,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0}
_YARN |= {"original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 1.1}
_YARN |= {"beta_fast": 32, "beta_slow": 1}
_EXPERTS = {"n_routed_experts": 6, "n_shared_experts": 2, "moe_intermediate_size": 20}
_EXPERTS |= {"num_experts_per_tok": 3, "n_group": 3, "topk_group": 2}
_GROWING = {"llama_4_scaling_beta": 0.6, "max_position_embeddings": 128}
_GROWING |= {"partial_rotary_factor": 10 / 24}
# HF's word of the family, and what makes it odd.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2, dense": (
        "DeepseekV2",
        {
            **{**_SIZES, "q_lora_rank": None, "attention_bias": True, "mlp_bias": True},
            **{"first_k_dense_replace": 2, "num_experts_per_tok": 2, "rope_parameters": _YARN},
        },
    ),
    "deepseek_v2, experts": (
        "DeepseekV2",
        {
            **{**_SIZES, **_EXPERTS, "num_hidden_layers": 3, "first_k_dense_replace": 1},
            **{"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7},
        },
    ),
    "deepseek_v3": ("DeepseekV3", {**_SIZES, **_EXPERTS, "first_k_dense_replace": 1}),
    "deepseek_v32": (
        "DeepseekV32",
        {**_SIZES, **_EXPERTS, "mlp_layer_types": ["dense", "sparse"], "index_topk": 24}
        | {"index_n_heads": 2, "index_head_dim": 32},
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {**_SIZES, **_EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
        | {"index_n_heads": 2, "index_head_dim": 32},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {**_SIZES, **_EXPERTS, "n_group": 1, "topk_group": 1, "rope_interleave": False},
    ),
    "axk1": ("AXK1", {**_SIZES, **_EXPERTS, "mlp_layer_types": ["dense", "sparse"]}),
    "axk2": (
        "AXK2",
        {**_SIZES, **_EXPERTS, "mlp_layer_types": ["dense", "sparse"], "index_topk": 24}
        | {"index_n_heads": 2, "index_head_dim": 32, "gated_norm_rank": 6}
        | {"n_group": None, "topk_group": None, "rope_parameters": _YARN},
    ),
    "longcat_flash": (
        "LongcatFlash",
        {**_SIZES, **_EXPERTS, "n_shared_experts": None, "n_group": None, "topk_group": None}
        | {"num_hidden_layers": 4, "num_layers": 2, "head_dim": 10, "zero_expert_num": 4}
        | {"attention_bias": True, "routed_scaling_factor": 1.7, "rope_parameters": _YARN},
    ),
    "minicpm3": ("MiniCPM3", {**_SIZES, "scale_emb": 3, "dim_model_base": 40, "mlp_bias": True}),
    "mistral4": (
        "Mistral4",
        {**_SIZES, **_EXPERTS, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7}
        | {"rope_parameters": {**_YARN, "original_max_position_embeddings": 4} | _GROWING},
    ),
    "youtu": (
        "Youtu",
        {**_SIZES, "attention_bias": True, "rope_parameters": {**_YARN, "factor": 4.0}},
    ),
}
_V3 = {
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "kv_lora_rank": 24,
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 16,
}
_OF_V3 = ("aux_loss_alpha", "moe_layer_freq", "scoring_func", "seq_aux")
# Fields of config.json as the makers wrote them, beside those that all have; by model_type.
WRITTEN: dict[str, dict[str, Any]] = {
    "deepseek_v3": _V3,
    "kimi_k2": _V3 | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "glm4_moe_lite": {k: v for k, v in _V3.items() if k not in _OF_V3}
    | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "partial_rotary_factor": 1.0},
    "minicpm3": {
        "dim_model_base": 256,
        "eos_token_id": [2, 73440],
        "hidden_act": "silu",
        "kv_lora_rank": 24,
        "num_key_value_heads": 4,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "long_factor": [1.06, 1.1, 1.2, 1.3],
            "original_max_position_embeddings": 32768,
            "short_factor": [1.06, 1.1, 1.2, 1.3],
            "type": "longrope",
        },
        "scale_depth": 1.4,
        "scale_emb": 12,
    },
}

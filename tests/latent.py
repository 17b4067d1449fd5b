"""Models with latent attention: cases for `test_relatives`, and what their tests share."""

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
# HF's class, and what makes it odd.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2, dense": (
        "DeepseekV2",
        {
            **{**_SIZES, "q_lora_rank": None, "attention_bias": True, "mlp_bias": True},
            **{"first_k_dense_replace": 2, "num_experts_per_tok": 2, "rope_parameters": _YARN},
        },
    ),
    "deepseek_v3, dense": ("DeepseekV3", {**_SIZES, "first_k_dense_replace": 2}),
    "glm4_moe_lite, dense": (
        "Glm4MoeLite",
        {**_SIZES, "mlp_layer_types": ["dense", "dense"], "rope_interleave": False},
    ),
    "minicpm3": ("MiniCPM3", {**_SIZES, "scale_emb": 3, "dim_model_base": 40, "mlp_bias": True}),
    "youtu": (
        "Youtu",
        {**_SIZES, "attention_bias": True, "rope_parameters": {**_YARN, "factor": 4.0}},
    ),
}

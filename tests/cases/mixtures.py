"""Mixtures of experts of every family, and which experts transformers chooses."""

import numpy as np
import torch

from ..models import EOS, PAD, randomize
from .case import Case, Table

VOCAB = 101
SIZES = {
    "hidden_size": 60,
    "intermediate_size": 31,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "vocab_size": VOCAB,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "experts_implementation": "eager",
}
FIVE = {"num_experts": 5, "num_experts_per_tok": 3}
LOCAL = {"num_local_experts": 5, "num_experts_per_tok": 3}
OF_LAYER = {"moe_intermediate_size": 19}
GROUPED = {"n_routed_experts": 6, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2}
GROUPED |= {"n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7}
MULTIPLIED = {"embedding_multiplier": 3.0, "attention_multiplier": 0.4}
MULTIPLIED |= {"residual_multiplier": 0.3, "logits_scaling": 2.5}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
PARTIAL_OF_14 = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.3}
ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False}
YARN |= {"original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}
TURNS = ["sliding_attention", "full_attention"]
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8}
LONGROPE |= {"short_factor": [1.0, 1.1, 1.3, 1.6, 2.0], "long_factor": [3.0] * 5}
LONGROPE |= {"short_mscale": 1.2, "long_mscale": 1.2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LLAMA4 = {"head_dim": 14, "intermediate_size": 19, "intermediate_size_mlp": 31}
LLAMA4 |= {"attention_chunk_size": 5, "floor_scale": 3, "attn_scale": 0.4}
LLAMA4 |= {"no_rope_layer_interval": 2, "rope_parameters": LLAMA3}
# HF's word of the family, and what makes it odd.
ROWS = {
    "mixtral": ("Mixtral", {**LOCAL, "sliding_window": 5}),
    "qwen2_moe": ("Qwen2Moe", {**FIVE, **OF_LAYER, "shared_expert_intermediate_size": 27}),
    "qwen2_moe, one layer dense": (
        "Qwen2Moe",
        {**FIVE, **OF_LAYER, "shared_expert_intermediate_size": 27, "norm_topk_prob": True}
        | {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 5}
        | {"layer_types": TURNS},
    ),
    "qwen3_moe": ("Qwen3Moe", {**FIVE, **OF_LAYER, "head_dim": 14, "norm_topk_prob": True}),
    "qwen3_moe, one layer dense": (
        "Qwen3Moe",
        {**FIVE, **OF_LAYER, "head_dim": 14, "mlp_only_layers": [0]},
    ),
    "olmoe": ("Olmoe", {**FIVE, "num_key_value_heads": 6}),
    "olmoe, clipped": ("Olmoe", {**FIVE, "clip_qkv": 0.7, "norm_topk_prob": True}),
    "granitemoe": ("GraniteMoe", {**LOCAL, **MULTIPLIED}),
    "granitemoeshared": (
        "GraniteMoeShared",
        {**LOCAL, **MULTIPLIED, "shared_intermediate_size": 27},
    ),
    "granitemoe_swa": (
        "GraniteMoeSWA",
        {**LOCAL, **MULTIPLIED, "shared_intermediate_size": 27, "sliding_window": 5}
        | {"num_hidden_layers": 3, "layer_types": ["full_attention", *TURNS]}
        | {"layer_rope_theta": [0, 1e4, 500.0]},
    ),
    "granitemoeshared without a shared expert": ("GraniteMoeShared", LOCAL),
    "gpt_oss": (
        "GptOss",
        {**LOCAL, "head_dim": 14, "layer_types": TURNS, "sliding_window": 5}
        | {"rope_parameters": YARN, "swiglu_limit": 1.5},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 5, "moe_k": 3, "moe_num_shared_experts": 2, **OF_LAYER}
        | {"head_dim": 14},
    ),
    "ernie4_5_moe without a shared expert": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 5, "moe_k": 3, "moe_num_shared_experts": 0, **OF_LAYER}
        | {"head_dim": 14, "moe_layer_start_index": 0},
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        {"num_experts": 5, "moe_topk": [3, 2], "head_dim": 14, "rope_parameters": ALPHA},
    ),
    "dots1": (
        "Dots1",
        {**GROUPED, **OF_LAYER, "head_dim": 14, "sliding_window": 5, "max_window_layers": 1},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {**GROUPED, **OF_LAYER, "head_dim": 16, "norm_topk_prob": True, "use_qk_norm": True}
        | {"attention_bias": True, "rope_parameters": PARTIAL},
    ),
    "llama4": ("Llama4", {**LOCAL, **LLAMA4, "num_hidden_layers": 3, "moe_layers": [0, 1]}),
    "llama4, one expert": (
        "Llama4",
        {**LOCAL, **LLAMA4, "num_experts_per_tok": 1, "use_qk_norm": False},
    ),
    "phimoe": ("Phimoe", {"num_local_experts": 5, "router_jitter_noise": 0.3}),
    "phimoe, longrope": (
        "Phimoe",
        {"num_local_experts": 5, "attention_bias": True, "lm_head_bias": True}
        | {"rope_parameters": LONGROPE, "sliding_window": 5, "router_jitter_noise": 0.1},
    ),
    "laguna": (
        "Laguna",
        {**FIVE, **OF_LAYER, "head_dim": 14, "layer_types": TURNS[::-1], "sliding_window": 5}
        | {"num_attention_heads_per_layer": [3, 6], "shared_expert_intermediate_size": 27}
        | {"moe_routed_scaling_factor": 1.7, "moe_router_logit_softcapping": 0.5}
        | {"rope_parameters": dict(zip(TURNS, (DEFAULT, PARTIAL_OF_14), strict=True))}
        | {"attention_bias": True},
    ),
    "laguna, gated by element": (
        "Laguna",
        {**FIVE, **OF_LAYER, "head_dim": 14, "gating": "per-element"}
        | {"mlp_layer_types": ["sparse"] * 2, "shared_expert_intermediate_size": 27}
        | {"rope_parameters": {"full_attention": YARN}},
    ),
    "longcat_flash with more experts": (
        "LongcatFlash",
        {"num_layers": 2, "num_hidden_layers": 4, "n_routed_experts": 5, "zero_expert_num": 3}
        | {"moe_topk": 4, "expert_ffn_hidden_size": 19, "routed_scaling_factor": 1.7}
        | {"num_key_value_heads": 6, "qk_rope_head_dim": 10, "qk_nope_head_dim": 14}
        | {"head_dim": 10, "v_head_dim": 18, "kv_lora_rank": 22, "q_lora_rank": 26},
    ),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        {**OF_LAYER, "n_routed_experts": 6, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2}
        | {"head_dim": 14, "v_head_dim": 11, "layer_types": TURNS[::-1], "sliding_window": 5}
        | {"routed_scaling_factor": 1.7, "attention_bias": True}
        | {
            "rope_parameters": dict(
                zip(TURNS, (PARTIAL_OF_14, DEFAULT | {"partial_rotary_factor": 1.0}), strict=True)
            )
        },
    ),
    "minimax_m2": ("MiniMaxM2", {**LOCAL, "head_dim": 16, "rope_parameters": PARTIAL}),
    "afmoe": (
        "Afmoe",
        {**FIVE, **OF_LAYER, "head_dim": 14, "num_dense_layers": 1, "num_shared_experts": 2}
        | {"route_scale": 1.7, "mup_enabled": True, "layer_types": TURNS, "sliding_window": 5},
    ),
    "cohere2_moe": (
        "Cohere2Moe",
        {**FIVE, "head_dim": 14, "layer_types": TURNS[::-1], "sliding_window": 5}
        | {"mlp_layer_types": ["dense", "sparse"], "num_shared_experts": 2, "logit_scale": 2.0}
        | {"prefix_dense_intermediate_size": 47},
    ),
    "cohere2_moe, sigmoid": (
        "Cohere2Moe",
        {**FIVE, "head_dim": 14, "layer_types": TURNS, "sliding_window": 5, "rms_norm_eps": 1e-6}
        | {"expert_selection_fn": "sigmoid", "num_shared_experts": 1, "logit_scale": 2.0}
        | {"shared_expert_combination_strategy": "sum"},
    ),
    "cohere2_moe without a shared expert": (
        "Cohere2Moe",
        {**FIVE, "head_dim": 14, "layer_types": TURNS, "sliding_window": 5, "logit_scale": 2.0}
        | {"expert_selection_fn": "sigmoid", "norm_topk_prob": False},
    ),
    "dbrx": (
        "Dbrx",
        {"attn_config": {"kv_n_heads": 3, "clip_qkv": 0.7, "rope_theta": 1e4}, "d_model": 60}
        | {"ffn_config": {"ffn_hidden_size": 19, "moe_num_experts": 5, "moe_top_k": 3}}
        | {"intermediate_size": None},
    ),
    "exaone_moe": (
        "ExaoneMoe",
        {**OF_LAYER, "num_experts": 6, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2}
        | {"num_shared_experts": 2, "sliding_window": 5, "layer_types": TURNS[::-1]},
    ),
    "flint": (
        "Flint",
        {**FIVE, **OF_LAYER, "head_dim": 14, "layer_types": TURNS, "sliding_window": 5}
        | {"shared_expert_intermediate_size": 27, "mlp_only_layers": [0]},
    ),
    "flex_olmo": ("FlexOlmo", {**FIVE, "attention_bias": True}),
    "hy_v3": (
        "HYV3",
        {**FIVE, **OF_LAYER, "head_dim": 14, "router_scaling_factor": 1.7}
        | {"num_shared_experts": 2, "num_hidden_layers": 3},
    ),
    "gemma4 with experts": (
        "Gemma4",
        {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 3, **OF_LAYER}
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "layer_types": TURNS}
        | {"head_dim": 12, "global_head_dim": 20, "num_global_key_value_heads": 2}
        | {"sliding_window": 5, "num_kv_shared_layers": 0},
    ),
    "kolibri1": (
        "Kolibri1",
        {**FIVE, **OF_LAYER, "head_dim": 14, "layer_types": TURNS, "sliding_window": 5}
        | {"shared_expert_intermediate_size": 27, "norm_topk_prob": True},
    ),
    "mellum": (
        "Mellum",
        {**FIVE, **OF_LAYER, "head_dim": 14, "layer_types": TURNS, "sliding_window": 5}
        | {"mlp_layer_types": ["dense", "sparse"], "attention_bias": True}
        | {"rope_parameters": dict(zip(TURNS, (DEFAULT, YARN), strict=True))},
    ),
    "solar_open": (
        "SolarOpen",
        {**OF_LAYER, "n_routed_experts": 5, "num_experts_per_tok": 3, "head_dim": 16}
        | {"n_shared_experts": 2, "attention_bias": True},
    ),
}


def _build(case, config, kind):
    return kind._from_config(config, experts_implementation="eager")


def _draw(case, model):
    """So that every expert, and every bias of a router, shows."""
    randomize(model)
    with torch.no_grad():
        for part, tensor in (*model.named_parameters(), *model.named_buffers()):
            if part.endswith(("e_score_correction_bias", "expert_bias")):
                tensor.normal_(0, 0.1)
            elif part.endswith(".sinks"):
                tensor.normal_()
            elif ".experts." in part and tensor.ndim == 3:
                tensor.normal_(0, 1.5 / max(tensor.shape[1:]) ** 0.5)


TABLE = Table(SIZES, _draw, build=_build)


def _case(name, kind, fields):
    text = "Text" * (kind in ("Gemma4", "Llama4"))
    return Case(name, f"{kind}ForCausalLM", fields, TABLE, f"{kind}{text}Config")


CASES = {name: _case(name, *row) for name, row in ROWS.items()}


def chosen_by(model, ids):
    """The experts that each layer's mixture runs for the tokens of `ids`, ascending."""
    found = []

    def remember(module, args):
        if len(args) > 1:
            found.append(np.sort(args[1].numpy(), -1))

    def remember_scores(module, args, outputs):
        """Llama 4's experts run for all tokens, most of them for 0 times its states."""
        scores = outputs[0].numpy()
        found.append(np.nonzero(scores)[1].reshape(len(scores), -1))

    parts = [m for n, m in model.named_modules() if n.endswith(".experts")]
    hooks = [part.register_forward_pre_hook(remember) for part in parts]
    routers = [m for m in model.modules() if type(m).__name__ == "Llama4Router"]
    hooks += [part.register_forward_hook(remember_scores) for part in routers]
    with torch.no_grad():
        logits = model(torch.tensor(ids)).logits.numpy()
    for hook in hooks:
        hook.remove()
    return logits, found

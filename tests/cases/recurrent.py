"""Decoders with recurrences, whose caches are states."""

import torch
import transformers as hf

from ..models import EOS, PAD, VOCAB, randomize
from .case import OUT, Case, Table

SIZES = {
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "vocab_size": VOCAB,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
MIXED = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
TURNS = {"layer_types": ["conv", "full_attention", "conv", "conv"]}
LFM2 = {**TURNS, "intermediate_size": 150, "block_multiple_of": 9}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
# HF's word of the family, and what makes it odd.
ROWS = {
    "lfm2": ("Lfm2", {**LFM2, "block_ffn_dim_multiplier": 1.1}),
    "lfm2 with biases": ("Lfm2", {**LFM2, "conv_bias": True, "conv_L_cache": 4}),
    "lfm2_moe": (
        "Lfm2Moe",
        {**TURNS, **EXPERTS, "intermediate_size": 77, "num_dense_layers": 1}
        | {"routed_scaling_factor": 1.7, "conv_L_cache": 2},
    ),
}
STATES = {"mamba_n_heads": 8, "mamba_d_head": 24, "mamba_n_groups": 2, "mamba_d_state": 10}
HYBRID = {**STATES, "intermediate_size": 150}
MULTIPLIED = {"attention_multiplier": 0.3, "residual_multiplier": 0.4}
MULTIPLIED |= {"embedding_multiplier": 3.0, "logits_scaling": 1.7}
GRANITE = {**MULTIPLIED, "mamba_n_groups": 1, "layer_types": MIXED}
_NO = ("max_position_embeddings", "num_attention_heads", "num_key_value_heads")
MAMBA2 = {
    **dict.fromkeys(_NO, OUT),
    "num_heads": 8,
    "head_dim": 24,
    "state_size": 10,
    "chunk_size": 8,
}
NEMOTRON = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]}
NEMOTRON |= {"mamba_num_heads": 8, "mamba_head_dim": 10, "n_groups": 4, "ssm_state_size": 6}
NEMOTRON |= {"head_dim": 14, "intermediate_size": 99, "moe_shared_expert_intermediate_size": 56}
FALCON = {"mamba_d_ssm": 192, "lm_head_multiplier": 0.3, "embedding_multiplier": 5.0}
FALCON |= {"mlp_multipliers": [0.7, 0.4], "ssm_multipliers": [0.5, 1.3, 0.6, 1.7, 0.8]}
FALCON |= {"ssm_in_multiplier": 1.4, "ssm_out_multiplier": 0.6, "key_multiplier": 0.5}
FALCON |= {"attention_in_multiplier": 1.2, "attention_out_multiplier": 0.7}
ROWS |= {
    "mamba2": ("Mamba2", {**MAMBA2, "n_groups": 2, "use_bias": True}),
    "mamba2 of one group": ("Mamba2", {**MAMBA2, "n_groups": 1, "use_conv_bias": False}),
    "bamba": ("Bamba", {**HYBRID, "attn_layer_indices": [1], "mlp_bias": True}),
    "falcon_h1": ("FalconH1", {**HYBRID, **FALCON}),
    "falcon_h1, normed": (
        "FalconH1",
        {**HYBRID, **FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
        | {"mamba_n_groups": 1},
    ),
    "falcon_h1, normed first": ("FalconH1", {**HYBRID, "mamba_d_ssm": 192, "mamba_rms_norm": True}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {**HYBRID, **GRANITE, "num_local_experts": 0, "shared_intermediate_size": 90}
        | {"position_embedding_type": "rope"},
    ),
    "granitemoehybrid with experts": (
        "GraniteMoeHybrid",
        {**HYBRID, **GRANITE, "num_local_experts": 5, "shared_intermediate_size": 90}
        | {"intermediate_size": 40},
    ),
    "nemotron_h": ("NemotronH", {**NEMOTRON, "use_bias": True}),
    "nemotron_h with experts": (
        "NemotronH",
        {**NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]}
        | {"moe_intermediate_size": 40, "n_group": 2, "n_routed_experts": 6}
        | {"routed_scaling_factor": 1.3},
    ),
}
TWO = {"num_hidden_layers": 2, "layer_types": MIXED[:2]}
DELTA = {**TWO, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "head_dim": 24}
DELTA |= {"linear_key_head_dim": 10, "linear_value_head_dim": 14, "intermediate_size": 77}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 30}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
PARTS = {**DEFAULT, "partial_rotary_factor": 0.5}
LATENT = {**TWO, "kv_lora_rank": 22, "qk_rope_head_dim": 10, "qk_nope_head_dim": 14}
LATENT |= {"v_head_dim": 18, "num_key_value_heads": 6, "n_shared_experts": 1}
LATENT |= {"moe_intermediate_size": 40, "num_experts_per_tok": 2, "num_local_experts": 6}
LATENT |= {"routed_scaling_factor": 1.7, "mlp_layer_types": ["dense", "sparse"]}
LATENT |= {"intermediate_size": 77}
ROWS |= {
    "qwen3_next with experts": (
        "Qwen3Next",
        {**DELTA, **SHARED, "mlp_only_layers": [1], "attention_bias": True},
    ),
    "qwen3_5": (
        "Qwen3_5",
        {**DELTA, "rope_parameters": {**PARTS, "mrope_section": [2, 2, 2]}},
    ),
    "qwen3_5_moe": ("Qwen3_5Moe", {**DELTA, **SHARED, "intermediate_size": OUT}),
    "kimi_linear with experts": (
        "KimiLinear",
        {**LATENT, "linear_head_dim": 13, "linear_num_heads": 5},
    ),
    "bailing_hybrid with experts": (
        "BailingHybrid",
        {**LATENT, "head_dim": 13, "n_group": 3, "topk_group": 2, "short_conv_kernel_size": 3},
    ),
    "bailing_hybrid, unbounded": (
        "BailingHybrid",
        {**LATENT, "head_dim": 13, "n_group": 1, "topk_group": 1, "kda_safe_gate": False},
    ),
    "olmo_hybrid": (
        "OlmoHybrid",
        {**DELTA, "head_dim": OUT, "rope_parameters": DEFAULT, "linear_key_head_dim": 42},
    ),
    "olmo_hybrid without turns": (
        "OlmoHybrid",
        {**TWO, "intermediate_size": 77, "linear_allow_neg_eigval": False}
        | {"linear_value_head_dim": 12},  # HF writes three kernels of one size
    ),
}
MAMBA = {**dict.fromkeys(_NO, OUT), "state_size": 5, "expand": 2, "time_step_rank": 7}
MAMBA["residual_in_fp32"] = False  # the stream is in the model's dtype here
JAMBA = {"attn_layer_period": 4, "attn_layer_offset": 2, "intermediate_size": 72}
JAMBA |= {"mamba_d_state": 6, "mamba_dt_rank": 9, "num_experts": 5, "num_experts_per_tok": 2}
ROWS |= {
    "mamba": ("Mamba", {**MAMBA, "use_bias": True, "conv_kernel": 3}),
    "falcon_mamba": ("FalconMamba", {**MAMBA, "use_conv_bias": False, "mixer_rms_eps": 0.01}),
    "jamba": ("Jamba", {**JAMBA, "mamba_proj_bias": True}),
    "jamba without experts": ("Jamba", {**JAMBA, "num_experts": 1, "num_experts_per_tok": 1}),
}
ROWS["nemotron_h with latent experts"] = (
    "NemotronH",
    {**ROWS["nemotron_h with experts"][1], "moe_latent_size": 24},
)
MINIMAX = {"layer_types": [*MIXED[:3], "full_attention"], "intermediate_size": 40}
MINIMAX |= {"linear_attn_alpha_factor": 1.3, "linear_attn_beta_factor": 0.6, "head_dim": 14}
MINIMAX |= {
    "block_size": 4,
    "full_attn_alpha_factor": 0.8,
    "mlp_beta_factor": 1.7,
    "num_local_experts": 5,
}
ROWS["minimax with experts"] = (
    "MiniMax",
    {**MINIMAX, "mlp_alpha_factor": 0.7, "num_experts_per_tok": 4},
)


def _draw(case, model):
    randomize(model)
    for name, tensor in model.named_parameters():  # decays and steps as those of real models
        if name.endswith(("A_log", "dt_bias", "dt_proj.bias")):
            tensor.data.uniform_(-1.5, 1.5)
    for name, tensor in model.named_buffers():
        if name.endswith(("expert_bias", "correction_bias")):
            tensor.uniform_(-0.3, 0.3)
    for mixer in model.modules():
        norm = getattr(mixer, "norm", None)
        old = type(norm).__name__ in ("MambaRMSNormGated", "BambaRMSNormGated")
        if old and not hasattr(norm, "group_size"):
            norm.groups, type(norm).forward = mixer.n_groups, grouped_norm


def grouped_norm(norm, x, gate):
    """The norm of each group by itself, as transformers 5.23 computes it.

    5.17 takes one sum over all groups, which is not what the checkpoints were trained with.
    """
    x = x.float() * torch.nn.functional.silu(gate.float())
    parts = x.unflatten(-1, (norm.groups, -1))
    parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * parts.flatten(-2)


TABLE = Table(SIZES, _draw)


def _case(name, kind, fields):
    text = f"{kind}TextConfig"
    config = text if hasattr(hf, text) else f"{kind}Config"
    return Case(name, f"{kind}ForCausalLM", fields, TABLE, config)


CASES = {name: _case(name, *row) for name, row in ROWS.items()}

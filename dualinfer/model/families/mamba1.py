"""Decoders of Mamba-1: Mamba, FalconMamba, and Jamba, some of whose layers attend.

HF sources: models/mamba, models/falcon_mamba and models/jamba.
"""

from collections.abc import Sequence

from ...blocks.selective_scan import SelectiveScan
from .. import rows as make
from ..spec import Attention, Experts, Head, Layer, Mlp, ModelSpec, Norm
from ..weights import Row, WeightTable
from . import mixtures
from .fields import ConfigFields

CLASSES = {
    "mamba": ("MambaForCausalLM", "MambaModel"),
    "falcon_mamba": ("FalconMambaForCausalLM", "FalconMambaModel"),
    "jamba": ("JambaForCausalLM", "JambaModel"),
}
_MOST = 1 << 20  # positions, of models whose layers know none
_NONE, _IDLE = Attention(1, 1, 1, 1.0), Mlp(1, "silu", gated=False)  # of layers without
_TRAINED = ("time_step_min", "time_step_max", "time_step_floor", "time_step_scale")
_TRAINED += ("time_step_init_scheme", "rescale_prenorm_residual", "residual_in_fp32")
_WAYS = ("use_mambapy", "use_falcon_mambapy", "use_associative_scan", "use_mamba_kernels")


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of one of them."""
    embed, is_hybrid = fields.size("hidden_size"), fields.family == "jamba"
    norm = Norm("rms", fields.number("rms_norm_eps" if is_hybrid else "layer_norm_epsilon"))
    layers, positions = (_jamba if is_hybrid else _mamba)(fields, embed, norm)
    spec = ModelSpec(
        family=fields.family,
        architecture=architecture,
        vocab=fields.size("vocab_size"),
        embed=embed,
        layers=tuple(layers),
        max_positions=positions,
        final_norm=norm,
        late_states=not is_hybrid,
        head=Head("causal") if architecture.endswith("ForCausalLM") else None,
    )
    fields.ignore(*_WAYS)
    return spec, _table(fields, spec, norm)


def _mamba(fields: ConfigFields, embed: int, norm: Norm) -> tuple[list[Layer], int]:
    count = fields.layers("num_hidden_layers")
    own = SelectiveScan(
        fields.size("intermediate_size"),  # whatever `expand` says, as HF's layers have it
        *(fields.size(name) for name in ("time_step_rank", "state_size", "conv_kernel")),
        activation=fields.activation("hidden_act"),
        eps=fields.number("mixer_rms_eps") if fields.family == "falcon_mamba" else None,
    )
    fields.ignore(*_TRAINED, "expand", "layer_types")
    # What the makers' own configs say again, or say of their code.
    for name, value in {"d_inner": own.width, "d_model": embed, "n_layer": count}.items():
        fields.require(name, value)
    fields.require("rms_norm", True)
    fields.ignore("fused_add_norm", "pad_vocab_size_multiple")
    layer = Layer(_NONE, _IDLE, norm, "pre", recurrence=own, attends=False, feeds=False)
    return [layer] * count, _MOST


def _jamba(fields: ConfigFields, embed: int, norm: Norm) -> tuple[list[Layer], int]:
    count = fields.layers("num_hidden_layers")
    own = SelectiveScan(
        embed * fields.size("mamba_expand"),
        *(fields.size(f"mamba_{name}") for name in ("dt_rank", "d_state", "d_conv")),
        activation=fields.activation("hidden_act"),
        eps=norm.eps,
        normed="weighted",
    )
    heads, kv_heads, head_dim = fields.grouped_heads(embed)
    attention = Attention(heads, kv_heads, head_dim, head_dim**-0.5)
    dense = Mlp(fields.size("intermediate_size"), fields.activation("hidden_act"), gated=True)
    mlps: Sequence[Mlp | Experts] = [dense] * count
    if fields.size("num_experts") > 1:
        mlps = mixtures.read_layers(fields, dense, count)
    period, offset = fields.size("attn_layer_period"), fields.take("attn_layer_offset", 0)
    fields.require("mamba_inner_layernorms", True)
    fields.ignore("layer_types", "layers_block_type", "layers_num_experts", "attention_dropout")
    fields.ignore("expert_layer_period", "expert_layer_offset", "num_experts_per_tok")
    fields.ignore("output_router_logits", "router_aux_loss_coef", "sliding_window", "n_ctx")
    fields.ignore("calc_logits_for_entire_prompt", "num_logits_to_keep")
    layers = [
        Layer(attention, mlp, norm, "pre")
        if i % period == offset
        else Layer(attention, mlp, norm, "pre", recurrence=own, attends=False)
        for i, mlp in enumerate(mlps)
    ]
    known = {layer: layer for layer in layers}
    return [known[layer] for layer in layers], fields.size("max_position_embeddings")


def _table(fields: ConfigFields, spec: ModelSpec, norm: Norm) -> WeightTable:
    is_hybrid = fields.family == "jamba"
    base = "model." if is_hybrid else "backbone."
    hf = base + "layers.{i}."
    names = ("mamba_proj_bias", "mamba_conv_bias") if is_hybrid else ("use_bias", "use_conv_bias")
    biased = fields.flag(names[0], False), fields.flag(names[1], True)
    first, part = ("input_layernorm", "mamba") if is_hybrid else ("norm", "mixer")

    def rows_of(layer: Layer) -> tuple[Row, ...]:
        rows = make.norm(norm, "attn_norm", f"{hf}{first}")
        if isinstance(layer.recurrence, SelectiveScan):
            rows += layer.recurrence.rows(f"{hf}{part}", *biased)
        if layer.attends:
            rows += make.joined("qkv", hf + "self_attn.{p}", make.QKV, bias=False)
            rows += make.linear("out", f"{hf}self_attn.o_proj", "embed q", bias=False)
        if not layer.feeds:
            return tuple(rows)
        rows += make.norm(norm, "mlp_norm", f"{hf}pre_ff_layernorm")
        names = mixtures.MIXTURES["jamba"]
        return (*rows, *mixtures.feed_rows(names, layer.mlp, hf, "feed_forward"))

    final = "final_layernorm" if is_hybrid else "norm_f"
    table = make.causal_table(
        spec,
        (),
        make.norm(norm, "final_norm", f"{base}{final}"),
        embedding=f"{base}embed_tokens" if is_hybrid else f"{base}embeddings",
        tied=fields.flag("tie_word_embeddings", not is_hybrid),
        base=base,
        renames=() if is_hybrid else (("backbone.embeddings.", "backbone.embedding."),),
    )
    return make.by_layer(table, rows_of)

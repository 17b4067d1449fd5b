"""Gemma 2: norms around each sub-layer, soft caps, windows in turns. HF source: models/gemma2."""

from ...errors import ModelError
from ..spec import Attention, Head, Layer, Mlp, ModelSpec, Norm
from ..weights import WeightTable, row
from . import rows as make
from .fields import ConfigFields
from .rope import make_rope, reach

_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def architectures(model_type: str) -> tuple[str, ...]:
    """HF class names served, the default first."""
    return "Gemma2ForCausalLM", "Gemma2Model"


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a Gemma 2 model."""
    embed, ffn = fields.size("hidden_size"), fields.size("intermediate_size")
    heads, kv_heads = fields.heads("num_attention_heads"), fields.heads("num_key_value_heads")
    head_dim = fields.head_dim(embed, heads)
    layers, vocab = fields.layers("num_hidden_layers"), fields.size("vocab_size")
    positions = fields.size("max_position_embeddings")
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads={heads} is no multiple of {kv_heads} KV heads.")
    norm = Norm("rms", fields.number("rms_norm_eps"), unit_offset=True)
    mlp = Mlp(ffn, fields.activation("hidden_activation"), gated=True)
    parameters = fields.take("rope_parameters")
    rope = make_rope(parameters, head_dim, positions)
    scale = fields.number("query_pre_attn_scalar") ** -0.5
    softcap = fields.optional_number("attn_logit_softcapping")
    bias = fields.flag("attention_bias", False)
    tied = fields.flag("tie_word_embeddings", True)
    has_head = architecture == "Gemma2ForCausalLM"
    logit_softcap = fields.optional_number("final_logit_softcapping")
    fields.require("use_bidirectional_attention", False)
    fields.ignore("attention_dropout", "sliding_window_size")  # HF reads sliding_window
    fields.ignore("hidden_act")  # HF reads hidden_activation only
    spec = ModelSpec(
        family="gemma2",
        architecture=architecture,
        vocab=vocab,
        embed=embed,
        layers=tuple(
            Layer(
                Attention(
                    heads, kv_heads, head_dim, scale, window=window, rope=rope, softcap=softcap
                ),
                mlp,
                norm,
                "around",
            )
            for window in _windows(fields, layers)
        ),
        max_positions=reach(parameters, positions),
        embed_scale=embed**0.5,
        final_norm=norm,
        head=Head("causal", softcap=logit_softcap) if has_head else None,
    )
    head = make.HeadRows.of(has_head, tied, "model.embed_tokens.weight")
    rows = [
        row("embed.weight", "vocab embed", ("model.embed_tokens.weight", "vocab embed")),
        row("final_norm.weight", "embed", ("model.norm.weight", "embed")),
    ]
    for i in range(layers):
        ours, hf = f"layers.{i}.", f"model.layers.{i}."
        rows += [
            row(f"{ours}{name}.weight", "embed", (f"{hf}{theirs}.weight", "embed"))
            for name, theirs in _NORMS.items()
        ]
        rows += make.split_qkv(f"{ours}qkv", f"{hf}self_attn.", bias)
        rows += make.linear(f"{ours}out", f"{hf}self_attn.o_proj", "embed q", bias)
        parts = ((f"{hf}mlp.{part}_proj.weight", f"{part} embed") for part in ("gate", "up"))
        rows.append(row(f"{ours}up.weight", "gate+up embed", *parts))
        rows += make.linear(f"{ours}down", f"{hf}mlp.down_proj", "embed up", bias=False)
    table = WeightTable(
        rows=(*rows, *head.rows),
        sizes={
            "vocab": vocab,
            "embed": embed,
            "q": heads * head_dim,
            "k": kv_heads * head_dim,
            "v": kv_heads * head_dim,
            "gate": ffn,
            "up": ffn,
        },
        base="model.",
        unused=(r"rotary_emb\.inv_freq$", *head.unused),
        tied=head.tied,
    )
    return spec, table


def _windows(fields: ConfigFields, layers: int) -> list[int | None]:
    """The sliding window of each layer, None where it sees all of the past."""
    kinds = fields.layer_types(layers)
    if "sliding_attention" not in kinds:
        fields.ignore("sliding_window")
        return [None] * layers
    window = fields.size("sliding_window")
    return [window if kind == "sliding_attention" else None for kind in kinds]

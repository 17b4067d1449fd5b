"""LFM2: short gated convolutions, and attention in some of the layers; with mixtures of experts.

HF sources: models/lfm2 and models/lfm2_moe.
"""

from collections.abc import Mapping
from dataclasses import replace

from ...blocks.short_convolution import ShortConvolution
from .. import rows as make
from ..spec import Attention, Experts, Head, Layer, Mlp, ModelSpec, Norm
from ..weights import Row, WeightTable
from . import mixtures
from .fields import ConfigFields
from .rope import make_rope, reach

CLASSES = {
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Model"),
    "lfm2_moe": ("Lfm2MoeForCausalLM", "Lfm2MoeModel"),
}
_GATE_UP = {"gate": "w1", "up": "w3"}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a LFM2."""
    embed, count = fields.size("hidden_size"), fields.layers("num_hidden_layers")
    heads, kv_heads, head_dim = fields.grouped_heads(embed)
    positions, parameters = fields.size("max_position_embeddings"), fields.take("rope_parameters")
    norm = Norm("rms", fields.number("norm_eps"))
    kinds = fields.kinds("layer_types", count, ("conv", "full_attention"))
    rope = make_rope(parameters, head_dim, positions)
    attention = Attention(heads, kv_heads, head_dim, head_dim**-0.5, rope=rope, qk_norm=norm)
    convolution = ShortConvolution(embed, fields.size("conv_L_cache"))
    mlps: list[Mlp | Experts] = [Mlp(_ffn(fields), "silu", gated=True)] * count
    if fields.family == "lfm2_moe":
        mlps = mixtures.read_layers(fields, Mlp(_ffn(fields), "silu", gated=True), count)
    own = list(zip(kinds, mlps, strict=True))
    layers = {
        key: Layer(
            *(attention, key[1], norm, "pre"),
            recurrence=convolution if key[0] == "conv" else None,
            attends=key[0] != "conv",
        )
        for key in dict.fromkeys(own)
    }
    spec = ModelSpec(
        family=fields.family,
        architecture=architecture,
        vocab=fields.size("vocab_size"),
        embed=embed,
        layers=tuple(layers[key] for key in own),
        max_positions=reach(parameters, positions),
        final_norm=norm,
        head=Head("causal") if architecture.endswith("ForCausalLM") else None,
    )
    fields.ignore("full_attn_idxs")  # which HF folds into layer_types
    # Of the makers' own code: what says again what other fields do, or how training began.
    theta = parameters.get("rope_theta") if isinstance(parameters, Mapping) else None
    for name, value in {
        **dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), embed),
        **{"block_norm_eps": norm.eps, "num_heads": heads, "theta": theta, "rope_theta": theta},
        **dict.fromkeys(("block_use_swiglu", "use_pos_enc"), True),
    }.items():
        fields.require(name, value)
    fields.ignore("block_mlp_init_scale", "block_out_init_scale")
    fields.ignore("block_use_xavier_init", "conv_use_xavier_init")
    return spec, _table(fields, spec)


def _ffn(fields: ConfigFields) -> int:
    """The MLP's width as HF rounds it."""
    ffn = fields.size("intermediate_size")
    grain = fields.size("block_multiple_of", 256)
    factor = fields.optional_number("block_ffn_dim_multiplier")
    if fields.family == "lfm2_moe" or not fields.flag("block_auto_adjust_ff_dim", True):
        return ffn
    ffn = int((factor or 1.0) * int(2 * ffn / 3))
    return grain * -(-ffn // grain)


def _table(fields: ConfigFields, spec: ModelSpec) -> WeightTable:
    norm, hf, bias = spec.layers[0].norm, "model.layers.{i}.", fields.flag("conv_bias", False)
    names = mixtures.MIXTURES["lfm2_moe"]
    if fields.family == "lfm2_moe" and not fields.flag("use_expert_bias", True):
        names = replace(names, choice_bias=None)

    def rows_of(layer: Layer) -> tuple[Row, ...]:
        rows = make.norm(norm, "attn_norm", f"{hf}operator_norm")
        rows += make.norm(norm, "mlp_norm", f"{hf}ffn_norm")
        if layer.attends:
            rows += make.joined("qkv", hf + "self_attn.{p}", make.QKV, bias=False)
            own = "q_layernorm", "k_layernorm"
            rows += make.head_norms(layer.attention, f"{hf}self_attn", own)
            rows += make.linear("out", f"{hf}self_attn.out_proj", "embed q", bias=False)
        if isinstance(layer.recurrence, ShortConvolution):
            rows += layer.recurrence.rows(f"{hf}conv", bias)
        if isinstance(layer.mlp, Experts):
            return (*rows, *mixtures.make_rows(names, layer.mlp, hf))
        rows += make.joined("up", hf + "feed_forward.{p}", _GATE_UP, bias=False)
        return (*rows, *make.linear("down", f"{hf}feed_forward.w2", "embed up", bias=False))

    table = make.causal_table(
        spec,
        (),
        make.norm(norm, "final_norm", "model.embedding_norm"),
        embedding="model.embed_tokens",
        tied=fields.flag("tie_word_embeddings", True),
        base="model.",
        unused=[r"rotary_emb\."],
    )
    return make.by_layer(table, rows_of)

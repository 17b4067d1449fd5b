"""Llama 4's text: attention in chunks, layers without rotary embedding, mixtures in turns.

HF source: models/llama4/modeling_llama4.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...errors import ModelError, shown
from .. import rows as make
from ..spec import Attention, Experts, Head, Layer, Mlp, ModelSpec, Norm, Rope
from ..weights import Row, WeightTable
from . import mixtures
from .fields import ConfigFields
from .rope import make_rope, reach

CLASSES = {
    "llama4": ("Llama4ForConditionalGeneration",),
    "llama4_text": ("Llama4ForCausalLM", "Llama4TextModel"),
}
_IMAGE_TOKENS = tuple(
    f"{name}_{kind}"
    for name in ("boi_token", "eoi_token", "image_token")
    for kind in ("index", "id")
)


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a Llama 4; of one that sees images the part for text alone."""
    if fields.family == "llama4_text":
        return _describe(fields, architecture)
    text = fields.take("text_config")
    if not isinstance(text, Mapping):
        raise ModelError(f"config.json has text_config={shown(text)}; expected an object.")
    inner = ConfigFields("llama4_text", text, "text_config")
    spec, table = _describe(inner, architecture)
    inner.finish()
    fields.ignore("vision_config", "tie_word_embeddings", *_IMAGE_TOKENS)
    renames = ("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")
    unused = *table.unused, r"^vision_model\.", r"^multi_modal_projector\."
    return replace(spec, family=fields.family), replace(table, renames=renames, unused=unused)


def _describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    embed, count = fields.size("hidden_size"), fields.layers("num_hidden_layers")
    positions, parameters = fields.size("max_position_embeddings"), fields.take("rope_parameters")
    if isinstance(parameters, Mapping):
        fields.require("rope_theta", parameters.get("rope_theta"))  # transformers 4 wrote it twice
    norm = Norm("rms", fields.number("rms_norm_eps"))
    activation = fields.activation("hidden_act")
    mlp = Mlp(fields.size("intermediate_size_mlp"), activation, gated=True)
    mlps = mixtures.read_layers(fields, mlp, count)
    attentions = _attentions(fields, embed, count, norm)
    layers = {
        own: Layer(*own, norm, "pre") for own in dict.fromkeys(zip(attentions, mlps, strict=True))
    }
    spec = ModelSpec(
        family=fields.family,
        architecture=architecture,
        vocab=fields.size("vocab_size"),
        embed=embed,
        layers=tuple(layers[own] for own in zip(attentions, mlps, strict=True)),
        max_positions=reach(parameters, positions),
        final_norm=norm,
        head=Head("causal") if "For" in architecture else None,
    )
    fields.ignore("attention_dropout", "for_llm_compressor")
    return spec, _table(fields, spec)


def _attentions(fields: ConfigFields, embed: int, count: int, norm: Norm) -> list[Attention]:
    """The attention of each layer."""
    heads, kv_heads, head_dim = fields.grouped_heads(embed)
    positions, parameters = fields.size("max_position_embeddings"), fields.take("rope_parameters")
    rope = make_rope(parameters, head_dim, positions, interleaved=True)
    kinds = fields.kinds("layer_types", count, ("full_attention", "chunked_attention"))
    chunk = fields.size("attention_chunk_size") if "chunked_attention" in kinds else None
    fields.ignore("attention_chunk_size")  # of a model without such layers
    fields.ignore("no_rope_layer_interval")  # HF folds it into no_rope_layers
    qk_norm = norm if fields.flag("use_qk_norm", True) else None
    growth = None
    if fields.flag("attn_temperature_tuning", True):
        growth = fields.number("attn_scale"), float(fields.size("floor_scale")), 1
    fields.ignore("attn_scale", "floor_scale")

    def attention(kind: str, rope: Rope | None) -> Attention:
        return Attention(
            heads,
            kv_heads,
            head_dim,
            head_dim**-0.5,
            chunk=chunk if kind == "chunked_attention" else None,
            rope=rope,
            qk_norm=qk_norm if rope else None,
            norm_turned=bool(qk_norm and rope),
            growth=None if rope else growth,
        )

    turns = _turns(fields, count)
    return [attention(kind, rope if t else None) for kind, t in zip(kinds, turns, strict=True)]


def _turns(fields: ConfigFields, count: int) -> Sequence[int]:
    """Of each layer whether it has the rotary embedding, by HF's no_rope_layers."""
    turns = fields.take("no_rope_layers")
    if (
        not isinstance(turns, list | tuple)
        or len(turns) < count
        or {*map(repr, turns)} - {"0", "1"}
    ):
        raise ModelError(
            f"config.json has no_rope_layers={shown(turns)}; expected a 0 or 1 for each of {count} "
            "layers."
        )
    return turns[:count]


def _table(fields: ConfigFields, spec: ModelSpec) -> WeightTable:
    norm, hf = spec.layers[0].norm, "model.layers.{i}."
    bias = fields.flag("attention_bias", False)
    shared = [
        *make.norm(norm, "attn_norm", f"{hf}input_layernorm"),
        *make.norm(norm, "mlp_norm", f"{hf}post_attention_layernorm"),
        *make.joined("qkv", hf + "self_attn.{p}", make.QKV, bias),
        *make.linear("out", f"{hf}self_attn.o_proj", "embed q", bias),
    ]
    dense = [
        *make.joined("up", hf + "feed_forward.{p}", make.GATE_UP, False),
        *make.linear("down", f"{hf}feed_forward.down_proj", "embed up", False),
    ]

    def rows_of(layer: Layer) -> tuple[Row, ...]:
        rows = list(shared)
        if layer.attention.qk_norm is not None:
            own = layer.attention.qk_norm
            rows += [r for x in "qk" for r in make.plain_norm(own, f"{x}_norm", "head_dim")]
        if not isinstance(layer.mlp, Experts):
            return (*rows, *dense)
        return (*rows, *mixtures.make_rows(mixtures.MIXTURES["llama4_text"], layer.mlp, hf))

    table = make.causal_table(
        spec,
        shared,
        make.norm(norm, "final_norm", "model.norm"),
        embedding="model.embed_tokens",
        tied=fields.flag("tie_word_embeddings", False),
        base="model.",
        unused=[r"rotary_emb\.inv_freq$"],
    )
    rows = {layer: rows_of(layer) for layer in dict.fromkeys(spec.layers)}
    return replace(table, layers=tuple(rows[layer] for layer in spec.layers))

"""T5 and its relatives: relative position buckets, RMSNorm, no scale.

HF sources: models/t5, mt5, umt5, longt5, switch_transformers.
"""

from dataclasses import replace
from typing import Any

from ...blocks.capacity import Capacity
from ...errors import ModelError, shown
from .. import rows as make
from ..spec import Attention, Experts, Head, Layer, Mlp, ModelSpec, Norm, RelativeBias, Router
from ..weights import Row, WeightTable, row
from .fields import ConfigFields
from .heads import Classifier, kind_of_head, make_head, pair_head, under

_SUFFIXES = (
    *("ForConditionalGeneration", "Model", "EncoderModel", "ForSequenceClassification"),
    *("ForTokenClassification", "ForQuestionAnswering"),
)
CLASSES = {
    family: tuple(family.upper() + suffix for suffix in _SUFFIXES)
    for family in ("t5", "mt5", "umt5")
}
CLASSES["longt5"] = tuple(f"LongT5{suffix}" for suffix in _SUFFIXES[:3])
CLASSES["switch_transformers"] = tuple(f"SwitchTransformers{s}" for s in _SUFFIXES[:3])
_MOST = 1 << 20  # tokens: its positions have no end
_QKV = {"q": "q", "k": "k", "v": "v"}
_EMBEDDING = "vocab embed"


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a T5 model, or of its encoder alone, with a head for labels."""
    kind = kind_of_head(architecture)
    spec, table = _describe(fields, architecture)
    if kind is None:
        return spec, table
    end = None
    if kind == "token":
        head, rows = make_head(fields, kind, Classifier("classifier"), None)
    else:
        head, rows, end = pair_head(fields, kind)
    spec = replace(spec, head=head, end_id=end)
    if spec.encoder is not None:
        spec = replace(spec, shifted=("labels", "source"))
    table = table if kind == "span" else under(table, "transformer.")
    return spec, replace(table, spec=spec, outer=(*table.outer, *rows))


def _describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Of the model without a head for labels."""
    embed, heads = fields.size("d_model"), fields.heads("num_heads")
    head_dim, ffn = fields.size("d_kv"), fields.size("d_ff")
    norm = Norm("rms", fields.number("layer_norm_epsilon"))
    mlp = Mlp(ffn, fields.activation("dense_act_fn"), fields.flag("is_gated_act", False))
    buckets = fields.size("relative_attention_num_buckets")
    farthest = fields.size("relative_attention_max_distance", most=1 << 16)
    layers, decoder_layers = fields.layers("num_layers"), fields.layers("num_decoder_layers")
    switches = fields.family == "switch_transformers"
    name = "tie_word_embeddings" if switches else "scale_decoder_outputs"
    scales = fields.family != "mt5" and fields.flag(name, True)
    fields.ignore("feed_forward_proj", "dropout_rate", "classifier_dropout", "initializer_factor")
    fields.ignore("n_positions")  # of the first files; its positions have no end
    fields.ignore("tie_word_embeddings", "is_decoder", "is_encoder_decoder", "tokenizer_class")
    window, local = None, "SelfAttention"
    if fields.family == "longt5":  # whose encoder sees so many tokens on either side
        fields.require("encoder_attention_type", "local")
        window, local = fields.size("local_radius") + 1, "LocalSelfAttention"
        fields.ignore("global_block_size")
    start = fields.take("decoder_start_token_id")
    start = fields.take("pad_token_id", 0) if start is None else start

    def block(causal: bool, cross: Attention | None = None) -> Layer:
        bias = RelativeBias(buckets, farthest, both_ways=not causal)
        attention = Attention(heads, heads, head_dim, 1.0, causal=causal, distances=bias)
        attention = attention if causal else replace(attention, near=window)
        return Layer(attention, mlp, norm, "pre", cross=cross)

    def stack(layer: Layer, count: int, side: str) -> ModelSpec:
        own = [layer] * count
        if switches:
            sparse = replace(layer, mlp=_switch(fields, mlp))
            own = [sparse if x else layer for x in _sparse(fields, side, count)]
        return ModelSpec(
            family=fields.family,
            architecture=architecture,
            vocab=fields.size("vocab_size"),
            embed=embed,
            layers=tuple(own),
            max_positions=_MOST,
            packs=False,
            final_norm=norm,
        )

    if switches:
        _sparse(fields, "decoder", decoder_layers)  # which a model of the encoder alone has as well
        fields.ignore("add_cross_attention")
    encoder = stack(block(causal=False), layers, "encoder")
    everywhere = fields.family == "umt5"  # else the first layer's bias is that of all
    how: dict[str, Any] = {"everywhere": everywhere, "mlp": "mlp" if switches else "DenseReluDense"}
    how["router_bias"] = switches and fields.flag("router_bias", False)
    encoder_rows = _layers(encoder, norm, "encoder", **how, own=local)
    embedding = row("embed.weight", _EMBEDDING, ("shared.weight", _EMBEDDING))
    twin = "encoder.embed_tokens.weight"
    if architecture.endswith(("EncoderModel", "ForTokenClassification")):
        return encoder, WeightTable(
            encoder,
            (embedding, *make.norm(norm, "final_norm", "encoder.final_layer_norm")),
            encoder_rows,
            unused=(r"^decoder\.", r"^lm_head\."),
            tied=((row("embed.weight", _EMBEDDING, (twin, _EMBEDDING)), "shared.weight"),),
        )
    across = Attention(heads, heads, head_dim, 1.0, causal=False)
    spec = stack(block(causal=True, cross=across), decoder_layers, "decoder")
    has_head = architecture.endswith("ForConditionalGeneration")
    head = Head("causal", scale=embed**-0.5 if scales else 1.0) if has_head else None
    spec = replace(spec, head=head, encoder=encoder, start=start)
    tied = [
        row("encoder.embed.weight", _EMBEDDING, (twin, _EMBEDDING)),
        row("embed.weight", _EMBEDDING, ("decoder.embed_tokens.weight", _EMBEDDING)),
    ]
    if has_head:
        tied.append(row("head.weight", _EMBEDDING, ("lm_head.weight", _EMBEDDING)))
    outer = (
        embedding,
        *make.norm(norm, "final_norm", "decoder.final_layer_norm"),
        *make.norm(norm, "encoder.final_norm", "encoder.final_layer_norm"),
    )
    decoder_rows = _layers(spec, norm, "decoder", **how)
    return spec, WeightTable(
        spec,
        outer,
        decoder_rows + encoder_rows,
        # The first release stored one that no implementation reads.
        unused=(r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",)
        + (() if has_head else (r"^lm_head\.",)),
        tied=tuple((own, "shared.weight") for own in tied),
    )


def _switch(fields: ConfigFields, mlp: Mlp) -> Experts:
    """The mixture of a layer of Switch Transformers."""
    fields.require("router_dtype", "float32")
    fields.require("is_gated_act", False)
    # Of training; and the padding, of which HF's code reads the field and does nothing by it.
    fields.ignore("router_jitter_noise", "router_z_loss_coef", "router_aux_loss_coef")
    fields.ignore("add_router_probs", "router_ignore_padding_tokens")
    capacity = fields.size("expert_capacity")
    each = replace(mlp, gated=False)
    return Experts(fields.size("num_experts"), each, Router(1), mixing=Capacity(capacity))


def _sparse(fields: ConfigFields, side: str, count: int) -> list[bool]:
    """Tell which layers of a stack have a mixture, by the step between them."""
    given, step = fields.take(f"num_sparse_{side}_layers", 0), fields.take(f"{side}_sparse_step")
    if not all(type(n) is int and n >= 0 for n in (given, step)):
        raise ModelError(
            f"config.json has num_sparse_{side}_layers={shown(given)} and {side}_sparse_step="
            f"{shown(step)}; expected ints of 0 and more."
        )
    return [step > 0 and (step == 1 or i % step == 1) for i in range(count)]


def _layers(spec: ModelSpec, norm: Norm, stack: str, **how: Any) -> tuple[tuple[Row, ...], ...]:
    """The rows of each layer; alike layers have the same."""
    rows = {layer: tuple(_layer(layer, norm, stack, **how)) for layer in set(spec.layers)}
    return tuple(rows[layer] for layer in spec.layers)


def _layer(
    layer: Layer,
    norm: Norm,
    stack: str,
    everywhere: bool,
    mlp: str,
    router_bias: bool,
    own: str = "SelfAttention",
) -> list[Row]:
    """The rows of a layer of the encoder or the decoder.

    `own` is HF's name of its attention, `mlp` that of its feed-forward.
    """
    hf = f"{stack}.block.{{i}}.layer."
    bias = layer.attending.bias
    assert bias is not None
    first = hf if everywhere else f"{stack}.block.0.layer."
    stored = f"{first}0.{own}.relative_attention_bias.weight"
    rows = [
        *make.joined("qkv", f"{hf}0.{own}.{{p}}", _QKV, bias=False),
        *make.linear("out", f"{hf}0.{own}.o", "embed q", bias=False),
        *make.norm(norm, "attn_norm", f"{hf}0.layer_norm"),
        make.relative_bias(bias, stored),
    ]
    last = 1
    if layer.cross:
        rows += make.cross(hf + "1.EncDecAttention.{p}", _QKV, "o", bias=False)
        rows += make.norm(norm, "cross_norm", f"{hf}1.layer_norm")
        last = 2
    mlp = f"{hf}{last}.{mlp}."
    if isinstance(layer.mlp, Experts):
        one = f"{mlp}experts.expert_{{x}}."
        rows += make.linear("router", f"{mlp}router.classifier", "choices embed", router_bias)
        up, down = (f"{one}wi.weight", "ffn embed"), (f"{one}wo.weight", "embed ffn")
        rows.append(row("experts.up.weight", "experts ffn embed", up))
        rows.append(row("experts.down.weight", "experts embed ffn", down))
        return rows + make.norm(norm, "mlp_norm", f"{hf}{last}.layer_norm")
    if layer.feeding.gated:
        rows += make.joined("up", mlp + "{p}", {"gate": "wi_0", "up": "wi_1"}, bias=False)
    else:
        rows += make.linear("up", f"{mlp}wi", "ffn embed", bias=False)
    rows += make.linear("down", f"{mlp}wo", "embed ffn", bias=False)
    return rows + make.norm(norm, "mlp_norm", f"{hf}{last}.layer_norm")

"""TrOCR's decoder, a part of `encoder_decoder`. HF source: models/trocr.

Alone it is no family: HF's text of a batch padded on the left is not that of its rows.
"""

from collections.abc import Iterable

from .. import rows as make
from ..spec import Attention, Embedding, Head, Layer, Mlp, ModelSpec, Norm, Positions
from ..weights import Row, WeightTable, row
from .bart import layer_rows
from .fairseq import Sinusoids
from .fields import ConfigFields

_OFFSET = 2  # rows of a learned table before position 0
_LAYER = "model.decoder.layers.{i}."


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of the decoder, without what attends to an image."""
    embed, heads, head_dim = fields.split("d_model", "decoder_attention_heads")
    positions = fields.size("max_position_embeddings")
    learned = fields.flag("use_learned_position_embeddings", True)
    pad = fields.take("pad_token_id")
    if not learned:  # the row before position 0
        pad = fields.size("pad_token_id") if pad else 0
    norm, normed = Norm("layer", 1e-5), fields.flag("layernorm_embedding", True)
    fields.ignore("dropout", "attention_dropout", "activation_dropout", "init_std", "is_decoder")
    fields.ignore("decoder_layerdrop", "num_hidden_layers", "cross_attention_hidden_size")
    fields.ignore("add_cross_attention", "classifier_dropout", "max_target_positions")
    activation = fields.activation("activation_function")
    layer = Layer(
        Attention(heads, heads, head_dim, head_dim**-0.5),
        Mlp(fields.size("decoder_ffn_dim"), activation, gated=False),
        norm,
        "post",
    )
    scale = embed**0.5 if fields.flag("scale_embedding", False) else 1.0
    places = Positions(positions, _OFFSET) if learned else Positions(positions, pad + 1, "rows")
    spec = ModelSpec(
        family=fields.family,
        architecture=architecture,
        vocab=fields.size("vocab_size"),
        embed=embed,
        layers=(layer,) * fields.layers("decoder_layers"),
        max_positions=positions,
        positions=places,
        pad_id=None if learned else pad,
        packs=False,
        embedding=Embedding(scale, norm=norm if normed else None),
        head=Head("causal"),
    )
    axes, at, hf = "vocab embed", "positions embed", "model.decoder."
    table = row("positions.weight", at, (f"{hf}embed_positions.weight", at))
    if not learned:
        table = Row(table.name, table.axes, (), constant=Sinusoids(pad))
    embedding = f"{hf}embed_tokens.weight"
    head = row("head.weight", axes, ("output_projection.weight", axes))
    tied = fields.flag("tie_word_embeddings", True)
    return spec, WeightTable(
        spec,
        (
            row("embed.weight", axes, (embedding, axes)),
            table,
            *(make.norm(norm, "embed_norm", f"{hf}layernorm_embedding") if normed else ()),
            *(() if tied else (head,)),
        ),
        (tuple(layer_rows(norm, _LAYER, crosses=False)),) * len(spec.layers),
        tied=((head, embedding),) if tied else (),
    )


def cross_rows(spec: ModelSpec) -> Iterable[Row]:
    """The rows of a layer for attention to an image, beside its others."""
    names = _LAYER + "encoder_attn.{p}", make.QKV, "out_proj", True
    yield from make.cross(*names, width="source_embed")
    yield from make.norm(spec.layers[0].norm, "cross_norm", f"{_LAYER}encoder_attn_layer_norm")

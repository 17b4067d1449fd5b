"""Llama 4's text: attention in chunks, layers without rotary embedding, mixtures in turns.

HF source: models/llama4/modeling_llama4.py.
"""

from dataclasses import replace

from ...errors import ModelError, shown
from .. import rows as make
from ..spec import Attention, Chunk, ModelSpec
from ..weights import Row, WeightTable
from .decoders import Decoder, Kind, Sight, alike, serve
from .fields import ConfigFields
from .gemma import IMAGE_TOKENS


def _sees(own: Decoder) -> Sight:
    """All layers see all of the past, or of a chunk, and turn by HF's no_rope_layers."""
    turns = own.fields.take("no_rope_layers")
    if (
        not isinstance(turns, list | tuple)
        or len(turns) < own.count
        or {*map(repr, turns)} - {"0", "1"}
    ):
        raise ModelError(
            f"config.json has no_rope_layers={shown(turns)}; expected a 0 or 1 for each of "
            f"{own.count} layers."
        )
    keys = ["" if turn else None for turn in turns[: own.count]]
    return alike(own)._replace(turns=keys)


class Llama4(Decoder):
    """Chunks by kind of layer; those that turn norm queries and keys, others scale queries."""

    def attentions(self) -> list[Attention]:
        fields = self.fields
        kinds = fields.kinds("layer_types", self.count, ("full_attention", "chunked_attention"))
        is_cut = "chunked_attention" in kinds
        chunk = Chunk(fields.size("attention_chunk_size")) if is_cut else None
        norm, growth = self.norm if fields.flag("use_qk_norm", True) else None, None
        if fields.flag("attn_temperature_tuning", True):
            growth = fields.number("attn_scale"), float(fields.size("floor_scale")), 1
        return [
            replace(
                a,
                near=chunk if kind == "chunked_attention" else None,
                qk_norm=norm if a.rope else None,
                qk_norm_over="turned" if norm and a.rope else "head",
                growth=None if a.rope else growth,
            )
            for a, kind in zip(super().attentions(), kinds, strict=True)
        ]

    def qkv_rows(self, a: Attention, hf: str, bias: bool) -> list[Row]:
        rows = super().qkv_rows(replace(a, qk_norm=None), hf, bias)
        if a.qk_norm is None:
            return rows
        return rows + [r for x in "qk" for r in make.plain_norm(a.qk_norm, f"{x}_norm", "head_dim")]


KINDS = {
    "llama4_text": Kind(
        *("Llama4",),
        build=Llama4,
        sees=_sees,
        base="Llama4TextModel",
        interleaved=True,
        ffn="intermediate_size_mlp",
        mlp_module="feed_forward",
        # The first is of a model without such layers; HF folds the second into no_rope_layers.
        ignored=(
            *("attention_chunk_size", "no_rope_layer_interval", "attn_scale", "floor_scale"),
            "for_llm_compressor",
        ),
        predicts=False,
    )
}
_OWN, describe_text = serve(KINDS)
CLASSES = {"llama4": ("Llama4ForConditionalGeneration",), **_OWN}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a Llama 4; of one that sees images the part for text alone."""
    if fields.family in KINDS:
        return describe_text(fields, architecture)
    inner = fields.part("text_config", "llama4_text")
    spec, table = describe_text(inner, architecture)
    inner.finish()
    fields.ignore("vision_config", "tie_word_embeddings", *IMAGE_TOKENS)
    renames = ("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")
    unused = *table.unused, r"^vision_model\.", r"^multi_modal_projector\."
    return replace(spec, family=fields.family), replace(table, renames=renames, unused=unused)

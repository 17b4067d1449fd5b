"""Gemma 2 and 3 (text): norms around each sub-layer, windows in turns.

HF sources: models/gemma2 and models/gemma3. Gemma 2 caps scores; Gemma 3 norms queries and keys,
and turns them by other angles where it looks through a window; it may look both ways, and then
embeds texts (EmbeddingGemma). VaultGemma is Gemma 2 without the
norms behind sub-layers.
"""

from dataclasses import replace
from typing import Any

from ..spec import Activation, Attention, ModelSpec
from ..weights import WeightTable
from . import sights
from .decoders import Decoder, Kind, rms, serve
from .fields import ConfigFields


class Gemma2(Decoder):
    """Scores are capped, and scaled by a field."""

    def activation(self) -> Activation:
        return self.fields.activation("hidden_activation")

    def scale(self, head_dim: int) -> float:
        return self.fields.number("query_pre_attn_scalar") ** -0.5

    def attention_facts(self) -> dict[str, Any]:
        softcap = self.fields.optional_number("attn_logit_softcapping")
        return super().attention_facts() | {"softcap": softcap}


class Gemma3(Gemma2):
    """No cap of scores, whatever the config says; all tokens may see one another."""

    def attention_facts(self) -> dict[str, Any]:
        return super().attention_facts() | {"softcap": None}

    def attentions(self) -> list[Attention]:
        found = super().attentions()
        if not self.both_ways:
            return found
        halves = (None if a.window is None else a.window // 2 + 1 for a in found)
        # So many in all, as HF's config counts them.
        return [replace(a, causal=False, near=w) for a, w in zip(found, halves, strict=True)]

    @property
    def both_ways(self) -> bool:
        """True if a token sees those behind it."""
        return self.kind.both_ways and self.fields.flag("use_bidirectional_attention", False)


_GEMMA: dict[str, Any] = {
    "norm": rms(unit_offset=True),
    "factors": sights.root,
    "scaled": "rounded",
    "softcap": "final_logit_softcapping",
    "tied": True,
    "ignored": (
        *("sliding_window_size", "hidden_act"),  # HF reads sliding_window and hidden_activation
        *("sliding_window_pattern", "_sliding_window_pattern"),  # folded into layer_types
    ),
}
_POSTS: dict[str, Any] = {
    "placement": "around",
    "norms": {
        "attn_norm": "input_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "attn_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
}
KINDS = {
    "gemma2": Kind("Gemma2", build=Gemma2, sees=sights.windows_by_kind, **_GEMMA, **_POSTS),
    "gemma3_text": Kind(
        *("Gemma3",),
        build=Gemma3,
        sees=sights.by_kind,
        qk_norm=True,
        both_ways=True,
        base="Gemma3TextModel",
        **_GEMMA,
        **_POSTS,
    ),
    "vaultgemma": Kind(
        *("VaultGemma",),
        build=Gemma2,
        sees=sights.windows_by_kind,
        norms={"attn_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"},
        **_GEMMA,
    ),
}
# Beside images: HF reads whether a head is tied of the outer config, and its masks are others.
_BESIDE_IMAGES = replace(KINDS["gemma3_text"], both_ways=False, under="language_model.")
IMAGE_TOKENS = tuple(
    f"{name}_{kind}"
    for name in ("boi_token", "eoi_token", "image_token")
    for kind in ("index", "id")
)
_OWN, describe_text = serve(KINDS)
CLASSES = {**_OWN, "gemma3": ("Gemma3ForConditionalGeneration", "Gemma3Model")}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a Gemma model; of one that sees images the part for text alone."""
    if fields.family in KINDS:
        return describe_text(fields, architecture)
    tied = fields.flag("tie_word_embeddings", True)
    inner = fields.part("text_config", "gemma3_text", tie_word_embeddings=tied)
    spec, table = Gemma3(_BESIDE_IMAGES, inner).describe(architecture)
    inner.finish()
    if spec.head is not None:  # HF's wrapper caps no logits
        spec = replace(spec, head=replace(spec.head, softcap=None))
    fields.ignore("vision_config", "mm_tokens_per_image", *IMAGE_TOKENS)
    renames = (
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
    )
    unused = *table.unused, r"^(model\.)?vision_tower\.", r"^(model\.)?multi_modal_projector\."
    return spec, replace(table, renames=renames, unused=unused)

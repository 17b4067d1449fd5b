"""Gemma 2 and 3 (text): norms around each sub-layer, windows in turns.

HF sources: models/gemma2 and models/gemma3. Gemma 2 caps scores; Gemma 3 norms queries and keys,
and turns them by other angles where it looks through a window; it may look both ways, and then
embeds texts (EmbeddingGemma). VaultGemma is Gemma 2 without the
norms behind sub-layers.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import ModelError, shown
from .. import rows as make
from ..spec import Attention, Head, Layer, Mlp, ModelSpec, Norm
from ..weights import WeightTable
from .fields import ConfigFields
from .rope import make_rope, reach, ropes_by_kind

CLASSES = {
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Model"),
    "gemma3": ("Gemma3ForConditionalGeneration", "Gemma3Model"),
    "gemma3_text": ("Gemma3ForCausalLM", "Gemma3TextModel"),
    "vaultgemma": ("VaultGemmaForCausalLM", "VaultGemmaModel"),
}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a Gemma model; of one that sees images the part for text alone."""
    tied = fields.flag("tie_word_embeddings", True)
    if fields.family != "gemma3":
        return describe_text(fields, architecture, tied, "model.")
    text = fields.take("text_config")
    if not isinstance(text, Mapping):
        raise ModelError(f"config.json has text_config={shown(text)}; expected an object.")
    inner = ConfigFields("gemma3_text", text, "text_config")
    spec, table = describe_text(inner, architecture, tied, "model.language_model.")
    inner.finish()
    if spec.head is not None:  # HF's wrapper caps no logits
        spec = replace(spec, head=replace(spec.head, softcap=None))
    fields.ignore("vision_config", "mm_tokens_per_image", *_IMAGE_TOKENS)
    renames = ("model.language_model.", "language_model.model."), _HEAD
    unused = *table.unused, r"^(model\.)?vision_tower\.", r"^(model\.)?multi_modal_projector\."
    return spec, replace(table, renames=renames, unused=unused)


_HEAD = ("lm_head.", "language_model.lm_head.")
_IMAGE_TOKENS = tuple(
    f"{name}_{kind}"
    for name in ("boi_token", "eoi_token", "image_token")
    for kind in ("index", "id")
)


def describe_text(
    fields: ConfigFields, architecture: str, tied: bool, base: str
) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a decoder of texts, whose tensors' names begin with `base`."""
    embed = fields.size("hidden_size")
    heads, kv_heads, head_dim = fields.grouped_heads(embed)
    positions = fields.size("max_position_embeddings")
    norm = Norm("rms", fields.number("rms_norm_eps"), unit_offset=True)
    fields.ignore("tie_word_embeddings")  # of a model with images HF reads the outer one
    third, posts = fields.family == "gemma3_text", fields.family != "vaultgemma"
    qk_norm = norm if third else None
    mlp = Mlp(fields.size("intermediate_size"), fields.activation("hidden_activation"), gated=True)
    scale = fields.number("query_pre_attn_scalar") ** -0.5
    softcap = fields.optional_number("attn_logit_softcapping")
    softcap = None if third else softcap  # HF's Gemma 3 does not read it
    bias = fields.flag("attention_bias", False)
    kinds = fields.layer_types(fields.layers("num_hidden_layers"))
    given: Any = fields.take("rope_parameters")
    one: dict[str, Any] = dict.fromkeys(kinds, given)  # Gemma 2 has one for both
    parameters = ropes_by_kind(given, kinds) if third else one
    ropes = {
        kind: make_rope(parameters[kind], head_dim, positions)
        for kind in parameters
        if kind in kinds
    }
    if not third or base != "model.":  # of a model with images HF's masks are others
        fields.require("use_bidirectional_attention", False)
    both_ways = fields.flag("use_bidirectional_attention", False)
    blocks = {}
    for kind, window in zip(kinds, fields.windows(kinds), strict=True):
        if kind not in blocks:
            if both_ways and window is not None:  # so many in all, as HF's config counts them
                window = window // 2 + 1
            attention = Attention(
                heads,
                kv_heads,
                head_dim,
                scale,
                causal=not both_ways,
                window=window,
                rope=ropes[kind],
                qk_norm=qk_norm,
                softcap=softcap,
            )
            blocks[kind] = Layer(attention, mlp, norm, "around" if posts else "pre")
    fields.ignore("attention_dropout", "sliding_window_size")  # HF reads sliding_window
    fields.ignore("sliding_window_pattern", "_sliding_window_pattern")  # folded into layer_types
    fields.ignore("hidden_act")  # HF reads hidden_activation only
    logit_softcap = fields.optional_number("final_logit_softcapping")
    spec = ModelSpec(
        family=fields.family,
        architecture=architecture,
        vocab=fields.size("vocab_size"),
        embed=embed,
        layers=tuple(blocks[kind] for kind in kinds),
        max_positions=max(reach(parameters[kind], positions) for kind in ropes),
        embed_scale=embed**0.5,
        rounds_scale=True,
        final_norm=norm,
        head=Head("causal", softcap=logit_softcap) if "For" in architecture else None,
    )
    hf = base + "layers.{i}."
    layer = [
        *make.norm(norm, "attn_norm", f"{hf}input_layernorm"),
        *make.norm(norm, "mlp_norm", f"{hf}pre_feedforward_layernorm"),
        *make.joined("qkv", hf + "self_attn.{p}", make.QKV, bias),
        *make.head_norms(spec.layers[0].attention, f"{hf}self_attn"),
        *make.linear("out", f"{hf}self_attn.o_proj", "embed q", bias),
        *make.joined("up", hf + "mlp.{p}", make.GATE_UP, bias=False),
        *make.linear("down", f"{hf}mlp.down_proj", "embed up", bias=False),
    ]
    if posts:
        layer += make.norm(norm, "attn_post_norm", f"{hf}post_attention_layernorm")
        layer += make.norm(norm, "mlp_post_norm", f"{hf}post_feedforward_layernorm")
    return spec, make.causal_table(
        spec,
        layer,
        make.norm(norm, "final_norm", f"{base}norm"),
        embedding=f"{base}embed_tokens",
        tied=tied,
        base="model.",
        unused=[r"rotary_emb\.inv_freq$"],
    )

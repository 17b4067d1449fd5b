"""Gemma 4's text: heads of two sizes, keys that layers share, embeddings that each layer reads.

HF sources: models/gemma4 and models/gemma4_unified, whose text is the same without the embeddings.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...blocks.multiplied import Multiplied
from ...blocks.own_embeddings import OwnEmbeddings, outer_rows, own_rows
from ...blocks.separate_norms import SeparateNorms
from ...errors import ModelError, shown
from .. import rows as make
from ..spec import Attention, Embedding, Experts, Head, Layer, Mlp, ModelSpec, Norm, Rope, Router
from ..weights import Row, WeightTable
from .decoders import decoder_spec
from .fields import ConfigFields, is_positive
from .mixtures import Mixture, make_rows
from .rope import make_rope, reach, ropes_by_kind

CLASSES = {
    "gemma4": ("Gemma4ForConditionalGeneration", "Gemma4Model"),
    "gemma4_text": ("Gemma4ForCausalLM", "Gemma4TextModel"),
    "gemma4_unified": ("Gemma4UnifiedForConditionalGeneration", "Gemma4UnifiedModel"),
    "gemma4_unified_text": ("Gemma4UnifiedForCausalLM", "Gemma4UnifiedTextModel"),
}
_TOKENS = tuple(
    f"{name}_token_{kind}"
    for name in ("boi", "eoi", "image", "video", "boa", "eoa", "audio")
    for kind in ("id", "index")
)
_MEDIA = (
    *("vision_config", "audio_config", "vision_soft_tokens_per_image", "audio_ms_per_token"),
    *("vision_soft_tokens_per_video_frame", "audio_soft_tokens_per_image"),
)
# Of which each is a part of a layer, beside the MLP that all tokens have.
_MIXTURE = Mixture(block="", router="router.proj", shared=".mlp")
_TOWERS = r"^(model\.)?(vision_tower|vision_embedder|audio_tower|embed_vision|embed_audio)\."


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a Gemma 4; of one that sees and hears the part for text alone."""
    tied = fields.flag("tie_word_embeddings", True)
    if fields.family.endswith("_text"):
        return _describe(fields, architecture, tied, "model.")
    inner = fields.part("text_config", f"{fields.family}_text")
    spec, table = _describe(inner, architecture, tied, "model.language_model.")
    inner.ignore("tie_word_embeddings")  # HF reads the outer one
    inner.finish()
    fields.ignore(*_MEDIA, *_TOKENS)
    return replace(spec, family=fields.family), replace(table, unused=(*table.unused, _TOWERS))


def _describe(
    fields: ConfigFields, architecture: str, tied: bool, base: str
) -> tuple[ModelSpec, WeightTable]:
    embed, count = fields.size("hidden_size"), fields.layers("num_hidden_layers")
    positions, vocab = fields.size("max_position_embeddings"), fields.size("vocab_size")
    norm = Norm("rms", fields.number("rms_norm_eps"))
    kinds = fields.layer_types(count)
    parameters = ropes_by_kind(fields.take("rope_parameters"), kinds)
    attentions = _attentions(fields, embed, kinds, norm, parameters)
    ffn, activation = fields.size("intermediate_size"), fields.activation("hidden_activation")
    wide = 2 if fields.flag("use_double_wide_mlp", False) else 1
    reads = 0
    if fields.take("hidden_size_per_layer_input", 0):
        reads = fields.size("hidden_size_per_layer_input")
        fields.require("vocab_size_per_layer_input", vocab)
    fields.ignore("vocab_size_per_layer_input", "attention_dropout")
    experts = None
    if fields.flag("enable_moe_block", False):
        count, chosen = fields.size("num_experts"), fields.size("top_k_experts")
        if chosen > count:
            raise ModelError(
                f"config.json has {count} experts, of which a token chooses {chosen} "
                "(top_k_experts); it cannot choose more experts than there are."
            )
        router, width = Router(chosen, over_sum=0.0), fields.size("moe_intermediate_size")
        experts = Experts(count, Mlp(width, activation, gated=True), router, mixing=SeparateNorms())
    fields.ignore("num_experts", "top_k_experts", "moe_intermediate_size")  # of such a block

    def layer(a: Attention) -> Layer:
        width = ffn * (1 if a.lender is None else wide)
        mlp = replace(experts, shared=width) if experts else Mlp(width, activation, gated=True)
        own = (OwnEmbeddings(reads),) if reads else ()
        return Layer(a, mlp, norm, "around", edits=(*own, Multiplied()))

    layers = {a: layer(a) for a in attentions}
    softcap = fields.optional_number("final_logit_softcapping")
    spec = decoder_spec(
        *(fields, architecture, embed, (layers[a] for a in attentions), norm),
        max_positions=max(reach(parameters[kind], positions) for kind in kinds),
        embedding=Embedding(embed**0.5, "rounded"),
        head=Head("causal", softcap=softcap),
    )
    return spec, _table(fields, spec, kinds, tied, base)


def _attentions(
    fields: ConfigFields, embed: int, kinds: list[str], norm: Norm, parameters: Mapping[str, Any]
) -> list[Attention]:
    """The attention of each layer."""
    heads, positions = fields.heads("num_attention_heads"), fields.size("max_position_embeddings")
    both_ways = fields.take("use_bidirectional_attention")
    fields.require("use_bidirectional_attention", "all", "vision")  # the latter sees images so
    own, lenders, attentions = _sizes(fields, embed, len(kinds)), lenders_of(fields, kinds), []
    for i, (kind, window) in enumerate(zip(kinds, fields.windows(kinds), strict=True)):
        if both_ways == "all" and window is not None:  # so many in all, as HF's config counts them
            window = window // 2 + 1
        kv_heads, head_dim = own[i]
        if heads % kv_heads:
            raise ModelError(f"num_attention_heads={heads} is no multiple of {kv_heads} KV heads.")
        attentions.append(
            Attention(
                heads,
                kv_heads,
                head_dim,
                1.0,
                causal=both_ways != "all",
                near=window,
                rope=_rope(parameters[kind], head_dim, positions),
                qk_norm=norm,
                value_norm=norm if lenders[i] is None else None,
                lender=lenders[i],
            )
        )
    return attentions


def _rope(parameters: Mapping[str, Any], head_dim: int, positions: int) -> Rope:
    """A layer's rotary embedding; a `proportional` one has angles of 0 for what does not turn."""
    if not isinstance(parameters, Mapping) or parameters.get("rope_type") != "proportional":
        return make_rope(parameters, head_dim, positions)
    part, factor = parameters.get("partial_rotary_factor", 1.0), parameters.get("factor", 1.0)
    if not is_positive(part) or part > 1:
        raise ModelError(
            f"config.json has partial_rotary_factor={shown(part)}; expected a number up to 1."
        )
    pairs = int(part * head_dim // 2)
    kind = {"rope_type": "linear", "factor": factor, "partial_rotary_factor": None}
    rope = make_rope({**parameters, **kind}, head_dim, positions)
    return replace(rope, inv_freq=rope.inv_freq[:pairs] + (0.0,) * (head_dim // 2 - pairs))


def _sizes(fields: ConfigFields, embed: int, count: int) -> list[tuple[int, int]]:
    """Of each layer the KV heads and the elements of a head, by HF's per_layer_config."""
    _, kv_heads, head_dim = fields.grouped_heads(embed)
    sizes = []
    for changes in changes_of(fields, count):
        inner = ConfigFields(fields.family, changes, "per_layer_config")
        sizes.append(
            (inner.heads("num_key_value_heads", kv_heads), inner.size("head_dim", head_dim))
        )
        inner.finish()
    return sizes


def changes_of(fields: ConfigFields, count: int) -> list[Mapping[str, Any]]:
    """Of each layer the fields that are its own, by HF's per_layer_config."""
    given = fields.take("per_layer_config", {})
    if not isinstance(given, Mapping) or not all(isinstance(v, Mapping) for v in given.values()):
        raise ModelError(f"config.json has per_layer_config={shown(given)}; expected objects.")
    found: list[Mapping[str, Any]] = [{}] * count
    for number, changes in given.items():
        if not str(number).isdecimal() or int(number) >= count:
            raise ModelError(
                f"config.json has per_layer_config of layer {shown(number)}; expected a number "
                f"below {count}."
            )
        found[int(number)] = changes
    return found


def lenders_of(fields: ConfigFields, kinds: list[str]) -> list[int | None]:
    """Of each layer the number of that whose keys and values it has, None for its own."""
    shared = fields.take("num_kv_shared_layers", 0)
    own = len(kinds) - fields.size("num_kv_shared_layers") if shared else len(kinds)
    last = {kind: i for i, kind in enumerate(kinds[: max(own, 0)])}
    if {*kinds} - {*last}:
        raise ModelError(
            f"config.json has num_kv_shared_layers={shown(shared)} of {len(kinds)} layers, so that "
            f"no layer is left to make keys of each kind of {' and '.join(sorted({*kinds}))}."
        )
    return [None if i < own else last[kind] for i, kind in enumerate(kinds)]


def _table(
    fields: ConfigFields, spec: ModelSpec, kinds: list[str], tied: bool, base: str
) -> WeightTable:
    norm, reads = spec.layers[0].norm, spec.layers[0].reads
    bias, equal = fields.flag("attention_bias", False), fields.flag("attention_k_eq_v", False)
    hf = base + "layers.{i}."
    shared = [
        *make.norm(norm, "attn_norm", f"{hf}input_layernorm"),
        *make.norm(norm, "attn_post_norm", f"{hf}post_attention_layernorm"),
        *make.norm(norm, "mlp_norm", f"{hf}pre_feedforward_layernorm"),
        *make.norm(norm, "mlp_post_norm", f"{hf}post_feedforward_layernorm"),
        *make.linear("out", f"{hf}self_attn.o_proj", "embed q", bias),
        *make.norm(norm, "q_norm", f"{hf}self_attn.q_norm", "head_dim"),
        *Multiplied().rows(hf),
    ]
    mlp = spec.layers[0].mlp
    if isinstance(mlp, Experts):
        shared += [*make_rows(_MIXTURE, mlp, hf.removesuffix(".")), *SeparateNorms().rows(hf, norm)]
    else:
        shared += [
            *make.joined("up", hf + "mlp.{p}", make.GATE_UP, bias=False),
            *make.linear("down", f"{hf}mlp.down_proj", "embed up", bias=False),
        ]
    if reads:
        shared += own_rows(hf, norm)

    def rows_of(kind: str, lender: int | None) -> tuple[Row, ...]:
        if lender is not None:
            own = f"{base}layers.{lender}.self_attn.k_norm"
            rows = make.linear("qkv", f"{hf}self_attn.q_proj", "q embed", bias)
            return (*shared, *rows, *make.norm(norm, "k_norm", own, "head_dim"))
        parts = {**make.QKV, "v": "k_proj"} if equal and kind == "full_attention" else make.QKV
        return (
            *shared,
            *make.joined("qkv", hf + "self_attn.{p}", parts, bias),
            *make.norm(norm, "k_norm", f"{hf}self_attn.k_norm", "head_dim"),
            *make.plain_norm(norm, "v_norm", "head_dim"),
        )

    outer = make.norm(norm, "final_norm", f"{base}norm")
    if reads:
        outer += outer_rows(base, norm)
    lenders = [own.lender for own in spec.attentions]
    numbers = "|".join(str(i) for i, lender in enumerate(lenders) if lender is not None)
    table = make.causal_table(
        spec,
        shared,
        outer,
        embedding=f"{base}embed_tokens",
        tied=tied,
        base="model.",
        unused=[
            r"rotary_emb\.",
            # Google's files have keys of the layers that take those of others.
            *([rf"layers\.({numbers})\.self_attn\.(k_proj|v_proj|k_norm)\."] if numbers else []),
        ],
    )
    own = list(zip(kinds, lenders, strict=True))
    by_kind = {key: rows_of(*key) for key in dict.fromkeys(own)}
    return replace(table, layers=tuple(by_kind[key] for key in own))

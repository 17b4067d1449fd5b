"""Gemma 3n's text: streams that layers take turns to update (AltUp), a low-rank path beside each.

HF source: models/gemma3n. Keys that layers share and embeddings that each layer reads are Gemma
4's; the first layers of the larger models let few gates through.
"""

from dataclasses import replace
from statistics import NormalDist

from ...blocks.embedders import Embedder, Embedders
from ...blocks.own_embeddings import outer_rows, own_rows
from ...blocks.streams import Streams
from ...errors import ModelError, shown
from .. import rows as make
from ..spec import Attention, Embedding, Head, Layer, Mlp, ModelSpec, Norm
from ..weights import Row, WeightTable
from .decoders import decoder_spec
from .fields import ConfigFields
from .gemma4 import lenders_of
from .rope import make_rope, reach, ropes_by_kind

CLASSES = {
    "gemma3n": ("Gemma3nForConditionalGeneration", "Gemma3nModel"),
    "gemma3n_text": ("Gemma3nForCausalLM", "Gemma3nTextModel"),
}
_TOKENS = (
    *(f"{name}_token_id" for name in ("boi", "eoi", "image", "boa", "eoa", "audio")),
    *("vision_soft_tokens_per_image", "audio_soft_tokens_per_image"),
)
_EMBEDDERS = "model.embed_vision", "model.embed_audio"
_TOWERS = r"^(model\.)?((vision_tower|audio_tower)\.|embed_(vision|audio)\.soft_embedding_norm\.)"


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a Gemma 3n; of one that sees and hears the part for text alone."""
    tied = fields.flag("tie_word_embeddings", True)
    if fields.family == "gemma3n_text":
        return _describe(fields, architecture, tied, "model.")
    inner = fields.part("text_config", "gemma3n_text")
    parts = [fields.part(f"{x}_config", fields.family) for x in ("vision", "audio")]
    spec, table = _describe(inner, architecture, tied, "model.language_model.")
    inner.ignore("tie_word_embeddings")  # HF reads the outer one
    inner.finish()
    fields.ignore(*_TOKENS)
    # Ids that stand for images, and behind them those for sounds.
    firsts = [part.size("vocab_offset") for part in parts]
    embedders, rows = [], []
    for i, end in enumerate((firsts[1], spec.vocab)):
        embedder, known = _embedder(parts[i], firsts[i], end)
        embedders.append(embedder)
        rows += embedder.rows(i, _EMBEDDERS[i], known - embedder.count)
    entry = spec.embedding.entry
    assert isinstance(entry, Embedders)
    entry = replace(entry, parts=tuple(embedders))
    embedding = replace(spec.embedding, entry=entry)
    spec = replace(spec, family=fields.family, embedding=embedding)
    table = replace(table, spec=spec, outer=(*table.outer, *rows))
    return spec, replace(table, unused=(*table.unused, _TOWERS))


def _embedder(part: ConfigFields, first: int, end: int) -> tuple[Embedder, int]:
    """The embedder of the ids from `first` up to `end`, and how many rows its table has."""
    count, known = end - first, part.size("vocab_size")
    if not 0 < count <= known:
        raise ModelError(
            f"config.json has ids for images or sounds from vocab_offset={first} up to {end}, and "
            f"vocab_size={known} embeddings for them; expected one for each, and at least one."
        )
    norm = Norm("rms", part.number("rms_norm_eps"))
    return Embedder(first, count, part.size("hidden_size"), norm), known


def _describe(
    fields: ConfigFields, architecture: str, tied: bool, base: str
) -> tuple[ModelSpec, WeightTable]:
    embed, count = fields.size("hidden_size"), fields.layers("num_hidden_layers")
    heads, kv_heads, head_dim = fields.grouped_heads(embed)
    positions, vocab = fields.size("max_position_embeddings"), fields.size("vocab_size")
    norm, kinds = Norm("rms", fields.number("rms_norm_eps")), fields.layer_types(count)
    parameters = ropes_by_kind(fields.take("rope_parameters"), kinds)
    ropes = {kind: make_rope(parameters[kind], head_dim, positions) for kind in {*kinds}}
    fields.require("altup_active_idx", 0)
    streams = Streams(
        fields.size("altup_num_inputs"),
        fields.size("laurel_rank"),
        scaled=fields.flag("altup_correct_scale", True),
        reads=fields.size("hidden_size_per_layer_input"),
    )
    own_ids = fields.size("vocab_size_per_layer_input")
    layers = [
        Layer(
            Attention(
                *(heads, kv_heads, head_dim, 1.0),
                near=window,
                rope=ropes[kind],
                qk_norm=norm,
                value_norm=norm if lender is None else None,
                lender=lender,
            ),
            mlp,
            norm,
            "pre",
            block=replace(streams, sparse=sparse),
        )
        for kind, window, lender, (mlp, sparse) in zip(
            kinds,
            fields.windows(kinds),
            lenders_of(fields, kinds),
            _mlps(fields, count),
            strict=True,
        )
    ]
    layers = [{layer: layer for layer in layers}[layer] for layer in layers]  # equal ones are one
    fields.ignore("attention_dropout", "altup_coef_clip")  # the latter is of training
    softcap = fields.optional_number("final_logit_softcapping")
    spec = decoder_spec(
        *(fields, architecture, embed, layers, norm),
        max_positions=max(reach(parameters[kind], positions) for kind in kinds),
        embedding=Embedding(embed**0.5, "rounded", entry=Embedders(min(own_ids, vocab))),
        head=Head("causal", softcap=softcap),
    )
    return spec, _table(fields, spec, tied, base, own_ids)


def _mlps(fields: ConfigFields, count: int) -> list[tuple[Mlp, tuple[float, int] | None]]:
    """The feed-forward of each layer and `Streams.sparse`, of lists of widths and of shares."""
    activation = fields.activation("hidden_activation")
    widths, shut = fields.take("intermediate_size"), fields.take("activation_sparsity_pattern", 0.0)
    widths, shut = (x if isinstance(x, list | tuple) else [x] * count for x in (widths, shut))
    fits = len(widths) == len(shut) == count
    if not fits or not all(type(n) is int and n > 0 for n in widths):
        raise ModelError(
            f"config.json has intermediate_size={shown(widths)}; expected a positive int for each "
            f"of {count} layers, and as many numbers in activation_sparsity_pattern."
        )
    if not all(isinstance(x, int | float) and 0 <= x < 1 for x in shut):
        raise ModelError(
            f"config.json has activation_sparsity_pattern={shown(shut)}; expected shares from 0 up "
            "to 1."
        )
    return [
        (Mlp(ffn, activation, gated=True), (NormalDist().inv_cdf(x), ffn) if x else None)
        for ffn, x in zip(widths, shut, strict=True)
    ]


def _table(
    fields: ConfigFields, spec: ModelSpec, tied: bool, base: str, own_ids: int
) -> WeightTable:
    norm, bias = spec.layers[0].norm, fields.flag("attention_bias", False)
    hf, streams = base + "layers.{i}.", spec.block
    assert isinstance(streams, Streams)
    shared = [
        *streams.rows(hf, norm),
        *make.norm(norm, "attn_norm", f"{hf}input_layernorm"),
        *make.norm(norm, "attn_post_norm", f"{hf}post_attention_layernorm"),
        *make.norm(norm, "mlp_norm", f"{hf}pre_feedforward_layernorm"),
        *make.norm(norm, "mlp_post_norm", f"{hf}post_feedforward_layernorm"),
        *make.linear("out", f"{hf}self_attn.o_proj", "embed q", bias),
        *make.norm(norm, "q_norm", f"{hf}self_attn.q_norm", "head_dim"),
        *make.joined("up", hf + "mlp.{p}", make.GATE_UP, bias=False),
        *make.linear("down", f"{hf}mlp.down_proj", "embed up", bias=False),
        *own_rows(hf, norm),
    ]
    lenders = [own.lender for own in spec.attentions]

    def rows_of(lender: int | None) -> tuple[Row, ...]:
        if lender is not None:
            own = f"{base}layers.{lender}.self_attn.k_norm"
            rows = make.linear("qkv", f"{hf}self_attn.q_proj", "q embed", bias)
            return (*shared, *rows, *make.norm(norm, "k_norm", own, "head_dim"))
        return (
            *shared,
            *make.joined("qkv", hf + "self_attn.{p}", make.QKV, bias),
            *make.norm(norm, "k_norm", f"{hf}self_attn.k_norm", "head_dim"),
            *make.plain_norm(norm, "v_norm", "head_dim"),
        )

    table, *rows = outer_rows(base, norm)
    (source,) = table.sources
    table = replace(table, sources=(replace(source, spare=own_ids - spec.vocab),))
    outer = [*make.norm(norm, "final_norm", f"{base}norm"), table, *rows]
    outer += streams.outer_rows(base)
    numbers = "|".join(str(i) for i, lender in enumerate(lenders) if lender is not None)
    unused = (
        [rf"layers\.({numbers})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\."] if numbers else []
    )
    whole = make.causal_table(
        spec,
        shared,
        outer,
        embedding=f"{base}embed_tokens",
        tied=tied,
        base="model.",
        unused=[r"rotary_emb\.", *unused],
    )
    by_kind = {own: rows_of(own) for own in dict.fromkeys(lenders)}
    return replace(whole, layers=tuple(by_kind[own] for own in lenders))

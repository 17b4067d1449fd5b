"""BERT and its relatives: encoders with norms after each residual sum, and HF's heads for them.

Each is a row of `bert_kinds.KINDS`. HF sources: models/NAME/modeling_NAME.py.
"""

import re
from dataclasses import replace
from typing import Literal

from ...blocks.adapter import Adapter
from ...blocks.boxes import Boxes
from ...blocks.dropped_tokens import DroppedTokens
from ...blocks.spans import Spans
from ...errors import ModelError, shown
from .. import rows as make
from ..spec import (
    Activation,
    Attention,
    Embedding,
    Entry,
    Head,
    Layer,
    Mlp,
    ModelSpec,
    Norm,
    Positions,
    RelativeBias,
)
from ..weights import Row, Source, WeightTable, row
from .bert_kinds import KINDS, OLD_NORMS, Kind
from .fields import ConfigFields
from .heads import Classifier, kind_of_head, make_head, masked_head
from .rope import make_rope, reach, rotary_size

CLASSES = {
    family: (
        f"{kind.name}{kind.model}",
        *(kind.name + c for c in ((kind.masked_name,) if kind.masked else ()) + kind.classes),
    )
    for family, kind in KINDS.items()
}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of an encoder of BERT's kind."""
    kind = KINDS[fields.family]
    if kind.rope == "stored" and fields.take("position_embedding_type") == "absolute":  # ESM-1b
        kind = replace(kind, rope=None, counts=True, places="absolute")
        fields.ignore("rope_theta")
    if kind.norms_first and fields.flag(kind.norms_first[0], False):
        kind = replace(kind, end=kind.norms_first[1])

    def named(name: str) -> str:
        return kind.fields.get(name, name)

    embed, heads, head_dim = fields.split(named("hidden_size"), named("num_attention_heads"))
    spans = None
    if kind.spans:
        heads, head_dim, spans = _spans(fields, embed, heads)
    positions = fields.size("max_position_embeddings")
    norm = Norm("layer", kind.eps or fields.number("layer_norm_eps"))
    activation = _activation(fields, kind, named("hidden_act"))
    _refuse(fields, kind, kind_of_head(architecture))
    rope = None
    if kind.rope == "interleaved":
        fields.require("rotary_value", False)
        turned = make_rope({"rope_theta": 1e4}, head_dim, positions, interleaved=True)
        rope = replace(turned, rounded=True)  # HF reads a table in the model's dtype
    elif kind.rope == "stored":
        rope = make_rope({"rope_theta": fields.number("rope_theta")}, head_dim, positions)
    elif kind.rope:
        fields.require("head_dim", head_dim)
        turns = fields.take("rope_parameters")
        turned = rotary_size(turns, head_dim)
        rope = make_rope({**turns, "partial_rotary_factor": None}, turned, positions)
        positions = reach(turns, positions)
    ffn = kind.ffn_factor * embed or fields.size(named("intermediate_size"))
    mlp = Mlp(ffn, activation, gated=len(kind.mlp) > 2)
    attention = Attention(
        *(heads, heads, head_dim, head_dim**-0.5),
        causal=False,
        rope=rope,
        distances=_bias(fields, kind),
    )
    count, vocab = fields.layers(named("num_hidden_layers")), fields.size("vocab_size")
    width = embed if kind.factored is None else fields.size(named("embedding_size"), embed)
    factored = width != embed or kind.always_factored
    groups = _groups(fields, count) if kind.grouped else [None] * count
    pad = kind.pad or _pad(fields) if kind.counts else None
    adapter, adapter_rows = _adapter(fields, kind, norm, embed, activation)
    placement = "pre" if kind.end else "post"
    edits = tuple(edit for edit in (spans, adapter) if edit is not None)
    layer = Layer(attention, mlp, norm, placement, edits=edits)
    layers = [layer] * len(groups)
    if kind.windowed:
        layers = [_windowed(layer, n) for n in _windows(fields, kind.windowed, count)]
    head, head_rows, ties = _head(fields, kind, architecture, norm, activation, factored)
    is_normed = kind.embed_norm and (kind.norm_flag is None or fields.flag(kind.norm_flag, False))
    spec = ModelSpec(
        family=fields.family,
        architecture=architecture,
        vocab=vocab,
        embed=embed,
        layers=tuple(layers),
        max_positions=positions if pad is None else positions - pad - 1,
        positions=Positions(0 if kind.rope else positions, counted="ids" if kind.counts else "all"),
        pad_id=fields.take("pad_token_id") if kind.hides else pad,
        hides=kind.hides,
        embedding=Embedding(
            width=width if factored else None,
            norm=norm if is_normed else None,
            order=("tables", "norm", "project"),
            types=_token_types(fields, kind),
            entry=_entry(fields, kind),
        ),
        final_norm=norm if kind.end else None,
        head=head,
    )
    table = WeightTable(
        spec,
        (*_embeddings(kind, spec), *_final_norm(kind, norm), *head_rows),
        tuple((*_layer(kind, norm, attention.bias, spans, x), *adapter_rows) for x in groups),
        base=kind.base,
        renames=(*kind.renames, *OLD_NORMS),
        unused=(*_unused(kind, head, head_rows, ties), *_others(fields, kind)),
        kept=kind.buffers,
        tied=ties,
        # HF builds a base model with add_pooling_layer=False too, and saves no pooler then.
        optional="pooler.",
    )
    return spec, table


def _spans(fields: ConfigFields, embed: int, heads: int) -> tuple[int, int, Spans]:
    """ConvBERT's heads, half of which are attention's, the size of one, and what others mix."""
    own, taps = max(1, heads // fields.size("head_ratio")), fields.size("conv_kernel_size")
    if embed % (2 * own) or not taps % 2:
        raise ModelError(
            f"config.json has hidden_size={embed}, which {own} heads of attention and as many "
            f"beside them share, and conv_kernel_size={taps}; expected a multiple, and an odd "
            "number of tokens."
        )
    return own, embed // own // 2, Spans(taps)


def _windows(fields: ConfigFields, name: str, count: int) -> list[int]:
    """Of each layer the tokens in a window, an even number; one number is that of all."""
    given = fields.take(name)
    sizes = list(given) if isinstance(given, list | tuple) else [given] * count
    if len(sizes) != count or any(type(n) is not int or n < 2 or n % 2 for n in sizes):
        raise ModelError(
            f"config.json has {name}={shown(given)}; expected an even number of tokens, or one "
            f"for each of {count} layers."
        )
    return sizes


def _windowed(layer: Layer, size: int) -> Layer:
    """The layer where a token sees half of `size` on either side, and itself."""
    return replace(layer, attention=replace(layer.attending, near=size // 2 + 1))


def _activation(fields: ConfigFields, kind: Kind, name: str) -> Activation:
    if kind.gelu_flag:
        return "gelu" if fields.flag(kind.gelu_flag, True) else "relu"
    return kind.activation or fields.activation(name)


def _refuse(fields: ConfigFields, kind: Kind, head: str | None) -> None:
    """Refuse what a family does not honour, and mark what changes nothing."""
    fields.require("is_decoder", False)
    fields.require("add_cross_attention", False)
    fields.require("position_embedding_type", kind.places)
    fields.require("use_task_id", False)
    fields.require("quant_mode", False)
    for name, value in kind.required.items():
        fields.require(name, value)
    for name, allowed in kind.summaries.get(head or "", {}).items():
        fields.require(name, *allowed)
    fields.ignore("hidden_dropout_prob", "attention_probs_dropout_prob", *kind.ignored)
    # The first TensorFlow release wrote these; no implementation reads them.
    fields.ignore("directionality", "pooler_fc_size", "pooler_num_attention_heads")
    fields.ignore("pooler_num_fc_layers", "pooler_size_per_head", "pooler_type")


def _entry(fields: ConfigFields, kind: Kind) -> Entry | None:
    """What is added to tokens for their boxes, or drops the embeddings of masks as training did."""
    if kind.boxes:
        return Boxes(fields.size(kind.boxes))
    if not kind.drops:
        return None
    own = fields.take("mask_token_id")
    if not fields.flag("token_dropout", False):
        return DroppedTokens(None)
    if type(own) is not int or own < 1:  # 0 fills up what is padded
        raise ModelError(f"config.json has mask_token_id={shown(own)}; expected a positive id.")
    return DroppedTokens(own)


def _token_types(fields: ConfigFields, kind: Kind) -> int | Literal["vocab"]:
    """Kinds of tokens; some files have none."""
    if kind.types is None:
        return 0
    if kind.types == "vocab":
        return "vocab"
    is_none = kind.types == "optional" and fields.take("type_vocab_size") == 0
    return 0 if is_none else fields.size("type_vocab_size")


def _final_norm(kind: Kind, norm: Norm) -> list[Row]:
    return make.norm(norm, "final_norm", kind.base + kind.end) if kind.end else []


def _pad(fields: ConfigFields) -> int:
    """The id that HF counts no position for."""
    pad = fields.take("pad_token_id")
    if isinstance(pad, bool) or not isinstance(pad, int) or pad < 0:
        raise ModelError(
            f"config.json has pad_token_id={shown(pad)}; the {fields.family} family counts the "
            "positions of other tokens, and needs an id of the vocabulary."
        )
    return pad


def _groups(fields: ConfigFields, count: int) -> list[tuple[int, int]]:
    """Of each of ALBERT's layers the group and the place in it whose weights it has."""
    groups, inner = fields.size("num_hidden_groups"), fields.size("inner_group_num")
    return [(int(i / (count / groups)), j) for i in range(count) for j in range(inner)]


def _bias(fields: ConfigFields, kind: Kind) -> RelativeBias | None:
    """The bias of distances, whose numbers HF has in its code whatever the table's size is."""
    if kind.bias_table is None:
        return None
    fields.require("relative_attention_num_buckets", 32)
    return RelativeBias(32, 128, both_ways=True)


def _adapter(
    fields: ConfigFields, kind: Kind, norm: Norm, embed: int, activation: Activation
) -> tuple[Adapter | None, list[Row]]:
    """The adapter of the language that HF takes where a caller names none, and its rows."""
    if not kind.adapts:
        return None, []
    language, known = fields.take("default_language"), fields.take("languages", [])
    if not isinstance(language, str) or language not in known:
        raise ModelError(
            f"config.json has default_language={shown(language)} and languages={shown(known)}; "
            f"{fields.family} is served by the adapters of its default language. Name one of them: "
            'args={"default_language": ...} of init_inference.'
        )
    width = embed // fields.size("adapter_reduction_factor")
    own, reused = fields.flag("adapter_layer_norm", False), "adapter_reuse_layer_norm"
    named = None
    if fields.flag(reused, True) or own:
        named = "adapter_layer_norm" if own else "LayerNorm"
    adapter = Adapter(width, activation, fields.flag("ln_before_adapter", True))
    return adapter, adapter.rows(f"{kind.base}{kind.layer}output.", language, norm, named)


def _others(fields: ConfigFields, kind: Kind) -> list[str]:
    """A pattern of the adapters of other languages."""
    language = re.escape(str(fields.take("default_language")))
    return [rf"\.adapter_modules\.(?!{language}\.)"] if kind.adapts else []


def _layer(
    kind: Kind,
    norm: Norm,
    bias: RelativeBias | None,
    spans: Spans | None,
    group: tuple[int, int] | None,
) -> tuple[Row, ...]:
    hf = kind.base + kind.layer
    if group is not None:
        hf = hf.replace("{group}", str(group[0])).replace("{inner}", str(group[1]))
    *first, down = kind.mlp
    rows = make.joined("qkv", hf + "{p}", dict(zip("qkv", kind.qkv, strict=True)), kind.bias)
    if kind.packed:
        rows = _or_packed(rows, hf + kind.packed, "q+k+v")
    out = make.linear("out", hf + kind.out, "embed q+spans" if spans else "embed q", kind.bias)
    # Words of 4-bit codes have 32 columns, which a device's part of heads or of spans may cut.
    rows += [replace(own, dense=spans is not None) for own in out]
    rows += spans.rows(f"{hf}attention.self.") if spans else []
    up_bias = kind.bias if kind.up_bias is None else kind.up_bias
    if len(first) > 1:
        parts: dict[str, str] = dict(zip(("gate", "up"), first, strict=True))
        up = make.joined("up", hf + "{p}", parts, up_bias)
        rows += up if kind.packed_up is None else _or_packed(up, hf + kind.packed_up, "up+gate/1")
    else:
        rows += make.linear("up", hf + first[0], "ffn embed", up_bias)
    inner = "embed up" if len(first) > 1 else "embed ffn"
    rows += make.linear("down", hf + down, inner, kind.bias)
    for ours, theirs in zip(("attn_norm", "mlp_norm"), kind.norms, strict=True):
        rows += make.norm(norm, ours, hf + theirs)
    if bias is not None:
        rows.append(make.relative_bias(bias, f"{kind.base}{kind.bias_table}"))
    return tuple(rows)


def _or_packed(rows: list[Row], theirs: str, layout: str) -> list[Row]:
    """A projection of several, which files may have as one, with its `layout`."""
    axes = {"weight": (layout, "embed"), "bias": (layout,)}
    return [
        replace(own, others=(Source(f"{theirs}.{part}", axes[part]),))
        for own, part in zip(rows, axes, strict=False)
    ]


def _embeddings(kind: Kind, spec: ModelSpec) -> list[Row]:
    at, words, places = kind.embeddings
    hf = kind.base + at
    own = spec.embedding
    width = "width" if own.is_factored else "embed"
    tables = [("embed", "vocab", words)]
    if spec.positions.rows:
        tables.append(("positions", "positions", places))
    if own.own_types:
        tables.append(("token_types", "types", "token_type_embeddings"))
    rows = make.tables((ours, f"{axis} {width}", hf + theirs) for ours, axis, theirs in tables)
    if isinstance(own.entry, Boxes):
        rows += own.entry.rows(hf, width)
    if own.norm and kind.embed_norm:
        rows += make.norm(own.norm, "embed_norm", hf + kind.embed_norm, width)
    if kind.rope == "stored":
        stored = f"{kind.base}rotary_embeddings.inv_freq", "pairs"
        rows.append(replace(row("frequencies", "pairs", stored), wide=True, fixed=True))
    if own.is_factored:
        rows += make.linear("project_in", f"{kind.base}{kind.factored}", "embed width")
    return rows


def _head(
    fields: ConfigFields,
    kind: Kind,
    architecture: str,
    norm: Norm,
    activation: Activation,
    factored: bool,
) -> tuple[Head | None, list[Row], tuple[tuple[Row, str], ...]]:
    """The head of a HF class, its rows (a base model's pooler), and those that HF ties."""
    tied = fields.flag("tie_word_embeddings", True) and kind.scored is None
    pooler = f"{kind.base}{kind.pooler}" if kind.pooler else None
    if architecture.endswith("WithLMHeadModel"):  # a projection alone
        assert kind.masked is not None
        head, axes = Head("masked"), "vocab embed"
        weight, bias = make.linear("head", kind.masked[2], axes)
        ties = ((weight, f"{kind.base}{kind.embeddings[1]}.weight"),)
        return (head, [bias], ties) if tied else (head, [weight, bias], ())
    if architecture.endswith("ForMaskedLM"):
        by = kind.masked_activation or activation
        embedding = f"{kind.base}embeddings.word_embeddings.weight"
        width = "width" if factored else "embed"
        assert kind.masked is not None
        if kind.scored is None:
            return masked_head(norm, by, kind.masked, embedding, tied, width)
        own = fields.size(kind.scored)
        head, rows, ties = masked_head(norm, by, kind.masked, embedding, tied, "scored")
        return replace(head, width=own), rows, ties
    labels = kind_of_head(architecture)
    if labels is None:
        return None, make.linear("pooler", pooler, _SQUARE) if pooler else [], ()
    own = kind.heads.get(labels)
    if own is None and labels in ("span", "token"):
        own = Classifier("qa_outputs" if labels == "span" else "classifier")
    elif own is None:
        own = Classifier("classifier", pooler, "tanh")
    if labels in kind.head_activations:
        own = replace(own, activation=fields.activation(kind.head_activations[labels]))
    return (*make_head(fields, labels, own, kind.poolings.get(labels, "first")), ())


_SQUARE = "embed embed_in"  # two names tell the sides of a square matrix apart


def _unused(
    kind: Kind, head: Head | None, rows: list[Row], ties: tuple[tuple[Row, str], ...]
) -> tuple[str, ...]:
    """Patterns of tensors that a checkpoint may hold beside those of the class."""
    unused = [r"embeddings\.(position_ids|token_type_ids)$", *kind.buffers]
    own = {s.name for r in (*rows, *(r for r, _ in ties)) for s in r.sources}
    if head is not None and not any("pooler" in name for name in own):
        unused.append(r"(^|\.)pooler\.")
    if head is None:
        unused += ["^" + part.replace(".", r"\.") for part in kind.unread]
    elif head.kind == "masked":
        # Checkpoints of a task before this one hold every head; a model reads its own.
        unused += [r"^cls\.seq_relationship\.", r"^sop_classifier\.", r"^discriminator_predictions"]
        bias = kind.masked[3] if kind.masked else None
        if bias and bias not in own:
            unused.append(f"^{bias}$".replace(".", r"\."))
    elif head.kind == "replaced":
        unused.append("^generator_")
    return tuple(unused)

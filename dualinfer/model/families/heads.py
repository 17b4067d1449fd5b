"""Heads for labels: those of encoders, by each family's table, and those that every decoder has."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ...errors import ModelError, shown
from .. import rows as make
from ..spec import Activation, Head, ModelSpec, Norm, Pooling
from ..weights import Row, WeightTable, row
from .fields import ConfigFields

Kind = Literal["sequence", "token", "choice", "span", "replaced"]
_SUFFIXES: dict[str, Kind] = {
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
    "ForQuestionAnswering": "span",
    "ForMultipleChoice": "choice",
    "ForPreTraining": "replaced",
    "ForQuestionAnsweringSimple": "span",
}
_OF_DECODERS = tuple(_SUFFIXES)[:3]
# The base model's name in HF's classes for questions, where it is not the other classes' own.
_QA_BASES: dict[str, str] = dict.fromkeys(
    "arcee diffllama exaone4 internlm3 iquestcoder llama ministral nemotron qwen2 qwen3 qwen3_moe "
    "seed_oss smollm3".split(),
    "transformer.",
)
_OWN_LOSSES = ("bloom", "falcon", "gpt2", "gpt-sw3", "gpt_neo", "gpt_neox", "gptj", "mpt", "opt")
_CLASSIFIERS = ("gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "bloom", "falcon", "mpt", "biogpt")


@dataclass(frozen=True)
class Classifier:
    """HF's names of a head's parts: `dense` comes first, if any, then `activation` and `norm`."""

    out: str
    dense: str | None = None
    activation: Activation | None = None
    norm: str | None = None
    dense_bias: bool = True
    bias: bool = True


def kind_of_head(architecture: str) -> Kind | None:
    """The kind of a HF class that scores by labels; None for other classes."""
    return next((k for suffix, k in _SUFFIXES.items() if architecture.endswith(suffix)), None)


def count_labels(fields: ConfigFields, kind: Kind) -> int:
    """Scores of a head, by HF's num_labels: as many as id2label names, and 2 by default."""
    if kind in ("choice", "replaced"):
        return 1
    names = fields.take("id2label")
    given = len(names) if isinstance(names, dict) and names else fields.size("num_labels", 2)
    if kind == "span" and given != 2:
        raise ModelError(
            f"config.json names {given} labels; a head for question answering has 2, of the start "
            f"and of the end (id2label={shown(names)})."
        )
    return given


def make_head(
    fields: ConfigFields,
    kind: Kind,
    own: Classifier,
    pooling: Pooling | None,
    norm: Norm | None = None,
    width: str = "embed",
) -> tuple[Head, list[Row]]:
    """A head for labels with its rows; `width` is the axis that it reads."""
    head = Head(
        kind,
        own.activation,
        norm if own.norm else None,
        labels=count_labels(fields, kind),
        pooling=pooling if kind in ("sequence", "choice") else None,
    )
    rows = []
    if own.dense:
        rows += make.linear("head.dense", own.dense, "embed embed_in", own.dense_bias)
    if own.norm:
        assert norm is not None
        rows += make.norm(norm, "head.norm", own.norm)
    return head, [*rows, *make.linear("head", own.out, f"labels {width}", own.bias)]


def pair_head(fields: ConfigFields, kind: Kind) -> tuple[Head, list[Row], int | None]:
    """An encoder-decoder's head for labels, with its rows, and the id whose place it reads.

    It is of its decoder's last hidden states.
    """
    if kind == "span":  # of two scores, whatever the config says of labels
        return Head(kind, labels=2), make.linear("head", "qa_outputs", "labels embed"), None
    own = Classifier("classification_head.out_proj", "classification_head.dense", "tanh")
    head, rows = make_head(fields, kind, own, "eos")
    eos = fields.take("eos_token_id")
    if isinstance(eos, bool) or not isinstance(eos, int):
        raise ModelError(
            f"config.json has eos_token_id={shown(eos)}; expected an id, at whose last place the "
            "decoder's hidden state is scored."
        )
    return head, rows, eos


def base_class(served: Sequence[str]) -> str | None:
    """The headless class of a family of decoders; None for one of encoders."""
    causal = [n for n in served if n.endswith(("ForCausalLM", "LMHeadModel"))]
    if all(name.endswith("WithLMHeadModel") for name in causal):  # XLM's is a masked one
        return None
    bases = (n for n in served if n.endswith("Model") and not n.endswith("LMHeadModel"))
    return next(bases, None)


def classes_of_decoder(served: Sequence[str]) -> list[str]:
    """HF's classes of a decoder with a head for labels, as it names them for every family."""
    base = base_class(served)
    return [] if base is None else [base.removesuffix("Model") + suffix for suffix in _OF_DECODERS]


def with_head(
    fields: ConfigFields, spec: ModelSpec, table: WeightTable, architecture: str
) -> tuple[ModelSpec, WeightTable]:
    """A decoder without a head, with HF's generic one for labels: spec and table."""
    kind = kind_of_head(architecture)
    assert kind is not None and spec.head is None
    if kind == "span":
        own = Classifier("qa_outputs")
        fields = fields.of_family(fields.family, {"id2label": None, "num_labels": 2})  # as HF
        table = under(table, _QA_BASES.get(spec.family, table.base))
    elif kind == "token":
        own = Classifier("classifier" if spec.family in _CLASSIFIERS else "score")
    else:
        own = Classifier("classifier" if spec.family == "ctrl" else "score", bias=False)
    width = "width" if spec.embedding.width else "embed"
    head, rows = make_head(fields, kind, own, "last", width=width)
    counted = kind == "span" and spec.family not in _OWN_LOSSES
    head = replace(head, loss="counted" if counted else "mean")
    pad = fields.take("pad_token_id")
    spec = replace(spec, architecture=architecture, head=head, pad_id=pad)
    return spec, replace(table, spec=spec, outer=(*table.outer, *rows))


def under(table: WeightTable, base: str) -> WeightTable:
    """The table with the base model's tensors under another name."""
    if base == table.base:
        return table

    def new(name: str) -> str:
        return re.sub(f"^{re.escape(table.base)}", base, name)

    def renamed(rows: Iterable[Row]) -> tuple[Row, ...]:
        return tuple(
            replace(
                own,
                sources=tuple(replace(s, name=new(s.name)) for s in own.sources),
                others=tuple(replace(s, name=new(s.name)) for s in own.others),
            )
            for own in rows
        )

    layers = {id(rows): renamed(rows) for rows in table.layers}
    return replace(
        table,
        outer=renamed(table.outer),
        layers=tuple(layers[id(rows)] for rows in table.layers),
        tied=tuple((*renamed([own]), new(name)) for own, name in table.tied),
        base=base,
    )


def masked_head(
    norm: Norm,
    activation: Activation,
    names: tuple[str, str, str, str],
    embedding: str,
    tied: bool,
    width: str = "embed",
    dense_bias: bool = True,
    bias: bool = True,
) -> tuple[Head, list[Row], tuple[tuple[Row, str], ...]]:
    """A masked-LM head, its rows, and those that HF ties to other tensors.

    `names` are HF's of the dense layer, its norm, the projection to the vocabulary and the bias of
    this. The projection repeats the `embedding`, if `tied`, as does its bias that of this name.
    """
    dense, normed, out, own_bias = names
    square = "embed embed_in" if width == "embed" else f"{width} embed"
    rows = make.linear("head.dense", dense, square, dense_bias)
    rows += make.norm(norm, "head.norm", normed, width)
    weight, *biases = make.linear("head", out, f"vocab {width}", bias)
    ties = ((weight, embedding),)
    if own_bias != f"{out}.bias" and bias:
        ties = (*ties, (biases[0], own_bias))
        biases = [row("head.bias", "vocab", (own_bias, "vocab"))] if tied else biases
    rows += biases if tied else [weight, *biases]
    return Head("masked", activation, norm), rows, ties if tied else ()

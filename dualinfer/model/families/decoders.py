"""The engine of decoders: a config is read by the row of its type, a `Kind`, to spec and table.

A type that differs by facts is a row alone. One that does otherwise has a class of its own beside
`Decoder`, which its row names, in the file that is about it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from ...blocks.gated_heads import GatedHeads
from ...blocks.long_rope import LongRope
from ...blocks.scaled_sums import ScaledSums
from ...errors import ModelError, shown
from .. import rows as make
from ..spec import (
    Activation,
    Attention,
    Embedding,
    Experts,
    Head,
    Layer,
    Mlp,
    ModelSpec,
    Norm,
    Recurrence,
    Rope,
)
from ..weights import Row, WeightTable, row
from . import mixtures
from .fields import ConfigFields, query_growth
from .rope import ORIGINAL, make_rope, reach, rotary_size, without

Bias: TypeAlias = bool | str  # the name of a config's field says it
PRE = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
PART = "partial_rotary_factor"
FREQUENCIES = r"rotary_emb\.inv_freq$"  # which older versions stored


class Factors(NamedTuple):
    """Factors of embedded tokens, of scores, of what a sub-layer adds, and of logits."""

    embed: float = 1.0
    scores: float | None = None
    residual: float = 1.0
    logits: float = 1.0


class Sight(NamedTuple):
    """How each layer sees: its window, None for all of the past, and the key of its rope.

    A layer without one has None; `ropes` are HF's rope_parameters by key.
    """

    windows: Sequence[int | None]
    turns: Sequence[str | None]
    ropes: Mapping[str, Any]


def rms(eps: str = "rms_norm_eps", unit_offset: bool = False) -> Callable[[ConfigFields], Norm]:
    """An RMSNorm whose epsilon is the field `eps`."""
    return lambda fields: Norm("rms", fields.number(eps), unit_offset)


def layer_norm(eps: str = "", unit_offset: bool = False) -> Callable[[ConfigFields], Norm]:
    """A LayerNorm whose epsilon is the field `eps`; without one it is torch's default."""
    return lambda fields: Norm("layer", fields.number(eps) if eps else 1e-5, unit_offset)


def alike(own: "Decoder") -> Sight:
    """All layers see all of the past, and turn by one embedding."""
    return Sight([None] * own.count, [""] * own.count, {"": own.fields.take("rope_parameters")})


def decoder_spec(
    fields: ConfigFields,
    architecture: str,
    embed: int,
    layers: Iterable[Layer],
    norm: Norm | None,
    *,
    head: Head | None = None,
    **more: Any,
) -> ModelSpec:
    """The spec of a decoder of texts; `more` are further fields. HF's base classes have no head."""
    is_bare = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    return ModelSpec(
        family=fields.family,
        architecture=architecture,
        vocab=fields.size("vocab_size"),
        embed=embed,
        layers=tuple(layers),
        final_norm=norm,
        head=None if is_bare else head or Head("causal"),
        **more,
    )


class Decoder:
    """A config of one type that is read: Llama's decoder, by what the row of the type says."""

    gives: ClassVar[str] = "q"  # the axis of what heads give

    def __init__(self, kind: "Kind", fields: ConfigFields):
        self.kind = kind
        self.fields = fields = fields.of_family(fields.family, self.changes(fields))
        self.embed, self.count = fields.size("hidden_size"), self.count_layers()
        self.base = kind.tensors + kind.under
        self.hf = self.base + "layers.{i}."  # how names of a layer's tensors begin
        self.positions = self.reach = self.most_positions()
        self.norm, self.factors = kind.norm(fields), kind.factors(self)
        self.mixture = kind.mixture or mixtures.MIXTURES.get(fields.family)

    def changes(self, fields: ConfigFields) -> Mapping[str, Any]:
        """Fields of the config as other types have them."""
        return {}

    def count_layers(self) -> int:
        """The number of layers."""
        return self.fields.layers(self.kind.count)

    def most_positions(self) -> int:
        """Positions as the config says."""
        return self.fields.size("max_position_embeddings")

    def says(self, bias: Bias) -> bool:
        """True if the row says so, or the config's field that the row names."""
        return self.fields.flag(bias, False) if isinstance(bias, str) else bias

    def describe(self, architecture: str) -> tuple[ModelSpec, WeightTable]:
        """Spec and weight table of a HF class."""
        fields, kind = self.fields, self.kind
        known: dict[Layer, Layer] = {}
        layers = self.layers(self.attentions(), self.feeds())
        softcap = fields.optional_number(kind.softcap) if kind.softcap else None
        spec = decoder_spec(
            *(fields, architecture, self.embed),
            *((known.setdefault(layer, layer) for layer in layers), self.norm),
            max_positions=self.reach,
            embedding=self.embedding(),
            head=Head("causal", scale=self.factors.logits, softcap=softcap),
            **self.facts(),
        )
        for bias in (kind.qkv_bias, kind.out_bias, kind.mlp_bias, kind.head_bias):
            self.says(bias)  # also where no layer has it
        fields.require("use_bidirectional_attention", False, *([True] if kind.both_ways else []))
        for name, value in kind.always.items():
            fields.require(name, *(value if isinstance(value, tuple) else (value,)))
        for name, other in kind.twins.items():
            value = fields.take(other)
            fields.require(name, value, [value] * self.count)
        if self.says(kind.mlp_bias) and any(layer.experts for layer in spec.layers):
            fields.require(str(kind.mlp_bias), False)  # which experts have not
        fields.ignore("attention_dropout", *kind.ignored)
        self.check(spec)
        return spec, self.table(spec)

    def check(self, spec: ModelSpec) -> None:
        """Refuse fields that ask for other than the spec."""

    def facts(self) -> Mapping[str, Any]:
        """Further fields of the spec."""
        return self.kind.facts

    def embedding(self) -> Embedding:
        """The way from ids to the first layer."""
        return Embedding(self.factors.embed, self.kind.scaled)

    def attentions(self) -> list[Attention]:
        """The attention of each layer; sets `reach`."""
        windows, turns, parameters = self.kind.sees(self)
        sizes = self.sizes(windows)
        for key, own in parameters.items():
            if isinstance(own, Mapping):
                self.check_rope(own)
            elif key:
                raise ModelError(
                    f"config.json has rope_parameters[{key!r}]={shown(own)}; expected an object."
                )
        parameters = {key: self.turning(own) for key, own in parameters.items()}
        ropes: dict[str | None, Rope | None] = {None: None}
        ropes |= {key: self.rope(own, sizes[0][2]) for key, own in parameters.items()}
        reaches = (reach(own, self.positions) for own in parameters.values())
        self.reach = max(reaches, default=self.positions)
        more = self.attention_facts()
        return [
            Attention(*size, self.scale(size[2]), near=window, rope=ropes[key], **more)
            for size, window, key in zip(sizes, windows, turns, strict=True)
        ]

    def check_rope(self, parameters: Mapping[str, Any]) -> None:
        """Refuse fields that say other than HF's rope_parameters."""
        self.fields.within(parameters, **{"rope_theta": None, PART: None, **self.kind.kept})
        for name in ("rope_pct", "rope_percent"):  # of StableLM's makers, and Nemotron's
            self.fields.require(name, parameters.get(PART))

    def turning(self, parameters: Any) -> Any:
        """HF's rope_parameters as its class takes them."""
        return parameters

    def sizes(self, windows: Sequence[int | None]) -> list[tuple[int, int, int]]:
        """Give query heads, KV heads and elements of a head, for each layer."""
        if self.kind.splits:
            _, _, head_dim = self.fields.split("hidden_size", "num_attention_heads")
            self.fields.require("head_dim", head_dim)
        return [self.fields.grouped_heads(self.embed)] * self.count

    def scale(self, head_dim: int) -> float:
        """The factor of scores."""
        return head_dim**-0.5 if self.factors.scores is None else self.factors.scores

    def rope(self, parameters: Any, head_dim: int) -> Rope:
        """The rotary embedding of layers by HF's parameters."""
        parameters = without(parameters, *self.kind.unturned)
        if self.kind.partial:
            size = rotary_size(parameters, head_dim)
            parameters, head_dim = {**parameters, PART: None}, size
        by_turns = self.kind.interleaved
        by_turns = self.fields.flag(by_turns, True) if isinstance(by_turns, str) else by_turns
        rope = make_rope(parameters, head_dim, self.positions, by_turns)
        long = rope.by_length
        if not self.kind.rereads or not isinstance(long, LongRope):
            return rope
        # HF's generate begins anew by one field, its model by the other.
        self.fields.require(ORIGINAL, rope.original)
        return replace(rope, by_length=replace(long, rereads=True))

    def attention_facts(self) -> dict[str, Any]:
        """Further fields of all layers' attention."""
        fields, kind = self.fields, self.kind
        more: dict[str, Any] = {"wiring": GatedHeads(kind.gate)} if kind.gate else {}
        if self.says(kind.qk_norm):
            more |= {"qk_norm": self.norm, "qk_norm_over": kind.qk_norm_over}
        if kind.grows:
            more["growth"] = query_growth(fields)
        if kind.clip:
            more["clip"] = fields.optional_number(kind.clip)
        return more

    def feeds(self) -> Sequence[Mlp | Experts]:
        """The feed-forward of each layer."""
        mlp = self.dense()
        if self.mixture is None:
            return [mlp] * self.count
        return mixtures.read_layers(self.fields, self.mixture, mlp, self.count)

    def dense(self) -> Mlp:
        """The feed-forward of a layer without experts."""
        ffn = self.fields.size(self.kind.ffn) if self.kind.ffn else 1  # of none
        return Mlp(ffn, self.activation(), self.kind.gated)

    def activation(self) -> Activation | Literal["xielu"]:
        """The activation of feed-forwards."""
        return self.fields.activation("hidden_act")

    def layers(
        self, attentions: Sequence[Attention], feeds: Sequence[Mlp | Experts]
    ) -> Sequence[Layer]:
        """The layers."""
        return [self.layer(*own) for own in zip(attentions, feeds, strict=True)]

    def layer(self, attention: Attention, mlp: Mlp | Experts) -> Layer:
        """The layer of an attention and a feed-forward."""
        placement = "shared" if self.says(self.kind.parallel) else self.kind.placement
        factor = self.factors.residual
        edits = () if factor == 1 else (ScaledSums(factor),)
        return Layer(attention, mlp, self.norm, placement, edits=edits)

    def table(self, spec: ModelSpec) -> WeightTable:
        """The weight table."""
        kind, mixture = self.kind, self.mixture
        outer = self.norm_rows("final_norm", f"{self.base}{kind.final_norm}")
        if spec.embedding.norm:
            outer += self.norm_rows("embed_norm", "")
        if spec.head and self.says(kind.head_bias):
            outer.append(row("head.bias", "vocab", ("lm_head.bias", "vocab")))
        unused = [*kind.unused, *(mixture.unused if mixture else ())]
        if (
            mixture is not None if kind.predicts is None else kind.predicts
        ):  # a second token, by a layer behind those that answer
            unused.append(rf"^(model\.)?layers\.{len(spec.layers)}\.")
        table = make.causal_table(
            spec,
            (),
            outer,
            embedding=f"{self.base}{kind.embedding}",
            tied=self.tied(),
            base=kind.tensors,
            unused=unused,
            kept=kind.kept_rows,
            renames=(*kind.renames, *(mixture.renames if mixture else ())),
            optional=kind.optional,
        )
        return replace(table, layers=tuple(self.all_rows(spec.layers)))

    def all_rows(self, layers: Sequence[Layer]) -> list[tuple[Row, ...]]:
        """The rows of each layer; layers that are one object share them."""
        made = {id(layer): tuple(self.rows(layer)) for layer in layers}
        return [made[id(layer)] for layer in layers]

    def tied(self) -> bool:
        """True if the head repeats the embedding."""
        return self.fields.flag("tie_word_embeddings", self.kind.tied)

    def rows(self, layer: Layer) -> list[Row]:
        """The rows of a layer."""
        rows = []
        for ours, theirs in self.kind.norms.items():
            normed = layer.placement == "around" or "post" not in ours
            if ours == "mlp_norm":
                normed = layer.mlp is not None and not layer.is_parallel
            elif ours == "attn_norm":
                normed = layer.attention is not None or layer.recurrence is not None
            if normed:
                rows += self.norm_rows(ours, f"{self.hf}{theirs}", layer)
        rows += self.mixing_rows(layer)
        return rows + (self.feed_rows(layer.mlp) if layer.mlp is not None else [])

    def norm_rows(self, ours: str, theirs: str, layer: Layer | None = None) -> list[Row]:
        """The rows of a norm over the stream, of a layer or behind all."""
        if not self.kind.weighted:
            return make.plain_norm(self.norm, ours)
        if self.norm.kind == "layer" and not self.kind.norm_bias:
            return make.norm_without_bias(self.norm, ours, theirs)
        return make.norm(self.norm, ours, theirs)

    def mixing_rows(self, layer: Layer) -> list[Row]:
        """The rows of a layer's attention, and of what stands in its place."""
        kind, hf = self.kind, f"{self.hf}{self.kind.attention}"
        if layer.attention is None:
            return []
        rows = self.qkv_rows(layer.attention, hf, self.says(kind.qkv_bias))
        if kind.gate:
            rows += self.gate_rows(hf)
        rows += make.linear(
            "out", f"{hf}.{kind.out}", f"embed {self.gives}", self.says(kind.out_bias)
        )
        return rows + (self.sink_rows() if kind.sinks else [])

    def qkv_rows(self, a: Attention, hf: str, bias: bool) -> list[Row]:
        """The rows of queries, keys and values, and of their norms."""
        kind = self.kind
        if kind.qkv:
            rows = make.packed("qkv", f"{hf}.{kind.qkv}", kind.qkv_layout, bias)
        else:
            rows = make.joined("qkv", hf + ".{p}", make.QKV, bias)
        if kind.weighted or a.qk_norm is None:
            return rows + make.head_norms(a, hf, kind.qk_names)
        return rows + [r for x in "qk" for r in make.plain_norm(a.qk_norm, f"{x}_norm", "head_dim")]

    def gate_rows(self, hf: str) -> list[Row]:
        """The rows of the product that gates what heads give."""
        return make.linear(
            "attn_gate", f"{hf}.{self.kind.attn_gate}", f"{self.kind.gates} embed", False
        )

    def sink_rows(self) -> list[Row]:
        """The rows of what heads see besides all tokens."""
        return [replace(row("sinks", "heads", (f"{self.hf}self_attn.sinks", "heads")), wide=True)]

    def feed_rows(self, mlp: Mlp | Experts) -> list[Row]:
        """The rows of a feed-forward."""
        kind, hf, bias = (
            self.kind,
            f"{self.hf}{self.kind.mlp_module}.",
            self.says(self.kind.mlp_bias),
        )
        if isinstance(mlp, Experts):
            assert self.mixture is not None
            return mixtures.make_rows(self.mixture, mlp, self.hf)
        *first, down = kind.mlp
        if len(first) == 2:
            parts: dict[str, str] = dict(zip(("gate", "up"), first, strict=True))
            rows = make.joined("up", hf + "{p}", parts, bias)
        else:
            axes = "gate+up embed" if kind.gated else "ffn embed"
            rows = make.linear("up", f"{hf}{first[0]}", axes, bias)
        if mlp.activation == "xielu":
            rows += make.xielu(f"{hf}act_fn")
        inner = "embed up" if kind.gated else "embed ffn"
        return rows + make.linear("down", f"{hf}{down}", inner, bias)


class Hybrid(Decoder):
    """Some layers have a recurrence in attention's place, by HF's layer_types."""

    recurring: ClassVar[tuple[str, ...]] = ("linear_attention",)
    attending: ClassVar[tuple[str, ...]] = ("full_attention",)

    def recurrence(self) -> Recurrence | None:
        """The recurrence of such layers."""
        raise NotImplementedError

    def recurrent_rows(self, recurrence: Any) -> list[Row]:
        """The rows of a layer's recurrence."""
        raise NotImplementedError

    def kinds(self) -> list[str]:
        """Of each layer its kind."""
        return self.fields.kinds("layer_types", self.count, (*self.recurring, *self.attending))

    def layers(
        self, attentions: Sequence[Attention], feeds: Sequence[Mlp | Experts]
    ) -> Sequence[Layer]:
        kinds, layers = self.kinds(), super().layers(attentions, feeds)
        own = self.recurrence()
        return [
            replace(layer, recurrence=own, attention=None) if kind in self.recurring else layer
            for kind, layer in zip(kinds, layers, strict=True)
        ]

    def mixing_rows(self, layer: Layer) -> list[Row]:
        own = layer.recurrence
        return [*(self.recurrent_rows(own) if own else []), *super().mixing_rows(layer)]


class Recurrent(Hybrid):
    """No layer attends, knows positions, or has a feed-forward."""

    def most_positions(self) -> int:
        return 1 << 20

    def attentions(self) -> list[Attention]:
        return []

    def feeds(self) -> Sequence[Mlp | Experts]:
        return []

    def layers(
        self, attentions: Sequence[Attention], feeds: Sequence[Mlp | Experts]
    ) -> Sequence[Layer]:
        return [Layer(None, None, self.norm, "pre", recurrence=self.recurrence())] * self.count


@dataclass(frozen=True)
class Kind:
    """A row: the facts that tell one type of decoders from another, with Llama's where it is still.

    `norm` makes the norms, `factors` the factors, and `sees` tells how far layers see and how
    they turn; what else is otherwise a class `build` does. `weighted` norms have weights.
    `norms` are HF's names by ours; without `norm_bias` LayerNorm has a weight alone. `qkv` is
    HF's name of a joint projection, which has a layout; `mlp` are its names in `mlp_module`
    from gate or up to down, two of them where the MLP is not gated or gate and up are one, and
    `ffn` is the field of its width, which may be empty where no layer is dense; `count` is that
    of layers. `qk_names` are those of the norms of queries and keys, `{x}` a head's number, and
    `attn_gate` is that of the product that gates what heads give by a `gate`, which has a
    number for each element (`q`) or for each head.

    Of `partial` types HF reads partial_rotary_factor; by `unturned` parts of rope_parameters
    nothing turns. `kept` are values of fields that HF's class keeps beside what rope_parameters
    say, and does not read. A sequence that grows past longrope's original length is read again
    by a type that `rereads`. Heads that `split` the width have no size of their own. Queries of
    a type that `grows` have a factor by their position. Queries, keys and values lie within
    what the field `clip` says, and logits within `softcap`. Heads see `sinks` as well. A token
    may see those behind it, `both_ways`, where the config says so.

    `always` are fields of the makers' own code with what HF takes for granted, a tuple of
    several; `twins` are such that say again what a field of HF's does; `ignored` ones change
    nothing at inference. The factor of embedded tokens is `scaled` as `Embedding` says. `facts` are
    fields of the spec. Tensors of `unused` patterns change no text; those of `kept_rows` are saved
    all the same, and `optional` ones may be absent. A file
    of a mixture may hold a layer that `predicts` a second token. `base` is HF's class without a
    head where its name is no other's with an end of its own; a kind that `only` others are
    around has no other, whose name ends in `head`; `also` are classes of the makers' own code.
    Names of `tensors` begin so, those of the decoder alone `under` a further name.
    """

    name: str
    also: tuple[str, ...] = ()
    norm: Callable[[ConfigFields], Norm] = field(default_factory=rms)
    weighted: bool = True
    norm_bias: bool = True
    norms: Mapping[str, str] = field(default_factory=lambda: PRE)
    final_norm: str = "norm"
    placement: Literal["pre", "around", "behind"] = "pre"
    sees: Callable[[Decoder], Sight] = alike
    factors: Callable[[Decoder], Factors] = lambda own: Factors()
    build: type[Decoder] = Decoder
    mixture: mixtures.Mixture | None = None
    count: str = "num_hidden_layers"
    qk_norm: Bias = False
    qk_norm_over: Literal["head", "own", "all", "turned"] = "head"
    qk_names: tuple[str, str] = ("q_norm", "k_norm")
    gate: Literal["sigmoid", "softplus"] | None = None
    attn_gate: str = "gate_proj"
    gates: Literal["q", "heads"] = "q"
    sinks: bool = False
    splits: bool = False
    grows: bool = False
    both_ways: bool = False
    clip: str = ""
    softcap: str = ""
    qkv_bias: Bias = "attention_bias"
    out_bias: Bias = "attention_bias"
    mlp_bias: Bias = False
    head_bias: Bias = False
    qkv: str | None = None
    qkv_layout: str = "q+k+v"
    out: str = "o_proj"
    attention: str = "self_attn"
    ffn: str = "intermediate_size"
    mlp_module: str = "mlp"
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    gated: bool = True
    parallel: Bias = False
    interleaved: Bias = False
    partial: bool = False
    unturned: tuple[str, ...] = ()
    rereads: bool = False
    kept: Mapping[str, float] = field(default_factory=dict)
    tied: bool = False
    scaled: Literal["ids", "rounded", "all"] = "ids"
    facts: Mapping[str, Any] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    twins: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    unused: tuple[str, ...] = (FREQUENCIES,)
    kept_rows: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    optional: str | None = None
    predicts: bool | None = None
    base: str | None = None
    head: str = "ForCausalLM"
    only: bool = False
    tensors: str = "model."
    under: str = ""
    embedding: str = "embed_tokens"

    @property
    def classes(self) -> tuple[str, ...]:
        """HF's classes, with a head and without."""
        if self.only:
            return (f"{self.name}Model",)
        return f"{self.name}{self.head}", self.base or f"{self.name}Model", *self.also


Described: TypeAlias = Callable[[ConfigFields, str], tuple[ModelSpec, WeightTable]]


def serve(kinds: Mapping[str, Kind]) -> tuple[dict[str, tuple[str, ...]], Described]:
    """What a file of families gives of its rows: HF's classes by type, and `describe`."""

    def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
        """Spec and weight table of a type of these rows."""
        kind = kinds[fields.family]
        return kind.build(kind, fields).describe(architecture)

    return {family: kind.classes for family, kind in kinds.items()}, describe

"""Layers, heads and the whole model."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ...errors import ModelError
from ..once import Once
from .attention import Attention
from .block import Block
from .distances import Distances
from .edit import Edit
from .embedding import Embedding
from .parts import (
    Activation,
    Experts,
    Mlp,
    Norm,
    Recurrence,
    keeps_float32,
)
from .positions import Positions
from .sounds import Sounds
from .wiring import Wiring

Pooling = Literal["first", "real", "last", "final", "mean", "late", "eos", "patches", "beside"]


@dataclass(frozen=True)
class Patches:
    """The input of an encoder of images: a token of each patch, behind `learned` ones.

    Images have `channels` and `grid` rows and columns of patches, each `size` pixels high and wide.
    Images are of `one` size, and positions are interpolated for others where a caller asks for it;
    or of `any` size, so that they are without being asked (DINOv2). `given` ones are patches, each
    image with a grid and a mask of its own (SigLIP 2); their positions are interpolated
    bilinearly, antialiased.
    """

    channels: int
    size: tuple[int, int]
    grid: tuple[int, int]
    learned: int = 1
    sizes: Literal["one", "any", "given"] = "one"

    @property
    def given(self) -> bool:
        """True if images are given as patches."""
        return self.sizes == "given"

    @property
    def width(self) -> int:
        """Numbers of one patch."""
        return self.channels * self.size[0] * self.size[1]

    @property
    def image(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        high, wide = (n * size for n, size in zip(self.grid, self.size, strict=True))
        return self.channels, high, wide

    @property
    def tokens(self) -> int:
        """Tokens of an image."""
        return self.learned + self.grid[0] * self.grid[1]


@dataclass(frozen=True)
class Probe:
    """A learned query that pools the tokens of an image (SigLIP): attention, then an MLP.

    The MLP reads the attention's result by the model's `norm`, and adds to it.
    """

    attention: Attention
    mlp: Mlp
    norm: Norm


@dataclass(frozen=True)
class Pooled:
    """The vector that a model without a head makes of its last hidden state.

    It is that of the `first` token, of the `final` one, padding too, or of the `end`: the first
    with the model's `end_id`, or with the largest id if that is None; or what a probe makes of all.
    A `norm` and a projection come behind it, where there are these.
    """

    pooling: Literal["first", "final", "end"] | Probe
    norm: Norm | None = None

    @property
    def probe(self) -> Probe | None:
        """The probe that pools all tokens."""
        return self.pooling if isinstance(self.pooling, Probe) else None


@dataclass(frozen=True)
class Layer:
    """One block: where its norms stand, what its sub-layers read, and what else some models do.

    - `placement`: norms before each sub-layer (`pre`), after each residual sum (`post`), or, within
      the residual, behind each sub-layer (`behind`) or before and behind it (`around`). As with
      `pre`, but the MLP reads the layer's input instead of attention's sum: by a norm of its own
      (`parallel`), or by attention's (`shared`).
    - `cross` (`pre`, `post` or `around`): a second attention stands between the two, whose keys and
      values are of what an encoder gives.
    - `edits`: what is otherwise at one place, in their order, as each says.
    - `block`: it is built otherwise from top to bottom, as that says.
    - `recurrence` (always `pre`): a sub-layer that keeps a state of fixed size instead of keys and
      values. It stands in attention's place where the layer has none (LFM2), else beside it: both
      read by one norm, and both are added (Falcon-H1).
    - A layer may have no `attention`, or no `mlp` (always `pre`).
    """

    attention: Attention | None
    mlp: Mlp | Experts | None
    norm: Norm
    placement: Literal["pre", "post", "around", "behind", "parallel", "shared"]
    cross: Attention | None = None
    edits: tuple[Edit, ...] = ()
    block: Block | None = None
    recurrence: Recurrence | None = None

    @property
    def is_parallel(self) -> bool:
        """True if both sub-layers read what the layer reads."""
        return self.placement in ("parallel", "shared")

    @property
    def reads(self) -> int:
        """Elements that a token's embedding gives this layer alone; 0 for none."""
        return sum(own.reads for own in (self.block, *self.edits) if own is not None)

    @property
    def attending(self) -> Attention:
        """The attention of a layer that has one; ModelError tells who asked that it has none."""
        if self.attention is None:
            raise ModelError(
                "A layer without attention was asked for it. A family whose layers differ makes "
                "the rows and edits of each by what the layer has (Layer.attention)."
            )
        return self.attention

    @property
    def feeding(self) -> Mlp | Experts:
        """The feed-forward of a layer that has one; ModelError tells who asked that it has none."""
        if self.mlp is None:
            raise ModelError(
                "A layer without a feed-forward was asked for it. A family whose layers differ "
                "makes the rows and edits of each by what the layer has (Layer.mlp)."
            )
        return self.mlp

    @property
    def experts(self) -> int:
        """The number of experts of a layer; 0 of one without a mixture."""
        return self.mlp.count if isinstance(self.mlp, Experts) else 0

    @property
    def axes(self) -> dict[str, int]:
        """Elements of the axes of its weights, by their names."""
        found: dict[str, int] = {}
        if self.attention is not None:
            found |= self.attention.axes
        if isinstance(self.mlp, Experts):
            found |= self.mlp.axes
        elif self.mlp is not None:
            found |= dict.fromkeys(("ffn", "gate", "up"), self.mlp.ffn)
        for own in (self.block, *self.edits):
            found |= own.axes(self) if own is not None else {}
        if self.recurrence is not None:
            found |= self.recurrence.extents
        return found

    @property
    def is_late(self) -> bool:
        """True if a part of what it gives is added behind the next layer."""
        mixing = self.mlp.mixing if isinstance(self.mlp, Experts) else None
        return mixing is not None and mixing.leaves


@dataclass(frozen=True)
class Head:
    """The head that makes scores of the last hidden state: for the vocabulary, or for `labels`.

    `causal` and `masked` heads project to the vocabulary. One without a projection of its own among
    its weights reads the input embedding as one. A logit is times `scale`; then `softcap` c makes
    it c * tanh(logit / c). A head for labels scores a `sequence` as one, each `token`, a `choice`
    among several sequences (by one label), or the `span` from where to where an answer goes (by
    two); of `replaced` tokens it has one score each. A head with an `activation` has a projection
    before its own, then the activation and the `norm` if any. `pooling` says which hidden state of
    a sequence a head reads: of the `first` token, the first `real` one by the mask, the `last` one
    that is no padding by its id, the `final` one, padding too, or the `mean` of the real ones,
    before the projection to labels or of what that gives (`late`), or of an image's `patches`
    without the learned tokens, or the first and this mean of patches side by side (`beside`); of an
    encoder-decoder the decoder's at the place of the last `end_id` that the encoder reads (`eos`).
    `width` is that of the projection before the vocabulary where it is neither the embedding's nor
    the layers' (RemBERT). HF's `loss` is the sum of tokens' over a number that the caller has
    `counted`, or their `mean`, or that of those that a mask has `shown` (Qwen2-Audio); where it is
    None, decoders' heads for the vocabulary count, and others do not. `ways` of HF's class that
    others have not: it `keeps` logits of some tokens alone, though it is of an encoder-decoder; it
    takes labels of several numbers as `shares` of classes.
    """

    kind: Literal["causal", "masked", "sequence", "token", "choice", "span", "replaced"]
    activation: Activation | None = None
    norm: Norm | None = None
    softcap: float | None = None
    scale: float = 1.0
    labels: int = 0
    pooling: Pooling | None = None
    width: int = 0
    loss: Literal["mean", "counted", "shown"] | None = None
    ways: tuple[Literal["keeps", "shares"], ...] = ()

    @property
    def of_vocab(self) -> bool:
        """True if the scores are logits of the vocabulary."""
        return self.kind in ("causal", "masked")


@dataclass(frozen=True)
class ModelSpec(Once):
    """A whole architecture. A layer that `is_late` and the next one are one layer of HF's.

    Tokens and where they stand:

    - `vocab` ids, or images or sounds in their place, as `senses` say. An `embedding` makes the
      first layer's input of them, and `positions` say where they stand. If the model `packs`,
      positions that start anew separate sequences.
    - `pad_id`: the id of padding, by which positions and heads may tell it, and which HF `hides`
      where there is no mask; `end_id`: that of a text's end, by which a head or `pooled` tells it.

    What comes out:

    - `head` makes scores, `pooled` HF's pooler_output, `projected` elements wide where it projects.
      HF's hidden `states` end behind the final norm, or, `raw` ones, before it; `late` ones begin
      behind the first layer, and end with the last layer's before that norm and behind it (Mamba).
    - With an `encoder` this is a decoder that attends across to what that gives of another
      sequence, and that begins with the id `start`, if the model names one. Where it is given no
      ids it reads what is `shifted`, the labels or else what the encoder read, if these are ids.
      Where no layer attends across, the encoder is a tower beside this one, and what they give says
      how near texts are to images (CLIP).
    """

    family: str
    architecture: str
    vocab: int
    embed: int
    layers: tuple[Layer, ...]
    max_positions: int
    embedding: Embedding = field(default_factory=Embedding)
    positions: Positions = field(default_factory=Positions)
    pad_id: int | None = None
    end_id: int | None = None
    hides: bool = False
    packs: bool = True
    final_norm: Norm | None = None
    head: Head | None = None
    encoder: "ModelSpec | None" = None
    start: int | None = None
    shifted: tuple[Literal["labels", "source"], ...] = ("labels",)
    projected: int = 0
    senses: Patches | Sounds | None = None
    pooled: Pooled | None = None
    states: Literal["normed", "raw", "late"] = "normed"

    @property
    def patches(self) -> Patches | None:
        """The images that the model reads."""
        return self.senses if isinstance(self.senses, Patches) else None

    @property
    def sounds(self) -> Sounds | None:
        """The sounds that the model reads."""
        return self.senses if isinstance(self.senses, Sounds) else None

    @property
    def all_layers(self) -> tuple[Layer, ...]:
        """The layers, then those of the encoder: numbers of layers in the weights are by these."""
        return self.layers + (self.encoder.layers if self.encoder else ())

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The attention of each layer that has one, to the sequence itself."""
        return tuple(own.attention for own in self.layers if own.attention is not None)

    def number(self, part: "ModelSpec", index: int) -> int:
        """The number in `all_layers` of a layer of `part`, this model or its encoder."""
        return index + (len(self.layers) if self.encoder and not part.encoder else 0)

    def with_layers(self, layers: Sequence[Layer]) -> "ModelSpec":
        """The same model of other layers, given as `all_layers` has them."""
        own, rest = tuple(layers[: len(self.layers)]), tuple(layers[len(self.layers) :])
        encoder = replace(self.encoder, layers=rest) if self.encoder else None
        return replace(self, layers=own, encoder=encoder)

    def extent(self, axis: str, layer: int | None = None) -> int:
        """Elements of an axis by its name; of a joined one, such as `q+k+v`, of all its parts.

        Axes of heads and of the MLP are those of layer number `layer`. What stands behind a `/`
        says how blocks are interleaved and adds nothing; behind `:` is a number of elements that
        have one here, and behind `=` the extent itself.
        """
        axis, _, literal = axis.partition("=")
        if literal:
            return int(literal)
        axis, _, block = axis.partition(":")
        size = sum(self._extent(part, layer) for part in axis.partition("/")[0].split("+"))
        return -(-size // int(block or 1))

    def _extent(self, axis: str, layer: int | None) -> int:
        if self.encoder and axis.startswith("source_"):
            return self.encoder.extent(axis.removeprefix("source_"))
        if self.encoder and layer is not None and layer >= len(self.layers):
            return self.encoder.extent(axis, layer - len(self.layers))
        outer = {
            "vocab": self.vocab,
            "embed": self.embed,
            "embed_in": self.embed,  # tells the sides of a square matrix apart
            "labels": self.head.labels if self.head else 0,
            "scored": self.head.width if self.head else 0,
            "projected": self.projected,
            "pairs": max((own.rope_pairs for own in self.attentions[:1]), default=0),
            **{"read": self.layers[0].reads, "reads": self.reads},
            "one": 1,
        }
        outer |= {**self.embedding.axes(self.embed), **self.positions.axes}
        if self.patches is not None:
            outer |= dict(zip(("high", "wide"), self.patches.size, strict=True))
            outer |= {"channels": self.patches.channels, "learned": self.patches.learned}
            outer |= {"registers": self.unplaced, "patch": self.patches.width}
            outer["classes"] = self.patches.learned - self.unplaced
        if self.sounds is not None:
            outer |= self.sounds.axes(self.embed)
        if self.pooled is not None and self.pooled.probe is not None:
            probe = self.pooled.probe
            outer |= {"probe_qkv": sum(probe.attention.qkv_sizes), "probe_ffn": probe.mlp.ffn}
        if self.block is not None:
            outer |= self.block.outer_axes(self)
        if self.places is not None:
            outer |= self.places.axes
        if axis in outer:
            return outer[axis]
        assert layer is not None, f"{axis} is an axis of layers"
        return self.layers[layer].axes[axis]

    @property
    def places(self) -> Distances | None:
        """What distances add to scores by products, which all layers share."""
        return next((own.places for own in self.attentions), None)

    @property
    def reads(self) -> int:
        """Elements that a token's embedding gives all layers for themselves; 0 for none."""
        return sum(layer.reads for layer in self.layers)

    @property
    def unplaced(self) -> int:
        """Learned tokens of images that have no position: registers, behind the others."""
        return 0 if self.patches is None else self.patches.tokens - self.positions.rows

    @property
    def lenders(self) -> frozenset[int]:
        """The numbers of the layers whose keys and values others have, too."""
        return frozenset(own.lender for own in self.attentions if own.lender is not None)

    @property
    def block(self) -> Block | None:
        """The block of layers that are built otherwise: the first one's, for all of them."""
        return self.layers[0].block

    @property
    def caches(self) -> tuple[tuple[int, str], ...]:
        """The layer of each cache but the cross ones, by number, and what of the layer keeps it.

        That is its "attention" or its "recurrence".
        """
        return tuple(
            (i, part)
            for i, layer in enumerate(self.layers)
            for part, has in (
                ("attention", layer.attention is not None and layer.attention.lender is None),
                ("recurrence", layer.recurrence is not None),
            )
            if has
        )

    @property
    def cache_numbers(self) -> dict[int, int]:
        """The number of the cache that a layer keeps its keys and values in: a lender's own.

        Layers that do not attend have none.
        """
        number = {i: n for n, (i, part) in enumerate(self.caches) if part == "attention"}
        lenders = {i: a.lender for i, own in enumerate(self.layers) if (a := own.attention)}
        return {i: number[i if own is None else own] for i, own in lenders.items()}

    @property
    def sights(self) -> tuple[int | None, ...]:
        """The most tokens that a query sees of each of the `caches`; None for all of the past.

        So it is where a latent vector is what is kept.
        """
        found: list[int | None] = [None if part == "recurrence" else 0 for _, part in self.caches]
        for i, number in self.cache_numbers.items():
            a, before = self.layers[i].attending, found[number]
            own = None if a.latent is not None else a.reach
            found[number] = None if own is None or before is None else max(own, before)
        return tuple(found)

    @property
    def state_numbers(self) -> dict[int, int]:
        """The number of the cache of each layer with a recurrence."""
        return {i: n for n, (i, part) in enumerate(self.caches) if part == "recurrence"}

    @property
    def has_float32_states(self) -> bool:
        """True if layers have recurrences that keep float32 states."""
        return any(own.recurrence and keeps_float32(own.recurrence) for own in self.layers)

    @property
    def cross_numbers(self) -> dict[int, int]:
        """The number of the cross cache of each layer that has one; they follow all others."""
        crossing = (i for i, layer in enumerate(self.layers) if layer.cross)
        return {index: n for n, index in enumerate(crossing, len(self.caches))}

    @property
    def token_types(self) -> int:
        """Types that a caller may give of tokens; 0 without any."""
        return self.vocab if self.embedding.types == "vocab" else self.embedding.own_types

    @property
    def hidden(self) -> int | None:
        """The id that HF hides where there is no mask."""
        return self.pad_id if self.hides else None

    @property
    def blanks(self) -> bool:
        """True if what a mask hides enters the first layer as zeros."""
        entry = self.embedding.entry
        return bool(entry and entry.blanks) or any(
            edit.blanks for layer in self.layers for edit in layer.edits
        )

    @property
    def projects(self) -> bool:
        """True if a projection lies between tokens and layers, and another before the head."""
        return (
            self.embedding.width is not None
            and not self.embedding.is_factored
            and not (self.block and self.block.embeds)
        )

    @property
    def crosses(self) -> bool:
        """True if this is a decoder that attends across to what its encoder gives."""
        return self.encoder is not None and any(layer.cross for layer in self.layers)

    @property
    def towers(self) -> bool:
        """True if the encoder is one beside this one: neither attends to the other."""
        return self.encoder is not None and not self.crosses

    @property
    def vector_name(self) -> str:
        """HF's name of the vector that a model without a head gives, which its class tells."""
        if not self.architecture.endswith("WithProjection"):
            return "pooler_output"
        return "text_embeds" if self.patches is None else "image_embeds"

    @property
    def masks_labels(self) -> bool:
        """True if labels of what a mask hides count in no loss."""
        return self.head is not None and self.head.loss == "shown"

    @property
    def transcribes(self) -> bool:
        """True if HF's class has a generate of its own, which goes through sounds by windows."""
        sounds = self.encoder.sounds if self.encoder else None
        return self.crosses and sounds is not None and sounds.transcribes

    @property
    def sees(self) -> bool:
        """True if images are among what the model reads."""
        return self.patches is not None or bool(self.encoder and self.encoder.patches)

    @property
    def reads_ids(self) -> bool:
        """True of an encoder of text."""
        return not self.hears and self.patches is None

    @property
    def hears(self) -> bool:
        """True of an encoder of sounds."""
        return self.sounds is not None

    @property
    def one_length(self) -> int:
        """Tokens of every sequence of an encoder of sounds or images; 0 where lengths differ."""
        if self.patches is not None:
            return self.patches.tokens
        return self.positions.rows if self.sounds and self.sounds.of_one_length else 0

    @property
    def stride(self) -> int:
        """The places that an encoder reads for each token."""
        return 1 if self.sounds is None else self.sounds.stride

    @property
    def marks(self) -> bool:
        """True of an encoder whose tokens tell by their last number whether layers see them."""
        return self.sounds is not None and not self.sounds.of_one_length

    @property
    def frames(self) -> int:
        """Frames of every sound of one length that the model reads; 0 of others."""
        return self.stride * self.one_length if self.sounds else 0

    @property
    def causal(self) -> bool:
        """True if every layer attends to the past only, so that a cache makes sense."""
        return all(own.causal for own in self.attentions)

    @property
    def reads_pieces(self) -> bool:
        """True if a prompt may be read in pieces.

        Then a token asks for no other one but in attention and recurrences, which caches serve.
        """
        whole = self.encoder is not None or self.positions.counted == "rows"
        mixings = [own.mlp.mixing for own in self.layers if isinstance(own.mlp, Experts)]
        return self.causal and not whole and not any(own and own.sees_others for own in mixings)

    @property
    def verifies(self) -> bool:
        """True if several tokens of a sequence may be read at once as they would be one by one.

        Angles that ask for its length differ from one to the next.
        """
        return self.reads_pieces and not self.turns_by_length

    @property
    def keeps_places(self) -> bool:
        """True if what a cache has of a token serves every sequence that begins as its own did.

        States of recurrences have no places, and some angles ask for the prompt's length.
        """
        parts = {part for _, part in self.caches}
        return self.reads_pieces and parts == {"attention"} and not self.turns_by_length

    @property
    def keeps_beginnings(self) -> bool:
        """True if a copy of what a cache has of a prompt's beginning serves others that begin so.

        Where not all is in places, at the length alone at which the states of recurrences stand.
        """
        parts = {part for _, part in self.caches}
        return self.reads_pieces and bool(parts) and not self.turns_by_length

    @property
    def alibi(self) -> bool:
        """True if attention measures positions itself, so that they are no input of the model."""
        return any(own.alibi for own in self.attentions)

    @property
    def original(self) -> int | None:
        """Tokens beyond which a sequence is read again, by other angles; None for never."""
        ropes = [own.rope for own in self.attentions]
        changing = [rope.by_length for rope in ropes if rope and rope.by_length]
        lengths = [own.original for own in changing if own.rereads]
        return min(lengths) if lengths else None

    @property
    def turns_by_length(self) -> bool:
        """True if a rotary embedding asks for the length of the sequence that it turns."""
        return any(own.rope and own.rope.by_length for own in self.attentions)

    @property
    def can_generate(self) -> bool:
        """True for a causal model with a vocabulary head."""
        return self.causal and self.head is not None and self.head.kind == "causal"

    @property
    def counts_labels(self) -> bool:
        """True if HF divides the sum of losses by the number that a caller counts."""
        if self.head is None or self.head.loss is not None:
            return self.head is not None and self.head.loss == "counted"
        return self.head.kind == "causal" and self.encoder is None

    @property
    def has_logits(self) -> bool:
        """True if the model scores the vocabulary."""
        return self.head is not None and self.head.of_vocab

    @property
    def tokens(self) -> int:
        """The longest sequence that its table of positions has rows for, or `most`; 0 without."""
        return self.most or self.positions.tokens(self.pad_id)

    @property
    def most(self) -> int:
        """Tokens of a sequence of which all are seen; 0 for no such limit.

        HF's layers choose among more by another product, or by biases, which is not served.
        """
        return max((own.wiring.most for own in self.attentions if own.wiring), default=0)

    @property
    def most_by(self) -> str:
        """The config's field that `most` is."""
        return (next((own.wiring for own in self.attentions), None) or Wiring).most_by

    @property
    def why_most(self) -> str:
        """For people: why one sequence has at most `tokens`."""
        if not self.most:
            return f"the model has {self.tokens} positions"
        return (
            f"of more than {self.most_by}={self.most} tokens the layers of {self.architecture} "
            "choose those that they see, which is not served"
        )

    @property
    def reads_near(self) -> bool:
        """True if what a token becomes is made of the tokens beside it, real or not."""
        return bool(self.block and self.block.reads_near) or any(
            edit.reads_near for layer in self.layers for edit in layer.edits
        )

    @property
    def reads_patches(self) -> bool:
        """True if images are given as patches, to the model or to its second tower."""
        own = self.encoder.patches if self.encoder and self.towers else self.patches
        return own is not None and own.given

    @property
    def can_pack(self) -> bool:
        """True if several sequences in one row give what each gives by itself."""
        apart = any(own.alibi_rounded or own.chunk for own in self.attentions)
        return not self.turns_by_length and not apart

    def most_tokens(self, asked: int | None) -> int:
        """Longest prompt with its new tokens: `asked`, else what fills the model's positions.

        A table of positions, or `most`, always bounds it. The last new token is never fed back, so
        that it takes no position.
        """
        bounds = [n + 1 for n in (self.positions.rows, self.most) if n]
        return min([asked or self.max_positions + 1, *bounds])

    def __repr__(self) -> str:
        """A short form: nested layers would fill pages."""
        return (
            f"ModelSpec({self.architecture}, L={len(self.layers)}, E={self.embed}, V={self.vocab})"
        )

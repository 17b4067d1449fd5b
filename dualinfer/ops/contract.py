"""The ops contract: what the decoder asks of a backend's fused ops, and what they give.

A fused op is what one kernel can do in one reading of the weights. What surrounds a product (a norm
before it; bias, activation and residual after it) is an argument of it, its `Epilogue`. A backend
has plain ops, which are `plain` over its Maths, and ops by kernels. Over several devices the ops of
each see its share of the model, as `ModelSpec` describes it, and join the others where the contract
says so.

Here stand the ops that a kernel may take the place of, or that join the shares of several devices.
What else the decoder computes are functions of the files beside this one, over `Maths` and these
ops. Arrays are the backend's own. Matrices of the model are `Weight`s, which may be quantized: ops
alone know how they are held. Unless an op says otherwise, arrays have the model's dtype, results
have x's dtype, sums are made in float32, and no argument is written. What an op may overwrite its
caller reads no more; on a backend whose arrays are values nothing happens to it. Shapes by letter:
see `model/spec`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias

from ..model.spec import Activation, Attention, Experts, ModelSpec, Norm, Recurrence, Router
from ..model.weights import Leaf, Weight
from .caches import CacheView, CrossView, StateView
from .maths import KeyScoring, Maths
from .schemes import BlockArithmetic

Array: TypeAlias = Any
Weights: TypeAlias = Mapping[str, Leaf]


class Params(Protocol):
    """A model's weights: those outside the layers, and those of each layer, by name."""

    @property
    def outer(self) -> Weights:
        """The weights outside the layers."""
        ...

    @property
    def layers(self) -> Sequence[Weights]:
        """The weights of each layer; those of an encoder's layers follow."""
        ...

    def of_encoder(self, decoder: int) -> "Params":
        """The weights of the encoder, whose layers follow those of a `decoder` of so many."""
        ...


class NormOf(NamedTuple):
    """A norm with its weights.

    `made` says that a pass computes the weight, so that no kernel may read it before it waits.
    """

    spec: Norm
    weight: Array
    bias: Array | None
    made: bool = False

    @classmethod
    def named(cls, spec: Norm, w: Weights, name: str) -> "NormOf":
        """The norm whose weights begin with `name`."""
        return cls(spec, w[f"{name}.weight"], w.get(f"{name}.bias"))


class Epilogue(NamedTuple):
    """The operations that a product carries: residual + activation(norm(x) weight^T + bias).

    With `gated` the product holds gate, then up, and gives activation(gate) * up, half as wide. The
    residual has the result's shape; with `spend` it may be overwritten and become the result.
    `wide` asks for float32 results.
    """

    bias: Array | None = None
    norm: NormOf | None = None
    activation: Activation | None = None
    gated: bool = False
    residual: Array | None = None
    spend: bool = False
    wide: bool = False


ALONE = Epilogue()


class Seen(NamedTuple):
    """Real tokens of a batch, bool [B, T], and the sequence of each, int [B, T].

    None where all are, and where a row is one sequence.
    """

    mask: Array | None = None
    segments: Array | None = None


EVERY = Seen()


class Tokens(NamedTuple):
    """The arrays of sequences that a pass reads: NumPy's, or a backend's own.

    `ids` int [B, T], or None and `embeds` float [B, T, W], W as wide as the embedding, which come
    in the embedded ids' place; `positions` and `token_types` int [B, T], or [B, T, 5] where a
    token's box is behind its type; `blend` float32 [B or 1, T, P] says what positions are, as in
    `embedding.embed_given`. `mask` bool [B, T] is True where a token is real, None for everywhere;
    `segments` int [B, T] numbers the packed sequences of a row, which do not see each other.
    float32 `weights` [B, T] are those of the tokens that a head pools. int `kept` [K] are the
    tokens whose logits are asked for, None for all. Of an encoder-decoder these are the decoder's,
    and `source` is what its encoder reads: spectrograms float32 [B, 2 S, mel] are its embeddings.
    Where the encoder has run before, the source has `states` float [B, S, E], and it is not run.
    """

    ids: Array | None = None
    positions: Array | None = None
    mask: Array | None = None
    token_types: Array | None = None
    segments: Array | None = None
    embeds: Array | None = None
    weights: Array | None = None
    blend: Array | None = None
    kept: Array | None = None
    states: Array | None = None
    source: "Tokens | None" = None

    @property
    def seen(self) -> Seen:
        """The tokens that are real, and of which sequence."""
        return Seen(self.mask, self.segments)

    @property
    def shape(self) -> tuple[int, int]:
        """B and T, of what has positions."""
        assert self.positions is not None
        return self.positions.shape[0], self.positions.shape[1]

    def each(self, change: Callable[[Array], Array]) -> "Tokens":
        """Apply `change` to each array, the source's as well."""
        source = None if self.source is None else self.source.each(change)
        own: Any = (None if array is None else change(array) for array in self[:-1])
        return Tokens._make((*own, source))


class Projection(NamedTuple):
    """A projection of the model: its weight [out, in], and its bias [out] if it has one."""

    weight: Weight
    bias: Array | None = None

    @classmethod
    def named(cls, w: Weights, name: str) -> "Projection":
        """The projection whose weights begin with `name`."""
        return cls(w[f"{name}.weight"], w.get(f"{name}.bias"))


class Unnormed(NamedTuple):
    """A stream whose norm behind a sub-layer is still to be made: norm(y + residual).

    Both are [..., E]: what the sub-layer gave, and what it read; None where nothing is added.
    """

    y: Array
    residual: Array | None
    norm: NormOf


class LatentQkv(NamedTuple):
    """The input of latent attention in the place of packed queries, keys and values.

    Queries [B, T, H D], the turning elements at the end of each head, and what all heads share,
    [B, T, rank + turning], before its norm and its rotary embedding (`spec.Latent`).
    """

    queries: Array
    shared: Array


class Routing(NamedTuple):
    """The experts of each token, int32 [..., k], and their weights, float32 [..., k].

    Experts ascend by number, so that every backend sums in one order.
    """

    experts: Array
    weights: Array


class LayerAttention(NamedTuple):
    """The facts and weights that one layer's attention needs beside its projections.

    `frequencies` float32 [R/2] of its rotary embedding and `slopes` float32 [H] of its ALiBi are
    the spec's as arrays on the device; None where there are none, or where the ops make their own.
    Where each device has a share of heads that are normed as one, `whole` are the elements of all
    queries and keys, and the part that this one's keys have in a sum over devices. `bias` [H, 2M+1]
    is what is added to scaled scores of keys that lie -M to M tokens behind the query, or farther.
    `sinks` float32 [H] are logits that join the softmax of every query, and no value. `latent_norm`
    and `kv` are of latent attention: this weight [H (D - turning) + H value_dim, rank] makes each
    head's key, and then its value, of a latent vector, and is never quantized, since ops read it in
    two ways. `places` are the weights by which distances add to scores, as `spec.Distances` has it.
    """

    spec: Attention
    q_norm: NormOf | None = None
    k_norm: NormOf | None = None
    frequencies: Array | None = None
    slopes: Array | None = None
    whole: tuple[int, int, Array | float] | None = None
    bias: Array | None = None
    sinks: Array | None = None
    latent_norm: NormOf | None = None
    kv: Weight | None = None
    places: Any = None

    @property
    def scoring(self) -> KeyScoring:
        """How the layer scores keys."""
        a = self.spec
        rounded = a.scale if a.alibi_rounded else None
        return KeyScoring(a.scale, a.softcap, self.sinks, self.slopes, rounded, self.bias)

    @classmethod
    def named(
        cls,
        spec: Attention,
        w: Weights,
        outer: Weights,
        frequencies: Array | None = None,
        slopes: Array | None = None,
        whole: tuple[int, int, Array | float] | None = None,
    ) -> "LayerAttention":
        """The attention of the layer whose weights are `w`; `outer` are outside the layers."""
        q_norm, k_norm = (
            NormOf.named(spec.qk_norm, w, name) if spec.widened.qk_norm and spec.qk_norm else None
            for name in ("q_norm", "k_norm")
        )
        bias = w["relative_bias"] if spec.bias else None
        sinks = w.get("sinks")
        latent_norm = kv = None
        if spec.latent is not None:
            latent_norm, kv = NormOf.named(spec.latent.norm, w, "latent_norm"), w["kv.weight"]
        own = frequencies, slopes, whole, bias, sinks
        return cls(
            spec.widened,
            q_norm,
            k_norm,
            *own,
            latent_norm,
            kv,
            spec.places.weights(w, outer) if spec.places else None,
        )


class BlockOps(Protocol):
    """The ops that the decoder's blocks compute with."""

    @property
    def maths(self) -> Maths:
        """The functions that plain ops are written with."""
        ...

    @property
    def schemes(self) -> BlockArithmetic:
        """The products with the model's matrices, plain and quantized."""
        ...

    def span(self, name: str) -> AbstractContextManager[Any]:
        """A range by which profilers, and a compiled program, name the ops within."""
        ...

    def embed(
        self,
        spec: ModelSpec,
        w: Weights,
        ids: Array,
        positions: Array,
        token_types: Array | None,
    ) -> Array:
        """Embedded tokens [B, T, E] of int ids [B, T], summed over devices.

        int positions [B, T] and token types [B, T] count where the model has them; token types
        [B, T, 5] of a model with `boxes` have a token's box behind its type, which else is of
        zeros. The norm of a model that is `normed` over tokens alone is made here.
        """
        ...

    def sum(self, x: Array) -> Array:
        """The sum over devices of x, which may be overwritten; x itself where one has all."""
        ...

    def tokens(self, ids: Array, table: Weight) -> Array:
        """Rows [..., W] for int ids [...] of a table of which each device has some."""
        ...

    def norm(self, x: Array, norm: NormOf, residual: Array | None = None) -> Array:
        """`x` [..., E], plus the residual [..., E] if given, normed over the last axis."""
        ...

    def linear(self, x: Array, weight: Weight, epilogue: Epilogue = ALONE) -> Array:
        """x [..., in] times weight [out, in], with its epilogue: [..., out].

        The result is x's dtype, or float32 as the epilogue asks. The residual may be overwritten
        as it says.
        """
        ...

    def read(self, x: Unnormed, weight: Weight, epilogue: Epilogue) -> tuple[Array, Array]:
        """The product of the normed stream, as `linear`, and that stream itself [..., E].

        The epilogue has no norm of its own.
        """
        ...

    def row_product(self, x: Array, weight: Weight, epilogue: Epilogue = ALONE) -> Array:
        """As `linear`, where each device has a share of the columns: x [..., in/devices].

        Of the epilogue it knows bias, residual and spend; bias and residual are added once, after
        the sum over devices.
        """
        ...

    def partial_product(self, x: Array, weight: Weight) -> Array:
        """As `row_product` without an epilogue, before the sum over devices; perhaps in float32."""
        ...

    def route(
        self,
        x: Array,
        weight: Weight,
        router: Router,
        *,
        bias: Array | None = None,
        choice_bias: Array | None = None,
        norm: NormOf | None = None,
    ) -> Routing:
        """The experts that rows of norm(x) [..., E] choose by `weight` [X, E], as `Router` says.

        Logits, with a bias [X] plus that, and scores are computed in float32; float32 `choice_bias`
        [X] is added to scores for the choice alone.
        """
        ...

    def experts(
        self,
        x: Array,
        mixture: Experts,
        w: Weights,
        routing: Routing,
        epilogue: Epilogue = ALONE,
        partial: Array | None = None,
    ) -> Array:
        """residual + the sum of what the chosen experts make of norm(x) [..., E], by their weights.

        `w` has "experts.up.weight" [X, out, E], gate before up, and "experts.down.weight"
        [X, E, F], with biases [X, out] and [X, E] by such names if there are any. Each device has a
        share of F, or where devices share experts out some of X, whole or a share of F of each; the
        bias [X, E] is whole. A device computes what the chosen ones among its own give. `partial`
        [..., E], what a shared expert gives before the sum over devices, is added to each device's
        part. An expert of a number that is not there gives nothing. Sums are made in float32 in
        routing's order, and no value of an expert that a token did not choose reaches its result.
        Of the epilogue it knows norm, residual and spend; the residual is added once, after the
        sum over devices.
        """
        ...

    def adds_shared(self, x: Array, mixture: Experts, w: Weights) -> bool:
        """True if `experts` adds what the expert of all tokens makes of x, by `shared.*` of `w`.

        Else it comes as `partial`.
        """
        ...

    def add(self, x: Array, y: Array, norm: NormOf | None = None) -> Array:
        """x + y, of one shape; with a norm x + norm(y)."""
        ...

    def xielu(self, x: Array, numbers: Sequence[Array]) -> Array:
        """The activation xIELU of x, computed in float32; `numbers` by their names in `XIELU`."""
        ...

    def gather_logits(self, logits: Array) -> Array:
        """Logits [..., V] of each device's share of the vocabulary, in their dtype."""
        ...


class CacheRows(NamedTuple):
    """Rows of tokens that go on in slots of a layer's cache.

    Row b is tokens starts[b] to starts[b] + lengths[b] of the sequence in slots[b], all int [B]. No
    row has a token at place `reach` or behind; None says nothing.
    """

    cache: CacheView
    slots: Array
    starts: Array
    lengths: Array
    reach: int | None = None


class StateRows(NamedTuple):
    """The rows of a layer's cache of states that sequences are of, whose states it is to keep.

    These are the states after the first int `lengths` [B] tokens, in int `slots` [B]. With int
    `starts` [B] the rows are tokens of a sequence from there on, and one that does not start at 0
    goes on from the state that its slot has. All are None without a cache.
    """

    cache: StateView | None = None
    slots: Array | None = None
    lengths: Array | None = None
    starts: Array | None = None

    @property
    def held(self) -> Sequence[Array]:
        """The arrays of the cache; none without one."""
        return () if self.cache is None else self.cache.arrays

    @property
    def numbers(self) -> dict[str, Array | None]:
        """The rest by name, as kernels take it; none without a cache."""
        if self.cache is None:
            return {}
        return {"slots": self.slots, "lengths": self.lengths, "starts": self.starts}

    def after(self, held: Sequence[Array]) -> StateView | None:
        """The cache once it has these arrays."""
        return None if self.cache is None else self.cache.of(*held)


NO_ROWS = StateRows()


class Ops(BlockOps, Protocol):
    """All that a model's steps compute with: the blocks', attention and sampling.

    A state is the backend's own of sampling, a cache a view of one layer's keys and values.
    Where these are memory, ops write them in place and give the same objects back; where they are
    values, the result has taken their place.
    """

    @property
    def implementations(self) -> Mapping[str, str]:
        """The implementation of each op, for people."""
        ...

    def layer_attention(self, spec: ModelSpec, params: Any, index: int) -> LayerAttention:
        """Facts and arrays of the layer with this number that `attend` and `attend_token` need."""
        ...

    def angles(
        self, spec: ModelSpec, params: Any, positions: Array, last: Array | None = None
    ) -> Any:
        """Angles for `attend` and `attend_token`, of int positions [B, T], made once a pass.

        int `last` [B] is the position of each sequence's last token, by which its rotary embedding
        is chosen; None for the largest of its own positions.
        """
        ...

    def attend(
        self,
        layer: LayerAttention,
        qkv: Array | LatentQkv,
        angles: Any,
        seen: Seen = EVERY,
        *,
        positions: Array | None = None,
        cache: CacheView | None = None,
        slots: Array | None = None,
    ) -> tuple[Array, CacheView | None]:
        """Attention of whole sequences, packed qkv [B, T, (H+2K) D] to [B, T, H D], and the cache.

        For latent attention `qkv` is a pair, and the result [B, T, H value_dim].

        `qkv` may be overwritten. Tokens that are not `seen` nobody sees, and packed sequences,
        which are numbered from left to right, do not see each other; int `positions` [B, T] are
        what ALiBi counts, None for 0 to T-1. With a cache, keys and values are in the result from
        the start of its int `slots` [B].
        """
        ...

    def attend_rows(
        self,
        layer: LayerAttention,
        qkv: Array | LatentQkv,
        angles: Any,
        rows: CacheRows,
    ) -> tuple[Array, CacheView]:
        """Attention of rows of tokens that go on from what their slots have, and the cache.

        qkv [B, T, (H+2K) D], padded, gives [B, T, H D], or for latent attention a pair gives
        [B, T, H value_dim]. First all rows' keys and values go into the cache, padding's nowhere
        or behind their own; then each query reads its slot up to its own place. So rows of one
        slot may be side by side, in their order and whole but for the last. A row of a slot that
        there is not, on JAX and by kernels, gives what is finite. `qkv` may be overwritten.
        """
        ...

    def attend_token(
        self,
        layer: LayerAttention,
        qkv: Array | LatentQkv,
        angles: Any,
        cache: CacheView,
        lengths: Array,
        reach: int | None = None,
    ) -> tuple[Array, CacheView]:
        """Attention of one new token a slot, qkv [N, 1, (H+2K) D] to [N, 1, H D], and the cache.

        For latent attention `qkv` is a pair, and the result [N, 1, H value_dim].

        Slots are the cache's first N. A key and value are in the result at position lengths[n] of
        int `lengths` [N]; what a slot has from `reach` tokens on need not be read, None for all.
        """
        ...

    def recur(
        self,
        own: Recurrence,
        w: Weights,
        x: Array,
        seen: Seen = EVERY,
        rows: StateRows = NO_ROWS,
    ) -> tuple[Array, StateView | None]:
        """Run a layer's recurrence over whole projected sequences; return the result and the cache.

        x is [B, T, ...], and the result [B, T, width], before the projection back: see
        `spec.Recurrence`. Tokens that are not `seen` change no state, and packed sequences do not
        meet. With `rows` of a cache the states after these are in the result.
        """
        ...

    def recur_token(
        self, own: Recurrence, w: Weights, x: Array, cache: StateView, moves: Array
    ) -> tuple[Array | Unnormed, StateView]:
        """As `recur`, of one new token a slot, x [N, 1, ...], from the cache's states.

        Slots are the cache's first N; those that bool `moves` [N] leaves out stay as they are.
        """
        ...

    def attend_across(
        self,
        a: Attention,
        q: Array,
        kv: Array,
        mask: Array | None = None,
        *,
        cache: CrossView | None = None,
        slots: Array | None = None,
        lengths: Array | None = None,
    ) -> tuple[Array, CrossView | None]:
        """Attention of sequences to others, q [B, T, H D] to [B, T, H D], and the cache.

        kv [B, S, 2 K D] are the others' keys, then values; of these bool `mask` [B, S] shows at
        least one in each row, None all. With a cache the first `lengths` [B] of them are in the
        result, in its int `slots` [B].
        """
        ...

    def attend_kept(self, a: Attention, q: Array, cache: CrossView) -> Array:
        """Attention of one token a slot, q [N, 1, H D] to [N, 1, H D], to all that its slot keeps.

        Slots are the cache's first N. One that keeps nothing gives what is finite.
        """
        ...

    def sample(self, logits: Array, state: Any, position: Array, features: Any) -> Array:
        """The next tokens, int [N], from float32 logits [N, V]; `position` [N] is the tokens' own.

        `features` says which parts of sampling any row needs: SamplingFeatures, or what the backend
        makes of them. Rows that need none of a part are as without it.
        """
        ...

    def advance(
        self, logits: Array, state: Any, features: Any, out: Array, step: Array
    ) -> tuple[Any, Array, Array]:
        """Choose each active slot's next token from float32 logits [N, V]: state, `out`, `step`.

        The state has booked the token; row step[n] of int `out` [R, N] has it, or NO_TOKEN for a
        slot that is not active, and int `step` [N] grows by one. A slot's length is the position of
        the token before, which is in the cache by now, and grows by one. What is given may be
        overwritten.
        """
        ...

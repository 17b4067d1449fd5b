"""Describe a layer's cache: its kind, the arrays that it takes, and what ops know of it.

A cache has N slots, one for each sequence under way. How a kind lays out its arrays stands here,
so that bytes are counted without a framework; how it grows, writes and reads them in
`cache_kinds.py`, over Maths.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from ..arrays import numpy_dtype
from ..errors import OutOfMemoryError, UnsupportedError
from ..model.spec import Attention, ModelSpec, Recurrence, keeps_float32
from ..parallel.agreement import Peers

BLOCK = 64  # tokens of a block
_MANY = 2048  # tokens
CODE_DTYPES = {"fp8_e4m3": "uint8", "int8": "int8"}  # floats as the bytes that they are


@dataclass(frozen=True)
class CacheSpec:
    """One layer's cache: its kind, and the sizes of the keys and values that it keeps.

    Those of a latent one are of the one head that all query heads read: its value is the first
    `value_dim` elements of its key, and not kept twice.
    `codes` are "fp8_e4m3" or "int8" where it keeps codes (see `cache_codes`), else None. A state is
    of a `recurrence`, and has no keys and values; with `states` its float32 arrays are of that
    dtype. One in blocks has so many `blocks` for all slots by a table that is not its own, and one
    more; with 0 each slot has its own. One that `forgets` has a table of slots' last tokens alone.
    """

    kind: str
    kv_heads: int
    key_dim: int
    value_dim: int
    codes: str | None = None
    recurrence: Recurrence | None = None
    states: str | None = None
    blocks: int = 0
    forgets: bool = False

    @property
    def label(self) -> str:
        """The kind, and its codes or other dtype, for people."""
        held = self.codes or self.states
        return f"{self.kind} in {held}" if held else self.kind


class Buffer(NamedTuple):
    """One array of a layer's cache.

    Devices share its axis number `heads`, that of the KV heads; with None each has all of it.
    `dtype` None is the model's. New ones hold zeros, or what `first` makes of the shape.
    """

    shape: tuple[int, ...]
    heads: int | None = 1
    dtype: str | None = None
    first: Callable[[tuple[int, ...]], np.ndarray] | None = None


Layout = Callable[[CacheSpec, int, int], tuple[Buffer, ...]]


def full_layout(spec: CacheSpec, slots: int, tokens: int) -> tuple[Buffer, ...]:
    """Keys and values of every token, [N, K, S, D] each; of codes their scales, [N, K, S] each."""
    values, scales = _held(spec, slots, tokens)
    return values + scales


def blocks_layout(spec: CacheSpec, slots: int, tokens: int) -> tuple[Buffer, ...]:
    """Pools of keys and values, [blocks, K, BLOCK, D] each, and the table [N, blocks a slot].

    Of codes their scales are behind it, [blocks, K, BLOCK] each.
    """
    rows, table = _table(spec, slots, tokens)
    pools, scales = _held(spec, rows, BLOCK)
    return *pools, table, *scales


def _held(spec: CacheSpec, rows: int, tokens: int) -> tuple[tuple[Buffer, ...], tuple[Buffer, ...]]:
    """Keys and values, [rows, K, tokens, D] each, and the scales of codes, of the axes before D."""
    shape, dtype = (rows, spec.kv_heads, tokens), CODE_DTYPES.get(spec.codes or "")
    values = tuple(Buffer((*shape, d), dtype=dtype) for d in (spec.key_dim, spec.value_dim))
    return values, (Buffer(shape, dtype="float32"),) * 2 if dtype else ()


def latent_layout(spec: CacheSpec, slots: int, tokens: int) -> tuple[Buffer, ...]:
    """The vectors of a token that all heads share, [N, S, rank + turning], whole on each device."""
    return (Buffer((slots, tokens, spec.key_dim), heads=None),)


def latent_blocks_layout(spec: CacheSpec, slots: int, tokens: int) -> tuple[Buffer, ...]:
    """The same in pools [blocks, BLOCK, rank + turning], and the table [N, blocks a slot]."""
    rows, table = _table(spec, slots, tokens)
    return Buffer((rows, BLOCK, spec.key_dim), heads=None), table


def _table(spec: CacheSpec, slots: int, tokens: int) -> tuple[int, Buffer]:
    """The blocks of all slots, and the table [N, blocks a slot] that says whose they are."""
    each = -(-tokens // BLOCK)
    if spec.blocks:
        first = partial(np.full, fill_value=spec.blocks, dtype=np.int32)
        return spec.blocks + 1, Buffer((slots, each), None, "int32", first)
    return slots * each, Buffer((slots, each), None, "int32", block_table)


def cross_layout(spec: CacheSpec, slots: int, tokens: int) -> tuple[Buffer, ...]:
    """Keys and values of what an encoder gave, [N, K, S, D] each, and how many are real, [N]."""
    values, _ = _held(spec, slots, tokens)
    return *values, Buffer((slots,), None, "int32")


def state_layout(spec: CacheSpec, slots: int, tokens: int) -> tuple[Buffer, ...]:
    """The arrays that a recurrence keeps of all tokens so far, as it says itself."""
    assert spec.recurrence is not None
    own = spec.recurrence.layout(slots)
    if spec.states is None:
        return own
    return tuple(x._replace(dtype=spec.states) if x.dtype == "float32" else x for x in own)


# The arrays of each kind, for so many slots with room for so many tokens each.
LAYOUTS: dict[str, Layout] = {
    "full": full_layout,
    "blocks": blocks_layout,
    "cross": cross_layout,
    "latent": latent_layout,
    "latent_blocks": latent_blocks_layout,
    "state": state_layout,
}
IN_BLOCKS = {"full": "blocks", "latent": "latent_blocks"}  # kinds that may be, and are then
LATENTS = frozenset({"latent", "latent_blocks"})
WITH_SCALES = frozenset({"full", "blocks"})  # kinds that keep codes, too


def block_table(shape: Sequence[int], held: Sequence[int] = (0, 0)) -> np.ndarray:
    """A table int32 [N, blocks]; those beyond a table of shape `held` are new, in their order."""
    table = np.zeros(shape, np.int32)
    is_new = np.ones_like(table, bool)
    is_new[: held[0], : held[1]] = False
    table[is_new] = np.arange(table.size - is_new.sum(), table.size)
    return table


def kind_of(a: Attention) -> str:
    """The kind of the cache of causal attention. Layers with a window mask a full one."""
    if a.latent is not None:
        return "latent"
    return "full"


class KeptIn(NamedTuple):
    """The codes that keys and values are kept in, and the dtype of float32 states.

    None is as they are computed. These are the config's `kv_cache_dtype` and `state_dtype`.
    """

    codes: str | None = None
    states: str | None = None

    @classmethod
    def of(cls, config: Any) -> "KeptIn":
        """Read what an `InferenceConfig` asks for."""
        return cls(config.kv_cache_dtype, config.state_dtype)


AS_COMPUTED = KeptIn()


def cache_specs(spec: ModelSpec, kept: KeptIn = AS_COMPUTED) -> tuple[CacheSpec, ...]:
    """The caches of a causal model's layers.

    Caches are numbered as `ModelSpec.caches` has them: layers that share keys and values share one,
    and one with a recurrence has a state, which is never codes. Then the cross cache of each, in
    the model's dtype, where layers attend to an encoder's output.
    UnsupportedError where codes would change what the model answers.
    """
    codes, states = kept
    owners = [(spec.layers[i], part) for i, part in spec.caches]
    fine = [a.wiring.fine_key for a in spec.attentions if a.wiring is not None]
    if codes == "fp8_e4m3" and any(fine):
        raise UnsupportedError(
            f"kv_cache_dtype={codes!r}: an element of a key of {spec.architecture} is "
            f"{max(fine)}, which three bits of a fraction round too coarsely. Use 'int8', or leave "
            "it unset."
        )
    own = [
        CacheSpec(kind_of(layer.attending), *_sizes(layer.attending), codes)
        if part == "attention"
        else CacheSpec("state", 0, 0, 0, recurrence=layer.recurrence)
        for layer, part in owners
    ]
    own = [
        replace(x, states=states) if x.recurrence and keeps_float32(x.recurrence) else x
        for x in own
    ]
    cross = [CacheSpec("cross", *_sizes(layer.cross)) for layer in spec.layers if layer.cross]
    return *own, *cross


def _sizes(a: Attention) -> tuple[int, int, int]:
    if a.latent is not None:
        return 1, a.latent.width, a.latent.rank
    own = a.widened
    return own.kv_heads, own.head_dim, own.head_dim


def in_blocks(
    specs: Sequence[CacheSpec], blocks: int, near: int = 0, forgetting: Collection[int] = ()
) -> tuple[CacheSpec, ...]:
    """The caches of layers that have so many blocks for all slots; with 0 as they are.

    Those with numbers in `forgetting` have `near` ones, of the last tokens of each slot.
    UnsupportedError where one is of a kind that has no blocks.
    """
    if not blocks:
        return tuple(specs)
    if others := sorted({spec.kind for spec in specs} - {*IN_BLOCKS}):
        raise UnsupportedError(
            "A cache is counted in blocks where each layer keeps something of every token (kinds "
            f"{', '.join(IN_BLOCKS)}), and layers of this model keep caches of kind "
            f"{', '.join(others)}. Leave cache_tokens unset."
        )
    found = [replace(spec, kind=IN_BLOCKS[spec.kind], blocks=blocks) for spec in specs]
    for number in forgetting:
        found[number] = replace(found[number], blocks=near, forgets=True)
    return tuple(found)


def check_kinds(specs: Sequence[CacheSpec], known: Collection[str], backend: str) -> None:
    """Raise UnsupportedError for a kind that the backend has not, or that keeps no codes."""
    lacking = sorted({spec.kind for spec in specs} - {*known})
    if lacking:
        other = "torch" if backend == "jax" else "jax"
        raise UnsupportedError(
            f"backend={backend!r} has no cache of kind {', '.join(lacking)}, which layers of this "
            f"model keep (it has {', '.join(sorted(known))}). Use backend={other!r}."
        )
    for spec in specs:
        if spec.codes is not None and spec.kind not in WITH_SCALES:
            raise UnsupportedError(
                f"kv_cache_dtype={spec.codes!r}: layers of this model keep caches of kind "
                f"{spec.kind}, which has no scales of codes. Leave it unset."
            )


class Room(NamedTuple):
    """The size of caches: so many slots, with so many tokens each, and of what is encoded."""

    slots: int = 0
    tokens: int = 0
    encoded: int = 0

    def of(self, spec: CacheSpec) -> int:
        """Tokens of a slot in one layer's cache."""
        return self.encoded if spec.kind == "cross" else self.tokens

    def within(self, other: "Room") -> bool:
        """True if `other` has all of it."""
        return all(a <= b for a, b in zip(self, other, strict=True))

    def joined(self, other: "Room") -> "Room":
        """The least room that has both."""
        return Room(*map(max, self, other))


def for_one(specs: Sequence[CacheSpec], tokens: int) -> tuple[list[CacheSpec], Room]:
    """Caches that have what one sequence has of its first `tokens`, and their room: whole blocks.

    There is no table of these.
    """
    if any(spec.blocks for spec in specs):
        tokens = -(-tokens // BLOCK) * BLOCK
    alone = {kind: name for name, kind in IN_BLOCKS.items()}
    own = [replace(s, kind=alone[s.kind], blocks=0) if s.blocks else s for s in specs]
    return own, Room(1, tokens)


def buffers(spec: CacheSpec, slots: int, tokens: int) -> tuple[Buffer, ...]:
    """The arrays of one layer's cache."""
    return LAYOUTS[spec.kind](spec, slots, tokens)


def cache_bytes(specs: Sequence[CacheSpec], room: Room, itemsize: int) -> int:
    """Bytes of the caches of all layers; `itemsize` is that of the model's dtype."""
    return sum(
        prod(b.shape) * (itemsize if b.dtype is None else numpy_dtype(b.dtype).itemsize)
        for spec in specs
        for b in buffers(spec, room.slots, room.of(spec))
    )


def token_bytes(specs: Sequence[CacheSpec], itemsize: int) -> int:
    """Bytes that one token of a long sequence takes in the caches of all layers."""
    return (cache_bytes(specs, Room(1, _MANY), itemsize) - state_bytes(specs, itemsize)) // _MANY


def state_bytes(specs: Sequence[CacheSpec], itemsize: int) -> int:
    """Bytes of the states of one sequence, which do not grow with its tokens, in all layers."""
    return cache_bytes([own for own in specs if own.kind == "state"], Room(1), itemsize)


def no_room(
    room: Room, needed: int, free: int | None, where: str, blocks: int = 0
) -> OutOfMemoryError:
    """The error of a cache that `where`, a device, has no room for; sizes in bytes.

    With `blocks` it has so many for all sequences.
    """
    there = "an unknown number" if free is None else f"{free:,} ({free / 2**30:.2f} GiB)"
    beside = f", over {room.encoded} of an encoder," if room.encoded else ""
    if blocks:
        return OutOfMemoryError(
            f"A cache of {blocks * BLOCK:,} tokens for all sequences needs {needed:,} bytes "
            f"({needed / 2**30:.2f} GiB), and {there} are free on {where}. Reserve fewer "
            "cache_tokens, or 'auto' for as many as have room."
        )
    return OutOfMemoryError(
        f"A cache for {room.slots} sequences of {room.tokens} tokens{beside} needs {needed:,} "
        f"bytes ({needed / 2**30:.2f} GiB), and {there} are free on {where}. Ask for fewer "
        "sequences at a time or fewer new tokens, or set a smaller max_out_tokens."
    )


def check_room(
    peers: Peers, room: Room, needed: int, free: int | None, where: str, blocks: int = 0
) -> None:
    """Raise OutOfMemoryError if a cache of `needed` bytes has no room in the `free` ones.

    `blocks` are those of all sequences, 0 where each has its own room. All of `peers` must call it:
    where one has no room, it is raised in all.
    """
    said = peers.tell("Making a cache", needed=needed, free=free, where=where)
    for amounts in zip(said["needed"], said["free"], said["where"], strict=True):
        if amounts[1] is not None and amounts[0] > amounts[1]:
            raise no_room(room, *amounts, blocks)


class CacheView(Protocol):
    """One layer's cache as ops take it: N slots, with keys and values by position.

    Where arrays are memory, `write` and `append` change them and give the same view back; where
    they are values, the result has taken its place. Kernels reach into the arrays of the kinds
    that they know by name; everything else asks the view. For a latent cache K is 1, keys are what
    all heads share, and values are these, too.
    """

    @property
    def kind(self) -> str:
        """The name in the tables of kinds."""
        ...

    @property
    def codes(self) -> str | None:
        """The codes that keys and values are kept in, as in `CacheSpec`; None for none."""
        ...

    @property
    def capacity(self) -> int:
        """S, the tokens that a slot has room for."""
        ...

    def view(self, slots: int | None, tokens: int) -> Self:
        """The first `slots` slots, None for all, with room for `tokens` tokens each.

        Where arrays are values it is there to be read.
        """
        ...

    def kept(self, k: Any, v: Any) -> tuple[Any, Any]:
        """k and v [..., K, D] as `read` gives them back: of codes, what these mean in float32."""
        ...

    def write(self, slots: Any, k: Any, v: Any) -> Self:
        """The cache with k and v [B, T, K, D] of whole prompts from the start of int `slots` [B].

        What lies behind them is finite: a masked value still takes part in a product as 0 * value,
        and the sequence that had the slot before may have left others.
        """
        ...

    def extend(self, slots: Any, starts: Any, lengths: Any, k: Any, v: Any) -> Self:
        """The cache with k and v [B, T, K, D] of rows of tokens: see `contract.Ops.attend_rows`.

        Token t of row b is at place starts[b] + t of slot slots[b], if t is below lengths[b] and
        the slot has that place.
        """
        ...

    def append(self, k: Any, v: Any, lengths: Any) -> Self:
        """The cache with k and v [N, K, D] of one token a slot, at position lengths[n] of slot n.

        These are its first N slots. A full slot, of a sequence that has ended, overwrites its own
        last token.
        """
        ...

    def read(self, slots: Any = None) -> tuple[Any, Any]:
        """Keys and values [N, K, S, D] of every slot, by position; of codes what these mean.

        With int `slots` [B] theirs, [B, K, S, D], a copy.
        """
        ...


class CrossView(Protocol):
    """One layer's cross cache as ops take it: what each of N slots keeps of an encoder's output."""

    @property
    def kind(self) -> str:
        """The name in the tables of kinds."""
        ...

    @property
    def codes(self) -> str | None:
        """None: it keeps the model's dtype."""
        ...

    @property
    def capacity(self) -> int:
        """S, the places that a slot has room for."""
        ...

    @property
    def lengths(self) -> Any:
        """The number of real places of each slot, int [N]."""
        ...

    def view(self, slots: int | None, tokens: int) -> Self:
        """As `CacheView.view`."""
        ...

    def keep(self, slots: Any, k: Any, v: Any, lengths: Any) -> Self:
        """The cache with k and v [B, T, K, D] in int `slots` [B], of which `lengths` [B] are real.

        What lies behind them is finite.
        """
        ...

    def read(self) -> tuple[Any, Any]:
        """Keys and values [N, K, S, D] of every slot."""
        ...


class StateView(Protocol):
    """The states that one layer's recurrence keeps of N slots, as ops take them."""

    @property
    def kind(self) -> str:
        """The name in the tables of kinds."""
        ...

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays that the recurrence has laid out, a row a slot."""
        ...

    def of(self, *arrays: Any) -> Self:
        """The states with these arrays, of all slots."""
        ...

    def view(self, slots: int | None, tokens: int) -> Self:
        """As `CacheView.view`; states have no tokens."""
        ...

    def keep(self, slots: Any, *arrays: Any) -> Self:
        """The states with those of sequences, [B, ...] each, in int `slots` [B]."""
        ...

    def move(self, moves: Any, *arrays: Any) -> Self:
        """The states with new ones, [N, ...] each, of those first N slots that bool `moves` says.

        Another slot keeps its own: a step that is not its sequence's passes it over.
        """
        ...


def describe_caches(specs: Sequence[CacheSpec]) -> str:
    """The kinds of the layers' caches, for people; "" without any."""
    return ", ".join(dict.fromkeys(spec.label for spec in specs))


def served(
    by_kernels: Mapping[str, str],
    by_plain: Mapping[str, str],
    knows: Callable[[CacheSpec], bool] | None,
    specs: Sequence[CacheSpec],
    left_plain: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The implementation of each op, for people, where the layers' caches are `specs`.

    Kernels serve those that they know, plain ops all others, and the ops `left_plain` for what
    these say, "" for all; `knows` None: there are no kernels.
    """
    by_kernels = dict(by_kernels)
    for op, of_what in (left_plain or {}).items():
        plain = by_plain[op]
        by_kernels[op] = f"{by_kernels[op]}; {plain} {of_what}" if of_what else plain
    attended = [spec for spec in specs if spec.kind != "state"]
    if len(attended) == len(specs):
        by_kernels = {op: how for op, how in by_kernels.items() if op != "recurrence"}
    specs = attended
    by_kernels, by_plain = _with_latents(by_kernels, specs), _with_latents(by_plain, specs)
    if not any(spec.kind == "cross" for spec in specs):
        by_kernels = {op: how for op, how in by_kernels.items() if op != "cross_attention"}
    if knows is None or all(map(knows, specs)):
        return dict(by_kernels)
    others = ", ".join(sorted({spec.label for spec in specs if not knows(spec)}))
    rotary = f"{by_kernels['rotary']}; the append to a cache of kind {others} is plain"
    attention = f"{by_plain['decode_attention']} for a cache of kind {others}"
    if any(map(knows, specs)):
        attention = f"{by_kernels['decode_attention']}; {attention}"
    return {**by_kernels, "rotary": rotary, "decode_attention": attention}


def _with_latents(ops: Mapping[str, str], specs: Sequence[CacheSpec]) -> dict[str, str]:
    """The implementation of each op, attention to latent caches as decode_attention."""
    ops = dict(ops)
    latent, kinds = ops.pop("latent_attention"), {spec.kind for spec in specs}
    if kinds and kinds <= LATENTS:
        ops["decode_attention"] = latent
    elif kinds & LATENTS:
        ops["decode_attention"] += f"; {latent}"
    return ops

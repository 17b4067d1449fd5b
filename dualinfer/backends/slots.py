"""The host's book of a runner: which slots are live, how far their cache reaches, what they sample.

It is no part of the contract of `base`: a runner may do without it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import LengthError, StepError
from ..model.spec import ModelSpec
from ..ops.caches import CacheSpec, Room, in_blocks
from .base import GRAIN, NO_TOKEN, Piece, Pool, Request
from .blocks import PANEL, Blocks, Lying, books_of, checked

SMALLEST_CACHE = 64
RESERVED = 2048
PANELS = (256, 512, 1024, 2048, PANEL)  # tokens of the passes that read pieces into a pool
_MOST_MET = 1024  # tokens: products of DeepSeek-V2 Lite are 6 percent more so
_SMALLEST_REACH, _REACHES = 512, 4  # of steps over a pool, and how much farther the next goes


def bucket(count: int, smallest: int = 1) -> int:
    """The next power of two, at least `smallest`: a padded size that few executables serve."""
    return max(smallest, 1 << (max(count, 1) - 1).bit_length())


def bucket_of_rows(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, ...: for long rows, where a power of two adds many."""
    whole = bucket(count)
    return whole * 3 // 4 if whole > 2 and count <= whole * 3 // 4 else whole


class StateSize(NamedTuple):
    """The size of a state of slots: `eos` ids each, and whether tokens are hidden or weighed."""

    slots: int
    eos: int
    hides: bool = False
    weighs: bool = False

    def joined(self, other: "StateSize | None") -> "StateSize":
        """The smallest size that holds both."""
        if other is None:
            return self
        hides, weighs = self.hides or other.hides, self.weighs or other.weighs
        return StateSize(max(self.slots, other.slots), max(self.eos, other.eos), hides, weighs)


class LiveSlots:
    """The host's book of a runner's live slots: what each serves, and how far its cache may reach.

    A cache is reserved for RESERVED tokens of a sequence at first, and grows as steps are asked
    for: a request for many new tokens may end early. One with the room of a `pool` does not, which
    is as it was `asked` for; its slots take `blocks` of it where it counts in these. Steps over it
    may be `coarse`, see `part_of`.
    """

    def __init__(
        self,
        pool: Room | None = None,
        blocks: Blocks | None = None,
        asked: Pool | None = None,
        coarse: bool = False,
    ) -> None:
        self.pool, self.blocks, self.asked, self._coarse = pool, blocks, asked, coarse
        self._requests: dict[int, Request] = {}
        self._reach: dict[int, int] = {}
        self._reading: set[int] = set()
        self._chosen: set[int] = set()

    @classmethod
    def of(cls, pool: Pool, spec: ModelSpec, coarse: bool) -> "LiveSlots":
        """A new book of the slots of a pool."""
        return cls(room_of(pool, spec), books_of(pool, spec), pool, coarse)

    def parts(self) -> list[Room]:
        """The parts of the pool that steps see, the largest first."""
        return [] if self.pool is None else parts_of(self.pool, self._coarse)

    def __len__(self) -> int:
        """Number of live slots."""
        return len(self._requests)

    def check_idle(self) -> None:
        """Raise StepError where a slot is live: a pool is opened and closed without such."""
        if self._requests:
            raise StepError("A pool was opened or closed while sequences are under way.")

    @property
    def requests(self) -> list[Request]:
        """The requests being served."""
        return list(self._requests.values())

    @property
    def width(self) -> int:
        """Slots that a step over every live one covers: a bucket."""
        return bucket(max(self._requests) + 1)

    @property
    def reach(self) -> int:
        """Cached tokens of the longest sequence once the steps asked for have run, at most."""
        return max(self._reach.values())

    def reach_beside(self, slots: Collection[int]) -> int:
        """`reach` where these slots alone have stepped.

        The step writes the newest token of every other sequence as well, in its next place, to no
        effect: that place must be there, or the write would fall on the one before. What is read
        yet of a prompt has it.
        """
        others = [slot for slot in self._requests if slot not in {*slots, *self._reading}]
        next_places = (min(self._reach[s] + 1, self._requests[s].cache_tokens) for s in others)
        return max(self.reach, *next_places, 0)

    def reach_after(self, steps: Sequence[int], slots: Sequence[int]) -> int:
        """`reach_beside` once each of these slots has so many tokens more."""
        return max(self.reach_beside(slots), *self._after(steps, slots).values(), 0)

    @property
    def encoded(self) -> int:
        """The most places that one of them needs for what an encoder gives."""
        return max(request.encoded for request in self._requests.values())

    @property
    def weighs(self) -> bool:
        """True if one of them has a bias, or a penalty that counts."""
        return any(r.sampling.weighs for r in self._requests.values())

    @property
    def hides(self) -> bool:
        """True if some tokens may not be chosen in one of them."""
        return any(r.hidden or r.grammar is not None for r in self._requests.values())

    @property
    def reserved(self) -> int:
        """Cached tokens to have room for when a sequence starts."""
        return max(
            max(self._reach[slot], min(request.cache_tokens, RESERVED))
            for slot, request in self._requests.items()
        )

    def room(self, spec: ModelSpec, tokens: int) -> Room:
        """The part of a cache that a step over the live slots reads, for `tokens` of each."""
        if self.pool is not None:
            return part_of(self.pool, self.width, tokens, self._coarse)
        return Room(self.width, bucket(tokens, SMALLEST_CACHE), encoded_bucket(spec, self.encoded))

    def first_room(self, spec: ModelSpec) -> Room:
        """Room in a cache for the live slots to start in, or all that a pool has."""
        if self.asked is not None:
            return room_of(self.asked, spec, whole=True)
        return self.room(spec, self.reserved)

    def state_size(self) -> StateSize:
        """The size of a state for the live slots, and for all that a pool was asked for."""
        pool, eos = self.asked, max((1, *(len(r.eos_ids) for r in self.requests)))
        if pool is None:
            return StateSize(self.width, eos, self.hides, self.weighs)
        own = StateSize(pool.slots, eos, self.hides, self.weighs)
        return own.joined(StateSize(pool.slots, pool.eos, pool.hides, pool.weighs))

    def may_outgrow(self, tokens: int) -> bool:
        """True if a sequence that is half way through `tokens` cached ones may go on beyond."""
        return any(
            2 * self._reach[slot] >= tokens < request.cache_tokens
            for slot, request in self._requests.items()
        )

    def read(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Book requests by their first pieces, which are given back.

        A slot takes no step before its last one. LengthError for what a pool has no room for.
        """
        first = [piece for piece in pieces if piece.is_first]
        if any(not p.is_first and p.slot not in self._requests for p in pieces):
            raise StepError("A piece of a prompt came before the first one.")
        for piece in first:
            self._check(piece.request, piece.slot)
        if self.blocks is not None:
            self.blocks.cover({piece.slot: needed(piece) for piece in pieces})
        self._requests.update((piece.slot, piece.request) for piece in first)
        self._reach.update((piece.slot, len(piece.request.prompt)) for piece in first)
        self._reading |= {piece.slot for piece in pieces if not piece.ends}
        self._reading -= {piece.slot for piece in pieces if piece.ends}
        return first

    def _check(self, request: Request, slot: int) -> None:
        pool = self.pool
        if pool is None:
            return
        needed = Room(slot + 1, request.cache_tokens, request.encoded)
        if not needed.within(pool):
            beside = f" over {request.encoded} of an encoder" if request.encoded else ""
            raise LengthError(
                f"A sequence of {request.cache_tokens} tokens{beside} in slot {slot} has no room "
                f"in a pool of {pool.slots} slots of {pool.tokens} tokens. Ask for fewer new "
                "tokens or a shorter prompt, or open a larger pool."
            )

    def advance(self, steps: int | Sequence[int], slots: Sequence[int] | None = None) -> int:
        """Book steps, a number or one each, of these slots, or of all that the device chooses for.

        It is one of which the prompt has been read. Gives `reach_beside` then.
        """
        reached = self._after(steps, slots)
        if self.blocks is not None:
            near = {slot: (self._reach[slot], stop) for slot, stop in reached.items()}
            self.blocks.cover(reached, near)
        self._reach |= reached
        return self.reach_beside(reached)

    def begin_pass(self, rows: Sequence[Piece], goes_on: bool = True) -> None:
        """Give slots room for rows of a pass; one that `goes_on` reads what lies before them.

        Another one, of whole prompts, keeps what later passes will see.
        """
        if self.blocks is not None and self.blocks.near is not None:
            starts, stops = _bounds(rows)
            at = starts if goes_on else stops
            self._cover_near({slot: (at[slot], stop) for slot, stop in stops.items()})

    def end_pass(self, rows: Sequence[Piece]) -> None:
        """Take from slots what no pass behind these rows will see."""
        if self.blocks is not None and self.blocks.near is not None:
            self._cover_near({slot: (stop, stop) for slot, stop in _bounds(rows)[1].items()})

    def begin_drafts(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Give each of these slots room for so many tokens behind what it has."""
        starts = {slot: self._reach[slot] for slot in slots}
        stops = {s: starts[s] + count for s, count in zip(slots, counts, strict=True)}
        self._cover_near({slot: (starts[slot], stop) for slot, stop in stops.items()})

    def first_saved(self, tokens: int, start: int) -> tuple[int, int]:
        """The first blocks that are saved of so many tokens from one on.

        The second is that of layers that forget; 0 without such.
        """
        near = self.blocks.near.first(tokens) if self.blocks and self.blocks.near else 0
        return start // GRAIN, near

    def put_back(self, slot: int, tokens: int) -> None:
        """Give a slot the blocks for what was saved of so many tokens."""
        if self.blocks is not None:
            self.blocks.cover({slot: tokens}, {slot: (tokens, tokens)})

    def _cover_near(self, wanted: dict[int, tuple[int, int]]) -> None:
        if self.blocks is not None and self.blocks.near is not None:
            self.blocks.near.cover(wanted)

    @property
    def forgets(self) -> bool:
        """True if layers keep the last tokens of sequences alone."""
        return self.blocks is not None and self.blocks.near is not None

    def _after(
        self, steps: int | Sequence[int], slots: Sequence[int] | None = None
    ) -> dict[int, int]:
        """Cached tokens of these slots after so many steps, or of all that take part in them."""
        own = [*(self._requests.keys() - self._chosen)] if slots is None else slots
        counts = [steps] * len(own) if isinstance(steps, int) else steps
        return {
            slot: min(self._reach[slot] + count, self._requests[slot].cache_tokens)
            for slot, count in zip(own, counts, strict=True)
            if slot not in self._reading
        }

    def lacks(self, steps: int) -> int:
        """See `Runner.lacks`."""
        if self.blocks is None:
            return 0
        return max(0, self.blocks.more(self._after(steps)) - self.blocks.free)

    def choose(self, requests: Sequence[Request], slots: Sequence[int]) -> None:
        """Note that the caller chooses the tokens of requests, which get these slots.

        They take no step with others, and get all the blocks that they may come to need.
        """
        self._chosen.update(slots)
        if self.blocks is not None:
            pairs = zip(slots, requests, strict=True)
            self.blocks.cover({slot: request.cache_tokens for slot, request in pairs})

    def changed_tables(self, anew: bool = False) -> list[np.ndarray | None]:
        """Copies of the blocks' tables, if they have changed since the last copy, or `anew`.

        The second is that of layers that forget.
        """
        found: list[np.ndarray | None] = [None, None]
        for i, book in enumerate((self.blocks, self.blocks and self.blocks.near)):
            if book is not None and (anew or book.is_changed):
                book.is_changed = False
                found[i] = book.table.copy()
        return found

    def remove(self, slots: Sequence[int]) -> None:
        """Free slots; those that are free already stay so."""
        for slot in slots:
            self._requests.pop(slot, None)
            self._reach.pop(slot, None)
            self._reading.discard(slot)
            self._chosen.discard(slot)
            if self.blocks is not None:
                self.blocks.drop(slot)


class PooledSlots(ABC):
    """The slots of a runner on its device: `live` is the book, and a pool is `open` for them.

    `_plain` are the caches of the layers as rectangles, and `_knows` says which ones kernels read.
    """

    _spec: ModelSpec
    _plain: Sequence[CacheSpec]
    _knows: Callable[[CacheSpec], bool]
    live: LiveSlots

    def open(self, pool: Pool | None) -> None:
        """See `base.Runner`; without room nothing is open."""
        self.live.check_idle()
        lies = checked(pool, self._spec)
        blocks = 0 if pool is None else pool.blocks
        specs = in_blocks(self._plain, blocks, lies.near, lies.forgets)
        self._let_go()
        self._lay(specs, lies)
        if pool is None:
            return
        try:
            self._take(room_of(pool, self._spec, whole=True))
            coarse = all(own.kind in ("state", "cross") or self._knows(own) for own in specs)
            self.live = LiveSlots.of(pool, self._spec, coarse)
            self._reserve(idle=True)
        except BaseException:
            self.open(None)
            raise

    @abstractmethod
    def _let_go(self) -> None:
        """Let go of cache and state, and of what was made for these alone."""

    @abstractmethod
    def _lay(self, specs: Sequence[CacheSpec], lies: Lying) -> None:
        """Let what comes to be held be caches of these specs."""

    @abstractmethod
    def _take(self, room: Room) -> None:
        """Take what a cache of so much room needs, or see that it is there; OutOfMemoryError."""

    @abstractmethod
    def _reserve(self, idle: bool) -> None:
        """Have cache and state for what the live slots need to start; `idle`: none held before."""


def below(tokens: Sequence[np.ndarray]) -> tuple[np.ndarray, list[int]]:
    """Tokens [B, K] of several calls below one another, [N, most K], and how many each row has.

    Zeros stand behind them.
    """
    ids = np.zeros((sum(map(len, tokens)), max(own.shape[1] for own in tokens)), np.int64)
    row, counts = 0, []
    for own in tokens:
        ids[row : row + len(own), : own.shape[1]] = own
        row, counts = row + len(own), counts + [own.shape[1]] * len(own)
    return ids, counts


def needed(piece: Piece) -> int:
    """Cached tokens that a slot must have room for before a piece is read into it.

    Of embeddings these are all: such a sequence cannot be read again where others need its blocks.
    """
    return piece.stop if piece.request.embeds is None else piece.request.cache_tokens


def _bounds(rows: Sequence[Piece]) -> tuple[dict[int, int], dict[int, int]]:
    """The first token of each slot's rows, and the one behind the last."""
    starts = {row.slot: row.start for row in reversed(rows)}
    return starts, {row.slot: row.stop for row in rows}


def room_of(pool: Pool, spec: ModelSpec, whole: bool = False) -> Room:
    """Room in the caches of a pool: whole grains of tokens; the `whole` has the spare slots too."""
    tokens = -(-pool.tokens // GRAIN) * GRAIN
    slots = pool.slots + (pool.spare if whole else 0)
    return Room(slots, tokens, encoded_bucket(spec, pool.encoded or tokens))


def part_of(pool: Room, slots: int, tokens: int, coarse: bool = False) -> Room:
    """The part of a pool that a step reads: its first `slots` slots, of at most `tokens` each.

    Of a `coarse` one half the pool's tokens or more are all of them, for kernels that read what
    slots have: it would be a program more for each number of slots.
    """
    reach = _SMALLEST_REACH
    while reach < tokens:
        reach *= _REACHES
    most = pool.tokens if coarse and 2 * reach >= pool.tokens else min(reach, pool.tokens)
    return Room(min(bucket(slots), pool.slots), most, pool.encoded)


def parts_of(pool: Room, coarse: bool = False) -> list[Room]:
    """Every `part_of` that steps over a pool see, the largest first."""
    counts = [1 << i for i in range(pool.slots.bit_length())]
    reaches = [_SMALLEST_REACH * _REACHES**i for i in range(pool.tokens.bit_length())]
    every = [(n, tokens) for n in (*counts, pool.slots) for tokens in reaches]
    parts = [part_of(pool, *one, coarse) for one in every]
    return sorted(dict.fromkeys(parts), reverse=True)


def share_rows(spec: ModelSpec, ops: Any, pieces: Sequence[Piece]) -> bool:
    """True if rows of GRAIN tokens read these pieces with little more work than a row a piece.

    Where queries of few tokens meet latent vectors, each is multiplied with all of a vector. Of
    many, who see long sequences, that takes longer than to make keys and values of it first.
    """
    if all(a.latent is None for a in spec.attentions):
        return True
    return all(p.stop <= _MOST_MET or not ops.makes_keys(spec, p.stop - p.start) for p in pieces)


def in_grains(pieces: Sequence[Piece]) -> list[tuple[int, Piece]]:
    """The pieces, numbered, in parts of at most GRAIN tokens."""
    return [
        (i, Piece(p.request, p.slot, a, min(a + GRAIN, p.stop)))
        for i, p in enumerate(pieces)
        for a in range(p.start, p.stop, GRAIN)
    ]


def panel_for(tokens: int, most: int) -> int:
    """The panel that reads the first of so many `tokens`: all, if it is mostly full of them.

    A small one takes as long as a full one. It has at most `most` tokens, if there is such a one.
    """
    sizes = [size for size in PANELS if size <= most] or PANELS[:1]
    for i, size in enumerate(sizes):
        if tokens <= size and (i < 2 or 4 * tokens > 3 * size):
            return size
        if i and tokens < size:
            return sizes[i - 1]
    return sizes[-1]


class WeightRows(NamedTuple):
    """The arguments of `sampling.weigh` as few numbers: ids int32 and values float32 [B, K].

    `new` int32 [B, T] are tokens that count, `costs` float32 [B, 2] as there.
    """

    ids: np.ndarray
    values: np.ndarray
    new: np.ndarray
    costs: np.ndarray


def room_for(spec: ModelSpec, slots: int, tokens: int) -> Room:
    """A cache for `slots` sequences of `tokens` tokens, in buckets, whatever an encoder reads."""
    tokens = bucket(tokens, SMALLEST_CACHE)
    return Room(bucket(slots), tokens, encoded_bucket(spec, tokens))


def encoded_bucket(spec: ModelSpec, tokens: int) -> int:
    """Places of a cross cache for encoders' outputs of so many `tokens`; 0 without an encoder.

    Spectrograms and images have one length.
    """
    if spec.encoder is None:
        return 0
    return spec.encoder.one_length or bucket(tokens, SMALLEST_CACHE)


def unpacked(words: np.ndarray, vocab: int) -> np.ndarray:
    """bool [..., V] of the bits of uint32 `words` [..., V / 32], the lowest one first."""
    given = np.ascontiguousarray(words).view(np.uint8)
    return np.unpackbits(given, axis=-1, bitorder="little")[..., :vocab].view(bool)


def sampling_rows(requests: Sequence[Request], eos_width: int) -> dict[str, np.ndarray]:
    """The requests' sampling parameters as columns for device arrays.

    Keys are those of both backends' slot state; seeds split into 32-bit halves, int64 because
    torch has no arithmetic on uint32; `eos` [N, eos_width] is filled up with NO_TOKEN.
    """
    s = [r.sampling for r in requests]
    most = np.iinfo(np.int32).max
    eos = np.full((len(requests), eos_width), NO_TOKEN, np.int32)
    for i, r in enumerate(requests):
        eos[i, : len(r.eos_ids)] = r.eos_ids
    return {
        "noise": np.array([x.do_sample for x in s], bool),
        "temperature": np.maximum(
            np.array([x.temperature if x.do_sample else 1.0 for x in s], np.float32),
            np.finfo(np.float32).tiny,
        ),
        "top_k": np.array([min(x.top_k, most) if x.do_sample else 0 for x in s], np.int32),
        "top_p": np.array([x.top_p if x.do_sample else 1.0 for x in s], np.float32),
        "min_p": np.array([x.min_p if x.do_sample else 0.0 for x in s], np.float32),
        "penalty": np.array([x.repetition_penalty for x in s], np.float32),
        "seed_low": np.array([x.seed & 0xFFFFFFFF for x in s], np.int64),
        "seed_high": np.array([x.seed >> 32 & 0xFFFFFFFF for x in s], np.int64),
        "return_index": np.array([x.return_index for x in s], np.int64),
        "minimum": np.array([min(r.min_new_tokens, most) for r in requests], np.int32),
        "remaining": np.array([r.max_new_tokens for r in requests], np.int32),
        "eos": eos,
    }


def weight_rows(requests: Sequence[Request], new: np.ndarray | None = None) -> WeightRows:
    """The bias and the costs of B requests, and their `new` tokens [B, T], for `sampling.weigh`.

    Unset, these are the `generated` ones of their own tokens. Ids are filled up with NO_TOKEN.
    """
    biases = [r.sampling.bias for r in requests]
    width = bucket(max(map(len, biases)))
    ids = np.full((len(requests), width), NO_TOKEN, np.int32)
    values = np.zeros((len(requests), width), np.float32)
    for i, bias in enumerate(biases):
        for j, (token, value) in enumerate(bias):
            ids[i, j], values[i, j] = token, value
    if new is None:
        width = bucket(max(r.generated for r in requests))
        new = np.full((len(requests), width), NO_TOKEN, np.int32)
        for i, r in enumerate(requests):
            new[i, : r.generated] = r.tokens[len(r.tokens) - r.generated :]
    s = [r.sampling for r in requests]
    costs = np.array([(x.presence_penalty, x.frequency_penalty) for x in s], np.float32)
    return WeightRows(ids, values, new.astype(np.int32), costs)

"""The steps that are compiled, as pure functions of parameters, cache and state."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ... import decoder
from ...model.spec import ModelSpec
from ...ops import sampling
from ...ops.contract import CacheRows, StateRows, Tokens
from ..base import MAX_STEPS, NO_TOKEN
from ..slots import WeightRows
from .cache import Cache
from .forward import Forward
from .maths import MATHS
from .ops.plain import PlainOps
from .params import Params
from .sampler import SlotState, book, mark, mark_in

_BLOCK = 8


class Prompts(NamedTuple):
    """Prompts that a step reads, or pieces of them, a row each.

    These are `ids` [B, T], or `embeds` [B, T, W] in their place, for `slots` [B]. `rows` is the
    state of the prompts, whose lengths tell ids from padding behind them; what they have seen is
    filled in by the step. An encoder reads `source`, ids [B, S] and how many [B] are real. bool
    `first` [B, V] are tokens that no first one may be, beside those that a row hides. With `pieces`
    ids are rows of prompts' tokens from int `pieces[0]` [B] to their lengths; the prompts' own are
    `pieces[1]`, and a row that does not end one is not active. Where rows of one slot are side by
    side `pieces[2]` are the slots whose state the last of them is, and for others none. `weights`
    are those of the rows.
    """

    ids: jax.Array
    slots: jax.Array
    rows: SlotState
    source: tuple[jax.Array, jax.Array] | tuple[()] = ()
    first: jax.Array | None = None
    pieces: tuple[jax.Array, jax.Array, jax.Array] | tuple[()] = ()
    weights: WeightRows | None = None
    embeds: jax.Array | None = None


class PrefillOptions(NamedTuple):
    """The facts of a pass over prompts that its program is made for.

    It chooses first tokens, or gives logits where the host chooses (not `choose`). Where a source
    `is_encoded` the encoder has run before. No piece reaches place `reach`. One that `tells` gives
    what `sampling.tell` says of the tokens [1, B, 1 + 2 K] beside them.
    """

    choose: bool
    is_encoded: bool
    reach: int | None
    tells: bool


class Carry(NamedTuple):
    """The values that a step takes over and hands to the next one; `scratch` is the ops'.

    int32 `rows` [N] are the rows of `tokens` [R, N] that the next tokens go to, all the same; what
    is told of them goes to those of `told` [R, N, 1 + 2 K], None where nothing is.
    """

    cache: Cache
    state: SlotState
    scratch: Any
    tokens: jax.Array
    rows: jax.Array
    told: jax.Array | None


class Steps(Forward):
    """A model's prefill and decode beside its forward pass, to be traced.

    The last result of each is `ops.given_up()`. With `on_gpu` decode looks whether all have
    ended once in eight steps, and each time where fewer are left: on a GPU the look takes time.
    """

    def __init__(self, spec: ModelSpec, ops: PlainOps, on_gpu: bool = False) -> None:
        super().__init__(spec, ops, on_gpu)
        self.block = _BLOCK if on_gpu else 1

    @jax.named_scope("dualinfer")
    def prefill(
        self,
        params: Params,
        cache: Cache,
        state: SlotState,
        prompts: Prompts,
        mode: jax.Array | int,
        options: PrefillOptions,
        x: jax.Array | None = None,
        layers: range | None = None,
    ) -> tuple[Cache, SlotState | None, Any, jax.Array | None]:
        """Cache and state with `prompts` in their slots, and their first tokens [1, B].

        With `layers` a part of the pass, as in `forward`: before the last one x in the place of the
        tokens, and no state. What layers need of a source goes to the cache.
        """
        ids, slots, rows, source, first, pieces, weights, embeds = prompts
        ops = self.ops.using(self._scratch(params, ids.shape[0]))
        model = self.spec, params, ops
        filled: list[Any] = cache.opened()
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        starts, wholes, into = pieces or (None, rows.length, slots)
        counts = rows.length
        if starts is not None:
            positions, counts = positions + starts[:, None], counts - starts
        angles = ops.angles(self.spec, params, positions, wholes - 1)
        numbers = self.spec.cache_numbers

        def attend(i: int, qkv: jax.Array) -> jax.Array:
            layer, n = ops.layer_attention(self.spec, params, i), numbers[i]
            if starts is None:
                y, filled[n] = ops.attend(layer, qkv, angles, cache=filled[n], slots=slots)
            else:
                into = CacheRows(filled[n], slots, starts, counts, options.reach)
                y, filled[n] = ops.attend_rows(layer, qkv, angles, into)
            return y

        states = self.spec.state_numbers

        def recur(i: int, x: jax.Array) -> jax.Array:
            own, n = self.spec.layers[i].recurrence, states[i]
            assert own is not None
            where = StateRows(filled[n], slots, counts, starts)
            y, filled[n] = ops.recur(own, params.layers[i], x, rows=where)
            return y

        if embeds is not None:
            embeds = embeds.astype(params.outer["embed.weight"].dtype)
        across = None
        if source:
            across = self._across(params, ops, filled, slots, *source, options.is_encoded)
        mixers = decoder.Mixers(attend, across, recur)
        tokens = Tokens(ids, positions, embeds=embeds)
        y = decoder.hidden_states(*model, tokens, mixers, layers=layers, x=x)[-1]
        if self._goes_on(layers):
            return cache.holding(filled), None, y, ops.given_up()
        last = jnp.take_along_axis(y, (counts - 1)[:, None, None], axis=1)[:, 0]
        logits = decoder.logits(*model, last, wide=True)
        rows = rows._replace(seen=jnp.zeros(logits.shape, bool))
        if weights is not None:
            rows = rows.weighing(weights)
        scores = rows.shown(logits) if options.choose else rows._replace(bias=None).shown(logits)
        if first is not None:
            scores = jnp.where(first, -jnp.inf, scores)
        if not options.choose:
            rows = rows._replace(active=jnp.zeros_like(rows.active))
            return (
                cache.holding(filled),
                _merged(state, rows, into),
                scores,
                ops.given_up(),
            )
        real = jnp.arange(ids.shape[1]) < counts[:, None]
        given = jnp.where(real, ids, NO_TOKEN)
        if starts is None:
            seen = mark(rows.seen, given.T)
        else:
            anew = jnp.where(starts == 0, slots, len(state.seen))
            seen = mark_in(state.seen.at[anew].set(False, mode="drop"), slots, given)
            state, seen = state._replace(seen=seen), seen[slots]
        rows = rows._replace(seen=seen)
        token = ops.sample(scores, rows, rows.length, mode)
        moved = rows.active  # not of a prompt of which there is more
        new = jnp.where(moved, token, NO_TOKEN)
        rows = book(rows, token).counted(moved)
        rows = rows._replace(seen=mark(rows.seen, new[None]))
        state = _merged(state, rows, into)
        result: Any = token[None]
        if options.tells:
            result = result, sampling.tell(MATHS, logits, token)[None]
        return cache.holding(filled), state, result, ops.given_up()

    def _across(
        self,
        params: Params,
        ops: PlainOps,
        filled: list[Any],
        slots: jax.Array,
        source: jax.Array,
        lengths: jax.Array,
        is_encoded: bool,
    ) -> decoder.Attend:
        """Attention to what the encoder gives of `source`, which goes into the caches `filled`."""
        model, numbers = (self.spec, params, ops), self.spec.cross_numbers
        places = source.shape[1] // (1 if is_encoded else self._stride)
        at = jnp.broadcast_to(jnp.arange(places), (len(source), places))
        mask, dtype = None, params.outer["embed.weight"].dtype
        if not self.of_one_length:
            mask = at < lengths[:, None]
        if is_encoded:
            states = source.astype(dtype)
        else:
            ids, embeds = (source, None) if source.ndim == 2 else (None, source.astype(dtype))
            assert self.spec.encoder is not None
            if embeds is not None and self.spec.encoder.marks:
                mask = source[..., -1] > 0
                lengths = mask.sum(1, dtype=jnp.int32)
            states = decoder.encoded(*model, Tokens(ids, at, mask, embeds=embeds))[-1]

        def across(i: int, q: jax.Array) -> jax.Array:
            a = self.spec.layers[i].cross
            assert a is not None
            kv, n = decoder.cross_keys(params.layers[i], ops, states), numbers[i]
            how: Any = {"cache": filled[n], "slots": slots, "lengths": lengths}
            y, filled[n] = ops.attend_across(a, q, kv, mask, **how)
            return y

        return across

    @jax.named_scope("dualinfer")
    def decode(
        self,
        params: Params,
        cache: Cache,
        state: SlotState,
        limits: jax.Array,
        tells: bool = False,
    ) -> tuple[Cache, SlotState, Any, jax.Array | None]:
        """Tokens for each active slot, [MAX_STEPS, N]; ends when all have ended.

        `limits` int32 [2] holds the most steps to take, and the mode of sampling. One that `tells`
        gives [MAX_STEPS, N, 1 + 2 K] beside them, as `prefill`.
        """
        steps, mode = limits

        def loop(served: jax.Array | int, more: jax.Array | bool, carry: Carry) -> Carry:
            """Steps of one mode, while `more` and slots are active."""

            @jax.jit  # so that the two loops have one body, traced and lowered once
            def step(carry: Carry) -> Carry:
                return self._step(params, served, carry)

            def several(carry: Carry) -> Carry:
                return jax.lax.fori_loop(0, self.block, lambda _, inner: step(inner), carry)

            def unfinished(carry: Carry, count: int = 1) -> jax.Array:
                return (carry.rows[0] + count <= steps) & carry.state.active.any() & more

            if self.block > 1:
                carry = jax.lax.while_loop(partial(unfinished, count=self.block), several, carry)
            return jax.lax.while_loop(unfinished, step, carry)

        carry = self._carry(params, cache, state, MAX_STEPS, tells)
        if self.ops.modes:
            # Loops one after the other: a branch around them would copy the cache.
            lower = -1
            for served in self.ops.modes:
                carry = loop(served, (mode > lower) & (mode <= served), carry)
                lower = served
        else:
            carry = loop(mode, True, carry)
        return self._ended(carry)

    def _carry(
        self, params: Params, cache: Cache, state: SlotState, steps: int, tells: bool
    ) -> Carry:
        """The values before the first of so many steps."""
        slots, told = state.active.shape[0], None
        if tells:
            width = 1 + 2 * min(sampling.TOP, self.spec.vocab)
            told = jnp.zeros((steps, slots, width), jnp.float32)
        tokens = jnp.full((steps, slots), NO_TOKEN, jnp.int32)
        rows = jnp.zeros(slots, jnp.int32)
        return Carry(cache, state, self._scratch(params, slots), tokens, rows, told)

    def _ended(self, carry: Carry) -> tuple[Cache, SlotState, Any, jax.Array | None]:
        """The results of steps: cache and state, and the tokens, with what is told of them."""
        ops, tokens = self.ops.using(carry.scratch), carry.tokens
        result = tokens if carry.told is None else (tokens, carry.told)
        return carry.cache, ops.ended(carry.state, tokens), result, ops.given_up()

    @jax.named_scope("dualinfer")
    def decode_one(
        self,
        params: Params,
        cache: Cache,
        state: SlotState,
        mode: jax.Array,
        x: jax.Array | None = None,
        layers: range | None = None,
        *,
        part: tuple[int, int] | None = None,
        tells: bool = False,
    ) -> tuple[Cache, SlotState | None, Any, jax.Array | None]:
        """One token for each active slot, [1, N], without a loop.

        `layers` and `tells` as in `prefill`.
        To run a loop the host waits for the device; this it leaves behind, and hands out tokens.
        With `part` N are the first slots alone, of which none has more tokens than it says.
        """
        whole, (state, reach) = state, _part_of(state, part)
        carry = self._carry(params, cache, state, 1, tells)
        if self._goes_on(layers):
            ops = self.ops.using(carry.scratch)
            cache, x = self._token(params, ops, cache, state, x, layers, reach=reach)
            return cache, None, x, ops.given_up()
        carry = self._step(params, mode, carry, x, layers, reach)
        cache, state, result, flags = self._ended(carry)
        return cache, _with_part(whole, state), result, flags

    @jax.named_scope("dualinfer")
    def decode_scores(
        self,
        params: Params,
        cache: Cache,
        state: SlotState,
        chosen: jax.Array,
        x: jax.Array | None = None,
        layers: range | None = None,
        *,
        part: tuple[int, int] | None = None,
    ) -> tuple[Cache, SlotState | None, jax.Array, jax.Array | None]:
        """Logits float32 [N, V] after the tokens `chosen` [N], NO_TOKEN for other slots' own.

        `layers` as in `prefill`, `part` as in `decode_one`.
        """
        whole, (state, reach) = state, _part_of(state, part)
        is_chosen = chosen != NO_TOKEN
        state = state._replace(last=jnp.where(is_chosen, chosen, state.last))
        ops = self.ops.using(self._scratch(params, chosen.shape[0]))
        cache, x = self._token(params, ops, cache, state, x, layers, is_chosen, reach)
        if self._goes_on(layers):
            return cache, None, x, ops.given_up()
        scores = decoder.logits(self.spec, params, ops, x[:, 0], wide=True)
        state = state._replace(length=state.length + is_chosen.astype(jnp.int32))
        return cache, _with_part(whole, state), scores, ops.given_up()

    @jax.named_scope("dualinfer")
    def decode_several(
        self,
        params: Params,
        cache: Cache,
        state: SlotState,
        ids: jax.Array,
        slots: jax.Array,
        *,
        reach: int,
        keeps: bool,
    ) -> tuple[Cache, SlotState, jax.Array, jax.Array | None]:
        """Logits float32 [B, K, V] after each of ids [B, K], which go on from what `slots` have.

        The first `ids[:, -1]` of a row are real, and there is a column more for that. None reaches
        place `reach`. It `keeps` them, or gives back lengths and states of recurrences as they are.
        """
        ids, counts = ids[:, :-1], ids[:, -1]
        ops = self.ops.using(self._scratch(params, ids.shape[0]))
        model = self.spec, params, ops
        filled: list[Any] = cache.opened()
        starts = state.length[slots]
        positions = jnp.arange(ids.shape[1]) + starts[:, None]
        angles = ops.angles(self.spec, params, positions, positions[:, -1])
        numbers, states = self.spec.cache_numbers, self.spec.state_numbers

        def attend(i: int, qkv: jax.Array) -> jax.Array:
            layer, n = ops.layer_attention(self.spec, params, i), numbers[i]
            into = CacheRows(filled[n], slots, starts, counts, reach)
            y, filled[n] = ops.attend_rows(layer, qkv, angles, into)
            return y

        def recur(i: int, x: jax.Array) -> jax.Array:
            own, n = self.spec.layers[i].recurrence, states[i]
            assert own is not None
            where = StateRows(filled[n], slots, counts, starts)
            y, kept = ops.recur(own, params.layers[i], x, rows=where)
            if keeps:
                filled[n] = kept
            return y

        x = None
        if states or not keeps:  # keys and values that are to be kept are there
            mixers = decoder.Mixers(attend, recur=recur)
            x = decoder.hidden_states(*model, Tokens(ids, positions), mixers)[-1]
        scores = jnp.zeros((*ids.shape, 0))
        if keeps:
            last = jnp.take_along_axis(ids, counts[:, None] - 1, axis=1)[:, 0]
            state = state._replace(
                length=state.length.at[slots].add(counts), last=state.last.at[slots].set(last)
            )
        else:
            assert x is not None
            flat = decoder.logits(*model, x.reshape(-1, x.shape[-1]), wide=True)
            scores = flat.reshape(*ids.shape, -1)
            # A step of others writes the last token of every slot anew, in its next place.
            state = state._replace(last=state.last.at[slots].set(ids[:, 0]))
        return cache.holding(filled), state, scores, ops.given_up()

    def _step(
        self,
        params: Params,
        mode: jax.Array | int,
        carry: Carry,
        x: jax.Array | None = None,
        layers: range | None = None,
        reach: int | None = None,
    ) -> Carry:
        """One token for each active slot, and what `sampling.tell` says of it where it is told."""
        cache, state, scratch, tokens, rows, told = carry
        ops = self.ops.using(scratch)
        cache, x = self._token(params, ops, cache, state, x, layers, reach=reach)
        logits = decoder.logits(self.spec, params, ops, x[:, 0], wide=True)
        moved = state.active
        row = None if told is None else rows[0]
        state, tokens, rows = ops.advance(state.shown(logits), state, mode, tokens, rows)
        if told is not None:
            told = told.at[row].set(sampling.tell(MATHS, logits, state.last))
        return Carry(cache, state.counted(moved), ops.scratch, tokens, rows, told)

    def _token(
        self,
        params: Params,
        ops: PlainOps,
        cache: Cache,
        state: SlotState,
        x: jax.Array | None,
        layers: range | None,
        moves: jax.Array | None = None,
        reach: int | None = None,
    ) -> tuple[Cache, jax.Array]:
        """The cache with each slot's last token, and what the last of `layers` gives [N, 1, E].

        Slots are the cache's first N, of which none has more than `reach` tokens. States of
        recurrences change in the slots that bool `moves` [N] says, None for active ones.
        """
        model = self.spec, params, ops
        filled: list[Any] = cache.opened()
        ids, positions = state.last[:, None], state.length[:, None]
        angles = ops.angles(self.spec, params, positions, state.length)
        numbers, crossing = self.spec.cache_numbers, self.spec.cross_numbers

        def attend(i: int, qkv: jax.Array) -> jax.Array:
            layer, n = ops.layer_attention(self.spec, params, i), numbers[i]
            y, filled[n] = ops.attend_token(layer, qkv, angles, filled[n], state.length, reach)
            return y

        def across(i: int, q: jax.Array) -> jax.Array:
            a = self.spec.layers[i].cross
            assert a is not None
            return ops.attend_kept(a, q, filled[crossing[i]])

        states, moves = self.spec.state_numbers, state.active if moves is None else moves

        def recur(i: int, x: jax.Array) -> jax.Array:
            own, n = self.spec.layers[i].recurrence, states[i]
            assert own is not None
            y, filled[n] = ops.recur_token(own, params.layers[i], x, filled[n], moves)
            return y

        mixers, tokens = decoder.Mixers(attend, across, recur), Tokens(ids, positions)
        y = decoder.hidden_states(*model, tokens, mixers, layers=layers, x=x)[-1]
        return cache.holding(filled), y


def _part_of(state: SlotState, part: tuple[int, int] | None) -> tuple[SlotState, int | None]:
    """The rows of a part of the slots, and the reach of all of them; without one the whole."""
    if part is None:
        return state, None
    count, reach = part
    return jax.tree.map(lambda column: column[:count], state), reach


def _with_part(whole: SlotState, part: SlotState) -> SlotState:
    """The whole state with the rows of its first slots."""
    count = len(part.active)
    if count == len(whole.active):
        return part
    return jax.tree.map(lambda rows, own: rows.at[:count].set(own), whole, part)


def _merged(state: SlotState, rows: SlotState, slots: jax.Array) -> SlotState:
    """The state with `rows` in `slots`; those of slots that there are not are dropped."""
    merged: dict[str, Any] = {
        name: None if column is None else column.at[slots].set(getattr(rows, name), mode="drop")
        for name, column in state._asdict().items()
    }
    return SlotState(**merged)

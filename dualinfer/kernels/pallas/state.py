"""A token of each sequence put into the states of its heads, which are read and written once."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .launch import BUDGET, Block, held_bytes, run

_BLOCK = 1 << 20  # bytes of states that a program has
_ROWS = 8  # heads of a tile of float32


def heads_of(heads: int, shape: tuple[int, ...]) -> int:
    """Heads of a program, which divide `heads`, of states of a shape; 0 if there is no room."""
    sizes = [n for n in range(heads, 0, -1) if heads % n == 0 and (n % _ROWS == 0 or n == heads)]
    held = {n: held_bytes((n, *shape), jnp.float32) for n in sizes}
    count = next((n for n in sizes if held[n] <= _BLOCK), sizes[-1])
    # Twice each of states before and behind, and what becomes of them on the way.
    return count if 8 * held[count] <= BUDGET else 0


def serves(state: Any) -> bool:
    """True if the kernel takes states [N, H, any, any], of which it has some heads at a time."""
    known = state.dtype in (jnp.float32, jnp.bfloat16)
    return state.ndim == 4 and known and heads_of(*_sizes(state)) > 0


def take_in(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    steps: jax.Array | None,
    decays: jax.Array,
    state: jax.Array,
    moves: jax.Array,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """See `recurrences.take_in`, of a `StateStep`'s arrays and states of N sequences or more.

    States take the memory of those given. Where bool `moves` [N] says no they stay as they are, as
    do those behind N.
    """
    count, groups, each, width = values.shape
    heads, size = groups * each, queries.shape[-1]
    own = heads_of(*_sizes(state))
    shared = each % own == 0  # all heads of a program have one key
    names, inputs = [], []

    def add(name: str, x: jax.Array) -> None:
        """Numbers of each head, [N, G, R, any], or of each group, [N, G, any]."""
        names.append(name)
        if x.ndim == 3 and shared:
            shape = (None, 1, 1, x.shape[-1])
            by = each // own
            inputs.append(Block(x[:, :, None], shape, lambda n, h, *_: (n, _div(h, by), 0, 0)))
            return
        if x.ndim == 3:
            x = jnp.repeat(x, each, 1)
        x = x.reshape(count, heads, -1)
        inputs.append(Block(x, (None, own, x.shape[-1]), lambda n, h, *_: (n, h, 0)))

    add("queries", queries)
    add("keys", keys)
    add("values", values)
    # As wide as a key, since a row of one number takes as much memory as one of LANES.
    add("decays", jnp.broadcast_to(jnp.exp(decays), (count, groups, each, size)))
    if steps is not None:
        add("steps", jnp.broadcast_to(steps[..., None], values.shape))
    held = Block(state, (None, own, *state.shape[2:]), lambda n, h, *_: (n, h, 0, 0))

    def body(moves: Any, *refs: Any) -> None:
        ref = dict(zip([*names, "state", "out", "new"], refs, strict=True))
        given = {name: ref[name][...] for name in names}
        for name in ("queries", "keys"):
            if shared:
                given[name] = given[name][0]
        old, value = ref["state"][...].astype(jnp.float32), given["values"]
        if steps is None:
            decayed = old * given["decays"][:, None, :]
            new = decayed + value[:, :, None] * given["keys"][:, None, :]
            y = (new * given["queries"][:, None, :]).sum(-1)
        else:
            decayed, key = old * given["decays"][:, :, None], given["keys"][:, :, None]
            u = (value - (decayed * key).sum(1)) * given["steps"]
            new = decayed + key * u[:, None, :]
            y = (new * given["queries"][:, :, None]).sum(1)
        ref["out"][...] = y
        kept = jnp.where(moves[pl.program_id(0)] != 0, new, old)
        ref["new"][...] = kept.astype(state.dtype)

    out = jax.ShapeDtypeStruct((count, heads, width), jnp.float32)
    y, state = run(
        body,
        "state",
        (count, heads // own),
        [*inputs, held],
        [Block(out, (None, own, width), lambda n, h, *_: (n, h, 0)), held],
        prefetch=[moves.astype(jnp.int32)],
        changes={len(inputs): 1},
        parallel=[True, True],
        between=4 * held_bytes(held.shape, jnp.float32),
        flops=(6 if steps is None else 8) * count * math.prod(state.shape[1:]),
        interpret=interpret,
    )
    return y, state


def _sizes(state: Any) -> tuple[int, tuple[int, ...]]:
    return state.shape[1], tuple(state.shape[2:])


def _div(a: Any, b: int) -> Any:
    return jax.lax.div(a, jnp.int32(b))

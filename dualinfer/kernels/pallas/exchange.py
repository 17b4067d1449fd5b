"""Small sums and gathers over the GPUs of one process, each in one launch, by peer-to-peer writes.

The protocol is that of kernels/triton/exchange.py: a rank writes 64-bit words, a float32 and the
number of the exchange, into every rank's memory, and waits until those in its own have that number;
two sets of words take turns. Who is at exchange n + 2 has seen words of n + 1 of every rank, which
each writes once its kernel of n has ended. What differs: each element counts its own exchanges, so
that no program waits for another one of its launch; and a rank writes to itself as to the others.

One thread has one element, and one piece of PTX does all that touches mailboxes. Pallas takes it
for a function without effects, so that exchanges must depend on one another by data: `counters`,
which is any array, goes through each of them, aliased and untouched.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .launch import assembly, cdiv, launch, load, program, store

_WARPS = 4
BLOCK = 32 * _WARPS  # a thread each: an element that two had would count its exchanges twice
_NAN = "0x7fc00000"


class Mailboxes(NamedTuple):
    """What the mailboxes of `size` ranks are like; `capacity` elements are a multiple of BLOCK.

    One is a rank's memory, zeros at first: numbers uint32 [capacity], of exchanges done; whether
    one was given up, uint32 in 256 bytes; words uint64 [2, ranks, capacity]. A rank polls
    `patience` times, then gives up: that value and all later ones are NaN, and nothing waits.
    """

    size: int
    capacity: int
    patience: int

    @property
    def flag(self) -> int:
        """Where it says whether an exchange was given up, in bytes."""
        return 4 * self.capacity

    @property
    def words(self) -> int:
        """Where the words begin, in bytes."""
        return self.flag + 256

    @property
    def bytes(self) -> int:
        """How large one is."""
        return self.words + 16 * self.size * self.capacity

    def table(self, addresses: Sequence[int]) -> np.ndarray:
        """int32 [ranks, 3 + 2 ranks] of all mailboxes' addresses; a rank's kernels take its row.

        The rank, its own address, then every rank's, each the low word first.
        """
        rows = [
            [rank, *(word for a in (own, *addresses) for word in (a & 0xFFFFFFFF, a >> 32))]
            for rank, own in enumerate(addresses)
        ]
        return np.array(rows, np.uint32).view(np.int32)


def sum_ranks(
    x: jax.Array,
    row: jax.Array,
    mailboxes: Mailboxes,
    counters: jax.Array,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """residual + the sum of every rank's x [..., width] + bias [width]; and `counters`.

    In `dtype`, x's by default. Added in float32, in one order, and rounded once: every rank gets
    the same bits. All ranks call it with arrays of one shape; `row` is this one's of the table.
    """
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual is {residual.shape}; {x.shape} is expected.")
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ValueError(f"bias is {bias.shape}; {x.shape[-1:]} is expected.")
    count, width = x.size, x.shape[-1]
    flat = [None if a is None else a.reshape(-1) for a in (x, bias, residual)]
    kernel = _sum_kernel(mailboxes, count, width)
    y, counters = _launch(kernel, flat, row, mailboxes, counters, count, dtype or x.dtype)
    return y.reshape(x.shape), counters


def gather_ranks(
    x: jax.Array, row: jax.Array, mailboxes: Mailboxes, counters: jax.Array, columns: int
) -> tuple[jax.Array, jax.Array]:
    """The first `columns` of all ranks' x [..., width] side by side; and `counters`.

    Every rank has some of them, so that none ends before all have begun. Values go through
    float32. All ranks call it; `row` as above.
    """
    width, rows = x.shape[-1], x.size // x.shape[-1]
    if not (mailboxes.size - 1) * width < columns <= mailboxes.size * width:
        raise ValueError(
            f"x is {x.shape}; {columns} columns are not some of each of {mailboxes.size} ranks."
        )
    kernel, count = _gather_kernel(mailboxes, rows, width, columns), rows * columns
    y, counters = _launch(kernel, [x.reshape(-1)], row, mailboxes, counters, count, x.dtype)
    return y.reshape(*x.shape[:-1], columns), counters


def given_up(row: jax.Array, mailboxes: Mailboxes, counters: jax.Array) -> jax.Array:
    """int32 [1]: not 0 once this rank gave up an exchange of those that `counters` went through."""
    out = [jax.ShapeDtypeStruct((1,), jnp.int32)]
    return launch(_check_kernel(mailboxes), (1,), row, counters, out=out, warps=1)[0]


def _launch(
    kernel: Any,
    arrays: list[jax.Array | None],
    row: jax.Array,
    mailboxes: Mailboxes,
    counters: jax.Array,
    count: int,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    if not 0 < count <= mailboxes.capacity or mailboxes.capacity % BLOCK:
        raise ValueError(
            f"An exchange of {count} values: 1 to {mailboxes.capacity}, a multiple of {BLOCK}, are "
            "expected."
        )
    if row.shape != (3 + 2 * mailboxes.size,) or row.dtype != jnp.int32:
        raise ValueError(
            f"row is {row.dtype} {row.shape}; int32 ({3 + 2 * mailboxes.size},) is expected."
        )
    out = [
        jax.ShapeDtypeStruct((count,), dtype),
        jax.ShapeDtypeStruct(counters.shape, counters.dtype),
    ]
    aliases = {len(arrays) + 1: 1}
    grid = (cdiv(count, BLOCK),)
    y, counters = launch(
        kernel, grid, *arrays, row, counters, out=out, warps=_WARPS, aliases=aliases
    )
    return y, counters


@cache
def _sum_kernel(mailboxes: Mailboxes, count: int, width: int) -> Callable[..., None]:
    text = protocol(mailboxes)

    def _exchange_sum_kernel(
        x_ref: Any, bias_ref: Any, residual_ref: Any, row_ref: Any, _: Any, y_ref: Any, __: Any
    ) -> None:
        at, inside = _elements(count)
        own = load(x_ref, (at,), inside).astype(jnp.float32)
        # Fetched before, since nothing is moved across the exchange.
        added = [
            load(ref, (where,), inside).astype(jnp.float32)
            for ref, where in ((bias_ref, at % width), (residual_ref, at))
            if ref is not None
        ]
        total = assembly(text, jnp.float32, own, at, *_addresses(row_ref, mailboxes.size))
        for term in added:
            total = total + term
        store(y_ref, (at,), total, inside)

    return _exchange_sum_kernel


@cache
def _gather_kernel(
    mailboxes: Mailboxes, rows: int, width: int, columns: int
) -> Callable[..., None]:
    text = protocol(mailboxes, gathers=True)

    def _exchange_gather_kernel(x_ref: Any, row_ref: Any, _: Any, y_ref: Any, __: Any) -> None:
        at, inside = _elements(rows * columns)
        column = at % columns
        owner = column // width
        place = at // columns * width + column % width
        own = load(x_ref, (place,), inside).astype(jnp.float32)  # which only the owner sends
        words = _addresses(row_ref, mailboxes.size)
        store(y_ref, (at,), assembly(text, jnp.float32, own, at, *words, owner), inside)

    return _exchange_gather_kernel


@cache
def _check_kernel(mailboxes: Mailboxes) -> Callable[..., None]:
    text = "\n".join(
        [
            "{",
            ".reg .b64 own;",
            "mov.b64 own, {$2, $3};",
            f"ld.volatile.global.u32 $0, [own + {mailboxes.flag}];",
            "}",
        ]
    )

    def _exchange_check_kernel(row_ref: Any, _: Any, flag_ref: Any) -> None:
        at = jnp.arange(32)
        words = [jnp.broadcast_to(load(row_ref, (1 + k,)), at.shape) for k in range(2)]
        store(flag_ref, (at,), assembly(text, jnp.int32, at, *words), at < 1)

    return _exchange_check_kernel


def _elements(count: int) -> tuple[jax.Array, jax.Array | None]:
    """This program's elements, and which there are; threads beyond exchange as well."""
    at = program(0) * BLOCK + jnp.arange(BLOCK)
    return at, None if count % BLOCK == 0 else at < count


def _addresses(row_ref: Any, size: int) -> list[jax.Array]:
    """The row's words, for every thread."""
    return [jnp.broadcast_to(load(row_ref, (k,)), (BLOCK,)) for k in range(3 + 2 * size)]


def protocol(mailboxes: Mailboxes, gathers: bool = False) -> str:
    """PTX of one element's exchange: $0 is the sum of all ranks' $1, or what the owner has.

    $1 float32 is this rank's; $2 the element's number; $3 the rank; then own address, and that of
    every rank; where it gathers, the owner's rank at last, which alone writes.
    """
    size, capacity, patience = mailboxes
    owner = 6 + 2 * size
    sources = range(1 if gathers else size)
    lines = [
        ".reg .b32 number, turn, slot, mine, flag, left;",
        f".reg .b32 value<{size}>;",
        f".reg .b32 stamp<{size}>;",
        ".reg .b64 own, counter, to, from, sent;",
        f".reg .b64 word<{size}>;",
        ".reg .pred late, over, writes;",
        "mov.b64 own, {$4, $5};",
        "mad.wide.u32 counter, $2, 4, own;",
        "ld.volatile.global.u32 number, [counter];",
        f"ld.volatile.global.u32 flag, [own + {mailboxes.flag}];",
        "add.u32 number, number, 1;",
        "st.volatile.global.u32 [counter], number;",  # this thread's alone, in the next launch too
        "and.b32 turn, number, 1;",
        f"mad.lo.u32 slot, turn, {size * capacity}, $2;",
        f"mad.lo.u32 mine, $3, {capacity}, slot;",
        "mov.b32 value0, $1;",
        "mov.b64 sent, {value0, number};",
    ]
    only = ""
    if gathers:
        lines += [f"setp.eq.u32 writes, $3, ${owner};"]
        lines += [f"mad.lo.u32 slot, ${owner}, {capacity}, slot;"]
        only = "@writes "
    for rank in range(size):
        lines += [
            f"mov.b64 to, {{${6 + 2 * rank}, ${7 + 2 * rank}}};",
            "mad.wide.u32 to, mine, 8, to;",
            f"{only}st.relaxed.sys.global.b64 [to + {mailboxes.words}], sent;",
        ]
    lines += [
        "mad.wide.u32 from, slot, 8, own;",
        f"mov.u32 left, {patience};",
        "setp.ne.u32 over, flag, 0;",
        "@over bra LATE;",
        "POLL:",
    ]
    for k in sources:
        at = mailboxes.words + 8 * capacity * k
        lines += [f"ld.relaxed.sys.global.b64 word{k}, [from + {at}];"]
    for k in sources:
        lines += [f"mov.b64 {{value{k}, stamp{k}}}, word{k};"]
        compared = f".or.u32 late, stamp{k}, number, late;" if k else ".u32 late, stamp0, number;"
        lines += ["setp.ne" + compared]
    lines += [
        "@!late bra ADD;",
        "setp.eq.u32 over, left, 0;",
        "@over bra LATE;",
        "sub.u32 left, left, 1;",
        "bra POLL;",
        "LATE:",
        f"st.volatile.global.u32 [own + {mailboxes.flag}], 1;",
        f"mov.b32 value0, {_NAN};",
        "bra END;",
        "ADD:",  # in one order on all ranks
        *(f"add.rn.f32 value0, value0, value{k};" for k in sources[1:]),
        "END:",
        "mov.b32 $0, value0;",
    ]
    return "\n".join(["{", *lines, "}"])

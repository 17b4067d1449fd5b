"""Reading the rows of a model in order, what comes next already on its way in a few threads."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from math import prod
from typing import Any, NamedTuple, Self

import numpy as np

from ..arrays import numpy_dtype
from ..errors import listing, warn_caller
from ..model.load_plan import LoadPlan, TensorSource
from ..model.weights import Row
from ..parallel.shard import Found, Read, Shard
from ..system.progress import track_bytes
from .pieces import Box

_THREADS = 4
_CHECKED = 1 << 19  # bytes that stay in a core's cache
_FLOATS = ("float32", "bfloat16", "float16", "float64")


class _Order(NamedTuple):
    """A row with what each shard reads for it, and the bytes of the distinct reads."""

    row: Row
    reads: list[list[tuple[Read, str, Box]]]
    size: int


class RowReader:
    """The rows of a load plan, each with what every one of `shards` reads of it, in order.

    A context manager to iterate over once: (row, [[Found, ...] of each shard]). What two shards
    read alike is read once, one array for both. What was read, and not lent by a live module, is
    looked through for NaN and inf. Ahead of the row in hand, at most one layer's bytes
    are read, or one row's where a row is larger; a list is emptied when the next is asked for. The
    first read that fails raises its error in its turn. `shown`: with a progress bar.
    """

    def __init__(
        self, shards: Sequence[Shard], plan: LoadPlan, source: TensorSource, shown: bool = True
    ):
        self._source, self._shown = source, shown
        self._orders = [_order(shards, row, names, source) for row, names in plan.rows]
        self._ahead = _largest_layer(self._orders)
        self._copied, self._start = 0, time.perf_counter()
        self._odd: dict[str, None] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        """Start the threads and the bar."""
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="dualinfer-read")
        self._open.callback(self._pool.shutdown, wait=True, cancel_futures=True)
        total = sum(order.size for order in self._orders)
        bar = track_bytes(f"Loading {self._source.description}", total, self._shown)
        self._advance = self._open.enter_context(bar)
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        """No thread is left behind, whatever happened."""
        self._open.close()

    def __iter__(self) -> Iterator[tuple[Row, list[list[Found]]]]:
        """See the class."""
        waiting, started = deque(self._orders), deque[tuple[_Order, dict[Any, Future[Any]]]]()
        held = 0
        while waiting or started:
            while waiting and (not started or held + waiting[0].size <= self._ahead):
                order = waiting.popleft()
                held += order.size
                started.append((order, self._begin(order)))
            order, reading = started.popleft()
            done = {}
            while reading:  # a future holds what it has read
                key = next(iter(reading))
                done[key], odd = reading.pop(key).result()
                if odd:
                    self._odd[key[0]] = None
            self._copied += sum(a.nbytes for a in done.values() if isinstance(a, np.ndarray))
            found = [[Found(r, done[name, box]) for r, name, box in own] for own in order.reads]
            done.clear()
            yield order.row, found
            found.clear()
            held -= order.size
            self._advance(order.size)

    def _begin(self, order: _Order) -> dict[Any, Future[Any]]:
        distinct = {(name, box): read for own in order.reads for read, name, box in own}
        return {
            key: self._pool.submit(_read, self._source, key[0], read.index)
            for key, read in distinct.items()
        }

    def notes(self) -> tuple[str, ...]:
        """How much was read so far and how fast, unless it was lent; warns of NaN and inf."""
        seconds = time.perf_counter() - self._start
        if not self._copied:
            return ()
        rate = _amount(self._copied / max(seconds, 1e-9))
        note = f"loaded {_amount(self._copied)} in {seconds:.2f} s ({rate}/s)"
        return (note, *odd_notes(self._source, [*self._odd]))


def _read(source: TensorSource, name: str, index: Any) -> tuple[Any, bool]:
    """A part of a tensor, and whether it was read here and holds NaN or inf."""
    array = source.read(name, index)
    return array, isinstance(array, np.ndarray) and not is_finite(array)


def odd_notes(source: TensorSource, names: Sequence[str]) -> tuple[str, ...]:
    """A note on tensors that hold NaN or inf, which the caller is warned of as well."""
    if not names:
        return ()
    note = f"NaN or inf in {len(names)} of the tensors of {source.description}: {listing(names)}"
    warn_caller(
        f"{note}. They are used as they are, as transformers does, and outputs may be NaN. Was the "
        "training run or the conversion that wrote them sound?"
    )
    return (note,)


def is_finite(array: np.ndarray) -> bool:
    """True if no element is NaN or inf: then no exponent is all ones, sign aside.

    It compares integers, as NumPy has nothing fast for bfloat16.
    """
    if not array.size or array.dtype.name not in _FLOATS:
        return True
    size = array.itemsize
    infinite = int(np.array(np.inf, array.dtype).view(f"u{size}"))
    negative = infinite + (1 << (8 * size - 1))
    flat = np.ascontiguousarray(array).reshape(-1)
    parts = (flat[i : i + _CHECKED // size] for i in range(0, flat.size, _CHECKED // size))
    return all(
        part.view(f"i{size}").max() < infinite and part.view(f"u{size}").max() < negative
        for part in parts
    )


def _amount(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _order(
    shards: Sequence[Shard], row: Row, names: tuple[str, ...], source: TensorSource
) -> _Order:
    reads = [
        [
            (read, name, Box.of(read.index, source.shape(name)))
            for part, name in zip(row.sources, names, strict=True)
            for read in shard.reads(row, part)
        ]
        for shard in shards
    ]
    distinct = {(name, box) for own in reads for _, name, box in own}
    itemsizes = {name: numpy_dtype(source.dtype(name)).itemsize for name in names}
    return _Order(row, reads, sum(prod(box.shape) * itemsizes[name] for name, box in distinct))


def _largest_layer(orders: Sequence[_Order]) -> int:
    """Bytes read for the layer that takes most."""
    layers: dict[int, int] = {}
    for order in orders:
        number = order.row.layer
        if number is not None:
            layers[number] = layers.get(number, 0) + order.size
    return max(layers.values(), default=0)

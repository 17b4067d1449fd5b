"""Reading the rows of a model in order, what comes next already on its way in a few threads."""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from math import prod
from typing import Any, NamedTuple, Self

import ml_dtypes
import numpy as np

from ..arrays import numpy_dtype
from ..errors import listing, warn_caller
from ..model.load_plan import LoadPlan, TensorSource
from ..model.weights import Row
from ..parallel.shard import Found, Read, Shard
from ..quantization import BlockScheme
from ..quantization.codes.floats import Floats8
from ..quantization.meaning import bound, overflows, span
from ..system.progress import track_bytes
from .files.pieces import Box

_THREADS = 4
_CHECKED = 1 << 19  # bytes that stay in a core's cache
_FLOATS = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2")


class _Order(NamedTuple):
    """A row with what each shard reads for it, and the bytes of the distinct reads."""

    row: Row
    reads: list[list[tuple[Read, str, Box]]]
    size: int


class RowReader:
    """The rows of a load plan, each with what every one of `shards` reads of it, in order.

    A context manager to iterate over once: (row, [[Found, ...] of each shard]). What two shards
    read alike is read once, one array for both. What was read, and not lent by a live module, is
    looked through for NaN, inf, and what is infinite in the model's `dtype`, once it is decoded.
    Ahead of the row in hand, at most one layer's bytes are read, or one row's where a row is
    larger; a list is emptied when the next is asked for. The first read that fails raises its error
    in its turn. `shown`: with a progress bar.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        plan: LoadPlan,
        source: TensorSource,
        dtype: str = "float32",
        shown: bool = True,
    ):
        self._source, self._shown = source, shown
        self._orders = [_order(shards, row, names, source) for row, names in plan.rows]
        self._ahead = _largest_layer(self._orders)
        self._copied, self._start = 0, time.perf_counter()
        self._odd, self._dtype = Oddities(source, dtype), dtype
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
            done, largest = {}, dict[str, dict[str, float]]()
            while reading:  # a future holds what it has read
                key = next(iter(reading))
                done[key], part, most = reading.pop(key).result()
                own = largest.setdefault(key[0].partition(":")[0], {})
                own[part] = max(own.get(part, 0.0), most)
            if order.row.scheme is not None:
                self._look_at_codes(order.row.scheme, largest)
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
            key: self._pool.submit(self._read, order.row, read, key[0])
            for key, read in distinct.items()
        }

    def _read(self, row: Row, read: Read, name: str) -> tuple[Any, str, float]:
        """An array, which part of a matrix it is, and its largest size if a factor of codes."""
        array, scheme, part = self._source.read(name, read.index), row.scheme, read.source.part
        if not isinstance(array, np.ndarray):
            return array, part, 0.0
        if scheme is None:
            self._odd.look(name, array, "float32" if row.wide else None)
            return array, part, 0.0
        name = name.partition(":")[0]
        if part == "data" and isinstance(scheme.code, Floats8):
            self._odd.look(name, array.view(scheme.code.float_dtype))
        if part not in ("scale", "outer", "input"):
            return array, part, 0.0
        is_byte = array.dtype == np.uint8
        most = largest_size(array.view(numpy_dtype(scheme.scale_dtype)) if is_byte else array)
        if not np.isfinite(most):
            self._odd.wrong[name] = None
        return array, part, most

    def _look_at_codes(self, scheme: BlockScheme, largest: Mapping[str, dict[str, float]]) -> None:
        """Find out of codes whose factors are large whether any is infinite once it is decoded."""
        for name, factors in largest.items():
            most = span(scheme) * factors.get("scale", 0.0) * factors.get("outer", 1.0)
            if not most < bound(self._dtype) and name not in self._odd.wrong:
                matrix = getattr(self._source, "matrix")(name)  # noqa: B009
                if overflows(matrix, bound(self._dtype)):
                    self._odd.beyond[name] = None

    def notes(self) -> tuple[str, ...]:
        """Tell how much was read and how fast, unless it was lent; warn of what is odd in it."""
        seconds = time.perf_counter() - self._start
        if not self._copied:
            return ()
        rate = _amount(self._copied / max(seconds, 1e-9))
        note = f"loaded {_amount(self._copied)} in {seconds:.2f} s ({rate}/s)"
        return (note, *self._odd.notes())


class Oddities:
    """Names of what was read of a source and is not finite in a model's `dtype`, for people.

    `wrong` hold NaN or inf as they are stored, and others hold values `beyond` the dtype.
    """

    def __init__(self, source: TensorSource, dtype: str) -> None:
        self._source, self._dtype = source, dtype
        self.wrong: dict[str, None] = {}
        self.beyond: dict[str, None] = {}

    def look(self, name: str, array: np.ndarray, dtype: str | None = None) -> None:
        """Note the name of an array that is not finite in the model's dtype, or in its own."""
        if not is_finite(array, dtype or self._dtype):
            (self.beyond if is_finite(array) else self.wrong)[name] = None

    def notes(self) -> tuple[str, ...]:
        """The notes, of which the caller is warned as well."""
        of = f"of the tensors of {self._source.description}"
        wrong, beyond = [*self.wrong], [*self.beyond]
        told = []
        if wrong:
            note = f"NaN or inf in {len(wrong)} {of}: {listing(wrong)}"
            told.append(note)
            warn_caller(
                f"{note}. They are used as they are, as transformers does, and outputs may be NaN. "
                "Was the training run or the conversion that wrote them sound?"
            )
        if beyond:
            note = f"values beyond {self._dtype} in {len(beyond)} {of}: {listing(beyond)}"
            told.append(note)
            wider = "Pass dtype='bf16' or 'fp32'" if self._dtype == "float16" else "Quantize again"
            warn_caller(
                f"{note}. They are infinite, and outputs may be NaN. {wider}, or was the "
                "conversion that wrote them sound?"
            )
        return tuple(told)


def is_finite(array: np.ndarray, dtype: str | None = None) -> bool:
    """True if no element is NaN or inf, nor would be in `dtype`; of integers always.

    It compares integers, as NumPy has nothing fast for bfloat16: bits are in the order of sizes.
    """
    if not array.size or array.dtype.name not in _FLOATS:
        return True
    size = array.itemsize
    infinite = _infinite(array.dtype.name, dtype or array.dtype.name)
    negative = infinite + (1 << (8 * size - 1))
    flat = np.ascontiguousarray(array).reshape(-1)
    parts = (flat[i : i + _CHECKED // size] for i in range(0, flat.size, _CHECKED // size))
    return all(
        part.view(f"i{size}").max() < infinite and part.view(f"u{size}").max() < negative
        for part in parts
    )


@cache
def _infinite(stored: str, dtype: str) -> int:
    """The bits of a stored dtype's least positive value that is infinite or NaN in `dtype`."""
    kind, most = numpy_dtype(stored), float(ml_dtypes.finfo(numpy_dtype(stored)).max)
    is_narrower = stored != dtype and most >= bound(dtype)
    least = np.array(bound(dtype) if is_narrower else most, kind)
    next_one = not is_narrower or float(least) < bound(dtype)
    return int(least.view(f"u{kind.itemsize}")) + next_one


def largest_size(array: np.ndarray) -> float:
    """The largest size of an array's floats, NaN above all; 0 of none."""
    if not array.size:
        return 0.0
    bits, size = np.ascontiguousarray(array).reshape(-1), array.itemsize
    kind = f"u{size}"
    has_sign = array.dtype.name != "float8_e8m0fnu"
    mask = np.array((1 << (8 * size - has_sign)) - 1, kind)
    return float((bits.view(kind) & mask).max().view(array.dtype))


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

"""Launches that are described before they run, on arrays whose memory is not known yet.

The functions of this package ask a tensor for its shape, dtype and strides, and hand it to a
kernel. An `Operand` answers them in place of a tensor, and `launch` then writes down what it would
do: that is how JAX, which must know a step before it runs, gets the same kernels as torch.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_BYTES = {"bool": 1, "int8": 1, "uint8": 1, "float16": 2, "bfloat16": 2}
_BYTES |= {"int32": 4, "uint32": 4, "float32": 4, "int64": 8, "float64": 8}
_FLOATS = ("float16", "bfloat16", "float32", "float64")


def dtype_name(dtype: Any) -> str:
    """The name that torch, NumPy and JAX share: "bfloat16"."""
    return getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")


def as_words(data: Any) -> Any:
    """The bytes of a tensor or an Operand as words of 32 bits."""
    if isinstance(data, Operand):
        return data.view("uint32")
    import torch

    return data.view(torch.uint32)


def empty(like: Any, shape: Sequence[int], dtype: str) -> Any:
    """New memory where `like` lies, a tensor or an Operand."""
    if isinstance(like, Operand):
        return like.new_empty(shape, dtype)
    import torch

    return like.new_empty(tuple(shape), dtype=getattr(torch, dtype))


def as_bytes(x: Any) -> Any:
    """bool elements as the bytes that they are, 0 or 1."""
    if isinstance(x, Operand):
        return x.view("uint8")
    import torch

    return x.view(torch.uint8)


def is_aligned(x: Any, size: int) -> bool:
    """True if a tensor begins at a multiple of `size` bytes, as buffers of operands do."""
    return (x.pointer.offset if isinstance(x, Operand) else x.data_ptr()) % size == 0


class Pointer(NamedTuple):
    """An argument of a launch: a place in a buffer, `offset` bytes from its start."""

    buffer: int
    offset: int
    dtype: str


class Launch(NamedTuple):
    """A kernel with its arguments by name: Pointers, and what is the same at every run.

    `options` are Triton's: num_warps, num_stages and the like. With `early` it may start before the
    kernel in front of it has ended.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]
    early: bool

    @property
    def buffers(self) -> tuple[int, ...]:
        """Numbers of the buffers that it gets."""
        return tuple(x.buffer for _, x in self.arguments if isinstance(x, Pointer))

    def over(self, numbers: Mapping[int, int]) -> "Launch":
        """The same launch, where buffers have other numbers."""
        arguments = tuple(
            (name, x._replace(buffer=numbers[x.buffer]) if isinstance(x, Pointer) else x)
            for name, x in self.arguments
        )
        return self._replace(arguments=arguments)


class Buffer(NamedTuple):
    """Contiguous memory of a shape and dtype."""

    shape: tuple[int, ...]
    dtype: str


class Recording:
    """Buffers, those given first, and the launches over them."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.launches: list[Launch] = []

    def operand(self, shape: Sequence[int], dtype: Any) -> "Operand":
        """All of a new buffer."""
        shape, name = tuple(shape), dtype_name(dtype)
        self.buffers.append(Buffer(shape, name))
        return Operand(self, len(self.buffers) - 1, shape, _packed(shape), 0, name)

    def add(
        self, kernel: Any, grid: Sequence[int], args: Sequence[Any], early: bool, **meta: Any
    ) -> None:
        """Write a launch down; `meta` as Triton takes it."""
        named = dict(zip(kernel.arg_names, args, strict=False)) | meta
        arguments = tuple((name, _argument(named.pop(name))) for name in kernel.arg_names)
        options = tuple(sorted(named.items()))
        x, y, z = (*grid, 1, 1)[:3]
        self.launches.append(Launch(kernel, (x, y, z), arguments, options, early))


def _argument(value: Any) -> Any:
    return value.pointer if isinstance(value, Operand) else value


def recording_of(args: Sequence[Any]) -> Recording | None:
    """That of the operands among `args`; None if there are none."""
    return next((x.recording for x in args if isinstance(x, Operand)), None)


def _packed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


class Operand:
    """A view of a buffer, with what the package's functions ask of a torch tensor."""

    def __init__(
        self,
        recording: Recording,
        buffer: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        dtype: str,
    ) -> None:
        self.recording, self.buffer = recording, buffer
        self.shape, self.strides, self.offset, self.dtype = shape, strides, offset, dtype

    @property
    def pointer(self) -> Pointer:
        """Where it begins."""
        return Pointer(self.buffer, self.offset * self.element_size(), self.dtype)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __len__(self) -> int:
        """Extent of the first axis."""
        return self.shape[0]

    def dim(self) -> int:
        """Number of axes."""
        return self.ndim

    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Bytes of an element."""
        return _BYTES[self.dtype]

    def is_floating_point(self) -> bool:
        """True if the dtype is one of floats."""
        return self.dtype in _FLOATS

    def stride(self, axis: int | None = None) -> Any:
        """Elements from one index of an axis to the next; those of all axes."""
        return self.strides if axis is None else self.strides[axis]

    def is_contiguous(self) -> bool:
        """True if elements follow one another in their order."""
        packed = _packed(self.shape)
        axes = zip(self.shape, self.strides, packed, strict=True)
        return all(size == 1 or mine == its for size, mine, its in axes)

    def new_empty(self, shape: Sequence[int], dtype: Any = None) -> "Operand":
        """New memory; of 8 bytes an element as pairs of words, since JAX may have no others."""
        name = dtype_name(dtype or self.dtype)
        if _BYTES[name] < 8:
            return self.recording.operand(shape, name)
        return self.recording.operand((*shape, 2), "uint32").view(name).reshape(tuple(shape))

    def reshape(self, *shape: Any) -> "Operand":
        """A contiguous view in another shape."""
        shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if -1 in shape:
            known = math.prod(n for n in shape if n != -1)
            shape = tuple(self.numel() // known if n == -1 else n for n in shape)
        if not self.is_contiguous() or math.prod(shape) != self.numel():
            raise ValueError(f"{self.shape} with strides {self.strides} has no view {shape}.")
        return self._view(shape, _packed(shape))

    def view(self, dtype: str) -> "Operand":
        """The bytes as elements of another dtype; the last axis is longer or shorter by it."""
        if not self.is_contiguous():
            raise ValueError(f"{self.shape} with strides {self.strides} has no view as {dtype}.")
        last = self.shape[-1] * self.element_size() // _BYTES[dtype]
        shape = (*self.shape[:-1], last)
        offset = self.offset * self.element_size() // _BYTES[dtype]
        return Operand(self.recording, self.buffer, shape, _packed(shape), offset, dtype)

    def transpose(self, a: int, b: int) -> "Operand":
        """The view with two axes exchanged."""
        order = list(range(self.ndim))
        order[a], order[b] = order[b], order[a]
        return self._view(
            tuple(self.shape[i] for i in order), tuple(self.strides[i] for i in order)
        )

    def narrow(self, axis: int, start: int, length: int) -> "Operand":
        """The view of some indices of an axis."""
        axis %= self.ndim
        if not 0 <= start <= start + length <= self.shape[axis]:
            raise ValueError(f"{self.shape} has no {length} indices from {start} in axis {axis}.")
        shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        return self._view(shape, self.strides, start * self.strides[axis])

    def split(self, sizes: Sequence[int], dim: int) -> list["Operand"]:
        """Views side by side along an axis."""
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [self.narrow(dim, *part) for part in zip(starts, sizes, strict=True)]

    def unflatten(self, axis: int, sizes: Sequence[int]) -> "Operand":
        """The view in which one axis is several, the last of them fastest; one may be -1."""
        axis %= self.ndim
        known = math.prod(n for n in sizes if n != -1)
        sizes = tuple(self.shape[axis] // known if n == -1 else n for n in sizes)
        if math.prod(sizes) != self.shape[axis]:
            raise ValueError(f"axis {axis} of {self.shape} is not {sizes}.")
        steps = tuple(n * self.strides[axis] for n in _packed(sizes))
        return self._view(
            (*self.shape[:axis], *sizes, *self.shape[axis + 1 :]),
            (*self.strides[:axis], *steps, *self.strides[axis + 1 :]),
        )

    def __getitem__(self, index: Any) -> "Operand":
        """Views by whole numbers, full slices and None, as far as an index says."""
        shape: list[int] = []
        strides: list[int] = []
        offset, axis = 0, 0
        for item in index if isinstance(index, tuple) else (index,):
            if item is None:
                shape.append(1)
                strides.append(self.shape[axis] * self.strides[axis] if axis < self.ndim else 1)
                continue
            if isinstance(item, int) and -self.shape[axis] <= item < self.shape[axis]:
                offset += item % self.shape[axis] * self.strides[axis]
            elif item == slice(None):
                shape.append(self.shape[axis])
                strides.append(self.strides[axis])
            else:
                raise ValueError(f"an operand has no view by {item!r}.")
            axis += 1
        shape, strides = shape + list(self.shape[axis:]), strides + list(self.strides[axis:])
        return self._view(tuple(shape), tuple(strides), offset)

    def _view(self, shape: Any, strides: Any, by: int = 0) -> "Operand":
        offset = self.offset + by
        return Operand(self.recording, self.buffer, tuple(shape), strides, offset, self.dtype)

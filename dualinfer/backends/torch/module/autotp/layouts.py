"""Find the rows of each attention head in projections, fused or not."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from .....parallel.sharding import split_heads

_CODEGEN_BLOCKS = 4  # of TPU cores that CodeGen was trained on; its forward has the number


class Run(NamedTuple):
    """Elements `start` to `start + width` of an axis; zeros where `start` is None."""

    start: int | None
    width: int


Runs = tuple[Run, ...]


class Heads(NamedTuple):
    """The heads of an attention block, and those of one rank.

    `query` and `key` say which of all each local head is; None is a head of zeros.
    """

    heads: int
    kv_heads: int
    head_dim: int
    query: tuple[int | None, ...]
    key: tuple[int | None, ...]

    @property
    def width(self) -> int:
        """Elements of all query heads."""
        return self.heads * self.head_dim


Layout = Callable[[Heads], Runs]


def local_heads(heads: int, kv_heads: int, head_dim: int, size: int) -> list[Heads]:
    """Each rank's heads: KV heads whole, and held by several ranks where these outnumber them."""
    queries, keys = split_heads(heads, kv_heads, size, False)
    return [
        Heads(
            heads,
            kv_heads,
            head_dim,
            tuple(range(q.start, q.stop)) or (None,),
            tuple(range(k.start, k.stop)) or (None,),
        )
        for q, k in zip(queries, keys, strict=True)
    ]


def join_runs(runs: Iterable[Run]) -> Runs:
    """The same elements in as few runs as possible."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        expected = None if last is None or last.start is None else last.start + last.width
        if last and run.start == expected:
            joined[-1] = Run(last.start, last.width + run.width)
        else:
            joined.append(run)
    return tuple(joined)


def extent(runs: Runs) -> int:
    """Elements in all of the runs."""
    return sum(run.width for run in runs)


def take(tensor: torch.Tensor, runs: Runs, dim: int) -> torch.Tensor:
    """The runs of an axis one after another, in memory of their own."""
    parts = []
    for start, width in runs:
        if start is None:
            shape = list(tensor.shape)
            shape[dim] = width
            parts.append(tensor.new_zeros(shape))
        else:
            parts.append(tensor.narrow(dim, start, width))
    if len(parts) > 1:
        return torch.cat(parts, dim)
    return parts[0].clone(memory_format=torch.contiguous_format)


def _rows(heads: Sequence[int | None], width: int, base: int = 0) -> list[Run]:
    return [Run(None if h is None else base + h * width, width) for h in heads]


def query_rows(h: Heads) -> Runs:
    """A projection to query heads; the output projection's columns."""
    return join_runs(_rows(h.query, h.head_dim))


def key_rows(h: Heads) -> Runs:
    """A projection to key or value heads."""
    return join_runs(_rows(h.key, h.head_dim))


def blocks(h: Heads) -> Runs:
    """All q, all k, all v: GPT-2, MPT, GLM, Phi-3, GPT-BigCode and Falcon with one KV head."""
    return join_runs(
        [
            *_rows(h.query, h.head_dim),
            *_rows(h.key, h.head_dim, h.width),
            *_rows(h.key, h.head_dim, h.width + h.kv_heads * h.head_dim),
        ]
    )


def key_value_blocks(h: Heads) -> Runs:
    """All k, all v: GPT-2's cross attention."""
    values = _rows(h.key, h.head_dim, h.kv_heads * h.head_dim)
    return join_runs([*_rows(h.key, h.head_dim), *values])


def interleaved(h: Heads) -> Runs:
    """q, k, v of each head together: BLOOM, GPT-NeoX, Falcon with as many KV heads."""
    return join_runs(_rows(h.query, 3 * h.head_dim))


def grouped(h: Heads) -> Runs:
    """The queries of a KV head, its k and its v, one KV head after another: new Falcons."""
    group = h.heads // h.kv_heads
    stride = (group + 2) * h.head_dim
    local = len(h.query) // len(h.key)
    runs = []
    for i, kv in enumerate(h.key):
        for head in h.query[i * local : (i + 1) * local]:
            start = None if head is None else head // group * stride + head % group * h.head_dim
            runs.append(Run(start, h.head_dim))
        start = None if kv is None else kv * stride + group * h.head_dim
        runs.append(Run(start, 2 * h.head_dim))
    return join_runs(runs)


def codegen(h: Heads) -> Runs:
    """Blocks of heads, each with its q, v and k (Salesforce CodeGen). Takes `pad_for_codegen`'s."""
    width, part = h.head_dim, len(h.query) // _CODEGEN_BLOCKS
    block = h.heads // _CODEGEN_BLOCKS
    runs = []
    for first in range(0, len(h.query), part):
        for kind in range(3):
            for head in h.query[first : first + part]:
                start = None
                if head is not None:
                    start = ((head // block * 3 + kind) * block + head % block) * width
                runs.append(Run(start, width))
    return join_runs(runs)


def pad_for_codegen(h: Heads) -> Heads:
    """With heads of zeros up to a number that CodeGen's forward can divide into its blocks."""
    lacking = (None,) * (-len(h.query) % _CODEGEN_BLOCKS)
    return h._replace(query=h.query + lacking, key=h.key + lacking)


_BY_CLASS: dict[str, Layout] = {
    "BloomAttention": interleaved,
    "GPTNeoXAttention": interleaved,
    "GPT2Attention": blocks,
    "MptAttention": blocks,
    "Phi3Attention": blocks,
    "CodeGenAttention": codegen,
}


def layout_of(attention: torch.nn.Module) -> Layout | None:
    """The layout of the fused q, k and v of an attention module of HF's; None if it is unknown."""
    kind = type(attention).__name__
    if kind in ("FalconAttention", "FalconFlashAttention2", "GPTBigCodeAttention"):
        if getattr(attention, "new_decoder_architecture", False):
            return grouped
        return blocks if getattr(attention, "multi_query", False) else interleaved
    return _BY_CLASS.get(kind)

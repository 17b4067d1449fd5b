"""Maths of torch; see `dualinfer.ops.maths`."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from ...model.spec import Activation
from ...ops.maths import KeyScoring, taken
from .profiling import span


class TorchMaths:
    """See `Maths`."""

    name = "torch"
    float32, bfloat16, int32 = torch.float32, torch.bfloat16, torch.int32
    span = staticmethod(span)
    stack = staticmethod(torch.stack)
    join = staticmethod(torch.cat)
    moveaxis = staticmethod(torch.moveaxis)
    round = staticmethod(torch.round)
    exp = staticmethod(torch.exp)
    expm1 = staticmethod(torch.expm1)
    log = staticmethod(torch.log)
    sqrt = staticmethod(torch.sqrt)
    rsqrt = staticmethod(torch.rsqrt)
    cos = staticmethod(torch.cos)
    sin = staticmethod(torch.sin)
    tanh = staticmethod(torch.tanh)
    sigmoid = staticmethod(torch.sigmoid)
    softplus = staticmethod(F.softplus)
    floor = staticmethod(torch.floor)
    minimum = staticmethod(torch.minimum)
    maximum = staticmethod(torch.maximum)
    glu = staticmethod(F.glu)
    broadcast = staticmethod(torch.broadcast_to)

    def where(self, condition: torch.Tensor, a: Any, b: Any, /) -> torch.Tensor:
        """See `Maths`."""
        if isinstance(a, float) and isinstance(b, torch.Tensor) and b.is_floating_point():
            shape = torch.broadcast_shapes(condition.shape, b.shape)
            return b.expand(shape).masked_fill(condition, a)  # else a number is a launch
        return torch.where(condition, a, b)

    def clip(self, a: torch.Tensor, low: float, high: float, /) -> torch.Tensor:
        """See `Maths`."""
        return torch.clamp(a, low, high)

    def wide(self, a: torch.Tensor) -> torch.Tensor:
        """See `Maths`."""
        return a.float()

    def cast(self, a: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `Maths`."""
        return a.to(dtype)

    def rounded(self, a: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `Maths`."""
        return a.to(dtype).float()

    def words(self, a: torch.Tensor) -> torch.Tensor:
        """See `Maths`; int64, since torch has no arithmetic on uint32."""
        return a.long()

    def low(self, a: torch.Tensor) -> torch.Tensor:
        """See `Maths`."""
        return a & 0xFFFFFFFF

    def float8(self, a: torch.Tensor, dtype: str) -> torch.Tensor:
        """See `Maths`."""
        return a.view(getattr(torch, dtype)).float()

    def nearest_e4m3(self, a: torch.Tensor) -> torch.Tensor:
        """See `Maths`."""
        return a.to(torch.float8_e4m3fn).float()

    def as_codes(self, a: torch.Tensor, codes: str) -> torch.Tensor:
        """See `Maths`."""
        if codes == "int8":
            return a.round().to(torch.int8)
        return a.to(torch.float8_e4m3fn).view(torch.uint8)

    def power(self, a: torch.Tensor, mantissa: int) -> torch.Tensor:
        """See `Maths`."""
        bits = a.view(torch.int32) + (1 << (22 - mantissa))
        return (bits & 0x7F800000).view(torch.float32)

    def nearest(self, number: float, dtype: torch.dtype) -> float:
        """See `Maths`."""
        return torch.tensor(number, dtype=dtype, device="cpu").item()

    def epsilon(self, dtype: torch.dtype) -> float:
        """See `Maths`."""
        return torch.finfo(dtype).eps

    def quotient(self, a: torch.Tensor, b: torch.Tensor | float) -> torch.Tensor:
        """See `Maths`."""
        if not isinstance(b, torch.Tensor):  # on a GPU torch multiplies by a number's reciprocal
            b = a.new_full((), b)
        return a / b

    def table(self, values: tuple[float, ...], codes: torch.Tensor) -> torch.Tensor:
        """See `Maths`."""
        return _table(values, codes.device)[codes.int()]

    def repeat(self, a: torch.Tensor, count: int, axis: int) -> torch.Tensor:
        """See `Maths`."""
        return a.repeat_interleave(count, dim=axis)

    def rows(self, a: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """See `Maths`."""
        return F.embedding(ids, a) if a.ndim == 2 and a.is_floating_point() else a[ids]

    def within(self, ids: torch.Tensor, count: int) -> torch.Tensor:
        """See `Maths`."""
        return ids.clamp(max=count - 1)

    def row(self, a: torch.Tensor, index: int | torch.Tensor) -> torch.Tensor:
        """See `Maths`; the index is a number or int [1]."""
        return a[index] if isinstance(index, int) else a.index_select(0, index)[0]

    def places(self, a: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """See `Maths`."""
        index = index.long().view(*index.shape, *[1] * (a.ndim - 2))
        return a.gather(1, index.expand(-1, -1, *a.shape[2:]))

    def along(self, a: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """See `Maths`."""
        lead = torch.broadcast_shapes(a.shape[:-1], index.shape[:-1])
        return a.expand(*lead, -1).gather(-1, index.long().expand(*lead, -1))

    def most(self, a: torch.Tensor) -> torch.Tensor:
        """See `Maths`."""
        return a.amax(-1, keepdim=True)

    def pad(
        self, a: torch.Tensor, axis: int, before: int, behind: int, value: float = 0
    ) -> torch.Tensor:
        """See `Maths`."""
        inner = a.ndim - 1 - axis % a.ndim
        return F.pad(a, (*(0, 0) * inner, before, behind), value=value)

    def sums(self, x: torch.Tensor, many: bool = True) -> torch.dtype:
        """See `Maths`."""
        return x.dtype

    def arange(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """See `Maths`."""
        return torch.arange(count, device=like.device)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
        """See `Maths`."""
        return torch.zeros(shape, dtype=dtype, device=like.device)

    def of_numpy(self, values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
        """See `Maths`."""
        return torch.from_numpy(values).to(like.device)

    def put(self, a: torch.Tensor, index: Any, new: torch.Tensor) -> torch.Tensor:
        """See `Maths`; in place."""
        if index is ...:
            return a.copy_(new)
        a[index] = new
        return a

    def put_some(
        self, a: torch.Tensor, index: tuple[Any, ...], new: torch.Tensor, there: torch.Tensor
    ) -> torch.Tensor:
        """See `Maths`; in place, and on a GPU it waits to know how many there are."""
        a[tuple(i if isinstance(i, slice) else i[there] for i in index)] = new[there]
        return a

    def put_rows(
        self, a: torch.Tensor, rows: torch.Tensor, new: torch.Tensor, axis: int
    ) -> torch.Tensor:
        """See `Maths`; in place."""
        before, count = (slice(None),) * (axis - 1), new.shape[axis]
        a[(rows, *before, slice(count))] = new
        if count < a.shape[axis]:  # with a zero of the device, as it may be captured
            a[(rows, *before, slice(count, None))] = new.new_zeros(())
        return a

    def rows_or(self, a: torch.Tensor, rows: torch.Tensor, beyond: int) -> torch.Tensor:
        """See `Maths`."""
        return a[rows]

    def grow(self, a: torch.Tensor, more: Sequence[int]) -> torch.Tensor:
        """See `Maths`."""
        sizes = [n for by in reversed((*more, *[0] * (a.ndim - len(more)))) for n in (0, by)]
        return F.pad(a, sizes)

    def add_product(self, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """See `Maths`."""
        return torch.addcmul(total, a, b)

    def activation(self, a: torch.Tensor, kind: Activation) -> torch.Tensor:
        """See `Maths`."""
        if kind == "silu":
            return F.silu(a)
        if kind == "gelu":
            return F.gelu(a)
        if kind == "gelu_tanh":
            return F.gelu(a, approximate="tanh")
        if kind == "quick_gelu":
            return a * torch.sigmoid(1.702 * a)
        if kind == "relu":
            return F.relu(a)
        if kind == "relu2":
            return F.relu(a).square()
        return torch.tanh(a)

    def scan(
        self,
        step: Callable[..., tuple[Any, Any]],
        state: torch.Tensor,
        parts: Sequence[torch.Tensor],
        size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Maths`."""
        found = []
        for pieces in zip(*(part.split(size, 1) for part in parts), strict=True):
            state, y = step(state, *pieces)
            found.append(y)
        return torch.cat(found, 1), state

    def whole(self, a: torch.Tensor) -> torch.Tensor:
        """See `Maths`."""
        return a.contiguous()

    def replace_last(self, a: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """See `Maths`; in place."""
        a[..., -values.shape[-1] :].copy_(values)
        return a

    def windows(self, a: torch.Tensor, axis: int, size: int, step: int) -> torch.Tensor:
        """See `Maths`; a view."""
        return a.unfold(axis, size, step)

    def times(self, a: torch.Tensor, number: float) -> torch.Tensor:
        """See `Maths`."""
        return a * number

    def length(self, a: torch.Tensor) -> torch.Tensor:
        """See `Maths`."""
        return a.norm(dim=-1, keepdim=True)

    def argmax(self, a: torch.Tensor) -> torch.Tensor:
        """See `Maths`."""
        return a.argmax(-1)

    def softmax(self, a: torch.Tensor) -> torch.Tensor:
        """See `Maths`."""
        return a.softmax(-1)

    def log_softmax(self, a: torch.Tensor) -> torch.Tensor:
        """See `Maths`."""
        return a.log_softmax(-1)

    def log_sum(self, a: torch.Tensor) -> torch.Tensor:
        """See `Maths`."""
        return a.logsumexp(-1, keepdim=True)

    def layer_norm(
        self, a: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """See `Maths`."""
        return F.layer_norm(a, a.shape[-1:], weight, bias, eps)

    def top(self, a: torch.Tensor, count: int) -> torch.Tensor:
        """See `Maths`."""
        return a.topk(count, dim=-1)[0]

    def largest(self, a: torch.Tensor, count: int) -> torch.Tensor:
        """See `Maths`; of equal ones `topk` takes any, and `argmax` the first."""
        if count == 1:
            return a.argmax(-1, keepdim=True)
        return a.sort(dim=-1, descending=True, stable=True)[1][..., :count]

    def sort(self, a: torch.Tensor) -> torch.Tensor:
        """See `Maths`."""
        return a.sort(dim=-1)[0]

    def ascending(self, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Maths`."""
        values, index = a.sort(dim=-1)
        return values, index

    def one_hot(self, a: torch.Tensor, count: int) -> torch.Tensor:
        """See `Maths`."""
        return F.one_hot(a.long(), count)

    def among(self, a: torch.Tensor, count: int) -> torch.Tensor:
        """See `Maths`."""
        nowhere = torch.zeros((*a.shape[:-1], count), dtype=torch.bool, device=a.device)
        return nowhere.scatter(-1, a, True)

    def without(self, a: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """See `Maths`."""
        return a.scatter(-1, index, -torch.inf)

    def running_most(self, a: torch.Tensor, axis: int) -> torch.Tensor:
        """See `Maths`."""
        return a.cummax(axis)[0]

    def product(
        self,
        x: torch.Tensor,
        matrix: torch.Tensor,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Maths`."""
        return F.linear(x, matrix, bias)

    def einsum(self, formula: str, /, *arrays: torch.Tensor, dtype: Any = None) -> torch.Tensor:
        """See `Maths`."""
        return torch.einsum(formula, *arrays)

    def scores(self, formula: str, /, *arrays: torch.Tensor) -> torch.Tensor:
        """See `Maths`."""
        return torch.einsum(formula, *(a.float() for a in arrays))

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scoring: KeyScoring,
        *,
        causal: bool = False,
        visible: Callable[[Any], Any] | None = None,
        bias: Callable[[Any], Any] | None = None,
        by_head: bool = False,
    ) -> torch.Tensor:
        """See `Maths`: SDPA, or where it has no arguments for what is asked, products."""
        shape, dtype = (*q.shape[:-1], v.shape[-1]), q.dtype
        q = q.to(k.dtype).transpose(1, 2) if q.ndim == 4 else q.to(k.dtype)[:, :, None]
        if not by_head:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        seen = None if visible is None else visible(None)[:, None]
        added = None if bias is None else bias(None)
        exact = any(x is not None for x in (scoring.alibi, scoring.softcap, scoring.sinks))
        if causal and seen is None and (exact or added is not None):
            at = torch.arange(k.shape[2], device=q.device)
            seen = at <= at[:, None]
        if exact:
            y = _dense_attention(q, k, v, seen, scoring, added)
            return y.transpose(1, 2).reshape(shape).to(dtype)
        mask = seen
        if added is not None:
            mask = added.to(q.dtype)
            mask = mask if seen is None else mask.masked_fill(~seen, -torch.inf)
        rows, heads, tokens, dim = q.shape
        kv_heads = k.shape[1]
        if tokens == 1:  # the heads of a KV head are rows of one product: no copy of keys for GQA
            q = q.reshape(rows, kv_heads, -1, dim)
            if mask is not None and mask.shape[1] > 1:
                mask = mask.reshape(mask.shape[0], kv_heads, -1, mask.shape[-1])
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal and mask is None,
            scale=scoring.scale,
            enable_gqa=q.shape[1] != kv_heads,
        )
        return y.reshape(rows, heads, tokens, -1).transpose(1, 2).reshape(shape).to(dtype)

    def solve(self, lower: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """See `Maths`."""
        return torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)

    def convolution(
        self, x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor, stride: int
    ) -> torch.Tensor:
        """See `Maths`."""
        y = F.conv1d(x.transpose(1, 2), kernel, bias, stride, padding=kernel.shape[2] // 2)
        return y.transpose(1, 2).contiguous()

    def pooled(self, shares: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `Maths`; one product, whose order does not change by runs."""
        return shares @ x

    def most_of(self, x: torch.Tensor, owner: torch.Tensor, count: int) -> torch.Tensor:
        """See `Maths`."""
        found = x.new_full((x.shape[0], count + 1, x.shape[2]), float("-inf"))
        owner = owner.long().clamp(max=count)[..., None].expand_as(x)
        return found.scatter_reduce(1, owner, x, "amax")[:, :count]

    def groups(
        self, chosen: torch.Tensor, total: int, among: int, here: torch.Tensor | None = None
    ) -> Callable[..., torch.Tensor]:
        """See `Maths`; the numbers that are there, which the host asks for."""
        found = list(_groups(chosen, total))

        def made(
            make: Callable[..., torch.Tensor], numbered: Any, paired: Any, width: int, dtype: Any
        ) -> torch.Tensor:
            parts = torch.empty((len(chosen), width), dtype=dtype, device=chosen.device)
            for number, pairs in found:
                parts[pairs] = make(*taken(self, numbered, paired, number, pairs))
            return parts if here is None else torch.where(here[:, None], parts, 0)

        return made


def _dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None,
    scoring: KeyScoring,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Attention that SDPA does not have: q [B, H, T, D], k and v [B, K, S, D] to [B, H, T, D].

    `visible` bool [B or 1, 1, T, S]; `bias` [B or 1, H, T, S] is added to capped scores. Scores are
    float32, as HF has them where it matters (GPT-Neo, Gemma 2).
    """
    batch, heads, tokens, dim = q.shape
    kv_heads = k.shape[1]
    # The query heads of one KV head are rows of one product: no copy of the keys for GQA.
    rows = q.reshape(batch, kv_heads, -1, dim).float()
    scores = (rows @ k.float().mT).view(batch, heads, tokens, -1) * scoring.scale
    if (cap := scoring.softcap) is not None:
        scores = cap * torch.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if scoring.sinks is not None:
        beside = scoring.sinks[:, None, None].expand(batch, heads, tokens, 1)
        scores = torch.cat((scores, beside), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]].to(v.dtype)
    return (weights.reshape(batch, kv_heads, -1, v.shape[2]) @ v).view(batch, heads, tokens, -1)


def _groups(chosen: torch.Tensor, total: int) -> Iterator[tuple[int | torch.Tensor, torch.Tensor]]:
    """Numbers below `total` with the pairs that have chosen them.

    While a CUDA graph is captured the host may not ask: each pair has its number as int [1], those
    of higher numbers the last one.
    """
    pairs = torch.arange(len(chosen), device=chosen.device)
    if chosen.is_cuda and torch.cuda.is_current_stream_capturing():
        yield from zip(chosen.clamp(max=total - 1).split(1), pairs.split(1), strict=True)
        return
    in_order = chosen.argsort(stable=True)
    counts = chosen.bincount(minlength=total + 1).tolist()
    for number, own in enumerate(in_order.split(counts)[:total]):
        if len(own):
            yield number, own


@cache
def _table(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Made once: a CUDA graph may not capture a copy from the host.

    It has memory even where tensors have none, as in passes that are made `ahead`.
    """
    with _disable_current_modes():
        return torch.tensor(values, dtype=torch.float32, device=device)


MATHS = TorchMaths()

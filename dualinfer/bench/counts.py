"""What a model must read and multiply: the bytes and FLOPs that the limit of a row is made of."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from ..arrays import numpy_dtype
from ..backends.caches import CacheSpec, cache_specs, token_bytes
from ..backends.held import describe_rows, held_bytes
from ..model.load_plan import LoadPlan
from ..model.spec import Attention
from ..model.weights import Row
from ..parallel.sharding import whole
from ..quantization import BlockScheme

_LOOKED_UP = ("vocab", "positions", "types")  # first axes of tables that a token reads one row of


@dataclass(frozen=True)
class Counts:
    """Weights, attention and caches of one model.

    `weight_bytes` are those of all weights that a step reads, as they are held: codes and scales of
    quantized ones; those looked up row by row (the embeddings) left out, a tied head counted.
    `held_bytes` are those of all that there are. `body` are the elements of matrices that every
    token is multiplied with, `head` those of the head, `pooler` of what runs once a sequence.
    """

    weight_bytes: int
    body: int
    head: int
    pooler: int
    attention: tuple[Attention, ...]
    caches: tuple[CacheSpec, ...] = ()  # of the same layers, where they are causal
    held_bytes: int = 0

    @classmethod
    def of(cls, plan: LoadPlan, dtype: str, cache_codes: str | None = None) -> "Counts":
        """The counts of a model as an engine in `dtype` loads it.

        `cache_codes` are the config's `kv_cache_dtype`.
        """
        table, size = plan.table, numpy_dtype(dtype).itemsize
        spec, one = table.spec, whole(table)
        held = {row.name: row for row, _ in plan.rows}
        read = {name: row for name, row in held.items() if not _is_lookup(row)}
        if spec.head is not None and "head.weight" not in read:
            read["head.weight"] = held["embed.weight"]  # which is read as a head
        matrices = {name for name, row in read.items() if len(row.axes) > 1}

        def total(parts: Iterable[str]) -> int:
            return sum(prod(table.shape(read[name])) for name in parts)

        def size_of(rows: Iterable[Row]) -> int:
            return sum(held_bytes(one, row, size) for row in rows)

        head = {name for name in matrices if name.startswith("head.")}
        pooler = {name for name in matrices if name.startswith("pooler.")}
        return cls(
            weight_bytes=size_of(read.values()),
            body=total(matrices - head - pooler),
            head=total(head),
            pooler=total(pooler),
            attention=tuple(layer.attention for layer in spec.layers),
            caches=cache_specs(spec, cache_codes) if spec.causal else (),
            held_bytes=size_of(held.values()),
        )

    def kv_bytes(self, dtype: str, batch: int, prompt: int, new_tokens: int) -> float:
        """Bytes of cached keys and values that a decode step reads, the mean over all steps.

        The first new token is the prefill's. Step k of the others, from 1, reads what the prompt
        and k - 1 tokens left behind; a window hides what is older.
        """
        steps = new_tokens - 1
        total = 0
        for attention, cache in zip(self.attention, self.caches, strict=True):
            wide = token_bytes([cache], numpy_dtype(dtype).itemsize)
            most = prompt + steps if attention.window is None else attention.window - 1
            total += wide * sum(min(prompt + k, most) for k in range(steps))
        return batch * total / steps

    def flops(self, batch: int, tokens: int, head_tokens: int) -> int:
        """Multiplications and additions over `batch` sequences of `tokens` tokens.

        The head runs for the last `head_tokens` of each. Attention counts what is visible: causal,
        a token sees itself and those before it, within the window; else as many after it.
        """
        dense = tokens * self.body + head_tokens * self.head + self.pooler
        attended = 0
        for attention in self.attention:
            visible = tokens * tokens
            if attention.causal:
                most = tokens if attention.window is None else min(attention.window, tokens)
                visible = most * (most + 1) // 2 + (tokens - most) * most
            elif attention.window is not None:
                most = min(attention.window, tokens)
                visible = most * (most + 1) + 2 * (tokens - most) * most - tokens
            attended += attention.heads * attention.head_dim * visible
        return batch * (2 * dense + 4 * attended)


def describe_held(plan: LoadPlan, dtype: str) -> dict[str, Any]:
    """How the weights are held: all of them, most of the layers', and the head, for a row.

    `group` are the elements that have a scale, None for a whole row.
    """
    rows = [row for row, _ in plan.rows]
    sizes: Counter[BlockScheme] = Counter()
    for row in rows:
        if row.scheme is not None and row.layer is not None:
            sizes[row.scheme] += prod(plan.table.shape(row))
    scheme = next((own for own, _ in sizes.most_common()), None)
    weights = describe_rows(rows, whole(plan.table), dtype)
    return {
        "scheme": None if scheme is None else scheme.name,
        "group": None if scheme is None else scheme.columns or None,
        "head": weights.pop("head", None),
        "weights": weights,
    }


def _is_lookup(row: Row) -> bool:
    return len(row.axes) == 2 and row.axes[0] in _LOOKED_UP and not row.name.startswith("head.")

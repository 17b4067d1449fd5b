"""What a model must read and multiply: the bytes and FLOPs that the limit of a row is made of."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from ..backends.caches import CacheSpec, cache_specs, token_bytes
from ..model.spec import Attention, ModelSpec
from ..model.weights import Row, WeightTable

_LOOKED_UP = ("vocab", "positions", "types")  # first axes of tables that a token reads one row of
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Counts:
    """Elements, attention and caches of one model.

    `read` are all weights that a step reads: those looked up row by row (the embeddings) left out,
    a tied head counted. `body` are the elements of matrices that every token is multiplied with,
    `head` those of the head, `pooler` of what runs once a sequence. `looked_up` are those of the
    tables left out. `held` are the bytes of what is read where weights are quantized.
    """

    read: int
    body: int
    head: int
    pooler: int
    attention: tuple[Attention, ...]
    caches: tuple[CacheSpec, ...] = ()  # of the same layers, where they are causal
    looked_up: int = 0
    held: int | None = None

    @classmethod
    def of(cls, spec: ModelSpec, table: WeightTable) -> "Counts":
        """The counts of a model described by its family."""
        sizes = {row.name: _elements(row, table) for row in table.rows if not _is_lookup(row)}
        looked_up = sum(_elements(row, table) for row in table.rows if _is_lookup(row))
        matrices = {row.name for row in table.rows if len(row.axes) > 1}
        if spec.head is not None and "head.weight" not in sizes:
            sizes["head.weight"] = spec.vocab * spec.embed  # the embedding, read as a head
            looked_up -= sizes["head.weight"]
            matrices.add("head.weight")

        def total(parts: Iterable[str]) -> int:
            return sum(sizes[name] for name in parts if name in sizes)

        head = {name for name in matrices if name.startswith("head.")}
        pooler = {name for name in matrices if name.startswith("pooler.")}
        return cls(
            read=sum(sizes.values()),
            body=total(matrices - head - pooler),
            head=total(head),
            pooler=total(pooler),
            attention=tuple(layer.attention for layer in spec.layers),
            caches=cache_specs(spec) if spec.causal else (),
            looked_up=looked_up,
        )

    def quantized(self, held: int, dtype: str) -> "Counts":
        """The counts of a model whose weights take `held` bytes; tables looked up are plain."""
        return replace(self, held=held - self.looked_up * _ITEM_BYTES[dtype])

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of weights that a step reads."""
        return self.read * _ITEM_BYTES[dtype] if self.held is None else self.held

    def kv_bytes(self, dtype: str, batch: int, prompt: int, new_tokens: int) -> float:
        """Bytes of cached keys and values that a decode step reads, the mean over all steps.

        The first new token is the prefill's. Step k of the others, from 1, reads what the prompt
        and k - 1 tokens left behind; a window hides what is older.
        """
        steps = new_tokens - 1
        total = 0
        for attention, cache in zip(self.attention, self.caches, strict=True):
            wide = token_bytes([cache], _ITEM_BYTES[dtype])
            most = prompt + steps if attention.window is None else attention.window - 1
            total += wide * sum(min(prompt + k, most) for k in range(steps))
        return batch * total / steps

    def flops(self, batch: int, tokens: int, head_tokens: int) -> int:
        """Multiplications and additions over `batch` sequences of `tokens` tokens.

        The head runs for the last `head_tokens` of each. Attention counts what is visible: causal,
        a token sees itself and those before it, within the window.
        """
        dense = tokens * self.body + head_tokens * self.head + self.pooler
        attended = 0
        for attention in self.attention:
            visible = tokens * tokens
            if attention.causal:
                most = tokens if attention.window is None else min(attention.window, tokens)
                visible = most * (most + 1) // 2 + (tokens - most) * most
            attended += attention.heads * attention.head_dim * visible
        return batch * (2 * dense + 4 * attended)


def _elements(row: Row, table: WeightTable) -> int:
    return prod(table.shape(row))


def _is_lookup(row: Row) -> bool:
    return len(row.axes) == 2 and row.axes[0] in _LOOKED_UP and not row.name.startswith("head.")

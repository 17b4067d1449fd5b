"""The bytes and FLOPs that a model must read and multiply, of which a row's limit is made."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..arrays import numpy_dtype
from ..backends.held import describe_rows, held_bytes, read_share
from ..model.load_plan import LoadPlan
from ..model.spec import Attention, Experts
from ..model.weights import Row
from ..ops.caches import (
    AS_COMPUTED,
    CacheSpec,
    KeptIn,
    Room,
    cache_bytes,
    cache_specs,
    state_bytes,
    token_bytes,
)
from ..parallel.shard import whole
from ..quantization import BlockScheme

_LOOKED_UP = (
    "vocab",
    "positions",
    "source_positions",
    "types",
    "boxes",
)  # first axes of tables that a token reads one row of


@dataclass(frozen=True)
class Counts:
    """Weights, attention and caches of one model.

    `weight_bytes` are those of all weights that a step may read, as they are held: codes and scales
    of quantized ones; those looked up row by row (the embeddings) left out, a tied head counted.
    `mixtures` are those among them of layers' experts. Those of an encoder, and what makes keys and
    values of its output, are no step's: `once` counts what is computed once for each sequence that
    it reads, and `cross` are the caches of that. `held_bytes` are those of all that there are.
    `body` are the elements of matrices that a token is multiplied with, `head` those of the head,
    `pooler` of what runs once a sequence. `states` are the caches of recurrences, and `recurred`
    what a token is multiplied with in these.
    """

    weight_bytes: int
    body: int
    head: int
    pooler: int
    attention: tuple[Attention, ...]
    caches: tuple[CacheSpec, ...] = ()  # of the same layers, where they are causal
    held_bytes: int = 0
    once: "Counts | None" = None
    cross: tuple[CacheSpec, ...] = ()
    mixtures: tuple["Mixture", ...] = ()
    states: tuple[CacheSpec, ...] = ()
    recurred: int = 0

    @classmethod
    def of(cls, plan: LoadPlan, dtype: str, kept: KeptIn = AS_COMPUTED) -> "Counts":
        """The counts of a model as an engine in `dtype` loads it."""
        table, size = plan.table, numpy_dtype(dtype).itemsize
        spec, one = table.spec, whole(table)
        held = {row.name: row for row, _ in plan.rows}
        read = {name: row for name, row in held.items() if not _is_lookup(row)}
        of_encoder = {
            name: row
            for name, row in read.items()
            if name.startswith("encoder.")
            or (row.layer is not None and row.layer >= len(spec.layers))
            or row.local_name.startswith("cross_kv.")
        }
        read = {name: row for name, row in read.items() if name not in of_encoder}
        if spec.head is not None and "head.weight" not in read:
            read["head.weight"] = held["embed.weight"]  # which is read as a head
        matrices = {name for name, row in read.items() if _is_matrix(row)}

        def total(parts: Iterable[str]) -> int:
            rows = [(held | read)[name] for name in parts]
            return sum(round(prod(table.shape(r)) * read_share(spec, r, 1)) for r in rows)

        def size_of(rows: Iterable[Row]) -> int:
            return sum(held_bytes(one, row, size) for row in rows)

        caches, once = cache_specs(spec, kept) if spec.causal else (), None
        if spec.encoder:
            own = {name for name, row in of_encoder.items() if _is_matrix(row)}
            attention = spec.encoder.attentions
            once = cls(size_of(of_encoder.values()), total(own), 0, 0, attention)
        head = {name for name in matrices if name.startswith("head.")}
        pooler = {name for name in matrices if name.startswith("pooler.")}
        return cls(
            weight_bytes=size_of(read.values()),
            body=total(matrices - head - pooler),
            head=total(head),
            pooler=total(pooler),
            attention=spec.attentions,
            caches=tuple(caches[n] for n in spec.cache_numbers.values()) if caches else (),
            held_bytes=size_of(held.values()),
            once=once,
            cross=tuple(cache for cache in caches if cache.kind == "cross"),
            states=tuple(cache for cache in caches if cache.kind == "state"),
            recurred=sum(own.recurrence.multiplied for own in spec.layers if own.recurrence),
            mixtures=tuple(
                Mixture(mlp.count + mlp.idle, mlp.router.chosen, held_bytes(one, row, size))
                for row in read.values()
                if read_share(spec, row, 1) < 1
                and row.layer is not None
                and isinstance(mlp := spec.layers[row.layer].mlp, Experts)
            ),
        )

    def read_bytes(self, tokens: int) -> int:
        """Bytes of weights that a step of so many tokens is expected to read.

        Of a mixture those of the experts that are chosen, where each token takes its own by lot.
        """
        unread = sum(own.size * (1 - own.chosen / own.count) ** tokens for own in self.mixtures)
        return round(self.weight_bytes - unread)

    def kv_bytes(self, dtype: str, batch: int, prompt: int, new_tokens: int) -> float:
        """Bytes of caches that a decode step reads, the mean over all steps.

        The first new token is the prefill's. Step k of the others, from 1, reads what the prompt
        and k - 1 tokens left behind; a window hides what is older. An encoder's prompt leaves the
        same to every step, and the decoder begins with one token. A state, which a step reads and
        writes, counts twice.
        """
        steps = new_tokens - 1
        itemsize, total = numpy_dtype(dtype).itemsize, 0
        if self.once:
            total = steps * cache_bytes(self.cross, Room(1, 0, prompt), itemsize)
            prompt = 1
        for attention, cache in zip(self.attention, self.caches, strict=True):
            wide = token_bytes([cache], itemsize)
            most = prompt + steps if attention.reach is None else attention.reach - 1
            total += wide * sum(min(prompt + k, most) for k in range(steps))
        return batch * (total / steps + 2 * state_bytes(self.states, itemsize))

    def flops(self, batch: int, tokens: int, head_tokens: int) -> int:
        """Multiplications and additions over `batch` sequences of `tokens` tokens.

        The head runs for the last `head_tokens` of each. Attention counts what is visible: causal,
        a token sees itself and those before it, within the window; else as many after it. Where an
        encoder reads these tokens, the decoder's are as many as the head's, and each sees all of
        them.
        """
        if self.once:
            heads = sum(cache.kv_heads * cache.key_dim for cache in self.cross)
            across = 4 * batch * heads * tokens * head_tokens
            decoded = replace(self, once=None).flops(batch, head_tokens, head_tokens)
            return self.once.flops(batch, tokens, 0) + decoded + across
        dense = tokens * (self.body + self.recurred) + head_tokens * self.head + self.pooler
        attended = 0
        for attention in self.attention:
            visible = tokens * tokens
            if attention.causal:
                most = tokens if attention.reach is None else min(attention.reach, tokens)
                visible = most * (most + 1) // 2 + (tokens - most) * most
                if attention.chunk is not None:
                    whole, rest = divmod(tokens, most)
                    visible = (whole * most * (most + 1) + rest * (rest + 1)) // 2
            elif attention.window is not None:
                most = min(attention.window, tokens)
                visible = most * (most + 1) + 2 * (tokens - most) * most - tokens
            query, _, value = attention.head_widths
            value *= attention.halves  # a head reads one of each
            attended += attention.heads * (query + value) * visible
        return batch * 2 * (dense + attended)


@dataclass(frozen=True)
class Mixture:
    """A matrix of all experts of a layer: a token has `chosen` of `count`, and its bytes."""

    count: int
    chosen: int
    size: int


def describe_held(plan: LoadPlan, dtype: str) -> dict[str, Any]:
    """The schemes of the weights: of all of them, most of the layers', and the head, for a row.

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


def _is_matrix(row: Row) -> bool:
    """True for what tokens are multiplied with: no vector, and no table of biases."""
    return len(row.axes) > 1 and not row.picks


def _is_lookup(row: Row) -> bool:
    return len(row.axes) == 2 and row.axes[0] in _LOOKED_UP and not row.name.startswith("head.")

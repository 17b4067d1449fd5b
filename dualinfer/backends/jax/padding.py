"""Inputs of whole sequences in buckets, so that few sizes are compiled."""

from typing import Any, NamedTuple

import numpy as np

from ...model.spec import ModelSpec
from ...ops.contract import Tokens
from ..base import ForwardInputs
from ..slots import bucket, bucket_of_rows
from .sampler import SMALLEST_PROMPT

_SHORT = 256  # tokens


class Padded(NamedTuple):
    """Inputs that fill a bucket of `size`, rows and tokens.

    Of a row in it `places` tokens have logits. An encoder really reads `read` tokens, of `width` in
    the bucket; None and 0 where there is none. What is so by default is None, and made on the
    device.
    """

    size: tuple[int, int]
    places: int
    read: int | None
    width: int
    tokens: Tokens


def pad_inputs(spec: ModelSpec, inputs: ForwardInputs) -> Padded:
    """The inputs of a forward pass in their bucket."""
    given = inputs.tokens
    batch, tokens = given.shape
    rows = bucket_of_rows(batch) if inputs.texts else bucket(batch)
    size = rows, _length(tokens)
    mask, positions, types = given.mask, given.positions, given.token_types
    hides = mask is None and not spec.causal and given.segments is None
    if hides and size != (batch, tokens):
        mask = np.ones((batch, tokens), bool)  # hides the bucket's own padding
    # The largest of a row says how long it is, which padding must not be.
    if mask is None and _counts_up(positions) and not spec.turns_by_length:
        positions = None
    if types is not None and spec.embedding.types != "vocab" and not types.any():
        types = None
    segments = given.segments
    if segments is None and spec.reads_near and size != (batch, tokens):
        segments = np.zeros((batch, tokens), np.int32)  # keeps the bucket's padding apart
    read = source = None
    if given.source is not None:
        read, source = given.source.shape[1], _pad_source(spec, given.source, size[0])
    places = size[1] if given.kept is None else bucket(len(given.kept))
    # Padding is a segment of its own, behind the others.
    own = 0 if segments is None else max(inputs.texts, int(segments.max()) + 1)
    arrays = given.ids, positions, mask, types, segments, given.embeds, given.weights
    padded = [None if x is None else fill_up(x, size, own if x is segments else 0) for x in arrays]
    kept = None if given.kept is None else np.resize(given.kept, places)
    blend = given.blend
    if blend is not None:
        more = size[0] - len(blend) if len(blend) > 1 else 0
        blend = np.pad(blend, ((0, more), (0, size[1] - blend.shape[1]), (0, 0)))
    width = 0 if read is None else bucket(read, SMALLEST_PROMPT)
    whole = Tokens._make((*padded, blend, kept, None, source))
    return Padded(size, places, read, width, whole)


def _length(tokens: int) -> int:
    """The bucket of a row's tokens: for long rows, whose padding costs most, twice as many."""
    return bucket_of_rows(tokens) if tokens > _SHORT else bucket(tokens, SMALLEST_PROMPT)


def fill_up(array: np.ndarray, size: tuple[int, int], fill: int = 0) -> np.ndarray:
    """The array [B, T, ...] at the beginning of one of `size`, filled up."""
    padded = np.full((*size, *array.shape[2:]), fill, array.dtype)
    padded[: array.shape[0], : array.shape[1]] = array
    return padded


def _counts_up(positions: Any) -> bool:
    return np.array_equal(
        positions, np.broadcast_to(np.arange(positions.shape[1]), positions.shape)
    )


def _pad_source(spec: ModelSpec, source: Tokens, rows: int) -> Tokens:
    """The padded inputs of an encoder, or what it gave before, for so many rows."""
    batch, tokens = source.shape
    size, mask = (rows, bucket(tokens, SMALLEST_PROMPT)), source.mask
    if source.states is None and spec.encoder and spec.encoder.one_length:
        assert source.embeds is not None
        return Tokens(embeds=fill_up(source.embeds, (rows, source.embeds.shape[1])))
    if mask is None and (batch, tokens) != size:
        mask = np.ones((batch, tokens), bool)
    positions = None if _counts_up(source.positions) else source.positions
    read = Tokens(source.ids, positions, embeds=source.embeds)
    if source.states is not None:
        read = Tokens(states=source.states)
    padded = read._replace(mask=mask).each(lambda x: fill_up(x, size))
    if padded.mask is not None:
        padded.mask[batch:] = True  # rows that see nothing are no numbers
    return padded

"""Texts packed into rows of one pass, so that no padding is computed between them."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..backends.base import ForwardInputs, Tokens
from ..backends.slots import bucket, bucket_of_rows
from ..model.spec import ModelSpec
from .inputs import default_positions

SMALLEST_ROW = 16  # tokens
_ROW = 512


class Pass(NamedTuple):
    """One forward pass: its rows of `width` tokens, each with the numbers of its texts in order."""

    width: int
    rows: list[list[int]]


def make_passes(
    lengths: Sequence[int], tokens: int, most: int | None, packs: bool
) -> Iterator[Pass]:
    """Passes of about `tokens` tokens, and of `most` texts, over texts of these lengths.

    Long texts come first. A row's width is a power of two, so that there are few shapes, and at
    least 512 where there is enough to fill it. Unless the model `packs`, a text has a row of its
    own.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for i, length in enumerate(lengths):
        groups[bucket(length, _ROW if packs else SMALLEST_ROW)].append(i)
    for width, members in sorted(groups.items(), reverse=True):
        total = sum(lengths[i] for i in members)
        width = min(width, bucket(total, SMALLEST_ROW)) if packs else width
        rows = _fill(lengths, members, width) if packs else [[i] for i in members]
        count, part, held = max(1, tokens // width), [], 0
        for row in _cut(rows, most):
            if part and (len(part) == count or (most and held + len(row) > most)):
                yield Pass(width, part)
                part, held = [], 0
            part.append(row)
            held += len(row)
        if part:
            yield Pass(width, part)


def _cut(rows: list[list[int]], most: int | None) -> Iterator[list[int]]:
    """The rows, those with more than `most` texts as several."""
    for row in rows:
        size = most or len(row)
        yield from (row[first : first + size] for first in range(0, len(row), size))


def _fill(lengths: Sequence[int], members: Sequence[int], width: int) -> list[list[int]]:
    """Rows of up to `width` tokens: to the longest text left the longest that still fit."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for i in reversed(members):
        by_length[lengths[i]].append(i)
    there, rows = sorted(by_length), []
    while there:
        row, room = [], width
        while (at := bisect_right(there, room) - 1) >= 0:
            length = there[at]
            row.append(by_length[length].pop())
            room -= length
            if not by_length[length]:
                del there[at]
        rows.append(row)
    return rows


def make_inputs(
    spec: ModelSpec,
    texts: Sequence[np.ndarray],
    weights: Sequence[np.ndarray],
    one: Pass,
    largest: bool,
    pads: bool,
) -> ForwardInputs:
    """The inputs of one pass over ids int32 [T] of each text, pooled by float32 weights [T].

    With `pads` empty rows are added up to one of few numbers, so that what was compiled or captured
    for another pass serves this one.
    """
    count = len(one.rows)
    shape = bucket_of_rows(count) if pads else count, one.width
    ids, positions, segments = (np.zeros(shape, np.int32) for _ in range(3))
    pooled = np.zeros(shape, np.float32)
    usual = default_positions(spec, (1, one.width), None, None)[0]
    for r, row in enumerate(one.rows):
        end = 0
        for number, i in enumerate(row):
            text = texts[i]
            begin, end = end, end + len(text)
            ids[r, begin:end], pooled[r, begin:end] = text, weights[i]
            segments[r, begin:end] = number
            own = usual[: len(text)]
            if spec.positions.counted == "ids" and (text == spec.pad_id).any():
                own = default_positions(spec, (1, len(text)), text[None], None)[0]
            positions[r, begin:end] = own
        segments[r, end:] = len(row)  # what fills a row up sees itself alone
    types = np.zeros(shape, np.int32) if spec.embedding.own_types else None
    most = bucket(max(map(len, one.rows)))
    tokens = Tokens(ids, positions, None, types, segments, weights=pooled)
    return ForwardInputs(tokens, texts=most, largest=largest)

"""Prompts of generate: a batch without its padding, and the columns that the result begins with."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import Kind, kind_of
from ..errors import ArgumentError
from ..model.spec import ModelSpec
from .checks import check_embeds, check_ids, check_mask


@dataclass(frozen=True)
class Prompts:
    """A batch of prompts without padding, and the block of columns that the result begins with.

    `block` int64 [B, width] holds each prompt at its right end. `kind` and `like` say which
    framework and device the result goes back to. `embeds` are what the model reads of each prompt
    in the place of its ids, of which there may then be none.
    """

    rows: tuple[np.ndarray, ...]
    block: np.ndarray
    kind: Kind
    like: Any
    embeds: tuple[np.ndarray, ...] | None = None

    @property
    def lengths(self) -> list[int]:
        """Tokens that the model reads of each prompt."""
        return [len(row) for row in (self.rows if self.embeds is None else self.embeds)]


def make_prompts(
    ids: Any,
    mask: Any,
    vocab: int,
    pad_id: int | None,
    eos_ids: tuple[int, ...],
    name: str = "input_ids",
) -> Prompts:
    """Prompts from [B, T] ids with a mask, or from a list of lists of any lengths.

    Without a mask, ids equal to a `pad_id` that is no EOS are padding in an array, as in HF; in a
    list, which needs no padding, every token counts. Raises ArgumentError for an empty prompt.
    """
    if ids is None:
        raise ArgumentError("input_ids is missing; generate needs a prompt.")
    kind = kind_of(ids) or "list"
    like = ids if kind == "torch" else None
    if kind_of(ids) == "list" and len(ids) and _has_rows(ids[0]):
        return _make_ragged(ids, mask, vocab, pad_id, name)
    array = check_ids(ids, name, vocab)
    visible = check_mask(mask, array.shape)
    if visible is None:
        padded = kind != "list" and pad_id is not None and pad_id not in eos_ids
        visible = array != pad_id if padded else np.ones(array.shape, bool)
    rows, block = [], np.empty(array.shape, np.int64)
    for i, (row, keep) in enumerate(zip(array, visible, strict=True)):
        if not keep.any():
            raise ArgumentError(f"Prompt {i} is empty: every token of it is masked.")
        rows.append(row[keep])
        block[i] = np.concatenate((row[~keep], row[keep]))
    return Prompts(tuple(rows), block, kind, like)


def make_embedded(embeds: Any, ids: Any, mask: Any, spec: ModelSpec) -> Prompts:
    """Prompts from embeddings [B, T, W]; `ids` [B, T] begin the result, which else is new tokens.

    Raises ArgumentError for what does not fit, and for an empty prompt.
    """
    vectors = check_embeds(embeds, spec)
    shape = vectors.shape[0], vectors.shape[1]
    visible = check_mask(mask, shape)
    visible = np.ones(shape, bool) if visible is None else visible
    for i, keep in enumerate(visible):
        if not keep.any():
            raise ArgumentError(f"Prompt {i} is empty: every token of it is masked.")
    kind = kind_of(embeds) or "list"
    like = embeds if kind == "torch" else None
    rows, block = (np.empty(0, np.int32),) * shape[0], np.empty((shape[0], 0), np.int64)
    if ids is not None:
        tokens = check_ids(ids, "input_ids", spec.vocab)
        if tokens.shape != shape:
            raise ArgumentError(
                f"input_ids has shape {tokens.shape} and inputs_embeds {vectors.shape}: where both "
                "are given, the ids must be those of the embeddings. Leave input_ids out."
            )
        named = make_prompts(tokens, visible, spec.vocab, None, ())
        rows, block = named.rows, named.block
    parts = tuple(row[keep] for row, keep in zip(vectors, visible, strict=True))
    return Prompts(rows, block, kind, like, parts)


def _make_ragged(ids: Any, mask: Any, vocab: int, pad_id: int | None, name: str) -> Prompts:
    if mask is not None and (not _has_rows(mask) or len(mask) != len(ids)):
        raise ArgumentError(f"attention_mask must have one row for each of {len(ids)} prompts.")
    rows = []
    for i, row in enumerate(ids):
        if _has_rows(row) and len(row) == 0:
            raise ArgumentError(f"Prompt {i} is empty.")
        tokens = check_ids(row, f"{name}[{i}]", vocab)
        if len(tokens) > 1:
            raise ArgumentError(f"{name}[{i}] has shape {tokens.shape}; expected one prompt.")
        keep = None if mask is None else check_mask(mask[i], tokens.shape)
        if keep is not None and not keep.any():
            raise ArgumentError(f"Prompt {i} is empty: every token of it is masked.")
        rows.append(tokens[0] if keep is None else tokens[keep])
    width = max(len(row) for row in rows)
    if pad_id is None and any(len(row) < width for row in rows):
        raise ArgumentError(
            "The prompts differ in length and the result is left-padded, but the model names "
            "neither a pad_token_id nor an eos_token_id. Pass pad_token_id."
        )
    block = np.full((len(rows), width), -1 if pad_id is None else pad_id, np.int64)
    for i, row in enumerate(rows):
        block[i, width - len(row) :] = row
    return Prompts(tuple(rows), block, "list", None)


def _has_rows(value: Any) -> bool:
    """True for lists, and for arrays of one axis or more."""
    return kind_of(value) is not None and getattr(value, "ndim", 1) > 0

"""The inputs of one forward pass, made of the caller's arguments, which are checked."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..arrays import kind_of
from ..backends.base import ForwardInputs, Tokens
from ..errors import ArgumentError, a_type, shown
from ..model.spec import ModelSpec, Probe
from .checks import (
    MEDIA,
    check_embeds,
    check_ids,
    check_length,
    check_mask,
    is_zero,
    read_array,
    refuse_prefix,
)
from .labels import NO_LABEL, check_ends, check_labels, check_loss_count, check_numbers, loss_kind

TEXT_ALONE = (
    "of a model that sees or hears fused mode serves the text alone. Leave it out, or pass HF's "
    "module itself with backend='torch', which runs as it is."
)
# Why fused mode does not serve some of HF's arguments, and what to do.
REASONS = {
    "past_key_values": (
        "the cache is the engine's own, in slots and buckets that graphs and executables read. "
        "Pass the whole prompt; engine.generate keeps its cache by itself."
    ),
    "output_attentions": (
        "attention is fused, so that its weights are never in memory. Pass False, or take them in "
        "module mode of a model with attn_implementation='eager'."
    ),
    **dict.fromkeys(MEDIA, TEXT_ALONE),
}


def text_alone(spec: ModelSpec) -> str:
    """The end of an error about an image or a sound that a model of texts is given."""
    is_part = spec.architecture.endswith("ForConditionalGeneration") and not spec.encoder
    return f": {TEXT_ALONE}" if is_part else ". Leave it out."


class Text(NamedTuple):
    """The arguments of a caller that say which tokens a model of text reads, as in HF's forward.

    `boxes` are where tokens lie on a page.
    """

    ids: Any
    mask: Any = None
    positions: Any = None
    types: Any = None
    embeds: Any = None
    boxes: Any = None


class Wanted(NamedTuple):
    """The results that a caller wants of a pass, as in HF's forward.

    `ends` are the first and the last token of each row's answer, `loss_count` is
    `num_items_in_batch`, and `problem` the config's `problem_type`.
    """

    output_hidden_states: bool = False
    logits_to_keep: Any = 0
    labels: Any = None
    ends: tuple[Any, Any] = (None, None)
    loss_count: Any = None
    problem: Any = None


def make_forward_inputs(
    spec: ModelSpec, text: Text, wanted: Wanted, *, may_pack: bool, name: str = "input_ids"
) -> ForwardInputs:
    """One forward pass's inputs, called `name` in errors.

    `may_pack`: positions that start anew separate sequences.

    Raises ArgumentError for what does not fit the model, and LengthError for more tokens than it
    has positions.
    """
    ids, mask, positions, types, embeds, boxes = text
    labels = wanted.labels
    if (ids is None) == (embeds is None):
        given = "input_ids is missing" if ids is None else "input_ids and inputs_embeds were given"
        raise ArgumentError(f"{given}; pass input_ids or inputs_embeds, one of them.")
    tokens = vectors = choices = None
    if spec.head is not None and spec.head.kind == "choice":
        given = "input_ids" if embeds is None else "inputs_embeds"
        choices, (ids, embeds, mask, positions, types) = _beside_each_other(
            given,
            {"input_ids": ids, "inputs_embeds": embeds, "attention_mask": mask}
            | {"position_ids": positions, "token_type_ids": types},
        )
    if embeds is None:
        tokens = check_ids(ids, name, spec.vocab)
        shape = batch, length = tokens.shape[0], tokens.shape[1]
    else:
        vectors = check_embeds(embeds, spec)
        shape = batch, length = vectors.shape[0], vectors.shape[1]
    visible = check_mask(mask, shape)
    hidden = None if visible is not None else spec.hidden
    if hidden is not None and tokens is not None and (tokens == hidden).any():
        shown_by = "decoder_attention_mask" if spec.crosses else "attention_mask"
        raise ArgumentError(
            f"{name} holds the id {hidden} of padding, which HF's {spec.architecture} hides "
            f"from parts of the model where there is no {shown_by}. Pass {shown_by}."
        )
    segments = None
    at = default_positions(spec, shape, tokens, visible)
    before = spec.positions.before(spec.pad_id)
    longest = int(at.max()) + 1 - before if before else length
    given = name if embeds is None else "inputs_embeds"
    check_length(spec, longest, f"{given} has {longest} tokens", "Pass at most so many.")
    if positions is not None:
        limit = spec.positions.rows or 2**31 - 1
        given = check_ids(positions, "position_ids", limit, "positions")
        given = _broadcast(given, "position_ids", shape)
        if spec.alibi and ((given != at) if visible is None else (given != at) & visible).any():
            raise ArgumentError(
                f"The {spec.family} family takes no position_ids: attention counts the tokens of "
                "attention_mask itself. Leave them out; padding is told by attention_mask."
            )
        at = at if spec.alibi else given
        if spec.causal and spec.packs and visible is None and may_pack:
            segments = _packed_segments(at)
    weights = pooling_weights(spec, shape, tokens, visible)
    if visible is not None and visible.all():
        visible = None
    if types is not None:
        if spec.embedding.types == "prefix":
            refuse_prefix(spec)
        if not spec.token_types and not is_zero(types):
            raise ArgumentError(
                f"The {spec.family} family has no token types, but token_type_ids holds other "
                "values than 0."
            )
        types = check_ids(types, "token_type_ids", spec.token_types or 1, "token types")
        types = _broadcast(types, "token_type_ids", shape) if spec.token_types else None
    elif spec.embedding.own_types:
        types = np.zeros(shape, np.int32)
    if boxes is not None:
        assert types is not None
        types = np.concatenate((types[..., None], _check_boxes(spec, boxes, shape)), -1)
    kept = _kept_tokens(spec, wanted.logits_to_keep, length)
    targets, loss = None, loss_kind(spec, labels, wanted.problem)
    if loss != "classes":
        targets = check_numbers(spec, labels, batch)
    elif labels is not None:
        many = length if kept is None else len(kept)
        targets = check_labels(spec, labels, (batch // (choices or 1), many), choices)
        if spec.masks_labels and visible is not None:
            shown = visible if kept is None else visible[:, kept]
            targets[:, :-1][~shown[:, 1:]] = NO_LABEL
    if any(end is not None for end in wanted.ends):
        targets = check_ends(wanted.ends, shape)
    count = None if targets is None else check_loss_count(spec, wanted.loss_count)
    read = Tokens(tokens, at, visible, types, segments, vectors, weights, kept=kept)
    return ForwardInputs(read, wanted.output_hidden_states, targets, count, loss, choices)


def _check_boxes(spec: ModelSpec, boxes: Any, shape: tuple[int, int]) -> np.ndarray:
    """The places of tokens on a page, int32 [B, T, 4], from a caller's bbox [B, T, 4]."""
    array = read_array(boxes, "bbox", "rows differ in length; pad them.")
    if array.dtype.kind not in "iu" or array.shape != (*shape, 4):
        raise ArgumentError(
            f"bbox has shape {array.shape} and dtype {array.dtype}; expected integers "
            f"{(*shape, 4)}, the left, upper, right and lower edge of each token's box."
        )
    array = array.astype(np.int64)  # differences of unsigned numbers have no sign
    sides = array[..., 2:] - array[..., :2]
    edges = spec.embedding.boxes
    if (array < 0).any() or (array >= edges).any() or (sides < 0).any():
        raise ArgumentError(
            f"bbox: {spec.architecture} takes edges from 0 to {edges - 1}, as thousandths of "
            "the page, with right and lower ones no less than left and upper ones."
        )
    return array.astype(np.int32)


def _beside_each_other(name: str, given: dict[str, Any]) -> tuple[int, list[Any]]:
    """The number of choices in a row, and arrays [B, choices, ...] as [B choices, ...].

    Raises ArgumentError where an array's first axes are not those of `name`.
    """
    arrays = {
        own: None if x is None else read_array(x, own, "rows differ in length; pad them.")
        for own, x in given.items()
    }
    axes = 3 if name == "input_ids" else 4
    first = arrays[name]
    assert first is not None  # the caller gives one of the two
    shape = first.shape
    if len(shape) != axes:
        raise ArgumentError(
            f"{name} has shape {shape}; a model for multiple choice expects [batch, choices, "
            f"tokens{', width' if axes > 3 else ''}]."
        )
    for own, x in arrays.items():
        if x is not None and x.shape[:3] != shape[:3]:
            raise ArgumentError(f"{own} has shape {x.shape}; expected {shape[:3]}.")
    flat = [None if x is None else x.reshape(-1, *x.shape[2:]) for x in arrays.values()]
    return shape[1], flat


def pooling_weights(
    spec: ModelSpec,
    shape: tuple[int, int],
    ids: Any,
    visible: Any,
    xp: Any = np,
) -> Any:
    """float32 [B, T]: what a head sums a sequence's tokens with; None if it pools none.

    Of arrays of the module `xp`, which may be traced.
    """
    pooling = spec.head.pooling if spec.head else spec.pooled and spec.pooled.pooling
    if pooling is None or pooling == "eos":  # by what the encoder reads
        return None
    real = xp.ones(shape, bool) if visible is None else visible
    if isinstance(pooling, Probe):
        return real.astype(np.float32)
    count = np.arange(shape[1])
    if pooling in ("patches", "beside"):
        assert spec.patches is not None
        real = real & (count >= spec.patches.learned)
    if pooling in ("mean", "late", "patches", "beside"):
        mean = (real / xp.maximum(real.sum(1, keepdims=True), 1)).astype(np.float32)
        return mean + np.float32(count == 0) if pooling == "beside" else mean
    at = xp.zeros(shape[0], np.int32)
    if pooling == "real":
        at = real.argmax(1)
    elif pooling == "end":
        assert spec.pooled is not None
        if ids is None:
            raise ArgumentError(
                f"inputs_embeds: {spec.architecture} finds the end of a text by its id. Pass "
                "input_ids."
            )
        end = spec.end_id
        at = (ids if end is None else ids == end).argmax(1)
    elif pooling == "final":
        at += shape[1] - 1
    elif pooling == "last" and spec.pad_id is None and shape[0] > 1:
        raise ArgumentError(
            f"{spec.architecture} scores the last token that is no padding, and its config names "
            f"no pad_token_id by which to tell, but there are {shape[0]} rows. Pass one at a time, "
            'or args={"pad_token_id": ...} to init_inference.'
        )
    elif pooling == "last" and (spec.pad_id is None or ids is None):
        at += shape[1] - 1
    elif pooling == "last" and ids is not None:
        at = ((ids != spec.pad_id) * count).argmax(1)
    return (count == at[:, None]).astype(np.float32)


def _kept_tokens(spec: ModelSpec, keep: Any, length: int) -> np.ndarray | None:
    """The tokens whose logits HF's `logits_to_keep` asks for, int32 [K]; None for all.

    An int is that many at the end, all for 0; an array [K] has their places, negative ones from
    the end.
    """
    if keep is None or (isinstance(keep, int) and not isinstance(keep, bool) and keep == 0):
        return None
    head = spec.head
    if head is None or head.kind != "causal" or (spec.encoder and "keeps" not in head.ways):
        raise ArgumentError(
            f"logits_to_keep={shown(keep)}: {spec.architecture} has no such argument in HF, only "
            "causal models with a vocabulary head have. Leave it out."
        )
    if isinstance(keep, int | np.integer) and not isinstance(keep, bool):
        if keep < 0:
            raise ArgumentError(
                f"logits_to_keep={keep}; expected the number of tokens at the end, 0 for all, or "
                "an array of places."
            )
        return np.arange(max(0, length - int(keep)), length, dtype=np.int32)
    if kind_of(keep) is None:
        raise ArgumentError(f"logits_to_keep is {a_type(keep)}; expected an int or array.")
    places = read_array(keep, "logits_to_keep", "it has no shape.")
    if places.ndim == 0 and places.dtype.kind in "iu":
        return _kept_tokens(spec, int(places), length)
    if places.ndim != 1 or places.dtype.kind not in "iu" or not places.size:
        raise ArgumentError(
            f"logits_to_keep has shape {places.shape} and dtype {places.dtype}; expected integers "
            "[tokens], the places of one row that serve all."
        )
    if (places < -length).any() or (places >= length).any():
        raise ArgumentError(
            f"logits_to_keep holds places outside of the {length} tokens ({-length} to "
            f"{length - 1})."
        )
    places = places.astype(np.int64)
    return np.where(places < 0, places + length, places).astype(np.int32)


def default_positions(
    spec: ModelSpec, shape: tuple[int, int], ids: Any, visible: Any, xp: Any = np
) -> Any:
    """The positions of tokens for which the caller gives none, as HF counts them; int32 [B, T].

    0 to T-1 for every row, the number of `visible` tokens before each, or that of ids that are no
    padding. Of arrays of the module `xp`, which may be traced.
    """
    return spec.positions.of_tokens(shape, ids, visible, spec.pad_id, xp)


def _broadcast(array: np.ndarray, name: str, shape: tuple[int, int]) -> np.ndarray:
    if array.shape not in (shape, (1, shape[1])):
        raise ArgumentError(f"{name} has shape {array.shape}; expected {shape}.")
    return np.broadcast_to(array, shape).copy()


def _packed_segments(positions: np.ndarray) -> np.ndarray | None:
    """Numbers of the packed sequences in each row, None if there is one.

    HF starts a new one wherever a position is not its predecessor plus one (`masking_utils.py`).
    """
    starts = np.diff(positions, axis=1, prepend=positions[:, :1] - 1) != 1
    segments = starts.cumsum(axis=1).astype(np.int32)
    return segments if segments.any() else None


def refuse_arguments(function: str, arguments: Mapping[str, Any]) -> None:
    """HF arguments that dualinfer does not serve pass only where they ask for nothing.

    Processors give `mm_token_type_ids` to texts, too, and zeros say that there is nothing else.
    """
    if is_zero(arguments.get("mm_token_type_ids")):
        arguments = {name: v for name, v in arguments.items() if name != "mm_token_type_ids"}
    asked = [n for n, v in arguments.items() if not (v is None or (isinstance(v, int) and v == 0))]
    if asked:
        reasons = [f"{name}: {REASONS[name]}" for name in sorted(asked) if name in REASONS]
        raise ArgumentError(
            f"{function} does not support {', '.join(sorted(asked))}. Supported: input_ids, "
            "attention_mask, position_ids, token_type_ids, inputs_embeds, labels, "
            "num_items_in_batch, logits_to_keep, output_hidden_states, return_dict, "
            f"return_tuple. {' '.join(reasons)}".rstrip()
        )

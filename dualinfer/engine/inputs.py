"""The caller's token ids, checked and brought into host memory: for forward and for generate."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from ..arrays import Kind, kind_of, to_numpy
from ..backends.base import NO_LABEL, ForwardInputs, LossKind
from ..errors import ArgumentError, LengthError, shown
from ..model.spec import ModelSpec

# Why fused mode does not serve some of HF's arguments, and what to do.
REASONS = {
    "past_key_values": (
        "the cache is the engine's own, in slots and buckets that graphs and executables read. "
        "Pass the whole prompt; engine.generate keeps its cache by itself."
    ),
    "output_attentions": (
        "attention is fused, so that its weights are never in memory. Pass False, or take them in "
        "module mode."
    ),
}


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


def by_name(inputs: Any) -> dict[str, Any] | None:
    """What a HF tokenizer has made, its ids, mask and token types by name; None for other values.

    Raises ArgumentError for a str, since the way from a text is another.
    """
    if isinstance(inputs, str):
        raise ArgumentError(
            f"input_ids is a str ({shown(inputs)}); expected token ids. For text in and text out "
            "call engine.generate_text(...) or engine.stream_text(...), or tokenize it first: "
            'engine.generate(**tokenizer(text, return_tensors="np")).'
        )
    if not isinstance(inputs, Mapping) or "input_ids" not in inputs:
        return None
    names = ("input_ids", "attention_mask", "token_type_ids")
    return {name: inputs.get(name) for name in names}


def check_ids(ids: Any, name: str, vocab: int, what: str = "vocabulary") -> np.ndarray:
    """An integer array [B, T] (or [T], taken as one row) as int32, every value in [0, vocab)."""
    if kind_of(ids) is None:
        if by_name(ids) is not None:
            raise ArgumentError(
                f"{name} is a {type(ids).__name__}, as a tokenizer gives it. Pass it as **inputs."
            )
        raise ArgumentError(
            f"{name} is a {type(ids).__name__}; expected token ids as a torch, NumPy or JAX array "
            "or a list."
        )
    array = read_array(ids, name, "rows differ in length; pad them and give a mask.")
    if array.dtype.kind not in "iu" and array.size:
        raise ArgumentError(f"{name} has dtype {array.dtype}; expected integers.")
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2:
        raise ArgumentError(f"{name} has shape {array.shape}; expected [batch, tokens].")
    if array.size == 0:
        raise ArgumentError(f"{name} has shape {array.shape}: there is no token in it.")
    outside = (array < 0) | (array >= vocab)
    if outside.any():
        row, column = np.argwhere(outside)[0]
        raise ArgumentError(
            f"{name}[{row}, {column}] is {array[row, column]}, outside the {what} of {vocab} "
            f"(0 to {vocab - 1})."
        )
    return array.astype(np.int32)


def read_array(value: Any, name: str, ragged: str) -> np.ndarray:
    """The caller's array in host memory; ArgumentError with `ragged` for lists without a shape."""
    try:
        return to_numpy(value)
    except ArgumentError as error:
        raise ArgumentError(f"{name}: {error}") from error
    except Exception as error:  # of the array's framework, or of the objects in a list
        if kind_of(value) == "list" and isinstance(error, ValueError):
            raise ArgumentError(f"{name}: {ragged}") from error
        raise ArgumentError(
            f"{name} cannot be read as an array: {type(error).__name__}: {str(error)[:200]}"
        ) from error


def check_mask(mask: Any, shape: tuple[int, int]) -> np.ndarray | None:
    """An attention mask of `shape` as bool; None where it is None."""
    if mask is None:
        return None
    if kind_of(mask) is None:
        raise ArgumentError(f"attention_mask is a {type(mask).__name__}; expected an array.")
    array = read_array(mask, "attention_mask", "rows differ in length.")
    if array.ndim == 1 and shape[0] == 1:
        array = array[None]
    if array.ndim == 4:
        raise ArgumentError(
            f"attention_mask has shape {array.shape}: a mask of its own for each query is not "
            f"supported, since attention is fused. Pass {shape}, 1 where a token is real; "
            "position_ids that start anew separate packed sequences. Module mode takes such a mask."
        )
    if array.shape != shape:
        raise ArgumentError(
            f"attention_mask has shape {array.shape}; expected {shape}, that of the prompts."
        )
    if array.dtype == ml_dtypes.bfloat16:  # whose kind is not that of a number
        array = array.astype(np.float32)
    if array.dtype.kind not in "biuf" or ((array != 0) & (array != 1)).any():
        raise ArgumentError("attention_mask holds other values than 0 and 1.")
    return array != 0


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
    vectors = check_embeds(embeds, spec.extent("width"))
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


def _has_rows(value: Any) -> bool:
    """True for lists, and for arrays of one axis or more."""
    return kind_of(value) is not None and getattr(value, "ndim", 1) > 0


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


def check_embeds(embeds: Any, width: int) -> np.ndarray:
    """Embeddings [B, T, width] (or [T, width], taken as one row) as float32."""
    if kind_of(embeds) is None:
        raise ArgumentError(
            f"inputs_embeds is a {type(embeds).__name__}; expected a torch, NumPy or JAX array."
        )
    array = read_array(embeds, "inputs_embeds", "rows differ in length; pad them and give a mask.")
    if array.ndim == 2:
        array = array[None]
    if array.ndim != 3 or array.shape[2] != width or not array.size:
        raise ArgumentError(
            f"inputs_embeds has shape {array.shape}; expected [batch, tokens, {width}]."
        )
    if array.dtype != ml_dtypes.bfloat16 and array.dtype.kind not in "fiu":
        raise ArgumentError(f"inputs_embeds has dtype {array.dtype}; expected floats.")
    return array.astype(np.float32)


def make_forward_inputs(
    spec: ModelSpec,
    ids: Any,
    mask: Any,
    positions: Any,
    types: Any,
    embeds: Any = None,
    labels: Any = None,
    *,
    logits_to_keep: Any = 0,
    loss_count: Any = None,
    ends: tuple[Any, Any] = (None, None),
    problem: Any = None,
    output_hidden_states: bool,
    may_pack: bool,
    name: str = "input_ids",
) -> ForwardInputs:
    """One forward pass's inputs, called `name` in errors.

    `may_pack`: positions that start anew separate sequences. `ends` are the first and the last
    token of each row's answer. `problem` is the config's `problem_type`.

    Raises ArgumentError for what does not fit the model, and LengthError for more tokens than it
    has positions.
    """
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
        vectors = check_embeds(embeds, spec.extent("width"))
        shape = batch, length = vectors.shape[0], vectors.shape[1]
    visible = check_mask(mask, shape)
    segments = None
    at = default_positions(spec, shape, tokens, visible)
    longest = length if spec.pad is None else int(at.max()) - spec.pad
    if spec.learned_positions and longest > spec.tokens:
        name = name if embeds is None else "inputs_embeds"
        raise LengthError(
            f"{name} has {longest} tokens, but the model has {spec.tokens} positions."
        )
    if positions is not None:
        limit = spec.learned_positions or 2**31 - 1
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
        if not spec.token_types and not is_zero(types):
            raise ArgumentError(
                f"The {spec.family} family has no token types, but token_type_ids holds other "
                "values than 0."
            )
        types = check_ids(types, "token_type_ids", spec.token_types or 1, "token types")
        types = _broadcast(types, "token_type_ids", shape) if spec.token_types else None
    elif spec.token_types and not spec.token_types_from_vocab:
        types = np.zeros(shape, np.int32)
    kept = _kept_tokens(spec, logits_to_keep, length)
    targets, loss = None, loss_kind(spec, labels, problem)
    if loss != "classes":
        targets = check_numbers(spec, labels, batch)
    elif labels is not None:
        many = length if kept is None else len(kept)
        targets = check_labels(spec, labels, (batch // (choices or 1), many), choices)
    if any(end is not None for end in ends):
        targets = _check_ends(ends, shape)
    count = _loss_count(spec, loss_count, labels is not None)
    inputs = ForwardInputs(tokens, at, visible, types, segments, output_hidden_states)
    inputs = replace(inputs, embeds=vectors, kept=kept, labels=targets, loss_count=count)
    return replace(inputs, weights=weights, choices=choices, loss=loss)


def _beside_each_other(name: str, given: dict[str, Any]) -> tuple[int, list[Any]]:
    """How many sequences a choice is made among, and arrays [B, choices, ...] as [B choices, ...].

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
    ids: np.ndarray | None,
    visible: np.ndarray | None,
) -> np.ndarray | None:
    """float32 [B, T]: what a head sums a sequence's tokens with; None if it pools none."""
    pooling = spec.head.pooling if spec.head else spec.pooled and spec.pooled.pooling
    if pooling is None or pooling == "eos":  # by what the encoder reads
        return None
    real = np.ones(shape, bool) if visible is None else visible
    if pooling == "all":
        return real.astype(np.float32)
    if pooling == "patches":
        assert spec.patches is not None
        real[:, : spec.patches.learned] = False
    if pooling in ("mean", "patches"):
        return (real / np.maximum(real.sum(1, keepdims=True), 1)).astype(np.float32)
    at = np.zeros(shape[0], np.int64)
    if pooling == "real":
        at = real.argmax(1)
    elif pooling == "end":
        assert spec.pooled is not None
        if ids is None:
            raise ArgumentError(
                f"inputs_embeds: {spec.architecture} finds the end of a text by its id. Pass "
                "input_ids."
            )
        end = spec.pooled.end_id
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
        at = ((ids != spec.pad_id) * np.arange(shape[1])).argmax(1)
    return (np.arange(shape[1]) == at[:, None]).astype(np.float32)


def _kept_tokens(spec: ModelSpec, keep: Any, length: int) -> np.ndarray | None:
    """The tokens whose logits HF's `logits_to_keep` asks for, int32 [K]; None for all.

    An int is that many at the end, all for 0; an array [K] has their places, negative ones from
    the end.
    """
    if keep is None or (isinstance(keep, int) and not isinstance(keep, bool) and keep == 0):
        return None
    if spec.head is None or spec.head.kind != "causal" or spec.encoder:
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
        raise ArgumentError(f"logits_to_keep is a {type(keep).__name__}; expected an int or array.")
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


def loss_kind(spec: ModelSpec, labels: Any, problem: Any) -> LossKind:
    """Which loss HF computes of `labels`, by the config's `problem_type` or by themselves."""
    if labels is None or spec.head is None or spec.head.kind != "sequence":
        return "classes"
    kinds: dict[Any, LossKind] = {
        "regression": "regression",
        "single_label_classification": "classes",
        "multi_label_classification": "several",
    }
    if problem is not None:
        if problem not in kinds:
            raise ArgumentError(
                f"labels: the model's config has problem_type={shown(problem)}; HF knows "
                f"{', '.join(kinds)}. Set one of them, or leave labels out."
            )
        return kinds[problem]
    if spec.head.labels == 1:
        return "regression"
    if kind_of(labels) is None:
        return "classes"  # which says what is wrong
    array = read_array(labels, "labels", "rows differ in length.")
    if array.dtype.kind in "iu":
        return "classes"
    if spec.family.startswith("deberta"):
        raise ArgumentError(
            f"labels of {array.dtype}: without a problem_type HF's {spec.architecture} takes them "
            "as shares of classes, a loss that fused mode does not compute. Set problem_type in "
            "the config to regression or multi_label_classification, or pass integers."
        )
    return "several"


def check_numbers(spec: ModelSpec, labels: Any, batch: int) -> np.ndarray:
    """A regression's labels, or a yes or no for each, as float32 [B, labels]."""
    assert spec.head is not None
    if kind_of(labels) is None:
        raise ArgumentError(f"labels is a {type(labels).__name__}; expected an array.")
    array = read_array(labels, "labels", "rows differ in length.")
    shape = batch, spec.head.labels
    if shape[1] == 1 and array.size == batch:
        array = array.reshape(shape)
    if array.dtype == ml_dtypes.bfloat16:
        array = array.astype(np.float32)
    if array.shape != shape or array.dtype.kind not in "fiu":
        expected = f"{shape[:1]} or {shape}" if shape[1] == 1 else f"{shape}"
        raise ArgumentError(
            f"labels has shape {array.shape} and dtype {array.dtype}; expected floats {expected}, "
            "one for each score."
        )
    return array.astype(np.float32)


def check_labels(
    spec: ModelSpec, labels: Any, shape: tuple[int, int], choices: int | None
) -> np.ndarray:
    """Labels as int32, NO_LABEL where none counts; a causal model's, shifted.

    They are [B, K], which is `shape`, or [B] of a model that scores sequences or choices. Those of
    an encoder-decoder are not shifted: its inputs are.
    """
    if spec.head is None:
        raise ArgumentError(f"labels: {spec.architecture} has no head, so no loss.")
    kind = spec.head.kind
    if kind in ("span", "replaced"):
        more = ", whose loss is that of start_positions and end_positions" if kind == "span" else ""
        raise ArgumentError(
            f"labels: fused mode computes no loss of labels for {spec.architecture}{more}. Leave "
            "labels out."
        )
    most = spec.vocab if spec.has_logits else choices or spec.head.labels
    what = "an id of the vocabulary" if spec.has_logits else "a label"
    expected: tuple[int, ...] = shape[:1] if kind in ("sequence", "choice") else shape
    if kind_of(labels) is None:
        raise ArgumentError(f"labels is a {type(labels).__name__}; expected an array.")
    array = read_array(labels, "labels", "rows differ in length; fill them up with -100.")
    if len(expected) == 1:
        array = array.reshape(-1) if array.size == expected[0] else array
    elif array.ndim == 1 and shape[0] == 1:
        array = array[None]
    if array.shape != expected or array.dtype.kind not in "iu":
        raise ArgumentError(
            f"labels has shape {array.shape} and dtype {array.dtype}; expected integers "
            f"{expected}, as many as there are logits."
        )
    wrong = (array != NO_LABEL) & ((array < 0) | (array >= most))
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0].tolist())
        place = ", ".join(map(str, at))
        raise ArgumentError(
            f"labels[{place}] is {array[at]}; expected {what} "
            f"(0 to {most - 1}), or {NO_LABEL} where no loss is asked for."
        )
    array = array.astype(np.int32)
    if kind != "causal" or spec.encoder:
        return array
    return np.pad(array[:, 1:], ((0, 0), (0, 1)), constant_values=NO_LABEL)


def _check_ends(ends: tuple[Any, Any], shape: tuple[int, int]) -> np.ndarray:
    """Where each row's answer starts and ends, int32 [B, 2]; NO_LABEL behind the last token.

    As in HF these count nowhere, and negative ones are 0.
    """
    found = []
    for name, given in zip(("start_positions", "end_positions"), ends, strict=True):
        if given is None or kind_of(given) is None:
            raise ArgumentError(
                f"{name} is {'missing' if given is None else type(given).__name__}; the loss of "
                "answers needs start_positions and end_positions, arrays [batch] both."
            )
        array = read_array(given, name, "it has no shape.")
        array = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
        if array.shape != shape[:1] or array.dtype.kind not in "iu":
            raise ArgumentError(
                f"{name} has shape {array.shape} and dtype {array.dtype}; expected integers "
                f"{shape[:1]}, one for each row."
            )
        found.append(np.where(array >= shape[1], NO_LABEL, np.maximum(array, 0)))
    return np.stack(found, axis=1).astype(np.int32)


def _loss_count(spec: ModelSpec, count: Any, has_labels: bool) -> float | None:
    """HF's `num_items_in_batch`, by which a causal model's sum of losses is divided."""
    if count is None:
        return None
    if not has_labels or spec.head is None or spec.head.kind != "causal" or spec.encoder:
        raise ArgumentError(
            f"num_items_in_batch={shown(count)} divides the loss of a causal model's labels; "
            "without them, and for others, HF does not read it. Leave it out."
        )
    try:
        number = float(count)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = float("nan")
    if not 0 < number < float("inf"):
        raise ArgumentError(f"num_items_in_batch={shown(count)}; expected a number above 0.")
    return number


def default_positions(
    spec: ModelSpec, shape: tuple[int, int], ids: np.ndarray | None, visible: np.ndarray | None
) -> np.ndarray:
    """The positions of tokens for which the caller gives none, as HF counts them; int32 [B, T].

    0 to T-1 for every row, the number of `visible` tokens before each, or that of ids that are no
    padding.
    """
    count = np.empty(shape, np.int32)
    count[:] = np.arange(shape[1], dtype=np.int32)
    if spec.pad is not None:
        if ids is None:
            return count + (spec.pad + 1)
        real = ids != spec.pad
        return (real.cumsum(axis=1) * real + spec.pad).astype(np.int32)
    if spec.positions_from_mask and visible is not None:
        return np.maximum(visible.cumsum(axis=1) - 1, 0).astype(np.int32) * visible
    return count


def is_zero(ids: Any) -> bool:
    """True for token types that say nothing."""
    if kind_of(ids) is None:
        return False
    return not np.any(read_array(ids, "token_type_ids", "rows differ in length."))


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
    """HF arguments that dualinfer does not serve pass only where they ask for nothing."""
    asked = [n for n, v in arguments.items() if not (v is None or (isinstance(v, int) and v == 0))]
    if asked:
        reasons = [f"{name}: {REASONS[name]}" for name in sorted(asked) if name in REASONS]
        raise ArgumentError(
            f"{function} does not support {', '.join(sorted(asked))}. Supported: input_ids, "
            "attention_mask, position_ids, token_type_ids, inputs_embeds, labels, "
            "num_items_in_batch, logits_to_keep, output_hidden_states, return_dict, "
            f"return_tuple. {' '.join(reasons)}".rstrip()
        )

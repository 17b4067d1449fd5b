"""The inputs of a forward pass's loss: labels, the ends of answers, what divides it."""

from typing import Any

import ml_dtypes
import numpy as np

from ..arrays import kind_of
from ..backends.base import NO_LABEL, LossKind
from ..errors import ArgumentError, a_type, shown
from ..model.spec import ModelSpec
from .checks import read_array


def loss_kind(spec: ModelSpec, labels: Any, problem: Any) -> LossKind:
    """The loss that HF computes of `labels`, by the config's `problem_type` or by themselves."""
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
    if "shares" in spec.head.ways:
        raise ArgumentError(
            f"labels of {array.dtype}: without a problem_type HF's {spec.architecture} takes them "
            "as shares of classes, a loss that fused mode does not compute. Set problem_type in "
            "the config to regression or multi_label_classification, or pass integers."
        )
    return "several"


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
        raise ArgumentError(f"labels is {a_type(labels)}; expected an array.")
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


def check_numbers(spec: ModelSpec, labels: Any, batch: int) -> np.ndarray:
    """A regression's labels, or a yes or no for each, as float32 [B, labels]."""
    assert spec.head is not None
    if kind_of(labels) is None:
        raise ArgumentError(f"labels is {a_type(labels)}; expected an array.")
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


def check_ends(ends: tuple[Any, Any], shape: tuple[int, int]) -> np.ndarray:
    """The start and end of each row's answer, int32 [B, 2]; NO_LABEL behind the last token.

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


def refuse_routers(config: Any) -> None:
    """Raise ArgumentError where HF adds the losses of routers to that of labels."""
    for own, where in ((config, ""), (getattr(config, "text_config", None), " in text_config")):
        if getattr(own, "output_router_logits", False):
            way = "" if where else ', pass args={"output_router_logits": False} to init_inference,'
            raise ArgumentError(
                f"labels: the model's config has output_router_logits=True{where}, with which HF "
                "adds to their loss one of the routers, which fused mode does not compute. Set it "
                f"to false in the model's config{way} or leave labels out."
            )


def check_loss_count(spec: ModelSpec, count: Any) -> float | None:
    """HF's `num_items_in_batch`, by which a sum of losses is divided; None where HF ignores it."""
    if count is None or not spec.counts_labels:
        return None
    try:
        number = float(count)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = float("nan")
    if not 0 < number < float("inf"):
        raise ArgumentError(f"num_items_in_batch={shown(count)}; expected a number above 0.")
    return number

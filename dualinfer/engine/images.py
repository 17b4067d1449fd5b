"""What an encoder of images reads: the pixels of each patch as a token."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from ..arrays import kind_of
from ..backends.base import ForwardInputs
from ..errors import ArgumentError, shown
from ..model.spec import ModelSpec
from .checks import read_array
from .inputs import pooling_weights
from .labels import check_labels, check_numbers, loss_kind


def refuse_images(spec: ModelSpec, pixels: Any) -> None:
    """Raise ArgumentError where a model that reads ids is given images."""
    if pixels is not None and spec.patches is None:
        raise ArgumentError(f"pixel_values: {spec.architecture} reads input_ids. Leave it out.")


def make_image_inputs(
    spec: ModelSpec,
    given: Mapping[str, Any],
    *,
    output_hidden_states: bool,
    logits_to_keep: Any,
    loss_count: Any,
    problem: Any = None,
) -> ForwardInputs:
    """One forward pass of an encoder of images, of HF's arguments by name.

    HF's first argument may be the images too. Raises ArgumentError for what does not fit.
    """
    patches = spec.patches
    assert patches is not None
    pixels = given["pixel_values"] if given["input_ids"] is None else given["input_ids"]
    others = "attention_mask", "position_ids", "token_type_ids", "inputs_embeds"
    asked = [name for name in others if given.get(name) is not None]
    if asked or None not in (given["input_ids"], given["pixel_values"]):
        raise ArgumentError(
            f"{spec.architecture} reads pixel_values alone; {(*asked, 'input_ids')[0]} was given "
            "as well. Leave it out."
        )
    if loss_count is not None or not (logits_to_keep is None or shown(logits_to_keep) == "0"):
        raise ArgumentError(
            f"logits_to_keep and num_items_in_batch are of language models, and "
            f"{spec.architecture} reads images. Leave them out."
        )
    channels, high, wide = patches.image
    expected = f"[batch, {channels}, {high}, {wide}]"
    if pixels is None or kind_of(pixels) is None:
        what = "missing" if pixels is None else f"a {type(pixels).__name__}"
        raise ArgumentError(f"pixel_values is {what}; expected an array {expected}.")
    array = read_array(pixels, "pixel_values", "images differ in shape.")
    array = array[None] if array.ndim == 3 else array
    if array.shape[1:] != patches.image or not array.size:
        raise ArgumentError(
            f"pixel_values has shape {array.shape}; expected {expected}. HF's image processor "
            "makes images of that size; positions are not interpolated for others."
        )
    if array.dtype != ml_dtypes.bfloat16 and array.dtype.kind != "f":
        raise ArgumentError(
            f"pixel_values has dtype {array.dtype}; expected floats, as HF's image processor gives."
        )
    batch, (rows, columns), size = len(array), patches.grid, patches.size
    cut = array.astype(np.float32).reshape(batch, channels, rows, size[0], columns, size[1])
    cut = cut.transpose(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, patches.width)
    tokens = np.pad(cut, ((0, 0), (1, 0), (0, 0)))  # the first is learned
    shape = batch, tokens.shape[1]
    labels, targets = given.get("labels"), None
    loss = loss_kind(spec, labels, problem)
    if loss != "classes":
        targets = check_numbers(spec, labels, batch)
    elif labels is not None:
        targets = check_labels(spec, labels, shape, None)
    return ForwardInputs(
        ids=None,
        positions=np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape).copy(),
        output_hidden_states=output_hidden_states,
        embeds=tokens,
        labels=targets,
        loss=loss,
        weights=pooling_weights(spec, shape, None, None),
    )

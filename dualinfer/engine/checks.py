"""The caller's arrays, checked and brought into host memory: ids, masks, embeddings."""

from collections.abc import Mapping
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from ..arrays import kind_of, to_numpy
from ..errors import ArgumentError, LengthError, a_type, shown
from ..model.spec import ModelSpec

# What processors of HF's make of images and sounds, beside ids.
MEDIA = (
    *("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "image_sizes"),
    *("input_features", "feature_attention_mask", "mm_token_type_ids"),
)
_NOT_OF_TOKENIZERS = ("position_ids", "inputs_embeds", "past_key_values", "decoder_input_ids")


def by_name(inputs: Any) -> dict[str, Any] | None:
    """The output of a HF tokenizer: ids, mask and token types by name; None for other values.

    Behind them is what a processor has made of images, sounds and pages, where it has. Raises
    ArgumentError for what no tokenizer makes, and which would change the answer.
    """
    if not isinstance(inputs, Mapping) or "input_ids" not in inputs:
        return None
    if lost := [name for name in _NOT_OF_TOKENIZERS if inputs.get(name) is not None]:
        raise ArgumentError(
            f"{lost[0]} stands beside input_ids in a dict, of which what a tokenizer makes is "
            f"read. Pass the dict as **inputs where the call takes {lost[0]}, or leave it out."
        )
    names = ("input_ids", "attention_mask", "token_type_ids")
    more = [name for name in (*MEDIA, "bbox") if inputs.get(name) is not None]
    return {name: inputs.get(name) for name in (*names, *more)}


def refuse_text(inputs: Any, name: str = "input_ids") -> None:
    """Raise ArgumentError for a str, since the way from a text is another."""
    if isinstance(inputs, str):
        raise ArgumentError(
            f"{name} is a str ({shown(inputs)}); expected token ids. For text in and text out "
            "call engine.generate_text(...) or engine.stream_text(...), or tokenize it first: "
            'engine.generate(**tokenizer(text, return_tensors="np")).'
        )


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


def check_length(spec: ModelSpec, count: int, what: str, way: str) -> None:
    """Raise LengthError where one sequence of `count` tokens is too long for the model.

    `what` says who asks for so many, and `way` what to do.
    """
    if not spec.tokens or count <= spec.tokens:
        return
    raise LengthError(f"{what}, but {spec.why_most}. {way}")


_UNEVEN = (
    "rows differ in length; pad them and give a mask, as a tokenizer does with padding=True. "
    "generate() and embed() take such rows as they are."
)


def check_ids(ids: Any, name: str, vocab: int, what: str = "vocabulary") -> np.ndarray:
    """An integer array [B, T] (or [T], taken as one row) as int32, every value in [0, vocab)."""
    if kind_of(ids) is None:
        refuse_text(ids, name)
        if by_name(ids) is not None:
            raise ArgumentError(
                f"{name} is {a_type(ids)}, as a tokenizer gives it. Pass it as **inputs."
            )
        raise ArgumentError(
            f"{name} is {a_type(ids)}; expected token ids as a torch, NumPy or JAX array or a list."
        )
    array = read_array(ids, name, _UNEVEN)
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


def check_mask(
    mask: Any, shape: tuple[int, int], name: str = "attention_mask"
) -> np.ndarray | None:
    """An attention mask of `shape` as bool, called `name` in errors; None where it is None."""
    if mask is None:
        return None
    if kind_of(mask) is None:
        raise ArgumentError(f"{name} is {a_type(mask)}; expected an array.")
    array = read_array(mask, name, "rows differ in length.")
    if array.ndim == 1 and shape[0] == 1:
        array = array[None]
    if array.ndim == 4:
        raise ArgumentError(
            f"{name} has shape {array.shape}: a mask of its own for each query is not "
            f"supported, since attention is fused. Pass {shape}, 1 where a token is real; "
            "position_ids that start anew separate packed sequences. Module mode takes such a mask."
        )
    if array.shape != shape:
        raise ArgumentError(
            f"{name} has shape {array.shape}; expected {shape}, that of the prompts."
        )
    if array.dtype == ml_dtypes.bfloat16:  # whose kind is not that of a number
        array = array.astype(np.float32)
    if array.dtype.kind not in "biuf" or ((array != 0) & (array != 1)).any():
        raise ArgumentError(f"{name} holds other values than 0 and 1.")
    return array != 0


def check_embeds(embeds: Any, spec: ModelSpec) -> np.ndarray:
    """Embeddings [B, T, W] (or [T, W], taken as one row) as float32."""
    if spec.reads:
        raise ArgumentError(
            f"inputs_embeds: each layer of {spec.architecture} reads an embedding of its own of "
            "every id. Pass input_ids."
        )
    width = spec.extent("width")
    if kind_of(embeds) is None:
        raise ArgumentError(
            f"inputs_embeds is {a_type(embeds)}; expected a torch, NumPy or JAX array."
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


def refuse_prefix(spec: ModelSpec) -> NoReturn:
    """Raise ArgumentError for token types that say which tokens are a prefix."""
    raise ArgumentError(
        f"token_type_ids: in the {spec.family} family they say which tokens see one another both "
        "ways, as those of an image and a prefix do; fused mode serves the text alone, in which "
        "no token sees those behind it. Leave them out, or load the model with transformers and "
        "pass the module, which runs as it is with backend='torch'."
    )


def is_zero(ids: Any) -> bool:
    """True for token types that say nothing."""
    if kind_of(ids) is None:
        return False
    return not np.any(read_array(ids, "token_type_ids", "rows differ in length."))

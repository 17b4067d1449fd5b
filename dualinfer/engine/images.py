"""Inputs of image encoders and of models of images and texts: each patch's pixels as a token."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from ..arrays import kind_of
from ..backends.base import ForwardInputs, Tokens
from ..errors import ArgumentError, a_type, shown
from ..model.spec import ModelSpec, Patches
from .checks import check_mask, read_array
from .inputs import Text, Wanted, make_forward_inputs, pooling_weights, text_alone
from .labels import check_labels, check_loss_count, check_numbers, loss_kind

OF_PATCHES = "pixel_attention_mask", "spatial_shapes"


def refuse_images(spec: ModelSpec, pixels: Any, interpolate: Any) -> None:
    """Raise ArgumentError where a model that reads ids is given images."""
    if spec.sees:
        if interpolate and spec.crosses:
            raise ArgumentError(
                f"interpolate_pos_encoding: {spec.architecture} describes images of the model's "
                "own size alone here. Leave it out."
            )
        return
    if pixels is not None:
        raise ArgumentError(f"pixel_values: {spec.architecture} reads input_ids{text_alone(spec)}")
    if interpolate:
        raise ArgumentError(
            f"interpolate_pos_encoding is of models that read images, and {spec.architecture} "
            "reads input_ids. Leave it out."
        )


def make_tower_inputs(
    spec: ModelSpec,
    given: Mapping[str, Any],
    wanted: Wanted,
    interpolate: Any,
) -> ForwardInputs:
    """One forward pass of a model of texts and images, of HF's arguments by name.

    Raises ArgumentError for what does not fit, and for one of the two without the other.
    """
    for name, way in (("input_ids", "get_image_features"), ("pixel_values", "get_text_features")):
        if given.get(name) is None:
            raise ArgumentError(
                f"{name} is missing: {spec.architecture} compares texts with images. Pass "
                f"input_ids and pixel_values, or call engine.{way}() for the others' vectors."
            )
    if wanted.labels is not None or given.get("token_type_ids") is not None:
        asked = "labels" if wanted.labels is not None else "token_type_ids"
        raise ArgumentError(f"{asked}: {spec.architecture} has none in HF. Leave them out.")
    if given.get("inputs_embeds") is not None:
        raise ArgumentError(f"inputs_embeds: {spec.architecture} reads input_ids. Pass these.")
    texts = make_text_tower_inputs(spec, given, wanted)
    images = make_image_tower_inputs(spec, given, wanted, interpolate)
    return replace(texts, tokens=texts.tokens._replace(source=images.tokens))


def make_text_tower_inputs(
    spec: ModelSpec, given: Mapping[str, Any], wanted: Wanted
) -> ForwardInputs:
    """The inputs of the tower of texts alone."""
    text = Text(given.get("input_ids"), given.get("attention_mask"), given.get("position_ids"))
    return make_forward_inputs(spec, text, wanted, may_pack=False)


def make_image_tower_inputs(
    spec: ModelSpec, given: Mapping[str, Any], wanted: Wanted, interpolate: Any
) -> ForwardInputs:
    """The inputs of the tower of images alone."""
    assert spec.encoder is not None
    pixels = {"input_ids": None, "pixel_values": given.get("pixel_values")}
    pixels |= {name: given.get(name) for name in OF_PATCHES}
    images = make_image_inputs(spec.encoder, pixels, wanted, interpolate=interpolate)
    return replace(images, of_encoder=True)


def make_image_inputs(
    spec: ModelSpec,
    given: Mapping[str, Any],
    wanted: Wanted,
    *,
    interpolate: Any = False,
    is_part: bool = False,
) -> ForwardInputs:
    """One forward pass of an encoder of images, of HF's arguments by name.

    HF's first argument may be the images too. With `interpolate` they may have any size, which
    nobody may ask for where the encoder `is_part` of a model with a decoder. Raises
    ArgumentError for what does not fit.
    """
    patches = spec.patches
    assert patches is not None
    pixels = given["pixel_values"] if given["input_ids"] is None else given["input_ids"]
    others = "attention_mask", "position_ids", "token_type_ids", "inputs_embeds"
    asked = [name for name in others if given.get(name) is not None]
    both = all(given[name] is not None for name in ("input_ids", "pixel_values"))
    if asked or both:
        raise ArgumentError(
            f"{spec.architecture} reads pixel_values alone; {(*asked, 'input_ids')[0]} was given "
            "as well. Leave it out."
        )
    if not (wanted.logits_to_keep is None or shown(wanted.logits_to_keep) == "0"):
        raise ArgumentError(
            f"logits_to_keep is of language models, and {spec.architecture} reads images. Leave it "
            "out."
        )
    if not isinstance(interpolate, bool | None):
        raise ArgumentError(
            f"interpolate_pos_encoding={shown(interpolate)}; expected True or False."
        )
    visible = None
    if patches.given:
        tokens, blend, visible = _read_patches(patches, pixels, given, interpolate)
    else:
        tokens, blend = _cut_images(spec, pixels, bool(interpolate), is_part)
    batch, *_ = shape = tokens.shape[:2]
    labels, targets = wanted.labels, None
    loss = loss_kind(spec, labels, wanted.problem)
    if loss != "classes":
        targets = check_numbers(spec, labels, batch)
    elif labels is not None:
        targets = check_labels(spec, labels, shape, None)
    count = None if targets is None else check_loss_count(spec, wanted.loss_count)
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape).copy()
    weights = pooling_weights(spec, shape, None, visible)
    read = Tokens(None, positions, visible, embeds=tokens, weights=weights, blend=blend)
    return ForwardInputs(read, wanted.output_hidden_states, targets, count, loss)


def _cut_images(
    spec: ModelSpec, pixels: Any, interpolate: bool, is_part: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """Images as float32 tokens [B, T, W], learned ones zeros, and what their positions are."""
    patches = spec.patches
    assert patches is not None
    any_size = interpolate or patches.sizes == "any"
    channels, high, wide = patches.image
    expected = f"[batch, {channels}, {'height, width' if any_size else f'{high}, {wide}'}]"
    array = _read_floats(pixels, expected)
    array = array[None] if array.ndim == 3 else array
    fits = array.ndim == 4 and array.shape[1] == channels and array.size > 0
    if not fits or not (any_size or array.shape[1:] == patches.image):
        ask = " Pass interpolate_pos_encoding=True for images of another size."
        way = "" if any_size or is_part else ask
        raise ArgumentError(f"pixel_values has shape {array.shape}; expected {expected}.{way}")
    grid = grid_of(patches, array.shape)
    return as_patches(patches, array.astype(np.float32), grid, np), blend_of(spec, grid)


def grid_of(patches: Patches, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of patches of images of a `shape` [B, C, H, W]."""
    size = patches.size
    rows, columns = shape[2] // size[0], shape[3] // size[1]
    if not rows or not columns:
        raise ArgumentError(
            f"pixel_values has shape {shape}, less than one patch of {size[0]} by {size[1]}."
        )
    return rows, columns


def as_patches(patches: Patches, images: Any, grid: tuple[int, int], xp: Any) -> Any:
    """Images [B, C, H, W] of the module `xp` as tokens [B, T, W], learned ones zeros."""
    (rows, columns), size = grid, patches.size
    images = images[:, :, : rows * size[0], : columns * size[1]]  # as HF's convolution does
    batch, channels = images.shape[:2]
    cut = images.reshape(batch, channels, rows, size[0], columns, size[1])
    cut = cut.transpose(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, patches.width)
    return xp.pad(cut, ((0, 0), (patches.learned, 0), (0, 0)))


def _read_floats(pixels: Any, expected: str) -> np.ndarray:
    if pixels is None or kind_of(pixels) is None:
        what = "missing" if pixels is None else a_type(pixels)
        raise ArgumentError(f"pixel_values is {what}; expected an array {expected}.")
    array = read_array(pixels, "pixel_values", "images differ in shape.")
    if array.dtype != ml_dtypes.bfloat16 and array.dtype.kind != "f":
        raise ArgumentError(
            f"pixel_values has dtype {array.dtype}; expected floats, as HF's image processor gives."
        )
    return array


def _read_patches(
    patches: Patches, pixels: Any, given: Mapping[str, Any], interpolate: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Float32 tokens [B, T, W] that a caller gives, what their positions are, and their mask."""
    if interpolate:
        raise ArgumentError(
            "interpolate_pos_encoding: images are given as patches here, with spatial_shapes for "
            "which positions are interpolated in any case. Leave it out."
        )
    array = _read_floats(pixels, f"[batch, patches, {patches.width}]")
    if array.ndim != 3 or array.shape[2] != patches.width or not array.size:
        raise ArgumentError(
            f"pixel_values has shape {array.shape}; expected [batch, patches, {patches.width}], as "
            "HF's image processor gives them."
        )
    shape = array.shape[0], array.shape[1]
    visible = check_mask(given.get("pixel_attention_mask"), shape, "pixel_attention_mask")
    return array.astype(np.float32), resized(patches, given.get("spatial_shapes"), shape), visible


def resized(patches: Patches, shapes: Any, shape: tuple[int, int]) -> np.ndarray:
    """float32 [B or 1, T, P]: positions of patches [B, T] of images of `shapes` [B, 2], a caller's.

    Raises ArgumentError for grids that do not fit.
    """
    if shapes is None:
        raise ArgumentError(
            "spatial_shapes is missing: of each image the rows and columns of its patches."
        )
    batch, length = shape
    shapes = read_array(shapes, "spatial_shapes", "it is no array [batch, 2].")
    fits = shapes.shape == (batch, 2) and shapes.dtype.kind in "iu" and (shapes > 0).all()
    if not fits or (shapes.astype(np.int64).prod(1) > length).any():
        raise ArgumentError(
            f"spatial_shapes is {shown(shapes.tolist())}; expected the rows and columns of patches "
            f"of each of {batch} images, of at most {length} patches each."
        )
    grids = [(int(high), int(wide)) for high, wide in shapes]
    grids = grids[:1] if len({*grids}) == 1 else grids
    return np.stack([_resized(patches, grid, length) for grid in grids])


def _resized(patches: Patches, grid: tuple[int, int], length: int) -> np.ndarray:
    """float32 [T, P]: the positions of an image's patches; those of padding are the first's."""
    high, wide = (_smooth(new, old) for new, old in zip(grid, patches.grid, strict=True))
    own = np.kron(high, wide)
    return np.concatenate((own, np.repeat(own[:1], length - len(own), 0)))


def _smooth(new: int, old: int) -> np.ndarray:
    """float32 [new, old]: weights of bilinear interpolation along an axis, antialiased."""
    scale = old / new
    centers = scale * (np.arange(new)[:, None] + 0.5)
    x = np.abs(np.arange(old) + 0.5 - centers) / max(scale, 1)
    weights = np.maximum(1 - x, 0)
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def blend_of(spec: ModelSpec, grid: tuple[int, int]) -> np.ndarray | None:
    """float32 [1, T, P]: how positions of a grid of patches are made of the model's own.

    None where they are those. Learned tokens keep theirs, and registers have none. Patches have
    those that HF interpolates, which takes the model's grid to be square.
    """
    patches = spec.patches
    assert patches is not None
    if grid == patches.grid and not spec.unplaced:
        return None
    if grid != patches.grid and patches.grid[0] != patches.grid[1]:
        raise ArgumentError(
            f"pixel_values of {grid[0]} by {grid[1]} patches: positions of {spec.architecture}, "
            f"which are for {patches.grid[0]} by {patches.grid[1]}, are interpolated in HF of "
            "square images alone. Pass images of the model's own size."
        )
    weights = _smooth_bicubic if spec.unplaced else _bicubic  # as HF's model with registers
    high, wide = (weights(new, old) for new, old in zip(grid, patches.grid, strict=True))
    first, kept = patches.learned, patches.learned - spec.unplaced
    blend = np.zeros((first + grid[0] * grid[1], kept + high.shape[1] * wide.shape[1]), np.float32)
    blend[:kept, :kept] = np.eye(kept)
    blend[first:, kept:] = np.kron(high, wide)
    return blend[None]


def _smooth_bicubic(new: int, old: int) -> np.ndarray:
    """As `_bicubic`, antialiased: a is -0.5, and the weights of what is inside sum to 1."""
    a, scale = -0.5, old / new
    centers = scale * (np.arange(new)[:, None] + 0.5)
    x = np.abs(np.arange(old) + 0.5 - centers) / max(scale, 1)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    weights = np.where(x < 1, near, np.where(x < 2, far, 0))
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def _bicubic(new: int, old: int) -> np.ndarray:
    """float32 [new, old]: weights of bicubic interpolation along an axis, as torch has them.

    `torch.nn.functional.interpolate` without aligned corners: a is -0.75, and what lies outside is
    the element at the edge.
    """
    a, weights = np.float32(-0.75), np.zeros((new, old), np.float32)
    at = np.float32(old / new) * (np.arange(new, dtype=np.float32) + np.float32(0.5))
    at -= np.float32(0.5)
    first = np.floor(at).astype(np.int64)
    for offset in range(-1, 3):
        x = np.abs(at - first.astype(np.float32) - np.float32(offset))
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
        place = np.clip(first + offset, 0, old - 1)
        np.add.at(weights, (np.arange(new), place), np.where(x <= 1, near, far))
    return weights

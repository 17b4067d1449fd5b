"""Encoders of images, and models that compare them with texts: by the name of HF's class."""

import numpy as np

from .case import Case, Table

_SIZES = {
    **{"hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3},
    **{"intermediate_size": 44},
}
_VIT = {**_SIZES, "image_size": [12, 16], "patch_size": 4, "num_channels": 2}
_EYE = {**_SIZES, "image_size": 15, "patch_size": 5, "num_channels": 3, "projection_dim": 20}
_TEXT = {
    **{**_SIZES, "vocab_size": 99, "max_position_embeddings": 30, "projection_dim": 20},
    **{"bos_token_id": 0, "eos_token_id": 7},
}
# Of the model of both, whose towers differ in width and in layers.
_BOTH = {
    "text_config": _TEXT,
    "vision_config": {**_EYE, "hidden_size": 24, "num_hidden_layers": 3},
    "projection_dim": 20,
}
_SIGLIP = {**_BOTH, "text_config": {**_TEXT, "projection_size": 24}}
del _SIGLIP["projection_dim"]
_PATCHES = {k: v for k, v in _EYE.items() if k not in ("image_size", "projection_dim")}
_PATCHES["num_patches"] = 16
_SIGLIP2 = {**_SIGLIP, "vision_config": {**_PATCHES, "hidden_size": 24, "num_hidden_layers": 3}}
_META = {**_BOTH, "text_config": {**_TEXT, "eos_token_id": 2}}
_DINO = {k: v for k, v in _EYE.items() if k not in ("intermediate_size", "projection_dim")}
# HF's class, and its fields.
ROWS = {
    "vit": ("ViTModel", _VIT),
    "vit-labels": ("ViTForImageClassification", {**_VIT, "num_labels": 3, "qkv_bias": False}),
    "clip-image": ("CLIPVisionModel", _EYE),
    "clip-image-projected": ("CLIPVisionModelWithProjection", _EYE),
    "clip-text": ("CLIPTextModel", _TEXT),
    "clip-text-projected": ("CLIPTextModelWithProjection", _TEXT),
    "clip-text-old": ("CLIPTextModelWithProjection", {**_TEXT, "eos_token_id": 2}),
    "clip": ("CLIPModel", _BOTH),
    "clip-labels": ("CLIPForImageClassification", {**_BOTH, "num_labels": 3}),
    "metaclip": ("MetaClip2Model", _META),
    "metaclip-labels": ("MetaClip2ForImageClassification", {**_META, "num_labels": 3}),
    "metaclip-text": ("MetaClip2TextModelWithProjection", {**_TEXT, "eos_token_id": 2}),
    "metaclip-image": ("MetaClip2VisionModel", _EYE),
    "siglip": ("SiglipModel", _SIGLIP),
    "siglip-labels": ("SiglipForImageClassification", {**_SIGLIP, "num_labels": 3}),
    "siglip-text": ("SiglipTextModel", {**_TEXT, "projection_size": 20}),
    "siglip-image": ("SiglipVisionModel", _EYE),
    "siglip-image-bare": ("SiglipVisionModel", {**_EYE, "vision_use_head": False}),
    "siglip2": ("Siglip2Model", _SIGLIP2),
    "siglip2-labels": ("Siglip2ForImageClassification", {**_SIGLIP2, "num_labels": 3}),
    "siglip2-text": ("Siglip2TextModel", {**_TEXT, "projection_size": 20}),
    "siglip2-image": ("Siglip2VisionModel", _PATCHES),
    "deit": ("DeiTModel", _VIT),
    "deit-labels": ("DeiTForImageClassification", {**_VIT, "num_labels": 3}),
    "dinov2": ("Dinov2Model", _DINO),
    "registers": ("Dinov2WithRegistersModel", {**_DINO, "num_register_tokens": 3}),
    "registers-labels": (
        "Dinov2WithRegistersForImageClassification",
        {**_DINO, "num_register_tokens": 3, "num_labels": 3},
    ),
    "dinov2-labels": ("Dinov2ForImageClassification", {**_DINO, "num_labels": 3}),
    "vit-msn": ("ViTMSNModel", _VIT),
    "vit-msn-labels": ("ViTMSNForImageClassification", {**_VIT, "num_labels": 3}),
    "ijepa": ("IJepaModel", _VIT),
    "ijepa-labels": ("IJepaForImageClassification", {**_VIT, "num_labels": 3}),
    "dinov2-gated": ("Dinov2Model", {**_DINO, "use_swiglu_ffn": True, "mlp_ratio": 3}),
}
TABLE = Table({})
CASES = {name: Case(name, *row, TABLE) for name, row in ROWS.items()}


def inputs_of(case):
    """Images, or texts padded on both sides with an end each; both for a model of both."""
    random, given = np.random.default_rng(4), {}
    fields = CASES[case].fields
    if "siglip2" in case and "text" not in case:  # patches, of which each image has its own
        mask = np.arange(20) < np.array([[6], [20]])
        given = {"pixel_values": random.standard_normal((2, 20, 75)).astype(np.float32)}
        given |= {"pixel_attention_mask": mask.astype(int)}
        given["spatial_shapes"] = np.array([[2, 3], [4, 5]])
    elif "text" not in case:
        fields = fields.get("vision_config", fields)
        size = fields["image_size"]
        shape = 2, fields["num_channels"], *(size if isinstance(size, list) else (size, size))
        given = {"pixel_values": random.standard_normal(shape).astype(np.float32)}
    if "text" not in case and case not in ("clip", "metaclip", "siglip", "siglip2"):
        return given
    ids, mask = random.integers(8, 99, (3, 11)), np.ones((3, 11), int)
    for row, end in enumerate((5, 9, 10)):
        ids[row, end] = 98 if case == "clip-text-old" else 2 if "meta" in case else 7
    mask[0, 6:] = 0
    mask[1, :3] = 0
    return given | {"input_ids": ids, "attention_mask": mask}

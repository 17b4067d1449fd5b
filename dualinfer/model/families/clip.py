"""CLIP, MetaCLIP 2, SigLIP and SigLIP 2: encoders of texts and of images, alone or as one model.

HF sources: models/clip, models/metaclip_2, models/siglip, models/siglip2.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import isqrt
from typing import Any

from ...errors import ModelError, shown
from .. import rows as make
from ..spec import (
    Attention,
    Embedding,
    Layer,
    Mlp,
    ModelSpec,
    Norm,
    Patches,
    Pooled,
    Positions,
    Probe,
)
from ..weights import Row, WeightTable, row
from .fields import ConfigFields
from .heads import Classifier, make_head

CLASSES = {
    "clip": ("CLIPModel", "CLIPForImageClassification"),
    "clip_text_model": ("CLIPTextModel", "CLIPTextModelWithProjection"),
    "clip_vision_model": ("CLIPVisionModel", "CLIPVisionModelWithProjection"),
    "metaclip_2": ("MetaClip2Model", "MetaClip2ForImageClassification"),
    "metaclip_2_text_model": ("MetaClip2TextModel", "MetaClip2TextModelWithProjection"),
    "metaclip_2_vision_model": ("MetaClip2VisionModel", "MetaClip2VisionModelWithProjection"),
    "siglip": ("SiglipModel", "SiglipForImageClassification"),
    "siglip_text_model": ("SiglipTextModel",),
    "siglip_vision_model": ("SiglipVisionModel",),
    "siglip2": ("Siglip2Model", "Siglip2ForImageClassification"),
    "siglip2_text_model": ("Siglip2TextModel",),
    "siglip2_vision_model": ("Siglip2VisionModel",),
}
_TEXT, _VISION = "text_model.", "vision_model."
_UNUSED = (r"embeddings\.position_ids$", r"^logit_(scale|bias)$")


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of an encoder of texts or of images, or of a model of both."""
    if fields.family.endswith("_text_model"):
        spec, outer, layer = _text(fields, architecture)
        return spec, _table(spec, outer, layer, _TEXT)
    if fields.family.endswith("_vision_model"):
        spec, outer, layer = _vision(fields, architecture)
        return spec, _table(spec, outer, layer, _VISION)
    text, images = (
        fields.part(f"{x}_config", f"{fields.family}_{x}_model") for x in ("text", "vision")
    )
    fields.ignore("initializer_factor", "logit_scale_init_value")
    image_spec, image_rows, image_layer = _vision(images, architecture)
    is_clip = _is_clip(fields)
    images.finish()
    if architecture.endswith("ForImageClassification"):
        pooling, unread = ("patches", "post_layernorm") if is_clip else ("mean", "head")
        head, rows = make_head(fields, "sequence", Classifier("classifier"), pooling)
        if is_clip:
            fields.ignore("projection_dim")
        spec = replace(image_spec, family=fields.family, head=head, pooled=None)
        read = [own for own in image_rows if not own.name.startswith(("pooled", "probe"))]
        unused = rf"^{_TEXT}", r"^(text|visual)_projection\.", rf"^{_VISION}{unread}\."
        return spec, _table(spec, [*read, *rows], image_layer, "", unused)
    spec, outer, layer = _text(text, architecture)
    text.finish()
    width = fields.size("projection_dim") if is_clip else image_spec.embed
    if is_clip:
        spec, image_spec = (replace(one, projected=width) for one in (spec, image_spec))
        outer += make.linear("projection", "text_projection", "projected embed", bias=False)
        image_rows += make.linear("projection", "visual_projection", "projected embed", bias=False)
    elif spec.projected != width or image_spec.pooled is None:
        raise ModelError(
            f"config.json has a text tower of {spec.projected} numbers (projection_size) and a "
            f"vision tower of {width}, without a head if vision_use_head is false; the vectors of "
            "both must be as wide."
        )
    spec = replace(spec, family=fields.family, encoder=image_spec)
    stored = "" if is_clip else "one"
    names = ("logit_scale",) if is_clip else ("logit_scale", "logit_bias")
    outer += [row(name, "", (name, stored)) for name in names]
    layers = (tuple(layer),) * len(spec.layers) + (tuple(image_layer),) * len(image_spec.layers)
    table = _table(spec, [*outer, *map(_of_encoder, image_rows)], layer, "")
    return spec, replace(table, layers=layers, unused=_UNUSED[:1])


def _is_clip(fields: ConfigFields) -> bool:
    return not fields.family.startswith("siglip")


def _of_encoder(own: Row) -> Row:
    """A row of the second tower as one of the whole model."""

    def axes(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(f"source_{name}" for name in names)

    sources = tuple(replace(source, axes=axes(source.axes)) for source in own.sources)
    return replace(own, name=f"encoder.{own.name}", axes=axes(own.axes), sources=sources)


def _table(
    spec: ModelSpec, outer: list[Row], layer: list[Row], base: str, unused: tuple[str, ...] = ()
) -> WeightTable:
    unused = (*_UNUSED, *unused)
    if base and not spec.projected:
        unused = (*unused, r"^(text|visual)_projection\.")
    layers = (tuple(layer),) * len(spec.layers)
    return WeightTable(spec, tuple(outer), layers, base=base, unused=unused)


def _stack(fields: ConfigFields, architecture: str, hf: str, causal: bool) -> Any:
    """The parts common to both kinds of towers: the spec of the layers, and a layer's rows."""
    embed, heads, head_dim = fields.split("hidden_size", "num_attention_heads")
    fields.ignore("attention_dropout", "dropout", "initializer_factor")
    norm = Norm("layer", fields.number("layer_norm_eps"))
    attention = Attention(heads, heads, head_dim, head_dim**-0.5, causal=causal)
    mlp = Mlp(fields.size("intermediate_size"), fields.activation("hidden_act"), gated=False)
    spec = ModelSpec(
        family=fields.family,
        architecture=architecture,
        vocab=0,
        embed=embed,
        layers=(Layer(attention, mlp, norm, "pre"),) * fields.layers("num_hidden_layers"),
        max_positions=1,
        packs=False,
        states="raw",
    )
    layer = f"{hf}encoder.layers.{{i}}."
    rows = [
        *make.norm(norm, "attn_norm", f"{layer}layer_norm1"),
        *make.joined("qkv", layer + "self_attn.{p}", make.QKV, bias=True),
        *make.linear("out", f"{layer}self_attn.out_proj", "embed q"),
        *make.norm(norm, "mlp_norm", f"{layer}layer_norm2"),
        *make.linear("up", f"{layer}mlp.fc1", "ffn embed"),
        *make.linear("down", f"{layer}mlp.fc2", "embed ffn"),
    ]
    return spec, rows


def _text(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, list[Row], list[Row]]:
    """Spec, outer rows and a layer's rows of an encoder of texts."""
    is_clip, hf = _is_clip(fields), _TEXT
    spec, layer = _stack(fields, architecture, hf, causal=is_clip)
    norm, positions = spec.layers[0].norm, fields.size("max_position_embeddings")
    projects = architecture.endswith("WithProjection")
    pooled = Pooled("end") if is_clip else Pooled("final")
    end = _end(fields) if is_clip else None
    width = projects and fields.size("projection_dim")
    if not is_clip:
        width = fields.size("projection_size", spec.embed)
    fields.ignore("projection_dim")
    tables = ("embed", "vocab", "token"), ("positions", "positions", "position")
    rows = [
        row(f"{o}.weight", f"{x} embed", (f"{hf}embeddings.{n}_embedding.weight", f"{x} embed"))
        for o, x, n in tables
    ]
    rows += make.norm(norm, "final_norm", f"{hf}final_layer_norm")
    if projects:
        rows += make.linear("projection", "text_projection", "projected embed", bias=False)
    elif not is_clip:
        rows += make.linear("projection", f"{hf}head", "projected embed")
    spec = replace(spec, vocab=fields.size("vocab_size"), final_norm=norm, pooled=pooled)
    spec = replace(spec, end_id=end, max_positions=positions, positions=Positions(positions))
    return replace(spec, projected=width or 0), rows, layer


def _vision(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, list[Row], list[Row]]:
    """Spec, outer rows and a layer's rows of an encoder of images."""
    is_clip, hf = _is_clip(fields), _VISION
    spec, layer = _stack(fields, architecture, hf, causal=False)
    norm = spec.layers[0].norm
    is_given = fields.family.startswith("siglip2")
    patches = _given_patches(fields) if is_given else make_patches(fields, learned=int(is_clip))
    projects = architecture.endswith("WithProjection")
    width = fields.size("projection_dim") if projects else 0
    fields.ignore("projection_dim")
    spec = replace(spec, max_positions=patches.tokens, positions=Positions(patches.tokens))
    spec = replace(spec, senses=patches, projected=width)
    at, table = f"{hf}embeddings.", "positions embed"
    rows = [
        row("positions.weight", table, (f"{at}position_embedding.weight", table)),
        *(_flat_kernel if is_given else kernel)(f"{at}patch_embedding", bias=not is_clip),
    ]
    if is_clip:
        rows.append(row("class_token", "embed", (f"{at}class_embedding", "embed")))
        rows += make.norm(norm, "embed_norm", f"{hf}pre_layrnorm")
        rows += make.norm(norm, "pooled_norm", f"{hf}post_layernorm")
        if projects:
            rows += make.linear("projection", "visual_projection", "projected embed", bias=False)
        pooled = Pooled("first", norm)
        return replace(spec, embedding=Embedding(norm=norm), pooled=pooled), rows, layer
    rows += make.norm(norm, "final_norm", f"{hf}post_layernorm")
    pooled = None
    if fields.flag("vision_use_head", True):
        attention, ffn = spec.layers[0].attention, fields.size("intermediate_size")
        probe = Probe(attention, Mlp(ffn, fields.activation("hidden_act"), gated=False), norm)
        pooled = Pooled(probe)
        rows += _probe(norm, f"{hf}head.")
    return replace(spec, final_norm=norm, pooled=pooled), rows, layer


def _probe(norm: Norm, hf: str) -> list[Row]:
    """The rows of the head that pools by a learned query."""
    return [
        row("probe.token", "embed", (f"{hf}probe", "one one embed")),
        row(
            *("probe.qkv.weight", "probe_qkv embed"),
            (f"{hf}attention.in_proj_weight", "probe_qkv embed"),
        ),
        row("probe.qkv.bias", "probe_qkv", (f"{hf}attention.in_proj_bias", "probe_qkv")),
        *make.linear("probe.out", f"{hf}attention.out_proj", "embed embed_in"),
        *make.norm(norm, "probe.norm", f"{hf}layernorm"),
        *make.linear("probe.up", f"{hf}mlp.fc1", "probe_ffn embed"),
        *make.linear("probe.down", f"{hf}mlp.fc2", "embed probe_ffn"),
    ]


def _given_patches(fields: ConfigFields) -> Patches:
    """The patches of images that come as patches, of a square grid of positions."""
    count, size = fields.size("num_patches"), fields.size("patch_size")
    side = isqrt(count)
    if side * side != count:
        raise ModelError(f"config.json has num_patches={count}; expected the square of a number.")
    return Patches(fields.size("num_channels"), (size, size), (side, side), 0, "given")


def _flat_kernel(hf: str, bias: bool) -> list[Row]:
    """The projection that makes a token of each patch, whose numbers lie as callers give them."""
    weight = row("patches.kernel", "embed patch", (f"{hf}.weight", "embed patch"))
    return [weight, *kernel(hf, bias)[1:]]


def make_patches(fields: ConfigFields, learned: int) -> Patches:
    """Read how images are cut into patches, with so many learned tokens in front."""

    def pair(name: str) -> tuple[int, int]:
        value: Any = fields.take(name)
        both = value if isinstance(value, list | tuple) else (value, value)
        if len(both) != 2 or not all(type(n) is int and 0 < n < 1 << 16 for n in both):
            raise ModelError(f"config.json has {name}={shown(value)}; expected pixels.")
        return both[0], both[1]

    image, size = pair("image_size"), pair("patch_size")
    grid = image[0] // size[0], image[1] // size[1]
    if 0 in grid or (grid[0] * size[0], grid[1] * size[1]) != image:
        raise ModelError(
            f"config.json has image_size={shown(image)}, no multiple of patch_size={shown(size)}."
        )
    return Patches(fields.size("num_channels"), size, grid, learned)


def kernel(hf: str, bias: bool) -> list[Row]:
    """The convolution that makes a token of each patch."""
    axes = "embed channels high wide"
    rows = [row("patches.kernel", axes, (f"{hf}.weight", axes))]
    return rows + ([row("patches.bias", "embed", (f"{hf}.bias", "embed"))] if bias else [])


def _end(fields: ConfigFields) -> int | None:
    """The id at the end of a text; None for the largest, as in CLIP's first files, which say 2."""
    end = fields.take("eos_token_id")
    if type(end) is not int or end < 0:
        raise ModelError(f"config.json has eos_token_id={shown(end)}; expected one id.")
    return None if end == 2 and fields.family.startswith("clip") else end

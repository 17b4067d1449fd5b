"""CLIP's encoders of texts and of images, and ViT. HF source: models/clip, models/vit."""

from typing import Any

from ...errors import ModelError, shown
from ..spec import Attention, Layer, Mlp, ModelSpec, Norm, Patches, Pooled
from ..weights import Row, WeightTable, row
from . import rows as make
from .fields import ConfigFields
from .heads import Classifier, make_head

CLASSES = {
    "clip_text_model": ("CLIPTextModel", "CLIPTextModelWithProjection"),
    "clip_vision_model": ("CLIPVisionModel", "CLIPVisionModelWithProjection"),
    "vit": ("ViTModel", "ViTForImageClassification"),
}
# Names of layers' parts in files that are older than transformers 5.
_OLD = (
    *(("layers.", "encoder.layer."), ("attention.q_proj", "attention.attention.query")),
    *(("attention.k_proj", "attention.attention.key"), ("mlp.fc1", "intermediate.dense")),
    *(("attention.v_proj", "attention.attention.value"), ("mlp.fc2", "output.dense")),
    ("attention.o_proj", "attention.output.dense"),
)


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of an encoder of texts or of images."""
    embed, heads, head_dim = fields.split("hidden_size", "num_attention_heads")
    fields.ignore("attention_dropout", "initializer_factor", "projection_dim", "encoder_stride")
    fields.ignore("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout")
    reads, is_vit = fields.family != "clip_text_model", fields.family == "vit"
    norm = Norm("layer", fields.number("layer_norm_eps"))
    attention = Attention(heads, heads, head_dim, head_dim**-0.5, causal=not reads)
    mlp = Mlp(fields.size("intermediate_size"), fields.activation("hidden_act"), gated=False)
    patches = _patches(fields) if reads else None
    if patches is None:
        positions = fields.size("max_position_embeddings")
    else:
        positions = 1 + patches.grid[0] * patches.grid[1]
    projects = architecture.endswith("WithProjection")
    base = {"clip_text_model": "text_model.", "clip_vision_model": "vision_model."}
    hf = base.get(fields.family, "vit.")
    head, pooled, outer = None, None, _embeddings(fields.family, hf)
    final = f"{hf}layernorm" if is_vit else f"{hf}final_layer_norm"
    has_final = is_vit or not reads
    if has_final:
        outer += make.norm(norm, "final_norm", final)
    if reads and not is_vit:
        outer += make.norm(norm, "embed_norm", f"{hf}pre_layrnorm")
        outer += make.norm(norm, "pooled_norm", f"{hf}post_layernorm")
        pooled = Pooled("first", norm, "image_embeds" if projects else None)
    elif not reads:
        pooled = Pooled("end", None, "text_embeds" if projects else None, _end(fields))
    fields.ignore("pooler_output_size", "pooler_act")
    if architecture == "ViTForImageClassification":
        head, rows = make_head(fields, "sequence", Classifier("classifier"), "first")
        outer += rows
    elif is_vit:
        fields.require("pooler_output_size", embed)
        fields.require("pooler_act", "tanh")
        outer += make.linear("pooler", f"{hf}pooler.dense", "embed embed_in")
    if projects:
        name = "visual_projection" if reads else "text_projection"
        outer += make.linear("projection", name, "projected embed", bias=False)
    spec = ModelSpec(
        family=fields.family,
        architecture=architecture,
        vocab=0 if reads else fields.size("vocab_size"),
        embed=embed,
        layers=(Layer(attention, mlp, norm, "pre"),) * fields.layers("num_hidden_layers"),
        max_positions=positions,
        learned_positions=positions,
        packs=False,
        embed_norm=norm if reads and not is_vit else None,
        final_norm=norm if has_final else None,
        head=head,
        projected=fields.size("projection_dim") if projects else 0,
        patches=patches,
        pooled=pooled,
        raw_states=True,
    )
    biased = fields.flag("qkv_bias", True)
    layer = _layer(f"{hf}layers.{{i}}." if is_vit else f"{hf}encoder.layers.{{i}}.", norm, biased)
    unused = [r"embeddings\.(position_ids|mask_token)$", "logit_scale"]
    unused += [] if projects else [r"^(text|visual)_projection\."]
    unused += [r"^(vit\.)?pooler\."] if head else [r"^classifier\."]
    return spec, WeightTable(
        spec,
        tuple(outer),
        (tuple(layer),) * len(spec.layers),
        base=hf,
        renames=_OLD if is_vit else (),
        unused=tuple(unused),
        optional="pooler.",  # HF builds a base model without one too
    )


def _patches(fields: ConfigFields) -> Patches:
    """How images are cut."""

    def pair(name: str) -> tuple[int, int]:
        value: Any = fields.take(name)
        both = value if isinstance(value, list | tuple) else (value, value)
        if len(both) != 2 or not all(type(n) is int and 0 < n < 1 << 16 for n in both):
            raise ModelError(f"config.json has {name}={shown(value)}; expected pixels.")
        return both[0], both[1]

    image, size = pair("image_size"), pair("patch_size")
    grid = image[0] // size[0], image[1] // size[1]
    if (grid[0] * size[0], grid[1] * size[1]) != image:
        raise ModelError(
            f"config.json has image_size={shown(image)}, no multiple of patch_size={shown(size)}."
        )
    return Patches(fields.size("num_channels"), size, grid)


def _end(fields: ConfigFields) -> int | None:
    """The id at the end of a text; None for the largest, as in the first files, which say 2."""
    end = fields.take("eos_token_id")
    if type(end) is not int or end < 0:
        raise ModelError(f"config.json has eos_token_id={shown(end)}; expected one id.")
    return None if end == 2 else end


def _embeddings(family: str, hf: str) -> list[Row]:
    at, axes = f"{hf}embeddings.", "embed channels high wide"
    if family == "clip_text_model":
        tables = ("embed", "vocab", "token"), ("positions", "positions", "position")
        return [
            row(f"{ours}.weight", f"{x} embed", (f"{at}{name}_embedding.weight", f"{x} embed"))
            for ours, x, name in tables
        ]
    if family == "clip_vision_model":
        places = row(
            *("positions.weight", "positions embed"),
            (f"{at}position_embedding.weight", "positions embed"),
        )
        first = row("class_token", "embed", (f"{at}class_embedding", "embed"))
        kernel = f"{at}patch_embedding.weight"
        return [places, first, row("patches.kernel", axes, (kernel, axes))]
    hf = f"{at}patch_embeddings.projection."
    return [
        row(
            *("positions.weight", "positions embed"),
            (f"{at}position_embeddings", "one positions embed"),
        ),
        row("class_token", "embed", (f"{at}cls_token", "one one embed")),
        row("patches.kernel", axes, (f"{hf}weight", axes)),
        row("patches.bias", "embed", (f"{hf}bias", "embed")),
    ]


def _layer(hf: str, norm: Norm, biased: bool) -> list[Row]:
    is_vit = ".encoder." not in hf
    attention = f"{hf}attention." if is_vit else f"{hf}self_attn."
    norms = ("layernorm_before", "layernorm_after") if is_vit else ("layer_norm1", "layer_norm2")
    return [
        *make.norm(norm, "attn_norm", hf + norms[0]),
        *make.joined("qkv", attention + "{p}", make.QKV, biased),
        *make.linear("out", f"{attention}{'o_proj' if is_vit else 'out_proj'}", "embed q"),
        *make.norm(norm, "mlp_norm", hf + norms[1]),
        *make.linear("up", f"{hf}mlp.fc1", "ffn embed"),
        *make.linear("down", f"{hf}mlp.fc2", "embed ffn"),
    ]

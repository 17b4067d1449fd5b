"""ViT and its relatives: DeiT, DINOv2 with and without registers, ViT-MSN and I-JEPA.

HF sources: models/vit, deit, dinov2, dinov2_with_registers, vit_msn, ijepa.
"""

from dataclasses import replace

from ...blocks.layer_scale import LayerScale
from .. import rows as make
from ..spec import Attention, Layer, Mlp, ModelSpec, Norm, Patches, Pooled, Positions
from ..weights import Row, Source, WeightTable, row
from .clip import kernel, make_patches
from .fields import ConfigFields
from .heads import Classifier, make_head

CLASSES = {
    "vit": ("ViTModel", "ViTForImageClassification"),
    "deit": ("DeiTModel", "DeiTForImageClassification"),
    "dinov2": ("Dinov2Model", "Dinov2ForImageClassification"),
    "dinov2_with_registers": (
        *("Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification"),
    ),
    "vit_msn": ("ViTMSNModel", "ViTMSNForImageClassification"),
    "ijepa": ("IJepaModel", "IJepaForImageClassification"),
}
_LEARNED = {"deit": 2, "ijepa": 0}  # tokens before those of patches, where they are not 1
# Names of layers' parts in files that are older than transformers 5.
_OLD = (
    *(("layers.", "encoder.layer."), ("attention.q_proj", "attention.attention.query")),
    *(("attention.k_proj", "attention.attention.key"), ("mlp.fc1", "intermediate.dense")),
    *(("attention.v_proj", "attention.attention.value"), ("mlp.fc2", "output.dense")),
    ("attention.o_proj", "attention.output.dense"),
)


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a ViT."""
    embed, heads, head_dim = fields.split("hidden_size", "num_attention_heads")
    fields.ignore("encoder_stride", "hidden_dropout_prob", "attention_probs_dropout_prob")
    is_dino, is_msn = fields.family.startswith("dinov2"), fields.family == "vit_msn"
    hf = "vit." if is_msn else f"{fields.family}."
    norm = Norm("layer", fields.number("layer_norm_eps"))
    attention = Attention(heads, heads, head_dim, head_dim**-0.5, causal=False)
    mlp = _dino_mlp(fields, embed) if is_dino else None
    if mlp is None:
        activation = fields.activation("hidden_act")
        mlp = Mlp(fields.size("intermediate_size"), activation, gated=False)
    registers = _registers(fields)
    patches = make_patches(fields, learned=_LEARNED.get(fields.family, 1) + registers)
    patches = replace(patches, sizes="any" if is_dino else "one")
    outer = [*_embeddings(patches, registers, hf), *make.norm(norm, "final_norm", f"{hf}layernorm")]
    head, pooled = None, Pooled("first") if is_dino else None
    if architecture.endswith("ForImageClassification"):
        pooling, width = "first" if patches.learned else "mean", "embed"
        if is_dino:
            pooling, width, pooled = "beside", "embed+embed_in", None
        own = Classifier("classifier")
        head, rows = make_head(fields, "sequence", own, pooling, width=width)
        head = replace(head, loss="counted")
        outer += rows
        fields.ignore("pooler_output_size", "pooler_act")
    elif not is_dino and not is_msn:
        fields.require("pooler_output_size", embed)
        fields.require("pooler_act", "tanh")
        outer += make.linear("pooler", f"{hf}pooler.dense", "embed embed_in")
    layer = Layer(attention, mlp, norm, "pre", edits=(LayerScale(),) if is_dino else ())
    spec = ModelSpec(
        family=fields.family,
        architecture=architecture,
        vocab=0,
        embed=embed,
        layers=(layer,) * fields.layers("num_hidden_layers"),
        max_positions=patches.tokens,
        positions=Positions(patches.tokens - registers),
        packs=False,
        final_norm=norm,
        head=head,
        senses=patches,
        pooled=pooled,
        states="raw",
    )
    rows = _layer(layer, f"{hf}encoder.layer.{{i}}." if is_dino else f"{hf}layers.{{i}}.", fields)
    return spec, WeightTable(
        spec,
        tuple(outer),
        (tuple(rows),) * len(spec.layers),
        base=hf,
        renames=_OLD[1:] if is_dino else _OLD,
        unused=(r"embeddings\.mask_token$", rf"^({hf})?pooler\." if head else r"^classifier\."),
        optional="pooler.",  # HF builds a base model without one too
    )


def _dino_mlp(fields: ConfigFields, embed: int) -> Mlp:
    """The MLP of DINOv2, whose width is a multiple of the embedding's, or 2/3 of that if gated."""
    fields.ignore("layerscale_value", "drop_path_rate", "use_mask_token")
    # Of a backbone, which is another class.
    fields.ignore("apply_layernorm", "reshape_hidden_states", "stage_names")
    fields.ignore("out_features", "out_indices")
    width, activation = embed * fields.size("mlp_ratio"), fields.activation("hidden_act")
    if not fields.flag("use_swiglu_ffn", False):
        return Mlp(width, activation, gated=False)
    return Mlp((int(width * 2 / 3) + 7) // 8 * 8, "silu", gated=True)


def _registers(fields: ConfigFields) -> int:
    """Learned tokens without a position; 0 registers are a model of another family."""
    return fields.size("num_register_tokens") if fields.family.endswith("_registers") else 0


def _embeddings(patches: Patches, registers: int, hf: str) -> list[Row]:
    at, stored = f"{hf}embeddings.", "one one embed"
    first = [row("class_token", "embed", (f"{at}cls_token", stored))]
    if registers:
        names = ("cls_token", "classes"), ("register_tokens", "registers")
        stored_as = [(f"{at}{name}", f"one {axis} embed") for name, axis in names]
        first = [row("class_token", "classes+registers embed", *stored_as)]
    elif patches.learned == 2:
        names = f"{at}cls_token", f"{at}distillation_token"
        sources = tuple(Source(n, tuple(stored.split()), index=i) for i, n in enumerate(names))
        first = [Row("class_token", ("learned", "embed"), sources)]
    elif not patches.learned:
        first = []
    table = "positions embed"
    places = row("positions.weight", table, (f"{at}position_embeddings", f"one {table}"))
    return [places, *first, *kernel(f"{at}patch_embeddings.projection", bias=True)]


def _layer(layer: Layer, hf: str, fields: ConfigFields) -> list[Row]:
    attention, norm, mlp = f"{hf}attention.", layer.norm, f"{hf}mlp."
    assert isinstance(layer.mlp, Mlp)
    names = ("norm1", "norm2") if layer.edits else ("layernorm_before", "layernorm_after")
    rows = [
        *make.norm(norm, "attn_norm", hf + names[0]),
        *make.joined("qkv", attention + "{p}", make.QKV, fields.flag("qkv_bias", True)),
        *make.linear("out", f"{attention}o_proj", "embed q"),
        *make.norm(norm, "mlp_norm", hf + names[1]),
    ]
    rows += [row for edit in layer.edits if isinstance(edit, LayerScale) for row in edit.rows(hf)]
    if not layer.mlp.gated:
        return [
            *rows,
            *make.linear("up", f"{mlp}fc1", "ffn embed"),
            *make.linear("down", f"{mlp}fc2", "embed ffn"),
        ]
    up = make.joined("up", mlp + "{p}", make.GATE_UP, bias=True)
    old = ("weight", ("gate+up", "embed")), ("bias", ("gate+up",))
    up = [
        replace(own, others=(Source(f"{mlp}weights_in.{part}", axes),))
        for own, (part, axes) in zip(up, old, strict=True)
    ]
    down = [
        replace(own, others=(replace(own.sources[0], name=f"{mlp}weights_out.{part}"),))
        for own, part in zip(
            make.linear("down", f"{mlp}down_proj", "embed up"), ("weight", "bias"), strict=True
        )
    ]
    return [*rows, *up, *down]

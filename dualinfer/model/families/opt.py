"""OPT: learned positions counted by the mask, pre- or post-norm. HF source: models/opt."""

from ..spec import Attention, Head, Layer, Mlp, ModelSpec, Norm
from ..weights import WeightTable, row
from . import rows as make
from .fields import ConfigFields

_OFFSET = 2  # rows of the table before position 0, once used for padding


def architectures(model_type: str) -> tuple[str, ...]:
    """HF class names served, the default first."""
    return "OPTForCausalLM", "OPTModel"


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of an OPT model."""
    embed, heads, head_dim = fields.split("hidden_size", "num_attention_heads")
    layers, vocab = fields.layers("num_hidden_layers"), fields.size("vocab_size")
    positions, ffn = fields.size("max_position_embeddings"), fields.size("ffn_dim")
    width = fields.size("word_embed_proj_dim", embed)
    norm = Norm("layer", 1e-5)  # HF leaves torch's default
    before = fields.flag("do_layer_norm_before", True)
    removed = fields.flag("_remove_final_layer_norm", False)
    final = before and not removed
    bias = fields.flag("enable_bias", True)
    affine = fields.flag("layer_norm_elementwise_affine", True)
    tied = fields.flag("tie_word_embeddings", True)
    has_head = architecture == "OPTForCausalLM"
    fields.ignore("dropout", "attention_dropout", "activation_dropout", "layerdrop", "init_std")
    block = Layer(
        Attention(heads, heads, head_dim, head_dim**-0.5),
        Mlp(ffn, fields.activation("activation_function"), gated=False),
        norm,
        "pre" if before else "post",
    )
    spec = ModelSpec(
        family="opt",
        architecture=architecture,
        vocab=vocab,
        embed=embed,
        layers=(block,) * layers,
        max_positions=positions,
        learned_positions=positions,
        position_offset=_OFFSET,
        positions_from_mask=True,
        embed_width=None if width == embed else width,
        final_norm=norm if final else None,
        head=Head("causal") if has_head else None,
    )
    decoder = "model.decoder."
    embedding = f"{decoder}embed_tokens.weight"
    table_axis = "embed" if width == embed else "width"
    head = make.HeadRows.of(has_head, tied, embedding, f"vocab {table_axis}")
    rows = [
        row("embed.weight", f"vocab {table_axis}", (embedding, f"vocab {table_axis}")),
        row(
            "positions.weight",
            "positions embed",
            (f"{decoder}embed_positions.weight", "positions embed"),
        ),
    ]
    if width != embed:
        rows += make.linear("project_in", f"{decoder}project_in", "embed width", bias=False)
        rows += make.linear("project_out", f"{decoder}project_out", "width embed", bias=False)
    norms = [("final_norm", f"{decoder}final_layer_norm")] if final else []
    for i in range(layers):
        ours, hf = f"layers.{i}.", f"{decoder}layers.{i}."
        rows += make.split_qkv(f"{ours}qkv", f"{hf}self_attn.", bias)
        rows += make.linear(f"{ours}out", f"{hf}self_attn.out_proj", "embed q", bias)
        rows += make.linear(f"{ours}up", f"{hf}fc1", "ffn embed", bias)
        rows += make.linear(f"{ours}down", f"{hf}fc2", "embed ffn", bias)
        norms += [
            (f"{ours}attn_norm", f"{hf}self_attn_layer_norm"),
            (f"{ours}mlp_norm", f"{hf}final_layer_norm"),
        ]
    for name, theirs in norms:
        rows += make.layer_norm(name, theirs) if affine else make.plain_layer_norm(name)
    table = WeightTable(
        rows=(*rows, *head.rows),
        sizes={
            "vocab": vocab,
            "embed": embed,
            "width": width,
            "positions": positions + _OFFSET,
            "q": embed,
            "k": embed,
            "v": embed,
            "ffn": ffn,
        },
        base="model.",
        unused=(r"decoder\.version$", *head.unused),
        tied=head.tied,
    )
    return spec, table

"""OPT: learned positions counted by the mask, pre- or post-norm. HF source: models/opt."""

from .. import rows as make
from ..spec import Attention, Embedding, Layer, Mlp, ModelSpec, Norm, Positions
from ..weights import Row, WeightTable, row
from .decoders import decoder_spec
from .fields import ConfigFields

CLASSES = {"opt": ("OPTForCausalLM", "OPTModel")}
_OFFSET = 2  # rows of the table before position 0, once used for padding


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of an OPT model."""
    embed, heads, head_dim = fields.split("hidden_size", "num_attention_heads")
    positions, ffn = fields.size("max_position_embeddings"), fields.size("ffn_dim")
    width = fields.size("word_embed_proj_dim", embed)
    norm = Norm("layer", 1e-5)  # HF leaves torch's default
    before = fields.flag("do_layer_norm_before", True)
    final = before and not fields.flag("_remove_final_layer_norm", False)
    bias = fields.flag("enable_bias", True)
    affine = fields.flag("layer_norm_elementwise_affine", True)
    fields.ignore("dropout", "attention_dropout", "activation_dropout", "layerdrop", "init_std")
    block = Layer(
        Attention(heads, heads, head_dim, head_dim**-0.5),
        Mlp(ffn, fields.activation("activation_function"), gated=False),
        norm,
        "pre" if before else "post",
    )
    spec = decoder_spec(
        *(fields, architecture, embed, (block,) * fields.layers("num_hidden_layers")),
        norm=norm if final else None,
        max_positions=positions,
        positions=Positions(positions, _OFFSET, "seen"),
        packs=False,
        embedding=Embedding(width=None if width == embed else width),
    )

    def normed(ours: str, theirs: str) -> list[Row]:
        return make.norm(norm, ours, theirs) if affine else make.plain_norm(norm, ours)

    decoder, hf = "model.decoder.", "model.decoder.layers.{i}."
    layer = [
        *make.joined("qkv", hf + "self_attn.{p}", make.QKV, bias),
        *make.linear("out", f"{hf}self_attn.out_proj", "embed q", bias),
        *make.linear("up", f"{hf}fc1", "ffn embed", bias),
        *make.linear("down", f"{hf}fc2", "embed ffn", bias),
        *normed("attn_norm", f"{hf}self_attn_layer_norm"),
        *normed("mlp_norm", f"{hf}final_layer_norm"),
    ]
    positions_axes = "positions embed"
    outer = [
        row(
            "positions.weight", positions_axes, (f"{decoder}embed_positions.weight", positions_axes)
        )
    ]
    if width != embed:
        outer += make.linear("project_in", f"{decoder}project_in", "embed width", bias=False)
        outer += make.linear("project_out", f"{decoder}project_out", "width embed", bias=False)
    if final:
        outer += normed("final_norm", f"{decoder}final_layer_norm")
    return spec, make.causal_table(
        spec,
        layer,
        outer,
        embedding=f"{decoder}embed_tokens",
        tied=fields.flag("tie_word_embeddings", True),
        width="embed" if width == embed else "width",
        base="model.",
        unused=[r"decoder\.version$"],
    )

"""GPT-2: pre-LayerNorm, learned positions, Conv1D layout. HF source: models/gpt2."""

from ..spec import Attention, Head, Layer, Mlp, ModelSpec, Norm
from ..weights import WeightTable, row
from . import rows as make
from .fields import ConfigFields

CLASSES = {"gpt2": ("GPT2LMHeadModel", "GPT2Model")}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a GPT-2 model."""
    embed, heads, head_dim = fields.split("n_embd", "n_head")
    positions = fields.size("n_positions")
    norm = Norm("layer", fields.number("layer_norm_epsilon"))
    ffn = fields.size("n_inner", 4 * embed)
    mlp = Mlp(ffn, fields.activation("activation_function"), gated=False)
    scale = head_dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx", False)
    scales = [scale / (i + 1) if by_layer else scale for i in range(fields.layers("n_layer"))]
    fields.require("add_cross_attention", False)
    # Softmax is in float32 here in any case, which is what reorder_and_upcast_attn asks for.
    fields.ignore("reorder_and_upcast_attn", "n_ctx", "resid_pdrop", "embd_pdrop", "attn_pdrop")
    fields.ignore_summary()
    spec = ModelSpec(
        family="gpt2",
        architecture=architecture,
        vocab=(vocab := fields.size("vocab_size")),
        embed=embed,
        layers=tuple(Layer(Attention(heads, heads, head_dim, s), mlp, norm, "pre") for s in scales),
        max_positions=positions,
        learned_positions=positions,
        token_types=vocab,
        token_types_from_vocab=True,
        final_norm=norm,
        head=Head("causal") if architecture == "GPT2LMHeadModel" else None,
    )
    hf = "transformer.h.{i}."
    layer = [
        *make.norm(norm, "attn_norm", f"{hf}ln_1"),
        *make.norm(norm, "mlp_norm", f"{hf}ln_2"),
        # Conv1D stores [in, out]; the axis names give the transpose.
        *make.linear("qkv", f"{hf}attn.c_attn", "q+k+v embed", stored="embed q+k+v"),
        *make.linear("out", f"{hf}attn.c_proj", "embed q", stored="q embed"),
        *make.linear("up", f"{hf}mlp.c_fc", "ffn embed", stored="embed ffn"),
        *make.linear("down", f"{hf}mlp.c_proj", "embed ffn", stored="ffn embed"),
    ]
    outer = [
        row("positions.weight", "positions embed", ("transformer.wpe.weight", "positions embed")),
        *make.norm(norm, "final_norm", "transformer.ln_f"),
    ]
    return spec, make.causal_table(
        spec,
        layer,
        outer,
        embedding="transformer.wte",
        tied=fields.flag("tie_word_embeddings", True),
        base="transformer.",
        unused=[r"\.attn\.(masked_)?bias$"],  # causal masks that older versions stored as buffers
    )

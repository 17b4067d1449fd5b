"""GPT-2: pre-LayerNorm, learned positions, Conv1D layout. HF source: models/gpt2."""

from ..spec import Attention, Head, Layer, Mlp, ModelSpec, Norm
from ..weights import WeightTable, row
from .fields import ConfigFields


def architectures(model_type: str) -> tuple[str, ...]:
    """HF class names served, the default first."""
    return "GPT2LMHeadModel", "GPT2Model"


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a GPT-2 model."""
    embed, heads, head_dim = fields.split("n_embd", "n_head")
    layers, vocab = fields.layers("n_layer"), fields.size("vocab_size")
    positions, ffn = fields.size("n_positions"), fields.size("n_inner", 4 * embed)
    norm = Norm("layer", fields.number("layer_norm_epsilon"))
    mlp = Mlp(ffn, fields.activation("activation_function"), gated=False)
    scale = head_dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx", False)
    tied = fields.flag("tie_word_embeddings", True)
    has_head = architecture == "GPT2LMHeadModel"
    fields.require("add_cross_attention", False)
    # Softmax is in float32 here in any case, which is what reorder_and_upcast_attn asks for.
    fields.ignore("reorder_and_upcast_attn", "n_ctx", "resid_pdrop", "embd_pdrop", "attn_pdrop")
    fields.ignore_summary()
    spec = ModelSpec(
        family="gpt2",
        architecture=architecture,
        vocab=vocab,
        embed=embed,
        layers=tuple(
            Layer(
                Attention(heads, heads, head_dim, scale / (i + 1) if by_layer else scale),
                mlp,
                norm,
                "pre",
            )
            for i in range(layers)
        ),
        max_positions=positions,
        learned_positions=positions,
        token_types=vocab,
        token_types_from_vocab=True,
        final_norm=norm,
        head=Head("causal") if has_head else None,
    )
    head = row("head.weight", "vocab embed", ("lm_head.weight", "vocab embed"))
    rows = [
        row("embed.weight", "vocab embed", ("transformer.wte.weight", "vocab embed")),
        row("positions.weight", "positions embed", ("transformer.wpe.weight", "positions embed")),
        row("final_norm.weight", "embed", ("transformer.ln_f.weight", "embed")),
        row("final_norm.bias", "embed", ("transformer.ln_f.bias", "embed")),
    ]
    for i in range(layers):
        ours, hf = f"layers.{i}.", f"transformer.h.{i}."
        for name, theirs in (("attn_norm", "ln_1"), ("mlp_norm", "ln_2")):
            for part in ("weight", "bias"):
                rows.append(row(f"{ours}{name}.{part}", "embed", (f"{hf}{theirs}.{part}", "embed")))
        # Conv1D stores [in, out]; the axis names give the transpose.
        for name, theirs, wide, narrow in (
            ("qkv", "attn.c_attn", "q+k+v", "embed"),
            ("out", "attn.c_proj", "embed", "q"),
            ("up", "mlp.c_fc", "ffn", "embed"),
            ("down", "mlp.c_proj", "embed", "ffn"),
        ):
            rows.append(
                row(
                    f"{ours}{name}.weight",
                    f"{wide} {narrow}",
                    (f"{hf}{theirs}.weight", f"{narrow} {wide}"),
                )
            )
            rows.append(row(f"{ours}{name}.bias", wide, (f"{hf}{theirs}.bias", wide)))
    if has_head and not tied:
        rows.append(head)
    table = WeightTable(
        rows=tuple(rows),
        sizes={
            "vocab": vocab,
            "embed": embed,
            "positions": positions,
            "q": embed,
            "k": embed,
            "v": embed,
            "ffn": ffn,
        },
        base="transformer.",
        # Causal masks that older versions stored as buffers.
        unused=(r"\.attn\.(masked_)?bias$",) + (() if has_head else (r"^lm_head\.weight$",)),
        tied=((head, "transformer.wte.weight"),) if has_head and tied else (),
    )
    return spec, table

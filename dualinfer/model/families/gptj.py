"""GPT-J: parallel residual under one norm, partial interleaved rotary. HF source: models/gptj."""

from ...errors import ModelError
from ..spec import Attention, Head, Layer, Mlp, ModelSpec, Norm
from ..weights import WeightTable, row
from . import rows as make
from .fields import ConfigFields
from .rope import make_rope


def architectures(model_type: str) -> tuple[str, ...]:
    """HF class names served, the default first."""
    return "GPTJForCausalLM", "GPTJModel"


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a GPT-J model."""
    embed, heads, head_dim = fields.split("n_embd", "n_head")
    layers, vocab = fields.layers("n_layer"), fields.size("vocab_size")
    positions, ffn = fields.size("n_positions"), fields.size("n_inner", 4 * embed)
    rotary_dim = fields.size("rotary_dim")
    if rotary_dim > head_dim or rotary_dim % 2:
        raise ModelError(
            f"config.json has rotary_dim={rotary_dim}; expected an even number up to {head_dim}, "
            "the size of a head."
        )
    norm = Norm("layer", fields.number("layer_norm_epsilon"))
    rope = make_rope({"rope_theta": 10000.0}, rotary_dim, positions, interleaved=True)
    tied = fields.flag("tie_word_embeddings", False)
    has_head = architecture == "GPTJForCausalLM"
    fields.ignore(
        "resid_pdrop", "embd_pdrop", "attn_pdrop", "n_ctx", "rotary", "scale_attn_weights"
    )
    fields.ignore_summary()
    block = Layer(
        Attention(heads, heads, head_dim, head_dim**-0.5, rope=rope),
        Mlp(ffn, fields.activation("activation_function"), gated=False),
        norm,
        "pre",
        parallel=True,
        shared_norm=True,
    )
    spec = ModelSpec(
        family="gptj",
        architecture=architecture,
        vocab=vocab,
        embed=embed,
        layers=(block,) * layers,
        max_positions=positions,
        token_types=vocab,
        token_types_from_vocab=True,
        final_norm=norm,
        head=Head("causal") if has_head else None,
    )
    head = make.HeadRows.of(has_head, tied, "transformer.wte.weight")
    rows = [
        row("embed.weight", "vocab embed", ("transformer.wte.weight", "vocab embed")),
        *make.layer_norm("final_norm", "transformer.ln_f"),
    ]
    for i in range(layers):
        ours, hf = f"layers.{i}.", f"transformer.h.{i}."
        rows += make.layer_norm(f"{ours}attn_norm", f"{hf}ln_1")
        rows += make.split_qkv(f"{ours}qkv", f"{hf}attn.", bias=False)
        rows += make.linear(f"{ours}out", f"{hf}attn.out_proj", "embed q", bias=False)
        rows += make.linear(f"{ours}up", f"{hf}mlp.fc_in", "ffn embed")
        rows += make.linear(f"{ours}down", f"{hf}mlp.fc_out", "embed ffn")
    if has_head:
        rows.append(row("head.bias", "vocab", ("lm_head.bias", "vocab")))
    table = WeightTable(
        rows=(*rows, *head.rows),
        sizes={"vocab": vocab, "embed": embed, "q": embed, "k": embed, "v": embed, "ffn": ffn},
        base="transformer.",
        # Causal masks and tables of angles that older versions stored as buffers.
        unused=(r"\.attn\.(bias|masked_bias|embed_positions)$", *head.unused),
        tied=head.tied,
    )
    return spec, table

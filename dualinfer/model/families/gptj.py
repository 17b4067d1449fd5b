"""GPT-J and CodeGen: parallel residual under one norm, partial interleaved rotary.

HF sources: models/gptj, models/codegen.
"""

from ...errors import ModelError
from .. import rows as make
from ..spec import Attention, Embedding, Layer, Mlp, ModelSpec, Norm
from ..weights import WeightTable, row
from .decoders import decoder_spec
from .fields import ConfigFields
from .rope import make_rope

CLASSES = {
    "gptj": ("GPTJForCausalLM", "GPTJModel"),
    "codegen": ("CodeGenForCausalLM", "CodeGenModel"),
}
# Parts of joint projections: of CodeGen for the cores of the TPUs that it was trained on.
_QUARTERS = {"gptj": 0, "codegen": 4}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a GPT-J or CodeGen model."""
    embed, heads, head_dim = fields.split("n_embd", "n_head")
    positions, rotary_dim = fields.size("n_positions"), fields.size("rotary_dim")
    if rotary_dim > head_dim or rotary_dim % 2:
        raise ModelError(
            f"config.json has rotary_dim={rotary_dim}; expected an even number up to {head_dim}, "
            "the size of a head."
        )
    quarters = _QUARTERS[fields.family]
    if quarters and heads % quarters:
        raise ModelError(f"config.json has n_head={heads}; expected a multiple of {quarters}.")
    norm = Norm("layer", fields.number("layer_norm_epsilon"))
    rope = make_rope({"rope_theta": 10000.0}, rotary_dim, positions, interleaved=True)
    ffn = fields.size("n_inner", 4 * embed)
    fields.ignore(
        "resid_pdrop", "embd_pdrop", "attn_pdrop", "n_ctx", "rotary", "scale_attn_weights"
    )
    fields.ignore_summary()
    block = Layer(
        Attention(heads, heads, head_dim, head_dim**-0.5, rope=rope),
        Mlp(ffn, fields.activation("activation_function"), gated=False),
        norm,
        "shared",
    )
    spec = decoder_spec(
        *(fields, architecture, embed, (block,) * fields.layers("n_layer"), norm),
        max_positions=positions,
        embedding=Embedding(types="vocab"),
    )
    hf = "transformer.h.{i}."
    layer = [
        *make.norm(norm, "attn_norm", f"{hf}ln_1"),
        *(
            make.packed("qkv", f"{hf}attn.qkv_proj", f"q+v+k/{quarters}", bias=False)
            if quarters
            else make.joined("qkv", hf + "attn.{p}", make.QKV, bias=False)
        ),
        *make.linear("out", f"{hf}attn.out_proj", "embed q", bias=False),
        *make.linear("up", f"{hf}mlp.fc_in", "ffn embed"),
        *make.linear("down", f"{hf}mlp.fc_out", "embed ffn"),
    ]
    outer = make.norm(norm, "final_norm", "transformer.ln_f")
    if spec.head:
        outer.append(row("head.bias", "vocab", ("lm_head.bias", "vocab")))
    return spec, make.causal_table(
        spec,
        layer,
        outer,
        embedding="transformer.wte",
        tied=fields.flag("tie_word_embeddings", False),
        base="transformer.",
        # Causal masks and tables of angles that older versions stored as buffers.
        unused=[r"\.attn\.(bias|masked_bias|causal_mask|embed_positions)$"],
    )

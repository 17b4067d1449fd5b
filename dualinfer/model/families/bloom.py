"""BLOOM: ALiBi in the place of positions, a norm after the embedding. HF source: models/bloom."""

import math

import numpy as np

from .. import rows as make
from ..spec import Attention, Embedding, Layer, Mlp, ModelSpec, Norm, Positions
from ..weights import WeightTable
from .decoders import decoder_spec
from .fields import ConfigFields

CLASSES = {"bloom": ("BloomForCausalLM", "BloomModel")}
_TRAINED = 2048  # tokens, of every published BLOOM; ALiBi itself has no limit


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a BLOOM model."""
    embed, heads, head_dim = fields.split("hidden_size", "n_head")
    norm = Norm("layer", fields.number("layer_norm_epsilon"))
    fields.require("apply_residual_connection_post_layernorm", False)
    if fields.size("pretraining_tp", 1) > 1:
        fields.require("slow_but_exact", False)  # HF drops the output biases then
    fields.ignore("slow_but_exact", "hidden_dropout", "attention_dropout")
    # Written by the training code; HF's model reads none of them.
    fields.ignore("attention_softmax_in_fp32", "masked_softmax_fusion", "bias_dropout_fusion")
    fields.ignore("skip_bias_add", "skip_bias_add_qkv", "offset_alibi", "n_inner", "unk_token_id")
    block = Layer(
        Attention(heads, heads, head_dim, head_dim**-0.5, alibi=alibi_slopes(heads)),
        Mlp(4 * embed, "gelu_tanh", gated=False),
        norm,
        "pre",
    )
    spec = decoder_spec(
        *(fields, architecture, embed, (block,) * fields.layers("n_layer"), norm),
        max_positions=fields.size("seq_length", _TRAINED),
        positions=Positions(counted="seen"),
        packs=False,
        embedding=Embedding(norm=norm),
    )
    hf = "transformer.h.{i}."
    layer = [
        *make.norm(norm, "attn_norm", f"{hf}input_layernorm"),
        *make.by_head("qkv", f"{hf}self_attention.query_key_value", bias=True),
        *make.linear("out", f"{hf}self_attention.dense", "embed q"),
        *make.norm(norm, "mlp_norm", f"{hf}post_attention_layernorm"),
        *make.linear("up", f"{hf}mlp.dense_h_to_4h", "ffn embed"),
        *make.linear("down", f"{hf}mlp.dense_4h_to_h", "embed ffn"),
    ]
    outer = [
        *make.norm(norm, "embed_norm", "transformer.word_embeddings_layernorm"),
        *make.norm(norm, "final_norm", "transformer.ln_f"),
    ]
    return spec, make.causal_table(
        spec,
        layer,
        outer,
        embedding="transformer.word_embeddings",
        tied=fields.flag("tie_word_embeddings", True),
        base="transformer.",
    )


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Slopes of Press et al., 2022, as float32 values.

    Heads beyond a power of two take every second slope of twice as many.
    """

    def series(count: int) -> np.ndarray:
        base = np.float32(2 ** (-8 / count))
        return (np.float64(base) ** np.arange(1, count + 1)).astype(np.float32)

    power = 2 ** math.floor(math.log2(heads))
    slopes = np.concatenate([series(power), series(2 * power)[::2]])[:heads]
    return tuple(float(slope) for slope in slopes)

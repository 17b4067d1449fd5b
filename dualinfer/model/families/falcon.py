"""Falcon: one KV head or few, parallel blocks, biases and ALiBi by choice. HF: models/falcon."""

import ml_dtypes
import numpy as np

from ...errors import ModelError
from .. import rows as make
from ..spec import Attention, Layer, Mlp, ModelSpec, Norm, Positions
from ..weights import WeightTable
from .bloom import alibi_slopes
from .decoders import decoder_spec
from .fields import ConfigFields
from .rope import make_rope, reach

CLASSES = {"falcon": ("FalconForCausalLM", "FalconModel")}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a Falcon model."""
    embed, heads, head_dim = fields.split("hidden_size", "num_attention_heads")
    norm = Norm("layer", fields.number("layer_norm_epsilon"))
    grouped = fields.flag("new_decoder_architecture", False)
    one, parallel = fields.flag("multi_query", True), fields.flag("parallel_attn", True)
    # Of a block that is no grouped one HF builds two norms and computes with one that is not there.
    norms = fields.size("num_ln_in_parallel_attn", 2 if grouped else 1)
    fields.require("num_ln_in_parallel_attn", *((1, 2) if grouped else (1,)))
    if grouped:
        fields.require("parallel_attn", True)
    kv_heads = fields.heads("num_kv_heads", heads)
    if grouped and heads % kv_heads:
        raise ModelError(f"num_attention_heads={heads} is no multiple of {kv_heads} KV heads.")
    if not grouped and not one:
        fields.require("num_kv_heads", heads)
    layout = "q+k+v/kv_heads" if grouped else "q+k+v" if one else "q+k+v/heads"
    kv_heads = kv_heads if grouped else 1 if one else heads
    bias, alibi = fields.flag("bias", False), fields.flag("alibi", False)
    positions = fields.size("max_position_embeddings")
    rope, most = None, positions
    if alibi:
        fields.ignore("rope_parameters", "rope_theta", "partial_rotary_factor")
    else:
        parameters = fields.take("rope_parameters")
        rope, most = make_rope(parameters, head_dim, positions), reach(parameters, positions)
        fields.require("rope_theta", parameters.get("rope_theta"))  # transformers 4 wrote it twice
    fields.require("apply_residual_connection_post_layernorm", False)
    fields.ignore("hidden_dropout", "attention_dropout")
    fields.ignore("ff_factor")  # of the makers' own code; ffn_hidden_size says it
    slopes = tuple(
        float(slope)
        for slope in np.array(alibi_slopes(heads), np.float32).astype(ml_dtypes.bfloat16)
    )
    placement = ("shared" if norms == 1 else "parallel") if parallel else "pre"
    block = Layer(
        Attention(
            *(heads, kv_heads, head_dim, head_dim**-0.5),
            rope=rope,
            alibi=slopes if alibi else None,
            alibi_rounded=alibi,
        ),
        Mlp(fields.size("ffn_hidden_size", 4 * embed), fields.activation("activation"), False),
        norm,
        placement,
    )
    spec = decoder_spec(
        *(fields, architecture, embed, (block,) * fields.layers("num_hidden_layers"), norm),
        max_positions=most,
        positions=Positions(counted="seen" if alibi else "all"),
        packs=False,
    )
    hf = "transformer.h.{i}."
    names = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if parallel and norms == 2:
        names = {"attn_norm": "ln_attn", "mlp_norm": "ln_mlp"}
    elif parallel:
        del names["mlp_norm"]
    layer = [
        *(row for ours, theirs in names.items() for row in make.norm(norm, ours, hf + theirs)),
        *make.packed("qkv", f"{hf}self_attention.query_key_value", layout, bias),
        *make.linear("out", f"{hf}self_attention.dense", "embed q", bias),
        *make.linear("up", f"{hf}mlp.dense_h_to_4h", "ffn embed", bias),
        *make.linear("down", f"{hf}mlp.dense_4h_to_h", "embed ffn", bias),
    ]
    return spec, make.causal_table(
        spec,
        layer,
        make.norm(norm, "final_norm", "transformer.ln_f"),
        embedding="transformer.word_embeddings",
        tied=fields.flag("tie_word_embeddings", True),
        base="transformer.",
        # Frequencies that older versions stored as buffers.
        unused=[r"\.self_attention\.(maybe_)?rotary(_emb)?\.inv_freq$"],
    )

"""GPT-NeoX, Pythia and its kind, and Persimmon: partial rotary, a projection by head.

HF sources: models/gpt_neox, models/gpt_neox_japanese, models/persimmon.
"""

from collections.abc import Mapping
from dataclasses import replace

from ...errors import ModelError, shown
from .. import rows as make
from ..spec import Attention, Layer, Mlp, ModelSpec, Norm
from ..weights import WeightTable, row
from .decoders import decoder_spec
from .fields import ConfigFields
from .rope import make_rope, reach, rotary_size

CLASSES = {
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXModel"),
    "gpt_neox_japanese": ("GPTNeoXJapaneseForCausalLM", "GPTNeoXJapaneseModel"),
    "persimmon": ("PersimmonForCausalLM", "PersimmonModel"),
}
# HF's names of: the model, attention, the embedding, the last norm.
_NAMES = {
    "gpt_neox": ("gpt_neox.", "attention", "embed_in", "final_layer_norm"),
    "gpt_neox_japanese": ("gpt_neox_japanese.", "attention", "embed_in", "final_layer_norm"),
    "persimmon": ("model.", "self_attn", "embed_tokens", "final_layernorm"),
}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a GPT-NeoX or Persimmon model."""
    embed, heads, head_dim = fields.split("hidden_size", "num_attention_heads")
    is_neox, is_japanese = (fields.family == f"gpt_neox{end}" for end in ("", "_japanese"))
    positions = fields.size("max_position_embeddings")
    if is_japanese:
        ffn = embed * fields.size("intermediate_multiple_size")
    else:
        ffn = fields.size("intermediate_size")
    norm = Norm("layer", fields.number("layer_norm_eps"))
    parameters = fields.take("rope_parameters")
    if not isinstance(parameters, Mapping):
        raise ModelError(
            f"config.json has rope_parameters={shown(parameters)}; expected an object."
        )
    fields.within(parameters, rope_theta=None, partial_rotary_factor=None)
    rotary_dim = rotary_size(parameters, head_dim)
    parameters = {k: v for k, v in parameters.items() if k != "partial_rotary_factor"}
    rope = make_rope(parameters, rotary_dim, positions)
    bias = not is_japanese and (not is_neox or fields.flag("attention_bias", True))
    parallel = is_neox and fields.flag("use_parallel_residual", True)
    normed = False
    if fields.family == "persimmon":
        normed = fields.flag("qk_layernorm", True)
        fields.require("num_key_value_heads", heads)
    fields.ignore("attention_dropout", "hidden_dropout", "classifier_dropout")
    fields.ignore("attention_probs_dropout_prob", "hidden_dropout_prob")
    fields.ignore("is_decoder")  # HF's model is causal in any case
    shape = heads, heads, head_dim, head_dim**-0.5
    attention = Attention(*shape, rope=rope, qk_norm=norm if normed else None)
    block = Layer(
        attention,
        Mlp(ffn, fields.activation("hidden_act"), gated=False),
        norm,
        "parallel" if parallel else "pre",
    )
    spec = decoder_spec(
        *(fields, architecture, embed, (block,) * fields.layers("num_hidden_layers"), norm),
        max_positions=reach(parameters, positions),
    )
    base, attends, embedding, last = _NAMES[fields.family]
    hf = base + "layers.{i}."
    layer = [
        *make.norm(norm, "attn_norm", f"{hf}input_layernorm"),
        *make.by_head("qkv", f"{hf}{attends}.query_key_value", bias),
        *make.head_norms(attention, f"{hf}{attends}", ("q_layernorm", "k_layernorm")),
        *make.linear("out", f"{hf}{attends}.dense", "embed q", bias),
        *make.norm(norm, "mlp_norm", f"{hf}post_attention_layernorm"),
        *make.linear("up", f"{hf}mlp.dense_h_to_4h", "ffn embed", not is_japanese),
        *make.linear("down", f"{hf}mlp.dense_4h_to_h", "embed ffn", not is_japanese),
    ]
    # Causal masks and frequencies that older versions stored as buffers.
    buffers = r"\.(attention|self_attn)\.(bias|masked_bias|rotary_emb\.inv_freq)$"
    table = make.causal_table(
        spec,
        layer,
        make.norm(norm, "final_norm", base + last),
        embedding=base + embedding,
        tied=fields.flag("tie_word_embeddings", is_japanese),
        base=base,
        renames=(("lm_head.", "embed_out."),),
        unused=[buffers] if spec.head else [buffers, r"^embed_out\."],
    )
    if is_japanese:  # of which the last layer alone has a bias
        own = row("out.bias", "embed", (f"{hf}{attends}.dense_bias", "embed"))
        table = replace(table, layers=(*table.layers[:-1], (*table.layers[-1], own)))
    return spec, table

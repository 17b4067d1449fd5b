"""Doge: keys whose scores have a bias of the token's values, and residuals with learned factors.

HF source: models/doge. Of a sequence longer than `keep_window_size` HF's layers see the keys of the
largest biases alone, which is not served; nor are mixtures, whose router in HF mixes tokens.
"""

from ...blocks.doge import BiasedKeys, KeptStream
from .. import rows as make
from ..spec import Attention, Head, Layer, Mlp, ModelSpec, Norm
from ..weights import Row, WeightTable
from .fields import ConfigFields
from .rope import make_rope, reach

CLASSES = {"doge": ("DogeForCausalLM", "DogeModel")}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a Doge model without experts."""
    embed, positions = fields.size("hidden_size"), fields.size("max_position_embeddings")
    heads, kv_heads, head_dim = fields.grouped_heads(embed)
    norm, parameters = Norm("rms", fields.number("rms_norm_eps")), fields.take("rope_parameters")
    fields.require("is_moe", False)
    fields.ignore("num_experts", "num_experts_per_tok", "norm_topk_prob", "output_router_logits")
    fields.ignore("router_aux_loss_coef", "hidden_dropout", "attention_dropout")
    window = fields.take("sliding_window")
    attention = Attention(
        *(heads, kv_heads, head_dim, head_dim**-0.5),
        window=None if window is None else fields.size("sliding_window"),
        rope=make_rope(parameters, head_dim, positions),
        qk_norm=norm,
        wiring=BiasedKeys(),
    )
    mlp = Mlp(fields.size("intermediate_size"), fields.activation("hidden_act"), gated=True)
    spec = ModelSpec(
        family=fields.family,
        architecture=architecture,
        vocab=fields.size("vocab_size"),
        embed=embed,
        layers=(Layer(attention, mlp, norm, "pre", edits=(KeptStream(),)),)
        * fields.layers("num_hidden_layers"),
        max_positions=reach(parameters, positions),
        final_norm=norm,
        head=Head("causal") if architecture.endswith("ForCausalLM") else None,
        most=fields.size("keep_window_size"),
    )
    bias, mlp_bias = (fields.flag(f"{part}_bias", False) for part in ("attention", "mlp"))
    return spec, make.causal_table(
        spec,
        _layer(attention, norm, "model.layers.{i}.", bias, mlp_bias),
        make.norm(norm, "final_norm", "model.norm"),
        embedding="model.embed_tokens",
        tied=fields.flag("tie_word_embeddings", False),
        base="model.",
    )


def _layer(a: Attention, norm: Norm, hf: str, bias: bool, mlp_bias: bool) -> list[Row]:
    attention = f"{hf}self_attn."
    return [
        *make.norm(norm, "attn_norm", f"{hf}input_layernorm"),
        *make.norm(norm, "mlp_norm", f"{hf}post_attention_layernorm"),
        *make.joined("qkv", attention + "{p}", make.QKV, bias),
        *make.head_norms(a, f"{hf}self_attn"),
        *BiasedKeys().rows(attention, bias),
        *make.linear("out", f"{attention}o_proj", "embed q", bias),
        *KeptStream().rows("attn", f"{hf}input"),
        *make.joined("up", hf + "mlp.{p}", make.GATE_UP, mlp_bias),
        *make.linear("down", f"{hf}mlp.down_proj", "embed up", mlp_bias),
        *KeptStream().rows("mlp", f"{hf}post_attention"),
    ]

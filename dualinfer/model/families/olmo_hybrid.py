"""OLMo Hybrid: gated delta rules, and OLMo 3's attention in some of the layers.

HF source: models/olmo_hybrid. Its two kinds of layers have their norms at different places.
"""

from collections.abc import Mapping
from dataclasses import replace

from ...blocks.delta_rule import KERNELS, READS, DeltaRule
from .. import rows as make
from ..spec import Attention, Head, Layer, Mlp, ModelSpec, Norm
from ..weights import Row, WeightTable
from . import qwen3_next
from .fields import ConfigFields
from .rope import make_rope, reach

CLASSES = {"olmo_hybrid": ("OlmoHybridForCausalLM", "OlmoHybridModel")}
_KINDS = "linear_attention", "full_attention"
_EPS = 1e-5  # of the norms of what states give, whatever the config says
_READS = "q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of an OLMo Hybrid."""
    embed, count = fields.size("hidden_size"), fields.layers("num_hidden_layers")
    positions, parameters = fields.size("max_position_embeddings"), fields.take("rope_parameters")
    norm = Norm("rms", fields.number("rms_norm_eps"))
    heads, kv_heads, head_dim = fields.grouped_heads(embed)
    rope = None
    if isinstance(parameters, Mapping) and parameters.get("rope_theta") is not None:
        rope = make_rope(parameters, head_dim, positions)
        positions = reach(parameters, positions)
    attention = Attention(
        *(heads, kv_heads, head_dim, head_dim**-0.5), rope=rope, qk_norm=norm, qk_norm_over="all"
    )
    own = qwen3_next.read(fields, replace(norm, eps=_EPS))
    own = replace(own, doubled=fields.flag("linear_allow_neg_eigval", True))
    mlp = Mlp(fields.size("intermediate_size"), fields.activation("hidden_act"), gated=True)
    layers = {
        _KINDS[0]: Layer(attention, mlp, norm, "pre", recurrence=own, attends=False),
        _KINDS[1]: Layer(attention, mlp, norm, "behind"),
    }
    spec = ModelSpec(
        family=fields.family,
        architecture=architecture,
        vocab=fields.size("vocab_size"),
        embed=embed,
        layers=tuple(layers[kind] for kind in fields.kinds("layer_types", count, _KINDS)),
        max_positions=positions,
        final_norm=norm,
        head=Head("causal") if architecture.endswith("ForCausalLM") else None,
    )
    fields.ignore("attention_dropout", *(f"linear_a_log_{x}" for x in ("min", "max")))
    fields.ignore("linear_dt_min", "linear_dt_max", "linear_dt_init_floor")  # of training's start
    return spec, _table(fields, spec)


def _table(fields: ConfigFields, spec: ModelSpec) -> WeightTable:
    norm, hf, bias = spec.layers[0].norm, "model.layers.{i}.", fields.flag("attention_bias", False)

    def rows_of(layer: Layer) -> tuple[Row, ...]:
        behind = "post_attention_layernorm", "post_feedforward_layernorm"
        first, second = behind if layer.attends else ("input_layernorm", behind[0])
        rows = make.norm(norm, "attn_norm", f"{hf}{first}")
        rows += make.norm(norm, "mlp_norm", f"{hf}{second}")
        if isinstance(layer.recurrence, DeltaRule):
            reads = list(zip(_READS, READS, strict=True))
            theirs = f"{hf}linear_attn"
            names = {"kernels": KERNELS, "norm": "o_norm", "out": "o_proj"}
            rows += layer.recurrence.rows(theirs, reads, **names)
        else:
            rows += make.joined("qkv", hf + "self_attn.{p}", make.QKV, bias)
            rows += make.head_norms(layer.attention, f"{hf}self_attn")
            rows += make.linear("out", f"{hf}self_attn.o_proj", "embed q", bias)
        rows += make.joined("up", hf + "mlp.{p}", make.GATE_UP, bias=False)
        return (*rows, *make.linear("down", f"{hf}mlp.down_proj", "embed up", bias=False))

    table = make.causal_table(
        spec,
        (),
        make.norm(norm, "final_norm", "model.norm"),
        embedding="model.embed_tokens",
        tied=fields.flag("tie_word_embeddings", False),
        base="model.",
        unused=[r"rotary_emb\."],
        renames=(
            (".input_layernorm.", ".attention_layer_norm."),
            (".post_attention_layernorm.", ".feedforward_layer_norm."),
        ),
    )
    return make.by_layer(table, rows_of)

"""LongCat-Flash: latent attention, experts without weights, mixtures that are added a layer later.

A layer of HF's has two attentions and two MLPs, and is two of ours. The mixture reads what the
first MLP does. HF source: models/longcat_flash/modeling_longcat_flash.py.
"""

from dataclasses import replace

from ...blocks.scaled_latent import ScaledLatent
from ...blocks.shortcut import Shortcut
from ...errors import ModelError
from .. import rows as make
from ..spec import Experts, Head, Layer, Mlp, ModelSpec, Norm, Router
from ..weights import Row, WeightTable
from .deepseek import latent_attention, latent_rows
from .fields import ConfigFields
from .mixtures import MIXTURES, make_rows
from .rope import reach

CLASSES = {"longcat_flash": ("LongcatFlashForCausalLM", "LongcatFlashModel")}
_IDLE = r"\.experts\.\d+\.(gate|up)_proj\."  # of experts without weights, in files nevertheless


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a LongCat-Flash."""
    embed, count = fields.size("hidden_size"), fields.layers("num_layers")
    positions, parameters = fields.size("max_position_embeddings"), fields.take("rope_parameters")
    norm = Norm("rms", fields.number("rms_norm_eps"))
    attention = latent_attention(fields, parameters, positions)
    latent = attention.latent
    assert latent is not None
    attention = replace(
        attention,
        scale=attention.scale * (embed / fields.size("q_lora_rank")) ** 0.5,  # of queries
        wiring=ScaledLatent((embed / latent.rank) ** 0.5),
    )
    mlp = Mlp(fields.size("ffn_hidden_size"), fields.activation("hidden_act"), gated=True)
    pair = Layer(attention, _experts(fields, mlp), norm, "pre"), Layer(attention, mlp, norm, "pre")
    spec = ModelSpec(
        family=fields.family,
        architecture=architecture,
        vocab=fields.size("vocab_size"),
        embed=embed,
        layers=pair * count,
        max_positions=reach(parameters, positions),
        final_norm=norm,
        head=Head("causal") if architecture.endswith("ForCausalLM") else None,
    )
    fields.require("num_hidden_layers", 2 * count)
    # Of the makers' own code, where these ask for nothing else.
    for name, value in {
        **{"attention_method": "MLA", "mla_scale_q_lora": True, "mla_scale_kv_lora": True},
        **{"norm_topk_prob": False, "router_bias": False, "zero_expert_type": "identity"},
    }.items():
        fields.require(name, value)
    fields.ignore("output_router_logits")
    fields.ignore("attention_dropout")
    return spec, _table(fields, spec)


def _experts(fields: ConfigFields, mlp: Mlp) -> Experts:
    count, chosen = fields.size("n_routed_experts"), fields.size("moe_topk")
    idle = fields.size("zero_expert_num") if fields.take("zero_expert_num", 0) else 0
    if chosen > count + idle:
        raise ModelError(
            f"config.json has {count + idle} experts, of which a token chooses {chosen} "
            "(moe_topk); it cannot choose more experts than there are."
        )
    assert mlp.activation != "xielu"
    return Experts(
        *(count, fields.size("expert_ffn_hidden_size"), mlp.activation, True),
        Router(chosen, scale=fields.number("routed_scaling_factor")),
        shared=mlp.ffn,
        mixing=Shortcut(idle),
    )


def _table(fields: ConfigFields, spec: ModelSpec) -> WeightTable:
    bias, norm = fields.flag("attention_bias", False), spec.layers[0].norm
    mixture, a = spec.layers[0].mlp, spec.layers[0].attention
    assert isinstance(mixture, Experts)

    def rows_of(number: int) -> tuple[Row, ...]:
        hf, part = f"model.layers.{number // 2}.", number % 2
        attention = f"{hf}self_attn.{part}."
        feed = make_rows(MIXTURES["longcat_flash"], mixture, hf)
        if part:
            feed = [
                *make.joined("up", f"{hf}mlps.1.{{p}}", make.GATE_UP, bias=False),
                *make.linear("down", f"{hf}mlps.1.down_proj", "embed up", bias=False),
            ]
        return (
            *make.norm(norm, "attn_norm", f"{hf}input_layernorm.{part}"),
            *make.norm(norm, "mlp_norm", f"{hf}post_attention_layernorm.{part}"),
            *latent_rows(a, attention, bias),
            *make.linear("out", f"{attention}o_proj", "embed v", bias),
            *feed,
        )

    table = make.causal_table(
        spec,
        (),
        make.norm(norm, "final_norm", "model.norm"),
        embedding="model.embed_tokens",
        tied=fields.flag("tie_word_embeddings", False),
        base="model.",
        # transformers keeps gates, which nobody reads, of experts without weights.
        unused=[r"^model\.mtp", _IDLE],
        kept=(_IDLE,),
    )
    return replace(table, layers=tuple(rows_of(i) for i in range(len(spec.layers))))

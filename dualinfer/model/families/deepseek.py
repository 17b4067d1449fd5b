"""DeepSeek-V2 and V3 and the families that share their latent attention.

HF sources: models/NAME/modeling_NAME.py of each. Those of GLM-4 MoE Lite, MiniCPM3 and Youtu are
one of the two with other numbers; A.X K2 gates norms, and what heads give.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from ...blocks.edited_norms import GatedNorms, NormBehindMlp
from ...blocks.gated_queries import GatedLatent
from ...errors import ModelError, UnservedError, shown
from .. import rows as make
from ..spec import Attention, Edit, Experts, Head, Latent, Layer, Mlp, ModelSpec, Norm
from ..weights import Row, WeightTable, row
from . import mixtures
from .fields import ConfigFields, is_positive, query_growth
from .rope import make_rope, reach, rotary_size

CLASSES = {
    "axk1": ("AXK1ForCausalLM", "AXK1Model"),
    "axk2": ("AXK2ForCausalLM", "AXK2Model"),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepseekV2Model"),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Model"),
    "deepseek_v32": ("DeepseekV32ForCausalLM", "DeepseekV32Model"),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", "GlmMoeDsaModel"),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", "Glm4MoeLiteModel"),
    "minicpm3": ("MiniCPM3ForCausalLM", "MiniCPM3Model"),
    "mistral4": ("Mistral4ForCausalLM", "Mistral4Model"),
    "youtu": ("YoutuForCausalLM", "YoutuModel"),
}
_LATENT_EPS = 1e-6  # of the norms of latent vectors, which no config names
_CHOOSING = ("axk2", "deepseek_v32", "glm_moe_dsa")  # of a long sequence what a layer sees
_INDEXER = r"\.self_attn\.indexer\."  # what chooses them, which is not read
_TIED = ("minicpm3", "youtu")
_MLP_BIAS = ("deepseek_v2", "minicpm3")


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a model with latent attention."""
    family, embed = fields.family, fields.size("hidden_size")
    count = fields.layers("num_hidden_layers")
    positions = fields.size("max_position_embeddings")
    parameters = fields.take("rope_parameters")
    if family == "mistral4" and isinstance(parameters, Mapping):
        parameters = _of_all_heads(fields, parameters)
    attention = latent_attention(fields, parameters, positions)
    norm = Norm("rms", fields.number("rms_norm_eps"))
    mlp = Mlp(fields.size("intermediate_size"), fields.activation("hidden_act"), gated=True)
    is_minicpm = family == "minicpm3"
    scale = fields.number("scale_depth") / math.sqrt(count) if is_minicpm else 1.0
    mlps: list[Mlp | Experts] = [mlp] * count
    if family in mixtures.MIXTURES:
        mlps = mixtures.read_layers(fields, mlp, count)
    layers = {
        own: Layer(
            *(attention, own, norm, "pre"),
            residual_scale=scale,
            edits=_edits(fields, own),
        )
        for own in mlps
    }
    head = Head("causal", scale=fields.number("dim_model_base") / embed if is_minicpm else 1.0)
    spec = ModelSpec(
        family=family,
        architecture=architecture,
        vocab=fields.size("vocab_size"),
        embed=embed,
        layers=tuple(layers[own] for own in mlps),
        max_positions=reach(parameters, positions),
        embed_scale=fields.number("scale_emb") if is_minicpm else 1.0,
        rounds_scale=is_minicpm,
        final_norm=norm,
        head=head if architecture.endswith("ForCausalLM") else None,
        most=fields.size("index_topk") if family in _CHOOSING else 0,
    )
    if family in _CHOOSING:
        fields.kinds("layer_types", count, ("indexed_attention",))
        fields.require("mlp_bias", False)
        fields.require("rope_interleave", True)
        # Of what chooses, and what HF folds into lists of layers.
        fields.ignore("index_head_dim", "index_n_heads", "indexer_types", "index_topk_pattern")
        fields.ignore("index_topk_freq", "index_skip_topk_offset", "first_k_dense_replace")
    fields.ignore("attention_dropout", "embedding_initializer_range", "ep_size")
    fields.ignore("num_nextn_predict_layers", "num_mtp_layers")  # layers behind those of the model
    return spec, _table(fields, spec)


def latent_attention(fields: ConfigFields, parameters: Any, positions: int) -> Attention:
    """The attention of all layers, by HF's names of DeepSeek's fields."""
    heads = fields.heads("num_attention_heads")
    fields.require("num_key_value_heads", heads)
    turning = fields.size("qk_rope_head_dim")
    head_dim = fields.size("qk_nope_head_dim") + turning
    fields.require("qk_head_dim", head_dim)
    fields.require("head_dim", head_dim if fields.family == "mistral4" else turning)
    rank = 0 if fields.take("q_lora_rank") is None else fields.size("q_lora_rank")
    interleaved = fields.family == "deepseek_v2"
    if fields.family not in ("deepseek_v2", "minicpm3"):
        interleaved = fields.flag("rope_interleave", True)
    if isinstance(parameters, Mapping) and parameters.get("rope_theta") is not None:
        fields.require("rope_theta", parameters["rope_theta"])  # transformers 4 wrote it twice
    part = rotary_size(parameters, turning)
    if part != turning:
        raise UnservedError(
            f"config.json has rope_parameters={shown(parameters)}, by which {part} of the "
            f"{turning} elements of qk_rope_head_dim turn; the {fields.family} family honours all."
        )
    return Attention(
        heads,
        heads,
        head_dim,
        head_dim**-0.5 * _magnitude(parameters) ** 2,
        growth=query_growth(fields) if fields.family == "mistral4" else None,
        rope=make_rope(parameters, turning, positions, interleaved),
        latent=Latent(
            rank=fields.size("kv_lora_rank"),
            turning=turning,
            value_dim=fields.size("v_head_dim"),
            norm=Norm("rms", _LATENT_EPS),
            query_rank=rank,
        ),
        wiring=GatedLatent() if fields.family == "axk2" else None,
    )


def _of_all_heads(fields: ConfigFields, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Mistral 4's rope_parameters, of whole heads and of more than angles, as others have them."""
    turning = fields.size("qk_rope_head_dim")
    if rotary_size(parameters, fields.size("qk_nope_head_dim") + turning) != turning:
        raise UnservedError(
            f"config.json has rope_parameters={shown(dict(parameters))}; the mistral4 family "
            f"honours a partial_rotary_factor that turns qk_rope_head_dim={turning} elements only."
        )
    unread = ("partial_rotary_factor", "llama_4_scaling_beta", "max_position_embeddings")
    return {**parameters, **dict.fromkeys(unread)}


def _magnitude(parameters: Mapping[str, Any]) -> float:
    """The factor of scores, used twice, where the rotary embedding is scaled (yarn's mscale)."""
    mscale, factor = parameters.get("mscale_all_dim"), parameters.get("factor")
    if parameters.get("rope_type", "default") == "default" or not is_positive(mscale):
        return 1.0
    if factor is None or not is_positive(factor):
        raise ModelError(
            f"config.json has rope_parameters with mscale_all_dim={shown(mscale)} and "
            f"factor={shown(factor)}; expected a positive factor."
        )
    return 1.0 if factor <= 1 else 0.1 * float(mscale or 0) * math.log(factor) + 1.0


def _table(fields: ConfigFields, spec: ModelSpec) -> WeightTable:
    norm, attention = spec.layers[0].norm, spec.layers[0].attention
    assert attention.latent is not None
    bias = fields.flag("attention_bias", False)
    mlp_bias = fields.family in _MLP_BIAS and fields.flag("mlp_bias", False)
    if mlp_bias and any(isinstance(layer.mlp, Experts) for layer in spec.layers):
        fields.require("mlp_bias", False)
    hf, mixture = "model.layers.{i}.", mixtures.MIXTURES.get(fields.family)
    layer = [
        *_norm_rows(spec.layers[0], "attn_norm", f"{hf}input_layernorm"),
        *latent_rows(attention, f"{hf}self_attn.", bias),
        *make.linear("out", f"{hf}self_attn.o_proj", "embed v", bias),
    ]
    dense = [
        *make.joined("up", hf + "mlp.{p}", make.GATE_UP, mlp_bias),
        *make.linear("down", f"{hf}mlp.down_proj", "embed up", mlp_bias),
    ]
    behind = rf"^(model\.)?layers\.{len(spec.layers)}\."  # a layer that predicts a second token
    table = make.causal_table(
        spec,
        layer,
        make.norm(norm, "final_norm", "model.norm"),
        embedding="model.embed_tokens",
        tied=fields.flag("tie_word_embeddings", fields.family in _TIED),
        base="model.",
        unused=[
            r"rotary_emb\.inv_freq$",
            _INDEXER,
            *((behind, *mixture.unused) if mixture else ()),
        ],
        kept=(_INDEXER,),
        renames=mixture.renames if mixture else (),
        optional="router.choice_bias" if fields.family == "axk1" else None,
    )

    def rows_of(own: Layer) -> tuple[Row, ...]:
        mlp = own.mlp
        if mixture is None or not isinstance(mlp, Experts):
            return (*layer, *make.norm(norm, "mlp_norm", f"{hf}post_attention_layernorm"), *dense)
        rows = _norm_rows(own, "mlp_norm", f"{hf}post_attention_layernorm")
        rows += mixtures.make_rows(mixture, mlp, hf)
        behind = (edit.rows(hf, norm) for edit in own.edits if isinstance(edit, NormBehindMlp))
        return (*layer, *rows, *chain(*behind))

    by_kind = {own: rows_of(own) for own in dict.fromkeys(spec.layers)}
    return replace(table, layers=tuple(by_kind[own] for own in spec.layers))


def _edits(fields: ConfigFields, mlp: Mlp | Experts) -> tuple[Edit, ...]:
    """The edits by which norms of SK Telecom's models differ from others."""
    if fields.family == "axk2":
        return (GatedNorms(fields.size("gated_norm_rank")),)
    is_axk1 = fields.family == "axk1" and isinstance(mlp, Experts)
    return (NormBehindMlp(),) if is_axk1 else ()


def _norm_rows(layer: Layer, ours: str, theirs: str) -> list[Row]:
    """The rows of a norm, and of its gate where norms have one."""
    gates = [edit for edit in layer.edits if isinstance(edit, GatedNorms)]
    rows = make.norm(layer.norm, ours, f"{theirs}.norm" if gates else theirs)
    return rows + [row for edit in gates for row in edit.rows(ours, theirs)]


def latent_rows(a: Attention, hf: str, bias: bool) -> list[Row]:
    """The rows of latent attention, but for the product back, in a module by HF's name."""
    latent = a.latent
    assert latent is not None
    rows = make.linear("latent", f"{hf}kv_a_proj_with_mqa", "latent embed", bias)
    rows += make.norm(latent.norm, "latent_norm", f"{hf}kv_a_layernorm", "rank")
    if latent.query_rank:
        rows += make.linear("query_latent", f"{hf}q_a_proj", "query_rank embed", bias)
        rows += make.norm(latent.norm, "query_norm", f"{hf}q_a_layernorm", "query_rank")
    if isinstance(a.wiring, GatedLatent):
        rows += a.wiring.rows(hf)
    elif latent.query_rank:
        rows += make.linear("query", f"{hf}q_b_proj", "q query_rank", False)
    else:
        rows += make.linear("query", f"{hf}q_proj", "q embed", False)
    kv = row("kv.weight", "k+v rank", (f"{hf}kv_b_proj.weight", "k+v/heads rank"))
    return [*rows, replace(kv, dense=True)]

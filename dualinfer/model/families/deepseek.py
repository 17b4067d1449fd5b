"""DeepSeek-V2 and V3 and the families that share their latent attention.

HF sources: models/NAME/modeling_NAME.py of each. Those of GLM-4 MoE Lite, MiniCPM3 and Youtu are
one of the two with other numbers; A.X K2 gates norms, and what heads give.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...blocks.edited_norms import GatedNorms, NormBehindMlp
from ...blocks.gated_queries import GatedLatent
from ...blocks.indexed import Indexed
from ...errors import ModelError, UnservedError, shown
from .. import rows as make
from ..spec import Attention, Experts, Latent, Layer, Mlp, ModelSpec, Norm, Rope
from ..weights import Row, row
from .decoders import FREQUENCIES, PART, Decoder, Factors, Kind, serve
from .fields import is_positive
from .rope import reach, rotary_size, without

_LATENT_EPS = 1e-6  # of the norms of latent vectors, which no config names
_INDEXER = r"\.self_attn\.indexer\."  # what chooses what a layer sees, which is not read


class LatentDecoder(Decoder):
    """Keys and values of all heads are made of one latent vector of a token."""

    gives = "v"

    def attentions(self) -> list[Attention]:
        attention = self.attention()
        self.reach = reach(self.parameters(), self.positions)
        return [attention] * self.count

    def parameters(self) -> Any:
        """HF's rope_parameters."""
        return self.fields.take("rope_parameters")

    def attention(self) -> Attention:
        """The attention of all layers, by HF's names of DeepSeek's fields."""
        fields, parameters = self.fields, self.parameters()
        heads = fields.heads("num_attention_heads")
        fields.require("num_key_value_heads", heads)
        turning = fields.size("qk_rope_head_dim")
        head_dim = fields.size("qk_nope_head_dim") + turning
        fields.require("qk_head_dim", head_dim)
        fields.require("head_dim", self.named_size(head_dim, turning))
        rank = 0 if fields.take("q_lora_rank") is None else fields.size("q_lora_rank")
        if isinstance(parameters, Mapping) and parameters.get("rope_theta") is not None:
            fields.within(parameters, rope_theta=None)  # transformers 4 wrote it twice
        return Attention(
            *(heads, heads, head_dim, head_dim**-0.5 * _magnitude(parameters) ** 2),
            rope=self.rope(parameters, turning),
            latent=Latent(
                rank=fields.size("kv_lora_rank"),
                turning=turning,
                value_dim=fields.size("v_head_dim"),
                norm=Norm("rms", _LATENT_EPS),
                query_rank=rank,
            ),
            **self.attention_facts(),
        )

    def named_size(self, head_dim: int, turning: int) -> int:
        """The elements that the field head_dim counts, of a head and of its part that turns."""
        return turning

    def rope(self, parameters: Any, head_dim: int) -> Rope:
        part = rotary_size(parameters, head_dim)
        if part != head_dim:
            raise UnservedError(
                f"config.json has rope_parameters={shown(parameters)}, by which {part} of the "
                f"{head_dim} elements of qk_rope_head_dim turn; the {self.fields.family} family "
                "honours all."
            )
        return super().rope(parameters, head_dim)

    def qkv_rows(self, a: Attention, hf: str, bias: bool) -> list[Row]:
        """The rows of queries, and of latent vectors of keys and values."""
        latent, hf = a.latent, f"{hf}."
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


def _magnitude(parameters: Mapping[str, Any]) -> float:
    """The factor of scores, used twice, where the rotary embedding is scaled (yarn's mscale)."""
    if not isinstance(parameters, Mapping):
        return 1.0
    mscale, factor = parameters.get("mscale_all_dim"), parameters.get("factor")
    if parameters.get("rope_type", "default") == "default" or not is_positive(mscale):
        return 1.0
    if factor is None or not is_positive(factor):
        raise ModelError(
            f"config.json has rope_parameters with mscale_all_dim={shown(mscale)} and "
            f"factor={shown(factor)}; expected a positive factor."
        )
    return 1.0 if factor <= 1 else 0.1 * float(mscale or 0) * math.log(factor) + 1.0


class AXK1(LatentDecoder):
    """A norm behind the mixture, within the residual."""

    def layer(self, attention: Attention, mlp: Mlp | Experts) -> Layer:
        layer = super().layer(attention, mlp)
        return replace(layer, edits=(*layer.edits, NormBehindMlp())) if layer.experts else layer

    def rows(self, layer: Layer) -> list[Row]:
        return super().rows(layer) + (
            NormBehindMlp().rows(self.hf, self.norm) if layer.experts else []
        )


class Choosing(LatentDecoder):
    """Of a long sequence a layer sees what another product chooses, which is not served."""

    def attention_facts(self) -> dict[str, Any]:
        return {"wiring": Indexed(self.fields.size("index_topk"))}

    def check(self, spec: ModelSpec) -> None:
        """Refuse other layers."""
        self.fields.kinds("layer_types", self.count, ("indexed_attention",))
        self.fields.require("mlp_bias", False)
        self.fields.require("rope_interleave", True)


class AXK2(Choosing):
    """Norms are gated, and what heads give."""

    def attention_facts(self) -> dict[str, Any]:
        return {"wiring": GatedLatent(self.fields.size("index_topk"))}

    def layer(self, attention: Attention, mlp: Mlp | Experts) -> Layer:
        gates = GatedNorms(self.fields.size("gated_norm_rank"))
        layer = super().layer(attention, mlp)
        return replace(layer, edits=(*layer.edits, gates))

    def norm_rows(self, ours: str, theirs: str, layer: Layer | None = None) -> list[Row]:
        """The rows of a norm: in a layer with its gate, but for that before a dense MLP."""
        if layer is None or (ours == "mlp_norm" and not layer.experts):
            return super().norm_rows(ours, theirs)
        gates = [edit for edit in layer.edits if isinstance(edit, GatedNorms)]
        return super().norm_rows(ours, f"{theirs}.norm") + gates[0].rows(ours, theirs)


class Mistral4(LatentDecoder):
    """rope_parameters are of whole heads, and of more than angles."""

    def named_size(self, head_dim: int, turning: int) -> int:
        return head_dim

    def rope(self, parameters: Any, head_dim: int) -> Rope:
        whole = self.fields.size("qk_nope_head_dim") + head_dim
        if rotary_size(parameters, whole) != head_dim:
            raise UnservedError(
                f"config.json has rope_parameters={shown(dict(parameters))}; the mistral4 family "
                f"honours a partial_rotary_factor that turns qk_rope_head_dim={head_dim} elements "
                "only."
            )
        return super().rope(without(parameters, PART), head_dim)


def _minicpm(own: Decoder) -> Factors:
    """MiniCPM's factors of embedded tokens, of what sub-layers add, and of logits."""
    embed, depth = own.fields.number("scale_emb"), own.fields.number("scale_depth")
    base = own.fields.number("dim_model_base")
    return Factors(embed, residual=depth / math.sqrt(own.count), logits=base / own.embed)


_LATENT: dict[str, Any] = {
    "build": LatentDecoder,
    "interleaved": "rope_interleave",
    "unused": (FREQUENCIES, _INDEXER),
    "kept_rows": (_INDEXER,),
    # The last two are of layers behind those that answer.
    "ignored": (
        *("embedding_initializer_range", "ep_size", "num_nextn_predict_layers"),
        "num_mtp_layers",
    ),
}
_CHOOSING: dict[str, Any] = {
    **_LATENT,
    "build": Choosing,
    # Of what chooses, and what HF folds into lists of layers.
    "ignored": (
        *_LATENT["ignored"],
        *("index_head_dim", "index_n_heads", "indexer_types", "index_topk_pattern"),
        *("index_topk_freq", "index_skip_topk_offset", "first_k_dense_replace"),
    ),
}
KINDS = {
    "axk1": Kind("AXK1", **{**_LATENT, "build": AXK1}, optional="router.choice_bias"),
    "axk2": Kind("AXK2", **{**_CHOOSING, "build": AXK2}),
    "deepseek_v2": Kind("DeepseekV2", **{**_LATENT, "interleaved": True}, mlp_bias="mlp_bias"),
    "deepseek_v3": Kind("DeepseekV3", **_LATENT),
    "deepseek_v32": Kind("DeepseekV32", **_CHOOSING),
    "glm_moe_dsa": Kind("GlmMoeDsa", **_CHOOSING),
    "glm4_moe_lite": Kind("Glm4MoeLite", **_LATENT),
    "minicpm3": Kind(
        *("MiniCPM3",),
        **{**_LATENT, "interleaved": False},
        mlp_bias="mlp_bias",
        factors=_minicpm,
        scaled="rounded",
        tied=True,
    ),
    "mistral4": Kind(
        "Mistral4",
        **{**_LATENT, "build": Mistral4},
        grows=True,
        unturned=("llama_4_scaling_beta", "max_position_embeddings"),
    ),
    "youtu": Kind("Youtu", **_LATENT, tied=True),
}
CLASSES, describe = serve(KINDS)

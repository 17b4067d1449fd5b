"""LongCat-Flash: latent attention, experts without weights, mixtures that are added a layer later.

A layer of HF's has two attentions and two MLPs, and is two of ours. The mixture reads what the
first MLP does. HF source: models/longcat_flash/modeling_longcat_flash.py.
"""

from collections.abc import Sequence
from dataclasses import replace

from ...blocks.scaled_latent import ScaledLatent
from ...blocks.shortcut import Shortcut
from ...errors import ModelError
from .. import rows as make
from ..spec import Attention, Experts, Layer, Mlp, ModelSpec, Router
from ..weights import Row
from .decoders import Kind, serve
from .deepseek import LatentDecoder
from .mixtures import Mixture, make_rows

_IDLE = r"\.experts\.\d+\.(gate|up)_proj\."  # of experts without weights, in files nevertheless
_MIXTURE = Mixture(
    router="router.classifier", shared="mlps.0", choice_bias="router.e_score_correction_bias"
)


class LongCat(LatentDecoder):
    """Pairs of layers, of which the first has the mixture."""

    def attention(self) -> Attention:
        """The attention of all layers, with factors of queries and of latent vectors."""
        own = super().attention()
        assert own.latent is not None
        return replace(
            own,
            scale=own.scale * (self.embed / self.fields.size("q_lora_rank")) ** 0.5,
            wiring=ScaledLatent((self.embed / own.latent.rank) ** 0.5),
        )

    def layers(
        self, attentions: Sequence[Attention], feeds: Sequence[Mlp | Experts]
    ) -> Sequence[Layer]:
        attention = attentions[0]
        both = self.layer(attention, self.experts()), self.layer(attention, self.dense())
        return both * self.count

    def experts(self) -> Experts:
        """The mixture, whose shared expert is the first MLP."""
        fields, mlp = self.fields, self.dense()
        count, chosen = fields.size("n_routed_experts"), fields.size("moe_topk")
        idle = fields.size("zero_expert_num") if fields.take("zero_expert_num", 0) else 0
        if chosen > count + idle:
            raise ModelError(
                f"config.json has {count + idle} experts, of which a token chooses {chosen} "
                "(moe_topk); it cannot choose more experts than there are."
            )
        return Experts(
            *(count, Mlp(fields.size("expert_ffn_hidden_size"), mlp.activation, gated=True)),
            Router(chosen, scale=fields.number("routed_scaling_factor")),
            shared=mlp.ffn,
            mixing=Shortcut(idle),
        )

    def check(self, spec: ModelSpec) -> None:
        """Refuse another count of layers."""
        self.fields.require("num_hidden_layers", len(spec.layers))

    def all_rows(self, layers: Sequence[Layer]) -> list[tuple[Row, ...]]:
        """The rows of each layer."""
        return [self._rows(*own) for own in enumerate(layers)]

    def _rows(self, number: int, layer: Layer) -> tuple[Row, ...]:
        hf, part = f"model.layers.{number // 2}.", number % 2
        bias, attention = self.says("attention_bias"), f"{hf}self_attn.{part}"
        if isinstance(layer.mlp, Experts):
            feed = make_rows(_MIXTURE, layer.mlp, hf)
        else:
            feed = make.joined("up", f"{hf}mlps.1.{{p}}", make.GATE_UP, bias=False)
            feed += make.linear("down", f"{hf}mlps.1.down_proj", "embed up", bias=False)
        return (
            *self.norm_rows("attn_norm", f"{hf}input_layernorm.{part}"),
            *self.norm_rows("mlp_norm", f"{hf}post_attention_layernorm.{part}"),
            *self.qkv_rows(layer.attending, attention, bias),
            *make.linear("out", f"{attention}.o_proj", "embed v", bias),
            *feed,
        )


KINDS = {
    "longcat_flash": Kind(
        *("LongcatFlash",),
        build=LongCat,
        count="num_layers",
        ffn="ffn_hidden_size",
        interleaved="rope_interleave",
        # Of the makers' own code, where these ask for nothing else.
        always={
            **{"attention_method": "MLA", "mla_scale_q_lora": True, "mla_scale_kv_lora": True},
            **{"norm_topk_prob": False, "router_bias": False, "zero_expert_type": "identity"},
        },
        ignored=("output_router_logits",),
        # transformers keeps gates, which nobody reads, of experts without weights.
        unused=(r"^model\.mtp", _IDLE),
        kept_rows=(_IDLE,),
    )
}
CLASSES, describe = serve(KINDS)

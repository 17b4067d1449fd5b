"""Relatives of Llama's that do something otherwise: a class for each, which its row names.

HF sources: models/NAME/modeling_NAME.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from ...blocks.difference import Difference
from ...blocks.long_rope import LongRope
from ...blocks.state_space import StateSpace
from ...blocks.sub_norms import NormedHeads, NormedHidden
from ...errors import ModelError, UnservedError, shown
from ..spec import Activation, Attention, Embedding, Experts, Layer, Mlp, ModelSpec, Norm, Rope
from ..weights import Row
from . import states
from .decoders import Decoder, Hybrid, layer_norm, rms
from .fields import ConfigFields, is_positive
from .rope import ORIGINAL, kind_of

_MSCALES = "short_mscale", "long_mscale"


class Apertus(Decoder):
    """xIELU, whose numbers a layer learns."""

    def activation(self) -> Activation | Literal["xielu"]:
        return "xielu" if self.fields.take("hidden_act") == "xielu" else super().activation()


class BitNet(Decoder):
    """Norms before the products back of attention and feed-forward."""

    def attention_facts(self) -> dict[str, Any]:
        heads, _, head_dim = self.fields.grouped_heads(self.embed)
        return super().attention_facts() | {"wiring": NormedHeads(heads * head_dim)}

    def layer(self, attention: Attention, mlp: Mlp | Experts) -> Layer:
        layer = super().layer(attention, mlp)
        return replace(layer, edits=(*layer.edits, NormedHidden(mlp.ffn)))

    def mixing_rows(self, layer: Layer) -> list[Row]:
        """The rows of a layer's attention, and of both norms."""
        rows, parts = super().mixing_rows(layer), (layer.attending.wiring, *layer.edits)
        owns = [own for own in parts if isinstance(own, NormedHeads | NormedHidden)]
        return rows + [row for own in owns for row in own.rows(self.norm, self.hf)]


class CohereMoe(Decoder):
    """Norms of either kind, and a width of dense layers that may have a field of its own."""

    def dense(self) -> Mlp:
        name = "prefix_dense_intermediate_size"
        given = self.fields.take(name) is not None
        return replace(super().dense(), ffn=self.fields.size(name)) if given else super().dense()


def either_norm(fields: ConfigFields) -> Norm:
    """An RMSNorm where the config has the epsilon of one, else a LayerNorm."""
    norm = layer_norm("layer_norm_eps")(fields)
    return norm if fields.take("rms_norm_eps") is None else rms()(fields)


class DiffLlama(Decoder):
    """Attention less a second one, in each layer by a number of its own."""

    def attentions(self) -> list[Attention]:
        """The attention of each layer."""
        found = super().attentions()
        if found[0].kv_heads % 2 or found[0].heads % 2:
            raise ModelError(
                f"config.json has {found[0].kv_heads} KV heads; diffllama needs two halves."
            )
        starts = [0.8 - 0.6 * math.exp(-0.3 * i) for i in range(len(found))]
        return [
            replace(a, wiring=Difference(start, self.norm.eps))
            for a, start in zip(found, starts, strict=True)
        ]

    def qkv_rows(self, a: Attention, hf: str, bias: bool) -> list[Row]:
        """The rows of queries, keys and values."""
        assert isinstance(a.wiring, Difference)
        return a.wiring.rows(hf, bias)


class GraniteHybrid(Hybrid):
    """Granite 4.0: Mamba-2 in most layers in attention's place, and mixtures if there are any."""

    recurring = "mamba", "linear_attention"
    attending = "attention", "full_attention"

    def feeds(self) -> Sequence[Mlp | Experts]:
        if self.fields.take("num_local_experts", 0):
            return super().feeds()
        self.fields.ignore("intermediate_size", "num_experts_per_tok", "router_aux_loss_coef")
        self.fields.ignore("output_router_logits")
        return [self.dense()] * self.count

    def recurrence(self) -> StateSpace | None:
        if not {*self.kinds()} & {*self.recurring}:
            self.fields.ignore(*states.FIELDS)
            return None
        width = int(self.embed * self.fields.number("mamba_expand"))
        return states.read(self.fields, self.norm, width)

    def recurrent_rows(self, recurrence: StateSpace) -> list[Row]:
        fields = self.fields
        biased = fields.flag("mamba_proj_bias", False), fields.flag("mamba_conv_bias", True)
        return recurrence.rows(f"{self.hf}mamba", *biased)


class HunYuan(Decoder):
    """A base of angles that `alpha` makes of the config's, where they are called dynamic."""

    def turning(self, parameters: Any) -> Any:
        if isinstance(parameters, Mapping) and parameters.get("rope_type") == "dynamic":
            alpha, theta = (parameters.get(name, 0) for name in ("alpha", "rope_theta"))
            dim = self.fields.size("head_dim")
            if is_positive(alpha) and is_positive(theta) and dim > 2:  # which makes it static
                base = theta * alpha ** (dim / (dim - 2))
                return {"rope_type": "default", "rope_theta": base}
        return parameters


class HyperClovaX(Decoder):
    """Norms behind sub-layers that a config may do without."""

    def layer(self, attention: Attention, mlp: Mlp | Experts) -> Layer:
        layer = super().layer(attention, mlp)
        has_posts = self.fields.flag("use_post_norm", True)
        return layer if has_posts else replace(layer, placement="pre")


class MiniMaxM2(Decoder):
    """Fields of the makers' own code say again what turns, and which layers attend."""

    def check(self, spec: ModelSpec) -> None:
        self.fields.require("rotary_dim", 2 * spec.attentions[0].rope_pairs)
        self.fields.require("attn_type_list", [1] * self.count)


class NanoChat(Decoder):
    """Heads turn backwards, and embedded tokens are normed."""

    def rope(self, parameters: Any, head_dim: int) -> Rope:
        rope = super().rope(parameters, head_dim)
        by_length = rope.by_length
        if isinstance(by_length, LongRope):
            by_length = replace(by_length, long=tuple(-f for f in by_length.long))
        return replace(rope, inv_freq=tuple(-f for f in rope.inv_freq), by_length=by_length)

    def embedding(self) -> Embedding:
        return replace(super().embedding(), norm=self.norm)


class PhiMoe(Decoder):
    """Of longrope the short factors at any length, and factors of its own on cos and sin.

    They are `short_mscale` and, where the longest sequence of a call is beyond the original length,
    `long_mscale`.
    """

    def rope(self, parameters: Any, head_dim: int) -> Rope:
        scales = [None, None]
        if isinstance(parameters, Mapping) and parameters.get("rope_type") == "longrope":
            scales = [parameters.get(name) for name in _MSCALES]
        rope = super().rope(parameters, head_dim)
        kind = kind_of(parameters)
        if kind == "default":
            return rope
        if kind != "longrope":
            raise UnservedError(
                f"config.json has rope_type={shown(kind)}, which the phimoe family does not "
                "honour (default and longrope only); ignoring it would give wrong text."
            )
        short, long = scales
        if not is_positive(short) or not is_positive(long):
            raise ModelError(
                f"config.json has rope_parameters with short_mscale={shown(short)} and "
                f"long_mscale={shown(long)}; longrope of phimoe needs two positive numbers."
            )
        if short != long:
            raise UnservedError(
                f"config.json has rope_parameters with short_mscale={short} and long_mscale="
                f"{long}; the phimoe family honours two equal ones only. By others a sequence's "
                "scores would depend on the lengths of those beside it. Take the short one for "
                f"both if all texts are of at most {parameters.get(ORIGINAL)} tokens."
            )
        return replace(rope, scaling=float(short or 0), by_length=None)

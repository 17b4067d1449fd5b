"""Decoders whose layers have heads by kind: MiMo-V2-Flash, Laguna and Step 3.7, with windows.

MiMo's values are narrower than its keys, and layers with a window have twice the KV heads and
sinks; Laguna's and Step's layers have query heads by number, each gated, and some of Step's have
limits of their hidden values.
HF sources: models/mimo_v2_flash, models/laguna and models/step3p7.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...blocks.limited import Limited, LimitedMlp
from ...blocks.narrow_values import NarrowValues
from ...errors import ModelError, shown
from .. import rows as make
from ..spec import Attention, Experts, Layer, Mlp, ModelSpec, Rope
from ..weights import Row, WeightTable
from . import sights
from .decoders import PART, Decoder, Kind, rms, serve
from .fields import ConfigFields, is_positive
from .gemma4 import changes_of

_SLIDING = "sliding_attention"
_MOST_PREDICTING = 9


class Layered(Decoder):
    """Heads by layer."""

    gives = "given"

    def check_rope(self, parameters: Mapping[str, Any]) -> None:
        """Nothing: each kind of layers has its own."""

    def sizes(self, windows: Sequence[int | None]) -> list[tuple[int, int, int]]:
        heads, kv_heads, head_dim = self.fields.grouped_heads(self.embed)
        by_layer = self.heads(heads)
        found = [
            (own, kv_heads * self.groups(window), head_dim)
            for own, window in zip(by_layer, windows, strict=True)
        ]
        for own, groups, _ in found:
            if own % groups:
                raise ModelError(
                    f"{own} query heads of a layer are no multiple of {groups} KV heads."
                )
        return found

    def heads(self, heads: int) -> Sequence[int]:
        """Of each layer the query heads, where the config says `heads` of all."""
        return [heads] * self.count

    def groups(self, window: int | None) -> int:
        """The KV heads of a layer over those that the config says."""
        return 1


class Laguna(Layered):
    """A list of heads, and gates of each head or of each element."""

    def heads(self, heads: int) -> Sequence[int]:
        given = self.fields.take("num_attention_heads_per_layer", [heads] * self.count)
        fits = isinstance(given, list | tuple) and len(given) == self.count
        if not fits or any(type(n) is not int or n < 1 for n in given):
            raise ModelError(
                f"config.json has num_attention_heads_per_layer={shown(given)}; expected a number "
                f"for each of {self.count} layers."
            )
        return given

    def gate_rows(self, hf: str) -> list[Row]:
        axes = "q embed" if self.fields.take("gating") == "per-element" else "heads embed"
        return make.linear("attn_gate", f"{hf}.g_proj", axes, bias=False)


class MiMo(Layered):
    """Values narrower than keys; layers with a window have more KV heads, and sinks."""

    def groups(self, window: int | None) -> int:
        return 1 if window is None else 2

    def attention_facts(self) -> dict[str, Any]:
        value_dim, head_dim = self.fields.size("v_head_dim"), self.fields.size("head_dim")
        if value_dim > head_dim:
            raise ModelError(f"v_head_dim={value_dim} is more than head_dim={head_dim}.")
        scale = self.fields.optional_number("attention_value_scale") or 1.0
        return {"wiring": NarrowValues(value_dim, scale)}

    def rope(self, parameters: Any, head_dim: int) -> Rope:
        given = parameters if isinstance(parameters, Mapping) else {"rope_type": None}
        if given.get("rope_type", "default") == "default":
            parameters = {PART: 0.334, **given}
        return super().rope(parameters, head_dim)

    def rows(self, layer: Layer) -> list[Row]:
        return super().rows(layer) + (self.sink_rows() if layer.attending.window else [])

    def check(self, spec: ModelSpec) -> None:
        """Refuse fields of the makers' own code that ask for other than what HF's class does."""
        fields, a = self.fields, spec.attentions[0]
        parameters = fields.take("rope_parameters")
        full, sliding = (parameters.get(k) or {} for k in ("full_attention", _SLIDING))
        window = fields.take("sliding_window")
        for name, value in {
            "add_full_attention_sink_bias": False,
            "add_swa_attention_sink_bias": True,
            "hybrid_layer_pattern": [int(x.window is not None) for x in spec.attentions],
            "layernorm_epsilon": self.norm.eps,
            "moe_layer_freq": [int(layer.experts > 0) for layer in spec.layers],
            "n_shared_experts": 0,
            PART: full.get(PART),
            "rope_theta": full.get("rope_theta"),
            "sliding_window_size": window and window - 1,
            "swa_head_dim": a.head_dim,
            "swa_num_attention_heads": a.heads,
            "swa_num_key_value_heads": 2 * fields.heads("num_key_value_heads"),
            "swa_rope_theta": sliding.get("rope_theta"),
            "swa_v_head_dim": a.head_widths[2],
        }.items():
            fields.require(name, value)


class Step(Layered):
    """Heads by per_layer_config, and limits of hidden values."""

    def heads(self, heads: int) -> Sequence[int]:
        found = []
        for changes in changes_of(self.fields, self.count):
            inner = ConfigFields(self.fields.family, changes, "per_layer_config")
            found.append(inner.heads("num_attention_heads", heads))
            inner.finish()
        return found

    def scale(self, head_dim: int) -> float:
        return self.fields.number("query_pre_attn_scalar") ** -0.5

    def layers(
        self, attentions: Sequence[Attention], feeds: Sequence[Mlp | Experts]
    ) -> Sequence[Layer]:
        """The layers, within their limits, which are lists, or None; 0 is no limit."""
        limits = []
        for name in ("swiglu_limits", "swiglu_limits_shared"):
            given = self.fields.take(name) or [None] * self.count
            fits = isinstance(given, list | tuple) and len(given) == self.count
            if not fits or not all(x is None or x == 0 or is_positive(x) for x in given):
                raise ModelError(
                    f"config.json has {name}={shown(given)}; expected a number, or None, for each "
                    f"of {self.count} layers."
                )
            limits.append([float(x) if x else None for x in given])
        layers = []
        for layer, own, shared in zip(super().layers(attentions, feeds), *limits, strict=True):
            if isinstance(layer.mlp, Experts):
                mlp = replace(layer.mlp, mixing=Limited(own, shared))
                layers.append(replace(layer, mlp=mlp))
            else:
                edits = () if shared is None else (LimitedMlp(shared),)
                layers.append(replace(layer, edits=edits))
        return layers

    def table(self, spec: ModelSpec) -> WeightTable:
        """The weight table; behind the layers are some that predict further tokens."""
        more = "|".join(str(self.count + i) for i in range(_MOST_PREDICTING))
        table = super().table(spec)
        return replace(table, unused=(*table.unused, rf"^(model\.)?layers\.({more})\."))


_LAYERED: dict[str, Any] = {
    "sees": sights.by_kind,
    "partial": True,
    "unused": (r"rotary_emb\.",),
    "predicts": False,
}
_GATED: dict[str, Any] = {"qk_norm": True, "attn_gate": "g_proj", "gates": "heads"}
KINDS = {
    "laguna": Kind(
        *("Laguna",),
        **_LAYERED,
        **_GATED,
        build=Laguna,
        gate="softplus",
        always={"gating": (True, "per-head", "per-element")},
    ),
    "mimo_v2_flash": Kind(
        *("MiMoV2Flash",),
        **_LAYERED,
        build=MiMo,
        out_bias=False,
        # The last two are of layers behind those that answer.
        ignored=(
            *("attention_chunk_size", "hybrid_block_size", "num_nextn_predict_layers"),
            "num_mtp_layers",
        ),
    ),
    "step3p5": Kind(
        *("Step3p7Text",),
        **_LAYERED,
        **_GATED,
        build=Step,
        norm=rms(unit_offset=True),
        gate="sigmoid",
        always={"mlp_bias": False},
        # HF folds the first into per_layer_config; the others are of layers behind these.
        ignored=(
            *("num_sliding_attention_heads", "num_nextn_predict_layers", "num_mtp_layers"),
            *("mtp_layer_types", "mtp_mlp_layer_types"),
        ),
        only=True,
    ),
}
CLASSES, describe = serve(KINDS)

"""Qwen3-Next, Qwen3.5 and 3.6: gated delta rules, and gated attention in some of the layers.

HF sources: models/qwen3_next, models/qwen3_5 and models/qwen3_5_moe.
"""

from dataclasses import replace
from typing import Any, ClassVar

from ...blocks.delta_rule import READS, DeltaRule
from ...blocks.gated_queries import GatedQueries
from ...errors import ModelError
from .. import rows as make
from ..spec import Attention, Norm
from ..weights import Row, row
from .decoders import PART, Hybrid, Kind, rms, serve
from .fields import ConfigFields

# HF's projections before the rule, with their axes.
_PARTS = tuple(
    (f"in_proj_{x}", axes)
    for x, axes in zip(("qkv", "z", "b", "a"), ("+".join(READS[:3]), *READS[3:]), strict=True)
)


def delta_rule(fields: ConfigFields, norm: Norm) -> DeltaRule:
    """The gated delta rule of a config's layers, by Qwen's names of its fields."""
    keys, values = (fields.heads(f"linear_num_{x}_heads") for x in ("key", "value"))
    if values % keys:
        raise ModelError(
            f"config.json has linear_num_value_heads={values}, no multiple of {keys} key heads."
        )
    key_dim, value_dim, taps = (
        fields.size(f"linear_{x}_dim") for x in ("key_head", "value_head", "conv_kernel")
    )
    activation = fields.activation("hidden_act")
    return DeltaRule(keys, values, key_dim, value_dim, taps, activation, norm)


class QwenHybrid(Hybrid):
    """Gated delta rules beside attention whose queries have their gates behind them."""

    reads: ClassVar[tuple[tuple[str, str], ...]] = _PARTS

    def attention_facts(self) -> dict[str, Any]:
        return {"qk_norm": self.norm, "wiring": GatedQueries()}

    def recurrence(self) -> DeltaRule:
        return delta_rule(self.fields, replace(self.norm, unit_offset=False))

    def recurrent_rows(self, recurrence: DeltaRule) -> list[Row]:
        return recurrence.rows(f"{self.hf}linear_attn", list(self.reads))

    def qkv_rows(self, a: Attention, hf: str, bias: bool) -> list[Row]:
        rows = []
        for part, rest in (("weight", " embed"), ("bias", ""))[: 1 + bias]:
            names = {"q_proj": "q+given/heads", "k_proj": "k", "v_proj": "v"}
            sources = [(f"{hf}.{name}.{part}", axis + rest) for name, axis in names.items()]
            rows.append(row(f"qkv.{part}", f"given+q+k+v{rest}", *sources))
        return rows + make.head_norms(a, hf)


class Qwen3Next(QwenHybrid):
    """All that is of a key head lies together."""

    reads = (
        ("in_proj_qkvz", f"{'+'.join(READS[:4])}/delta_keys"),
        ("in_proj_ba", f"{'+'.join(READS[4:])}/delta_keys"),
    )


_QWEN: dict[str, Any] = {
    "norm": rms(unit_offset=True),
    "partial": True,
    "unturned": ("mrope_section", "mrope_interleaved"),  # of positions, alike in texts
    "kept": {PART: 0.25},
    "always": {"attn_output_gate": True, "mamba_ssm_dtype": "float32"},
    # HF makes layer_types of the first; intermediate_size is of no mixture.
    "ignored": (
        *("full_attention_interval", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
        *("num_nextn_predict_layers", "num_mtp_layers", "intermediate_size"),
    ),
    "unused": (r"rotary_emb\.", r"^mtp\.", r"^model\.visual\."),
    "predicts": False,
}
# Of a whole model's file, which sees as well.
_SEEING: dict[str, Any] = {**_QWEN, "renames": (("model.", "model.language_model."),)}
KINDS = {
    "qwen3_next": Kind("Qwen3Next", build=Qwen3Next, **_QWEN),
    "qwen3_5_text": Kind("Qwen3_5", build=QwenHybrid, base="Qwen3_5TextModel", **_SEEING),
    "qwen3_5_moe_text": Kind(
        "Qwen3_5Moe", build=QwenHybrid, base="Qwen3_5MoeTextModel", ffn="", **_SEEING
    ),
}
CLASSES, describe = serve(KINDS)

"""OpenAI's privacy filter: GPT-OSS's layers, in which a token sees a window on either side.

HF source: models/openai_privacy_filter. Its router's weights are over the number of chosen experts,
and their sum times that, which is nothing. Queries and keys share the scale between them.
"""

from dataclasses import replace

from ..spec import ModelSpec
from ..weights import Row, Source, WeightTable
from . import kinds
from .fields import ConfigFields
from .heads import with_head

CLASSES = {
    "openai_privacy_filter": (
        "OpenAIPrivacyFilterForTokenClassification",
        "OpenAIPrivacyFilterModel",
    )
}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a privacy filter."""
    windows = ["sliding_attention"] * fields.layers("num_hidden_layers")
    inner = fields.of_family("gpt_oss", {"layer_types": windows, "hidden_act": "silu"})
    spec, table = kinds.describe(inner, "GptOssModel")
    fields.ignore("classifier_dropout")
    layer = spec.layers[0]
    attention = layer.attending
    assert attention.rope is not None and attention.window is not None
    turned = replace(attention.rope, interleaved=True)
    both_ways = replace(attention, causal=False, near=attention.window + 1, rope=turned)
    layers = (replace(layer, attention=both_ways),) * len(spec.layers)
    spec = replace(spec, family=fields.family, architecture=architecture, layers=layers)
    rows = tuple(map(_in_blocks, table.layers[0]))
    table = replace(table, spec=spec, layers=(rows,) * len(layers))
    return (spec, table) if architecture.endswith("Model") else _scored(fields, spec, table)


def _scored(
    fields: ConfigFields, spec: ModelSpec, table: WeightTable
) -> tuple[ModelSpec, WeightTable]:
    spec, table = with_head(fields, spec, table, spec.architecture)
    return spec, replace(table, spec=spec)


def _in_blocks(own: Row) -> Row:
    """A row whose gates and ups lie one behind the other, not by turns."""

    def put(source: Source) -> Source:
        return replace(source, axes=tuple(axis.partition("/")[0] for axis in source.axes))

    return replace(own, sources=tuple(map(put, own.sources)), others=tuple(map(put, own.others)))

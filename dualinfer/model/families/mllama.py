"""Llama 3.2 Vision's text: Llama's layers, without those that attend to an image.

HF source: models/mllama. Given input_ids alone HF passes over the layers in between that attend
across to an image. The embedding has rows of eight ids more, which stand for images.
"""

from dataclasses import replace

from ...errors import ModelError, shown
from ..spec import ModelSpec
from ..weights import WeightTable
from . import llama
from .fields import ConfigFields

CLASSES = {"mllama_text_model": ("MllamaForCausalLM", "MllamaTextModel")}
_OF_IMAGES = 8  # rows of the embedding behind those of the vocabulary


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of the layers that a text passes through."""
    count = fields.layers("num_hidden_layers")
    across = fields.take("cross_attention_layers", [])
    fits = isinstance(across, list | tuple) and all(type(i) is int for i in across)
    own = [i for i in range(count) if fits and i not in across]
    if not fits or not own:
        raise ModelError(
            f"config.json has cross_attention_layers={shown(across)}; expected a list of layers, "
            f"without some of the {count} that there are."
        )
    fields.require("tie_word_embeddings", False)
    fields.ignore("dropout")
    inner = fields.of_family("llama", {"num_hidden_layers": len(own), "head_dim": None})
    spec, table = llama.describe(inner, architecture)
    layers = tuple(
        tuple(
            replace(
                row,
                sources=tuple(replace(s, name=s.name.replace("{i}", str(i))) for s in row.sources),
            )
            for row in rows
        )
        for i, rows in zip(own, table.layers, strict=True)
    )
    embed, *outer = table.outer
    (source,) = embed.sources
    embed = replace(embed, sources=(replace(source, spare=_OF_IMAGES),))
    numbers = "|".join(str(i) for i in range(count) if i not in own)
    unused = [rf"^(model\.)?layers\.({numbers})\."] if numbers else []
    spec = replace(spec, family=fields.family)
    return spec, replace(
        table,
        spec=spec,
        outer=(embed, *outer),
        layers=layers,
        unused=(*table.unused, *unused),
    )

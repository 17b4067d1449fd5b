"""The text of Mistrals that see images: Mistral Small 3.1 to 4, Ministral 3, Pixtral's relatives.

HF source: models/mistral3. The text is a `mistral`, `ministral3` or `mistral4`.
"""

from collections.abc import Mapping
from dataclasses import replace

from ...errors import ModelError, UnservedError, shown
from ..spec import ModelSpec
from ..weights import WeightTable
from . import deepseek, llama, relatives
from .fields import ConfigFields
from .heads import under

CLASSES = {"mistral3": ("Mistral3ForConditionalGeneration", "Mistral3Model")}
_TEXTS = {"mistral": llama, "ministral3": relatives, "mistral4": deepseek}
# In files, as older versions have them.
_RENAMES = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)
_UNUSED = r"^(model\.)?vision_tower\.", r"^(model\.)?multi_modal_projector\."


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of the part for text alone."""
    text = fields.take("text_config")
    if not isinstance(text, Mapping):
        raise ModelError(f"config.json has text_config={shown(text)}; expected an object.")
    family = text.get("model_type")
    if not isinstance(family, str) or family not in _TEXTS:
        raise UnservedError(
            f"config.json has text_config with model_type={shown(family)}; the mistral3 family "
            f"honours {', '.join(_TEXTS)}."
        )
    # HF reads the outer one.
    inner = ConfigFields(
        family, {**text, "tie_word_embeddings": fields.take("tie_word_embeddings")}
    )
    head, base = _TEXTS[family].CLASSES[family][:2]
    spec, table = _TEXTS[family].describe(inner, head if "For" in architecture else base)
    inner.finish()
    fields.ignore("vision_config", "image_token_index", "image_token_id", "spatial_merge_size")
    fields.ignore("projector_hidden_act", "vision_feature_layer", "multimodal_projector_bias")
    table = under(table, "model.language_model.")
    spec = replace(spec, family=fields.family, architecture=architecture)
    more = {"renames": (*table.renames, *_RENAMES), "unused": (*table.unused, *_UNUSED)}
    return spec, replace(table, spec=spec, base="model.", **more)

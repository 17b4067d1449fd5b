"""Families: from a HF config to a ModelSpec and a weight table; a file per kind of architecture."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from ...errors import ModelError, UnservedError, shown
from ...quantization import read_quantization
from ..spec import ModelSpec
from ..weights import WeightTable
from . import (
    bart,
    bert,
    bloom,
    clip,
    ctrl,
    dbrx,
    deberta,
    deepseek,
    doge,
    encoder_decoder,
    fairseq,
    falcon,
    fsmt,
    gemma,
    gemma3n,
    gemma4,
    gpt2,
    gpt_neo,
    gpt_neox,
    gptj,
    jetmoe,
    kimi,
    kinds,
    layered,
    lfm2,
    lilt,
    llama,
    llama4,
    longcat,
    mamba,
    mamba1,
    minimax,
    mllama,
    mobilebert,
    modernbert,
    moonshine,
    mpt,
    multimodal,
    olmo_hybrid,
    opt,
    privacy_filter,
    qwen3_next,
    speech_to_text,
    t5,
    t5gemma,
    vit,
    whisper,
)
from .fields import ConfigFields
from .heads import base_class, classes_of_decoder, with_head

# By model_type. A family's CLASSES names HF's classes that it serves, the default first.
_FAMILIES: dict[str, ModuleType] = {
    model_type: family
    for family in (
        *(
            llama,
            gemma,
            gemma3n,
            gemma4,
            gpt2,
            gpt_neo,
            gpt_neox,
            gptj,
            opt,
            bloom,
            bert,
            kinds,
        ),
        *(falcon, mpt, fairseq, modernbert, deberta, mobilebert, lilt, clip, vit),
        *(bart, fsmt, t5, t5gemma, encoder_decoder, whisper, deepseek, llama4, multimodal, dbrx),
        *(layered, ctrl, longcat, mllama, privacy_filter, jetmoe, doge, moonshine, speech_to_text),
        *(lfm2, mamba, mamba1, minimax, qwen3_next, kimi, olmo_hybrid),
    )
    for model_type in family.CLASSES
}


def check_model_type(model_type: Any) -> str:
    """`model_type` if it is served; UnservedError names those that are."""
    if model_type is None:
        raise UnservedError(
            "config.json has no model_type, so the family is unknown. Add one of "
            f"{', '.join(served_types())}."
        )
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise UnservedError(
            f"model_type={shown(model_type)} is not supported in fused mode. "
            f"Supported: {', '.join(served_types())}."
        )
    return model_type


def served_types() -> list[str]:
    """The model_types that fused mode knows, sorted."""
    return sorted(_FAMILIES)


def served_modules() -> list[ModuleType]:
    """The files of families, in the order in which the pages list them; each has CLASSES."""
    return list(dict.fromkeys(_FAMILIES.values()))


def default_class(model_type: str) -> str | None:
    """The HF class that a family's config means where it names none; None if it is not served."""
    family = _FAMILIES.get(model_type)
    return None if family is None else family.CLASSES[model_type][0]


def class_for_task(model_type: str, ending: str, now: str) -> str | None:
    """The class whose name has an `ending` that fused mode serves for a family, `now` if it has it.

    The base model's ends in `Model`. None where there is no such class.
    """
    served = _FAMILIES[check_model_type(model_type)].CLASSES[model_type]
    bare = ("LMHeadModel", "DoubleHeadsModel")
    own = [
        name
        for name in (now, *served, *classes_of_decoder(served))
        if name.removesuffix("Simple").endswith(ending)
        and not (ending == "Model" and name.endswith(bare))
    ]
    return own[0] if own else None


def describe_model(
    config: Mapping[str, Any], class_names: Sequence[str] | None = None
) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a HF config, given as the dict that HF's `to_dict` makes.

    `class_names` are the HF classes that the weights belong to, the most derived first; None means
    the family's default. Raises UnservedError that names a class or config field that fused mode
    does not know, ModelError for a bad value, and UnsupportedError for a quantized model of a kind
    that is not served.
    """
    read_quantization(config)
    model_type = check_model_type(config.get("model_type"))
    architecture = find_architecture(model_type, class_names)
    fields = ConfigFields(model_type, config)
    family = _FAMILIES[model_type]
    served = family.CLASSES[model_type]
    if architecture in classes_of_decoder(served) and architecture not in served:
        spec, table = family.describe(fields, base_class(served))
        spec, table = with_head(fields, spec, table, architecture)
    else:
        spec, table = family.describe(fields, architecture)
    fields.ignore("quantization_config")  # of what holds the weights
    fields.finish()
    return spec, table


def knows_family(config: Mapping[str, Any]) -> bool:
    """True if fused mode serves the model's class, whatever else its config holds."""
    try:
        find_architecture(config.get("model_type"), config.get("architectures"))
    except ModelError:
        return False
    return True


def find_architecture(model_type: Any, class_names: Any = None) -> str:
    """The first of `class_names` that fused mode serves, or the default; else UnservedError."""
    served = _served_classes(check_model_type(model_type))
    names = [class_names] if isinstance(class_names, str) else class_names or served
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ModelError(
            f"config.json has architectures={shown(class_names)}; expected a list of class names."
        )
    known = find_served(model_type, names)
    if known is None:
        raise UnservedError(
            f"{names[0][:80]} is not supported in fused mode; of the "
            f"{model_type} family it serves {' and '.join(served)}."
        )
    return known


def find_served(model_type: str, names: Sequence[str]) -> str | None:
    """The first of HF's class names that fused mode serves of a model_type; None if none is."""
    served = _served_classes(model_type)
    # The first Llama checkpoints spell their class LLaMAForCausalLM.
    return next((own for n in names for own in served if own.lower() == n.lower()), None)


def _served_classes(model_type: str) -> tuple[str, ...]:
    family = _FAMILIES.get(model_type)
    served = () if family is None else family.CLASSES[model_type]
    return (*served, *classes_of_decoder(served))

"""Find the transformers class that a config.json means: the one that Auto classes would make.

They go by `model_type`. A name in `architectures` chooses among the classes of that type alone, and
names that transformers does not know (of a wrapper, of FSDP, of a class that is gone) choose none.
"""

import importlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from ...errors import ModelError, shown
from ...model.families import default_class, find_served

# Where a class stands in several mappings, or is not named, the first of these that has the type.
_FIRST = (
    *("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText"),
    *("AutoModelForSpeechSeq2Seq", "AutoModelForMultimodalLM", "AutoModelForMaskedLM"),
)
_LAST = ("AutoModel", "AutoModelForPreTraining")
# Ends of names beside those that Auto classes have themselves, such as ForCausalLM.
_ENDS = {"ForConditionalGeneration": _FIRST[1:4], "LMHeadModel": (_FIRST[0], _FIRST[5])}

_MOST_NAMES = 64


def as_auto(written: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the model_type and the class by which transformers' Auto classes go.

    Names stay as they are where they lead to no class of that type. Raises ModelError for a class
    that is code of the checkpoint's own.
    """
    fields = dict(written)
    model_type, given = fields.get("model_type"), fields.get("architectures")
    if model_type == "mistral" and "layer_types" in fields:  # AutoConfig's own rule
        fields["model_type"] = model_type = "ministral"
    names = [given] if isinstance(given, str) else given
    is_list = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    if not names or not is_list or not isinstance(model_type, str):
        return fields
    if len(names) > _MOST_NAMES:  # each of which is looked for
        raise ModelError(
            f"config.json names {len(names):,} architectures; expected one, and at most "
            f"{_MOST_NAMES}. Fetch it again."
        )
    names = [*names]
    found = find_served(model_type, names) or _class_of(model_type, names)
    by_name = found is not None and found.lower() in (name.lower() for name in names)
    own = None if by_name else _own_code(fields, names)
    if own:
        local = f" Without it transformers makes a {found}." if found else ""
        raise ModelError(
            f"config.json names the class {own[:80]}, which is code of the checkpoint's own "
            f"(auto_map) and does not run here.{local} If you trust it, load the model yourself "
            "with trust_remote_code=True and pass it to init_inference with backend='torch'."
        )
    if found and found != names[0]:
        fields["architectures"] = [found]
    return fields


def changed(written: Mapping[str, Any], auto: Mapping[str, Any]) -> list[str]:
    """Notes of what `as_auto` made of a config."""
    notes = []
    if written.get("model_type") != auto.get("model_type"):
        notes.append(
            f"config.json has model_type={shown(written.get('model_type'))} and layer_types, which "
            f"transformers takes as {auto.get('model_type')}"
        )
    if written.get("architectures") != auto.get("architectures"):
        notes.append(
            f"config.json names {shown(written.get('architectures'))}, by which transformers does "
            f"not go; taken as {auto['architectures'][0]} by its model_type"
        )
    return notes


def class_named(fields: Mapping[str, Any]) -> str | None:
    """The class of a config that `as_auto` has read; None where nothing tells it."""
    names, model_type = fields.get("architectures"), str(fields.get("model_type"))
    if isinstance(names, list | tuple) and names:
        return names[0] if isinstance(names[0], str) else None
    return _class_by_type(_mappings(), model_type)


def _class_by_type(mappings: Mapping[str, Any], model_type: str) -> str | None:
    return default_class(model_type) or next(_of_type(mappings, model_type), None)


def classes_of_type(model_type: str) -> list[str]:
    """The names of all classes that Auto classes have for a model_type."""
    return list(dict.fromkeys(_of_type(_mappings(), model_type)))


def _class_of(model_type: str, names: list[str]) -> str | None:
    """transformers' class of `model_type` that these names mean; None if they mean none of it."""
    mappings = _mappings()
    own = set(_of_type(mappings, model_type))
    known = {name for types in mappings.values() for each in types.values() for name in each}
    for name in names:
        if name in own or (name not in known and _is_of(name, model_type)):
            return name
    # A name of the type, or of another one, with words of a wrapper before it.
    inner = max((x for x in (*own, *known) if names[0].endswith(x)), key=len, default=None)
    if inner in own:
        return inner
    if inner:  # whose task this type may have as well
        tasks = {a: c for a, c in mappings.items() if any(inner in x for x in c.values())}
        return next(_of_type(tasks, model_type), None)
    ends = {a.removeprefix("AutoModel"): (a,) for a in mappings if a not in _LAST} | _ENDS
    end = max((e for e in ends if e and names[0].endswith(e)), key=len, default=None)
    if end is None:
        return _class_by_type(mappings, model_type)
    return next(_of_type({a: mappings[a] for a in ends[end]}, model_type), None)


@cache
def _mappings() -> dict[str, dict[str, tuple[str, ...]]]:
    """The names of the classes of each Auto class by model_type, those first that go first."""
    # By its path, since transformers gives a stand-in for it where there is no torch.
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    kinds = sorted(name for name in vars(auto) if name.startswith("AutoModel"))
    for name in (*_FIRST, *(k for k in kinds if k not in (*_FIRST, *_LAST)), *_LAST):
        classes = getattr(getattr(auto, name)._model_mapping, "_model_mapping", None)
        if classes is not None:
            found[name] = {
                model_type: one if isinstance(one, tuple) else (one,)
                for model_type, one in classes.items()
            }
    return found


def _of_type(
    mappings: Mapping[str, Mapping[str, tuple[str, ...]]], model_type: str
) -> Iterator[str]:
    for classes in mappings.values():
        yield from classes.get(model_type, ())


def _is_of(name: str, model_type: str) -> bool:
    """True if transformers has a model of this name for the type, in an Auto class or in none."""
    import transformers

    if not transformers.is_torch_available():  # there are stand-ins for its models
        return False
    try:
        config = getattr(getattr(transformers, name, None), "config_class", None)
    except Exception:  # a model that needs a package which is not installed
        return False
    return getattr(config, "model_type", None) == model_type


def _own_code(fields: Mapping[str, Any], names: list[str]) -> str | None:
    """The first of the names that is a class of the folder's own code."""
    places = fields.get("auto_map")
    if not isinstance(places, Mapping):
        return None
    own = {str(place).rpartition(".")[2] for place in places.values()}
    return next((name for name in names if name in own), None)

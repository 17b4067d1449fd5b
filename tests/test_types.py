"""What editors, type checkers and help() know of the public calls; lint reads user_code.py."""

import inspect
import types
import typing
from typing import get_args, get_origin, get_type_hints

import pytest

import dualinfer
from dualinfer.config import keywords
from dualinfer.config.fields import InferenceConfig
from dualinfer.config.model import Model, is_stale, nested_model

TAKEN = {"backend", "config"}  # arguments of init_inference by these names
MODELS = {
    InferenceConfig: keywords.ConfigFields,
    **{
        kind: getattr(keywords, name.replace("Config", "Fields"))
        for name, kind in vars(dualinfer.config).items()
        if name.endswith("Config") and hasattr(keywords, name.replace("Config", "Fields"))
    },
}


def members(hint):
    """The plain kinds and literals of a hint, without Annotated and None."""
    if get_origin(hint) is typing.Annotated:
        return members(get_args(hint)[0])
    if get_origin(hint) in (typing.Union, types.UnionType):
        return {one for part in get_args(hint) for one in members(part)} - {type(None)}
    if get_origin(hint) is typing.Literal:
        return set(get_args(hint))
    return {get_origin(hint) or hint}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_keyword_arguments_are_the_fields_of_the_config(model: type[Model]):
    hints = get_type_hints(MODELS[model], include_extras=True)
    live = {name: field for name, field in model.model_fields.items() if not is_stale(field)}
    aliases = {str(f.validation_alias): f for f in live.values() if f.validation_alias}
    fields = {**live, **aliases}
    assert set(hints) == set(fields) - (TAKEN if model is InferenceConfig else set())
    for name, hint in hints.items():
        field, held = fields[name], members(hint)
        wanted = members(field.annotation)
        if "dtype" in name:  # words in any spelling
            continue
        wanted -= {dict} if {get_origin(typing.Mapping[str, int])} & held else set()
        assert wanted <= held or typing.Any in held, name
        nested = nested_model(field)
        assert nested is None or MODELS[nested] in held, name


def test_every_model_of_the_config_has_its_dict():
    missing = {"CheckpointConfig", "BaseQuantConfig", "InferenceConfig"}  # stale, a base, and named
    found = {n for n, kind in vars(dualinfer.config).items() if n.endswith("Config")}
    assert {kind.__name__ for kind in MODELS} == found - missing | {"InferenceConfig"}


CALLS = ["generate", "generate_text", "stream_text", "chat", "stream_chat", "embed", "score"]


def test_help_shows_fields_and_examples():
    shown = inspect.signature(dualinfer.init_inference)
    assert {"model", "backend", "tensor_parallel", "quant"} <= shown.parameters.keys()
    assert ">>> " in (dualinfer.init_inference.__doc__ or "")
    from dualinfer.engine.fused import FusedEngine

    calls = {name: getattr(FusedEngine, name) for name in CALLS}
    assert [name for name, call in calls.items() if ">>> " not in (call.__doc__ or "")] == []
    assert "max_new_tokens" in inspect.signature(calls["chat"]).parameters


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("is_module", [False, True], ids=["fused", "module"])
def test_engines_are_of_their_backends_type(backend, is_module):
    kind, other = dualinfer.TorchEngine, dualinfer.JaxEngine
    kind, other = (kind, other) if backend == "torch" else (other, kind)
    if not is_module:
        model = dualinfer.embedded_model()
    elif backend == "torch":
        import torch

        model = torch.nn.Linear(2, 3)
    else:
        from flax import nnx

        model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with dualinfer.init_inference(model, backend=backend) as engine:
        assert isinstance(engine, kind) and not isinstance(engine, other)

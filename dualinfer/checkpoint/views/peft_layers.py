"""Adapters of peft that peft's own layers merge, one weight at a time: IA3, LoHa, OFT and others.

A layer gets the weight that is read, in float32, and merges into it. So a kind needs no code of its
own here, and a model's weights are never in memory at once. This needs torch and peft.
"""

import copy
import dataclasses
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...arrays import from_numpy, to_numpy
from ...errors import BackendNotAvailableError, CheckpointError, listing, shortened
from ...model.load_plan import TensorSource
from ...model.peft_modules import MERGING

Make = Callable[[np.ndarray], np.ndarray]


def is_own(kind: str, name: str) -> bool:
    """True if a tensor of an adapter's file belongs to its layers."""
    return any(part.startswith(MERGING[kind]) for part in name.split("."))


def fields_of(kind: str) -> frozenset[str]:
    """The names of the fields that peft's config of a kind has; of all where peft is missing."""
    try:
        import peft
    except ImportError:
        return _Anything()
    fields = dataclasses.fields(peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)])
    return frozenset(field.name for field in fields)


class _Anything(frozenset[str]):
    """Has every name."""

    def __contains__(self, name: object) -> bool:
        return True


def merge_by(layer: Any, adapter: str) -> Callable[[str], Make]:
    """By the name of a parameter of the layer below, what merges the adapter into its values.

    Of the layer a copy is used, which shares nothing with it that merging changes.
    """
    import torch

    def merging(parameter: str) -> Make:
        def make(values: np.ndarray) -> np.ndarray:
            below = layer.get_base_layer()
            given = {
                id(old): torch.nn.Parameter(
                    from_numpy(np.array(values, np.float32), "torch")
                    if name == parameter
                    else torch.zeros(tuple(old.shape)),
                    requires_grad=False,
                )
                for name, old in below._parameters.items()
                if old is not None
            }
            own = copy.deepcopy(layer, given).to("cpu").float().eval()
            own.merged_adapters = []
            try:
                with torch.no_grad():
                    own.merge(adapter_names=[adapter])
            except Exception as error:  # peft raises many kinds
                raise CheckpointError(
                    f"peft cannot merge its {type(own).__name__} into a weight: {shortened(error)} "
                    "Save the adapter again with the version of peft that is installed here."
                ) from error
            return to_numpy(getattr(own.get_base_layer(), parameter).detach())

        return make

    return merging


def read_layers(
    folder: Path,
    kind: str,
    source: TensorSource,
    make_model: Callable[[str | None], Any] | None,
) -> dict[str, Make]:
    """By HF's names of a model's weights, what merges an adapter of a folder into each.

    `make_model` makes the HF model of a task_type, without values. Raises CheckpointError for what
    peft does not read, and BackendNotAvailableError without torch or peft.
    """
    try:
        import peft
        import torch
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError as error:
        raise BackendNotAvailableError(
            f"{folder} holds an adapter of kind {kind}, which peft's own layers merge, and "
            f"{error.name} is not installed. Install torch and peft, or merge it where they are "
            "(merge_and_unload()) and pass what save_pretrained() writes."
        ) from error
    if make_model is None:
        raise CheckpointError(
            f"{folder} holds an adapter of kind {kind}, which is not merged in module mode. Merge "
            "it with peft (merge_and_unload()), and pass the model that comes back."
        )
    names = [name for name in source.names() if is_own(kind, name)]
    state = {name: from_numpy(np.array(to_numpy(source.read(name))), "torch") for name in names}
    # peft draws what it then reads, and says of zeros that they are in no file.
    with _lock, torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = peft.PeftConfig.from_pretrained(str(folder))
            bare, config.task_type = make_model(config.task_type), None
            config.inference_mode = True
            for field in ("modules_to_save", "trainable_token_indices"):
                if hasattr(config, field):
                    setattr(config, field, None)  # read as those of LoRA
            model = peft.get_peft_model(_without_values(bare), config)
            result = peft.set_peft_model_state_dict(model, state)
        except Exception as error:  # peft raises many kinds
            raise CheckpointError(
                f"{folder}: peft cannot put this adapter of kind {kind} into the model: "
                f"{shortened(error)} Pass the model that it was trained for."
            ) from error
    if result.unexpected_keys:
        raise CheckpointError(
            f"{folder} has {listing(result.unexpected_keys, 4)}, of which the model has no layers. "
            "Pass the model that it was trained for."
        )
    if lacking := _lacking(model, [name for name in result.missing_keys if is_own(kind, name)]):
        raise CheckpointError(
            f"{folder} lacks {listing(lacking, 4)}, which an adapter of kind {kind} has there. The "
            "file is damaged or of another model; save the adapter again, with save_pretrained()."
        )
    made: dict[str, Make] = {}
    for path, layer in model.get_base_model().named_modules():
        if isinstance(layer, BaseTunerLayer):
            made |= changes_of(kind, path, layer, "default")
    return made


def _lacking(model: Any, missing: Sequence[str]) -> list[str]:
    """The missing tensors that are not, by another name, tensors which were read."""
    held = model.state_dict()
    read = {held[name].data_ptr() for name in held.keys() - {*missing}}
    return [name for name in missing if held[name].data_ptr() not in read]


def changes_of(kind: str, path: str, layer: Any, adapter: str) -> dict[str, Make]:
    """The functions that merge an adapter into the layer below one of peft's, by name.

    Raises CheckpointError where a bias changes by the weight beside it.
    """
    merging = merge_by(layer, adapter)
    held = {n for n, value in layer.get_base_layer()._parameters.items() if value is not None}
    if kind == "GLORA" and "bias" in held:
        raise CheckpointError(
            f"An adapter of kind GLORA changes {path}.bias by the weight beside it, which is not "
            "merged here. Merge it with peft (merge_and_unload()), and pass what comes back."
        )
    names = {"weight", "bias"} if kind in _WITH_BIAS else {"weight"}
    return {f"{path}.{name}": merging(name) for name in sorted(held & names)}


# The Auto classes of tasks, as peft chooses them.
_AUTO = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}


def empty_model(config: Any, class_names: Sequence[str] | None, task: str | None) -> Any:
    """The HF model of a config, or of a task that has a class of its own, on the meta device."""
    import torch
    import transformers

    config = copy.deepcopy(config)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    with torch.device("meta"):
        if task in _AUTO:
            return getattr(transformers, _AUTO[task]).from_config(config)
        names = [n for n in class_names or () if hasattr(transformers, n)]
        return getattr(transformers, (names or ["AutoModelForCausalLM"])[0])._from_config(config)


_WITH_BIAS = ("IA3", "LN_TUNING", "ROAD")  # which change what a layer adds as well
_lock = threading.Lock()


def _without_values(model: Any) -> Any:
    """The model with zeros that take no memory in the place of its weights."""
    import torch

    for part in model.modules():
        for name, value in list(part._parameters.items()):
            if value is not None:
                zeros = torch.zeros(1, device="cpu").expand(tuple(value.shape))
                part._parameters[name] = torch.nn.Parameter(zeros, requires_grad=False)
    return model

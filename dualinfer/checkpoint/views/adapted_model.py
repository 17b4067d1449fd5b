"""Apply adapters to a model's facts beside its weights: class, labels and vocabulary."""

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ...errors import CheckpointError, listing
from ...model.families import class_for_task, describe_model
from ...model.load_plan import TensorSource
from ...model.spec import ModelSpec
from ...model.weights import Row, Source, WeightTable
from .adapters import Adapter, Added

# peft's task_type, and which of HF's Auto classes peft makes the model by.
_TASKS = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
    "FEATURE_EXTRACTION": "Model",
}
_AUTO = {task: f"peft.AutoPeftModel{ending}" for task, ending in _TASKS.items()}
_AUTO["FEATURE_EXTRACTION"] = "peft.AutoPeftModelForFeatureExtraction"
_HEADS = ("score.weight", "classifier.weight", "classifier.out_proj.weight", "qa_outputs.weight")


class AdaptedModel(NamedTuple):
    """A model as its adapters have it: HF config and class names, spec and table.

    `trained` are the tensors of a head that the model itself has none of.
    """

    config: Any
    class_names: list[str] | None
    spec: ModelSpec
    table: WeightTable
    trained: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def describe_adapted(
    config: Any, class_names: list[str] | None, adapters: Sequence[Adapter]
) -> AdaptedModel:
    """The model that peft would make for `adapters`.

    An adapter for a task has the class of that task, whatever the model's own is; one that brings
    other embeddings has their vocabulary, and its own head has its labels. The given config stays
    as it is. Raises as `describe_model` does, and CheckpointError for adapters that contradict each
    other.
    """
    found = AdaptedModel(config, class_names, *describe_model(config.to_dict(), class_names))
    if not adapters:
        return found
    found = _with_task(found, adapters)
    found = _with_sizes(found, adapters)
    return found._replace(table=with_biases(found.table, adapters))


def _with_task(own: AdaptedModel, adapters: Sequence[Adapter]) -> AdaptedModel:
    """The model with the class that adapters were trained with."""
    asked = {a.task: a.label for a in adapters if a.task in _TASKS}
    if len(asked) > 1:
        raise CheckpointError(
            f"Adapters of different tasks cannot be in one model: "
            f"{', '.join(f'{label} is for {task}' for task, label in asked.items())}. Pass one."
        )
    if not asked:
        return own
    ((task, label),) = asked.items()
    assert task is not None
    model_type, now = own.config.model_type, own.spec.architecture
    name = class_for_task(model_type, _TASKS[task], now)
    if name is None:
        labels = [s[0] for a in adapters for n in _HEADS if (s := a.shape_of(n))]
        own_labels = f", num_labels={labels[0]}" if labels else ""
        raise CheckpointError(
            f"The adapter {label} is for the task {task}, for which fused mode serves no class of "
            f"the {model_type} family. Make the model that peft makes, {_AUTO[task]}"
            f".from_pretrained({label!r}{own_labels}), and pass it with backend='torch'."
        )
    if name == now:
        return own
    config = copy.deepcopy(own.config)
    config.architectures = [name]
    spec, table = describe_model(config.to_dict(), [name])
    if table.base != own.table.base:  # as of Llama's class for questions
        raise CheckpointError(
            f"The adapter {label} is for the task {task}, and {name} has its base model as "
            f"{table.base}*, which {now} has as {own.table.base}*: HF draws all of it anew, "
            "so that no two models with this adapter are alike. Pass a model that was saved as a "
            f"{name}."
        )
    head = [s.name for row in table.outer if row.name.startswith("head.") for s in row.sources]
    left = {c for n in _names(own.table) for c in own.table.candidates(n)}
    left -= {c for n in _names(table) for c in table.candidates(n)}
    unused = (*table.unused, *(f"^{re.escape(n)}$" for n in sorted(left)))
    note = f"{name}, and not {now}: the adapter {label} is for the task {task}"
    return AdaptedModel(
        config, [name], spec, replace(table, unused=unused), tuple(head), (*own.notes, note)
    )


def _names(table: WeightTable) -> Iterable[str]:
    """HF's names of what lies outside of a model's layers."""
    rows = (*table.outer, *(row for row, _ in table.tied))
    return (source.name for row in rows for source in row.sources)


def _with_sizes(own: AdaptedModel, adapters: Sequence[Adapter]) -> AdaptedModel:
    """The model with the labels and the vocabulary of what adapters bring along."""
    sizes: dict[str, dict[int, str]] = {"labels": {}, "vocab": {}}
    for row in (*own.table.outer, *(row for row, _ in own.table.tied)):
        axis = row.axes[0] if row.axes else ""
        if axis not in sizes:
            continue
        given = [(c, s.spare) for s in row.sources for c in own.table.candidates(s.name)]
        for adapter in adapters:
            for name, spare in given:
                shape, now = adapter.shape_of(name), own.table.shape(row)[0]
                if shape and shape[0] not in (now, now + spare):
                    sizes[axis].setdefault(shape[0] - spare, adapter.label)
    changed = {axis: given for axis, given in sizes.items() if given}
    if not changed:
        return own
    config, notes = copy.deepcopy(own.config), list(own.notes)
    for axis, given in changed.items():
        if len(given) > 1:
            raise CheckpointError(
                f"Adapters bring {axis} of {' and '.join(map(str, given))}: "
                f"{listing([*given.values()])}. Pass one of them."
            )
        ((size, label),) = given.items()
        if axis == "labels":
            config.num_labels = size
            notes.append(f"{size} labels, as the adapter {label} has them")
        else:
            _text(config).vocab_size = size
            notes.append(f"a vocabulary of {size}, as the adapter {label} brings it")
    patterns = own.table.unused
    spec, table = describe_model(config.to_dict(), own.class_names)
    table = replace(table, unused=patterns)
    return own._replace(config=config, spec=spec, table=table, notes=tuple(notes))


def _text(config: Any) -> Any:
    """The part of a HF config that has the vocabulary."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


# Products that read a bias where there is one, by our names of their weights.
_BIASED = {"qkv", "out", "up", "down", "shared.up", "shared.down", "head"}
_BIASED |= {f"cross_{name}" for name in ("q", "kv", "out")}


def with_biases(table: WeightTable, adapters: Sequence[Adapter]) -> WeightTable:
    """The table with the biases that adapters add where the model has none (peft's lora_bias)."""
    known = {s.name for row in table.rows for s in row.sources}
    asked = {
        f"{name.removesuffix('bias')}weight"
        for adapter in adapters
        for name, changes in adapter.changes.items()
        if name.endswith(".bias") and any(isinstance(change, Added) for change in changes)
    }
    asked = {own for name in asked for own in table.candidates(name)}
    added: list[str] = []

    def extended(rows: tuple[Row, ...], number: str) -> tuple[Row, ...]:
        """The rows of a layer with HF's number, or of none, with a bias for each that lacks one."""
        found = {row.name: row for row in rows}
        for row in rows:
            name = row.name.removesuffix(".weight")
            if name == row.name or name not in _BIASED or not row.is_weight:
                continue
            own = found.get(f"{name}.bias", Row(f"{name}.bias", row.axes[:1], ()))
            sources = list(own.sources)
            for source in row.sources:
                spelt = source.name.removesuffix("weight") + "bias"
                full = spelt.replace("{i}", number)
                if source.name.replace("{i}", number) in asked and full not in known:
                    out = source.axes[row.permutation(source)[0]]
                    sources.append(Source(spelt, (out,)))
                    added.append(full)
            if len(sources) > len(own.sources):
                found[own.name] = replace(own, sources=tuple(sources))
        return tuple(found.values()) if len(added) > count else rows

    layers, count = [], 0
    for i, rows in enumerate(table.layers):
        inner = len(table.spec.layers)
        layers.append(extended(rows, str(i if i < inner else i - inner)))
        count = len(added)
    outer = extended(table.outer, "")
    if not added:
        return table
    return replace(table, outer=outer, layers=tuple(layers), added=tuple(added))


def check_head(own: AdaptedModel, adapters: Sequence[Adapter], source: TensorSource) -> None:
    """Raise CheckpointError for a head that neither the model nor an adapter has."""
    held: set[str] = set(source.names()) if own.trained else set()
    missing = [
        name
        for name in own.trained
        if held.isdisjoint(spelt := own.table.candidates(name))
        and not any(a.shape_of(c) for a in adapters for c in spelt)
    ]
    if missing:
        raise CheckpointError(
            f"{listing(missing)} of {own.spec.architecture} is neither in {source.description} nor "
            f"in {listing([a.label for a in adapters])}, and peft would draw it anew each time. "
            "Train the adapter with modules_to_save, or pass a model that has a head."
        )

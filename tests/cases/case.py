"""What a case is: one tiny HF model, by its classes, the fields of its config, and its weights."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers as hf

from ..models import randomize

OUT = object()  # a field of `Table.sizes` that a case's config does not have


def _randomize(case: "Case", model: hf.PreTrainedModel) -> None:
    randomize(model)


def _build(case: "Case", config: hf.PreTrainedConfig, kind: type) -> hf.PreTrainedModel:
    return kind(config)


@dataclass(frozen=True)
class Table:
    """What the cases of one file share."""

    sizes: Mapping[str, Any]  # of their configs
    draw: Callable[["Case", hf.PreTrainedModel], None] = _randomize  # the weights
    seed: Callable[["Case"], int] = lambda case: 0  # of weights
    build: Callable[["Case", hf.PreTrainedConfig, type], hf.PreTrainedModel] = _build


@dataclass(frozen=True)
class Case:
    """One tiny model: the names of HF's classes, and the fields of its config that make it odd."""

    name: str
    architecture: str
    fields: Mapping[str, Any]
    table: Table = field(repr=False)
    config_class: str | type = ""  # of the config, where it is not the model's own
    base: str = ""  # HF's class without a head, where AutoModel has none for the config

    @property
    def model(self) -> type[hf.PreTrainedModel]:
        """HF's class."""
        return getattr(hf, self.architecture)

    @property
    def config(self) -> type[hf.PreTrainedConfig]:
        """The class of its config."""
        own = self.config_class or self.model.config_class
        return getattr(hf, own) if isinstance(own, str) else own

    @property
    def family(self) -> str:
        """HF's model_type."""
        return self.config.model_type

    @property
    def is_there(self) -> bool:
        """True if this version of transformers has the classes."""
        names = (self.architecture, self.config_class or "PreTrainedConfig")
        return all(not isinstance(name, str) or hasattr(hf, name) for name in names)

    @property
    def generates(self) -> bool:
        """True for a causal model with a head."""
        return self.architecture.endswith(("ForCausalLM", "LMHeadModel"))

    @property
    def has_head(self) -> bool:
        """True if forward gives logits."""
        return self.generates or self.architecture.endswith("ForMaskedLM")

    def make_config(self, **changes: Any) -> hf.PreTrainedConfig:
        """The HF config, with `changes`; the test is skipped where transformers lacks its class."""
        if not self.is_there:
            pytest.skip(f"transformers {hf.__version__} has no {self.architecture}")
        fields = {**self.table.sizes, **self.fields, **changes}
        fields = {name: value for name, value in fields.items() if value is not OUT}
        return self.config(**copy.deepcopy(fields))

    def make(self, headless: bool = False, **changes: Any) -> hf.PreTrainedModel:
        """The model in float32 with weights of its own, the same in every process.

        A headless one is of HF's class `base`, or of the one that AutoModel has for the config.
        """
        config = self.make_config(**changes)
        kind = self.model
        if headless:
            kind = getattr(hf, self.base, None) or hf.AutoModel._model_mapping[type(config)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.table.seed(self))
            model = self.table.build(self, config, kind)
            self.table.draw(self, model)
        return model.eval()

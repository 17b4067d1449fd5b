"""Every kind of model that dualinfer serves, as tiny random HF models: a row each.

A file holds the rows of one kind, and how their weights are drawn. Names are those of HF's
model_type, with what is odd behind it.
"""

from typing import Any

import transformers as hf

from . import decoders, encoders, images, mixtures, pairs, recurrent, relatives, sights
from .case import OUT, Case, Table

TABLES = (decoders, relatives, mixtures, recurrent, encoders, pairs, sights, images)
CASES: dict[str, Case] = {}
for _table in TABLES:
    _twice = CASES.keys() & _table.CASES
    assert not _twice, f"{_twice} stand in two tables"
    CASES |= _table.CASES

__all__ = ["CASES", "OUT", "TABLES", "Case", "Table", "make_model"]


def make_model(name: str, **changes: Any) -> hf.PreTrainedModel:
    """The model of a case, in float32; see `Case.make`."""
    return CASES[name].make(**changes)

"""The table of cases shows all that is served, and says which of its rows are quick."""

from collections.abc import Iterator
from typing import Any

import pytest

from dualinfer.model.families import served_types

from .cases import CASES
from .cases.covering import QUICK, TORCH_ALONE, derive

# Served types without a row, and who shows them.
ELSEWHERE = {
    **dict.fromkeys(("gemma3", "gemma3n", "gemma4", "gemma4_unified"), "test_relatives"),
    **{"gemma4_unified_text": "test_relatives", "llama4": "test_mixtures"},
    **{"gpt-sw3": "another name of gpt2", "iquestcoder": "another name of llama"},
}


def types(written: Any) -> Iterator[str]:
    """Each model_type in a config and in the configs within."""
    if isinstance(written, dict):
        if isinstance(written.get("model_type"), str):
            yield written["model_type"]
        for value in written.values():
            yield from types(value)


@pytest.mark.slow
def test_each_served_type_has_a_case():
    shown = {x for case in CASES.values() for x in types(case.make_config().to_dict())}
    assert {*served_types()} - shown == {*ELSEWHERE}


@pytest.mark.slow
def test_quick_cases_are_those_that_the_specs_give():
    """`python -m tests.cases.covering` writes them anew."""
    assert derive() == {"quick": sorted(QUICK), "torch_alone": sorted(TORCH_ALONE)}

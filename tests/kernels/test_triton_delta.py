"""Triton's gated delta rule: tokens of slots, and sequences chunk by chunk."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from .cases import assert_close, normal, unit
from .tensors import get, needs_triton, put, strict, strided

from dualinfer.blocks.delta_rule import DeltaRule  # isort: skip
from dualinfer.kernels.triton import delta_prompt, delta_token  # isort: skip
from dualinfer.kernels.triton.launch import has_pdl  # isort: skip
from dualinfer.model.spec import Norm  # isort: skip
from dualinfer.ops.contract import Seen  # isort: skip
from dualinfer.ops.exact import MATHS  # isort: skip

pytestmark = [needs_triton, pytest.mark.usefixtures(strict.__name__)]
EXACT: Any = SimpleNamespace(maths=MATHS)
RULES = {
    "head": DeltaRule(2, 4, 24, 40, 4, "silu", Norm("rms", 1e-6)),
    "alone": DeltaRule(3, 3, 16, 64, 4, "silu", Norm("rms", 1e-5), doubled=True),
    "channel": DeltaRule(
        *(2, 2, 32, 24, 4, "silu", Norm("rms", 1e-5)), by_channel=True, gate="sigmoid"
    ),
    "bounded": DeltaRule(
        *(1, 2, 48, 16, 3, "silu", Norm("rms", 1e-5)),
        by_channel=True,
        floor=-5.0,
        gate="sigmoid",
    ),
}


class Case(NamedTuple):
    """A rule with weights, as NumPy has them and as the kernels take them."""

    rule: DeltaRule
    weights: dict[str, np.ndarray]
    layer: delta_token.DeltaLayer

    def past(self, slots: int, dtype: np.dtype) -> np.ndarray:
        return normal(7, slots, self.rule.taps - 1, self.rule.channels, dtype=dtype)

    def state(self, slots: int) -> np.ndarray:
        shape = slots, self.rule.values, self.rule.key_dim, self.rule.value_dim
        return normal(8, *shape, dtype=np.dtype(np.float32), scale=0.3)

    def x(self, *shape: int, dtype: np.dtype) -> np.ndarray:
        return normal(9, *shape, sum(self.rule.sizes), dtype=dtype)


def case_of(name: str, dtype: np.dtype) -> Case:
    rule = RULES[name]
    weights = {
        "recurrence_kernel": normal(1, rule.channels, rule.taps, dtype=dtype, scale=0.7),
        "delta_decay_scale": normal(2, rule.values, dtype=np.dtype(np.float32)),
        "delta_decay_bias": normal(3, rule.decays, dtype=np.dtype(np.float32)),
        "delta_norm.weight": normal(4, rule.value_dim, dtype=dtype),
    }
    layer = delta_token.DeltaLayer(
        *(rule.keys, rule.values, rule.key_dim, rule.value_dim, sum(rule.sizes[:4])),
        *map(put, weights.values()),
        rule.norm.eps,
        **{"floor": rule.floor, "doubled": rule.doubled, "gate": rule.gate},
    )
    return Case(rule, weights, layer)


def loop(case: Case, x: np.ndarray, past: Any, state: Any) -> tuple[Any, Any, Any]:
    """Token by token in float64: results [T, width] of x [T, W], and what is kept."""
    states = past[None], state[None].astype(np.float64)
    found = []
    for token in x:
        y, states = case.rule.token(EXACT, case.weights, token[None, None], states)
        found.append(y[0, 0])
    return np.stack(found), states[0][0], states[1][0]


def test_sizes_that_kernels_do_not_know_are_plain():
    rule = RULES["head"]
    assert rule.is_fused
    for other in ({"taps": 1}, {"key_dim": 129}, {"value_dim": 256}, {"activation": "gelu"}):
        assert not replace(rule, **other).is_fused, other


@pytest.mark.parametrize("name", RULES)
def test_a_token_moves_the_slots_that_are_named(dtype, name):
    case = case_of(name, dtype)
    x, past, state = case.x(3, dtype=dtype), case.past(4, dtype), case.state(4)
    if name == "channel":  # states may be kept in 16 bits
        state = state.astype(dtype)
    moves = np.array([True, False, True])
    import torch

    counters = torch.zeros(3 * case.rule.keys, dtype=torch.int32, device=put(x).device)
    for pdl in {False, has_pdl(counters)}:
        held = put(past), put(state)
        own: dict[str, Any] = {"counters": counters, "pdl": pdl}
        y = get(delta_token.delta_token(put(x), case.layer, *held, put(moves), **own))
        assert not counters.any()
        new_past, new_state = map(get, held)
        for slot in (0, 2):
            wanted = loop(case, x[slot : slot + 1], past[slot], state[slot].astype(np.float32))
            assert_close(y[slot], wanted[0][0].astype(np.float32), dtype, length=256)
            assert (new_past[slot] == wanted[1]).all()
            assert_close(new_state[slot], wanted[2].astype(np.float32), state.dtype, length=256)
        assert (y[1] == 0).all()
        for slot in (1, 3):
            assert (new_past[slot] == past[slot]).all()
            assert (new_state[slot] == state[slot]).all()


@pytest.mark.parametrize("name", RULES)
def test_rows_go_on_from_their_slots(dtype, name):
    case, tokens = case_of(name, dtype), 75
    x, past, state = case.x(3, tokens, dtype=dtype), case.past(5, dtype), case.state(5)
    if name == "channel":
        state = state.astype(dtype)
    slots, starts, lengths = np.array([3, 1, 7]), np.array([64, 0, 0]), np.array([75, 66, 1])
    held = put(past), put(state)
    y = delta_prompt.delta_prompt(
        *(put(x), case.layer, *held),
        **{"slots": put(slots), "starts": put(starts), "lengths": put(lengths)},
    )
    y, new_past, new_state = map(get, (y, *held))
    # Products are of rounded operands: several roundings lie on the way.
    rounds = {"roundings": 12} if unit(dtype) > 1e-6 else {}
    for b in (0, 1):
        slot, before = slots[b], float(starts[b] > 0)
        kept = (past[slot] * before).astype(dtype), state[slot].astype(np.float32) * before
        wanted = loop(case, x[b, : lengths[b]], *kept)
        found = y[b, : lengths[b]]
        assert_close(found, wanted[0].astype(np.float32), dtype, length=1024, **rounds)
        assert (new_past[slot] == wanted[1]).all()
        error = np.abs(new_state[slot].astype(np.float32) - wanted[2])
        assert error.max() <= (4e-2 if rounds else 1e-5) * np.abs(wanted[2]).max()
    for slot in (0, 2, 4):
        assert (new_past[slot] == past[slot]).all()
        assert (new_state[slot] == state[slot]).all()


@pytest.mark.parametrize("name", ["head", "channel"])
def test_a_cut_at_a_whole_chunk_changes_no_bit(name):
    dtype = np.dtype(np.float32)
    case, tokens = case_of(name, dtype), 150
    x = case.x(1, tokens, dtype=dtype)

    def read(cuts: list[int]) -> list[np.ndarray]:
        held = put(case.past(1, dtype)), put(case.state(1))
        found = []
        for start, end in zip([0, *cuts], [*cuts, tokens], strict=True):
            own = {"starts": put(np.array([start])), "lengths": put(np.array([end - start]))}
            part = put(np.ascontiguousarray(x[:, start:end]))
            y = delta_prompt.delta_prompt(part, case.layer, *held, slots=put(np.array([0])), **own)
            found.append(get(y))
        return [np.concatenate(found, 1), *map(get, held)]

    whole = read([])
    for cuts in ([64], [64, 128]):
        for a, b in zip(whole, read(cuts), strict=True):
            assert (a == b).all()


def test_hidden_tokens_change_nothing():
    dtype = np.dtype(np.float32)
    case, tokens = case_of("head", dtype), 70
    x = case.x(2, tokens, dtype=dtype)
    mask = np.ones((2, tokens), bool)
    mask[0, :5], mask[1, 66:] = False, False
    y = get(delta_prompt.delta_prompt(put(x), case.layer, mask=strided(mask)))
    wanted, _ = case.rule.sequence(EXACT, case.weights, x, None, Seen(mask), None)
    assert_close(y[mask], wanted[mask].astype(np.float32), dtype, length=1024)

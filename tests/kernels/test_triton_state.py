"""Triton's steps of Mamba-2 and of short convolutions."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from .cases import assert_close, normal, unit
from .tensors import get, needs_triton, put, strict

from dualinfer.blocks.short_convolution import ShortConvolution  # isort: skip
from dualinfer.blocks.state_space import StateSpace  # isort: skip
from dualinfer.kernels.triton.conv_token import conv_token  # isort: skip
from dualinfer.kernels.triton.state_token import state_token  # isort: skip
from dualinfer.model.spec import Norm  # isort: skip
from dualinfer.ops.contract import Seen  # isort: skip
from dualinfer.ops.exact import MATHS  # isort: skip

pytestmark = [needs_triton, pytest.mark.usefixtures(strict.__name__)]
EXACT: Any = SimpleNamespace(maths=MATHS)
# Factors are powers of two: NumPy does not round products of bfloat16.
WHOLE = StateSpace(6, 24, 2, 20, 4, "silu", Norm("rms", 1e-5), 144)
SPACES = {
    "normed whole": WHOLE,
    "by groups, gated last": replace(WHOLE, normed=72, gated_last=True, limits=(0.01, 0.6)),
    "alone": replace(WHOLE, groups=6, taps=2, norm=None, normed=0),
    "scaled": replace(
        *(WHOLE,),
        groups=1,
        norm=None,
        normed=0,
        scales=(0.5, 2.0, 0.25, 4.0, 0.5),
        out_scale=0.3,
    ),
    "scaled, normed": replace(WHOLE, scales=(0.5, 2.0, 0.25, 4.0, 0.5), out_scale=1.7),
}


WIDE = np.dtype(np.float32)
SILENT: Any = SimpleNamespace(starts_early=lambda rows: False)


def weights_of(own: StateSpace, dtype: np.dtype, biased: bool) -> dict[str, np.ndarray]:
    w = {
        "recurrence_kernel": normal(1, own.channels, own.taps, dtype=dtype, scale=0.7),
        "recurrence_kernel_bias": normal(2, own.channels, dtype=dtype),
        "state_step_bias": normal(3, own.heads, dtype=WIDE),
        "state_decay": normal(4, own.heads, dtype=WIDE),
        "state_skip": normal(5, own.heads, dtype=WIDE),
        "state_norm.weight": normal(6, own.width, dtype=dtype),
    }
    if not biased:
        del w["recurrence_kernel_bias"]
    return w


@pytest.mark.parametrize("name", SPACES)
def test_a_token_moves_the_slots_that_are_named(dtype, name):
    own, wide = SPACES[name], dtype if name == "scaled" else WIDE  # states may be kept in 16 bits
    w = weights_of(own, dtype, name != "alone")
    x = normal(7, 3, own.width + own.channels + own.heads, dtype=dtype)
    past = normal(8, 4, own.taps - 1, own.channels, dtype=dtype)
    state = normal(9, 4, own.heads, own.head_dim, own.state, dtype=wide)
    moves = np.array([True, False, True])
    import torch

    held = put(past), put(state)
    counters = torch.zeros(3 * own.groups, dtype=torch.int32, device=held[0].device)
    cache: Any = SimpleNamespace(arrays=held)
    assert own.is_fused
    weights = {key: put(value) for key, value in w.items()}
    launch = own.token_launch(SILENT, weights, put(x), cache, put(moves))
    assert launch is not None and launch.function is state_token
    y = get(launch.function(*launch.arguments, **launch.options, counters=counters))
    assert not counters.any()
    new_past, new_state = map(get, held)
    for slot in (0, 2):
        before = past[slot : slot + 1], state[slot : slot + 1].astype(np.float64)
        wanted, (kept, last) = own.token(EXACT, w, x[slot : slot + 1, None], before)
        assert_close(y[slot], wanted[0, 0].astype(np.float32), dtype, length=256)
        assert (new_past[slot] == kept[0].astype(dtype)).all()
        assert_close(new_state[slot], last[0].astype(np.float32), wide, length=256)
    assert (y[1] == 0).all()
    for slot in (1, 3):
        assert (new_past[slot] == past[slot]).all()
        assert (new_state[slot] == state[slot]).all()


def run(own: StateSpace, w: dict[str, np.ndarray], x: np.ndarray, held: Any, **how: Any) -> Any:
    """What kernels give of sequences, and what `held`, (past, state) or None, has then."""
    weights = {key: put(value) for key, value in w.items()}
    cache: Any = None if held is None else SimpleNamespace(arrays=held)
    numbers = {key: how.get(key) for key in ("mask", "slots", "lengths", "starts")}
    numbers = {key: None if value is None else put(value) for key, value in numbers.items()}
    launch = own.sequence_launch(SILENT, weights, put(x), cache=cache, **numbers)
    assert launch is not None
    return get(launch.function(*launch.arguments, **launch.options))


@pytest.mark.parametrize("name", SPACES)
def test_rows_go_on_from_their_slots(dtype, name):
    own, tokens = SPACES[name], 75
    w = weights_of(own, dtype, name != "alone")
    x = normal(7, 3, tokens, own.width + own.channels + own.heads, dtype=dtype)
    past = normal(8, 5, own.taps - 1, own.channels, dtype=dtype)
    wide = dtype if name == "scaled" else WIDE
    state = normal(9, 5, own.heads, own.head_dim, own.state, dtype=wide, scale=0.3)
    slots, starts, lengths = np.array([3, 1, 7]), np.array([64, 0, 0]), np.array([75, 66, 1])
    held = put(past), put(state)
    y = run(own, w, x, held, slots=slots, starts=starts, lengths=lengths)
    new_past, new_state = map(get, held)
    rounds = {"roundings": 8} if unit(dtype) > 1e-6 else {}
    for b in (0, 1):
        slot, before = slots[b], float(starts[b] > 0)
        states = past[slot : slot + 1] * dtype.type(before), state[slot : slot + 1]
        states = states[0], states[1].astype(np.float64) * before
        wanted = []
        for token in x[b, : lengths[b]]:
            one, states = own.token(EXACT, w, token[None, None], states)
            wanted.append(one[0, 0])
        found = y[b, : lengths[b]]
        assert_close(found, np.stack(wanted).astype(np.float32), dtype, length=1024, **rounds)
        assert (new_past[slot] == states[0][0].astype(dtype)).all()
        error = np.abs(new_state[slot].astype(np.float64) - states[1][0])
        assert error.max() <= (4e-2 if rounds else 1e-5) * np.abs(states[1][0]).max()
    for slot in (0, 2, 4):
        assert (new_past[slot] == past[slot]).all()
        assert (new_state[slot] == state[slot]).all()


def test_a_cut_at_a_whole_chunk_changes_no_bit():
    own, tokens = SPACES["scaled, normed"], 150
    w = weights_of(own, WIDE, True)
    x = normal(7, 1, tokens, own.width + own.channels + own.heads, dtype=WIDE)

    def read(cuts: list[int]) -> list[np.ndarray]:
        held = (
            put(np.zeros((1, own.taps - 1, own.channels), WIDE)),
            put(np.zeros((1, own.heads, own.head_dim, own.state), WIDE)),
        )
        found = []
        for start, end in zip([0, *cuts], [*cuts, tokens], strict=True):
            numbers = {"starts": np.array([start]), "lengths": np.array([end - start])}
            part = np.ascontiguousarray(x[:, start:end])
            found.append(run(own, w, part, held, slots=np.array([0]), **numbers))
        return [np.concatenate(found, 1), *map(get, held)]

    whole = read([])
    for a, b in zip(whole, read([64, 128]), strict=True):
        assert (a == b).all()


def test_hidden_tokens_change_nothing():
    own, tokens = SPACES["by groups, gated last"], 70
    w = weights_of(own, WIDE, True)
    x = normal(7, 2, tokens, own.width + own.channels + own.heads, dtype=WIDE)
    mask = np.ones((2, tokens), bool)
    mask[0, :5], mask[1, 66:] = False, False
    y = run(own, w, x, None, mask=mask)
    wanted, _ = own.sequence(EXACT, w, x, None, Seen(mask), None)
    assert_close(y[mask], wanted[mask].astype(np.float32), WIDE, length=1024)


@pytest.mark.parametrize(("taps", "bias"), [(3, True), (2, False), (5, False)])
def test_a_token_is_convolved_in_the_slots_that_are_named(dtype, taps, bias):
    own = ShortConvolution(300, taps)  # channels of two programs
    w = {"recurrence_kernel": normal(1, own.width, taps, dtype=dtype, scale=0.7)}
    if bias:
        w["recurrence_kernel_bias"] = normal(2, own.width, dtype=dtype)
    x, past = normal(3, 3, 3 * own.width, dtype=dtype), normal(4, 4, taps - 1, 300, dtype=dtype)
    moves = np.array([True, False, True])
    held = put(past)
    cache: Any = SimpleNamespace(arrays=(held,))
    weights = {key: put(value) for key, value in w.items()}
    launch = own.token_launch(SILENT, weights, put(x), cache, put(moves))
    assert own.is_fused and launch is not None and launch.function is conv_token
    y = get(launch.function(*launch.arguments, **launch.options))
    kept = get(held)
    for slot in (0, 2):
        wanted, (last,) = own.token(EXACT, w, x[slot : slot + 1, None], (past[slot : slot + 1],))
        assert_close(y[slot], wanted[0, 0].astype(np.float32), dtype, length=256)
        assert_close(kept[slot], last[0].astype(np.float32), dtype, length=2)
    assert (y[1] == 0).all()
    for slot in (1, 3):
        assert (kept[slot] == past[slot]).all()
    assert not replace(own, taps=1).is_fused


def test_sizes_that_the_kernel_does_not_know_are_plain():
    assert WHOLE.is_fused
    for other in ({"taps": 1}, {"activation": "gelu"}, {"head_dim": 256, "state": 128}):
        assert not replace(WHOLE, **other).is_fused, other
    assert not replace(WHOLE, heads=3, normed=144).is_fused  # devices share what is normed
    assert not replace(WHOLE, head_dim=4096, normed=6 * 4096, state=2).is_fused
    assert math.isinf(WHOLE.limits[1])

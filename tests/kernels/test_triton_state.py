"""Triton's steps of Mamba-1, Mamba-2 and short convolutions."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from .cases import assert_close, normal, unit
from .tensors import get, needs_triton, put, strict

from dualinfer.backends.torch.maths import MATHS as torch_maths  # isort: skip
from dualinfer.blocks.selective_scan import SelectiveScan  # isort: skip
from dualinfer.blocks.short_convolution import ShortConvolution  # isort: skip
from dualinfer.blocks.state_space import StateSpace  # isort: skip
from dualinfer.kernels.triton import linear  # isort: skip
from dualinfer.kernels.triton.launch import has_pdl  # isort: skip
from dualinfer.model.spec import Norm  # isort: skip
from dualinfer.ops.contract import ALONE, Seen, StateRows, Unnormed  # isort: skip
from dualinfer.ops.exact import MATHS  # isort: skip
from dualinfer.ops.recurrence_kernels import Launch  # isort: skip
from dualinfer.ops.norms import plain_norm  # isort: skip

pytestmark = [needs_triton, pytest.mark.usefixtures(strict.__name__)]
# Factors are powers of two: NumPy does not round products of bfloat16.
WHOLE = StateSpace(6, 24, 2, 20, 4, "silu", Norm("rms", 1e-5), 144)
SPACES: dict[str, Any] = {
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
    "channels": SelectiveScan(40, 6, 5, 4, "silu"),  # of two programs, the second not whole
    "channels, normed": SelectiveScan(32, 3, 16, 2, "silu", 1e-5, "weighted"),
}


WIDE = np.dtype(np.float32)
SHORT = "scaled", "channels"  # whose states are kept in 16 bits, where x has as many


class Kernels:
    """What a recurrence's kernels ask of ops: launches in place, and products that are rounded."""

    def __init__(self, counters: Any = None, early: bool = False):
        self.counters, self.launched, self.early = counters, [], early
        self.maths, self.split = torch_maths, None

    def starts_early(self, rows: int) -> bool:
        return self.early

    def launch(self, launch: Launch, written: Any = (), counts: bool = False) -> Any:
        self.launched.append(launch.function.__name__)
        how = {"counters": self.counters} if counts else {}
        return launch.function(*launch.arguments, **launch.options, **how), written

    def norm(self, x: Any, norm: Any) -> Any:
        return plain_norm(self.maths, x, norm)

    def linear(self, x: Any, weight: Any, epilogue: Any = ALONE) -> Any:
        x = x if epilogue.norm is None else self.norm(x, epilogue.norm)
        return (x.float()[..., None, :] * weight.float()).sum(-1).to(x.dtype)  # by itself each

    def sum(self, x: Any) -> Any:
        return x


class Exact(Kernels):
    """The same in float64."""

    maths: Any = MATHS

    def __init__(self) -> None:
        pass

    def linear(self, x: Any, weight: Any, epilogue: Any = ALONE) -> Any:
        return (x if epilogue.norm is None else self.norm(x, epilogue.norm)) @ weight.T


EXACT: Any = Exact()


def cache_of(*arrays: Any) -> Any:
    return SimpleNamespace(arrays=arrays, of=cache_of)


def weights_of(own: Any, dtype: np.dtype, biased: bool) -> dict[str, np.ndarray]:
    channels = own.layout(1)[0].shape[2]
    w = {"recurrence_kernel": normal(1, channels, own.taps, dtype=dtype, scale=0.7)}
    if biased:
        w["recurrence_kernel_bias"] = normal(2, channels, dtype=dtype)
    if isinstance(own, SelectiveScan):
        narrow = {"scan_read.weight": (own.rank + 2 * own.state, channels)}
        narrow["scan_step.weight"] = channels, own.rank
        w |= {name: normal(3, *shape, dtype=dtype, scale=0.3) for name, shape in narrow.items()}
        sizes = {"dt": own.rank, "b": own.state, "c": own.state}
        w |= {f"scan_{k}_norm.weight": normal(4, size, dtype=dtype) for k, size in sizes.items()}
        wide = {"step_bias": (channels,), "skip": (channels,), "decay": (channels, own.state)}
        return w | {f"scan_{k}": normal(5, *shape, dtype=WIDE) for k, shape in wide.items()}
    for seed, name in enumerate(("step_bias", "decay", "skip"), 3):
        w[f"state_{name}"] = normal(seed, own.heads, dtype=WIDE)
    return w | {"state_norm.weight": normal(6, own.width, dtype=dtype)}


def given_to(own: Any, *shape: int, dtype: np.dtype) -> np.ndarray:
    """Projected tokens of a recurrence, [..., W]."""
    scan = isinstance(own, SelectiveScan)
    width = 2 * own.width if scan else own.width + own.channels + own.heads
    return normal(7, *shape, width, dtype=dtype)


def held_by(own: Any, slots: int, dtype: np.dtype, wide: np.dtype) -> list[np.ndarray]:
    """What came before, and states, of slots."""
    past, state = own.layout(slots)
    return [normal(8, *past.shape, dtype=dtype), normal(9, *state.shape, dtype=wide, scale=0.5)]


@pytest.mark.parametrize("name", SPACES)
def test_a_token_moves_the_slots_that_are_named(dtype, name):
    own, wide = SPACES[name], dtype if name in SHORT else WIDE
    w = weights_of(own, dtype, name != "alone")
    x = given_to(own, 3, dtype=dtype)
    past, state = held_by(own, 4, dtype, wide)
    moves = np.array([True, False, True])
    import torch

    counters = torch.zeros(3 * 6, dtype=torch.int32, device=put(x).device)
    assert own.is_fused
    weights = {key: put(value) for key, value in w.items()}
    for early in {False, has_pdl(counters)}:
        held = put(past), put(state)
        cache, kernels = cache_of(*held), Kernels(counters, early)
        found = own.fused_token(kernels, weights, put(x), cache, put(moves))
        assert found is not None and not counters.any()
        y = get(found[0])
        new_past, new_state = map(get, held)
        for slot in (0, 2):
            before = past[slot : slot + 1], state[slot : slot + 1].astype(np.float64)
            wanted, (kept, last) = own.token(EXACT, w, x[slot : slot + 1, None], before)
            # Products of what was convolved are rounded before channels are scanned.
            near = {"length": 1024, "roundings": 8} if "channels" in name else {"length": 256}
            assert_close(y[slot], wanted[0, 0].astype(np.float32), dtype, **near)
            assert (new_past[slot] == kept[0].astype(dtype)).all()
            error = np.abs(new_state[slot].astype(np.float64) - last[0])
            assert error.max() <= (4 * unit(dtype) + 4e-6) * np.abs(last[0]).max()
        assert (y[1] == 0).all()
        for slot in (1, 3):
            assert (new_past[slot] == past[slot]).all()
            assert (new_state[slot] == state[slot]).all()


def test_many_slots_at_once_are_a_few_at_a_time(dtype):
    """Of many a program is one warp, which has more of a head."""
    own = StateSpace(4, 32, 2, 20, 4, "silu", Norm("rms", 1e-5), 128)
    w = {key: put(value) for key, value in weights_of(own, dtype, True).items()}
    x, (past, state) = given_to(own, 9, dtype=dtype), held_by(own, 9, dtype, WIDE)
    import torch

    counters = torch.zeros(9 * own.groups, dtype=torch.int32, device=put(x).device)
    moves = np.arange(9) != 4

    def moved(rows: slice) -> list[np.ndarray]:
        held = put(past[rows]), put(state[rows])
        found = own.fused_token(
            Kernels(counters), w, put(x[rows]), cache_of(*held), put(moves[rows])
        )
        assert found is not None and not counters.any()
        return [get(part) for part in (found[0], *held)]

    few = [moved(slice(at, at + 3)) for at in (0, 3, 6)]
    y, new_past, new_state = moved(slice(9))
    assert_close(y, np.concatenate([part[0] for part in few]), dtype, length=32)
    assert (new_past == np.concatenate([part[1] for part in few])).all()
    assert (new_state == np.concatenate([part[2] for part in few])).all()
    assert (new_state[4] == state[4]).all() and (new_state[3] != state[3]).any()


def test_the_norm_of_a_single_slot_is_left_to_the_product(dtype):
    own = SPACES["normed whole"]
    w = weights_of(own, dtype, True)
    x, held = given_to(own, 1, dtype=dtype), held_by(own, 1, dtype, WIDE)
    out = normal(3, 40, own.width, dtype=dtype, scale=0.1)
    import torch

    kernels = Kernels(torch.zeros(own.groups, dtype=torch.int32, device=put(out).device))
    weights: dict[str, Any] = {key: put(value) for key, value in w.items()}
    weights["recurrence_out.weight"] = SimpleNamespace(scheme=None)
    state = cache_of(*map(put, held))
    found, _ = own.fused_token(kernels, weights, put(x), state, put(np.array([True])))
    assert isinstance(found, Unnormed) and found.residual is None
    kernels.split = ...  # devices share the heads, and what is normed is a share
    shared, _ = own.fused_token(kernels, weights, put(x), state, put(np.array([True])))
    assert not isinstance(shared, Unnormed)
    y = get(linear.linear(found.y, put(out), norm=linear.NormArguments.of(found.norm)))
    normed, _ = own.token(EXACT, w, x[:, None], (held[0], held[1].astype(np.float64)))
    wanted = normed[:, 0].astype(np.float64) @ out.astype(np.float64).T
    assert_close(y, wanted.astype(np.float32), dtype, length=256, roundings=2)


def run(own: Any, w: dict[str, np.ndarray], x: np.ndarray, held: Any, **how: Any) -> Any:
    """What kernels give of sequences, and what `held`, (past, state) or None, has then."""
    weights = {key: put(value) for key, value in w.items()}
    cache = None if held is None else cache_of(*held)
    numbers = (how.get(key) for key in ("mask", "slots", "lengths", "starts"))
    mask, *rest = (None if value is None else put(value) for value in numbers)
    found = own.fused_sequence(Kernels(), weights, put(x), mask, StateRows(cache, *rest))
    assert found is not None
    return get(found[0])


@pytest.mark.parametrize("name", SPACES)
def test_rows_go_on_from_their_slots(dtype, name):
    own, tokens = SPACES[name], 75
    w = weights_of(own, dtype, name != "alone")
    x = given_to(own, 3, tokens, dtype=dtype)
    past, state = held_by(own, 5, dtype, dtype if name in SHORT else WIDE)
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


@pytest.mark.parametrize(
    ("name", "cuts"), [("scaled, normed", [64, 128]), ("channels, normed", [33, 34])]
)
def test_a_cut_at_a_whole_chunk_changes_no_bit(name, cuts):  # of channels at any token
    own, tokens = SPACES[name], cuts[-1] + 22
    w = weights_of(own, WIDE, True)
    x = given_to(own, 1, tokens, dtype=WIDE)

    def read(cuts: list[int]) -> list[np.ndarray]:
        held = [put(np.zeros(part.shape, WIDE)) for part in own.layout(1)]
        found = []
        for start, end in zip([0, *cuts], [*cuts, tokens], strict=True):
            numbers = {"starts": np.array([start]), "lengths": np.array([end - start])}
            part = np.ascontiguousarray(x[:, start:end])
            found.append(run(own, w, part, held, slots=np.array([0]), **numbers))
        return [np.concatenate(found, 1), *map(get, held)]

    whole = read([])
    for a, b in zip(whole, read(cuts), strict=True):
        assert (a == b).all()


@pytest.mark.parametrize("name", ["by groups, gated last", "channels"])
def test_hidden_tokens_change_nothing(name):
    own, tokens = SPACES[name], 70
    w = weights_of(own, WIDE, True)
    x = given_to(own, 2, tokens, dtype=WIDE)
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
    weights = {key: put(value) for key, value in w.items()}
    found = own.fused_token(Kernels(), weights, put(x), cache_of(held), put(moves))
    assert own.is_fused and found is not None
    y, kept = get(found[0]), get(held)
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
    for other in ({"taps": 1}, {"activation": "gelu"}, {"state": 128}):
        assert not replace(SPACES["channels"], **other).is_fused, other
    assert not replace(WHOLE, head_dim=4096, normed=6 * 4096, state=2).is_fused
    assert math.isinf(WHOLE.limits[1])

"""The sampling kernels against the plain sampler and the runner's bookkeeping."""

import copy
from dataclasses import fields

import numpy as np
import pytest

from dualinfer.backends.base import MAX_STEPS, NO_TOKEN, Request, Sampling, SamplingFeatures
from dualinfer.backends.slots import sampling_rows

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from dualinfer.backends.torch import default_device, sampler  # noqa: E402
from dualinfer.kernels.triton import sampling, threefry  # noqa: E402

from .implementations import meaning  # noqa: E402

WAYS = {
    "greedy": [{"do_sample": False}],
    "noise": [{}, {"temperature": 0.3}, {"temperature": 1e-38}, {"temperature": 40.0}],
    "top-k": [{"top_k": k, "temperature": t} for k in (1, 2, 50, 999, 5000) for t in (1.0, 30.0)],
    "top-p": [{"top_p": p, "temperature": t} for p in (0.0, 0.3, 0.9, 0.999) for t in (0.5, 9.0)],
    "min-p": [{"min_p": p} for p in (0.001, 0.1, 1.0)],
    "all": [
        {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.4},
        {"top_k": 700, "top_p": 0.5, "temperature": 4.0, "repetition_penalty": 0.7},
        {"top_k": 3, "top_p": 0.99},
        {"temperature": 1e-38, "top_k": 5, "top_p": 0.9},
        {"do_sample": False, "repetition_penalty": 2.0},
        {"min_p": 0.05, "min_new_tokens": 3, "eos_ids": (0,)},
        {"do_sample": False, "min_new_tokens": 3, "eos_ids": (0,)},
    ],
}
# The interpreter divides in NumPy, which warns of what IEEE 754 defines.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in .*:RuntimeWarning")


@pytest.fixture(scope="module")
def device():
    return default_device()


def request_of(way: dict, index: int, max_new_tokens: int = 50) -> Request:
    options = {k: v for k, v in way.items() if k not in ("min_new_tokens", "eos_ids")}
    return Request(
        tokens=np.array([1, 2], np.int32),
        max_new_tokens=max_new_tokens,
        min_new_tokens=way.get("min_new_tokens", 0),
        eos_ids=way.get("eos_ids", ()),
        sampling=Sampling(**{"do_sample": True} | options, seed=(index << 40) + 77 * index),
    )


def state_of(requests: list[Request], vocab: int, device, seed: int = 0) -> sampler.SlotState:
    """Active slots in the middle of their text; a tenth of the vocabulary seen."""
    rng = np.random.default_rng(seed)
    count = len(requests)
    state = sampler.SlotState.make(count, 2, vocab, device)
    state.write(torch.arange(count, device=device), sampling_rows(requests, 2))
    state.active[:] = True
    state.length[:] = torch.from_numpy(rng.integers(2, 4000, count))
    state.new[:] = torch.from_numpy(rng.integers(0, 6, count))
    state.seen = torch.from_numpy(rng.random((count, vocab)) < 0.1).to(device)
    return state


def logits_of(rows: int, vocab: int, device, seed: int = 0, scale: float = 3.0):
    x = np.random.default_rng(seed).standard_normal((rows, vocab)).astype(np.float32) * scale
    return torch.from_numpy(x).to(device)


def assert_same_tokens(logits, requests, device, **more) -> None:
    features = SamplingFeatures.of(requests)
    state = state_of(requests, logits.shape[1], device)
    expected = sampler.sample(logits.float(), state, state.length + 1, features)
    found = sampling.sample(logits, state, state.length + 1, features, **more)
    assert found.dtype == torch.int64
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("vocab", [1, 63, 1000])
@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_tokens_are_those_of_the_plain_sampler(ways, vocab, device):
    """1000 is two chunks, the last one not full."""
    ways = ways * 2 if vocab < 1000 else ways
    requests = [request_of(way, i) for i, way in enumerate(ways)]
    assert_same_tokens(logits_of(len(requests), vocab, device, vocab), requests, device)


@pytest.mark.parametrize("way", [{"do_sample": False}, {}, {"top_k": 50, "top_p": 0.9}], ids=str)
def test_a_real_vocabulary(way, device):
    assert_same_tokens(logits_of(1, 50257, device), [request_of(way, 3)], device)


def test_tokens_are_those_of_the_reference(device):
    ways = [way for way in WAYS["all"] if way.get("temperature", 1) > 1e-6]
    requests = [request_of(way, i) for i, way in enumerate(ways)]
    logits = logits_of(len(requests), 700, device, 5)
    state = state_of(requests, 700, device)
    position = state.length + 1
    held = {f.name: getattr(state, f.name) for f in fields(state)}
    columns = {name: x.cpu().numpy() for name, x in held.items() if x is not None}
    plain = type("State", (), columns)
    expected = meaning.sample(
        logits.cpu().numpy(), plain, position.cpu().numpy(), SamplingFeatures.of(requests)
    )
    found = sampling.sample(logits, state, position, SamplingFeatures.of(requests))
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["integers", "equal", "mostly hidden", "nearly equal", "bfloat16"])
def test_ties_stay_together(kind, device):
    ways = WAYS["top-k"][2:6] + WAYS["top-p"][2:6] + WAYS["all"][:5]
    requests = [request_of(way, i) for i, way in enumerate(ways)]
    logits = logits_of(len(ways), 600, device, 6)
    if kind == "integers":
        logits = logits.round()
    elif kind == "equal":
        logits[:] = -0.5
        logits[:, ::2] = logits[:, 1::2]
    elif kind == "mostly hidden":
        logits[:, 5:590] = -torch.inf
    elif kind == "nearly equal":
        logits *= 1e-9
    else:
        logits = logits.bfloat16()
    assert_same_tokens(logits, requests, device)


def test_zeros_of_either_sign_are_equal(device):
    logits = torch.full((1, 1200), -1.0, device=device)
    logits[0, 3], logits[0, 700] = -0.0, 0.0
    assert_same_tokens(logits, [request_of({"do_sample": False}, 0)], device)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_gives_a_token_of_the_vocabulary(value, device):
    ways = [{"do_sample": False}, {}, {"top_k": 5, "top_p": 0.9, "min_p": 0.01}]
    logits = logits_of(len(ways), 600, device, 7)
    logits[:, 555 if value != -np.inf else slice(None)] = value  # in the second chunk
    requests = [request_of(way, i) for i, way in enumerate(ways)]
    state = state_of(requests, 600, device)
    for features in (SamplingFeatures(), SamplingFeatures(True), SamplingFeatures(True, True)):
        found = sampling.sample(logits, state, state.length, features)
        assert ((found >= 0) & (found < 600)).all()
        if np.isnan(value) or (value > 0 and not features.noise):
            assert (found == 555).all()


def test_rows_may_be_strided_and_the_workspace_larger(device):
    wide = logits_of(9, 1300, device)
    requests = [request_of(way, i) for i, way in enumerate(WAYS["all"][:4])]
    work = sampling.make_workspace(16, 1200, device)
    for _ in range(2):
        assert_same_tokens(wide[1::2, :1200], requests, device, workspace=work)


@pytest.mark.parametrize("ways", [WAYS["noise"], WAYS["all"]], ids=["noise", "filters"])
def test_a_row_does_not_depend_on_the_batch(ways, device):
    requests = [request_of(way, i) for i, way in enumerate(ways)]
    features = SamplingFeatures.of(requests)
    state, logits = state_of(requests, 1000, device), logits_of(len(ways), 1000, device)
    together = sampling.sample(logits, state, state.length, features)
    assert torch.equal(together, sampling.sample(logits, state, state.length, features))
    some = torch.tensor([2, 0], device=device)
    part = state.take(some)
    assert torch.equal(together[some], sampling.sample(logits[some], part, part.length, features))


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_steps_book_what_the_plain_ones_book(ways, device):
    """Slots end at an EOS, at their last token, or are free; the rest go on."""
    count, vocab = 6, 130
    ends = [{"eos_ids": (4,)}, {"eos_ids": (9, 4)}, {}]
    requests = [
        request_of(ends[i % 3] | ways[i % len(ways)], i, max_new_tokens=(1, 2, 50)[i // 2 % 3])
        for i in range(count)
    ]
    features = SamplingFeatures.of(requests)
    state = state_of(requests, vocab, device, 1)
    state.active[3] = False
    state.seen[3, state.last[3]] = True  # as where it has ended
    wanted = copy.deepcopy(state)
    work = sampling.make_workspace(count, vocab, device)
    ring = torch.full((MAX_STEPS, count + 2), -7, device=device)
    expected = torch.full((MAX_STEPS, count), -7, device=device)
    step, steps = torch.zeros(2, count, dtype=torch.int64, device=device)
    for i in range(2):
        logits = logits_of(count, vocab, device, i)
        logits[:, 4] += (0, 20)[i]
        sampler.advance(logits, wanted, features, expected, steps)
        sampling.sample_step(logits, state, features, ring, step, workspace=work)
        for f in fields(state):
            own, other = getattr(state, f.name), getattr(wanted, f.name)
            assert own is other is None or torch.equal(own, other), f.name
    assert torch.equal(ring[:, :count], expected)
    assert (ring[:, count:] == -7).all()
    assert (step == 2).all()
    assert not wanted.active.all() and (expected[1] == NO_TOKEN).any()


def test_a_slot_that_takes_no_step_has_seen_what_it_had(device):
    """As one whose prompt is being read: what lies in `last` is an older sequence's."""
    state = state_of([request_of({"do_sample": False}, 0)], 63, device)
    state.active[0], state.last[0] = False, 7
    seen, work = state.seen.clone(), sampling.make_workspace(1, 63, device)
    ring, step = torch.zeros((2, 1), dtype=torch.int64, device=device), torch.zeros(1).long()
    sampling.sample_step(
        logits_of(1, 63, device), state, SamplingFeatures(), ring, step.to(device), workspace=work
    )
    assert torch.equal(state.seen, seen) and int(ring[0, 0]) == NO_TOKEN


def test_steps_beyond_the_ring_are_not_written(device):
    state = state_of([request_of({"do_sample": False}, 0)], 63, device)
    work = sampling.make_workspace(1, 63, device)
    ring = torch.full((2, 1), -7, device=device)
    step = torch.full((1,), 2, device=device)
    sampling.sample_step(
        logits_of(1, 63, device), state, SamplingFeatures(), ring, step, workspace=work
    )
    assert (ring == -7).all()


def test_workspaces_end_as_they_began(device):
    work = sampling.make_workspace(10, 1000, device)
    requests = [request_of(way, i) for i, way in enumerate(WAYS["top-k"])]
    assert_same_tokens(logits_of(10, 1000, device), requests, device, workspace=work)
    assert not work.counters.any() and not work.coarse.any() and not work.fine.any()


def test_wrong_shapes_are_refused(device):
    state = state_of([request_of({}, 0)] * 2, 63, device)
    logits = logits_of(2, 63, device)
    work = sampling.make_workspace(2, 64, device)
    with pytest.raises(ValueError, match="the workspace was made for up to 2 rows of 64"):
        sampling.sample(logits, state, state.length, SamplingFeatures(), workspace=work)
    with pytest.raises(ValueError, match="position"):
        sampling.sample(logits, state, state.length[:1], SamplingFeatures())
    with pytest.raises(ValueError, match=r"state\.active"):
        sampling.sample(logits[:1], state, state.length[:1], SamplingFeatures())
    with pytest.raises(ValueError, match="contiguous last axis"):
        sampling.sample(logits[:, ::2], state, state.length, SamplingFeatures())
    with pytest.raises(ValueError, match="Use the plain sampler"):
        sampling.make_workspace(1, 1 << 19, device)


def noise_kernel():
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(out_ptr, words_ptr, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        value = tl.where(at % 2 == 0, at * 8, 8388607 - at)
        uniform = (value.to(tl.float32) + 0.5) * (1.0 / 8388608)
        tl.store(out_ptr + at, -threefry.log(-threefry.log(uniform)))
        key = at.to(tl.uint32)
        low, high = threefry.threefry2x32(key * 2654435761, key + 7, key ^ 99, key << 3)
        tl.store(words_ptr + at, low.to(tl.int64))
        tl.store(words_ptr + tl.num_programs(0) * BLOCK + at, high.to(tl.int64))

    return kernel


def test_noise_and_words_are_those_of_the_reference(device):
    """Values all over those that the noise can take, those next to 0 and to 1 among them."""
    count, block = 1 << 20, 1 << 18 if device.type == "cpu" else 1 << 10
    noise = torch.empty(count, device=device)
    words = torch.empty(2, count, dtype=torch.int64, device=device)
    noise_kernel()[(count // block,)](noise, words, BLOCK=block)
    key = np.arange(count, dtype=np.uint32)
    values = np.where(key % 2 == 0, key * 8, 8388607 - key)
    expected = -np.log(-np.log((values + 0.5) / 2**23))
    assert np.abs(noise.cpu().numpy().astype(np.float64) - expected).max() < 2e-6
    wanted = meaning.threefry2x32(key * np.uint32(2654435761), key + 7, key ^ 99, key << 3)
    np.testing.assert_array_equal(words.cpu().numpy(), np.stack(wanted).astype(np.int64))

"""Exchanges between ranks: what one rank sends, and what it makes of what the others sent.

The interpreter runs one rank at a time: the others' words are written by NumPy, as the protocol
says, before the rank reads them. Several GPUs at once: tests/test_multi_gpu_torch.py.
"""

import numpy as np
import pytest

from .tensors import DEVICE, get, needs_triton, put, torch

pytestmark = needs_triton

from dualinfer.kernels.triton.exchange import Mailbox, gather_ranks, sum_ranks  # noqa: E402

CAPACITY = 1300


def mailboxes(size, done=0):
    """One for each rank, all in this process's memory, after `done` exchanges."""
    words = [torch.zeros(2, size, CAPACITY, dtype=torch.int64, device=DEVICE) for _ in range(size)]
    peers = torch.tensor([w.data_ptr() for w in words], device=DEVICE)
    return [
        Mailbox(
            rank,
            size,
            words[rank],
            peers,
            torch.tensor([done, 0, 0], dtype=torch.int32, device=DEVICE),
            10,
        )
        for rank in range(size)
    ]


def words_of(values, number):
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.int64)
    return torch.from_numpy(bits | (number << 32)).to(DEVICE)


def deliver(box, sender, values, number):
    """What rank `sender` writes to `box` in exchange `number`."""
    flat = np.asarray(values, np.float32).reshape(-1)
    box.words[number % 2, sender, : flat.size] = words_of(flat, number)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("size", "rank", "shape"), [(2, 0, (1, 63)), (3, 2, (2, 600)), (4, 1, (1, 1, 1000))]
)
def test_sum_adds_every_ranks_values_bias_and_residual(size, rank, shape, dtype):
    random = np.random.default_rng(0)
    xs = random.standard_normal((size, *shape), np.float32)
    bias, residual = random.standard_normal(shape[-1], np.float32), random.standard_normal(shape)
    boxes = mailboxes(size, done=6)
    for sender in range(size):
        deliver(boxes[rank], sender, xs[sender], 7)
    added = [put(a.astype(np.float32)).to(dtype) for a in (bias, residual)]
    y = sum_ranks(put(xs[rank]), boxes[rank], *added, dtype=dtype)
    expected = xs.sum(0) + get(added[0].float()) + get(added[1].float())
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    np.testing.assert_allclose(get(y.float()), expected, rtol=tolerance, atol=tolerance)
    assert boxes[rank].state.tolist() == [7, 0, 0]
    for peer in range(size):
        found = boxes[peer].words[1, rank, : xs[rank].size]
        if peer != rank:
            assert torch.equal(found, words_of(xs[rank].reshape(-1), 7))


def test_ranks_have_the_same_bits_and_take_turns_with_two_sets_of_words():
    size, shape = 3, (1, 700)
    boxes = mailboxes(size)
    for number in (1, 2, 3):
        xs = np.random.default_rng(number).standard_normal((size, *shape), np.float32)
        for box in boxes:
            for sender in range(size):
                deliver(box, sender, xs[sender], number)
        results = [sum_ranks(put(xs[r]), boxes[r]) for r in range(size)]
        assert all(torch.equal(results[0], other) for other in results)
        np.testing.assert_allclose(get(results[0]), xs.sum(0), rtol=1e-5, atol=1e-6)
    assert [box.state.tolist() for box in boxes] == [[3, 0, 0]] * size


def test_a_rank_that_sends_nothing_is_given_up_and_noted():
    box, _other = mailboxes(2)  # which its words go to
    sum_ranks(put(np.ones((1, 600), np.float32)), box)
    assert box.state.tolist() == [1, 0, 1]
    deliver(box, 1, np.zeros(600), 1)  # words of an exchange before are not taken for this one's
    sum_ranks(put(np.ones((1, 600), np.float32)), box)
    assert box.state.tolist() == [2, 0, 1]


def test_after_one_was_given_up_none_is_waited_for():
    box = mailboxes(2)[0]._replace(patience=2**31 - 1)  # hours
    box.state[2] = 1
    sum_ranks(put(np.ones((1, 600), np.float32)), box)
    assert box.state.tolist() == [1, 0, 1]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_gather_puts_the_ranks_columns_side_by_side(rank, rows):
    widths = (200, 193, 210)
    firsts = torch.tensor(np.cumsum([0, *widths]), dtype=torch.int32, device=DEVICE)
    random = np.random.default_rng(0)
    xs = [random.standard_normal((rows, width), np.float32) for width in widths]
    boxes = mailboxes(3)
    box = boxes[rank]
    for sender, x in enumerate(xs):
        deliver(box, sender, x, 1)
    y = gather_ranks(put(xs[rank]), box, firsts, widths)
    np.testing.assert_array_equal(get(y), np.concatenate(xs, axis=1))
    assert box.state.tolist() == [1, 0, 0]


@pytest.mark.parametrize("shape", [(0, 5), (2, 700), (3,)])
def test_what_does_not_fit_is_refused(shape):
    x = torch.zeros(shape, device=DEVICE)
    box, _other = mailboxes(2)
    if shape == (3,):
        with pytest.raises(ValueError, match="residual is"):
            sum_ranks(x, box, residual=torch.zeros(4, device=DEVICE))
        with pytest.raises(ValueError, match="bias is"):
            sum_ranks(x, box, bias=torch.zeros(4, device=DEVICE))
        with pytest.raises(ValueError, match="columns"):
            gather_ranks(x, box, torch.zeros(3), (4, 4))
    else:
        with pytest.raises(ValueError, match="1 to 1300 elements"):
            sum_ranks(x, box)

"""Exchanges between ranks: what one rank sends, and what it makes of what the others sent.

The interpreter runs one rank at a time: the others' words are written by NumPy, as the protocol
says, before the rank reads them. Several GPUs at once: tests/test_multi_gpu_torch.py.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest

from .tensors import DEVICE, get, needs_triton, put, torch

pytestmark = needs_triton

from dualinfer.kernels.triton.exchange import (  # noqa: E402
    Mailbox,
    gather_ranks,
    given_up,
    row,
    sum_ranks,
)

CAPACITY = 1300


class Box(NamedTuple):
    """What a rank's kernels take, and its memory."""

    mailbox: Mailbox
    words: Any
    state: Any


def mailboxes(size, done=0, rows=False, patience=10):
    """One for each rank, all in this process's memory, after `done` exchanges.

    With `rows` a rank's kernels have nothing but its row, in pairs of words.
    """
    words = [torch.zeros(2, size, CAPACITY, dtype=torch.int64, device=DEVICE) for _ in range(size)]
    made = []
    for rank in range(size):
        state = torch.tensor([done, 0, 0], dtype=torch.int32, device=DEVICE)
        addresses = [w.data_ptr() for w in words]
        if rows:
            addresses = row(rank, addresses, state.data_ptr())
        box = Mailbox(rank, size, CAPACITY, patience, torch.tensor(addresses, device=DEVICE))
        if rows:
            box = box._replace(rank=None, peers=box.peers.view(torch.int32))
        else:
            box = box._replace(words=words[rank], state=state)
        made.append(Box(box, words[rank], state))
    return made


def words_of(values, number):
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.int64)
    return torch.from_numpy(bits | (number << 32)).to(DEVICE)


def deliver(box, sender, values, number):
    """What rank `sender` writes to `box` in exchange `number`."""
    flat = np.asarray(values, np.float32).reshape(-1)
    box.words[number % 2, sender, : flat.size] = words_of(flat, number)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [False, True], ids=["a rank", "a row"])
@pytest.mark.parametrize(
    ("size", "rank", "shape"), [(2, 0, (1, 63)), (3, 2, (2, 600)), (4, 1, (1, 1, 1000))]
)
def test_sum_adds_every_ranks_values_bias_and_residual(size, rank, shape, rows, dtype):
    random = np.random.default_rng(0)
    xs = random.standard_normal((size, *shape), np.float32)
    bias, residual = random.standard_normal(shape[-1], np.float32), random.standard_normal(shape)
    boxes = mailboxes(size, 6, rows)
    for sender in range(size):
        deliver(boxes[rank], sender, xs[sender], 7)
    added = [put(a.astype(np.float32)).to(dtype) for a in (bias, residual)]
    y = sum_ranks(put(xs[rank]), boxes[rank].mailbox, *added, dtype=dtype)
    expected = xs.sum(0) + get(added[0].float()) + get(added[1].float())
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    np.testing.assert_allclose(get(y.float()), expected, rtol=tolerance, atol=tolerance)
    assert boxes[rank].state.tolist() == [7, 0, 0]
    for peer in range(size):
        found = boxes[peer].words[1, rank, : xs[rank].size]
        if peer != rank:
            assert torch.equal(found, words_of(xs[rank].reshape(-1), 7))


@pytest.mark.parametrize("done", [0, 2**31 - 2, -2], ids=["fresh", "turns negative", "wraps"])
def test_ranks_have_the_same_bits_and_take_turns_with_two_sets_of_words(done):
    size, shape = 3, (1, 700)
    boxes = mailboxes(size, done, rows=done != 0)
    for i in (1, 2, 3):
        number = (done + i + 2**31) % 2**32 - 2**31
        xs = np.random.default_rng(i).standard_normal((size, *shape), np.float32)
        for box in boxes:
            for sender in range(size):
                deliver(box, sender, xs[sender], number)
        results = [sum_ranks(put(xs[r]), boxes[r].mailbox) for r in range(size)]
        assert all(torch.equal(results[0], other) for other in results)
        np.testing.assert_allclose(get(results[0]), xs.sum(0), rtol=1e-5, atol=1e-6)
    assert [box.state.tolist() for box in boxes] == [[number, 0, 0]] * size


@pytest.mark.parametrize("rows", [False, True], ids=["a rank", "a row"])
def test_a_rank_that_sends_nothing_is_given_up_and_noted(rows):
    (box, words, state), _other = mailboxes(2, rows=rows)  # which its words go to
    for done in (1, 2):
        y = sum_ranks(put(np.ones((1, 600), np.float32)), box)
        assert np.isnan(get(y)).all() and state.tolist() == [done, 0, 1]
        # Words of an exchange before are not taken for this one's.
        deliver(Box(box, words, state), 1, np.zeros(600), 1)


def test_after_one_was_given_up_none_is_waited_for_and_all_are_nan():
    (box, words, state), _other = mailboxes(2, rows=True, patience=2**31 - 1)  # hours
    flags = [given_up(box)]
    state[2] = 1
    deliver(Box(box, words, state), 1, np.zeros(600), 2)
    for _ in range(2):  # to the second the other rank has come
        y = sum_ranks(put(np.ones((1, 600), np.float32)), box)
        assert np.isnan(get(y)).all()
    assert state.tolist() == [2, 0, 1]
    assert [get(flag).tolist() for flag in (*flags, given_up(box))] == [[0], [1]]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("rows", [False, True], ids=["a rank", "a row"])
def test_gather_puts_the_ranks_columns_side_by_side(rank, count, rows):
    widths = (210, 210, 193) if rows else (200, 193, 210)  # then all are padded to the widest
    firsts = torch.tensor(np.cumsum([0, *widths]), dtype=torch.int32, device=DEVICE)
    random = np.random.default_rng(0)
    xs = [random.standard_normal((count, width), np.float32) for width in widths]
    boxes = mailboxes(3, rows=rows)
    for sender, x in enumerate(xs):
        deliver(boxes[rank], sender, x, 1)
    x = np.pad(xs[rank], ((0, 0), (0, 210 - widths[rank]))) if rows else xs[rank]
    y = gather_ranks(put(x), boxes[rank].mailbox, firsts, widths)
    np.testing.assert_array_equal(get(y), np.concatenate(xs, axis=1))
    assert boxes[rank].state.tolist() == [1, 0, 0]
    for peer in {0, 1, 2} - {rank}:
        sent = boxes[peer].words[1, rank, : xs[rank].size]
        assert torch.equal(sent, words_of(xs[rank].reshape(-1), 1))


@pytest.mark.parametrize("shape", [(0, 5), (2, 700), (3,)])
def test_what_does_not_fit_is_refused(shape):
    x = torch.zeros(shape, device=DEVICE)
    box = mailboxes(2)[0].mailbox
    if shape == (3,):
        with pytest.raises(ValueError, match="residual is"):
            sum_ranks(x, box, residual=torch.zeros(4, device=DEVICE))
        with pytest.raises(ValueError, match="bias is"):
            sum_ranks(x, box, bias=torch.zeros(4, device=DEVICE))
        with pytest.raises(ValueError, match="columns"):
            gather_ranks(x, box, torch.zeros(3), (4, 4))
        with pytest.raises(ValueError, match="some of each rank"):
            gather_ranks(x, box._replace(rank=None), torch.zeros(3), (3, 0))
    else:
        with pytest.raises(ValueError, match="1 to 1300 elements"):
            sum_ranks(x, box)

"""What processes say to each other: here threads of this process, which is enough to disagree."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dualinfer.errors import ArgumentError, DistributedError
from dualinfer.parallel import agreement
from dualinfer.parallel.agreement import Peers, fingerprint, in_turn, share_inputs


class Thread(Peers):
    """One of two peers; each waits for the other for a moment."""

    size = 2

    def __init__(self, rank, messages, said, heard):
        self.rank, self._messages = rank, messages
        self._said, self._heard = said, heard  # where both wait
        self.left = []

    def exchange(self, message):
        self._messages[self.rank] = message
        try:
            self._said.wait()
            found = list(self._messages)
            self._heard.wait()
        except threading.BrokenBarrierError as error:
            raise DistributedError("the other one is gone") from error
        return found

    def leave(self, message, reason):
        self.left.append(reason)
        self.go()

    def go(self):
        self._said.abort()


def both(*works):
    """What each of two peers makes of its own work: a result or the error."""
    shared = [b"", b""], threading.Barrier(2, timeout=5), threading.Barrier(2, timeout=5)

    def outcome(rank):
        peer = Thread(rank, *shared)
        try:
            return works[rank % len(works)](peer)
        except BaseException as error:
            error.left = peer.left
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(outcome, range(2)))


def fails(peers, what, kind):
    with peers.together(what):
        raise kind("no such folder")


def shares(peers, call, ids):
    return share_inputs(peers, call, {"input_ids": ids}, lambda x: x is not None, lambda: None)


def test_the_others_are_told_what_failed_here():
    here, there = both(
        lambda peers: fails(peers, "The models", KeyError),
        lambda peers: peers.tell("The models"),
    )
    assert isinstance(here, KeyError) and isinstance(there, DistributedError)
    assert "The models failed elsewhere. rank 0: KeyError: 'no such folder'" in str(there)


def test_the_first_one_works_alone_for_as_long_as_it_takes(monkeypatch):
    monkeypatch.setattr(agreement, "_BEAT", 0.05)
    order, shared = (
        [],
        ([b"", b""], threading.Barrier(2, timeout=1), threading.Barrier(2, timeout=1)),
    )

    def work(rank):
        order.append(f"{rank} begins")
        time.sleep(1.5 if rank == 0 else 0.1)  # longer than the others wait for a message
        order.append(f"{rank} ends")
        return rank

    with ThreadPoolExecutor(2) as pool:
        peers = [Thread(rank, *shared) for rank in range(2)]
        found = pool.map(lambda p: in_turn(p, "The models", lambda: work(p.rank)), peers)
        assert list(found) == [0, 1]
    assert order == ["0 begins", "0 ends", "1 begins", "1 ends"]


@pytest.mark.parametrize("rank", [0, 1])
def test_work_that_fails_in_turn_fails_in_all(rank):
    done = []

    def work(peers):
        if peers.rank == rank:
            raise KeyError("no such folder")
        done.append(peers.rank)

    found = both(lambda peers: in_turn(peers, "The models", lambda: work(peers)))
    assert isinstance(found[rank], KeyError) and isinstance(found[1 - rank], DistributedError)
    assert f"The models failed elsewhere. rank {rank}: KeyError" in str(found[1 - rank])
    assert done == [0] * rank


def gone_after(count):
    """A peer that takes part in so many exchanges, with inputs of its own to ask for, and goes."""

    def work(peers):
        for _ in range(count):
            peers.tell("generate()", asks=True)
        peers.go()

    return work


def test_the_own_error_is_raised_where_the_others_are_gone_as_well():
    def agreeing(peers):
        return fails(peers, "The models", ArgumentError)

    def handing(peers):  # asks who has inputs before it hands out its own
        return shares(peers, "generate()", object())

    for call, others in ((agreeing, gone_after(0)), (handing, gone_after(1))):
        here, _ = both(call, others)
        assert isinstance(here, ArgumentError)
        assert "could not be told. the other one is gone" in here.__notes__[0]


def test_what_fails_after_all_have_met_is_told_to_nobody():
    def call(peers):
        with peers.together("The models") as work:
            work.meet()
            if peers.rank == 0:
                raise KeyError("no such layer")
        return "done"

    here, there = both(call)
    assert isinstance(here, KeyError) and not hasattr(here, "__notes__") and there == "done"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_process_is_raised_at_once_and_told(kind):
    here, there = both(
        lambda peers: fails(peers, "The inputs", kind),
        lambda peers: peers.tell("The inputs"),
    )
    assert type(here) is kind and here.left == [f"{kind.__name__}: no such folder"]
    assert isinstance(there, DistributedError)


def test_calls_of_other_names_are_told_by_their_names():
    found = both(
        lambda peers: shares(peers, "forward()", [[1]]),
        lambda peers: shares(peers, "generate()", [[1]]),
    )
    for error in found:
        assert isinstance(error, DistributedError)
        assert "not in the same call. rank 0: forward(); rank 1: generate()." in str(error)
    for error in both(
        lambda peers: peers.tell("A cache", free=3),
        lambda peers: peers.exchange(b"\x80 no JSON") and None,
    )[:1]:
        assert "rank 0: A cache; rank 1: elsewhere." in str(error)


def test_numbers_come_back_in_the_order_of_ranks():
    assert (
        both(lambda peers: peers.tell("A cache", free=10 + peers.rank)) == [{"free": [10, 11]}] * 2
    )


def test_arrays_of_the_same_bytes_and_other_shapes_or_dtypes_differ():
    array = np.arange(12, dtype=np.int32)
    arrays = [array.reshape(2, 6), array.reshape(3, 4), array, array.view(np.float32)]
    assert len({fingerprint(x) for x in arrays}) == len(arrays)
    assert fingerprint(array.reshape(2, 6)) == fingerprint(array.reshape(2, 6).copy())
    found = both(lambda peers: peers.together("The ids").meet(lambda: arrays[peers.rank]))
    assert all("The ids differ: rank 1 from rank 0" in str(error) for error in found)

"""Who is let in when: whatever comes, leaves and fails, each ends once, and no slot leaks."""

import asyncio
import threading
import time
import traceback
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualinfer.backends.base import NO_TOKEN, Request
from dualinfer.backends.profiling import Profiler
from dualinfer.engine.driver import Driver, Job
from dualinfer.engine.generation import Awaited
from dualinfer.engine.loop import Loop
from dualinfer.errors import OutOfMemoryError, StepError
from dualinfer.parallel.agreement import Peers
from dualinfer.parallel.spmd import Turns
from dualinfer.serving.scheduler import PAUSES, PROMPTS, Entry, Scheduler, steps_for

SLOTS, ROOM = 4, 4096
EVENT = st.tuples(
    st.sampled_from(["submit"] * 3 + ["urgent", "cancel", "turn", "turn", "put back", "fail"]),
    st.integers(1, 6000),
    st.integers(1, 9),
)


def fits(slots, tokens):
    return slots * tokens <= ROOM


@given(st.lists(EVENT, max_size=60))
@settings(max_examples=150, deadline=None)
def test_whatever_happens_each_entry_ends_once_and_no_slot_leaks(events):
    scheduler, entries, left, ended, now = Scheduler(SLOTS, fits, pauses=True), [], {}, [], 0

    def end(some):
        for entry in some:
            assert entry not in ended
            ended.append(entry)
            left.pop(entry, None)

    def turn(others=()):
        made = scheduler.turn(now, others)
        end([*made.cancelled, *made.expired])
        for entry in made.paused:
            assert entry.may_pause and not entry.urgent and entry.paused <= PAUSES
            assert entry.state == "waiting" and any(x.urgent for x in made.admitted)
            del left[entry]
        left.update((entry, entry.prompt % 7 + 1) for entry in made.admitted)
        held = [*others, *(entry.tokens for entry in left)]
        assert scheduler.live == len(left)
        if made.admitted and len(held) > 1:
            assert len(held) <= SLOTS
            assert fits(len(held), max(held))
        return made.admitted

    def step():
        for entry in list(left):
            left[entry] -= 1
            if not left[entry]:
                scheduler.end(entry)
                end([entry])

    for kind, tokens, number in events:
        now += 1
        if kind in ("submit", "urgent"):
            deadline = now + number if tokens % 3 == 0 else None
            entry = Entry(tokens, tokens // 2 + 1, kind == "urgent", deadline)
            entry.may_pause = number % 2 == 0
            entries.append(entry)
            scheduler.submit(entries[-1])
        elif kind == "cancel" and entries:
            scheduler.cancel(entries[tokens % len(entries)])
        elif kind == "fail" and left:
            entry = list(left)[number % len(left)]
            scheduler.end(entry)
            end([entry])
        elif kind == "put back":
            held, admitted = len(left), turn()
            if admitted and held:
                scheduler.put_back(admitted)
                scheduler.hold(held)
                for entry in admitted:
                    del left[entry]
        else:
            turn([number * 100] * (number % 3))
            step()
    for _ in range(20 * len(entries) + 1):  # nothing comes any more
        turn()
        step()
    assert sorted(map(id, ended)) == sorted(map(id, entries))
    assert scheduler.live == scheduler.waiting == 0
    assert all(entry.state == "ended" for entry in entries)


def test_who_comes_first_is_let_in_first_and_a_large_one_is_not_passed_by_small_ones():
    scheduler = Scheduler(SLOTS, fits)
    small, large, late = Entry(1000, 1), Entry(4000, 1), Entry(10, 1)
    for entry in (small, large, late):
        scheduler.submit(entry)
    assert scheduler.turn(0).admitted == [small]
    assert scheduler.turn(0).admitted == []
    scheduler.end(small)
    assert scheduler.turn(0).admitted == [large]


def test_urgent_ones_come_first_but_others_are_not_left_for_ever():
    scheduler = Scheduler(1, fits)
    patient = Entry(10, 1)
    scheduler.submit(patient)
    for before in range(100):
        scheduler.submit(Entry(10, 1, urgent=True))
        scheduler.submit(Entry(10, 1, urgent=True))
        (entry,) = scheduler.turn(0).admitted
        assert before or entry.urgent
        if entry is patient:
            return
        scheduler.end(entry)
    raise AssertionError("It waits for ever.")


def test_an_urgent_one_takes_the_slot_of_the_last_that_may_pause():
    scheduler = Scheduler(3, lambda slots, tokens: True, pauses=True)
    first, second, fixed, later = (Entry(10, 1, may_pause=i != 2) for i in range(4))
    for entry in (first, second, fixed, later):
        scheduler.submit(entry)
    assert scheduler.turn(0).admitted == [first, second, fixed]
    urgent = [Entry(10, 1, urgent=True) for _ in range(3)]
    for entry in urgent:
        scheduler.submit(entry)
    turn = scheduler.turn(0)
    assert (turn.admitted, turn.paused) == (urgent[:2], [second, first])
    assert scheduler.turn(0).paused == []  # those that are left may not
    for entry in (*urgent[:2], fixed):
        scheduler.end(entry)
    assert scheduler.turn(0).admitted == [urgent[2], first, second]  # before the later one
    scheduler.submit(last := Entry(10, 1, urgent=True))
    assert scheduler.turn(0).paused == [second]
    scheduler.end(second)  # it had ended by its last step
    assert scheduler.waiting == 1 and last.state == "live"


def test_one_that_pauses_gets_on_however_many_urgent_ones_come():
    scheduler = Scheduler(1, lambda slots, tokens: True, pauses=True)
    scheduler.submit(patient := Entry(10, 1, may_pause=True))
    running = None
    for _ in range(500):
        scheduler.submit(Entry(10, 1, urgent=True))
        turn = scheduler.turn(0)
        running = turn.admitted[0] if turn.admitted else running
        if running is patient and patient.paused == PAUSES:
            assert scheduler.turn(0).paused == []
            return
        if running is not patient:
            scheduler.end(running)
            running = None
    raise AssertionError("It waits for ever.")


def test_prompts_are_let_in_by_and_by_so_that_the_first_need_not_wait_for_all():
    scheduler = Scheduler(9, lambda slots, tokens: True)
    entries = [Entry(PROMPTS, PROMPTS // 2) for _ in range(4)]
    for entry in entries:
        scheduler.submit(entry)
    assert scheduler.turn(0).admitted == entries[:2]
    assert scheduler.turn(0).admitted == entries[2:]


def test_a_chunk_is_short_where_a_step_is_long():
    assert [steps_for(x) for x in (None, 0.0, 1.0, 0.002, 1e-6)] == [1, 1, 1, 2, 8]


class FakeRunner:
    """A runner whose tokens follow from the request and the position alone, and that may fail."""

    def __init__(self, faults):
        self.spec = SimpleNamespace(reads_pieces=True, original=None)
        self._faults, self.slots = faults, {}

    def _may_fail(self):
        fault = next(self._faults, None)
        if fault == "step":
            raise ValueError("of the device")
        if fault == "memory":
            raise OutOfMemoryError("no room")

    def extend(self, pieces):
        self._may_fail()
        first = []
        for piece in pieces:
            if piece.start == 0:
                assert piece.slot not in self.slots
            self.slots[piece.slot] = [piece.request, 1 if piece.ends else 0]
            if piece.ends:
                first.append(token_of(piece.request, 0))
        return Pending(np.array([first], np.int32), None)

    def decode(self, steps):
        self._may_fail()
        rows = np.full((steps, max(self.slots) + 1), NO_TOKEN, np.int32)
        for row in rows:
            for slot, state in self.slots.items():
                request, done = state
                if 0 < done < request.max_new_tokens:
                    row[slot] = token_of(request, done)
                    state[1] += 1
        return Pending(rows, next(self._faults, None) == "fetch")

    def release(self, slots):
        for slot in slots:
            self.slots.pop(slot, None)


class Pending:
    def __init__(self, tokens, fails):
        self._tokens, self._fails = tokens, fails

    def fetch(self):
        if self._fails:
            raise ValueError("of the device, late")
        return self._tokens

    def told(self):
        return None


def token_of(request, position):
    return int(request.tokens[0]) * 100 + position


FAULT = st.sampled_from([None] * 12 + ["step", "memory", "fetch"])
CALL = st.tuples(st.integers(1, 5000), st.integers(1, 12), st.sampled_from([None] * 4 + [0, 2]))


@given(st.lists(CALL, min_size=1, max_size=25), st.lists(FAULT, max_size=60))
@settings(max_examples=60, deadline=None)
def test_with_faults_each_request_has_its_tokens_or_an_error_and_all_slots_are_free(calls, faults):
    turns = Turns(Peers(), may_fork=True)
    runner = FakeRunner(iter(faults))
    loop = Loop(runner, Profiler(lambda cuda: None), turns)
    driver = Driver(loop, turns, Scheduler(SLOTS, lambda slots, tokens: True), lambda: None)

    async def read(number, length, new, leaves):
        tokens = np.full(length, number, np.int32)
        job = Job.of(Request(tokens, max_new_tokens=new))
        driver.submit([job])
        got = []
        while True:
            await job.channel.wait()
            if not job.channel.items:
                break
            got.append(job.channel.items.popleft())
            if leaves is not None and len(got) > leaves:
                driver.cancel(job)
        assert got == [token_of(job.request, i) for i in range(len(got))]
        error, reason = job.channel.error, job.channel.reason
        assert (error is None) != (reason is None)
        if error is not None:
            assert isinstance(error, StepError | ValueError | OutOfMemoryError)
        elif reason == "length":
            assert len(got) == new
        else:
            assert reason == "cancelled"
            assert leaves is not None

    async def read_all():
        await asyncio.gather(*(read(i + 1, *call) for i, call in enumerate(calls)))

    asyncio.run(asyncio.wait_for(read_all(), 30))
    assert driver.live == driver.waiting == 0
    driver.stop(StepError("The end."))
    assert not loop.tokens_beside(())
    assert not runner.slots


def test_who_begins_something_has_the_turn_before_who_goes_on():
    """The lock alone gives it to him who asks again at once."""
    turns, order = Turns(Peers(), may_fork=True), []

    def begin(number: int) -> None:
        with turns.coming():
            order.append(number)

    threads = [threading.Thread(target=begin, args=(i,)) for i in range(5)]
    with turns:
        for thread in threads:
            thread.start()
        while len(turns._coming) < 5:
            time.sleep(0.001)
        begun = time.monotonic()
        turns.give_way()  # to those who wait for something else it is not given for long
        assert time.monotonic() - begun < 1 and not order
    turns.give_way()
    with turns:
        order.append(None)
    assert sorted(order[:-1]) == list(range(5)) and order[-1] is None
    for thread in threads:
        thread.join()
    assert not turns._coming


def test_each_caller_gets_an_error_of_its_own():
    """Raised by several threads, one would have the tracebacks of all of them."""
    cause, turns = ValueError("of the device"), Turns(Peers(), may_fork=True)
    loop = Loop(FakeRunner(iter(())), Profiler(lambda cuda: None), turns)
    request, are_there = Request(np.ones(3, np.int32), max_new_tokens=10), threading.Event()

    def fail():
        are_there.wait(30)
        raise StepError("It failed.") from cause

    driver = Driver(loop, turns, Scheduler(SLOTS, lambda slots, tokens: True), fail)
    calls, found = [Awaited(driver, [request]) for _ in range(SLOTS + 1)], []
    are_there.set()
    for call in calls:
        with pytest.raises(StepError, match=r"It failed\.") as info:
            list(call)
        found.append(info.value)
    depths = [len(traceback.extract_tb(x.__traceback__)) for x in found]
    assert len({*depths}) == 1
    error = StepError("The end.")
    error.__cause__ = cause
    driver.stop(error)
    for _ in range(2):
        with pytest.raises(StepError) as info:
            driver.submit([])
        found.append(info.value)
    lives = loop.start([request] * 2)
    loop.lose(error)
    found += [live.error for live in lives]
    assert len({*map(id, [error, *found])}) == len(found) + 1
    assert all(x.__cause__ is cause for x in found)


def test_one_that_waits_hears_of_the_end_in_any_event_loop():
    turns = Turns(Peers(), may_fork=True)
    runner = FakeRunner(iter(()))
    loop = Loop(runner, Profiler(lambda cuda: None), turns)
    driver = Driver(loop, turns, Scheduler(SLOTS, lambda slots, tokens: True), lambda: None)
    request = Request(np.ones(3, np.int32), max_new_tokens=10)
    counts = []

    def in_thread(number):
        async def read():
            job = Job.of(replace(request, tokens=np.full(3, number, np.int32)))
            driver.submit([job])
            while not job.channel.has_ended:
                await job.channel.wait()
                job.channel.items and job.channel.items.popleft()
                await asyncio.sleep(0)
            counts.append(job.given)

        asyncio.run(read())

    threads = [threading.Thread(target=in_thread, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert counts == [10] * 8
    driver.stop(StepError("The end."))

"""The front's side: an engine of another process, as the routes see it.

What an event loop has begun belongs to it. An engine that dies is followed by another one, to which
everything that is under way is sent once more, with the tokens that have come.
"""

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import numpy as np

from ...engine.requests import TokenLogprobs, told_of
from ...engine.scoring import prompt_told
from ...errors import ClosedError, StepError, copied
from ...parallel.frames import Message, packed
from ..health import BEAT, Pulse
from ..http.engines import About, Handle, State
from .host import failure_of
from .suspects import MOST_DEATHS, Line, Party

_REFUSED_FOR = 600.0  # seconds in which one that engines died of is refused when it comes again
_MOST_REFUSED = 64
Write = Callable[[bytes], None]


class _Work:
    """A request to the engine, which may be sent again, with others of its party."""

    def __init__(self, engine: "RemoteEngine", number: int, party: Party) -> None:
        self.engine, self.number, self.party = engine, number, party
        self.is_left = False
        self.error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def fail(self, error: Exception) -> None:
        """End it with an error, of which others may end too."""
        self.error = copied(error)
        self.wake()

    def wake(self) -> None:
        """Let go on who waits for it."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def changed(self) -> None:
        """Wait until something comes."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class RemoteHandle(_Work):
    """A sequence under way in another process; see `Handle`."""

    def __init__(
        self,
        engine: "RemoteEngine",
        number: int,
        ids: np.ndarray,
        arguments: Mapping[str, Any],
        index: int,
        party: Party,
    ) -> None:
        super().__init__(engine, number, party)
        self.ids, self.arguments, self.index = ids, arguments, index
        self.tokens: list[int] = []  # all that have come
        self._given = 0
        self._told: list[np.ndarray] = []
        self._kept: int | None = None
        self._reason: str | None = None
        self.is_taken = False

    @property
    def prompt_ids(self) -> list[int]:
        """See `Handle`."""
        return self.ids.tolist()

    @property
    def finish_reason(self) -> str | None:
        """See `Handle`."""
        return self._reason if self._given == len(self.tokens) else None

    @property
    def cached_tokens(self) -> int:
        """See `Handle`."""
        return self._kept or 0

    @property
    def has_ended(self) -> bool:
        """True if no token comes any more."""
        return self._reason is not None or self.error is not None

    @property
    def size(self) -> int:
        """See `suspects.Work`."""
        return len(self.tokens)

    def logprobs_of(self, index: int) -> TokenLogprobs:
        """See `Handle`."""
        return told_of(self._told[index], self.arguments["logprobs"])

    async def accepted(self) -> None:
        """See `Handle`."""
        while not self.is_taken and not self.has_ended:
            await self.changed()
        if self.error is not None and not self.tokens:
            raise self.error

    async def arrived(self) -> list[int]:
        """See `Handle`."""
        try:
            while self._given == len(self.tokens) and not self.has_ended:
                await self.changed()
        except BaseException:
            self.cancel()
            raise
        begun, self._given = self._given, len(self.tokens)
        if begun == self._given and self.error is not None:
            raise self.error
        return self.tokens[begun:]

    def cancel(self) -> None:
        """See `Handle`; from any thread."""
        if not self.has_ended and not self.is_left:
            self.is_left = True
            self.engine.post(self.engine.cancel, self)

    def take(self, tokens: list[int], told: np.ndarray) -> None:
        """Book tokens that have come, and what is told of them."""
        self.tokens += tokens
        self._told += list(told)
        self.is_taken = True
        self.wake()

    def keep(self, kept: int) -> None:
        """Book how much of the prompt was not read; the first engine's word counts."""
        self._kept = kept if self._kept is None else self._kept

    def end(self, reason: str) -> None:
        """Book why it ended."""
        self._reason = reason
        self.wake()


def _started(handles: Sequence[RemoteHandle]) -> bytes:
    """The message that starts sequences of one prompt, or lets them go on."""
    first = handles[0]
    message: Message = {"do": "start", "numbers": [x.number for x in handles]}
    message |= {"indices": [x.index for x in handles], "arguments": first.arguments}
    message["counts"] = [len(x.tokens) for x in handles]
    done = np.array([token for x in handles for token in x.tokens], np.int32)
    return packed(message, ids=first.ids, done=done)


class _Call(_Work):
    """A call that gives one array."""

    size = 0

    def __init__(self, engine: "RemoteEngine", number: int, frame: bytes) -> None:
        super().__init__(engine, number, Party())
        self.frame, self.array = frame, None

    @property
    def has_ended(self) -> bool:
        """True if nothing comes any more: where nobody waits, the engine may still be at it."""
        is_over = self.is_left and not self.party.is_sent
        return is_over or self.array is not None or self.error is not None

    def take(self, array: np.ndarray) -> None:
        """Book the result."""
        self.array = array
        self.wake()

    async def result(self) -> np.ndarray:
        """The array, once it has come."""
        while self.array is None and self.error is None:
            await self.changed()
        if self.error is not None:
            raise self.error
        assert self.array is not None
        return self.array


def _frame_of(party: Party) -> bytes:
    """The message that asks for what is left of a party."""
    first = party.works[0]
    if isinstance(first, _Call):
        return first.frame
    return _started([x for x in party.works if isinstance(x, RemoteHandle) and not x.has_ended])


def _parties(works: Iterable[RemoteHandle | _Call]) -> list[Party]:
    return list(dict.fromkeys(work.party for work in works))


def _digest(ids: np.ndarray, arguments: Mapping[str, Any]) -> bytes:
    """The same for the same prompt and arguments."""
    made = hashlib.blake2b(json.dumps(arguments, sort_keys=True).encode())
    made.update(ids.tobytes())
    return made.digest()


def _died_of(deaths: int) -> StepError:
    """The error of a request that is not tried again."""
    return StepError(
        f"The engine died {deaths} times while this request was under way, the last time with "
        "nothing beside it. It is not tried again."
    )


class RemoteEngine:
    """An engine of another process, and of the one that takes its place; see `ServedEngine`.

    It belongs to the event loop in which it was made. `tokenizer` is the model's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._loop = asyncio.get_running_loop()
        self._numbers = count()
        self._work: dict[int, RemoteHandle | _Call] = {}  # in the order in which it came
        self._line = Line()
        self._refused: dict[bytes, float] = {}  # that engines died of, and when
        self.in_vain = 0  # requests that engines died of, since anything came
        self._write: Write | None = None
        self._about: About | None = None
        self._state = State(0, 0, 1)
        self._pulse = Pulse()
        self.unheard = 0.0  # seconds without a sign of life
        self._before = 0, 0, 0  # what earlier engines have counted
        self._closed: Exception | None = None
        self.down: str | None = "The engine starts."
        self.progress = 0  # tokens and results that have come

    @property
    def about(self) -> About:
        """See `ServedEngine`."""
        assert self._about is not None
        return self._about

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function in the event loop; from any thread."""
        with suppress(RuntimeError):  # it was closed
            self._loop.call_soon_threadsafe(function, *arguments)

    # What the routes ask for

    def start(self, ids: list[int], arguments: Mapping[str, Any], count: int) -> list[Handle]:
        """See `ServedEngine`."""
        how, array, party = dict(arguments), np.array(ids, np.int32), Party()
        party.asked = array, dict(arguments)
        if how["do_sample"] and how.get("seed") is None:
            how["seed"] = secrets.randbits(63)  # which another engine needs as well
        numbers = [next(self._numbers) for _ in range(count)]
        handles = [RemoteHandle(self, n, array, how, i, party) for i, n in enumerate(numbers)]
        self.post(self._begin, handles)
        return [*handles]

    def _begin(self, works: Sequence[RemoteHandle | _Call]) -> None:
        party = works[0].party
        party.works.extend(works)
        error = self._closed
        if error is None and self._refused and self._is_refused(party):
            error = _died_of(MOST_DEATHS)
        for work in works:
            if error is not None:
                work.fail(error)
            else:
                self._work[work.number] = work
        if error is None:
            self._line.put(party)
            self._send()

    def _send(self) -> None:
        """Send the engine what it may have by now."""
        if self._write is not None and self._closed is None:
            for party in self._line.sent():
                self._write(_frame_of(party))

    def cancel(self, handle: RemoteHandle) -> None:
        """Let a sequence end that nobody reads."""
        if self._write is not None and handle.party.is_sent:
            self._write(packed({"do": "cancel", "numbers": [handle.number]}))
        else:  # nothing is under way
            self._work.pop(handle.number, None)
            handle.end("cancelled")

    async def prompt_logprobs(self, ids: list[int], likely: int) -> list[TokenLogprobs | None]:
        """See `ServedEngine`."""
        rows = await self._called({"do": "tell"}, ids=np.array(ids, np.int32))
        return prompt_told([rows], likely)

    async def embed(self, texts: Sequence[str | list[int]], size: int | None) -> np.ndarray:
        """See `ServedEngine`."""
        return await self._called({"do": "embed", "texts": [*texts], "size": size})

    async def _called(self, message: Message, **arrays: np.ndarray) -> np.ndarray:
        number = next(self._numbers)
        call = _Call(self, number, packed({**message, "number": number}, **arrays))
        self._begin([call])
        try:
            return await call.result()
        finally:
            call.is_left = True
            if number in self._work:
                if self._write is not None and call.party.is_sent:
                    self._write(packed({"do": "leave", "number": number}))
                else:
                    self._forget(call)

    def state(self) -> State:
        """See `ServedEngine`."""
        there = sum(isinstance(work, RemoteHandle) for work in list(self._work.values()))
        live = 0 if self._write is None else min(self._state.live, there)
        asked, found, preemptions = self._counts()
        room = live, there - live, self._state.slots
        usage = self._state.cache
        return State(*room, asked, found, self.trouble, preemptions, usage)

    def _counts(self) -> tuple[int, int, int]:
        """The counts of all engines so far."""
        (asked, found, preemptions), now = self._before, self._state
        return asked + now.asked, found + now.found, preemptions + now.preemptions

    @property
    def pulse(self) -> Pulse:
        """The work that the engine was at when it was last heard of."""
        return self._pulse

    @property
    def trouble(self) -> str | None:
        """Why it does not serve; None where it does."""
        if self.down is not None:
            return self.down
        if self.unheard > BEAT:
            return f"The engine has not answered for {self.unheard:.0f} s."
        return self._pulse.trouble

    # What comes from the engine, and of it

    def attach(self, write: Write, about: About, state: State) -> None:
        """Go on with an engine that serves, and is so: it is sent everything that is under way."""
        self._about, self._write, self.down = about, write, None
        self._state, self._pulse, self.unheard = state, Pulse(), 0.0
        self._line.begin(_parties(self._work.values()))
        self._send()

    def detach(self, why: str) -> None:
        """The engine is gone. What it had under way waits for another one, but not for ever."""
        self._write, self.down = None, why
        last = self._state
        self._before = self._counts()
        self._state = last._replace(live=0, asked=0, found=0, preemptions=0)
        blamed = self._line.blame(_parties(self._under_way(last.slots)))
        for work in list(self._work.values()):
            work.party.take_back()
            if work.is_left:
                self._forget(work)
                if isinstance(work, RemoteHandle):
                    work.end("cancelled")
            elif blamed is not None and work.party is blamed:
                self._forget(work)
                work.fail(_died_of(blamed.deaths))
        if blamed is not None:
            self.in_vain += 1
            self._note_refused(blamed)

    def _under_way(self, slots: int) -> Iterable[RemoteHandle | _Call]:
        """The work that an engine which is gone may have been at: what had a slot, and calls."""
        sent = [work for work in self._work.values() if work.party.is_sent]
        handles = [work for work in sent if isinstance(work, RemoteHandle)]
        handles.sort(key=lambda x: x.arguments.get("priority") != "high")  # who is first is first
        waited = {id(x) for x in handles[slots:] if not x.party.has_begun}
        return [work for work in sent if id(work) not in waited]

    def _note_refused(self, party: Party) -> None:
        """Remember a request that engines died of: its client may send it again."""
        if party.asked is not None:
            self._refused[_digest(*party.asked)] = time.monotonic()
        while len(self._refused) > _MOST_REFUSED:
            self._refused.pop(next(iter(self._refused)))

    def _is_refused(self, party: Party) -> bool:
        """True for a request that engines have died of, a while ago."""
        late = time.monotonic() - _REFUSED_FOR
        self._refused = {digest: at for digest, at in self._refused.items() if at > late}
        return party.asked is not None and _digest(*party.asked) in self._refused

    def close(self, error: Exception | None = None) -> None:
        """End everything, and take nothing any more."""
        self._write = None
        self._closed = error or ClosedError("The server has gone down.")
        self.down = str(self._closed)
        for work in list(self._work.values()):
            self._forget(work)
            work.fail(self._closed)

    def _forget(self, work: _Work) -> None:
        self._work.pop(work.number, None)

    def received(self, message: Message) -> None:
        """Take a message of the engine."""
        self.unheard = 0.0
        self._take(message)
        if self._line.is_held:
            self._send()

    def _take(self, message: Message) -> None:
        kind = message["is"]
        if kind == "turn":
            self._turn(message)
        elif kind == "beat":
            self._beaten(message)
        elif kind == "taken":
            for handle in self._handles(message["numbers"]):
                handle.is_taken = True
                handle.wake()
        elif kind == "refused":
            for number in message["numbers"]:
                if (work := self._work.pop(number, None)) is not None:
                    work.fail(failure_of(message["error"]))
        elif kind == "result":
            work = self._work.pop(message["number"], None)
            if isinstance(work, _Call):
                self.progress, self.in_vain = self.progress + 1, 0
                work.take(message["array"])
        elif kind == "left" and (work := self._work.pop(message["number"], None)) is not None:
            # Nobody waits for it, but others may wait for its end.
            work.fail(ClosedError("Nobody waited for it when the engine came to it."))

    def _beaten(self, message: Message) -> None:
        """Note what the engine does."""
        if "pulse" in message:
            self._pulse, self._state = Pulse(**message["pulse"]), State(**message["state"])

    def _handles(self, numbers: Sequence[int]) -> list[RemoteHandle]:
        found = (self._work.get(number) for number in numbers)
        return [work for work in found if isinstance(work, RemoteHandle)]

    def _turn(self, message: Message) -> None:
        """Hand out the tokens of a turn."""
        tokens, told = message["tokens"].tolist(), message["told"]
        self._state = self._state._replace(live=message["live"])
        self._pulse = self._pulse._replace(silent=0.0)
        if tokens:
            self.progress, self.in_vain = self.progress + len(tokens), 0
        at = row = 0
        for number, size, rows in message["sizes"].tolist():
            handle = self._work.get(number)
            if isinstance(handle, RemoteHandle):
                handle.take(tokens[at : at + size], told[row : row + rows])
            at, row = at + size, row + rows
        for number, kept in message.get("kept", ()):
            if isinstance(handle := self._work.get(number), RemoteHandle):
                handle.keep(kept)
        for number, reason, error in message.get("ended", ()):
            work = self._work.pop(number, None)
            if isinstance(work, RemoteHandle):
                if error is None:
                    work.end(reason)
                else:
                    work.fail(failure_of(error))

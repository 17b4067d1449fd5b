"""A runner of several processes that one of them drives: the others make the calls that it makes.

`Leading` stands in the place of rank 0's runner. Each call that changes what a runner holds, or in
which all ranks compute, it sends to the others before it makes the call itself; `follow` makes
these calls on another rank's runner. Results do not travel: every rank computes the same tokens,
and only rank 0 looks at them. What the caller decides from them, later calls say.
"""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np

from ..errors import DistributedError, UnsupportedError
from ..ops.contract import Tokens
from ..parallel.agreement import Peers
from ..parallel.frames import Message, packed
from ..parallel.lines import Line
from .base import ForwardInputs, PendingTokens, Piece, Pool, Request, Sampling, Saved

# Calls that every rank makes; others of a runner read what rank 0 has.
_LED = (
    *("forward", "open", "prefill", "extend", "decode", "prefill_scores", "decode_scores"),
    *("decode_several", "keep", "allow", "copy", "save", "restore", "release"),
)
# Of these no sequence begins or ends; what a cache that grows takes is known.
_GOING_ON = "decode", "decode_scores", "decode_several", "keep", "allow"
_ASKED = "free_bytes", "cache_bytes_for", "block_bytes"
_SENT = {kind.__name__: kind for kind in (ForwardInputs, Piece, Pool, Request, Sampling, Tokens)}
_PATIENCE = 10.0  # seconds until the other ranks have failed in what failed in one
_LONGEST = 600.0  # seconds for an answer, which comes behind all that was asked for before


class Leading:
    """Rank 0's runner, which leads the others'; `tell_lost` is called once they cannot be led.

    That is where one of them is gone, or fails in what the others do: `lost` is the reason then,
    and DistributedError is raised with it.
    """

    def __init__(
        self, runner: Any, peers: Peers, lines: Sequence[Line], tell_lost: Callable[[str], None]
    ) -> None:
        self._runner, self._peers, self._lines = runner, peers, lines
        self._tell_lost, self.lost = tell_lost, None
        self._lock = threading.RLock()
        self._settled = threading.Condition()
        self._number = self._over = self._failed = 0  # of calls: the last one, ended, and failed
        self._answers: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in lines]
        self._numbers: weakref.WeakKeyDictionary[Saved, int] = weakref.WeakKeyDictionary()
        self._dropped: deque[int] = deque()  # what was saved and is needed no more
        self._sizes: dict[tuple[int, int], int] = {}
        self._free: tuple[int | None, int] | None = None  # bytes, beside a cache of so many
        self._is_closed = False
        for rank, line in enumerate(lines, 1):
            gone = f"The process of rank {rank} of {peers.size} is gone; its own output says why."
            line.listen(partial(self._take, rank), partial(self._lose, gone))

    def __getattr__(self, name: str) -> Any:
        """Give what the runner has; of calls that every rank makes, those."""
        own = getattr(self._runner, name)
        return partial(self._led, name) if name in _LED else own

    @property
    def notes(self) -> tuple[str, ...]:
        """See `Report`."""
        others = len(self._lines)
        return *self._runner.notes, f"this process leads {others} more, which make its calls"

    def _led(self, name: str, *args: Any) -> Any:
        """The result of a call that all ranks make."""
        with self._lock:
            if self.lost is not None and name == "release":
                return self._runner.release(*args)  # of what is there no more
            frame = self._packed(name, *args)  # what cannot be sent fails alone, before any call
            if name not in _GOING_ON:
                self._free = None
            try:  # what interrupts it may leave a call that others make and this rank does not
                self._send(frame)
                result = getattr(self._runner, name)(*args)
            except BaseException as error:
                self._settle(error)
                raise
            self._end_call()
            if isinstance(result, Saved):
                self._numbers[result] = self._number
                weakref.finalize(result, self._dropped.append, self._number)
                return result
            return _Watched(result, self._lose) if hasattr(result, "fetch") else result

    def _packed(self, name: str, *args: Any) -> tuple[bytes, int]:
        """The frame of a call, the next one, and how many it names that are dropped."""
        if self.lost is not None:
            raise DistributedError(self.lost)
        message: Message = {"do": name, "number": self._number + 1}
        # More may come at any time, at its end.
        if dropped := [self._dropped[i] for i in range(len(self._dropped))]:
            message["dropped"] = dropped
        arrays: dict[str, np.ndarray] = {}
        message["args"] = [_plain(x, arrays, self._numbers) for x in args]
        return packed(message, **arrays), len(dropped)

    def _send(self, frame: tuple[bytes, int]) -> None:
        data, dropped = frame
        self._number += 1
        for _ in range(dropped):
            self._dropped.popleft()
        for line in self._lines:
            try:
                line.send_frame(data)
            except DistributedError as error:
                self._lose(str(error))
                raise

    def _end_call(self, failed: bool = False) -> None:
        with self._settled:
            self._over, self._failed = self._number, self._number if failed else self._failed
            self._settled.notify_all()

    def _settle(self, error: BaseException) -> None:
        """Go on behind a call that failed here, if it has failed everywhere."""
        self._end_call(failed=True)
        if isinstance(error, DistributedError):
            self._lose(str(error))
        with suppress(DistributedError):  # it is the first error that counts
            if self.lost is None and not all(self._asked("failed", _PATIENCE)):
                self._lose(f"Not all ranks failed in what failed in rank 0: {error!r}.")

    def _asked(self, name: str, seconds: float, *args: Any) -> list[Any]:
        """The answers of all other ranks, which come behind what was asked for before."""
        self._send(self._packed(name, *args))
        self._end_call()
        found = []
        for rank, answers in enumerate(self._answers, 1):
            try:
                found.append(answers.get(timeout=seconds))
            except queue.Empty:
                self._lose(f"Rank {rank} did not answer within {seconds:.0f} seconds.")
        if self.lost is not None:
            raise DistributedError(self.lost)
        return found

    def _take(self, rank: int, message: Message) -> None:
        """Take what another rank says: an answer, or that it has failed."""
        if message["is"] == "answer":
            self._answers[rank - 1].put(message["value"])
            return
        number = message["number"]
        with self._settled:
            self._settled.wait_for(lambda: self._over >= number, _PATIENCE)
            is_alike = self._failed == number
        if not is_alike:
            self._lose(f"Rank {rank} failed where rank 0 did not: {message['error']}")

    def _lose(self, why: str) -> None:
        """Lead no more, with a reason; once."""
        with self._settled:
            if self._is_closed or self.lost is not None:
                return
            self.lost = why
        for line, answers in zip(self._lines, self._answers, strict=True):
            line.close()
            answers.put(None)  # who waits for one
        self._tell_lost(why)

    def free_bytes(self) -> int | None:
        """See `base.Runner`: of the rank that has least.

        It is asked again once a sequence has begun or ended, or the cache has another size: each
        answer comes behind all that was asked for before.
        """
        with self._lock:
            size = self._runner.cache_bytes
            if self.lost is not None or self._free is None or self._free[1] != size:
                self._free = self._over_all("free_bytes", min), size
            return self._free[0]

    def cache_bytes_for(self, slots: int, tokens: int) -> int:
        """See `base.Runner`: of the rank that needs most."""
        if (slots, tokens) not in self._sizes:
            found = self._over_all("cache_bytes_for", max, slots, tokens)
            assert found is not None
            self._sizes[slots, tokens] = found
        return self._sizes[slots, tokens]

    def block_bytes(self, numbers: Sequence[int]) -> int:
        """See `base.Runner`: of the rank that needs most."""
        found = self._over_all("block_bytes", max, list(numbers))
        assert found is not None
        return found

    def _over_all(self, name: str, of: Callable[[list[int]], int], *args: Any) -> int | None:
        with self._lock:
            own = getattr(self._runner, name)(*args)
            said = [own, *self._asked(name, _LONGEST, *args)]
        return None if None in said else of(said)

    def probe(self) -> None:
        """See `base.Runner`."""
        if self.lost is not None:
            raise DistributedError(self.lost)
        self._runner.probe()

    def compile(self, backend: Any, compile_kwargs: Mapping[str, Any]) -> None:
        """See `base.Runner`; what is compiled must be so in all ranks."""
        raise UnsupportedError(f"compile(): {ALONE}")

    def close(self) -> None:
        """See `base.Runner`; the others follow no more."""
        with self._lock:
            with self._settled:
                self._is_closed = True  # that others go is no loss
            with suppress(DistributedError):
                self._send(self._packed("close"))
        for line in self._lines:
            line.close()
        self._runner.close()
        self._peers.close()


ALONE = (
    "this process leads others, which follow its passes and steps alone. Call it in every process "
    "before lead() and follow()."
)


class _Watched:
    """Tokens of rank 0; where they do not come because of another rank, no rank goes on."""

    def __init__(self, pending: PendingTokens, lose: Callable[[str], None]) -> None:
        self._pending, self._lose = pending, lose
        self.told = pending.told

    def fetch(self) -> np.ndarray:
        """See `base.PendingTokens`."""
        try:
            return self._pending.fetch()
        except DistributedError as error:
            self._lose(str(error))
            raise


def follow(runner: Any, line: Line) -> None:
    """Make the calls of rank 0's `Leading` on this rank's runner, until that is closed.

    A call that fails in rank 0 as well is passed over; what fails here alone is raised.
    DistributedError where rank 0 is gone.
    """
    saved: dict[int, Saved] = {}
    while True:
        message = line.receive()
        if message is None:
            raise DistributedError("The process of rank 0, which leads this one, is gone.")
        name, number = message["do"], message["number"]
        for one in message.get("dropped", ()):
            saved.pop(one, None)
        if name == "close":
            return
        if name == "failed":
            line.send({"is": "answer", "value": False})
            continue
        if name not in (*_LED, *_ASKED):
            raise DistributedError(f"Rank 0 asks for {name}, which is no call of a runner.")
        try:
            result = getattr(runner, name)(*(_read(x, message, saved) for x in message["args"]))
        except Exception as error:
            line.send({"is": "raised", "number": number, "error": f"{error!r}."})
            verdict = line.receive(2 * _PATIENCE)
            if verdict is None or verdict["do"] != "failed":
                raise
            line.send({"is": "answer", "value": True})
            continue
        if name in _ASKED:
            line.send({"is": "answer", "value": result})
        elif isinstance(result, Saved):
            saved[number] = result


def _plain(value: Any, arrays: dict[str, np.ndarray], saved: Mapping[Saved, int]) -> Any:
    """An argument as JSON; arrays are put beside it, by name."""
    if isinstance(value, np.ndarray):
        name = f"array {len(arrays)}"
        arrays[name] = value
        return {"array": name}
    if isinstance(value, Saved):
        return {"saved": saved[value]}
    if is_dataclass(value) and type(value).__name__ in _SENT:
        found = {
            field.name: _plain(getattr(value, field.name), arrays, saved)
            for field in fields(value)
            if field.name != "grammar"
        }
        # Only whether there is one counts: what it allows is among the calls.
        follows = getattr(value, "grammar", None) is not None
        return {"kind": type(value).__name__, "fields": found, "follows": follows}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tokens):
        found = {name: _plain(x, arrays, saved) for name, x in value._asdict().items()}
        return {"kind": "Tokens", "fields": found, "follows": False}
    if isinstance(value, list | tuple):
        return [_plain(x, arrays, saved) for x in value]
    assert value is None or isinstance(value, bool | int | float | str), type(value)
    return value


def _read(value: Any, arrays: Mapping[str, Any], saved: Mapping[int, Saved]) -> Any:
    """An argument of `_plain`; its arrays may be written. Sequences are tuples."""
    if isinstance(value, list):
        return tuple(_read(x, arrays, saved) for x in value)
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays[value["array"]].copy()
    if "saved" in value:
        return saved[value["saved"]]
    found = {name: _read(x, arrays, saved) for name, x in value["fields"].items()}
    if value["follows"]:
        found["grammar"] = _FOLLOWED
    return _SENT[value["kind"]](**found)


_FOLLOWED: Any = object()  # a grammar that rank 0 follows

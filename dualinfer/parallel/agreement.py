"""Agreement on the host of processes that share a model: the same calls, the same inputs.

Each process of a group makes the same calls. What fails in one of them is raised in all, and
inputs that differ are refused in all, so that no process waits for one that does not come.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Self, TypeVar

import numpy as np

from ..arrays import from_numpy, kind_of, numpy_dtype, to_numpy
from ..errors import ArgumentError, DistributedError, a_type

_BEAT = 1.0  # seconds

T = TypeVar("T")


class Peers:
    """This process among those that share a model; here it is the only one.

    A backend's class of processes says how messages get to the others. A job may run several copies
    of a model: `copy` is the number of this one, from 0; what is done once a job, the processes of
    copy 0 do.
    """

    rank: int = 0
    size: int = 1
    copy: int = 0

    def exchange(self, message: bytes) -> list[bytes]:
        """Every process's message, in the order of ranks; all must call it.

        Raises DistributedError where one is gone or does not come within the group's timeout.
        """
        return [message]

    def leave(self, message: bytes, reason: str) -> None:
        """Go without the next exchange, of which `message` is this process's part.

        The others get it where messages wait for them, else a DistributedError with the `reason`.
        Nothing is waited for.
        """

    def close(self) -> None:
        """Leave the group."""

    def together(self, what: str) -> "Work":
        """The context of work that every process does; `what` names it, for people."""
        return Work(self, what)

    def tell(self, what: str, **said: Any) -> dict[str, list[Any]]:
        """Exchange what every process says under the name `what`; returns as `Work.meet`."""
        with self.together(what) as work:
            return work.meet(**said)


class Work:
    """Work that every process does, a context that none leaves before all have done it.

    Where it fails here, that error is raised; where it failed elsewhere, a DistributedError that
    says where and how. Processes that are at works of other names are told so. What ends this
    process (KeyboardInterrupt, SystemExit) is raised at once, and the others are told.
    """

    def __init__(self, peers: Peers, what: str) -> None:
        self._peers, self._what, self._met = peers, what, False

    def meet(self, alike: Callable[[], Any] | None = None, **said: Any) -> dict[str, list[Any]]:
        """Return all processes' `said`, by name and in the order of ranks, once all are here.

        It ends the work: what fails in the context after it is this process's own affair. Where
        what `alike` gives (arrays, numbers, strings, and what holds them) differs, it raises a
        DistributedError in every process. What is said is sent as JSON.
        """
        if self._peers.size == 1:
            return {name: [value] for name, value in said.items()}
        message = _message(self._what, None if alike is None else fingerprint(alike()), None, said)
        self._met = True
        bodies = _read(self._what, self._peers.exchange(message))
        failed = [f"rank {r}: {other['error']}" for r, other in enumerate(bodies) if other["error"]]
        if failed:
            raise DistributedError(f"{self._what} failed elsewhere. {'; '.join(failed)}")
        marks = [other["mark"] for other in bodies]
        if len(set(marks)) > 1:
            others = [r for r, m in enumerate(marks) if m != marks[0]]
            raise DistributedError(
                f"{self._what} differ: rank {', '.join(map(str, others))} from rank 0. Processes "
                "that share a model must make the same calls with the same values; those that pass "
                "None for the inputs take rank 0's."
            )
        return {name: [other["said"][name] for other in bodies] for name in said}

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Meet the others, or tell them what failed."""
        if self._met or self._peers.size == 1:
            return
        if error is None:
            self.meet()
        else:
            self._tell(error)

    def _tell(self, error: BaseException) -> None:
        """Tell the others what failed here; it is this process's user who must see it first."""
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        message = _message(self._what, None, reason, {})
        if not isinstance(error, Exception):  # nobody who presses Ctrl-C waits for the others
            self._peers.leave(message, reason)
            return
        try:
            self._peers.exchange(message)
        except DistributedError as lost:
            error.add_note(f"The other processes could not be told. {lost}")


def in_turn(peers: Peers, what: str, work: Callable[[], T]) -> T:
    """The result of `work`, which rank 0 does first, and the others once it has succeeded there.

    The work may take longer than the group waits for a message: every process says each second
    that it is at it. Where one has failed nobody waits for the rest.
    """
    if peers.size == 1:
        return work()
    job = _Job(work)
    if peers.rank == 0:
        job.start()
    states = ["waiting"]
    while "failed" not in states and set(states) != {"done"}:
        with peers.together(what) as beat:
            state = job.wait(_BEAT)
            states = beat.meet(state=state)["state"]
        if states[0] == "done" and state == "waiting":
            job.start()
    with peers.together(what):
        return job.result()


class _Job:
    """Work in a thread of its own."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work, self._result, self._error = work, None, None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin it."""
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error

    def wait(self, seconds: float) -> str:
        """`waiting` before the start, then `busy`, `done` or `failed`."""
        if self._thread.ident is None:
            return "waiting"
        self._thread.join(seconds)
        if self._thread.is_alive():
            return "busy"
        return "done" if self._error is None else "failed"

    def result(self) -> Any:
        """Return the work's result, None where it has not ended; raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._result


def share_inputs(
    peers: Peers,
    call: str,
    inputs: Mapping[str, Any],
    is_input: Callable[[Any], bool],
    device: Callable[[], Any],
) -> dict[str, Any]:
    """The arguments of a `call`, by name, with rank 0's inputs where this process has none.

    `is_input` tells which are inputs. They come as what they are there: lists, or arrays of the
    same framework and dtype; torch's that lie on an accelerator go to the `device`. Those of a
    process that has its own are its own. Raises DistributedError where others are in another call.
    """
    own = dict(inputs)
    if peers.size == 1:
        return own
    place = device()  # a closed engine says here that it is
    asks = not any(map(is_input, own.values()))
    asking = peers.tell(call, asks=asks)["asks"]
    if asking[0] or not any(asking):
        return own
    with peers.together(f"Sharing the inputs of {call}") as work:
        shared = {} if peers.rank else {n: _plain(v) for n, v in own.items() if is_input(v)}
        shared = work.meet(inputs=shared)["inputs"][0]
    return own | {n: _unpacked(v, place) for n, v in shared.items()} if asks else own


def fingerprint(value: Any) -> str:
    """A checksum of arrays with their shapes, numbers, strings, and of what holds them."""
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if kind_of(value) in ("numpy", "torch", "jax"):
        array = to_numpy(value)
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    elif is_dataclass(value) and not isinstance(value, type):
        _feed(digest, [(f.name, getattr(value, f.name)) for f in fields(value)])
    elif isinstance(value, Mapping):
        _feed(digest, list(value.items()))
    elif isinstance(value, list | tuple):
        digest.update(f"[{len(value)}".encode())
        for item in value:
            _feed(digest, item)
    elif value is None or isinstance(value, str | bytes | int | float | complex):
        digest.update(f"{type(value).__name__}:{value!r};".encode())
    elif callable(getattr(value, "to_dict", None)) and not isinstance(value, type):  # HF's configs
        _feed(digest, value.to_dict())
    else:  # of an object only what it is: its repr may tell where it lies
        digest.update(f"{type(value).__name__};".encode())


def _message(what: str, mark: str | None, error: str | None, said: Mapping[str, Any]) -> bytes:
    """One process's part of an exchange, as JSON: nothing is pickled."""
    return json.dumps({"at": what, "mark": mark, "error": error, "said": said}).encode()


def _read(what: str, messages: list[bytes]) -> list[dict[str, Any]]:
    """Messages of all processes at the work `what`; DistributedError where one is at another."""
    bodies: list[dict[str, Any]] = []
    for message in messages:
        try:
            bodies.append(dict(json.loads(message)))
        except (TypeError, ValueError):
            bodies.append({})
    if any(other.get("at") != what for other in bodies):
        where = [f"rank {r}: {other.get('at', 'elsewhere')}" for r, other in enumerate(bodies)]
        raise DistributedError(
            f"The processes that share a model are not in the same call. {'; '.join(where)}. Each "
            "must make the same calls in the same order; where an error has left one of them "
            "behind, make the engines anew."
        )
    return bodies


def _plain(value: Any) -> Any:
    """Nested lists of numbers as they are, in rows of any lengths; an array with what it is."""
    kind = kind_of(value)
    if kind == "list":
        return [_plain(item) for item in value]
    if isinstance(value, bool | int | float):
        return value
    if kind is None:
        raise ArgumentError(
            f"Other ranks take rank 0's inputs, and {a_type(value)} cannot be sent to "
            "them. Pass arrays or lists of numbers."
        )
    array = to_numpy(value)
    if array.dtype.kind in "OSUMm":
        raise ArgumentError(
            f"Other ranks take rank 0's inputs, and an array of {array.dtype} cannot be sent to "
            "them. Pass arrays of numbers."
        )
    return {
        "kind": kind,
        "dtype": array.dtype.name,
        "shape": array.shape,
        "bytes": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode(),
        "placed": kind == "torch" and value.device.type != "cpu",
    }


def _unpacked(value: Any, device: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(item, device) for item in value]
    if not isinstance(value, dict):
        return value
    buffer = bytearray(base64.b64decode(value["bytes"]))
    array = np.frombuffer(buffer, numpy_dtype(value["dtype"]))
    result = from_numpy(array.reshape(value["shape"]), value["kind"])
    return result.to(device) if value["placed"] else result

"""What processes that share a model say to each other on the host: the same calls, the same inputs.

Each process of a group makes the same calls. What fails in one of them is raised in all, and
inputs that differ are refused in all, so that no process waits for one that does not come.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from ..arrays import from_numpy, kind_of, numpy_dtype, to_numpy
from ..errors import ArgumentError, DistributedError

T = TypeVar("T")

_BEAT = 1.0  # seconds


class Peers(Protocol):
    """This process among those that share a model, of which a job may run several copies."""

    rank: int
    size: int
    copy: int  # its number, from 0; what is done once a job, the processes of copy 0 do

    def exchange(self, message: bytes) -> list[bytes]:
        """Every process's message, in the order of ranks; all must call it.

        Raises DistributedError where one is gone or does not come within the group's timeout.
        """
        ...

    def leave(self, message: bytes, reason: str) -> None:
        """Go without the next exchange, of which `message` is this process's part.

        The others get it where messages wait for them, else a DistributedError with the `reason`.
        Nothing is waited for.
        """
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class Alone:
    """The only process that runs a model."""

    rank, size, copy = 0, 1, 0

    def exchange(self, message: bytes) -> list[bytes]:
        """See `Peers`."""
        return [message]

    def leave(self, message: bytes, reason: str) -> None:
        """Nobody to tell."""

    def close(self) -> None:
        """Nothing to leave."""


def agree(
    peers: Peers, what: str, work: Callable[[], T], alike: Callable[[T], Any] | None = None
) -> T:
    """The result of this process's `work`, once all have done theirs.

    Where it failed here, that error; where it failed elsewhere, a DistributedError that says where
    and how; where `alike` of the results (arrays, numbers, strings, and what holds them) differ, a
    DistributedError in every process. `what` names the work, for people; processes that are at
    works of other names are told so. What ends this process (KeyboardInterrupt, SystemExit) is
    raised at once, and the others are told.
    """
    if peers.size == 1:
        return work()
    try:
        result = work()
        mark = None if alike is None else fingerprint(alike(result))
    except BaseException as error:
        _tell(peers, what, error)
        raise
    found = _heard(peers, what, {"mark": mark, "error": None})
    failed = [f"rank {r}: {said['error']}" for r, said in enumerate(found) if said["error"]]
    if failed:
        raise DistributedError(f"{what} failed elsewhere. {'; '.join(failed)}")
    marks = [said["mark"] for said in found]
    if len(set(marks)) > 1:
        others = [r for r, m in enumerate(marks) if m != marks[0]]
        raise DistributedError(
            f"{what} differ: rank {', '.join(map(str, others))} from rank 0. Processes that share "
            "a model must make the same calls with the same values; those that pass None for the "
            "inputs take rank 0's."
        )
    return result


def in_turn(
    peers: Peers, what: str, work: Callable[[], T], alike: Callable[[T], Any] | None = None
) -> T:
    """As `agree`, but rank 0 does its work first, and the others once it has succeeded there.

    The work may take longer than the group waits for a message: every process says each second
    that it is at it. Where one has failed nobody waits for the rest.
    """
    if peers.size == 1:
        return work()
    job = _Job(work)
    if peers.rank == 0:
        job.start()
    while True:
        try:
            state = job.wait(_BEAT)
        except BaseException as error:  # Ctrl-C
            _tell(peers, what, error)
            raise
        states = [said["state"] for said in _heard(peers, what, {"state": state})]
        if "failed" in states or set(states) == {"done"}:
            return agree(peers, what, job.result, alike)
        if states[0] == "done" and state == "waiting":
            job.start()


class _Job:
    """Work in a thread of its own."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work, self._result, self._error = work, None, None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
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
        """What came out, None where it has not ended; raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._result


def _tell(peers: Peers, what: str, error: BaseException) -> None:
    """Tell the others what failed here; it is this process's user who must see it first."""
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    message = _said({"at": what, "mark": None, "error": reason})
    if not isinstance(error, Exception):  # nobody who presses Ctrl-C waits for the others
        peers.leave(message, reason)
        return
    try:
        peers.exchange(message)
    except DistributedError as lost:
        error.add_note(f"The other processes could not be told. {lost}")


def share_inputs(
    peers: Peers, call: str, inputs: Mapping[str, Any], device: Any = None
) -> dict[str, Any]:
    """`inputs` of a `call`, by name, or rank 0's where this process has none but None.

    They come as what they are there: lists, or arrays of the same framework and dtype. Torch's that
    lie on an accelerator go to `device`. Those of a process that has its own are its own. Raises
    DistributedError where other processes are in another call.
    """
    if peers.size == 1:
        return dict(inputs)
    asks = all(value is None for value in inputs.values())
    asking = [said["asks"] for said in _heard(peers, call, {"asks": asks})]
    if asking[0] or not any(asking):
        return dict(inputs)
    message = b""
    try:
        if peers.rank == 0:
            message = _packed(inputs)
    except Exception as error:
        try:
            peers.exchange(b"")
        except DistributedError as lost:
            error.add_note(f"The other processes could not be told. {lost}")
        raise
    found = peers.exchange(message)[0]
    if not found:
        raise DistributedError("Rank 0 could not hand over its inputs; its own error says why.")
    if not asks:
        return dict(inputs)
    return {**inputs, **{n: _unpacked(v, device) for n, v in json.loads(found).items()}}


def settle(peers: Peers, what: str, values: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Every process's numbers, by name, in the order of ranks; `what` as in `agree`."""
    found = _heard(peers, what, values) if peers.size > 1 else [values]
    return {name: [said[name] for said in found] for name in values}


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


def _said(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content).encode()


def _heard(peers: Peers, what: str, content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What every process said at the work `what`; DistributedError where one is at another."""
    found: list[Any] = []
    for message in peers.exchange(_said({"at": what, **content})):
        try:
            said = json.loads(message)
        except ValueError:
            said = None
        found.append(said if isinstance(said, dict) else {})
    if any(said.get("at") != what or set(said) != {"at", *content} for said in found):
        where = [f"rank {r}: {said.get('at', 'elsewhere')}" for r, said in enumerate(found)]
        raise DistributedError(
            f"The processes that share a model are not in the same call. {'; '.join(where)}. Each "
            "must make the same calls in the same order; where an error has left one of them "
            "behind, make the engines anew."
        )
    return found


def _packed(inputs: Mapping[str, Any]) -> bytes:
    """As JSON: nothing is pickled."""
    return _said({name: _plain(value) for name, value in inputs.items() if value is not None})


def _plain(value: Any) -> Any:
    """Nested lists of numbers as they are, in rows of any lengths; an array with what it is."""
    kind = kind_of(value)
    if kind == "list":
        return [_plain(item) for item in value]
    if isinstance(value, bool | int | float):
        return value
    if kind is None:
        raise ArgumentError(
            f"Other ranks take rank 0's inputs, and a {type(value).__name__} cannot be sent to "
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
    found = from_numpy(array.reshape(value["shape"]), value["kind"])
    return found.to(device) if value["placed"] and device is not None else found

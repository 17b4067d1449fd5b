"""Processes of this host that share a model: started together, watched, and ended together.

What torchrun is for, on one host. Nothing here listens beyond the loopback, and nothing is pickled:
the store by which the processes find each other is this process's, and theirs are clients of it.
Where this process is killed, a guard that it has started ends them.
"""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DistributedError
from . import guard

_HOST = "127.0.0.1"
_LOOPBACK = ("lo", "lo0")
_GRACE = 1.0  # seconds in which others that fail as well may say why
_PATIENCE = 30.0  # seconds for what a process does when it is told to end
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")

_Event = tuple[int | None, int]  # a rank and its exit code, or None and the number of a signal


def run_processes(command: Sequence[str], count: int) -> int:
    """Run Python with the arguments `command` in `count` processes; the exit code of the job.

    It is 0 once all have ended well. Where one fails, those that are left are stopped, and the
    code is the failed one's. A signal goes to all of them; a second one kills them. None of them
    outlives this process, however it ends.
    """
    events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
    children: list[subprocess.Popen[bytes]] = []
    store, port = open_store()
    with guarded() as marks, _signals_to(events):
        try:
            for rank in range(count):
                children.append(_start(command, rank, count, port, marks))
                watch = threading.Thread(target=_watch, args=(children, rank, events), daemon=True)
                watch.start()
            return _wait(children, events)
        finally:
            _end(children, events, signal.SIGTERM)
            del store  # it serves them to their end


@contextmanager
def others_of(
    command: Sequence[str], count: int, said: Mapping[str, Any], ended: Callable[[str], None]
) -> Iterator[threading.Event]:
    """Within it this process is rank 0 of a job of `count`; Python runs `command` in the others.

    They find what is `said` at their standard input, a line of JSON, with the `variables` that
    say who they are. It stays open as long as this process lives, and they must end by its end.
    `ended` is called in a thread, with the reason, where one of them ends before the event that is
    given is set.
    """
    children: list[subprocess.Popen[bytes]] = []
    over = threading.Event()

    def watch(rank: int) -> None:
        code = children[rank - 1].wait()
        if not over.wait(_GRACE):  # in which this process may learn why
            ended(f"The process of rank {rank} of {count} ended with {_how(code)}.")

    store = None  # it serves them to their end
    try:
        for rank in range(1, count):
            children.append(_piped(command, rank, count))
            threading.Thread(target=watch, args=(rank,), daemon=True).start()
        store, port = open_store()  # while they start
        for rank, child in enumerate(children, 1):
            whole = {**said, "variables": _environment(rank, count, port)}
            with suppress(BrokenPipeError):  # it has ended, which is seen
                assert child.stdin is not None
                child.stdin.write(json.dumps(whole).encode() + b"\n")
                child.stdin.flush()
        with _variables(_environment(0, count, port)):
            yield over
    finally:
        over.set()
        for child in children:
            assert child.stdin is not None
            with suppress(BrokenPipeError):
                child.stdin.close()
        deadline = time.monotonic() + _PATIENCE
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
            child.kill()
            child.wait()
        del store


def pass_over(*names: str) -> None:
    """Ignore signals that come to all processes of a job, and on which its first one acts."""
    for name in names:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _piped(command: Sequence[str], rank: int, count: int) -> subprocess.Popen[bytes]:
    """A process of the job in this one's group and session: what ends these ends it."""
    try:
        return subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE)
    except OSError as error:
        raise _not_started(rank, count, error) from error


@contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """Within it this process has these variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def check_places(count: int, oversubscribe: bool = False) -> None:
    """Raise ConfigError for more processes than GPUs, or, where there is none, than cores.

    The latter may be had by asking to `oversubscribe`; a GPU serves one process.
    """
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there and count > there:
        raise ConfigError(
            f"--tp {count}, but this machine has {there} GPU{'s' if there > 1 else ''}, and each "
            f"process needs one of its own. Use --tp {there}, or set CUDA_VISIBLE_DEVICES= to run "
            "on the CPU."
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if not there and not oversubscribe and count > (cores or 1):
        raise ConfigError(
            f"--tp {count}, but this process may use {cores} core{'s' if cores != 1 else ''}, and "
            "more processes than cores wait for each other and take the memory of as many models' "
            f"parts. Use --tp {cores}, or pass --oversubscribe to start them all the same."
        )


@contextmanager
def guarded() -> Iterator[dict[str, str]]:
    """Variables for processes that shall not outlive this one, even where it is killed.

    What they start inherits them, and ends with them.
    """
    if not os.path.isdir("/proc/self"):  # where nothing tells which processes these are
        yield {}
        return
    mark = uuid.uuid4().hex
    # Isolated, so that it starts at once, and in a session of its own: no signal reaches it.
    command = [sys.executable, "-I", "-S", str(Path(guard.__file__)), mark]
    own = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert own.stdin is not None
    try:
        yield {guard.VARIABLE: ":".join(filter(None, (os.environ.get(guard.VARIABLE), mark)))}
        own.stdin.write(b".")
    finally:
        with suppress(BrokenPipeError):  # it was killed
            own.stdin.close()
        own.wait()


def open_store() -> tuple[Any, int]:
    """The job's store, which listens on the loopback alone, and its port."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        # Left to itself a TCPStore listens on all interfaces.
        store = TCPStore(
            _HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    return store, port


def _start(
    command: Sequence[str], rank: int, count: int, port: int, marks: dict[str, str]
) -> subprocess.Popen[bytes]:
    try:
        # In a session of its own: a terminal's Ctrl-C reaches it through this process alone.
        return subprocess.Popen(
            [sys.executable, "-u", *command],
            env=_environment(rank, count, port) | marks,
            start_new_session=True,
        )
    except OSError as error:
        raise _not_started(rank, count, error) from error


def _not_started(rank: int, count: int, error: OSError) -> DistributedError:
    return DistributedError(f"Process {rank} of {count} could not be started: {error}")


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    """The caller's, and what tells a process who it is; his own choice of interfaces stands."""
    return {**loopback_only(), **os.environ, **place_of(rank, count, port)}


def loopback_only() -> dict[str, str]:
    """Variables by which gloo and NCCL use an interface that no other machine reaches."""
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in _LOOPBACK if name in names), None)
    return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback} if loopback else {}


def place_of(rank: int, count: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets for a process, where `open_store`'s store serves the job."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # no process opens a store, rank 0 neither
    }


@contextmanager
def _signals_to(events: "queue.SimpleQueue[_Event]") -> Iterator[None]:
    """Within it the signals that end a process are events."""
    known = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    # One that is ignored stays so, as under nohup; None is a handler that Python cannot set again.
    numbers = [n for n in known if signal.getsignal(n) not in (signal.SIG_IGN, None)]
    before = {n: signal.signal(n, lambda number, _: events.put((None, number))) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(
    children: Sequence[subprocess.Popen[bytes]], rank: int, events: "queue.SimpleQueue[_Event]"
) -> None:
    events.put((rank, children[rank].wait()))


def _wait(children: Sequence[subprocess.Popen[bytes]], events: "queue.SimpleQueue[_Event]") -> int:
    """The job's exit code, once all have ended, one has failed or a signal has come."""
    for _ in children:
        rank, code = events.get()
        if rank is None:
            _end(children, events, code)
            return 128 + code
        if code:
            return _failed(children, events, rank, code)
    return 0


def _failed(
    children: Sequence[subprocess.Popen[bytes]],
    events: "queue.SimpleQueue[_Event]",
    first: int,
    code: int,
) -> int:
    """Stop the others and say who failed; the exit code of the first."""
    failed = [(first, code)]
    for rank, other in _events_until(events, time.monotonic() + _GRACE, children):
        if rank is not None and other:
            failed.append((rank, other))
    stopped = any(child.poll() is None for child in children)
    _end(children, events, signal.SIGTERM)
    (rank, how), *more = [(rank, _how(code)) for rank, code in failed]
    text = f"error: rank {rank} of {len(children)} ended with {how}"
    text += "".join(f", rank {rank} with {how}" for rank, how in more)
    text += ", and the others were stopped." if stopped else "."
    print(text, file=sys.stderr, flush=True)
    return code if code > 0 else 128 - code


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _end(
    children: Sequence[subprocess.Popen[bytes]], events: "queue.SimpleQueue[_Event]", number: int
) -> None:
    """Tell those that still run to end; kill them where they do not, or a signal comes."""
    _send(children, number)
    for rank, _ in _events_until(events, time.monotonic() + _PATIENCE, children):
        if rank is None:
            break
    _send(children, signal.SIGKILL)
    for child in children:
        child.wait()


def _events_until(
    events: "queue.SimpleQueue[_Event]",
    deadline: float,
    children: Iterable[subprocess.Popen[bytes]],
) -> Iterator[_Event]:
    """The events until `deadline`, or until no process is left."""
    while any(child.poll() is None for child in children):
        try:
            yield events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return


def _send(children: Iterable[subprocess.Popen[bytes]], number: int) -> None:
    """A signal to those that still run, and to what they have started."""
    for child in children:
        if child.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, number)


if __name__ == "__main__":  # -m dualinfer.parallel.launching COUNT SCRIPT ...
    sys.exit(run_processes(sys.argv[2:], int(sys.argv[1])))

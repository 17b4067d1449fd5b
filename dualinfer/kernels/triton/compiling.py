"""Compiles one kernel after another in a process of its own, for another process that runs them.

While Triton works on a kernel it holds Python's lock most of the time, so that threads which
compile slow down everything else in their process, as the tracing of a step. The process gets a
`Task` as a line of standard input and answers with a line when Triton's cache on disk has the code.
It imports Triton and the kernels, neither JAX nor torch, and never looks for a GPU. It ends when
its input does, as with the process that started it, and when nothing was asked of it for a minute.
"""

import ast
import importlib
import os
import queue
import signal
import sys
import threading
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from .launch import PARSING, settle

DONE, FAILED = b"dualinfer: done\n", b"dualinfer: failed\n"
_IDLE_SECONDS = 60


class Task(NamedTuple):
    """What Triton is asked to compile: a kernel by its name in a module, for a GPU.

    `signature` has the type of each argument, "constexpr" of a constant; `constants` and
    `attributes` are by the argument's number. `capability` is the GPU's, 90 on Hopper.
    """

    module: str
    kernel: str
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    capability: int

    @property
    def line(self) -> bytes | None:
        """The task as a literal of Python; None where that is not all of it, as with a dtype.

        Unlike JSON a literal tells a tuple from a list, as Triton's key of a kernel does.
        """
        text = repr(tuple(self))
        try:
            is_whole = ast.literal_eval(text) == tuple(self)
        except (ValueError, SyntaxError):
            return None
        return text.encode() + b"\n" if is_whole else None

    @property
    def kernel_found(self) -> Any:
        """What stands under the kernel's name; None if nothing does."""
        return getattr(importlib.import_module(self.module), self.kernel, None)


class Absent(Exception):
    """Triton has no code of a kernel on disk."""


class Source(ASTSource):
    """A kernel that one thread at a time parses.

    With `only_kept` it is not parsed, which raises Absent. `parsed` tells whether it was.
    """

    def __init__(self, kernel: Any, task: Task, only_kept: bool) -> None:
        """Of a task's kernel."""
        how = {"constexprs": task.constants, "attrs": task.attributes}
        super().__init__(fn=kernel, signature=task.signature, **how)
        self.parsed, self._only_kept = False, only_kept

    def hash(self) -> str:
        """As Triton's."""
        with PARSING:
            return super().hash()

    def make_ir(self, *args: Any, **how: Any) -> Any:
        """As Triton's, which asks for it where it has no code."""
        if self._only_kept:
            raise Absent
        self.parsed = True
        with PARSING:
            return super().make_ir(*args, **how)


def compiled(kernel: Any, task: Task, only_kept: bool = False) -> tuple[Any, bool]:
    """The kernel as Triton has compiled it, and whether it did so now.

    With `only_kept` it raises Absent where Triton's cache on disk does not have it.
    """
    settle(kernel)
    source = Source(kernel, task, only_kept)
    target = GPUTarget("cuda", task.capability, 32)
    return compile(source, target=target, options=task.options), source.parsed


def serve() -> None:
    """Compile what standard input asks for until it ends; whatever else is printed goes nowhere."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that of a terminal is for who started this
    warnings.simplefilter("ignore")  # who started this has seen them
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    answers = os.dup(1)
    os.dup2(2, 1)
    threading.Thread(target=_read, args=(sys.stdin.buffer, tasks), daemon=True).start()
    while True:
        try:
            line = tasks.get(timeout=_IDLE_SECONDS)
        except queue.Empty:
            os._exit(0)  # at once: who asks while it winds down would take it for one that failed
        try:
            task = Task(*ast.literal_eval(line.decode()))
            compiled(task.kernel_found, task)
            answer = DONE
        except Exception:  # the other process meets it as well, and tells
            answer = FAILED
        try:
            os.write(answers, answer)
        except OSError:
            return


def _read(lines: Iterable[bytes], tasks: "queue.SimpleQueue[bytes]") -> None:
    """Hand lines on; the process ends with the last one, in the middle of a kernel if need be."""
    for line in lines:
        tasks.put(line)
    os._exit(0)

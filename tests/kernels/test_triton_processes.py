"""Processes that compile Triton's kernels for another one, as it meets them without a GPU."""

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton

from dualinfer.kernels.triton import ahead, norm
from dualinfer.kernels.triton.launch import launch
from dualinfer.kernels.triton.operands import Launch, Recording
from dualinfer.kernels.triton.processes import Compilers

pytestmark = pytest.mark.xdist_group("lowering")
NOISY = "import os; os.write(1, b'a line of its own\\nand one that goes on: ')"


def launched(width: int) -> Launch:
    """A norm, of a kernel that is another one for each width."""
    made = Recording()
    norm.rms_norm(made.operand((1, width), "float16"), made.operand((width,), "float16"), 1e-6)
    return made.launches[0]


INNER = """
import triton
import triton.language as tl

@triton.jit
def inner(x, PDL: tl.constexpr):
    tl.store(x, 1)

@triton.jit
def beside(x, PDL: tl.constexpr):
    tl.store(x, 2)
"""
OUTER = INNER.replace("inner", "first").replace("beside", "outer")
OUTER = OUTER.replace("tl.store(x, 2)", "inner(x, PDL)") + "\nfrom keys_inner import inner\n"


def keys_made(folder: Path) -> list[str]:
    """The functions of two modules whose keys Triton makes, in order, as one is launched."""
    (folder / "keys_inner.py").write_text(INNER)
    (folder / "keys_outer.py").write_text(OUTER)
    module: Any = importlib.import_module("keys_outer")
    made: list[str] = []

    def noted(self: Any) -> str:
        is_new, found = self.hash is None, key.__get__(self)
        made.extend([self.fn.__name__] * is_new)
        return found

    Function: Any = triton.JITFunction
    key, Function.cache_key = Function.cache_key, property(noted)
    for _ in range(2):
        launch(module.outer, (1,), Recording().operand((1,), "int32"))
    Function.cache_key = key
    return made


def meets(folder: Path) -> None:
    """Print what becomes of processes here, a line each; end by a signal that nobody can handle."""
    print(json.dumps(["keys", keys_made(folder)]), flush=True)
    parsed: list[bool] = []
    compiled: Any = ahead.compiled

    def noted(*given: Any, **how: Any) -> Any:
        made = compiled(*given, **how)
        parsed.append(made[1])
        return made

    ahead.compiled = noted

    def told(name: str, compilers: Compilers, act: Callable[[], Any], cache: str) -> None:
        os.environ["TRITON_CACHE_DIR"] = str(folder / cache)
        ahead._compilers = lambda: compilers  # pyright: ignore[reportAttributeAccessIssue]
        ahead._codes.clear()
        parsed.clear()
        before = len(compilers)
        act()
        line = [name, before, len(compilers), compilers.usable, any(parsed)]
        print(json.dumps(line), flush=True)

    def code(width: int) -> None:
        assert b"sm_90" in ahead.code(launched(width), 90).cubin

    first = Compilers(1)
    told("a new cache", first, lambda: ahead.prepare(90), "one")
    told("another kernel", first, lambda: code(2048), "one")
    told("a warm cache", Compilers(1), lambda: (ahead.prepare(90), code(2048)), "one")
    told("alone", Compilers(1), lambda: code(4096), "one")
    told("another cache than the process has", first, lambda: code(2048), "two")
    told("one that has given up", first, lambda: code(4096), "two")

    def killed() -> None:
        killing.start()
        (process,) = killing._all
        process.send_signal(signal.SIGSTOP)
        run = threading.Thread(target=code, args=(8192,))
        run.start()
        while killing._idle:
            time.sleep(0.01)
        process.kill()
        run.join()

    killing = Compilers(1)
    told("a process that is killed", killing, killed, "two")
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"
    told("no cache", Compilers(1), lambda: ahead.prepare(90), "two")
    del os.environ["TRITON_ALWAYS_COMPILE"]
    last = Compilers(1)
    last.start()
    print(json.dumps(["left", last._all[0].pid]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def leaves(folder: Path) -> None:
    """End while a process that has been stopped is asked for a kernel, and others are waiting.

    The folder it is in has modules of the names of Python's own, which a process must not run.
    """
    os.environ["TRITON_CACHE_DIR"] = str(folder / "cache")
    here = folder / "here"
    here.mkdir()
    (here / "queue.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    os.chdir(here)
    sys.path[:0] = ["", "."]
    compilers = ahead._compilers()
    compilers.start()
    time.sleep(1.5)
    assert len(compilers) and not (folder / "ran").exists()
    for process in compilers._all:
        process.send_signal(signal.SIGSTOP)
    ahead.begin([launched(width) for width in range(512, 4096, 128)], 90)
    time.sleep(0.2)


def started(function: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A function of this file in a process that finds modules in a folder, too."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, sys.path)])
    command = [sys.executable, __file__, function, str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The lines of a process where everything that starts prints, by their names."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "sitecustomize.py").write_text(NOISY)
    run = started("meets", folder)
    assert run.returncode == -signal.SIGKILL, run.stderr[-3000:]
    lines = [json.loads(line[line.index("[") :]) for line in run.stdout.splitlines() if "[" in line]
    return {name: rest for name, *rest in lines}


def test_a_process_compiles_what_this_one_then_finds(met):
    assert met["a new cache"] == [0, 1, True, False]
    assert met["another kernel"] == [1, 1, True, False]


def test_no_process_starts_where_there_is_nothing_to_compile_or_little(met):
    assert met["a warm cache"] == [0, 0, True, False]
    assert met["alone"] == [0, 0, True, True]


def test_where_processes_are_of_no_use_this_one_compiles(met):
    assert met["another cache than the process has"] == [1, 0, False, True]
    assert met["one that has given up"] == [0, 0, False, True]
    assert met["a process that is killed"] == [0, 0, False, True]
    assert met["no cache"] == [0, 0, False, True]


def test_keys_are_made_in_one_order_whatever_is_launched_first(met):
    """Triton 3.6 makes a key of what those that a kernel calls have as keys until then."""
    assert met["keys"] == [["inner", "beside", "first", "outer"]]


def test_nobody_waits_at_the_end_for_a_kernel_nor_runs_the_files_where_he_is(tmp_path):
    begun = time.monotonic()
    run = started("leaves", tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    assert time.monotonic() - begun < 30


def test_a_process_ends_with_the_one_that_started_it(met):
    (pid,) = met["left"]
    state = Path(f"/proc/{pid}/stat")
    for _ in range(200):
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("It was still there after 10 s.")


if __name__ == "__main__":
    {"meets": meets, "leaves": leaves}[sys.argv[1]](Path(sys.argv[2]))

"""Processes that dualinfer starts: no more than there is room for, and none outlives its parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dualinfer.cli.main import app
from dualinfer.errors import ConfigError
from dualinfer.parallel.guard import VARIABLE, find_processes
from dualinfer.parallel.launching import check_places, guarded

CORES = len(os.sched_getaffinity(0))
# A rank that has started a process in a session of its own, says so, and sleeps.
SLEEPER = """
import os, subprocess, sys, time
code = "import time; time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
os.write(1, f"{child.pid}\\n".encode())  # at once: ranks share the pipe
time.sleep(300)
"""


def marks_of(process):
    """The marks of the jobs that a process is of; a program that begins shows none yet."""

    def found():
        variables = Path(f"/proc/{process}/environ").read_text().split("\0")
        return [v for v in variables if v.startswith(f"{VARIABLE}=")]

    assert wait_until(found)
    return found()[0].partition("=")[2].split(":")


def wait_until(condition, seconds=20):
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_ranks_and_what_they_start_end_with_a_launcher_that_is_killed(tmp_path):
    """More ranks than cores, which the flag allows; the launcher has no time to say anything."""
    (tmp_path / "rank.py").write_text(SLEEPER)
    count = CORES + 1
    command = [sys.executable, "-m", "dualinfer", "launch", "--tp", str(count), "--oversubscribe"]
    launcher = subprocess.Popen([*command, tmp_path / "rank.py"], stdout=subprocess.PIPE, text=True)
    with launcher.stdout as said:
        grandchildren = [int(said.readline()) for _ in range(count)]
    (mark,) = {mark for child in grandchildren for mark in marks_of(child)}
    assert wait_until(lambda: set(grandchildren) < set(find_processes(mark)))
    assert wait_until(lambda: len(find_processes(mark)) == 2 * count)
    launcher.kill()
    launcher.wait()
    assert wait_until(lambda: not find_processes(mark))


# As `dualinfer bench` does it: a worker, which may launch ranks of its own.
OUTER = """
import subprocess, sys, time
from dualinfer.parallel.launching import guarded
inner = sys.argv[1:2] == ["inner"]
with guarded() as marks:
    code = [sys.argv[-1]] if inner else [__file__, "inner", sys.argv[-1]]
    child = subprocess.Popen([sys.executable, *code], env={**__import__("os").environ, **marks})
    child.wait()
"""


def test_jobs_in_one_another_end_with_the_outer_one(tmp_path):
    """One that does not end as it is told to is killed."""
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=1);"
    (tmp_path / "rank.py").write_text(SLEEPER.replace("import time;", stubborn))
    (tmp_path / "outer.py").write_text(OUTER)
    command = [sys.executable, tmp_path / "outer.py", tmp_path / "rank.py"]
    outer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with outer.stdout as said:
        (child,) = (int(line) for line in (said.readline(), said.readline()) if line.strip())
    first, second = marks_of(child)
    assert len(find_processes(first)) == 4 and len(find_processes(second)) == 2
    outer.kill()
    outer.wait()
    assert wait_until(lambda: not find_processes(first) and not find_processes(second))


def test_what_a_job_that_ended_well_leaves_running_is_left():
    with guarded() as marks:
        left = subprocess.Popen(["sleep", "300"], env=os.environ | marks)
    try:
        time.sleep(0.5)
        assert left.poll() is None
    finally:
        left.kill()
        left.wait()


def test_a_job_that_fails_takes_all_with_it():
    started = []

    def fail():
        with guarded() as marks:
            started.append(subprocess.Popen(["sleep", "300"], env=os.environ | marks))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert started[0].wait(20) == -signal.SIGTERM


@pytest.mark.parametrize("command", [["launch"], ["bench", "decode"]])
def test_more_processes_than_cores_need_a_flag(command):
    script = [__file__] if command == ["launch"] else []
    result = CliRunner().invoke(app, [*command, "--tp", "200", *script])
    assert result.exit_code != 0
    assert isinstance(result.exception, ConfigError) or "--oversubscribe" in result.output


def test_places_are_counted(monkeypatch):
    import torch

    check_places(CORES)
    check_places(CORES + 198, oversubscribe=True)
    with pytest.raises(ConfigError, match=rf"{CORES} cores?, .* --tp {CORES}, or pass --oversub"):
        check_places(CORES + 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    check_places(4)
    with pytest.raises(ConfigError, match=r"this machine has 4 GPUs.*Use --tp 4, or set CUDA_VIS"):
        check_places(5, oversubscribe=True)

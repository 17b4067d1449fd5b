"""The plugin of `make test-gpu` and `make test-multi-gpu`: which worker runs a test, and a table.

Tests of one family and backend go to one worker, which then compiles each kernel once and keeps
the family's model. The groups that take longest come first. XLA does not search for the fastest
of its own kernels, which took three quarters of a test's time; `XLA_FLAGS= make test-gpu` does it.
A failure is told when it happens, since the command may be stopped before its end. A test that
takes longer than GPU_TEST_SECONDS (180) ends its process, with the stack of each thread.
"""

import faulthandler
import hashlib
import os
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")

_SECONDS = int(os.environ.get("GPU_TEST_SECONDS", "180"))
_BEGUN = "GPU_TEST_BEGUN"  # the variable that names the folder of begun tests
_STDERR = os.fdopen(os.dup(2), "w")  # before pytest captures it

# Seconds of a group on a worker, longest first, as an H100's host took them.
_HEAVY = ("test_gpu_tuning", "test_bench", "test_gpu_kernels_jax", "test_gpu_kernels")
_KINDS = ("family", "case", "dtype")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """Each test gets a group, unless it names one, and heavy groups come first."""
    if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        from dualinfer.kernels.triton import ahead  # compiles in processes of its own

        ahead._PROCESSES = max(0, ahead._PROCESSES // workers - 1)  # workers share the processors
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=_weight)


def _group(item):
    file = Path(item.fspath).stem
    params = item.callspec.params if hasattr(item, "callspec") else {}
    kind = next((str(params[name]) for name in _KINDS if name in params), None)
    if kind is None and file in ("test_gpu_tuning", "test_bench"):
        kind = item.name
    backend = params.get("backend", "")
    return f"{file}-{kind or 'rest'}-{backend}"


def _weight(item):
    file = Path(item.fspath).stem
    return _HEAVY.index(file) if file in _HEAVY else len(_HEAVY)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A test that hangs ends its process; xdist says which it was and goes on with another.

    A file stands while a test runs: xdist gives the test to another process, where it fails.
    """
    begun = _begun(item)
    item.ended_its_process = begun is not None and begun.exists()
    if begun is not None:
        begun.touch()
    faulthandler.dump_traceback_later(_SECONDS, exit=True, file=_STDERR)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        if begun is not None:
            begun.unlink(missing_ok=True)


def pytest_runtest_setup(item):
    """What ended its process once is not tried again."""
    if item.ended_its_process:
        pytest.fail(f"it ended its process, perhaps since it took over {_SECONDS} s", pytrace=False)


def _begun(item):
    """The file that stands while a worker runs this test; None where there are no workers."""
    if not hasattr(item.config, "workerinput"):
        return None
    return Path(os.environ[_BEGUN]) / hashlib.sha256(item.nodeid.encode()).hexdigest()


@pytest.hookimpl(tryfirst=True)  # before xdist starts its workers, which inherit the variable
def pytest_sessionstart(session):
    """A folder of this run alone, in which workers note the tests that they have begun."""
    if _has_workers(session):
        os.environ[_BEGUN] = tempfile.mkdtemp(prefix="gpu-")


@pytest.hookimpl(trylast=True)  # when the workers are gone
def pytest_sessionfinish(session):
    """The folder goes with the run."""
    if _has_workers(session) and _BEGUN in os.environ:
        shutil.rmtree(os.environ.pop(_BEGUN), ignore_errors=True)


def _has_workers(session):
    return session.config.pluginmanager.hasplugin("dsession")


def pytest_runtest_logreport(report):
    """A failure's last lines are printed at once, by the process that prints."""
    if report.failed and not os.environ.get("PYTEST_XDIST_WORKER"):
        lines = report.longreprtext.splitlines()[-12:]
        print("\n" + "\n".join([f"FAILED {report.nodeid}", *lines]), file=_STDERR, flush=True)


def pytest_terminal_summary(terminalreporter):
    """A row for each file: how its tests ended, their seconds over all workers, and the longest."""
    ended = defaultdict(lambda: defaultdict(int))
    seconds: dict[str, float] = defaultdict(float)
    longest: dict[str, tuple[float, str]] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            ended[_file(report)][outcome] += 1
    for reports in terminalreporter.stats.values():
        for report in reports:
            if not hasattr(report, "duration"):
                continue
            file = _file(report)
            seconds[file] += report.duration
            entry = report.duration, report.nodeid.partition("::")[2]
            longest[file] = max(longest.get(file, (0.0, "")), entry)
    row = "{:<28}{:>8}{:>8}{:>8}{:>10}  {}".format
    write = terminalreporter.write_line
    write(row("file", "passed", "failed", "skipped", "seconds", "longest"))
    for file in sorted(ended, key=lambda name: -seconds[name]):
        counts = ended[file]
        time, name = longest.get(file, (0.0, ""))
        failed = counts["failed"] + counts["error"]
        write(
            row(
                file,
                counts["passed"],
                failed,
                counts["skipped"],
                f"{seconds[file]:.0f}",
                f"{time:.0f} s {name}",
            )
        )


def _file(report):
    return Path(report.nodeid.partition("::")[0]).stem

"""The plugin of `make test-gpu` and `make test-multi-gpu`: which worker runs a test, and a table.

Tests of one family and backend go to one worker, which then compiles each kernel once and keeps
the family's model. The groups that take longest come first. XLA does not search for the fastest
of its own kernels, which took three quarters of a test's time; `XLA_FLAGS= make test-gpu` does it.
"""

import os
from collections import defaultdict
from pathlib import Path

import pytest

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")

# Seconds of a group on a worker, longest first, as an H100's host took them.
_HEAVY = ("test_gpu_tuning", "test_bench", "test_gpu_kernels_jax", "test_gpu_kernels")
_KINDS = ("family", "case", "dtype")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """Each test gets a group, unless it names one, and heavy groups come first."""
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

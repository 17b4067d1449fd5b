"""Which tests launch no kernel that no other test launches in the same way.

A plugin of pytest, for the interpreter. Kernels that are launched by the same branches (flags,
names, which pointers are there, which counts are 0, 1 or more) are one way. The costliest tests
come first, and a test counts as a repetition where those that are left launch all of its ways:

    TRITON_INTERPRET=1 pytest -m "slow or not slow" -k kernels -p tests.launched TESTS
"""

from typing import Any

_ways: dict[str, set[str]] = {}
_seconds: dict[str, float] = {}
_now = [""]


def _way(name: str, value: Any) -> str:
    if value is None or isinstance(value, bool | str | tuple):
        return f"{name}={value}"
    if isinstance(value, int) and name.isupper():
        return f"{name}={value if value in (0, 1) else 'n'}"
    return name


def pytest_configure():
    """Every launch of the interpreter is noted from now on."""
    from triton.runtime.interpreter import GridExecutor

    call = GridExecutor.__call__

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        given = dict(zip(self.arg_names, args, strict=False)) | options
        ways = ",".join(_way(name, given[name]) for name in self.arg_names if name in given)
        _ways.setdefault(_now[0], set()).add(f"{self.fn.__name__}: {ways}")
        return call(self, *args, **options)

    GridExecutor.__call__ = noted


def pytest_runtest_setup(item):
    """Launches from now on are of this test."""
    _now[0] = item.nodeid


def pytest_runtest_logreport(report):
    """What a test took."""
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration


def pytest_terminal_summary(terminalreporter):
    """Repetitions, the costliest first."""
    count: dict[str, int] = {}
    for ways in _ways.values():
        for way in ways:
            count[way] = count.get(way, 0) + 1
    terminalreporter.write_line(f"{len(_ways)} tests launch kernels in {len(count)} ways")
    for test in sorted(_ways, key=lambda test: -_seconds.get(test, 0.0)):
        if all(count[way] > 1 for way in _ways[test]):
            for way in _ways[test]:
                count[way] -= 1
            terminalreporter.write_line(f"{_seconds.get(test, 0.0):7.1f} s repeats: {test}")

"""A record of what passes compute, by which a change of the plain ops is proven to change nothing.

It is a plugin of pytest. Tests run as they are, and each pass of an engine that they make in their
own process is noted: digests of what it gave, on torch the launches of its ops by name, and on JAX
the equations of each step that was traced. Two records are compared by

    pytest -p tests.record --record old.json TESTS     # before the change
    pytest -p tests.record --record new.json TESTS     # after it
    python -m tests.record old.json new.json [--worse]

The last prints what differs; with `--worse` only what gives something else, or takes more
launches or equations than before.

With `--record-dtype bf16` engines that tests make in float32 are in bfloat16. With
`--record-traced` JAX compiles nothing and steps give zeros: what was traced is compared, in a
fraction of the time. Asserts may fail then, and the record is what counts. With `--record-arrays`
what passes gave is kept beside the record, and what differs is told in units of bfloat16.
"""

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PASSES = ("forward", "prefill", "extend", "decode", "prefill_scores", "decode_scores", "choose")
CALLS = {"pjit", "jit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}
CALLS |= {"shard_map", "custom_vmap_call"}  # inlined: which function holds an op does not matter
ALIKE = {"square": "mul", "integer_pow": "mul"}  # to XLA


class Record:
    """What the tests' passes gave, by test; `arrays` is the folder for numbers, if any."""

    def __init__(self, arrays: Path | None = None):
        self.tests: dict[str, list[dict[str, Any]]] = {}
        self.arrays = arrays
        self._test = ""
        self._within = False

    def begin(self, test: str) -> None:
        """What comes now is of this test."""
        self._test = test

    def add(self, **noted: Any) -> None:
        """One entry of the test under way."""
        self.tests.setdefault(self._test, []).append(noted)

    def digest(self, result: Any) -> dict[str, str]:
        """A digest of each array within `result`, by its path; -0 is 0."""
        return {path: self._digest(path, array) for path, array in arrays_of(result)}

    def _digest(self, path: str, array: np.ndarray) -> str:
        if self.arrays is not None:
            self.arrays.mkdir(parents=True, exist_ok=True)
            np.save(
                self.arrays / file_of(self._test, len(self.tests.get(self._test, ())), path), array
            )
        found = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array + array.dtype.type(0)).tobytes())
        return found.hexdigest()[:16]

    @contextmanager
    def outermost(self) -> Iterator[bool]:
        """True within a pass that is no part of another."""
        was, self._within = self._within, True
        try:
            yield not was
        finally:
            self._within = was


def file_of(test: str, entry: int, path: str) -> str:
    """The name of the file of an array that a test's entry gave."""
    return re.sub(r"[^\w.-]+", "_", f"{test}.{entry}") + f".{path}.npy"


def folder_of(record: str | Path) -> Path:
    """The folder of a record's arrays."""
    return Path(record).with_suffix(".arrays")


def units(old: np.ndarray, new: np.ndarray) -> float:
    """The largest difference in units of bfloat16, of a value or of the RMS, if that is larger."""
    if old.shape != new.shape or old.dtype.kind != "f":
        return float("inf")
    a, b = old.astype(np.float64), new.astype(np.float64)
    if not (np.isfinite(a) == np.isfinite(b)).all():
        return float("inf")
    is_finite = np.isfinite(a) & (np.abs(a) < 1e30)  # what is hidden is the least there is
    a, b = a[is_finite], b[is_finite]
    size = np.maximum(np.maximum(np.abs(a), np.abs(b)), np.sqrt((a * a).mean()) if a.size else 0)
    size = np.maximum(size, np.finfo(np.float32).tiny)
    return float((np.abs(a - b) / 2.0 ** (np.floor(np.log2(size)) - 7)).max(initial=0))


def arrays_of(result: Any, path: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """The arrays within a pass's result, in NumPy; bfloat16 as float32."""
    if isinstance(result, dict):
        result = list(result.items())
    elif isinstance(result, list | tuple):
        result = [(str(i), x) for i, x in enumerate(result)]
    elif hasattr(result, "fetch"):
        result = result.fetch()
    if isinstance(result, list):
        for name, inner in result:
            yield from arrays_of(inner, f"{path}.{name}" if path else name)
    elif result is not None:
        from dualinfer.arrays import to_numpy

        array = result if isinstance(result, np.ndarray) else to_numpy(result)
        wide = array.dtype.kind not in "fiub" or array.dtype.itemsize < 4
        yield path, np.asarray(array, np.float32) if wide and array.dtype.kind != "b" else array


def watch(record: Record, runner: Any, around: Callable[[], Any], results: bool = True) -> None:
    """Have the passes of a class of runners noted; `around()` is a context that counts.

    Their `results` are noted as well, unless they mean nothing.
    """
    for name in PASSES:
        plain = getattr(runner, name)

        def noted(self: Any, *args: Any, _name: str = name, _plain: Any = plain, **kw: Any) -> Any:
            with record.outermost() as is_outermost:
                if not is_outermost:
                    return _plain(self, *args, **kw)
                with around() as counted:
                    result = _plain(self, *args, **kw)
            gave = {"gave": record.digest(result)} if results else {}
            record.add(**{"pass": _name}, **counted(), **gave)
            return result

        setattr(runner, name, wraps(plain)(noted))


def torch_launches() -> Any:
    """A context that counts torch's ops by name, but for those that give views."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Launches(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.counts: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            result = func(*args, **(kwargs or {}))
            if not _is_view(func, result, args):
                self.counts[str(func.overloadpacket).removeprefix("aten.")] += 1
            return result

    @contextmanager
    def counting() -> Iterator[Callable[[], dict[str, Any]]]:
        launches = Launches()
        with launches:
            yield lambda: {"launches": dict(sorted(launches.counts.items()))}

    return counting()


def _is_view(func: Any, result: Any, args: Any) -> bool:
    import torch

    if func._schema.is_mutable:
        return False
    results = result if isinstance(result, list | tuple) else [result]
    own = [x for x in results if isinstance(x, torch.Tensor)]
    given = list(_tensors(args))
    held = {x.untyped_storage().data_ptr() for x in given if x.device.type != "meta"}
    return all(x.device.type != "meta" and x.untyped_storage().data_ptr() in held for x in own)


def _tensors(values: Iterable[Any]) -> Iterator[Any]:
    import torch

    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def equations(jaxpr: Any) -> Counter[str]:
    """The equations of a jaxpr by primitive, with those of the functions that it calls."""
    found: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "split":  # the same slices, in one equation
            found["slice"] += len(equation.outvars)
        elif name not in CALLS:
            found[ALIKE.get(name, name)] += 1
        for body in inner(equation.params.values()):
            found += equations(body)
    return found


def inner(values: Iterable[Any]) -> Iterator[Any]:
    """The jaxprs among an equation's parameters."""
    for value in values:
        if hasattr(value, "eqns"):
            yield value
        elif hasattr(value, "jaxpr"):
            yield value.jaxpr
        elif isinstance(value, list | tuple):
            yield from inner(value)


def watch_steps(
    note: Callable[[Any, Any], None],
    traced_alone: bool,
    put: Callable[[Any, str, Any], None] = setattr,
) -> None:
    """Have `note` get the key and the jaxpr of each step that JAX engines trace.

    Those `traced_alone` are not compiled, and give zeros. `put` sets what is patched.
    """
    import jax
    import jax.numpy as jnp

    from dualinfer.backends.jax import executables

    def lower(self: Any, job: Any) -> Any:
        function = executables.grouped(job.function) if self._launches else job.function
        jitted = jax.jit(function, donate_argnums=job.donate, out_shardings=job.results)
        with executables._LOWERING:
            traced = jitted.trace(*job.args)
            note(job.key, traced.jaxpr.jaxpr)
            return traced if traced_alone else executables.Lowered(traced.lower())

    def compile_none(self: Any, traced: Any, coming: Any) -> None:
        coming.set_result(
            lambda *args: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), traced.out_info)
        )

    put(executables.Executables, "lower", lower)
    if traced_alone:
        put(executables.Executables, "_compile", compile_none)
        put(executables, "_code_bytes", lambda compiled: 0)


def in_dtype(dtype: str) -> None:
    """Have engines that ask for float32 be of another dtype."""
    import dualinfer

    plain = dualinfer.init_inference

    @wraps(plain)
    def init_inference(*args: Any, **options: Any) -> Any:
        if options.get("dtype") in ("fp32", "float32"):
            options["dtype"] = dtype
        return plain(*args, **options)

    dualinfer.init_inference = init_inference


def pytest_addoption(parser: pytest.Parser) -> None:
    """See the module."""
    parser.addoption("--record", help="the file to write")
    parser.addoption("--record-dtype", help="the dtype of engines in the place of float32")
    parser.addoption("--record-traced", action="store_true", help="JAX compiles nothing")
    parser.addoption("--record-arrays", action="store_true", help="what passes gave is kept")


def pytest_configure(config: pytest.Config) -> None:
    """Watch the runners of both backends."""
    if not config.getoption("--record"):
        return
    file = config.getoption("--record")
    record = Record(folder_of(file) if config.getoption("--record-arrays") else None)
    config.pluginmanager.register(Noting(record, file))
    if find_spec("torch"):
        from dualinfer.backends.torch.runner import TorchRunner

        watch(record, TorchRunner, torch_launches)
    if find_spec("jax"):
        from dualinfer.backends.jax.runner import JaxRunner

        @contextmanager
        def nothing() -> Iterator[Callable[[], dict[str, Any]]]:
            yield dict

        traced_alone = config.getoption("--record-traced")
        watch(record, JaxRunner, nothing, not traced_alone)

        def note(key: Any, jaxpr: Any) -> None:
            counts = dict(sorted(equations(jaxpr).items()))
            record.add(**{"pass": f"step {key}"[:60]}, equations=counts)

        watch_steps(note, traced_alone)
    if config.getoption("--record-dtype"):
        in_dtype(config.getoption("--record-dtype"))


class Noting:
    """Says which test runs, and writes the record at the end."""

    def __init__(self, record: Record, file: str):
        self.record, self.file = record, file

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins, with its fixtures."""
        self.record.begin(nodeid)

    def pytest_sessionfinish(self) -> None:
        """All tests have run."""
        Path(self.file).write_text(json.dumps(self.record.tests, indent=0), encoding="utf-8")


class Compared:
    """What differs of two records, in lines; and how far, where both have arrays."""

    def __init__(self, old: str, new: str, worse: bool = False):
        self.records = [json.loads(Path(name).read_text(encoding="utf-8")) for name in (old, new)]
        self.folders = folder_of(old), folder_of(new)
        self.worse = worse
        self.most = 0.0  # units of bfloat16
        self.lines: list[str] = []

    def run(self) -> None:
        """Compare all tests that both have."""
        old, new = self.records
        self.lines += [f"{test}: not in the old record" for test in sorted(new.keys() - old.keys())]
        for test in sorted(old.keys() & new.keys()):
            both = [list(enumerate(record[test])) for record in self.records]
            steps = [{x["pass"]: (i, x) for i, x in own if "equations" in x} for own in both]
            passes = [[(i, x) for i, x in own if "equations" not in x] for own in both]
            for name in sorted(steps[0].keys() & steps[1].keys()):
                self._pair(test, name, steps[0][name], steps[1][name])
            for i, (a, b) in enumerate(zip(*passes, strict=False)):
                self._pair(test, f"#{i} {a[1]['pass']}", a, b)

    def _pair(self, test: str, name: str, old: tuple[int, Any], new: tuple[int, Any]) -> None:
        (_, a), (_, b) = old, new
        if "gave" in a and "gave" in b and a["gave"] != b["gave"]:
            keys = [k for k in a["gave"] if a["gave"][k] != b["gave"].get(k)]
            far = [self._far(test, (old[0], new[0]), key) for key in keys]
            self.most = max(self.most, *(n for n in far if n is not None), 0.0)
            told = [
                k if n is None else f"{k} by {n:.2g} units" for k, n in zip(keys, far, strict=True)
            ]
            self.lines.append(f"{test} {name}: gave other {', '.join(told) or 'arrays'}")
        for kind in ("launches", "equations"):
            was, now = Counter(a.get(kind, {})), Counter(b.get(kind, {}))
            if was.total() < now.total() or (was != now and not self.worse):
                total = f"{was.total()} to {now.total()}"
                self.lines.append(
                    f"{test} {name}: {kind} {total}: -{dict(was - now)} +{dict(now - was)}"
                )

    def _far(self, test: str, entries: tuple[int, int], key: str) -> float | None:
        """Units of bfloat16 between two arrays; None where they were not kept."""
        pairs = zip(self.folders, entries, strict=True)
        files = [folder / file_of(test, entry, key) for folder, entry in pairs]
        if not all(file.exists() for file in files):
            return None
        return units(*(np.load(file) for file in files))


def main(old: str, new: str, *how: str) -> int:
    """Print what differs; 1 if anything does."""
    compared = Compared(old, new, worse="--worse" in how)
    compared.run()
    lines, tests = compared.lines, compared.records[1]
    total = f"{sum(map(len, tests.values()))} entries of {len(tests)} tests: {len(lines)} differ"
    if compared.folders[1].exists():
        total += f", by {compared.most:.2g} units of bfloat16 at most"
    print(*lines, total, sep="\n")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

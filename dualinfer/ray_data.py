"""Batches on many machines: an actor for Ray Data's `map_batches`."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from .api import init_inference
from .engine.fused import FusedEngine
from .errors import ArgumentError, shown
from .serving.http.batch import BatchFileError, has_failed, row_of_line, without_id
from .serving.http.rows import Row
from .system.new_folder import write_whole

_SUFFIX = ".results.jsonl"


class BatchActor:
    """A callable class for `Dataset.map_batches`: each actor of Ray has a model of its own.

    A batch's `column` has requests of OpenAI's batch format as JSON texts, as
    `ray.data.read_text("in.jsonl")` gives them in "text". The batch that comes back has its other
    columns, `custom_id` (None where a row has none), `failed`, and the results as JSON texts in
    `result`; a row that is no request, or that the model refuses, is such a result too. With an
    `output`, a folder that all machines see, results are also written there, those of a batch as
    one whole file, and a row whose result is there is left out: a job that was stopped goes on when
    it is run again. `reserve` are arguments of `engine.reserve`, `name` is what bodies call the
    model (None: whatever they say), `config` is that of `init_inference`.
    """

    def __init__(
        self,
        model: Any,
        backend: str | None = None,
        *,
        column: str = "text",
        output: str | Path | None = None,
        name: str | None = None,
        reserve: Mapping[str, Any] | None = None,
        **config: Any,
    ) -> None:
        self._column, self._name = column, name
        self._output = None if output is None else Path(output)
        self._done: set[str] = set()
        if self._output is not None:
            self._output.mkdir(parents=True, exist_ok=True)
            self._done = set(_done_in(self._output))
        self._engine: Any = init_inference(model, backend=backend, **config)
        if isinstance(self._engine, FusedEngine) and self._engine.can_generate():
            self._engine.reserve(**(reserve or {}))

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with its results; `batch` and what comes back are columns of one length."""
        if self._column not in batch:
            raise ArgumentError(
                f"The batch has no column {shown(self._column)}, but {', '.join(batch)}. Read the "
                "requests with ray.data.read_text(), or name their column."
            )
        lines = [_text(line) for line in batch[self._column]]
        keys = [_key_of(line) for line in lines]
        left = [i for i, key in enumerate(keys) if key not in self._done and lines[i].strip()]
        results = self._answered([lines[i] for i in left])
        if self._output is not None and left:
            rows = zip((keys[i] for i in left), results, strict=True)
            written = [{"row": key} | row if row["custom_id"] is None else row for key, row in rows]
            _write(self._output, [keys[i] for i in left], written)
            self._done.update(keys[i] for i in left)
        columns = {x: np.asarray(y)[left] for x, y in batch.items() if x != self._column}
        columns["custom_id"] = np.array([row["custom_id"] for row in results], object)
        columns["failed"] = np.array([has_failed(row) for row in results], bool)
        columns["result"] = np.array([json.dumps(row) for row in results], object)
        return columns

    def _answered(self, lines: Sequence[str]) -> list[Row]:
        """The results of lines, in their order."""
        rows: list[Any] = []
        for i, line in enumerate(lines):
            row = row_of_line(line.encode("utf-8", "surrogatepass"))
            rows.append(row if _name_of(row) is not None else without_id(i, row))
        places: dict[str | int, list[int]] = {}
        for i, row in enumerate(rows):
            places.setdefault(_name_of(row) or i + 1, []).append(i)
        results: list[Row] = [{}] * len(lines)
        for result in self._engine.batch(rows, self._name):
            line = result.pop("line", None)
            results[places[line or result["custom_id"]].pop(0)] = result
        return results


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def _name_of(row: Any) -> str | None:
    name = row.get("custom_id") if isinstance(row, dict) else None
    return name if isinstance(name, str) and name else None


def _key_of(line: str) -> str:
    """What tells a row from others: a digest of its id, or of all of it where it has none."""
    data = line.encode("utf-8", "surrogatepass")
    name = _name_of(row_of_line(data))
    return _digest(b"line " + data if name is None else _id_bytes(name))


def _id_bytes(name: str) -> bytes:
    return b"id " + name.encode("utf-8", "surrogatepass")


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _write(folder: Path, keys: Iterable[str], results: Iterable[Row]) -> None:
    """Write results as one file, whole; a task that Ray runs again writes the same one."""
    content = "".join(json.dumps(row) + "\n" for row in results).encode()
    write_whole(folder / (_digest("".join(keys).encode()) + _SUFFIX), content)


def _done_in(folder: Path) -> Iterator[str]:
    """The keys of the rows whose results a folder has."""
    for path in sorted(folder.glob("*" + _SUFFIX)):
        try:
            with path.open("rb") as lines:
                for row in map(json.loads, lines):
                    name = row["custom_id"]
                    yield row["row"] if name is None else _digest(_id_bytes(name))
        except (ValueError, KeyError, TypeError) as error:
            raise BatchFileError(
                f"{path} has no results of a batch. Name another folder, or remove it."
            ) from error

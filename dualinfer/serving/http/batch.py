"""Files of OpenAI's batches: JSON lines in, JSON lines out, which may be cut off and gone on with.

The output is the job's only memory. A result is written with one call as a whole line, at its end;
a line that a crash has torn is the last one, and is cut off by the next run. Ids that the output
holds are not asked again.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import ArgumentError, DualinferError, shown
from .rows import Row, RowError

MOST_LINE = 16 * 2**20  # bytes of a line of the input
_SYNC_EVERY, _SYNC_ROWS = 1.0, 256  # seconds and rows after which results are on the disk for sure
_BLOCK = 2**20


class BatchFileError(DualinferError, ValueError):
    """The files of a batch do not fit each other, or are not what they should be."""


@dataclass
class Progress:
    """The progress of a job: its rows, those answered before and now, and those in vain.

    `tokens` are those that were made now.
    """

    total: int
    before: int
    done: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def describe(self) -> str:
        """It in words, with the rate."""
        rate = self.done / self.seconds if self.seconds else 0.0
        text = f"{self.before + self.done:,} of {self.total:,} rows"
        text += f", {self.failed:,} failed" if self.failed else ""
        text += f"; {rate:,.1f} rows/s" if self.done else ""
        if self.done and self.tokens:
            text += f", {self.tokens / self.seconds:,.0f} tokens/s"
        if rate and (left := self.total - self.before - self.done):
            text += f", {left / rate:,.0f} s left"
        return text


def run_file(
    answer: Callable[[Iterable[Any]], Iterator[Row]],
    source: Path,
    target: Path,
    shard: tuple[int, int] = (0, 1),
    tell: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Answer the rows of a file that another does not hold yet, and add the results to that.

    Of a `shard` (i, n) every n-th row from the i-th. `answer` gives results of rows as they come.
    """
    if source.absolute() == target.absolute() or (target.exists() and source.samefile(target)):
        raise ArgumentError(f"{target} is the input. Name another file for the results.")
    with source.open("rb") as lines, _opened(target) as out:
        expected = _scan(lines, source, shard)
        answered = _answered(out, target, expected)
        progress = Progress(len(expected), len(answered))
        begun = written = time.monotonic()
        unsynced = 0
        rows = _rows(lines, shard, answered)
        for result in answer(rows):
            _append(out, json.dumps(result).encode())  # in ASCII, so that no text ends a line
            unsynced += 1
            progress.done += 1
            progress.failed += has_failed(result)
            progress.tokens += _tokens_of(result)
            now = time.monotonic()
            progress.seconds = now - begun
            if unsynced >= _SYNC_ROWS or now - written >= _SYNC_EVERY:
                os.fsync(out.fileno())
                written, unsynced = now, 0
            tell(progress)
        os.fsync(out.fileno())
    return progress


@contextmanager
def _opened(target: Path) -> Iterator[BinaryIO]:
    """The output, held alone."""
    is_new = not target.exists()
    with target.open("a+b", buffering=0) as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BatchFileError(
                f"{target}: another process writes to it. Wait for it, or name another file."
            ) from error
        if is_new:
            folder = os.open(target.absolute().parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        yield out  # type: ignore[misc]


def _append(out: BinaryIO, line: bytes) -> None:
    """Write a line; where that fails in the middle, as on a full disk, it is as if it never was."""
    data, size = line + b"\n", os.fstat(out.fileno()).st_size
    try:
        if os.write(out.fileno(), data) != len(data):
            raise OSError(f"{out.name}: a line was not written whole.")
    except OSError:
        os.ftruncate(out.fileno(), size)
        raise


def _lines(file: BinaryIO, most: int = MOST_LINE) -> Iterator[tuple[int, int, bytes | None]]:
    """Number and place of each line and the line itself; None for one that is too long to read."""
    file.seek(0)
    number, place = 0, 0
    while data := file.readline(most + 1):
        begun, is_long = place, len(data) > most
        place += len(data)
        while not data.endswith(b"\n") and (data_ := file.readline(_BLOCK)):
            place += len(data_)
            data = data_ if is_long else data + data_
        yield number, begun, None if is_long else data
        number += 1


def _key(value: str) -> bytes:
    """A short stand-in for an id, so that millions of them are held."""
    return blake2b(value.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _line_key(number: int) -> bytes:
    return b"line %d" % number


def row_of_line(data: bytes | None) -> Any:
    """The row of a line, or a RowError in its place."""
    if data is None:
        return RowError("line_too_long", f"The line is longer than {MOST_LINE:,} bytes.")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        return RowError("invalid_json", f"The line is no JSON: {error}"[:500])


def _key_of(number: int, row: Any) -> bytes:
    """The key that tells a row from all others: its id, or the number of its line."""
    name = row.get("custom_id") if isinstance(row, dict) else None
    return _key(name) if isinstance(name, str) and name else _line_key(number)


def _in_shard(number: int, shard: tuple[int, int]) -> bool:
    return number % shard[1] == shard[0]


def _scan(file: BinaryIO, source: Path, shard: tuple[int, int]) -> set[bytes]:
    """The keys of the rows of a shard; two of one id anywhere in the file are refused."""
    seen: dict[bytes, int] = {}
    for number, _, data in _lines(file):
        if data is not None and not data.strip():
            continue
        row = row_of_line(data)
        key = _key_of(number, row)
        if key in seen:
            raise BatchFileError(
                f"{source}: lines {seen[key] + 1} and {number + 1} have the same custom_id "
                f"{shown(row['custom_id'])}. Give each row an id of its own."
            )
        seen[key] = number
    if not seen:
        raise BatchFileError(f"{source} holds no rows.")
    return {key for key, number in seen.items() if _in_shard(number, shard)}


def _answered(out: BinaryIO, target: Path, expected: set[bytes]) -> set[bytes]:
    """The keys of the rows whose results are there; what a crash has torn is cut off."""
    found: set[bytes] = set()
    for number, place, data in _lines(out, 2**31):
        if data is None or not data.endswith(b"\n"):
            os.ftruncate(out.fileno(), place)
            break
        try:
            result = json.loads(data)
            name = result["custom_id"]
            key = _key(name) if name else _line_key(result["line"] - 1)
        except (ValueError, LookupError, TypeError) as error:
            raise BatchFileError(
                f"{target}: line {number + 1} is no result of a batch. Name another file."
            ) from error
        if key not in expected:
            raise BatchFileError(
                f"{target}: line {number + 1} is the result of a row that the input has not. "
                "Name another file, or delete this one."
            )
        if key in found:
            raise BatchFileError(f"{target}: line {number + 1} repeats the result of a row.")
        found.add(key)
    return found


def _rows(lines: BinaryIO, shard: tuple[int, int], answered: set[bytes]) -> Iterator[Any]:
    """Rows that have no result yet, each when it is asked for."""
    for number, _, data in _lines(lines):
        if not _in_shard(number, shard) or (data is not None and not data.strip()):
            continue
        row = row_of_line(data)
        key = _key_of(number, row)
        if key in answered:
            continue
        yield without_id(number, row) if key == _line_key(number) else row


def without_id(number: int, row: Any) -> RowError:
    """Why a row has no id, with the number of its line, by which it is told."""
    if isinstance(row, RowError):
        return RowError(row.code, str(row), number + 1)
    what = "custom_id is missing, empty or no text."
    return RowError("missing_custom_id", what, number + 1)


def has_failed(result: Row) -> bool:
    """True unless a row was answered."""
    return result["response"] is None or result["response"]["status_code"] != 200


def _tokens_of(result: Row) -> int:
    body = (result["response"] or {}).get("body") or {}
    usage = body.get("usage") if isinstance(body, dict) else None
    return int((usage or {}).get("completion_tokens") or 0)

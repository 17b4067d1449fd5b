"""Requests sent as a load says, and when their tokens came."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .load import Ask, Load


@dataclass
class Record:
    """One request: seconds since the start, of when it was sent and when something of it came.

    `late` is by how much later than the load says. `output` is how many tokens came, by the
    server's own count.
    """

    input: int
    asked: int
    late: float = 0.0
    begun: float = 0.0
    stamps: list[float] = field(default_factory=list)
    output: int = 0
    error: str | None = None

    @property
    def ended(self) -> float:
        """When its last token came."""
        return self.stamps[-1]


@dataclass
class Run:
    """A load that was run: a record of each request, and the seconds that all of them took."""

    records: list[Record]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The fields as a plain dict, for another process."""
        return asdict(self)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "Run":
        """The Run that `to_dict` was called on."""
        return cls([Record(**one) for one in fields["records"]], fields["seconds"])


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()

    def __call__(self) -> float:
        """The seconds."""
        return time.perf_counter() - self._begun


Send = Callable[[Ask, Record, Clock], Awaitable[None]]
"""Sends one request, and notes in its record what came of it and when."""


async def drive(load: Load, asks: Sequence[Ask], send: Send) -> Run:
    """Send requests when they come, those that may be under way; what fails is in its record."""
    gate = asyncio.Semaphore(load.concurrency or max(1, len(asks)))
    clock, loop = Clock(), asyncio.get_running_loop()
    end = None if load.within is None else loop.time() + load.within

    async def sent(ask: Ask, record: Record) -> None:
        if (early := ask.at - clock()) > 0:
            await asyncio.sleep(early)
        record.late = clock() - ask.at
        async with gate:
            record.begun = clock()
            await send(ask, record, clock)

    async def one(ask: Ask) -> Record:
        record = Record(len(ask.ids), ask.new_tokens)
        limit = asyncio.timeout_at(end)
        try:
            async with limit:
                await sent(ask, record)
        except Exception as error:
            record.error = _told(error)
            if load.within is not None and limit.expired():
                record.error = f"It had not ended within {load.within:g} s."
        return record

    records = await asyncio.gather(*map(one, asks))
    return Run(list(records), clock())


def _told(error: Exception) -> str:
    """An error in one line, without what differs from one request to the next."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0][:200]}" if said else type(error).__name__

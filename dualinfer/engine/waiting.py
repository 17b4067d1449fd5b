"""Who waits for slots of a loop: calls of threads, and the thread that drives jobs."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..backends.base import Request
from .sequence import Live


@dataclass(eq=False)
class Ticket:
    """A call that is to begin, or the place of the thread that drives jobs.

    Of those `chosen` the `owner`, a thread, chooses the tokens. Once it has begun, which another
    thread may do whose prompts are read in the same pass, it has `lives`, and one that is chosen
    the `logits` [B, V] behind its prompts. One that is `alone` failed beside others.
    """

    requests: Sequence[Request] = ()
    chosen: bool = False
    is_driver: bool = False
    owner: int = field(default_factory=threading.get_ident)
    lives: list[Live] | None = None
    logits: Any = None
    alone: bool = False

    @property
    def count(self) -> int:
        """Slots that it waits for."""
        return 1 if self.is_driver else len(self.requests)


class Queue(list[Ticket]):
    """Tickets in the order in which they came: who came first is first."""

    def take(self, ticket: Ticket) -> bool:
        """Take a ticket out; False where another thread did."""
        try:
            self.remove(ticket)
        except ValueError:
            return False
        return True

    def wanted_before_driver(self) -> int:
        """Slots of calls that came before what the driver has."""
        queue = list(self)
        last = next((i for i, x in enumerate(queue) if x.is_driver), len(queue))
        return sum(ticket.count for ticket in queue[:last])

    def claim(self, waits: bool, anew: bool = False) -> None:
        """Keep the driver's place among the calls that wait while it `waits`, or give it up.

        It goes behind them `anew` once one of its sequences got a slot.
        """
        there = [ticket for ticket in list(self) if ticket.is_driver]
        if there and (anew or not waits):
            self.take(there[0])
            there = []
        if waits and not there:
            self.append(Ticket(is_driver=True))

    def lets(self, ticket: Ticket, free: int) -> bool:
        """True unless another call has waited longer, or the driver needs one of the free slots."""
        before = self[: self.index(ticket)]
        if any(not x.is_driver for x in before):
            return False
        return ticket.count + sum(x.count for x in before) <= free

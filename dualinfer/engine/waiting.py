"""Who waits for slots of a loop: calls of threads, and the thread that drives jobs."""

from dataclasses import dataclass


@dataclass(eq=False)
class Ticket:
    """The place of a call that waits for slots, or of the thread that drives jobs."""

    count: int
    is_driver: bool = False


class Queue(list[Ticket]):
    """Tickets in the order in which they came: who came first is first."""

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
            self.remove(there[0])
            there = []
        if waits and not there:
            self.append(Ticket(1, is_driver=True))

    def lets(self, ticket: Ticket, free: int) -> bool:
        """True unless another call has waited longer, or the driver needs one of the free slots."""
        before = self[: self.index(ticket)]
        if any(not x.is_driver for x in before):
            return False
        return ticket.count + sum(x.count for x in before) <= free

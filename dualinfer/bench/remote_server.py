"""A row of the bench of a server that is not ours."""

import asyncio
from dataclasses import dataclass

from ..errors import DualinferError
from .client import run_all
from .load import Load
from .runs import Row
from .serving import figures


@dataclass(frozen=True)
class Remote:
    """A row of a server that is not ours."""

    url: str
    model: str | None
    key: str | None
    vocab: int
    load: Load
    warm_ups: int
    goals: dict[str, float]

    def row(self) -> Row:
        """The figures, or why there are none."""
        load = self.load.filled()
        about = {"kind": "serve", "system": "url", "url": self.url, "model": self.model or ""}
        about |= {"dtype": None, "kernels": True, "load": load.to_dict(), "what": load.describe()}
        loads = [*([load.warm_up(self.warm_ups)] if self.warm_ups else []), load]
        first = min(16, self.vocab // 2)  # special ids are the first ones, mostly
        try:
            request = {"url": self.url, "model": self.model, "key": self.key, "first": first}
            request |= {"vocab": self.vocab, "loads": [one.to_dict() for one in loads]}
            return about | figures(asyncio.run(run_all(request))[-1], self.goals)
        except (DualinferError, OSError) as error:
            return about | {"error": str(error)}

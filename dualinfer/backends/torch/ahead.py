"""Knows which kernels a pass launches before it runs, where Triton has nothing on disk yet.

Triton compiles a kernel when it is launched, one after another: a first call would wait for that.
So the pass is made once over tensors without memory, which takes some tenths of a second, and
processes compile all that it would launch, several at a time. See `kernels/triton/processes.py`.
"""

import logging
import warnings
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from typing import Any

import torch

from .ops.plain import PlainOps

_log = logging.getLogger(__name__)


class Ahead:
    """The kernels of one runner's passes, as far as they are asked for before these run.

    `ops` are those of the passes; None where nothing is known before.
    """

    def __init__(self, ops: PlainOps | None) -> None:
        self._ops = ops
        self._met: dict[Hashable, list[Future[None]]] = {}
        self.then: Callable[[], None] | None = None  # called once, behind the first pass

    @property
    def is_on(self) -> bool:
        """True where the kernels of passes are asked for before these run."""
        if self._ops is None:
            return False
        from ...kernels.triton.ahead import is_cold

        return is_cold()

    def meet(self, key: Hashable, run: Callable[[PlainOps], Any], waits: bool) -> None:
        """Have the kernels of `run(ops)` compiled; with `waits` until Triton finds them on disk.

        `key` names all that they depend on. `run` is called once for a key, with ops and on tensors
        that have no memory: it must not ask for values, and what it does in Python must be apart.
        """
        if not self.is_on:
            return
        if key not in self._met:
            self._met[key] = self._expected(run)
        then, self.then = self.then, None
        if then is not None:
            then()
        if waits:
            wait(self._met[key])

    def _expected(self, run: Callable[[PlainOps], Any]) -> list[Future[None]]:
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

        from ...kernels.triton.ahead import asked, expect

        assert self._ops is not None
        ops = self._ops.apart()
        try:
            with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
                warnings.simplefilter("ignore")  # on the address of what has no memory
                return expect(asked(lambda: run(ops), FakeTensor))
        except Exception as error:  # a pass that asks for values, or a Triton of another kind
            _log.info("kernels are compiled as they are launched: %r", error)
            self._ops = None
            return []


NOTHING_AHEAD = Ahead(None)


def prepare(device: torch.device) -> None:
    """Have Triton looked through while weights are read, and processes started if all is new.

    Whatever fails here fails again where kernels are needed, and is told there.
    """
    try:
        from ...kernels.triton import ahead

        major, minor = torch.cuda.get_device_capability(device)
        ahead.prepare(10 * major + minor)
        if ahead.is_cold():
            from torch._subclasses.fake_tensor import FakeTensorMode

            with FakeTensorMode():  # takes a second the first time
                torch.empty(1)
    except Exception as error:
        _log.info("Triton was not looked through: %r", error)

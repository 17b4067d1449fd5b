"""Knows which kernels a pass launches before it runs, where Triton has nothing on disk yet.

Triton compiles a kernel when it is launched, one after another: a first call would wait for that.
So a pass of a few layers is made once over tensors without memory, in a tenth of a second, and
processes compile all that it would launch, several at a time. See `kernels/triton/processes.py`.
"""

import logging
import threading
import warnings
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from ...model.spec import ModelSpec
from ...model.weights import Leaf, Weight, parts_of
from ...ops.contract import Weights
from .ops.plain import PlainOps
from .params import Params

_log = logging.getLogger(__name__)
_MOST_SECONDS = 60  # that a pass waits: a kernel takes few
_ONE = threading.Lock()  # filters of warnings are the process's


Run: TypeAlias = Callable[[ModelSpec, Params, PlainOps], Any]


class Ahead:
    """The kernels of one runner's passes, as far as they are asked for before these run.

    `ops` are those of the passes; None where nothing is known before.
    """

    def __init__(self, spec: ModelSpec, ops: PlainOps | None) -> None:
        self._spec, self._ops = spec, ops
        self._met: dict[Hashable, list[Future[None]]] = {}
        self.then: Callable[[], None] | None = None  # called once, behind the first pass

    @property
    def is_on(self) -> bool:
        """True where the kernels of passes are asked for before these run."""
        if self._ops is None:
            return False
        from ...kernels.triton.ahead import is_cold

        return is_cold()

    def meet(self, key: Hashable, params: Params, run: Run, waits: bool) -> None:
        """Have the kernels of a pass compiled; with `waits` until Triton finds them on disk.

        `key` names all that they depend on, and `run(spec, params, ops)` is the pass, called once
        for a key. It gets fewer layers and ops with memory of their own, on tensors without memory:
        it asks for no values, and leaves nothing behind in Python.
        """
        if not self.is_on:
            return
        if key not in self._met:
            self._met[key] = self._expected(params, run)
        then, self.then = self.then, None
        if then is not None:
            then()
        if waits:
            wait(self._met[key], _MOST_SECONDS)
            self._met[key] = []  # those that are late are waited for once

    def _expected(self, params: Params, run: Run) -> list[Future[None]]:
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

        from ...kernels.triton.ahead import expected

        assert self._ops is not None
        ops = self._ops.apart()
        try:
            few = _shortened(self._spec, params)
            with _ONE, warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
                warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
                return expected(lambda: run(*few, ops), FakeTensor)
        except Exception as error:  # a pass that asks for values, or a Triton of another kind
            _log.info("kernels are compiled as they are launched: %r", error)
            self._ops = None
            return []


def _shortened(spec: ModelSpec, params: Params) -> tuple[ModelSpec, Params]:
    """A model of the first layers alone, among which is one of each kind: it has all launches.

    Its weights are others, over the same arrays: these keep nothing that is made of them.
    """
    kinds: list[Any] = []
    count = 0
    for i, (layer, weights) in enumerate(zip(spec.layers, params.layers, strict=False)):
        arrays = {
            (name, part): (array.shape, array.dtype)
            for name, leaf in weights.items()
            for part, array in parts_of(leaf).items()
        }
        if (layer, arrays) not in kinds:
            kinds.append((layer, arrays))
            count = i + 1
    layers = [_anew(weights) for weights in params.layers[:count]]
    short = replace(spec, layers=spec.layers[:count])
    return short, params._replace(outer=_anew(params.outer), layers=layers)


def _anew(weights: Weights) -> Weights:
    return {name: _copied(leaf) for name, leaf in weights.items()}


def _copied(leaf: Leaf) -> Leaf:
    if not isinstance(leaf, Weight):
        return leaf
    return replace(leaf, pieces=tuple(map(_copied, leaf.pieces)))


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

"""The runner of layers in host memory: one step a layer, on weights that have arrived."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import UnsupportedError
from ...model.load_plan import LoadPlan, TensorSource
from ...ops.contract import Tokens
from ..base import SamplingFeatures
from . import ahead
from .forward import joined, parts_of, reads_others
from .params import Params
from .pending import PendingSteps, PendingTokens
from .prompts import Step
from .runner import JaxRunner
from .sampler import mode_of
from .streaming import LayerStream
from .whole import Part, Placed


class StreamingRunner(JaxRunner):
    """A JaxRunner with layers in pinned host memory; see `LayerStream`.

    A step of all layers would be one executable, whose copies XLA orders as it sees fit: all at
    once, or out of the loop of tokens. So each layer is a step of its own; layers that are alike
    share an executable. Between two tokens the host looks whether all sequences have ended, while
    the next copies go on.
    """

    def __init__(self, model: Placed) -> None:
        super().__init__(model)
        layers, spec = self.params.layers, self.steps.spec
        if reads_others(spec):
            raise UnsupportedError(
                f"keep_module_on_host=True: layers of {spec.architecture} read what others made, "
                "and backend='jax' streams layers one by one. Leave it unset, or use "
                "backend='torch'."
            )
        if [i for i, _ in spec.caches] not in ([], list(range(len(spec.layers)))):
            raise UnsupportedError(
                f"keep_module_on_host=True: layers of {spec.architecture} have two caches each, or "
                "none, and backend='jax' streams layers with one. Leave it unset, or use "
                "backend='torch'."
            )
        self._stream = LayerStream(layers)
        kinds = [self._kind(i) for i in range(len(layers))]
        last = len(layers) - 1
        # The first and the last have the embedding and the head with them.
        self._alike = [0, *(kinds.index(kind, 1) for kind in kinds[1:last]), last]

    def _kind(self, index: int) -> Any:
        """The key of a layer's step: layers of one key can share a step."""
        leaves, tree = jax.tree.flatten(self.params.layers[index])
        specs = self._slots.specs
        cached = specs[index] if specs else None
        layer = self.steps.spec.layers[index]
        return layer, cached, tree, [(x.shape, x.dtype, self._place.spec_of(x)) for x in leaves]

    def _layer(self, index: int) -> tuple[list[jax.Array], Part, range]:
        """A layer's parameters with those outside of the layers, and the number of its step."""
        at = self._alike[index]
        weights = self._stream.take(index)
        table = None if self._exchange is None else self._exchange.table
        layers: Any = [None] * at + [weights]
        leaves, tree = jax.tree.flatten(self.params._replace(layers=layers, mailboxes=table))
        split = self._slots.split
        lies = [None] * at + [split[index]] if split else []
        return leaves, (tree, [self._place.spec_of(x) for x in leaves], lies), range(at, at + 1)

    def _outputs(
        self,
        tokens: Tokens,
        size: tuple[int, int],
        keep: bool,
        rows: int,
        how: Mapping[str, Any],
    ) -> Any:
        """See `JaxRunner`; where it takes fewer rows at a time, one pass after another."""
        passes = []
        for first in range(0, size[0], rows):
            by_row, common = parts_of(tokens)
            some = by_row.each(lambda x, own=slice(first, first + rows): x[own])
            given = self._place.operands(joined(some, common))
            passes.append(self._whole_pass(given, keep, how))
        if len(passes) == 1:
            return passes[0]
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *passes)

    def _whole_pass(self, tokens: Tokens, keep: bool, how: Mapping[str, Any]) -> Any:
        shapes, earlier = tokens.each(lambda x: x.shape), []
        x: Any = None
        for index in range(len(self._stream)):
            leaves, part, layers = self._layer(index)
            step = partial(self.steps.forward, keep=keep, layers=layers, **how)
            key = "forward", shapes, keep, layers, *how.values()
            function = self._of_leaves(step, part=part)
            given, flags = self._executables.run(key, function, leaves, tokens, x)
            self._note(flags)
            if index + 1 < len(self._stream):
                x = given[-1] if keep else given
                earlier += given if keep else []
            else:
                x = given
            self._stream.sent(index, x)
        if keep:
            x["hidden_states"] = (*earlier, *x["hidden_states"])
        return x

    def _advance(
        self, step: Step, beside: Callable[[], None] | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """See `JaxRunner`."""
        slots = self._slots
        cache, given = slots.shown(), slots.held[1] if step.ends else slots.state
        state = given
        sizes = *cache.key, *state.eos.shape, *state.parts
        held, args = list(cache.layers), self._place.operands(step.args)
        x = flags = None
        with self._slots.at_stake():
            for index in range(len(held)):
                leaves, part, layers = self._layer(index)
                is_last = index + 1 == len(held)
                own: Any = [None] * layers.start + [held[index]]

                def work(*args: Any, layers: range = layers) -> Any:
                    return step.function(*args, layers)

                own, state, x, flags = self._executables.run(
                    (*step.key, layers.start, *sizes),
                    self._of_leaves(work, cached=True, part=part),
                    *(leaves, replace(cache, layers=own), given, *args, x),
                    donate=(1, 2) if is_last else (1,),
                )
                held[index], cache = own.layers[layers.start], own
                self._note(flags)
                self._stream.sent(index, x)
        self._slots.hold(replace(cache, layers=held), state)
        assert x is not None
        return self._place.local(x), flags

    def _take_steps(self, steps: int, reach: int) -> PendingSteps:
        """See `JaxRunner`."""
        live, slots = self._slots.live, self._slots.state.active.shape[0]
        needs, part, taken = SamplingFeatures.of(live.requests), None, []
        if live.pool is not None:
            part = live.room(self.spec, reach)
            slots = part.slots
        how = mode_of(needs), needs.tells, part
        while len(taken) < steps and np.asarray(self._place.local(self._slots.state.active)).any():
            results = self._advance(self._decode_step(1, True, *how))
            taken.append(PendingTokens(results[0], 1, slots, self._exchange, results[1]))
        return PendingSteps(taken, slots)

    def _begin(self, tokens: int) -> None:
        """Nothing: a step of one layer is compiled sooner than the pass before it has copied."""

    def _prepare_pool(self) -> None:
        """As `_begin`."""

    def refresh(self, plan: LoadPlan, source: TensorSource) -> None:
        """See `JaxRunner`."""
        try:
            super().refresh(plan, source)
        finally:
            self._stream.forget()

    def pure_forward(
        self, keep: bool, of_encoder: bool = False, derived: bool = False
    ) -> Callable[[Params, Any], dict[str, Any]]:
        """UnsupportedError: it is one function of weights that lie on the device."""
        raise UnsupportedError(
            "engine.apply is one function of all weights on the device, and this engine streams "
            "them from the host's memory. Call the engine instead; for apply and its gradients "
            "make one with keep_module_on_host=False, and without zero's offload_param."
        )

    def compile(self, backend: Any = None, compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """Nothing without arguments, since every step is compiled; else UnsupportedError."""
        if ahead.Wanted.of(backend, compile_kwargs) is not None:
            raise UnsupportedError(
                f"compile_kwargs={dict(compile_kwargs or {})!r}: with layers streamed from the "
                "host's memory (keep_module_on_host) steps are compiled when they are first used. "
                "Call compile() without arguments, or not at all."
            )

    def close(self) -> None:
        """See `JaxRunner`."""
        self._stream.forget()
        super().close()

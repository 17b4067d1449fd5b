"""Steps of decoding over static buffers, each replayed from a graph where there are graphs."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch

from ... import decoder
from ...model.spec import ModelSpec
from ...ops import sampling
from ...ops.contract import Tokens
from ...system.patience import told_if_slow
from ..base import NO_TOKEN, SamplingFeatures
from .ahead import Ahead
from .graphs import StepGraphs
from .maths import MATHS
from .ops.plain import PlainOps
from .params import Params
from .sampler import SlotState
from .slots import View


class Steps:
    """The steps of one runner over views of its slots.

    `graphs` is None where there are none. `forget` drops them, before buffers are replaced whose
    addresses they hold. `ahead` knows kernels of steps before these run.
    """

    def __init__(
        self,
        spec: ModelSpec,
        ops: PlainOps,
        graphs: StepGraphs | None,
        forget: Callable[[], None],
        ahead: Ahead | None = None,
    ) -> None:
        self._spec, self._ops, self.graphs, self._forget = spec, ops, graphs, forget
        self._ahead = ahead
        self.close()

    def close(self) -> None:
        """Let go of the buffers."""
        self._told = torch.empty(0)  # of the steps of a call, where a request wants to know
        self._scores = torch.empty(0)  # of the last step, where the host chooses tokens
        self._chosen = torch.empty(0)  # bool: the slots of that step

    def take(
        self, steps: int, params: Params, view: View, features: SamplingFeatures, asks: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens int64 [steps, N] of the slots, and what is told of them: in buffers that last.

        With `asks` the host stops where all sequences have ended; on a GPU it waits for that.
        """
        state, slots = view.state, view.room.slots
        if features.tells and self._told.shape[1:2] != view.tokens.shape[1:]:
            self._forget()
            width = 1 + 2 * min(sampling.TOP, self._spec.vocab)
            self._told = torch.empty(*view.tokens.shape, width, device=view.tokens.device)
        key, run = self._step_of(params, view, features)
        out = view.tokens[:, :slots]
        out.fill_(NO_TOKEN)
        view.rows[:slots].zero_()
        for _ in range(steps):
            if asks and not state.active.any():
                break
            self._replay(key, run)
        return out[:steps], self._told[:steps, :slots] if features.tells else None

    def prepare(self, params: Params, view: View, features: SamplingFeatures) -> None:
        """Take a step of no slot, so that its graph is there."""
        view.rows.zero_()
        self._replay(*self._step_of(params, view, features))

    def scores(self, params: Params, view: View, rows: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] after the last tokens of slots `rows` [B], which alone have stepped."""
        state, cache, room, tokens, _ = view
        if self._scores.shape[0] < room.slots:
            self._forget()
            count, device = tokens.shape[1], tokens.device
            self._scores = torch.empty(count, self._spec.vocab, device=device)
            self._chosen = torch.empty(count, dtype=torch.bool, device=device)
        out, chosen = self._scores[: room.slots], self._chosen[: room.slots]
        chosen.zero_()
        chosen[rows] = True

        def run() -> None:
            out.copy_(state.shown(self._next_logits(params, state, cache, chosen)))

        self._replay((room.slots, room, "scores"), run)
        return out[rows]

    def _step_of(
        self, params: Params, view: View, features: SamplingFeatures
    ) -> tuple[Hashable, Callable[[], None]]:
        """The key of a step's graph, and the step."""
        slots, launches = view.room.slots, self._ops.launches_of(features)
        key = slots, view.room, launches, features.weighs, features.tells
        if self.graphs is None or key not in self.graphs:
            self.expect(params, view, features, waits=True)
        return key, partial(self._step, params, view, features)

    def expect(
        self, params: Params, view: View, features: SamplingFeatures, waits: bool = False
    ) -> None:
        """Have the kernels of a step compiled, where that is done ahead; see `Ahead.meet`."""
        if self._ahead is None:
            return
        key = "step", view.room, self._ops.launches_of(features), features.weighs, features.tells

        def step(spec: ModelSpec, params: Params, ops: PlainOps) -> None:
            apart = Steps(spec, ops, None, self._forget)
            apart._told = self._told
            apart._step(params, view, features)

        self._ahead.meet(key, params, step, waits)

    def _replay(self, key: Hashable, run: Callable[[], None]) -> None:
        """Do `run` once, from the key's graph where there are graphs."""
        if self.graphs is None:
            run()
        elif key in self.graphs:
            self.graphs.replay(key)
        else:
            with told_if_slow("kernels and a graph are made for sizes that are new"):
                run()
                self.graphs.capture(key, run)

    def _step(self, params: Params, view: View, features: SamplingFeatures) -> None:
        """One token for each active slot, all in place: ready for capture."""
        state, slots = view.state, view.room.slots
        out, step = view.tokens[:, :slots], view.rows[:slots]
        logits = self._next_logits(params, state, view.cache, state.active)
        scores = state.shown(logits)
        moves, row = state.active, step
        if features.weighs:
            scores, moves = state.weighed(scores), moves.clone()
        if features.tells:
            row = row.clone()
        self._ops.advance(scores, state, features, out, step)
        if features.weighs:
            state.count(moves)
        if features.tells:
            told = sampling.tell(MATHS, logits, state.last)[None]
            self._told[:, : len(row)].scatter_(0, row[None, :, None].expand_as(told), told)

    def _next_logits(
        self, params: Params, state: SlotState, cache: list[Any], moves: torch.Tensor
    ) -> torch.Tensor:
        """Logits float32 [N, V] after each slot's last token, which goes into the cache.

        States of recurrences change in the slots that bool `moves` [N] says.
        """
        spec, ops = self._spec, self._ops
        ids, positions = state.last[:, None], state.length[:, None]
        angles = ops.angles(spec, params, positions, state.length)
        numbers, crossing, states = spec.cache_numbers, spec.cross_numbers, spec.state_numbers

        def attend(i: int, qkv: torch.Tensor) -> torch.Tensor:
            layer, own = ops.layer_attention(spec, params, i), cache[numbers[i]]
            return ops.attend_token(layer, qkv, angles, own, state.length)[0]

        def across(i: int, q: torch.Tensor) -> torch.Tensor:
            a = spec.layers[i].cross
            assert a is not None
            return ops.attend_kept(a, q, cache[crossing[i]])

        def recur(i: int, x: torch.Tensor) -> torch.Tensor:
            own = spec.layers[i].recurrence
            assert own is not None
            return ops.recur_token(own, params.layers[i], x, cache[states[i]], moves)[0]

        mixers = decoder.Mixers(attend, across, recur)
        x = decoder.hidden_states(spec, params, ops, Tokens(ids, positions), mixers)[-1]
        return decoder.logits(spec, params, ops, x[:, 0], wide=True)

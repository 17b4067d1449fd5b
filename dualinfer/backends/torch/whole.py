"""Forward passes over whole sequences on torch."""

from collections.abc import Callable, Hashable, Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from ... import decoder
from ...model.spec import ModelSpec
from ...ops.contract import Tokens
from ..base import NO_LABEL, ForwardInputs
from ..slots import bucket
from .ahead import Ahead
from .compiling import compile_options
from .device import ready
from .graphs import MOST_STEPS, CallGraphs
from .ops.plain import PlainOps
from .params import Params

# Parameters times tokens of a pass over texts. One of 5e12 takes an H100 about 15 ms, and its
# launches from Python as long.
_MOST_TEXT_WORK = 1 << 44


class WholePasses:
    """Passes over whole sequences, by graphs or compiled where that is asked for.

    The model has so many `parameters`. Where it decodes by graphs, short texts get some as well.
    `ahead` knows kernels of a pass before it runs.
    """

    def __init__(
        self,
        spec: ModelSpec,
        ops: PlainOps,
        dtype: torch.dtype,
        device: torch.device,
        parameters: int,
        has_graphs: bool,
        by_graphs: bool,
        ahead: Ahead | None = None,
    ) -> None:
        self.spec, self.ops, self.dtype, self.device = spec, ops, dtype, device
        self._ahead = ahead
        self._params: Params | None = None  # of the pass under way
        self._parameters = parameters
        name = f"forward of {spec.architecture}"
        self.calls = CallGraphs(device, name, uploads=True) if by_graphs else None
        self.texts = None  # of passes over texts whose launches take longer than their work
        self._text_sizes: set[Hashable] = set()
        if self.calls is None and has_graphs:
            name = f"embed() of {spec.architecture}"
            self.texts = CallGraphs(device, name, most=MOST_STEPS, uploads=True)
        self._compiled: Callable[..., dict[str, Any]] | None = None

    @property
    def is_compiled(self) -> bool:
        """True if passes are compiled."""
        return self._compiled is not None

    def compile(self, backend: Any, compile_kwargs: Mapping[str, Any]) -> None:
        """Compile passes with torch.compile when the next one runs."""
        self._compiled = torch.compile(self._outputs, **compile_options(backend, compile_kwargs))
        self.forget()

    def forget(self) -> None:
        """Drop the graphs."""
        for graphs in (self.calls, self.texts):
            if graphs is not None:
                graphs.clear()

    def close(self) -> None:
        """Let go of graphs, and of what is compiled."""
        self.forget()
        self._compiled = None

    def run(self, params: Params, inputs: ForwardInputs) -> dict[str, Any]:
        """Outputs of one pass, with its loss; `params` are the weights as passes take them."""
        self._params = params
        try:
            return self._run(inputs)
        finally:
            self._params = None

    def _run(self, inputs: ForwardInputs) -> dict[str, Any]:
        tokens = inputs.tokens.each(self._ready_to_upload)
        outputs: Callable[..., dict[str, Any]] = self._compiled or self._outputs
        how = inputs.output_hidden_states, inputs.texts, inputs.largest, inputs.of_encoder
        how = *how, inputs.watched
        if inputs.tokens.source is None and not inputs.of_encoder and not self.is_compiled:
            self._meet(tokens, how)
        graphs = self.calls
        if inputs.texts and self._parameters * prod(inputs.tokens.shape) <= _MOST_TEXT_WORK:
            size = inputs.tokens.shape, inputs.texts, inputs.largest
            if size in self._text_sizes:  # one that comes a second time is worth a capture
                graphs = graphs or self.texts
            self._text_sizes.add(size)
        if graphs is not None:
            result = graphs.run(outputs, (tokens, *how), {})
        else:
            result = outputs(tokens.each(self._upload), *how)
        if inputs.choices:
            result["logits"] = result["logits"].reshape(-1, inputs.choices)
        if inputs.labels is not None and "start_logits" in result:
            ends = result["start_logits"], result["end_logits"]
            parts = [
                self._loss(x, inputs.labels[:, i], inputs.loss_count) for i, x in enumerate(ends)
            ]
            result["loss"] = (parts[0] + parts[1]) / 2
        elif inputs.labels is not None and inputs.loss != "classes":
            wanted = torch.from_numpy(inputs.labels).to(self.device)
            several = inputs.loss == "several"
            difference = F.binary_cross_entropy_with_logits if several else F.mse_loss
            result["loss"] = difference(result["logits"].float(), wanted)
        elif inputs.labels is not None:
            result["loss"] = self._loss(result["logits"], inputs.labels, inputs.loss_count)
        return result

    def _meet(self, tokens: Tokens, how: tuple[Any, ...]) -> None:
        """Have the kernels of a pass compiled before it runs, where that is done ahead."""
        if self._ahead is None:
            return
        assert self._params is not None
        given = tuple(array is not None for array in tokens)
        key = "whole", *map(bucket, tokens.shape), given, how

        def forward(spec: ModelSpec, params: Params, ops: PlainOps) -> None:
            apart = WholePasses(spec, ops, self.dtype, self.device, 0, False, False)
            apart._params = params
            apart._outputs(tokens.each(self._upload), *how)

        self._ahead.meet(key, self._params, forward, waits=True)

    def _ready_to_upload(self, array: np.ndarray) -> torch.Tensor:
        """`array` in memory from which it can be copied to the device beside the device's work."""
        tensor = torch.from_numpy(array)
        return ready(tensor) if self.device.type == "cuda" else tensor

    def _upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=tensor.is_pinned())

    def _outputs(
        self,
        tokens: Tokens,
        keep: bool,
        texts: int,
        largest: bool,
        of_encoder: bool,
        watched: tuple[tuple[int, int], ...],
    ) -> dict[str, Any]:
        """Outputs of whole sequences on the device: ready for capture and for torch.compile."""
        spec, params = self.spec, self._params
        mask, positions, source = tokens.mask, tokens.positions, tokens.source
        assert params is not None and positions is not None
        if of_encoder and spec.encoder is not None:
            params, spec = params.of_encoder(len(spec.layers)), spec.encoder
        model = spec, params, self.ops
        last = None
        if mask is not None and spec.turns_by_length:
            last = positions.where(mask, 0).amax(1)
        angles = self.ops.angles(spec, params, positions, last)
        counted = None if mask is None else positions

        def attend(i: int, qkv: torch.Tensor) -> torch.Tensor:
            layer = self.ops.layer_attention(spec, params, i)
            return self.ops.attend(layer, qkv, angles, tokens.seen, positions=counted)[0]

        def recur(i: int, x: torch.Tensor) -> torch.Tensor:
            own = spec.layers[i].recurrence
            assert own is not None
            return self.ops.recur(own, params.layers[i], x, tokens.seen)[0]

        across, more = None, {}
        seen: dict[tuple[int, int], torch.Tensor] = {}
        if source is not None:
            if source.states is not None:
                encoded = [source.states.to(self.dtype)]
            else:
                encoded = decoder.encoded(*model, self._in_dtype(source), keep)
            across = decoder.across_whole(*model, encoded[-1], source.mask, watched, seen)
            more = {"encoder_last_hidden_state": encoded[-1]}
            if keep and source.states is None:
                more["encoder_hidden_states"] = decoder.encoder_states(spec, encoded)
        mixers = decoder.Mixers(attend, across, recur)
        states = decoder.hidden_states(*model, self._in_dtype(tokens), mixers, keep)
        weights = tokens.weights
        if texts:
            assert weights is not None and tokens.segments is not None
            how = weights, tokens.segments, (texts, largest)
            return decoder.embeddings(*model, states[-1], *how)
        if watched:
            more["cross_weights"] = torch.stack([seen[head] for head in watched], 2)
        return {**decoder.outputs(*model, states, keep, tokens.kept, weights), **more}

    def _in_dtype(self, tokens: Tokens) -> Tokens:
        """Tokens whose embeddings have the model's dtype."""
        embeds = tokens.embeds
        return tokens if embeds is None else tokens._replace(embeds=embeds.to(self.dtype))

    def _loss(self, logits: torch.Tensor, labels: np.ndarray, count: float | None) -> torch.Tensor:
        """Cross-entropy float32 [] of logits [..., V], its sum divided by `count` if given."""
        loss = F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).float(),
            torch.from_numpy(labels).to(self.device).flatten().long(),
            ignore_index=NO_LABEL,
            reduction="mean" if count is None else "sum",
        )
        return loss if count is None else loss / count

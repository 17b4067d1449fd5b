"""A model on the devices of one place: passes over whole sequences, without a cache."""

import functools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ... import decoder
from ...model.load_plan import LoadPlan, TensorSource
from ...model.spec import ModelSpec
from ...ops.caches import AS_COMPUTED, KeptIn
from ...ops.contract import Tokens
from ...ops.pooling import contrast
from ...parallel.agreement import Peers
from ...parallel.sharding import ShardingPlan
from ..base import ForwardInputs
from ..slots import bucket
from ..streaming import Streaming
from .executables import Executables
from .gradients import Derived, check_derivative
from .maths import MATHS
from .mesh import WHOLE, ManyDevices, Place, in_place, without_mesh
from .ops.plain import PlainOps
from .outputs import cut, make_loss
from .padding import pad_inputs
from .params import Model, Params, read_into, split_notes
from .prompts import most_tokens
from .steps import Steps

# A part of the parameters: their structure and how they and the cache's arrays are split.
Part = tuple[Any, list[Any], list[Any]]


_contrast = jax.jit(partial(contrast, MATHS))


class Placed(NamedTuple):
    """A model on the devices of one place, and what its passes are made with.

    `module` shows its weights to people, by nnx; None where these are shapes. One sequence has at
    most `most_tokens`; `options` are the compiler's, `streaming` says which layers the host holds,
    and `kept` what caches keep.
    """

    spec: ModelSpec
    tp_plan: ShardingPlan
    params: Params
    module: Model | None
    dtype: Any
    place: Place
    ops: PlainOps
    peers: Peers
    most_tokens: int
    options: Mapping[str, str | bool] | None = None
    streaming: Streaming | None = None
    kept: KeptIn = AS_COMPUTED


class WholePasses:
    """Passes over whole sequences of a model on the devices of one place.

    `spec` is the whole model's, that of `steps` what each device computes.
    """

    def __init__(self, model: Placed) -> None:
        place, tp_plan, ops = model.place, model.tp_plan, model.ops
        on_gpu = place.size == 1 and place.device.platform == "gpu"
        self.spec, self.steps = model.spec, Steps(tp_plan.shards[0].spec, ops, on_gpu)
        self.module: Model | None = model.module
        self._most_tokens, self._tp_plan = model.most_tokens, tp_plan
        self._streaming = model.streaming
        self._exchange, self.kernels = ops.exchange, ops.kernels
        self.params = model.params
        self._flatten()
        self.notes = split_notes(place, tp_plan, jax.tree.leaves(self.params))
        self.dtype, self.device, self._place = model.dtype, place.device, place
        self._specs = [place.spec_of(x) for x in self._leaves]
        launching = place.devices if ops.launches else ()
        self._executables = Executables(model.options, launching=launching)

    def _flatten(self) -> None:
        """Hold the weights as the steps take them, too."""
        table = None if self._exchange is None else self._exchange.table
        self._leaves, self._tree = jax.tree.flatten(self.params._replace(mailboxes=table))

    @in_place
    def refresh(self, plan: LoadPlan, source: TensorSource) -> None:
        """Put the plan's rows, read again, in the place of the old ones."""
        assert self.module is not None
        self._leaves = []  # so that each old one goes as it is read
        where = self._place, self._tp_plan
        try:
            with without_mesh():
                what = self.params, self.module, *where, plan, source, self.dtype
                read_into(*what, self._streaming, shown=False)
        finally:
            self._flatten()

    @property
    def compilations(self) -> int:
        """Executables compiled so far: one for each bucket."""
        return self._executables.compilations

    @in_place
    def probe(self) -> None:
        """See `base.Runner`."""
        for device in self._place.devices:
            np.asarray(jax.device_put(np.ones(1, np.float32), device) + 1)

    @in_place
    def forward(self, inputs: ForwardInputs) -> dict[str, Any]:
        """Outputs of whole sequences; see `base.Runner`. Padded to a bucket, cut back after.

        They are not waited for: where an exchange is given up they are NaN, and the next call says
        so.
        """
        self._check()
        spec = self.spec
        if spec.towers and inputs.tokens.source is not None:
            texts, images = map(self.forward, inputs.towers())
            w = self._place.local({n: x for n, x in self.params.outer.items() if "logit_" in n})
            vectors = texts["pooler_output"], images["pooler_output"]
            found = _contrast(*vectors, w["logit_scale"], w.get("logit_bias"))
            return decoder.joined_towers(texts, images, *found)
        if inputs.of_encoder and spec.encoder is not None:
            spec = spec.encoder
        batch, tokens = inputs.tokens.shape
        padded = pad_inputs(spec, inputs)
        size, places, read = padded.size, padded.places, padded.read
        keep = inputs.output_hidden_states
        how: dict[str, Any] = {}
        if inputs.texts:
            how = {"texts": inputs.texts, "largest": inputs.largest}
        elif inputs.of_encoder:
            how = {"of_encoder": True}
        elif inputs.watched:
            how = {"watched": inputs.watched}
        with jax.profiler.TraceAnnotation("dualinfer/forward"):
            values = spec.embed
            if spec.has_logits and not inputs.texts:
                values = spec.vocab * places // size[1]
            values += (len(spec.all_layers) + 1) * spec.embed if keep else 0
            width = size[1] + padded.width
            at_once = max(1, self._most_tokens_of(width, values) // bucket(width))
            at_once = size[0] if at_once >= size[0] else math.gcd(at_once, size[0])
            outputs = self._outputs(padded.tokens, size, keep, at_once, how)
        kept = inputs.tokens.kept
        count = tokens if kept is None else len(kept)
        is_whole = (*size, places) == (batch, tokens, count) and not read
        head = spec.head
        flat = head is not None and head.kind in ("span", "replaced")
        cut_back = outputs if is_whole else cut(batch, tokens, count, read, flat)(outputs)
        result = self._place.local(cut_back)
        if inputs.choices:
            result = {**result, "logits": result["logits"].reshape(-1, inputs.choices)}
        if inputs.labels is not None:
            logits = self._place.local(outputs.get("logits"))
            result["loss"] = make_loss(inputs, padded, result, logits)
        return result

    def _outputs(
        self,
        tokens: Tokens,
        size: tuple[int, int],
        keep: bool,
        rows: int,
        how: Mapping[str, Any],
    ) -> Any:
        """Outputs of padded tokens [B, T] of `size`, of so many rows at a time."""
        tokens = self._place.operands(tokens)
        outputs: Any = None
        is_whole = keep or rows < size[0] or "of_encoder" in how
        for layers in [None] if is_whole else self.steps.parts:
            step = partial(self.steps.forward, keep=keep, layers=layers, **how)
            if rows < size[0]:
                step = partial(self.steps.forward_panels, keep=keep, rows=rows, **how)
            given = tokens.each(lambda x: x.shape)
            outputs, flags = self._executables.run(
                ("forward", size, given, keep, layers, rows, *how.items()),
                self._of_leaves(step),
                self._leaves,
                tokens,
                outputs,
            )
            self._note(flags)
        return outputs

    def _of_leaves(
        self, step: Callable[..., Any], cached: bool = False, part: Part | None = None
    ) -> Callable[..., Any]:
        """`step` on every device, with the parameters as a flat tuple: a call costs half as much.

        With `cached` it takes the cache and the state first, gives them back first, then tokens. At
        last come the flags of what each device gave up, or None. With `part` its parameters are
        those, not all.
        """
        tree, specs, lies = part or (self._tree, self._specs, [])

        def on_device(leaves: list[jax.Array], *args: Any) -> Any:
            with jax.numpy_rank_promotion("allow"):  # the caller's choice is for his own code
                return step(jax.tree.unflatten(tree, leaves), *args)

        def run(leaves: list[jax.Array], *args: Any) -> Any:
            cache = args[0].like(lies, WHOLE) if cached else WHOLE
            arguments = specs, cache, *(WHOLE,) * (len(args) - 1)
            results = (cache, WHOLE, WHOLE) if cached else (WHOLE,)
            results = *results, self._place.over_devices
            return self._place.spread(on_device, arguments, results)(leaves, *args)

        return run

    def pure_forward(
        self, keep: bool, of_encoder: bool = False, derived: bool = False
    ) -> Callable[[Params, Any], dict[str, Any]]:
        """Forward of parameters and tokens, as `Steps.forward` takes them; to be traced.

        Sums over devices are XLA's in it: who calls it when is not known. Its derivatives are right
        where it is `derived`; UnsupportedError where it has none.
        """
        if derived:
            check_derivative(self.params.leaves(), self.kernels)

        def forward(params: Params, inputs: Any) -> dict[str, Any]:
            if derived:
                params = self._derived(params)
            with jax.numpy_rank_promotion("allow"):
                how: Any = {"keep": keep, "of_encoder": of_encoder}
                return self.steps.forward(params, inputs, **how)[0]

        arguments = jax.tree.map(self._place.spec_of, self.params), WHOLE
        return self._place.spread(forward, arguments, WHOLE)

    @functools.cached_property
    def has_tangents(self) -> bool:
        """True if derivatives of `pure_forward` are taken forward, too.

        Gradients are made otherwise where experts' are summed, and where parameters are held twice.
        """
        if any(layer.experts for layer in self.spec.all_layers) or self.kernels:
            return False
        return not self._derived.joins

    @functools.cached_property
    def _derived(self) -> Derived:
        axis = self._place.axis if isinstance(self._place, ManyDevices) else None
        return Derived(self._tp_plan, axis)

    def _most_tokens_of(self, width: int, outputs: int = 0) -> int:
        """Tokens that a pass takes at a time; see `prompts.most_tokens`."""
        itemsize, scores = jnp.dtype(self.dtype).itemsize, self.steps.ops.holds_scores
        return most_tokens(self.steps.spec, itemsize, width, scores, outputs)

    def _note(self, flags: jax.Array | None) -> None:
        if self._exchange is not None and flags is not None:
            self._exchange.note(flags)

    def _check(self, flags: jax.Array | None = None) -> None:
        """Raise DistributedError if an exchange is known to have been given up; or by `flags`."""
        if self._exchange is not None:
            self._exchange.check(*(() if flags is None else (flags,)))

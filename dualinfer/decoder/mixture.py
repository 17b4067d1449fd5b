"""Mixtures of experts in a feed-forward's place."""

from collections.abc import Callable
from typing import TypeAlias

from ..model.spec import Experts, Mlp, Router
from ..ops import mixtures
from ..ops.contract import Array, BlockOps, Epilogue, NormOf, Routing, Weights
from ..ops.feed_forward import gate, gate_within
from ..ops.projection import project, project_in_part
from .run import Run, SubLayer

# What the expert of all tokens makes of norm(x), before the sum over devices.
Shared: TypeAlias = Callable[[Run, Array, NormOf | None], Array]
_SIDES = Router(2)  # the softmax of two numbers


def mixture_of(experts: Experts) -> SubLayer:
    """The sub-layer of a token's own experts, in one sum with the expert of all tokens."""
    mixing = experts.mixing
    if mixing is not None and mixing.sublayer is not None:
        return mixing.sublayer
    routed = None if mixing is None else mixing.routed
    shared = None
    if experts.shared:
        shared = mixing.shared if mixing is not None and mixing.shared is not None else shared_of

    def mixture(
        run: Run, x: Array, norm: NormOf | None, residual: Array | None, spend: bool
    ) -> Array:
        routing = route(run, x, norm)
        if routed is not None:
            routing = routed(run, routing)
        return weighed(run, x, norm, routing, shared, Epilogue(residual=residual, spend=spend))

    return mixture


def route(run: Run, x: Array, norm: NormOf | None) -> Routing:
    """The experts of each token, and their weights."""
    own, w = run.layer.feeding, run.w
    assert isinstance(own, Experts)
    biases = {"bias": w.get("router.bias"), "choice_bias": w.get("router.choice_bias")}
    routing = run.ops.route(x, w["router.weight"], own.router, **biases, norm=norm)
    if not own.blended:
        return routing
    sides = run.ops.route(x, w["sides.weight"], _SIDES, bias=w["sides.bias"], norm=norm)
    return mixtures.blend(run.ops.maths, routing, sides, own.count - 1)


def weighed(
    run: Run,
    x: Array,
    norm: NormOf | None,
    routing: Routing,
    shared: Shared | None,
    epilogue: Epilogue,
) -> Array:
    """The sum of the chosen experts and the one of all tokens for norm(x), with a residual."""
    own, w, ops, partial = run.layer.feeding, run.w, run.ops, None
    assert isinstance(own, Experts)
    if shared is not None and not ops.adds_shared(x, own, w):
        partial = shared(run, x, norm)
    y = ops.experts(x, own, w, routing, epilogue._replace(norm=norm), partial)
    return y + w["experts.bias"] if "experts.bias" in w else y


def shared_of(run: Run, x: Array, norm: NormOf | None, limit: float | None = None) -> Array:
    """See `Shared`."""
    own, w, ops = run.layer.feeding, run.w, run.ops
    assert isinstance(own, Experts)
    h = hidden(own, w, ops, "shared.up", x, norm, limit)
    partial = project_in_part(ops, w, "shared.down", h)
    return gate(ops, w, "shared.gate", partial, x, norm) if "shared.gate.weight" in w else partial


def hidden(
    mlp: Mlp | Experts,
    w: Weights,
    ops: BlockOps,
    name: str,
    x: Array,
    norm: NormOf | None,
    limit: float | None,
) -> Array:
    """The hidden values of a feed-forward by the projection `name`, within a limit if given."""
    assert mlp.activation != "xielu"
    if limit is None:
        return project(ops, w, name, x, Epilogue(None, norm, mlp.activation, mlp.gated))
    h = project(ops, w, name, x, Epilogue(norm=norm))
    return gate_within(ops.maths, h, mlp.activation, limit)

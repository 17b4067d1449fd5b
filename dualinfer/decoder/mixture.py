"""Mixtures of experts in a feed-forward's place."""

from dataclasses import replace

from ..model.spec import Experts, Mlp, Router
from ..ops import mixtures
from ..ops.contract import EVERY, Array, BlockOps, Epilogue, NormOf, Routing, Seen, Weights
from ..ops.feed_forward import gate, gate_within
from ..ops.projection import project, project_in_part
from .run import Run

_SIDES = Router(2)  # the softmax of two numbers


def mixture(
    experts: Experts,
    w: Weights,
    ops: BlockOps,
    x: Array,
    norm: NormOf | None,
    residual: Array | None,
    seen: Seen = EVERY,
    spend: bool = True,
) -> Array:
    """What the experts of each token make of `x`, normed first where there is a norm.

    The residual, which may be overwritten with `spend`, is added if given. The shared expert's part
    goes into the one sum over devices with the others'.
    """
    routing = ops.route(
        x,
        w["router.weight"],
        experts.router,
        bias=w.get("router.bias"),
        choice_bias=w.get("router.choice_bias"),
        norm=norm,
    )
    if experts.capacity is not None:
        routing = mixtures.fill(ops.maths, routing, experts.count, experts.capacity, *seen)
    if experts.blended:
        sides = ops.route(x, w["sides.weight"], _SIDES, bias=w["sides.bias"], norm=norm)
        routing = mixtures.blend(ops.maths, routing, sides, experts.count - 1)
    partial = None
    if experts.shared and not ops.adds_shared(x, experts, w):
        h = hidden(experts, w, ops, "shared.up", x, norm, experts.shared_limit)
        partial = project_in_part(ops, w, "shared.down", h)
        if experts.shared_gated:
            partial = gate(ops, w, "shared.gate", partial, x, norm)
        if experts.shared_scale != 1:
            partial = partial * experts.shared_scale
    if experts.zeros:
        x = ops.norm(x, norm) if norm else x
        passed = (routing.weights * (routing.experts >= experts.count)).sum(-1)[..., None] * x
        epilogue = Epilogue(residual=residual, spend=spend)
        y = ops.experts(x, experts, w, routing, epilogue, partial)
        return ops.add(y, ops.maths.cast(passed, y.dtype))
    epilogue = Epilogue(norm=norm, residual=residual, spend=spend)
    y = ops.experts(x, experts, w, routing, epilogue, partial)
    return y + w["experts.bias"] if "experts.bias" in w else y


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


def late(run: Run, x: Array, norm: NormOf | None, residual: Array | None, spend: bool) -> Array:
    """The expert of all tokens; what others give is added behind the next layer (LongCat)."""
    own, ops = run.layer.mlp, run.ops
    assert isinstance(own, Experts) and norm is not None
    x = ops.norm(x, norm)
    run.given.late.append(mixture(replace(own, shared=0), run.w, ops, x, None, None))
    h = run.project("shared.up", x, Epilogue(activation=own.activation, gated=own.gated))
    return run.project_back("shared.down", h, Epilogue(residual=residual, spend=spend))


def apart(run: Run, x: Array, norm: NormOf | None, residual: Array | None, spend: bool) -> Array:
    """A mixture and the expert of all tokens, each between norms of its own (Gemma 4)."""
    own, ops, w = run.layer.mlp, run.ops, run.w
    assert isinstance(own, Experts) and residual is None
    h = run.project("shared.up", x, Epilogue(None, norm, own.activation, own.gated))
    y = ops.norm(run.project_back("shared.down", h), run.norm("shared_post_norm"))
    # The router's learned scale, over the root of the width as HF has it.
    scale = w["router_norm.weight"] * x.shape[-1] ** -0.5
    scaled = NormOf(run.layer.norm, scale, None, made=True)
    chosen, weights = ops.route(x, w["router.weight"], own.router, norm=scaled)
    routing = Routing(chosen, weights * w["router.scale"][chosen])
    z = ops.experts(x, own, w, routing, Epilogue(norm=run.norm("experts_norm")))
    return ops.add(y, z, run.norm("experts_post_norm"))

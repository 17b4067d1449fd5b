"""What some layers do with the residual stream otherwise than `layer.within`."""

from ..ops.contract import Array, Epilogue
from ..ops.feed_forward import gate
from .run import Block, Run, Step, SubLayer, activation_of, normed


def parallel(mixing: SubLayer, feeding: SubLayer, norm: str) -> Block:
    """Both sub-layers read the block's input, the second one by this norm."""

    def block(run: Run, x: Array) -> Array:
        x = normed(run.ops, x)
        total = mixing(run, x, run.norm("attn_norm"), x, False)
        return feeding(run, x, run.norm(norm), total, True)

    return block


def bare(sublayer: SubLayer) -> Step:
    """x + sublayer(x)."""

    def step(run: Run, x: Array, spend: bool) -> Array:
        return sublayer(run, x, None, x, spend)

    return step


def gated(sublayer: SubLayer, norm: str, otherwise: Step) -> Step:
    """x + sublayer(y), of y = norm(x) times the logistic function of two products of it.

    A layer without these is `otherwise`.
    """

    def step(run: Run, x: Array, spend: bool) -> Array:
        if f"{norm}_up.weight" not in run.w:
            return otherwise(run, x, spend)
        y = run.ops.norm(x, run.norm(norm))
        h = run.project(f"{norm}_down", y, Epilogue(activation="silu"))
        return sublayer(run, gate(run.ops, run.w, f"{norm}_up", y, h), None, x, spend)

    return step


def kept(sublayer: SubLayer, name: str) -> Step:
    """x times a learned vector, plus sublayer(norm(x))."""

    def step(run: Run, x: Array, spend: bool) -> Array:
        first, x_kept = run.norm(f"{name}_norm"), x * run.w[f"{name}_kept"]
        return run.ops.add(x_kept, sublayer(run, x, first, None, False))

    return step


def added(sublayer: SubLayer, before: str | None, behind: str | None, scale: str | float) -> Step:
    """x + scale times norm(sublayer(norm(x))), with the norms that have a name.

    The scale is a number, or a learned vector by its name.
    """

    def apart(run: Run, x: Array) -> Array:
        first = None if before is None else run.norm(before)
        return sublayer(run, x, first, None, False)

    def summed(run: Run, x: Array, spend: bool) -> Array:
        assert behind is not None
        return run.ops.add(x, apart(run, x), run.norm(behind))

    def scaled(run: Run, x: Array, spend: bool) -> Array:
        factor = run.w[scale] if isinstance(scale, str) else scale
        y = apart(run, x)
        y = y if behind is None else run.ops.norm(y, run.norm(behind))
        return run.ops.add(x, y * factor)

    return summed if behind is not None and scale == 1 else scaled


def adapted(run: Run, x: Array) -> Array:
    """x and what the layer's adapter makes of it."""
    return run.ops.add(*adapter(run, x))


def adapter(run: Run, x: Array) -> tuple[Array, Array]:
    """What a layer's adapter makes of x [B, T, E], and what it adds to."""
    own = run.layer.adapter
    assert own is not None
    h = run.ops.norm(x, run.norm("adapter_norm")) if "adapter_norm.weight" in run.w else x
    y = run.project("adapter_up", h, Epilogue(activation=own.activation))
    return run.project("adapter_down", y), h if own.normed else x


def read_own(run: Run, x: Array) -> Array:
    """x and what the layer makes of its own embedding of each token."""
    h = run.project("read", x, Epilogue(activation=activation_of(run.layer)))
    y = run.project("read_out", h * run.own)
    return run.ops.add(x, y, run.norm("read_norm"))


def multiplied(run: Run, x: Array) -> Array:
    """x times the layer's number."""
    return x * run.w["multiplier"]


def with_late(run: Run, x: Array) -> Array:
    """x and what the layer before left to be added here."""
    return run.ops.add(x, run.given.late.pop())

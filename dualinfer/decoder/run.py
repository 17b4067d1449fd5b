"""One layer in one pass: what its sub-layers compute with."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from ..model.spec import Activation, Layer
from ..ops.contract import ALONE, Array, BlockOps, Epilogue, NormOf, Seen, Unnormed, Weights
from ..ops.projection import project, project_back, project_unnormed

# Attention of a layer, by its number, over packed queries, keys and values, or over the pair that
# latent attention takes; across, over queries.
Attend: TypeAlias = Callable[[int, Array], Array]
# A layer's recurrence, likewise, over what it has projected.
Recur: TypeAlias = Callable[[int, Array], Array | Unnormed]


class Mixers(NamedTuple):
    """The functions by which a pass takes values from some tokens to others.

    `across` attends to what an encoder gave, and `recur` is that of layers with a recurrence.
    """

    attend: Attend
    across: Attend | None = None
    recur: Recur | None = None


class Pass(NamedTuple):
    """The values that a pass gives all of its layers.

    With `spend` a layer's input may be overwritten. `lent` has the packed queries, keys and values
    of the layers whose keys and values others have, and `late` what mixtures gave that is to be
    added behind the next layer.
    """

    mixers: Mixers
    seen: Seen
    spend: bool
    lent: dict[int, Array]
    late: list[Array]


class Run(NamedTuple):
    """A layer in a pass: what it is, its weights, its number, and what the pass gives.

    `own` is the layer's own embedding of each token, where it `reads` one.
    """

    layer: Layer
    w: Weights
    number: int
    ops: BlockOps
    given: Pass
    own: Array | None = None

    def norm(self, name: str) -> NormOf:
        """The layer's norm of this name."""
        return NormOf.named(self.layer.norm, self.w, name)

    def project(self, name: str, x: Array, epilogue: Epilogue = ALONE) -> Array:
        """See `projection.project`."""
        return project(self.ops, self.w, name, x, epilogue)

    def project_back(self, name: str, x: Array, epilogue: Epilogue = ALONE) -> Array:
        """See `projection.project_back`."""
        return project_back(self.ops, self.w, name, x, epilogue)

    def read(
        self, name: str, x: Array | Unnormed, epilogue: Epilogue = ALONE
    ) -> tuple[Array, Array]:
        """The projection `name` of x, and x itself, normed."""
        if isinstance(x, Unnormed):
            return project_unnormed(self.ops, self.w, name, x, epilogue)
        return self.project(name, x, epilogue), x

    def attend(self, qkv: Array) -> Array:
        """The layer's attention."""
        return self.given.mixers.attend(self.number, qkv)

    def attend_across(self, q: Array) -> Array:
        """The layer's attention to what an encoder gave."""
        across = self.given.mixers.across
        assert across is not None
        return across(self.number, q)

    def recur(self, x: Array) -> Array | Unnormed:
        """The layer's recurrence."""
        recur = self.given.mixers.recur
        assert recur is not None
        return recur(self.number, x)


# A layer, or a part of one: x, or a stream whose norm is still to be made, to what comes of it.
Block: TypeAlias = Callable[[Run, Array], Array]
# x plus what a sub-layer makes of it; it may overwrite x if it is told so.
Step: TypeAlias = Callable[[Run, Array, bool], Array]
# What a sub-layer makes of norm(x), plus the residual if given, which it may overwrite likewise.
SubLayer: TypeAlias = Callable[[Run, Array, NormOf | None, Array | None, bool], Array]


def normed(ops: BlockOps, x: Array | Unnormed) -> Array:
    """A layer's output [B, T, E], with the norm behind it where that is still to be made."""
    return ops.norm(x.y, x.norm, residual=x.residual) if isinstance(x, Unnormed) else x


def in_turn(*blocks: Block) -> Block:
    """The block that is these, one after another."""
    if len(blocks) == 1:
        return blocks[0]

    def run_all(run: Run, x: Array) -> Array:
        for one in blocks:
            x = one(run, x)
        return x

    return run_all


def activation_of(layer: Layer) -> Activation:
    """The activation of a layer's MLP that is a kernel's as well."""
    assert layer.feeding.activation != "xielu"
    return layer.feeding.activation

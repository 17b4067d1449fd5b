"""A block owns all that a layer of another build needs, so that nobody else knows of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from .model import Layer, ModelSpec


class Block:
    """A layer that is not made of sub-layers between norms, and all that it needs of others.

    A kind is a frozen dataclass in a file of `blocks/`, and its docstring tells what it computes.
    What a kind leaves out is as with other layers. All layers of a model are of one kind, and the
    first one is asked for what lies before and behind them. Arrays are of a framework, `ops` are
    the backend's, and `w` the weights by name.
    """

    reads_near: ClassVar[bool] = False  # a token is made of the tokens beside it, real or not
    embeds: ClassVar[bool] = False  # it has an `embed`
    reads: int = 0  # elements that a token's embedding gives a layer alone

    @property
    def sums(self) -> int:
        """Sums over devices, of a layer."""
        return 2

    @property
    def apart(self) -> int:
        """Elements of every query, key and value that a projection of their own gives."""
        return 0

    def axes(self, layer: "Layer") -> Mapping[str, int]:
        """Elements of the axes of a layer's own weights, by their names."""
        return {}

    def outer_axes(self, spec: "ModelSpec") -> Mapping[str, int]:
        """Elements of axes that are the same for all layers, or are outside of them."""
        return {}

    def share(self, layer: "Layer", heads: Any) -> Mapping[str, Any]:
        """A device's share of each of `axes` that is split, by its `sharding.Share` of heads."""
        return {}

    def runs(self, layer: "Layer", lends: bool) -> Callable[[Any, Any], Any]:
        """A function that computes a layer, of its `decoder.run.Run` and x.

        It may `lend` keys and values. It is chosen once for a spec.
        """
        raise NotImplementedError

    def embed(self, ops: Any, spec: "ModelSpec", w: Any, x: Any, where: Any, segments: Any) -> Any:
        """Embedded tokens [B, T, E] of ids x [B, T] or of given embeddings [B, T, W].

        `where` has positions and token types [B, T], and `segments` are as in `contract.Seen`.
        """
        raise NotImplementedError

    def enter(self, ops: Any, spec: "ModelSpec", w: Any, x: Any, where: Any) -> Any:
        """The first layer's input, of embedded tokens [B, T, E]; `where` is as in `embed`."""
        return x

    def leave(self, ops: Any, w: Any, states: Sequence[Any], keep: bool) -> list[Any]:
        """States as a pass gives them, of what `enter` and layers gave; unless `keep`, of the last.

        The last one that it gives is what the final norm reads; unless `keep`, there is no other.
        """
        return [*states]

    def tokens(self, ops: Any, spec: "ModelSpec", x: Any) -> Any:
        """The tokens' own part [B, T, E] of a state."""
        return x

    def hidden(self, states: Sequence[Any], last: Any) -> tuple[Any, ...]:
        """HF's hidden states of those that `leave` gave; `last` has passed the final norm."""
        return (*states[:-1], last)

    def shown(self, states: tuple[Any, ...]) -> tuple[Any, ...]:
        """Hidden states with axes in HF's order, of `hidden`'s, which have sequences first."""
        return states

"""What distances add to scores by products with queries and keys, so that nobody else knows it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import Attention


class Distances:
    """Terms that a token's distance from another adds to their score, made of both tokens.

    A kind is a frozen dataclass in a file of `blocks/`, and its docstring tells what it computes.
    Only layers that attend both ways and keep no cache have one.
    """

    @property
    def axes(self) -> Mapping[str, int]:
        """Elements of the axes of its weights outside of layers, by their names."""
        return {}

    def weights(self, w: Mapping[str, Any], outer: Mapping[str, Any]) -> Any:
        """The weights of a layer's terms, of its own `w` and of those outside of layers."""
        raise NotImplementedError

    def added(self, ops: Any, a: "Attention", weights: Any, q: Any, k: Any) -> Any:
        """What is added to products of q and k [B, T, H, D]: float32 [B, H, T, T], or None."""
        raise NotImplementedError

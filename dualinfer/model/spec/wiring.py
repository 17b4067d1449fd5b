"""A wiring owns all that attention of another build needs, so that nobody else knows of it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from .attention import Attention


class Wiring:
    """Another way to make queries, keys and values, or to use what heads give.

    A kind is a frozen dataclass in a file of `blocks/`, and its docstring tells what it computes.
    What a kind leaves out is as with other layers. `run` is a `decoder.run.Run`, `made` the
    `decoder.attention.Projected` of the layer, and shares are `sharding.Share`s.
    """

    projects: ClassVar[bool] = False  # it has a `project`
    halves: ClassVar[int] = 1  # parts of the heads; devices share what stands beside each other
    reads_all: ClassVar[bool] = False  # what a head gives changes what the others give
    why_whole: ClassVar[str] = ""  # why devices do not share query heads within a KV head
    fine_key: ClassVar[str] = ""  # an element of a key that codes of few bits are too coarse for
    most: int = 0  # tokens of a sequence of which all are seen; more are not served; 0 for no limit
    most_by: ClassVar[str] = "index_topk"  # the config's field that says it

    @property
    def norm_width(self) -> int:
        """Elements of a norm of its own; 0 for none."""
        return 0

    def value_dim(self, a: "Attention") -> int:
        """Elements of a head's value in the projection."""
        return a.head_dim

    def axes(self, a: "Attention") -> Mapping[str, int]:
        """Elements of the axes of a layer's own weights, by their names."""
        return {}

    def share(self, a: "Attention", query: Any, key: Any) -> Mapping[str, Any]:
        """A device's share of each of `axes` that is split, by its shares of heads or `halves`."""
        return {}

    def widened(self, a: "Attention") -> "Attention":
        """The attention as caches and ops have it, without a wiring."""
        return replace(a, wiring=None)

    def project(self, run: Any, x: Any, norm: Any) -> Any:
        """Queries, keys and values of norm(x); only where it `projects`."""
        raise NotImplementedError

    def widen(self, run: Any, qkv: Any, made: Any) -> Any:
        """Packed queries, keys and values as `widened` has them."""
        return qkv

    def narrow(self, run: Any, y: Any, made: Any) -> Any:
        """The output of the heads of `widened`, as the product back reads it."""
        return y

    def project_back(self, run: Any, y: Any, made: Any, epilogue: Any) -> Any:
        """The product back."""
        return run.project_back("out", y, epilogue)

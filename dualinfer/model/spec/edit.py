"""An edit owns what one place of a layer does otherwise, so that nobody else knows of it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from .model import Layer


class Edit:
    """A layer that is built as others are, but for one place, and all that this needs of others.

    A kind is a frozen dataclass in a file of `blocks/`, and its docstring tells what it computes.
    What a kind leaves out is as with other layers. `SubLayer`, `Step` and `Block` are functions as
    `decoder.run` has them; edits change them once for a spec, in a layer's order of edits.
    """

    reads_near: ClassVar[bool] = False  # a token is made of the tokens beside it, real or not
    blanks: ClassVar[bool] = False  # what a mask hides enters the first layer as zeros

    reads: int = 0  # elements that a token's embedding gives this layer alone

    @property
    def norm_width(self) -> int:
        """Elements of a norm of its own that is not over the stream; 0 for none."""
        return 0

    def axes(self, layer: "Layer") -> Mapping[str, int]:
        """Elements of the axes of a layer's own weights, by their names."""
        return {}

    def share(self, layer: "Layer", heads: Any) -> Mapping[str, Any]:
        """A device's share of each of `axes` that is split, by its `sharding.Share` of heads."""
        return {}

    def attention(self, sublayer: Any) -> Any:
        """The `SubLayer` in the place of attention, before a recurrence beside it."""
        return sublayer

    def feeding(self, sublayer: Any) -> Any:
        """The `SubLayer` in the place of the feed-forward."""
        return sublayer

    def step(
        self, step: Any, name: str, sublayer: Any, norm: str | None, behind: str | None
    ) -> Any:
        """The `Step` in the place of one: of a `sublayer`, called `name`, by a `norm`.

        Names are `attn`, `cross` and `mlp`. The norm has a name, and so has one `behind` within the
        residual; None is for none. A `post` layer has no steps.
        """
        return step

    def parts(self, parts: Sequence[Any]) -> Sequence[Any]:
        """The `Block`s of which the layer is made, one after another.

        A layer has one for all of its steps, and of a `post` layer there is one a sub-layer. These
        take and give a stream whose last norm may be still to be made, `contract.Unnormed`.
        """
        return parts

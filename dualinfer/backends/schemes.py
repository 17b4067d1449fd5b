"""What a backend computes with quantized weights, by a table of schemes."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ..errors import UnsupportedError
from ..model.weights import Leaf, LoadPlan, Weight
from ..quantization import Scheme


class Arithmetic(NamedTuple):
    """What a backend does with weights of one scheme; what is not given is done with their values.

    `dequantize(weight)` gives the matrix [out, in] in the weight's dtype; `product(x, weight)` is x
    [..., in] times it, in x's dtype; `embed(ids, weight)` its rows for ids [...]. On JAX a product
    takes the dtype of its result, too, and is summed in float32, and ids are clipped to those that
    the weight has.
    """

    implementation: str
    dequantize: Callable[[Weight], Any]
    product: Callable[..., Any] | None = None
    embed: Callable[[Any, Weight], Any] | None = None


class Schemes(dict[str, Arithmetic]):
    """The arithmetic of each scheme that `backend` knows, by the scheme's name."""

    def __init__(self, backend: str, **known: Arithmetic) -> None:
        super().__init__(known)
        self._backend = backend

    def of(self, scheme: Scheme) -> Arithmetic:
        """What the backend does with a scheme; UnsupportedError where it knows nothing of it."""
        if scheme.name not in self:
            raise UnsupportedError(
                f"The weights are quantized ({scheme.name}), which backend={self._backend!r} does "
                "not compute with. Pass the model that they were made from."
            )
        return self[scheme.name]

    def check(self, plan: LoadPlan) -> None:
        """Raise UnsupportedError for weights of a scheme that is not here."""
        for row, _ in plan.rows:
            if row.scheme is not None:
                self.of(row.scheme)

    def implementations(self, leaves: Iterable[Leaf]) -> dict[str, str]:
        """What serves the products of each scheme among a model's leaves, for people."""
        schemes = {leaf.scheme for leaf in leaves if isinstance(leaf, Weight) and leaf.scheme}
        return {f"matmul, {s.name}": self.of(s).implementation for s in schemes}

"""The parts of layers beside attention: norms, MLPs, mixtures of experts, and rarer ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, Self

from .mixing import Mixing

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "tanh"]
XIELU = ("alpha_p", "alpha_n", "beta", "eps")  # a layer's numbers of the activation xIELU


@dataclass(frozen=True)
class Norm:
    """RMSNorm (`rms`) or LayerNorm (`layer`), with a bias where there is one among the weights.

    With `unit_offset` the factor is 1 + weight, in float32 (Gemma). An `affine` norm is weight and
    bias alone, without any mean or root (MobileBERT).
    """

    kind: Literal["rms", "layer", "affine"]
    eps: float
    unit_offset: bool = False


@dataclass(frozen=True)
class Mlp:
    """Feed-forward of one layer; `gated` multiplies activation(gate) with up."""

    ffn: int
    activation: Activation | Literal["xielu"]
    gated: bool

    def of_width(self, ffn: int) -> "Mlp":
        """The same feed-forward of another width."""
        return replace(self, ffn=ffn)


@dataclass(frozen=True)
class Router:
    """The way a token chooses its experts and weighs them, by a product with the router's weights.

    Logits are within `softcap` c as c * tanh(logit / c). `score` names a row of `ops.scorings`.
    Scores of them are their `softmax` or their `sigmoid`; or the choice is among logits, and of the
    chosen ones alone it is the softmax (`chosen`) or the sigmoid (`gates`), all in float32. A bias
    for the choice, if there is one among the weights, is added for the choice alone. Of equal
    `groups` of experts those `groups_chosen` are open whose best score (`max`), or sum of their
    `two` best, is the largest.
    With `over_sum` weights are over their sum plus that number; then they are times `scale`. Of
    equal scores that of the lower number goes first.

    A `sparse` choice (Phi-3.5-MoE, arXiv:2409.12136) is of two logits. The weight of each is its
    softmax among itself m and those below it that are near: (m - logit) / max(abs(logit), m) is at
    most 2 * `jitter`, or is no number. Router biases, groups and renormalization are not for it.
    """

    chosen: int
    score: str = "softmax"
    groups: int = 1
    groups_chosen: int = 1
    group_score: Literal["max", "two"] = "max"
    over_sum: float | None = None
    scale: float = 1.0
    jitter: float = 0.0
    softcap: float | None = None


@dataclass(frozen=True)
class Experts:
    """A mixture in a feed-forward's place: each token's `router.chosen` of `count` experts.

    An expert is a feed-forward as `each` says.
    `shared` is the ffn of an expert that all tokens have, 0 for none; if there is a gate among the
    weights, its result is times the logistic function of that product (Qwen2-MoE). With `blended`
    the last expert is one that the router does not know and all tokens have: its weight, and what
    those of the chosen ones are times, are the softmax of a product of their own (DeepSpeed's
    residual layers, arXiv:2201.05596). With a `mixing` it does otherwise, as that says.
    """

    count: int
    each: Mlp
    router: Router
    shared: int = 0
    blended: bool = False
    mixing: Mixing | None = None

    @property
    def ffn(self) -> int:
        """The width of an expert."""
        return self.each.ffn

    @property
    def activation(self) -> Activation:
        """The activation of an expert, which has no numbers of its own."""
        assert self.each.activation != "xielu"
        return self.each.activation

    @property
    def gated(self) -> bool:
        """True if an expert has a gate."""
        return self.each.gated

    def of_width(self, ffn: int) -> "Experts":
        """The same mixture of experts of another width."""
        return replace(self, each=self.each.of_width(ffn))

    @property
    def idle(self) -> int:
        """Experts without weights that a router knows, behind the others."""
        return self.mixing.idle if self.mixing else 0

    @property
    def choices(self) -> int:
        """Experts that a router tells apart."""
        return self.count - self.blended + self.idle

    @property
    def axes(self) -> dict[str, int]:
        """Elements of the axes of its weights, by their names.

        Experts that devices share out, those that each of them knows of, those that a router tells
        apart.
        """
        found = {"experts": self.count, "mixed": self.count, "choices": self.choices, "sides": 2}
        found |= dict.fromkeys(("ffn", "gate", "up"), self.ffn)
        found |= dict.fromkeys(("shared", "shared_gate", "shared_up"), self.shared)
        return found | (dict(self.mixing.axes) if self.mixing else {})

    @property
    def per_token(self) -> int:
        """Experts of a token, without the one of width `shared`."""
        return self.router.chosen + self.blended


class Recurrence(Protocol):
    """A part that keeps a state of fixed size of all tokens, in attention's place or beside it.

    A kind is a frozen class in a file of `blocks/`, which says all of it; its class's docstring
    tells what it computes. Arrays are of a framework, and `ops` the backend's.
    """

    held: ClassVar[Mapping[str, str]]  # the axes that devices share, by what people call them

    @property
    def width(self) -> int:
        """Elements that it gives of a token, before the projection back."""
        ...

    @property
    def extents(self) -> Mapping[str, int]:
        """Elements of the axes of its weights, by their names."""
        ...

    @property
    def passing(self) -> int:
        """Numbers of a token that a pass over a sequence holds in float32."""
        ...

    @property
    def multiplied(self) -> int:
        """Products of a token beside those with matrices."""
        ...

    def share(self, devices: Any) -> Sequence[tuple[Self, Mapping[str, Any]]]:
        """The share of each of `sharding.Devices`, and the shares of its axes by name."""
        ...

    def layout(self, slots: int) -> tuple[Any, ...]:
        """The arrays that its cache keeps of N slots, each a `caches.Buffer`, a row a slot."""
        ...

    def sequence(
        self,
        ops: Any,
        w: Mapping[str, Any],
        x: Any,
        states: tuple[Any, ...] | None,
        seen: Any,
        lengths: Any | None,
    ) -> tuple[Any, tuple[Any, ...]]:
        """Run over projected sequences x [B, T, ...]; return [B, T, width] and the new states.

        It begins from `states`, the arrays of its cache, a row a sequence, None for a new one.
        Tokens that `seen`, a `contract.Seen`, hides change none, and packed sequences do not meet.
        The states that it gives are those after the first `lengths` [B] tokens; without lengths
        nobody reads them.
        """
        ...

    def token(
        self, ops: Any, w: Mapping[str, Any], x: Any, states: tuple[Any, ...]
    ) -> tuple[Any, tuple[Any, ...]]:
        """As `sequence`, of one token each, x [B, 1, ...], behind `states`."""
        ...


def keeps_float32(own: Recurrence) -> bool:
    """True if states of a recurrence are float32 in any model, as they are sums of many tokens."""
    return any(kept.dtype == "float32" for kept in own.layout(1))

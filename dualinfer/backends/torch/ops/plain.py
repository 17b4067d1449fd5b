"""The plain ops over torch's Maths, and sampling; kernels.py has the same by Triton."""

import copy
from collections.abc import Hashable
from typing import TYPE_CHECKING, Self

import torch

from ....model.spec import ModelSpec, Rope
from ....ops import plain
from ....ops.contract import LayerAttention
from ...base import SamplingFeatures
from .. import sampler
from ..maths import MATHS
from ..parallel import Split
from ..params import Params
from ..sampler import SlotState
from .schemes import SCHEMES

if TYPE_CHECKING:
    from ..exchange import Exchange

SDPA = "torch.nn.functional.scaled_dot_product_attention"
IMPLEMENTATIONS = {
    "matmul": "torch.nn.functional.linear",
    "embed": "torch.nn.functional.embedding",
    "rms_norm": "plain torch",
    "layer_norm": "torch.nn.functional.layer_norm",
    "qk_norm": "plain torch",
    "rotary": "plain torch",
    "activation": "torch.nn.functional",
    "router": "plain torch",
    "experts": "plain torch, one expert after another",
    "attention": f"{SDPA}; plain torch with ALiBi, a soft cap or sinks",
    "decode_attention": f"{SDPA}; plain torch with ALiBi, a soft cap or sinks",
    "cross_attention": SDPA,
    "latent_attention": f"{SDPA} over latent vectors, a head's matrices before and behind it",
    "recurrence": "plain torch",
    "sampling": "plain torch, threefry2x32",
}


class PlainOps(plain.PlainOps):
    """All that a model's steps compute with, on any device; see `contract.Ops`."""

    maths, schemes, implementations = MATHS, SCHEMES, IMPLEMENTATIONS

    def __init__(self, split: Split | None = None):
        super().__init__(split)
        self.exchange: Exchange | None = None  # peer to peer, of kernels alone

    def clear(self) -> None:
        """Let go of memory on the device."""

    def apart(self) -> Self:
        """The same ops, with memory of their own."""
        return copy.copy(self)

    def frequencies(self, params: Params, rope: Rope) -> torch.Tensor:
        """See `plain.PlainOps.frequencies`."""
        return params.frequencies[rope]

    def layer_attention(self, spec: ModelSpec, params: Params, index: int) -> LayerAttention:
        """See `contract.Ops.layer_attention`."""
        a = spec.layers[index].attending
        frequencies = params.frequencies[a.rope] if a.rope else None
        slopes = params.slopes[a.alibi] if a.alibi else None
        whole = self.split.whole(spec, index) if self.split else None
        return LayerAttention.named(
            a, params.layers[index], params.outer, frequencies, slopes, whole
        )

    def sample(
        self,
        logits: torch.Tensor,
        state: SlotState,
        position: torch.Tensor,
        features: SamplingFeatures,
    ) -> torch.Tensor:
        """See `contract.Ops.sample`."""
        return sampler.sample(logits, state, position, features)

    def advance(
        self,
        logits: torch.Tensor,
        state: SlotState,
        features: SamplingFeatures,
        out: torch.Tensor,
        step: torch.Tensor,
    ) -> tuple[SlotState, torch.Tensor, torch.Tensor]:
        """See `contract.Ops.advance`; all is written in place, as `sampler.advance` says."""
        sampler.advance(logits, state, features, out, step)
        return state, out, step

    def launches_of(self, features: SamplingFeatures) -> Hashable:
        """The part of `features` that tells launches of `advance` apart, one graph for each."""
        return features

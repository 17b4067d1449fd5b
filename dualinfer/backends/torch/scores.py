"""Scores that the host holds: calls that change them, or choose tokens by them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...ops import sampling
from ..base import TOP, Request
from ..slots import sampling_rows, weight_rows
from . import sampler
from .device import in_order
from .maths import MATHS


class ScoreCalls:
    """The calls of a runner that change scores [B, V], or choose tokens by them."""

    device: torch.device

    @in_order
    def choose(self, scores: Any, requests: Sequence[Request], step: int) -> np.ndarray:
        """Tokens of scores [B, V]; see `base.Runner`."""
        scores = scores.to(self.device, torch.float32)
        if any(r.sampling.do_sample for r in requests):
            columns = sampling_rows(requests, max(len(r.eos_ids) for r in requests))
            drawn, low, high, index = (
                torch.as_tensor(columns[name], device=self.device)
                for name in ("noise", *sampling.WORDS)
            )
            position = torch.tensor([len(r.prompt) + step for r in requests], device=self.device)
            tokens = sampling.choose(MATHS, scores, drawn, low, high, index, position)
            return tokens.cpu().numpy()
        return scores.argmax(-1).cpu().numpy()

    @in_order
    def hide(self, scores: Any, hidden: np.ndarray, outweigh: int | None = None) -> torch.Tensor:
        """See `base.Runner`."""
        mask = torch.from_numpy(hidden).to(self.device)
        return sampling.hide(MATHS, scores.to(self.device, torch.float32), mask, outweigh)

    @in_order
    def warm(self, scores: Any, requests: Sequence[Request]) -> torch.Tensor:
        """See `base.Runner`."""
        columns = sampling_rows(requests, max(len(r.eos_ids) for r in requests))
        names = "temperature", "top_k", "top_p", "min_p"
        temperature, *filters = (
            torch.as_tensor(columns[name], device=self.device) for name in names
        )
        scores = scores.to(self.device, torch.float32)
        return sampling.warm(MATHS, scores, temperature, filters)

    @in_order
    def weigh(self, scores: Any, requests: Sequence[Request], new: np.ndarray) -> torch.Tensor:
        """See `base.Runner`."""
        scores = scores.to(self.device, torch.float32)
        rows = sampler.dense(weight_rows(requests, new), scores.shape[1], self.device)
        return sampling.weigh(MATHS, scores, *rows)

    @in_order
    def tell(self, scores: Any, tokens: np.ndarray, likely: int = TOP) -> np.ndarray:
        """See `base.Runner`."""
        ids = torch.from_numpy(tokens.astype(np.int64)).to(self.device)
        scores = scores.to(self.device, torch.float32)
        return sampling.tell(MATHS, scores, ids, likely).cpu().numpy()

    @in_order
    def log_probs(self, scores: Any, tokens: np.ndarray, temperature: float) -> torch.Tensor:
        """See `base.Runner`."""
        ids = torch.from_numpy(tokens.astype(np.int64)).to(self.device)
        return sampling.log_probs(MATHS, scores.to(self.device, torch.float32), ids, temperature)

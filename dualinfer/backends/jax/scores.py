"""Scores that the host holds: calls that change them, or choose tokens by them."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ...arrays import to_jax
from ..base import NO_TOKEN, TOP, Request
from ..slots import bucket, sampling_rows, weight_rows
from . import sampler
from .mesh import Place, in_place
from .sampler import WORDS, choose


class ScoreCalls:
    """The calls of a runner that change scores [B, V], or choose tokens by them."""

    device: Any
    _place: Place

    @in_place
    def choose(self, scores: Any, requests: Sequence[Request], step: int) -> np.ndarray:
        """Tokens of scores [B, V]; see `base.Runner`."""
        columns = sampling_rows(requests, max(len(r.eos_ids) for r in requests))
        columns = {
            "noise": columns["noise"],
            **{name: columns[name].astype(np.uint32) for name in WORDS},
        }
        position = np.array([len(r.prompt) + step for r in requests], np.int32)
        return np.asarray(choose(to_jax(scores, self.device), columns, position))

    @in_place
    def hide(self, scores: Any, hidden: np.ndarray, outweigh: int | None = None) -> jax.Array:
        """See `base.Runner`."""
        return sampler.hide(to_jax(scores, self.device), hidden, outweigh)

    @in_place
    def warm(self, scores: Any, requests: Sequence[Request]) -> jax.Array:
        """See `base.Runner`."""
        columns = sampling_rows(requests, max(len(r.eos_ids) for r in requests))
        how = {name: columns[name] for name in ("temperature", "top_k", "top_p", "min_p")}
        return sampler.warm(to_jax(scores, self.device), how)

    @in_place
    def weigh(self, scores: Any, requests: Sequence[Request], new: np.ndarray) -> jax.Array:
        """See `base.Runner`."""
        width = bucket(max(new.shape[1], 1))
        padded = np.full((len(new), width), NO_TOKEN, np.int32)
        padded[:, : new.shape[1]] = new
        return sampler.weigh(to_jax(scores, self.device), weight_rows(requests, padded))

    @in_place
    def tell(self, scores: Any, tokens: np.ndarray, likely: int = TOP) -> np.ndarray:
        """See `base.Runner`."""
        ids = tokens.astype(np.int32)
        return np.asarray(sampler.tell(to_jax(scores, self.device), ids, likely))

    @in_place
    def log_probs(self, scores: Any, tokens: np.ndarray, temperature: float) -> jax.Array:
        """See `base.Runner`."""
        ids = tokens.astype(np.int32)
        return sampler.log_probs(to_jax(scores, self.device), ids, np.float32(temperature))

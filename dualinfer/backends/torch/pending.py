"""Tokens that a torch device may still be computing."""

import numpy as np
import torch

from ...arrays import on_its_way
from .ops.plain import PlainOps


class PendingTokens:
    """Tokens on their way to the host; on CUDA the copy runs beside later steps."""

    def __init__(self, tokens: torch.Tensor, ops: PlainOps, told: torch.Tensor | None = None):
        self._exchange, self._given_up = ops.exchange, None
        if tokens.is_cuda:
            if self._exchange is not None:
                self._given_up = on_its_way(self._exchange.given_up)
        else:
            tokens = tokens.clone()  # the next call's steps write there again
            told = None if told is None else told.clone()
        self._tokens = on_its_way(tokens)
        self._told = None if told is None else on_its_way(told)

    def fetch(self) -> np.ndarray:
        """int32 [steps, columns]."""
        if self._exchange is not None and self._given_up is not None and self._given_up().any():
            raise self._exchange.error()
        return self._tokens().astype(np.int32)

    def told(self) -> np.ndarray | None:
        """See `base.PendingTokens`."""
        return None if self._told is None else self._told()

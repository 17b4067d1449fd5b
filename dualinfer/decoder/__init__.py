"""The decoder: every family's forward pass, read off its ModelSpec, once for all backends.

It computes by a backend's ops (`ops/contract.py`) alone: whether kernels or plain ops serve,
on one device or a share of several, is theirs. How a layer attends (a whole sequence, a prompt into
the cache, one token from the cache) is the `attend` function that the runner passes in.
"""

from .encoder import across_whole, cross_keys, encoded, encoder_states
from .forward import hidden_states
from .head import embeddings, joined_towers, last_hidden_state, logits, outputs, pooled
from .run import Attend, Mixers, Recur

__all__ = [
    "Attend",
    "Mixers",
    "Recur",
    "across_whole",
    "cross_keys",
    "embeddings",
    "encoded",
    "encoder_states",
    "hidden_states",
    "joined_towers",
    "last_hidden_state",
    "logits",
    "outputs",
    "pooled",
]

"""One model architecture as frozen data: what the decoder and the ops read, and nothing else.

A field is here only if it is a fact of the checkpoint that changes the result. Letters, here and
everywhere: B sequences, T tokens, S cache length, L layers, E embed, H query heads, K KV heads,
G = H/K, D head_dim, F ffn, V vocab, X experts.
"""

from .attention import Attention, Chunk, Latent, RelativeBias, Rope
from .block import Block
from .by_length import ByLength
from .distances import Distances
from .edit import Edit
from .embedding import Embedding
from .entry import Entry
from .mixing import Mixing
from .model import Head, Layer, ModelSpec, Patches, Pooled, Pooling, Probe
from .parts import (
    XIELU,
    Activation,
    Experts,
    Mlp,
    Norm,
    Recurrence,
    Router,
    keeps_float32,
)
from .positions import Positions
from .sounds import Sounds
from .wiring import Wiring

__all__ = [
    "XIELU",
    "Activation",
    "Attention",
    "Block",
    "ByLength",
    "Chunk",
    "Distances",
    "Edit",
    "Embedding",
    "Entry",
    "Experts",
    "Head",
    "Latent",
    "Layer",
    "Mixing",
    "Mlp",
    "ModelSpec",
    "Norm",
    "Patches",
    "Pooled",
    "Pooling",
    "Positions",
    "Probe",
    "Recurrence",
    "RelativeBias",
    "Rope",
    "Router",
    "Sounds",
    "Wiring",
    "keeps_float32",
]

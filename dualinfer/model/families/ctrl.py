"""CTRL: sines and cosines for positions, scaled embeddings, a bias of the vocabulary.

HF source: models/ctrl/modeling_ctrl.py.
"""

from dataclasses import dataclass

import numpy as np

from .. import rows as make
from ..spec import Attention, Embedding, Layer, Mlp, ModelSpec, Norm, Positions
from ..weights import Row, WeightTable, row
from .decoders import decoder_spec
from .fields import ConfigFields

CLASSES = {"ctrl": ("CTRLLMHeadModel", "CTRLModel")}
_QKV = {"q": "Wq", "k": "Wk", "v": "Wv"}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a CTRL."""
    embed, heads, head_dim = fields.split("n_embd", "n_head")
    positions, norm = fields.size("n_positions"), Norm("layer", 1e-6)
    final = Norm("layer", fields.number("layer_norm_epsilon"))
    attention = Attention(heads, heads, head_dim, head_dim**-0.5)
    layer = Layer(attention, Mlp(fields.size("dff"), "relu", gated=False), norm, "pre")
    spec = decoder_spec(
        *(fields, architecture, embed, (layer,) * fields.layers("n_layer"), final),
        max_positions=positions,
        positions=Positions(positions),
        embedding=Embedding(embed**0.5, "all"),
    )
    fields.ignore("resid_pdrop", "embd_pdrop", "attn_pdrop", "n_ctx")
    fields.ignore_summary()
    hf = "transformer.h.{i}."
    rows = [
        *make.norm(norm, "attn_norm", f"{hf}layernorm1"),
        *make.norm(norm, "mlp_norm", f"{hf}layernorm2"),
        *make.joined("qkv", hf + "multi_head_attention.{p}", _QKV, bias=True),
        *make.linear("out", f"{hf}multi_head_attention.dense", "embed q"),
        *make.linear("up", f"{hf}ffn.0", "ffn embed"),
        *make.linear("down", f"{hf}ffn.2", "embed ffn"),
    ]
    outer = [Row("positions.weight", ("positions", "embed"), (), constant=Angles())]
    outer += make.norm(final, "final_norm", "transformer.layernorm")
    if spec.head:
        outer.append(row("head.bias", "vocab", ("lm_head.bias", "vocab")))
    return spec, make.causal_table(
        spec,
        rows,
        outer,
        embedding="transformer.w",
        tied=fields.flag("tie_word_embeddings", True),
        base="transformer.",
        unused=[r"(^|\.)pos_encoding$"],
    )


@dataclass(frozen=True)
class Angles:
    """Sines of positions by frequencies from 1 down to 1e-4, then their cosines, as HF has them."""

    def __call__(self, shape: tuple[int, ...]) -> np.ndarray:
        """The table float32 [rows, width]."""
        rows, width = shape
        exponents = 2 * (np.arange(width) // 2).astype(np.float32) / np.float32(width)
        # As for rotary frequencies: a position multiplies the error.
        rates = np.float32(1) / (1e4 ** exponents.astype(np.float64)).astype(np.float32)
        angles = (np.arange(rows, dtype=np.float32)[:, None] * rates).astype(np.float64)
        both = np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])
        return np.concatenate(both, -1).astype(np.float32)

"""Decoders that come from fairseq: BioGPT and XGLM. HF sources: models/biogpt, models/xglm."""

import math
from dataclasses import dataclass

import numpy as np

from ...errors import ModelError
from .. import rows as make
from ..spec import Attention, Embedding, Layer, Mlp, ModelSpec, Norm, Positions
from ..weights import Row, WeightTable, row
from .decoders import decoder_spec
from .fields import ConfigFields

CLASSES = {"biogpt": ("BioGptForCausalLM", "BioGptModel"), "xglm": ("XGLMForCausalLM", "XGLMModel")}
# HF's name of the model, and whether positions are computed.
_BASES = {"biogpt": ("biogpt.", False), "xglm": ("model.", True)}
_OFFSET = 2  # rows of the table before position 0
# The names of: embed, heads, layers, the MLP's width, its activation.
_FIELDS = {
    "biogpt": (
        *("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size"),
        "hidden_act",
    ),
    "xglm": ("d_model", "attention_heads", "num_layers", "ffn_dim", "activation_function"),
}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a BioGPT or XGLM model."""
    *sizes, layers, ffn, activation = _FIELDS[fields.family]
    embed, heads, head_dim = fields.split(*sizes)
    positions = fields.size("max_position_embeddings")
    norm = Norm("layer", 1e-5)  # HF leaves torch's default, whatever layer_norm_eps is
    fields.require("add_cross_attention", False)
    fields.ignore("dropout", "attention_dropout", "activation_dropout", "layerdrop", "init_std")
    fields.ignore("layer_norm_eps", "hidden_dropout_prob", "attention_probs_dropout_prob")
    block = Layer(
        Attention(heads, heads, head_dim, head_dim**-0.5),
        Mlp(fields.size(ffn), fields.activation(activation), gated=False),
        norm,
        "pre",
    )
    spec = decoder_spec(
        *(fields, architecture, embed, (block,) * fields.layers(layers), norm),
        max_positions=positions,
        positions=Positions(positions, _OFFSET),
        packs=False,
        embedding=Embedding(embed**0.5 if fields.flag("scale_embedding", True) else 1.0),
    )
    base, computes = _BASES[fields.family]
    hf, at = base + "layers.{i}.", "positions embed"
    layer = [
        *make.norm(norm, "attn_norm", f"{hf}self_attn_layer_norm"),
        *make.joined("qkv", hf + "self_attn.{p}", make.QKV, bias=True),
        *make.linear("out", f"{hf}self_attn.out_proj", "embed q"),
        *make.norm(norm, "mlp_norm", f"{hf}final_layer_norm"),
        *make.linear("up", f"{hf}fc1", "ffn embed"),
        *make.linear("down", f"{hf}fc2", "embed ffn"),
    ]
    table = row("positions.weight", at, (f"{base}embed_positions.weight", at))
    if computes:
        if embed < 4:
            raise ModelError(f"config.json has d_model={embed}; expected 4 or more.")
        padding = fields.take("pad_token_id")
        table = Row(table.name, table.axes, (), constant=Sinusoids(padding))
    return spec, make.causal_table(
        spec,
        layer,
        [table, *make.norm(norm, "final_norm", f"{base}layer_norm")],
        embedding=f"{base}embed_tokens",
        tied=fields.flag("tie_word_embeddings", True),
        base=base,
        renames=(("lm_head.", "output_projection."),),
        # The table, which older versions stored.
        unused=[
            r"embed_positions\.(weights|_float_tensor)$",
            *([] if spec.head else [r"^output_"]),
        ],
    )


@dataclass(frozen=True)
class Sinusoids:
    """Angles of positions, sines and then cosines, by frequencies from 1 down to 1e-4.

    Vaswani et al., 2017, as tensor2tensor has it. The row of the number `padding` is zero, as HF's.
    """

    padding: int | None

    def __call__(self, shape: tuple[int, ...]) -> np.ndarray:
        """The table float32 [rows, width]; an odd width ends with zeros."""
        rows, width = shape
        half = width // 2
        exponents = np.arange(half, dtype=np.float32) * np.float32(-math.log(1e4) / (half - 1))
        # As for rotary frequencies: a position multiplies the error.
        frequencies = np.exp(exponents.astype(np.float64)).astype(np.float32)
        angles = (np.arange(rows, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
        table = np.zeros(shape, np.float32)
        table[:, :half], table[:, half : 2 * half] = np.sin(angles), np.cos(angles)
        if self.padding is not None and 0 <= self.padding < rows:
            table[self.padding] = 0
        return table

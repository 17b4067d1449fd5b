"""GPT-Neo: unscaled attention, in layers of turns over all of the past and over a window.

HF source: models/gpt_neo.
"""

from typing import Any

from ...errors import ModelError, shown
from .. import rows as make
from ..spec import Attention, Embedding, Layer, Mlp, ModelSpec, Norm, Positions
from ..weights import WeightTable, row
from .decoders import decoder_spec
from .fields import MOST_LAYERS, ConfigFields

CLASSES = {"gpt_neo": ("GPTNeoForCausalLM", "GPTNeoModel")}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a GPT-Neo model."""
    embed, heads, head_dim = fields.split("hidden_size", "num_heads")
    positions = fields.size("max_position_embeddings")
    norm = Norm("layer", fields.number("layer_norm_epsilon"))
    ffn = fields.size("intermediate_size", 4 * embed)
    mlp = Mlp(ffn, fields.activation("activation_function"), gated=False)
    attention = [
        Attention(heads, heads, head_dim, 1.0, near=window)
        for window in _windows(fields, fields.layers("num_layers"))
    ]
    fields.ignore("resid_dropout", "embed_dropout", "attention_dropout", "classifier_dropout")
    fields.ignore_summary()
    spec = decoder_spec(
        *(fields, architecture, embed, (Layer(a, mlp, norm, "pre") for a in attention), norm),
        max_positions=positions,
        positions=Positions(positions),
        embedding=Embedding(types="vocab"),
    )
    hf = "transformer.h.{i}."
    layer = [
        *make.norm(norm, "attn_norm", f"{hf}ln_1"),
        *make.joined("qkv", hf + "attn.attention.{p}", make.QKV, bias=False),
        *make.linear("out", f"{hf}attn.attention.out_proj", "embed q"),
        *make.norm(norm, "mlp_norm", f"{hf}ln_2"),
        *make.linear("up", f"{hf}mlp.c_fc", "ffn embed"),
        *make.linear("down", f"{hf}mlp.c_proj", "embed ffn"),
    ]
    outer = [
        row("positions.weight", "positions embed", ("transformer.wpe.weight", "positions embed")),
        *make.norm(norm, "final_norm", "transformer.ln_f"),
    ]
    return spec, make.causal_table(
        spec,
        layer,
        outer,
        embedding="transformer.wte",
        tied=fields.flag("tie_word_embeddings", True),
        base="transformer.",
        unused=[r"\.attn\.attention\.(masked_)?bias$"],  # buffers of older versions: causal masks
    )


def _windows(fields: ConfigFields, layers: int) -> list[int | None]:
    """The window of each layer, None where it sees all of the past."""
    size = fields.size("window_size")
    types = fields.take("attention_types", [])
    kinds = fields.take("attention_layers")
    if kinds is None:
        check_types(types)
        kinds = [kind for pattern, times in types for _ in range(times) for kind in pattern]
    kinds = fields.kinds("attention_layers", layers, ("global", "local"), kinds)
    return [size if kind == "local" else None for kind in kinds]


def check_types(types: Any) -> None:
    """Raise ModelError unless `attention_types` is a list of [kinds of layers, times].

    HF and this file write it out layer by layer.
    """
    try:
        count = sum(len(pattern) * times for pattern, times in types)
        fits = all(isinstance(pattern, list | tuple) for pattern, _ in types)
        fits = fits and isinstance(count, int) and all(n >= 0 for _, n in types)
    except (TypeError, ValueError):
        fits, count = False, 0
    if not fits or count > MOST_LAYERS:
        raise ModelError(
            f"config.json has attention_types={shown(types)}; expected a list of pairs, kinds of "
            f"layers and how often they come, for at most {MOST_LAYERS} layers."
        )

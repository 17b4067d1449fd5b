"""MPT: ALiBi in the place of positions, no biases at all. HF source: models/mpt."""

import math
from collections.abc import Mapping

import numpy as np

from ...errors import ModelError, shown
from .. import rows as make
from ..spec import Attention, Layer, Mlp, ModelSpec, Norm
from ..weights import WeightTable
from .decoders import decoder_spec
from .fields import INERT, ConfigFields

CLASSES = {"mpt": ("MptForCausalLM", "MptModel")}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of an MPT model."""
    embed, heads, head_dim = fields.split("d_model", "n_heads")
    norm = Norm("layer", fields.number("layer_norm_epsilon"))
    written = fields.take("attn_config", {})
    if not isinstance(written, Mapping):
        raise ModelError(f"config.json has attn_config={shown(written)}; expected an object.")
    inner = {f"attn_config.{n}": value for n, value in written.items() if n not in INERT}
    attn = ConfigFields(fields.family, inner, "attn_config")
    scale = attn.optional_number("attn_config.softmax_scale")
    clip = attn.optional_number("attn_config.clip_qkv")
    # HF's model is this one whatever these say, and so reads other checkpoints wrongly.
    attn.require("attn_config.alibi", True)
    attn.require("attn_config.alibi_bias_max", 8)
    attn.require("attn_config.attn_type", "multihead_attention")
    for name in ("prefix_lm", "qk_ln", "qk_gn", "rope", "attn_uses_sequence_id"):
        attn.require(f"attn_config.{name}", False)
    attn.ignore("attn_config.attn_impl", "attn_config.attn_pdrop")
    attn.finish()
    fields.require("expansion_ratio", 4)
    fields.require("no_bias", True)
    fields.require("logit_scale")
    fields.require("norm_type", "low_precision_layernorm", "layernorm")
    fields.ignore("learned_pos_emb")  # there are none beside ALiBi
    fields.ignore("embedding_fraction", "emb_pdrop", "resid_pdrop")  # of training
    fields.ignore("init_config", "init_device", "tokenizer_name", "verbose")
    block = Layer(
        Attention(
            *(heads, heads, head_dim, scale or head_dim**-0.5), clip=clip, alibi=alibi_slopes(heads)
        ),
        Mlp(4 * embed, "gelu", gated=False),
        norm,
        "pre",
    )
    spec = decoder_spec(
        *(fields, architecture, embed, (block,) * fields.layers("n_layers"), norm),
        max_positions=fields.size("max_seq_len"),
        packs=False,
    )
    hf = "transformer.blocks.{i}."
    layer = [
        *make.norm_without_bias(norm, "attn_norm", f"{hf}norm_1"),
        *make.norm_without_bias(norm, "mlp_norm", f"{hf}norm_2"),
        *make.linear("qkv", f"{hf}attn.Wqkv", "q+k+v embed", bias=False),
        *make.linear("out", f"{hf}attn.out_proj", "embed q", bias=False),
        *make.linear("up", f"{hf}ffn.up_proj", "ffn embed", bias=False),
        *make.linear("down", f"{hf}ffn.down_proj", "embed ffn", bias=False),
    ]
    return spec, make.causal_table(
        spec,
        layer,
        make.norm_without_bias(norm, "final_norm", "transformer.norm_f"),
        embedding="transformer.wte",
        tied=fields.flag("tie_word_embeddings", True),
        base="transformer.",
    )


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Slopes as float32 values (HF's `build_mpt_alibi_tensor`).

    Of a number of heads that is no power of two, those of the next one, every second one first.
    """
    power = 2 ** math.ceil(math.log2(heads))
    exponents = np.arange(1, power + 1, dtype=np.float32) * np.float32(8 / power)
    slopes = (1 / (2 ** exponents.astype(np.float64)).astype(np.float32)).astype(np.float32)
    if power != heads:
        slopes = np.concatenate([slopes[1::2], slopes[::2]])[:heads]
    return tuple(float(slope) for slope in slopes)

"""GPT-2 and its kin, with learned positions. HF sources: models/gpt2, gpt_bigcode, openai.

GPT-BigCode (StarCoder) has one KV head for all queries or one for each, and GPT, the first, its
norms behind the sums.
"""

from collections.abc import Iterable

from ...errors import UnservedError, shown
from .. import rows as make
from ..spec import Activation, Attention, Embedding, Layer, Mlp, ModelSpec, Norm, Positions
from ..weights import Row, WeightTable, row
from .decoders import decoder_spec
from .fields import ConfigFields

CLASSES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Model"),
    "gpt-sw3": (
        "GPT2LMHeadModel",
        "GPT2Model",
    ),  # whose config, as transformers reads it, is GPT-2's
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeModel"),
    "openai-gpt": ("OpenAIGPTLMHeadModel", "OpenAIGPTModel"),
}
_AFN: dict[str, Activation] = {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a GPT-2, GPT-BigCode or GPT model."""
    embed, heads, head_dim = fields.split("n_embd", "n_head")
    positions, count = fields.size("n_positions"), fields.layers("n_layer")
    norm = Norm("layer", fields.number("layer_norm_epsilon"))
    ffn, scales = fields.size("n_inner", 4 * embed), [head_dim**-0.5] * count
    is_first, is_bigcode = fields.family == "openai-gpt", fields.family == "gpt_bigcode"
    if is_first:
        fields.require("n_inner", 4 * embed)
        activation = _first_activation(fields)
        fields.ignore("predict_special_tokens")  # of older versions' heads
    else:
        activation = fields.activation("activation_function")
        if not fields.flag("scale_attn_weights", True):
            scales = [1.0] * count
    one = is_bigcode and fields.flag("multi_query", True)
    if is_bigcode:
        fields.require("num_key_value_heads", 1 if one else heads)
        fields.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
        # Of the makers' own code.
        fields.ignore("inference_runner", "max_batch_size", "pad_key_length")
        fields.ignore("pre_allocate_kv_cache", "validate_runner_input")
    elif not is_first and fields.flag("scale_attn_by_inverse_layer_idx", False):
        scales = [scale / (i + 1) for i, scale in enumerate(scales)]
    fields.require("add_cross_attention", False)
    # Softmax is in float32 here in any case, which is what reorder_and_upcast_attn asks for.
    fields.ignore("reorder_and_upcast_attn", "n_ctx", "resid_pdrop", "embd_pdrop", "attn_pdrop")
    fields.ignore_summary()
    mlp, placement = Mlp(ffn, activation, gated=False), "post" if is_first else "pre"
    shape = heads, 1 if one else heads, head_dim
    layers = (Layer(Attention(*shape, s), mlp, norm, placement) for s in scales)
    spec = decoder_spec(
        *(fields, architecture, embed, layers, None if is_first else norm),
        max_positions=positions,
        positions=Positions(positions),
        embedding=Embedding(types="vocab"),
        packs=not is_first,
    )
    hf, table = "transformer.h.{i}.", "positions_embed" if is_first else "wpe"

    def linear(ours: str, theirs: str, axes: str) -> list[Row]:
        if is_bigcode:
            return make.linear(ours, hf + theirs, axes)
        # Conv1D stores [in, out]; the axis names give the transpose.
        return make.linear(ours, hf + theirs, axes, stored=" ".join(reversed(axes.split())))

    layer = [
        *make.norm(norm, "attn_norm", f"{hf}ln_1"),
        *make.norm(norm, "mlp_norm", f"{hf}ln_2"),
        *(
            make.by_head("qkv", f"{hf}attn.c_attn", bias=True)
            if is_bigcode and not one
            else linear("qkv", "attn.c_attn", "q+k+v embed")
        ),
        *linear("out", "attn.c_proj", "embed q"),
        *linear("up", "mlp.c_fc", "ffn embed"),
        *linear("down", "mlp.c_proj", "embed ffn"),
    ]
    at = "positions embed"
    outer = [row("positions.weight", at, (f"transformer.{table}.weight", at))]
    if spec.final_norm:
        outer += make.norm(norm, "final_norm", "transformer.ln_f")
    return spec, make.causal_table(
        spec,
        layer,
        outer,
        embedding="transformer.tokens_embed" if is_first else "transformer.wte",
        tied=fields.flag("tie_word_embeddings", True),
        base="transformer.",
        # Causal masks and positions that older versions stored as buffers.
        unused=[r"\.attn\.(masked_)?bias$", r"^(transformer\.)?(bias|position_ids)$"],
    )


def cross_rows(spec: ModelSpec) -> Iterable[Row]:
    """The rows of a layer of GPT-2's for attention to what an encoder gives."""
    hf = "transformer.h.{i}.crossattention."
    yield from make.linear("cross_q", f"{hf}q_attn", "q embed", stored="embed q")
    kv = "k+v source_embed", "source_embed k+v"
    yield from make.linear("cross_kv", f"{hf}c_attn", kv[0], stored=kv[1])
    yield from make.linear("cross_out", f"{hf}c_proj", "embed q", stored="q embed")
    yield from make.norm(spec.layers[0].norm, "cross_norm", "transformer.h.{i}.ln_cross_attn")


def _first_activation(fields: ConfigFields) -> Activation:
    """GPT's own names of activations, where gelu is the approximation."""
    name = fields.take("afn")
    if not isinstance(name, str) or name not in _AFN:
        raise UnservedError(
            f"config.json has afn={shown(name)}, which the openai-gpt family does not honour; "
            f"known: {', '.join(_AFN)}."
        )
    return _AFN[name]

"""GPT-NeoX: Pythia and its kind, parallel residual, partial rotary. HF source: models/gpt_neox."""

from collections.abc import Mapping

from ...errors import ModelError, shown
from ..spec import Attention, Head, Layer, Mlp, ModelSpec, Norm
from ..weights import WeightTable, row
from . import rows as make
from .fields import ConfigFields, is_positive
from .rope import make_rope, reach


def architectures(model_type: str) -> tuple[str, ...]:
    """HF class names served, the default first."""
    return "GPTNeoXForCausalLM", "GPTNeoXModel"


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a GPT-NeoX model."""
    embed, heads, head_dim = fields.split("hidden_size", "num_attention_heads")
    layers, vocab = fields.layers("num_hidden_layers"), fields.size("vocab_size")
    positions, ffn = fields.size("max_position_embeddings"), fields.size("intermediate_size")
    norm = Norm("layer", fields.number("layer_norm_eps"))
    parameters = fields.take("rope_parameters")
    if not isinstance(parameters, Mapping):
        raise ModelError(
            f"config.json has rope_parameters={shown(parameters)}; expected an object."
        )
    for name in ("rope_theta", "partial_rotary_factor"):  # transformers 4 wrote them twice
        fields.require(name, parameters.get(name))
    rotary_dim = _rotary_dim(parameters, head_dim)
    parameters = {k: v for k, v in parameters.items() if k != "partial_rotary_factor"}
    rope = make_rope(parameters, rotary_dim, positions)
    bias = fields.flag("attention_bias", True)
    tied = fields.flag("tie_word_embeddings", False)
    has_head = architecture == "GPTNeoXForCausalLM"
    fields.ignore("attention_dropout", "hidden_dropout", "classifier_dropout")
    fields.ignore("attention_probs_dropout_prob", "hidden_dropout_prob")
    fields.ignore("is_decoder")  # HF's model is causal in any case
    block = Layer(
        Attention(heads, heads, head_dim, head_dim**-0.5, rope=rope),
        Mlp(ffn, fields.activation("hidden_act"), gated=False),
        norm,
        "pre",
        parallel=fields.flag("use_parallel_residual", True),
    )
    spec = ModelSpec(
        family="gpt_neox",
        architecture=architecture,
        vocab=vocab,
        embed=embed,
        layers=(block,) * layers,
        max_positions=reach(parameters, positions),
        final_norm=norm,
        head=Head("causal") if has_head else None,
    )
    head = make.HeadRows.of(has_head, tied, "gpt_neox.embed_in.weight")
    rows = [
        row("embed.weight", "vocab embed", ("gpt_neox.embed_in.weight", "vocab embed")),
        *make.layer_norm("final_norm", "gpt_neox.final_layer_norm"),
    ]
    for i in range(layers):
        ours, hf = f"layers.{i}.", f"gpt_neox.layers.{i}."
        rows += make.layer_norm(f"{ours}attn_norm", f"{hf}input_layernorm")
        rows += make.fused_qkv(f"{ours}qkv", f"{hf}attention.query_key_value", bias)
        rows += make.linear(f"{ours}out", f"{hf}attention.dense", "embed q", bias)
        rows += make.layer_norm(f"{ours}mlp_norm", f"{hf}post_attention_layernorm")
        rows += make.linear(f"{ours}up", f"{hf}mlp.dense_h_to_4h", "ffn embed")
        rows += make.linear(f"{ours}down", f"{hf}mlp.dense_4h_to_h", "embed ffn")
    table = WeightTable(
        rows=(*rows, *head.rows),
        sizes={
            "vocab": vocab,
            "embed": embed,
            "heads": heads,
            "q": embed,
            "k": embed,
            "v": embed,
            "ffn": ffn,
        },
        base="gpt_neox.",
        renames=(("lm_head.", "embed_out."),),
        # Causal masks and frequencies that older versions stored as buffers.
        unused=(
            r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$",
            *head.unused,
            *(pattern.replace("lm_head", "embed_out") for pattern in head.unused),
        ),
        tied=head.tied,
    )
    return spec, table


def _rotary_dim(parameters: Mapping, head_dim: int) -> int:
    """Elements of a head that rotate."""
    factor = parameters.get("partial_rotary_factor", 1.0)
    if not is_positive(factor) or factor > 1:
        raise ModelError(
            f"config.json has partial_rotary_factor={shown(factor)}; expected a number up to 1."
        )
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(
            f"config.json has partial_rotary_factor={factor}, which rotates {rotary_dim} of the "
            f"{head_dim} elements of a head; expected an even number."
        )
    return rotary_dim

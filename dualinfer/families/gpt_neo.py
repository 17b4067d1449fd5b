"""GPT-Neo: unscaled attention, in layers of turns over all of the past and over a window.

HF source: models/gpt_neo.
"""

from ..errors import ModelError
from ..spec import Attention, Head, Layer, Mlp, ModelSpec, Norm
from ..weights import WeightTable, row
from . import rows as make
from .fields import ConfigFields


def architectures(model_type: str) -> tuple[str, ...]:
    """HF class names served, the default first."""
    return "GPTNeoForCausalLM", "GPTNeoModel"


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a GPT-Neo model."""
    embed, heads = fields.size("hidden_size"), fields.size("num_heads")
    layers, vocab = fields.size("num_layers"), fields.size("vocab_size")
    positions = fields.size("max_position_embeddings")
    ffn = fields.size("intermediate_size", 4 * embed)
    if embed % heads:
        raise ModelError(f"hidden_size={embed} is no multiple of num_heads={heads}.")
    norm = Norm("layer", fields.number("layer_norm_epsilon"))
    mlp = Mlp(ffn, fields.activation("activation_function"), gated=False)
    tied = bool(fields.take("tie_word_embeddings", True))
    has_head = architecture == "GPTNeoForCausalLM"
    fields.ignore("resid_dropout", "embed_dropout", "attention_dropout", "classifier_dropout")
    fields.ignore_summary()
    spec = ModelSpec(
        family="gpt_neo",
        architecture=architecture,
        vocab=vocab,
        embed=embed,
        layers=tuple(
            Layer(Attention(heads, heads, embed // heads, 1.0, window=window), mlp, norm, "pre")
            for window in _windows(fields, layers)
        ),
        max_positions=positions,
        learned_positions=positions,
        token_types=vocab,
        token_types_from_vocab=True,
        final_norm=norm,
        head=Head("causal") if has_head else None,
    )
    head = make.HeadRows.of(has_head, tied, "transformer.wte.weight")
    rows = [
        row("embed.weight", "vocab embed", ("transformer.wte.weight", "vocab embed")),
        row("positions.weight", "positions embed", ("transformer.wpe.weight", "positions embed")),
        *make.layer_norm("final_norm", "transformer.ln_f"),
    ]
    for i in range(layers):
        ours, hf = f"layers.{i}.", f"transformer.h.{i}."
        rows += make.layer_norm(f"{ours}attn_norm", f"{hf}ln_1")
        rows += make.split_qkv(f"{ours}qkv", f"{hf}attn.attention.", bias=False)
        rows += make.linear(f"{ours}out", f"{hf}attn.attention.out_proj", "embed q")
        rows += make.layer_norm(f"{ours}mlp_norm", f"{hf}ln_2")
        rows += make.linear(f"{ours}up", f"{hf}mlp.c_fc", "ffn embed")
        rows += make.linear(f"{ours}down", f"{hf}mlp.c_proj", "embed ffn")
    table = WeightTable(
        rows=(*rows, *head.rows),
        sizes={
            "vocab": vocab,
            "embed": embed,
            "positions": positions,
            "q": embed,
            "k": embed,
            "v": embed,
            "ffn": ffn,
        },
        base="transformer.",
        # Causal masks that older versions stored as buffers.
        unused=(r"\.attn\.attention\.(masked_)?bias$", *head.unused),
        tied=head.tied,
    )
    return spec, table


def _windows(fields: ConfigFields, layers: int) -> list[int | None]:
    """The window of each layer, None where it sees all of the past."""
    size = fields.size("window_size")
    types = fields.take("attention_types", [])
    kinds = fields.take("attention_layers")
    if kinds is None:
        kinds = [kind for pattern, times in types for _ in range(times) for kind in pattern]
    if set(kinds) - {"global", "local"} or len(kinds) != layers:
        raise ModelError(
            f"config.json has attention_layers={kinds}; the gpt_neo family honours one of global "
            f"and local for each of {layers} layers."
        )
    return [size if kind == "local" else None for kind in kinds]

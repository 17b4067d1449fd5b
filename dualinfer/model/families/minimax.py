"""MiniMax-Text-01 and M1: lightning attention, and attention in some of the layers; mixtures.

HF source: models/minimax. MiniMax-M2 is among the relatives of Llama.
"""

from dataclasses import replace

from ...blocks.lightning import Lightning
from ...blocks.normed_stream import NormedStream
from .. import rows as make
from ..spec import Attention, Experts, Head, Layer, Mlp, ModelSpec, Norm
from ..weights import Row, WeightTable
from . import mixtures
from .fields import ConfigFields
from .rope import make_rope, reach

CLASSES = {"minimax": ("MiniMaxForCausalLM", "MiniMaxModel")}
_KINDS = "linear_attention", "full_attention"
_EPS = 1e-6  # of the norm behind lightning attention, which no config names
_TABLES = r"\.(slope_rate|query_decay|key_decay|diagonal_decay)$"  # of numbers known without them


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a MiniMax."""
    embed, count = fields.size("hidden_size"), fields.layers("num_hidden_layers")
    heads, kv_heads, head_dim = fields.grouped_heads(embed)
    norm = Norm("rms", fields.number("rms_norm_eps"))
    activation = fields.activation("hidden_act")
    kinds = fields.kinds("layer_types", count, _KINDS)
    positions, parameters = fields.size("max_position_embeddings"), fields.take("rope_parameters")
    window = None if fields.take("sliding_window") is None else fields.size("sliding_window")
    rope = make_rope(parameters, head_dim, positions)
    fields.require("rotary_dim", head_dim)  # HF turns whole heads
    attention = Attention(heads, kv_heads, head_dim, head_dim**-0.5, rope=rope, window=window)
    mlps = mixtures.read_layers(fields, Mlp(1, activation, gated=True), count)
    feeding = _factors(fields, "mlp")
    blocks = {
        kind: NormedStream(_factors(fields, name), feeding)
        for kind, name in zip(_KINDS, ("linear_attn", "full_attn"), strict=True)
    }

    lightning = Lightning(heads, head_dim, activation, _EPS, heads * head_dim)
    layers = {
        kind: Layer(attention, mlps[0], norm, "pre", block=block) for kind, block in blocks.items()
    }
    layers[_KINDS[0]] = replace(layers[_KINDS[0]], recurrence=lightning, attends=False)
    spec = ModelSpec(
        family=fields.family,
        architecture=architecture,
        vocab=fields.size("vocab_size"),
        embed=embed,
        layers=tuple(layers[kind] for kind in kinds),
        max_positions=reach(parameters, positions),
        final_norm=norm,
        head=Head("causal") if architecture.endswith("ForCausalLM") else None,
    )
    fields.ignore("block_size", "attention_dropout")  # how HF cuts a sum, which is the same
    return spec, _table(fields, spec, norm)


def _factors(fields: ConfigFields, name: str) -> tuple[float, float]:
    """Of what a sub-layer reads and of what it gives, in their sum."""
    kept, added = (
        fields.optional_number(f"{name}_{letter}_factor") for letter in ("alpha", "beta")
    )
    return (1.0 if kept is None else kept, 1.0 if added is None else added)


def _forgets(layer: int, layers: int) -> float:
    """The factor of a layer's slopes; the first layers forget most."""
    return 1 - layer / (layers - 1 + 1e-5) + 1e-5


def _table(fields: ConfigFields, spec: ModelSpec, norm: Norm) -> WeightTable:
    hf, names = "model.layers.{i}.", mixtures.MIXTURES["minimax"]

    def rows_of(i: int, layer: Layer) -> tuple[Row, ...]:
        rows = make.norm(norm, "attn_norm", f"{hf}input_layernorm")
        rows += make.norm(norm, "mlp_norm", f"{hf}post_attention_layernorm")
        if isinstance(layer.recurrence, Lightning):
            rows += layer.recurrence.rows(f"{hf}self_attn", _forgets(i, len(spec.layers)))
        else:
            rows += make.joined("qkv", hf + "self_attn.{p}", make.QKV, bias=False)
            rows += make.linear("out", f"{hf}self_attn.o_proj", "embed q", bias=False)
        assert isinstance(layer.mlp, Experts)
        return (*rows, *mixtures.make_rows(names, layer.mlp, hf))

    table = make.causal_table(
        spec,
        (),
        make.norm(norm, "final_norm", "model.norm"),
        embedding="model.embed_tokens",
        tied=fields.flag("tie_word_embeddings", False),
        base="model.",
        unused=[r"rotary_emb\.", _TABLES],
        renames=names.renames,
    )
    return replace(table, layers=tuple(rows_of(*own) for own in enumerate(spec.layers)))

"""The Llama kind: Llama 1 to 3, Mistral, Qwen2, Qwen3. HF sources: models/llama and so on."""

from ...errors import ModelError, shown
from .. import rows as make
from ..spec import Attention, Head, Layer, Mlp, ModelSpec, Norm
from ..weights import WeightTable
from .fields import ConfigFields
from .rope import make_rope, reach

CLASSES = {
    "llama": ("LlamaForCausalLM", "LlamaModel"),
    "mistral": ("MistralForCausalLM", "MistralModel"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Model"),
}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a model of the Llama kind."""
    kind = fields.family
    embed = fields.size("hidden_size")
    heads, kv_heads, head_dim = fields.grouped_heads(embed)
    positions = fields.size("max_position_embeddings")
    norm = Norm("rms", fields.number("rms_norm_eps"))
    mlp = Mlp(fields.size("intermediate_size"), fields.activation("hidden_act"), gated=True)
    parameters = fields.take("rope_parameters")
    rope = make_rope(parameters, head_dim, positions)
    qk_norm = norm if kind == "qwen3" else None
    scale, windows = head_dim**-0.5, _windows(fields, fields.layers("num_hidden_layers"))
    blocks = {
        w: Layer(
            Attention(heads, kv_heads, head_dim, scale, window=w, rope=rope, qk_norm=qk_norm),
            mlp,
            norm,
            "pre",
        )
        for w in set(windows)
    }
    qkv_bias, out_bias, mlp_bias = _biases(fields)
    fields.ignore("attention_dropout")
    fields.require("activation", "swiglu")  # Falcon 3's word for silu and gates
    spec = ModelSpec(
        family=kind,
        architecture=architecture,
        vocab=fields.size("vocab_size"),
        embed=embed,
        layers=tuple(blocks[window] for window in windows),
        max_positions=reach(parameters, positions),
        final_norm=norm,
        head=Head("causal") if architecture.endswith("ForCausalLM") else None,
    )
    hf = "model.layers.{i}."
    layer = [
        *make.norm(norm, "attn_norm", f"{hf}input_layernorm"),
        *make.norm(norm, "mlp_norm", f"{hf}post_attention_layernorm"),
        *make.joined("qkv", hf + "self_attn.{p}", make.QKV, qkv_bias),
        *make.head_norms(spec.layers[0].attention, f"{hf}self_attn"),
        *make.linear("out", f"{hf}self_attn.o_proj", "embed q", out_bias),
        *make.joined("up", hf + "mlp.{p}", make.GATE_UP, mlp_bias),
        *make.linear("down", f"{hf}mlp.down_proj", "embed up", mlp_bias),
    ]
    return spec, make.causal_table(
        spec,
        layer,
        make.norm(norm, "final_norm", "model.norm"),
        embedding="model.embed_tokens",
        tied=fields.flag("tie_word_embeddings", False),
        base="model.",
        unused=[r"rotary_emb\.inv_freq$"],
    )


def _windows(fields: ConfigFields, layers: int) -> list[int | None]:
    """The sliding window of each layer, None where it sees all of the past."""
    if fields.family in ("llama", "mistral"):
        fields.ignore("use_sliding_window", "max_window_layers")  # HF's Qwen alone reads them
    if fields.family == "llama":
        _refuse_windows(fields)
        return [None] * layers
    if fields.family == "mistral":
        window = fields.take("sliding_window")
        return [None if window is None else fields.size("sliding_window")] * layers
    fields.ignore("use_sliding_window", "max_window_layers")  # HF folds both into layer_types
    return fields.windows(fields.layer_types(layers))


def _refuse_windows(fields: ConfigFields) -> None:
    """Raise ModelError where HF's cache would forget what HF's LlamaModel attends to."""
    window = fields.take("sliding_window")
    kinds = fields.take("layer_types") or []
    reach = fields.size("max_position_embeddings")
    short = window is not None and not (isinstance(window, int) and window >= reach)
    full = isinstance(kinds, list | tuple) and all(kind == "full_attention" for kind in kinds)
    if short or not full:
        what = f"sliding_window={shown(window)}" if short else f"layer_types={shown(kinds)}"
        raise ModelError(
            f"config.json has {what}: HF's Llama does not attend in windows, but its cache forgets "
            "by them, so that its text is not that of its logits. Remove the field, or use the "
            "mistral family for a model with windows."
        )


def _biases(fields: ConfigFields) -> tuple[bool, bool, bool]:
    """True if the q/k/v, output and MLP projections have biases."""
    if fields.family == "qwen2":
        return True, False, False
    if fields.family == "mistral":
        return False, False, False
    bias = fields.flag("attention_bias", False)
    return bias, bias, fields.family == "llama" and fields.flag("mlp_bias", False)

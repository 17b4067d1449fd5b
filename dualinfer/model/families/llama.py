"""The Llama kind: Llama 1 to 3, Mistral, Qwen2, Qwen3. HF sources: models/llama and so on."""

from ...errors import ModelError, shown
from ..spec import Attention, Head, Layer, Mlp, ModelSpec, Norm
from ..weights import Row, WeightTable, row
from .fields import ConfigFields
from .rope import make_rope, reach

CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def architectures(model_type: str) -> tuple[str, ...]:
    """HF class names served, the default first."""
    name = CLASSES[model_type]
    return f"{name}ForCausalLM", f"{name}Model"


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a model of the Llama kind."""
    kind = fields.family
    embed, ffn = fields.size("hidden_size"), fields.size("intermediate_size")
    heads = fields.heads("num_attention_heads")
    kv_heads = fields.heads("num_key_value_heads", heads)
    head_dim = fields.head_dim(embed, heads)
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads={heads} is no multiple of {kv_heads} KV heads.")
    layers, vocab = fields.layers("num_hidden_layers"), fields.size("vocab_size")
    max_positions = fields.size("max_position_embeddings")
    norm = Norm("rms", fields.number("rms_norm_eps"))
    mlp = Mlp(ffn, fields.activation("hidden_act"), gated=True)
    parameters = fields.take("rope_parameters")
    rope = make_rope(parameters, head_dim, max_positions)
    windows = _windows(fields, layers)
    attention = {
        window: Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            window=window,
            rope=rope,
            qk_norm=norm if kind == "qwen3" else None,
        )
        for window in set(windows)
    }
    blocks = {window: Layer(own, mlp, norm, "pre") for window, own in attention.items()}
    tied = fields.flag("tie_word_embeddings", False)
    has_head = architecture.endswith("ForCausalLM")
    qkv_bias, out_bias, mlp_bias = _biases(fields)
    fields.ignore("attention_dropout")
    spec = ModelSpec(
        family=kind,
        architecture=architecture,
        vocab=vocab,
        embed=embed,
        layers=tuple(blocks[window] for window in windows),
        max_positions=reach(parameters, max_positions),
        final_norm=norm,
        head=Head("causal") if has_head else None,
    )
    q, k, v = attention[windows[0]].qkv_sizes
    head = row("head.weight", "vocab embed", ("lm_head.weight", "vocab embed"))
    rows = [
        row("embed.weight", "vocab embed", ("model.embed_tokens.weight", "vocab embed")),
        row("final_norm.weight", "embed", ("model.norm.weight", "embed")),
    ]
    for i in range(layers):
        rows += _layer_rows(i, qkv_bias, out_bias, mlp_bias, kind == "qwen3")
    if has_head and not tied:
        rows.append(head)
    table = WeightTable(
        rows=tuple(rows),
        sizes={
            "vocab": vocab,
            "embed": embed,
            "q": q,
            "k": k,
            "v": v,
            "gate": ffn,
            "up": ffn,
            "head_dim": head_dim,
        },
        base="model.",
        unused=(r"rotary_emb\.inv_freq$",) + (() if has_head else (r"^lm_head\.weight$",)),
        tied=((head, "model.embed_tokens.weight"),) if has_head and tied else (),
    )
    return spec, table


def _windows(fields: ConfigFields, layers: int) -> list[int | None]:
    """The sliding window of each layer, None where it sees all of the past."""
    if fields.family in ("llama", "mistral"):
        fields.ignore("use_sliding_window", "max_window_layers")  # HF's Qwen alone reads them
    if fields.family == "llama":
        _refuse_windows(fields)
        return [None] * layers
    window = None
    if fields.take("sliding_window") is not None:
        window = fields.size("sliding_window")
    if fields.family == "mistral":
        return [window] * layers
    fields.ignore("use_sliding_window", "max_window_layers")  # HF folds both into layer_types
    kinds = fields.layer_types(layers)
    if window is None and "sliding_attention" in kinds:
        raise ModelError(
            "config.json has layer_types with sliding_attention and no sliding_window (or "
            "use_sliding_window=False), so that how far those layers see is not said."
        )
    return [window if kind == "sliding_attention" else None for kind in kinds]


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
    """Whether the q/k/v, output and MLP projections have biases."""
    if fields.family == "qwen2":
        return True, False, False
    if fields.family == "mistral":
        return False, False, False
    bias = fields.flag("attention_bias", False)
    return bias, bias, fields.family == "llama" and fields.flag("mlp_bias", False)


def _layer_rows(i: int, qkv_bias: bool, out_bias: bool, mlp_bias: bool, qk_norm: bool) -> list[Row]:
    ours, hf = f"layers.{i}.", f"model.layers.{i}."
    attn, mlp = hf + "self_attn.", hf + "mlp."
    projections = ("q", "k", "v")
    rows = [
        row(ours + "attn_norm.weight", "embed", (hf + "input_layernorm.weight", "embed")),
        row(ours + "mlp_norm.weight", "embed", (hf + "post_attention_layernorm.weight", "embed")),
        row(
            ours + "qkv.weight",
            "q+k+v embed",
            *((f"{attn}{p}_proj.weight", f"{p} embed") for p in projections),
        ),
        row(ours + "out.weight", "embed q", (attn + "o_proj.weight", "embed q")),
        row(
            ours + "up.weight",
            "gate+up embed",
            (mlp + "gate_proj.weight", "gate embed"),
            (mlp + "up_proj.weight", "up embed"),
        ),
        row(ours + "down.weight", "embed up", (mlp + "down_proj.weight", "embed up")),
    ]
    if qkv_bias:
        rows.append(
            row(ours + "qkv.bias", "q+k+v", *((f"{attn}{p}_proj.bias", p) for p in projections))
        )
    if out_bias:
        rows.append(row(ours + "out.bias", "embed", (attn + "o_proj.bias", "embed")))
    if mlp_bias:
        rows += [
            row(
                ours + "up.bias",
                "gate+up",
                (mlp + "gate_proj.bias", "gate"),
                (mlp + "up_proj.bias", "up"),
            ),
            row(ours + "down.bias", "embed", (mlp + "down_proj.bias", "embed")),
        ]
    if qk_norm:
        rows += [
            row(f"{ours}{p}_norm.weight", "head_dim", (f"{attn}{p}_norm.weight", "head_dim"))
            for p in ("q", "k")
        ]
    return rows

"""Moonshine: a rotary encoder of raw audio, and decoder of text. HF source: models/moonshine."""

from collections.abc import Iterable
from dataclasses import replace

from ...blocks.waves import Waves
from ...errors import UnservedError
from .. import rows as make
from ..spec import Attention, Head, Layer, Mlp, ModelSpec, Norm
from ..weights import Row, WeightTable, row
from .fields import ConfigFields
from .rope import make_rope, reach, rotary_size

CLASSES = {"moonshine": ("MoonshineForConditionalGeneration", "MoonshineModel")}
_SIDES = ("encoder", "decoder")


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a Moonshine model."""
    norm, embed = Norm("layer", 1e-5), fields.size("hidden_size")  # HF leaves torch's default
    positions, turns = fields.size("max_position_embeddings"), fields.take("rope_parameters")
    heads = fields.heads("encoder_num_attention_heads")
    others = ("decoder_num_attention_heads", *(f"{x}_num_key_value_heads" for x in _SIDES))
    if embed % heads or any(fields.heads(name, heads) != heads for name in others):
        raise UnservedError(
            f"config.json has encoder_num_attention_heads={heads} and hidden_size={embed}; the "
            f"moonshine family is served where it has as many {', '.join(others)}, which divide "
            "hidden_size: HF's class takes the numbers of one for the other."
        )
    head_dim = embed // heads
    fields.require("head_dim", head_dim)
    turned = rotary_size(turns, head_dim)
    rope = {**turns, "partial_rotary_factor": None}
    rope = make_rope(rope, turned, positions, interleaved=True)
    # Padding of heads for kernels changes nothing.
    fields.ignore("pad_head_dim_to_multiple_of", "attention_dropout", "is_encoder_decoder")
    fields.ignore("partial_rotary_factor")
    bias, ffn = fields.flag("attention_bias", False), fields.size("intermediate_size")
    has_head = architecture.endswith("ForConditionalGeneration")

    def stack(side: str) -> ModelSpec:
        decodes = side == "decoder"
        attention = Attention(heads, heads, head_dim, head_dim**-0.5, causal=decodes, rope=rope)
        mlp = Mlp(ffn, fields.activation(f"{side}_hidden_act"), gated=decodes)
        cross = replace(attention, causal=False, rope=None) if decodes else None
        return ModelSpec(
            family=fields.family,
            architecture=architecture,
            vocab=fields.size("vocab_size") if decodes else 0,
            embed=embed,
            layers=(Layer(attention, mlp, norm, "pre", cross=cross),)
            * fields.layers(f"{side}_num_hidden_layers"),
            max_positions=reach(turns, positions),
            packs=False,
            final_norm=norm,
            senses=None if decodes else Waves(),
        )

    encoder, spec = stack("encoder"), stack("decoder")
    start, axes = fields.take("decoder_start_token_id"), "vocab embed"
    scores = Head("causal", loss="counted") if has_head else None
    spec = replace(spec, head=scores, encoder=encoder, start=start)
    embedding, hf = "model.decoder.embed_tokens.weight", "model.encoder."
    outer = [
        row("embed.weight", axes, (embedding, axes)),
        *make.norm_without_bias(norm, "final_norm", "model.decoder.norm"),
        *make.norm_without_bias(norm, "encoder.final_norm", f"{hf}layer_norm"),
        *make.norm(norm, "encoder.sound_norm", f"{hf}groupnorm"),
    ]
    for i, shape in enumerate(("embed one taps1", "embed2 embed taps2", "embed embed2 taps3")):
        axes_of = " ".join(f"source_{x}" for x in shape.split())
        name, out = f"conv{i + 1}", axes_of.split()[0]
        outer.append(row(f"encoder.{name}.kernel", axes_of, (f"{hf}{name}.weight", axes_of)))
        if i:
            outer.append(row(f"encoder.{name}.bias", out, (f"{hf}{name}.bias", out)))
    head = row("head.weight", axes, ("proj_out.weight", axes))
    tied = fields.flag("tie_word_embeddings", True) and has_head
    if has_head and not tied:
        outer.append(head)
    decoder_rows = tuple(_layer(norm, "model.decoder.layers.{i}.", bias, crosses=True))
    encoder_rows = tuple(_layer(norm, f"{hf}layers.{{i}}.", bias, crosses=False))
    return spec, WeightTable(
        spec,
        tuple(outer),
        (decoder_rows,) * len(spec.layers) + (encoder_rows,) * len(encoder.layers),
        base="model.",
        unused=(r"rotary_emb\.inv_freq$", *(() if has_head else (r"^proj_out\.",))),
        tied=((head, embedding),) if tied else (),
    )


def _layer(norm: Norm, hf: str, bias: bool, crosses: bool) -> Iterable[Row]:
    yield from make.norm_without_bias(norm, "attn_norm", f"{hf}input_layernorm")
    yield from make.joined("qkv", hf + "self_attn.{p}", make.QKV, bias)
    yield from make.linear("out", f"{hf}self_attn.o_proj", "embed q", bias=False)
    behind, mlp = f"{hf}post_attention_layernorm", f"{hf}mlp."
    if not crosses:
        yield from make.norm_without_bias(norm, "mlp_norm", behind)
        yield from make.linear("up", f"{mlp}fc1", "ffn embed")
        yield from make.linear("down", f"{mlp}fc2", "embed ffn")
        return
    yield from make.norm_without_bias(norm, "cross_norm", behind)
    kv = {axis: make.QKV[axis] for axis in ("k", "v")}
    yield from make.joined("cross_q", hf + "encoder_attn.{p}", {"q": "q_proj"}, bias)
    yield from make.joined("cross_kv", hf + "encoder_attn.{p}", kv, bias)
    yield from make.linear("cross_out", f"{hf}encoder_attn.o_proj", "embed q", bias=False)
    yield from make.norm_without_bias(norm, "mlp_norm", f"{hf}final_layernorm")
    yield row("up.weight", "gate+up embed", (f"{mlp}fc1.weight", "up+gate/1 embed"))
    yield row("up.bias", "gate+up", (f"{mlp}fc1.bias", "up+gate/1"))
    yield from make.linear("down", f"{mlp}fc2", "embed up")

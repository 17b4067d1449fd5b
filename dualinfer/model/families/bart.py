"""BART and its relatives: encoder-decoders that come from fairseq and Marian.

HF sources: models/bart, mbart, plbart, mvp, led, blenderbot, blenderbot_small, marian, pegasus,
m2m_100, nllb_moe.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ...errors import ModelError, shown
from .. import rows as make
from ..spec import (
    Activation,
    Attention,
    Embedding,
    Experts,
    Head,
    Layer,
    Mlp,
    ModelSpec,
    Norm,
    Positions,
    Router,
)
from ..weights import Row, WeightTable, row
from .fairseq import Sinusoids
from .fields import ConfigFields
from .heads import kind_of_head, pair_head


@dataclass(frozen=True)
class _Kind:
    """The facts that tell the families apart.

    Norms before the sub-layers have one behind the last layer as well. Tables of positions are
    learned or computed, in tensor2tensor's way (`fairseq`) or in XLM's (`marian`), and begin with
    `offset` other rows, or those up to the id of the padding. Where labels are shifted, `starts`
    tells whether the id of a start comes first, or their own last one. A decoder that `repeats`
    reads the encoder's ids where it is given none; where `tokens_normed` it norms tokens before
    positions. An encoder that `looks_around` has windows and a table of its own length, both have
    an embedding that a config must say they `share`, and some layers are `sparse`. The names of
    tensors begin with `base`, and HF's classes with `name`, whose heads for labels are `heads`.
    """

    name: str
    placement: Literal["pre", "post"]
    embed_norm: bool
    positions: Literal["learned", "fairseq", "marian"]
    offset: int = 0
    starts: bool = True
    repeats: bool = False
    tokens_normed: bool = False
    looks_around: bool = False
    share: bool = False
    sparse: bool = False
    base: str = "model."
    heads: tuple[str, ...] = ()
    generates: str = "ForConditionalGeneration"

    @property
    def classes(self) -> tuple[str, ...]:
        """HF's classes."""
        return tuple(self.name + end for end in (self.generates, "Model", *self.heads))


_LABELS = ("ForSequenceClassification", "ForQuestionAnswering")
_BART: dict[str, Any] = {
    **{"placement": "post", "embed_norm": True, "positions": "learned", "offset": 2},
    **{"repeats": True, "heads": _LABELS},
}
_KINDS = {
    "bart": _Kind("Bart", **_BART),
    "mbart": _Kind("MBart", **{**_BART, "placement": "pre"}, starts=False),
    "plbart": _Kind("PLBart", **{**_BART, "heads": _LABELS[:1]}, starts=False),
    "mvp": _Kind("Mvp", **_BART),
    "led": _Kind(
        *("LED", "post", True, "learned"),
        repeats=True,
        looks_around=True,
        base="led.",
        heads=_LABELS[1:],
    ),
    "blenderbot": _Kind("Blenderbot", "pre", False, "learned"),
    "blenderbot-small": _Kind("BlenderbotSmall", "post", True, "learned", tokens_normed=True),
    "marian": _Kind("Marian", "post", False, "marian", share=True, generates="MTModel"),
    "pegasus": _Kind("Pegasus", "pre", False, "marian"),
    "m2m_100": _Kind("M2M100", "pre", False, "fairseq"),
    "nllb-moe": _Kind("NllbMoe", "pre", False, "fairseq", sparse=True),
}
CLASSES = {family: kind.classes for family, kind in _KINDS.items()}
# What old configs say beside, and no code reads any more.
WRITTEN = (
    *("add_bias_logits", "add_final_layer_norm", "classif_dropout", "extra_pos_embeddings"),
    *("force_bos_token_to_be_generated", "normalize_before", "normalize_embedding", "save_step"),
    *(
        "static_position_embeddings",
        "do_blenderbot_90_layernorm",
        "extra_layer_norm",
        "max_sequence",
    ),
)
_EMBEDDING = "vocab embed"
# Of LED's tokens that see all others.
_GLOBAL = r"\.longformer_self_attn\.(query|key|value)_global\.(weight|bias)$"


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of an encoder-decoder of BART's kind."""
    kind = _KINDS[fields.family]
    norm = Norm("layer", 1e-5)  # HF leaves torch's default
    embed, vocab = fields.size("d_model"), fields.size("vocab_size")
    names = ("max_encoder_position_embeddings", "max_decoder_position_embeddings")
    names = names if kind.looks_around else ("max_position_embeddings",) * 2
    positions: dict[str, int] = {"encoder": fields.size(names[0]), "decoder": fields.size(names[1])}
    activation = fields.activation("activation_function")
    scale = embed**0.5 if fields.flag("scale_embedding", kind.positions == "fairseq") else 1.0
    pad, start = fields.take("pad_token_id"), fields.take("decoder_start_token_id")
    offset = kind.offset
    if kind.positions == "fairseq":  # that of the padding is the row before position 0
        offset = fields.size("pad_token_id", 1) + 1 if pad else 1
    if kind.share:
        fields.require("share_encoder_decoder_embeddings", True)
        fields.require("decoder_vocab_size", vocab)
    fields.require("use_prompt", False)
    fields.ignore("prompt_length", "prompt_mid_dim")
    fields.ignore("dropout", "attention_dropout", "activation_dropout", "classifier_dropout")
    fields.ignore("encoder_layerdrop", "decoder_layerdrop", "init_std", "num_hidden_layers")
    fields.ignore("is_decoder", "is_encoder_decoder", "add_cross_attention", *WRITTEN)
    has_head = architecture.endswith(("ForConditionalGeneration", "MTModel"))

    def stack(side: str) -> ModelSpec:
        decodes = side == "decoder"
        layers = side_layers(fields, side, activation, norm, kind.placement)
        if kind.sparse:
            layers = _with_experts(fields, layers, fields.take(f"{side}_sparse_step"))
        if kind.looks_around and not decodes:
            layers = _windowed(layers, fields.take("attention_window"))
        skips = kind.positions == "fairseq" and pad is not None
        embedding = Embedding(scale, norm=norm if kind.embed_norm else None)
        if kind.tokens_normed and decodes:
            embedding = replace(embedding, scale=1.0, order=("norm", "project", "tables"))
        return ModelSpec(
            family=fields.family,
            architecture=architecture,
            vocab=vocab,
            embed=embed,
            layers=layers,
            max_positions=positions[side],
            positions=Positions(positions[side], offset, "rows" if skips else "all"),
            pad_id=pad if skips else None,
            packs=False,
            embedding=embedding,
            final_norm=norm if kind.placement == "pre" else None,
        )

    encoder, decoder = stack("encoder"), stack("decoder")
    head, head_rows, end = (Head("causal") if has_head else None), [], None
    if (scored := kind_of_head(architecture)) is not None:
        head, head_rows, end = pair_head(fields, scored)
    start = start if kind.starts else None
    shifted = ("labels", "source") if kind.repeats else ("labels",)
    spec = replace(decoder, head=head, encoder=encoder, start=start, end_id=end, shifted=shifted)
    tables: dict[str, Row] = {}
    base = kind.base
    for side, ours, axis in (
        ("encoder", "encoder.", "source_positions"),
        ("decoder", "", "positions"),
    ):
        axes = f"{axis} embed"
        stored = (f"{base}{side}.embed_positions.weight", axes)
        table = row(f"{ours}positions.weight", axes, stored)
        if kind.positions != "learned":
            make_table = Sinusoids(pad) if kind.positions == "fairseq" else Halves()
            table = Row(table.name, table.axes, (), constant=make_table)
        tables[side] = table
    outer = [
        row("embed.weight", _EMBEDDING, (f"{base}shared.weight", _EMBEDDING)),
        tables["decoder"],
        tables["encoder"],
        *_norms(kind, norm, "", f"{base}decoder."),
        *_norms(kind, norm, "encoder.", f"{base}encoder."),
        *head_rows,
    ]
    tied = [
        row(f"{ours}embed.weight", _EMBEDDING, (f"{base}{side}.embed_tokens.weight", _EMBEDDING))
        for ours, side in (("encoder.", "encoder"), ("", "decoder"))
    ]
    unused = [] if kind.positions == "learned" else [r"embed_positions\.weights?$"]
    optional = None
    if has_head:
        fields.flag("tie_word_embeddings", True)
        tied.append(row("head.weight", _EMBEDDING, ("lm_head.weight", _EMBEDDING)))
        if kind.positions != "fairseq":
            bias = row("head.bias", "vocab", ("final_logits_bias", "one vocab"))
            outer.append(replace(bias, fixed=True))
            optional = "head.bias"
    else:
        fields.ignore("tie_word_embeddings")
        unused += [r"^lm_head\.", r"^final_logits_bias$"]
    if kind.looks_around:  # of global attention, for which a caller would have to ask
        unused.append(_GLOBAL)
    decoder_rows = tuple(layer_rows(norm, base + "decoder.layers.{i}.", crosses=True))
    hf, parts = base + "encoder.layers.{i}.", (make.QKV, "out_proj")
    if kind.looks_around:
        parts = _LONG, "output"
    encoder_rows = tuple(layer_rows(norm, hf, False, *parts))
    layers = (decoder_rows,) * len(spec.layers) + (encoder_rows,) * len(encoder.layers)
    if kind.sparse:
        biased = fields.flag("router_bias", False)
        names = [base + "decoder.layers.{i}."] * len(spec.layers) + [hf] * len(encoder.layers)
        layers = tuple(
            tuple(_sparse_rows(layer, hf, biased))
            for layer, hf in zip(spec.all_layers, names, strict=True)
        )
    return spec, WeightTable(
        spec,
        tuple(outer),
        layers,
        base=base,
        unused=tuple(unused),
        kept=(_GLOBAL,),
        tied=tuple((own, f"{base}shared.weight") for own in tied),
        optional=optional,
    )


def _norms(kind: _Kind, norm: Norm, ours: str, theirs: str) -> Iterable[Row]:
    """The norms outside of a stack's layers."""
    if kind.embed_norm:
        yield from make.norm(norm, f"{ours}embed_norm", f"{theirs}layernorm_embedding")
    if kind.placement == "pre":
        yield from make.norm(norm, f"{ours}final_norm", f"{theirs}layer_norm")


_LONG = {x[0]: f"longformer_self_attn.{x}" for x in ("query", "key", "value")}


def _windowed(layers: tuple[Layer, ...], given: Any) -> tuple[Layer, ...]:
    """LED's encoder: a layer sees half its window on either side of each token."""
    each = given if isinstance(given, list | tuple) else [given] * len(layers)
    if len(each) != len(layers) or not all(type(n) is int and n > 0 and not n % 2 for n in each):
        raise ModelError(
            f"config.json has attention_window={shown(given)}; expected an even positive int, or "
            f"one for each of {len(layers)} layers."
        )
    return tuple(
        replace(x, attention=replace(x.attending, near=n // 2 + 1))
        for x, n in zip(layers, each, strict=True)
    )


def side_layers(
    fields: ConfigFields,
    side: str,
    activation: Activation,
    norm: Norm,
    placement: Literal["pre", "post"],
) -> tuple[Layer, ...]:
    """The layers of the "encoder" or the "decoder", by fairseq's names of fields."""
    _, heads, head_dim = fields.split("d_model", f"{side}_attention_heads")
    decodes = side == "decoder"
    attention = Attention(heads, heads, head_dim, head_dim**-0.5, causal=decodes)
    mlp = Mlp(fields.size(f"{side}_ffn_dim"), activation, gated=False)
    cross = replace(attention, causal=False) if decodes else None
    layer = Layer(attention, mlp, norm, placement, cross=cross)
    return (layer,) * fields.layers(f"{side}_layers")


def layer_rows(
    norm: Norm, hf: str, crosses: bool, parts: Mapping[str, str] = make.QKV, out: str = "out_proj"
) -> Iterable[Row]:
    """The rows of a layer, which `crosses` in a decoder; `parts` and `out` are HF's names."""
    yield from make.joined("qkv", hf + "self_attn.{p}", parts, bias=True)
    yield from make.linear("out", f"{hf}self_attn.{out}", "embed q")
    yield from make.norm(norm, "attn_norm", f"{hf}self_attn_layer_norm")
    if crosses:
        yield from make.cross(hf + "encoder_attn.{p}", make.QKV, "out_proj", bias=True)
        yield from make.norm(norm, "cross_norm", f"{hf}encoder_attn_layer_norm")
    yield from make.linear("up", f"{hf}fc1", "ffn embed")
    yield from make.linear("down", f"{hf}fc2", "embed ffn")
    yield from make.norm(norm, "mlp_norm", f"{hf}final_layer_norm")


def _with_experts(fields: ConfigFields, layers: tuple[Layer, ...], step: Any) -> tuple[Layer, ...]:
    """NLLB-MoE's layers: the last of every `step` ones has a mixture; none if that is 0.

    An expert has room for `moe_eval_capacity_token_fraction` of a batch: for all, if that is 1.
    """
    fields.require("router_dtype", "float32")
    fields.require("second_expert_policy", "all")  # others draw in evaluation, too
    fields.require("moe_eval_capacity_token_fraction", 1.0)
    # What they say of tokens without room is of none.
    fields.ignore("expert_capacity", "batch_prioritized_routing", "router_ignore_padding_tokens")
    fields.ignore("normalize_router_prob_before_dropping", "output_router_logits")
    fields.ignore("router_z_loss_coef", "router_aux_loss_coef")
    count, dropped = fields.size("num_experts"), fields.take("moe_token_dropout", 0)
    if isinstance(dropped, bool) or not isinstance(dropped, int | float) or not 0 <= dropped < 1:
        raise ModelError(
            f"config.json has moe_token_dropout={shown(dropped)}; expected a number from 0 to 1."
        )
    if type(step) is not int or step < 0 or count < 2:
        raise ModelError(
            f"config.json has a sparse_step of {shown(step)} and num_experts={count}; expected an "
            "int of 0 and more, and 2 experts or more."
        )
    own = layers[0].feeding
    assert isinstance(own, Mlp)
    router = Router(2, over_sum=0.0, scale=1 - dropped)
    sparse = replace(layers[0], mlp=Experts(count, replace(own, gated=False), router))
    return tuple(sparse if step and not (i + 1) % step else x for i, x in enumerate(layers))


def _sparse_rows(layer: Layer, hf: str, biased: bool) -> Iterable[Row]:
    """The rows of a layer of NLLB-MoE."""
    norm = layer.norm
    yield from make.joined("qkv", hf + "self_attn.{p}", make.QKV, bias=True)
    yield from make.linear("out", f"{hf}self_attn.out_proj", "embed q")
    yield from make.norm(norm, "attn_norm", f"{hf}self_attn_layer_norm")
    if layer.cross:
        yield from make.cross(hf + "cross_attention.{p}", make.QKV, "out_proj", bias=True)
        yield from make.norm(norm, "cross_norm", f"{hf}cross_attention_layer_norm")
    yield from make.norm(norm, "mlp_norm", f"{hf}ff_layer_norm")
    hf = f"{hf}ffn."
    if not layer.experts:
        yield from make.linear("up", f"{hf}fc1", "ffn embed")
        yield from make.linear("down", f"{hf}fc2", "embed ffn")
        return
    yield from make.linear("router", f"{hf}router.classifier", "choices embed", biased)
    one = f"{hf}experts.expert_{{x}}."
    for ours, theirs, axes in (("up", "fc1", "ffn embed"), ("down", "fc2", "embed ffn")):
        yield row(f"experts.{ours}.weight", f"experts {axes}", (f"{one}{theirs}.weight", axes))
    yield row("experts.up.bias", "experts ffn", (f"{one}fc1.bias", "ffn"))
    yield row("experts.down.bias", "choices embed", (f"{one}fc2.bias", "embed"))


@dataclass(frozen=True)
class Halves:
    """Angles of positions as XLM has them, all sines before all cosines (Marian, Pegasus).

    Frequencies go from 1 to almost 1e-4; an odd width has one more sine.
    """

    def __call__(self, shape: tuple[int, ...]) -> np.ndarray:
        """The table float32 [rows, width]."""
        rows, width = shape
        exponents = 2 * (np.arange(width) // 2) / width
        angles = np.arange(rows)[:, None] / np.power(10000, exponents)
        return np.concatenate((np.sin(angles[:, ::2]), np.cos(angles[:, 1::2])), 1).astype("f4")

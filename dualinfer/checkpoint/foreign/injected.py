"""Layers of DeepSpeed's kernel injection, as `save_mp_checkpoint_path` of DeepSpeed writes them.

Its layers have names of their own, store matrices as [in, out], and join query, key and value. A
rank's share of these is its part of each, one after another; BLOOM's lie head by head. Facts of
DeepSpeed's module_inject/containers and ops/transformer/inference.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ...errors import CheckpointError, counted, shortened
from .fitting import Wanted
from .merged import Merge, Shard, check_alike, join, swap, take

_PART = re.compile(
    r"^(?P<layer>.+\.\d+)\.(?P<part>attention\.attn_[a-z]+|mlp\.(?:attn_n|inter_|output_)[a-z]|"
    r"norm_[wb])$"
)


class _Family(NamedTuple):
    """HF's names for the parts of a DeepSpeed layer, behind `prefix` and its number.

    `qkv` is one name or three; `up` a name, or those that are joined. `by_head`: a joined qkv lies
    head by head in HF's model, and if it is `kept`, in DeepSpeed's, too. `conv`: HF stores matrices
    as DeepSpeed does.
    """

    prefix: str
    qkv: tuple[str, ...]
    out: str
    up: tuple[str, ...]
    down: str
    norm: str
    mlp_norm: str
    by_head: bool = False
    kept: bool = False
    conv: bool = False


_SPLIT = ("q_proj", "k_proj", "v_proj")
_FAMILIES = {
    "bloom": _Family(
        "transformer.h.",
        ("self_attention.query_key_value",),
        "self_attention.dense",
        ("mlp.dense_h_to_4h",),
        "mlp.dense_4h_to_h",
        "input_layernorm",
        "post_attention_layernorm",
        by_head=True,
        kept=True,
    ),
    "gpt_neox": _Family(
        "gpt_neox.layers.",
        ("attention.query_key_value",),
        "attention.dense",
        ("mlp.dense_h_to_4h",),
        "mlp.dense_4h_to_h",
        "input_layernorm",
        "post_attention_layernorm",
        by_head=True,
    ),
    "gpt2": _Family(
        "transformer.h.",
        ("attn.c_attn",),
        "attn.c_proj",
        ("mlp.c_fc",),
        "mlp.c_proj",
        "ln_1",
        "ln_2",
        conv=True,
    ),
    "gptj": _Family(
        "transformer.h.",
        tuple(f"attn.{name}" for name in _SPLIT),
        "attn.out_proj",
        ("mlp.fc_in",),
        "mlp.fc_out",
        "ln_1",
        "ln_2",
    ),
    "gpt_neo": _Family(
        "transformer.h.",
        tuple(f"attn.attention.{name}" for name in _SPLIT),
        "attn.attention.out_proj",
        ("mlp.c_fc",),
        "mlp.c_proj",
        "ln_1",
        "ln_2",
    ),
    "opt": _Family(
        "model.decoder.layers.",
        tuple(f"self_attn.{name}" for name in _SPLIT),
        "self_attn.out_proj",
        ("fc1",),
        "fc2",
        "self_attn_layer_norm",
        "final_layer_norm",
    ),
    "llama": _Family(
        "model.layers.",
        tuple(f"self_attn.{name}" for name in _SPLIT),
        "self_attn.o_proj",
        ("mlp.up_proj", "mlp.gate_proj"),
        "mlp.down_proj",
        "input_layernorm",
        "post_attention_layernorm",
    ),
}


def is_injected(names: Iterable[str]) -> bool:
    """True if some layer's tensors have DeepSpeed's own names."""
    return any(_PART.match(name) for name in names)


def layers_of(wanted: Wanted) -> list[str]:
    """The starts of the names of the model's layers, with and without the prefix of its base."""
    family = _FAMILIES.get(str(wanted.config.get("model_type")))
    return [family.prefix, family.prefix.partition(".")[2]] if family else []


def convert(
    shards: Mapping[str, Sequence[Shard]], wanted: Wanted, description: str
) -> tuple[dict[str, Merge], dict[str, Sequence[Shard]]]:
    """The layers' tensors by HF's names, and the shards of all others.

    Raises CheckpointError for a family whose layers DeepSpeed cannot load either, and for shards
    that do not fit.
    """
    kind = str(wanted.config.get("model_type"))
    family = _FAMILIES.get(kind)
    if family is None:
        raise CheckpointError(
            f"{description} holds layers of DeepSpeed's kernels (attn_qkvw ...), read for "
            f"{', '.join(_FAMILIES)}, and the model is {shortened(kind)}. Save it with HF's names, "
            "by save_pretrained(), before the kernels are injected."
        )
    tensors: dict[str, Merge] = {}
    others: dict[str, Sequence[Shard]] = {}
    faults = []
    for name, own in shards.items():
        match = _PART.match(name)
        if match is None:
            others[name] = own
            continue
        part = match["part"].rpartition(".")[2]
        try:
            tensors |= {
                f"{match['layer']}.{theirs}": made
                for theirs, made in _make(family, part, own, match["layer"], wanted, description)
            }
        except ValueError as error:
            if isinstance(error, CheckpointError):
                raise
            faults.append(f"{name} ({error})")
    if faults:
        raise CheckpointError(
            f"The shards of {description} do not fit the model, "
            f"{counted([shortened(fault) for fault in faults])}. Are all ranks' files listed, in "
            "order?"
        )
    return tensors, others


def _make(
    family: _Family,
    part: str,
    shards: Sequence[Shard],
    layer: str,
    wanted: Wanted,
    description: str,
) -> Iterable[tuple[str, Merge]]:
    """The names in HF's layer that a tensor of DeepSpeed's becomes, and how each is made."""
    whole = {
        "norm_w": f"{family.norm}.weight",
        "norm_b": f"{family.norm}.bias",
        "attn_nw": f"{family.mlp_norm}.weight",
        "attn_nb": f"{family.mlp_norm}.bias",
        "attn_ob": f"{family.out}.bias",
        "output_b": f"{family.down}.bias",
    }
    if part in whole:
        if len(shards) > 1:
            check_alike(shards, description)
        return [(whole[part], take(shards[0]))]
    turned = not family.conv
    if part in ("attn_ow", "output_w"):
        theirs = family.out if part == "attn_ow" else family.down
        return [(f"{theirs}.weight", replace(join(shards, 0), turned=turned))]
    is_bias = part.endswith("b")
    joined: dict[str, tuple[str, ...]] = {"attn_qkvw": family.qkv, "attn_qkvb": family.qkv}
    joined |= {"inter_w": family.up, "inter_b": family.up}
    if part not in joined:
        raise ValueError("a part that DeepSpeed's loader does not know either")
    names, axis = joined[part], 0 if is_bias else 1
    kind = "bias" if is_bias else "weight"
    turned = turned and not is_bias
    name, *more = names
    if more:
        lengths = [_rows(f"{layer}.{own}.{kind}", wanted) for own in names]
        return [
            (f"{own}.{kind}", replace(join(shards, axis, lengths, [i]), turned=turned))
            for i, own in enumerate(names)
        ]
    total = sum(shard.shape[-1] for shard in shards)
    is_qkv = names == family.qkv
    if not is_qkv or family.kept:
        return [(f"{name}.{kind}", replace(join(shards, axis), turned=turned))]
    made = join(shards, axis, [total // 3] * 3)
    if family.by_head:
        heads = wanted.config.get("num_attention_heads")
        if type(heads) is not int or not heads or total % (3 * heads):
            raise ValueError(f"{total} columns for three times {heads} heads")
        made = replace(made, order=swap(total, (3, heads, -1), (1, 0, 2)), axis=axis)
    return [(f"{name}.{kind}", replace(made, turned=turned))]


def _rows(name: str, wanted: Wanted) -> int:
    expected = wanted.find(name)
    if expected is None:
        raise ValueError(f"the model has no {name}")
    return expected[0]

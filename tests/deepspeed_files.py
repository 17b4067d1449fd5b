"""Checkpoints as DeepSpeed, Megatron-LM and Meta write them, of tiny HF models' tensors.

Each writer follows the tool's own rules, by torch's operations on whole tensors.
"""

import argparse
import json
from collections import OrderedDict
from pathlib import Path

import torch


def blocks(tensor, rank, size, count=3, dim=-1):
    """A rank's part of each of `count` tensors in one, one after another."""
    parts = torch.chunk(tensor, count, dim)
    return torch.cat([torch.chunk(part, size, dim)[rank] for part in parts], dim).contiguous()


def part(tensor, rank, size, dim):
    """A rank's share of a tensor along an axis."""
    return torch.chunk(tensor, size, dim)[rank].contiguous()


def by_kind(weight, heads):
    """Rows that lie head by head, as all queries, all keys, all values."""
    shape = weight.shape
    return weight.reshape(heads, 3, -1, *shape[1:]).transpose(0, 1).reshape(shape)


# HF's names of what a layer of DeepSpeed's has: qkv, out, up, down, and the norms.
_NAMES = {
    "bloom": (
        ("self_attention.query_key_value",),
        "self_attention.dense",
        ("mlp.dense_h_to_4h",),
        "mlp.dense_4h_to_h",
        "input_layernorm",
        "post_attention_layernorm",
    ),
    "gpt_neox": (
        ("attention.query_key_value",),
        "attention.dense",
        ("mlp.dense_h_to_4h",),
        "mlp.dense_4h_to_h",
        "input_layernorm",
        "post_attention_layernorm",
    ),
    "gpt2": (("attn.c_attn",), "attn.c_proj", ("mlp.c_fc",), "mlp.c_proj", "ln_1", "ln_2"),
    "gptj": (
        ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        "attn.out_proj",
        ("mlp.fc_in",),
        "mlp.fc_out",
        "ln_1",
        "none",
    ),
    "gpt_neo": (
        ("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        "attn.attention.out_proj",
        ("mlp.c_fc",),
        "mlp.c_proj",
        "ln_1",
        "ln_2",
    ),
    "opt": (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attn.out_proj",
        ("fc1",),
        "fc2",
        "self_attn_layer_norm",
        "final_layer_norm",
    ),
    "llama": (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attn.o_proj",
        ("mlp.up_proj", "mlp.gate_proj"),
        "mlp.down_proj",
        "input_layernorm",
        "post_attention_layernorm",
    ),
}
_LAYERS = {
    "bloom": "transformer.h.",
    "gpt_neox": "gpt_neox.layers.",
    "gpt2": "transformer.h.",
    "gptj": "transformer.h.",
    "gpt_neo": "transformer.h.",
    "opt": "model.decoder.layers.",
    "llama": "model.layers.",
}


def injected_state(model, rank, size):
    """The state dict of a rank after kernel injection: layers of DeepSpeed's, all else as it was.

    Matrices are [in, out]; qkv is split by `strided_copy` with three splits, a gated layer with
    two, BLOOM's as it lies; out and down by rows.
    """
    kind = model.config.model_type
    qkv, out, up, down, norm, mlp_norm = _NAMES[kind]
    state = dict(model.state_dict())
    prefix = _LAYERS[kind]
    for i in range(model.config.num_hidden_layers):
        layer = f"{prefix}{i}."

        def get(names, what, state=state, layer=layer):
            names = [names] if isinstance(names, str) else names
            found = [state.pop(f"{layer}{name}.{what}", None) for name in names]
            return None if found[0] is None else torch.cat(found)

        def matrix(names, get=get):
            weight = get(names, "weight")
            return weight if kind == "gpt2" else weight.T.contiguous()

        weight, bias = matrix(qkv), get(qkv, "bias")
        if kind == "gpt_neox":
            heads = model.config.num_attention_heads
            weight, bias = by_kind(weight.T, heads).T, by_kind(bias, heads)
        if kind == "bloom":
            split = {"attn_qkvw": part(weight, rank, size, 1)}
            split["attn_qkvb"] = part(bias, rank, size, 0)
        else:
            split = {"attn_qkvw": blocks(weight, rank, size)}
            split["attn_qkvb"] = None if bias is None else blocks(bias, rank, size)
        made = {f"attention.{name}": value for name, value in split.items()}
        made["attention.attn_ow"] = part(matrix(out), rank, size, 0)
        made["attention.attn_ob"] = get(out, "bias")
        weight, bias = matrix(up), get(up, "bias")
        made["mlp.inter_w"] = blocks(weight, rank, size, len(up))
        made["mlp.inter_b"] = None if bias is None else blocks(bias, rank, size, len(up))
        made["mlp.output_w"] = part(matrix(down), rank, size, 0)
        made["mlp.output_b"] = get(down, "bias")
        made["mlp.attn_nw"], made["mlp.attn_nb"] = get(mlp_norm, "weight"), get(mlp_norm, "bias")
        made["norm_w"], made["norm_b"] = get(norm, "weight"), get(norm, "bias")
        state |= {f"{layer}{name}": v.clone() for name, v in made.items() if v is not None}
    return state


def save_injected(model, folder, size, partitions=8):
    """What DeepSpeed's save_mp_checkpoint_path writes; the path of its JSON.

    Only of BLOOM are tensors outside of layers in a file of their own.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    is_bloom = model.config.model_type == "bloom"
    for rank in range(size):
        state = injected_state(model, rank, size)
        outer = {n: t for n, t in state.items() if is_bloom and ".h." not in n}
        torch.save(OrderedDict(outer), folder / "non-tp.pt")
        keys = list(state)
        step = len(keys) // partitions + 1
        for m in range(partitions):
            own = {k: state[k] for k in keys[m * step : (m + 1) * step] if k not in outer}
            torch.save(OrderedDict(own), folder / f"tp_{rank:0>2d}_{m:0>2d}.pt")
    said = {
        "type": "bloom" if is_bloom else "ds_model",
        "base_dir": str(folder),
        "checkpoints": {
            "non_tp": ["non-tp.pt"],
            "tp": [f"tp_{r:0>2d}_{m:0>2d}.pt" for m in range(partitions) for r in range(size)],
        },
        "version": 1.0,
        "parallelization": "tp",
        "tp_size": size,
        "dtype": "float32",
    }
    path = folder / "ds_inference_config.json"
    path.write_text(json.dumps(said))
    return path


_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1", "query_key_value", "h_to_4h")
_COLUMNS = ("o_proj", "out_proj", "down_proj", "fc2", "attention.dense", "4h_to_h")


def split_state(model, rank, size):
    """The state dict of a rank after AutoTP: HF's names, linear layers split by rows or columns.

    The head and tables stay whole; GPT-2's matrices are [in, out], and its qkv three in one.
    """
    state = {}
    for name, tensor in model.state_dict().items():
        if "c_attn" in name:
            tensor = blocks(tensor, rank, size)
        elif "c_fc" in name:
            tensor = part(tensor, rank, size, -1)
        elif name.endswith("c_proj.weight"):
            tensor = part(tensor, rank, size, 0)
        elif any(key in name for key in _COLUMNS):
            tensor = part(tensor, rank, size, 1) if name.endswith("weight") else tensor
        elif any(key in name for key in _ROWS):
            tensor = part(tensor, rank, size, 0)
        state[name] = tensor.clone()
    return state


def megatron_state(model, rank, size, version, padded=0):
    """The state dict of a rank of Megatron-LM that trains a GPT-2, dicts in one another."""
    config, state = model.config, model.state_dict()
    heads, layers = config.n_head, {}

    def get(name):
        return state[f"transformer.{name}"]

    for i in range(config.n_layer):
        own, theirs = f"h.{i}.", f"layers.{i}."
        for what in ("weight", "bias"):
            layers[f"{theirs}input_layernorm.{what}"] = get(f"{own}ln_1.{what}")
            layers[f"{theirs}post_attention_layernorm.{what}"] = get(f"{own}ln_2.{what}")
            fused = get(f"{own}attn.c_attn.{what}")
            fused = fused.T if what == "weight" else fused
            axes = fused.reshape(3, heads, -1, *fused.shape[1:])  # [3, heads, D, ...]
            if version == 1:
                fused = axes.movedim(0, 2).reshape(fused.shape)
            elif version == 2:
                fused = axes.transpose(0, 1).reshape(fused.shape)
            fused = part(fused, rank, size, 0) if version else blocks(fused, rank, size, dim=0)
            layers[f"{theirs}attention.query_key_value.{what}"] = fused
            up = get(f"{own}mlp.c_fc.{what}")
            up = up.T if what == "weight" else up
            layers[f"{theirs}mlp.dense_h_to_4h.{what}"] = part(up, rank, size, 0)
            for module, name in (
                ("attention.dense", "attn.c_proj"),
                ("mlp.dense_4h_to_h", "mlp.c_proj"),
            ):
                value = get(f"{own}{name}.{what}")
                if what == "weight":
                    value = part(value.T, rank, size, 1)
                layers[f"{theirs}{module}.{what}"] = value
    for what in ("weight", "bias"):
        layers[f"final_layernorm.{what}"] = get(f"ln_f.{what}")
    table = get("wte.weight")
    table = torch.cat([table, torch.zeros(padded, table.shape[1])])
    embedding = {
        "word_embeddings": {"weight": part(table, rank, size, 0)},
        "position_embeddings": {"weight": get("wpe.weight")},
    }
    layers = {name: tensor.clone() for name, tensor in layers.items()}
    return {"language_model": {"embedding": embedding, "transformer": layers}}


class Scheduler:
    """What a training keeps beside the weights: an object of a class of its own."""

    def __init__(self):
        self.steps = [1, 2, 3]


def training_file(state, size=1, key="module", **more):
    """What mp_rank_NN_model_states.pt holds."""
    said = {
        key: state,
        "optimizer": None,
        "lr_scheduler": Scheduler(),
        "global_steps": 7,
        "mp_world_size": size,
        "dp_world_size": 2,
        "args": argparse.Namespace(hidden_size=60, lr=1e-4, betas=(0.9, 0.95)),
        "ds_version": "0.15.0",
    }
    return {**said, **more}


def save_training(folder, states, tag="global_step7", **more):
    """A folder of DeepSpeed's training, with a file for each rank and the tag in `latest`."""
    folder = Path(folder)
    (folder / tag).mkdir(parents=True)
    (folder / "latest").write_text(tag)
    for rank, state in enumerate(states):
        path = folder / tag / f"mp_rank_{rank:02d}_model_states.pt"
        torch.save(training_file(state, len(states), **more), path)
    return folder


def save_moe_training(folder, model, tag="global_step7", old=False, size=1):
    """A folder of a training with DeepSpeed's MoE layers: a file for each expert of each.

    `old`: one for each expert of all layers, as versions before 0.5 have it. `size` ranks have a
    part of each linear layer of a block and of its experts.
    """
    states = [split_state(model, rank, size) for rank in range(size)]
    files = [moe_files(state, old) for state in states]
    count = len(files[0][1])
    save_training(folder, [rest for rest, _ in files], tag, num_experts=[count])
    for rank, (_, experts) in enumerate(files):
        for key, state in experts.items():
            torch.save(state, Path(folder) / tag / f"{key}_mp_rank_{rank:02d}_model_states.pt")
    return Path(folder)


def moe_files(state, old):
    """A state dict without experts, and those of each file by the start of its name."""
    rest, experts, layers = {}, {}, {}
    for name, tensor in state.items():
        head, found, tail = name.partition(".deepspeed_moe.experts.deepspeed_experts.")
        if not found:
            rest[name] = tensor.clone()
            continue
        layer = layers.setdefault(head, len(layers))
        key = ("" if old else f"layer_{layer}_") + f"expert_{tail.partition('.')[0]}"
        experts.setdefault(key, {})[name] = tensor.clone()
    return rest, experts


def save_meta(model, folder, size, version=2):
    """A Llama as Meta releases it: pairs that rotate side by side, a file for each rank."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config, state = model.config, model.state_dict()

    def turn(weight, heads):
        return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)

    whole = {
        "tok_embeddings.weight": (state["model.embed_tokens.weight"], 1 if version < 3 else 0),
        "norm.weight": (state["model.norm.weight"], None),
        "output.weight": (state["lm_head.weight"], 0),
    }
    for i in range(config.num_hidden_layers):
        own, theirs = f"model.layers.{i}.", f"layers.{i}."
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        query, key = (state[f"{own}self_attn.{x}_proj.weight"] for x in "qk")
        whole |= {
            f"{theirs}attention.wq.weight": (turn(query, heads), 0),
            f"{theirs}attention.wk.weight": (turn(key, kv_heads), 0),
            f"{theirs}attention.wv.weight": (state[f"{own}self_attn.v_proj.weight"], 0),
            f"{theirs}attention.wo.weight": (state[f"{own}self_attn.o_proj.weight"], 1),
            f"{theirs}feed_forward.w1.weight": (state[f"{own}mlp.gate_proj.weight"], 0),
            f"{theirs}feed_forward.w2.weight": (state[f"{own}mlp.down_proj.weight"], 1),
            f"{theirs}feed_forward.w3.weight": (state[f"{own}mlp.up_proj.weight"], 0),
            f"{theirs}attention_norm.weight": (state[f"{own}input_layernorm.weight"], None),
            f"{theirs}ffn_norm.weight": (state[f"{own}post_attention_layernorm.weight"], None),
        }
    for rank in range(size):
        own = {n: t if d is None else part(t, rank, size, d) for n, (t, d) in whole.items()}
        own["rope.freqs"] = torch.zeros(7)
        torch.save({n: t.clone() for n, t in own.items()}, folder / f"consolidated.{rank:02d}.pth")
    params = {
        "dim": config.hidden_size,
        "multiple_of": 256,
        "n_heads": config.num_attention_heads,
        "n_layers": config.num_hidden_layers,
        "norm_eps": config.rms_norm_eps,
        "vocab_size": -1,
    }
    if config.num_key_value_heads != config.num_attention_heads:
        params["n_kv_heads"] = config.num_key_value_heads
    (folder / "params.json").write_text(json.dumps(params))
    return folder

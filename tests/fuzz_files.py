"""Folders of every form that is read, and random changes of them, of bytes and of what they say.

`python -m tests.fuzz_files --backend jax --count 2000` draws them from a seed and tells each that
is neither loaded nor refused by an error of ours, or that twice takes more than `A_SECOND`.
`--form` chooses one form, and `--first` a step, to see it again.
"""

import argparse
import copy
import faulthandler
import io
import json
import logging
import os
import pickletools
import random
import re
import shutil
import struct
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from safetensors.numpy import save_file

import dualinfer
from dualinfer.errors import DualinferError

from .cases import make_model
from .checkpoints import write_byte_tokenizer
from .deepspeed_files import megatron_state, save_injected, save_meta, save_training, split_state
from .gguf_files import Type, write_gguf
from .models import A_SECOND

VOCAB = 259  # bytes, and three special tokens
_STUCK = 120  # seconds after which a step is told by the stack, and ends the run
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **{"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16},
    **{"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "hidden_act": "silu"},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def arrays_of(config: dict[str, Any] = CONFIG) -> dict[str, np.ndarray]:
    """The weights of a Llama of these sizes, by HF's names."""
    embed, ffn, vocab = (config[n] for n in ("hidden_size", "intermediate_size", "vocab_size"))
    query, kv = (config["head_dim"] * config[f"num_{n}_heads"] for n in ("attention", "key_value"))
    layer = {
        **{"self_attn.q_proj": (query, embed), "self_attn.k_proj": (kv, embed)},
        **{"self_attn.v_proj": (kv, embed), "self_attn.o_proj": (embed, query)},
        **{"mlp.gate_proj": (ffn, embed), "mlp.up_proj": (ffn, embed)},
        **{"mlp.down_proj": (embed, ffn)},
        **{"input_layernorm": (embed,), "post_attention_layernorm": (embed,)},
    }
    shapes = {
        "model.embed_tokens": (vocab, embed),
        "lm_head": (vocab, embed),
        "model.norm": (embed,),
    }
    shapes |= {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    noise = np.random.default_rng(0)
    return {f"{n}.weight": noise.normal(0, 0.1, s).astype(np.float32) for n, s in shapes.items()}


# --- forms ---------------------------------------------------------------------------------------


def _describe(folder: Path, **more: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | more))


def plain(folder: Path) -> None:
    """One safetensors file, a tokenizer, generation_config.json."""
    write_byte_tokenizer(folder)
    _describe(folder)
    save_file(arrays_of(), folder / "model.safetensors")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    fields = {"eos_token_id": [1, 5], "temperature": 0.7, "top_p": 0.9, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(fields))


def indexed(folder: Path) -> None:
    """Two safetensors files and their index."""
    _describe(folder)
    arrays, where = arrays_of(), {}
    for i in range(2):
        name = f"model-0000{i + 1}-of-00002.safetensors"
        own = {n: a for j, (n, a) in enumerate(arrays.items()) if j % 2 == i}
        save_file(own, folder / name)
        where |= dict.fromkeys(own, name)
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def pieces(folder: Path) -> None:
    """What save_mp_checkpoint_path writes for two devices."""
    plain(folder / "plain")
    tp = {"tensor_parallel": {"tp_size": 2}, "save_mp_checkpoint_path": str(folder / "out")}
    dualinfer.init_inference(folder / "plain", backend="jax", dtype="fp32", **tp).close()
    shutil.rmtree(folder / "plain")
    for path in (folder / "out").iterdir():
        path.rename(folder / path.name)
    (folder / "out").rmdir()


def pickled(old: bool) -> Callable[[Path], None]:
    """pytorch_model.bin, in either of torch's forms."""

    def write(folder: Path) -> None:
        _describe(folder)
        state = {name: torch.from_numpy(array) for name, array in arrays_of().items()}
        path = folder / "pytorch_model.bin"
        torch.save(state, path, _use_new_zipfile_serialization=not old)

    return write


def gguf(folder: Path) -> None:
    """A GGUF file with a tokenizer, of blocks and floats."""

    def describe(writer: Any) -> None:
        tokens = [f"t{i}" for i in range(58)] + ["t", "0", "1"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_types([1] * 61)
        writer.add_token_merges(["t 0", "t 1"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_array("some.numbers", [1, 2, 3])

    fields = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 16}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61}
    model = make_model("llama-gqa", **fields)
    kinds = {"attn_q": Type.Q8_0, "ffn_up": Type.Q4_0, "ffn_gate": Type.F16}

    def choose(name: str) -> Type:
        return kinds.get(name.split(".")[-2], Type.F32)

    write_gguf(folder / "model.gguf", model, choose, describe)


_LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+\.weight")
_NOISE = np.random.default_rng(7)


def _random(dtype: str, *shape: int) -> np.ndarray:
    if dtype in ("int32", "uint8", "int8"):
        return np.frombuffer(
            _NOISE.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype
        ).reshape(shape)
    return _NOISE.uniform(0.01, 0.02, shape).astype(getattr(ml_dtypes, dtype, dtype))


def _gptq(module: str, n: int, k: int) -> dict[str, np.ndarray]:
    return {
        "qweight": _random("int32", k // 8, n),
        "qzeros": _random("int32", k // 32, n // 8),
        "scales": _random("float16", k // 32, n),
        "g_idx": (np.arange(k) // 32).astype(np.int32),
    }


def _awq(module: str, n: int, k: int) -> dict[str, np.ndarray]:
    return {
        "qweight": _random("int32", k, n // 8),
        "qzeros": _random("int32", k // 32, n // 8),
        "scales": _random("float16", k // 32, n),
    }


def _fp8(module: str, n: int, k: int) -> dict[str, np.ndarray]:
    scales = _random("float32", -(-n // 32), -(-k // 32))
    return {"weight": _random("float8_e4m3fn", n, k), "weight_scale_inv": scales}


def _modelopt(module: str, n: int, k: int) -> dict[str, np.ndarray]:
    scales = {part: _random("float32", 1).reshape(()) for part in ("weight_scale", "input_scale")}
    return {"weight": _random("float8_e4m3fn", n, k), **scales}


def _packed(module: str, n: int, k: int) -> dict[str, np.ndarray]:
    return {
        "weight_packed": _random("int32", n, k // 8),
        "weight_scale": _random("float16", n, k // 32),
        "weight_shape": np.array([n, k], np.int64),
    }


def _nvfp4(module: str, n: int, k: int) -> dict[str, np.ndarray]:
    return {
        "weight_packed": _random("uint8", n, k // 2),
        "weight_scale": _random("float8_e4m3fn", n, k // 16),
        "weight_global_scale": _random("float32", 1) * 1e3,
    }


def _int8(module: str, n: int, k: int) -> dict[str, np.ndarray]:
    form = np.zeros((), np.uint8)
    return {"weight": _random("int8", n, k), "SCB": _random("float32", n), "weight_format": form}


def _nf4(module: str, n: int, k: int) -> dict[str, np.ndarray]:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [n, k]}
    return {
        "weight": _random("uint8", n * k // 2, 1),
        "weight.absmax": _random("float32", n * k // 64),
        "weight.quant_map": np.linspace(-1, 1, 16, dtype=np.float32),
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }


def _bitnet(module: str, n: int, k: int) -> dict[str, np.ndarray]:
    codes = np.full((n // 4, k), 0b01100001, np.uint8)
    return {"weight": codes, "weight_scale": _random("float32", 1)}


def _torchao(module: str, n: int, k: int) -> dict[str, np.ndarray]:
    return {"_weight_qdata": _random("int8", n, k), "_weight_scale": _random("float32", n, 1)}


_TORCHAO: Any = {"_type": "Int8Tensor", "_data": {"act_quant_kwargs": None}}
_SCHEME = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
_FLOATS = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group"}
QUANTIZED: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptq": (_gptq, {"bits": 4, "group_size": 32, "dynamic": {r"-:.*\.gate$": {}}}),
    "awq": (_awq, {"bits": 4, "group_size": 32, "modules_to_not_convert": ["lm_head"]}),
    "fp8": (_fp8, {"weight_block_size": [32, 32], "activation_scheme": "dynamic"}),
    "modelopt": (_modelopt, {"quant_algo": "FP8", "ignore": ["lm_head", "*router*"]}),
    "compressed-tensors": (
        _packed,
        {
            "format": "pack-quantized",
            "ignore": ["re:.*lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _SCHEME}},
        },
    ),
    "compressed-tensors nvfp4": (
        _nvfp4,
        {
            "format": "nvfp4-pack-quantized",
            "ignore": ["lm_head"],
            "config_groups": {
                "g": {"targets": ["Linear"], "weights": _FLOATS | {"group_size": 16}}
            },
        },
    ),
    "bitsandbytes int8": (_int8, {"load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]}),
    "bitsandbytes": (_nf4, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "bitnet": (_bitnet, {"linear_class": "autobitlinear", "quantization_mode": "offline"}),
    "torchao": (_torchao, {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}),
}


def quantized(method: str) -> Callable[[Path], None]:
    """A checkpoint of random codes."""
    make, fields = QUANTIZED[method]

    def write(folder: Path) -> None:
        quantization = {"quant_method": method.partition(" ")[0], **fields}
        _describe(folder, quantization_config=quantization, dtype="float32")
        arrays, metadata = {}, {"format": "pt"}
        for name, array in arrays_of().items():
            if _LINEAR.fullmatch(name):
                module = name.removesuffix(".weight")
                own = make(module, *array.shape)
                arrays |= {f"{module}.{part}": np.ascontiguousarray(a) for part, a in own.items()}
                about = _TORCHAO["_data"] | {"block_size": [1, array.shape[1]]}
                metadata[name] = json.dumps(_TORCHAO | {"_data": about})
            else:
                arrays[name] = array
        if method == "torchao":
            metadata["tensor_names"] = json.dumps([*metadata])
        save_file(arrays, folder / "model.safetensors", metadata)

    return write


def adapter(folder: Path) -> None:
    """A model and an adapter of peft's in one folder."""
    plain(folder)
    arrays = {}
    for module in ("self_attn.q_proj", "mlp.down_proj"):
        n, k = arrays_of()[f"model.layers.0.{module}.weight"].shape
        at = f"base_model.model.model.layers.0.{module}"
        arrays |= {f"{at}.lora_A.weight": _random("float32", 4, k)}
        arrays |= {f"{at}.lora_B.weight": _random("float32", n, 4)}
    save_file(arrays, folder / "adapter_model.safetensors")
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(folder),
        **{"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "bias": "none", "use_rslora": False},
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {r".*\.q_proj": 4},
        "alpha_pattern": {"down_proj": 16},
    }
    (folder / "adapter_config.json").write_text(json.dumps(said))


def sentences(folder: Path) -> None:
    """A folder of sentence-transformers."""
    plain(folder)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.models.Pooling",
        },
        {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 32}')
    prompts = {"prompts": {"query": "q: "}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "2_Dense").mkdir()
    dense = {"in_features": 64, "out_features": 8, "bias": False}
    dense["activation_function"] = "torch.nn.modules.linear.Identity"
    (folder / "2_Dense" / "config.json").write_text(json.dumps(dense))
    save_file(
        {"linear.weight": _random("float32", 8, 64)}, folder / "2_Dense" / "model.safetensors"
    )


def injected(folder: Path) -> None:
    """Ranks' shards with DeepSpeed's own names, and their JSON."""
    model = make_model("bloom")
    save_injected(model, folder, 2, partitions=2)
    model.config.to_json_file(folder / "config.json")


def training(folder: Path) -> None:
    """A folder of DeepSpeed's training of two ranks."""
    model = make_model("llama-gqa")
    save_training(folder, [split_state(model, rank, 2) for rank in range(2)])
    model.config.to_json_file(folder / "config.json")


def megatron(folder: Path) -> None:
    """Two ranks of Megatron-LM, and DeepSpeed's JSON of them."""
    model = make_model("gpt2", num_attention_heads=4, hidden_size=64)
    for rank in range(2):
        state = {"model": megatron_state(model, rank, 2, 2.0), "checkpoint_version": 2.0}
        torch.save(state | {"mp_world_size": 2}, folder / f"mp_rank_0{rank}.pt")
    said = {"type": "Megatron", "version": 2.0, "parallelization": "tp", "mp_size": 2}
    said["checkpoints"] = [f"mp_rank_0{rank}.pt" for rank in range(2)]
    (folder / "ds.json").write_text(json.dumps(said))
    model.config.to_json_file(folder / "config.json")


def meta(folder: Path) -> None:
    """A Llama of two ranks as Meta releases it."""
    save_meta(make_model("llama-gqa", tie_word_embeddings=False), folder, 2)


# Of each there is a folder whose config.json is changed.
FAMILIES = (
    *("gpt2", "bloom", "gemma2", "gemma3_text", "phi3", "cohere2", "gpt_oss", "qwen3_moe"),
    *("deepseek_v3", "mamba2", "lfm2", "t5", "whisper", "bert", "modernbert"),
)


def family(model_type: str) -> Callable[[Path], None]:
    """A small model of a family."""

    def write(folder: Path) -> None:
        import transformers

        from dualinfer.cli.tiny import tiny_config
        from dualinfer.model.families import default_class

        config = tiny_config(transformers.AutoConfig.for_model(model_type))
        made = getattr(transformers, str(default_class(model_type)))(config).float()
        made.save_pretrained(folder)

    return write


FORMS: dict[str, Callable[[Path], None]] = {
    **{"plain": plain, "indexed": indexed, "pieces": pieces, "gguf": gguf, "adapter": adapter},
    **{"bin": pickled(False), "old bin": pickled(True), "sentences": sentences},
    **{method: quantized(method) for method in QUANTIZED},
    **{"injected": injected, "training": training, "megatron": megatron, "meta": meta},
    **{"tokenizer": plain, "generation": plain, "config": plain},
    **{model_type: family(model_type) for model_type in FAMILIES},
}
# Of these forms no other files are changed.
ONLY = {
    "tokenizer": ("tokenizer.json", "tokenizer_config.json"),
    "generation": ("generation_config.json",),
    **dict.fromkeys(("config", *FAMILIES), ("config.json",)),
}


def checkpoint_of(form: str, folder: Path) -> dict[str, Any]:
    """What `checkpoint=` says of forms that hold no model of their own."""
    name = {"injected": "ds_inference_config.json", "megatron": "ds.json", "training": ""}.get(form)
    return {} if name is None else {"checkpoint": str(folder / name)}


# --- changes -------------------------------------------------------------------------------------

BIG = "1" * 5000
# Numbers as JSON writes them, beside values.
TEXTS = (
    BIG,
    f"-{BIG}",
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
    "1e400",
    "0.1e1",
    "1.0",
    "-0.0",
    "1E2",
)
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 64, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, 10**400),
    *(0.0, 0.5, 4.0, -3.0, 1e-300, 1e308, "", "x", "0", "nan", "default", "../x", "\0", "\ud800"),
    *("a" * 3000, "(a+)+$", "re:(a+)+$", "/etc/passwd", [], {}, [[]], [1], ["a"], [None], {"a": 1}),
    *([1] * 50, {"__float__": "NaN"}, {"__float__": []}, [2**64], [1e308] * 3, [{}], {"": None}),
]


def any_node(draw: random.Random, tree: Any) -> tuple[Any, Any] | None:
    """A container in a tree and a key of it, of all with the same chance."""
    places, level = [], [tree]
    while level:
        node = level.pop()
        inner = list(node.items()) if isinstance(node, dict) else list(enumerate(node))
        places += [(node, key) for key, _ in inner]
        level += [value for _, value in inner if isinstance(value, dict | list)]
    return draw.choice(places) if places else None


def changed_tree(draw: random.Random, tree: Any) -> str:
    """JSON of a tree with one to three changes."""
    tree, texts = copy.deepcopy(tree), {}
    for i in range(draw.choice((1, 1, 1, 2, 3))):
        place = any_node(draw, tree)
        if place is None:
            break
        node, key = place
        kind = draw.random()
        if kind < 0.1:
            del node[key]
        elif kind < 0.2:
            other = any_node(draw, tree)
            node[key] = copy.deepcopy(other[0][other[1]]) if other else None
        elif kind < 0.27:
            node[key] = [copy.deepcopy(node[key])] * draw.choice((1, 2, 40))
        elif kind < 0.32:
            for _ in range(draw.choice((5, 150, 3000))):
                node[key] = [node[key]] if draw.random() < 0.5 else {"a": node[key]}
        elif kind < 0.4 and isinstance(node, dict):
            node[draw.choice(("x", "", "self", "to_dict", "a" * 2000))] = node.pop(key)
        elif kind < 0.55:
            texts[f"@{i}@"] = draw.choice(TEXTS)
            node[key] = f"@{i}@"
        elif kind < 0.65 and type(node[key]) in (int, float):
            node[key] = draw.choice(
                (float(node[key]), node[key] + 1, -node[key], node[key] * 2**33)
            )
        else:
            node[key] = copy.deepcopy(draw.choice(VALUES))
    try:
        text = json.dumps(tree)
    except (RecursionError, ValueError):
        text = "[" * 100_000
    for mark, number in texts.items():
        text = text.replace(f'"{mark}"', number)
    return text


def changed_bytes(draw: random.Random, content: bytes, heads: int = 4096) -> bytes:
    """Bytes changed, put in, taken out, cut or repeated; mostly where a file describes itself."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        if not data:
            break
        last = len(data) if draw.random() < 0.2 else min(len(data), heads)
        at = draw.randrange(last) if draw.random() < 0.8 else len(data) - 1 - draw.randrange(last)
        size = draw.choice((1, 1, 1, 2, 4, 8, 64, 1024))
        kind = draw.random()
        if kind < 0.4:
            data[at] ^= 1 << draw.randrange(8)
        elif kind < 0.55:
            filling = draw.choice((b"\0", b"\xff", b"\x7f", b"\x80", b"9", draw.randbytes(1)))
            data[at : at + size] = filling * min(size, len(data) - at)
        elif kind < 0.7:
            del data[at : at + size]
        elif kind < 0.85:
            data[at:at] = draw.choice((draw.randbytes(size), data[at : at + size], b"[" * size))
        elif kind < 0.9:
            del data[at:]
        else:
            number = draw.choice(
                (0, 1, 2**31 - 1, 2**32, 2**40, 2**63 - 1, 2**64 - 1, len(content))
            )
            data[at : at + 8] = struct.pack("<Q", number)
    return bytes(data)


def changed_header(draw: random.Random, content: bytes) -> bytes:
    """A safetensors file whose header says something else."""
    length = struct.unpack("<Q", content[:8])[0]
    text = changed_tree(draw, json.loads(content[8 : 8 + length])).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


HUGE = b"\x8a\x06" + (10**13).to_bytes(6, "little")
OPCODES = [opcode.code.encode("latin1") for opcode in pickletools.opcodes]


def changed_pickle(draw: random.Random, content: bytes) -> bytes:
    """A pickle with opcodes left out, doubled, put elsewhere, or of another kind."""
    found = [position for _, _, position in pickletools.genops(content)]
    parts = [content[a:b] for a, b in zip(found, [*found[1:], len(content)], strict=True)]
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(parts))
        kind = draw.random()
        if kind < 0.25:
            del parts[at]
        elif kind < 0.45:
            parts[at:at] = [draw.choice(parts)] * draw.choice((1, 1, 100))
        elif kind < 0.6:
            parts[at] = draw.choice(parts)
        elif kind < 0.8:
            odd = (b"N", b"]", b"}", b")", b"(", HUGE, b"K\xff", b"G" + b"\x7f\xf0" + b"\0" * 6)
            parts[at] = draw.choice((*odd, b"\x8c\x01x", b"X\x02\0\0\0\xff\xff", b"cos\nsystem\n"))
        elif kind < 0.9:
            parts[at] = draw.choice(OPCODES) + parts[at][1:]
        else:
            parts[at] = changed_bytes(draw, parts[at])
        parts = parts or [b"."]
    return b"".join(parts)


def changed_archive(draw: random.Random, content: bytes) -> bytes:
    """A zip of torch's whose records differ."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    name = next(name for name in records if name.endswith("data.pkl"))
    kind = draw.random()
    if kind < 0.7:
        records[name] = changed_pickle(draw, records[name])
    elif kind < 0.85:
        name = draw.choice(list(records))
        records[name] = changed_bytes(draw, records[name])
    else:
        records[draw.choice(("x", "a/b", "archive/data/0", "archive/byteorder"))] = records.pop(
            name
        )
    new = io.BytesIO()
    method = zipfile.ZIP_STORED if draw.random() < 0.95 else zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(new, "w", method) as archive:
        for name, record in records.items():
            archive.writestr(name, record)
    return new.getvalue()


def fields_of(content: bytes) -> tuple[list[tuple[int, int]], int]:
    """Where the type and the end of each field of a GGUF file lie, and the end of its header."""
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    tensors, count = struct.unpack_from("<QQ", content, 8)
    at, found = 24, []

    def skip(kind: int, at: int) -> int:
        if kind == 8:
            return at + 8 + struct.unpack_from("<Q", content, at)[0]
        if kind == 9:
            inner, size = struct.unpack_from("<IQ", content, at)
            if size > len(content):
                raise KeyError(size)
            at += 12
            for _ in range(size):
                at = skip(inner, at)
            return at
        return at + sizes[kind]

    for _ in range(count):
        at += 8 + struct.unpack_from("<Q", content, at)[0]
        kind = struct.unpack_from("<I", content, at)[0]
        end = skip(kind, at + 4)
        found.append((at, end))
        at = end
    for _ in range(min(tensors, len(content))):
        at += 8 + struct.unpack_from("<Q", content, at)[0]
        at += 4 + 8 * struct.unpack_from("<I", content, at)[0] + 12
    return found, at


def changed_gguf(draw: random.Random, content: bytes) -> bytes:
    """A GGUF file whose fields have other types and values."""
    for _ in range(draw.choice((1, 1, 2))):
        fields, header = fields_of(content)
        kind, end = draw.choice(fields)
        text = draw.choice((b"", b"x", b"llama", b"\xff\xfe", b"9" * 5000, b"default"))
        new = draw.choice(
            (
                (4, struct.pack("<I", draw.choice((0, 1, 3, 2**31, 2**32 - 1)))),
                (5, struct.pack("<i", -1)),
                (6, struct.pack("<f", draw.choice((0.0, 1.5, float("nan"), float("inf"), 64.0)))),
                (7, draw.choice((b"\0", b"\1", b"\7"))),
                (8, struct.pack("<Q", len(text)) + text),
                (9, struct.pack("<IQ3I", 4, 3, 1, 2, 3)),
                (9, struct.pack("<IQ2f", 6, 2, float("nan"), 1.0)),
                (9, struct.pack("<IQ", draw.choice((4, 6, 7, 8)), 0)),
                (9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", len(text)) + text),
                (10, struct.pack("<Q", draw.choice((0, 2**63, 2**64 - 1)))),
                (12, struct.pack("<d", draw.choice((1e308, float("nan"), -1.0)))),
            )
        )
        data = content[-(-header // 32) * 32 :]
        content = content[:kind] + struct.pack("<I", new[0]) + new[1] + content[end:header]
        content += b"\0" * (-len(content) % 32) + data
    return content


def change(draw: random.Random, path: Path) -> str:
    """Change a file in its own terms or its bytes; how, for people."""
    content = path.read_bytes()
    own = changed_bytes if draw.random() < 0.35 else _changes_of(path, content)
    try:
        path.write_bytes(own(draw, content))
    except Exception:  # an earlier change has left what cannot be taken apart
        own = changed_bytes
        path.write_bytes(own(draw, content))
    return f"{path.name} by {own.__name__}"


def _changes_of(path: Path, content: bytes) -> Callable[[random.Random, bytes], bytes]:
    if path.suffix in (".bin", ".pt", ".pth"):
        return changed_archive if content.startswith(b"PK") else changed_old
    kinds = {".json": changed_json, ".safetensors": changed_header, ".gguf": changed_gguf}
    return kinds.get(path.suffix, changed_bytes)


def changed_json(draw: random.Random, content: bytes) -> bytes:
    """A JSON file that says something else."""
    return changed_tree(draw, json.loads(content)).encode("utf-8", "surrogatepass")


def changed_old(draw: random.Random, content: bytes) -> bytes:
    """A file of torch before 1.6, one of whose five pickles differs."""
    ends, at = [0], 0
    for _ in range(5):
        at += max(p for _, _, p in pickletools.genops(content[at:])) + 1
        ends.append(at)
    which = draw.choice((0, 1, 2, 3, 3, 3, 4))
    first, last = ends[which], ends[which + 1]
    return content[:first] + changed_pickle(draw, content[first:last]) + content[last:]


# --- running -------------------------------------------------------------------------------------


class Fault(AssertionError):
    """A changed folder that was neither loaded nor refused as it should be."""


def serve(form: str, folder: Path, backend: str, draw: random.Random) -> None:
    """Load a folder, and use what was loaded."""
    model: Any = folder / "model.gguf" if form == "gguf" else folder
    given = checkpoint_of(form, folder)
    if given:
        import transformers

        from dualinfer.checkpoint.described.hf_config import read_config

        config = read_config(folder)
        config = getattr(config, "make", lambda: config)()
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        given["replace_with_kernel_inject"] = True
    elif draw.random() < 0.1:
        ask("plan", model, "--tp", 2, "--backend", backend)
    elif draw.random() < 0.1:
        out = folder.with_name("quantized")
        shutil.rmtree(out, ignore_errors=True)
        ask("quantize", model, out, "--scheme", "int8")
    with dualinfer.init_inference(model, backend=backend, dtype="fp32", **given) as engine:
        engine.report()
        if form in ("plain", "gguf", "adapter", "tokenizer"):
            assert engine.tokenizer is not None
        if form == "tokenizer" and backend == "torch":
            engine.generate_text("ab c", max_new_tokens=2)
            engine.chat([{"role": "user", "content": "ab c"}], max_new_tokens=2)
        if form == "sentences" and backend == "torch":
            engine.embed(["ab"])
        if backend == "torch" and draw.random() < 0.3:
            engine.generate([[3, 4]], max_new_tokens=2)


def ask(*command: Any) -> None:
    """Run a command of ours; its error is raised."""
    from typer.testing import CliRunner

    from dualinfer.cli.main import app

    result = CliRunner().invoke(app, [*map(str, command)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code < 2, result.output
    if result.exit_code:
        raise DualinferError(result.output)


def attempt(form: str, step: int, base: Path, top: Path, backend: str) -> str:
    """Change a copy of a folder and load it; what came of it. Raises Fault.

    A slow step is taken once more: the first may have compiled something or looked for garbage.
    """
    outcome, taken, label = once(form, step, base, top, backend)
    if taken > A_SECOND:
        outcome, taken, label = once(form, step, base, top, backend)
    if taken > A_SECOND:
        raise Fault(f"{label}: {taken:.1f} s of the CPU ({outcome})")
    return outcome


def once(form: str, step: int, base: Path, top: Path, backend: str) -> tuple[str, float, str]:
    """Take a step: what came of it, the seconds of the CPU, and what was changed. Raises Fault."""
    draw = random.Random(f"{form} {step}")
    folder = top / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if form in ONLY:
        files = [path for path in files if path.name in ONLY[form]]
    if checkpoint_of(form, folder):  # whose model transformers makes of config.json
        files = [path for path in files if path.name != "config.json"]
    how = [change(draw, draw.choice(files)) for _ in range(draw.choice((1, 1, 1, 2)))]
    label = f"{form!r} step {step} ({', '.join(how)})"
    start, outcome = time.process_time(), "loaded"
    try:
        serve(form, folder, backend, draw)
    except DualinferError as error:
        outcome = "refused"
        text = str(error)
        if len(text.split()) < 4 or len(text) > 6000:
            raise Fault(f"{label}: says {ascii(text)[:300]}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # PanicException of tokenizers is no Exception
        raise Fault(ascii(f"{label}: {type(error).__name__}: {error}")[:600]) from error
    return outcome, time.process_time() - start, label


def build(top: Path, forms: list[str]) -> dict[str, Path]:
    """A whole folder of each form, which is loaded once to see that it is served."""
    made = {}
    for form in forms:
        made[form] = top / form.replace(" ", "-")
        made[form].mkdir()
        FORMS[form](made[form])
    return made


def run(
    backend: str, count: int, forms: list[str], first: int = 0, keep_on: bool = True
) -> Counter:
    """Change and load `count` folders, forms in turn; what came of them, and each fault told."""
    found: Counter[str] = Counter()
    logging.disable()
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        top = Path(place)
        bases = build(top, forms)
        for form, base in bases.items():  # compiles what is compiled once
            for _ in range(2):
                serve(form, base, backend, random.Random(1))
        for step in range(first, first + count):
            form = forms[step % len(forms)]
            faulthandler.dump_traceback_later(_STUCK, exit=True)
            try:
                found[attempt(form, step, bases[form], top, backend)] += 1
            except Fault as fault:
                found["fault"] += 1
                if not keep_on:
                    raise
                print(fault, flush=True)
    faulthandler.cancel_dump_traceback_later()
    logging.disable(logging.NOTSET)
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="torch", choices=("torch", "jax"))
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--form", action="append", choices=[*FORMS])
    asked = parser.parse_args()
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    print(run(asked.backend, asked.count, asked.form or [*FORMS], asked.first))


if __name__ == "__main__":
    main()

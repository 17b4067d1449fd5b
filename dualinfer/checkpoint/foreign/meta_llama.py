"""Llama as Meta releases it: consolidated.NN.pth, a file for each rank, and params.json.

The facts are those of Meta's llama repositories, and of transformers' convert_llama_weights_to_hf.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, UnsupportedError, listing, reads, shown
from ...model.load_plan import TensorSource
from ..files.safetensors import read_json
from ..files.torch_files import open_torch_file
from .fitting import Wanted
from .merged import Merge, MergedSource, Shard, swap
from .shards import Shards, merge

_PARAMS = "params.json"
_FILE = re.compile(r"^consolidated\.(\d{2,4})\.pth$")
_LAYER = re.compile(r"^layers\.(\d+)\.(.+)\.weight$")
_MODULES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OUTER = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_COMPUTED = re.compile(r"(^|\.)rope\.freqs$")
_KNOWN = ("dim", "n_layers", "n_heads", "n_kv_heads", "norm_eps", "rope_theta", "vocab_size")
# What only says how wide the feed-forward layer is, as its tensors do, or concerns training.
_HARMLESS = ("multiple_of", "ffn_dim_multiplier", "max_batch_size", "max_seq_len")
_SCALING = ("use_scaled_rope", "rope_scaling_factor")


def is_meta_folder(folder: Path) -> bool:
    """True for a folder with files of Meta's own form."""
    return os.path.isfile(folder / _PARAMS) and bool(_files(folder))


def _files(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if _FILE.match(name))


def open_meta_folder(folder: Path) -> "MetaShards":
    """The weights of a folder of Meta's, once the model is known."""
    names = _files(folder)
    ranks = [int(name.split(".")[1]) for name in names]
    if ranks != list(range(len(ranks))):
        raise CheckpointError(
            f"{folder} holds {listing(names)}; expected the files of ranks 00, 01 and so on. Fetch "
            "all of them."
        )
    files = [open_torch_file(folder / name) for name in names]
    heads = read_json(folder / _PARAMS).get("n_heads")
    return MetaShards([files], str(folder), heads)


class MetaShards(Shards):
    """The files of Meta's ranks; `heads` is what params.json says."""

    def __init__(self, rounds: Sequence[Sequence[Any]], description: str, heads: Any):
        super().__init__(rounds, description)
        self._heads = heads

    def fit(self, wanted: Wanted) -> TensorSource:
        """Llama's tensors by HF's names."""
        config = wanted.config
        if config.get("model_type") != "llama":
            raise CheckpointError(
                f"{self.description} is Meta's Llama, and the model is "
                f"{shown(config.get('model_type'))}. Pass a LlamaForCausalLM of its sizes."
            )
        if self._heads is not None and self._heads != config.get("num_attention_heads"):
            raise CheckpointError(
                f"{self.description}/{_PARAMS} says n_heads={shown(self._heads)}, and the model "
                f"has {shown(config.get('num_attention_heads'))} heads. Pass a model of its sizes."
            )
        tensors: dict[str, Merge] = {}
        faults = []
        for name, shards in self.shards.items():
            if _COMPUTED.search(name):
                continue
            try:
                theirs, made = self._make(name, shards, wanted)
            except ValueError as error:
                if isinstance(error, CheckpointError):
                    raise
                faults.append(f"{name} ({error})")
                continue
            tensors[theirs] = made
        if faults:
            raise CheckpointError(
                f"The files of {self.description} do not make Llama's tensors: {listing(faults, 4)}"
                ". Are all of them there, and is the model of the same sizes?"
            )
        notes = [*self.notes, f"Meta's files of {self.size} ranks, under HF's names"]
        return MergedSource(tensors, self.description, notes)

    def _make(self, name: str, shards: Sequence[Shard], wanted: Wanted) -> tuple[str, Merge]:
        match = _LAYER.match(name)
        module = _MODULES.get(match[2]) if match else None
        theirs = _OUTER.get(name, name)
        if match is not None and module is not None:
            theirs = f"model.layers.{int(match[1])}.{module}.weight"
        made = merge(shards, theirs, wanted, self.description)
        if module not in ("self_attn.q_proj", "self_attn.k_proj"):
            return theirs, made
        key = "num_attention_heads" if module.endswith("q_proj") else "num_key_value_heads"
        rows, heads = made.shape[0], wanted.config.get(key)
        if type(heads) is not int or heads < 1 or rows % (2 * heads):
            raise ValueError(f"{rows} rows for {heads} heads")
        # Pairs that rotate lie side by side at Meta's, and half a head apart at HF.
        return theirs, replace(made, order=swap(rows, (heads, -1, 2), (0, 2, 1)))


@reads("params.json")
def read_meta_config(folder: Path) -> dict[str, Any]:
    """Make what config.json would hold, of params.json and the tensors of the files.

    How many positions a model was trained for is not in the files: 2048 is Llama's, 4096 Llama 2's,
    8192 Llama 3's and 16384 Code Llama's, told apart by norm_eps and rope_theta. Raises
    UnsupportedError for scaled positions whose factor is not said, and for unknown fields.
    """
    params, path = read_json(folder / _PARAMS), folder / _PARAMS
    unknown = sorted(k for k in params if k not in (*_KNOWN, *_HARMLESS, *_SCALING))
    if unknown:
        raise UnsupportedError(
            f"{path} has {listing(unknown)}, which no Llama has that is read here. Convert the "
            "model with transformers' convert_llama_weights_to_hf.py."
        )
    dim, layers, heads = (_count(params, key, path) for key in ("dim", "n_layers", "n_heads"))
    kv_heads = _count(params, "n_kv_heads", path) if params.get("n_kv_heads") else heads
    eps, theta = params.get("norm_eps", 1e-5), params.get("rope_theta") or 10000.0
    for key, value in (("norm_eps", eps), ("rope_theta", theta)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise CheckpointError(f"{path} has {key}={shown(value)}; expected a positive number.")
    shards = open_meta_folder(folder)
    vocab = _rows(shards, "tok_embeddings.weight", dim, params.get("vocab_size"))
    ffn = _rows(shards, "layers.0.feed_forward.w1.weight", dim)
    query = _rows(shards, "layers.0.attention.wq.weight", dim)
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": dim,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": query // heads,
        "hidden_act": "silu",
        "rms_norm_eps": float(eps),
        "tie_word_embeddings": False,
        "dtype": shards.dtype("norm.weight"),
        **_positions(params, path, float(eps), float(theta)),
        **_ids(vocab),
    }


def _positions(params: Mapping[str, Any], path: Path, eps: float, theta: float) -> dict[str, Any]:
    if not params.get("use_scaled_rope"):
        lengths = {500000.0: 8192, 1000000.0: 16384}
        most = lengths.get(theta, 2048 if eps < 1e-5 else 4096)
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
        return {"max_position_embeddings": most, "rope_parameters": rope}
    factor = params.get("rope_scaling_factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        raise UnsupportedError(
            f"{path} has use_scaled_rope, and no rope_scaling_factor: it is 8 for Llama 3.1 and "
            "3.3, 32 for Llama 3.2, and the files do not say which they are. Write it into "
            "params.json."
        )
    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": float(factor)}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    return {"max_position_embeddings": 131072, "rope_parameters": rope}


def _ids(vocab: int) -> dict[str, int]:
    """The ids that begin and end a text, by the tokenizer that has so many tokens."""
    return (
        {"bos_token_id": 128000, "eos_token_id": 128001}
        if vocab >= 128256
        else {
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
    )


def _count(params: Mapping[str, Any], key: str, path: Path) -> int:
    value = params.get(key)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{path} has {key}={shown(value)}; expected a positive number.")
    return value


def _rows(shards: Shards, name: str, dim: int, said: Any = None) -> int:
    """The rows of a whole matrix with `dim` columns, from the shapes of its shards."""
    if name not in shards.shards or "norm.weight" not in shards.shards:
        raise CheckpointError(f"{shards.description} holds no {name}. Fetch its files again.")
    shapes = [shard.shape for shard in shards.shards[name]]
    if any(len(shape) != 2 for shape in shapes):
        raise CheckpointError(f"{shards.description}: {name} is {shapes[0]}, expected a matrix.")
    if all(shape[1] == dim for shape in shapes):
        whole = len({shape[0] for shape in shapes}) == 1 and shapes[0][0] == said
        return shapes[0][0] if whole else sum(shape[0] for shape in shapes)
    if sum(shape[1] for shape in shapes) == dim:
        return shapes[0][0]
    raise CheckpointError(
        f"{shards.description}: {name} is {listing([str(s) for s in shapes], 2)} in its files, and "
        f"params.json says dim={dim}. Fetch its files again."
    )

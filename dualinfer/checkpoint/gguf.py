"""A model in GGUF files: HF's config, names and layouts of what llama.cpp's converter wrote.

The converter renames tensors, joins and permutes rows of some, and adds 1 to Gemma's norms: that is
undone while parts are read. Sources: llama.cpp's convert_hf_to_gguf.py and its loader.
"""

import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ModelError,
    UnservedError,
    UnsupportedError,
    listing,
    shown,
)
from ..model.families.fields import is_positive
from ..quantization.formats import Opener
from ..quantization.formats.ggml import BlockMatrix, GgmlType, check_reader, values
from .gguf_file import GgufFile, Strings

SUFFIX = ".gguf"
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(\w+)$")
_WAY = "Pass the HF checkpoint that it was made from."
_FAR = 64  # rows; what lies between nearer ones is read as well
_log = logging.getLogger(__name__)


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """True for a file that is GGUF by its name."""
    return str(path).lower().endswith(SUFFIX) and os.path.isfile(path)


def find_gguf(folder: Path) -> Path | None:
    """The one GGUF model in a folder, by its first file.

    None where there is none; CheckpointNotFoundError where it is not clear which one.
    """
    try:
        names = sorted(name for name in os.listdir(folder) if is_gguf(folder / name))
    except OSError:
        return None
    models = {split[1] if (split := _SPLIT.match(name)) else name: name for name in names[::-1]}
    if len(models) > 1:
        raise CheckpointNotFoundError(
            f"{folder} holds {len(models)} GGUF models: {listing(sorted(models.values()))}. Pass "
            "the path of one of them."
        )
    return next((folder / name for name in models.values()), None)


def _files_of(path: Path) -> list[Path]:
    """All files of a model, of which `path` is one."""
    split = _SPLIT.match(path.name)
    if split is None:
        return [path]
    count = int(split[3])
    names = [f"{split[1]}-{i:05}-of-{split[3]}{path.suffix}" for i in range(1, count + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing or not count:
        raise CheckpointNotFoundError(
            f"{path} is one of {count} files of a model, and {listing(missing)} lie not beside it. "
            "Fetch all of them into one folder."
        )
    return [path.parent / name for name in names]


_LLAMA = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_GEMMA = {
    **_LLAMA,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT2 = {
    "attn_norm": "ln_1",
    "ffn_norm": "ln_2",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_BLOOM = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_NEOX = {
    **_BLOOM,
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
}
_BERT = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
}
_LLAMA_FIELDS = {
    **_SIZES,
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# What no decoder here computes by, or all of its tensors say as well.
_HARMLESS = ("vocab_size", "tensor_data_layout", "pooling_type", "rope.scaling.finetuned")


class _Fields:
    """The fields of one architecture, which must all be read, as a family reads config.json's."""

    def __init__(self, file: GgufFile, architecture: str):
        self._file, self._prefix = file, f"{architecture}."
        self._read = {f"{self._prefix}{name}" for name in _HARMLESS}

    def take(self, name: str) -> Any:
        """A field's value, None where it is absent."""
        self._read.add(self._prefix + name)
        return self._file.fields.get(self._prefix + name)

    def number(self, name: str, default: float | None = None) -> Any:
        """A field that must be a positive number, whole if the file has it so."""
        value = self.take(name)
        if value is None and default is not None:
            return default
        if not is_positive(value):
            what = "one for each layer" if isinstance(value, np.ndarray) else shown(value)
            raise ModelError(
                f"{self._file.path} has {self._prefix}{name}={what}; expected a positive number. "
                f"{_WAY}"
            )
        return value

    def require(self, name: str, *allowed: Any) -> None:
        """Refuse a field unless it is absent or one of `allowed`."""
        value = self.take(name)
        if value is not None and value not in allowed:
            raise self._unserved(f"{self._prefix}{name}={shown(value)}")

    def finish(self) -> None:
        """Refuse what nobody read, unless it is nothing."""
        unread = {
            name: value
            for name, value in self._file.fields.items()
            if name.startswith(self._prefix) and name not in self._read
        }
        left = [f"{n}={shown(v)}" for n, v in unread.items() if not _is_nothing(v)]
        if left:
            raise self._unserved(listing(sorted(left)))

    def _unserved(self, what: str) -> UnservedError:
        return UnservedError(
            f"{self._file.path} has {what}, which is not honoured here; ignoring it could give "
            f"wrong results. {_WAY}"
        )


def _is_nothing(value: Any) -> bool:
    return not value.any() if isinstance(value, np.ndarray) else value in (0, False, "")


@dataclass(frozen=True)
class _Architecture:
    """How llama.cpp calls what HF's model type has.

    `fields` map its fields to config.json's, and `complete` adds the rest. `outer` and `layer` name
    modules; a layer's are behind `prefix`.
    """

    model_type: str
    class_name: str
    fields: Mapping[str, str]
    prefix: str
    layer: Mapping[str, str]
    outer: Mapping[str, str]
    complete: Callable[["_Model", _Fields, dict[str, Any]], None]
    by_pairs: tuple[str, ...] = ()  # whose rows are permuted: halves of a head lie in turns
    by_head: tuple[str, ...] = ()  # whose rows HF has head by head, and the file q, k, v
    turned: tuple[str, ...] = ()  # that HF stores [in, out]
    raised: bool = False  # norms are 1 higher
    doubles_head: bool = False  # older files hold a tied embedding twice


def _llama(model: "_Model", fields: _Fields, config: dict[str, Any]) -> None:
    """Llama, Mistral, Qwen2 and Qwen3."""
    head_dim = _head_dim(fields, config)
    rotary = fields.number("rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise UnservedError(f"{model.path} rotates {rotary} of {head_dim} elements. {_WAY}")
    config["rope_parameters"] = _rope(model, fields)
    fields.require("attention.causal", True)
    if model.architecture == "llama":
        config["attention_bias"] = model.holds("blk.0.attn_q.bias")
        config["mlp_bias"] = model.holds("blk.0.ffn_gate.bias")


def _gemma(model: "_Model", fields: _Fields, config: dict[str, Any]) -> None:
    """Gemma 2 and 3; what a file leaves out is as in llama.cpp."""
    head_dim, layers = _head_dim(fields, config), config["num_hidden_layers"]
    fields.require("rope.dimension_count", head_dim)
    is_second = model.architecture == "gemma2"
    is_27b = layers == (46 if is_second else 62)  # which llama.cpp tells by this, too
    heads = config["num_attention_heads"]
    config["query_pre_attn_scalar"] = config["hidden_size"] // heads if is_27b else head_dim
    if is_second:
        config["sliding_window"] = fields.number("attention.sliding_window", 4096)
        config["attn_logit_softcapping"] = fields.number("attn_logit_softcapping", 50.0)
        config["final_logit_softcapping"] = fields.number("final_logit_softcapping", 30.0)
        config["rope_parameters"] = _rope(model, fields)
        return
    config["sliding_window"] = fields.number("attention.sliding_window", 1024)
    softcap = fields.take("final_logit_softcapping")
    config["final_logit_softcapping"] = softcap or None
    pattern = fields.number("attention.sliding_window_pattern", 6)
    if type(layers) is int and layers < 1 << 16:  # else HF's class says what is wrong
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [kinds[(i + 1) % pattern == 0] for i in range(layers)]
    local = fields.number("rope.freq_base_swa", 10000.0)
    config["rope_parameters"] = {
        "full_attention": _rope(model, fields, 1e6),
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def _gpt2(model: "_Model", fields: _Fields, config: dict[str, Any]) -> None:
    fields.require("attention.head_count_kv", config["n_head"])


def _bloom(model: "_Model", fields: _Fields, config: dict[str, Any]) -> None:
    fields.require("attention.head_count_kv", config["n_head"])
    fields.require("feed_forward_length", 4 * config["hidden_size"])
    fields.require("attention.max_alibi_bias", 8.0)


def _neox(model: "_Model", fields: _Fields, config: dict[str, Any]) -> None:
    fields.require("attention.head_count_kv", config["num_attention_heads"])
    head_dim = config["hidden_size"] // config["num_attention_heads"] or 1
    rope = _rope(model, fields)
    rotary = fields.number("rope.dimension_count", head_dim)
    config["rope_parameters"] = {**rope, "partial_rotary_factor": rotary / head_dim}
    parallel = fields.take("use_parallel_residual")
    config["use_parallel_residual"] = True if parallel is None else parallel


def _bert(model: "_Model", fields: _Fields, config: dict[str, Any]) -> None:
    fields.require("attention.causal", False)
    config["type_vocab_size"] = model.rows("token_types.weight")


_ARCHITECTURES = {
    "llama": _Architecture(
        "llama",
        "LlamaForCausalLM",
        _LLAMA_FIELDS,
        "model.layers",
        _LLAMA,
        _LLAMA_OUTER,
        _llama,
        by_pairs=("attn_q", "attn_k"),
    ),
    **{
        name: _Architecture(name, kind, _LLAMA_FIELDS, "model.layers", _LLAMA, _LLAMA_OUTER, _llama)
        for name, kind in (("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM"))
    },
    **{
        name: _Architecture(
            kind,
            title,
            _LLAMA_FIELDS,
            "model.layers",
            _GEMMA,
            _LLAMA_OUTER,
            _gemma,
            raised=True,
        )
        for name, kind, title in (
            ("gemma2", "gemma2", "Gemma2ForCausalLM"),
            ("gemma3", "gemma3_text", "Gemma3ForCausalLM"),
        )
    },
    "gpt2": _Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        {
            "embedding_length": "n_embd",
            "block_count": "n_layer",
            "feed_forward_length": "n_inner",
            "context_length": "n_positions",
            "attention.head_count": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        "transformer.h",
        _GPT2,
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
        },
        _gpt2,
        turned=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
        doubles_head=True,
    ),
    "bloom": _Architecture(
        "bloom",
        "BloomForCausalLM",
        {
            "embedding_length": "hidden_size",
            "block_count": "n_layer",
            "context_length": "seq_length",
            "attention.head_count": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        "transformer.h",
        _BLOOM,
        {
            "token_embd": "transformer.word_embeddings",
            "token_embd_norm": "transformer.word_embeddings_layernorm",
            "output_norm": "transformer.ln_f",
        },
        _bloom,
        by_head=("attn_qkv",),
        doubles_head=True,
    ),
    "gptneox": _Architecture(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        {**_SIZES, "attention.layer_norm_epsilon": "layer_norm_eps"},
        "gpt_neox.layers",
        _NEOX,
        {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm"},
        _neox,
        by_head=("attn_qkv",),
    ),
    "bert": _Architecture(
        "bert",
        "BertModel",
        {**_SIZES, "attention.layer_norm_epsilon": "layer_norm_eps"},
        "bert.encoder.layer",
        _BERT,
        {
            "token_embd": "bert.embeddings.word_embeddings",
            "position_embd": "bert.embeddings.position_embeddings",
            "token_types": "bert.embeddings.token_type_embeddings",
            "token_embd_norm": "bert.embeddings.LayerNorm",
        },
        _bert,
    ),
}


def _head_dim(fields: _Fields, config: dict[str, Any]) -> Any:
    """The elements of a head, as a field or as what all heads have."""
    rest = config["hidden_size"] // config["num_attention_heads"]
    head_dim = fields.number("attention.key_length", fields.take("rope.dimension_count") or rest)
    fields.require("attention.value_length", head_dim)
    config["head_dim"] = head_dim
    return head_dim


def _rope(model: "_Model", fields: _Fields, theta: float = 10000.0) -> dict[str, Any]:
    """HF's rope_parameters. Llama 3's factors are a tensor, which is as longrope with one list."""
    parameters: dict[str, Any] = {"rope_theta": float(fields.number("rope.freq_base", theta))}
    kind = fields.take("rope.scaling.type") or "linear"
    factor = float(fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0)))
    original = fields.take("rope.scaling.original_context_length")
    if model.holds(_ROPE_FACTORS):
        if kind not in ("none", "linear") or factor != 1:
            raise UnservedError(f"{model.path} has {_ROPE_FACTORS} beside {kind}. {_WAY}")
        factors = [float(value) for value in model.vector(_ROPE_FACTORS)]
        return {
            **parameters,
            "rope_type": "longrope",
            "factor": 1.0,
            "original_max_position_embeddings": fields.number("context_length"),
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
        }
    if kind == "none" or (kind == "linear" and factor == 1):
        return {**parameters, "rope_type": "default"}
    parameters |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scale = 1.0
        for name in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
            scale *= fields.number(name, 1.0)
        if scale != 1:
            parameters["attention_factor"] = scale * (0.1 * math.log(max(factor, 1)) + 1)
        for name in ("beta_fast", "beta_slow"):
            parameters[name] = float(fields.number(f"rope.scaling.yarn_{name}", _BETAS[name]))
        fields.require("rope.scaling.yarn_ext_factor", 1.0, -1.0)
        if original is not None:
            parameters["original_max_position_embeddings"] = original
    return parameters


_ROPE_FACTORS = "rope_freqs.weight"
_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


class _Model:
    """The files of one model, their headers read and checked against one another."""

    def __init__(self, path: Path):
        self.path = path
        self.files = [GgufFile(file) for file in _files_of(path)]
        self.fields = self.files[0].fields
        self.place: dict[str, GgufFile] = {}
        for file in self.files:
            twice = self.place.keys() & file.types.keys()
            if twice:
                raise CheckpointError(
                    f"{path}: {listing(sorted(twice))} lie in two of its files. Fetch them again."
                )
            self.place.update(dict.fromkeys(file.types, file))
        held = self.fields.get("split.count", 1), self.fields.get("split.tensors.count")
        if held[0] not in (0, len(self.files)) or held[1] not in (None, len(self.place)):
            raise CheckpointError(
                f"{path}: the model is one of {held[0]} files and {held[1]} tensors, and "
                f"{len(self.files)} files with {len(self.place)} tensors are here. Fetch all of "
                "them into one folder, under their own names."
            )
        self.architecture = self.fields.get("general.architecture")
        kind = self.fields.get("general.type", "model")
        if kind != "model" or self.architecture not in _ARCHITECTURES:
            of = f"of {shown(self.architecture)}" if kind == "model" else f"no model: {shown(kind)}"
            raise UnservedError(
                f"{path} is {of}; GGUF files of these are read: "
                f"{', '.join(sorted(_ARCHITECTURES))}. {_WAY}"
            )
        self.own = _ARCHITECTURES[self.architecture]

    def holds(self, name: str) -> bool:
        """True if there is a tensor of that name."""
        return name in self.place

    def rows(self, name: str) -> int:
        """The length of a tensor's first axis."""
        if name not in self.place:
            raise CheckpointError(f"{self.path} holds no {name}. Fetch or convert it again.")
        return self.place[name].shape(name)[0]

    def vector(self, name: str) -> np.ndarray:
        """A small tensor of floats."""
        file = self.place[name]
        if not file.types[name].is_plain or len(file.shape(name)) != 1:
            raise CheckpointError(f"{self.path}: {name} is no vector of floats. Convert it again.")
        if file.shape(name)[0] > _MOST_FACTORS:
            raise CheckpointError(f"{self.path}: {name} is longer than a head. Convert it again.")
        return file.read(name).astype(np.float32)

    def config(self) -> dict[str, Any]:
        """What config.json would hold."""
        own, fields = self.own, _Fields(self.files[0], str(self.architecture))
        config: dict[str, Any] = {
            "model_type": own.model_type,
            "architectures": [own.class_name],
            "vocab_size": self.rows("token_embd.weight"),
            "dtype": self._dtype(),
        }
        if own.model_type != "bert":
            config["tie_word_embeddings"] = self._is_tied()
        optional = {"attention.head_count_kv": "attention.head_count"}
        for name, theirs in own.fields.items():
            default = fields.number(optional[name]) if name in optional else None
            config[theirs] = fields.number(name, default)
        own.complete(self, fields, config)
        fields.finish()
        return {**config, **self._ids()}

    def _ids(self) -> dict[str, Any]:
        return {
            name: self.fields.get(f"tokenizer.ggml.{own}_token_id") for name, own in _IDS.items()
        }

    def generation(self) -> dict[str, Any]:
        """What generation_config.json would hold: ids that end a text, and the maker's sampling."""
        fields = self._ids()
        ends = [fields["eos_token_id"]]
        ends += [self.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
        ends = [*dict.fromkeys(end for end in ends if end is not None)]
        fields["eos_token_id"] = ends if len(ends) > 1 else next(iter(ends), None)
        found = {t: self.fields.get(f"general.sampling.{own}") for own, t in _SAMPLING.items()}
        sampling = {name: value for name, value in found.items() if value is not None}
        if sampling.get("temperature") != 0 and sampling:
            fields |= {"do_sample": True, **sampling}
        return {name: value for name, value in fields.items() if value is not None}

    def _is_tied(self) -> bool:
        head, embedding = "output.weight", "token_embd.weight"
        if not self.holds(head):
            return True
        kinds = [self.place[name].types[name] for name in (head, embedding)]
        return self.own.doubles_head and kinds[0] is kinds[1]

    def counts(self) -> Counter[GgmlType]:
        """How many elements there are of each type."""
        counts: Counter[GgmlType] = Counter()
        for name, file in self.place.items():
            counts[file.types[name]] += math.prod(file.shape(name))
        return counts

    def _dtype(self) -> str:
        """That of most elements; bfloat16 has the range of what blocks stand for."""
        kind = max(self.counts().items(), key=lambda item: item[1])[0]
        return kind.dtype if kind.is_plain else "bfloat16"

    def tokenizer(self) -> dict[str, Any]:
        """The fields of the tokenizer, without `tokenizer.`, arrays as lists."""
        file = self.files[0]
        found = {}
        for name, value in file.fields.items():
            if name.startswith("tokenizer."):
                whole = file.strings(name) if isinstance(value, Strings) else value
                found[name.partition(".")[2]] = (
                    whole.tolist() if isinstance(whole, np.ndarray) else whole
                )
        return found


_MOST_FACTORS = 1 << 12


def read_gguf_config(path: Path) -> dict[str, Any]:
    """What config.json would hold."""
    return _Model(path).config()


def read_gguf_generation(path: Path) -> dict[str, Any]:
    """What generation_config.json would hold."""
    return _Model(path).generation()


def read_gguf_tokenizer(path: Path) -> tuple[str, dict[str, Any]]:
    """The architecture, and the tokenizer's fields."""
    model = _Model(path)
    return str(model.architecture), model.tokenizer()


class _Tensor(NamedTuple):
    """A stored tensor under HF's name; `order` gives the file's row of each row."""

    file: GgufFile
    name: str
    kind: GgmlType
    order: np.ndarray | None
    turned: bool
    raised: bool

    def blocks(self, rows: slice, rest: tuple[slice, ...]) -> np.ndarray:
        """What the file holds of some rows, floats or blocks."""
        if self.order is None:
            return self.file.read(self.name, (rows, *rest))
        places = self.order[rows]
        if not len(places):
            return self.file.read(self.name, (slice(0, 0), *rest))
        by_place = np.argsort(places)
        sorted_places = places[by_place]
        runs = np.split(sorted_places, np.flatnonzero(np.diff(sorted_places) > _FAR) + 1)
        parts = [
            self.file.read(self.name, (slice(int(run[0]), int(run[-1]) + 1), *rest))[run - run[0]]
            for run in runs
        ]
        found = np.empty((len(places), *parts[0].shape[1:]), parts[0].dtype)
        found[by_place] = np.concatenate(parts)
        return found


class GgufSource:
    """The tensors of a GGUF model under HF's names; blocks are floats where they are read.

    Those of Q8_0 and Q4_0 are matrices in `matrices()`, too.
    """

    def __init__(self, path: Path):
        model = _Model(path)
        config = model.config()
        self.description = str(path)
        self._tensors: dict[str, _Tensor] = {}
        self._kept: list[str] = []
        for name, file in model.place.items():
            if name == _ROPE_FACTORS:
                continue  # which the config holds
            theirs, tensor = _describe(model, config, name, file)
            check_reader(tensor.kind)
            self._tensors[theirs] = tensor
            is_matrix = len(file.shape(name)) == 2 and name.endswith(".weight")
            in_place = name.startswith(("blk.", "token_embd.", "output."))
            if tensor.kind.scheme is not None and is_matrix and in_place:
                self._kept.append(theirs)
        self._in_layers = any(self._tensors[name].name.startswith("blk.") for name in self._kept)
        self.notes = _notes(t.kind for t in self._tensors.values())
        for note in self.notes:
            _log.info("%s: %s", path, note)

    def names(self) -> Iterable[str]:
        """HF's names; the file's own of what HF has not."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as in HF's model."""
        tensor = self._tensors[name]
        shape = tensor.file.shape(tensor.name)
        return shape[::-1] if tensor.turned else shape

    def dtype(self, name: str) -> str:
        """NumPy's name of the dtype that is read."""
        return self._tensors[name].kind.dtype

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """The tensor, or the part at `index`."""
        tensor, shape = self._tensors[name], self.shape(name)
        whole = (slice(None),) * len(shape)
        index = tuple(slice(*i.indices(n)) for i, n in zip(index or whole, shape, strict=True))
        if tensor.turned:
            index = index[::-1]
        if tensor.kind.is_plain:
            array = tensor.blocks(index[0], index[1:])
        elif len(index) == 1:
            raise UnsupportedError(
                f"{self.description}: {name} is a vector in {tensor.kind.name}, which no converter "
                f"writes. {_WAY}"
            )
        else:
            first, size = index[-1].start, tensor.kind.elements
            span = slice(first // size, -(-index[-1].stop // size))
            raw = tensor.blocks(index[0], (*index[1:-1], span, slice(None)))
            start = first - span.start * size
            array = values(tensor.kind, raw)[..., start : start + index[-1].stop - first]
        if tensor.raised:
            array = array.astype(np.float32) - np.float32(1)
        return np.ascontiguousarray(array.T if tensor.turned else array)

    def matrices(self) -> Opener | None:
        """The matrices whose blocks a scheme says; None where no layer has one."""
        return Opener(self._matrix) if self._in_layers else None

    def _matrix(self, name: str) -> BlockMatrix | None:
        if name not in self._kept:
            return None
        tensor = self._tensors[name]
        n, k = tensor.file.shape(tensor.name)
        read = partial(_read_blocks, tensor)
        return BlockMatrix(name, (n, k), tensor.kind, read, self.description)


def _read_blocks(tensor: _Tensor, rows: slice, blocks: slice) -> np.ndarray:
    return tensor.blocks(rows, (blocks, slice(None)))


def _describe(
    model: _Model, config: Mapping[str, Any], name: str, file: GgufFile
) -> tuple[str, _Tensor]:
    """HF's name of a tensor, and how it lies in the file."""
    own, shape = model.own, file.shape(name)
    block = _BLOCK.match(name)
    module, _, part = name.rpartition(".")
    theirs = own.outer.get(module, "lm_head" if module == "output" else None)
    if block:
        module, part = block[2], block[3]
        inner = own.layer.get(module)
        theirs = None if inner is None else f"{own.prefix}.{int(block[1])}.{inner}"
    heads = config.get("n_head") or config["num_attention_heads"]
    order = None
    if module in own.by_pairs:
        heads = config["num_key_value_heads"] if module == "attn_k" else heads
        order = _order(model, name, shape[0], (heads, -1, 2))
    elif module in own.by_head:
        order = _order(model, name, shape[0], (3, heads, -1))
    turned = module in own.turned and len(shape) == 2
    raised = own.raised and name.endswith("norm.weight")
    tensor = _Tensor(file, name, file.types[name], order, turned, raised)
    return f"{theirs}.{part}" if theirs else name, tensor


def _order(model: _Model, name: str, rows: int, axes: tuple[int, int, int]) -> np.ndarray:
    """The file's row of each of HF's: two axes of the rows, as the file has them, change places."""
    if type(axes[0]) is not int or type(axes[1]) is not int or rows % -math.prod(axes):
        raise CheckpointError(
            f"{model.path}: {name} has {rows} rows, which do not fit the model's heads. Fetch or "
            "convert it again."
        )
    swapped = (1, 2) if axes[2] == 2 else (0, 1)
    return np.arange(rows).reshape(axes).swapaxes(*swapped).reshape(-1)


def _notes(kinds: Iterable[GgmlType]) -> tuple[str, ...]:
    """What becomes of a file's blocks, for people."""
    counts = Counter(kind for kind in kinds if not kind.is_plain)
    kept = [f"{n} tensors of {kind.name}" for kind, n in counts.items() if kind.scheme]
    made = [f"{n} tensors of {kind.name}" for kind, n in counts.items() if not kind.scheme]
    notes = []
    if kept:
        way = "stay quantized in fused mode, and are dequantized in module mode"
        notes.append(f"GGUF: {', '.join(kept)} {way}")
    if made:
        notes.append(f"GGUF: {', '.join(made)} are dequantized while they are loaded")
    return tuple(notes)

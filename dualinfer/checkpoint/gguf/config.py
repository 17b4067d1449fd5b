"""HF's config of a GGUF model, and HF's names of what its architecture has.

Sources: llama.cpp's convert_hf_to_gguf.py and its loader.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ModelError, UnservedError, listing, reads, shown
from ...model.families.fields import is_positive
from .file import GgufFile, Strings
from .model import GgufModel

WAY = "Pass the HF checkpoint that it was made from."
ROPE_FACTORS = "rope_freqs.weight"
_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
# Ends of turns. Phi-3's <|end|> ends a part of an answer elsewhere, and is told by its files.
_TURNS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<end_of_utterance>")
_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
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
        """A field's one value, None where it is absent."""
        self._read.add(self._prefix + name)
        value = self._file.fields.get(self._prefix + name)
        if isinstance(value, np.ndarray | Strings):
            raise self._odd(name, "a list, one for each layer", "one value")
        return value

    def _odd(self, name: str, value: str, expected: str) -> ModelError:
        return ModelError(
            f"{self._file.path} has {self._prefix}{name}={value}; expected {expected}. {WAY}"
        )

    def number(self, name: str, default: float | None = None) -> Any:
        """A field that must be a positive number, whole if the file has it so."""
        value = self.take(name)
        if value is None and default is not None:
            return default
        if not is_positive(value):
            raise self._odd(name, shown(value), "a positive number")
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
            f"wrong results. {WAY}"
        )


def _is_nothing(value: Any) -> bool:
    return not value.any() if isinstance(value, np.ndarray) else value in (0, False, "")


@dataclass(frozen=True)
class Architecture:
    """llama.cpp's names for the parts of one of HF's model types.

    `fields` map its fields to config.json's, and `complete` adds the rest. `outer` and `layer` name
    modules; a layer's are behind `prefix`.
    """

    model_type: str
    class_name: str
    fields: Mapping[str, str]
    prefix: str
    layer: Mapping[str, str]
    outer: Mapping[str, str]
    complete: Callable[[GgufModel, _Fields, dict[str, Any]], None]
    by_pairs: tuple[str, ...] = ()  # whose rows are permuted: halves of a head lie in turns
    by_head: tuple[str, ...] = ()  # whose rows HF has head by head, and the file q, k, v
    turned: tuple[str, ...] = ()  # that HF stores [in, out]
    raised: bool = False  # norms are 1 higher
    doubles_head: bool = False  # older files hold a tied embedding twice


def _llama(model: GgufModel, fields: _Fields, config: dict[str, Any]) -> None:
    """Llama, Mistral, Qwen2 and Qwen3."""
    head_dim = _head_dim(fields, config)
    rotary = fields.number("rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise UnservedError(f"{model.path} rotates {rotary} of {head_dim} elements. {WAY}")
    config["rope_parameters"] = _rope(model, fields)
    fields.require("attention.causal", True)
    if model.architecture == "llama":
        config["attention_bias"] = model.holds("blk.0.attn_q.bias")
        config["mlp_bias"] = model.holds("blk.0.ffn_gate.bias")


def _gemma(model: GgufModel, fields: _Fields, config: dict[str, Any]) -> None:
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


def _gpt2(model: GgufModel, fields: _Fields, config: dict[str, Any]) -> None:
    fields.require("attention.head_count_kv", config["n_head"])


def _bloom(model: GgufModel, fields: _Fields, config: dict[str, Any]) -> None:
    fields.require("attention.head_count_kv", config["n_head"])
    fields.require("feed_forward_length", 4 * config["hidden_size"])
    fields.require("attention.max_alibi_bias", 8.0)


def _neox(model: GgufModel, fields: _Fields, config: dict[str, Any]) -> None:
    fields.require("attention.head_count_kv", config["num_attention_heads"])
    head_dim = config["hidden_size"] // config["num_attention_heads"] or 1
    rope = _rope(model, fields)
    rotary = fields.number("rope.dimension_count", head_dim)
    config["rope_parameters"] = {**rope, "partial_rotary_factor": rotary / head_dim}
    parallel = fields.take("use_parallel_residual")
    config["use_parallel_residual"] = True if parallel is None else parallel


def _bert(model: GgufModel, fields: _Fields, config: dict[str, Any]) -> None:
    fields.require("attention.causal", False)
    config["type_vocab_size"] = model.rows("token_types.weight")


_ARCHITECTURES = {
    "llama": Architecture(
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
        name: Architecture(name, kind, _LLAMA_FIELDS, "model.layers", _LLAMA, _LLAMA_OUTER, _llama)
        for name, kind in (("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM"))
    },
    **{
        name: Architecture(
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
    "gpt2": Architecture(
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
    "bloom": Architecture(
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
    "gptneox": Architecture(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        {**_SIZES, "attention.layer_norm_epsilon": "layer_norm_eps"},
        "gpt_neox.layers",
        _NEOX,
        {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm"},
        _neox,
        by_head=("attn_qkv",),
    ),
    "bert": Architecture(
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


def _rope(model: GgufModel, fields: _Fields, theta: float = 10000.0) -> dict[str, Any]:
    """HF's rope_parameters. Llama 3's factors are a tensor, which is as longrope with one list."""
    parameters: dict[str, Any] = {"rope_theta": float(fields.number("rope.freq_base", theta))}
    kind = fields.take("rope.scaling.type") or "linear"
    factor = float(fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0)))
    original = fields.take("rope.scaling.original_context_length")
    if model.holds(ROPE_FACTORS):
        if kind not in ("none", "linear") or factor != 1:
            raise UnservedError(f"{model.path} has {ROPE_FACTORS} beside {kind}. {WAY}")
        factors = [float(value) for value in model.vector(ROPE_FACTORS)]
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


def architecture_of(model: GgufModel) -> Architecture:
    """The facts known of the model's architecture; UnservedError where there are none."""
    kind = model.fields.get("general.type", "model")
    kind = kind if isinstance(kind, str) else "a list"
    if kind != "model" or model.architecture not in _ARCHITECTURES:
        of = f"of {shown(model.architecture)}" if kind == "model" else f"no model: {shown(kind)}"
        raise UnservedError(
            f"{model.path} is {of}; GGUF files of these are read: "
            f"{', '.join(sorted(_ARCHITECTURES))}. {WAY}"
        )
    return _ARCHITECTURES[model.architecture]


def make_config(model: GgufModel) -> dict[str, Any]:
    """Make the fields that config.json would hold."""
    own, fields = architecture_of(model), _Fields(model.files[0], str(model.architecture))
    config: dict[str, Any] = {
        "model_type": own.model_type,
        "architectures": [own.class_name],
        "vocab_size": model.rows("token_embd.weight"),
        "dtype": _dtype(model),
    }
    if own.model_type != "bert":
        config["tie_word_embeddings"] = _is_tied(model, own)
    optional = {"attention.head_count_kv": "attention.head_count"}
    for name, theirs in own.fields.items():
        default = fields.number(optional[name]) if name in optional else None
        config[theirs] = fields.number(name, default)
    own.complete(model, fields, config)
    fields.finish()
    return {**config, **_ids(model)}


def _make_generation(model: GgufModel) -> dict[str, Any]:
    """Make generation_config.json's fields: ids that end a text, and the maker's sampling."""
    fields = _ids(model)
    ends = [fields["eos_token_id"]]
    ends += [model.token_id(name) for name in ("eot", "eom")]
    ends += _ends_of_turns(model) if model.token_id("eot") is None else []
    ends = [*dict.fromkeys(end for end in ends if end is not None)]
    fields["eos_token_id"] = ends if len(ends) > 1 else next(iter(ends), None)
    found = {t: model.value(f"general.sampling.{own}") for own, t in _SAMPLING.items()}
    sampling = {name: value for name, value in found.items() if value is not None}
    if sampling.get("temperature") != 0 and sampling:
        fields |= {"do_sample": True, **sampling}
    return {name: value for name, value in fields.items() if value is not None}


def _ends_of_turns(model: GgufModel) -> list[int]:
    """The tokens by which an answer ends where the file does not say so, by what llama.cpp knows.

    Files of before eot_token_id was written name the end of a text alone, at which no chat ends.
    """
    template = model.fields.get("tokenizer.chat_template")
    names = [name for name in _TURNS if isinstance(template, str) and name in template]
    tokens = model.tokens() if names else []
    return [number for number, token in enumerate(tokens) if token in names]


def _ids(model: GgufModel) -> dict[str, Any]:
    return {name: model.token_id(own) for name, own in _IDS.items()}


def _is_tied(model: GgufModel, own: Architecture) -> bool:
    head, embedding = "output.weight", "token_embd.weight"
    if not model.holds(head):
        return True
    kinds = [model.place[name].types[name] for name in (head, embedding)]
    return own.doubles_head and kinds[0] is kinds[1]


def _dtype(model: GgufModel) -> str:
    """The dtype of most elements; bfloat16 has the range of what blocks stand for."""
    kind = max(model.counts().items(), key=lambda item: item[1])[0]
    return kind.dtype if kind.is_plain else "bfloat16"


@reads()
def read_gguf_config(path: Path) -> dict[str, Any]:
    """Read the fields that config.json would hold."""
    return make_config(GgufModel(path))


@reads()
def read_gguf_generation(path: Path) -> dict[str, Any]:
    """Read the fields that generation_config.json would hold."""
    return _make_generation(_known(path))


@reads()
def read_gguf_tokenizer(path: Path) -> tuple[str, dict[str, Any]]:
    """The architecture, and the tokenizer's fields."""
    model = _known(path)
    return str(model.architecture), model.tokenizer()


def _known(path: Path) -> GgufModel:
    """The model, refused if nothing is known of its architecture."""
    model = GgufModel(path)
    architecture_of(model)
    return model

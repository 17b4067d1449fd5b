"""Tiny random HF models of every kind that dualinfer serves: the oracles of the parity tests."""

import importlib
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

VOCAB, PAD, EOS = 1001, 0, 2
A_SECOND = 2.0  # of the CPU: others use the machine as well, and two threads share a core
BACKENDS = ("torch", "jax")


def on_backends(cases: Iterable[str], repeating: Iterable[str] = ()) -> list[Any]:
    """Each case on each backend; on JAX those slow that repeat there what others show."""
    repeating = set(repeating)
    return [
        pytest.param(case, name, marks=[pytest.mark.slow] if case in repeating and late else [])
        for case in cases
        for late, name in enumerate(BACKENDS)
    ]


def slow_but(quick: Iterable[Any], cases: Iterable[Any], *more: Any) -> list[Any]:
    """Each case, with `more` parameters; those that are not `quick` show the same and are slow."""
    quick = set(quick)
    return [
        pytest.param(case, *more, marks=[] if case in quick else [pytest.mark.slow])
        for case in cases
    ]


@dataclass(frozen=True)
class Case:
    """One tiny model: its HF classes and the config fields that make it odd."""

    name: str
    model: type[hf.PreTrainedModel]
    config: type[hf.PreTrainedConfig]
    fields: dict[str, Any]

    @property
    def family(self) -> str:
        """HF's model_type."""
        return self.config.model_type

    @property
    def generates(self) -> bool:
        """True for a causal model with a head."""
        return self.model.__name__.endswith(("ForCausalLM", "GPT2LMHeadModel"))

    @property
    def has_head(self) -> bool:
        """True if forward gives logits."""
        return self.generates or self.model is hf.BertForMaskedLM

    def make_config(self, **changes: Any) -> hf.PreTrainedConfig:
        """The HF config, with `changes`."""
        common = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": EOS}
        return self.config(**{**common, **self.fields, **changes})


def _llama(model=hf.LlamaForCausalLM, config=hf.LlamaConfig, **fields):
    sizes = {
        "hidden_size": 84,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "max_position_embeddings": 512,
    }
    return model, config, {**sizes, **fields}


def _rope(kind, theta=10000.0, **fields):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **fields}}


def _mistral(**fields):
    return _llama(hf.MistralForCausalLM, hf.MistralConfig, **fields)


def _qwen2(**fields):
    return _llama(hf.Qwen2ForCausalLM, hf.Qwen2Config, **fields)


def _qwen3(**fields):
    return _llama(hf.Qwen3ForCausalLM, hf.Qwen3Config, **fields)


def _gpt2(model=hf.GPT2LMHeadModel, **fields):
    sizes = {"n_embd": 60, "n_layer": 2, "n_head": 5, "n_positions": 128}
    return model, hf.GPT2Config, {**sizes, **fields}


def _bert(model, **fields):
    sizes = {
        "hidden_size": 60,
        "num_hidden_layers": 2,
        "num_attention_heads": 5,
        "intermediate_size": 77,
        "max_position_embeddings": 63,
    }
    return model, hf.BertConfig, {**sizes, **fields}


def _opt(model=hf.OPTForCausalLM, **fields):
    sizes = {
        "hidden_size": 60,
        "num_hidden_layers": 2,
        "num_attention_heads": 5,
        "ffn_dim": 77,
        "max_position_embeddings": 128,
        "word_embed_proj_dim": 60,
    }
    return model, hf.OPTConfig, {**sizes, **fields}


def _gptj(model=hf.GPTJForCausalLM, **fields):
    sizes = {"n_embd": 84, "n_layer": 2, "n_head": 3, "n_positions": 128, "rotary_dim": 10}
    return model, hf.GPTJConfig, {**sizes, **fields}


def _neo(model=hf.GPTNeoForCausalLM, **fields):
    sizes = {
        "hidden_size": 60,
        "num_layers": 2,
        "num_heads": 5,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 5,
        "max_position_embeddings": 128,
    }
    return model, hf.GPTNeoConfig, {**sizes, **fields}


def _neox(model=hf.GPTNeoXForCausalLM, **fields):
    sizes = {
        "hidden_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 5,
        "intermediate_size": 77,
        "max_position_embeddings": 128,
    }
    return model, hf.GPTNeoXConfig, {**sizes, **fields}


def _bloom(model=hf.BloomForCausalLM, **fields):
    return model, hf.BloomConfig, {"hidden_size": 60, "n_layer": 2, "n_head": 5, **fields}


def _gemma2(model=hf.Gemma2ForCausalLM, **fields):
    sizes = {
        "hidden_size": 60,
        "intermediate_size": 99,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 22,
        "sliding_window": 5,
        "query_pre_attn_scalar": 13,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
        "max_position_embeddings": 128,
    }
    return model, hf.Gemma2Config, {**sizes, **fields}


def _gemma3(model=hf.Gemma3ForCausalLM, **fields):
    """Layers in turns: a window, and all of the past with rotary angles of its own."""
    sizes = {
        "hidden_size": 60,
        "intermediate_size": 99,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 22,
        "sliding_window": 5,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 13,
        "max_position_embeddings": 128,
    }
    return model, hf.Gemma3TextConfig, {**sizes, **fields}


_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}

CASES: dict[str, Case] = {
    name: Case(name, *parts)
    for name, parts in {
        # heads of 14, no GQA, weights of its own in the head
        "llama-mha": _llama(num_key_value_heads=6, tie_word_embeddings=False),
        # head_dim 80 makes the attention wider than the model
        "llama-gqa": _llama(hidden_size=96, head_dim=80, num_hidden_layers=3),
        "llama-mqa": _llama(
            hidden_size=60,
            num_attention_heads=5,
            num_key_value_heads=1,
            num_hidden_layers=1,
            tie_word_embeddings=True,
        ),
        "llama-bias": _llama(
            num_attention_heads=3,
            num_key_value_heads=3,
            attention_bias=True,
            mlp_bias=True,
            hidden_act="gelu_pytorch_tanh",
            rms_norm_eps=1e-3,
        ),
        "llama-linear": _llama(**_rope("linear", factor=2.5)),
        "llama-llama3": _llama(
            hidden_size=96,
            head_dim=80,
            **_rope(
                "llama3",
                500000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        ),
        "llama-yarn": _llama(head_dim=32, **_rope("yarn", **_YARN)),
        "llama-yarn-factor": _llama(
            head_dim=32,
            **_rope("yarn", 50000.0, **_YARN, attention_factor=1.3, beta_fast=16.0, beta_slow=2.0),
        ),
        "llama-yarn-mscale": _llama(
            head_dim=32,
            **_rope("yarn", **_YARN, mscale=1.2, mscale_all_dim=0.7, truncate=False),
        ),
        "llama-headless": _llama(hf.LlamaModel, num_hidden_layers=5),
        "mistral": _mistral(sliding_window=None, head_dim=20),
        "mistral-window": _mistral(sliding_window=7, num_hidden_layers=3),
        "qwen2": _qwen2(tie_word_embeddings=True),
        "qwen2-mixed": _qwen2(
            num_hidden_layers=4, use_sliding_window=True, sliding_window=7, max_window_layers=2
        ),
        "qwen3": _qwen3(head_dim=80, num_attention_heads=4, num_key_value_heads=2),
        "qwen3-mixed": _qwen3(
            head_dim=10,
            attention_bias=True,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
        ),
        "gpt2": _gpt2(),
        "gpt2-inverse": _gpt2(
            n_layer=3,
            n_inner=50,
            scale_attn_by_inverse_layer_idx=True,
            reorder_and_upcast_attn=True,
            activation_function="relu",
            tie_word_embeddings=False,
        ),
        "gpt2-unscaled": _gpt2(
            n_layer=1, n_head=3, scale_attn_weights=False, layer_norm_epsilon=1e-2
        ),
        "gpt2-headless": _gpt2(hf.GPT2Model),
        "opt": _opt(),
        # as OPT-350m
        "opt-post": _opt(
            do_layer_norm_before=False, word_embed_proj_dim=36, activation_function="tanh"
        ),
        # as Galactica, with a head of its own
        "opt-bare": _opt(
            enable_bias=False,
            layer_norm_elementwise_affine=False,
            activation_function="gelu",
            tie_word_embeddings=False,
        ),
        # an old fine-tune without its last norm
        "opt-headless": _opt(hf.OPTModel, _remove_final_layer_norm=True, word_embed_proj_dim=36),
        "gptj": _gptj(),
        "gptj-tied": _gptj(
            n_head=6, rotary_dim=14, n_inner=77, n_layer=1, tie_word_embeddings=True
        ),
        "gptj-headless": _gptj(hf.GPTJModel, n_head=6, rotary_dim=2),
        "gpt-neo": _neo(),
        "gpt-neo-untied": _neo(
            intermediate_size=77, tie_word_embeddings=False, activation_function="relu"
        ),
        "gpt-neo-headless": _neo(
            hf.GPTNeoModel,
            num_layers=3,
            attention_types=[[["local"], 2], [["global"], 1]],
            window_size=1,
        ),
        "neox": _neox(),
        "neox-sequential": _neox(
            use_parallel_residual=False,
            attention_bias=False,
            tie_word_embeddings=True,
            hidden_act="gelu_fast",
            rotary_pct=1.0,
            rotary_emb_base=5000,
        ),
        "neox-headless": _neox(
            hf.GPTNeoXModel,
            num_attention_heads=2,
            rope_scaling={"rope_type": "linear", "factor": 2.5, "partial_rotary_factor": 0.5},
        ),
        "bloom": _bloom(),
        "bloom-untied": _bloom(n_head=12, n_layer=1, tie_word_embeddings=False),
        "bloom-headless": _bloom(hf.BloomModel, n_head=1),
        "gemma2": _gemma2(),
        "gemma2-uncapped": _gemma2(
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            attention_bias=True,
            tie_word_embeddings=False,
            num_key_value_heads=1,
            layer_types=["full_attention", "sliding_attention"],
        ),
        "gemma2-headless": _gemma2(hf.Gemma2Model, num_hidden_layers=1),
        "gemma3": _gemma3(),
        # scaled where it sees all of the past; its cap of scores is one that HF does not read
        "gemma3-scaled": _gemma3(
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            rope_scaling={"rope_type": "linear", "factor": 8.0},
            attn_logit_softcapping=3.0,
            final_logit_softcapping=5.0,
            attention_bias=True,
            tie_word_embeddings=False,
        ),
        "bert": _bert(hf.BertModel),
        "bert-types": _bert(
            hf.BertModel, num_hidden_layers=1, type_vocab_size=3, hidden_act="gelu_new"
        ),
        "bert-masked": _bert(hf.BertForMaskedLM, layer_norm_eps=1e-3),
        "bert-masked-untied": _bert(
            hf.BertForMaskedLM, tie_word_embeddings=False, hidden_act="relu"
        ),
    }.items()
}

ALL = tuple(CASES)
CAUSAL = tuple(name for name, case in CASES.items() if case.family != "bert")
GENERATING = tuple(name for name, case in CASES.items() if case.generates)
# They differ from another case by weights or angles, which a forward pass shows on both backends:
# of their text on JAX each costs three executables and shows nothing else.
VARIED = (
    *("llama-bias", "llama-linear", "llama-llama3", "llama-yarn", "llama-yarn-factor"),
    *("llama-yarn-mscale", "llama-mha", "mistral", "qwen2", "gpt2-unscaled", "opt-bare"),
    *("gptj-tied", "gpt-neo-untied", "neox-sequential", "bloom-untied", "gemma2-uncapped"),
    *("gemma3-scaled", "qwen3", "llama-mqa", "opt-post"),
)


def make_model(case: Case | str, **changes: Any) -> hf.PreTrainedModel:
    """The case's model in float32 with weights of its own, the same in every process."""
    case = CASES[case] if isinstance(case, str) else case
    with torch.random.fork_rng(devices=[]):
        model = case.model(case.make_config(**changes)).eval()
        draw = "e" if case.family in _STRONG else "b"
        torch.manual_seed(zlib.crc32(f"{case.name}/{draw}".encode()))
        randomize(model)
    return model


# Families whose greedy text runs into a loop less soon with strong weights.
_STRONG = ("opt", "gptj", "gpt_neox", "bloom", "gemma2", "gemma3_text")


@torch.no_grad()
def randomize(model: hf.PreTrainedModel) -> None:
    """Draw every parameter so that it shows: logits differ clearly, biases and norms count."""
    kind = model.config.model_type
    tables = ("embed", "wte", "wpe", "lm_head", *(() if kind == "opt" else ("decoder.",)))
    for name, p in model.named_parameters():
        if p.ndim > 1:
            embedding = any(part in name for part in tables)
            if kind in _STRONG:
                p.normal_(0, 0.3 if embedding else 2.5 / p.shape[1] ** 0.5)
            else:
                p.normal_(0, 0.7 if embedding else 1.5 / max(p.shape) ** 0.5)
        elif name.endswith("bias"):
            p.normal_(0, 0.3)
        else:  # norms; with signs, or a tied head would repeat the last token for ever
            p.uniform_(0.4, 1.6).mul_(torch.randint(0, 2, p.shape) * 2 - 1)
            adds_one = kind.startswith("gemma") and not kind.startswith("gemma4")
            p.sub_(1.0 if adds_one else 0.0)  # whose norms add 1
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5)
    model.tie_weights()


def random_ids(rows: int, tokens: int, seed: int = 0, vocab: int = VOCAB) -> np.ndarray:
    """Token ids int64 [rows, tokens] that are no special ones."""
    return np.random.default_rng(seed).integers(3, vocab, (rows, tokens))


def relative_rms(result: Any, expected: Any) -> float:
    """Root mean square of the difference over that of `expected`; shapes equal, all finite."""
    a, b = (np.asarray(x, np.float64) for x in (result, expected))
    assert a.shape == b.shape, f"shape {a.shape}, expected {b.shape}"
    assert np.isfinite(a).all() and np.isfinite(b).all()
    scale = np.sqrt((b**2).mean())
    assert scale > 0
    error = float(np.sqrt(((a - b) ** 2).mean()) / scale)
    print(f"relative RMS {error:.2e}, largest error {np.abs(a - b).max():.2e}")
    return error


@contextmanager
def noted_logits(backend: str) -> Iterator[dict[int, np.ndarray]]:
    """The logits [N, V] of the steps within that sample, by position; rows have equal lengths.

    They come out of the very steps that generate runs, once the context ends.
    """
    sampler = importlib.import_module(f"dualinfer.backends.{backend}.sampler")
    by_position, original = {}, sampler.sample

    def note(position: Any, logits: Any) -> None:
        by_position[int(position[0])] = np.asarray(logits).copy()

    def sample(logits: Any, state: Any, position: Any, *how: Any) -> Any:
        if backend == "jax":
            importlib.import_module("jax").debug.callback(note, position, logits)
        else:
            note(position, logits)
        return original(logits, state, position, *how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "sample", sample)
        yield by_position
        if backend == "jax":
            importlib.import_module("jax").effects_barrier()

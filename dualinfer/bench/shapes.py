"""The models that bench runs: named shapes, as real HF configs with random weights, and folders."""

import difflib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import embedded
from ..checkpoint.described.hf_config import read_config
from ..checkpoint.hub import find_checkpoint
from ..checkpoint.sources import is_checkpoint
from ..errors import ArgumentError, ModelError
from ..model.families import describe_model
from ..model.spec import ModelSpec
from ..model.weights import WeightTable
from ..quantization import quantization_of

EMBEDDED = "embedded"
_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@dataclass(frozen=True)
class Shape:
    """Fields of a HF config, the class whose weights are made, and the dtype people run it in."""

    class_name: str
    model_type: str
    dtype: str
    fields: dict[str, Any]

    def with_layers(self, count: int) -> "Shape":
        """The same shape in another depth."""
        names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
        name = next((n for n in names if n in self.fields), names[0])
        fields = self.fields | {name: count}
        if "encoder_layers" in fields:
            fields = self.fields | {"encoder_layers": count, "decoder_layers": count}
        if "attention_types" in fields:  # GPT-Neo's are listed
            fields["attention_types"] = [[["global", "local"][:count], max(1, count // 2)]]
        for name in ("layer_types", "hybrid_override_pattern"):  # a kind for each layer, in turns
            if name in fields:
                kinds: Any = fields[name]
                fields[name] = (kinds * -(-count // len(kinds)))[:count]
        return replace(self, fields=fields)


def _llama(vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv: int, **more: Any) -> Any:
    fields = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "rms_norm_eps": 1e-5,
        **more,
    }
    return Shape("LlamaForCausalLM", "llama", "bfloat16", fields)


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta} | more


def _gpt2(width: int, layers: int, heads: int) -> Shape:
    fields = {"n_embd": width, "n_layer": layers, "n_head": heads}
    return Shape("GPT2LMHeadModel", "gpt2", "float16", fields)


def _opt(hidden: int, layers: int, heads: int) -> Shape:
    fields = {
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "ffn_dim": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return Shape("OPTForCausalLM", "opt", "float16", fields)


def _gpt_neo(hidden: int, layers: int, heads: int) -> Shape:
    fields = {
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "attention_types": [[["global", "local"], layers // 2]],
    }
    return Shape("GPTNeoForCausalLM", "gpt_neo", "float16", fields)


def _gpt_neox(hidden: int, layers: int, heads: int) -> Shape:
    fields = {
        "vocab_size": 50432,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "rope_parameters": _rope(10000.0, partial_rotary_factor=0.25),
    }
    return Shape("GPTNeoXForCausalLM", "gpt_neox", "float16", fields)


def _bloom(hidden: int, layers: int, heads: int) -> Shape:
    fields = {"vocab_size": 250880, "hidden_size": hidden, "n_layer": layers, "n_head": heads}
    return Shape("BloomForCausalLM", "bloom", "bfloat16", fields)


def _qwen3_5(hidden: int, layers: int, heads: int, kv: int, values: int, **more: Any) -> Shape:
    """Qwen3.5's text; `values` are the value heads of its delta rules."""
    kind = "Moe" if "num_experts" in more else ""
    fields = {
        "vocab_size": 248320,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": 256,
        "linear_num_value_heads": values,
        "max_position_embeddings": 262144,
        "rope_parameters": _rope(10000000.0, partial_rotary_factor=0.25),
        **more,
    }
    name, family = f"Qwen3_5{kind}ForCausalLM", f"qwen3_5{kind and '_moe'}_text"
    return Shape(name, family, "bfloat16", fields)


def _gpt_oss(**more: Any) -> Shape:
    fields = {
        **{"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880},
        **{"num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8},
        **{"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4},
        **{"sliding_window": 128, "max_position_embeddings": 131072},
        "rope_parameters": _rope(
            150000.0,
            rope_type="yarn",
            factor=32.0,
            original_max_position_embeddings=4096,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
        ),
    }
    return Shape("GptOssForCausalLM", "gpt_oss", "bfloat16", fields | more)


def _gemma2(hidden: int, ffn: int, layers: int, heads: int, kv: int) -> Shape:
    fields = {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": 256,
    }
    return Shape("Gemma2ForCausalLM", "gemma2", "bfloat16", fields)


def _gemma3(hidden: int, ffn: int, layers: int, heads: int, kv: int) -> Shape:
    fields = {
        "vocab_size": 262208,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": 256,
        "sliding_window": 1024,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "sliding_attention": _rope(10000.0),
            "full_attention": _rope(1000000.0, rope_type="linear", factor=8.0),
        },
    }
    return Shape("Gemma3ForCausalLM", "gemma3_text", "bfloat16", fields)


def _bert(hidden: int, layers: int, heads: int) -> Shape:
    fields = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
    }
    return Shape("BertForMaskedLM", "bert", "float16", fields)


def _t5(hidden: int, ffn: int, layers: int, heads: int) -> Shape:
    fields = {
        **{"d_model": hidden, "d_ff": ffn, "num_layers": layers, "num_heads": heads, "d_kv": 64},
        **{"decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu"},
    }
    return Shape("T5ForConditionalGeneration", "t5", "bfloat16", fields)


def _bart(class_name: str, model_type: str, hidden: int, layers: int, **more: Any) -> Shape:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (
            ("layers", layers),
            ("attention_heads", hidden // 64),
            ("ffn_dim", 4 * hidden),
        )
    }
    fields = {"d_model": hidden, **sides, "decoder_start_token_id": 2, **more}
    return Shape(class_name, model_type, "float16", fields)


def _xlm_roberta(hidden: int, layers: int, heads: int) -> Shape:
    fields = {
        "vocab_size": 250002,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "pad_token_id": 1,
    }
    return Shape("XLMRobertaModel", "xlm-roberta", "float16", fields)


def _modernbert(hidden: int, ffn: int, layers: int, heads: int) -> Shape:
    fields = {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "global_attn_every_n_layers": 3,
    }
    return Shape("ModernBertModel", "modernbert", "bfloat16", fields)


SHAPES: dict[str, Shape] = {
    "tiny": _llama(1001, 96, 200, 2, 6, 3, max_position_embeddings=512),
    "llama-2-7b": _llama(32000, 4096, 11008, 32, 32, 32, max_position_embeddings=4096),
    "llama-2-70b": _llama(32000, 8192, 28672, 80, 64, 8, max_position_embeddings=4096),
    "llama-3-8b": _llama(
        *(128256, 4096, 14336, 32, 32, 8),
        max_position_embeddings=8192,
        rope_parameters=_rope(500000.0),
    ),
    "llama-3.2-1b": _llama(
        *(128256, 2048, 8192, 16, 32, 8),
        head_dim=64,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        rope_parameters=_rope(
            500000.0,
            rope_type="llama3",
            factor=32.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    ),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "gpt-oss-20b": _gpt_oss(),
    "gpt-oss-20b-mxfp4": _gpt_oss(quantization_config={"quant_method": "mxfp4"}),  # as published
    "opt-125m": _opt(768, 12, 12),
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "gpt-j-6b": Shape("GPTJForCausalLM", "gptj", "float16", {}),  # the config's defaults are it
    "gpt-neo-125m": _gpt_neo(768, 12, 12),
    "gpt-neo-1.3b": _gpt_neo(2048, 24, 16),
    "gpt-neo-2.7b": _gpt_neo(2560, 32, 20),
    "pythia-6.9b": _gpt_neox(4096, 32, 32),
    "bloom-560m": _bloom(1024, 24, 16),
    "bloom-7b1": _bloom(4096, 30, 32),
    "gemma-2-2b": _gemma2(2304, 9216, 26, 8, 4),
    "gemma-2-9b": _gemma2(3584, 14336, 42, 16, 8),
    "gemma-3-4b": _gemma3(2560, 10240, 34, 8, 4),
    "gemma-3-12b": _gemma3(3840, 15360, 48, 16, 8),
    "phi-4-mini": Shape(
        *("Phi3ForCausalLM", "phi3", "bfloat16"),
        {
            "vocab_size": 200064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "rope_parameters": _rope(
                10000.0,
                rope_type="longrope",
                partial_rotary_factor=0.75,
                short_factor=[1.0] * 48,
                long_factor=[32.0] * 48,
                original_max_position_embeddings=4096,
            ),
        },
    ),
    "falcon-7b": Shape(
        *("FalconForCausalLM", "falcon", "bfloat16"),
        {
            "vocab_size": 65024,
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
        },
    ),
    "mpt-7b": Shape(
        *("MptForCausalLM", "mpt", "bfloat16"),
        {
            "vocab_size": 50432,
            "d_model": 4096,
            "n_layers": 32,
            "n_heads": 32,
            "max_seq_len": 2048,
        },
    ),
    "command-r": Shape(
        *("CohereForCausalLM", "cohere", "bfloat16"),
        {
            "vocab_size": 256000,
            "hidden_size": 8192,
            "intermediate_size": 22528,
            "num_hidden_layers": 40,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "logit_scale": 0.0625,
        },
    ),
    "olmo-2-7b": Shape(
        *("Olmo2ForCausalLM", "olmo2", "bfloat16"),
        {
            "vocab_size": 100352,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
        },
    ),
    "starcoder2-7b": Shape(
        *("Starcoder2ForCausalLM", "starcoder2", "bfloat16"),
        {
            "vocab_size": 49152,
            "hidden_size": 4608,
            "intermediate_size": 18432,
            "num_hidden_layers": 32,
            "num_attention_heads": 36,
            "num_key_value_heads": 4,
            "max_position_embeddings": 16384,
            "sliding_window": 4096,
        },
    ),
    "deepseek-v2-lite": Shape(
        *("DeepseekV2ForCausalLM", "deepseek_v2", "bfloat16"),
        {
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "n_group": 1,
            "topk_group": 1,
            "max_position_embeddings": 163840,
            "rope_parameters": _rope(
                10000.0,
                rope_type="yarn",
                factor=40.0,
                mscale=0.707,
                mscale_all_dim=0.707,
                original_max_position_embeddings=4096,
            ),
        },
    ),
    "minicpm3-4b": Shape("MiniCPM3ForCausalLM", "minicpm3", "bfloat16", {}),  # the defaults are it
    "youtu-llm-2b": Shape("YoutuForCausalLM", "youtu", "bfloat16", {}),  # likewise
    "flan-t5-large": _t5(1024, 2816, 24, 16),
    "flan-t5-xl": _t5(2048, 5120, 24, 32),
    "bart-large": _bart("BartForConditionalGeneration", "bart", 1024, 12, forced_eos_token_id=None),
    "whisper-large-v3": _bart(
        *("WhisperForConditionalGeneration", "whisper", 1280, 32),
        num_mel_bins=128,
        vocab_size=51866,
    ),
    "mixtral-8x7b": Shape(
        *("MixtralForCausalLM", "mixtral", "bfloat16"),
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 32768,
            "rope_parameters": _rope(1000000.0),
        },
    ),
    "qwen3-30b-a3b": Shape(
        *("Qwen3MoeForCausalLM", "qwen3_moe", "bfloat16"),
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
            "rope_parameters": _rope(1000000.0),
        },
    ),
    "olmoe-1b-7b": Shape(
        *("OlmoeForCausalLM", "olmoe", "bfloat16"),
        {
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 4096,
        },
    ),
    "qwen3.5-9b": _qwen3_5(4096, 32, 16, 4, 32, intermediate_size=12288),
    "qwen3.6-35b-a3b": _qwen3_5(
        *(2048, 40, 16, 2, 32),
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "qwen3-next-80b-a3b": Shape(
        *("Qwen3NextForCausalLM", "qwen3_next", "bfloat16"),
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "max_position_embeddings": 262144,
            "rope_parameters": _rope(10000000.0, partial_rotary_factor=0.25),
        },
    ),
    "kimi-linear-48b-a3b": Shape(
        *("KimiLinearForCausalLM", "kimi_linear", "bfloat16"),
        {"num_hidden_layers": 27},
    ),
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 24, 16),
    "xlm-roberta-base": _xlm_roberta(768, 12, 12),
    "xlm-roberta-large": _xlm_roberta(1024, 24, 16),
    "modernbert-base": _modernbert(768, 1152, 22, 12),
    "modernbert-large": _modernbert(1024, 2624, 28, 16),
    "mamba-2-1.3b": Shape(
        *("Mamba2ForCausalLM", "mamba2", "bfloat16"),
        {
            "vocab_size": 50288,
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_heads": 64,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 1,
            "tie_word_embeddings": True,
        },
    ),
    "mamba2-2.7b": Shape(
        *("Mamba2ForCausalLM", "mamba2", "bfloat16"),
        {
            "vocab_size": 50288,
            "hidden_size": 2560,
            "num_hidden_layers": 64,
            "num_heads": 80,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 1,
            "tie_word_embeddings": True,
        },
    ),
    "falcon-mamba-7b": Shape(
        *("FalconMambaForCausalLM", "falcon_mamba", "bfloat16"),
        {
            "vocab_size": 65024,
            "hidden_size": 4096,
            "intermediate_size": 8192,
            "num_hidden_layers": 64,
            "state_size": 16,
            "time_step_rank": 256,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2-1.2b": Shape(
        *("Lfm2ForCausalLM", "lfm2", "bfloat16"),
        {
            "vocab_size": 65536,
            "hidden_size": 2048,
            "intermediate_size": 12288,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "max_position_embeddings": 128000,
        },
    ),
    "nemotron-nano-9b": Shape(
        *("NemotronHForCausalLM", "nemotron_h", "bfloat16"),
        {
            "vocab_size": 131072,
            "hidden_size": 4480,
            "intermediate_size": 15680,
            "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 80,
            "ssm_state_size": 128,
            "n_groups": 8,
            "max_position_embeddings": 131072,
        },
    ),
    "granite-4-h-small": Shape(
        *("GraniteMoeHybridForCausalLM", "granitemoehybrid", "bfloat16"),
        {
            "vocab_size": 100352,
            "hidden_size": 4096,
            "intermediate_size": 768,
            "shared_intermediate_size": 1536,
            "num_hidden_layers": 40,
            "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 72,
            "num_experts_per_tok": 10,
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "position_embedding_type": "nope",
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
    ),
}


@dataclass(frozen=True)
class Model:
    """The model that a row of a benchmark runs. `folder` holds its weights; None: random ones."""

    name: str
    config: Any
    class_name: str
    folder: Path | None
    dtype: str | None

    @property
    def vocab(self) -> int:
        """Number of token ids."""
        return self.config.vocab_size

    @property
    def is_quantized(self) -> bool:
        """True if its config says that weights are codes."""
        return quantization_of(self.config.to_dict()) is not None

    def describe(self) -> tuple[ModelSpec, WeightTable]:
        """Spec and weight table; ModelError where fused mode does not serve the model."""
        return describe_model(self.config.to_dict(), [self.class_name])


def find_shape(name: str) -> Shape | None:
    """The shape of a name such as llama-2-7b, or llama-2-7b:4 for one of four layers."""
    base, _, layers = name.partition(":")
    shape = SHAPES.get(base)
    if shape is None or not layers:
        return shape if base == name else None
    count = int(layers) if layers.isdecimal() else 0
    if not count or (shape.model_type == "gpt_neo" and count > 1 and count % 2):
        raise ArgumentError(
            f"{name!r}: {layers!r} is no number of layers of {base}"
            + (", which has pairs of them." if count else ". Pass one from 1, as :4.")
        )
    return shape.with_layers(count)


def check_model(name: str) -> None:
    """Raise ArgumentError for no shape's name, folder of a checkpoint or model of the hub.

    The last is fetched where the local cache does not hold it.
    """
    if find_shape(name) or name == EMBEDDED or is_checkpoint(name):
        return
    if "/" in name:
        find_checkpoint(name)
        return
    near = difflib.get_close_matches(name, [*SHAPES, EMBEDDED], 1)
    raise ArgumentError(
        f"{name!r} is no folder with a config.json, no GGUF file, no owner/name of the hub and no "
        "shape's name."
        + (f" Did you mean {near[0]}?" if near else "")
        + f" Shapes: {', '.join([*SHAPES, EMBEDDED])}."
    )


def open_model(name: str) -> Model:
    """The model of a shape's name, of a checkpoint's folder or of the hub.

    No weights are read or made.
    """
    from transformers import AutoConfig

    check_model(name)
    shape = find_shape(name)
    if shape is None:
        folder = embedded.path() if name == EMBEDDED else find_checkpoint(name)
        config = read_config(folder)
        if not config.architectures:
            raise ModelError(f"{folder / 'config.json'} names no architecture. Add it.")
        return Model(name, config, config.architectures[0], folder, None)
    config = AutoConfig.for_model(shape.model_type, **(_SPECIAL | shape.fields))
    config.architectures = [shape.class_name]
    return Model(name, config, shape.class_name, None, shape.dtype)

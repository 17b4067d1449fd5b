"""GGUF files of tiny HF models, as llama.cpp's converter writes them, by the package `gguf`.

The converter is not a package: what it does to tensors is written down here once more.
"""

from typing import NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

ARCHITECTURES = {
    **{"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"},
    **{"gemma2": "gemma2", "gemma3_text": "gemma3", "gpt2": "gpt2", "bloom": "bloom"},
    **{"gpt_neox": "gptneox", "bert": "bert"},
}
# Where the float16 scales of a block lie.
_SCALES = {
    **{Type.Q2_K: slice(80, 84), Type.Q3_K: slice(108, 110), Type.Q4_K: slice(0, 4)},
    **{Type.Q5_K: slice(0, 4), Type.Q6_K: slice(208, 210)},
}


class Layout(NamedTuple):
    """What the converter does to a tensor, and what undoes it."""

    there: object = lambda x: x
    back: object = lambda x: x


def _layout(config, name):
    """The layout of a tensor of the family, by its name in the file."""
    heads = getattr(config, "num_attention_heads", 0)
    family = config.model_type
    if family in ("llama", "mistral") and name.split(".")[-2] in ("attn_q", "attn_k"):
        n = heads if "attn_q" in name else config.num_key_value_heads
        return Layout(
            lambda x: x.reshape(n, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape),
            lambda x: x.reshape(n, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape),
        )
    if family in ("bloom", "gpt_neox") and "attn_qkv" in name:
        return Layout(
            lambda x: x.reshape(heads, 3, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape),
            lambda x: x.reshape(3, heads, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape),
        )
    modules = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    if family == "gpt2" and name.endswith(tuple(f"{m}.weight" for m in modules)):
        return Layout(lambda x: x.T, lambda x: x.T)
    if family.startswith("gemma") and name.endswith("norm.weight"):
        return Layout(lambda x: x + np.float32(1), lambda x: x - np.float32(1))
    return Layout()


def random_blocks(generator, shape, kind):
    """Random bytes of a type that `gguf` does not quantize to, with scales that are numbers."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    raw = generator.integers(0, 256, (*shape[:-1], shape[-1] // elements, size), np.uint8)
    place = _SCALES[kind]
    scales = generator.uniform(1e-5, 3e-4, (*raw.shape[:-1], (place.stop - place.start) // 2))
    raw[..., place] = scales.astype(np.float16).view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def _fields(writer, config):
    """The metadata of a model."""

    def get(*names):
        return next((v for n in names if (v := getattr(config, n, None)) is not None), None)

    family = config.model_type
    writer.add_context_length(get("max_position_embeddings", "n_positions") or 2048)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(get("intermediate_size", "n_inner") or 4 * config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    epsilon = get("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(epsilon)
        writer.add_head_count_kv(config.num_key_value_heads)
        if get("head_dim"):
            writer.add_key_length(config.head_dim)
            writer.add_value_length(config.head_dim)
    else:
        writer.add_layer_norm_eps(epsilon)
    rope = get("rope_parameters") or {}
    if family == "gemma3_text":
        rope = rope["full_attention"]
    if rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    head_dim = get("head_dim") or config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    if family in ("llama", "mistral"):
        writer.add_rope_dimension_count(head_dim)
    if family == "gpt_neox":
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
        writer.add_parallel_residual(config.use_parallel_residual)
    if family.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if family == "bert":
        writer.add_causal_attention(False)
        writer.add_pooling_type(gguf.PoolingType.MEAN)


def _quantized(generator, array, kind):
    if kind in _SCALES:
        return random_blocks(generator, array.shape, kind)
    return gguf.quants.quantize(array, kind)


@torch.no_grad()
def write_gguf(path, model, choose=lambda name: Type.F32, describe=lambda writer: None, **options):
    """Write a model's file; matrices have the type that `choose` gives for their GGUF names.

    The model's weights become what the file means. `describe` adds fields to the writer.
    """
    config, generator = model.config, np.random.default_rng(5)
    architecture = ARCHITECTURES[config.model_type]
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture, **options)
    writer.add_name("tiny")
    _fields(writer, config)
    describe(writer)
    tied = getattr(config, "tie_word_embeddings", False)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        plain = model.model.rotary_emb.compute_default_rope_parameters(config)[0]
        factors = plain / model.model.rotary_emb.inv_freq
        writer.add_tensor("rope_freqs.weight", factors.numpy().astype(np.float32))
    for name, tensor in model.state_dict().items():
        if (tied and name == "lm_head.weight") or "pooler" in name or "position_ids" in name:
            continue
        bare = name.replace("transformer.", "") if config.model_type == "bloom" else name
        module, _, part = bare.rpartition(".")
        theirs = f"{names.get_name(module)}.{part}"
        layout = _layout(config, theirs)
        array = np.ascontiguousarray(layout.there(tensor.numpy()))
        matrix = array.ndim == 2 and part == "weight" and "position" not in theirs
        kind = choose(theirs) if matrix and "token_types" not in theirs else Type.F32
        raw = _quantized(generator, array, kind)
        writer.add_tensor(theirs, raw, raw_dtype=kind)
        means = gguf.quants.dequantize(raw, kind)
        tensor.copy_(torch.from_numpy(np.ascontiguousarray(layout.back(means))))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

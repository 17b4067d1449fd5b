"""A tiny Llama checkpoint with a tokenizer, made without torch or jax: for tests of one backend."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

EMBED, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 48, 70, 6, 3, 8, 2
SPECIAL = ("<s>", "</s>", "<pad>")


def write_llama(folder: Path, vocab: int, dtype: str = "float32") -> Path:
    """A random Llama of odd sizes as config.json and model.safetensors."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": EMBED,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    query, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "model.embed_tokens": (vocab, EMBED),
        "lm_head": (vocab, EMBED),
        "model.norm": (EMBED,),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.self_attn.q_proj": (query, EMBED),
            f"{layer}.self_attn.k_proj": (kv, EMBED),
            f"{layer}.self_attn.v_proj": (kv, EMBED),
            f"{layer}.self_attn.o_proj": (EMBED, query),
            f"{layer}.mlp.gate_proj": (FFN, EMBED),
            f"{layer}.mlp.up_proj": (FFN, EMBED),
            f"{layer}.mlp.down_proj": (EMBED, FFN),
            f"{layer}.input_layernorm": (EMBED,),
            f"{layer}.post_attention_layernorm": (EMBED,),
        }
    random = np.random.default_rng(0)
    numpy_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    tensors = {
        f"{name}.weight": (
            np.ones(shape) if len(shape) == 1 else random.normal(0, EMBED**-0.5, shape)
        ).astype(numpy_dtype)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_byte_tokenizer(folder: Path) -> int:
    """A tokenizer whose tokens are single bytes, so that most characters take several; its size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[2],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return len(vocab)

"""Tiny Whispers with a tokenizer and a feature extractor, whose text depends on what they hear."""

import functools
import json
from typing import Any

import numpy as np
import torch
import transformers as hf

SECONDS = 2  # of a window
PLACES = 50 * SECONDS
POSITIONS = 64
WORDS = "the fox and a dog ran over some hills while it was raining"
LANGUAGES = ("en", "de", "fr")
SPECIAL = (
    *("<|endoftext|>", "<|startoftranscript|>", *(f"<|{name}|>" for name in LANGUAGES)),
    *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>"),
    "<|notimestamps|>",
)


@functools.cache
def make_tokenizer() -> Any:
    """A WhisperTokenizer of letters, a few words, and timestamps of a window."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

    letters = pre_tokenizers.ByteLevel.alphabet()
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=letters, show_progress=False, special_tokens=[]
    )
    own.train_from_iterator([WORDS] * 9, trainer)
    model = json.loads(own.to_str())["model"]
    names = {f"{side}_token": SPECIAL[0] for side in ("unk", "bos", "eos", "pad")}
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = hf.WhisperTokenizer(vocab=model["vocab"], merges=merges, **names)
    times = [f"<|{i * 0.02:.2f}|>" for i in range(PLACES + 1)]
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.add_tokens([AddedToken(name, special=False) for name in times])
    return tokenizer


def make_extractor() -> Any:
    """A WhisperFeatureExtractor of short windows."""
    return hf.WhisperFeatureExtractor(chunk_length=SECONDS, feature_size=20)


def id_of(name: str) -> int:
    """The id of a token."""
    return make_tokenizer().convert_tokens_to_ids(name)


def make_config(**fields: Any) -> Any:
    """A config of two layers on each side."""
    end = id_of("<|endoftext|>")
    return hf.WhisperConfig(
        **{
            **{"vocab_size": len(make_tokenizer()), "d_model": 32, "num_mel_bins": 20},
            **{"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
            **{"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
            **{"max_source_positions": PLACES, "max_target_positions": POSITIONS},
            **{"bos_token_id": end, "eos_token_id": end, "pad_token_id": end},
            **{"decoder_start_token_id": id_of("<|startoftranscript|>")},
            **{"suppress_tokens": None, "begin_suppress_tokens": None, **fields},
        }
    )


def make_whisper(seed: int = 0, *, ends: float = 0.0, stamps: float = 0.0, **fields: Any) -> Any:
    """A Whisper whose generation_config says what those of openai/whisper-* say.

    `ends` and `stamps` make ends and timestamps more likely.
    """
    torch.manual_seed(seed)
    model = hf.WhisperForConditionalGeneration(make_config(**fields)).eval()
    begin = id_of("<|notimestamps|>") + 1
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                heard = name.endswith("encoder_attn.out_proj.weight")
                p.normal_(0, (3.0 if heard else 1.0) * p.shape[-1] ** -0.5)
            else:
                p.add_(torch.empty_like(p).uniform_(-0.2, 0.2))
        table, norm = model.model.decoder.embed_tokens.weight, model.model.decoder.layer_norm
        norm.weight *= torch.randint(0, 2, norm.weight.shape) * 2 - 1  # else the last token repeats
        table[:, 0] = 0.0
        norm.weight[0], norm.bias[0] = 0.0, 1.0
        table[id_of("<|endoftext|>"), 0] = ends
        table[begin:, 0] = stamps
        model.model.decoder.embed_positions.weight *= 4
        model.tie_weights()
    own: dict[str, Any] = {
        "_from_model_config": False,  # else HF reads no field of Whisper's own from a folder
        "lang_to_id": {f"<|{name}|>": id_of(f"<|{name}|>") for name in LANGUAGES},
        "task_to_id": {name: id_of(f"<|{name}|>") for name in ("translate", "transcribe")},
        "no_timestamps_token_id": begin - 1,
        "is_multilingual": True,
        "max_initial_timestamp_index": 50,
        "prev_sot_token_id": id_of("<|startofprev|>"),
        "alignment_heads": [[0, 1], [1, 0], [1, 3]],
        "max_length": POSITIONS,
        "begin_suppress_tokens": [220, id_of("<|endoftext|>")],
        "suppress_tokens": [5, 6, *(id_of(n) for n in SPECIAL[1:-1])],
    }
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    return model


def make_sound(seconds: float, seed: int = 0) -> np.ndarray:
    """Tones that change each half second, some noise, and now and then nearly nothing."""
    random = np.random.default_rng(seed)
    count = int(seconds * 16000)
    at, places = np.arange(count) / 16000, np.arange(count) // 8000
    pitch, loud = random.uniform(80, 4000, 99), random.choice([0.002, 0.1, 0.4], 99)
    sound = np.sin(2 * np.pi * pitch[places] * at) + 0.1 * random.standard_normal(count)
    return (sound * loud[places]).astype(np.float32)


def features_of(*sounds: np.ndarray, long: bool = False) -> dict[str, torch.Tensor]:
    """What the extractor makes of sounds: input_features and attention_mask."""
    how: dict[str, Any] = {"truncation": False, "padding": "longest"} if long else {}
    made = make_extractor()(
        list(sounds), sampling_rate=16000, return_tensors="pt", return_attention_mask=True, **how
    )
    return dict(made)

"""Small tokenizers of every kind: real classes over tiny vocabularies."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

WORDS = "one two the cat 's n't 'm ' . , ? ! do say been in thin 日本 é 🙂 x y".split()
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def fast(inner: Tokenizer, **settings: Any) -> Any:
    """A tokenizer of transformers' around one of the tokenizers library."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=inner, **settings)


def _numbered(*tokens: str) -> dict[str, int]:
    return {token: i for i, token in enumerate(dict.fromkeys(tokens))}


def byte_level(split: str | None = None, **settings: Any) -> Any:
    """GPT-2's way, or Llama 3's with its split."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = _numbered(*letters, "th", "in", "thin", "Ġthin")
    merges = [("t", "h"), ("i", "n"), ("th", "in"), ("Ġ", "thin")]
    inner = Tokenizer(models.BPE(vocab, merges, ignore_merges=split is not None))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split is not None:
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|begin|>", "<|eot|>"])
    inner.add_tokens([AddedToken("<日>", normalized=False), "<think>"])
    return fast(inner, eos_token="<|eot|>", **settings)


def llama3() -> Any:
    made = byte_level(LLAMA3, bos_token="<|begin|>", clean_up_tokenization_spaces=True)
    id = made.bos_token_id
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair=None, special_tokens=[("<|begin|>", id)]
    )
    return made


def byte_fallback(prefix: bool = True) -> Any:
    """Llama 1 and 2's way, or Gemma's, which puts no blank in front."""
    tokens = _numbered("<unk>", "<s>", "</s>", *BYTES, "▁", *"abcdefghijklmnopqrstuvwxyz.")
    inner = Tokenizer(models.BPE(tokens, [], unk_token="<unk>", byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        inner.normalizer = replace
    inner.decoder = decoders.Sequence(steps)
    inner.add_tokens(["<think>", "\n\n"])
    return fast(inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def unigram(cleans: bool = False) -> Any:
    """T5's way."""
    tokens = ["<pad>", "</s>", "<unk>", "▁", *(f"▁{w}" for w in WORDS), *WORDS, *"abcdef"]
    scored = [(token, -float(i)) for i, token in enumerate(dict.fromkeys(tokens))]
    inner = Tokenizer(models.Unigram(scored, unk_id=2))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    inner.decoder = decoders.Metaspace(prepend_scheme="always")
    settings = {"clean_up_tokenization_spaces": cleans, "eos_token": "</s>", "unk_token": "<unk>"}
    return fast(inner, pad_token="<pad>", **settings)


def word_piece(cleans: bool = True) -> Any:
    """BERT's way; its text is cleaned up after decoding, too."""
    pieces = [*WORDS, *(f"##{w}" for w in WORDS), "[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    inner = Tokenizer(models.WordPiece(_numbered(*pieces), unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(cleanup=cleans)
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    made = fast(inner, clean_up_tokenization_spaces=True, unk_token="[UNK]", **names)
    ids = [("[CLS]", made.cls_token_id), ("[SEP]", made.sep_token_id)]
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=None, special_tokens=ids
    )
    return made


def suffixed() -> Any:
    """OpenAI GPT's way: the ends of words are marked."""
    inner = Tokenizer(models.BPE(_numbered("<unk>", *"abc.'", *(f"{c}</w>" for c in "abc.'")), []))
    inner.decoder = decoders.BPEDecoder(suffix="</w>")
    return fast(inner, unk_token="<unk>")


def letters_of_sound() -> Any:
    """CTC's way, with a vocabulary of characters."""
    inner = Tokenizer(models.WordLevel(_numbered("<pad>", "|", *"ABC'."), unk_token="<pad>"))
    inner.decoder = decoders.CTC(pad_token="<pad>", word_delimiter_token="|")
    return fast(inner)


def without_decoder() -> Any:
    inner = Tokenizer(models.WordLevel(_numbered("[UNK]", *WORDS), unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return fast(inner, unk_token="[UNK]", clean_up_tokenization_spaces=True)


def of_bytes() -> Any:
    """ByT5's own class, in Python, which leaves out what is no text."""
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer(extra_ids=3)


def of_bytes_with_marks() -> Any:
    from transformers import PerceiverTokenizer

    return PerceiverTokenizer()


def of_characters() -> Any:
    from transformers import CanineTokenizer

    return CanineTokenizer()


def joined_words(folder: Path) -> Any:
    """CTRL's own class, in Python: what follows a token takes away its end."""
    from transformers import CTRLTokenizer

    vocab = _numbered("<unk>", "a", "b", "ca@@", "d@@", "e", "t</w>", "s</w>")
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version\nc a\n")
    return CTRLTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))


def decoded_by_itself() -> Any:
    """A fast tokenizer whose class decodes in its own way, CodeGen's."""
    from transformers import CodeGenTokenizer

    vocab = _numbered(*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>")
    return CodeGenTokenizer(vocab=vocab, merges=[])


KINDS: dict[str, Callable[..., Any]] = {
    "byte-level": byte_level,
    "llama-3": llama3,
    "byte-fallback": byte_fallback,
    "gemma": lambda: byte_fallback(prefix=False),
    "unigram": unigram,
    "unigram-cleaned": lambda: unigram(cleans=True),
    "word-piece": word_piece,
    "word-piece-cleaned-late": lambda: word_piece(cleans=False),
    "suffixed": suffixed,
    "ctc": letters_of_sound,
    "no-decoder": without_decoder,
    "byt5": of_bytes,
    "perceiver": of_bytes_with_marks,
    "canine": of_characters,
    "ctrl": joined_words,
    "codegen": decoded_by_itself,
}

# ruff: noqa: RUF001 (marks of many scripts)
"""Tokenizers out of GGUF files: those that the models had, whichever way they split text."""

import json
from typing import Any

import gguf
import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers.pre_tokenizers import ByteLevel, Digits, Punctuation, Sequence, Split

from dualinfer import CheckpointError
from dualinfer.checkpoint.described.tokenizer import load_tokenizer
from dualinfer.checkpoint.gguf.config import read_gguf_generation
from dualinfer.checkpoint.gguf.tokenizer import SPLITS

from .tokenizer_kinds import LLAMA3, byte_fallback, fast, word_piece

CORPUS = "Hello wORLD, don't GPU4 12345 x_y!! end.Yes 3.14 naïve 日本語 the thin toolbox\n\n  x" * 3
TEXTS = (
    *("thin toolbox", "  Hello wORLD don't", "GPU4 12345 3.14", "x_y!! end.Yes?\n\n  日本 naïve"),
    *(
        "x<｜日▁end｜>y",
        "Cafe\u0301 the\tend",
        "a <|eot|> b<think>c",
        " 1234567 (x) {y}…",
        "Ünïcode İstanbul ß",
    ),
)
CONTROL, USER = ["<|bos|>", "<|end|>", "<|eot|>", "<｜日▁end｜>"], ["<think>"]
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PLAIN, BARE = ByteLevel(add_prefix_space=False), ByteLevel(add_prefix_space=False, use_regex=False)


def cut(*patterns: str) -> list[Any]:
    return [Split(Regex(pattern), "isolated") for pattern in patterns]


# How the models' own tokenizer.json cut text, whether words are taken whole, whether a BOS is set.
BYTE_LEVEL = {
    "llama-bpe": ([*cut(LLAMA3), BARE], True, True),
    "tekken": ([*cut(TEKKEN), BARE], True, True),
    "smaug-bpe": ([*cut(LLAMA3), BARE], False, False),
    "qwen2": ([*cut(QWEN2), BARE], False, False),
    "smollm": ([Digits(individual_digits=True), PLAIN], False, False),
    "gpt-2": ([PLAIN], False, False),
    "olmo": ([PLAIN], False, False),
    "falcon": ([Punctuation("contiguous"), PLAIN, *cut("[0-9][0-9][0-9]")], False, False),
    "bloom": ([*cut(r" ?[^(\s|[.,!?…。，、।۔،])]+"), BARE], False, False),
    "deepseek-coder": (
        [
            *cut(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"),
            *(Digits(individual_digits=True), BARE),
        ],
        *(False, False),
    ),
}


@pytest.fixture(scope="module")
def learned() -> tuple[dict[str, int], list[Any]]:
    """A vocabulary with merges that go beyond words, so that each way to cut text shows."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = BARE
    letters = ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=letters, show_progress=False)
    inner.train_from_iterator([CORPUS], trainer)
    model = json.loads(inner.to_str())["model"]
    vocab = model["vocab"]
    vocab["Ġtoolbox"] = len(vocab)  # which no merge makes
    return vocab, [tuple(pair) for pair in model["merges"]]


def write(path: Any, architecture: str, kind: str, tokenizer: Any, **fields: Any) -> Any:
    """A file with no more than a tokenizer, as llama.cpp's converter writes it."""
    writer = gguf.GGUFWriter(path, architecture)
    inner = tokenizer.backend_tokenizer
    added = inner.get_added_tokens_decoder()
    tokens = [inner.id_to_token(i) for i in range(len(tokenizer))]
    types = [(3 if added[i].special else 4) if i in added else 1 for i in range(len(tokens))]
    types = [6 if token.startswith("<0x") else of for token, of in zip(tokens, types, strict=True)]
    writer.add_tokenizer_model(kind)
    writer.add_token_list(fields.pop("tokens", tokens))
    writer.add_token_types(fields.pop("types", types))
    names = {"unk": "unknown", "pad": "padding", "sep": "seperator"}
    for name in fields.pop("ids", ("bos", "eos", "unk", "pad", "sep", "mask")):
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            writer.add_uint32(f"tokenizer.ggml.{names.get(name, name)}_token_id", number)
    for name, value in fields.items():
        add = {bool: writer.add_bool, str: writer.add_string, int: writer.add_uint32}
        add.get(type(value), writer.add_array)(f"tokenizer.{name.replace('__', '.')}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def check_alike(found: Any, own: Any, texts: Any = TEXTS) -> None:
    for text in texts:
        ids = own(text)["input_ids"]
        assert found(text)["input_ids"] == ids
        assert found.decode(ids) == own.decode(ids)
        assert found.decode(ids, skip_special_tokens=True) == own.decode(
            ids, skip_special_tokens=True
        )
    assert found.all_special_ids == own.all_special_ids or found.eos_token == own.eos_token


def with_bos(tokenizer: Any) -> Any:
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=None, special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    return tokenizer


def byte_level(learned: Any, pre: str) -> Any:
    vocab, merges = learned
    steps, whole, bos = BYTE_LEVEL[pre]
    inner = Tokenizer(models.BPE(dict(vocab), merges, ignore_merges=whole))
    inner.pre_tokenizer, inner.decoder = Sequence(steps), decoders.ByteLevel()
    if pre in ("qwen2", "olmo"):
        inner.normalizer = normalizers.NFC()
    inner.add_special_tokens(CONTROL)
    inner.add_tokens(USER)
    made = fast(inner, bos_token=CONTROL[0], eos_token=CONTROL[1])
    return with_bos(made) if bos else made


def joined(learned: Any) -> list[str]:
    return [" ".join(pair) for pair in learned[1]]


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_a_byte_level_vocabulary_cuts_text_as_its_model_did(pre, learned, tmp_path):
    own = byte_level(learned, pre)
    fields = {"ggml__pre": pre, "ggml__merges": joined(learned)}
    path = write(tmp_path / "m.gguf", "llama", "gpt2", own, **fields)
    check_alike(load_tokenizer(path), own)


def test_ways_to_cut_text_differ(learned):
    """So that the test above can tell them apart."""
    found = {
        pre: tuple(tuple(byte_level(learned, pre)(t).input_ids) for t in TEXTS)
        for pre in BYTE_LEVEL
    }
    assert len(set(found.values())) == len(found)


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_every_known_way_keeps_the_text(pre, learned, tmp_path):
    own = byte_level(learned, "gpt-2")
    fields = {"ggml__pre": pre, "ggml__merges": joined(learned), "ggml__add_bos_token": False}
    with pytest.warns(match="does not say") if pre == "default" else _nothing():
        found = load_tokenizer(write(tmp_path / "m.gguf", "llama", "gpt2", own, **fields))
    for text in TEXTS:
        assert found.decode(found(text)["input_ids"]) in (text, text.replace("e\u0301", "é"))


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *args: object) -> None: ...


def test_what_a_file_says_of_bos_and_eos_counts(learned, tmp_path):
    for pre, bos, eos in (("llama-bpe", False, True), ("qwen2", True, True)):
        own = byte_level(learned, pre)
        inner = own("thin", add_special_tokens=False)["input_ids"]
        fields = {"ggml__pre": pre, "ggml__merges": joined(learned)}
        fields |= {"ggml__add_bos_token": bos, "ggml__add_eos_token": eos}
        found = load_tokenizer(write(tmp_path / f"{pre}.gguf", "llama", "gpt2", own, **fields))
        around = [[own.bos_token_id] * bos, [own.eos_token_id] * eos]
        assert found("thin")["input_ids"] == [*around[0], *inner, *around[1]]


def test_an_unknown_way_is_refused_and_a_missing_one_is_told(learned, tmp_path):
    own = byte_level(learned, "gpt-2")
    merges = {"ggml__merges": joined(learned)}
    path = write(tmp_path / "a.gguf", "llama", "gpt2", own, ggml__pre="kimi-k2", **merges)
    with pytest.raises(CheckpointError, match=r"not known here, 'kimi-k2'.*tokenizer="):
        load_tokenizer(path)
    with pytest.warns(UserWarning, match="does not say how its tokenizer splits"):
        load_tokenizer(write(tmp_path / "b.gguf", "llama", "gpt2", own, **merges))
    for architecture, pre in (("gpt2", "gpt-2"), ("bloom", "bloom"), ("gptneox", "olmo")):
        path = write(tmp_path / f"{pre}.gguf", architecture, "gpt2", own, **merges)
        check_alike(load_tokenizer(path), byte_level(learned, pre))


def test_special_ids_and_templates_are_read(learned, tmp_path):
    own = byte_level(learned, "llama-bpe")
    template = "{{ messages[0].content }}<|eot|>"
    fields = {"ggml__pre": "llama-bpe", "ggml__merges": joined(learned)}
    fields |= {
        "chat_template": template,
        "chat_templates": ["rag"],
        "chat_template__rag": "{{ 1 }}",
    }
    path = write(tmp_path / "m.gguf", "llama", "gpt2", own, **fields)
    assert load_tokenizer(path).chat_template == {"default": template, "rag": "{{ 1 }}"}
    own.backend_tokenizer.add_special_tokens(["<|eot_id|>"])
    fields = {"ggml__pre": "qwen2", "ggml__merges": joined(learned)}
    path = write(tmp_path / "n.gguf", "llama", "gpt2", own, chat_template="<|eot_id|>", **fields)
    assert read_gguf_generation(path)["eos_token_id"] == [own.eos_token_id, len(own) - 1]
    assert load_tokenizer(path)("a<|eot_id|>")["input_ids"][-1] == len(own) - 1


def test_a_whole_tokenizer_in_a_file_is_taken(learned, tmp_path):
    own = byte_level(learned, "deepseek-coder")
    whole = {"huggingface__json": own.backend_tokenizer.to_str(), "ggml__pre": "afmoe"}
    check_alike(load_tokenizer(write(tmp_path / "m.gguf", "llama", "gpt2", own, **whole)), own)


PIECES = {
    "▁▁": 0,
    "he": -1,
    "th": -2,
    "▁th": -3,
    "in": -4,
    "▁thin": -5,
    "ll": -6,
    "hell": -7,
    "hello": -8,
}
LINES = ("thin hello", "  hello", "x  日本 thin", "hello <think> thin", "a</s>thin", "🙂\nhello")


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_pieces_with_scores_are_those_of_sentencepiece(architecture, tmp_path):
    """Llama's puts a blank in front of each text and behind special tokens, Gemma's nowhere."""
    own = byte_fallback(prefix=architecture == "llama")
    inner = own.backend_tokenizer
    model = json.loads(inner.to_str())
    vocab = model["model"]["vocab"]
    merges = [
        ("▁", "▁"),
        ("h", "e"),
        ("t", "h"),
        ("▁", "th"),
        ("i", "n"),
        ("▁th", "in"),
        ("l", "l"),
    ]
    merges += [("he", "ll"), ("hell", "o")]
    for token in PIECES:
        vocab[token] = len(vocab)
    inner.model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    own = fast(_again(inner), bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    own = with_bos(own)
    tokens = sorted(vocab, key=vocab.get)
    types = [2, 3, 3, *[6] * 256] + [1] * (len(tokens) - 259)
    for token in ("<think>", "\n\n"):
        tokens.append(token)
        types.append(4)
    scores = [float(PIECES.get(token, -99)) for token in tokens]
    fields = {"tokens": tokens, "types": types, "ggml__scores": scores}
    if architecture == "gemma2":  # whose blanks are written as such
        fields["ggml__add_space_prefix"] = False
        types[tokens.index("▁▁")] = 4
        tokens[tokens.index("▁▁")] = "  "
    found = load_tokenizer(write(tmp_path / "m.gguf", architecture, "llama", own, **fields))
    check_alike(found, own, LINES)


def _again(inner: Any) -> Any:
    """The tokenizer with its added tokens behind a vocabulary that has grown."""
    made = Tokenizer(inner.model)
    made.normalizer, made.decoder = inner.normalizer, inner.decoder
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "\n\n")])
    return made


def test_special_ids_that_a_file_does_not_name_are_those_of_its_kind(tmp_path):
    own = with_bos(byte_fallback())
    tokens = [own.convert_ids_to_tokens(i) for i in range(len(own))]
    fields = {"ggml__scores": [0.0] * len(tokens), "ggml__merges": ["a b"], "ids": ()}
    fields["tokens"] = [*tokens[:-2], "ab", "c d"]
    found = load_tokenizer(write(tmp_path / "m.gguf", "llama", "llama", own, **fields))
    assert found.special_tokens_map == own.special_tokens_map
    assert found("a")["input_ids"] == own("a")["input_ids"]


@pytest.mark.parametrize("scheme", ["always", "never"])
def test_pieces_with_probabilities_are_those_of_xlm_roberta(scheme, tmp_path):
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "▁", "▁thin", "▁he", "llo", *"abcdehilnot"]
    scores = [-float(i) for i in range(len(tokens))]
    inner = Tokenizer(models.Unigram(list(zip(tokens, scores, strict=True)), unk_id=3))
    inner.normalizer = normalizers.Precompiled(CHARSMAP)
    inner.pre_tokenizer = Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme=scheme)]
    )
    inner.decoder = decoders.Metaspace(prepend_scheme=scheme)
    names = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
    own = fast(inner, **{f"{name}_token": token for name, token in names.items()})
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair=None, special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    own = fast(inner, **{f"{name}_token": token for name, token in names.items()})
    fields = {"ggml__scores": scores, "ggml__add_bos_token": True}
    fields |= {"ggml__add_space_prefix": True} if scheme == "always" else {}
    fields |= {"ggml__remove_extra_whitespaces": True}
    fields |= {"ggml__precompiled_charsmap": list(CHARSMAP), "types": [3, 3, 3, 2, *[1] * 15]}
    found = load_tokenizer(write(tmp_path / "m.gguf", "bert", "t5", own, **fields))
    check_alike(found, own, ("thin hello", "  a  b ", "tab\u00a0e", "hxllo x 日"))


def make_charsmap(letter: str, becomes: str) -> bytes:
    """A sentencepiece charsmap of one rule: its trie as darts-clone has it, and the texts."""
    byte, units = ord(letter), [0] * 512
    units[byte] = byte | 1 << 8 | 256 << 10  # the label, that a leaf follows, and how far away
    units[byte ^ 256] = 1 << 31  # the leaf: where the text begins
    trie = b"".join(unit.to_bytes(4, "little") for unit in units)
    return len(trie).to_bytes(4, "little") + trie + becomes.encode() + bytes(1)


CHARSMAP = make_charsmap("x", "e")


@pytest.mark.parametrize("lowers", [True, False])
def test_words_with_pieces_are_those_of_bert(lowers, tmp_path):
    own = word_piece()
    own.backend_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowers)
    marked = []
    for i in range(len(own)):
        token = own.convert_ids_to_tokens(i)
        is_special = i in own.all_special_ids
        plain = token[2:] if token.startswith("##") else f"▁{token}"
        marked.append(token if is_special else plain)
    types = [3 if i in own.all_special_ids else 1 for i in range(len(own))]
    fields = {"tokens": marked, "types": types, "ggml__bos_token_id": own.cls_token_id}
    fields |= {} if lowers else {"ggml__normalizer__lowercase": False}
    found = load_tokenizer(write(tmp_path / "m.gguf", "bert", "bert", own, **fields))
    check_alike(found, own, ("one two the cat", "One do n't SAY é", "thinthin 日本 [SEP] x", ""))


@pytest.mark.parametrize(
    "fields",
    [
        {"ggml__pre": "gpt-2"},
        {"ggml__pre": "gpt-2", "ggml__merges": "no list"},
        {"ggml__pre": 5, "ggml__merges": ["a b"]},
        {"ggml__pre": "gpt-2", "ggml__merges": ["a zzzz"]},
        {
            "ggml__pre": "gpt-2",
            "ggml__merges": [],
            "ggml__eot_token_id": 5,
            "ggml__add_bos_token": "x",
        },
        {"ggml__pre": "gpt-2", "ggml__merges": ["a b"], "types": [1, 3]},
        {"ggml__pre": "llama-bpe", "ggml__merges": ["Ġ t"], "ids": ()},
        {"ggml__pre": "gpt-2", "ggml__merges": [], "tokens": ["a", "a"]},
        {"huggingface__json": "{"},
    ],
)
def test_a_file_that_makes_no_tokenizer_is_told(fields, learned, tmp_path):
    path = write(tmp_path / "m.gguf", "llama", "gpt2", byte_level(learned, "gpt-2"), **fields)
    with pytest.raises(CheckpointError, match="Pass the model's own tokenizer"):
        load_tokenizer(path)

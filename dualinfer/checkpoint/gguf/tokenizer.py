"""The HF tokenizer of a GGUF file's fields: vocabulary, splits of text, what stands around one.

What the fields mean, and what holds where one is missing, is llama.cpp's (llama-vocab.cpp); the
patterns are those of the models' own tokenizer.json.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import CheckpointError, shortened, shown, told, warn_caller
from .config import read_gguf_tokenizer

_WAY = "Pass the model's own tokenizer as tokenizer=, or pass token ids."
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # types of tokens
# Names of special tokens: llama.cpp's, and transformers'.
_SPECIAL = {
    **{"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"},
    **{"seperator": "sep", "mask": "mask", "cls": "cls"},
}
# Their ids where the file names none.
_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
    "bert": {"bos": 101, "seperator": 102, "unknown": 100, "padding": 0, "mask": 103},
}


class Split(NamedTuple):
    """The rules that cut text into words before a byte-level BPE merges letters.

    Each pattern cuts what those before it have left. With `whole` a word of the vocabulary is not
    merged from parts; `bos` says that one stands in front, and `nfc` that text is composed first.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    bos: bool = False
    nfc: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _words(numbers: str, contractions: str = _CONTRACTIONS + "|") -> str:
    """The pattern of GPT-4, by how many digits make a word."""
    return (
        contractions + r"[^\r\n\p{L}\p{N}]?\p{L}+|" + numbers
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )  # fmt: skip


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_NUMBER, _MARKS = r"\p{N}{1,3}", r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|"


def _cased(ending: str, numbers: str) -> str:
    """The pattern of GPT-4o: a word is of capitals and then of small letters."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = (f"{upper}*{lower}+", f"{upper}+{lower}*")
    before = r"[^\r\n\p{L}\p{N}]?"
    return "|".join([*(before + word + ending for word in words), numbers + _MARKS + _SPACES])


_GPT4O = _cased(_CONTRACTIONS + "?", _NUMBER)
_PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"  # noqa: RUF001 (the marks of many scripts)
_CJK = "[一-龥ࠀ-一가-퟿]+"

_LLAMA3 = Split((_words(r"\p{N}{1,3}"),))
_QWEN2 = Split((_words(r"\p{N}"),))
_BY_NAME: dict[str, Split] = {
    "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe mpt "
    "jais gigachat a.x-4.0 mellum modern-bert exaone4 trillion granite-docling": Split((_GPT2,)),
    "olmo": Split((_GPT2,), nfc=True),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": Split(
        (r"\p{N}", _GPT2)
    ),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": (
        _LLAMA3._replace(whole=True, bos=True)
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": _LLAMA3,
    "jais-2": Split(
        (
            _words(r"\p{N}{1,3}").replace(
                r"\s+(?!\S)|\s+",
                "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
                + r"|\s{1,2}(?!\S)|\s{1}",
            ),
        )
    ),
    "qwen2": _QWEN2._replace(nfc=True),
    "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": _QWEN2,
    "qwen35": Split(
        (
            _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
            r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES,
        ),
        nfc=True,
    ),
    "ufakzeka": Split((_words(r"\p{N}", contractions=""),)),
    "laguna": Split((r"[^\n]+|[\n]+", _words(r"\p{N}"))),
    "minicpm5": Split((r"\p{N}{1,3}", _words(r"\p{N}+")), whole=True),
    "seed-coder": Split(
        (
            _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
            r"| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES,
        )
    ),
    "bailingmoe bailingmoe2 llada-moe": Split(
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
            r"|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "exaone-moe": Split(
        (
            _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "tekken": Split((_cased("", r"\p{N}"),), whole=True, bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Split((_GPT4O,)),
    "granite-embed-multi-97m": Split((_GPT4O,), whole=True),
    "tiny_aya cohere2moe": Split((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    "youtu": Split(
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-\u30ff]+",  # noqa: RUF001
            _cased(_CONTRACTIONS + "?", r"\p{N}"),
        ),
        whole=True,
    ),
    "deepseek-llm": Split(
        (
            *(r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),  # noqa: RUF001
            *(r"\s+$", _CJK, r"\p{N}+"),
        )
    ),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Split(
        (r"\p{N}{1,3}", "[一-龥\u3040-\u30ff]+", _PUNCTUATED)
    ),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "bloom poro-chat gpt3-finnish": Split((_BLOOM,)),
    "viking": Split((_BLOOM, r"\p{N}")),
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
SPLITS = {name: split for names, split in _BY_NAME.items() for name in names.split()}
# That of an architecture's files from before there were names of splits.
_OF_OLD = {"gpt2": "gpt-2", "gptneox": "olmo", "bloom": "bloom"}


class _Fields:
    """The tokenizer's fields of one file, checked as they are read."""

    def __init__(self, path: Path):
        self.architecture, self._fields = read_gguf_tokenizer(path)
        self.path, self.kind = path, self._fields.get("ggml.model")
        tokens = self._fields.get("ggml.tokens")
        if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
            raise CheckpointError(
                f"{path} holds no tokenizer. Pass one as tokenizer=, or pass token ids."
            )
        self.tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
        if len(set(self.tokens)) < len(self.tokens):
            raise self.wrong("names tokens twice")

    def wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: the tokenizer {what}. {_WAY}")

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """A field of a type; CheckpointError for one of another."""
        value = self._fields.get(name, default)
        if value is not None and not isinstance(value, kind):
            raise self.wrong(f"has {name}={shown(value)}, which is no {kind.__name__}")
        return value

    def numbers(self, name: str) -> list[Any]:
        """A number for each token, or none."""
        values = self.get(name, list, [])
        if values and len(values) < len(self.tokens):
            raise self.wrong(f"has {len(values)} {name} for {len(self.tokens)} tokens")
        return values

    def token(self, name: str) -> str | None:
        """The special token of that name."""
        default = _DEFAULTS.get(str(self.kind), {}).get(name)
        default = default if default is not None and default < len(self.tokens) else None
        number = self.get(f"ggml.{name}_token_id", int, default)
        if number is None:
            return None
        if not 0 <= number < len(self.tokens):
            raise self.wrong(f"has {len(self.tokens)} tokens, and {name} is token {number}")
        return self.tokens[number]

    def templates(self) -> Any:
        """The chat template, or several by name."""
        main, prefix = self.get("chat_template", str), "chat_template."
        named = {
            name.removeprefix(prefix): self.get(name, str)
            for name in self._fields
            if name.startswith(prefix)
        }
        return {**({"default": main} if main else {}), **named} if named else main


def load_gguf_tokenizer(path: Path) -> Any:
    """The tokenizer of a file's fields; CheckpointError where they make none."""
    fields = _Fields(path)
    says = f"No tokenizer can be made of what {path} holds ({shown(fields.kind)})"
    with told(lambda error: CheckpointError(f"{says}: {shortened(error)}. {_WAY}")):
        return _made(fields)


def _made(fields: _Fields) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    special = {theirs: fields.token(own) for own, theirs in _SPECIAL.items()}
    settings: dict[str, Any] = {f"{n}_token": t for n, t in special.items() if t is not None}
    settings["chat_template"] = fields.templates()
    whole = fields.get("huggingface.json", str)
    if whole is not None:
        inner, bos = Tokenizer.from_str(whole), fields.kind == "llama"
        if inner.post_processor is not None:
            return PreTrainedTokenizerFast(tokenizer_object=inner, **settings)
    elif fields.kind == "bert":
        settings["clean_up_tokenization_spaces"] = True  # as every BERT of the hub
        return PreTrainedTokenizerFast(tokenizer_object=_word_piece(fields, special), **settings)
    elif fields.kind == "gpt2":
        inner, bos = _byte_level(fields)
    elif fields.kind == "llama":
        inner, bos = _sentence_piece(fields, special["unk"]), True
    elif fields.kind == "t5":
        inner, bos = _unigram(fields), False
    else:
        raise fields.wrong(f"is of the kind {shown(fields.kind)}, which is not known here")
    _add_tokens(inner, fields)
    for name, default in (("bos", bos), ("eos", fields.kind == "t5")):
        asked = fields.get(f"ggml.add_{name}_token", bool, default)
        if asked and special[name] is None:
            raise fields.wrong(f"puts a token around each text ({name}), and names none")
        settings[f"add_{name}_token"] = asked
    return PreTrainedTokenizerFast(tokenizer_object=inner, **settings)


def _add_tokens(inner: Any, fields: _Fields) -> None:
    """Make control tokens special, and keep those whole that a user defined.

    Gemma's blanks are not among them: its vocabulary has them in another spelling.
    """
    from tokenizers import AddedToken

    types = fields.numbers("ggml.token_type")
    for kind, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        tokens = [
            AddedToken(token, normalized=False, special=is_special)
            for i, (token, of) in enumerate(zip(fields.tokens, types, strict=False))
            if of == kind and inner.token_to_id(token) == i
        ]
        (inner.add_special_tokens if is_special else inner.add_tokens)(tokens)


def _numbered(tokens: Sequence[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _byte_level(fields: _Fields) -> tuple[Any, bool]:
    """A BPE of bytes as of GPT-2, and whether a BOS stands in front where nobody says."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    split = _find_split(fields)
    merges = fields.get("ggml.merges", list)
    if merges is None:
        raise fields.wrong("holds no merges")
    at = [merge.find(" ", 1) for merge in merges]
    pairs = [(m[:i], m[i + 1 :]) for m, i in zip(merges, at, strict=True) if i > 0]
    model = models.BPE(_numbered(fields.tokens), pairs, ignore_merges=split.whole)
    inner = Tokenizer(model)
    if split.nfc or fields.get("ggml.normalizer.nfc", bool):
        inner.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    return inner, split.bos


def _find_split(fields: _Fields) -> Split:
    name = fields.get("ggml.pre", str)
    if name in (None, "", "default"):
        name = _OF_OLD.get(fields.architecture, "default")
        if name == "default":
            warn_caller(
                f"{fields.path} does not say how its tokenizer splits text, as files of before May "
                "2024 do not: it is split as llama.cpp does then, and answers may be worse. Pass "
                "the model's own tokenizer as tokenizer=, or convert the model again."
            )
    if name not in SPLITS:
        raise fields.wrong(f"splits text in a way that is not known here, {shown(name)}")
    return SPLITS[name]


def _sentence_piece(fields: _Fields, unknown: str | None) -> Any:
    """A BPE of pieces with scores as of the first Llamas and Gemmas."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping

    builder = mapping.GGUF_SENTENCEPIECE_BUILDERS.get(fields.architecture)
    has_blank = fields.get("ggml.add_space_prefix", bool, True)
    given = {"tokens": fields.tokens, "scores": fields.numbers("ggml.scores")}
    if (merges := fields.get("ggml.merges", list)) is not None:
        given["merges"] = merges
    if builder is not None and not has_blank:
        return builder(given).backend_tokenizer
    if not (merges or given["scores"]):
        raise fields.wrong("holds neither merges nor scores")
    vocab, pairs = _numbered(fields.tokens), mapping.get_merges(given)
    known = {"fuse_unk": True, "byte_fallback": True, "unk_token": unknown}
    inner = Tokenizer(models.BPE(vocab, pairs, **known))
    escaped = normalizers.Replace(" ", "\u2581")
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_blank:
        escaped = normalizers.Sequence([normalizers.Prepend("\u2581"), escaped])
        steps.append(decoders.Strip(" ", 1, 0))
    inner.normalizer, inner.decoder = escaped, decoders.Sequence(steps)
    return inner


def _unigram(fields: _Fields) -> Any:
    """Pieces with probabilities as of T5 and XLM-RoBERTa."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    scores = fields.numbers("ggml.scores")
    if not scores:
        raise fields.wrong("holds no scores")
    pieces = list(zip(fields.tokens, scores, strict=False))
    unknown, has_bytes = fields.token("unknown"), _BYTE in fields.numbers("ggml.token_type")
    number = None if unknown is None else fields.tokens.index(unknown)
    inner = Tokenizer(models.Unigram(pieces, unk_id=number, byte_fallback=has_bytes))
    charsmap = fields.get("ggml.precompiled_charsmap", list)
    if charsmap is not None:
        inner.normalizer = normalizers.Precompiled(bytes(byte & 255 for byte in charsmap))
    scheme = "always" if fields.get("ggml.add_space_prefix", bool, False) else "never"
    steps: list[Any] = [pre_tokenizers.Metaspace(prepend_scheme=scheme)]
    if fields.get("ggml.remove_extra_whitespaces", bool, False):
        steps.insert(0, pre_tokenizers.WhitespaceSplit())
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    inner.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return inner


def _word_piece(fields: _Fields, special: Mapping[str, str | None]) -> Any:
    """BERT's, whose file marks the words that begin and not the pieces that go on."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    types = fields.numbers("ggml.token_type") or [1] * len(fields.tokens)
    fields.tokens = [
        _of_word_piece(token, of == _CONTROL)
        for token, of in zip(fields.tokens, types, strict=False)
    ]
    special = {name: _of_word_piece(t, True) for name, t in special.items() if t is not None}
    vocab = _numbered(fields.tokens)
    inner = Tokenizer(models.WordPiece(vocab, unk_token=special.get("unk", "[UNK]")))
    lowers = fields.get("ggml.normalizer.lowercase", bool, True)
    strips = fields.get("ggml.normalizer.strip_accents", bool, lowers)
    inner.normalizer = normalizers.BertNormalizer(lowercase=lowers, strip_accents=strips)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    _add_tokens(inner, fields)
    inner.add_special_tokens([token for token in special.values() if token in vocab])
    first, last = special.get("cls") or special.get("bos"), special.get("sep")
    if first is None or last is None:
        raise fields.wrong("names no tokens that stand around a text")
    inner.post_processor = processors.TemplateProcessing(
        single=[first, "$A", last],
        pair=[first, "$A", last, "$B:1", f"{last}:1"],
        special_tokens=[(token, vocab[token]) for token in dict.fromkeys((first, last))],
    )
    return inner


def _of_word_piece(token: str, is_special: bool) -> str:
    """A token as BERT's own vocabulary has it."""
    if is_special or (token.startswith("[") and token.endswith("]")):
        return token
    return token[1:] if token.startswith("\u2581") else f"##{token}"

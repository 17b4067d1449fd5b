"""Rules for new text: a JSON schema, a regex, a choice of texts or a grammar, by llguidance."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..errors import (
    ArgumentError,
    BackendNotAvailableError,
    StepError,
    UnsupportedError,
    a_type,
    shortened,
    shown,
)
from .tokenizing import tokenizer_of

KINDS = ("json", "regex", "choice", "lark", "any")
_MOST_TEXT = 2**18  # characters of a grammar, far beyond what people write
_MOST_CHOICES = 4096
_MOST_PARTS = 8
_MOST_GBNF = 2**14  # which is read by Python
_MOST_MULTIPLES = 20_000  # states of an automaton, which llguidance does not bound itself
_MOST_NAMES = 2000  # of properties; twice as many take four times as long
_KEPT = 32  # compiled grammars
# Of llguidance: what a grammar takes to compile, and what a step takes, of time and of memory.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 30_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
# A model that has nothing to say would write blanks without an end.
_JSON: dict[str, Any] = {
    "whitespace_pattern": r"\x20|\r?\n[\x20\x09]{0,32}",
    "lenient": False,
    "coerce_one_of": False,
}


@dataclass(frozen=True)
class Grammar:
    """A grammar over a tokenizer's vocabulary, compiled, for the sequences of one call.

    The text ends with one of `ends` where it is complete, not before `least` tokens as far as the
    grammar lets it go on. Tokens that are `hidden` are not chosen, and those `hidden_at_first` not
    as the first one.
    """

    source: str
    vocab: int
    ends: tuple[int, ...]
    least: int
    hidden: tuple[int, ...] = ()
    hidden_at_first: tuple[int, ...] = ()
    compiled: Any = field(default=None, compare=False, repr=False)

    def begin(self) -> "Progress":
        """The state of a new sequence."""
        return Progress(self)

    def reader(self) -> "Reader":
        """Reads a text and tells where it is complete."""
        return Reader(self.compiled)


class Progress:
    """The place of one sequence in its grammar.

    It `accepts` the text so far as a whole one, and `is_over` where nothing may follow.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar, self._matcher = grammar, grammar.compiled.matcher.deep_copy()
        self._count, self.accepts, self.is_over = 0, self._matcher.is_accepting(), False

    def words(self) -> np.ndarray:
        """The tokens that may come next: the bits of uint32 [V / 32], the lowest first.

        ArgumentError where there is none.
        """
        grammar = self._grammar
        size = -(-grammar.vocab // 32)
        made = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[:size].copy()
        self._check()
        _clear(made, grammar.compiled.ends)
        _clear(made, grammar.ends)
        _clear(made, grammar.hidden)
        if self._count == 0:
            _clear(made, grammar.hidden_at_first)
        if self.accepts and (self._count >= grammar.least or not made.any()):
            for x in grammar.ends:
                if x not in grammar.hidden:
                    made[x // 32] |= np.uint32(1 << x % 32)
        if not made.any():
            raise ArgumentError(
                f"After {self._count} new tokens the grammar leaves no token that may come next. "
                "Does it ask for a text that these tokens cannot write, or that an EOS, a stop id "
                "or a suppressed token is a part of?"
            )
        return made

    def take(self, token: int) -> None:
        """Go on by the token that was chosen; StepError for one that was not allowed."""
        self._count += 1
        is_end = token in self._grammar.ends
        if is_end and self.accepts:
            self.is_over = True
            return
        if is_end or not self._matcher.consume_token(token):
            if self._matcher.stop_reason().endswith("TooComplex"):
                self._check()
            raise StepError(
                f"The token {token} was chosen, which the grammar does not allow there. Do options "
                "force it, or does every allowed one have the logit -inf?"
            )
        self.accepts = self._matcher.is_accepting()
        self.is_over = self._matcher.is_stopped()
        self._check()

    def _check(self) -> None:
        """Raise ArgumentError where a step was too much for llguidance's limits."""
        if not self._matcher.is_error():
            return
        reason = _reason(self._matcher.get_error())
        if reason.startswith("NoExtension"):
            raise ArgumentError(f"After {self._count} new tokens no text is left for the grammar.")
        raise ArgumentError(f"The grammar is too complex after {self._count} new tokens: {reason}.")


class Reader:
    """Reads a text piece by piece, and tells whether it is complete."""

    def __init__(self, compiled: "_Compiled") -> None:
        self._tokenizer, self._matcher = compiled.tokenizer, compiled.matcher.deep_copy()

    def accepts(self, text: str) -> bool:
        """True if the text is a whole one with this piece."""
        tokens = self._tokenizer.tokenize_str(text)
        read = self._matcher.try_consume_tokens(tokens)
        return read == len(tokens) and self._matcher.is_accepting()


def _clear(words: np.ndarray, ids: Sequence[int]) -> None:
    for x in ids:
        if x // 32 < len(words):
            words[x // 32] &= np.uint32(~(1 << x % 32) & 0xFFFFFFFF)


# --- making one ----------------------------------------------------------------------------------


def make_grammar(
    given: Any, tokenizer: Any, vocab: int, ends: Sequence[int], least: int, **hidden: Any
) -> Grammar:
    """The grammar that a caller asks for; ArgumentError that says what is wrong with it.

    `given` is a dict of one of KINDS: a JSON schema (a dict, its text, True for any object, or a
    pydantic class), a regex, a list of texts, a grammar in Lark's notation or GBNF's, or a list of
    such dicts of which any may be followed. A `prefix` beside it is one of Lark that comes first.
    """
    source = source_of(given)
    compiled = _compiled(_tokenizer(tokenizer, vocab), source)
    grammar = Grammar(source, vocab, tuple(ends), least, **hidden, compiled=compiled)
    grammar.begin().words()
    return grammar


def source_of(given: Any) -> str:
    """The text that llguidance compiles."""
    if isinstance(given, Mapping) and "prefix" in given:
        rest = {key: value for key, value in given.items() if key != "prefix"}
        if given["prefix"] is None:
            return source_of(rest)
        return _joined("start: @part0 @part1", [{"lark": given["prefix"]}, rest])
    if not isinstance(given, Mapping) or len(given) != 1 or next(iter(given)) not in KINDS:
        raise ArgumentError(
            f"grammar={shown(given)}; expected a dict with one of {', '.join(KINDS)}, such as "
            "{'json': schema} or {'regex': '[0-9]+'}."
        )
    ((kind, value),) = given.items()
    if kind == "json":
        return _json_source(value)
    if kind == "choice":
        return _choice_source(value)
    if kind == "any":
        parts = list(value) if isinstance(value, list | tuple) else []
        if not 0 < len(parts) <= _MOST_PARTS:
            raise ArgumentError(f"grammar: any is {shown(value)}; expected a few grammars.")
        return _joined("start: " + " | ".join(f"@part{i}" for i in range(len(parts))), parts)
    if not isinstance(value, str) or not value:
        raise ArgumentError(f"grammar: {kind} is {shown(value)}; expected a text.")
    _check_size(value)
    _check_text(value)
    if kind == "regex":
        return _llguidance().LLMatcher.grammar_from_regex(value)
    return _lark_source(value)


def _joined(start: str, parts: Sequence[Any]) -> str:
    """A grammar that refers to each of some as @part0 and so on."""
    grammars = [{"lark_grammar": start}]
    for i, part in enumerate(parts):
        if isinstance(part, Mapping) and ("any" in part or "prefix" in part):
            raise ArgumentError("grammar: any and prefix take plain grammars alone.")
        source = source_of(part)
        made = json.loads(source)["grammars"][0] if source[0] == "{" else {"lark_grammar": source}
        grammars.append({**made, "name": f"part{i}"})
    return json.dumps({"grammars": grammars})


def _json_source(value: Any) -> str:
    if value is True:
        value = {"type": "object"}
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"grammar: the JSON schema is none: {shortened(error)}.") from error
    if not isinstance(schema, Mapping):
        raise ArgumentError(f"grammar: json is {a_type(schema)}; expected a JSON schema, a dict.")
    _check_size(text)
    _check_text(text)
    _check_schemas([schema])
    try:
        return _llguidance().LLMatcher.grammar_from_json_schema(text, overrides=_JSON)
    except ValueError as error:
        raise ArgumentError(f"grammar: the JSON schema is not served: {error}.") from error


def _choice_source(value: Any) -> str:
    texts = list(value) if isinstance(value, list | tuple) else []
    if not texts or not all(isinstance(x, str) and x for x in texts):
        raise ArgumentError(f"grammar: choice is {shown(value)}; expected a list of texts.")
    if len(texts) > _MOST_CHOICES:
        raise ArgumentError(f"grammar: choice has {len(texts)} texts; at most {_MOST_CHOICES}.")
    joined = " | ".join(json.dumps(x, ensure_ascii=False) for x in texts)
    _check_size(joined)
    _check_text(joined)
    return json.dumps({"grammars": [{"lark_grammar": f"start: {joined}"}]})


def _lark_source(text: str) -> str:
    """Lark's notation; that of GBNF is turned into it."""
    if "::=" in text:
        if len(text) > _MOST_GBNF:
            raise ArgumentError(
                f"A grammar in GBNF has at most {_MOST_GBNF:,} characters here; write it for Lark."
            )
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            text = any_to_lark(text)
        except Exception as error:
            raise ArgumentError(f"grammar: {shortened(error)}") from error
    decoder, schemas, at = json.JSONDecoder(), [], text.find("%json")
    while at >= 0:
        begin = re.compile(r"\s*").match(text, at + len("%json"))
        try:
            schema, at = decoder.raw_decode(text, begin.end() if begin else at)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"grammar: no JSON schema is behind %json: {error}.") from error
        schemas.append(schema)
        at = text.find("%json", at)
    _check_schemas(schemas)
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _check_size(text: str) -> None:
    if len(text) > _MOST_TEXT:
        raise ArgumentError(
            f"The grammar has {len(text):,} characters; expected at most {_MOST_TEXT:,}."
        )


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError("The grammar holds half a surrogate pair, which is no text.") from error


def _check_schemas(schemas: Sequence[Any]) -> None:
    """Refuse what llguidance would take minutes for without a bound of its own."""
    names = sum(len(x) for x in _values(schemas, "properties") if isinstance(x, Mapping))
    if names > _MOST_NAMES:
        raise ArgumentError(
            f"The schema has {names:,} properties; at most {_MOST_NAMES:,} are served."
        )
    total = 0
    for value in _values(schemas, "multipleOf"):
        if isinstance(value, int | float) and not isinstance(value, bool):
            digits = Decimal(str(value)).as_tuple().digits
            total += int("".join(map(str, digits[:12]))) if len(digits) <= 12 else 10**12
    if total > _MOST_MULTIPLES:
        raise ArgumentError(
            f"The schema's multipleOf are too large to be served: their digits make {total:,}, and "
            f"at most {_MOST_MULTIPLES:,} do. Leave them out, and check the number yourself."
        )


def _values(value: Any, name: str) -> Iterator[Any]:
    """The values of a key, wherever it stands."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            if name in one:
                yield one[name]
            waiting.extend(one.values())
        elif isinstance(one, list | tuple):
            waiting.extend(one)


def _reason(text: str) -> str:
    return shortened(text.replace("<non-verbose/>", "").strip().rstrip("."), 400)


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise BackendNotAvailableError(
            "A grammar needs llguidance, which is not installed. Install `dualinfer[serve]`."
        ) from error
    return llguidance


class _Compiled:
    """A grammar that llguidance has compiled, not begun, and the tokenizer that it is over."""

    def __init__(self, tokenizer: Any, source: str) -> None:
        guidance = _llguidance()
        limits = guidance.LLParserLimits(**_LIMITS)
        self.tokenizer, self.ends = tokenizer, tuple(tokenizer.eos_tokens)
        self.matcher = guidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
        if self.matcher.is_error():
            raise ArgumentError(
                f"The grammar cannot be served: {_reason(self.matcher.get_error())}."
            )


_compiling = threading.Lock()
_made: "OrderedDict[tuple[int, str], _Compiled]" = OrderedDict()
_tokenizers: "WeakKeyDictionary[Any, dict[tuple[int, int], Any]]" = WeakKeyDictionary()


def _compiled(tokenizer: Any, source: str) -> _Compiled:
    """A grammar, compiled now or before; llguidance holds no lock of Python's meanwhile."""
    key = id(tokenizer), source
    with _compiling:
        if (known := _made.get(key)) is not None and known.tokenizer is tokenizer:
            _made.move_to_end(key)
            return known
    made = _Compiled(tokenizer, source)
    with _compiling:
        _made[key] = made
        while len(_made) > _KEPT:
            _made.popitem(last=False)
    return made


def _tokenizer(given: Any, vocab: int) -> Any:
    """llguidance's form of a HF tokenizer, made once, for the ids of a model."""
    tokenizer = tokenizer_of(given)
    backend: Any = getattr(tokenizer, "_tokenizer", None)
    if not hasattr(backend, "to_str"):
        raise UnsupportedError(
            "A grammar needs a tokenizer of the tokenizers library, and "
            f"{type(tokenizer).__name__} is one of Python. Load the fast one: AutoTokenizer gives "
            "it where there is one."
        )
    size = max(vocab, backend.get_vocab_size(with_added_tokens=True))
    with _compiling:
        known = _tokenizers.setdefault(tokenizer, {})
        key = size, id(backend)
        if key not in known:
            known[key] = _made_tokenizer(tokenizer, backend, size)
        return known[key]


def _made_tokenizer(tokenizer: Any, backend: Any, size: int) -> Any:
    text = json.loads(backend.to_str())
    text["truncation"] = text["padding"] = None
    end = tokenizer.eos_token_id
    try:
        return _llguidance().LLTokenizer(json.dumps(text), n_vocab=size, eos_token=end)
    except (ValueError, RuntimeError, TypeError) as error:
        raise UnsupportedError(
            f"llguidance does not read this tokenizer, so that no grammar can be served: "
            f"{shortened(error)}"
        ) from error

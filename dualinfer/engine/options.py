"""GenerationOptions: the values of generate's arguments, resolved and checked."""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..backends.base import NO_TOKEN, TOP
from ..errors import ArgumentError, a_type, shown, warn_caller
from .arguments import (
    BEAMS,
    DEFAULTS,
    DRAWN,
    KNOWN,
    OUTPUTS,
    PROCESSED,
    asks,
    check_beams,
    is_same,
    refuse_unknown,
    refuse_unserved,
)

DEFAULT_NEW_TOKENS = 20
_MOST_SEQUENCES = 1 << 16  # of one call; each takes some of the host's memory
_LOOKUP, _NGRAM = "prompt_lookup_num_tokens", "max_matching_ngram_size"
_MOST_DRAFTS = 255  # a pass over as many tokens takes no longer than one over a few
_MOST_WEIGHT = 1e4  # far beyond the logits of any model
_MOST = 2**31 - 1  # the largest id of a result on JAX


@dataclass(frozen=True)
class GenerationOptions:
    """One generate call's options, HF's names and meanings.

    `top_k` 0, `top_p` 1 and `min_p` 0 are off. Of `max_new_tokens` and `max_length`, the number of
    columns of the result, the first wins where both are set; `asked_length` tells that the caller
    set one, not the model's defaults. `processed` are options that the host applies to each step's
    logits, by name, and `processors` and `criteria` the caller's own functions. `returns` says what
    is asked for beside the ids: of `scores` and `logits`, where HF's output is; None where it is
    not. `bias` are pairs of an id and what its logit gets more, and `logprobs` is how many likely
    tokens of each step the output tells of, None for no log-probabilities. `decoder_start` is the
    id, or are those, that an encoder-decoder begins with. `rule` is a `stepwise.Rule` of the
    model's own. `grammar` is what the caller says of the new text. At most `lookup` tokens are
    drafted at a time, found by the last `lookup_ngram` tokens of a text.
    """

    max_new_tokens: int | None
    max_length: int | None
    asked_length: bool
    min_new_tokens: int | None
    min_length: int
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias: tuple[tuple[int, float], ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    stop_strings: tuple[str, ...]
    num_return_sequences: int
    processed: Mapping[str, Any] = field(default_factory=dict)
    processors: tuple[Any, ...] = ()
    criteria: tuple[Any, ...] = ()
    max_time: float | None = None
    renormalize: bool = False
    returns: tuple[str, ...] | None = None
    logprobs: int | None = None
    decoder_start: Any = None
    rule: Any = None
    grammar: Any = None
    lookup: int = 0
    lookup_ngram: int = 2

    def forced(self, name: str) -> int:
        """The one id that an option forces, NO_TOKEN where it is a list of several."""
        value = self.processed[name]
        ids = list(value) if isinstance(value, list | tuple) else [value]
        is_one = len(ids) == 1 and isinstance(ids[0], int) and not isinstance(ids[0], bool)
        return ids[0] if is_one and ids[0] >= 0 else NO_TOKEN

    def hidden(self, name: str, vocab: int) -> tuple[int, ...]:
        """The ids that an option suppresses; NO_TOKEN alone where HF shall say what is wrong."""
        ids = self.processed.get(name, ())
        known = isinstance(ids, list | tuple) and all(type(i) is int and i >= 0 for i in ids)
        return tuple(i for i in dict.fromkeys(ids) if i < vocab) if known else (NO_TOKEN,)

    @property
    def stepwise(self) -> list[str]:
        """Arguments for which the host chooses each token, by name."""
        asked = {"logits_processor": self.processors, "stopping_criteria": self.criteria}
        asked |= {"max_time": self.max_time is not None}
        asked |= {"prompt_lookup_num_tokens": self.lookup}
        asked |= {f"output_{name}": True for name in self.returns or ()}
        if self.rule is not None:
            asked |= dict.fromkeys(self.rule.names, True)
        return sorted([*self.processed, *(name for name, value in asked.items() if value)])

    @property
    def fill_id(self) -> int | None:
        """The id that fills rows up: the pad id, else the first EOS, as in HF."""
        if self.pad_token_id is not None:
            return self.pad_token_id
        return self.eos_token_ids[0] if self.eos_token_ids else None

    def new_tokens(self, width: int, limit: int) -> int:
        """Most new tokens after a prompt block of `width` columns.

        `limit`, on all of them, caps what the caller did not ask for: the model's default, or HF's
        20. Raises ArgumentError where nothing could be generated.
        """
        count = self._count(width)
        return count if self.asked_length else max(1, min(count, limit - width))

    def _count(self, width: int) -> int:
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if self.max_length is None:
            return DEFAULT_NEW_TOKENS
        if self.max_length <= width:
            raise ArgumentError(
                f"The prompt has {width} tokens and max_length={self.max_length} counts it, so "
                "nothing could be generated. Raise max_length, or set max_new_tokens."
            )
        return self.max_length - width

    def check_sequences(self, prompts: int) -> None:
        """Raise ArgumentError for more sequences of `prompts` prompts than anyone can want."""
        many = self.num_return_sequences
        if many > 1 and many * prompts > _MOST_SEQUENCES:
            raise ArgumentError(
                f"num_return_sequences={many} of {prompts} prompts make {many * prompts} "
                f"sequences; one call makes at most {_MOST_SEQUENCES}. Use a smaller one."
            )

    def least_tokens(self, width: int) -> int:
        """New tokens before which no EOS is chosen; of the two minima, as of the two maxima."""
        if self.min_new_tokens is not None:
            return self.min_new_tokens
        return max(0, self.min_length - width)


def make_options(
    model_defaults: Mapping[str, Any], generation_config: Any, kwargs: Mapping[str, Any], vocab: int
) -> GenerationOptions:
    """Options from keyword arguments, then the call's `generation_config`, then the model's own.

    Raises UnsupportedError for beam search, and ArgumentError that names an argument which is
    unknown, not supported, or out of range.
    """
    ignored = set(model_defaults) - KNOWN  # HF keeps them and reads none
    own = {k: v for k, v in model_defaults.items() if v is not None and k not in ignored}
    config = {
        k: v
        for k, v in config_dict(generation_config).items()
        # A copy of the model's own config asks for no more than that does.
        if v is not None and k not in ignored and (k in DEFAULTS or not is_same(own.get(k), v))
    }
    refuse_unknown({k: v for k, v in kwargs.items() if v is not None or k not in ignored})
    asked = {**config, **{k: v for k, v in kwargs.items() if k not in ignored}}
    values = {**DEFAULTS, **own, **asked}
    check_beams(values, "num_beams=1")
    greedy = not _boolean(values, "do_sample")
    count = _integer(values, "num_return_sequences", 1, 1)
    idle = {*BEAMS, "low_memory"}
    returns = _returns(values, asked)
    if returns is None:
        idle.update(OUTPUTS)
    refuse_unserved({k: v for k, v in values.items() if k in asked or k not in idle})
    if greedy and count != 1:
        raise ArgumentError(
            f"num_return_sequences={count} with do_sample=False would return the same text several "
            "times. Set do_sample=True, or num_return_sequences=1."
        )
    for name in DRAWN:  # HF passes over others
        if not greedy and asks(name, values.get(name)):
            _number(values, name, 0.0, low=0.0, high=1.0)
    if asks("no_repeat_ngram_size", values.get("no_repeat_ngram_size")):
        _integer(values, "no_repeat_ngram_size", 1, None)
    processed = {
        name: values[name]
        for name in PROCESSED
        if asks(name, values.get(name)) and not (greedy and name in DRAWN)
    }
    _check_forced(processed)
    _check_processed(processed, vocab)
    return GenerationOptions(
        asked_length=any(asked.get(k) is not None for k in ("max_length", "max_new_tokens")),
        do_sample=not greedy,
        bos_token_id=_bos(values["bos_token_id"]),
        eos_token_ids=_eos(values["eos_token_id"], vocab),
        pad_token_id=_pad(values),
        **check_values(values, greedy),
        num_return_sequences=count,
        processed=processed,
        processors=_functions(values, "logits_processor"),
        criteria=_functions(values, "stopping_criteria"),
        max_time=(
            None if values.get("max_time") is None else _number(values, "max_time", 0.0, low=0.0)
        ),
        bias=_bias(values.get("logit_bias"), vocab),
        logprobs=_logprobs(values.get("logprobs"), returns),
        renormalize=_boolean({"renormalize_logits": None, **values}, "renormalize_logits"),
        returns=returns,
        decoder_start=values.get("decoder_start_token_id"),
        grammar=_grammar(values.get("grammar"), processed),
        lookup=_integer({_LOOKUP: None, **values}, _LOOKUP, 0, 0, _MOST_DRAFTS),
        lookup_ngram=_integer({_NGRAM: None, **values}, _NGRAM, 1, 2),
    )


def _grammar(given: Any, processed: Mapping[str, Any]) -> Any:
    """A caller's grammar; ArgumentError beside what would end its text before it is whole."""
    if given is not None and processed.get("forced_eos_token_id") is not None:
        raise ArgumentError(
            "forced_eos_token_id would end a text in the middle of its grammar. Pass "
            "forced_eos_token_id=None, and enough max_new_tokens."
        )
    return given


def _check_forced(processed: Mapping[str, Any]) -> None:
    """Raise ArgumentError for a forced id that is suppressed, so that no token would be left."""
    hidden = processed.get("suppress_tokens")
    plain = {i for i in hidden if type(i) is int} if isinstance(hidden, list | tuple) else set()
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        given = processed.get(name)
        ids = given if isinstance(given, list | tuple) else [given]
        if given is not None and ids and all(type(i) is int and i in plain for i in ids):
            raise ArgumentError(
                f"{name}={shown(given)} is among suppress_tokens, so that no token is left where "
                "it is forced. Take it out of one of them; min_new_tokens keeps off an early end."
            )


def _check_processed(processed: Mapping[str, Any], vocab: int) -> None:
    """Raise ArgumentError for what HF's processors fail at in a step, or give as it is."""
    allowed = processed.get("prefix_allowed_tokens_fn")
    if allowed is not None and not callable(allowed):
        raise ArgumentError(
            f"prefix_allowed_tokens_fn={shown(allowed)}; expected a function of a prompt's number "
            "and its ids."
        )
    bias = processed.get("sequence_bias")
    if isinstance(bias, list | tuple):
        bias = [pair[0] for pair in bias if isinstance(pair, list | tuple) and pair]
    names = "forced_bos_token_id", "forced_eos_token_id", "bad_words_ids"
    for name, given in (*((n, processed.get(n)) for n in names), ("sequence_bias", bias)):
        try:
            tokens = list(_tokens_in(given))
        except Exception as error:  # a tensor without memory, or one that is no plain array
            raise ArgumentError(f"{name}={shown(given)}; expected token ids.") from error
        for token in tokens:
            if not 0 <= token < vocab:
                raise ArgumentError(
                    f"{name} has the id {shown(token)}, outside the vocabulary of {vocab} (0 to "
                    f"{vocab - 1})."
                )


def _tokens_in(value: Any) -> Iterator[int]:
    """The ints in lists, tuples, arrays and the keys of a dict, of whatever depth."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for item in value:
            yield from _tokens_in(item)
    elif hasattr(value, "tolist"):
        yield from _tokens_in(value.tolist())


def _returns(values: Mapping[str, Any], asked: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The fields of HF's output beside the ids; None where it is not asked for, as in HF."""
    wanted = tuple(
        name
        for name in ("scores", "logits")
        if _boolean({f"output_{name}": None, **values}, f"output_{name}")
    )
    if _boolean({"return_dict_in_generate": None, **values}, "return_dict_in_generate"):
        return wanted
    for name in wanted:
        if asked.get(f"output_{name}"):
            warn_caller(
                f"output_{name} is given in HF's output alone, and is ignored: pass "
                "return_dict_in_generate=True as well."
            )
    return None


def _penalty(values: Mapping[str, Any], name: str) -> float:
    """A penalty that counts; HF has none, and OpenAI's are from -2 to 2."""
    return _number({name: None, **values}, name, 0.0, low=-_MOST_WEIGHT, high=_MOST_WEIGHT)


def _bias(value: Any, vocab: int) -> tuple[tuple[int, float], ...]:
    """The pairs of `logit_bias`: an id and a number, as OpenAI's API takes them."""
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise ArgumentError(
            f"logit_bias={shown(value)}; expected a dict of token ids and what is added to their "
            "logits, as {50256: -100.0}."
        )
    pairs = []
    for key, number in value.items():
        text = key.strip() if isinstance(key, str) else ""  # a key of JSON is a string
        token = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else key
        if type(token) is not int or not 0 <= token < vocab:
            raise ArgumentError(
                f"logit_bias has the id {shown(key)}; expected an int within the vocabulary of "
                f"{vocab} (0 to {vocab - 1})."
            )
        name = f"logit_bias of {token}"
        pairs.append((token, _number({name: number}, name, 0.0, -_MOST_WEIGHT, _MOST_WEIGHT)))
    if len({token for token, _ in pairs}) < len(pairs):
        raise ArgumentError(f"logit_bias={shown(value)} names an id twice. Name each once.")
    return tuple(pairs)


def _logprobs(value: Any, returns: tuple[str, ...] | None) -> int | None:
    """The number of likely tokens to tell of in a step; None for no log-probabilities at all."""
    if value is None:
        return None
    if returns is None:
        raise ArgumentError(
            f"logprobs={shown(value)}: log-probabilities are given in HF's output. Pass "
            "return_dict_in_generate=True as well."
        )
    return _integer({"logprobs": value}, "logprobs", 0, None, TOP)


def _functions(values: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    given = values.get(name)
    functions = given if isinstance(given, list | tuple) else [] if given is None else [given]
    if not isinstance(given, list | tuple | None) or not all(map(callable, functions)):
        raise ArgumentError(f"{name}={shown(given)}; expected a list of functions, as HF takes it.")
    return tuple(functions)


def check_values(values: Mapping[str, Any], greedy: bool) -> dict[str, Any]:
    """Lengths, what shapes sampling, and stop strings; ArgumentError for one out of range."""
    values = {**DEFAULTS, **values}
    return dict(
        max_new_tokens=_integer(values, "max_new_tokens", 1, None),
        max_length=_integer(values, "max_length", 1, None),
        min_new_tokens=_integer(values, "min_new_tokens", 0, None),
        min_length=_integer(values, "min_length", 0, 0),
        # HF ignores what shapes sampling when it does not sample, whatever its value.
        temperature=1.0 if greedy else _number(values, "temperature", 1.0, low=0.0, open_low=True),
        top_k=0 if greedy else _integer(values, "top_k", 0, 0),
        top_p=1.0 if greedy else _number(values, "top_p", 1.0, low=0.0, high=1.0),
        min_p=0.0 if greedy else _number(values, "min_p", 0.0, low=0.0, high=1.0),
        repetition_penalty=_number(values, "repetition_penalty", 1.0, low=0.0, open_low=True),
        presence_penalty=_penalty(values, "presence_penalty"),
        frequency_penalty=_penalty(values, "frequency_penalty"),
        stop_strings=_strings(values["stop_strings"]),
    )


def config_dict(generation_config: Any) -> dict[str, Any]:
    """HF's GenerationConfig, a dict or None as a new dict."""
    if generation_config is None:
        return {}
    if isinstance(generation_config, Mapping):
        return dict(generation_config)
    if hasattr(generation_config, "to_dict") and not isinstance(generation_config, type):
        return generation_config.to_dict()
    raise ArgumentError(
        f"generation_config is {a_type(generation_config)}; expected HF's "
        "GenerationConfig or a dict."
    )


def over_limit(prompt: int, new: int, name: str, limit: int, way: str = "") -> str:
    """A message on a prompt and new tokens over a limit; `new` is 0 where none were asked for."""
    if new == 0:
        return (
            f"A prompt of {count_of(prompt)} leaves no room for a new one within {name} ({limit}). "
            f"Shorten the prompt{', ' if way else ''}{way}."
        )
    return (
        f"A prompt of {count_of(prompt)} and {new} new ones make {prompt + new}, over {name} "
        f"({limit}). {shorter(way)}"
    )


def count_of(tokens: int) -> str:
    """A number of tokens, in words."""
    return f"{tokens} token{'' if tokens == 1 else 's'}"


def shorter(way: str) -> str:
    """A hint at what to ask for instead; `way` is one more thing to do, or empty."""
    if not way:
        return "Ask for fewer new tokens, or shorten the prompt."
    return f"Ask for fewer new tokens, shorten the prompt, {way}."


def _boolean(values: Mapping[str, Any], name: str) -> bool:
    value = values[name]
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ArgumentError(f"{name}={shown(value)}; expected True or False.")
    return value


def _integer(values: Mapping[str, Any], name: str, low: int, unset: Any, most: int = 2**127) -> Any:
    value = values[name]
    if value is None:
        return unset
    try:
        number = operator.index(value)
    except (TypeError, RuntimeError):  # the second from torch, for a tensor without values
        number = low - 1
    if isinstance(value, bool) or number < low:
        raise ArgumentError(f"{name}={shown(value)}; expected an int of at least {low}.")
    if number > most:
        raise ArgumentError(f"{name}={shown(value)}; expected an int of at most {most}.")
    return number


def _number(
    values: Mapping[str, Any],
    name: str,
    unset: float,
    low: float,
    high: float = float("inf"),
    open_low: bool = False,
) -> float:
    value = values[name]
    if value is None:
        return unset
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = float("nan")
    inside = low < number < high if open_low else low <= number <= high
    if not inside:
        bound = f"above {low}" if open_low else f"from {low} to {high}"
        raise ArgumentError(f"{name}={shown(value)}; expected a number {bound}.")
    return number


def _pad(values: Mapping[str, Any]) -> int | None:
    """The pad id; the first Llama checkpoints write -1 for none."""
    none = is_same(values["pad_token_id"], -1)
    return None if none else _integer(values, "pad_token_id", 0, None, _MOST)


def _bos(value: Any) -> int | None:
    """The BOS id, which only a missing prompt needs: one that is none is as good as absent."""
    return value if isinstance(value, int) and value >= 0 else None


def _eos(value: Any, vocab: int) -> tuple[int, ...]:
    if value is None:
        return ()
    try:
        plain = value.tolist() if hasattr(value, "tolist") else value
    except Exception:  # an array without values, or a device that failed
        plain = None
    ids: list[Any] = list(plain) if isinstance(plain, list | tuple) else [plain]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ArgumentError(f"eos_token_id={shown(value)}; expected an int or a list of ints.")
    # HF lets a config name an id that no token has; such an EOS never comes.
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < vocab))


def _strings(value: Any) -> tuple[str, ...]:
    strings = tuple(value or ()) if isinstance(value, list | tuple | None) else (value,)
    if not all(isinstance(s, str) and s for s in strings):
        raise ArgumentError(f"stop_strings={shown(value)}; expected non-empty strings.")
    return strings

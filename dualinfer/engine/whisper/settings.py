"""The settings of one call of Whisper's generate: its arguments, then the generation configs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...arrays import kind_of
from ...errors import ArgumentError, shown
from ..arguments import TRANSCRIBING
from ..checks import check_ids, read_array

# What a generation config may hold, for some arguments in their place.
FIELDS = (
    *("return_timestamps", "task", "language", "is_multilingual", "condition_on_prev_tokens"),
    *("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"),
    *("force_unique_generate_call", "forced_decoder_ids", "no_timestamps_token_id"),
    *("lang_to_id", "task_to_id", "prev_sot_token_id", "max_initial_timestamp_index"),
    *("alignment_heads", "_detect_timestamp_from_logprob"),
)
_CONDITIONS = ("first-segment", "all-segments")


@dataclass(frozen=True)
class Settings:
    """Options of one call, HF's names and meanings; `fields` are those of the merged configs.

    `asked_timestamps` is the caller's own return_timestamps, `timestamps` what follows from it, the
    config and the length of the sound. `first_stamp` is the id of 0 seconds, all further ones are
    timestamps. `conditions_at_first` is the caller's own condition_on_prev_tokens.
    """

    fields: Mapping[str, Any]
    start: int
    vocab: int
    first_stamp: int
    timestamps: bool
    asked_timestamps: bool
    token_timestamps: bool
    segments: bool
    unique: bool
    temperatures: tuple[float | None, ...]
    compression_ratio: float | None
    log_prob: float | None
    no_speech: float | None
    conditions: bool
    conditions_at_first: bool
    prompt: np.ndarray | None
    prompt_for: str
    time_precision: float
    time_precision_features: float
    heads: tuple[tuple[int, int], ...]
    monitor: Callable[[Any], Any] | None = field(default=None, compare=False)

    @property
    def no_timestamps(self) -> int | None:
        """The id of <|notimestamps|>, if the config names one."""
        return self.fields.get("no_timestamps_token_id")

    @property
    def judges(self) -> bool:
        """True if a window is read again, or passed over, by how it came out."""
        return not (self.compression_ratio is None and self.log_prob is None)


def merged(*configs: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Whisper's own in generation configs, of which later ones count first."""
    fields: dict[str, Any] = {}
    for config in configs:
        fields |= {n: config[n] for n in FIELDS if config.get(n) is not None}
    return fields


def make_settings(
    fields: Mapping[str, Any],
    given: Mapping[str, Any],
    *,
    start: Any,
    vocab: int,
    is_long: bool,
    heads: Sequence[int] = (),
) -> Settings:
    """Settings of the merged configs' `fields` and the arguments `given`.

    `heads` are the attention heads of each layer. Raises ArgumentError as HF raises ValueError, and
    for values that HF would fail at later.
    """
    fields = dict(fields)
    for name in ("is_multilingual", "language", "task"):
        _check_language(name, given.get(name), fields)
        if given.get(name) is not None:
            fields[name] = given[name]
    both = {name: _of(name, given, fields) for name in TRANSCRIBING}
    no_stamps = _id(fields, "no_timestamps_token_id", vocab)
    fields["no_timestamps_token_id"] = no_stamps
    for name in ("lang_to_id", "task_to_id"):
        _check_table(name, fields, vocab)
    _id(fields, "prev_sot_token_id", vocab)
    most = fields.get("max_initial_timestamp_index")
    if most is not None and (type(most) is not int or most < 0):
        raise ArgumentError(f"max_initial_timestamp_index={shown(most)}; expected an int from 0.")
    thresholds = [
        _number(name, both[name])
        for name in ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold")
    ]
    if thresholds[2] is not None and thresholds[1] is None:
        raise ArgumentError(
            "no_speech_threshold passes over a window whose text is unlikely as well, which "
            "logprob_threshold says. Pass that too; Whisper's own values are 0.6 and -1.0."
        )
    if thresholds[2] is not None and no_stamps is None:
        raise ArgumentError(
            "no_speech_threshold needs no_timestamps_token_id in the model's generation_config: "
            "the id before it stands for no speech. Set it, or leave the threshold out."
        )
    words = bool(given.get("return_token_timestamps"))
    conditions = bool(both["condition_on_prev_tokens"])
    if type(start) is not int:
        raise ArgumentError(
            "Neither the model's generation_config nor its config names a "
            "decoder_start_token_id. Pass decoder_start_token_id."
        )
    return Settings(
        fields=fields,
        start=start,
        vocab=vocab,
        first_stamp=vocab + 1 if no_stamps is None else no_stamps + 1,
        timestamps=_timestamps(both["return_timestamps"], no_stamps, is_long),
        asked_timestamps=bool(given.get("return_timestamps")),
        token_timestamps=words,
        segments=bool(given.get("return_segments")),
        unique=bool(both["force_unique_generate_call"]),
        temperatures=_temperatures(given.get("temperature")),
        compression_ratio=thresholds[0],
        log_prob=thresholds[1],
        no_speech=thresholds[2],
        conditions=conditions,
        conditions_at_first=bool(given.get("condition_on_prev_tokens")),
        prompt=_prompt(given.get("prompt_ids"), vocab),
        prompt_for=_condition(given.get("prompt_condition_type"), conditions),
        time_precision=_seconds(given, "time_precision", 0.02),
        time_precision_features=_seconds(given, "time_precision_features", 0.01),
        heads=_heads(fields.get("alignment_heads"), heads) if words else (),
        monitor=_function(given.get("monitor_progress")),
    )


def first_tokens(
    settings: Settings,
    config: Any,
    batch: int,
    detect: Callable[[], Sequence[int]],
) -> np.ndarray:
    """The decoder's first tokens for each sound, int [B, T]: start, language, task, and so on.

    `detect` hears the language of each, where neither the caller nor a config names one. `config`
    is the model's, whose old forced_decoder_ids count as the generation config's do.
    """
    fields, language = settings.fields, settings.fields.get("language")
    task, no_stamps = fields.get("task"), settings.no_timestamps
    begin: list[int | None] = [settings.start]
    if task is None and language is None:
        forced = fields.get("forced_decoder_ids")
        begin += _forced(getattr(config, "forced_decoder_ids", None) if forced is None else forced)
    found: Sequence[int] | None = None
    if isinstance(language, list | tuple):
        if len(language) != batch:
            raise ArgumentError(
                f"language has {len(language)} names for {batch} sounds. Pass one for each, or one "
                "str for all."
            )
        found = [_language_id(one, fields) for one in language]
    elif language is not None:
        found = [_language_id(language, fields)] * batch
    elif fields.get("lang_to_id") and (len(begin) <= 1 or begin[1] is None):
        found = detect()
    rows = []
    for i in range(batch):
        row = list(begin)
        if found is not None:
            row[1:2] = [found[i]]
        _add_task(row, task, language, fields)
        if not settings.timestamps and no_stamps is not None and row[-1] != no_stamps:
            row.append(no_stamps)
        elif settings.timestamps and row[-1] == no_stamps:
            row.pop()
        rows.append([token for token in row if token is not None])
    return check_ids(rows, "The ids of language and task", settings.vocab).astype(np.int64)


def _add_task(row: list[int | None], task: Any, language: Any, fields: Mapping[str, Any]) -> None:
    """Put the id of the task at a row's end, or of transcribing where a language alone is named."""
    ids = fields.get("task_to_id") or {}
    if task is not None:
        from transformers.models.whisper.tokenization_whisper import TASK_IDS

        if task not in TASK_IDS or task not in ids:
            raise ArgumentError(
                f"task={shown(task)}; expected one of {', '.join(n for n in TASK_IDS if n in ids)}."
            )
        row.append(ids[task])
        row[:] = [ids[task] if token in ids.values() else token for token in row]
    elif language is not None and ids and not any(token in ids.values() for token in row):
        if "transcribe" not in ids:
            raise ArgumentError(
                "task_to_id of the generation config has no 'transcribe', which is the task where "
                "a language alone is named. Pass task=..."
            )
        row.append(ids["transcribe"])


def _forced(forced: Any) -> list[int | None]:
    """The ids that old configs force behind the start, None where the language is to be heard."""
    given = () if forced is None else forced if isinstance(forced, list | tuple) else (forced,)
    pairs: list[Any] = [list(pair) if isinstance(pair, list | tuple) else [] for pair in given]
    known = all(len(pair) == 2 and type(pair[0]) is int for pair in pairs)
    if not known or not all(pair[1] is None or type(pair[1]) is int for pair in pairs):
        raise ArgumentError(
            f"forced_decoder_ids={shown(forced)}; expected pairs of a place and an id."
        )
    if not pairs or pairs[0][0] != 1:
        return []
    if [place for place, _ in pairs] != list(range(1, len(pairs) + 1)):
        raise ArgumentError(
            f"forced_decoder_ids={shown(forced)} leave a place out; expected an id for each from 1 "
            "on. Better pass language and task."
        )
    return [token for _, token in pairs]


def _language_id(language: Any, fields: Mapping[str, Any]) -> int:
    """The id of a language by its name, its code, or as the vocabulary writes it."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    ids = fields.get("lang_to_id") or {}
    if not isinstance(language, str):
        raise ArgumentError(
            f"language={shown(language)}; expected a str, such as 'en' or 'german', or one for "
            "each sound."
        )
    name = language.lower()
    if name not in ids:
        code = TO_LANGUAGE_CODE.get(name, name)
        if code not in TO_LANGUAGE_CODE.values():
            codes = sorted(set(TO_LANGUAGE_CODE.values()))
            names = codes if len(name) == 2 else sorted(TO_LANGUAGE_CODE)
            raise ArgumentError(
                f"language={shown(language)} is none that Whisper knows. It knows: "
                f"{', '.join(names)}."
            )
        name = f"<|{code}|>"
    if name not in ids:
        raise ArgumentError(
            f"language={shown(language)}: the model's generation_config has no {name} in "
            f"lang_to_id, but {', '.join(list(ids)[:12])}."
        )
    return ids[name]


def _check_language(name: str, value: Any, fields: Mapping[str, Any]) -> None:
    """Raise ArgumentError where the model's config does not say how to take this argument."""
    if value is None:
        return
    if name != "is_multilingual" and not fields.get("is_multilingual", True):
        raise ArgumentError(
            f"{name}={shown(value)}: this model is of English alone (is_multilingual is false in "
            "its generation_config). Leave it out, or pass is_multilingual=True."
        )
    needs = {"is_multilingual": "is_multilingual", "language": "lang_to_id", "task": "task_to_id"}
    if fields.get(needs[name]) is None:
        raise ArgumentError(
            f"{name}={shown(value)}: the model's generation_config has no {needs[name]}, so that "
            "it does not tell how. Take the generation_config.json of a newer checkpoint "
            "(openai/whisper-* have one), or pass decoder_input_ids."
        )


def _timestamps(asked: Any, no_stamps: int | None, is_long: bool) -> bool:
    if asked is not None and not isinstance(asked, bool):
        raise ArgumentError(
            f"return_timestamps={shown(asked)}; generate takes True or False. Words are HF's "
            "pipeline's: here return_token_timestamps=True gives the time of each token."
        )
    if is_long and asked is False:
        raise ArgumentError(
            "input_features are longer than one window, and windows follow from the timestamps of "
            "the one before, but return_timestamps is False. Pass return_timestamps=True, or a "
            "sound of one window."
        )
    if (asked or is_long) and no_stamps is None:
        raise ArgumentError(
            "return_timestamps needs no_timestamps_token_id in the model's generation_config, "
            "which says where timestamps begin. Take the generation_config.json of a newer "
            "checkpoint (openai/whisper-* have one), or set it."
        )
    return bool(asked) or is_long


def _of(name: str, given: Mapping[str, Any], fields: Mapping[str, Any]) -> Any:
    value = given.get(name)
    return fields.get(name) if value is None else value


def _id(fields: Mapping[str, Any], name: str, vocab: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < vocab:
        raise ArgumentError(
            f"{name}={shown(value)}; expected an id of the vocabulary (0 to {vocab - 1})."
        )
    return value


def _check_table(name: str, fields: Mapping[str, Any], vocab: int) -> None:
    table = fields.get(name)
    if table is None:
        return
    known = isinstance(table, Mapping) and all(isinstance(key, str) for key in table)
    if not known or not all(type(i) is int and 0 <= i < vocab for i in table.values()):
        raise ArgumentError(
            f"{name}={shown(table)}; expected a dict of names to ids (0 to {vocab - 1})."
        )


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = float("nan")
    if isinstance(value, bool) or number != number:
        raise ArgumentError(f"{name}={shown(value)}; expected a number.")
    return number


def _seconds(given: Mapping[str, Any], name: str, usual: float) -> float:
    value = _number(name, given.get(name))
    if value is not None and not 0 < value < float("inf"):
        raise ArgumentError(f"{name}={shown(given[name])}; expected seconds, a number above 0.")
    return usual if value is None else value


def _temperatures(value: Any) -> tuple[float | None, ...]:
    """The temperatures to try, one after the other; None, as 0, is for the best token alone."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    if not values:
        raise ArgumentError("temperature is empty; expected a number, or several to fall back on.")
    found = [_number("temperature", one) for one in values]
    if any(one is not None and not 0 <= one < float("inf") for one in found):
        raise ArgumentError(
            f"temperature={shown(value)}; expected a number from 0, or several to fall back on."
        )
    return tuple(found)


def _prompt(ids: Any, vocab: int) -> np.ndarray | None:
    if ids is None:
        return None
    array = check_ids(ids, "prompt_ids", vocab)
    if len(array) != 1 or np.ndim(read_array(ids, "prompt_ids", "")) != 1:
        raise ArgumentError(
            f"prompt_ids has shape {array.shape}; expected one row of ids, as "
            "processor.get_prompt_ids gives it, for all sounds."
        )
    return array[0].astype(np.int64)


def _condition(value: Any, conditions: bool) -> str:
    value = value or _CONDITIONS[0]
    if value not in _CONDITIONS:
        raise ArgumentError(
            f"prompt_condition_type={shown(value)}; expected {' or '.join(_CONDITIONS)}."
        )
    if value == _CONDITIONS[1] and not conditions:
        raise ArgumentError(
            "prompt_condition_type='all-segments' needs condition_on_prev_tokens=True."
        )
    return value


def _heads(value: Any, counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The heads by which tokens are found in the sound: pairs of a layer and a head."""
    if value is None:
        raise ArgumentError(
            "return_token_timestamps needs alignment_heads in the model's generation_config, "
            "which say which heads to read. Take the generation_config.json of a newer checkpoint "
            "(openai/whisper-* have one), or set them."
        )
    given = value.tolist() if kind_of(value) not in (None, "list") else value
    pairs = [tuple(pair) for pair in given] if isinstance(given, list | tuple) else []
    known = all(len(pair) == 2 and all(type(n) is int for n in pair) for pair in pairs)
    if (
        not pairs
        or not known
        or not all(0 <= layer < len(counts) and 0 <= head < counts[layer] for layer, head in pairs)
    ):
        raise ArgumentError(
            f"alignment_heads={shown(value)}; expected pairs of a layer (0 to {len(counts) - 1}) "
            "and one of its heads."
        )
    return tuple(pairs)


def _function(value: Any) -> Callable[[Any], Any] | None:
    if value is not None and not callable(value):
        raise ArgumentError(
            f"monitor_progress={shown(value)}; expected a function of an array [sounds, 2]."
        )
    return value

"""The names of generate's arguments, HF's: which are served, which pass, and why others do not."""

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, get_type_hints

from ..errors import ArgumentError, UnsupportedError, shown
from .inputs import REASONS

F = TypeVar("F", bound=Callable[..., Any])


class TextArguments(TypedDict, total=False):
    """The arguments of generation that leave the kind of its result as it is."""

    max_new_tokens: int | None
    max_length: int | None
    min_new_tokens: int | None
    min_length: int | None
    do_sample: bool | None
    temperature: float | Sequence[float] | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    grammar: Mapping[str, Any] | None
    stop_strings: str | Sequence[str] | None
    seed: int | Sequence[int] | None
    bos_token_id: int | None
    eos_token_id: int | Sequence[int] | None
    pad_token_id: int | None
    inputs: Any
    inputs_embeds: Any
    num_beams: int | None
    logits_processor: Sequence[Callable[..., Any]] | None
    stopping_criteria: Sequence[Callable[..., Any]] | None
    prefix_allowed_tokens_fn: Callable[..., Any] | None
    no_repeat_ngram_size: int | None
    bad_words_ids: Sequence[Sequence[int]] | None
    suppress_tokens: Sequence[int] | None
    begin_suppress_tokens: Sequence[int] | None
    sequence_bias: Any
    forced_bos_token_id: int | None
    forced_eos_token_id: int | Sequence[int] | None
    exponential_decay_length_penalty: Any
    remove_invalid_values: bool | None
    renormalize_logits: bool | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    top_h: float | None
    max_time: float | None
    prompt_lookup_num_tokens: int | None
    max_matching_ngram_size: int | None
    output_scores: bool | None
    output_logits: bool | None
    token_type_ids: Any
    use_cache: bool | None
    decoder_input_ids: Any
    decoder_attention_mask: Any
    decoder_start_token_id: int | Sequence[int] | None
    input_features: Any
    input_values: Any
    pixel_values: Any
    encoder_outputs: Any
    language: str | Sequence[str] | None
    task: str | None
    is_multilingual: bool | None
    return_timestamps: bool | None
    return_token_timestamps: bool | None
    return_segments: bool | None
    prompt_ids: Any
    prompt_condition_type: str | None
    condition_on_prev_tokens: bool | None
    compression_ratio_threshold: float | None
    logprob_threshold: float | None
    no_speech_threshold: float | None
    forced_decoder_ids: Sequence[Sequence[int | None]] | None
    force_unique_generate_call: bool | None
    monitor_progress: Callable[[Any], None] | None
    num_segment_frames: int | None
    time_precision: float | None
    time_precision_features: float | None


class ArrayArguments(TextArguments, total=False):
    """The arguments of text, and how many sequences each prompt gets."""

    num_return_sequences: int | None


class GenerationArguments(ArrayArguments, total=False):
    """The keyword arguments of generate and stream, of which HF's keep their names and meanings.

    HF's other names pass where they ask for nothing. `stop_strings` needs a tokenizer. `seed` is
    an int below 2**64, or one for each prompt. Those from `language` on are Whisper's, of which
    `temperature` may also be several, to fall back on. `presence_penalty`, `frequency_penalty`,
    `logit_bias` (what the logit of an id gets more) and `logprobs` (log-probabilities of each new
    token, and of up to 20 likeliest ones, in HF's output) are those of OpenAI's API. `grammar` says
    what the new text must be: {"json": schema}, {"regex": ...}, {"choice": [...]} or {"lark": ...}.
    """

    return_dict_in_generate: bool | None


def with_names(of: type) -> Callable[[F], F]:
    """A decorator: the names of a TypedDict in the signature that Python shows.

    A type checker reads them from the annotation; help() and notebooks read the signature.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        *named, rest = signature.parameters.values()
        names = {parameter.name for parameter in named}
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in get_type_hints(of).items()
            if name not in names
        ]
        rest = rest.replace(annotation=Any)  # HF's other names
        shown: Any = function
        shown.__signature__ = signature.replace(parameters=[*named, *added, rest])
        return function

    return decorate


with_arguments = with_names(GenerationArguments)

# HF's own defaults for what neither the caller nor the model sets.
DEFAULTS: dict[str, Any] = {
    "max_length": None,
    "max_new_tokens": None,
    "min_length": 0,
    "min_new_tokens": None,
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "stop_strings": None,
    "num_return_sequences": 1,
}
# What the host does to the logits of each step, by HF's own classes; of these, what shapes
# sampling alone.
DRAWN = ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
PROCESSED = (
    *DRAWN,
    *("bad_words_ids", "begin_suppress_tokens", "exponential_decay_length_penalty"),
    *("forced_bos_token_id", "forced_eos_token_id", "no_repeat_ngram_size"),
    *("prefix_allowed_tokens_fn", "remove_invalid_values", "sequence_bias", "suppress_tokens"),
)
_CALLED = ("logits_processor", "stopping_criteria")
_RETURNED = ("return_dict_in_generate", "output_scores", "output_logits")
WEIGHED = ("presence_penalty", "frequency_penalty", "logit_bias")
_SERVED = {*DEFAULTS, *PROCESSED, *_CALLED, *_RETURNED, "max_time", "renormalize_logits"}
_SERVED |= {*WEIGHED, "logprobs", "grammar", "prompt_lookup_num_tokens", "max_matching_ngram_size"}
_BESIDE = ("inputs_embeds", "seed", "streamer", "tokenizer")  # of generate itself, or ours
_ENCODED = ("decoder_attention_mask", "decoder_input_ids", "decoder_start_token_id")
_ENCODED += ("encoder_outputs", "input_features", "input_values", "pixel_values")
# Of the generate that HF's Whisper has for itself.
TRANSCRIBING = (
    *("return_timestamps", "task", "language", "is_multilingual", "prompt_ids"),
    *("prompt_condition_type", "condition_on_prev_tokens", "compression_ratio_threshold"),
    *("logprob_threshold", "no_speech_threshold", "num_segment_frames", "time_precision"),
    *("time_precision_features", "return_token_timestamps", "return_segments"),
    *("force_unique_generate_call", "monitor_progress"),
)
_MODULE_MODE = (
    "Module mode serves what HF's generate does: pass the live HF model, with backend='torch' and "
    "without replace_with_kernel_inject."
)

# Arguments that cannot change the tokens, or only together with one that is refused.
INERT = frozenset(
    """_commit_hash _from_model_config _name_or_path architectures assistant_confidence_threshold
    assistant_lookbehind cache_config cache_implementation compile_config
    decoder_start_token_id disable_compile early_stopping labels length_penalty max_cache_len
    num_assistant_tokens num_assistant_tokens_schedule prefill_chunk_size return_legacy_cache
    synced_gpus target_lookbehind transformers_version use_cache""".split()
)
# Arguments of HF's that are known and not supported: they pass as None, False or empty.
_OFF = frozenset(
    """assistant_early_exit assistant_ensemble_weight assistant_model assistant_tokenizer
    constraints continuous_batching_config custom_generate dola_layers feature_attention_mask
    force_words_ids image_grid_thw image_sizes is_assistant low_memory
    mm_token_type_ids negative_prompt_attention_mask negative_prompt_ids output_attentions
    output_hidden_states past_key_values pixel_values pixel_values_videos position_ids
    speculation_type token_healing token_type_ids use_mtp video_grid_thw
    watermarking_config""".split()
)
# Values, beside None, False and empty ones, at which an unsupported argument does nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "diversity_penalty": (0.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "guidance_scale": (1.0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "penalty_alpha": (0.0,),
    "typical_p": (1.0,),
}
KNOWN = {*_SERVED, *INERT, *_OFF, *NEUTRAL}
# What HF passes over in a model's own generation config: without beams, and where generate()
# returns ids alone.
BEAMS = ("diversity_penalty", "num_beam_groups")
OUTPUTS = ("output_attentions", "output_hidden_states")
# Why fused mode does not serve some arguments, and what to do.
_REASONS = {
    "output_hidden_states": "Call engine(ids, output_hidden_states=True) for those of a text.",
    "assistant_model": (
        "Leave it out, the tokens are the same; prompt_lookup_num_tokens needs no second model."
    ),
    "encoder_repetition_penalty": "It is about an encoder's input; use repetition_penalty.",
    "encoder_no_repeat_ngram_size": "It is about an encoder's input; use no_repeat_ngram_size.",
    "guidance_scale": (
        "It runs the model twice a step. A logits_processor of yours can call engine() itself."
    ),
    "position_ids": "Positions follow from attention_mask; leave them out.",
}


# What other engines and servers call an argument.
_ELSEWHERE = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "n_predict"), "max_new_tokens"),
    **dict.fromkeys(("stop", "stop_sequences"), "stop_strings"),
    **{"stop_token_ids": "eos_token_id", "min_tokens": "min_new_tokens"},
    **{"n": "num_return_sequences", "repeat_penalty": "repetition_penalty"},
    **dict.fromkeys(("response_format", "guided_json", "structured_outputs"), "grammar"),
    **dict.fromkeys(("random_seed", "generator"), "seed"),
}


def refuse_unknown(kwargs: Mapping[str, Any]) -> None:
    """Refuse a keyword that HF does not know either, whatever its value: it is a slip."""
    known = {*KNOWN, *_BESIDE, *TRANSCRIBING}
    for name, value in kwargs.items():
        if name in TRANSCRIBING and asks(name, value):
            raise ArgumentError(
                f"generate() does not support {name}={shown(value)} of this model: it is for those "
                "that transcribe sounds window by window (Whisper). Leave it out."
            )
        if name not in known:
            others = [_ELSEWHERE[name]] if name in _ELSEWHERE else []
            near = others or difflib.get_close_matches(name, known, 1, 0.6)
            supported = ", ".join(sorted({*_SERVED, *_BESIDE, *_ENCODED}))
            way = f"Did you mean {near[0]}?" if near else f"Supported: {supported}."
            raise ArgumentError(
                f"{name[:80]} is no argument of generate(), or of what makes text by it. {way}"
            )


def refuse_foreign(kwargs: Mapping[str, Any], own: Collection[str]) -> None:
    """Refuse other engines' words for an argument of HF's, unless a module's `own` has them."""
    for name in kwargs.keys() & _ELSEWHERE.keys() - {*own, *KNOWN}:
        raise ArgumentError(
            f"{name} is no argument of this module's generate(). Did you mean {_ELSEWHERE[name]}?"
        )


def check_beams(values: Mapping[str, Any], way: str) -> None:
    """Raise UnsupportedError if generation arguments ask for beams; `way` says how to go on."""
    beams = values.get("num_beams")
    if beams is not None and not (isinstance(beams, int | float) and beams == 1):
        raise UnsupportedError(
            f"num_beams={shown(beams)}: beam search is not supported. Use {way}. If the model's "
            "own generation_config asks for beams, pass num_beams=1 to generate; in a HF pipeline, "
            'generate_kwargs={"num_beams": 1}.'
        )


def refuse_outputs(name: str, arguments: Mapping[str, Any], tells: bool = False) -> None:
    """Raise ArgumentError where a call that gives no HF output is asked for one.

    One that `tells` has a way of its own for `logprobs`.
    """
    asked = [n for n in _RETURNED if is_on(arguments.get(n))]
    if asked := asked + ["logprobs"] * (not tells and arguments.get("logprobs") is not None):
        raise ArgumentError(f"{name} returns no HF output: {asked[0]} is generate()'s.")


def is_on(value: Any) -> bool:
    """True if a switch that a caller set is on; what has no truth value, as an array, is."""
    try:
        return bool(value)
    except Exception:
        return True


def is_same(a: Any, b: Any) -> bool:
    """True if two values are equal and of one type, whatever they are."""
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:  # arrays and the like: they are not known as equal
        return False


def refuse_unserved(values: Mapping[str, Any]) -> None:
    """Raise ArgumentError for an argument of HF's that asks for what fused mode does not do."""
    if is_same(values.get("cache_implementation"), "quantized"):
        raise ArgumentError(
            "cache_implementation='quantized' changes results and is not supported."
        )
    for name, value in values.items():
        if name in _SERVED or name in INERT or not asks(name, value):
            continue
        why = f". {_REASONS.get(name, _MODULE_MODE)}"
        if name in REASONS:  # which go on with a sentence
            why = f": {REASONS[name]}"
        raise ArgumentError(f"generate() does not support {name}={shown(value)}{why}")


def asks(name: str, value: Any) -> bool:
    """True unless a value of an option that is off by default asks for nothing."""
    if value is None or value is False:
        return False
    empty = isinstance(value, list | tuple | dict) and not value
    return not empty and not (isinstance(value, int | float) and value in NEUTRAL.get(name, ()))

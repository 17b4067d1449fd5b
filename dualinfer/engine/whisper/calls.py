"""The calls of a fused Whisper: generate by windows, and the language of a sound."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...arrays import kind_of, to_kind, to_numpy
from ...backends.base import ForwardInputs, Request
from ...errors import ArgumentError, UnsupportedError, shown
from ...model.outputs import make_generate_outputs
from ...model.spec import ModelSpec
from ..arguments import TRANSCRIBING
from ..base import InferenceEngine
from ..checks import check_ids, check_mask
from ..inputs import Wanted
from ..options import GenerationOptions, config_dict, make_options
from ..pairs import make_pair_inputs, refuse_names
from ..prompts import Prompts
from ..requests import make_requests, make_seeds
from ..source import check_features, encoder_states, make_encoded
from .alignment import token_times
from .rules import TokenRule
from .segments import STRIDE, Segment, joined, padded
from .settings import FIELDS, Settings, first_tokens, make_settings, merged
from .windows import Begin, Read, Result, Sounds, Transcript, Windows

_GIVEN = ("input_ids", "inputs", "attention_mask", "input_features", "encoder_outputs")
_GIVEN += ("decoder_input_ids", "decoder_attention_mask", "inputs_embeds", "pixel_values")
_GIVEN += ("input_values", "prompt_ids")
_DEFAULT_LENGTH = 20  # HF's, beside what stands in front
_PRECISION = 0.02  # seconds of a place, by which tokens are found in a sound


@dataclass
class _Call:
    """A call of generate as it was given, checked; `rest` is what any generate takes."""

    settings: Settings
    options: GenerationOptions
    sounds: Sounds
    source: Prompts
    begin: Begin | None
    sequences: int
    config: dict[str, Any]
    rest: dict[str, Any]
    tokenizer: Any
    whole: bool = False
    streamer: Any = None
    seeds: Sequence[int] = ()


class SpeechCalls(InferenceEngine):
    """Whisper's own calls, by HF's names."""

    _spec: ModelSpec

    @property
    def max_tokens(self) -> int:
        """As in FusedEngine."""
        raise NotImplementedError

    def _check_model(self, alone: bool) -> None:
        raise NotImplementedError

    def _prepare(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _generated(self, work: Any, streamer: Any) -> tuple[np.ndarray, Any]:
        raise NotImplementedError

    def _scores_after(self, requests: Sequence[Request]) -> Any:
        raise NotImplementedError

    def _watched(self, inputs: ForwardInputs) -> np.ndarray:
        raise NotImplementedError

    def _result(self, ids: np.ndarray, prompts: Prompts) -> Any:
        raise NotImplementedError

    def detect_language(
        self,
        input_features: Any = None,
        encoder_outputs: Any = None,
        generation_config: Any = None,
        num_segment_frames: Any = None,
    ) -> Any:
        """The id of the language that each sound's first window is in, ints [B], as HF's.

        Raises UnsupportedError for a model that does not transcribe, and ArgumentError where its
        generation_config has no lang_to_id.
        """
        if not self._spec.transcribes:
            raise UnsupportedError(
                f"detect_language(): {self._spec.architecture} does not transcribe sounds. It is "
                "Whisper's."
            )
        if kind_of(input_features) not in (None, "list"):
            assert self._spec.encoder is not None
            input_features = input_features[..., : self._spec.encoder.frames]
        given = {"input_features": input_features, "encoder_outputs": encoder_outputs}
        call = self._heard(None, generation_config, None, None, given)
        ids = self._languages(call)
        return self._result(np.array(ids, np.int64), call.source)

    def _transcribe(
        self,
        ids: Any,
        config: Any,
        mask: Any,
        streamer: Any,
        tokenizer: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        """The outputs of HF's Whisper for generate."""
        call = self._heard(ids, config, mask, tokenizer, kwargs)
        call.streamer, call.whole = streamer, streamer is None
        return self._output(call, self._windows(call).run())

    def _first_window(
        self, ids: Any, config: Any, mask: Any, tokenizer: Any, kwargs: dict[str, Any]
    ) -> Any:
        """The work of the only window of a call, for `stream`."""
        call = self._heard(ids, config, mask, tokenizer, kwargs)
        settings = call.settings
        several = {
            "return_timestamps": settings.timestamps,
            "temperature (a list)": len(settings.temperatures) > 1,
            "compression_ratio_threshold": settings.compression_ratio is not None,
            "logprob_threshold": settings.log_prob is not None,
            "return_segments": settings.segments,
            "return_token_timestamps": settings.token_timestamps,
        }
        if asked := [name for name, there in several.items() if there]:
            raise UnsupportedError(
                f"stream() gives the tokens of one window as they are made, and {asked[0]} (or a "
                "sound of more than one window) reads several, or one again. Call "
                "generate(streamer=...), which gets the tokens of each window, or generate()."
            )
        return _Reader(self, call).work(*self._windows(call).first())

    def _heard(
        self,
        ids: Any,
        config: Any,
        mask: Any,
        tokenizer: Any,
        kwargs: dict[str, Any],
    ) -> _Call:
        """A call's arguments, checked in every process before anything runs."""
        kwargs = dict(kwargs)
        if isinstance(ids, Mapping) and "input_features" in ids:  # as HF's processor gives them
            ids, kwargs = None, {**ids, **kwargs}
        seed = kwargs.pop("seed", None)
        inputs = {name: kwargs.pop(name, None) for name in _GIVEN}
        inputs["input_ids"] = ids if inputs["input_ids"] is None else inputs["input_ids"]
        inputs["attention_mask"] = mask if mask is not None else inputs["attention_mask"]
        inputs["encoder_outputs"] = encoder_states(inputs["encoder_outputs"])
        with self._call("generate()", inputs) as turn:
            self._check_model(alone=False)
            call = self._checked(turn.inputs, config, kwargs, seed)
            call.tokenizer = tokenizer
            draws = seed is None and any(call.settings.temperatures)
            count = len(call.source.rows)
            answers = turn.meet(
                lambda: (call.settings, call.sounds.frames, call.sounds.states),
                seeds=self.runner.draw_seeds(count) if draws else [],
            )
        call.seeds = answers["seeds"][0] if draws else make_seeds(seed, count)
        return call

    def _checked(
        self, given: Mapping[str, Any], config: Any, kwargs: dict[str, Any], seed: Any
    ) -> _Call:
        """The languages that `_heard` derives in one process."""
        spec = self._spec
        if not spec.can_generate:
            raise UnsupportedError(
                f"{spec.architecture} cannot generate: it is no causal model with a vocabulary "
                "head."
            )
        refuse_names(spec, given)
        for name in ("inputs_embeds", "pixel_values"):
            if given[name] is not None:
                raise ArgumentError(f"{name}: {spec.architecture} reads input_features alone.")
        own, config = config_dict(self._generation_config), config_dict(config)
        names = {*TRANSCRIBING, *FIELDS, "temperature"}
        asked = {name: kwargs.pop(name) for name in names if name in kwargs}
        asked["prompt_ids"] = given["prompt_ids"]
        if (
            asked.get("return_token_timestamps")
            and self.inference_config.tensor_parallel.tp_size > 1
        ):
            raise UnsupportedError(
                "return_token_timestamps reads attention, of which each of several devices has "
                "some heads. Leave tensor_parallel out; return_timestamps=True works over devices."
            )
        fields = merged(own, config, {n: v for n, v in asked.items() if n not in TRANSCRIBING})
        count = _sequences(kwargs, config, own)
        config = {n: v for n, v in config.items() if n not in FIELDS}
        # Whether tokens are drawn is said by temperature alone, as in HF.
        kwargs |= {"do_sample": False, "temperature": None, "num_return_sequences": 1}
        options = make_options(own, config, kwargs, spec.vocab)
        if options.logprobs is not None:
            raise ArgumentError(
                "generate() does not support logprobs of a model that transcribes sounds window by "
                "window. Pass output_scores=True, or return_timestamps with logprob_threshold."
            )
        if options.grammar is not None:
            raise ArgumentError(
                "generate() does not support a grammar of a model that transcribes sounds window "
                "by window. Leave it out."
            )
        source, sounds = self._sounds(given, count)
        start = options.decoder_start
        settings = make_settings(
            fields,
            asked,
            start=spec.start if start is None else start,
            vocab=spec.vocab,
            is_long=sounds.frames is not None and sounds.frames.shape[1] > sounds.size,
            heads=[0 if layer.cross is None else layer.cross.heads for layer in spec.layers],
        )
        if count > 1 and not settings.temperatures[0]:
            raise ArgumentError(
                f"num_return_sequences={count} without a temperature above 0 would return the same "
                "text several times. Set temperature, or num_return_sequences=1."
            )
        if (monitor := settings.monitor) is not None:
            settings = replace(settings, monitor=lambda seek: monitor(self._result(seek, source)))
        begin = _given_begin(given, spec, len(source.rows), count)
        make_seeds(seed, len(source.rows))
        return _Call(settings, options, sounds, source, begin, count, config, kwargs, None)

    def _sounds(self, given: Mapping[str, Any], sequences: int) -> tuple[Prompts, Sounds]:
        """The sounds of a call, `sequences` times each, and to where results go back."""
        spec, mask = self._spec, given["attention_mask"]
        assert spec.encoder is not None
        size, states, frames = spec.encoder.frames, None, None
        first = given["input_ids"] if given["inputs"] is None else given["inputs"]
        if given["encoder_outputs"] is not None:
            source = make_encoded(spec, given["encoder_outputs"], {**given, "attention_mask": None})
            states = np.stack(source.rows)
            total = STRIDE * states.shape[1]
        else:
            if given["inputs"] is not None and given["input_ids"] is not None:
                raise ArgumentError("Both inputs and input_ids were given; they are the same.")
            frames = check_features(spec, given["input_features"], first, any_length=True)
            array = first if given["input_features"] is None else given["input_features"]
            kind = kind_of(array) or "list"
            block = np.empty((len(frames), 0), np.int64)
            source = Prompts(tuple(frames), block, kind, array if kind == "torch" else None)
            total = frames.shape[1]
        count = len(source.rows)
        ends, heard = np.full(count, total, np.int64), None
        if total > size and count > 1 and mask is None:
            raise ArgumentError(
                "attention_mask is missing: of several sounds longer than one window it says where "
                "each ends. HF's processor gives it for return_attention_mask=True."
            )
        if mask is not None:
            shape = (count, np.shape(mask)[-1]) if total <= size else (count, total)
            real = check_mask(mask, shape)
            assert real is not None
            heard = real.sum(1).astype(np.int64)
            if total > size and count > 1:
                ends = heard
        return source, Sounds(frames, states, ends, heard, size).times(sequences)

    def _windows(self, call: _Call) -> Windows:
        """The way through the sounds of a call."""
        spec, options, count = self._spec, call.options, call.sequences
        begins = first_tokens(
            call.settings, self._config, len(call.source.rows), lambda: self._languages(call)
        )
        previous, hidden = call.settings.fields.get("prev_sot_token_id"), ()
        if previous is None and "suppress_tokens" in options.processed:
            hidden = options.hidden("suppress_tokens", spec.vocab)
            previous = hidden[-2] if len(hidden) > 1 else None
        most = _DEFAULT_LENGTH if options.max_length is None else options.max_length
        return Windows(
            settings=call.settings,
            reader=_Reader(self, call),
            sounds=call.sounds,
            begins=np.repeat(begins, count, 0),
            given=call.begin,
            seeds=call.seeds,
            per_sound=count,
            most_new=options.max_new_tokens,
            most=most,
            limit=None if options.asked_length else self.max_tokens,
            positions=spec.positions.rows,
            previous=previous,
            fill=0 if options.fill_id is None else options.fill_id,
            ends=options.eos_token_ids,
        )

    def _languages(self, call: _Call) -> list[int]:
        """The id of each sound's language, by what follows the start of its transcript."""
        known = call.settings.fields.get("lang_to_id")
        if not known:
            raise ArgumentError(
                "The model's generation_config has no lang_to_id, so that it does not tell which "
                "ids are languages."
            )
        rows = range(0, len(call.source.rows) * call.sequences, call.sequences)
        windows = call.sounds.window(rows, np.zeros(rows.stop, np.int64))
        prompts = [np.array([call.settings.start], np.int64)] * len(rows)
        new = call.options.max_new_tokens or call.options.max_length or _DEFAULT_LENGTH
        scores, ids = _Reader(self, call).scores(windows, prompts, new), sorted({*known.values()})
        return [ids[best] for best in scores[:, ids].argmax(1)]

    def _output(self, call: _Call, done: Transcript) -> Any:
        """The outputs of HF's Whisper for a transcript, in the caller's framework."""
        settings, options = call.settings, call.options
        is_once = settings.unique or not settings.asked_timestamps
        if options.returns is not None and is_once:
            return self._single(call, done.last)
        if settings.unique:
            last = [own[0].result for own in done.segments]
            sequences = np.stack([one.read.ids[one.row] for one in last])
            times: list[Any] = [one.times for one in last]
        else:
            rows = [joined(own, settings) for own in done.segments]
            sequences = padded(rows, call.options.fill_id or 0, np.int64)
            times = [_joined_times(own) for own in done.segments] if settings.heads else []
        shows = settings.segments or options.returns is not None
        ids = self._result(sequences, call.source)
        if not shows and not settings.token_timestamps:
            return ids
        outputs: dict[str, Any] = {"sequences": ids}
        if settings.token_timestamps:
            ends = [float(own[-1]) if len(own) else 0.0 for own in times]
            outputs["token_timestamps"] = self._floats(padded(times, ends, np.float32), call.source)
        if shows:
            outputs["segments"] = [
                [self._shown(segment, call) for segment in own] for own in done.segments
            ]
        return outputs

    def _single(self, call: _Call, last: list[Result]) -> Any:
        """HF's output of the only pass, or of the last one."""
        rows = [one.read.ids[one.row] for one in last]
        ids = padded(rows, call.options.fill_id or 0, np.int64)
        fields: dict[str, Any] = {"sequences": self._result(ids, call.source)}
        for name in ("scores", "logits"):
            steps = [getattr(one.read, name) for one in last]
            if all(own is not None for own in steps):
                count = min(map(len, steps))
                fields[name] = tuple(
                    self._floats(
                        np.stack([to_numpy(s[i][o.row]) for s, o in zip(steps, last, strict=True)]),
                        call.source,
                    )
                    for i in range(count)
                )
        if call.settings.token_timestamps:
            times = np.stack([one.times for one in last if one.times is not None])
            return {**fields, "token_timestamps": self._floats(times, call.source)}
        return make_generate_outputs(fields)

    def _shown(self, segment: Segment, call: _Call) -> dict[str, Any]:
        """A segment as HF's dict."""
        result: Result = segment.result
        whole = self._result(result.read.ids[result.row], call.source)
        shown = {
            "start": self._seconds(segment.start, call.source),
            "end": self._seconds(segment.end, call.source),
            "tokens": self._result(segment.tokens, call.source),
            "idxs": segment.places,
        }
        is_output = call.options.returns is not None or call.settings.log_prob is not None
        if is_output or result.times is not None:
            whole = {"sequences": whole}
            for name in ("scores", "logits"):
                steps = getattr(result.read, name)
                if steps is not None:
                    whole[name] = [
                        self._floats(to_numpy(step[result.row]), call.source) for step in steps
                    ]
        if result.times is not None:
            whole["token_timestamps"] = self._floats(result.times, call.source)
            first, last = segment.places
            times = result.times[first:last] + np.float32(segment.offset)
            shown["token_timestamps"] = self._floats(times, call.source)
        return {**shown, "result": whole}

    def _floats(self, values: np.ndarray, source: Prompts) -> Any:
        kind = self.inference_config.backend if source.kind == "list" else source.kind
        return to_kind(np.ascontiguousarray(values), kind)

    def _seconds(self, value: float, source: Prompts) -> Any:
        """A float64, as a tensor without axes where the caller's framework is torch, as in HF."""
        return to_kind(np.array(value, np.float64), "torch") if source.kind == "torch" else value


class _Reader:
    """A `windows.Reader` that has an engine read."""

    def __init__(self, engine: SpeechCalls, call: _Call) -> None:
        self._engine, self._call, settings = engine, call, call.settings
        self._rule = None
        if settings.timestamps or settings.log_prob is not None:
            hidden = [self._hidden(name) for name in ("suppress_tokens", "begin_suppress_tokens")]
            options = call.options
            end = options.eos_token_ids[0] if options.eos_token_ids else options.bos_token_id
            eos = settings.first_stamp if end is None else end
            self._rule = TokenRule(settings, hidden[0], hidden[1], eos)

    def _hidden(self, name: str) -> tuple[int, ...]:
        options = self._call.options
        if name not in options.processed:
            return ()
        ids = options.hidden(name, self._call.settings.vocab)
        if any(token < 0 for token in ids):
            raise ArgumentError(f"{name}={shown(options.processed[name])}; expected a list of ids.")
        return ids

    def _source(self, windows: np.ndarray) -> dict[str, Any]:
        if self._call.sounds.frames is None:
            return {"encoder_outputs": windows}
        return {"input_features": windows.swapaxes(1, 2)}

    def work(
        self, windows: np.ndarray, begin: Begin, new: int, temperature: float, seeds: Sequence[int]
    ) -> Any:
        """A pass over windows, prepared; see `windows.Reader.generate`."""
        call = self._call
        how: dict[str, Any] = {"max_new_tokens": new, "max_length": None, "seed": list(seeds)}
        how |= {"do_sample": temperature > 0, "temperature": temperature or None}
        how |= {"decoder_input_ids": begin.ids, "decoder_attention_mask": begin.mask}
        if self._rule is not None:
            how |= {"suppress_tokens": None, "begin_suppress_tokens": None}
        elif "forced_bos_token_id" in call.options.processed and begin.ids.shape[1] == 1:
            how["begin_suppress_tokens"] = None  # they are for the token that is forced
        kwargs = call.rest | self._source(windows) | how
        args = None, call.config, None, call.tokenizer, kwargs, call.whole
        return self._engine._prepare(*args, streamer=call.streamer, rule=self._rule)

    def generate(
        self, windows: np.ndarray, begin: Begin, new: int, temperature: float, seeds: Sequence[int]
    ) -> Read:
        """See `windows.Reader`."""
        work = self.work(windows, begin, new, temperature, seeds)
        ids, generation = self._engine._generated(work, self._call.streamer)
        kept: dict[str, Any] = {}
        if self._call.options.returns is not None:
            kept = {name: tuple(getattr(generation, name)) for name in self._call.options.returns}
        if self._rule is not None and self._rule.log_probs:
            kept["log_probs"] = np.stack([to_numpy(one) for one in generation.log_probs])
        return Read(ids, **kept)

    def scores(self, windows: np.ndarray, prompts: Sequence[np.ndarray], new: int) -> np.ndarray:
        """See `windows.Reader`."""
        spec, count = self._engine._spec, len(prompts)
        block = np.empty((count, 0), np.int64)
        rows = (tuple(own.astype(np.int32) for own in prompts), tuple(windows))
        begin, source = (Prompts(own, block, "numpy", None) for own in rows)
        plain = {"processed": {}, "processors": (), "criteria": (), "max_time": None}
        options = replace(self._call.options, **plain, returns=None, repetition_penalty=1.0)
        how = self._call.sounds.frames is None, options, new, 0, [0] * count
        requests, _ = make_requests(spec, begin, source, *how)
        return to_numpy(self._engine._scores_after(requests)).astype(np.float32)

    def times(
        self, windows: np.ndarray, begin: Begin, ids: np.ndarray, frames: Sequence[int | None]
    ) -> list[np.ndarray]:
        """See `windows.Reader`."""
        spec, width = self._engine._spec, begin.ids.shape[1]
        mask = np.ones((len(ids), ids.shape[1] - 1), bool)
        if begin.mask is not None:
            mask[:, :width] = begin.mask
        given = dict.fromkeys(_GIVEN) | self._source(windows)
        given |= {"decoder_input_ids": ids[:, :-1], "position_ids": None}
        given |= {"decoder_attention_mask": mask, "token_type_ids": None}
        inputs = make_pair_inputs(spec, given, Wanted(), pad=None)
        at = np.maximum(mask.cumsum(1) - 1, 0) * mask
        own: dict[str, Any] = {"positions": at.astype(np.int32), "kept": np.zeros(1, np.int32)}
        tokens = inputs.tokens._replace(**own)
        inputs = replace(inputs, tokens=tokens, watched=self._call.settings.heads)
        found = self._engine._watched(inputs)
        wide = getattr(self._engine._config, "median_filter_width", 7)
        if type(wide) is not int or wide < 1 or wide % 2 == 0:
            raise ArgumentError(
                f"median_filter_width={shown(wide)} in the model's config; expected an odd int."
            )
        return [
            token_times(own[width:], count, width, _PRECISION, wide)
            for own, count in zip(found, frames, strict=True)
        ]


def _sequences(*configs: Mapping[str, Any]) -> int:
    """num_return_sequences of the first config that names one."""
    named = (config.get("num_return_sequences") for config in configs)
    count = next((value for value in named if value is not None), 1)
    if type(count) is not int or count < 1:
        raise ArgumentError(f"num_return_sequences={shown(count)}; expected an int of at least 1.")
    return count


def _given_begin(
    given: Mapping[str, Any], spec: ModelSpec, sounds: int, sequences: int
) -> Begin | None:
    """The caller's decoder_input_ids, which the first window begins with, for each sequence."""
    if given["decoder_input_ids"] is None:
        return None
    ids = check_ids(given["decoder_input_ids"], "decoder_input_ids", spec.vocab).astype(np.int64)
    if len(ids) != sounds:
        raise ArgumentError(
            f"decoder_input_ids has {len(ids)} rows and input_features {sounds}; they are pairs."
        )
    shape = len(ids), ids.shape[1]
    mask = check_mask(given["decoder_attention_mask"], shape, "decoder_attention_mask")
    mask = None if mask is None else np.repeat(mask, sequences, 0)
    return Begin(np.repeat(ids, sequences, 0), mask)


def _joined_times(segments: Sequence[Segment]) -> np.ndarray:
    """The seconds of all segments' tokens, within their windows, as HF joins them."""
    parts = [own.result.times[slice(*own.places)] for own in segments]
    return np.concatenate(parts) if parts else np.empty(0, np.float32)

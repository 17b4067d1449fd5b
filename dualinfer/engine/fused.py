"""FusedEngine: forward, generate and stream over a backend's runner."""

import logging
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Unpack

import numpy as np

from ..arrays import ids_to_jax, kind_of, to_kind, to_numpy
from ..backends.base import ForwardInputs, Request, Runner
from ..errors import (
    ArgumentError,
    ClosedError,
    LengthError,
    UnsupportedError,
    a_type,
    shown,
    warn_caller,
)
from ..model.outputs import make_generate_outputs, make_outputs
from ..serving.room import make_room
from ..serving.scheduler import Scheduler
from .arguments import GenerationArguments, refuse_outputs, with_arguments
from .asynchronous import AsyncCalls
from .base import CLOSED, About
from .checks import by_name, is_zero, refuse_prefix
from .driver import Driver, Job
from .embedding import EmbeddingCalls
from .grammar import make_grammar
from .images import OF_PATCHES, make_image_inputs, make_tower_inputs, refuse_images
from .inputs import make_forward_inputs, refuse_arguments
from .labels import refuse_routers
from .likeness import Likeness
from .loop import Generation, Loop, StopStrings
from .options import GenerationOptions, config_dict, count_of, make_options, over_limit, shorter
from .origin import Origin
from .prompts import Prompts, make_embedded, make_prompts
from .pure import make_pure_inputs
from .report import Report
from .requests import make_requests, make_seeds, told_fields
from .scoring import ScoringCalls
from .source import (
    NAMES,
    counts_hidden,
    encoder_states,
    make_decoder_prompts,
    make_encoded,
    make_frames,
    make_images,
    make_pair_inputs,
    make_sounds,
    make_source,
    refuse_names,
)
from .stepwise import Rule, Rules, Stepwise
from .text import DEFAULT_TEXT_TOKENS, Sequences
from .towers import TowerCalls, as_fields
from .whisper import SpeechCalls

_INPUTS = "inputs", "inputs_embeds", "pixel_values"  # of generate, beside `source.NAMES`
_HIDDEN = {"hidden": "suppress_tokens", "hidden_at_first": "begin_suppress_tokens"}
ENDED = "The engine was closed during the call. Make a new one by init_inference()."
_STREAM_CHUNK, _STOP_CHUNK, _WHOLE_CHUNK = 1, 4, 32
_log = logging.getLogger(__name__)


class _Work(NamedTuple):
    """One call of generate, checked: `rules` where the host chooses tokens, one step at a time."""

    prompts: Prompts
    requests: list[Request]
    options: GenerationOptions
    stop: StopStrings | None
    rules: Rules | None
    chunk: int = 1


class FusedEngine(Likeness, EmbeddingCalls, TowerCalls, SpeechCalls, ScoringCalls, AsyncCalls):
    """dualinfer's own decoder in the place of the model's forward."""

    _mode = "fused"

    def __init__(self, runner: Runner, about: About, origin: Origin) -> None:
        super().__init__(runner, about)
        self._spec, self._origin = runner.spec, origin
        self._loop = Loop(runner, self._profiler, self._turns)
        self._stepwise = ""  # for people: why the last such call went one step at a time

    @property
    def max_tokens(self) -> int:
        """Most prompt plus new tokens of generate: `max_out_tokens`, else what positions allow.

        That is one token more than the model has positions, since the last new one takes none. A
        table of positions bounds it in any case, and so does the room that is reserved.
        """
        pool = self._pool
        return self._longest if pool is None else min(self._longest, pool.tokens + 1)

    @property
    def _longest(self) -> int:
        return self._spec.most_tokens(self.inference_config.max_out_tokens)

    def can_generate(self) -> bool:
        """True for a causal model with a vocabulary head."""
        return self._spec.can_generate

    def refresh(self) -> None:
        """Read the weights again from the live model, or the folder, that the engine was made of.

        They are written in place: no graph is captured and nothing compiled, unless the model has
        other tensors in the place of some that the engine shared; these it then copies. Raises
        ModelError or CheckpointError where the model is gone or is another one by its config,
        UnsupportedError while a stream is open; the old weights stay. Where the reading itself
        fails the engine refuses to run until a refresh succeeds. Every process that shares the
        model must call it.
        """
        with self._turns:
            self._origin.refresh(self.runner, self._turns, self._loop.check_idle)

    def save_pretrained(
        self, folder: str | os.PathLike[str], max_shard_size: int | str | None = None
    ) -> None:
        """Write a folder that transformers loads, and any engine, on any number of devices.

        Weights are in the engine's dtype, quantized ones in compressed-tensors' format with the
        same values. They are read again from where the engine has them from. `folder` is new or
        empty; files hold at most `max_shard_size` bytes, an int or as "5GB". Every process that
        shares the model must call it. Raises ConfigError, CheckpointError, UnsupportedError.
        """
        if not isinstance(folder, str | os.PathLike):
            raise ArgumentError(f"folder={shown(folder)}: expected the path of a folder.")
        with self._turns:
            self._origin.save(os.fspath(folder), _bytes(max_shard_size), self._turns)

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        *,
        position_ids: Any = None,
        token_type_ids: Any = None,
        inputs_embeds: Any = None,
        decoder_input_ids: Any = None,
        decoder_attention_mask: Any = None,
        input_features: Any = None,
        encoder_outputs: Any = None,
        input_values: Any = None,
        pixel_values: Any = None,
        pixel_attention_mask: Any = None,
        spatial_shapes: Any = None,
        bbox: Any = None,
        interpolate_pos_encoding: bool | None = False,
        labels: Any = None,
        start_positions: Any = None,
        end_positions: Any = None,
        num_items_in_batch: Any = None,
        logits_to_keep: Any = 0,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        return_tuple: bool | None = None,
        use_cache: bool | None = None,
        **unsupported: Any,
    ) -> Any:
        """HF's forward over whole sequences: logits, or last_hidden_state and pooler_output.

        Examples:
            >>> engine([[2, 3, 4]]).logits  # [B, T, V]
            >>> engine([[2, 3, 4]], output_hidden_states=True).hidden_states  # [B, T, E] each

        `input_ids` [B, T] ints; `attention_mask` [B, T] of 0 and 1; `position_ids` [T] or [B, T],
        counted from zero when absent; `token_type_ids` [B, T]. Arrays of torch, NumPy, JAX or lists
        come back in the same framework, in the engine's dtype, on its device. As in HF,
        `position_ids` that start anew separate packed sequences only without a mask and without a
        cache: with `use_cache=False` here or in the model's config. `inputs_embeds` [B, T, W] come
        in the place of `input_ids`. `labels` [B, T] give the `loss`, float32 [], as HF computes it:
        a causal model's are shifted, -100 counts nowhere, and `num_items_in_batch` divides the sum.
        Floats [B, labels] of a head for sequences are a regression's, or a yes or no for each
        label. `start_positions` and `end_positions` [B] give that of answers. `logits_to_keep` is a
        number of tokens at the end, or an array of places: the logits of no others are computed,
        and labels are theirs. Of an encoder-decoder these ids, mask and embeddings are the
        encoder's, and `decoder_input_ids` [B, T] the decoder's, without which they are made of
        labels, which are not shifted then. Whisper's encoder reads `input_features` [B, mel,
        frames], Speech2Text's [B, frames, mel], Moonshine's `input_values` [B, samples], LayoutLM
        `bbox` [B, T, 4], an encoder of images `pixel_values` [B, C, H, W], of any size with
        `interpolate_pos_encoding`; SigLIP 2's reads patches, `pixel_values` [B, T, W], with
        `pixel_attention_mask` [B, T] and `spatial_shapes` [B, 2]. A model of texts and images
        reads both, and gives `logits_per_text` and `logits_per_image`, as HF's CLIPModel.
        `encoder_outputs` are what an encoder gave before, in the place of what it reads: its last
        hidden state [B, S, E], a tuple that begins with it, HF's BaseModelOutput or what `forward`
        gave; `attention_mask` [B, S] then tells its padding. Returns HF's ModelOutput; with
        `return_dict=False` a plain tuple; with `return_tuple=False` the first array alone. Raises
        ArgumentError and LengthError before anything runs.
        """
        arguments = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "token_type_ids": token_type_ids,
            "inputs_embeds": inputs_embeds,
            "labels": labels,
        }
        given = decoder_input_ids, decoder_attention_mask, input_features
        given = *given, encoder_states(encoder_outputs), input_values
        beside: dict[str, Any] = dict(zip(NAMES, given, strict=True))
        spans = {"start_positions": start_positions, "end_positions": end_positions}
        head = self._spec.head
        if head is not None and head.kind == "span":
            arguments |= spans
        else:
            unsupported |= {name: value for name, value in spans.items() if value is not None}
        if self._spec.crosses:
            arguments |= beside
        if self._spec.sees:
            arguments["pixel_values"] = pixel_values
        of_patches = dict(zip(OF_PATCHES, (pixel_attention_mask, spatial_shapes), strict=True))
        if self._spec.reads_patches:
            arguments |= of_patches
        else:
            unsupported |= {name: x for name, x in of_patches.items() if x is not None}
        if self._spec.boxes:
            arguments["bbox"] = bbox
        elif bbox is not None:
            unsupported["bbox"] = bbox
        with self._call("forward()", arguments) as call:
            self._check_model(alone=False)
            refuse_names(self._spec, beside)
            refuse_images(self._spec, pixel_values, interpolate_pos_encoding)
            refuse_arguments("forward", unsupported)
            if use_cache:
                raise ArgumentError(
                    "forward does not support use_cache=True: it returns no past_key_values. "
                    "The cache belongs to generate()."
                )
            if labels is not None:
                refuse_routers(self._config)
            if use_cache is None:
                use_cache = getattr(self._config, "use_cache", True)
            if output_hidden_states is None:
                output_hidden_states = bool(getattr(self._config, "output_hidden_states", False))
            how: dict[str, Any] = {
                "logits_to_keep": logits_to_keep,
                "loss_count": num_items_in_batch,
                "output_hidden_states": output_hidden_states,
                "problem": getattr(self._config, "problem_type", None),
            }
            values = dict(call.inputs)
            ends = tuple(values.pop(name, None) for name in spans)
            if self._spec.crosses:
                pad = getattr(self._config, "pad_token_id", None)
                inputs = make_pair_inputs(self._spec, values, pad=pad, ends=ends, **how)
            elif self._spec.towers or self._spec.patches:
                make = make_tower_inputs if self._spec.towers else make_image_inputs
                how["interpolate"] = interpolate_pos_encoding
                inputs = make(self._spec, call.inputs, **how)
            else:
                how |= {"may_pack": not use_cache, "ends": ends, "boxes": values.pop("bbox", None)}
                inputs = make_forward_inputs(self._spec, *values.values(), **how)
            call.meet(lambda: inputs)
            results = self._profiler.run(self.runner.forward, inputs)
            self._check_model(alone=True)
        names = "input_ids", "inputs_embeds", "pixel_values", *NAMES[2:]
        given = (call.inputs[name] for name in names if call.inputs.get(name) is not None)
        kind = kind_of(next(given, None)) or "list"
        fields = as_fields(results, kind)
        if self._spec.block is not None and "hidden_states" in fields:
            fields["hidden_states"] = self._spec.block.shown(fields["hidden_states"])
        if isinstance(encoder_outputs, Mapping):  # as in HF they come back
            names = "encoder_hidden_states", "hidden_states"
            kept = (encoder_outputs[name] for name in names if encoder_outputs.get(name))
            if (states := next(kept, None)) is not None:
                fields["encoder_hidden_states"] = tuple(states)
        if return_tuple is None:
            return_tuple = self.inference_config.return_tuple
        if not return_tuple:
            return next(iter(fields.values()))
        if return_dict is None:
            return_dict = getattr(self._config, "return_dict", True)
        return make_outputs(fields) if return_dict is not False else tuple(fields.values())

    def _pure_inputs(self, given: Mapping[str, Any], xp: Any) -> ForwardInputs:
        """Inputs of a pass by HF's names, which may be traced arrays of the module `xp`."""
        pad = getattr(self._config, "pad_token_id", None)
        return make_pure_inputs(self._spec, given, xp, pad=pad)

    @with_arguments
    def generate(
        self,
        input_ids: Any = None,
        generation_config: Any = None,
        *,
        attention_mask: Any = None,
        streamer: Any = None,
        tokenizer: Any = None,
        **arguments: Unpack[GenerationArguments],
    ) -> Any:
        """Prompt plus new tokens [B * num_return_sequences, width + new], as HF's generate.

        Examples:
            >>> engine.generate([[2, 3, 4], [5, 6]], max_new_tokens=8)  # lists of ids, any lengths
            >>> engine.generate(**tokenizer(["One", "Two"], padding=True, return_tensors="pt"))

        `input_ids` is an array [B, T] (padded left, right or anywhere, told by `attention_mask`) or
        a list of lists of any lengths, what a HF tokenizer gives, or None for the model's BOS
        alone; rows of the result are left-padded, and filled up with the pad id after their end.
        With `inputs_embeds` [B, T, W] and no ids the result is the new tokens alone, as in HF. Of
        an encoder-decoder `input_ids` are what the encoder reads, and the result is the decoder's
        ids: `decoder_input_ids`, or the id of a start, and the new ones, which lengths count;
        `encoder_outputs` may be in the place of what it reads, as in `forward`. Whisper gives what
        its own generate in HF does: docs/speech.md.
        Other arguments have HF's names and meanings, with the model's own generation_config as
        defaults; `streamer` follows HF's protocol, `tokenizer` is needed for `stop_strings`. `seed`
        is an int below 2**64, or one for each prompt; None draws one for each. With `logprobs` and
        `return_dict_in_generate` the result has `logprobs` float32 [B, new] too, and of the so many
        likeliest tokens `top_logprobs` [B, new, K] and `top_ids`: by the model's own logits, 0 and
        -1 behind a row's end. Raises before
        anything runs, StaleWeightsError before the first new token; an argument that is not
        supported is refused by name.
        """
        chunk = _WHOLE_CHUNK if streamer is None else _STREAM_CHUNK
        given = input_ids, generation_config, attention_mask
        if self._spec.transcribes:
            return self._transcribe(*given, streamer, tokenizer, dict(arguments), chunk)
        work = self._prepare(*given, tokenizer, dict(arguments), chunk, streamer=streamer)
        ids, generation = self._generated(work, streamer)
        prompts, options = work.prompts, work.options
        new = ids.shape[1] - prompts.block.shape[1]
        ids = self._result(ids, prompts)
        if options.returns is None:
            return ids
        kind = self.inference_config.backend if prompts.kind == "list" else prompts.kind
        kept = {name: getattr(generation, name) for name in options.returns}
        kept = {name: tuple(to_kind(one, kind) for one in steps) for name, steps in kept.items()}
        if options.logprobs is not None:
            kept |= told_fields(generation.told, new, options.logprobs, kind)
        return make_generate_outputs({"sequences": ids, **kept})

    def _generated(self, work: "_Work", streamer: Any) -> tuple[np.ndarray, Generation | Stepwise]:
        """The ids [B, width + new] of a call, prompts first, and what made them."""
        prompts, options = work.prompts, work.options
        pad = options.fill_id
        block = np.repeat(prompts.block, options.num_return_sequences, axis=0)
        streamer = self._turns.streamer(streamer)
        if streamer is not None:
            self._check_model(alone=True)  # before it is given anything
            streamer.put(self._streamed(block))
        columns = []
        generation = self._begun(work)
        with closing(iter(generation)) as steps:
            for tokens in steps:
                if not columns and streamer is None:
                    self._check_model(alone=True)
                column = np.array([pad if t is None else t for t in tokens], np.int64)
                columns.append(column)
                if streamer is not None:
                    streamer.put(self._streamed(column))
        self._origin.check_late()
        if streamer is not None:
            streamer.end()
        return np.column_stack((block, *columns)), generation

    def _scores_after(self, requests: Sequence[Request]) -> Any:
        """The logits float32 [B, V] behind the prompts of requests, which end with it."""
        self._check_model(alone=True)
        lives, scores = self._loop.start_scores(requests)
        self._loop.finish(lives)
        return scores

    def _watched(self, inputs: ForwardInputs) -> np.ndarray:
        """The attention to their source of the heads that `inputs` watch, float32 [B, T, A, S]."""
        with self._turns:
            self._check_model(alone=True)
            outputs = self._profiler.run(self.runner.forward, inputs)
        return to_numpy(outputs["cross_weights"])

    @with_arguments
    def stream(
        self,
        input_ids: Any = None,
        generation_config: Any = None,
        *,
        attention_mask: Any = None,
        tokenizer: Any = None,
        **arguments: Unpack[GenerationArguments],
    ) -> Iterator[Any]:
        """An iterator of new tokens, as they are made; the arguments of `generate`.

        Examples:
            >>> for token in engine.stream([[2, 3, 4]], max_new_tokens=8):
            ...     print(token)

        One sequence gives ints; several give lists with an int for each, None once it has ended.
        Arguments are checked at once; the work starts with the first `next`. Leaving the loop, or
        `close()` on the iterator, frees what it holds.
        """
        refuse_outputs("stream", arguments)
        given = input_ids, generation_config, attention_mask, tokenizer, dict(arguments)
        if self._spec.transcribes:
            work = self._first_window(*given, _STREAM_CHUNK)
        else:
            work = self._prepare(*given, _STREAM_CHUNK)
        self._check_model(alone=True)
        return self._stream(work)

    def _begin(
        self,
        rows: list[list[int]],
        config: Any,
        tokenizer: Any,
        arguments: dict[str, Any],
        whole: bool,
    ) -> Sequences:
        refuse_outputs("What gives text", arguments)
        chunk = _WHOLE_CHUNK if whole else _STREAM_CHUNK
        work = self._prepare(
            *(rows, config, None, tokenizer, arguments, chunk), default_length=DEFAULT_TEXT_TOKENS
        )
        self._check_model(alone=True)
        prompts = [request.tokens.tolist() for request in work.requests]
        return Sequences(prompts, self._steps(work))

    def _make_jobs(
        self,
        ids: Any,
        config: Any,
        tokenizer: Any,
        arguments: dict[str, Any],
        fields: dict[str, Any],
        default_length: int | None,
    ) -> list[Job]:
        refuse_outputs("generate_async", arguments, tells=True)
        if arguments.get("logprobs") is not None:
            arguments = {**arguments, "return_dict_in_generate": True}
        if self._spec.transcribes:
            raise UnsupportedError(
                "generate_async() does not serve a model that transcribes sounds window by window. "
                "Use generate()."
            )
        work = self._prepare_alone(ids, config, tokenizer, arguments, default_length)
        if len(work.prompts.rows) != 1:
            raise ArgumentError(
                f"generate_async() takes one prompt, and got {len(work.prompts.rows)}. Call it "
                "once for each: they run at the same time."
            )
        requests, stop = work.requests, work.stop
        self._loop.check(requests)
        if work.rules is None:
            return [Job.of(request, stop=stop, **fields) for request in requests]
        jobs = []
        for request in requests:  # each with rules of its own: they join and leave alone
            own = {**arguments, "num_return_sequences": 1}
            rules = self._prepare_alone(ids, config, tokenizer, own, default_length)
            jobs.append(Job.of(request, begin=partial(self._begun_alone, rules, request), **fields))
        return jobs

    def _prepare_alone(
        self,
        ids: Any,
        config: Any,
        tokenizer: Any,
        arguments: dict[str, Any],
        default_length: int | None,
    ) -> "_Work":
        """As `_prepare`, of one process; where nothing runs, it does not wait for the turn."""
        kwargs = {**arguments}
        seed = kwargs.pop("seed", None)
        inputs, kwargs = _gathered(ids, None, kwargs)
        with self._turns if self._spec.encoder is not None else nullcontext():
            work = self._make_requests(inputs, config, tokenizer, seed, kwargs, default_length)
        if seed is None and work.options.do_sample:
            seeds = self.runner.draw_seeds(len(work.prompts.rows))
            _seed(work.requests, seeds, work.options.num_return_sequences)
        return work

    def _begun_alone(self, work: "_Work", request: Request) -> Stepwise:
        begun = self._begun(work._replace(requests=[request]))
        assert isinstance(begun, Stepwise)
        return begun

    def _driving(self) -> Driver:
        if self._driver is not None:
            return self._driver
        with self._turns:
            if self._driver is None:
                room = make_room(self.runner, self._pool)
                scheduler = Scheduler(*room, pauses=self._pool is not None)
                self._driver = Driver(self._loop, self._turns, scheduler, self._origin.check)
            return self._driver

    def _end_threads(self) -> None:
        if self._driver is not None:
            self._driver.stop(ClosedError(ENDED))

    def _check_model(self, alone: bool) -> None:
        """Raise StaleWeightsError if the live model has changed, before a call has results.

        Asked twice in a call, and done once. Processes that share a model must all know before they
        run. One that is `alone` looks while the device computes: it takes tens of microseconds.
        """
        if alone != self._turns.is_shared:
            self._origin.check()

    def _begun(self, work: "_Work") -> Generation | Stepwise:
        """The sequences of a call, their first step under way."""
        if work.rules is None:
            return Generation(self._loop, work.requests, work.chunk, work.stop)
        names = ", ".join(work.options.stepwise)
        _log.info("generate() goes one step at a time, for what the host does: %s", names)
        self._stepwise = f"generate() went one step at a time, for what the host does: {names}"
        how = work.requests, work.rules, work.options, work.stop
        return Stepwise(self._loop, self._turns, self.runner, *how)

    def _stream(self, work: "_Work") -> Iterator[Any]:
        with closing(self._steps(work)) as steps:
            for tokens in steps:
                yield tokens[0] if len(tokens) == 1 else tokens

    def _steps(self, work: "_Work") -> Generator[list[int | None], None, None]:
        if self._runner is None:  # closed since stream() was called
            raise ClosedError(CLOSED)
        self._check_model(alone=True)
        with closing(iter(self._begun(work))) as steps:
            for tokens in steps:
                yield tokens
                self._check_model(alone=True)  # the caller had the turn
        self._origin.check_late()

    def _prepare(
        self,
        ids: Any,
        config: Any,
        mask: Any,
        tokenizer: Any,
        kwargs: dict[str, Any],
        chunk: int,
        streamer: Any = None,
        default_length: int | None = None,
        rule: Rule | None = None,
    ) -> "_Work":
        """Everything that generate and stream check and derive before anything runs.

        `chunk` is how many steps this process wants at a time; the result's, how many all take.
        `default_length` stands for HF's 20 new tokens, where nobody names a length. `rule` is what
        the model's own generate does to logits.
        """
        seed = kwargs.pop("seed", None)
        inputs, kwargs = _gathered(ids, mask, kwargs)
        with self._call("generate()", inputs) as call:
            self._check_model(alone=False)
            if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
                raise ArgumentError(
                    f"streamer is {a_type(streamer)}; expected put() and end(), as HF's have."
                )
            how = config, tokenizer, seed, kwargs, default_length, rule
            work = self._make_requests(call.inputs, *how)
            requests, options, stop = work.requests, work.options, work.stop
            draws = seed is None and options.do_sample
            same = requests, options, seed is None, stop is None, self._profiler.enabled
            answers = call.meet(
                lambda: same,
                chunk=min(chunk, _STOP_CHUNK) if stop else chunk,
                seeds=self.runner.draw_seeds(len(work.prompts.rows)) if draws else [],
            )
            if draws:
                _seed(requests, answers["seeds"][0], options.num_return_sequences)
        return work._replace(chunk=min(answers["chunk"]))

    def _make_requests(
        self,
        given: Mapping[str, Any],
        config: Any,
        tokenizer: Any,
        seed: Any,
        kwargs: dict[str, Any],
        default_length: int | None,
        rule: Rule | None = None,
    ) -> "_Work":
        """Derive the work of `_prepare` in one process, before the others are asked."""
        spec = self.runner.spec
        ids, mask, inputs = given["input_ids"], given["attention_mask"], given["inputs"]
        embeds = given["inputs_embeds"]
        if not spec.can_generate:
            why = "it is no causal model with a vocabulary head"
            if spec.head is not None and spec.head.kind == "causal":
                why = "by its config tokens see those behind them (use_bidirectional_attention)"
            raise UnsupportedError(f"{spec.architecture} cannot generate: {why}.")
        if inputs is not None:  # HF's name of its first argument
            if ids is not None:
                raise ArgumentError("Both inputs and input_ids were given; they are the same.")
            ids = inputs
        if spec.prefixes and kwargs.get("token_type_ids") is not None:
            refuse_prefix(spec)
        for name in ("token_type_ids",) * (not spec.token_types) + ("mm_token_type_ids",):
            if is_zero(kwargs.get(name)):
                del kwargs[name]  # many tokenizers give them to models that have none
        own = config_dict(self._generation_config)
        if own.get("max_new_tokens") is None and own.get("max_length") is None:
            own["max_new_tokens"] = default_length
        kwargs = kwargs | _longest(kwargs.get("stopping_criteria"))
        refuse_names(spec, given)
        refuse_images(spec, given["pixel_values"], None)
        options = replace(make_options(own, config, kwargs, spec.vocab), rule=rule)
        pad = options.fill_id
        if options.stop_strings and not hasattr(tokenizer, "decode"):
            raise ArgumentError("stop_strings needs the tokenizer; pass tokenizer=... as well.")
        source = None
        is_encoded = given["encoder_outputs"] is not None
        if spec.encoder:
            if embeds is not None and not is_encoded:
                raise ArgumentError(
                    f"inputs_embeds: {spec.architecture} generates from input_ids alone here. "
                    "Pass these, or call engine.forward() with embeddings."
                )
            if is_encoded:
                source = make_encoded(spec, given["encoder_outputs"], given)
            elif spec.encoder.mel:
                source = make_frames(spec, given["input_features"], ids)
            elif spec.encoder.sounds is not None:
                source = make_sounds(spec, given[spec.encoder.sounds.name], ids, mask)
            elif spec.encoder.patches is not None:
                source = make_images(spec, given["pixel_values"], ids, mask)
            else:
                source = make_source(spec, ids, mask, pad)
                if counts_hidden(spec, ids, mask):
                    states, is_encoded = self._encode(ids, mask), True
                    read = make_encoded(spec, states, {"attention_mask": mask})
                    source = replace(source, rows=read.rows)
            limit, read = self.inference_config.max_out_tokens, max(source.lengths)
            if limit is not None and not spec.encoder.one_length and read > limit:
                raise LengthError(
                    f"The encoder's input has {read} tokens, over max_out_tokens ({limit}). "
                    "Shorten it, or set a larger max_out_tokens."
                )
            begins = given["decoder_input_ids"], given["decoder_attention_mask"]
            start = options.decoder_start
            prompts = make_decoder_prompts(spec, source, *begins, start, pad)
        elif embeds is not None:
            prompts = make_embedded(embeds, ids, mask, spec)
        else:
            if ids is None and options.bos_token_id is not None:
                ids, mask = [[options.bos_token_id]], None  # as in HF
            prompts = make_prompts(ids, mask, spec.vocab, pad, options.eos_token_ids)
            if given["input_ids"] is given["inputs"] is None and self._about.of_torch:
                prompts = replace(prompts, kind="torch")  # as of the model in whose place it stands
        count = options.num_return_sequences
        ends = options.stop_strings or options.criteria
        if pad is None and ends and len(prompts.rows) * count > 1:
            name = "stop_strings" if options.stop_strings else "stopping_criteria"
            raise ArgumentError(
                f"{name} may end some rows before others, but the model names neither a "
                "pad_token_id nor an eos_token_id to fill them up. Pass pad_token_id."
            )
        longest = max(prompts.lengths)  # without padding, which takes no room
        width = prompts.block.shape[1] or longest
        asked = self.inference_config.max_out_tokens
        default = self.max_tokens - (self.max_tokens != asked)  # HF's own fills the positions
        new_tokens = options.new_tokens(width, default + width - longest)
        least_tokens = options.least_tokens(width)
        if least_tokens > new_tokens:
            warn_caller(
                f"At least {least_tokens} new tokens are asked for, and at most {new_tokens}: "
                "the maximum counts."
            )
        self._check_length(prompts, new_tokens)
        options.check_sequences(len(prompts.rows))
        seeds = make_seeds(seed, len(prompts.rows))
        grammar = None
        if options.grammar is not None:
            reader = self.tokenizer if tokenizer is None else tokenizer
            hidden = {name: options.hidden(key, spec.vocab) for name, key in _HIDDEN.items()}
            about = spec.vocab, options.eos_token_ids, least_tokens
            grammar = make_grammar(options.grammar, reader, *about, **hidden)
        how = options, new_tokens, least_tokens, seeds, grammar
        requests, names = make_requests(spec, prompts, source, is_encoded, *how)
        stop = StopStrings(options.stop_strings, tokenizer) if options.stop_strings else None
        if options.lookup:
            self._check_drafts(options.lookup)
        rules = None
        if names:
            backend = self.inference_config.backend
            how = options, prompts, new_tokens, backend, self.runner, self._turns
            rules = Rules(*how, grammar)
        return _Work(prompts, requests, options, stop, rules)

    def _encode(self, ids: Any, mask: Any) -> np.ndarray:
        """The encoder's states of ids [B, S], float32 [B, S, E]."""
        names = "input_ids", "attention_mask", "decoder_input_ids"
        given = {"token_type_ids": None, "inputs_embeds": None, "labels": None}
        given |= dict(zip(names, (ids, mask, [[0]] * len(ids)), strict=True))
        how: dict[str, Any] = {"loss_count": None, "logits_to_keep": 0}
        given |= {"decoder_attention_mask": None}
        inputs = make_pair_inputs(self._spec, given, pad=None, output_hidden_states=False, **how)
        results = self.runner.forward(inputs)
        return to_numpy(results["encoder_last_hidden_state"]).astype(np.float32)

    def _check_drafts(self, count: int) -> None:
        """Raise UnsupportedError where several tokens at once are not what they are one by one."""
        if self.runner.verifies:
            return
        why = f"{self._spec.architecture} reads a token otherwise where others come with it"
        if self._spec.verifies:
            why = "layers that are streamed one by one on JAX read one token at a time"
        raise UnsupportedError(
            f"prompt_lookup_num_tokens={count}: {why}. Leave it out; the tokens are the same."
        )

    def _check_length(self, prompts: Prompts, new_tokens: int) -> None:
        longest = max(prompts.lengths)
        limit, asked = self._longest, self.inference_config.max_out_tokens
        if longest + new_tokens <= limit:
            return
        table = self._spec.learned_positions or self._spec.most
        way = "" if table and limit == table + 1 else "or set a larger max_out_tokens"
        if limit == asked:
            raise LengthError(over_limit(longest, new_tokens, "max_out_tokens", limit, way))
        own = "max_position_embeddings" if asked is None else "number of positions"
        if self._spec.most and limit == self._spec.most + 1:
            own = f"{self._spec.most_by}, beyond which its layers choose the tokens that they see"
        raise LengthError(
            f"A prompt of {count_of(longest)} and {new_tokens} new ones, of which the last takes "
            f"no position, need {longest + new_tokens - 1}, over the model's {own} ({limit - 1}). "
            f"{shorter(way)}"
        )

    def _streamed(self, tokens: np.ndarray) -> Any:
        """Tokens as a streamer expects them: torch on the torch backend, else NumPy."""
        return to_kind(tokens, "torch" if self.inference_config.backend == "torch" else "numpy")

    def _result(self, ids: np.ndarray, prompts: Prompts) -> Any:
        backend = self.inference_config.backend
        kind = backend if prompts.kind == "list" else prompts.kind
        if kind == backend == "jax":
            return ids_to_jax(ids, self.device)
        return to_kind(ids, kind, like=prompts.like)

    def report(self) -> Report:
        """Report what runs, where, and what it holds."""
        report = self._make_report(
            family=self._spec.family,
            architecture=self._spec.architecture,
            layers=len(self._spec.layers),
            max_tokens=self.max_tokens,
        )
        more = (self._stepwise,) if self._stepwise else ()
        return replace(report, notes=(*report.notes, *more, *self._reserved_note()))

    def _name(self) -> str:
        return self._spec.architecture

    def _let_go(self) -> None:
        self._loop.close(ClosedError(ENDED))
        self._origin.close()


def _gathered(ids: Any, mask: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inputs of a call of generate, by name, and its other arguments."""
    if (named := by_name(ids)) is not None:
        ids, own = named.pop("input_ids"), named.pop("attention_mask")
        mask, kwargs = own if mask is None else mask, named | kwargs
    inputs = {"input_ids": ids, "attention_mask": mask}
    inputs |= {name: kwargs.pop(name, None) for name in (*_INPUTS, *NAMES)}
    inputs["encoder_outputs"] = encoder_states(inputs["encoder_outputs"])
    return inputs, kwargs


def _seed(requests: list[Request], seeds: Sequence[int], count: int) -> None:
    """Give the `count` requests of each prompt its seed."""
    for i, request in enumerate(requests):
        sampling = replace(request.sampling, seed=seeds[i // count])
        requests[i] = replace(request, sampling=sampling)


def _longest(criteria: Any) -> dict[str, Any]:
    """The length that HF's MaxLengthCriteria among a caller's names: there it replaces others."""
    given = criteria if isinstance(criteria, list | tuple) else ()
    lengths = [c.max_length for c in given if type(c).__name__ == "MaxLengthCriteria"]
    return {"max_length": min(lengths), "max_new_tokens": None} if lengths else {}


def _bytes(size: Any) -> int | None:
    """Bytes of an int, or of a number with MB or GB as transformers writes it; None is no limit."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
    count = size
    if isinstance(size, str) and (unit := units.get(size.strip()[-2:].upper())):
        with suppress(ValueError, OverflowError):
            count = int(float(size.strip()[:-2]) * unit)
    if count is None or (type(count) is int and count > 0):
        return count
    raise ArgumentError(f"max_shard_size={shown(size)}: expected bytes, or a str such as '5GB'.")

"""The arguments of generate, checked and completed before anything runs."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..arrays import to_numpy
from ..backends.base import Request
from ..errors import ArgumentError, LengthError, UnsupportedError, a_type, warn_caller
from ..model.spec import ModelSpec
from .base import InferenceEngine
from .checks import by_name, is_zero, refuse_prefix
from .grammar import make_grammar
from .images import refuse_images
from .inputs import Wanted
from .options import GenerationOptions, config_dict, count_of, make_options, over_limit, shorter
from .pairs import make_decoder_prompts, make_pair_inputs, refuse_names
from .prompts import Prompts, make_embedded, make_prompts
from .requests import make_requests, make_seeds
from .source import NAMES, counts_hidden, encoder_states, make_encoded, source_reader
from .stepwise import Rule, Rules
from .stops import StopStrings

_INPUTS = "inputs", "inputs_embeds", "pixel_values"  # of generate, beside `source.NAMES`
_HIDDEN = {"hidden": "suppress_tokens", "hidden_at_first": "begin_suppress_tokens"}
# Steps at a time: of a text that is read as it is made, of one made at once, and where it may end.
_STREAM_CHUNK, _WHOLE_CHUNK, _STOP_CHUNK = 1, 32, 4


class Work(NamedTuple):
    """One call of generate, checked: `rules` where the host chooses tokens, one step at a time.

    Nobody reads what a `whole` one makes before it has ended.
    """

    prompts: Prompts
    requests: list[Request]
    options: GenerationOptions
    stop: StopStrings | None
    rules: Rules | None
    chunk: int = 1
    whole: bool = False


class Preparing(InferenceEngine):
    """The checks of an engine that generates."""

    _spec: ModelSpec

    @property
    def max_tokens(self) -> int:
        """As in FusedEngine."""
        raise NotImplementedError

    @property
    def _longest(self) -> int:
        raise NotImplementedError

    def _check_model(self, alone: bool) -> None:
        raise NotImplementedError

    @property
    def _runs_to_prepare(self) -> bool:
        """True if calls need the turn before they begin: an encoder reads, or processes meet."""
        return self._turns.is_shared or self._spec.encoder is not None

    def _prepare(
        self,
        ids: Any,
        config: Any,
        mask: Any,
        tokenizer: Any,
        kwargs: dict[str, Any],
        whole: bool,
        streamer: Any = None,
        default_length: int | None = None,
        rule: Rule | None = None,
    ) -> Work:
        """Everything that generate and stream check and derive before anything runs.

        Of a `whole` call nobody waits for a token before all have come; where another process
        waits for each, this one takes as few steps at a time.
        `default_length` stands for HF's 20 new tokens, where nobody names a length. `rule` is what
        the model's own generate does to logits.
        """
        seed = kwargs.pop("seed", None)
        inputs, kwargs = _gathered(ids, mask, kwargs)
        with self._call("generate()", inputs, waits=self._runs_to_prepare) as call:
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
            chunk = _WHOLE_CHUNK if whole else _STREAM_CHUNK
            answers = call.meet(
                lambda: same,
                chunk=min(chunk, _STOP_CHUNK) if stop else chunk,
                seeds=self.runner.draw_seeds(len(work.prompts.rows)) if draws else [],
            )
            if draws:
                give_seeds(requests, answers["seeds"][0], options.num_return_sequences)
        return work._replace(chunk=min(answers["chunk"]), whole=whole)

    def _prepare_alone(
        self,
        ids: Any,
        config: Any,
        tokenizer: Any,
        arguments: dict[str, Any],
        default_length: int | None,
    ) -> Work:
        """As `_prepare`, of one process; where nothing runs, it does not wait for the turn."""
        kwargs = {**arguments}
        seed = kwargs.pop("seed", None)
        inputs, kwargs = _gathered(ids, None, kwargs)
        with self._turns if self._runs_to_prepare else nullcontext():
            work = self._make_requests(inputs, config, tokenizer, seed, kwargs, default_length)
        if seed is None and work.options.do_sample:
            seeds = self.runner.draw_seeds(len(work.prompts.rows))
            give_seeds(work.requests, seeds, work.options.num_return_sequences)
        return work

    def _make_requests(
        self,
        given: Mapping[str, Any],
        config: Any,
        tokenizer: Any,
        seed: Any,
        kwargs: dict[str, Any],
        default_length: int | None,
        rule: Rule | None = None,
    ) -> Work:
        """Derive the work of `_prepare` in one process, before the others are asked."""
        spec = self.runner.spec
        given = self._named(given, kwargs)
        own = config_dict(self._generation_config)
        if own.get("max_new_tokens") is None and own.get("max_length") is None:
            own["max_new_tokens"] = default_length
        kwargs = kwargs | _longest(kwargs.get("stopping_criteria"))
        refuse_names(spec, given)
        refuse_images(spec, given["pixel_values"], None)
        options = replace(make_options(own, config, kwargs, spec.vocab), rule=rule)
        if options.stop_strings and not hasattr(tokenizer, "decode"):
            raise ArgumentError("stop_strings needs the tokenizer; pass tokenizer=... as well.")
        prompts, source, is_encoded = self._make_prompts(given, options)
        self._check_ends(options, len(prompts.rows))
        new_tokens, least_tokens = self._lengths(prompts, options)
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
        return Work(prompts, requests, options, stop, rules)

    def _named(self, given: Mapping[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of a model that generates, with `input_ids` whatever they were called."""
        spec = self.runner.spec
        if not spec.can_generate:
            why = "it is no causal model with a vocabulary head"
            if spec.head is not None and spec.head.kind == "causal":
                why = "by its config tokens see those behind them (use_bidirectional_attention)"
            raise UnsupportedError(f"{spec.architecture} cannot generate: {why}.")
        ids = given["input_ids"]
        if given["inputs"] is not None:  # HF's name of its first argument
            if ids is not None:
                raise ArgumentError("Both inputs and input_ids were given; they are the same.")
            ids = given["inputs"]
        if spec.embedding.types == "prefix" and kwargs.get("token_type_ids") is not None:
            refuse_prefix(spec)
        for name in ("token_type_ids",) * (not spec.token_types) + ("mm_token_type_ids",):
            if is_zero(kwargs.get(name)):
                del kwargs[name]  # many tokenizers give them to models that have none
        if given["encoder_outputs"] is not None:
            return {**given}  # nothing else is read, and what is given beside it is refused by name
        return {**given, "input_ids": ids, "inputs": None}

    def _make_prompts(
        self, given: Mapping[str, Any], options: GenerationOptions
    ) -> tuple[Prompts, Prompts | None, bool]:
        """The prompts, what the encoder reads, if any, and if that is an encoder's states."""
        spec, pad = self.runner.spec, options.fill_id
        ids, mask, embeds = given["input_ids"], given["attention_mask"], given["inputs_embeds"]
        if spec.encoder:
            source, is_encoded = self._make_source(given, pad)
            begins = given["decoder_input_ids"], given["decoder_attention_mask"]
            start = options.decoder_start
            prompts = make_decoder_prompts(spec, source, *begins, start, pad)
            return prompts, source, is_encoded
        is_encoded = given["encoder_outputs"] is not None
        if embeds is not None:
            return make_embedded(embeds, ids, mask, spec), None, is_encoded
        if ids is None and options.bos_token_id is not None:
            ids, mask = [[options.bos_token_id]], None  # as in HF
        prompts = make_prompts(ids, mask, spec.vocab, pad, options.eos_token_ids)
        if given["input_ids"] is None and self._about.of_torch:
            prompts = replace(prompts, kind="torch")  # as of the model in whose place it stands
        return prompts, None, is_encoded

    def _make_source(self, given: Mapping[str, Any], pad: int | None) -> tuple[Prompts, bool]:
        """The encoder's inputs, and whether it has read them before."""
        spec, is_encoded = self.runner.spec, given["encoder_outputs"] is not None
        assert spec.encoder is not None
        if given["inputs_embeds"] is not None and not is_encoded:
            raise ArgumentError(
                f"inputs_embeds: {spec.architecture} generates from input_ids alone here. "
                "Pass these, or call engine.forward() with embeddings."
            )
        reader = source_reader(spec, given)
        source = reader.rows(spec, given, pad)
        ids, mask = given["input_ids"], given["attention_mask"]
        if reader.reads_ids and counts_hidden(spec, ids, mask):
            states, is_encoded = self._encode(ids, mask), True
            read = make_encoded(spec, states, {"attention_mask": mask})
            source = replace(source, rows=read.rows)
        limit, read = self.inference_config.max_out_tokens, max(source.lengths)
        if limit is not None and not spec.encoder.one_length and read > limit:
            raise LengthError(
                f"The encoder's input has {read} tokens, over max_out_tokens ({limit}). "
                "Shorten it, or set a larger max_out_tokens."
            )
        return source, is_encoded

    def _check_ends(self, options: GenerationOptions, rows: int) -> None:
        """Raise ArgumentError where a row may end before others, and nothing fills it up."""
        ends = options.stop_strings or options.criteria
        if options.fill_id is None and ends and rows * options.num_return_sequences > 1:
            name = "stop_strings" if options.stop_strings else "stopping_criteria"
            raise ArgumentError(
                f"{name} may end some rows before others, but the model names neither a "
                "pad_token_id nor an eos_token_id to fill them up. Pass pad_token_id."
            )

    def _lengths(self, prompts: Prompts, options: GenerationOptions) -> tuple[int, int]:
        """The most and the least new tokens, which fit behind the prompts."""
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
        return new_tokens, least_tokens

    def _encode(self, ids: Any, mask: Any) -> np.ndarray:
        """The encoder's states of ids [B, S], float32 [B, S, E]."""
        names = "input_ids", "attention_mask", "decoder_input_ids"
        given = {"token_type_ids": None, "inputs_embeds": None}
        given |= dict(zip(names, (ids, mask, [[0]] * len(ids)), strict=True))
        given |= {"decoder_attention_mask": None}
        inputs = make_pair_inputs(self._spec, given, Wanted(), pad=None)
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
        table = self._spec.positions.rows or self._spec.most
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


def _gathered(ids: Any, mask: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inputs of a call of generate, by name, and its other arguments."""
    if (named := by_name(ids)) is not None:
        ids, own = named.pop("input_ids"), named.pop("attention_mask")
        mask, kwargs = own if mask is None else mask, named | kwargs
    inputs = {"input_ids": ids, "attention_mask": mask}
    inputs |= {name: kwargs.pop(name, None) for name in (*_INPUTS, *NAMES)}
    inputs["encoder_outputs"] = encoder_states(inputs["encoder_outputs"])
    return inputs, kwargs


def give_seeds(requests: list[Request], seeds: Sequence[int], count: int) -> None:
    """Give the `count` requests of each prompt its seed."""
    for i, request in enumerate(requests):
        sampling = replace(request.sampling, seed=seeds[i // count])
        requests[i] = replace(request, sampling=sampling)


def _longest(criteria: Any) -> dict[str, Any]:
    """The length that HF's MaxLengthCriteria among a caller's names: there it replaces others."""
    given = criteria if isinstance(criteria, list | tuple) else ()
    lengths = [c.max_length for c in given if type(c).__name__ == "MaxLengthCriteria"]
    return {"max_length": min(lengths), "max_new_tokens": None} if lengths else {}

"""FusedEngine: forward, generate and stream over a backend's runner."""

import logging
import os
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import numpy as np

from ..arrays import ids_to_jax, to_kind, to_numpy
from ..backends.base import ForwardInputs, Request, Runner
from ..errors import (
    ArgumentError,
    ClosedError,
    UnsupportedError,
    shown,
)
from ..model.outputs import make_generate_outputs
from ..serving.room import make_room
from ..serving.scheduler import Scheduler
from .arguments import GenerationArguments, refuse_outputs, with_arguments
from .asynchronous import AsyncCalls
from .base import CLOSED, About
from .driver import Driver, Job
from .embedding import EmbeddingCalls
from .forward import ForwardCalls
from .generation import Awaited, Generation
from .leading import LeadingCalls
from .likeness import Likeness
from .loop import Loop
from .origin import Origin
from .preparing import Preparing, Work
from .prompts import Prompts
from .readers import reader_of
from .report import Report
from .requests import told_fields
from .scoring import ScoringCalls
from .slots import BESIDE
from .stepwise import Stepwise
from .text import DEFAULT_TEXT_TOKENS, Sequences
from .towers import TowerCalls
from .whisper import SpeechCalls

ENDED = "The engine was closed during the call. Make a new one by init_inference()."
_log = logging.getLogger(__name__)


class FusedEngine(
    Likeness,
    ForwardCalls,
    Preparing,
    EmbeddingCalls,
    TowerCalls,
    SpeechCalls,
    ScoringCalls,
    AsyncCalls,
    LeadingCalls,
):
    """dualinfer's own decoder in the place of the model's forward."""

    _mode = "fused"

    def __init__(self, runner: Runner, about: About, origin: Origin) -> None:
        super().__init__(runner, about)
        self._spec, self._origin = runner.spec, origin
        self._read = reader_of(runner.spec)
        self._loop = Loop(runner, self._profiler, self._turns)
        self._alone = threading.Lock()  # of the one call that takes its steps itself
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
        self._check_leads_none("refresh()")
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
        given = input_ids, generation_config, attention_mask
        if self._spec.transcribes:
            return self._transcribe(*given, streamer, tokenizer, dict(arguments))
        whole = streamer is None
        work = self._prepare(*given, tokenizer, dict(arguments), whole, streamer=streamer)
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

    def _generated(
        self, work: Work, streamer: Any
    ) -> tuple[np.ndarray, Generation | Awaited | Stepwise]:
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
            work = self._first_window(*given)
        else:
            work = self._prepare(*given, whole=False)
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
        work = self._prepare(
            *(rows, config, None, tokenizer, arguments, whole), default_length=DEFAULT_TEXT_TOKENS
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
            jobs.append(Job.of(request, begin=partial(self._steps_alone, rules, request), **fields))
        return jobs

    def _steps_alone(self, work: Work, request: Request) -> Stepwise:
        """The steps of a job, to which the thread that drives it gives a slot."""
        return self._stepwise_of(work._replace(requests=[request]))

    def _driving(self) -> Driver:
        self._leave_parent()
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

    def _begun(self, work: Work) -> Generation | Awaited | Stepwise:
        """The sequences of a call, their first step under way, or waited for beside others'."""
        if work.rules is None and work.whole and not self._turns.is_shared:
            return self._begun_whole(work)
        if work.rules is None:
            return Generation(self._loop, work.requests, work.chunk, work.stop)
        return self._begun_stepwise(work)

    def _begun_stepwise(self, work: Work) -> Stepwise:
        """The sequences of a call whose tokens the host chooses, once it has slots."""
        steps = self._stepwise_of(work)
        steps.begin(*self._loop.start_scores(work.requests))
        return steps

    def _stepwise_of(self, work: Work) -> Stepwise:
        """The steps of a call whose tokens the host chooses, which are yet to begin."""
        assert work.rules is not None
        names = ", ".join(work.options.stepwise)
        _log.info("generate() goes one step at a time, for what the host does: %s", names)
        self._stepwise = f"generate() went one step at a time, for what the host does: {names}"
        how = work.requests, work.rules, work.options, work.stop
        return Stepwise(self._loop, self._turns, self.runner, *how)

    def _begun_whole(self, work: Work) -> Generation | Awaited:
        """The sequences of a call that nobody reads before they have ended.

        One that is alone takes its steps itself, if there are slots for all of its sequences. Those
        that come meanwhile are the driver's.
        """
        self._turns.check()
        self._leave_parent()
        driver, alone = self._driver, self._alone
        chunk = work.chunk if self._pool is None else min(work.chunk, BESIDE)  # others may come
        if self._loop.chooses_here or (driver is not None and driver.is_here):
            return Generation(self._loop, work.requests, chunk, work.stop)  # else it waits for us
        self._loop.check(work.requests)
        if self._loop.fits(work.requests) and alone.acquire(blocking=False):
            if not (self._loop.is_under_way or (driver is not None and driver.is_busy)):
                return Generation(self._loop, work.requests, chunk, work.stop, alone.release)
            alone.release()
        return Awaited(self._driving(), work.requests, work.stop)

    def _leave_parent(self) -> None:
        """Let go of the driver of the process from which this one was forked, and of its lock."""
        if self._driver is not None and self._driver.is_foreign:
            self._driver, self._alone = None, threading.Lock()

    def _stream(self, work: Work) -> Iterator[Any]:
        with closing(self._steps(work)) as steps:
            for tokens in steps:
                yield tokens[0] if len(tokens) == 1 else tokens

    def _steps(self, work: Work) -> Generator[list[int | None], None, None]:
        if self._runner is None:  # closed since stream() was called
            raise ClosedError(CLOSED)
        self._check_model(alone=True)
        with closing(iter(self._begun(work))) as steps:
            for tokens in steps:
                yield tokens
                self._check_model(alone=True)  # the caller had the turn
        self._origin.check_late()

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

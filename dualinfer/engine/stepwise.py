"""Generation one step at a time: the host chooses each token, by HF's processors and criteria."""

import logging
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol

import numpy as np

from ..arrays import from_numpy, kind_of, to_jax, to_kind, to_numpy
from ..backends.base import Grammar, Progress, Request, Runner
from ..backends.slots import unpacked
from ..errors import ArgumentError, ClosedError, UnsupportedError, a_type, shown
from ..parallel.spmd import Turns
from .lookup import Drafts
from .loop import Loop
from .meeting import Ask
from .options import GenerationOptions
from .prompts import Prompts
from .sequence import Live
from .stops import StopStrings

_log = logging.getLogger(__name__)


class Rule(Protocol):
    """A change of logits by a model's own generate, before the caller's processors.

    `names` are the arguments that ask for it, for people. Ids from `outweigh` on are one candidate,
    see `Runner.hide`. With `log_probs` those of the tokens that are chosen are kept.
    """

    names: tuple[str, ...]
    outweigh: int | None
    log_probs: bool

    def hidden(self, ids: np.ndarray) -> np.ndarray:
        """The ids that may not come next, bool [B, V], after the new tokens `ids` [B, T]."""
        ...


class Rules:
    """The host's rules for the logits of a call's steps.

    `processors` change logits, in HF's order; `criteria` end sequences. Functions get what HF's
    get: ids int [B, T] of the padded prompts and all new tokens, and float32 logits [B, V]; on
    torch as tensors on the engine's device, on JAX as JAX arrays, but HF's own classes get torch
    tensors in host memory there. A `rule`, a `grammar`, which comes first, and what shapes sampling
    are the runner's to apply.
    """

    def __init__(
        self,
        options: GenerationOptions,
        prompts: Prompts,
        count: int,
        backend: str,
        runner: Runner,
        turns: Turns,
        grammar: Grammar | None = None,
    ) -> None:
        self._backend, self._device = backend, runner.device
        self._runner, self._turns = runner, turns
        self._options, self._criteria = options, options.criteria
        self._start = time.monotonic()
        block = np.repeat(prompts.block, options.num_return_sequences, axis=0)
        self.block = block
        self._grammar = grammar
        self._progress: list[Progress] = []
        self._processors: Sequence[Any] = options.processors
        if options.rule is not None:
            self._processors = (self._ruled, *options.processors)
        self._warms = _is_shaped(options)
        if _needs_hf(options, self._least(prompts)):
            self._warms = False  # the same, in their place among HF's
            with _torch_there():
                self._processors = self._made(prompts, count)

    def _ruled(self, ids: np.ndarray, logits: Any) -> Any:
        """The logits by the model's own rule."""
        rule: Rule = self._options.rule
        hidden = rule.hidden(ids[:, self.block.shape[1] :])
        with self._turns:
            return self._runner.hide(logits, hidden, rule.outweigh)

    def _least(self, prompts: Prompts) -> int:
        """New tokens before which no EOS is chosen; a grammar counts them itself."""
        if self._grammar is not None:
            return 0
        return self._options.least_tokens(prompts.block.shape[1] or max(prompts.lengths))

    def _made(self, prompts: Prompts, count: int) -> Sequence[Any]:
        """HF's processors and the caller's, as HF's own generate would order them."""
        import torch
        from transformers import GenerationConfig
        from transformers.generation.logits_process import LogitsProcessorList
        from transformers.generation.utils import GenerationMixin

        options, width = self._options, prompts.block.shape[1]
        device = self._device if self._backend == "torch" else torch.device("cpu")
        config: Any = GenerationConfig()
        values = {
            **dict.fromkeys(("temperature", "top_k", "top_p", "min_p")),
            **options.processed,
            "num_beams": 1,
            "num_return_sequences": options.num_return_sequences,
            "do_sample": options.do_sample,
            "repetition_penalty": options.repetition_penalty,
            "min_new_tokens": self._least(prompts) or None,
            "max_length": width + count,
            "renormalize_logits": options.renormalize,
        }
        allowed = values.pop("prefix_allowed_tokens_fn", None)
        if options.do_sample:
            names = "temperature", "top_k", "top_p"
            values |= {name: getattr(options, name) for name in names}
            values["min_p"] = options.min_p or None
        for name, value in values.items():
            setattr(config, name, value)
        ends = list(options.eos_token_ids)
        config._eos_token_tensor = torch.tensor(ends, device=device) if ends else None
        mask = None
        if width:
            lengths = np.repeat(prompts.lengths, options.num_return_sequences)
            mask = torch.tensor(np.arange(width) >= width - lengths[:, None], device=device)
        model: Any = type("_Model", (GenerationMixin,), {"config": _DecoderConfig})()
        try:
            return model._get_logits_processor(
                config,
                input_ids_seq_length=width,
                prefix_allowed_tokens_fn=allowed,
                logits_processor=LogitsProcessorList(self._processors),
                device=device,
                model_kwargs={"attention_mask": mask},
            )
        except (ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            given = ", ".join(f"{name}={shown(value)}" for name, value in options.processed.items())
            raise ArgumentError(f"HF's processors do not take {given}: {error}") from error

    def scores(self, ids: np.ndarray, logits: Any, requests: Sequence[Request]) -> Any:
        """The logits [B, V], processed; arrays of the backend, or torch's."""
        if any(request.sampling.weighs for request in requests):
            with self._turns:
                logits = self._runner.weigh(logits, requests, ids[:, self.block.shape[1] :])
        if self._grammar is not None:
            hidden = np.stack([self._hidden(i, logits.shape[-1]) for i in range(len(requests))])
            with self._turns:
                logits = self._runner.hide(logits, hidden)
        given = _Ids(ids, self._backend, self._device)
        for processor in self._processors:
            if getattr(processor, "__self__", None) is self:
                logits = self._ruled(ids, logits)
                continue
            kind = self._kind(processor)
            with self._own_transfers():
                logits, tokens = self._to(kind, logits), given.of(kind)
            result = processor(tokens, logits)
            if getattr(result, "shape", None) != logits.shape:
                raise ArgumentError(
                    f"logits_processor: {_name(processor)} returned {_described(result)}; "
                    f"expected scores of shape {tuple(logits.shape)}."
                )
            logits = result
        if kind_of(logits) not in ("torch", self._backend):  # NumPy's, by a function of the caller
            with self._own_transfers():
                logits = self._to(self._backend, logits)
        if not self._warms:
            return logits
        with self._turns:
            return self._runner.warm(logits, requests)

    def _hidden(self, row: int, vocab: int) -> np.ndarray:
        """The tokens that the grammar does not allow next, bool [V]; none behind its end."""
        assert self._grammar is not None
        if row == len(self._progress):
            self._progress.append(self._grammar.begin())
        progress = self._progress[row]
        if progress.is_over:
            return np.zeros(vocab, bool)
        return ~unpacked(progress.words(), vocab)

    def follow(self, row: int, token: int) -> None:
        """Take the token that was chosen for a row that goes on."""
        if self._grammar is not None:
            self._progress[row].take(token)

    def is_over(self, row: int) -> bool:
        """True if the grammar lets nothing follow."""
        return self._grammar is not None and self._progress[row].is_over

    def may_stop(self, row: int) -> bool:
        """True if a stop string may end a row: not amid a grammar's text."""
        return self._grammar is None or self._progress[row].accepts

    def ended(self, ids: np.ndarray, scores: tuple[Any, ...] | None) -> np.ndarray:
        """The sequences that the criteria end, bool [B]; `scores` are all steps' own, if kept."""
        limit = self._options.max_time
        over = limit is not None and time.monotonic() - self._start > limit
        done = np.full(len(ids), over)
        given = _Ids(ids, self._backend, self._device)
        for criterion in self._criteria:
            kind = self._kind(criterion)
            with self._own_transfers():
                kept = None if scores is None else tuple(self._to(kind, one) for one in scores)
                tokens = given.of(kind)
            result = criterion(tokens, kept)
            with self._own_transfers():
                result = np.asarray(to_numpy(result))
            if result.dtype != bool or result.shape not in ((), done.shape):
                raise ArgumentError(
                    f"stopping_criteria: {_name(criterion)} returned {_described(result)}; "
                    f"expected a bool, or bools of shape {done.shape}."
                )
            done = done | result
        return done

    def _own_transfers(self) -> AbstractContextManager[Any]:
        """Around what is copied between host and device: no guard of the caller's bars it."""
        if self._backend != "jax":
            return nullcontext()
        import jax

        return jax.transfer_guard("allow")

    def _kind(self, function: Any) -> str:
        """The framework whose arrays a function takes."""
        is_hf = any(c.__module__.startswith("transformers.") for c in type(function).__mro__)
        return "torch" if is_hf else self._backend

    def _to(self, kind: str, array: Any) -> Any:
        """Logits in a framework, in memory that may be written."""
        if kind_of(array) == kind:
            return array
        if kind == "jax":
            return to_jax(array, self._device)
        made = to_kind(np.array(to_numpy(array)), "torch")
        return made.to(self._device) if self._backend == "torch" else made


class _DecoderConfig:
    """The facts of a model's config that HF's generation reads where it makes processors."""

    is_encoder_decoder = False


class _Ids:
    """Ids [B, T] in each framework, made once."""

    def __init__(self, ids: np.ndarray, backend: str, device: Any) -> None:
        self._ids, self._backend, self._device = ids, backend, device
        self._made: dict[str, Any] = {}

    def of(self, kind: str) -> Any:
        if kind not in self._made:
            if kind == "jax":
                made = to_jax(self._ids.astype(np.int32), self._device)
            else:
                made = from_numpy(self._ids, "torch")
                made = made.to(self._device) if self._backend == "torch" else made
            self._made[kind] = made
        return self._made[kind]


@contextmanager
def _torch_there() -> Iterator[None]:
    """Within it a missing torch is told as what needs it."""
    try:
        yield
    except ImportError as error:
        raise UnsupportedError(
            "These options are HF's own logits processors, which need torch, and it is not "
            "installed. Install dualinfer[torch] as well, or pass a logits_processor of yours, a "
            "function of JAX arrays."
        ) from error


def _is_shaped(options: GenerationOptions) -> bool:
    """True if sampling is from other probabilities than those of the logits."""
    return options.do_sample and (
        options.temperature != 1 or options.top_k > 0 or options.top_p < 1 or options.min_p > 0
    )


def _needs_hf(options: GenerationOptions, least: int) -> bool:
    """True if any of HF's processors has something to do that the runner has not."""
    held = least > 0 and options.eos_token_ids
    penalty = options.repetition_penalty != 1
    return bool(options.processed or held or penalty or options.renormalize)


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is None:
        return a_type(value)
    return f"{value.dtype} of shape {tuple(shape)}"


class Stepwise:
    """The sequences of one call, step by step. Close it, or exhaust it, to free its slots.

    It has these from `begin` on, which comes once, before its steps.
    A sequence that has ended goes on with the pad id until all have, as in HF, whose scores these
    are. `scores` and `logits`, where they are kept, have an array [B, V] for each step, and
    `log_probs` one [B] of the tokens that were chosen, as a rule asks for it.
    Its steps may be those of others as well: whoever has the logits that it `asks` for puts them
    there, and where nobody has it makes a step of its own.
    """

    def __init__(
        self,
        loop: Loop,
        turns: Turns,
        runner: Runner,
        requests: Sequence[Request],
        rules: Rules,
        options: GenerationOptions,
        stop: StopStrings | None,
    ) -> None:
        self._loop, self._turns, self._runner = loop, turns, runner
        self.requests, self._rules, self._options = requests, rules, options
        self._watches = [stop.watch(r.tokens.tolist()) for r in requests] if stop else []
        self._fill = 0 if options.fill_id is None else options.fill_id
        returns = options.returns or ()
        self.scores: list[Any] | None = [] if "scores" in returns else None
        self.logits: list[Any] | None = [] if "logits" in returns else None
        keeps = options.rule is not None and options.rule.log_probs
        self.log_probs: list[Any] | None = [] if keeps else None
        self._tells = any(request.tells for request in requests)
        self._told: list[list[np.ndarray]] = [[] for _ in requests]
        self._temperature = options.temperature if options.do_sample else 1.0
        self._newest: np.ndarray | None = None  # [B, 1], to be read next; none at its ends
        self._ask: Ask | None = None
        self.lives: list[Live] = []
        self._first: Any = None
        self._drafts: Drafts | None = None

    def begin(self, lives: list[Live], logits: Any) -> None:
        """Have the sequences of its `requests`, and the logits [B, V] behind their prompts."""
        self.lives, self._first = lives, logits
        options = self._options
        if options.lookup:  # room that is reserved now stays until these end
            ahead = self._loop.most_ahead or options.lookup + 1  # the newest token is one of them
            how = min(options.lookup, ahead - 1), options.lookup_ngram, self._fill
            self._drafts = Drafts([request.tokens.tolist() for request in self.requests], *how)

    def __iter__(self) -> Generator[list[int | None], None, None]:
        """For every step, each sequence's new token; None once it has ended."""
        ids, logits = self._rules.block, self._first
        self._first = None
        done = np.zeros(len(self.requests), bool)
        try:
            for step in range(self.requests[0].max_new_tokens):
                if step:
                    logits = self._after()
                before = done
                with self._turns.together("The tokens that the host chose") as work:
                    tokens, done = self._chosen(ids, logits, step, before)
                    said = work.meet(tokens=tokens.tolist(), done=done.tolist())
                tokens = np.array(said["tokens"][0], np.int64)  # clocks differ, and random numbers
                done = np.array(said["done"][0], bool)
                ids = np.column_stack((ids, tokens))
                left = self.requests[0].max_new_tokens - 1 - step
                if left and not done.all() and not self._are_there(tokens, ~done, left - 1):
                    self._newest = tokens[:, None]
                yield [
                    None if ended else int(token)
                    for token, ended in zip(tokens, before, strict=True)
                ]
                if done.all():
                    return
        finally:
            self.close()

    @property
    def asks(self) -> Ask | None:
        """The step it needs next; None at its ends, and where the logits are there."""
        if self._ask is not None:
            return self._ask
        ahead = self._drafts
        tokens = self._newest if ahead is None or ahead.to_read is None else ahead.to_read
        if tokens is None:
            return None
        self._ask = Ask(self.lives, tokens, drafts=tokens is not self._newest)
        if ahead is not None:
            self._ask.right, ahead.right = ahead.right, None
        return self._ask

    @property
    def is_ahead(self) -> bool:
        """True if the logits after its newest tokens are there."""
        return self._drafts is not None and self._drafts.is_there

    def _are_there(self, newest: np.ndarray, going: np.ndarray, left: int) -> bool:
        """True if drafts have, or read, what comes after the newest tokens [B]."""
        return self._drafts is not None and self._drafts.are_there(newest, going, left)

    def _after(self) -> Any:
        """The logits [B, V] of a step, after the newest tokens [B]."""
        ask = self.asks
        if ask is None:
            assert self._drafts is not None
            return self._drafts.logits()
        logits = self._loop.scores(ask)
        self._ask = self._newest = None
        if not ask.drafts:
            return logits
        assert self._drafts is not None
        self._drafts.take(logits)
        return self._drafts.logits()

    def _chosen(
        self, ids: np.ndarray, logits: Any, step: int, ended: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The tokens [B] of a step, and which sequences have ended with them."""
        if self.logits is not None:
            self.logits.append(_own(logits))
        scores = self._rules.scores(ids, _own(logits), self.requests)
        if self.scores is not None:
            self.scores.append(scores)
        with self._turns:
            tokens = self._runner.choose(scores, self.requests, step).astype(np.int64)
            if self.log_probs is not None:
                kept = self._runner.log_probs(scores, tokens, self._temperature)
                self.log_probs.append(kept)
            if self._tells:
                told = self._runner.tell(logits, tokens)
                for i in np.flatnonzero(~ended):
                    self._told[i].append(told[i])
        if ended.any():
            tokens = np.where(ended, self._fill, tokens)
        ids = np.column_stack((ids, tokens))
        kept = None if self.scores is None else tuple(self.scores)
        done = ended | self._rules.ended(ids, kept)
        width = self._rules.block.shape[1]
        for i, request in enumerate(self.requests):
            new = ids[i, width:].tolist()
            if not ended[i]:
                self._rules.follow(i, new[-1])
            done[i] |= new[-1] in request.eos_ids or self._rules.is_over(i)
            if self._watches and not done[i]:
                is_stop = self._watches[i].is_completed(new[-1])
                done[i] = is_stop and self._rules.may_stop(i)
        return tokens, done

    @property
    def told(self) -> list[list[np.ndarray]]:
        """Arrays of `sampling.tell` for each sequence's tokens, in order; none where none tells."""
        return self._told

    def close(self) -> None:
        """End what is unfinished and free the slots."""
        if self._drafts is not None:
            _log.info("Of %d tokens that were looked up, %d were right.", *self._drafts.counts)
        with suppress(ClosedError):  # in a forked process, which has nothing to free
            self._loop.leave(self.lives)


def _own(logits: Any) -> Any:
    """Logits that a processor may write; torch's are no longer of inference mode."""
    return logits.clone() if kind_of(logits) == "torch" else logits

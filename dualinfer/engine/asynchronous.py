"""Generation for programs of asyncio: many sequences at once, without a thread of theirs."""

import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Self, Unpack

from ..arrays import kind_of
from ..errors import ArgumentError, UnsupportedError, shown
from ..serving.room import MOST_SLOTS
from .arguments import GenerationArguments, with_arguments
from .chat import encode_chat
from .driver import Channel, Driver, Job
from .requests import TokenLogprobs, told_of
from .reserve import RoomCalls
from .text_stream import Detokenizer
from .tokenizing import encode, tokenizer_of

Priority = Literal["high", "normal"]


class Traffic(NamedTuple):
    """The work that one thread has under way: of `generate_async`, and of `generate` beside others.

    Sequences that have a slot, those that wait for one, the most that get one, for how many seconds
    the thread that drives them has not come round, 0 where there is nothing to do, and the tokens
    of prompts that it may be reading. `preemptions` counts how often a sequence gave its slot to
    one of high priority, or its blocks to others where they had run out. `lost` says why the device
    computes no more: it did not when a turn had failed, or turn after turn fails; None otherwise.
    `cache` is the share of a cache's blocks that sequences have; None where it has none.
    """

    live: int
    waiting: int
    slots: int
    silent: float
    reading: int = 0
    preemptions: int = 0
    lost: str | None = None
    cache: float | None = None


@dataclass(frozen=True)
class Start:
    """The start of a sequence: its return index, and the new tokens that are done."""

    index: int
    done: Sequence[int] = ()


class AsyncGeneration:
    """The new tokens of one sequence, as they come: `async for token in ...`.

    `await` gives the list of all of them, `text()` the whole text, and `pieces()` the text piece by
    piece. `cancel()` ends it within a step, and so does dropping the last reference, leaving an
    `async with`, or cancelling the task that waits for it. `finish_reason` is "stop" (its EOS or a
    stop string), "length" or "cancelled" once it has ended. It belongs to one reader.
    """

    def __init__(self, driver: Driver, job: Job, make_text: Any, most: int = 0) -> None:
        self._driver, self._job, self._make_text, self._most = driver, job, make_text, most
        self._channel = job.channel

    @property
    def prompt_ids(self) -> list[int]:
        """The ids of the prompt."""
        return self._job.request.tokens.tolist()

    @property
    def finish_reason(self) -> str | None:
        """Why it ended; None while it goes on, and where it failed."""
        return None if self._channel.items else self._channel.reason

    @property
    def began(self) -> float | None:
        """When it got its slot, by time.monotonic(); None before."""
        return self._channel.began

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that another one left; known once the first token has come."""
        return self._job.kept

    def logprobs_of(self, index: int) -> TokenLogprobs:
        """The log-probabilities (`logprobs=K`) of a new token that has come, by its place."""
        if not self._job.request.tells:
            raise ArgumentError("Nothing is told of tokens: pass logprobs=K to generate_async().")
        return told_of(self._channel.told[index], self._most)

    async def accepted(self) -> None:
        """It was taken when it was made; what is refused raises there."""

    def cancel(self) -> None:
        """End it with the next step. Tokens that have come can still be read."""
        if not self._channel.has_ended:
            self._driver.cancel(self._job)

    async def arrived(self) -> list[int]:
        """All tokens that have come since, at least one; none at the end.

        Raises what ended it where that was no end of its own.
        """
        channel = self._channel
        try:
            await channel.wait()
        except BaseException:
            self.cancel()
            raise
        tokens = []
        while channel.items:
            tokens.append(channel.items.popleft())
        if not tokens and channel.error is not None:
            raise channel.error
        return tokens

    def __aiter__(self) -> AsyncIterator[int]:
        """The tokens as they come."""
        return self

    async def __anext__(self) -> int:
        """The next token."""
        channel = self._channel
        if not channel.items:
            try:
                await channel.wait()
            except BaseException:
                self.cancel()
                raise
        if channel.items:
            return channel.items.popleft()
        if channel.error is not None:
            raise channel.error
        raise StopAsyncIteration

    def __await__(self) -> Generator[Any, None, list[int]]:
        """The list of its tokens."""
        return self._all().__await__()

    async def _all(self) -> list[int]:
        return [token async for token in self]

    async def pieces(self) -> AsyncGenerator[str, None]:
        """The text as it comes; joined, the pieces are what `generate_text` gives."""
        stream = self._make_text().stream(self.prompt_ids)
        try:
            while tokens := await self.arrived():
                if piece := stream.push(*tokens):
                    yield piece
            if rest := stream.finish():
                yield rest
        finally:
            self.cancel()

    async def text(self) -> str:
        """The whole text, without the prompt."""
        return "".join([piece async for piece in self.pieces()])

    async def __aenter__(self) -> Self:
        """It itself."""
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Cancel what is left."""
        self.cancel()

    def __del__(self) -> None:
        """Cancel what nobody reads any more."""
        self.cancel()


class AsyncCalls(RoomCalls):
    """The calls of a fused engine for programs of asyncio."""

    _lost: str | None = None  # why the device computed no more when it was last looked at

    @with_arguments
    def generate_async(
        self,
        prompt: Any = None,
        generation_config: Any = None,
        *,
        tokenizer: Any = None,
        deadline: float | None = None,
        priority: Priority = "normal",
        template_options: Mapping[str, Any] | None = None,
        skip_special_tokens: bool = True,
        **arguments: Unpack[GenerationArguments],
    ) -> Any:
        """An AsyncGeneration of the tokens that continue one prompt: `async for token in ...`.

        Examples:
            >>> text = await engine.generate_async("import os", max_new_tokens=16).text()

        `prompt` is a text, the messages of a chat, or token ids [T] or [1, T]. Arguments are those
        of `generate`; where nobody names a length, a text gets at most 256 new tokens. Any number
        of calls may be under way, from any event loop and thread, beside `generate` and `stream`:
        each sequence has the tokens that it has alone. A request waits where there is no slot or no
        room for it; those of `priority` "high" come before others, and in reserved room take the
        slots of others, which go on later with the tokens that they would have had. `deadline`
        seconds after the call it ends with DeadlineError, wherever it is. With
        `num_return_sequences` above 1 a list of as many. With `logprobs=K` each tells of its
        tokens. Arguments are checked at once. Where several processes share the model it raises
        UnsupportedError, unless this one leads them (`lead`).
        """
        given = self.tokenizer if tokenizer is None and not _is_ids(prompt) else tokenizer
        ids, default = _ids_of(given, prompt, template_options)
        if _is_chat(prompt):
            arguments = self._ending(generation_config, tokenizer_of(given), dict(arguments))  # type: ignore[assignment]

        def make_text() -> Detokenizer:
            source = self.tokenizer if given is None else given
            cleans = arguments.get("grammar") is None
            return Detokenizer(tokenizer_of(source), skip_special_tokens, cleans=cleans)

        made = self._submit(
            ids, generation_config, given, dict(arguments), deadline, priority, default
        )
        most = arguments.get("logprobs") or 0
        handles = [AsyncGeneration(driver, job, make_text, most) for driver, job in made]
        return handles[0] if len(handles) == 1 else handles

    def batch(
        self, rows: Iterable[Mapping[str, Any]], name: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """The results of rows of OpenAI's batch format, as they come, in any order.

        A row has a `custom_id`, "POST" as its `method`, a `url` (/v1/chat/completions,
        /v1/completions or /v1/embeddings) and a `body`, whose fields mean what they mean to
        `dualinfer serve`. Each gives one result with its `custom_id`: a `response` with
        `status_code` and `body`, or an `error`; a bad row fails alone. Rows are taken as they are
        needed, so that there may be any number. `name` is what bodies call the model; None:
        whatever they say. Needs `dualinfer[serve]`.
        """
        assert self._about.answer_rows is not None
        return self._about.answer_rows(self, rows, name)

    def traffic(self) -> Traffic:
        """Count the sequences that one thread drives, and tell whether they move."""
        driver = self._driver
        lost = self._runner.lost or self._lost
        book = self._loop.blocks
        usage = None if book is None else book.usage
        if driver is None:
            pool = self._pool
            slots = MOST_SLOTS if pool is None else pool.slots
            return Traffic(0, 0, slots, 0.0, lost=lost, cache=usage)
        live, waiting = driver.live, driver.waiting
        is_busy = live or waiting or driver.is_looking
        silent = time.monotonic() - driver.heartbeat if is_busy else 0.0
        known = driver.reading, driver.yields, driver.lost or lost, usage
        return Traffic(live, waiting, driver.slots, silent, *known)

    def look(self) -> None:
        """Ask the device for a sum behind an error of a pass over whole texts.

        Where it does not give one, `traffic` says so from then on.
        """
        self._lost = self._loop.trouble()

    def submit_sequences(
        self,
        ids: Sequence[int],
        arguments: Mapping[str, Any],
        starts: Sequence[Start],
        channels: Sequence[Channel],
    ) -> list[Callable[[], None]]:
        """Queue sequences that continue one prompt, each behind what of it is done before.

        `arguments` are those of `generate_async`, with a seed where they sample. A sequence has the
        tokens that the one of its return index has without a break, to rounding; they go to its
        channel, but for those that are done. The result ends each of them.
        """
        how = dict(arguments)
        fields = {"urgent": how.pop("priority", "normal") == "high", "deadline": None}
        if how.get("do_sample"):
            count = 1 + max(start.index for start in starts)
            how["num_return_sequences"] = count
            made = self._make_jobs([ids], None, None, how, fields, None)
            jobs = [made[start.index] for start in starts]
        else:  # all alike
            jobs = self._make_jobs([ids], None, None, dict(how), fields, None)
            for _ in starts[1:]:
                if jobs[0].begin is None:
                    jobs.append(replace(jobs[0]))
                else:  # whose rules are its own
                    jobs += self._make_jobs([ids], None, None, dict(how), fields, None)
        for job, start, channel in zip(jobs, starts, channels, strict=True):
            job.resume(start.done)
            job.channel = channel
            channel.begins(job)
        driver = self._driving()
        driver.submit(jobs)
        return [partial(driver.cancel, job) for job in jobs]

    def _submit(
        self,
        ids: Any,
        config: Any,
        tokenizer: Any,
        arguments: dict[str, Any],
        deadline: float | None = None,
        priority: Priority = "normal",
        default_length: int | None = None,
    ) -> list[tuple[Driver, Job]]:
        """The jobs of a prompt's sequences, queued."""
        if priority not in ("high", "normal"):
            raise ArgumentError(f"priority={shown(priority)}; expected 'high' or 'normal'.")
        if not (deadline is None or _is_positive(deadline)):
            raise ArgumentError(f"deadline={shown(deadline)}; expected seconds above 0, or None.")
        _ = self.runner  # a closed engine says that it is
        if self._turns.is_shared:
            raise UnsupportedError(
                "Several processes share this model, and each of them must make every call, which "
                "many calls at once cannot. Let rank 0 drive them: engine.lead() there, and "
                "engine.follow() in the others. Or use generate()."
            )
        end = None if deadline is None else time.monotonic() + deadline
        fields = {"urgent": priority == "high", "deadline": end}
        jobs = self._make_jobs(ids, config, tokenizer, arguments, fields, default_length)
        driver = self._driving()
        driver.submit(jobs)
        return [(driver, job) for job in jobs]

    def _make_jobs(
        self,
        ids: Any,
        config: Any,
        tokenizer: Any,
        arguments: dict[str, Any],
        fields: dict[str, Any],
        default_length: int | None,
    ) -> list[Job]:
        raise NotImplementedError

    def _driving(self) -> Driver:
        """The driver of this engine's jobs, made when it is first needed."""
        raise NotImplementedError


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _is_ids(prompt: Any) -> bool:
    return not isinstance(prompt, str) and not _is_chat(prompt)


def _ids_of(
    tokenizer: Any, prompt: Any, template_options: Mapping[str, Any] | None
) -> tuple[Any, int | None]:
    """The ids [1, T] of a prompt, and the length of what follows where nobody names one."""
    from .text import DEFAULT_TEXT_TOKENS

    if template_options is not None and not _is_chat(prompt):
        raise ArgumentError("template_options are for chats: pass messages as the prompt.")
    if isinstance(prompt, str):
        return [encode(tokenizer, prompt)], DEFAULT_TEXT_TOKENS
    if _is_chat(prompt):
        return [encode_chat(tokenizer, prompt, template_options)], DEFAULT_TEXT_TOKENS
    if prompt is None or kind_of(prompt) is None:
        return prompt, None
    is_flat = getattr(prompt, "ndim", None) == 1 or (
        isinstance(prompt, list | tuple) and all(kind_of(x) is None for x in prompt[:1])
    )
    ids = [prompt] if is_flat else prompt
    if len(ids) != 1:
        raise ArgumentError(
            f"generate_async() takes one prompt, and got {len(ids)}. Call it once for each: they "
            "run at the same time."
        )
    return ids, None

"""The text of one sequence on its way to a client: cut at a stop string, and counted."""

import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...engine.grammar import Reader
from ...engine.requests import TokenLogprobs
from ...engine.text_stream import Detokenizer, Places
from .calls import Delta, Reply
from .metrics import Metrics

_NEAR = 256  # of the last ids of a prompt


class StopText:
    """Text up to the first stop string; what may begin one is held back.

    The first is the one that ends first, so that it does not matter in which pieces the text comes.
    With `keep` the stop string itself stays. Where the text follows a grammar, of which `reader`
    reads it, a stop string amid of it is passed over.
    """

    def __init__(self, stops: Sequence[str], keep: bool, reader: Reader | None = None) -> None:
        self._stops, self._keep, self._held = stops, keep, ""
        self._reader, self._read = reader, 0  # characters of what is held that it has read
        self.found = False

    def push(self, piece: str) -> str:
        """The text that is certain with another piece."""
        if self.found or not self._stops:
            return "" if self.found else piece
        text = self._held + piece
        for end, start in sorted(set(_found(text, self._stops))):
            cut = end if self._keep else start
            if self._may_end(text, cut):
                self.found, self._held = True, ""
                return text[:cut]
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        if self._reader is not None:
            self._accepts(text, len(text) - held)
            self._read -= len(text) - held
        return text[: len(text) - held]

    def skip(self, piece: str) -> str:
        """The piece, in which no stop string is looked for."""
        if self._reader is not None:
            self._reader.accepts(piece)
        return piece

    def _may_end(self, text: str, cut: int) -> bool:
        """True unless the text would be cut amid of its grammar."""
        return self._reader is None or (cut >= self._read and self._accepts(text, cut))

    def _accepts(self, text: str, cut: int) -> bool:
        assert self._reader is not None
        piece, self._read = text[self._read : cut], max(self._read, cut)
        return self._reader.accepts(piece)

    def finish(self) -> str:
        """The text that was held back."""
        rest, self._held = self._held, ""
        return rest


def _found(text: str, stops: Sequence[str]) -> Iterator[tuple[int, int]]:
    """The places where each stop string ends and begins in a text."""
    for stop in stops:
        at = text.find(stop)
        while at >= 0:
            yield at + len(stop), at
            at = text.find(stop, at + 1)


def _overlap(text: str, stop: str) -> int:
    """The number of characters at the end of `text` that may begin `stop`."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)


def _finite(logprob: float) -> float:
    """A log-probability that JSON has a word for; -9999 for none at all, as other servers say."""
    return logprob if math.isfinite(logprob) else -9999.0


def _text_among(namer: Detokenizer, ids: Sequence[int]) -> list[int]:
    """The last of some ids that is text by itself, no part of a character; none if there is none.

    Behind it a token has the text that it has within a text.
    """
    for token in reversed(ids[-_NEAR:]):
        stream = namer.stream()
        if "\ufffd" not in stream.push(token) + stream.finish():
            return [token]
    return []


@dataclass(frozen=True)
class Told:
    """The log-probability of a token, where its text begins, and the likeliest ones of its step."""

    token: "Named"
    logprob: float | None  # None of a prompt's first token
    offset: int
    top: list[tuple["Named", float]]


@dataclass(frozen=True)
class Named:
    """A token by itself: its text, with U+FFFD for parts of characters, and its bytes if known."""

    text: str
    raw: bytes | None


class Nothing:
    """Stands for a sequence where only the prompt is asked for."""

    finish_reason, cached_tokens = "length", 0

    def __init__(self, ids: Sequence[int]) -> None:
        self.prompt_ids = list(ids)

    async def accepted(self) -> None:
        """Nothing is asked for."""

    async def arrived(self) -> list[int]:
        """No token."""
        return []

    def logprobs_of(self, index: int) -> TokenLogprobs:
        """Nothing is told of tokens that there are not."""
        raise IndexError(index)

    def cancel(self) -> None:
        """Nothing is under way."""


@dataclass
class Part:
    """A piece of a sequence's text, its tokens, and what is told of them if that is asked for."""

    text: str
    tokens: list[int] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    said: Delta = field(default_factory=Delta)  # what the text says, where it is read as a reply
    reason: str | None = None  # why it ended, with the last part


@dataclass
class Answer:
    """One sequence of a request: the handle of `generate_async`, and how its text is made."""

    index: int
    prompt: int  # which of the request's
    prompt_tokens: int
    handle: Any
    detokenizer: Detokenizer
    stop: StopText
    stop_ids: frozenset[int]
    free: int  # tokens at the start in which no stop string is looked for
    metrics: Metrics
    begun: float
    namer: Detokenizer | None = None  # of single tokens, where they are to be told of
    reply: Reply | None = None  # reads the text for calls and thoughts
    opening: str = ""  # the prompt, where it is to be echoed
    prompt_told: Sequence[TokenLogprobs | None] | None = None  # of the prompt's tokens
    likely: int = 0  # ones of each step that are told
    placer: Detokenizer | None = None  # as `detokenizer`, and eager, to find where tokens begin
    before: list[int] = field(default_factory=list)  # an id of the prompt that is text by itself
    places: Places | None = None  # of new tokens
    count: int = 0

    async def parts(self) -> AsyncIterator[Part]:
        """The text as it comes; the last part says why it ended."""
        prompt = self.handle.prompt_ids
        text = self.detokenizer.stream(prompt)
        last: float | None = None
        if self.opening:
            part = Part(self.opening)
            if self.prompt_told is not None and self.namer is not None:
                part.told = self._echoed(self.namer, prompt, self.prompt_told)
            yield part
        if self.namer is not None and self.placer is not None:
            self.before = _text_among(self.namer, prompt)
            self.places = Places(self.placer.stream(prompt), len(self.opening))
        try:
            while tokens := await self.handle.arrived():
                now = time.monotonic()
                self._observe(now, last, len(tokens))
                last = now
                part = self._take(text, tokens)
                is_over = self.stop.found
                if self.reply is not None:
                    part.said = self.reply.push(part.text)
                    is_over = is_over or self.reply.is_over
                if is_over:
                    yield self._last(part, "stop")
                    return
                if part.text or part.tokens:
                    yield part
            rest = self.stop.push(text.finish())
            rest += self.stop.finish()
            end = Part(rest)
            if self.reply is not None:
                end.said = self.reply.push(rest)
            yield self._last(end, "stop" if self.stop.found else self.handle.finish_reason)
        finally:
            self.handle.cancel()

    def _last(self, part: Part, reason: str) -> Part:
        """The last part, with why it ended."""
        if self.reply is not None:
            part.said.add(self.reply.finish())
            if reason == "stop" and self.reply.count:
                reason = "tool_calls"
        part.reason = reason
        self._end(reason)
        return part

    def _take(self, text: Any, tokens: Sequence[int]) -> Part:
        """The text of tokens up to a stop string."""
        part = Part("")
        for token in tokens:
            if self.namer is not None and self.places is not None:
                part.told.append(self._tell(self.namer, self.places, token))
            self.count += 1
            part.tokens.append(token)
            if token in self.stop_ids:
                continue
            piece = text.push(token)
            part.text += (self.stop.skip if self.count <= self.free else self.stop.push)(piece)
            if self.stop.found:
                break
        return part

    def _tell(self, namer: Detokenizer, places: Places, token: int) -> Told:
        """The log-probabilities of the next token."""
        offset = places.end if token in self.stop_ids else places.push(token)
        return self._told(namer, token, self.handle.logprobs_of(self.count), offset)

    def _echoed(
        self, namer: Detokenizer, prompt: Sequence[int], told: Sequence[TokenLogprobs | None]
    ) -> list[Told]:
        """The log-probabilities of the prompt's tokens; `opening` is their text as it is echoed."""
        places, stream = Places(namer.stream()), namer.stream()
        text = stream.push(*prompt) + stream.finish()
        ahead, most = max(0, text.find(self.opening)), len(self.opening)  # as of a BOS
        made, whole = [], _text_among(namer, prompt)
        for i, (token, said) in enumerate(zip(prompt, told, strict=True)):
            self.before = whole if i else []
            offset = min(max(0, places.push(token) - ahead), most)
            made.append(self._told(namer, token, said, offset))
        return made

    def _told(
        self, namer: Detokenizer, token: int, said: TokenLogprobs | None, offset: int
    ) -> Told:
        """A token with its log-probability, and those of the likeliest."""

        def name(token: int) -> Named:
            stream = namer.stream(self.before)  # as within a text
            text = stream.push(token) + stream.finish()
            known = namer.bytes_of(token) if "\ufffd" in text else text.encode()
            return Named(text, known)

        top = [] if said is None else [(name(x), _finite(y)) for x, y in said.top[: self.likely]]
        logprob = None if said is None else _finite(said.logprob)
        return Told(name(token), logprob, offset, top)

    def shown_prompt(self) -> list[dict[str, Any] | None] | None:
        """The prompt's log-probabilities as vLLM gives them; ranks are known of the likeliest."""
        if self.prompt_told is None:
            return None
        made: list[dict[str, Any] | None] = []
        for token, said in zip(self.handle.prompt_ids, self.prompt_told, strict=True):
            if said is None:
                made.append(None)
                continue
            ranks = {x: i + 1 for i, (x, _) in enumerate(said.top)}
            values = {**dict(said.top), token: said.logprob}
            made.append(
                {
                    str(x): {
                        "logprob": _finite(value),
                        "rank": ranks.get(x),
                        "decoded_token": self.detokenizer.stream().push(x),
                    }
                    for x, value in values.items()
                }
            )
        return made

    def _observe(self, now: float, last: float | None, count: int) -> None:
        if last is None:
            self.metrics.prompt_tokens += self.prompt_tokens
            self.metrics.first_token.observe(now - self.begun)
        else:
            self.metrics.inter_token.observe((now - last) / count, count)
        self.metrics.generation_tokens += count

    def _end(self, reason: str) -> None:
        self.metrics.finished[reason] += 1
        self.metrics.whole.observe(time.monotonic() - self.begun)

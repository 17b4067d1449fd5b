"""The neutral generation loop: prefill, decode in chunks, hand out; stop strings; streaming."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .backends.base import MAX_STEPS, NO_TOKEN, PendingTokens, Request, Runner


class StopStrings:
    """Tells whether the newest token of a sequence completes a stop string.

    As in HF, the string may begin in the prompt, and must end within the newest token. Every token
    is decoded with those before it, since a token alone may be half a character.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any):
        self._strings = strings
        self._tokenizer = tokenizer
        self._window = 4 * max(len(s) for s in strings) + 8  # a token may be a quarter character

    def _text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def completed(self, tokens: Sequence[int]) -> bool:
        """True if a stop string ends within the last of `tokens`."""
        tail = tokens[-self._window :]
        text = self._text(tail)
        old = len(os.path.commonprefix((text, self._text(tail[:-1]))))
        return any(text.find(s, max(0, old - len(s) + 1)) >= 0 for s in self._strings)


@dataclass(eq=False)
class Live:
    """One sequence being generated in a slot. `queued` counts tokens that were asked for."""

    request: Request
    slot: int
    stop: StopStrings | None = None
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    queued: int = 1

    def take(self, token: int) -> bool:
        """Book a token; True if the sequence has ended by it without the device knowing."""
        self.tokens.append(token)
        request = self.request
        is_eos = token in request.eos_ids and len(self.tokens) > request.min_new_tokens
        if is_eos or len(self.tokens) >= request.max_new_tokens:
            self.ended = True
        elif self.stop and self.stop.completed([*request.tokens.tolist(), *self.tokens]):
            self.ended = True
            return True
        return False


class Loop:
    """The slots of one runner. Several generations may be open at once; each keeps its own slots."""

    def __init__(self, runner: Runner):
        self._runner = runner
        self._live: dict[int, Live] = {}
        self._chunks: deque[tuple[PendingTokens, dict[int, Live]]] = deque()

    def start(self, requests: Sequence[Request], stop: StopStrings | None = None) -> list[Live]:
        """Sequences for `requests`, in the lowest free slots, with their first token under way."""
        free = (slot for slot in range(len(requests) + len(self._live)) if slot not in self._live)
        lives = [Live(request, slot, stop) for request, slot in zip(requests, free, strict=False)]
        slots = [live.slot for live in lives]
        try:
            pending = self._runner.prefill(requests, slots)
        except BaseException:
            self._runner.release(slots)
            raise
        self._live.update(zip(slots, lives, strict=True))
        self._chunks.append((pending, dict(enumerate(lives))))
        return lives

    def pump(self, steps: int) -> None:
        """Hand out the oldest chunk's tokens, after enqueueing the next chunk behind it."""
        self._enqueue(steps)
        pending, columns = self._chunks.popleft()
        for row in pending.fetch():
            for column, live in columns.items():
                if not live.ended and row[column] != NO_TOKEN and live.take(int(row[column])):
                    self.finish([live])

    def _enqueue(self, steps: int) -> None:
        """Ask for the next chunk, at most one beyond the one about to be fetched."""
        ahead = max((x.request.max_new_tokens - x.queued for x in self._unfinished()), default=0)
        if ahead <= 0 or len(self._chunks) > 1:
            return
        steps = min(steps, ahead, MAX_STEPS)
        columns = dict(self._live)
        for live in columns.values():
            live.queued += steps
        self._chunks.append((self._runner.decode(steps), columns))

    def _unfinished(self) -> Iterator[Live]:
        return (live for live in self._live.values() if not live.ended)

    def finish(self, lives: Sequence[Live]) -> None:
        """Free the slots of these sequences, ended or not."""
        slots = [live.slot for live in lives if self._live.get(live.slot) is live]
        for live in lives:
            live.ended = True
        for slot in slots:
            del self._live[slot]
        if slots:
            self._runner.release(slots)
        if not self._live:
            self._chunks.clear()


class Generation:
    """The sequences of one call, step by step. Close it, or exhaust it, to free its slots."""

    def __init__(
        self, loop: Loop, requests: Sequence[Request], chunk: int, stop: StopStrings | None = None
    ):
        self._loop = loop
        self._chunk = chunk
        self._lives = loop.start(requests, stop)

    def __iter__(self) -> Iterator[list[int | None]]:
        """For every step, each sequence's new token; None once it has ended."""
        step = 0
        try:
            while True:
                while any(len(x.tokens) <= step and not x.ended for x in self._lives):
                    self._loop.pump(self._chunk)
                tokens = [x.tokens[step] if len(x.tokens) > step else None for x in self._lives]
                if all(token is None for token in tokens):
                    return
                yield tokens
                step += 1
        finally:
            self.close()

    def close(self) -> None:
        """End what is unfinished and free the slots."""
        self._loop.finish(self._lives)

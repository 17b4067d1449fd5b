"""OpenAI's objects of responses: of chats and of texts, whole and as streams of events."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from .answers import Answer, Named, Part, Told
from .calls import Delta
from .protocol import StreamOptions, as_refused


class Form:
    """The objects of one response of a route."""

    kind: str
    prefix: str

    def __init__(self, model: str) -> None:
        self._base = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        return {**self._base, "object": self.kind, "choices": choices, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An event of a stream."""
        return {**self._base, "object": self.chunk_kind, "choices": choices}

    chunk_kind: str

    def tells(self, part: Part) -> bool:
        """True if there is anything to tell of a part."""
        return bool(part.text or part.reason or part.told)

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of a stream's first event; None where there is none."""
        raise NotImplementedError

    def piece(self, index: int, part: Part) -> dict[str, Any]:
        """The choice of an event."""
        raise NotImplementedError

    def choice(
        self, index: int, text: str, reason: str | None, told: list[Told] | None, reply: Delta
    ) -> dict[str, Any]:
        """The choice of a whole response, of its text and what that says."""
        raise NotImplementedError


class ChatForm(Form):
    """The objects of /v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, model: str, reads: bool = False) -> None:
        super().__init__(model)
        self._reads = reads  # calls and thoughts

    def tells(self, part: Part) -> bool:
        """See `Form`."""
        return bool(part.said or part.reason or part.told) if self._reads else super().tells(part)

    def opening(self, index: int) -> dict[str, Any]:
        """See `Form`."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, part: Part) -> dict[str, Any]:
        """See `Form`."""
        delta: dict[str, Any] = {"content": part.text} if part.text else {}
        if self._reads:
            delta = part.said.delta()
        told = _told_in_chat(part.told) if part.told else None
        return {"index": index, "delta": delta, "logprobs": told, "finish_reason": part.reason}

    def choice(
        self, index: int, text: str, reason: str | None, told: list[Told] | None, reply: Delta
    ) -> dict[str, Any]:
        """See `Form`."""
        fields = reply.message() if self._reads else {"content": text}
        message = {"role": "assistant", **fields, "refusal": None}
        said = None if told is None else _told_in_chat(told)
        return {"index": index, "message": message, "logprobs": said, "finish_reason": reason}


def _told_in_chat(told: Sequence[Told]) -> dict[str, Any]:
    content = [
        {**_token(one.token, one.logprob), "top_logprobs": [_token(*x) for x in one.top]}
        for one in told
    ]
    return {"content": content, "refusal": None}


def _token(token: Named, logprob: float | None) -> dict[str, Any]:
    """A token as chats tell of it."""
    known = None if token.raw is None else list(token.raw)
    return {"token": token.text, "logprob": logprob, "bytes": known}


class TextForm(Form):
    """The objects of /v1/completions."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def opening(self, index: int) -> None:
        """See `Form`."""
        return None

    def piece(self, index: int, part: Part) -> dict[str, Any]:
        """See `Form`."""
        return self.choice(index, part.text, part.reason, part.told or None, part.said)

    def choice(
        self, index: int, text: str, reason: str | None, told: list[Told] | None, reply: Delta
    ) -> dict[str, Any]:
        """See `Form`."""
        said = None
        if told is not None:
            said = {
                "tokens": [one.token.text for one in told],
                "token_logprobs": [one.logprob for one in told],
                "text_offset": [one.offset for one in told],
                "top_logprobs": [None if x.logprob is None else _likeliest(x.top) for x in told],
            }
        return {"index": index, "text": text, "logprobs": said, "finish_reason": reason}


def _likeliest(top: Sequence[tuple[Named, float]]) -> dict[str, float]:
    """Likely tokens by their texts; of several ids with one text the likeliest counts."""
    made: dict[str, float] = {}
    for token, logprob in top:
        made.setdefault(token.text, logprob)
    return made


async def whole(answers: Sequence[Answer], form: Form, prompts: bool = False) -> dict[str, Any]:
    """The body of a response, when all of its sequences have ended.

    With `prompts` it tells the log-probabilities of their tokens.
    """

    async def one(answer: Answer) -> dict[str, Any]:
        text, reason, said = "", "", Delta()
        told: list[Told] = []
        async with aclosing(answer.parts()) as parts:  # type: ignore[type-var]
            async for part in parts:
                text, reason = text + part.text, part.reason or reason
                told += part.told
                said.add(part.said)
        known = None if answer.namer is None else told
        return form.choice(answer.index, text, reason, known, said)

    choices = await asyncio.gather(*map(one, answers))
    made = form.whole(choices, _usage(answers))
    if prompts:
        told = await asyncio.to_thread(lambda: [answer.shown_prompt() for answer in answers])
        if form.kind == ChatForm.kind:
            made["prompt_logprobs"] = told[0]
        else:
            for choice, one_told in zip(choices, told, strict=True):
                choice["prompt_logprobs"] = one_told
    return made


async def events_of(
    options: StreamOptions, answers: Sequence[Answer], form: Form
) -> AsyncIterator[bytes]:
    """The events of a stream; what comes together is one write."""
    queue: asyncio.Queue[tuple[int, Part] | Exception | None] = asyncio.Queue()

    async def feed(answer: Answer) -> None:
        try:
            async with aclosing(answer.parts()) as parts:  # type: ignore[type-var]
                async for part in parts:
                    queue.put_nowait((answer.index, part))
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    def event(choice: dict[str, Any]) -> bytes:
        chunk = form.chunk([choice])
        if options.continuous_usage_stats:
            chunk["usage"] = _usage(answers)
        elif options.include_usage:
            chunk["usage"] = None
        return _event(chunk)

    tasks = [asyncio.ensure_future(feed(answer)) for answer in answers]
    try:
        openings = [form.opening(answer.index) for answer in answers]
        if opened := b"".join(event(choice) for choice in openings if choice):
            yield opened
        left = len(answers)
        while left:
            items = [await queue.get()]
            while not queue.empty():
                items.append(queue.get_nowait())
            data = b""
            for item in items:
                if isinstance(item, Exception):
                    yield data + _event(as_refused(item).body()) + _DONE
                    return
                if item is None:
                    left -= 1
                elif form.tells(item[1]) or options.continuous_usage_stats:
                    data += event(form.piece(*item))
            if data:
                yield data
        end = b""
        if options.include_usage or options.continuous_usage_stats:
            end = _event({**form.chunk([]), "usage": _usage(answers)})
        yield end + _DONE
    finally:
        for task in tasks:
            task.cancel()
        cancel(answers)


_DONE = b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


def _usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens of the prompts, each counted once, and of what was made."""
    prompts = {a.prompt: a.prompt_tokens for a in answers}
    prompt, new = sum(prompts.values()), sum(a.count for a in answers)
    cached = {a.prompt: a.handle.cached_tokens for a in reversed(answers)}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
    }


def cancel(answers: Sequence[Answer]) -> None:
    """End sequences that nobody waits for."""
    for answer in answers:
        answer.handle.cancel()

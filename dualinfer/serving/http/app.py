"""The routes of the server, as an ASGI application around one engine."""

import asyncio
import base64
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...engine.chat import encode_chat
from ...engine.grammar import Grammar, make_grammar
from ...engine.requests import TokenLogprobs
from ...engine.text import chat_endings
from ...engine.text_stream import Detokenizer
from ...engine.tokenizing import encode, ids_of, tokenizer_of
from ...errors import ArgumentError, UnsupportedError, shown
from .answers import Answer, Nothing, StopText
from .calls import CHANNELS, MARKS
from .engines import Handle, ServedEngine, State
from .forms import ChatForm, Form, TextForm, cancel, events_of, whole
from .metrics import CONTENT_TYPE, Metrics
from .protocol import (
    MOST_SEQUENCES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    Generation,
    RequestError,
    StreamOptions,
    TokenizeRequest,
    as_refused,
    content_of,
    read,
)
from .talks import Talk, TalkOf

MOST_BYTES = 8 * 2**20  # of a body
MOST_WAITING = 4096  # sequences that wait for a slot
_TEXTS = 64  # that are embedded between two looks whether anybody still waits
T = TypeVar("T")


class Asked(NamedTuple):
    """A request of new text that was read: its prompts, each with the text of it to be echoed.

    `ends` are the ids that end a text, and `name` is the field of the prompts.
    """

    prompts: list[tuple[list[int], str]]
    ends: Sequence[int]
    name: str
    talk: "TalkOf | None" = None


class Server:
    """Holds what the routes share: the engine, its name, and what is counted."""

    def __init__(
        self,
        engine: ServedEngine,
        name: str,
        api_key: str | None = None,
        most_bytes: int = MOST_BYTES,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        origins: Sequence[str] = (),
    ) -> None:
        self.engine, self.name = engine, name
        self._parsers, self._origins = (tool_call_parser, reasoning_parser), list(origins)
        self._key = None if api_key is None else api_key.strip().encode()
        self._most_bytes = most_bytes
        self._metrics, self._created = Metrics(), int(time.time())
        self.is_draining = False

    def config(self, grace: int | None = None, **how: Any) -> uvicorn.Config:
        """Uvicorn's config for the routes; open requests have `grace` seconds when it is to end.

        h11 bounds the headers of a request, which httptools does not.
        """
        quiet = {"log_level": "warning", "access_log": False, "lifespan": "off", "ws": "none"}
        how |= {"http": "h11", "timeout_graceful_shutdown": grace}
        return uvicorn.Config(self._ended(self.app()), **quiet, **how)

    def _ended(self, app: ASGIApp) -> ASGIApp:
        """The application, whose requests are told so where the server ends before them."""

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            has_begun = False

            async def note(message: Message) -> None:
                nonlocal has_begun
                has_begun = True
                await send(message)

            try:
                await app(scope, receive, note)
            except asyncio.CancelledError:
                if not self.is_draining:
                    raise
                if not has_begun:
                    refused = RequestError("The server has gone down.", status=503)
                    response = JSONResponse(refused.body(), refused.status)
                    await response(scope, receive, send)

        return call

    def app(self) -> Starlette:
        """The application."""
        posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._complete,
            "/v1/embeddings": self._embed,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        gets: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/v1/models": self._models,
            "/v1/models/{name:path}": self._models,
        }
        routes = [Route(p, self._guarded(f), methods=["POST"]) for p, f in posts.items()]
        routes += [Route(p, self._guarded(f), methods=["GET"]) for p, f in gets.items()]
        routes += [
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._show_metrics),
        ]
        pages = Middleware(
            CORSMiddleware,
            allow_origins=self._origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
        return Starlette(
            routes=routes,
            exception_handlers={HTTPException: _unrouted},
            middleware=[pages] if self._origins else [],
        )

    def _guarded(
        self, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """The handler behind the key; what it raises becomes OpenAI's error object."""

        async def call(request: Request) -> Response:
            try:
                self._check_key(request)
                if request.method == "POST":
                    _check_type(request)
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                refused = as_refused(error)
                return JSONResponse(refused.body(), refused.status)

        return call

    def _check_key(self, request: Request) -> None:
        if self._key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Headers come as latin-1, whatever the client wrote.
        same = secrets.compare_digest(given.strip().encode("latin-1"), self._key)
        if scheme.lower() != "bearer" or not same:
            raise RequestError(
                "The API key is missing or wrong. Send it as `Authorization: Bearer KEY`.",
                status=401,
                code="invalid_api_key",
            )

    async def _body(self, request: Request) -> bytes:
        """The body, as far as it is not too large."""
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > self._most_bytes:
                raise RequestError(
                    f"The body is larger than {self._most_bytes:,} bytes.", status=413
                )
            chunks.append(chunk)
        return b"".join(chunks)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise RequestError(
                f"There is no model {shown(name)} here; this server has {shown(self.name)}.",
                "model",
                404,
                "model_not_found",
            )

    # Text

    async def _chat(self, request: Request) -> Response:
        body = read(await self._body(request), ChatRequest)
        self._check_model(body.model)
        answers = await self._begun(request, body, lambda: self._read_chat(body))
        reads = answers[0].reply is not None
        return await self._respond(request, body, answers, ChatForm(self.name, reads))

    def _read_chat(self, body: ChatRequest) -> Asked:
        tokenizer, options = self.engine.tokenizer, body.template_options
        tools, talk = body.callable, self._talk_of(body, options)
        ids = encode_chat(tokenizer, content_of(body.messages), options)
        ends = chat_endings({"eos_token_id": self.engine.about.ends}, tokenizer_of(tokenizer))
        return Asked([(ids, "")], ends, "messages", talk.of(ids, body, tools))

    def _talk_of(self, body: ChatRequest, options: dict[str, Any]) -> "Talk":
        """The rules by which the answers of the chat template are read."""
        talk = Talk.of_template(self.engine.tokenizer, options, *self._parsers)
        if body.callable and talk.has_channels and talk.style != CHANNELS:
            raise RequestError(
                "tools: the model answers in channels, where calls have the form of harmony alone, "
                f"and `dualinfer serve` has --tool-call-parser {self._parsers[0]}. Start it "
                "without, or pass no tools.",
                "tools",
            )
        if body.callable and talk.style is None:
            raise RequestError(
                "tools: the model's chat template writes calls in no form that is known "
                f"({', '.join(MARKS)}), if any. `dualinfer serve --tool-call-parser` names one.",
                "tools",
            )
        return talk

    async def _complete(self, request: Request) -> Response:
        body = read(await self._body(request), CompletionRequest)
        self._check_model(body.model)
        answers = await self._begun(request, body, lambda: self._read_completion(body))
        return await self._respond(request, body, answers, TextForm(self.name))

    def _read_completion(self, body: CompletionRequest) -> Asked:
        if not body.prompts or len(body.prompts) * (body.n or 1) > MOST_SEQUENCES:
            raise RequestError(
                f"prompt holds {len(body.prompts)} prompts; expected at least one, and at most "
                f"{MOST_SEQUENCES} sequences of all of them in one request.",
                "prompt",
            )
        prompts = [self._prompt(one, bool(body.echo)) for one in body.prompts]
        return Asked(prompts, self.engine.about.ends, "prompt")

    def _prompt(self, given: str | list[int], echo: bool) -> tuple[list[int], str]:
        """The ids of a prompt, and its text where that is asked for."""
        if isinstance(given, str):
            return encode(self.engine.tokenizer, given), given if echo else ""
        if not given:
            raise RequestError("prompt is empty; there is nothing to continue.", "prompt")
        return given, self._text_of(given, "prompt") if echo else ""

    def _text_of(self, ids: Sequence[int], name: str) -> str:
        """The text of ids that the field `name` gave."""
        _check_ids(ids, len(tokenizer_of(self.engine.tokenizer)), name)
        stream = Detokenizer(tokenizer_of(self.engine.tokenizer), False).stream()
        return stream.push(*ids) + stream.finish()

    async def _begun(
        self, request: Request, body: Generation, read: Callable[[], Asked]
    ) -> list[Answer]:
        """The answers to a request, each sequence queued, while its client waits.

        What is `read` is encoded in a thread, so that the event loop goes on meanwhile.
        """
        if body.told is None:
            answers = await _in_thread(lambda: self._begin(body, read(), None))
        else:
            asked, told = await asyncio.to_thread(lambda: self._checked(body, read())), []
            for ids, _ in asked.prompts:
                work = self.engine.prompt_logprobs(ids, body.told)
                told.append(await _unless_gone(request, work))
            answers = await _in_thread(lambda: self._begin(body, asked, told))
        try:
            await _unless_gone(request, _accepted(answers))
        except BaseException:
            cancel(answers)
            raise
        return answers

    def _checked(self, body: Generation, asked: Asked) -> Asked:
        """The request itself, unless it cannot be served."""
        if self.engine.state().waiting + len(asked.prompts) * (body.n or 1) > MOST_WAITING:
            raise RequestError("Too many requests wait. Try again later.", status=429)
        if body.prompt_logprobs is not None and body.stream:
            raise RequestError("prompt_logprobs are not for stream: true.", "prompt_logprobs")
        if body.stream_options is not None and not body.stream:
            raise RequestError("stream_options are for stream: true.", "stream_options")
        _check_ids(body.stop_token_ids or [], self.engine.about.vocab, "stop_token_ids")
        for ids, _ in asked.prompts:
            self._length(body, len(ids), asked.name)
        return asked

    def _begin(
        self,
        body: Generation,
        asked: Asked,
        told: Sequence[Sequence[TokenLogprobs | None]] | None,
    ) -> list[Answer]:
        """The answers to some prompts, of whose tokens this is `told`; each sequence is queued."""
        begun, count, talk = time.monotonic(), body.n or 1, asked.talk
        self._checked(body, asked)
        own = [] if body.ignore_eos else list(asked.ends)
        stop_ids = body.stop_token_ids or []
        ends = list(dict.fromkeys([*own, *stop_ids]))
        arguments = body.sampling() | {"eos_token_id": ends or None}
        given, grammar = body.grammar, None
        if talk is not None:
            given = talk.grammar(given)
        if given is not None:
            grammar, arguments["grammar"] = self._grammar(*given), given[1]
        reads = talk is not None and talk.reads
        skips = body.skip_special_tokens is not False
        keeps = bool(body.include_stop_str_in_output)
        tokenizer, cleans = tokenizer_of(self.engine.tokenizer), grammar is None
        detokenizer = Detokenizer(tokenizer, skips and not reads, cleans=cleans)
        silent = talk.silent if talk is not None and reads and skips else ()
        namer = placer = None
        if arguments["logprobs"] is not None:
            namer = Detokenizer(tokenizer, skip_special_tokens=False, eager=True)
            placer = Detokenizer(tokenizer, skips and not reads, eager=True)
        answers: list[Answer] = []
        try:
            for i, (ids, opening) in enumerate(asked.prompts):
                length = self._length(body, len(ids), asked.name)
                for handle in self._submit(ids, arguments, length, count):
                    reader, dropped = None, stop_ids if not keeps else []
                    if grammar is not None and length:  # whose ends are no text
                        reader, dropped = grammar.reader(), ends
                    answer = Answer(
                        len(answers),
                        i,
                        len(ids),
                        handle,
                        detokenizer,
                        StopText(body.stops, keeps, reader),
                        frozenset((*dropped, *silent)),
                        body.min_tokens or 0,
                        self._metrics,
                        begun,
                        namer,
                        talk.reply() if talk is not None and reads else None,
                        opening,
                        None if told is None else told[i],
                        body.likely or 0,
                        placer,
                    )
                    answers.append(answer)
        except BaseException:
            cancel(answers)
            raise
        return answers

    def _grammar(self, name: str, given: dict[str, Any]) -> Grammar:
        """A grammar that can be served, which the field `name` gave."""
        try:
            return make_grammar(given, self.engine.tokenizer, self.engine.about.vocab, (), 0)
        except (ArgumentError, UnsupportedError) as error:
            raise RequestError(f"{name}: {error}", name) from error

    def _submit(
        self, ids: list[int], arguments: dict[str, Any], length: int, count: int
    ) -> list[Handle]:
        """So many sequences that continue a prompt."""
        if length == 0:
            return [Nothing(ids) for _ in range(count)]
        return self.engine.start(ids, {**arguments, "max_new_tokens": length}, count)

    def _length(self, body: Generation, prompt: int, name: str) -> int:
        """The number of new tokens that there may be."""
        asked, most = body.asked_length, self.engine.about.max_tokens
        if asked == 0 and getattr(body, "echo", False):
            return 0
        if asked == 0:
            raise RequestError("max_tokens is 0; expected at least 1.", "max_tokens")
        room = most - prompt if most else None
        if room is not None and room < (asked or 1):
            raise RequestError(
                f"This model takes {most:,} tokens, and the request has {prompt:,} in {name} and "
                f"asks for {asked or 1:,} new ones. Send less, or ask for fewer.",
                name,
                code="context_length_exceeded",
            )
        length = asked
        if length is None:
            length = body.DEFAULT_LENGTH if room is None else min(body.DEFAULT_LENGTH, room)
        if (body.min_tokens or 0) > length:
            raise RequestError(
                f"min_tokens is {body.min_tokens}, and at most {length} new tokens are made. Ask "
                "for fewer, or pass a larger max_tokens.",
                "min_tokens",
            )
        return length

    async def _respond(
        self, request: Request, body: Generation, answers: list[Answer], form: "Form"
    ) -> Response:
        if body.stream:
            events = events_of(body.stream_options or StreamOptions(), answers, form)
            return StreamingResponse(
                events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
            )
        try:
            tells = body.prompt_logprobs is not None
            return JSONResponse(await _unless_gone(request, whole(answers, form, tells)))
        finally:
            cancel(answers)

    # The rest

    async def _models(self, request: Request) -> Response:
        if "name" in request.path_params:
            self._check_model(request.path_params["name"])
        model = {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "dualinfer",
            "max_model_len": self.engine.about.max_tokens or None,
        }
        one = "name" in request.path_params
        return JSONResponse(model if one else {"object": "list", "data": [model]})

    async def _tokenize(self, request: Request) -> Response:
        body = read(await self._body(request), TokenizeRequest)
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("Send either prompt or messages.", "prompt")
        if body.messages is not None and body.add_special_tokens is not None:
            raise RequestError("add_special_tokens is for a prompt.", "add_special_tokens")
        tokenizer = self.engine.tokenizer
        if body.messages is not None:
            ids = await asyncio.to_thread(encode_chat, tokenizer, content_of(body.messages))
        else:
            bare = body.add_special_tokens is False
            ids = await asyncio.to_thread(ids_of, tokenizer, body.prompt or "", bare)
        most = self.engine.about.max_tokens or None
        return JSONResponse({"count": len(ids), "max_model_len": most, "tokens": ids})

    async def _detokenize(self, request: Request) -> Response:
        body = read(await self._body(request), DetokenizeRequest)
        self._check_model(body.model)
        return JSONResponse(
            {"prompt": await asyncio.to_thread(self._text_of, body.tokens, "tokens")}
        )

    async def _embed(self, request: Request) -> Response:
        body = read(await self._body(request), EmbeddingRequest)
        self._check_model(body.model)
        if body.encoding_format not in (None, "float", "base64"):
            raise RequestError(
                f"encoding_format is {shown(body.encoding_format)}; expected float or base64.",
                "encoding_format",
            )
        work = self._embedded(body)
        return Response(await _unless_gone(request, work), media_type="application/json")

    async def _embedded(self, body: EmbeddingRequest) -> bytes:
        """The body of a response; texts are embedded some at a time, while somebody waits."""
        texts = body.inputs
        for given in texts:
            if not isinstance(given, str):
                _check_ids(given, self.engine.about.vocab, "input")
        data: list[str] = []
        tokens = 0
        for first in range(0, len(texts), _TEXTS):
            some = texts[first : first + _TEXTS]
            vectors = await self.engine.embed(some, body.dimensions)
            read, made = await asyncio.to_thread(self._shown, some, vectors, first, body)
            tokens += read
            data += made
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        rest = json.dumps({"object": "list", "model": self.name, "usage": usage})
        return f'{rest[:-1]}, "data": [{", ".join(data)}]}}'.encode()

    def _shown(
        self, texts: Sequence[str | list[int]], vectors: Any, first: int, body: EmbeddingRequest
    ) -> tuple[int, list[str]]:
        """The number of the texts' tokens, and their vectors as JSON, with indices from `first`."""
        data = []
        for i, vector in enumerate(vectors):
            numbers: Any = vector.tolist()
            if body.encoding_format == "base64":
                numbers = base64.b64encode(vector.astype("<f4").tobytes()).decode()
            data.append(
                json.dumps({"object": "embedding", "index": first + i, "embedding": numbers})
            )
        counts = (
            len(ids_of(self.engine.tokenizer, text) if isinstance(text, str) else text)
            for text in texts
        )
        return sum(counts), data

    async def _health(self, request: Request) -> Response:
        trouble = self.engine.state().trouble
        return PlainTextResponse(
            "ok\n" if trouble is None else f"{trouble}\n", 503 if trouble else 200
        )

    async def _ready(self, request: Request) -> Response:
        if self.is_draining:
            return PlainTextResponse("The server is going down.\n", 503)
        return await self._health(request)

    async def _show_metrics(self, request: Request) -> Response:
        now: State = self.engine.state()
        share = now.cache
        if share is None:
            share = 1.0 if now.waiting else now.live / now.slots
        gauges = {
            "num_requests_running": now.live,
            "num_requests_waiting": now.waiting,
            "kv_cache_usage_perc": share,
        }
        totals = {
            "prefix_cache_queries_total": now.asked,
            "prefix_cache_hits_total": now.found,
            "num_preemptions_total": now.preemptions,
        }
        text = self._metrics.text(self.name, gauges, totals)
        return Response(text, media_type=CONTENT_TYPE)


async def _in_thread(function: Callable[[], list[Answer]]) -> list[Answer]:
    """Answers that a function gives in a thread; they end where nobody waits for it any more."""
    task = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda t: None if t.exception() else cancel(t.result()))
        raise


async def _accepted(answers: Sequence[Answer]) -> None:
    """Wait until the engine has taken each sequence; raises where it refuses one."""
    for answer in answers:
        await answer.handle.accepted()


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; ClientDisconnect where the client leaves before."""

    async def until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


def _check_type(request: Request) -> None:
    """Refuse a body that a page of another site may send without a question: it is no JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(f"Content-Type is {shown(kind)}; expected application/json.", status=415)


def _check_ids(ids: Sequence[int], size: int, name: str) -> None:
    """Refuse a token that there is not, among those that the field `name` gave."""
    if (wrong := next((x for x in ids if x >= size), None)) is not None:
        raise RequestError(f"{name} has the id {wrong}, and there are {size:,}.", name)


async def _unrouted(request: Request, error: Any) -> Response:
    said = f"{request.method} {request.url.path}: {error.detail}."
    refused = RequestError(said, status=error.status_code)
    return JSONResponse(refused.body(), refused.status, headers=error.headers)

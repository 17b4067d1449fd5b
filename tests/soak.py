"""Bad days of a server: many requests at once, of which some leave, are cut off or make no sense.

    python -m tests.soak --requests 10000 [--backend jax] [--shape llama-3-8b] [--minutes 60]
    python -m tests.soak --requests 10000 --kills 3 [--backend jax]

Server and clients share a process and an event loop. Every request must end in exactly one state,
the one that its kind allows; a text that was completed, however long that took, is that of a run
in which nobody disturbs anybody, and one that was cut off begins as it does (float32; in 16 bits
texts are counted and not compared). In the end no sequence is under way, room can be reserved
anew, and as many tasks, threads and file descriptors are there as before. With --minutes rounds
follow one another, and what memory the process holds is told after each. With --kills the engine
has a process of its own, as that of `dualinfer serve`, which is killed so many times under way.
"""

import argparse
import asyncio
import json
import os
import resource
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

KINDS = {
    "whole": 0.3,  # a response in one piece
    "stream": 0.25,
    "direct": 0.1,  # generate_async
    "disconnect": 0.1,
    "abort": 0.05,  # of generate_async
    "deadline": 0.08,
    "oversize": 0.05,
    "broken": 0.05,
    "grammar": 0.02,  # one that is none
}
HERE = {"direct": "whole", "abort": "disconnect", "deadline": "stream"}  # kinds without HTTP
ENDS = {
    "whole": {"done"},
    "stream": {"done"},
    "direct": {"done"},
    "disconnect": {"left", "done"},
    "abort": {"cancelled", "done"},
    "deadline": {"late", "done"},
    "oversize": {"400"},
    "broken": {"400"},
    "grammar": {"400"},
}
BROKEN = (
    b"{",
    b"[]",
    b'{"model": "soak", "prompt": 7}',
    b'{"model": "soak", "prompt": "x", "temperature": -1}',
    b'{"model": "soak", "prompt": [[1], "x"]}',
    b'{"model": "soak", "prompt": [99999999]}',
    b'{"model": "soak", "prompt": "x", "what": 1}',
    b"\xff\xfe" * 20,
)


@dataclass
class Ask:
    """A request; `delay` seconds from the start till it comes, `patience` till who leaves does."""

    kind: str
    prompt: list[int]
    new_tokens: int
    seed: int | None  # None: greedy
    delay: float
    patience: float


@dataclass
class Outcome:
    """How a request ended, and the tokens or the text that came of it."""

    states: list[str]
    text: str = ""


def asks_of(
    count: int, vocab: int, most: int, seed: int, seconds: float, over_http: bool = False
) -> list[Ask]:
    """Requests whose prompts are few, so that many of them share what an undisturbed run gives."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(5, vocab, n).tolist() for n in random.integers(1, most // 4, 24)]
    kinds = random.choice(list(KINDS), count, p=list(KINDS.values()))
    found = []
    for kind in kinds:
        which = int(random.integers(len(prompts)))
        new, seeded = 4 + 5 * (which % 7), which % 3 == 0
        prompt = prompts[which]
        if kind == "oversize":
            prompt = prompt * (most // len(prompt) + 1)
        times = random.uniform(0, seconds), random.exponential(0.02)
        kind = HERE.get(str(kind), str(kind)) if over_http else str(kind)
        found.append(Ask(kind, prompt, new, which if seeded else None, *times))
    return found


class Soak:
    """Runs requests against one engine and its server.

    The engine is one of this process, or None; `served` is what the routes see of it.
    """

    def __init__(self, engine: Any, served: Any, url: tuple[str, int]) -> None:
        self.engine, self.served, self._url = engine, served, url
        self.ended = 0

    def _arguments(self, ask: Ask) -> dict[str, Any]:
        how: dict[str, Any] = {"max_new_tokens": ask.new_tokens, "eos_token_id": None}
        how["do_sample"] = ask.seed is not None
        if ask.seed is not None:
            how |= {"seed": ask.seed, "temperature": 1.0, "top_k": 0}
        return how

    def _body(self, ask: Ask, **more: Any) -> bytes:
        fields = {"model": "soak", "prompt": ask.prompt, "max_tokens": ask.new_tokens}
        fields |= {"temperature": 0.0 if ask.seed is None else 1.0, "ignore_eos": True}
        fields |= {"seed": ask.seed, "skip_special_tokens": False} | more
        return json.dumps(fields).encode()

    async def run(self, asks: list[Ask]) -> list[Outcome]:
        """The outcomes of all requests."""
        return list(await asyncio.gather(*map(self._one, asks)))

    async def _one(self, ask: Ask) -> Outcome:
        outcome = Outcome([])
        await asyncio.sleep(ask.delay)
        try:
            kind = "direct" if ask.kind in ("abort", "deadline") else ask.kind
            await getattr(self, f"_{kind}")(ask, outcome)
        except Exception as error:
            outcome.states.append(f"{type(error).__name__}: {error}")
        self.ended += 1
        return outcome

    async def _direct(self, ask: Ask, outcome: Outcome) -> None:
        from dualinfer import DeadlineError

        how = self._arguments(ask)
        if ask.kind == "deadline":
            how["deadline"] = ask.patience + 1e-4
        handle = self.engine.generate_async(ask.prompt, skip_special_tokens=False, **how)
        if ask.kind == "abort":
            asyncio.get_running_loop().call_later(ask.patience, handle.cancel)
        try:
            async for piece in handle.pieces():
                outcome.text += piece
        except DeadlineError:
            outcome.states.append("late")
            return
        outcome.states.append("cancelled" if handle.finish_reason == "cancelled" else "done")

    async def _whole(self, ask: Ask, outcome: Outcome) -> None:
        status, body = await self._post(self._body(ask))
        outcome.states.append("done" if status == 200 else str(status))
        if status == 200:
            outcome.text = json.loads(body)["choices"][0]["text"]

    async def _stream(self, ask: Ask, outcome: Outcome) -> None:
        status, body = await self._post(self._body(ask, stream=True))
        self._read(body, outcome)
        is_done = body.rstrip().endswith(b"data: [DONE]")
        outcome.states.append("done" if status == 200 and is_done else str(status))

    def _read(self, body: bytes, outcome: Outcome) -> None:
        for line in body.split(b"\n"):
            with suppress(ValueError):  # the last one, cut off
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:]).get("choices", []):
                        outcome.text += choice["text"]

    async def _disconnect(self, ask: Ask, outcome: Outcome) -> None:
        is_stream = ask.new_tokens % 2 == 0
        got = bytearray()
        try:
            async with asyncio.timeout(ask.patience):
                await self._post(self._body(ask, stream=is_stream), got)
            outcome.states.append("done")
        except TimeoutError:
            outcome.states.append("left")
        _, _, body = bytes(got).partition(b"\r\n\r\n")
        if is_stream:
            self._read(body, outcome)

    async def _oversize(self, ask: Ask, outcome: Outcome) -> None:
        status, _ = await self._post(self._body(ask))
        outcome.states.append(str(status))

    async def _broken(self, ask: Ask, outcome: Outcome) -> None:
        status, _ = await self._post(BROKEN[len(ask.prompt) % len(BROKEN)])
        outcome.states.append(str(status))

    async def _grammar(self, ask: Ask, outcome: Outcome) -> None:
        schema = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "nothing"}},
        }
        status, _ = await self._post(self._body(ask, response_format=schema))
        outcome.states.append(str(status))

    async def _post(self, body: bytes, got: bytearray | None = None) -> tuple[int, bytes]:
        """Status and body of a request; what has come by then is in `got`."""
        got = bytearray() if got is None else got
        reader, writer = await asyncio.open_connection(*self._url)
        try:
            head = "POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while data := await reader.read(65536):
                got += data
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        head, _, rest = bytes(got).partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]), rest

    async def expected(self, asks: list[Ask]) -> dict[tuple[Any, ...], str]:
        """The text of each request that may be completed, of a run that nobody disturbs."""
        kinds = ("oversize", "broken", "grammar")
        first = {key_of(ask): ask for ask in asks if ask.kind not in kinds}
        if self.engine is None:
            texts = await asyncio.gather(*map(self._quiet, first.values()))
        else:
            texts = [await self._alone(ask) for ask in first.values()]
        return dict(zip(first, texts, strict=True))

    async def _alone(self, ask: Ask) -> str:
        how = self._arguments(ask)
        return await self.engine.generate_async(ask.prompt, skip_special_tokens=False, **how).text()

    async def _quiet(self, ask: Ask) -> str:
        outcome = Outcome([])
        await self._whole(ask, outcome)
        assert outcome.states == ["done"]
        return outcome.text

    async def settle(self) -> None:
        """Wait until nothing is under way."""
        begun = time.monotonic()
        while (now := self.served.state()).live or now.waiting:
            assert time.monotonic() - begun < 60, f"still under way: {now}"
            await asyncio.sleep(0.02)


def key_of(ask: Ask) -> tuple[Any, ...]:
    """All that a text follows from."""
    return tuple(ask.prompt), ask.new_tokens, ask.seed


def _held(loop_tasks: int) -> dict[str, int]:
    return {
        "tasks": loop_tasks,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


async def soak(engine: Any, asks: list[Ask], exact: bool = True) -> dict[str, Any]:
    """The outcome of requests to an engine of this process; raises where something leaks."""
    from dualinfer.serving.http.engines import LocalEngine

    found = await _soaked(engine, LocalEngine(engine), asks, exact)
    engine._loop.check_idle()
    return found


async def soak_killed(
    backend: str, asks: list[Ask], kills: int, slots: int | None, tokens: int
) -> dict[str, Any]:
    """The same, of an engine in a process of its own, which is killed so many times meanwhile."""
    import dualinfer
    from dualinfer.checkpoint.described.tokenizer import load_tokenizer
    from dualinfer.serving.remote.keeper import Keeper, python

    folder = dualinfer.embedded_model()
    opens = {"folder": str(folder), "adapters": {}, "backend": backend}
    opens |= {"how": {"dtype": "float32"}, "room": [slots, tokens, True, 1.0]}
    keeper = Keeper(python("dualinfer.cli.engine_process"), opens, load_tokenizer(folder))
    killed = set()

    async def kill(runs: Soak) -> None:
        for i in range(kills):
            while runs.ended < len(asks) * (i + 1) // (kills + 1) or keeper.engine.trouble:
                await asyncio.sleep(0.002)
            while not keeper.engine.state().live:  # something is under way
                await asyncio.sleep(0.002)
            killed.add(keeper.process_id)
            os.kill(keeper.process_id or 0, signal.SIGKILL)

    async with keeper.running() as engine:
        found = await _soaked(None, engine, asks, True, kill)
        assert keeper.process_id not in killed and len(killed) == kills
    return found


async def _soaked(
    engine: Any,
    served: Any,
    asks: list[Ask],
    exact: bool,
    beside: Callable[[Soak], Coroutine[Any, Any, None]] | None = None,
) -> dict[str, Any]:
    import uvicorn

    from dualinfer.serving.http.app import Server

    count = len(asks)
    config = Server(served, "soak").config(log_config=None, backlog=4096)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    serving = asyncio.create_task(server._serve([listener]))
    try:
        runs = Soak(engine, served, listener.getsockname()[:2])
        expected = await runs.expected(asks)
        await runs.run(asks[:64])  # threads and connections that stay
        await runs.settle()
        await asyncio.sleep(0.2)
        before = _held(len(asyncio.all_tasks()))
        begun = time.monotonic()
        runs.ended = 0
        other = None if beside is None else asyncio.create_task(beside(runs))
        outcomes = await runs.run(asks)
        if other is not None:
            await asyncio.wait_for(other, 1)
        took = time.monotonic() - begun
        await runs.settle()
        after = before
        for _ in range(100):  # the server ends a task of a connection a moment after the client
            after = _held(len(asyncio.all_tasks()))
            if all(after[name] <= before[name] for name in ("tasks", "descriptors")):
                break
            await asyncio.sleep(0.05)
    finally:
        server.should_exit = True
        await serving
        listener.close()
    wrong = [
        (ask.kind, outcome.states)
        for ask, outcome in zip(asks, outcomes, strict=True)
        if len(outcome.states) != 1 or outcome.states[0] not in ENDS[ask.kind]
    ]
    assert not wrong, f"{len(wrong)} of {count} ended otherwise: {wrong[:5]}"
    differing = 0
    for ask, outcome in zip(asks, outcomes, strict=True):
        if (text := expected.get(key_of(ask))) is None:
            continue
        is_whole = outcome.states == ["done"] and (
            ask.kind != "disconnect" or ask.new_tokens % 2 == 0
        )
        differing += outcome.text != text if is_whole else not text.startswith(outcome.text)
    assert not (exact and differing), f"{differing} of {count} texts differ"
    for name in ("tasks", "descriptors"):
        assert after[name] <= before[name], f"{name}: {before[name]} before, {after[name]} after"
    assert after["threads"] <= before["threads"] + 32, f"threads: {before} before, {after} after"
    states = Counter(f"{a.kind}: {o.states[0]}" for a, o in zip(asks, outcomes, strict=True))
    return {"seconds": took, "differing": differing, "states": dict(sorted(states.items()))} | after


def _main() -> None:
    import dualinfer
    from dualinfer.bench.random_weights import random_model
    from dualinfer.bench.shapes import open_model

    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="torch", choices=["torch", "jax"])
    parser.add_argument("--shape", help="random weights; unset: the embedded model in float32")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60, help="in which they come")
    parser.add_argument("--kills", type=int, default=0, help="of the engine; of the embedded model")
    parser.add_argument("--minutes", type=float, default=0, help="rounds until then")
    options = parser.parse_args()
    shape = options.shape
    if options.kills:
        asks = asks_of(options.requests, 2048, 1024, 0, options.seconds, over_http=True)
        print(
            json.dumps(asyncio.run(soak_killed(options.backend, asks, options.kills, None, 1024)))
        )
        return
    model = dualinfer.embedded_model() if shape is None else random_model(open_model(shape), "bf16")
    dtype = "float32" if shape is None else "bfloat16"
    with dualinfer.init_inference(model, backend=options.backend, dtype=dtype) as engine:
        if shape is not None:
            from dualinfer.bench.local_server import word_tokenizer

            engine.tokenizer = word_tokenizer(open_model(shape).vocab)
        most, vocab = min(1024, engine.report().max_tokens), engine.runner.spec.vocab
        engine.reserve(tokens=most)
        begun, round_ = time.monotonic(), 0
        while not round_ or time.monotonic() - begun < 60 * options.minutes:
            asks = asks_of(options.requests, vocab, most, round_, options.seconds)
            found = asyncio.run(soak(engine, asks, shape is None))
            found["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            print(json.dumps(found), flush=True)
            round_ += 1
        engine.reserve(tokens=most)  # nothing is under way


if __name__ == "__main__":
    _main()

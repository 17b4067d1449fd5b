"""Bad days of a server: many requests at once, of which some leave, are cut off or make no sense.

    python -m tests.soak --requests 10000 [--backend jax|both] [--shape llama-3-8b] [--kills 3]
    python -m tests.soak --requests 100 --seconds 20 --minutes 60 --apart

Server and clients share a process and an event loop. Every request must end in exactly one state,
the one that its kind allows; a text that was completed, however long that took, is that of a run
in which nobody disturbs anybody, and one that was cut off begins as it does (float32; in 16 bits
texts are counted and not compared). In the end no sequence is under way, room can be reserved
anew, and as many tasks, threads and file descriptors are there as before. With --kills the engine
has a process of its own, as that of `dualinfer serve`, which is killed so many times in a round.
With --minutes rounds follow one another, and memory must be flat over the last two thirds of them.
"""

import argparse
import asyncio
import faulthandler
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
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


def asks_of(count: int, vocab: int, most: int, seed: int, seconds: float) -> list[Ask]:
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
        found.append(Ask(str(kind), prompt, new, which if seeded else None, *times))
    return found


class Soak:
    """Runs requests against one engine and its server.

    The engine is one of this process, or None; `served` is what the routes see of it.
    """

    def __init__(self, engine: Any, served: Any, url: tuple[str, int]) -> None:
        self.engine, self.served, self._url = engine, served, url
        self.ended = self.retried = 0
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._gate = asyncio.Semaphore((files - 256) // 2)  # both ends of a connection are here

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
        if self.engine is None:
            await self._apart(ask, how, outcome)
            return
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

    async def _apart(self, ask: Ask, how: dict[str, Any], outcome: Outcome) -> None:
        """The same of an engine of another process, whose deadlines are the callers'."""
        from dualinfer.engine.text_stream import Detokenizer

        text = Detokenizer(self.served.tokenizer, False).stream(ask.prompt)
        (handle,) = self.served.start(ask.prompt, how, 1)
        if ask.kind != "direct":
            asyncio.get_running_loop().call_later(ask.patience, handle.cancel)
        while tokens := await handle.arrived():
            outcome.text += text.push(*tokens)
        if handle.finish_reason == "cancelled":
            outcome.states.append("late" if ask.kind == "deadline" else "cancelled")
        else:
            outcome.text += text.finish()
            outcome.states.append("done")

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
        """Status and body of a request; what has come by then is in `got`.

        One that comes while too many wait is sent again, as clients do.
        """
        got = bytearray() if got is None else got
        async with self._gate:
            while True:
                status, answer = await self._posted(body, got)
                if status != 429:
                    return status, answer
                self.retried += 1
                got.clear()
                await asyncio.sleep(0.5)

    async def _posted(self, body: bytes, got: bytearray) -> tuple[int, bytes]:
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


def memory_of(process: int) -> int:
    """MiB that a process has in memory."""
    pages = Path(f"/proc/{process}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") >> 20


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


class Apart:
    """An engine in a process of its own, which may be killed."""

    def __init__(self, keeper: Any, engine: Any) -> None:
        self._keeper, self._engine = keeper, engine

    async def soak(self, asks: list[Ask], kills: int, exact: bool = True) -> dict[str, Any]:
        """The outcome of requests, amid of which the engine is killed so many times."""
        keeper, killed = self._keeper, set()

        async def kill(runs: Soak) -> None:
            for i in range(kills):
                while runs.ended < len(asks) * (i + 1) // (kills + 1) or keeper.engine.trouble:
                    await asyncio.sleep(0.002)
                while not keeper.engine.state().live:  # something is under way
                    await asyncio.sleep(0.002)
                killed.add(keeper.process_id)
                os.kill(keeper.process_id or 0, signal.SIGKILL)

        found = await _soaked(None, self._engine, asks, exact, kill)
        assert keeper.process_id not in killed and len(killed) == kills
        return found | {"kills": kills, "engine_mib": memory_of(keeper.process_id)}


@asynccontextmanager
async def apart(module: str, opens: dict[str, Any], tokenizer: Any) -> AsyncIterator[Apart]:
    """An engine that a process of the module opens."""
    from dualinfer.serving.remote.keeper import Keeper, python

    keeper = Keeper(python(module), opens, tokenizer)
    async with keeper.running() as engine:
        yield Apart(keeper, engine)


def embedded_apart(backend: str, slots: int | None, tokens: int) -> Any:
    """The embedded model as `apart` gives it."""
    import dualinfer
    from dualinfer.checkpoint.described.tokenizer import load_tokenizer

    folder = dualinfer.embedded_model()
    opens = {"folder": str(folder), "adapters": {}, "backend": backend}
    opens |= {
        "how": {"dtype": "float32"},
        "room": {"slots": slots, "tokens": tokens, "swap_space": 1.0},
    }
    return apart("dualinfer.cli.engine_process", opens, load_tokenizer(folder))


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
    found = {"requests": count, "seconds": took, "differing": differing, "retried": runs.retried}
    gc.collect()
    after |= {"mib": memory_of(os.getpid()), "objects": len(gc.get_objects())}
    return found | {"states": dict(sorted(states.items()))} | after


def check_flat(rounds: Sequence[dict[str, Any]], mib: float, objects: int) -> None:
    """Raise where memory, or Python's objects, have grown over the last two thirds of the rounds.

    That is from their first half to their second, by their medians, which one round cannot move.
    """
    later = rounds[len(rounds) // 3 :]
    half = len(later) // 2
    for name, most in (("mib", mib), ("engine_mib", mib), ("objects", objects)):
        values = [found[name] for found in later if name in found]
        if len(values) >= 2:
            grown = float(np.median(values[-half:]) - np.median(values[:half]))
            assert grown <= most, f"{name}: {grown:+.0f} over {len(later)} rounds: {values}"


def _table(backend: str, rounds: Sequence[dict[str, Any]]) -> str:
    """What came of the rounds on a backend, for people."""
    lines = []
    for found in rounds:
        states = ", ".join(f"{name} {count}" for name, count in found["states"].items())
        numbers = {name: x for name, x in found.items() if name not in ("states", "seconds")}
        facts = ", ".join(f"{name} {x}" for name, x in numbers.items())
        lines.append(f"{backend}: {found['seconds']:.1f} s, {facts}\n  {states}")
    return "\n".join(lines)


def _rounds(options: argparse.Namespace) -> None:
    """Rounds on one backend, each told as it ends."""
    from dualinfer.bench.local_server import word_tokenizer
    from dualinfer.bench.shapes import open_model

    dtype = options.dtype or ("float32" if options.shape is None else "bfloat16")
    exact, rounds, begun = dtype == "float32", [], time.monotonic()
    before = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    most, vocab = 1024, 2048
    if options.shape is not None:
        vocab = open_model(options.shape).vocab
        config = open_model(options.shape).config
        most = min(most, getattr(config, "max_position_embeddings", most))

    def is_over() -> bool:
        return bool(rounds) and time.monotonic() - begun >= 60 * options.minutes

    def asks() -> list[Ask]:
        return asks_of(options.requests, vocab, most, len(rounds), options.seconds)

    def note(found: dict[str, Any]) -> None:
        rounds.append({"backend": options.backend, "dtype": dtype} | found)
        print(_table(options.backend, rounds[-1:]), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(before + rounds, indent=1) + "\n")

    async def killed() -> None:
        opens = {"shape": options.shape, "dtype": dtype, "backend": options.backend}
        opens |= {"room": {"slots": options.slots, "tokens": most, "swap_space": 1.0}}
        if options.shape is None:
            there = embedded_apart(options.backend, options.slots, most)
        else:
            there = apart("tests.random_engine", opens, word_tokenizer(vocab))
        async with there as engine:
            print(f"{options.backend}: ready after {time.monotonic() - begun:.1f} s", flush=True)
            while not is_over():
                note(await engine.soak(asks(), options.kills, exact))

    def here() -> None:
        import dualinfer

        from .random_engine import opened

        opens = {"shape": options.shape, "dtype": dtype, "backend": options.backend}
        if options.shape is None:
            model = dualinfer.embedded_model()
            there = dualinfer.init_inference(model, backend=options.backend, dtype=dtype)
        else:
            there = opened(opens)
        with there as engine:
            room = engine.reserve(options.slots, most)
            print(f"{options.backend}: ready after {time.monotonic() - begun:.1f} s", flush=True)
            while not is_over():
                note(asyncio.run(soak(engine, asks(), exact)))
            assert engine.reserve(options.slots, most) == room  # nothing is under way

    asyncio.run(killed()) if options.kills or options.apart else here()
    if len(rounds) >= 6:
        check_flat(rounds, 32, 2000)
        print(f"{options.backend}: memory is flat", flush=True)


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="torch", choices=["torch", "jax", "both"])
    parser.add_argument("--shape", help="random weights; unset: the embedded model")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="unset: of a shape 16 bits"
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60, help="in which they come")
    parser.add_argument("--slots", type=int, help="unset: what has room")
    parser.add_argument("--kills", type=int, default=0, help="of the engine, in each round")
    parser.add_argument("--apart", action="store_true", help="the same process for it, unharmed")
    parser.add_argument("--minutes", type=float, default=0, help="rounds until then")
    parser.add_argument("--within", type=float, help="seconds for a backend; then it is ended")
    parser.add_argument("--json", type=Path, help="what came of each round")
    options = parser.parse_args()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    if options.backend == "both":  # one after the other, so that each has the device's memory
        codes = []
        for backend in ("torch", "jax"):
            command = [sys.executable, "-m", "tests.soak", *sys.argv[1:], "--backend", backend]
            codes.append(subprocess.run(command).returncode)
        raise SystemExit(max(codes, key=abs))
    if options.within is not None:
        faulthandler.dump_traceback_later(options.within, exit=True)
    _rounds(options)


if __name__ == "__main__":
    _main()

"""64 ragged callers of one engine, on both backends, each in a process of its own.

    python benchmarks/ragged.py [--shape llama-3-8b:8] [--callers]

Prompts of 10 to 800 tokens, 20 to 146 new ones:

1. Over a pool (`Runner.open`): the seconds that it takes to open, and to prepare all that it runs;
   then each of three rounds: seconds, new tokens a second, and programs made meanwhile. A turn
   reads 2,048 tokens of prompts, and takes 8 steps; the next is enqueued before tokens are fetched.
2. With `--callers` such requests over reserved room, in slots of their own and in blocks: by a
   thread each that calls `generate`, and by a task each that awaits `generate_async`; with
   `--library` by threads over none as well, where caches grow.

Without a GPU the shape is tiny and no number means anything.
"""

import argparse
import asyncio
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import dualinfer
from dualinfer.backends.base import Piece, Pool, Request
from dualinfer.bench.random_weights import random_model
from dualinfer.bench.shapes import open_model

CALLERS, PROMPTS, NEW = 64, (10, 801), (20, 147)
PIECE, STEPS, GRAIN = 2048, 8, 64
ROOMS: dict[str, dict[str, Any]] = {"rows": {}, "blocks": {"cache_tokens": CALLERS * 1024}}


def requests_of(vocab: int, seed: int = 0) -> list[Request]:
    """Other lengths for each seed."""
    random = np.random.default_rng(seed)
    sizes = zip(random.integers(*PROMPTS, CALLERS), random.integers(*NEW, CALLERS), strict=True)
    return [Request(random.integers(5, vocab, n).astype(np.int32), int(new)) for n, new in sizes]


class Turns:
    """A scheduler with nothing but what the measurement needs: all requests come at once."""

    def __init__(self, runner: Any, requests: list[Request], slots: int) -> None:
        self._runner, self._free = runner, list(range(slots))
        self._waiting = deque(enumerate(requests))
        self._unread: deque[tuple[int, Piece]] = deque()
        self._left: dict[int, tuple[int, int]] = {}  # by slot: the request, and tokens to come
        self._pending: deque[tuple[Any, dict[int, int]]] = deque()
        self.texts: list[list[int]] = [[] for _ in requests]

    def run(self) -> None:
        """Turns until every request has all of its tokens."""
        while self._waiting or self._unread or self._left or self._pending:
            self._read()
            self._step()
            if len(self._pending) > 2 or not (self._waiting or self._unread or self._left):
                self._fetch()

    def _read(self) -> None:
        while self._waiting and self._free:
            number, request = self._waiting.popleft()
            self._unread.append((number, Piece.whole(request, self._free.pop(0))))
        pieces, columns, left = [], {}, PIECE
        while self._unread and left >= GRAIN:
            number, rest = self._unread.popleft()
            stop = min(rest.stop, rest.start + left // GRAIN * GRAIN)
            piece = Piece(rest.request, rest.slot, rest.start, stop)
            pieces.append(piece)
            left -= -(-(stop - piece.start) // GRAIN) * GRAIN
            if not piece.ends:
                self._unread.appendleft((number, Piece(rest.request, rest.slot, stop, rest.stop)))
                continue
            columns[len(columns)] = number
            if piece.request.max_new_tokens > 1:
                self._left[piece.slot] = number, piece.request.max_new_tokens - 1
        if pieces:
            self._pending.append((self._runner.extend(pieces), columns))

    def _step(self) -> None:
        if not self._left:
            return
        steps = min(STEPS, max(left for _, left in self._left.values()))
        columns = {slot: number for slot, (number, _) in self._left.items()}
        self._pending.append((self._runner.decode(steps), columns))
        self._left = {slot: (n, left - steps) for slot, (n, left) in self._left.items()}
        if ended := [slot for slot, (_, left) in self._left.items() if left <= 0]:
            self._runner.release(ended)
            self._free = sorted(self._free + ended)
            for slot in ended:
                del self._left[slot]

    def _fetch(self) -> None:
        pending, columns = self._pending.popleft()
        for row in pending.fetch():
            for column, number in columns.items():
                if row[column] >= 0:
                    self.texts[number].append(int(row[column]))


def measure(backend: str, shape: str, callers: bool, library: bool) -> None:
    """One backend, in this process."""
    dtype = "bfloat16" if shape.startswith("llama") else "float32"
    model = random_model(open_model(shape), dtype)
    engine: Any = dualinfer.init_inference(
        model, backend=backend, dtype=dtype, replace_with_kernel_inject=True, max_out_tokens=2048
    )
    runner, vocab = engine.runner, engine.runner.spec.vocab

    def told(what: str, begun: float, tokens: int, made: int) -> None:
        seconds = time.perf_counter() - begun
        rate = f", {tokens / seconds:.0f} tokens/s" if tokens else ""
        made = engine.report().compilations - made
        print(f"{backend} {shape}: {what}: {seconds:.2f} s{rate}, {made} programs", flush=True)

    begun = time.perf_counter()
    runner.open(Pool(CALLERS, 1024))
    told("opened", begun, 0, 0)
    for i in range(3):
        requests, made = requests_of(vocab, i), engine.report().compilations
        turns, begun = Turns(runner, requests, CALLERS), time.perf_counter()
        turns.run()
        assert [len(t) for t in turns.texts] == [r.max_new_tokens for r in requests]
        told(f"round {i + 1}", begun, sum(map(len, turns.texts)), made)
    made, begun = engine.report().compilations, time.perf_counter()
    runner.open(Pool(CALLERS, 1024), prepare=True)
    told("opened and prepared", begun, 0, made)
    runner.open(None)

    def asked(request: Request) -> dict[str, Any]:
        return {"max_new_tokens": request.max_new_tokens, "eos_token_id": None, "do_sample": False}

    def call(request: Request) -> int:
        return np.asarray(engine.generate(request.tokens[None], **asked(request))).shape[1]

    def by_threads(requests: list[Request]) -> int:
        with ThreadPoolExecutor(CALLERS) as threads:
            return sum(threads.map(call, requests)) - sum(len(r.tokens) for r in requests)

    async def by_tasks(requests: list[Request]) -> int:
        async def one(request: Request) -> int:
            return len(await engine.generate_async(request.tokens[None], **asked(request)))

        return sum(await asyncio.gather(*map(one, requests)))

    def rounds(what: str, run: Callable[[list[Request]], int], count: int = 3) -> None:
        for i in range(count):
            requests, made = requests_of(vocab, i), engine.report().compilations
            begun = time.perf_counter()
            told(f"{what}, round {i + 1}", begun, run(requests), made)

    if library:
        rounds("callers", by_threads)
    for what, room in ROOMS.items() if callers else ():
        made, begun = engine.report().compilations, time.perf_counter()
        engine.reserve(CALLERS, 1024, **room)
        told(f"{what} reserved", begun, 0, made)
        rounds(f"callers over {what}", by_threads)
        rounds(f"tasks over {what}", lambda requests: asyncio.run(by_tasks(requests)), 2)
    engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="llama-3-8b:8")
    parser.add_argument("--backend", choices=["torch", "jax"])
    parser.add_argument("--callers", action="store_true")
    parser.add_argument("--library", action="store_true")
    options = parser.parse_args()
    if options.backend:
        measure(options.backend, options.shape, options.callers, options.library)
    else:
        for one in ("torch", "jax"):
            subprocess.run([sys.executable, *sys.argv, "--backend", one], check=True)

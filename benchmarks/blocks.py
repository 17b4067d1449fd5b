"""A cache in blocks beside one of rectangles: steps and prompts, in one process.

    python benchmarks/blocks.py [--backend jax] [--json blocks.json]

`reserve(slots, tokens)` gives each slot its own tokens, with `cache_tokens` as well all slots share
blocks of 64. Both hold as much here. A step's time is what lies between the ends of two chunks of
steps of `engine.generate`, divided by their number: prompts drop out, the host's work does not. A
prompt's is that of `generate` of one token. Both ways take turns in `--rounds` rounds, and no
more is begun that would not end within `--seconds`; medians are over all rounds. "Of the limit" is
by what must be read, or multiplied, at the rates of this process, as `dualinfer bench` has them.

Floors: a step by blocks takes at most 1 % longer, a prompt 3 %. On a CPU no number means anything:

    python benchmarks/blocks.py --shape tiny --dtype float32 --case 1x16 --case 4x40 --prompt 256
"""

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")

import numpy as np

from dualinfer import init_inference
from dualinfer.backends.base import GRAIN, MAX_STEPS
from dualinfer.bench.counts import Counts
from dualinfer.bench.limits import Limits, open_device
from dualinfer.bench.random_weights import plan_weights, random_model
from dualinfer.bench.shapes import Model, open_model

WAYS = "rows", "blocks"
FLOORS = {"step": 1.01, "prompt": 1.03}
CHUNKS = 6  # of MAX_STEPS, as many as a text has; the first one that is taken is not counted
NEW = 1 + CHUNKS * MAX_STEPS


class Case(NamedTuple):
    """What is timed: a step of `batch` sequences behind prompts of `tokens`, or such a prompt."""

    kind: str
    batch: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.batch} x {self.tokens}"


class Group(NamedTuple):
    """Cases that one pool serves."""

    slots: int
    tokens: int
    cases: list[Case]


def groups(cases: list[Case], prompt: Case) -> list[Group]:
    """The case of most sequences in a pool of its own, so that long ones do not make it larger."""
    *few, most = sorted(cases, key=lambda case: case.batch)
    found = []
    for own in ([*few, prompt], [most]):
        tokens = max(case.tokens + (NEW if case.kind == "step" else 1) for case in own)
        tokens = -(-tokens // GRAIN) * GRAIN
        found.append(Group(max(case.batch for case in own), tokens, own))
    return found


@contextmanager
def stamps(runner: Any) -> Iterator[list[tuple[int, float]]]:
    """The steps of each chunk that was asked for, and when the host had its tokens."""
    decode, found = runner.decode, []

    class Stamped:
        """Tokens that note when they have come."""

        def __init__(self, steps: int) -> None:
            self._steps, self._pending = steps, decode(steps)

        def fetch(self) -> np.ndarray:
            """As the runner's."""
            tokens = self._pending.fetch()
            found.append((self._steps, time.perf_counter()))
            return tokens

        def told(self) -> np.ndarray | None:
            """As the runner's."""
            return self._pending.told()

    runner.decode = Stamped
    try:
        yield found
    finally:
        del runner.decode


def generate(engine: Any, ids: list[list[int]], new: int) -> np.ndarray:
    """Greedy new tokens behind ids, EOS off."""
    how = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
    return np.asarray(engine.generate(np.array(ids), **how))[:, len(ids[0]) :]


def times_of(engine: Any, case: Case, repeats: int) -> tuple[list[float], np.ndarray]:
    """Milliseconds of each measurement, and the text."""
    vocab = engine.runner.spec.vocab
    ids = np.random.default_rng(0).integers(5, vocab, (case.batch, case.tokens)).tolist()
    if case.kind == "prompt":
        found, text = [], np.zeros(0)
        for _ in range(2 + repeats):
            begun = time.perf_counter()
            text = generate(engine, ids, 1)
            found.append((time.perf_counter() - begun) * 1e3)
        return found[2:], text
    with stamps(engine.runner) as found:
        text = generate(engine, ids, NEW)
    assert sum(steps for steps, _ in found) == CHUNKS * MAX_STEPS, found
    behind = [steps for steps, _ in found[1:]]
    return (np.diff([at for _, at in found]) * 1e3 / behind).tolist(), text


def reserve(engine: Any, group: Group, way: str) -> None:
    """Reserve room of one way; nothing is made ahead, nor kept of prompts."""
    how: dict[str, Any] = {"prefix_cache": False, "swap_space": 0, "prepare": False}
    if way == "blocks":
        how["cache_tokens"] = group.slots * group.tokens
    engine.reserve(group.slots, group.tokens, **how)


def limit_ms(case: Case, model: Model, dtype: str, limits: Limits) -> float:
    """Milliseconds that the device's rates leave: bytes of a step, or products of a prompt."""
    counts = Counts.of(plan_weights(model, dtype, None), dtype)
    weights = counts.read_bytes(case.batch if case.kind == "step" else case.batch * case.tokens)
    if case.kind == "prompt":
        flops = counts.flops(case.batch, case.tokens, head_tokens=1)
        return max(flops / limits.matrix_rate, weights / limits.read_bandwidth) * 1e3
    cached = counts.kv_bytes(dtype, case.batch, case.tokens + MAX_STEPS, NEW - MAX_STEPS)
    return (weights + cached) / limits.read_bandwidth * 1e3


def measure(engine: Any, found: list[Group], rounds: int, repeats: int, until: float) -> Any:
    """Milliseconds by case and way, and whether both ways gave the same first chunk of a text."""
    times: Any = defaultdict(lambda: defaultdict(list))
    texts: dict[Case, dict[str, np.ndarray]] = defaultdict(dict)
    took: dict[Any, float] = {}
    for number in range(rounds):
        for group in found:
            for way in WAYS:
                begun = time.perf_counter()
                if begun + took.get((group.slots, way), 0) > until and number:
                    print(f"round {number + 1}: {way} of {group.slots} slots left out: no time")
                    continue
                reserve(engine, group, way)
                opened = time.perf_counter() - begun
                for case in group.cases:
                    own, text = times_of(engine, case, repeats)
                    times[case][way] += own
                    texts[case][way] = text[:, :MAX_STEPS]
                took[group.slots, way] = time.perf_counter() - begun
                print(
                    f"round {number + 1}: {way} of {group.slots} x {group.tokens}: "
                    f"{took[group.slots, way]:.1f} s, {opened:.1f} of it to reserve",
                    flush=True,
                )
    alike = {case: float((a["rows"] == a["blocks"]).mean()) for case, a in texts.items()}
    return times, alike


def main() -> None:
    """Measure, print a table, and write what was measured."""
    parser = argparse.ArgumentParser(description="A cache in blocks beside one of rectangles.")
    parser.add_argument("--backend", choices=["torch", "jax"], default="torch")
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--case", action="append", metavar="BATCHxPROMPT")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=8, help="of a prompt, in each round")
    parser.add_argument("--seconds", type=float, help="(190, on JAX 240)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    seconds = options.seconds or (240 if options.backend == "jax" else 190)
    until = time.perf_counter() + seconds
    asked = options.case or ["1x128", "32x1024", "256x512"]
    cases = [Case("step", *map(int, text.split("x"))) for text in asked]
    if len(cases) < 2:
        parser.error("pass two cases or more, as --case 1x128 --case 32x1024")
    prompt = Case("prompt", 1, options.prompt)
    model, device = open_model(options.shape), open_device(options.backend)
    limits, begun = device.limits(options.dtype), time.perf_counter()
    how: dict[str, Any] = {"dtype": options.dtype, "replace_with_kernel_inject": True}
    given = random_model(model, options.dtype)
    with init_inference(given, backend=options.backend, **how) as engine:
        loaded = time.perf_counter() - begun
        print(
            f"{options.shape} on {device.name}, {options.backend}: loaded in {loaded:.1f} s; reads "
            f"{limits.read_bandwidth / 1e12:.3f} TB/s, {limits.matrix_rate / 1e12:.0f} TFLOP/s",
            flush=True,
        )
        found = groups(cases, prompt)
        times, alike = measure(engine, found, options.rounds, options.repeats, until)
        notes = list(engine.report().notes)
    rows = []
    print(
        f"{'':22} {'rows, ms':>9} {'blocks':>9} {'ratio':>7} {'floor':>6} {'of the limit':>14} same"
    )
    for case in (*cases, prompt):
        rows_ms, blocks_ms = (statistics.median(times[case][way]) for way in WAYS)
        least, ratio = limit_ms(case, model, options.dtype, limits), blocks_ms / rows_ms
        met = "met" if ratio <= FLOORS[case.kind] else "MISSED"
        shares = f"{least / rows_ms:.1%} {least / blocks_ms:.1%}"
        print(
            f"{case!s:22} {rows_ms:9.3f} {blocks_ms:9.3f} {ratio:7.4f} {met:>6} {shares:>14} "
            f"{alike[case]:.0%}"
        )
        rows.append(
            {
                **case._asdict(),
                "rows_ms": rows_ms,
                "blocks_ms": blocks_ms,
                "ratio": ratio,
                "floor": FLOORS[case.kind],
                "limit_ms": least,
                "same_tokens": alike[case],
                "times_ms": dict(times[case]),
            }
        )
    if options.json:
        told = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "backend": options.backend,
            "shape": options.shape,
            "dtype": options.dtype,
            "device": device.name,
            "read_bandwidth": limits.read_bandwidth,
            "matrix_rate": limits.matrix_rate,
            "notes": notes,
            "rows": rows,
        }
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()

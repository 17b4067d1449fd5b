"""Rates of `engine.score` beside Hugging Face's, and of `engine.batch` beside its own engine.

    python benchmarks/scoring.py --shape llama-3-8b [--within 500] [--json out.json]

All read one folder of random weights, one after another, each in a process of its own. HF scores as
lm-evaluation-harness does: pairs by length, padded on the right, the log-softmax of all logits, a
context once whose continuations are of one token; and once more with the logits of the last places
alone, which the harness does not ask for. Each takes the best of its batch sizes. Rates are pairs a
second of a second call, when shapes are known; the first one is told, too. `batch` are new tokens a
second of OpenAI rows, beside `generate_async` of the same prompts. Without a GPU shapes are small
and no number means anything.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import dualinfer
from dualinfer.bench.local_server import word_tokenizer
from dualinfer.bench.random_weights import checkpoint, make_module
from dualinfer.bench.shapes import Model, open_model

SIZES = 8, 32, 128
SYSTEMS = "hf", "torch", "jax"
Pair = tuple[list[int], list[int]]


def loads(vocab: int, count: int, most: int) -> dict[str, list[Pair]]:
    """Pairs as tasks have them: texts to choose from, letters to choose from, and whole texts."""
    draw = np.random.default_rng(0)

    def ids(length: float) -> list[int]:
        return draw.integers(5, vocab, max(1, min(int(length), most // 2))).tolist()

    choices, letters = [], []
    for _ in range(count // 4):
        context = ids(draw.lognormal(np.log(100), 0.6))
        choices += [(context, ids(float(draw.integers(1, 25)))) for _ in range(4)]
        context = ids(draw.lognormal(np.log(400), 0.4))
        letters += [(context, ids(1)) for _ in range(4)]
    texts = [(ids(1), draw.integers(5, vocab, most // 2).tolist()) for _ in range(count // 16)]
    return {"choices": choices, "letters": letters, "texts": texts}


class HfScores:
    """What HF's module gives as the harness asks it, or with the `last` logits alone."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def scores(self, pairs: Sequence[Pair], size: int, last: bool) -> list[float]:
        """The log-probability of each continuation."""
        import torch

        rows: dict[tuple[int, ...], list[int]] = {}
        for i, (first, then) in enumerate(pairs):
            rows.setdefault((*first, *then[:-1]), []).append(i)
        ordered = sorted(rows, key=len, reverse=True)
        found = [0.0] * len(pairs)
        for begin in range(0, len(ordered), size):
            part = ordered[begin : begin + size]
            ids = torch.zeros((len(part), len(part[0])), dtype=torch.long)
            for row, read in zip(ids, part, strict=True):
                row[: len(read)] = torch.tensor(read)
            own = [(row, i) for row, read in enumerate(part) for i in rows[read]]
            start = min(len(pairs[i][0]) - 1 for _, i in own) if last else 0
            kept = ids.shape[1] - start
            with torch.inference_mode():
                logits = self._module(
                    ids.to(self._module.device), use_cache=False, logits_to_keep=kept
                ).logits
                logs = torch.log_softmax(logits, -1)
                sums = []
                for row, i in own:
                    first, then = pairs[i]
                    at = len(first) - 1 - start
                    told = logs[row, at : at + len(then)]
                    chosen = told.gather(-1, torch.tensor(then, device=logs.device)[:, None])
                    sums.append(chosen.float().sum())
                    _ = (told.argmax(-1) == torch.tensor(then, device=logs.device)).all()
                sums = torch.stack(sums).tolist()
            for (_, i), total in zip(own, sums, strict=True):
                found[i] = total
        return found


def timed(make: Callable[[], Any]) -> tuple[Any, float, float]:
    """What it gives, and seconds of the first call and of a second one."""
    begun = time.perf_counter()
    make()
    first = time.perf_counter() - begun
    begun = time.perf_counter()
    found = make()
    return found, first, time.perf_counter() - begun


def hf(model: Model, dtype: str, given: dict[str, list[Pair]]) -> dict[str, Any]:
    """HF's figures, of the best batch size of each way."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    scores = HfScores(make_module(model, dtype, device))
    made: dict[str, Any] = {}
    for name, pairs in given.items():
        best: dict[str, Any] = {}
        for last in (False, True):
            slower = 0
            for size in SIZES:
                try:
                    scores.scores(pairs[: 2 * size], size, last)
                    begun = time.perf_counter()
                    found = scores.scores(pairs, size, last)
                    seconds = time.perf_counter() - begun
                except torch.cuda.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    break
                rate = len(pairs) / seconds
                if rate > best.get("rate", 0):
                    way = "last logits" if last else "as the harness"
                    best = {"rate": rate, "size": size, "way": way, "logprobs": found}
                    slower = 0
                elif (slower := slower + 1) > 1:
                    break
        made[name] = best
        print(f"hf: {name}: {best['rate']:.1f} pairs/s ({best['way']}, {best['size']})", flush=True)
    return made


def ours(
    backend: str, model: Model, dtype: str, given: dict[str, list[Pair]], rows: int, most: int
) -> dict[str, Any]:
    """The figures of an engine."""
    made: dict[str, Any] = {}
    how = {"dtype": dtype, "replace_with_kernel_inject": True}
    assert model.folder is not None
    with dualinfer.init_inference(model.folder, backend=backend, **how) as engine:
        engine.tokenizer = word_tokenizer(model.vocab)
        for name, pairs in given.items():
            columns = [p for p, _ in pairs], [c for _, c in pairs]
            found, first, seconds = timed(lambda c=columns: engine.score(*c))
            rate = len(pairs) / seconds
            made[name] = {"rate": rate, "first_s": first, "logprobs": [s.logprob for s in found]}
            print(f"{backend}: {name}: {rate:.1f} pairs/s, first {first:.1f} s", flush=True)
        try:
            made["batch"] = batch(engine, model.vocab, rows, most)
        except dualinfer.DualinferError as error:  # as where no server is installed
            print(f"{backend}: no batch: {error}", flush=True)
    return made


def batch(engine: Any, vocab: int, rows: int, most: int) -> dict[str, Any]:
    """New tokens a second of completions, by `generate_async` and by `engine.batch`."""
    draw = np.random.default_rng(1)
    new = most // 8
    prompts = [draw.integers(5, vocab, most // 2).tolist() for _ in range(rows)]
    engine.reserve(tokens=most, prefix_cache=False)
    body = {"model": "any", "max_tokens": new, "temperature": 0.0, "ignore_eos": True}
    asked = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions"}
        | {"body": body | {"prompt": prompt}}
        for i, prompt in enumerate(prompts)
    ]

    async def direct() -> int:
        async def one(prompt: list[int]) -> int:
            how = {"do_sample": False, "eos_token_id": None, "max_new_tokens": new}
            return len(await engine.generate_async(prompt, **how))

        return sum(await asyncio.gather(*map(one, prompts)))

    def by_batch() -> int:
        bodies = [one["response"]["body"] for one in engine.batch(asked)]
        return sum(one["usage"]["completion_tokens"] for one in bodies)

    tokens, _, seconds = timed(lambda: asyncio.run(direct()))
    assert tokens == rows * new
    by_rows, _, took = timed(by_batch)
    assert by_rows == tokens
    return {"direct": tokens / seconds, "rate": tokens / took, "rows": rows, "new_tokens": new}


def told(found: dict[str, dict[str, Any]]) -> str:
    """The table of all systems."""
    lines = ["| load | " + " | ".join(found) + " |", "|---" * (1 + len(found)) + "|"]
    for load in ("choices", "letters", "texts"):
        base = found.get("hf", {}).get(load)
        cells = []
        for system, own in found.items():
            if load not in own:
                cells.append("failed")
                continue
            cell = f"{own[load]['rate']:.1f} pairs/s"
            if base and system != "hf":
                apart = np.abs(np.array(own[load]["logprobs"]) - base["logprobs"])
                apart /= np.abs(base["logprobs"])
                cell += f", {own[load]['rate'] / base['rate']:.2f} x"
                cell += f", logprobs within {apart.max():.1e}"
            cells.append(cell)
        lines.append(f"| {load} | " + " | ".join(cells) + " |")
    for system, own in found.items():
        if "batch" in own:
            rate, direct = own["batch"]["rate"], own["batch"]["direct"]
            share = f"{rate / direct:.1%} of generate_async's {direct:.0f}"
            lines.append(f"{system}: engine.batch {rate:.0f} new tokens/s, {share}")
    return "\n".join(lines)


def main() -> None:
    """Run all systems, or the one of this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--system", action="append", choices=SYSTEMS)
    parser.add_argument("--pairs", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=512, help="of the batch")
    parser.add_argument("--tokens", type=int, default=1024, help="the most of a sequence")
    parser.add_argument("--within", type=float, default=560, help="seconds for all of it")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a process of its own
    options = parser.parse_args()
    begun, model = time.monotonic(), open_model(options.shape)
    most = min(options.tokens, getattr(model.config, "max_position_embeddings", options.tokens))
    if options.folder is not None:
        model = replace(model, folder=options.folder)
        given = loads(model.vocab, options.pairs, most)
        system = options.system[-1]
        if system == "hf":
            made = hf(model, options.dtype, given)
        else:
            made = ours(system, model, options.dtype, given, options.rows, most)
        options.json.write_text(json.dumps(made))
        return
    found: dict[str, dict[str, Any]] = {}
    with checkpoint(model, options.dtype) as folder, tempfile.TemporaryDirectory() as room:
        print(f"weights written after {time.monotonic() - begun:.1f} s", flush=True)
        for system in options.system or SYSTEMS:
            path = Path(room, f"{system}.json")
            command = [sys.executable, *sys.argv, "--system", system]
            command += ["--folder", str(folder), "--json", str(path)]
            left = options.within - (time.monotonic() - begun)
            try:
                subprocess.run(command, timeout=max(1, left), check=False)
            except subprocess.TimeoutExpired:
                print(f"{system}: no time is left", flush=True)
            found[system] = json.loads(path.read_text()) if path.exists() else {}
    print(told(found))
    if options.json is not None:
        for own in found.values():
            for load in own.values():
                load.pop("logprobs", None)
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

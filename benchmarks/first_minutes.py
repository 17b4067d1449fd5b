"""What the first calls of an engine wait for, on both backends, and what JAX pays to wait less.

    OUT=results python benchmarks/first_minutes.py

The checkpoints, with random weights, lie in /dev/shm where there is one. First both backends make
every kind of call in processes side by side, which fills caches made for this run. Then new
processes, one at a time, make the same calls with these caches: each kind twice, and what the first
takes longer is the stall. Then come tokens of GPT-2 and of the large shape with the executable that
serves all requests and with one that takes the best token alone; a stream beside generate; and
many prompts at once. It ends within five minutes on an H100, what has no time left is left out;
`--parts` leaves out more.
Without a GPU the shapes are tiny and no number means anything.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

LIMIT = 300.0  # seconds for all of it
PARTS = ("stalls", "rates", "small rates", "panels")
ROOT = str(Path(__file__).resolve().parents[1])
sys.path.insert(0, ROOT)
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
DRAWN: dict[str, Any] = {"do_sample": True, "eos_token_id": None, "seed": 5}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": DRAWN | {"top_k": 0},
    "top-k, top-p": DRAWN | {"top_k": 50, "top_p": 0.9},
    "penalty": GREEDY | {"repetition_penalty": 1.2},
    "min_new_tokens": {"do_sample": False, "eos_token_id": 3, "min_new_tokens": 30},
    "stop strings": GREEDY | {"stop_strings": ["never"]},
}


class Digits:
    """A tokenizer of which stop strings need no more than this."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return " ".join(map(str, tokens))


def clock(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def open_engine(backend: str, folder: str, dtype: str) -> Any:
    from dualinfer import init_inference

    return init_inference(folder, backend=backend, dtype=dtype, replace_with_kernel_inject=True)


def calls(engine: Any, new: int) -> dict[str, Callable[[], Any]]:
    """A function for each kind of call."""
    import numpy as np

    ids = np.random.default_rng(0).integers(4, 1000, (1, 120)).tolist()

    def generate(options: dict[str, Any], count: int = new) -> Callable[[], Any]:
        more = {"tokenizer": Digits()} if "stop_strings" in options else {}
        return lambda: engine.generate(ids, max_new_tokens=count, **options, **more)

    def stream(options: dict[str, Any]) -> Callable[[], Any]:
        return lambda: list(engine.stream(ids, max_new_tokens=new, **options))

    found = {name: generate(options) for name, options in KINDS.items()}
    found["stream"] = stream(GREEDY)
    found["sampled stream"] = stream(KINDS["top-k, top-p"])
    found["longer, next bucket"] = generate(GREEDY, 3 * new // 2)
    found["longer, sampled"] = generate(KINDS["top-k, top-p"], 3 * new // 2)
    return found


def stalls(backend: str, folder: str, dtype: str, new: int, times: int) -> dict[str, Any]:
    """Seconds of the first call of each kind; `times` 2 takes off those of a second one."""
    found: dict[str, Any] = {}
    engine: Any = None

    def start() -> None:
        nonlocal engine
        engine = open_engine(backend, folder, dtype)

    found["engine"] = clock(start)
    for name, call in calls(engine, new).items():
        found[name] = clock(call) - (clock(call) if times > 1 else 0.0)
    found["compilations"] = engine.report().compilations
    if backend == "torch" and times > 1:
        found |= {f"{k} (ms)": v for k, v in tokens(engine, new).items()}
    engine.close()
    return found


def tokens(engine: Any, new: int, kinds: tuple[str, ...] = tuple(KINDS)[:3]) -> dict[str, float]:
    """Milliseconds of a token of each kind, the prompt's time taken off."""
    found = {}
    ids = [[7] * 120]
    for name in kinds:

        def run(count: int, options: dict[str, Any] = KINDS[name]) -> float:
            return clock(lambda: engine.generate(ids, max_new_tokens=count, **options))

        for count in (1, new):
            run(count)
        times = [run(new) - run(1) for _ in range(3)]
        found[name] = statistics.median(times) * 1e3 / (new - 1)
    return found


def rates(folder: str, dtype: str, new: int) -> dict[str, Any]:
    """A greedy token by the executable for all requests and by one for greedy ones, and streams."""
    import jax.numpy as jnp

    from dualinfer.backends.jax import sampler

    engine = open_engine("jax", folder, dtype)
    found: dict[str, Any] = {f"{k} (ms)": v for k, v in tokens(engine, new).items()}
    ids = [[7] * 120]

    def stream() -> list[float]:
        start, times = time.perf_counter(), []
        for _ in engine.stream(ids, max_new_tokens=new, **GREEDY):
            times.append(time.perf_counter() - start)
        return times

    stream()
    runs = [stream() for _ in range(3)]
    whole = [clock(lambda: engine.generate(ids, max_new_tokens=new, **GREEDY)) for _ in range(3)]
    found["stream, first token (ms)"] = statistics.median(r[0] for r in runs) * 1e3
    found["stream (tok/s)"] = new / statistics.median(r[-1] for r in runs)
    found["generate (tok/s)"] = new / statistics.median(whole)
    found["greedy again (ms)"] = tokens(engine, new, ("greedy",))["greedy"]
    engine.close()

    def best(logits: Any, *_: Any) -> Any:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    original, sampler.sample = sampler.sample, best
    try:
        engine = open_engine("jax", folder, dtype)
        found["greedy alone (ms)"] = tokens(engine, new, ("greedy",))["greedy"]
        engine.close()
    finally:
        sampler.sample = original
    quickest = min(found["greedy (ms)"], found["greedy again (ms)"])
    found["loss of greedy (%)"] = 100 * (quickest / found["greedy alone (ms)"] - 1)
    return found


def panels(folder: str, dtype: str, count: int, length: int) -> dict[str, Any]:
    """Many prompts at once, and one of 2,048 tokens."""
    import jax
    import numpy as np

    engine = open_engine("jax", folder, dtype)
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {}
    for rows, width in ((1, 4 * length), (count, length)):
        ids = rng.integers(4, 1000, (rows, width)).tolist()

        def run(ids: Any = ids) -> Any:
            return engine.generate(ids, max_new_tokens=1, **GREEDY)

        name = f"{rows} x {width}"
        found[f"{name}, first (s)"] = clock(run)
        seconds = min(clock(run) for _ in range(3))
        weights = sum(layer[n].data.size for layer in engine.runner.params.layers for n in PRODUCTS)
        found[f"{name} (ms)"] = seconds * 1e3
        found[f"{name} (TFLOP/s)"] = 2 * weights * rows * width / seconds / 1e12
    made: dict[Any, Any] = engine.runner._executables._made
    temporary = [
        getattr(e.memory_analysis(), "temp_size_in_bytes", 0)
        for key, e in made.items()
        if key[0] == "prefill"
    ]
    found["largest temporaries (GiB)"] = max(temporary) / 2**30
    stats = jax.devices()[0].memory_stats() or {}
    found["peak (GiB)"] = stats.get("peak_bytes_in_use", 0) / 2**30
    engine.close()
    return found


PRODUCTS = ("qkv.weight", "out.weight", "up.weight", "down.weight")


def child(arguments: list[str]) -> None:
    """One measurement in a process of its own; its result is the last line."""
    name, *rest = arguments
    function: Any = {"stalls": stalls, "rates": rates, "panels": panels}[name]
    values = [int(x) if x.isdigit() else x for x in rest]
    print(json.dumps(function(*values)), flush=True)


class Run:
    """The processes of this run and what they found."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._began, self._environment = time.time(), environment
        self.found: dict[str, Any] = {}

    @property
    def left(self) -> float:
        """Seconds."""
        return LIMIT - (time.time() - self._began)

    def start(self, *arguments: Any, **environment: str) -> subprocess.Popen[str]:
        """A process with a measurement."""
        command = [sys.executable, __file__, "--child", *map(str, arguments)]
        env = os.environ | self._environment | environment
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)

    def finish(self, name: str, process: subprocess.Popen[str]) -> None:
        """Book what it prints, or that it did not end in time."""
        start = time.time()
        try:
            said, _ = process.communicate(timeout=max(1.0, self.left))
            found = json.loads(said.splitlines()[-1]) if process.returncode == 0 else "failed"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            found = "no time left"
        self.found[name] = found
        print(
            f"[{time.time() - self._began:5.1f} s] {name}: {time.time() - start:.1f} s", flush=True
        )
        out = os.environ.get("OUT")
        if out:
            Path(out, "first_minutes.json").write_text(json.dumps(self.found, indent=1))

    def one(self, name: str, *arguments: Any, least: float = 15.0, **environment: str) -> None:
        """Start and finish, if there is time for it."""
        if self.left < least:
            self.found[name] = "no time left"
            return
        self.finish(name, self.start(*arguments, **environment))


def has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def thunks(folder: Path) -> dict[str, int]:
    """How often each kind of work is named in what XLA runs for decode, from its dump."""
    counts: dict[str, int] = {}
    words = ("kCommandBuffer", "kConditional", "kWhile", "Case", "kCubSort", "kCopy", "kKernel")
    for path in sorted(folder.glob("*jit_run*thunk_sequence*")):
        text = path.read_text(errors="replace")
        if "while" not in text.lower():
            continue
        for word in words:
            counts[f"{path.name} {word}"] = text.count(word)
        out = os.environ.get("OUT")
        if out and not list(Path(out).glob("thunks*")):
            Path(out, "thunks.txt").write_text(text[: 1 << 20])
    return counts


def table(found: dict[str, Any]) -> None:
    """Print everything, a number a line."""
    for name, values in found.items():
        print(f"\n{name}")
        if not isinstance(values, dict):
            print(f"  {values}")
            continue
        for key, value in values.items():
            print(
                f"  {key:32} {value:10.3f}" if isinstance(value, float) else f"  {key:32} {value}"
            )


def measure_stalls(run: Run, backends: list[str], folder: Path, dtype: str, new: int) -> None:
    """Every kind of call, by processes side by side without caches, then by new ones with them."""
    side_by_side = {b: run.start("stalls", b, folder, dtype, new, 1) for b in backends}
    for backend, process in side_by_side.items():
        run.finish(f"{backend}, cold caches, side by side: seconds of the first call", process)
    for backend in backends:
        name = f"{backend}, warm caches: seconds more than the second call"
        run.one(name, "stalls", backend, folder, dtype, new, 2)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="First calls of an engine, on both backends.")
    parser.add_argument("--shape", default=None, help="llama-2-7b; gpt2:1 without a GPU")
    parser.add_argument("--only", choices=("torch", "jax"), default=None)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    from dualinfer.bench.random_weights import checkpoint
    from dualinfer.bench.shapes import open_model

    gpu = has_gpu()
    large, small, wide = ("llama-2-7b", "gpt2", "llama-3-8b:4") if gpu else ("gpt2:1",) * 3
    large = options.shape or large
    dtype, new = ("bfloat16", 128) if gpu else ("float32", 40)
    shm = Path("/dev/shm")
    with ExitStack() as stack:
        if gpu and shm.is_dir():
            tempfile.tempdir = str(shm)
        caches = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = {
            "XDG_CACHE_HOME": str(caches),
            "DUALINFER_CACHE": str(caches / "dualinfer"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH")))),
        }
        run = Run(environment)

        def written(shape: str) -> Path:
            found = stack.enter_context(checkpoint(open_model(shape), dtype))
            print(f"{shape} written after {LIMIT - run.left:.1f} s", flush=True)
            return found

        backends = [b for b in ("jax", "torch") if options.only in (None, b)]
        if {"stalls", "rates"} & set(options.parts):
            folder = written(large)
            if "stalls" in options.parts:
                measure_stalls(run, backends, folder, dtype, new)
            if "jax" in backends and "rates" in options.parts:
                run.one(f"jax, {large}", "rates", folder, dtype, new)
        if "jax" in backends and "small rates" in options.parts:
            dump = caches / "dump"
            flags = f"--xla_dump_to={dump} --xla_dump_hlo_as_text"
            run.one(f"jax, {small}", "rates", written(small), dtype, 2 * new, XLA_FLAGS=flags)
            run.found["thunks"] = thunks(dump) if dump.is_dir() else "no dump"
        if "jax" in backends and "panels" in options.parts and run.left > 25:
            rows = (256, 512) if gpu else (8, 16)
            run.one(f"jax, {wide}, prompts at once", "panels", written(wide), dtype, *rows)
    table(run.found)
    print(f"\n{LIMIT - run.left:.0f} s in all")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
    else:
        main()

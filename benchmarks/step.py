"""What the kernels of one decoded token take on JAX, one by one, by JAX's own profiler.

    python benchmarks/step.py --shape llama-2-7b:4 [--dtype bfloat16] [--tp 2] [--config out=1,8]

The profiler runs op by op, outside of command buffers, and early starts stay on: a kernel's
duration holds the wait at its start. Beside the table stands the token's time without the profiler.
Products are told apart by their place: out, up and down follow the decode attention, in that order,
then comes the next layer's qkv, and the head after the last layer. `--config NAME=ROWS,WARPS` tries
another configuration of one of a layer's products with one row of x, as does
NAME=ROWS,WARPS,PER_SM; it may be given several times.
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dualinfer import init_inference
from dualinfer.bench.limits import open_device
from dualinfer.bench.random_weights import checkpoint
from dualinfer.bench.shapes import open_model
from dualinfer.kernels.triton import linear
from dualinfer.kernels.triton.tuning import Measured

PROMPT, TOKENS, PROFILED, REPEATS = 128, 128, 24, 5
ATTENTION = "decode_attention"
FOLLOWERS = {ATTENTION: "out", "out": "up", "up": "down"}


class Event(NamedTuple):
    """One kernel's run, in nanoseconds."""

    start: float
    duration: float
    name: str


def events(folder: Path) -> list[Event]:
    """Kernels of the first GPU's busiest stream, by their start."""
    (path,) = folder.rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(path))
    plane = next(p for p in data.planes if p.name.startswith("/device:GPU:0"))
    streams = [
        [Event(e.start_ns, e.duration_ns, e.name) for e in line.events]
        for line in plane.lines
        if "Stream" in line.name
    ]
    return sorted(max(streams, key=len))


def named(found: Sequence[Event]) -> Iterator[tuple[str, float]]:
    """Microseconds of each run from the first decode attention on, products by their place."""
    last = ""
    first = next((i for i, e in enumerate(found) if ATTENTION in e.name), len(found))
    for event, following in pairwise(found[first:]):
        name = event.name
        if name.startswith("matvec"):
            name = FOLLOWERS.get(last) or ("qkv" if ATTENTION in following.name else "head")
            last = name
        elif ATTENTION in name:
            name = last = ATTENTION
        yield name, event.duration / 1e3


def configure(given: Sequence[str], layer: dict[str, Any], ops: Any) -> None:
    """Have the products of these weights run as given, by NAME=ROWS,WARPS or with PER_SM behind."""
    table = {}
    for text in given:
        name, _, numbers = text.partition("=")
        features, width = layer[name].shape
        gated = name == "up" and features == 2 * layer["down"].shape[1]
        features = features // 2 if gated else features
        key = linear.tuning_key(1, features, width, layer[name].dtype.itemsize, gated)
        table[key] = Measured(linear.VectorConfig(*map(int, numbers.split(","))), 0.0)
    ops.configurations = ops.configurations.having("the command line", table)


def main() -> None:
    """Print a table of one shape."""
    parser = argparse.ArgumentParser(description="Durations of a decoded token's kernels on JAX.")
    parser.add_argument("--shape", default="llama-2-7b:4")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--config", action="append", default=[], metavar="NAME=ROWS,WARPS,PER_SM")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error("the profiler shows kernels on a GPU only")
    model, limits = open_model(options.shape), open_device("jax").limits(options.dtype)
    ids = np.random.default_rng(0).integers(0, model.vocab, (1, PROMPT))
    how: dict[str, Any] = {"dtype": options.dtype, "replace_with_kernel_inject": True}
    if options.tp > 1:
        how["tensor_parallel"] = {"tp_size": options.tp}
    with checkpoint(model, options.dtype) as folder:
        engine: Any = init_inference(folder, backend="jax", **how)
    parts = engine.params["layers"][0]
    layer = {
        name: parts[name]["weight"].addressable_data(0) for name in ("qkv", "out", "up", "down")
    }
    configure(options.config, layer, engine.runner.steps.ops)

    def seconds(count: int) -> float:
        start = time.perf_counter()
        engine.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None)
        return time.perf_counter() - start

    for count in (TOKENS, 1, PROFILED, TOKENS):
        seconds(count)
    times = [seconds(TOKENS) - seconds(1) for _ in range(REPEATS)]
    token = statistics.median(times) * 1e3 / (TOKENS - 1)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            seconds(PROFILED)
        found = events(Path(folder))
    runs: dict[str, list[float]] = defaultdict(list)
    for name, duration in named(found):
        runs[name].append(duration)
    limit = limits.read_bandwidth / 1e12
    print(f"{options.shape}, {options.tp} x {jax.devices()[0].device_kind}: {token:.3f} ms a token")
    print(f"{'kernel':40} {'runs':>6} {'median, us':>11} {'TB/s':>6}, of {limit:.2f} read")
    for name, durations in sorted(runs.items(), key=lambda pair: -sum(pair[1])):
        median = statistics.median(durations)
        rate = f"{layer[name].nbytes / median / 1e6:.2f}" if name in layer else ""
        print(f"{name[:40]:40} {len(durations):6} {median:11.2f} {rate:>6}")
    engine.close()


if __name__ == "__main__":
    main()

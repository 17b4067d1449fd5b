"""Find the kernels' best configurations for a list of shapes: the table that the package ships.

    python benchmarks/tune.py --out dualinfer/kernels/triton/tuned.json
    python benchmarks/tune.py --quant int4 --kv-cache-dtype fp8_e4m3 --shape llama-3-8b --keep \
        --out dualinfer/kernels/triton/tuned.json
    python benchmarks/tune.py --quant mxfp4 --shape gpt-oss-20b --keep \
        --out dualinfer/kernels/triton/tuned.json

The search is that of `triton_autotune=True`, over random weights for the first layers of each shape
in the dtype that people run it in, for one device's share of them (`--tp`; `--ep` groups of such
devices share experts out), or for random codes: `--quant` tunes their products and experts (mxfp4
those of experts), `--kv-cache-dtype` attention over a cache in codes, and what is read in 16 bits
beside them is tuned without these options. Many processes compile a shape's candidates
first. What the file holds for other kinds of device stays, and so does, with `--keep`, what it
holds for this one: only the rest is measured then, or with `--again` all of the shapes asked for.
The file is written after every shape, and no search is begun after `--seconds`. Times are
microseconds a call.
"""

import argparse
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dualinfer import init_inference
from dualinfer.backends.torch.ops.kernels import KernelOps
from dualinfer.backends.torch.params import Params
from dualinfer.backends.torch.tuning.cases import TuningCase, tuning_cases
from dualinfer.backends.torch.tuning.search import graph_seconds, search
from dualinfer.backends.torch.tuning.store import Machine
from dualinfer.bench.case import fillings, quantized_weight
from dualinfer.bench.mixtures import MXFP4
from dualinfer.bench.random_weights import random_model
from dualinfer.bench.shapes import SHAPES, open_model
from dualinfer.bench.torch.inputs import Bench
from dualinfer.kernels.triton import experts_choice, tuning
from dualinfer.kernels.triton.decode_attention import DecodeConfig
from dualinfer.kernels.triton.tuning import Key, Measured, Table
from dualinfer.model.spec import ModelSpec
from dualinfer.model.weights import make_leaf
from dualinfer.parallel.sharding import make_plan

NAMES = [
    *("llama-3-8b", "llama-2-7b", "llama-3.2-1b", "opt-6.7b", "gpt-j-6b", "gpt2", "bert-large"),
    *("gemma-2-2b", "gemma-2-9b", "pythia-6.9b", "bloom-7b1", "gpt-neo-2.7b", "opt-1.3b"),
    *("gpt2-xl", "gpt-neo-1.3b", "bloom-560m", "bert-base", "opt-125m", "gpt-neo-125m"),
    *("qwen3-30b-a3b", "olmoe-1b-7b", "gpt-oss-20b", "mixtral-8x7b"),
]
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
PROMPTS = (128, 512, 2048, 8192)
REACHES = (128, 256, 512, 1024, 2048, 4096, 8192)


class Part(NamedTuple):
    """What one of `tp` times `ep` devices has of a shape, whose experts `ep` groups share out."""

    shape: str
    tp: int
    quant: str | None = None
    cache_codes: str | None = None
    ep: int = 1
    rows: tuple[int, ...] = ROWS
    products: bool = False

    @property
    def in_codes(self) -> tuple[str, ...]:
        """The ops that are tuned where weights or the cache are codes; none: all."""
        products = ("quantized_linear", "eight_bit_linear", "experts") if self.quant else ()
        return (*products, *(("decode_attention",) if self.cache_codes else ()))

    def asks_for(self, key: Key) -> bool:
        """Whether a case is tuned: of codes those that kernels read as codes."""
        if not self.in_codes:
            return True
        if key[0] == "experts" and self.quant:
            return dict(zip(experts_choice.TUNABLE.fields, key[1:], strict=True))["bits"] <= 8
        return key[0] in self.in_codes


class ShareOps(KernelOps):
    """The ops of a device that has the first of `parts` of all experts."""

    def __init__(self, device: torch.device, parts: int):
        super().__init__(device)
        self._parts = parts

    def own_experts(self, count: int) -> torch.Tensor | None:
        """See `KernelOps.own_experts`."""
        if self._parts == 1:
            return None
        return torch.tensor([0, count // self._parts], dtype=torch.int32, device=self.device)


def make_params(part: Part, dtype: str, device: torch.device) -> tuple[ModelSpec, Params]:
    """The first device's share of the shape's first layers, with random weights or codes."""
    spec, table = open_model(part.shape).describe()
    layers = 2 if spec.embed >= 2048 else 12
    if part.quant and part.quant != "mxfp4":
        model = random_model(open_model(f"{part.shape}:{layers}"), dtype)
        runner = init_inference(model, backend="torch", dtype=dtype, quant=part.quant).runner
        return runner.spec, runner.params
    if spec.encoder is None:
        spec = replace(spec, layers=spec.layers[:layers])
        table = replace(table, spec=spec, layers=table.layers[:layers])
    shard = make_plan(table, part.tp * part.ep, expert_parts=part.ep).shards[0]
    spec = shard.spec
    attention = {layer.attention for layer in spec.layers if layer.attention is not None}

    def constant(values: tuple[Any, ...]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    frequencies = {a.rope: constant(a.rope.tables) for a in attention if a.rope}
    slopes = {a.alibi: constant(a.alibi) for a in attention if a.alibi}
    params = Params({}, [{} for _ in spec.all_layers], frequencies, slopes)
    for row in shard.table.rows:
        group = params.outer if row.layer is None else params.layers[row.layer]
        if part.quant and row.local_name in ("experts.up.weight", "experts.down.weight"):
            bench, shape = Bench(getattr(torch, dtype), device), shard.shape(row)
            arrays = {name: bench.fill(own) for name, own in fillings(MXFP4, *shape).items()}
            group[row.local_name] = quantized_weight(MXFP4, shape[-1], arrays, bench.dtype)
            continue
        data = torch.empty(shard.shape(row), dtype=getattr(torch, dtype), device=device)
        group[row.local_name] = make_leaf(
            row, {"data": data.normal_(0, 0.02)}, dtype, shard.width(row)
        )
    return spec, params


def cases_of(part: Part, device: torch.device) -> list[TuningCase]:
    """What its steps ask of the kernels."""
    spec, params = make_params(part, SHAPES[part.shape].dtype, device)
    prompts = PROMPTS if part.quant or not part.in_codes else ()
    asked = (part.rows, (), ()) if part.products else (part.rows, REACHES, prompts)
    cases = tuning_cases(spec, params, ShareOps(device, part.ep), *asked, part.cache_codes)
    return [case for case in cases if part.asks_for(case.key)]


@lru_cache(1)  # the weights of one shape at a time
def cases_here(part: Part) -> dict[Key, TuningCase]:
    """Those of one shape, in a process that only compiles."""
    device = torch.device("cuda", torch.cuda.current_device())
    return {case.key: case for case in cases_of(part, device)}


def compile_candidates(part: Part, key: Key) -> None:
    """Run each candidate once, which leaves it in Triton's cache."""
    with torch.inference_mode(), suppress(Exception):  # the search meets it again, and tells
        case = cases_here(part)[key]
        run, _ = case.prepare()
        for config in case.candidates:
            with suppress(Exception):
                run(config)
        torch.cuda.synchronize()


def kind_of_device(device: torch.device, machine: Machine) -> str:
    """The name of this device's table."""
    capability = torch.cuda.get_device_capability(device)
    kinds = tuning.device_kinds(machine.device, capability, machine.processors)
    return kinds[0] if kinds else machine.device


def ships(measured: Measured) -> bool:
    """Whether an entry serves whole steps as well as it serves the op by itself.

    Attention that is split over programs is bound by latency, and its place between its neighbours
    decides: in whole steps the default rule was up to a tenth faster than what the search found.
    """
    config = measured.config
    return not isinstance(config, DecodeConfig) or config.splits == 1


def write(path: Path, kind: str, machine: Machine, table: Table) -> None:
    """Put the kind's table into the file."""
    devices = json.loads(path.read_text()) if path.is_file() else {}
    facts = {
        **{"device": machine.device, "torch": machine.torch, "triton": machine.triton},
        "entries": tuning.to_entries({k: m for k, m in table.items() if ships(m)}),
    }
    path.write_text(tuning.to_json(dict(sorted({**devices, kind: facts}.items()))))


def main() -> None:
    parser = argparse.ArgumentParser(description="The table of kernel configurations.")
    parser.add_argument("--shape", action="append", choices=SHAPES, help="default: a list of 23")
    parser.add_argument("--tp", action="append", type=int, help="devices that share it; default: 1")
    parser.add_argument("--ep", type=int, default=1, help="parts that experts are shared out in")
    parser.add_argument("--rows", action="append", type=int, help=f"default: {ROWS}")
    parser.add_argument("--products", action="store_true", help="leave attention out")
    parser.add_argument("--quant", help="tune products of random codes of this scheme")
    parser.add_argument("--kv-cache-dtype", help="tune attention over a cache in these codes")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keep", action="store_true", help="measure only what the file lacks")
    parser.add_argument("--again", action="store_true", help="with --keep: measure these anew")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--processes", type=int, default=min(6, os.cpu_count() or 1))
    arguments = parser.parse_args()
    if arguments.quant and (arguments.tp or arguments.ep > 1):
        parser.error("--quant makes the codes of one device; leave --tp and --ep out")
    what = arguments.quant, arguments.kv_cache_dtype, arguments.ep
    what = *what, tuple(arguments.rows or ROWS), arguments.products
    started = time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device())
    machine = Machine.of(device)
    kind = kind_of_device(device, machine)
    if arguments.again and not arguments.keep:
        parser.error("--again measures what --keep would leave as it is; give both")
    table: Table = {}
    known: set[Key] = set()
    if arguments.keep and arguments.out.is_file():
        devices = json.loads(arguments.out.read_text())
        table = tuning.to_table(devices.get(kind, {"entries": []})["entries"])
        known = set() if arguments.again else set(table)
    processes = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, processes) as pool:
        shapes = product(arguments.shape or NAMES, arguments.tp or [1])
        for part in (Part(*one, *what) for one in shapes):
            cases = [p for p in cases_of(part, device) if p.key not in known]
            # Before, not beside, the measurements: it runs the kernels as well.
            jobs = pool.map(partial(compile_candidates, part), [p.key for p in cases])
            list(jobs)
            compiled = time.monotonic() - started
            found: Table = {}
            ended = search(cases, found, graph_seconds(device), arguments.seconds - compiled)
            table |= found
            known |= set(found)
            write(arguments.out, kind, machine, table)
            spent = time.monotonic() - started
            keys = f"{len(found)} of {len(cases)} keys"
            times = f"compiled after {compiled:.0f} s, done after {spent:.0f} s"
            print(f"{part.shape} over {part.tp * part.ep}: {keys}, {times}", flush=True)
            del cases
            torch.cuda.empty_cache()
            if not ended:
                print("Out of time. With --keep the next run goes on from here.")
                break


if __name__ == "__main__":
    main()

"""Mixtures of experts by kernels on one GPU: each is checked against float64, searched and timed.

    python benchmarks/experts.py
    python benchmarks/experts.py --sizes olmoe gpt-oss --seconds 120 --out experts.json

It needs a CUDA device from Ampere on, torch and Triton, and neither network nor a checkpoint: the
weights are random, at the sizes of Qwen3-30B-A3B, OLMoE-1B-7B, Mixtral-8x7B and gpt-oss-20b, the
last one in mxfp4 too, as it is published, and the first one in int4 by groups of 128. It takes less
than five minutes on an H100 with 16 cores, of which the compiler has most; beyond `--seconds` no
other configuration is tried, and what was found so far is printed.

First each kernel is checked: routers by the experts they choose and their weights, experts by their
relative RMS error from float64 at 1 to 2,048 tokens, all with NaN in every expert that no
token chose; the same call gives the same bits, with and without an early start. A line `WRONG`
says that something is not so, and the exit status is then 1.

Then come times, of many calls in one CUDA graph whose routings take turns, so that weights come
from memory and not from the L2 cache:

- for few tokens microseconds of a call (gate and up, down, and what orders pairs), GB/s of the
  bytes of weights that the chosen experts have, each counted once, and what part that is of the
  rate of a large sum; by vectors and by tiles, so that the threshold between them can be read off;
- for prompts TFLOP/s beside torch's grouped_mm between the same kernels;
- for each shape the configuration that was fastest, and the default's time beside it.
"""

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of a checkout that is not installed

from dualinfer.kernels.triton import experts, quantized, routing
from dualinfer.kernels.triton.experts import (
    ExpertsConfig,
    ExpertsVectorConfig,
    Mixture,
)
from dualinfer.kernels.triton.linear import NormArguments
from dualinfer.kernels.triton.operands import Launch, Operand, Pointer, Recording
from dualinfer.kernels.triton.quantized import Packed
from dualinfer.kernels.triton.routing import Routing

FEW = (1, 2, 4, 8, 32)
MIDDLE = (128, 512)
PROMPTS = (2048, 8192)
CHECKED = (1, 2, 8, 64, 512, 2048)
CALLS = 16  # of few tokens in a graph
EPS = 1e-6
ERROR = 1e-2  # relative RMS of bfloat16's roundings on the way


@dataclass(frozen=True)
class Size:
    """A layer of experts, and how its router chooses."""

    name: str
    embed: int
    ffn: int
    total: int
    chosen: int
    router: dict[str, Any]
    hidden: dict[str, Any] = field(default_factory=dict)
    biases: bool = False
    codes: tuple[str, int, str] | None = None  # of weights, a group's columns, the scales' dtype

    @property
    def expert_bytes(self) -> float:
        """Of the weights of one expert."""
        count = 3 * self.embed * self.ffn
        if self.codes is None:
            return 2 * count
        codes, columns, scales = self.codes
        size = 1 if scales.startswith("float8") else 2
        return count * (quantized.bits_of(codes) / 8 + size / columns)


GPT_OSS = {"activation": "quick_gelu", "limit": 7.0, "offset": 1.0}
SIZES = {
    "qwen3": Size("Qwen3-30B-A3B", 2048, 768, 128, 8, {"score": "softmax", "renormalized": True}),
    "olmoe": Size("OLMoE-1B-7B", 2048, 1024, 64, 8, {"score": "softmax"}),
    "gpt-oss": Size(
        *("gpt-oss-20b", 2880, 2880, 32, 4, {"score": "chosen"}, GPT_OSS),
        biases=True,
    ),
    "mixtral": Size("Mixtral-8x7B", 4096, 14336, 8, 2, {"score": "softmax", "renormalized": True}),
    "gpt-oss-mxfp4": Size(
        *("gpt-oss-20b, mxfp4", 2880, 2880, 32, 4, {"score": "chosen"}, GPT_OSS),
        biases=True,
        codes=("fp4_e2m1", 32, "float8_e8m0fnu"),
    ),
    "qwen3-int4": Size(
        *("Qwen3-30B-A3B, int4", 2048, 768, 128, 8, {"score": "softmax", "renormalized": True}),
        codes=("int4", 128, "bfloat16"),
    ),
}


class Layer:
    """Random weights of one size, on the device."""

    def __init__(self, size: Size, device: torch.device):
        self.size, self.device = size, device
        self.generator = torch.Generator(device).manual_seed(0)
        e, f, x = size.embed, size.ffn, size.total
        self.mixture = Mixture(
            self.weight(x, 2 * f, e),
            self.weight(x, e, f),
            self.draw(x, 2 * f) if size.biases else None,
            self.draw(x, e) if size.biases else None,
            **size.hidden,
        )
        self.router = self.draw(x, e, scale=2 * e**-0.5)
        self.router_bias = self.draw(x) if size.biases else None
        self.norm = NormArguments("rms", self.draw(e).abs_() + 0.5, None, EPS)
        self.counters = torch.zeros(4096, dtype=torch.int32, device=device)

    def draw(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers, bfloat16."""
        x = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return x.normal_(0, scale, generator=self.generator)

    def weight(self, total: int, rows: int, width: int) -> Any:
        """Of all experts."""
        if self.size.codes is None:
            return self.draw(total, rows, width, scale=width**-0.5)
        codes, columns, scales = self.size.codes
        held = width if quantized.bits_of(codes) == 8 else -(-width // 32) * 16
        random = {"device": self.device, "generator": self.generator, "dtype": torch.uint8}
        data = torch.randint(0, 256, (total, rows, held), **random)
        shape = total, rows, -(-width // columns)
        if scales == "float8_e8m0fnu":
            scale = torch.randint(118, 122, shape, **random)
        else:
            scale = self.draw(*shape).abs_() * (0.2 * width**-0.5)
        return Packed(data, scale, None, None, codes, scales, 1, columns, width)

    def matrix(self, weight: Any, expert: int) -> torch.Tensor:
        """Of one expert, float64."""
        if not isinstance(weight, Packed):
            return weight[expert].double()
        own = weight._replace(data=weight.data[expert], scale=weight.scale[expert])
        return quantized.values(own, self.norm.weight, torch.float32).double()

    def routings(self, tokens: int, count: int, most: int | None = None) -> list[Routing]:
        """Random ones of the first `most` experts; those of single tokens that follow are apart."""
        total, k = most or self.size.total, self.size.chosen
        found = []
        for i in range(count):
            if tokens == 1:
                order = torch.arange(total) + i * k
                chosen = (order[:k] % total)[None]
            else:
                noise = torch.rand((tokens, total), device=self.device, generator=self.generator)
                chosen = noise.topk(k, dim=-1).indices
            weights = torch.rand(
                (tokens, k), device=self.device, generator=self.generator, dtype=torch.float32
            )
            chosen = chosen.sort(-1).values.to(self.device, torch.int32)
            found.append(Routing(chosen.contiguous(), weights / weights.sum(-1, keepdim=True)))
        return found

    def route(self, x: torch.Tensor, config: Any = None, pdl: bool = False) -> Routing:
        """By our kernel, with the norm where it has one."""
        few = routing.fuses_norm(x.shape[0])
        return routing.route(
            x, self.router, self.router_bias,
            chosen=self.size.chosen, norm=self.norm if few else None, counters=self.counters,
            config=config, pdl=pdl, sms=sms(self.device), **self.size.router,
        )  # fmt: skip

    def run(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        chosen: Routing,
        config: ExpertsConfig | None = None,
        grouped: bool = False,
        pdl: bool = False,
        mixture: Mixture | None = None,
    ) -> torch.Tensor:
        """By our kernels, with the norm where they have one; `grouped` by torch's products."""
        if config is None:
            key = experts.tuning_key(len(x), self.size.chosen, self.mixture, 2)
            config = experts.default_config(key, sms(self.device))
        vector = isinstance(config, ExpertsVectorConfig)
        return experts.experts(
            x, mixture or self.mixture, chosen,
            norm=self.norm if vector else None, residual=residual, config=config,
            product=grouped_product if grouped else None, counters=self.counters, pdl=pdl,
            sms=sms(self.device),
        )  # fmt: skip


def grouped_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """By torch."""
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


def sms(device: torch.device) -> int:
    """Multiprocessors of the device."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def starts_early(tokens: int, device: torch.device) -> bool:
    """As the engine decides it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    return tokens <= 4 or tokens >= 64


# What is right.


class Checks:
    """What was found wrong."""

    def __init__(self) -> None:
        self.wrong = 0

    def line(self, name: str, fine: bool, text: str) -> None:
        """Print a check."""
        self.wrong += not fine
        print(f"  {'ok   ' if fine else 'WRONG'} {name:38} {text}", flush=True)


def normed(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """float64."""
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * layer.norm.weight.double()


def wanted_experts(
    layer: Layer, x: torch.Tensor, residual: torch.Tensor, chosen: Routing
) -> torch.Tensor:
    """float64 of x, one expert after another."""
    m = layer.mixture
    y = residual.double()
    for expert in chosen.experts.unique().tolist():
        token, slot = (chosen.experts == expert).nonzero(as_tuple=True)
        h = x[token] @ layer.matrix(m.up, expert).T
        if m.up_bias is not None:
            h += m.up_bias[expert].double()
        gate, up = h.chunk(2, -1)
        if m.limit is not None:
            gate, up = gate.clamp(max=m.limit), up.clamp(-m.limit, m.limit)
        slope = 1.702 if m.activation == "quick_gelu" else 1.0
        h = gate * torch.sigmoid(slope * gate) * (up + m.offset)
        out = h @ layer.matrix(m.down, expert).T
        if m.down_bias is not None:
            out += m.down_bias[expert].double()
        y.index_add_(0, token, out * chosen.weights[token, slot].double()[:, None])
    return y


def check_router(layer: Layer, checks: Checks) -> None:
    """The chosen experts are the best but for ties of rounding, and their weights are right."""
    size, how = layer.size, layer.size.router
    for tokens in (1, 8, 64, 512):
        x = layer.draw(tokens, size.embed)
        found = layer.route(x)
        again = layer.route(x, pdl=starts_early(1, layer.device))
        same = all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        given = normed(layer, x) if routing.fuses_norm(tokens) else x.double()
        logits = given @ layer.router.double().T
        if layer.router_bias is not None:
            logits += layer.router_bias.double()
        scores = logits if how["score"] == "chosen" else logits.softmax(-1)
        best = scores.topk(size.chosen, dim=-1).values
        index = found.experts.long()
        mine = scores.gather(-1, index)
        far = (mine.sort(-1, descending=True).values - best).abs().max().item()
        weights = mine.softmax(-1) if how["score"] == "chosen" else mine
        if how.get("renormalized"):
            weights = weights / weights.sum(-1, keepdim=True)
        error = (found.weights.double() - weights).abs().max().item()
        ascending = bool((index.diff(dim=-1) > 0).all())
        checks.line(
            f"router, {tokens} tokens",
            far < 1e-4 and error < 1e-5 and ascending and same and int(layer.counters.sum()) == 0,
            f"choices {far:.1e}, weights {error:.1e}, ascending {ascending}, repeats {same}",
        )


def poisonable(layer: Layer) -> list[torch.Tensor]:
    """What the experts' weights are multiplied by, first axis X: they themselves, or scales."""
    weights = layer.mixture.up, layer.mixture.down
    return [weight.scale if isinstance(weight, Packed) else weight for weight in weights]


def poison(layer: Layer) -> list[torch.Tensor]:
    """Make the last half of the experts NaN; what was there, to be put back."""
    half, kept = layer.size.total // 2, []
    for part in poisonable(layer):
        kept.append(part[half:].clone())
        part[half:] = math.nan if part.is_floating_point() else 255  # as e8m0, NaN or more
    return kept


def check_experts(layer: Layer, checks: Checks) -> None:
    """Each way, at several numbers of tokens, with NaN in experts that are not chosen."""
    size, half = layer.size, layer.size.total // 2
    for tokens in CHECKED:
        x, residual = layer.draw(tokens, size.embed), layer.draw(tokens, size.embed)
        (chosen,) = layer.routings(tokens, 1, half)
        key = experts.tuning_key(tokens, size.chosen, layer.mixture, 2)
        default = experts.default_config(key, sms(layer.device))
        least = experts.MOST_VECTORS + 1
        many = experts.tuning_key(max(tokens, least), size.chosen, layer.mixture, 2)
        ways: dict[str, tuple[ExpertsConfig, bool]] = {"vectors": (default, False)}
        ways["tiles"] = experts.default_config(many, sms(layer.device)), False
        ways["torch's grouped_mm"] = ways["tiles"][0], True
        if not experts.is_few(tokens):
            del ways["vectors"]
        if size.codes is not None:
            del ways["torch's grouped_mm"]
        for way, (config, grouped) in ways.items():
            if grouped and layer.device.type != "cuda":
                continue
            vector = isinstance(config, ExpertsVectorConfig)
            given = normed(layer, x) if vector else x.double()
            wanted = wanted_experts(layer, given, residual, chosen)
            found = layer.run(x, residual, chosen, config, grouped)
            early = starts_early(1, layer.device)
            same = torch.equal(found, layer.run(x, residual, chosen, config, grouped, early))
            kept = poison(layer)
            blind = torch.equal(found, layer.run(x, residual, chosen, config, grouped, early))
            for part, values in zip(poisonable(layer), kept, strict=True):
                part[half:] = values
            error = ((found.double() - wanted).square().mean() / wanted.square().mean()).sqrt()
            fine = error.item() < ERROR and same and blind and int(layer.counters.sum()) == 0
            text = f"error {error.item():.1e}, repeats {same}, without NaN {blind}"
            checks.line(f"{tokens} tokens, {way}", fine, text)


# What is compiled beforehand, by several processes.


def launches(layer: Layer, tokens: int, config: ExpertsConfig, pdl: bool) -> list[Launch]:
    """What `Layer.run` would launch."""
    recording = Recording()

    def operand(x: Any) -> Any:
        return recording.operand(x.shape, x.dtype) if isinstance(x, torch.Tensor) else x

    m, size = layer.mixture, layer.size
    mixture = Mixture(
        *(Packed(*map(operand, part)) if isinstance(part, Packed) else operand(part) for part in m)
    )
    norm = None
    if isinstance(config, ExpertsVectorConfig):
        norm = NormArguments(*(operand(part) for part in layer.norm))
    pairs = tokens, size.chosen
    chosen = Routing(recording.operand(pairs, "int32"), recording.operand(pairs, "float32"))
    x, residual = (recording.operand((tokens, size.embed), "bfloat16") for _ in range(2))
    experts.experts(
        x, mixture, chosen, norm=norm, residual=residual, config=config,
        counters=operand(layer.counters), pdl=pdl, sms=sms(layer.device),
    )  # fmt: skip
    assert isinstance(x, Operand)
    return recording.launches


def portable(launch: Launch) -> tuple[Any, ...]:
    """A launch as another process can compile it, and as those that compile alike are equal."""
    values = []
    for name, value in launch.arguments:
        if isinstance(value, Pointer):
            value = ("pointer", value.dtype)
        elif type(value) is int and name.islower():  # Triton looks at these two facts alone
            value = 1 if value == 1 else 16 if value % 16 == 0 else 17
        values.append(value)
    kernel = launch.kernel
    return kernel.__module__, kernel.__name__, tuple(values), launch.options, launch.early


def compile_one(task: tuple[Any, ...]) -> str | None:
    """Compile a launch into Triton's cache; what went wrong, if something did."""
    import importlib

    module, name, values, options, early = task
    try:
        kernel = getattr(importlib.import_module(module), name)
        dtypes = {"uint32": torch.uint32, "uint8": torch.uint8}
        args = [
            (dtypes.get(value[1]) or getattr(torch, value[1]))
            if isinstance(value, tuple) and value[:1] == ("pointer",)
            else value
            for value in values
        ]
        meta = dict(options) | ({"launch_pdl": True} if early else {})
        kernel.warmup(*args, grid=(1,), **meta)
    except Exception as error:  # the launch itself will say it again
        return f"{name}: {error}"
    return None


def compile_all(tasks: Sequence[tuple[Any, ...]], until: float) -> None:
    """By as many processes as there are cores, as far as the time goes."""
    started = time.monotonic()
    workers = max(1, min(14, (os.cpu_count() or 1) - 1))
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    futures = [pool.submit(compile_one, task) for task in tasks]
    failed = []
    try:
        for future in futures:
            failed.append(future.result(timeout=max(1.0, until - time.monotonic())))
    except Exception as error:
        print(f"compiling ahead ended early: {type(error).__name__} {error}")
    pool.shutdown(wait=False, cancel_futures=True)
    problems = [text for text in failed if text]
    print(
        f"compiled {len(failed)} of {len(tasks)} kernels in {time.monotonic() - started:.0f} s"
        f"{'; ' + problems[0][:300] if problems else ''}",
        flush=True,
    )


# How fast it is.


def graph_us(calls: Sequence[Callable[[], Any]], repeats: int = 7) -> float:
    """Median microseconds of one of the calls, which follow one another in a graph."""
    side = torch.cuda.Stream()
    graph, times = torch.cuda.CUDAGraph(), []
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        calls[0]()
        side.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
        for _ in range(repeats + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            times.append((start, end))
        side.synchronize()
    found = sorted(start.elapsed_time(end) for start, end in times[1:])
    return found[len(found) // 2] * 1e3 / len(calls)


def read_rate() -> float:
    """Bytes a second of a large sum, the best of ten."""
    x = torch.ones(1 << 30, device="cuda")
    best = 0.0
    for _ in range(10):
        best = max(best, x.nbytes / (graph_us([x.sum], 1) * 1e-6))
    return best


def configurations(
    layer: Layer, tokens: int, vectors: bool
) -> tuple[ExpertsConfig, list[ExpertsConfig]]:
    """The default, and others that are worth a try."""
    most = experts.MOST_VECTORS
    bounded = min(tokens, most) if vectors else max(tokens, most + 1)
    key = experts.tuning_key(bounded, layer.size.chosen, layer.mixture, 2)
    default, *others = experts.TUNABLE.candidates(key, sms(layer.device))
    fitting = [c for c in dict.fromkeys(others) if experts.TUNABLE.fits(key, c) and c != default]
    return default, fitting


def combined(times: dict[ExpertsConfig, float], default: ExpertsConfig) -> ExpertsConfig:
    """The best of gate and up with the best of down, which candidates vary one by one."""
    best = min(times, key=lambda c: times[c])
    if not isinstance(default, ExpertsVectorConfig):
        return best
    ups = {c: t for c, t in times.items() if c[2:] == default[2:]}
    downs = {c: t for c, t in times.items() if c[:2] == default[:2]}
    up, down = min(ups, key=lambda c: ups[c]), min(downs, key=lambda c: downs[c])
    return ExpertsVectorConfig(*up[:2], *down[2:])


class Timer:
    """Times of one layer, as far as time goes."""

    def __init__(self, layer: Layer, rate: float, until: float):
        self.layer, self.rate, self.until = layer, rate, until
        self.results: list[dict[str, Any]] = []

    def inputs(self, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor, Routing]]:
        """As many as their weights do not fit into the L2 cache, a call each."""
        layer, size = self.layer, self.layer.size
        calls = CALLS if tokens <= 8 else 4 if tokens < 1024 else 2
        return [
            (layer.draw(tokens, size.embed), layer.draw(tokens, size.embed), chosen)
            for chosen in layer.routings(tokens, calls)
        ]

    def us(self, inputs: Sequence[Any], config: ExpertsConfig, grouped: bool = False) -> float:
        """Microseconds of a call; infinite where it cannot run."""
        early = starts_early(len(inputs[0][0]), self.layer.device)
        try:
            return graph_us(
                [lambda own=own: self.layer.run(*own, config, grouped, early) for own in inputs]
            )
        except Exception as error:
            torch.cuda.synchronize()
            print(f"  {config} cannot run: {str(error)[:200]}", flush=True)
            return math.inf

    def few(self, tokens: int, vectors: bool) -> None:
        """Search and print one number of tokens, by vectors or by tiles."""
        inputs = self.inputs(tokens)
        default, others = configurations(self.layer, tokens, vectors)
        times = {default: self.us(inputs, default)}
        for config in others:
            if time.monotonic() < self.until:
                times[config] = self.us(inputs, config)
        both = combined(times, default)
        times.setdefault(both, self.us(inputs, both))
        best = min(times, key=lambda c: times[c])
        distinct = [len(chosen.experts.unique()) for *_, chosen in inputs]
        moved = self.layer.size.expert_bytes * sum(distinct) / len(distinct)
        us = times[best]
        way = "vectors" if vectors else "tiles"
        print(
            f"  {tokens:5} tokens {way:8} {us:8.1f} us (default {times[default]:8.1f}) "
            f"{moved / us / 1e3:7.0f} GB/s {moved / us * 1e6 / self.rate:6.1%} of the stream, "
            f"{sum(distinct) / len(distinct):.1f} experts, {best}",
            flush=True,
        )
        self.note(tokens, way, best, us, times[default], len(times))

    def many(self, tokens: int) -> None:
        """Search and print a prompt, and torch's products."""
        inputs, size = self.inputs(tokens), self.layer.size
        default, others = configurations(self.layer, tokens, False)
        times = {default: self.us(inputs, default)}
        for config in others:
            if time.monotonic() < self.until:
                times[config] = self.us(inputs, config)
        best = min(times, key=lambda c: times[c])
        grouped = self.us(inputs, default, True) if size.codes is None else math.nan
        flops = 2.0 * tokens * size.chosen * 3 * size.embed * size.ffn
        print(
            f"  {tokens:5} tokens tiles    {times[best]:8.1f} us (default {times[default]:8.1f}) "
            f"{flops / times[best] / 1e6:6.0f} TFLOP/s; grouped_mm {grouped:8.1f} us "
            f"{flops / grouped / 1e6:6.0f} TFLOP/s; {best}",
            flush=True,
        )
        self.note(tokens, "tiles", best, times[best], times[default], len(times), grouped)

    def router(self, tokens: int) -> None:
        """Search and print the router."""
        layer, size = self.layer, self.layer.size
        key = routing.tuning_key(tokens, size.total, size.embed, 2)
        xs = [layer.draw(tokens, size.embed) for _ in range(CALLS)]
        early = starts_early(tokens, layer.device)
        default, *others = routing.TUNABLE.candidates(key, sms(layer.device))
        times = {}
        for config in dict.fromkeys([default, *others]):
            if config != default and (
                time.monotonic() > self.until or not routing.TUNABLE.fits(key, config)
            ):
                continue
            try:
                calls = [lambda x=x, c=config: layer.route(x, c, early) for x in xs]
                times[config] = graph_us(calls)
            except Exception as error:
                print(f"  {config} cannot run: {str(error)[:200]}", flush=True)
        best = min(times, key=lambda c: times[c])
        print(
            f"  {tokens:5} tokens router   {times[best]:8.1f} us (default {times[default]:8.1f}) "
            f"{best}",
            flush=True,
        )
        self.note(tokens, "router", best, times[best], times[default], len(times))

    def note(
        self, tokens: int, way: str, best: Any, us: float, default: float, tried: int, *more: float
    ) -> None:
        """Keep a result."""
        self.results.append(
            {
                **{"size": self.layer.size.name, "tokens": tokens, "way": way, "us": us},
                **{"default_us": default, "tried": tried, "grouped_us": more[0] if more else None},
                **{"config": [type(best).__name__, *best]},
            }
        )


def cases(layer: Layer) -> Iterator[tuple[int, bool]]:
    """Tokens, and whether by vectors."""
    for tokens in FEW:
        if tokens <= 2 * experts.MOST_VECTORS:
            yield tokens, True
        if tokens > 1:
            yield tokens, False
    for tokens in (*MIDDLE, *PROMPTS):
        yield tokens, False


def all_launches(layer: Layer) -> Iterator[tuple[Any, ...]]:
    """What timing will launch, each once, defaults first."""
    first, later = [], []
    for tokens, vectors in cases(layer):
        default, others = configurations(layer, tokens, vectors)
        early = starts_early(tokens, layer.device)
        first += [portable(one) for one in launches(layer, tokens, default, early)]
        for config in others:
            later += [portable(one) for one in launches(layer, tokens, config, early)]
    yield from (*first, *later)


def main() -> None:
    """Check, then time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--seconds", type=float, default=270.0)
    parser.add_argument("--out", help="a file for the results as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This measures kernels on a CUDA device, and torch finds none.")
    started = time.monotonic()
    device = torch.device("cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    checks, results = Checks(), []
    rate = read_rate()
    torch.cuda.empty_cache()
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, a stream of {rate / 1e12:.2f} TB/s", flush=True)
    layers = {name: Layer(SIZES[name], device) for name in options.sizes}
    tasks = dict.fromkeys(
        task
        for group in itertools.zip_longest(*(all_launches(layer) for layer in layers.values()))
        for task in group
        if task is not None
    )
    with torch.inference_mode():
        compile_all(list(tasks), started + options.seconds * 0.5)
        for layer in layers.values():
            print(f"{layer.size.name}: right?", flush=True)
            check_router(layer, checks)
            check_experts(layer, checks)
            torch.cuda.empty_cache()
        for number, layer in enumerate(layers.values()):
            left = started + options.seconds - time.monotonic()
            until = time.monotonic() + left / (len(layers) - number)
            print(f"{layer.size.name}: fast?", flush=True)
            timer = Timer(layer, rate, until)
            for tokens in (1, 8, 2048):
                timer.router(tokens)
            for tokens, vectors in cases(layer):
                timer.few(tokens, vectors) if tokens < 1024 else timer.many(tokens)
            results += timer.results
            torch.cuda.empty_cache()
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump({"device": name, "stream": rate, "results": results}, file, indent=1)
    print(f"{time.monotonic() - started:.0f} s, {checks.wrong} wrong", flush=True)
    sys.exit(1 if checks.wrong else 0)


if __name__ == "__main__":
    main()

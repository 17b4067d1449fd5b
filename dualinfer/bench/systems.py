"""The systems that rows measure: dualinfer's engine, or a peer, behind the same three calls."""

import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .. import backends
from ..api import init_inference
from ..errors import UnsupportedError
from . import peers
from .drive import Clock, Record, Run, drive
from .load import Ask, Load
from .random_weights import checkpoint, make_module, random_model
from .shapes import Model
from .task import Task

SIDES = {
    "torch": ("torch", "hf-eager", "hf-compile", "hf"),
    "jax": ("jax", "keras-hub", "flax"),
}
SERVING_PEERS = ("hf",)
PEERS = tuple(
    name
    for side, names in SIDES.items()
    for name in names
    if name != side and name not in SERVING_PEERS
)

_PATIENCE = 120  # seconds that ranks wait for one that has failed


class System(Protocol):
    """One model ready to run. Every call returns when its result is there."""

    def generate(self, ids: np.ndarray, new_tokens: int) -> int:
        """Continue ids [B, T] greedily by `new_tokens`, no EOS; the columns of the result."""
        ...

    def prefill(self, ids: np.ndarray) -> None:
        """The first new token of ids [B, T]."""
        ...

    def forward(self, ids: np.ndarray) -> Callable[[], Any]:
        """A call that runs one pass over ids [B, T], put on the device here."""
        ...

    def embed(self, texts: list[list[int]]) -> Callable[[], Any]:
        """A call that makes a vector of each text's ids, mean pooling, on the host."""
        ...

    def answer(self, loads: list[Load], vocab: int, most: int | None, over_http: bool) -> list[Run]:
        """Answer many requests at once: those of each load, one after another."""
        ...

    def facts(self) -> dict[str, Any]:
        """The facts that the row says of the system."""
        ...

    def close(self) -> None:
        """Free everything on the device."""
        ...


def side_of(system: str) -> str:
    """The framework in whose process a system runs."""
    return next(side for side, names in SIDES.items() if system in names)


@contextmanager
def opened(task: Task, model: Model, dtype: str) -> Iterator[System]:
    """The system of a task with the model loaded, as this and others of its kind want it.

    With `tp` above 1 on torch this is one of so many processes that do the same.
    """
    instance: System
    if task.system in backends.BACKENDS:
        instance = Engine(task, model, dtype)
    else:
        instance = peers.make_peer(task.system, model, dtype, task.kind)
    try:
        yield instance
    finally:
        instance.close()


async def drive_all(send: Any, loads: list[Load], vocab: int, most: int | None) -> list[Run]:
    """The runs of loads in this process, one after another."""
    return [await drive(load, load.asks(vocab, most), send) for load in loads]


def _over_http(engine: Any, loads: list[Load], vocab: int, most: int | None) -> list[Run]:
    """The runs of loads by the server of `dualinfer serve` on a free port of this machine."""
    from .local_server import running

    with running(engine, vocab) as url, tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "request.json")
        fields = {"url": url, "model": None, "vocab": vocab, "most": most}
        path.write_text(json.dumps(fields | {"loads": [load.to_dict() for load in loads]}))
        command = [sys.executable, "-m", f"{__package__}.client", str(path)]
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True
        )
    return [Run.of(fields) for fields in json.loads(ended.stdout)]


class Engine:
    """Dualinfer itself, made as a user makes it."""

    def __init__(self, task: Task, model: Model, dtype: str) -> None:
        backend, tp, resident = task.system, task.tp, task.resident
        options: dict[str, Any] = {"dtype": dtype, "replace_with_kernel_inject": task.kernels}
        options |= {"quant": task.quant, "kv_cache_dtype": task.kv_cache, "kernels": task.by}
        options["state_dtype"] = task.states
        if resident is not None:
            options |= {"keep_module_on_host": True, "resident_layers": resident}
        if tp > 1:
            options["tensor_parallel"] = {"tp_size": tp, "timeout": _PATIENCE}
            options["moe"] = {"ep_size": task.ep}
        device = backends.device_kind(backend)
        if task.kind == "forward" and device != "cpu":
            options["enable_cuda_graph"] = True
        self._backend = backend
        self._load_seconds = None
        self._reserved = 0  # tokens of a slot
        if model.folder is None and (task.quant or resident is not None or model.is_quantized):
            given = random_model(model, dtype)
            self._engine: Any = init_inference(given, backend=backend, **options)
        elif backend == "torch" and task.kernels and model.folder is None:
            # The module dies here, and with it those of its weights that are not shared.
            module = make_module(model, dtype, device)
            self._engine = init_inference(module, backend=backend, **options)
            del module
        else:
            with checkpoint(model, dtype) as folder:
                start = time.perf_counter()
                self._engine = init_inference(folder, backend=backend, **options)
                self._load_seconds = time.perf_counter() - start

    def generate(self, ids: np.ndarray, new_tokens: int) -> int:
        """NumPy in, NumPy out."""
        result = self._engine.generate(
            ids,
            max_new_tokens=new_tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            eos_token_id=None,
        )
        return result.shape[1]

    def prefill(self, ids: np.ndarray) -> None:
        """Generate's first token."""
        self.generate(ids, 1)

    def forward(self, ids: np.ndarray) -> Callable[[], Any]:
        """One pass; the outputs stay on the device."""
        if self._backend == "torch":
            import torch

            tensor = torch.from_numpy(ids).to(self._engine.device)

            def run() -> Any:
                outputs = self._engine(tensor)
                if tensor.is_cuda:
                    torch.cuda.synchronize()
                return outputs

            return run
        import jax

        array = jax.device_put(ids.astype(np.int32), self._engine.device)
        return lambda: jax.block_until_ready(tuple(self._engine(array).values()))

    def embed(self, texts: list[list[int]]) -> Callable[[], Any]:
        """`engine.embed`, which packs texts by itself."""
        return lambda: self._engine.embed(texts, pooling="mean", normalize=False)

    def answer(self, loads: list[Load], vocab: int, most: int | None, over_http: bool) -> list[Run]:
        """By a server of ours and a client in a process of its own, or by `generate_async`."""
        if not hasattr(self._engine, "generate_async"):
            raise UnsupportedError(
                "This model runs in module mode, which serves one call at a time."
            )
        asks = [ask for load in loads for ask in load.asks(vocab, most)]
        longest = max(len(ask.ids) + ask.new_tokens for ask in asks)
        if longest > self._reserved:  # as `dualinfer serve` does
            more = 33  # that the steps alone take
            tokens = min(longest + more, most or longest + more)
            self._reserved = self._engine.reserve(tokens=tokens).tokens
        if over_http:
            return _over_http(self._engine, loads, vocab, most)
        return asyncio.run(drive_all(self._send, loads, vocab, most))

    async def _send(self, ask: Ask, record: Record, clock: Clock) -> None:
        how = {"do_sample": False, "repetition_penalty": 1.0, "eos_token_id": None}
        handle = self._engine.generate_async(ask.ids, max_new_tokens=ask.new_tokens, **how)
        while tokens := await handle.arrived():
            record.stamps.append(clock())
            record.output += len(tokens)

    def facts(self) -> dict[str, Any]:
        """From the engine's report: what served each op, and what was captured or compiled."""
        report = self._engine.report()
        return {
            "ops": dict(report.ops),
            "compilations": report.compilations,
            "parameter_bytes": report.parameter_bytes,
            "weights": dict(report.weights),
            "cache_bytes": report.cache_bytes,
            "streamed_bytes": report.streamed_bytes,
            "notes": list(report.notes),
            "load_seconds": self._load_seconds,
            "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

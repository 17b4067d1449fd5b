"""The work that `engine.compile(compile_kwargs=...)` compiles before the first request."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np

from ...errors import ArgumentError, LengthError, UnsupportedError, shown
from ...ops.caches import Room
from ..base import Request
from ..slots import RESERVED, SMALLEST_CACHE, bucket
from .cache import Cache
from .executables import Job
from .sampler import BEST, SlotState


@dataclass(frozen=True)
class Wanted:
    """Every size of a batch with every length of a prompt, for at most `new_tokens` tokens more.

    One executable serves every kind of sampling. With `stream` also the step that streams take,
    which is one by itself.
    """

    batch_sizes: tuple[int, ...]
    prompt_lengths: tuple[int, ...]
    new_tokens: int
    stream: bool = False

    @classmethod
    def of(cls, backend: Any, compile_kwargs: Mapping[str, Any] | None) -> "Wanted | None":
        """From `compile()`'s arguments; None where nothing is asked for.

        UnsupportedError for another compiler or its options, ArgumentError for a wrong value.
        """
        given = dict(compile_kwargs or {})
        names = [field.name for field in fields(cls)]
        if backend is not None or set(given) - set(names):
            raise UnsupportedError(
                f"compile(backend={shown(backend)}, compile_kwargs={shown(given)}): on JAX every "
                "step is compiled by XLA as it is. To compile it before the first request, pass "
                f"{', '.join(names)} in compile_kwargs, and no backend."
            )
        if not given:
            return None
        missing = [name for name in names[:3] if name not in given]
        if missing:
            raise ArgumentError(f"compile_kwargs lacks {', '.join(missing)}.")
        for name in ("batch_sizes", "prompt_lengths"):
            given[name] = _sizes(name, given[name])
        (given["new_tokens"],) = _sizes("new_tokens", [given["new_tokens"]])
        if not isinstance(given.get("stream", False), bool):
            raise ArgumentError(f"stream={given['stream']!r}; expected True or False.")
        return cls(**given)

    def check_length(self, most: int) -> None:
        """Raise LengthError beyond `most`, the tokens that generate takes and makes at most."""
        longest = max(self.prompt_lengths)
        if longest + self.new_tokens > most:
            raise LengthError(
                f"prompt_lengths of {longest} and {self.new_tokens} new tokens make "
                f"{longest + self.new_tokens}, over what generate allows ({most}: max_out_tokens, "
                "or the model's own limit). Ask for shorter prompts or fewer new tokens."
            )


def _sizes(name: str, value: Any) -> tuple[int, ...]:
    sizes = tuple(value) if isinstance(value, list | tuple | range) else ()
    if not sizes or not all(type(n) is int and n > 0 for n in sizes):
        raise ArgumentError(f"{name}={value!r}; expected ints of 1 or more.")
    return sizes


class Steps(Protocol):
    """The part of a runner that says how its steps are compiled; arrays may be abstract."""

    device: jax.Device

    def make_buffers(self, room: Room, eos_width: int) -> tuple[Cache, SlotState]:
        """New buffers for `room`; called under jax.eval_shape."""
        ...

    def prefill_jobs(
        self, requests: Sequence[Request], slots: Sequence[int], cache: Any, state: Any
    ) -> list[Job]:
        """The steps that read the prompts of `requests` into `slots`, from host memory."""
        ...

    def decode_job(self, steps: int, alone: bool, mode: int, cache: Any, state: Any) -> Job:
        """Up to `steps` steps for every slot in a loop, or one `alone`."""
        ...


def jobs(runner: Steps, wanted: Wanted, eos_width: int) -> list[Job]:
    """Every step that `wanted` passes through, each once, for abstract arrays."""
    by_key: dict[Any, Job] = {}
    for count in dict.fromkeys(map(bucket, wanted.batch_sizes)):
        for length in wanted.prompt_lengths:
            request = Request(np.zeros(length, np.int32), wanted.new_tokens)
            for job in _of_request(runner, request, count, eos_width, wanted.stream):
                by_key.setdefault(job.key, job)
    return [abstract(job, runner.device) for job in by_key.values()]


def _of_request(
    runner: Steps, request: Request, count: int, eos_width: int, stream: bool
) -> Iterator[Job]:
    """Prefill of `count` such requests, and decode in each size of the cache.

    The sizes are all that requests for fewer tokens start with or that the cache grows to.
    """
    started = max(len(request.tokens), min(request.cache_tokens, RESERVED))
    last_start, most = (bucket(n, SMALLEST_CACHE) for n in (started, request.cache_tokens))
    tokens = bucket(len(request.tokens), SMALLEST_CACHE)
    while tokens <= most:
        buffers = jax.eval_shape(partial(runner.make_buffers, Room(count, tokens), eos_width))
        if tokens <= last_start:
            yield from runner.prefill_jobs([request] * count, range(count), *buffers)
        if request.max_new_tokens > 1:
            for alone in (False, True) if stream else (False,):
                yield runner.decode_job(1, alone, BEST, *buffers)
        tokens *= 2


def decode(runner: Steps, room: Room, eos_width: int, alone: bool) -> Job:
    """A step of the sequences in a cache of `room`, for abstract arrays."""
    buffers = jax.eval_shape(partial(runner.make_buffers, room, eos_width))
    return abstract(runner.decode_job(1, alone, BEST, *buffers), runner.device)


def abstract(job: Job, device: jax.Device) -> Job:
    """The job with shapes in place of all arrays: its executable is that of a run, on disk as well.

    Those of host memory lie nowhere on a single device: a step takes them there itself.
    """
    shardings = job.shardings or (jax.sharding.SingleDeviceSharding(device),) * len(job.args)

    def shape(x: Any, sharding: jax.sharding.Sharding) -> Any:
        lies: jax.sharding.Sharding | None = sharding
        if isinstance(x, jax.Array):
            lies = x.sharding
        elif isinstance(x, np.ndarray | np.generic) and len(sharding.device_set) == 1:
            lies = None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies)

    args = tuple(
        jax.tree.map(shape, arg, jax.tree.broadcast(sharding, arg))
        for arg, sharding in zip(job.args, shardings, strict=True)
    )
    return job._replace(args=args)

"""`dualinfer bench serve`: many requests, beside the steps alone."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from .. import backends
from ..config import make_config
from ..errors import ArgumentError
from ..system.command_options import (
    KvCacheOption,
    StateOption,
    with_options,
)
from .asked import Chosen, Measured, ModelArgument, make_tasks
from .load import Load
from .remote_server import Remote
from .running import bench
from .serving import SLOS
from .shapes import EMBEDDED
from .systems import SERVING_PEERS


@dataclass(frozen=True, kw_only=True)
class Served(Chosen):
    """Options of the load on a server, and of how its answers are judged."""

    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Another system beside it: hf, HF's continuous batching."
        ),
    ] = None
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw how the times are spread (.png).")
    ] = None
    requests: Annotated[int, typer.Option(metavar="COUNT", min=1, help="Requests of each row.")] = (
        1000
    )
    rate: Annotated[
        list[float] | None,
        typer.Option(
            metavar="NUMBER",
            help="Requests a second, as a Poisson process; several times for several rows. Unset: "
            "all are there from the start.",
        ),
    ] = None
    concurrency: Annotated[
        list[int] | None,
        typer.Option(
            metavar="COUNT",
            min=1,
            help="Requests under way at a time; several times for several rows. Unset: any number.",
        ),
    ] = None
    lengths: Annotated[
        Literal["random", "chat"],
        typer.Option(
            metavar="random|chat", help="Of prompts and answers: those named below, or as chats'."
        ),
    ] = "random"
    input_len: Annotated[
        list[int] | None,
        typer.Option(
            metavar="COUNT",
            min=1,
            help="Tokens of a prompt; several times for several rows. [1024]",
        ),
    ] = None
    output_len: Annotated[
        int | None, typer.Option(metavar="COUNT", min=1, help="Tokens of an answer. [128]")
    ] = None
    range_ratio: Annotated[
        float,
        typer.Option(metavar="SHARE", min=0, max=1, help="By how much each may differ from these."),
    ] = 0.0
    prefix_len: Annotated[
        int,
        typer.Option(metavar="COUNT", min=0, help="Tokens before a prompt that others have, too."),
    ] = 0
    prefixes: Annotated[
        int, typer.Option(metavar="COUNT", min=1, help="How many such beginnings there are.")
    ] = 1
    seed: Annotated[
        int, typer.Option(metavar="NUMBER", min=0, help="Of lengths, ids and times.")
    ] = 0
    warm_ups: Annotated[
        int | None,
        typer.Option(
            metavar="COUNT",
            min=0,
            help="Requests before those that are measured. [as many as may be under way, at most "
            "256; of a --url 1]",
        ),
    ] = None
    within: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Give up requests of a row that have not ended by then. Unset: none.",
        ),
    ] = None
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:MS",
            help=f"Count requests within so many milliseconds of {', '.join(SLOS)}; several times "
            "for all of several.",
        ),
    ] = None


@with_options
def serve(
    model: ModelArgument = None,
    url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            show_default=False,
            help="Measure a server of OpenAI's API in place of one made here; MODEL is its name "
            "there. Several times for several.",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", envvar="DUALINFER_API_KEY", help="What the server wants."),
    ] = None,
    vocab: Annotated[
        int,
        typer.Option(metavar="COUNT", min=1, help="Prompts have ids below it, of a --url."),
    ] = 1000,
    http: Annotated[
        bool,
        typer.Option("--http/--no-http", help="By our server, or by generate_async without one."),
    ] = True,
    bare: Annotated[
        bool,
        typer.Option("--bare/--no-bare", help="Measure the same steps by generate alone, too."),
    ] = True,
    kv_cache_dtype: KvCacheOption = None,
    state_dtype: StateOption = None,
    *,
    asked: Served,
) -> None:
    """Latency and throughput of many requests, beside the steps alone.

    Of dualinfer's own server with random weights, of a checkpoint, of HF's continuous batching
    (--peer hf), or of any server of OpenAI's API (--url). Figures are those of vLLM's benchmark.
    """
    goals = _goals(asked.goodput or [])
    every = Load(
        asked.requests,
        chat=asked.lengths == "chat",
        output_len=asked.output_len,
        range_ratio=asked.range_ratio,
        prefix_len=asked.prefix_len,
        prefixes=asked.prefixes,
        seed=asked.seed,
        within=asked.within,
    )
    loads = [
        replace(every, input_len=length, rate=rate, concurrency=concurrency)
        for length in dict.fromkeys(asked.input_len or [None])
        for rate in dict.fromkeys(asked.rate or [None])
        for concurrency in dict.fromkeys(asked.concurrency or [None])
    ]
    for load in loads:
        if load.rate is not None and not load.rate > 0:
            raise ArgumentError(f"--rate {load.rate:g}; expected a number above 0.")
        if load.chat and (load.input_len or load.output_len or load.range_ratio):
            raise ArgumentError(
                "--lengths chat has lengths of its own. Leave --input-len, --output-len and "
                "--range-ratio out."
            )
        if load.within is not None and not load.within > 0:
            raise ArgumentError(f"--within {load.within:g}; expected seconds above 0.")
    if url:
        tasks = [
            Remote(one, model, api_key, vocab, load, _warm_ups(asked, load, 1), goals)
            for one in url
            for load in loads
        ]
        bench("serve", tasks, asked.json, asked.plot)
        return
    chosen = Measured(**{field.name: getattr(asked, field.name) for field in fields(Chosen)})
    kept = make_config({"kv_cache_dtype": kv_cache_dtype, "state_dtype": state_dtype}, {})
    own_tasks = [
        replace(
            task,
            kv_cache=kept.kv_cache_dtype if own else None,
            states=kept.state_dtype if own else None,
            serve={
                "load": load.to_dict(),
                "goals": goals,
                "over_http": http and own,
                "warm_ups": _warm_ups(asked, load, _MOST_WARM_UPS),
                "is_bare": bare and own,
            },
        )
        for task in make_tasks("serve", model, EMBEDDED, 0, 0, 1, chosen, SERVING_PEERS)
        for load in loads
        for own in [task.system in backends.BACKENDS]
    ]
    bench("serve", own_tasks, asked.json, asked.plot)


_MOST_WARM_UPS = 256


def _warm_ups(asked: Served, load: Load, most: int) -> int:
    if asked.warm_ups is not None:
        return asked.warm_ups
    return min(most, load.concurrency or most, load.requests)


def _goals(given: list[str]) -> dict[str, float]:
    """The goals that --goodput names, in milliseconds."""
    goals = {}
    for one in given:
        name, _, value = one.partition(":")
        try:
            goals[name] = float(value)
        except ValueError:
            goals[name] = 0.0
        if name not in SLOS or not goals[name] > 0:
            raise ArgumentError(
                f"--goodput {one}; expected one of {', '.join(SLOS)} and milliseconds, as ttft:200."
            )
    return goals

"""A model's steps compiled by libtpu, the compiler of TPUs, on a machine without a TPU."""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from ...arrays import numpy_dtype
from ...backends.jax import ahead
from ...backends.jax.executables import Job
from ...backends.jax.mesh import OneDevice
from ...backends.jax.ops.pallas import PallasOps
from ...backends.jax.ops.plain import PlainOps
from ...backends.jax.params import Params
from ...backends.jax.runner import JaxRunner
from ...backends.jax.whole import Placed
from ...model.load_plan import LoadPlan
from ...model.spec import ModelSpec
from ...model.weights import Row, make_leaf, put_leaf
from ...ops.caches import AS_COMPUTED, KeptIn
from ...parallel.agreement import Peers
from ...parallel.shard import Shard, fit_blocks
from ...parallel.sharding import make_plan
from ..task import Task

_VARIABLE = "TPU_LIBRARY_PATH"
# What libtpu would ask a TPU's machine for; two processes may have it, with no TPU to share.
_SETTINGS = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_SKIP_MDS_QUERY": "1",
}
_GRIDS = {"v5e": {4: "2x2", 8: "2x4"}, "v5p": {4: "2x2x1"}, "v6e": {4: "2x2", 8: "2x4"}}
_EOS_WIDTH = 4


def library() -> Path | None:
    """The file of libtpu: as TPU_LIBRARY_PATH says, where `make test-tpu` puts it, or installed.

    A TPU_LIBRARY_PATH that is empty, or names no file, means none.
    """
    if (given := os.environ.get(_VARIABLE)) is not None:
        return Path(given) if Path(given).is_file() else None
    places = [Path(sys.prefix, "tpu", "libtpu", "libtpu.so")]
    if (found := find_spec("libtpu")) is not None and found.origin is not None:
        places.append(Path(found.origin).with_name("libtpu.so"))
    return next((path for path in places if path.exists()), None)


def chips(name: str, count: int = 1) -> list[Any]:
    """So many chips of "v5e", "v5p" or "v6e" that there are not, to compile for."""
    jax.devices("cpu")  # or JAX would look for TPUs by what is set here
    os.environ.update({_VARIABLE: str(library()), **_SETTINGS})
    grid = _GRIDS[name][max(4, count)]
    return list(topologies.get_topology_desc(f"{name}:{grid}", "tpu").devices[:count])


def compile_for(job: Job, chip: Any) -> Any:
    """The job's executable for one chip."""
    lies = SingleDeviceSharding(chip)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies), job.args)
    return jax.jit(job.function, donate_argnums=job.donate).lower(*args).compile()


def abstract_runner(
    spec: ModelSpec,
    plan: LoadPlan,
    dtype: str,
    most: int,
    by: str = "pallas",
    kept: KeptIn = AS_COMPUTED,
) -> JaxRunner:
    """A runner on one device by "pallas" or "xla", whose weights are shapes."""
    tp_plan, own = make_plan(plan.table, 1), jnp.dtype(dtype)
    shard, place = tp_plan.shards[0], OneDevice(jax.devices("cpu")[0])
    params = Params({}, tuple({} for _ in spec.all_layers))
    for row, _ in fit_blocks(plan, tp_plan.shards).rows:
        leaf = make_leaf(row, _parts(shard, row, own), own, shard.width(row))
        put_leaf(params.group(row), row, leaf)
    ops = PlainOps() if by == "xla" else PallasOps()
    how = params, None, own, place, ops, Peers(), most
    return JaxRunner(Placed(spec, tp_plan, *how, kept=kept))


def _parts(shard: Shard, row: Row, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    if row.scheme is None:
        kind = jnp.dtype(jnp.float32) if row.wide else dtype
        return {"data": jax.ShapeDtypeStruct(shard.shape(row), kind)}
    kinds = {source.part: numpy_dtype(source.dtypes[0]) for source in row.sources}
    parts = {}
    for part, axes in row.parts.items():
        *rest, last = shard.shape(row, axes) or (1,)
        if part == "data":
            last = row.scheme.code.packing.width(last)
        parts[part] = jax.ShapeDtypeStruct((*rest, last), kinds[part])
    return parts


def compiled(task: Task, spec: ModelSpec, plan: LoadPlan, dtype: str, chip: str) -> dict[str, Any]:
    """Compile the program of a token, or of a prompt, and read its facts; no time is measured.

    `by` says whose kernels it has, "pallas" or "xla", and `error` why there is no program: all else
    is missing then.

    `argument_bytes` are weights, cache and inputs, `temp_bytes` what it holds beside them, and
    `kernels` how many it calls. XLA counts what it reads and writes, `accessed_bytes`, and `flops`,
    kernels' as `launch.run` says them, and of all but kernels how long it takes, `cycles`.
    """
    by = task.by or ("pallas" if task.kernels else "xla")
    most = task.tokens + task.new_tokens
    wanted = ahead.Wanted((task.batch,), (task.tokens,), task.new_tokens, stream=True)
    name = "one" if task.kind == "decode" else "prefill"
    try:  # any compiler's error is the row's
        runner = abstract_runner(spec, plan, dtype, most, by, task.kept)
        jobs = {_name(job): job for job in ahead.jobs(runner, wanted, _EOS_WIDTH)}
        # Over the largest cache, which is the last one.
        made = compile_for(jobs[name], chips(chip)[0])
    except Exception as error:
        first, *_ = str(error).strip().splitlines() or [""]
        if "RESOURCE_EXHAUSTED" in str(error):
            first = "it does not fit into the chip's memory"
        return {"by": by, "error": first or type(error).__name__}
    memory, cost, text = made.memory_analysis(), made.cost_analysis(), made.as_text()
    entry = text[text.index("\nENTRY ") :]
    return {
        "by": by,
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "accessed_bytes": int(cost["bytes accessed"]),
        "flops": int(cost["flops"]),
        "kernels": entry.count('custom_call_target="tpu_custom_call"'),
        "cycles": sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', entry))),
    }


def _name(job: Job) -> str:
    key: Any = job.key
    return key[0]

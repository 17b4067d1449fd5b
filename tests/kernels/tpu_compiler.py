"""XLA's and Mosaic's compiler for TPUs, which libtpu has, and which needs no TPU.

`make test-tpu` and `make test-slow` bring libtpu, in a folder of its own: JAX looks for a TPU
wherever it is installed.
"""

import re
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dualinfer.backends.jax.executables import Job
from dualinfer.bench.jax.tpu import chips, compile_for, library

needs_compiler = pytest.mark.skipif(library() is None, reason="`make test-tpu` brings libtpu")


class Program(NamedTuple):
    """A compiled step: what it calls, and what it holds."""

    kernels: set[str]  # Pallas' by name
    collectives: set[str]
    copied: set[tuple[int, ...]]  # shapes of arrays that are copied within the TPU's main memory
    aliased: int  # bytes of arguments whose memory results take
    held: int  # bytes of temporaries
    moved: int  # bytes that it reads and writes, as XLA counts them


def compiled(job: Job, chip: str, count: int = 1) -> Program:
    """A job compiled for so many devices of "v5e", "v5p" or "v6e".

    A job of several devices has a mesh of the CPU's in it, and goes to a TPU as an exported one.
    """
    own = chips(chip, count)
    if count == 1:
        return _program(compile_for(job, own[0]))
    function: Any = jax.jit(job.function, donate_argnums=job.donate)
    exported = jax.export.export(function, platforms=["tpu"])(*job.args)
    mesh = Mesh(np.array(own), ("tp",))
    given = [
        jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=NamedSharding(mesh, PartitionSpec() if lies is None else lies.spec),
        )
        for x, lies in zip(exported.in_avals, exported._in_named_shardings, strict=True)
    ]
    args, _ = jax.tree.unflatten(exported.in_tree, given)
    function = jax.jit(exported.call, donate_argnums=job.donate)
    return _program(function.lower(*args).compile())


def _program(made: Any) -> Program:
    text = made.as_text()
    kernels = re.findall(r'%(\w+?)(?:\.\d+)? = [^\n]*custom_call_target="tpu_custom_call"', text)
    collectives = re.findall(r"\b(all-reduce|all-gather|reduce-scatter|all-to-all)\b", text)
    # Where both ends lie in main memory: S(1) is VMEM, to which weights are fetched ahead.
    copies = re.findall(r" = \w+\[([\d,]+)\]\{[^}\n]*\} copy\(", text)
    copied = {tuple(map(int, shape.split(","))) for shape in copies}
    memory = made.memory_analysis()
    bytes_of = memory.alias_size_in_bytes, memory.temp_size_in_bytes
    moved = int(made.cost_analysis()["bytes accessed"])
    return Program(set(kernels), set(collectives), copied, *bytes_of, moved)

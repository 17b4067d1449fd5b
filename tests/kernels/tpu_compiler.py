"""XLA's and Mosaic's compiler for TPUs, which libtpu has, and which needs no TPU.

`make test-tpu` and `make test-slow` bring libtpu, in a folder of its own: JAX looks for a TPU
wherever it is installed.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from dualinfer.backends.jax.executables import Job

LIBRARY = Path(sys.prefix, "tpu", "libtpu", "libtpu.so")
# What libtpu would ask a TPU's machine for; two workers may have it, as there is no TPU to share.
_SETTINGS = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_LIBRARY_PATH": str(LIBRARY),
}
_GRIDS = {"v5e": {4: "2x2", 8: "2x4"}, "v5p": {4: "2x2x1"}, "v6e": {4: "2x2", 8: "2x4"}}

needs_compiler = pytest.mark.skipif(not LIBRARY.exists(), reason="`make test-tpu` brings libtpu")


class Program(NamedTuple):
    """A compiled step: what it calls, and what it holds."""

    kernels: set[str]  # Pallas' by name
    collectives: set[str]
    copied: set[tuple[int, ...]]  # shapes of arrays that are copied within the TPU's main memory
    aliased: int  # bytes of arguments whose memory results take


def compiled(job: Job, chip: str, count: int = 1) -> Program:
    """A job compiled for so many devices of "v5e", "v5p" or "v6e".

    A job of several devices has a mesh of the CPU's in it, and goes to a TPU as an exported one.
    """
    os.environ.update(_SETTINGS)
    grid = _GRIDS[chip][max(4, count)]
    chips = topologies.get_topology_desc(f"{chip}:{grid}", "tpu").devices[:count]
    function: Any = jax.jit(job.function, donate_argnums=job.donate)
    if count == 1:
        lies = SingleDeviceSharding(chips[0])
        args = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies), job.args
        )
    else:
        exported = jax.export.export(function, platforms=["tpu"])(*job.args)
        mesh = Mesh(np.array(chips), ("tp",))
        own = zip(exported.in_avals, exported._in_named_shardings, strict=True)
        given = [
            jax.ShapeDtypeStruct(
                x.shape,
                x.dtype,
                sharding=NamedSharding(mesh, PartitionSpec() if lies is None else lies.spec),
            )
            for x, lies in own
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
    return Program(
        set(kernels), set(collectives), copied, made.memory_analysis().alias_size_in_bytes
    )

"""Mosaic GPU's compiler, which JAX's plugin for CUDA has, and ptxas behind it; neither needs a GPU.

`make test-slow` brings the plugin, in a folder of its own: JAX looks for a GPU wherever it is
installed. The compiler asks the driver for the device's capability alone, which a library of a few
lines answers here; a kernel is compiled to the end, and not loaded.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest
from jax.experimental.mosaic.gpu import core

_DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuCtxGetDevice(int *device) { return *device = 0; }
int cuDeviceGet(int *device, int index) { return *device = 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) {
    *value = which == 75 ? MAJOR : which == 76 ? MINOR : 0;
    return 0;
}
"""
_COMPILE = """
import ctypes, pathlib, sys
module = pathlib.Path(sys.argv[2]).read_bytes()
ctypes.CDLL(sys.argv[1]).MosaicGpuCompile(ctypes.c_char_p(module), len(module))
"""


class Kernel(NamedTuple):
    """A compiled kernel: registers of a thread, and bytes of them that lie in memory instead."""

    registers: int
    spilled: int


def library() -> Path | None:
    """The plugin's file: as MOSAIC_LIBRARY_PATH says, or where `make test-slow` puts it."""
    given = os.environ.get("MOSAIC_LIBRARY_PATH")
    own = Path(sys.prefix, "mosaic", "jax_plugins", "xla_cuda13", "xla_cuda_plugin.so")
    path = own if given is None else Path(given)
    return path if path.is_file() else None


def _assembler() -> Path | None:
    """The folder of ptxas: Triton's own."""
    triton = pytest.importorskip("triton")
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return folder if (folder / "ptxas").is_file() else None


needs_compiler = pytest.mark.skipif(
    library() is None or shutil.which("cc") is None or _assembler() is None,
    reason="`make test-slow` brings JAX's plugin for CUDA; a C compiler and Triton's ptxas, too",
)


@cache
def _driver(folder: Path, capability: tuple[int, int]) -> Path:
    """The folder of a library in the driver's place, of a GPU of that capability."""
    own = folder / f"driver{capability[0]}"
    own.mkdir(exist_ok=True)
    (own / "driver.c").write_text(_DRIVER)
    names = [f"-D{name}={n}" for name, n in zip(("MAJOR", "MINOR"), capability, strict=True)]
    made = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "driver.c"]
    subprocess.run(["cc", *names, *made], cwd=own, check=True)
    return own


def compiled(
    function: Callable[..., Any],
    *shapes: Any,
    folder: Path,
    capability: tuple[int, int] = (9, 0),
) -> list[Kernel]:
    """The kernels of a function of arrays of `shapes`, compiled; `folder` is for what comes up.

    Raises AssertionError with the compiler's words where a kernel does not compile.
    """
    core.KNOWN_KERNELS.clear()
    jax.export.export(jax.jit(function), platforms=["cuda"])(*shapes)
    found = []
    for i, module in enumerate(core.KNOWN_KERNELS.values()):
        own = folder / f"kernel{i}"
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
        (own / "module").write_bytes(module)
        settings = {
            "MOSAIC_GPU_DUMP_TO": str(own),
            "MOSAIC_GPU_DUMP_PTXAS": "1",
            "LD_LIBRARY_PATH": str(_driver(folder, capability)),
            "PATH": f"{_assembler()}{os.pathsep}{os.environ['PATH']}",
        }
        call = [sys.executable, "-c", _COMPILE, str(library()), str(own / "module")]
        said = subprocess.run(call, env=os.environ | settings, capture_output=True, text=True)
        log = "".join(path.read_text() for path in own.glob("*.ptxas"))
        used = re.search(r"Used (\d+) registers", log)
        assert used, said.stderr + log
        spills = re.findall(r"(\d+) bytes spill", log)
        found.append(Kernel(int(used[1]), sum(map(int, spills))))
    return found

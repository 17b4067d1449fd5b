"""Facts of this machine: versions, devices, and which backends and kernels can be used."""

import importlib
import importlib.metadata
import platform
from collections.abc import Iterator
from types import ModuleType

from .. import backends
from ..errors import BackendNotAvailableError


def describe_system() -> Iterator[tuple[str, str]]:
    """Rows about Python and the packages that every backend uses."""
    yield "dualinfer", _version("dualinfer")
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for package in ("transformers", "safetensors", "numpy"):
        yield package, _version(package)


def describe_backend(name: str) -> Iterator[tuple[str, str]]:
    """Rows about one backend: usable or why not, versions, devices, kernels. Imports it."""
    try:
        backends.check_backend(name)
        backend = importlib.import_module(f".{name}", backends.__name__)
    except BackendNotAvailableError as error:
        yield f"{name} backend", f"not usable: {error}"
        return
    except Exception as error:  # a broken installation fails in any way it likes
        yield f"{name} backend", f"not usable: importing it failed: {error!r}"
        return
    describe = _torch_devices if name == "torch" else _jax_devices
    versions = ", ".join(f"{m} {_version(m)}" for m in backends.requirements(name))
    yield f"{name} backend", f"usable: {versions}"
    try:
        yield f"{name} devices", ", ".join(describe(backend))
        yield f"{name} kernels", backend.describe_kernels()
    except RuntimeError as error:
        yield f"{name} devices", f"none can be used: {error}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package"


def _torch_devices(_: ModuleType) -> list[str]:
    import torch

    gpus = [
        f"cuda:{i} ({torch.cuda.get_device_name(i)}, "
        f"{torch.cuda.get_device_properties(i).total_memory / 2**30:.0f} GiB)"
        for i in range(torch.cuda.device_count())
    ]
    if gpus:
        return [*gpus, f"CUDA {torch.version.cuda}"]
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return [f"cpu ({torch.get_num_threads()} threads; built with {built})"]


def _jax_devices(backend: ModuleType) -> list[str]:
    import jax

    backend.default_device()  # says why where there is none
    return [f"{d.platform}:{d.id} ({d.device_kind})" for d in jax.local_devices()]

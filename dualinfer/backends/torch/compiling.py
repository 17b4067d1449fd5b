"""Make options for torch.compile, and recognize the modules that it makes."""

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ...errors import ArgumentError, listing, shown


def compile_options(backend: Any, compile_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of torch.compile; `backend` None is its own default.

    Raises ArgumentError for what torch.compile does not know.
    """
    known = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    if unknown := sorted(map(str, set(compile_kwargs) - set(known))):
        raise ArgumentError(
            f"compile_kwargs has {listing(unknown)}, and torch.compile takes {', '.join(known)}."
        )
    if isinstance(backend, str):
        backends = torch.compiler.list_backends(())
        if backend not in backends:
            raise ArgumentError(f"backend={backend!r}: torch.compile has {', '.join(backends)}.")
    elif backend is not None and not callable(backend):
        raise ArgumentError(
            f"backend={shown(backend)}; expected a name that torch.compile knows, or a function."
        )
    return {**compile_kwargs} if backend is None else {"backend": backend, **compile_kwargs}


def is_optimized(module: Any) -> bool:
    """True for what `torch.compile(module)` makes, told without importing the compiler."""
    compiler = sys.modules.get("torch._dynamo")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)

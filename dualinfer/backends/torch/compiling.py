"""What torch.compile is called with, and what it makes."""

import sys
from collections.abc import Mapping
from typing import Any


def compile_options(backend: Any, compile_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of torch.compile; `backend` None is its own default."""
    return {**compile_kwargs} if backend is None else {"backend": backend, **compile_kwargs}


def is_optimized(module: Any) -> bool:
    """True for what `torch.compile(module)` makes, told without importing the compiler."""
    compiler = sys.modules.get("torch._dynamo")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)

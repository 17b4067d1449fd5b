"""TorchEngine and JaxEngine: what `init_inference` makes on each backend, for types and isinstance.

A type checker sees all that a fused engine has, with the arrays of its framework. At run time each
is the part of the backend's that all its engines share, in either mode; it is imported when it is
first asked for, so that neither needs the other's framework.
"""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np

from .engine.arguments import ArrayArguments, GenerationArguments
from .engine.fused import FusedEngine

if TYPE_CHECKING:
    import jax
    import torch

    from .backends.jax.adapter import FusedModule, FusedOnJax
    from .backends.torch.adapter import FusedOnTorch

    class TorchEngine(FusedOnTorch, FusedEngine):
        """An engine on PyTorch, and an nn.Module: `state_dict()`, `parameters()`, `eval()`.

        Examples:
            >>> engine = dualinfer.init_inference("Qwen/Qwen3-0.6B", backend="torch")
            >>> engine.generate_text("The capital of France is", max_new_tokens=8)
            >>> engine(torch.tensor([[1, 2, 3]])).logits  # [B, T, V]
        """

        @property
        def device(self) -> torch.device:
            """The device that holds the weights."""
            ...

        @property
        def dtype(self) -> torch.dtype:
            """The dtype of the weights."""
            ...

        @overload
        def generate(
            self,
            input_ids: np.ndarray,
            generation_config: Any = ...,
            *,
            attention_mask: Any = ...,
            streamer: Any = ...,
            tokenizer: Any = ...,
            **arguments: Unpack[ArrayArguments],
        ) -> np.ndarray: ...

        @overload
        def generate(
            self,
            input_ids: torch.Tensor | Sequence[Sequence[int]] | Sequence[int] | None = ...,
            generation_config: Any = ...,
            *,
            attention_mask: Any = ...,
            streamer: Any = ...,
            tokenizer: Any = ...,
            **arguments: Unpack[ArrayArguments],
        ) -> torch.Tensor: ...

        @overload
        def generate(
            self, input_ids: Any = ..., **arguments: Unpack[GenerationArguments]
        ) -> Any: ...

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            """See FusedEngine."""
            ...

    class JaxEngine(FusedOnJax, FusedEngine):
        """An engine on JAX: `params` is a pytree of its weights, `apply` the pure forward.

        Examples:
            >>> engine = dualinfer.init_inference("Qwen/Qwen3-0.6B", backend="jax")
            >>> engine.generate_text("The capital of France is", max_new_tokens=8)
            >>> jax.jit(engine.apply)(engine.params, jnp.array([[1, 2, 3]])).logits  # [B, T, V]
        """

        @property
        def device(self) -> jax.Device:
            """The device that holds the weights, or the first of several."""
            ...

        @property
        def module(self) -> FusedModule:
            """The weights as an nnx module, which runs and generates as the engine does."""
            ...

        @overload
        def generate(
            self,
            input_ids: np.ndarray,
            generation_config: Any = ...,
            *,
            attention_mask: Any = ...,
            streamer: Any = ...,
            tokenizer: Any = ...,
            **arguments: Unpack[ArrayArguments],
        ) -> np.ndarray: ...

        @overload
        def generate(
            self,
            input_ids: jax.Array | Sequence[Sequence[int]] | Sequence[int] | None = ...,
            generation_config: Any = ...,
            *,
            attention_mask: Any = ...,
            streamer: Any = ...,
            tokenizer: Any = ...,
            **arguments: Unpack[ArrayArguments],
        ) -> jax.Array: ...

        @overload
        def generate(
            self, input_ids: Any = ..., **arguments: Unpack[GenerationArguments]
        ) -> Any: ...

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            """See FusedEngine."""
            ...


_HOMES = {"TorchEngine": ("torch", "OnTorch"), "JaxEngine": ("jax", "OnJax")}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    backend, kind = _HOMES[name]
    return getattr(importlib.import_module(f".backends.{backend}", __package__), kind)

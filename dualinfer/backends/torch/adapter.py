"""The engine as an nn.Module: its weights are parameters, its methods those that users expect."""

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...errors import ArgumentError, UnsupportedError, shortened, told
from ...model.weights import named_arrays
from .params import Params


class _InferenceModule(torch.nn.Module):
    """Methods of nn.Module as an engine has them: it is for inference, where it was made."""

    _modules: dict[str, Any]

    def train(self, mode: bool = True) -> Any:
        """Only `train(False)`, which is `eval()`: the engine never trains."""
        if mode:
            raise UnsupportedError(
                "The engine is for inference and stays in eval mode; train the model itself."
            )
        return super().train(False)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The engine itself on a device or in a dtype, as torch's own `to` takes them."""
        says = "engine.to() takes a device or a dtype of torch's"
        with told(lambda error: ArgumentError(f"{says}: {shortened(error)}")):
            torch.nn.Module().to(*args, **kwargs)  # nothing to move: what it is asked for is read
        return super().to(*args, **kwargs)

    def to_empty(self, **_: Any) -> Any:
        """UnsupportedError: the weights would be left without values."""
        raise UnsupportedError("An engine's weights are never left without values.")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """UnsupportedError: neither copied nor pickled."""
        raise UnsupportedError(
            "An engine holds state on its device, and is neither copied nor pickled. Make another "
            "one with init_inference(); copy or save the model, or the engine's state_dict()."
        )


class OnTorch(_InferenceModule):
    """The base of every engine on torch: one part, `module`, which is set when it is made."""

    def __setattr__(self, name: str, value: Any) -> None:
        """As in nn.Module, but that `module` stays the one that it has."""
        if name == "module":
            _refuse_module("set")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """As in nn.Module, but that `module` stays the one that it has."""
        if name == "module":
            _refuse_module("deleted")
        super().__delattr__(name)


def _refuse_module(what: str) -> None:
    raise UnsupportedError(
        f"engine.module cannot be {what}: the engine was made for the one it has. Make another "
        "engine with init_inference(), or end this one with close()."
    )


class _FusedWeights(_InferenceModule):
    """The holder of fused weights, which may be the memory of the caller's own model."""

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """UnsupportedError: the weights are given when the engine is made."""
        raise UnsupportedError(
            "A fused engine's weights may be the caller's own, and are not written. Load them into "
            "the model, then call engine.refresh()."
        )


class _FusedModule(_FusedWeights):
    """dualinfer's weights by their names, with the engine's forward and generate."""

    def __init__(self, weights: torch.nn.Module, engine: Any):
        super().__init__()
        for name, child in weights.named_children():
            self.add_module(name, child)
        self._engine = (engine,)  # in a tuple: the engine is not a part of its own module
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's forward."""
        return self._engine[0].forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Parts of the module, then what the engine has: generate, config, device, dtype."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            return getattr(self._engine[0], name)

    def _apply(self, fn: Callable, recurse: bool = True) -> Any:
        _refuse_change(fn, self._engine[0])
        return self


def _tried(fn: Callable, before: torch.Tensor) -> torch.Tensor:
    """A tensor that `fn` made of one; UnsupportedError where this torch cannot, as without CUDA."""
    try:
        return fn(before)
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        raise UnsupportedError(
            f"This engine is on {before.device} and cannot go elsewhere: torch says "
            f"{str(error).splitlines()[0]!r}. `dualinfer env` shows the devices that it finds."
        ) from error


def _refuse_change(fn: Callable, engine: Any) -> None:
    """Raise if `fn`, with which nn.Module casts and moves, would change fused weights."""
    before = torch.empty(0, dtype=engine.dtype, device=engine.device)
    after = _tried(fn, before)
    if (after.dtype, after.device) != (before.dtype, before.device):
        raise UnsupportedError(
            f"This engine was made in {engine.dtype} on {engine.device} and stays so; asked was "
            f"{after.dtype} on {after.device}. Make another one with init_inference()."
        )


def _weights_module(params: Params) -> torch.nn.Module:
    """A tree of plain modules with the weights as parameters: `layers.0.qkv.weight` and so on.

    A quantized weight's scales and zeros are parameters beside it: `layers.0.qkv.weight_scale`.
    """
    root = torch.nn.Module()
    groups: Mapping[str, Any] = {"": params.outer} | {
        f"layers.{i}.": layer for i, layer in enumerate(params.layers)
    }
    for prefix, group in groups.items():
        for name, array in named_arrays(group).items():
            *path, leaf = f"{prefix}{name}".split(".")
            node = root
            for part in path:
                if part not in node._modules:
                    node.add_module(part, torch.nn.Module())
                node = node.get_submodule(part)
            node.register_parameter(leaf, torch.nn.Parameter(array, requires_grad=False))
    return root


class FusedOnTorch(OnTorch, _FusedWeights):
    """Of a FusedEngine: its `module` is made when it is asked for, so that no cycle keeps it."""

    def _adopt(self: Any, runner: Any) -> None:
        self._modules["module"] = _weights_module(runner.params)
        self._view: Any = lambda: None

    @property
    def module(self: Any) -> torch.nn.Module:
        """dualinfer's weights as an nn.Module, which runs and generates as the engine does."""
        self.runner  # noqa: B018 (raises when closed)
        view = self._view()
        if view is None:
            view = _FusedModule(self._modules["module"], self)
            self._view = weakref.ref(view)
        return view

    def __getattr__(self: Any, name: str) -> Any:
        """Parts of the module; AttributeError says what a fused engine has not."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name.startswith("_"):
                raise
            raise self._absent(name) from error

    def _apply(self, fn: Callable, recurse: bool = True) -> Any:
        _refuse_change(fn, self)
        return self

    def _follow(self: Any) -> None:
        """Show the weights where they lie now, in every view of them."""
        weights = dict(_weights_module(self.runner.params).named_parameters())
        for name, parameter in self._modules["module"].named_parameters():
            parameter.data = weights[name].data


class _ModuleEngine(OnTorch):
    """Of a ModuleEngine: the caller's module is the one part, and answers for what it has."""

    def _adopt(self: Any, runner: Any) -> None:
        self._modules["module"] = runner.module

    def __getattr__(self: Any, name: str) -> Any:
        """Attributes of the module that the engine lacks, such as HF's `base_model_prefix`."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("_") or name == "generate":
                raise
            if hasattr(module, name):
                return getattr(module, name)
            raise self._absent(name) from error

    def _apply(self: Any, fn: Callable, recurse: bool = True) -> Any:
        before = torch.empty(0, dtype=self.dtype, device=self.device)
        after = _tried(fn, before)
        if after.dtype != before.dtype or after.is_meta:
            asked = "the meta device" if after.is_meta else after.dtype
            raise UnsupportedError(
                f"This engine was made in {before.dtype} and stays so; asked was {asked}. Make "
                "another one with init_inference()."
            )

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)  # a cast to the engine's dtype leaves what is in another one
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        with self._turns:
            self.runner.forget_graphs()  # they hold the addresses of what moves now
            return super()._apply(move, recurse)


@functools.cache
def engine_type(base: type) -> type:
    """`base`, one of dualinfer's engines, as an nn.Module as well."""
    from_torch = FusedOnTorch if base.__name__ == "FusedEngine" else _ModuleEngine

    def __init__(self: Any, runner: Any, *args: Any) -> None:
        torch.nn.Module.__init__(self)
        base.__init__(self, runner, *args)  # pyright: ignore
        self._adopt(runner)
        self.eval()

    def close(self: Any) -> None:
        """Free what the engine holds on the device; it cannot be used afterwards."""
        base.close(self)  # pyright: ignore
        self._modules.pop("module", None)

    namespace = {
        "__init__": __init__,
        "__call__": torch.nn.Module.__call__,  # with the hooks that users put on the engine
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "close": close,
    }
    if from_torch is FusedOnTorch:

        def refresh(self: Any) -> None:
            try:
                base.refresh(self)  # pyright: ignore
            finally:
                self._follow()

        refresh.__doc__ = base.refresh.__doc__  # pyright: ignore
        namespace |= {"module": FusedOnTorch.module, "refresh": refresh}
    return type(base.__name__, (base, from_torch), namespace)

"""Module mode on torch: the user's own nn.Module, cast and moved in place, and run as it is."""

import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...config import InferenceConfig
from ...errors import ConfigError, ModelError, OutOfMemoryError, UnsupportedError
from ...profiling import Profiler, Stopwatch
from ...weights import TensorSource
from .device import default_device, default_dtype, device_name, free_bytes
from .fill import check_values, fill, is_hf, slots
from .graphs import CallGraphs
from .precision import own_precision
from .profiling import make_stopwatch


@torch.inference_mode(False)  # else a caller's inference mode would mark the weights as its own
@torch.no_grad()
def create_module_runner(
    config: InferenceConfig, module: Any, source: TensorSource | None = None
) -> "TorchModuleRunner":
    """A runner of `module` itself, in eval mode, in the config's dtype, on the default device.

    Floating parameters and buffers are cast, integer and complex ones stay, as with half(); in HF
    models also what from_pretrained(dtype=...) leaves in float32. With `keep_module_on_host` it
    stays where it is. `source` fills it, on the meta device or not. All is
    checked first: what fails leaves the module as it was. Raises ConfigError, ModelError,
    CheckpointError, UnsupportedError or OutOfMemoryError.
    """
    _check_module(module)
    dtype = getattr(torch, config.dtype or default_dtype())
    notes = _check_policy(module, config.injection_policy or {})
    own = next((s.tensor.device for s in slots(module) if not s.tensor.is_meta), None)
    device = default_device()
    if config.keep_module_on_host:
        device = own or torch.device("cpu")
    if config.enable_cuda_graph and device.type != "cuda":
        raise ConfigError(
            f"enable_cuda_graph=True: the {type(module).__name__} stays on {device}, and graphs "
            "need it on a CUDA device. Leave keep_module_on_host or enable_cuda_graph unset."
        )
    if source is None:
        check_values(module)
    _check_room(module, device, dtype)
    if source is not None:
        notes += fill(module, source, dtype)
        check_values(module)
    _convert(module, device, dtype)
    return TorchModuleRunner(module.eval(), device, dtype, config.enable_cuda_graph is True, notes)


class TorchModuleRunner:
    """A module on one torch device. `notes` are for the report."""

    def __init__(
        self,
        module: torch.nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        forward_graphs: bool = False,
        notes: Sequence[str] = (),
    ) -> None:
        self.module: Any = module
        self.device, self.dtype = device, dtype
        self.notes = tuple(notes)
        self.is_compiled = False
        name = f"{type(module).__name__}.forward"
        self._calls = CallGraphs(device, name) if forward_graphs else None
        self._groups = [m._parameters for m in module.modules() if m._parameters]
        self._addresses: list[int] = []
        self._profiler: Profiler | None = None
        self._unwatch: Callable[[], None] | None = None
        self._thread = threading.local()

    @torch.no_grad()
    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module returns; from a graph, copies of what it returned when captured."""
        with own_precision(self.dtype, self.device):
            if self._calls is None:
                return self.module(*args, **kwargs)
            self._check_addresses()
            replay = self._calls.ready(self._untimed, args, kwargs)
            if self._profiler is None:
                return replay()
            return self._profiler.run(replay)

    def _untimed(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward while it is warmed up and captured, which is nobody's pass."""
        self._thread.muted = True
        try:
            return self.module(*args, **kwargs)
        finally:
            self._thread.muted = False

    def _check_addresses(self) -> None:
        """Drop the graphs if weights have moved since: they hold the old addresses."""
        assert self._calls is not None
        # Walking the modules each time would take longer than many a replay.
        addresses = [
            p.data_ptr() for group in self._groups for p in group.values() if p is not None
        ]
        if addresses != self._addresses:
            self._calls.clear()
            self._addresses = addresses

    @torch.no_grad()
    def generate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module's own generate returns, its `reset_cache()` called first if it has one.

        Its forward passes are not replayed from graphs.
        """
        reset = getattr(self.module, "reset_cache", None)
        if callable(reset):
            reset()
        with own_precision(self.dtype, self.device):
            return self.module.generate(*args, **kwargs)

    def watch(self, profiler: Profiler) -> None:
        """Time the module's forward passes while `profiler` is enabled; see `base.ModuleRunner`."""
        self._stop_watching()
        if not profiler.enabled:
            return
        self._profiler = profiler
        if self.is_compiled:
            self._unwatch = self._watch_compiled(profiler)
            return
        module: torch.nn.Module = self.module
        hooks = [
            module.register_forward_pre_hook(self._started),
            module.register_forward_hook(self._ended, always_call=True),
        ]

        def remove() -> None:
            for hook in hooks:
                hook.remove()

        self._unwatch = remove

    def _watch_compiled(self, profiler: Profiler) -> Callable[[], None]:
        """Time the compiled call itself: torch.compile does not see hooks that come later."""
        module, compiled = self.module, self.module._compiled_call_impl

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_muted():
                return compiled(*args, **kwargs)
            return profiler.run(lambda: compiled(*args, **kwargs))

        def restore() -> None:
            module._compiled_call_impl = compiled

        module._compiled_call_impl = timed
        return restore

    def _is_muted(self) -> bool:
        return getattr(self._thread, "muted", False)

    def _started(self, module: torch.nn.Module, args: Any) -> None:
        """Before a forward pass: start its stopwatch, on top of those of passes around it."""
        if self._profiler is not None and not self._is_muted():
            running = self._thread.__dict__.setdefault("running", [])
            running.append((self._profiler.start(), sys.exception()))

    def _ended(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        """After a forward pass, one that raised included: book it, or forget it."""
        running = self._thread.__dict__.get("running")
        if self._is_muted() or not running:
            return
        watch, error = running.pop()
        if self._profiler is not None and sys.exception() is error:
            self._profiler.book(watch, result)

    def _stop_watching(self) -> None:
        if self._unwatch is not None:
            self._unwatch()
        self._unwatch = self._profiler = None
        self._thread = threading.local()  # passes under way are not booked

    def stopwatch(self, use_cuda_events: bool) -> Stopwatch:
        """CUDA events where asked for on CUDA, else the clock around completed work."""
        return make_stopwatch(self.device, use_cuda_events)

    def compile(self, backend: Any, compile_kwargs: Mapping[str, Any]) -> None:
        """Compile the module in place, when it is next called; the second time, do nothing.

        `backend` None is torch's default.
        """
        if self.is_compiled:
            return
        options = {**compile_kwargs} if backend is None else {"backend": backend, **compile_kwargs}
        profiler = self._profiler
        self._stop_watching()
        self.module.compile(**options)
        self.is_compiled = True
        self.forget_graphs()
        if profiler is not None:
            self.watch(profiler)

    def forget_graphs(self) -> None:
        """Drop the graphs: what they hold the addresses of is about to move."""
        if self._calls is not None:
            self._calls.clear()

    def report(self) -> Mapping[str, Any]:
        """Facts for `engine.report()`; a tied parameter counts once."""
        parameters = list(self.module.parameters())
        return {
            "device": str(self.device),
            "device_name": device_name(self.device),
            "ops": {"forward": "the module's own"},
            "parameters": sum(p.numel() for p in parameters),
            "parameter_bytes": sum(p.nbytes for p in parameters),
            "cache_bytes": 0,
            "compilations": 0 if self._calls is None else self._calls.captures,
        }

    def close(self) -> None:
        """Let go of the module, which stays the caller's, of hooks and graphs."""
        self._stop_watching()
        self.forget_graphs()
        self.module, self._groups = None, []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _check_module(module: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"model is a {type(module).__name__}; expected a torch.nn.Module.")
    kind = type(module).__name__
    if (
        getattr(module, "is_quantized", False)
        or getattr(getattr(module, "config", None), "quantization_config", None) is not None
    ):
        raise UnsupportedError(
            f"The {kind} is quantized by transformers, which fixes its dtypes; dualinfer cannot "
            "cast it. Pass the model without quantization."
        )
    places = set((getattr(module, "hf_device_map", None) or {}).values())
    if len(places) > 1:
        raise UnsupportedError(
            f"The {kind} was spread over {', '.join(sorted(map(str, places)))} by device_map, and "
            "an engine has one device. Load it without device_map."
        )


def _check_policy(module: torch.nn.Module, policy: Mapping[Any, Any]) -> list[str]:
    """Notes on an injection policy; ConfigError for one that says nothing about this module."""
    if not policy:
        return []
    names = [f".{name}" for name, _ in module.named_modules() if name]
    classes = {type(part) for part in module.modules()}
    absent = []
    for layer, outputs in policy.items():
        if not (isinstance(layer, type) and issubclass(layer, torch.nn.Module)):
            raise ConfigError(
                f"injection_policy: the key {layer!r} is no class of layers; expected a subclass "
                "of torch.nn.Module, such as the model's decoder layer."
            )
        if not any(issubclass(c, layer) for c in classes):
            absent.append(layer.__name__)
        for name in _policy_names(layer, outputs):
            if not any(own.endswith(name) for own in names):
                raise ConfigError(
                    f"injection_policy: no module of the {type(module).__name__} has a name that "
                    f"ends with {name!r} (given for {layer.__name__}). It has, for instance, "
                    f"{', '.join(n[1:] for n in names[-3:])}."
                )
    if len(absent) == len(policy):
        raise ConfigError(
            f"injection_policy: the {type(module).__name__} has no layer of class "
            f"{', '.join(absent)}."
        )
    notes = ["injection_policy: with one device nothing is split"]
    if absent:
        notes.append(f"injection_policy: the model has no {', '.join(absent)}")
    return notes


def _policy_names(layer: type, outputs: Any) -> list[str]:
    names = [outputs] if isinstance(outputs, str) else outputs
    if isinstance(names, type) or not isinstance(names, list | tuple):
        raise ConfigError(
            f"injection_policy: the value for {layer.__name__} is {outputs!r}. DeepSpeed's policy "
            "classes replace layers by its own kernels, which dualinfer does not have; expected "
            "the names of the linear layers whose outputs are summed, a str or a tuple of them."
        )
    odd = [name for name in names if not isinstance(name, str) or not name.strip(".")]
    if odd or not names:
        raise ConfigError(
            f"injection_policy: {outputs!r} for {layer.__name__}; expected names of linear layers, "
            "a str or a tuple of them."
        )
    return list(names)


def _check_room(module: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Raise OutOfMemoryError, before anything is moved, if the module does not fit."""
    needed, seen = 0, set()
    for slot in slots(module):
        tensor = slot.tensor
        if slot.kind == "__dict__" or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        size = dtype.itemsize if tensor.is_floating_point() else tensor.itemsize
        here = tensor.nbytes if tensor.device == device else 0
        needed += max(0, tensor.numel() * size - here)
    free = free_bytes(device)
    if free is not None and needed > free:
        raise OutOfMemoryError(
            f"The {type(module).__name__} in {dtype} needs {needed:,} bytes "
            f"({needed / 2**30:.2f} GiB) more on {device}, and {free:,} ({free / 2**30:.2f} GiB) "
            "are free. Use a smaller dtype or model, keep_module_on_host=True, or free memory "
            "first."
        )


def _convert(module: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Cast and move in place, with nn.Module's own machinery; tied tensors stay tied."""
    kept = _kept_in_float32(module, dtype)
    done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in done:  # a buffer of two names
            return done[id(tensor)][1]
        casts = tensor.is_floating_point() and id(tensor) not in kept
        new = tensor.to(device, dtype if casts else None)
        if not isinstance(tensor, torch.nn.Parameter):
            done[id(tensor)] = tensor, new
        return new

    module._apply(convert)


def _kept_in_float32(module: Any, dtype: torch.dtype) -> set[int]:
    """Ids of the tensors that `from_pretrained(dtype=...)` leaves in float32, and half() does not.

    Rotary frequencies, whose rounding grows with the position (at 2,000 tokens it makes 3 times the
    error of all else in bfloat16), and what the model's class names.
    """
    if not is_hf(module) or dtype == torch.float32:
        return set()
    names = {*(module._keep_in_fp32_modules_strict or ())}
    if dtype == torch.float16:
        names |= {*(module._keep_in_fp32_modules or ())}
    pattern = re.compile("|".join(rf"(?:^|\.){name}(?:\.|$)" for name in names) or r"(?!)")
    return {
        id(s.tensor)
        for s in slots(module)
        if s.tensor.dtype == torch.float32
        and ((s.is_transient and s.key.endswith("inv_freq")) or pattern.search(s.name))
    }

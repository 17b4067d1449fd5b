"""True if a live torch module still holds the tensors, and the values, that an engine has read."""

import threading
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from .hf_module import turns_by_length
from .peft_modules import adapted_parameters, adapters_in_use

# They keep a question short at 300 tensors; benchmarks/live.py measures it.
_TURN = 16  # tensors of which addresses and samples are compared in one question
_EVERY = 8  # questions for one launch of a comparison on a GPU
_SAMPLED = 16  # elements of a tensor
_versions = attrgetter("_version")


class Watch:
    """Tells whether a module was changed since `look`: by an optimizer, a load, a merge, a move.

    Each question compares which tensors and parts the module holds and the version that torch
    counts for each tensor; of some tensors in turn, all where they are few, also where they lie and
    a few of their values, since writes through `.data` leave no version. On a GPU the values
    are compared without waiting, so that the answer comes with a later question. What cannot be
    seen: a write without a version outside of the values that are compared, and anything once the
    module itself is gone. Tensors are held as long as the module lives, or until it has changed.
    """

    def __init__(self, module: Any):
        watch = weakref.ref(self)

        def let_go(_: Any) -> None:
            held = watch()
            if held is not None:
                held._seen = None

        self._lock = threading.Lock()  # questions come from several threads
        self._module = weakref.ref(module, let_go)
        self._seen: _Seen | None = None
        self._change: str | None = None
        self.look()

    @property
    def module(self) -> Any:
        """The module; None if it is gone."""
        return self._module()

    def look(self) -> None:
        """Take the module as it is now for what it should be."""
        module = self._module()
        seen = None if module is None else _Seen(module)
        with self._lock:
            self._seen, self._change = seen, None

    def change(self) -> str | None:
        """Tell people what has changed, as often as it is asked; None if nothing has."""
        with self._lock:
            seen = self._seen
            if seen is not None and self._change is None and (change := seen.change()):
                self._change, self._seen = change, None
            return self._change

    def late_change(self) -> str | None:
        """The change that a GPU has found since `change` was asked; it costs little."""
        with self._lock:
            seen = self._seen
            if seen is not None and self._change is None and (change := seen.late_change()):
                self._change, self._seen = change, None
            return self._change

    def close(self) -> None:
        """Let go of the tensors."""
        self._seen = None


class _Seen:
    """A module's parts and tensors as they were."""

    def __init__(self, module: Any):
        import torch

        self._names: list[str] = []
        self._held: list[dict[str, Any]] = []
        tensors: dict[int, tuple[str, Any]] = {}
        for path, part in module.named_modules():
            prefix = f"{path}." if path else ""
            for held in (part._parameters, part._buffers, part._modules):
                if not held or (held is part._buffers and turns_by_length(part)):
                    continue
                self._names.append(prefix)
                self._held.append(held)
                for name, value in held.items():
                    if isinstance(value, torch.Tensor) and value.device.type != "meta":
                        tensors.setdefault(id(value), (prefix + name, value))
        self._were = [dict(held) for held in self._held]
        self._module = weakref.ref(module)
        self._adapters = adapters_in_use(module)
        uncounted = set(map(id, adapted_parameters(module)))
        counted = [
            (n, t) for n, t in tensors.values() if not t.is_inference() and id(t) not in uncounted
        ]
        self._counted, self._counted_names = [t for _, t in counted], [n for n, _ in counted]
        self._versions = list(map(_versions, self._counted))
        plain = [
            (n, t)
            for n, t in tensors.values()
            if type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout == torch.strided
        ]
        count = -(-len(plain) // _TURN)
        self._turns = [_Turn(plain[i::count]) for i in range(count)]
        self._asked = self._compared = -1

    def change(self) -> str | None:
        """The first difference that is found, for people; None if there is none."""
        try:
            is_same = self._held == self._were  # of one and the same tensor no values are compared
        except Exception:  # two tensors have no truth value
            is_same = False
        if not is_same and (name := self._replaced()):
            return f"{name} was replaced, added or taken away"
        module = self._module() if self._adapters else None
        if module is not None and adapters_in_use(module) != self._adapters:
            return "other adapters are in use, or more or less of them,"
        versions = list(map(_versions, self._counted))
        if versions != self._versions:
            pairs = zip(versions, self._versions, strict=True)
            i = next(i for i, (now, then) in enumerate(pairs) if now != then)
            return f"{self._counted_names[i]} was written to"
        if change := self.late_change():
            return change
        if not self._turns:
            return None
        self._asked += 1
        if change := self._turns[self._asked % len(self._turns)].change():
            return change
        if self._asked % _EVERY == 0 and not self._turns[self._compared].is_pending:
            self._compared = (self._compared + 1) % len(self._turns)
            self._turns[self._compared].compare()
        return None

    def late_change(self) -> str | None:
        """The change that the turn compared last has found on a GPU."""
        return self._turns[self._compared].late_change() if self._turns else None

    def _replaced(self) -> str | None:
        for prefix, held, were in zip(self._names, self._held, self._were, strict=True):
            for name in dict.fromkeys((*were, *held)):
                if held.get(name) is not were.get(name):
                    return prefix + name
        return None


class _Turn:
    """Some of the tensors, by name: where they lie, and samples of their values."""

    def __init__(self, named: Sequence[tuple[str, Any]]):
        import torch

        self._names, self._tensors = [n for n, _ in named], [t for _, t in named]
        self._address: Callable[[Any], int] = torch.Tensor.data_ptr
        self._addresses = list(map(self._address, self._tensors))
        samples = [s for s in map(_sample, self._tensors) if s is not None]
        # Of host memory the bytes themselves: read only after the addresses have been compared.
        self._views = [memoryview(s.numpy()) for s in samples if s.device.type == "cpu"]
        self._bytes = b"".join(self._views)
        by_device: dict[Any, list[Any]] = {}
        for sample in samples:
            if sample.is_cuda:
                by_device.setdefault(sample.device, []).append(sample)
        self._on_devices = [_DeviceSamples(views) for views in by_device.values()]

    def change(self) -> str | None:
        """See `_Seen.change`."""
        addresses = list(map(self._address, self._tensors))
        if addresses != self._addresses:
            pairs = zip(addresses, self._addresses, strict=True)
            i = next(i for i, (now, then) in enumerate(pairs) if now != then)
            return f"{self._names[i]} was moved or given other data"
        return self._written() if b"".join(self._views) != self._bytes else None

    def compare(self) -> None:
        """Have each GPU compare its samples; `late_change` tells what it has found."""
        for samples in self._on_devices:
            samples.compare()

    @property
    def is_pending(self) -> bool:
        """True while a GPU is still comparing."""
        return any(samples.is_pending for samples in self._on_devices)

    def late_change(self) -> str | None:
        """The change that a GPU has found, if any."""
        return self._written() if any(s.differ() for s in self._on_devices) else None

    def _written(self) -> str:
        return f"values of {self._names[0]}, or of a tensor compared with it, were written"


def _sample(tensor: Any) -> Any:
    """A few elements from the middle of a tensor, as bytes in its own memory; None if it has none.

    They lie side by side.
    """
    import torch

    if not tensor.numel() or tensor.is_quantized:
        return None
    line = tensor.detach()
    along = next((i for i in reversed(range(line.ndim)) if line.stride(i) == 1), None)
    for i in reversed(range(line.ndim)):
        if i != along:
            line = line.select(i, line.shape[i] // 2)
    if not line.ndim:
        line = line.reshape(1)
    start = max(0, line.shape[0] // 2 - _SAMPLED // 2)
    return line[start : start + _SAMPLED].view(torch.uint8)


class _DeviceSamples:
    """Samples on one GPU, compared there by a captured graph, which costs the host one launch."""

    def __init__(self, views: list[Any]):
        import torch

        device = views[0].device
        self._device, self._views, self._asked = device, views, False
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
            self._expected = torch.cat(views)
            self._found = torch.empty_like(self._expected)
            self._unequal = torch.empty_like(self._expected, dtype=torch.bool)
            self._any = torch.empty(1, dtype=torch.bool, device=device)
            self._host = torch.empty(1, dtype=torch.bool, device="cpu", pin_memory=True)
            self._answer = self._host.numpy()
            self._event = torch.cuda.Event()
            self._graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._compare()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.stream(stream):  # without what torch.cuda.graph collects and frees
                self._graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._compare()
                finally:
                    self._graph.capture_end()

    def _compare(self) -> None:
        import torch

        torch.cat(self._views, out=self._found)
        torch.ne(self._found, self._expected, out=self._unequal)
        torch.any(self._unequal, 0, keepdim=True, out=self._any)

    def compare(self) -> None:
        """Begin another comparison; none may be pending."""
        import torch

        self._graph.replay()
        with torch.cuda.device(self._device), torch.no_grad():
            self._host.copy_(self._any, non_blocking=True)
            self._event.record()
        self._asked = True

    @property
    def is_pending(self) -> bool:
        """True while a comparison has not ended."""
        return self._asked and not self._event.query()

    def differ(self) -> bool:
        """The result of the last comparison, told once; False while it has not ended."""
        if not self._asked or not self._event.query():
            return False
        self._asked = False  # an event is not asked for again what it has said
        return bool(self._answer[0])

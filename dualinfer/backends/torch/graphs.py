"""CUDA graphs: of the decode step by bucket, and of whole calls by what they are called with."""

import copy
import enum
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ...errors import ArgumentError, DualinferError, GraphError, a_type
from ...system.patience import told_if_slow

# More than the sizes that prompts of 1,024 tokens in all come in (about 50), and than a server's
# steps: over 1 to 256 slots, reaches of 512 to 32768, greedy and sampled, 9 * 4 * 2 = 72. They
# share one memory.
MOST_STEPS = 128
_WARM_UPS = 3
_VALUES = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class StepGraphs:
    """Graphs by key. A key must name everything that fixes the launches and their addresses.

    `captures` counts those ever made, `evictions` those that had to go: the least recently used one
    when there are more than `most`.
    """

    def __init__(self, most: int = MOST_STEPS) -> None:
        self._most = most
        self._graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph] = OrderedDict()
        self._pool: Any = None  # the graphs' memory: they run one after another, on one stream
        self.captures = self.evictions = 0

    def __len__(self) -> int:
        """Graphs held."""
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        """True if the key's graph can be replayed."""
        return key in self._graphs

    def capture(self, key: Hashable, step: Callable[[], None]) -> None:
        """Record `step`, which works on static buffers, without running it.

        It must have run before, so that libraries are loaded and have their workspaces.
        """
        if len(self._graphs) >= self._most:
            torch.cuda.synchronize()  # it may be running
            self._graphs.popitem(last=False)
            self.evictions += 1
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # Other threads may go on using the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        self._graphs[key] = graph
        self.captures += 1

    def replay(self, key: Hashable) -> None:
        """Run the key's step once."""
        self._graphs.move_to_end(key)
        self._graphs[key].replay()

    def drop(self, key: Hashable) -> None:
        """Let go of the key's graph, if there is one: the buffers that it writes are going."""
        if key not in self._graphs:
            return
        torch.cuda.synchronize()  # it may be running
        del self._graphs[key]
        self.evictions += 1
        if not self._graphs:
            self._pool = None  # as in clear

    def clear(self) -> None:
        """Let go of every graph: the buffers that they write are about to be freed."""
        if self._graphs:
            torch.cuda.synchronize()  # one may be running
            self._graphs.clear()
            self._pool = None  # torch frees a pool with its last graph


class _Captured(NamedTuple):
    """One call's graph: `replay` reads `inputs` and writes the tensors of `outputs`."""

    replay: Callable[[], None]
    inputs: list[torch.Tensor]
    outputs: Any


class CallGraphs:
    """Graphs of whole calls: captured once for each signature, then replayed.

    The signature is the structure of the arguments, the shape, dtype and device of each tensor, and
    the value of everything else. Inputs are copied into buffers of the graph's own, and results
    out of them, so that the caller's tensors are neither kept nor written, and no call changes
    what an earlier one returned. A graph repeats its launches and nothing else: what the function
    does in Python, it does in the warm-ups and the capture alone. Random numbers that it draws on
    the device are new in every replay; warming up and capturing take none from the caller's
    generators.

    `captures` counts the graphs ever made, `evictions` those that had to go: the least recently
    used one when there are more than `most`. `name` is what errors call the function. With
    `uploads` inputs may lie in host memory: they go straight to the graph's buffers.
    """

    def __init__(
        self, device: torch.device, name: str, most: int = 16, uploads: bool = False
    ) -> None:
        self.captures = self.evictions = 0
        self._uploads = uploads
        self._device, self._name, self._most = device, name, most
        self._graphs: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._pool: Any = None  # the graphs' memory: they never run at the same time
        self._done: torch.cuda.Event | None = None
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Graphs held."""
        return len(self._graphs)

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Replay `function(*args, **kwargs)` and return its result; captured first if new."""
        return self.ready(function, args, kwargs)()

    @torch.inference_mode(False)  # else a caller's inference mode would mark the buffers as its own
    @torch.no_grad()
    def ready(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[], Any]:
        """The call, captured if it is new, as a function that replays it once.

        The graph is found by the arguments alone: `function` must always be the same. Raises
        ArgumentError for an argument that a graph cannot take, GraphError if the capture fails; an
        error of the function itself in the warm-ups passes as it is.
        """
        if not kwargs and all(isinstance(a, torch.Tensor | bool | None) for a in args):
            leaves, structure = list(args), None  # nothing to take apart, which takes its time
        else:
            leaves, structure = pytree.tree_flatten((args, dict(sorted(kwargs.items()))))
        names = _Names(args, kwargs)
        parts = [self._signature(leaf, i, names) for i, leaf in enumerate(leaves)]
        key = structure, tuple(parts)
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        with self._lock:
            captured = self._graphs.get(key)
            if captured is None:
                captured = self._add(key, function, leaves, structure)
            self._graphs.move_to_end(key)
        return lambda: self._replay(captured, inputs)

    def move(self, device: torch.device) -> None:
        """Capture on `device` from now on; if that is another one, the graphs go."""
        if device != self._device:
            self.clear()
            self._device = device

    def clear(self) -> None:
        """Let go of every graph and its memory."""
        with self._lock:
            if self._graphs:
                self._synchronize()
                self._graphs.clear()
            self._pool = self._done = None

    def _signature(self, leaf: Any, index: int, names: "_Names") -> Hashable:
        if isinstance(leaf, torch.Tensor):
            if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or leaf.layout != torch.strided:
                kind = f"{type(leaf).__name__} of layout {leaf.layout}"
                raise ArgumentError(
                    f"{names[index]} is a {kind}, which a CUDA graph cannot take as input. Pass a "
                    "plain dense tensor, or set enable_cuda_graph=False."
                )
            from_host = self._uploads and leaf.device.type == "cpu"
            if leaf.device != self._device and not from_host:
                raise ArgumentError(
                    f"{names[index]} lies on {leaf.device}, but {self._name} is replayed from a "
                    f"CUDA graph on {self._device}. Move it there: {names[index]}.to("
                    f"{str(self._device)!r})."
                )
            return torch.Tensor, tuple(leaf.shape), leaf.dtype
        if not isinstance(leaf, _VALUES):
            raise ArgumentError(
                f"{names[index]} is {a_type(leaf)}. With enable_cuda_graph=True a call is "
                "replayed for arguments of the same kind, and whether two of these are cannot be "
                "told. Pass tensors, plain values, or lists, tuples and dicts of them; or set "
                "enable_cuda_graph=False."
            )
        if isinstance(leaf, float | complex):
            return type(leaf), repr(leaf)  # NaN equals itself, and -0.0 is not 0.0
        return type(leaf), leaf

    def _add(
        self, key: Hashable, function: Callable[..., Any], leaves: list[Any], structure: Any
    ) -> _Captured:
        if len(self._graphs) >= self._most:
            self._synchronize()  # it may be running
            self._graphs.popitem(last=False)
            self.evictions += 1
            if not self._graphs:
                self._pool = None  # torch frees a pool with its last graph
        inputs = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                own = leaf.detach().clone(memory_format=torch.contiguous_format)
                leaves[i] = own.to(self._device)
                inputs.append(leaves[i])
        args, kwargs = (
            (leaves, {}) if structure is None else pytree.tree_unflatten(leaves, structure)
        )
        with told_if_slow(f"{self._name} is captured for arguments that are new"):
            replay, outputs = self._capture(lambda: function(*args, **kwargs))
        self._graphs[key] = captured = _Captured(replay, inputs, outputs)
        self.captures += 1
        return captured

    def _capture(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Warm up and record `call`: a function that repeats its launches, and what they write."""
        device = self._device
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(device), torch.random.fork_rng([device.index]):
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on using the device meanwhile.
            mode: Any = {"pool": self._pool, "capture_error_mode": "thread_local"}
            capture: Any = torch.cuda.graph(graph, **mode)
            if capture.capture_stream.device != device:  # torch has one, on its first device
                capture = torch.cuda.graph(graph, stream=torch.cuda.Stream(), **mode)
            # Warmed up where it is captured: cuBLAS keeps a workspace for each stream.
            stream, side = torch.cuda.current_stream(), capture.capture_stream
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    call()
            stream.wait_stream(side)
            generator = torch.cuda.default_generators[device.index]
            spare = generator.clone_state()
            cause: BaseException | None = None
            try:
                with capture:
                    try:
                        outputs = call()
                    except BaseException as error:
                        cause = error  # ending the capture may raise as well, and say less
                        raise
            except BaseException as error:
                cause = cause or error
                self._clean_up(stream, generator, spare)
                if not isinstance(cause, Exception) or isinstance(
                    cause, torch.OutOfMemoryError | DualinferError
                ):
                    raise cause from None
                raise GraphError(
                    f"{self._name} cannot be captured into a CUDA graph: {cause}. A graph holds "
                    "work on the device alone: no decision on a tensor's values, no copy from or "
                    "to the host. Set enable_cuda_graph=False to run it without."
                ) from cause
        return graph.replay, outputs

    def _clean_up(
        self, stream: torch.cuda.Stream, generator: torch.Generator, spare: torch.Generator
    ) -> None:
        """Make the device usable again where torch did not end a failed capture itself."""
        torch.cuda.set_stream(stream)
        with suppress(Exception):  # raises where the capture did end
            torch._C._cuda_endAllocateToPool(stream.device_index, self._pool)
        self._pool = None  # what failed may still count as its user
        with suppress(Exception):
            torch.cuda.synchronize()
        try:
            torch.rand(1, device=stream.device)
        except RuntimeError:  # the generator still believes in the capture
            generator.graphsafe_set_state(spare)
            self._graphs.clear()  # they draw from the old state

    @torch.inference_mode(False)
    @torch.no_grad()
    def _replay(self, captured: _Captured, inputs: list[torch.Tensor]) -> Any:
        with self._lock:
            stream = None
            if self._device.type == "cuda":
                stream = torch.cuda.current_stream(self._device)
                if self._done is not None:  # another stream may still be reading the outputs
                    stream.wait_event(self._done)
            for buffer, tensor in zip(captured.inputs, inputs, strict=True):
                buffer.copy_(tensor, non_blocking=True)  # host memory is read before it returns
            captured.replay()
            outputs = self._copied(captured.outputs)
            if stream is not None:
                self._done = torch.cuda.Event()
                self._done.record(stream)
            return outputs

    def _copied(self, outputs: Any) -> Any:
        """A copy that shares no tensor with `outputs`; what appears twice stays one."""
        memo: dict[int, Any] = {}

        def copied(leaf: Any) -> Any:
            if isinstance(leaf, _VALUES):
                return leaf
            if isinstance(leaf, torch.Tensor) and id(leaf) not in memo:
                memo[id(leaf)] = leaf.detach().clone()
            return copy.deepcopy(leaf, memo)

        try:
            return pytree.tree_map(copied, outputs)
        except (TypeError, NotImplementedError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise GraphError(
                f"{self._name} returned something that cannot be copied: {error}. Results of a "
                "CUDA graph are copied out of it. Set enable_cuda_graph=False to run it without."
            ) from error

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def graph_facts(*kinds: StepGraphs | CallGraphs | None) -> dict[str, int]:
    """Counts of graphs for a report. CUDA does not tell what memory one takes."""
    graphs = [kind for kind in kinds if kind is not None]
    return {
        "compilations": sum(kind.captures for kind in graphs),
        "executables": sum(map(len, graphs)),
        "evictions": sum(kind.evictions for kind in graphs),
        "executable_bytes": 0,
    }


class _Names:
    """Names of the leaves of a call's arguments; worked out only for an error."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]):
        self._call = args, dict(sorted(kwargs.items()))

    def __getitem__(self, index: int) -> str:
        """`attention_mask`, `args[0]`, `inputs['ids']`."""
        path: Any = pytree.tree_flatten_with_path(self._call)[0][index][0]
        if path[0].idx == 0:
            return f"args{pytree.keystr(path[1:])}"
        return f"{path[1].key}{pytree.keystr(path[2:])}"

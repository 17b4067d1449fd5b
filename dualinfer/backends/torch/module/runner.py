"""Module mode on torch: the user's own nn.Module, cast and moved in place, and run as it is."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from pydantic import TypeAdapter

from ....config import InferenceConfig
from ....errors import ConfigError, ModelError, UnsupportedError, a_type
from ....model.load_plan import TensorSource
from ....model.weights import count_leaves
from ....quantization.recipe import make_recipe
from ...held import describe_weights
from ...profiling import Profiler, Stopwatch
from ..compiling import compile_options, is_optimized
from ..device import default_dtype, device_name
from ..graphs import CallGraphs, graph_facts
from ..ops.schemes import SCHEMES
from ..parallel import Ranks
from ..precision import own_precision
from ..process_groups import forget_graphs_at_exit
from ..profiling import make_stopwatch, module_spans
from .autotp.changes import SurgeryPlan, is_altered
from .autotp.layers import RanksSeam
from .autotp.plan import check_whole, kept_sizes, make_plan
from .autotp.policy import check_policy
from .autotp.surgery import split_module
from .fill import check_values, fill, slots
from .mixtures import Mixtures
from .placing import check_room, convert_module, dtypes_of
from .quantized import (
    choose_layers,
    held_leaves,
    held_sizes,
    is_scale,
    put_layers,
    quantize_layers,
    restored,
)
from .watch import ModuleWatch, compiled_call

_MARKED = 8  # values of a row
_SHARED_PLAN = TypeAdapter(tuple[SurgeryPlan, list[str]])  # as JSON: nothing is unpickled


@torch.inference_mode(False)  # else a caller's inference mode would mark the weights as its own
@torch.no_grad()
def create_module_runner(
    config: InferenceConfig, module: Any, source: TensorSource | None, peers: Ranks
) -> "TorchModuleRunner":
    """A runner of `module` itself, in eval mode, in the config's dtype, on the rank's device.

    Floating parameters and buffers are cast, integer and complex ones stay, as with half(); in HF
    models also what from_pretrained(dtype=...) leaves in float32. With `keep_module_on_host` it
    stays where it is. `source` fills it, on the meta device or not. With several ranks it is split
    in place, and stays so when the engine is closed: each rank's part is of no use alone. By
    `quant` its linear layers become quantized in place, and stay so, too. All is checked, and codes
    are made, first: what fails leaves the module as it was. The random state of torch becomes rank
    0's, so that all sample alike. Raises ConfigError, ModelError, CheckpointError,
    UnsupportedError, DistributedError or OutOfMemoryError.
    """
    dtype = getattr(torch, config.dtype or default_dtype())
    policy, grain = config.injection_policy or {}, config.tensor_parallel.tp_grain_size
    recipe, targets, weights = make_recipe(config.quant), {}, {}
    seam = plan = None
    with ExitStack() as undo, nullcontext() if source is None else restored(module):
        with peers.together("The modules") as work:
            _check_module(module)
            check_whole(module)
            inner = module._orig_mod if is_optimized(module) else module
            mixtures = Mixtures(inner, config.moe)
            undo.callback(mixtures.undo)
            mixtures.check(config.moe, peers.size, source is not None, recipe is not None)
            if source is not None:
                mixtures.complete()
            mixtures.put()
            notes = check_policy(module, policy, peers.size)
            own = next((s.tensor.device for s in slots(module) if not s.tensor.is_meta), None)
            device = peers.device
            if config.keep_module_on_host:
                device = own or torch.device("cpu")
            if config.enable_cuda_graph:
                _check_graph_device(module, device)
            if source is None:
                check_values(module)
            if recipe is not None:
                targets, plain_notes = choose_layers(inner, recipe)
                notes += plain_notes
            if peers.size == 1:
                check_room(module, device, dtype, held_sizes(inner, targets, dtype, {}))
            if source is not None:
                notes += fill(module, source, torch.float32 if targets else dtype)
                check_values(module)
            notes += mixtures.notes()
            own_parts = mixtures.own_parts
            work.meet(lambda: _marks(module, own_parts))
        if peers.size > 1:
            with peers.together("The plan of the split") as work:  # rank 0 alone tries one out
                result = make_plan(inner, peers.size, grain, policy) if peers.rank == 0 else None
                text = None if result is None else _SHARED_PLAN.dump_json(result).decode()
                plan, plan_notes = _SHARED_PLAN.validate_json(work.meet(plan=text)["plan"][0])
            notes += plan_notes
            kept = kept_sizes(inner, plan, peers.rank)
            targets = {
                path: target
                for path, target in targets.items()
                if kept.get(id(inner.get_submodule(path).weight)) != 0
            }
            sizes = held_sizes(inner, targets, dtype, kept)
            with peers.together("Room for the parts"):
                check_room(module, device, dtype, sizes)
            seam = RanksSeam(peers)
        with peers.together("Quantizing"):
            if targets:
                casts = dtypes_of(module, dtype)
                weights = quantize_layers(inner, targets, plan, peers.rank, source, casts)
        undo.pop_all()
    with peers.together("Splitting the module"):
        if seam is not None and plan is not None:
            split_module(inner, plan.changes, peers.rank, seam)
        put_layers(inner, weights)
        convert_module(module, device, dtype)
    _share_random_state(peers, device)
    graphs = config.enable_cuda_graph is True
    runner = TorchModuleRunner(module.eval(), peers, device, dtype, graphs, notes, seam, mixtures)
    if peers.size > 1:
        forget_graphs_at_exit(runner)
    return runner


def _marks(module: torch.nn.Module, own_parts: tuple[str, ...] = ()) -> list[Any]:
    """Marks that tell modules apart: parts, tensors and a few of their values. All ranks have one.

    Values are left out in `own_parts`, by the start of their names, which are each rank's own.
    """
    tensors = [(slot.name, slot.tensor.detach()) for slot in slots(module)]
    values = [
        t[(end,) * (t.ndim - 1)][: _MARKED if end == 0 else None][-_MARKED:]
        for name, t in tensors
        if not name.startswith(own_parts or ("\n",))
        for end in (0, -1)
        if t.ndim and t.numel() and not t.is_complex()
    ]
    marks = [value.to("cpu", torch.float64) for value in values]
    parts = [(n, type(part).__name__, is_altered(part)) for n, part in module.named_modules()]
    shapes = [(name, tuple(t.shape)) for name, t in tensors]
    return [parts, shapes, torch.cat(marks) if marks else None]


def _share_random_state(peers: Ranks, device: torch.device) -> None:
    """Set torch's random state, of the host and of `device`, to rank 0's."""
    if peers.size == 1:
        return
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    own = [state.numpy().tobytes().hex() for state in states]
    first = peers.tell("The random state", states=own)["states"][0]
    host, *others = (torch.frombuffer(bytearray.fromhex(x), dtype=torch.uint8) for x in first)
    torch.set_rng_state(host)
    for state in others:
        torch.cuda.set_rng_state(state, device)


class TorchModuleRunner:
    """A module on one torch device, or the rank's part of it. `notes` are for the report.

    The module stays the caller's: each call puts it back in eval mode and follows it to the device
    where it is now. In another dtype than the engine's it is refused.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        peers: Ranks,
        device: torch.device,
        dtype: torch.dtype,
        forward_graphs: bool = False,
        notes: Sequence[str] = (),
        seam: RanksSeam | None = None,
        mixtures: Mixtures | None = None,
    ) -> None:
        self.module: Any = module
        self._peers = peers
        self._seam = seam
        self._mixtures = mixtures
        self.dtype = dtype
        self.notes = tuple(notes)
        self._device = device
        name = f"{type(module).__name__}.forward"
        self._calls = CallGraphs(device, name) if forward_graphs else None
        self._parts: list[torch.nn.Module] = []
        self._children: list[Mapping[str, Any]] = []
        self._tensors: list[Any] = []
        self._layout: list[int] = []
        self._addresses: list[int] = []
        self._sample_name = ""
        self._watch: ModuleWatch | None = None

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        sample = None if self.module is None else self._sample()
        if sample is not None and not sample.is_meta:
            self._device = sample.device
        return self._device

    def _sample(self) -> torch.Tensor | None:
        """A tensor that tells the module's dtype and device; None if it has no tensors.

        Found by its name, because walking the modules each time would cost more.
        """
        *path, key = self._sample_name.split(".")
        owner = self.module
        try:
            for part in path:
                owner = owner._modules[part]
            group = owner._parameters if key in owner._parameters else owner._buffers
            tensor = group[key]
        except (AttributeError, KeyError):
            tensor = None
        return self._choose_sample() if tensor is None else tensor

    def _choose_sample(self) -> torch.Tensor | None:
        """One in the engine's dtype if there is one: HF keeps some in float32."""
        buffers = (own for own in self.module.named_buffers() if not is_scale(self.module, own[0]))
        tensors = [*self.module.named_parameters(), *buffers]
        ranks = [2 * t.is_floating_point() + (t.dtype == self.dtype) for _, t in tensors]
        if not ranks:
            return None
        self._sample_name, tensor = tensors[ranks.index(max(ranks))]
        return tensor

    def _look(self) -> None:
        """Take note of what others did to the module, or refuse it."""
        if self._mixtures:
            self._mixtures.put()
        changed = self._read_layout()
        if any(part.training for part in self._parts):
            self.module.eval()
        sample, kind = self._sample(), type(self.module).__name__
        if sample is not None and sample.is_floating_point() and sample.dtype != self.dtype:
            raise ModelError(
                f"The {kind} is in {sample.dtype} now, and this engine was made in {self.dtype}: "
                "another engine or a cast changed it. Give each engine a copy of its own "
                "(copy.deepcopy(model)), or make a new engine with init_inference()."
            )
        if sample is not None and sample.is_meta:
            raise ModelError(
                f"The {kind} was moved to the meta device, where it has no values. Load it again "
                "and make a new engine with init_inference()."
            )
        if self._calls is not None:
            _check_graph_device(self.module, self.device)
            self._calls.move(self.device)
            self._check_addresses(changed)

    @torch.no_grad()
    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's result in eval mode, into which it is put again if need be.

        From a graph, copies of what it returned when captured. Raises ModelError if the module is
        no longer in the engine's dtype.
        """
        self._look()
        spans = module_spans(self.module, parts=self._calls is None and not self.is_compiled)
        with own_precision(self.dtype, self.device), spans:
            if self._calls is not None:
                work = self._calls.ready(self._untimed, args, kwargs)
                return work() if self._watch is None else self._watch.run(work)
            if self._watch is not None and isinstance(self.module, torch.jit.ScriptModule):
                return self._watch.run(self.module, *args, **kwargs)
            return self.module(*args, **kwargs)

    def _untimed(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward while it is warmed up and captured, which is nobody's pass."""
        if self._watch is None:
            return self.module(*args, **kwargs)
        with self._watch.muted():
            return self.module(*args, **kwargs)

    def _read_layout(self) -> bool:
        """Note the module's parts; True if they are others than before."""
        # Walking the modules each time would take longer than many a replay.
        layout = [id(part) for group in self._children for part in group.values()]
        if self._parts and layout == self._layout:
            return False
        self._parts = list(self.module.modules())  # kept: an id must stay its owner's
        self._children = [m._modules for m in self._parts]
        self._tensors = [m._parameters for m in self._parts] + [m._buffers for m in self._parts]
        self._layout = [id(part) for group in self._children for part in group.values()]
        return True

    def _check_addresses(self, changed: bool) -> None:
        """Drop the graphs if the module has other parts or tensors now: they hold addresses."""
        groups = self._tensors
        addresses = [t.data_ptr() for group in groups for t in group.values() if t is not None]
        if changed or addresses != self._addresses:
            self.forget_graphs()
            self._addresses = addresses

    @torch.no_grad()
    def generate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's own generate, its `reset_cache()` called first if it has one.

        In eval mode and the engine's dtype, as `forward`. Its forward passes are not replayed from
        graphs. Ranks draw from rank 0's random state: other tokens in one would be other lengths.
        """
        self._look()
        _share_random_state(self._peers, self.device)
        reset = getattr(self.module, "reset_cache", None)
        if callable(reset):
            reset()
        with own_precision(self.dtype, self.device):
            if self._watch is None or not is_optimized(self.module):
                return self.module.generate(*args, **kwargs)
            with self._watch.also(self.module._orig_mod):  # whose generate it is
                return self.module.generate(*args, **kwargs)

    def refresh(self) -> None:
        """Nothing to do: what is written to the module is what runs, and graphs follow it."""

    def watch(self, profiler: Profiler) -> None:
        """Time the module's forward passes while `profiler` is enabled; see `base.ModuleRunner`.

        A ScriptModule's are seen in `forward` alone.
        """
        self._stop_watching()
        if profiler.enabled:
            self._watch = ModuleWatch(self.module, profiler)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.end()
        self._watch = None

    def stopwatch(self, use_cuda_events: bool) -> Stopwatch:
        """CUDA events where asked for on CUDA, else the clock around completed work."""
        return make_stopwatch(self.device, use_cuda_events)

    @property
    def is_compiled(self) -> bool:
        """True if the module is compiled, by the engine or before it."""
        return compiled_call(self.module) is not None or is_optimized(self.module)

    def compile(self, backend: Any, compile_kwargs: Mapping[str, Any]) -> None:
        """Compile the module in place, when it is next called; the second time, do nothing.

        `backend` None is torch's default. Raises UnsupportedError for a ScriptModule.
        """
        if self.is_compiled:
            return
        if isinstance(self.module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"The {type(self.module).__name__} is TorchScript, which torch.compile does not "
                "take. Make the engine of the module that was scripted or traced."
            )
        profiler = None if self._watch is None else self._watch.profiler
        self._stop_watching()
        self.module.compile(**compile_options(backend, compile_kwargs))
        self.forget_graphs()
        if profiler is not None:
            self.watch(profiler)

    def forget_graphs(self) -> None:
        """Drop the graphs: what they hold the addresses of is about to move."""
        if self._calls is not None:
            self._calls.clear()

    def report(self) -> Mapping[str, Any]:
        """Facts for `engine.report()`; a tied parameter counts once."""
        leaves = held_leaves(self.module)
        return {
            "device": str(self.device),
            "device_name": device_name(self.device),
            "ops": {
                "forward": "the module's own",
                **SCHEMES.implementations(leaves.values()),
            },
            "weights": describe_weights(leaves),
            **count_leaves(leaves.values()),
            "cache_bytes": 0,
            **graph_facts(self._calls),
        }

    def close(self) -> None:
        """Let go of the module, which stays the caller's, of hooks and graphs.

        A module that was split stays so, and runs no more: its ranks are not joined any longer.
        """
        self._stop_watching()
        self.forget_graphs()
        if self._seam is not None:
            self._seam.close()
        device = self.device
        if self._mixtures:
            self._mixtures.put_back()
        self._mixtures = None
        self.module = None
        self._parts, self._children, self._tensors = [], [], []
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _check_module(module: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"model is {a_type(module)}; expected a torch.nn.Module.")
    kind = type(module).__name__
    if (
        getattr(module, "is_quantized", False)
        or getattr(getattr(module, "config", None), "quantization_config", None) is not None
    ):
        raise UnsupportedError(
            f"The {kind} is quantized by transformers, which fixes its dtypes; dualinfer cannot "
            "cast it. Pass the model without quantization, or the folder of a quantized checkpoint."
        )
    places = set((getattr(module, "hf_device_map", None) or {}).values())
    if len(places) > 1:
        raise UnsupportedError(
            f"The {kind} was spread over {', '.join(sorted(map(str, places)))} by device_map, and "
            "an engine has one device. Load it without device_map."
        )


def _check_graph_device(module: torch.nn.Module, device: torch.device) -> None:
    if device.type != "cuda":
        raise ConfigError(
            f"enable_cuda_graph=True: the {type(module).__name__} stays on {device}, and graphs "
            "need it on a CUDA device. Leave keep_module_on_host or enable_cuda_graph unset."
        )

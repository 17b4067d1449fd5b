"""InferenceEngine: what every engine has, whatever runs in it: model, times, report, life cycle."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ..arrays import to_torch_dtype
from ..backends.profiling import Profiler
from ..config import InferenceConfig
from ..errors import ArgumentError, ClosedError, UnsupportedError
from ..model.embedding import TextEmbedding
from ..model.kept_config import made
from ..parallel.agreement import Peers
from ..parallel.spmd import Call, Turns
from .report import Report
from .text import TextCalls

CLOSED = "This engine was closed. Make a new one with init_inference()."


@dataclass(frozen=True)
class About:
    """Facts that an engine knows of its model beside the runner.

    `peers` are the processes that share it, and the engine's to close. `config` and
    `generation_config` are the model's own, HF's objects, or None; `source` says where the weights
    are from, and `notes` what was decided for the user. `load_tokenizer` gives the model's
    tokenizer, and `load_embedding` how its folder embeds texts; they are None where nothing tells
    where that lies. A module that was `made_here` is
    nobody else's: it was made of a checkpoint. One `of_torch` is the caller's, of torch, in whose
    place the engine stands. `answer_rows` is `engine.batch`, by the server's routes.
    """

    inference_config: InferenceConfig
    peers: Peers
    config: Any
    generation_config: Any
    source: str
    notes: Sequence[str]
    load_tokenizer: Callable[[], Any] | None = None
    made_here: bool = False
    of_torch: bool = False
    load_embedding: Callable[[], TextEmbedding] | None = None
    answer_rows: Callable[..., Iterator[dict[str, Any]]] | None = None


class InferenceEngine(TextCalls):
    """A model ready to run. Made by `init_inference`; usable as a context manager.

    `inference_config` is the InferenceConfig. `config` and `generation_config` are the model's own
    (HF's objects), or None. On torch the engine is an nn.Module as well. Calls from several threads
    take turns.
    """

    _mode: ClassVar[str]  # "fused" or "module"

    def __init__(self, runner: Any, about: About) -> None:
        self._runner: Any = runner
        on_host = str(runner.device).startswith("cpu")
        may_fork = about.inference_config.backend == "torch" and on_host
        self._turns = Turns(about.peers, may_fork)
        self._about = about
        self.inference_config = about.inference_config
        self._config: Any = about.config
        self._generation_config: Any = about.generation_config
        self._profiler = Profiler(runner.stopwatch)
        self._kernels: str | None = getattr(runner, "kernels", None)  # None: the module's own ops

    @property
    def config(self) -> Any:
        """The model's own config, HF's object, or None."""
        self._config = made(self._config)
        return self._config

    @config.setter
    def config(self, value: Any) -> None:
        self._config = value

    @property
    def generation_config(self) -> Any:
        """The model's own defaults of `generate`, HF's object, or None."""
        self._generation_config = made(self._generation_config)
        return self._generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self._generation_config = value

    @property
    def runner(self) -> Any:
        """The backend's Runner or ModuleRunner; ClosedError after `close()`, or where forked."""
        self._turns.check()
        if self._runner is None:
            raise ClosedError(CLOSED)
        return self._runner

    @property
    def module(self) -> Any:
        """The model as an object of its framework.

        In module mode the caller's own module on torch, its cast copy on JAX; in fused mode an
        nn.Module or nnx module that holds dualinfer's weights.
        """
        return self.runner.module

    @property
    def device(self) -> Any:
        """The torch.device or jax.Device that holds the weights."""
        return self.runner.device

    @property
    def dtype(self) -> Any:
        """The framework's dtype of the weights.

        On JAX it is torch's where the engine was made of a torch module: pipelines of transformers
        cast images and sounds to the dtype of the model, and take no other.
        """
        return to_torch_dtype(self.runner.dtype) if self._about.of_torch else self.runner.dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The same as `forward`."""
        return self.forward(*args, **kwargs)

    def _call(
        self,
        name: str,
        inputs: Mapping[str, Any],
        is_input: Callable[[Any], bool] = lambda value: value is not None,
        waits: bool = True,
    ) -> Call:
        """The turn of the call `name`, in every process that shares the model; see `Call`."""
        _ = self.runner  # a closed engine says that it is
        return Call(self._turns, name, inputs, is_input, lambda: self.device, waits)

    @property
    def turns(self) -> Turns:
        """The lock by which calls take turns: what holds it runs alone."""
        return self._turns

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One forward pass of the model, without gradients."""
        raise NotImplementedError

    def embed(self, inputs: Any, **unsupported: Any) -> Any:
        """One vector of each text; in fused mode alone."""
        raise UnsupportedError(
            f"embed() needs dualinfer's own forward pass, and this engine runs in {self._mode} "
            "mode. Pass a folder or hub id of a family that fused mode knows, or a live model of "
            "one with replace_with_kernel_inject=True."
        )

    def can_generate(self) -> bool:
        """True if `generate` serves this model."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Take the weights that the model has now, without new graphs or executables."""
        raise NotImplementedError

    def profile_model_time(self, use_cuda_events: bool = True, enabled: bool = True) -> None:
        """Time every forward pass of the model from now on; `enabled=False` ends it.

        A generate of N tokens is N passes. With `use_cuda_events` (torch on CUDA) the times are
        taken on the device without waiting for it; else, and on JAX and CPUs always, by the clock
        around completed work, which slows generate down.
        """
        with self._turns:
            self._watch(self.runner, enabled, use_cuda_events)

    def _watch(self, runner: Any, enabled: bool, use_cuda_events: bool) -> None:
        """Turn profiling on or off on a runner that is open."""
        self._profiler.switch(enabled, use_cuda_events)

    @property
    def model_profile_enabled(self) -> bool:
        """True while model times are taken."""
        return self._profiler.enabled

    def model_times(self) -> list[float]:
        """Milliseconds of each forward pass since the last call, oldest first; they are cleared.

        Raises ProfilingError if profiling is off.
        """
        with self._turns:
            _ = self.runner  # a closed engine says that it is
            return self._profiler.take()

    def compile(self, backend: Any = None, compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """Compile forward with torch.compile; a second call does nothing.

        `backend` None is torch's default, "inductor". On JAX everything is compiled as it is, so
        that only None is taken. Raises UnsupportedError where it cannot be done, and ArgumentError
        for what the compiler does not know.
        """
        if not (compile_kwargs is None or isinstance(compile_kwargs, Mapping)):
            kind = type(compile_kwargs).__name__
            raise ArgumentError(
                f"compile_kwargs is a {kind}; a dict of names to values is expected."
            )
        with self._turns:
            self.runner.compile(backend, dict(compile_kwargs or {}))

    @property
    def is_compiled(self) -> bool:
        """True if forward is compiled."""
        return self.runner.is_compiled

    def report(self) -> Report:
        """Report what runs, where, and what it holds."""
        raise NotImplementedError

    def _make_report(self, **facts: Any) -> Report:
        return Report(
            mode=self._mode,
            backend=self.inference_config.backend,
            dtype=self.inference_config.dtype or "",
            source=self._about.source,
            notes=(*self._about.notes, *getattr(self.runner, "notes", ())),
            **facts,
            **self.runner.report(),
        )

    def close(self) -> None:
        """Free what the engine holds on the device; it cannot be used afterwards."""
        if self._turns.is_foreign:  # what it holds is another process's
            return
        self._end_threads()
        with self._turns:
            if self._runner is None:
                return
            self._let_go()
            self._profiler.switch(False)
            runner, self._runner = self._runner, None
            runner.close()
            self._turns.peers.close()

    def _end_threads(self) -> None:
        """End what runs by itself, which may wait for the turn."""

    def _let_go(self) -> None:
        """End what is under way, before the runner is closed."""

    def destroy(self) -> None:
        """DeepSpeed's name of `close`."""
        self.close()

    def __enter__(self) -> Self:
        """The engine itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()

    def __repr__(self) -> str:
        """Name what runs, in which mode, on which backend, in which dtype, by whose kernels."""
        kernels = "" if self._kernels is None else f", {self._kernels or 'no'} kernels"
        state = "closed" if self._runner is None else f"{self.inference_config.dtype}{kernels}"
        mode, backend = self._mode, self.inference_config.backend
        return f"InferenceEngine({self._name()}, {mode} mode, {backend}, {state})"

    def _name(self) -> str:
        raise NotImplementedError

"""The engine as JAX code expects it: a module that runs, outputs as a pytree, what it refuses."""

import functools
import re
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ...config.dtypes import dtype_name
from ...decoder import joined_towers
from ...errors import ArgumentError, UnsupportedError, shortened
from ...model.outputs import make_outputs, on_outputs_type
from ...ops.contract import Tokens
from ...ops.pooling import contrast
from ..base import ForwardInputs
from .executables import TRACED, check_untraced
from .functional import transformable
from .maths import MATHS
from .params import Model, make_tree, read_tree

_DEVICE = re.compile(r"(cpu|cuda|gpu|tpu)(?::(\d+))?")


class _Inference:
    """The calls that scripts for HF's models make on one; no change is made here."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def device(self) -> Any: ...

        @property
        def dtype(self) -> Any: ...

    def eval(self) -> Self:
        """Itself: there is no other mode."""
        return self

    def train(self, mode: bool = True) -> Self:
        """Only `train(False)`, which is `eval()`: the engine never trains."""
        if mode:
            raise UnsupportedError(
                "The engine is for inference and stays in eval mode; train the model itself."
            )
        return self

    def to(
        self, *args: Any, device: Any = None, dtype: Any = None, non_blocking: bool = False
    ) -> Self:
        """Itself, for the device and dtype that it has, named as in JAX or torch.

        Raises UnsupportedError for others.
        """
        for wanted in (*args, device, dtype):
            if not (wanted is None or isinstance(wanted, bool) or self._has(wanted)):
                raise UnsupportedError(
                    f"This engine was made in {dtype_name(self.dtype)} on {self.device} and stays "
                    f"so; asked was {shortened(wanted)}. Make another one with init_inference()."
                )
        return self

    def _has(self, wanted: Any) -> bool:
        """True for this device, or this dtype."""
        if isinstance(wanted, jax.Device):
            return wanted == self.device
        name = f"gpu:{wanted}" if isinstance(wanted, int) else str(wanted).lower()  # int: torch's
        match = _DEVICE.fullmatch(name)
        if match is None:
            try:
                return dtype_name(wanted) == dtype_name(self.dtype)
            except ValueError:
                return False
        kind, index = match.groups()
        same = self.device.platform == ("gpu" if kind == "cuda" else kind)
        return same and index in (None, str(self.device.id))


class _Holder:
    __slots__ = ("_engine",)  # outside of vars(), which are all that nnx looks at


class FusedModule(_Inference, _Holder, Model):  # pyright: ignore[reportIncompatibleMethodOverride]
    """dualinfer's weights as an nnx module, which runs and generates as its engine does.

    Copies that nnx makes of it (split and merge, clone) have the weights alone.
    """

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's forward."""
        engine = getattr(self, "_engine", None)
        if engine is None:
            raise UnsupportedError(
                "This is a copy of a fused engine's module: it has the weights, and no forward. "
                "Call the engine, or engine.module itself, outside of nnx's transformations."
            )
        return engine.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the engine: generate, config, device, dtype and so on."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._engine, name)


def _view(weights: Model, engine: Any) -> FusedModule:
    """`weights`, sharing their attributes, with an engine that runs them."""
    view = object.__new__(FusedModule)
    object.__setattr__(view, "__dict__", vars(weights))
    object.__setattr__(view, "_engine", engine)
    return view


class OnJax(_Inference):
    """The base of every engine on JAX."""

    @property
    def _modules(self) -> Any:
        """AttributeError: what takes an engine for a torch module looks for this."""
        raise AttributeError(
            "This engine is JAX's and no torch module, which Trainer and torch's tools need. Make "
            "one with backend='torch' for them."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """UnsupportedError: neither copied nor pickled."""
        raise UnsupportedError(
            "An engine holds executables and memory of its device, so that it cannot be copied or "
            "pickled. Make another one with init_inference()."
        )


class FusedOnJax(OnJax):
    """Of a FusedEngine: its `module` is made when it is asked for, so that no cycle keeps it."""

    _view: Callable[[], FusedModule | None] = staticmethod(lambda: None)

    @property
    def module(self: Any) -> FusedModule:
        """dualinfer's weights as an nnx module, which runs and generates as the engine does."""
        weights, view = self.runner.module, self._view()
        if view is None:
            view = _view(weights, self)
            self._view = weakref.ref(view)
        return view

    if not TYPE_CHECKING:  # a type checker flags what is not there

        def __getattr__(self, name):
            """AttributeError, which says what a fused engine has not."""
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise self._absent(name)

    @property
    def model(self: Any) -> FusedModule:
        """The same as `module`, to inspect: its repr lists what it holds."""
        return self.module

    @property
    def params(self: Any) -> dict[str, Any]:
        """The weights as a pytree of arrays by name: `params["layers"][0]["qkv"]["weight"]`.

        A fresh dict of the engine's own buffers, which must not be donated: copy them first. Of
        several devices each array is one over all of them, sharded: along the axis that is split,
        each device's block, padded to equal size, follows that of the one before. Raises
        StaleWeightsError if the live model has changed.
        """
        self._origin.check()
        return make_tree(self.runner.params)

    def apply(
        self: Any,
        params: Any,
        tokens: Any = None,
        *,
        attention_mask: Any = None,
        position_ids: Any = None,
        token_type_ids: Any = None,
        inputs_embeds: Any = None,
        decoder_input_ids: Any = None,
        decoder_attention_mask: Any = None,
        input_features: Any = None,
        input_values: Any = None,
        encoder_outputs: Any = None,
        pixel_values: Any = None,
        pixel_attention_mask: Any = None,
        spatial_shapes: Any = None,
        interpolate_pos_encoding: bool = False,
        bbox: Any = None,
        output_hidden_states: bool = False,
    ) -> Any:
        """Forward's outputs, as a pure function: for jax.jit, jax.vmap, jax.grad.

        Examples:
            >>> jax.jit(engine.apply)(engine.params, jnp.array([[2, 3, 4]])).logits  # [B, T, V]

        `params` as `engine.params` gives them, of the same names, shapes and dtype; `tokens` int
        [B, T], or [T] for one row, or what else the model reads first, as an image encoder's
        pixels; the others as in forward, as arrays, `encoder_outputs` the hidden state [B, S, E].
        All but `spatial_shapes` may be traced, so that values are not checked: ids, positions and
        boxes outside their tables are clipped, any mask value but 0 shows a token, and
        `position_ids` never separate packed sequences. It reads nothing of the engine but facts of
        the model, and keeps nothing. Gradients are those of HF's parameters, on plain XLA alone. Of
        several devices it runs on all of them, and its results are whole on each; arrays that lie
        on other devices are refused by JAX. Raises ArgumentError for what does not fit, LengthError
        for too many tokens, and UnsupportedError where it is differentiated and has no derivatives.
        """
        keep, interpolate = output_hidden_states, interpolate_pos_encoding
        ways = {"output_hidden_states": keep, "interpolate_pos_encoding": interpolate}
        for name, value in ways.items():
            if isinstance(value, Tracer):
                raise ArgumentError(
                    f"{name} says what is computed, and is traced here. Make it static: "
                    f'jax.jit(engine.apply, static_argnames="{name}").'
                )
        given = {
            "input_ids": tokens,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "token_type_ids": token_type_ids,
            "inputs_embeds": inputs_embeds,
            "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": decoder_attention_mask,
            "input_features": input_features,
            "input_values": input_values,
            "encoder_outputs": encoder_outputs,
            "pixel_values": pixel_values,
            "pixel_attention_mask": pixel_attention_mask,
            "spatial_shapes": spatial_shapes,
            "interpolate_pos_encoding": interpolate or None,
            "bbox": bbox,
        }
        runner = self.runner
        weights = read_tree(params, runner.params)
        inputs = self._pure_inputs(given, jnp)
        run = functools.partial(_run_pure, runner, weights, keep)
        if not runner.spec.towers:
            return make_outputs(run(inputs))
        texts, images = map(run, inputs.towers())
        scale, bias = (weights.outer.get(f"logit_{name}") for name in ("scale", "bias"))
        text, image = texts["pooler_output"], images["pooler_output"]
        found = contrast(MATHS, text, image, scale, bias)
        return make_outputs(joined_towers(make_outputs(texts), make_outputs(images), *found))


def _run_pure(runner: Any, weights: Any, keep: bool, inputs: ForwardInputs) -> dict[str, Any]:
    """Results of one pass over rows that vmap may make more of."""

    def forward(derived: bool = False) -> Any:
        return runner.pure_forward(keep, inputs.of_encoder, derived)

    derived = functools.partial(forward, derived=True)
    run = transformable(forward(), derived, runner.has_tangents)
    tokens = inputs.tokens
    if tokens.source is not None and tokens.source.states is not None:
        read = Tokens(mask=tokens.source.mask, states=tokens.source.states)
        tokens = tokens._replace(source=read)
    results = run(weights, tokens)
    if inputs.choices:
        results = {**results, "logits": results["logits"].reshape(-1, inputs.choices)}
    if (block := runner.spec.block) is not None and keep:
        results = {**results, "hidden_states": block.shown(results["hidden_states"])}
    return results


class _ModuleOnJax(OnJax):
    """The base of a ModuleEngine on JAX, whose module is not looked through for attributes."""

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            """AttributeError, which says what fused engines alone have."""
            if hasattr(type(self), name):  # a property, whose own error this is
                return object.__getattribute__(self, name)
            raise self._absent(name)


@functools.cache
def engine_type(base: type) -> type:
    """`base`, one of dualinfer's engines, with what JAX code and HF's scripts expect of it."""
    namespace: dict[str, Any] = {"__doc__": base.__doc__, "__module__": base.__module__}
    if base.__name__ != "FusedEngine":
        return type(base.__name__, (_ModuleOnJax, base), namespace)
    for name in ("forward", "generate", "stream", "refresh"):
        namespace[name] = _refuse_tracing(getattr(base, name))
    return type(base.__name__, (FusedOnJax, base), namespace)


def _refuse_tracing(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, with an UnsupportedError where JAX's transformations hide its arguments' values.

    Also where nothing of the call is traced but jit stages what is done on the device.
    """
    hidden = jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        check_untraced()
        try:
            return method(*args, **kwargs)
        except Exception as error:
            if isinstance(error, hidden) or isinstance(error.__cause__, hidden):
                raise UnsupportedError(TRACED) from error
            raise

    return call


@functools.cache
def register_outputs() -> None:
    """Make what forward and generate return pytrees; once, since JAX takes a class but once."""

    def flatten_with_keys(outputs: Any) -> Any:
        return [(jax.tree_util.DictKey(k), v) for k, v in outputs.items()], tuple(outputs)

    def flatten(outputs: Any) -> Any:
        return tuple(outputs.values()), tuple(outputs)

    def register(kind: Any) -> None:
        def unflatten(names: tuple[str, ...], values: Any) -> Any:
            outputs = kind()
            for name, value in zip(names, values, strict=True):
                outputs[name] = value  # a None too, which __init__ leaves out
            return outputs

        jax.tree_util.register_pytree_with_keys(kind, flatten_with_keys, unflatten, flatten)

    on_outputs_type(register)

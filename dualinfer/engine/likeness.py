"""Names, signatures and facts that code around a HF model reads of an engine in its place.

Trainer, pipelines and evaluation harnesses go by these. What is there is what HF's class has; what
an engine has not is absent, so that they say so.
"""

import functools
import inspect
import re
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any


def hf_class(architecture: str) -> Any:
    """transformers' class of this name; None if it has none, or has not been imported here."""
    hf = sys.modules.get("transformers")
    has_torch = getattr(hf, "is_torch_available", None)  # None while another thread imports it
    if has_torch is None or not has_torch():  # then there are stand-ins for its models
        return None
    return getattr(hf, architecture, None)


def _fact(name: str, what: str) -> Any:
    def read(engine: Any) -> Any:
        return getattr(engine._hf_class(), name)  # AttributeError where it has none

    return property(read, doc=what)


class Likeness:
    """The attributes of HF's class that others read of a fused engine."""

    _spec: Any

    accepts_loss_kwargs = _fact("accepts_loss_kwargs", "Whether HF's class says that it does.")
    base_model_prefix = _fact("base_model_prefix", "HF's name of what lies below the head.")
    config_class = _fact("config_class", "HF's class of the config.")
    input_modalities = _fact("input_modalities", "What HF's class reads.")
    main_input_name = _fact("main_input_name", "HF's name of the first argument.")

    def _hf_class(self) -> Any:
        found = hf_class(self._spec.architecture)
        if found is None:
            raise AttributeError(f"transformers' {self._spec.architecture} is not at hand.")
        return found

    @property
    def loss_type(self) -> str | None:
        """HF's name of the loss, by which Trainer counts labels."""
        from transformers.loss.loss_utils import LOSS_MAPPING

        name = self._hf_class().__name__
        found = [name] if name in LOSS_MAPPING else re.findall("|".join(LOSS_MAPPING), name)
        return found[0] if found else None

    @property
    def name_or_path(self: Any) -> str:
        """The name or path that the model is from, as its config says."""
        return getattr(self.config, "name_or_path", "") or ""

    def num_parameters(
        self: Any, only_trainable: bool = False, exclude_embeddings: bool = False
    ) -> int:
        """Parameters of the model as HF counts them by its config; none is trainable."""
        if only_trainable:
            return 0
        from .. import backends

        module = backends.make_empty_module(self._spec.architecture, self.config)
        return module.num_parameters(exclude_embeddings=exclude_embeddings)

    def _absent(self, name: str) -> AttributeError:
        """The error for an attribute that HF's class may have, and the engine has not."""
        return AttributeError(
            f"A fused engine in the place of a {type(self).__name__} has no {name!r}. Code that "
            "reads or changes the model's own parts needs them: pass it the live module, or an "
            "engine in module mode (backend='torch', without replace_with_kernel_inject)."
        )

    def tie_weights(self, *_: Any, **__: Any) -> None:
        """Nothing to do: weights that the config ties are one."""


@functools.cache
def in_place_of(engine_type: Any, architecture: str) -> Any:
    """`engine_type` by the name of the HF class in whose place it stands, which others look for."""
    return _named(engine_type, architecture, lambda: hf_class(architecture))


def in_place_of_module(engine_type: Any, module: Any) -> Any:
    """`engine_type` by the name of the class of a caller's module."""
    kind = type(module)
    return _named(engine_type, kind.__name__, lambda: kind)


def _named(engine_type: Any, name: str, find: Callable[[], Any]) -> Any:
    own = {"__doc__": engine_type.__doc__, "__module__": engine_type.__module__}
    if hasattr(engine_type, "named_parameters"):  # an nn.Module, on which Trainer may be
        own["forward"] = _Forward(engine_type.forward, find)
    return type(name, (engine_type,), own)


class _Forward:
    """An engine's `forward` that shows the signature of another class's.

    Trainer drops the columns of a dataset that are not in it. `find` gives the class, or None where
    nothing is known of it yet.
    """

    def __init__(self, run: Callable[..., Any], find: Callable[[], Any]) -> None:
        self._run, self._find = run, find
        self._signed: Any = None

    def __get__(self, engine: Any, owner: Any = None) -> Any:
        """The function, or the engine's method."""
        if self._signed is None and (found := self._find()) is not None:
            self._signed = _signed(self._run, found.forward)
        function = self._signed or self._run
        return function if engine is None else MethodType(function, engine)


def _signed(run: Callable[..., Any], shown: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    try:
        forward.__signature__ = inspect.signature(shown)  # pyright: ignore
    except (TypeError, ValueError):  # code that Python does not know
        return run
    return forward

"""Refuse calls on a split or quantized HF model that act on parts of weights, or on codes."""

import inspect
from typing import Any

from torch import nn

from .....errors import UnsupportedError
from ..fill import is_hf

_SAVING = (
    "Save the model before you pass it to init_inference(), or let a fused engine write a "
    "checkpoint of the whole model with save_mp_checkpoint_path."
)
_RESIZING = "Resize the whole model, and pass it to init_inference() then."
_REFUSED = {
    "save_pretrained": _SAVING,
    "push_to_hub": _SAVING,
    "resize_token_embeddings": _RESIZING,
}


def guard(module: nn.Module, heads_are_split: bool) -> None:
    """Make the HF models in a split module refuse what is wrong on a part of their weights.

    With `heads_are_split` also the attention's weights as outputs, which each rank has of its own
    heads.
    """
    refuse_changes(module, "split over ranks", "one rank's part of the weights")
    for part in module.modules():
        if is_hf(part) and heads_are_split:
            names = tuple(inspect.signature(part.forward).parameters)
            part.register_forward_pre_hook(_AttentionsCheck(names), with_kwargs=True, prepend=True)


def refuse_changes(module: nn.Module, state: str, acts_on: str) -> None:
    """Make the HF models in a module refuse to be saved or resized in the `state` they are in.

    They would act on what `acts_on` says.
    """
    for part in module.modules():
        for name, way in _REFUSED.items() if is_hf(part) else ():
            if callable(getattr(part, name, None)):
                why = f"This {type(part).__name__} is {state}, and {name}() would act on {acts_on}."
                vars(part)[name] = _Refusal(f"{why} {way}")


class _Refusal:
    """Stands in for a method."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """UnsupportedError."""
        raise UnsupportedError(self.text)


class _AttentionsCheck:
    """A forward pre-hook: UnsupportedError where the attention's weights are asked for."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Look at the arguments and the config."""
        asked = kwargs.get("output_attentions")
        if asked is None and "output_attentions" in self.names[: len(args)]:
            asked = args[self.names.index("output_attentions")]
        if asked is None:
            asked = getattr(module.config, "output_attentions", False)
        if asked:
            raise UnsupportedError(
                f"This {type(module).__name__} is split by attention heads over ranks, and its "
                "attention weights would be those of one rank's heads. Leave output_attentions "
                "off, or ask a module that is not split."
            )

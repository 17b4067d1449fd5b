"""What a split HF model refuses: it holds one rank's part, and would act on that alone."""

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
    for part in module.modules():
        if not is_hf(part):
            continue
        for name, way in _REFUSED.items():
            if callable(getattr(part, name, None)):
                vars(part)[name] = _Refusal(type(part).__name__, name, way)
        if heads_are_split:
            names = tuple(inspect.signature(part.forward).parameters)
            part.register_forward_pre_hook(_AttentionsCheck(names), with_kwargs=True, prepend=True)


class _Refusal:
    """Stands in for a method."""

    def __init__(self, kind: str, name: str, way: str) -> None:
        self.kind, self.name, self.way = kind, name, way

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """UnsupportedError."""
        raise UnsupportedError(
            f"This {self.kind} is split over ranks, and {self.name}() would act on one rank's part "
            f"of the weights. {self.way}"
        )


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

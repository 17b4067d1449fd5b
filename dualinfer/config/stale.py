"""Fields of DeepSpeed's that may hold one harmless value, which is accepted with a warning."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, create_model

from .model import Model
from .nested import CheckpointConfig
from .values import Integer

# Name: alias, type, the value that it holds, what else is taken for it, and why there is no other.
_TABLE: dict[str, tuple[str | None, Any, Any, Any, str]] = {
    "triangular_masking": (
        *("tm", bool, True, True, "whether attention is causal follows from the model"),
    ),
    "set_empty_params": (None, bool, False, False, "modules are never left without weights"),
    "checkpoint_config": (
        *("ckpt_config", CheckpointConfig, CheckpointConfig(), CheckpointConfig()),
        "use the fields `checkpoint` and `base_dir` instead",
    ),
    "training_mp_size": (None, Integer, 1, 1, "`checkpoint` says how many ranks wrote its files"),
    "replace_method": (None, str, "auto", "", "there is one method of replacement"),
    "injection_policy_tuple": (
        *(None, tuple[Any, ...] | None, None, (), "it is internal to DeepSpeed"),
    ),
    "transposed_mode": (None, bool, False, False, "the layout is known from the checkpoint"),
}


def _field(alias: str | None, kind: Any, value: Any, same: Any, reason: str) -> tuple[Any, Any]:
    def check(given: Any) -> Any:
        if given not in (value, same):
            raise ValueError(f"cannot be honoured: {reason}")
        return value

    about = f"{value!r} only: {reason}."
    # Out of dumps, so that these warn of nothing.
    hidden: Any = {"exclude": True, "repr": False, "description": about}
    field = Field(default=value, validation_alias=alias, **hidden)
    return Annotated[kind, AfterValidator(check)], field


_fields: Any = {name: _field(*row) for name, row in _TABLE.items()}
StaleFields = create_model("StaleFields", __base__=Model, **_fields)

"""A HF config that is read field by field, so that whatever a family leaves unread is refused."""

from collections.abc import Mapping
from typing import Any

from ..errors import ModelError
from ..spec import Activation

# Fields of any HF config that cannot change what forward computes.
_INERT = frozenset(
    """_attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled
    _name_or_path _num_labels architectures attn_implementation auto_map bos_token_id
    chunk_size_feed_forward dtype eos_token_id finetuning_task gradient_checkpointing id2label
    initializer_range is_composition is_llama_config label2id max_length max_sequence_length
    model_type name_or_path num_labels output_hidden_states output_past pad_token_id prefix
    pretraining_tp problem_type return_dict sep_token_id task_specific_params tokenizer_class
    torch_dtype torchscript transformers_version unsloth_version use_cache
    use_return_dict""".split()
)

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "tanh": "tanh",
}


class ConfigFields:
    """One HF config's fields; remembers which were read. `family` names it in errors."""

    def __init__(self, family: str, values: Mapping[str, Any]):
        self.family = family
        self._values = dict(values)
        self._read: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """The field's value, `default` where it is absent or None; marks it as honoured."""
        self._read.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """A field that must be a positive int."""
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"config.json has {name}={value!r}; expected a positive int.")
        return value

    def number(self, name: str) -> float:
        """A field that must be a positive number."""
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ModelError(f"config.json has {name}={value!r}; expected a positive number.")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A field that is a positive number, or None or absent where it is off."""
        return None if self.take(name) is None else self.number(name)

    def layer_types(self, layers: int) -> list[str]:
        """`layer_types`, checked: full_attention or sliding_attention for each layer."""
        kinds = self.take("layer_types", [])
        if set(kinds) - {"full_attention", "sliding_attention"} or len(kinds) != layers:
            raise ModelError(
                f"config.json has layer_types={kinds}; the {self.family} family honours one of "
                f"full_attention and sliding_attention for each of {layers} layers."
            )
        return kinds

    def require(self, name: str, *allowed: Any) -> None:
        """Refuse the field unless it is absent, None or one of `allowed`."""
        value = self.take(name)
        if value is not None and value not in allowed:
            honoured = " or ".join(repr(a) for a in allowed) or "nothing"
            raise ModelError(
                f"config.json has {name}={value!r}, which the {self.family} family does not honour "
                f"({honoured} only); ignoring it would give wrong results."
            )

    def activation(self, name: str) -> Activation:
        """An activation field, as our name of it."""
        value = self.take(name)
        if value not in _ACTIVATIONS:
            raise ModelError(
                f"config.json has {name}={value!r}, which the {self.family} family does not "
                f"honour; known: {', '.join(sorted(_ACTIVATIONS))}."
            )
        return _ACTIVATIONS[value]

    def ignore(self, *names: str) -> None:
        """Mark fields as read that change nothing at inference, such as dropout."""
        self._read.update(names)

    def ignore_summary(self) -> None:
        """Mark the fields of a GPT-2 classifier's head, which language models' configs hold too."""
        self.ignore("summary_type", "summary_use_proj", "summary_activation")
        self.ignore("summary_proj_to_labels", "summary_first_dropout")

    def finish(self) -> None:
        """Refuse every field that nobody read and that is set to something."""
        self.require("is_encoder_decoder", False)
        self.require("rope_interleaved", False)
        self.require("use_mrope", False)
        self.require("output_attentions", False)
        self.require("tie_last_hidden_states", True)
        unread = {
            name: value
            for name, value in self._values.items()
            if name not in self._read | _INERT
            and not name.startswith("transformers.js")
            and value not in (None, False, [], {}, "")
        }
        if unread:
            shown = ", ".join(f"{name}={value!r}" for name, value in sorted(unread.items()))
            raise ModelError(
                f"config.json has {shown}, which the {self.family} family does not honour; "
                "ignoring it could give wrong results. If it has no effect on this model, remove "
                "it."
            )

"""A HF config that is read field by field, so that whatever a family leaves unread is refused."""

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ModelError, UnservedError, shown
from ..generation import GENERATION
from ..spec import Activation

# Fields of any HF config that cannot change what forward computes, since HF's models of these
# families do not read them. Most are from some 75 public config.json files of ten families, found
# in GitHub repositories by model_type in November 2026; the rest are their siblings by name.
INERT = frozenset(
    """_attn_implementation _attn_implementation_autoset _commit_hash _experts_implementation
    _flash_attn_2_enabled _name_or_path _num_labels architectures attn_implementation auto_map
    base_model_name_or_path bos_token bos_token_id chunk_size_feed_forward cls_token cls_token_id
    custom_pipeline custom_pipelines dtype eos_token eos_token_id experts_implementation
    finetuning_task gradient_checkpointing id2label initializer_range internal_version
    is_composition is_llama_config keys_to_ignore_at_inference label2id line_by_line mask_token
    mask_token_id max_sequence_length model_max_length model_type n_vocab name_or_path num_labels
    output_hidden_states output_past pad_token pad_token_id prefix pretraining_tp problem_type
    return_dict sep_token sep_token_id task_specific_params tokenizer_class torch_dtype torchscript
    transformers_version trust_remote_code unk_token unk_token_id unsloth_fixed unsloth_version
    use_cache use_deepspeed_checkpointing use_flash_attention use_flash_attention_2
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
    "relu2": "relu2",
    "tanh": "tanh",
}


# A few bytes of a file ask for as many layers, heads or elements as they like, and each costs
# memory before any weight is looked at. Models of today stay below a tenth of these.
MOST_LAYERS = 4096
_MOST_HEADS = 1 << 16
_MOST_HEAD_DIM = 1 << 16
_SHOWN, _LONGEST = 8, 80  # unread fields in a message, and letters of a field's name
_MOST = 2**31 - 1  # ids, positions and sizes of axes are 32-bit numbers on both backends


def check_layers(name: str, count: Any) -> None:
    """Raise ModelError where a config's number of layers is more than any model has."""
    if isinstance(count, int | float) and count > MOST_LAYERS:
        raise ModelError(
            f"config.json has {name}={shown(count)}; dualinfer takes at most {MOST_LAYERS} layers."
        )


class ConfigFields:
    """One HF config's fields; remembers which were read. `family` names it in errors.

    `inside` is the field of config.json that holds these, where they are a part's.
    """

    def __init__(self, family: str, values: Mapping[str, Any], inside: str = ""):
        self.family, self._inside = family, inside
        self._values = dict(values)
        self._read: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """The field's value, `default` where it is absent or None; marks it as honoured."""
        self._read.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def of_family(self, family: str, changes: Mapping[str, Any]) -> "ConfigFields":
        """The same config as another family's, with some fields changed; what it reads is read."""
        own = ConfigFields(family, {**self._values, **changes}, self._inside)
        own._read = self._read
        return own

    def part(self, name: str, family: str, **changes: Any) -> "ConfigFields":
        """The fields of an object within the config, some of them changed."""
        values = self.take(name)
        if not isinstance(values, Mapping):
            raise ModelError(f"config.json has {name}={shown(values)}; expected an object.")
        return ConfigFields(family, {**values, **changes}, name)

    def size(self, name: str, default: int | None = None, most: int = _MOST) -> int:
        """A field that must be a positive int, of at most `most`."""
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"config.json has {name}={shown(value)}; expected a positive int.")
        if value > most:
            raise ModelError(
                f"config.json has {name}={shown(value)}; dualinfer takes at most {most}."
            )
        return value

    def layers(self, name: str) -> int:
        """The number of layers."""
        check_layers(name, self.take(name))
        return self.size(name)

    def heads(self, name: str, default: int | None = None) -> int:
        """A number of heads."""
        return self.size(name, default, _MOST_HEADS)

    def split(self, embed_name: str, heads_name: str) -> tuple[int, int, int]:
        """Embedding size, number of heads and size of a head, of heads that share the embedding."""
        embed, heads = self.size(embed_name), self.heads(heads_name)
        if embed % heads:
            raise ModelError(f"{embed_name}={embed} is no multiple of {heads_name}={heads}.")
        if embed // heads > _MOST_HEAD_DIM:
            raise ModelError(
                f"config.json has {embed_name}={embed} and {heads_name}={heads}, so that a head "
                f"has {embed // heads} elements; dualinfer takes at most {_MOST_HEAD_DIM}."
            )
        return embed, heads, embed // heads

    def grouped_heads(self, embed: int) -> tuple[int, int, int]:
        """The query heads, the KV heads that they share, and the elements of a head."""
        heads = self.heads("num_attention_heads")
        kv_heads = self.heads("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ModelError(f"num_attention_heads={heads} is no multiple of {kv_heads} KV heads.")
        return heads, kv_heads, self.size("head_dim", embed // heads, _MOST_HEAD_DIM)

    def flag(self, name: str, default: bool) -> bool:
        """A field that must be true or false."""
        value = self.take(name, default)
        if not isinstance(value, bool) and not (isinstance(value, int) and value in (0, 1)):
            raise ModelError(f"config.json has {name}={shown(value)}; expected true or false.")
        return bool(value)

    def number(self, name: str) -> float:
        """A field that must be a positive number."""
        value = self.take(name)
        if not is_positive(value):
            raise ModelError(f"config.json has {name}={shown(value)}; expected a positive number.")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A field that is a positive number, or None or absent where it is off."""
        return None if self.take(name) is None else self.number(name)

    def layer_types(self, layers: int) -> list[str]:
        """`layer_types`, checked: full_attention or sliding_attention for each layer."""
        return self.kinds("layer_types", layers, ("full_attention", "sliding_attention"))

    def kinds(self, name: str, layers: int, known: tuple[str, ...], given: Any = None) -> list[str]:
        """A list with one of a few words for each layer: the field `name`, or `given` in place."""
        kinds = self.take(name, []) if given is None else given
        fits = isinstance(kinds, list | tuple) and len(kinds) == layers
        if not fits or any(kind not in known for kind in kinds):
            is_other = fits and all(isinstance(kind, str) for kind in kinds)
            raise (UnservedError if is_other else ModelError)(
                f"config.json has {name}={shown(kinds)}; the {self.family} family honours one of "
                f"{' and '.join(known)} for each of {layers} layers."
            )
        return list(kinds)

    def windows(self, kinds: Sequence[str]) -> list[int | None]:
        """The window of each layer, by its `layer_types`; None where it sees all of the past."""
        window = self.take("sliding_window")
        if "sliding_attention" not in kinds:
            return [None] * len(kinds)
        if window is None:
            raise ModelError(
                "config.json has layer_types with sliding_attention and sliding_window=None (or "
                "use_sliding_window=False), so that how far those layers see is not said."
            )
        size = self.size("sliding_window")
        return [size if kind == "sliding_attention" else None for kind in kinds]

    def require(self, name: str, *allowed: Any) -> None:
        """Refuse the field unless it is absent, None or one of `allowed`."""
        value = self.take(name)
        if value is not None and value not in allowed:
            honoured = " or ".join(repr(a) for a in allowed if a is not None) or "nothing"
            raise UnservedError(
                f"config.json has {name}={shown(value)}, which the {self.family} family does not "
                f"honour ({honoured} only); ignoring it would give wrong results."
            )

    def within(self, parameters: Mapping[str, Any], **defaults: Any) -> None:
        """Refuse fields that say other than `parameters`, where HF reads them; mark the rest.

        transformers 4 wrote them twice. Some of HF's classes keep their default of a field beside
        what is given, and do not read it.
        """
        for name, default in defaults.items():
            self.require(name, parameters.get(name), default)

    def activation(self, name: str) -> Activation:
        """An activation field, as our name of it."""
        value = self.take(name)
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise (UnservedError if isinstance(value, str) else ModelError)(
                f"config.json has {name}={shown(value)}, which the {self.family} family does not "
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
        if "is_encoder_decoder" not in self._read:
            self.require("is_encoder_decoder", False)
        self.require("rope_interleaved", False)
        self.require("use_mrope", False)
        self.require("output_attentions", False)
        self.require("tie_last_hidden_states", True)
        self.require("is_causal", True)
        unread = {
            name: value
            for name, value in self._values.items()
            if name not in self._read | INERT | GENERATION
            and not name.startswith("transformers.js")
            and value not in (None, False, [], {}, "")
        }
        if unread:
            some = sorted(unread.items())[:_SHOWN]
            fields = ", ".join(f"{name[:_LONGEST]}={shown(value)}" for name, value in some)
            fields += f" and {len(unread) - _SHOWN} more" if len(unread) > _SHOWN else ""
            raise UnservedError(
                f"config.json has {fields}, which the {self.family} family does not honour; "
                f"ignoring it could give wrong results. {self._way_without(list(unread))}"
            )

    def _way_without(self, names: list[str]) -> str:
        """The way on where nobody read some fields: by transformers' code, which may read them."""
        known = read_by_transformers(self.family, names)
        if known:
            return (
                f"transformers' code of this family knows {known[0][:_LONGEST]}: without it "
                "config.json would describe another model."
            )
        way = ""
        if not self._inside:
            nothing = ", ".join(f'"{name[:_LONGEST]}": None' for name in names[:_SHOWN])
            way = f", or pass args={{{nothing}}} to init_inference" if len(names) <= _SHOWN else ""
        place = f"{self._inside} in config.json" if self._inside else "config.json"
        return (
            "transformers' code of this family reads it nowhere: if the weights were not made by "
            f"other code that does, remove it from {place}{way}."
        )


_SHARED = (
    "masking_utils modeling_rope_utils cache_utils modeling_layers configuration_utils".split()
)


def read_by_transformers(model_type: str, names: Sequence[str]) -> list[str]:
    """The names that stand in transformers' code of a family, or in what all share.

    All of them where it has no such family.
    """
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return list(names)
    own = Path(inspect.getfile(CONFIG_MAPPING[model_type])).parent
    files = [*own.glob("modeling_*.py"), *own.glob("configuration_*.py")]
    files += [own.parent.parent / f"{name}.py" for name in _SHARED]
    words = {word for f in files for word in re.findall(r"\w+", f.read_text("utf-8"))}
    return [name for name in names if name.rpartition(".")[2] in words]


def query_growth(fields: ConfigFields) -> tuple[float, float, int] | None:
    """Read the newest Mistrals' scaling of queries from the rotary embedding's parameters."""
    parameters = fields.take("rope_parameters")
    if not isinstance(parameters, Mapping):
        return None
    names = "llama_4_scaling_beta", "original_max_position_embeddings"
    beta, period = (parameters.get(name, 0) for name in names)
    if not is_positive(beta) or not is_positive(period):
        raise ModelError(
            f"config.json has rope_parameters={shown(dict(parameters))}; {fields.family} needs a "
            f"positive {' and '.join(names)}."
        )
    return float(beta), float(period), 0


def is_positive(value: Any) -> bool:
    """True for a finite number above 0 that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return 0 < float(value) < math.inf
    except OverflowError:
        return False

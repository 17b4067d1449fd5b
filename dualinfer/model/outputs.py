"""The results of forward: transformers' ModelOutput with the fields of dualinfer's models."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

# In HF's order.
FIELDS = (
    *("loss", "logits", "start_logits", "end_logits", "logits_per_image", "logits_per_text"),
    *("text_embeds", "image_embeds", "text_model_output", "vision_model_output"),
    *("last_hidden_state", "pooler_output", "hidden_states"),
    *("decoder_hidden_states", "encoder_last_hidden_state", "encoder_hidden_states"),
)


_CLASSES = {
    "Outputs": (*FIELDS, "attentions", "past_key_values"),
    "GenerateOutputs": (
        *("sequences", "scores", "logits", "logprobs", "top_logprobs", "top_ids"),
        *("attentions", "hidden_states", "past_key_values"),
    ),
}


_seers: list[Callable[[Any], None]] = []


def on_outputs_type(see: Callable[[Any], None]) -> None:
    """Have `see` called with each class of outputs, before the first of its objects is made."""
    _seers.append(see)
    for kind in _made.values():
        see(kind)


_made: dict[str, Any] = {}
_making = threading.RLock()


def _outputs_type(name: str) -> Any:
    """A class of _CLASSES, made on first use: it takes the import of transformers."""
    with _making:
        if name not in _made:
            kind = _make_type(name)
            for see in _seers:
                see(kind)
            _made[name] = kind
        return _made[name]


def _make_type(name: str) -> Any:
    from dataclasses import make_dataclass

    from transformers.utils.generic import ModelOutput

    # transformers 5.24 calls the cache so, and warns of each object with the older name.
    cache = "cache" if hasattr(ModelOutput, "past_key_values") else "past_key_values"
    names = [cache if field == "past_key_values" else field for field in _CLASSES[name]]
    fields = [(field, Any, None) for field in names]
    namespace = {"__repr__": _describe, "__module__": __name__, "__post_init__": _keep}
    return make_dataclass(name, fields, bases=(ModelOutput,), namespace=namespace, repr=False)


def __getattr__(name: str) -> Any:
    """`Outputs` and `GenerateOutputs`, the classes, for pickle and for isinstance."""
    if name in _CLASSES:
        return _outputs_type(name)
    raise AttributeError(name)


def make_outputs(fields: Mapping[str, Any]) -> Any:
    """A ModelOutput: by attribute, key or position; HF's other fields are None.

    As in HF it is a dict, so that iterating gives names; `to_tuple()` gives the values.
    """
    return _outputs_type("Outputs")(**fields)


def make_generate_outputs(fields: Mapping[str, Any]) -> Any:
    """The result of generate for return_dict_in_generate: as HF's GenerateDecoderOnlyOutput."""
    return _outputs_type("GenerateOutputs")(**fields)


def _keep(outputs: Any) -> None:
    """Leave the fields as they were given.

    HF's own looks for pairs in a first field that stands alone, which takes a JAX array apart.
    """


def _describe(outputs: Any) -> str:
    """Names and shapes, not contents."""
    parts = (f"{n}={getattr(v, 'shape', f'{len(v)} arrays')}" for n, v in outputs.items())
    return f"{type(outputs).__name__}({', '.join(parts)})"

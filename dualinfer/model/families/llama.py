"""The Llama kind: Llama 1 to 3, Mistral, Qwen2, Qwen3. HF sources: models/llama and so on."""

from typing import Any

from ...errors import ModelError, shown
from ..spec import ModelSpec
from . import sights
from .decoders import Decoder, Kind, serve


class Llama(Decoder):
    """HF's Llama, whose cache would forget by windows what its layers attend to."""

    def check(self, spec: ModelSpec) -> None:
        """Refuse windows."""
        window, kinds = self.fields.take("sliding_window"), self.fields.take("layer_types") or []
        reach = self.positions
        short = window is not None and not (isinstance(window, int) and window >= reach)
        full = isinstance(kinds, list | tuple) and all(kind == "full_attention" for kind in kinds)
        if short or not full:
            what = f"sliding_window={shown(window)}" if short else f"layer_types={shown(kinds)}"
            raise ModelError(
                f"config.json has {what}: HF's Llama does not attend in windows, but its cache "
                "forgets by them, so that its text is not that of its logits. Remove the field, or "
                "use the mistral family for a model with windows."
            )


_ALL: dict[str, Any] = {
    "always": {"activation": "swiglu"},  # Falcon 3's word for silu and gates
    # HF's Qwen alone reads them, and folds both into layer_types.
    "ignored": ("use_sliding_window", "max_window_layers"),
}
_UNBIASED: dict[str, Any] = {"qkv_bias": False, "out_bias": False}
KINDS = {
    "llama": Kind("Llama", mlp_bias="mlp_bias", build=Llama, **_ALL),
    "mistral": Kind("Mistral", sees=sights.one_window, **_UNBIASED, **_ALL),
    "qwen2": Kind("Qwen2", qkv_bias=True, out_bias=False, sees=sights.windows_by_kind, **_ALL),
    "qwen3": Kind("Qwen3", qk_norm=True, sees=sights.windows_by_kind, **_ALL),
}
CLASSES, describe = serve(KINDS)

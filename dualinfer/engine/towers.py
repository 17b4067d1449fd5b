"""The calls of a fused engine with two towers: the vectors of texts alone, or of images."""

from collections.abc import Mapping
from typing import Any

from ..arrays import kind_of, to_kind
from ..errors import ArgumentError, UnsupportedError
from ..model.outputs import FIELDS, make_outputs
from ..model.spec import ModelSpec
from .base import InferenceEngine
from .images import make_image_tower_inputs, make_text_tower_inputs
from .inputs import Wanted


def as_fields(results: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """The results of a runner's forward, in HF's order, as arrays of the framework `kind`."""

    def converted(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(to_kind(one, kind) for one in value)
        if isinstance(value, Mapping):
            return make_outputs(as_fields(value, kind))
        return to_kind(value, kind)

    # A jitted function returns its dict sorted.
    return {name: converted(results[name]) for name in FIELDS if name in results}


class TowerCalls(InferenceEngine):
    """CLIP's and SigLIP's own calls, by HF's names."""

    _spec: ModelSpec

    def _check_model(self, alone: bool) -> None:
        raise NotImplementedError

    def get_text_features(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        *,
        output_hidden_states: bool = False,
    ) -> Any:
        """HF's outputs of the tower of texts: `pooler_output` [B, W] are their vectors.

        They are what the projection gives, of any length, as in HF: those that forward compares are
        of length 1. Raises UnsupportedError for a model of one tower.
        """
        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        given |= {"position_ids": position_ids}
        return self._features("get_text_features", given, output_hidden_states)

    def get_image_features(
        self,
        pixel_values: Any,
        *,
        pixel_attention_mask: Any = None,
        spatial_shapes: Any = None,
        interpolate_pos_encoding: bool = False,
        output_hidden_states: bool = False,
    ) -> Any:
        """HF's outputs of the tower of images: `pooler_output` [B, W] are their vectors.

        As in `get_text_features`. With `interpolate_pos_encoding` images may have any size.
        """
        given, how = {"pixel_values": pixel_values}, interpolate_pos_encoding
        more = {"pixel_attention_mask": pixel_attention_mask, "spatial_shapes": spatial_shapes}
        asked = [name for name, value in more.items() if value is not None]
        if asked and not self._spec.reads_patches:
            raise ArgumentError(
                f"{asked[0]}: {self._spec.architecture} reads whole images. Leave it out."
            )
        given |= more if self._spec.reads_patches else {}
        return self._features("get_image_features", given, output_hidden_states, how)

    def _features(
        self, name: str, given: dict[str, Any], keep: bool, interpolate: Any = False
    ) -> Any:
        spec = self._spec
        if not spec.towers:
            raise UnsupportedError(
                f"{name}() is for models of texts and images, such as CLIPModel. "
                f"{spec.architecture} is not one: call the engine itself."
            )
        wanted = Wanted(keep)
        with self._call(f"{name}()", given) as call:
            self._check_model(alone=False)
            if "input_ids" in given:
                inputs = make_text_tower_inputs(spec, call.inputs, wanted)
            else:
                inputs = make_image_tower_inputs(spec, call.inputs, wanted, interpolate)
            call.meet(lambda: inputs)
            results = self._profiler.run(self.runner.forward, inputs)
            self._check_model(alone=True)
        kind = kind_of(next(iter(given.values()))) or "list"
        return make_outputs(as_fields(results, kind))

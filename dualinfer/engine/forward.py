"""Forward passes of a fused engine over whole sequences: HF's arguments, and its outputs."""

from collections.abc import Mapping
from typing import Any

from ..arrays import kind_of
from ..backends.base import ForwardInputs
from ..errors import ArgumentError
from ..model.outputs import make_outputs
from ..model.spec import ModelSpec
from .base import InferenceEngine
from .images import refuse_images
from .inputs import Wanted, refuse_arguments
from .labels import refuse_routers
from .pairs import refuse_names
from .pure import make_pure_inputs
from .readers import Asked, Reader, read_by
from .source import NAMES, encoder_states
from .towers import as_fields


class ForwardCalls(InferenceEngine):
    """The forward of an engine with a spec: `_read` makes a pass of what the model reads."""

    _spec: ModelSpec
    _read: Reader

    def _check_model(self, alone: bool) -> None:
        raise NotImplementedError

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        *,
        position_ids: Any = None,
        token_type_ids: Any = None,
        inputs_embeds: Any = None,
        decoder_input_ids: Any = None,
        decoder_attention_mask: Any = None,
        input_features: Any = None,
        encoder_outputs: Any = None,
        input_values: Any = None,
        pixel_values: Any = None,
        pixel_attention_mask: Any = None,
        spatial_shapes: Any = None,
        bbox: Any = None,
        interpolate_pos_encoding: bool | None = False,
        labels: Any = None,
        start_positions: Any = None,
        end_positions: Any = None,
        num_items_in_batch: Any = None,
        logits_to_keep: Any = 0,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        return_tuple: bool | None = None,
        use_cache: bool | None = None,
        **unsupported: Any,
    ) -> Any:
        """HF's forward over whole sequences: logits, or last_hidden_state and pooler_output.

        Examples:
            >>> engine([[2, 3, 4]]).logits  # [B, T, V]
            >>> engine([[2, 3, 4]], output_hidden_states=True).hidden_states  # [B, T, E] each

        `input_ids` [B, T] ints; `attention_mask` [B, T] of 0 and 1; `position_ids` [T] or [B, T],
        counted from zero when absent; `token_type_ids` [B, T]. Arrays of torch, NumPy, JAX or lists
        come back in the same framework, in the engine's dtype, on its device. As in HF,
        `position_ids` that start anew separate packed sequences only without a mask and without a
        cache: with `use_cache=False` here or in the model's config. `inputs_embeds` [B, T, W] come
        in the place of `input_ids`. `labels` [B, T] give the `loss`, float32 [], as HF computes it:
        a causal model's are shifted, -100 counts nowhere, and `num_items_in_batch` divides the sum.
        Floats [B, labels] of a head for sequences are a regression's, or a yes or no for each
        label. `start_positions` and `end_positions` [B] give that of answers. `logits_to_keep` is a
        number of tokens at the end, or an array of places: the logits of no others are computed,
        and labels are theirs. Of an encoder-decoder these ids, mask and embeddings are the
        encoder's, and `decoder_input_ids` [B, T] the decoder's, without which they are made of
        labels, which are not shifted then. Whisper's encoder reads `input_features` [B, mel,
        frames], Speech2Text's [B, frames, mel], Moonshine's `input_values` [B, samples], LayoutLM
        `bbox` [B, T, 4], an encoder of images `pixel_values` [B, C, H, W], of any size with
        `interpolate_pos_encoding`; SigLIP 2's reads patches, `pixel_values` [B, T, W], with
        `pixel_attention_mask` [B, T] and `spatial_shapes` [B, 2]. A model of texts and images
        reads both, and gives `logits_per_text` and `logits_per_image`, as HF's CLIPModel.
        `encoder_outputs` are what an encoder gave before, in the place of what it reads: its last
        hidden state [B, S, E], a tuple that begins with it, HF's BaseModelOutput or what `forward`
        gave; `attention_mask` [B, S] then tells its padding. Returns HF's ModelOutput; with
        `return_dict=False` a plain tuple; with `return_tuple=False` the first array alone. Raises
        ArgumentError and LengthError before anything runs.
        """
        given = {
            **{"input_ids": input_ids, "attention_mask": attention_mask},
            **{"position_ids": position_ids, "token_type_ids": token_type_ids},
            **{"inputs_embeds": inputs_embeds, "labels": labels},
            **{"start_positions": start_positions, "end_positions": end_positions},
            "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": decoder_attention_mask,
            "input_features": input_features,
            "encoder_outputs": encoder_states(encoder_outputs),
            **{"input_values": input_values, "pixel_values": pixel_values},
            **{"pixel_attention_mask": pixel_attention_mask, "spatial_shapes": spatial_shapes},
            "bbox": bbox,
        }
        arguments, others = read_by(self._spec, given)
        with self._call("forward()", arguments) as call:
            self._check_model(alone=False)
            refuse_names(self._spec, given)
            refuse_images(self._spec, pixel_values, interpolate_pos_encoding)
            refuse_arguments("forward", unsupported | others)
            if use_cache:
                raise ArgumentError(
                    "forward does not support use_cache=True: it returns no past_key_values. "
                    "The cache belongs to generate()."
                )
            if labels is not None:
                refuse_routers(self._config)
            keep = output_hidden_states
            keep = self._said("output_hidden_states", False) if keep is None else keep
            keep = bool(keep) if output_hidden_states is None else keep
            wanted = Wanted(keep, logits_to_keep, loss_count=num_items_in_batch)
            wanted = wanted._replace(problem=self._said("problem_type", None))
            packs = not (self._said("use_cache", True) if use_cache is None else use_cache)
            pad = self._said("pad_token_id", None)
            asked = Asked(wanted, packs, interpolate_pos_encoding, pad)
            inputs = self._read(self._spec, dict(call.inputs), asked)
            call.meet(lambda: inputs)
            results = self._profiler.run(self.runner.forward, inputs)
            self._check_model(alone=True)
        fields = self._fields(results, call.inputs, encoder_outputs)
        if self.inference_config.return_tuple if return_tuple is None else return_tuple:
            as_dict = self._said("return_dict", True) if return_dict is None else return_dict
            return make_outputs(fields) if as_dict is not False else tuple(fields.values())
        return next(iter(fields.values()))

    def _said(self, name: str, default: Any) -> Any:
        return getattr(self._config, name, default)

    def _fields(self, results: Any, given: Mapping[str, Any], encoder_outputs: Any) -> Any:
        """A pass's results in HF's order, as arrays of the framework of what was given."""
        names = "input_ids", "inputs_embeds", "pixel_values", *NAMES[2:]
        read = (given[name] for name in names if given.get(name) is not None)
        fields = as_fields(results, kind_of(next(read, None)) or "list")
        if self._spec.block is not None and "hidden_states" in fields:
            fields["hidden_states"] = self._spec.block.shown(fields["hidden_states"])
        if isinstance(encoder_outputs, Mapping):  # as in HF they come back
            names = "encoder_hidden_states", "hidden_states"
            kept = (encoder_outputs[name] for name in names if encoder_outputs.get(name))
            if (states := next(kept, None)) is not None:
                fields["encoder_hidden_states"] = tuple(states)
        return fields

    def _pure_inputs(self, given: Mapping[str, Any], xp: Any) -> ForwardInputs:
        """Inputs of a pass by HF's names, which may be traced arrays of the module `xp`."""
        pad = getattr(self._config, "pad_token_id", None)
        return make_pure_inputs(self._spec, given, xp, pad=pad)

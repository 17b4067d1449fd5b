"""config.json of Nomic BERT as its maker's own code writes it, in the words of transformers."""

from collections.abc import Mapping
from typing import Any

from ...errors import ModelError, UnsupportedError, shown

_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
}
_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu"}
_CLASSES = {"NomicBertForPreTraining": "NomicBertForMaskedLM"}
# The values that transformers' class has; others have no meaning there.
_FIXED = {
    **dict.fromkeys(("prenorm", "parallel_block", "parallel_block_tied_norm", "causal"), False),
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "use_rms_norm"), False),
    **dict.fromkeys(("rotary_emb_interleaved", "scale_attn_by_inverse_layer_idx"), False),
    **{"scale_attn_weights": True, "rotary_emb_scale_base": None, "rotary_scaling_factor": None},
}
# Dropout, and which code runs or was trained.
_INERT = frozenset(
    """attn_pdrop embd_pdrop resid_pdrop dense_seq_output fused_bias_fc fused_dropout_add_ln
    use_flash_attn use_xentropy reorder_and_upcast_attn max_trained_positions last_layer_subset
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    pad_vocab_size_multiple activation_function rotary_emb_base rotary_emb_fraction""".split()
)


def is_makers(written: Mapping[str, Any]) -> bool:
    """True for a config of the maker's own code."""
    return written.get("model_type") == "nomic_bert" and "n_embd" in written


def to_transformers(written: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of such a config as transformers names them; those that it has not stay.

    Raises UnsupportedError for a setting that transformers' class has no field for.
    """
    for name, value in _FIXED.items():
        given = written.get(name)
        if given is not None and given != value:
            more = " It changes texts of more than max_trained_positions tokens alone."
            raise UnsupportedError(
                f"config.json has {name}={shown(given)}, which transformers' Nomic BERT has not; "
                "ignoring it would give wrong results. Remove it if it changes nothing for your "
                f"inputs.{more if name == 'rotary_scaling_factor' else ''}"
            )
    activation = written.get("activation_function", "swiglu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise UnsupportedError(
            f"config.json has activation_function={shown(activation)}; of Nomic BERT "
            f"{' and '.join(_ACTIVATIONS)} are served."
        )
    fields = {
        _NAMES.get(name, name): value
        for name, value in written.items()
        if name not in _FIXED and name not in _INERT
    }
    vocab, multiple = written.get("vocab_size"), written.get("pad_vocab_size_multiple") or 1
    if type(vocab) is not int or type(multiple) is not int or multiple < 1:
        raise ModelError(
            f"config.json has vocab_size={shown(vocab)} and pad_vocab_size_multiple="
            f"{shown(multiple)}; expected positive ints."
        )
    fields["vocab_size"] = -(-vocab // multiple) * multiple
    fields["hidden_act"] = _ACTIVATIONS[activation]
    fields["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": written.get("rotary_emb_base", 10000.0),
        "partial_rotary_factor": written.get("rotary_emb_fraction", 1.0),
    }
    names = fields.get("architectures")
    if isinstance(names, list):
        known = [_CLASSES.get(name, name) if isinstance(name, str) else name for name in names]
        fields["architectures"] = known
    return fields

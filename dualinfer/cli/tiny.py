"""A HF config made small: odd sizes, few layers, and whatever makes its family what it is."""

from collections.abc import Mapping
from typing import Any

from ..model.families.kinds import KINDS
from ..model.families.multimodal import TEXTS, WRAPPERS

VOCAB = 131
POSITIONS = 256
_HEADS, _KV_HEADS, _HEAD_DIM = 6, 3, 40  # a head of which common shares turn even numbers
_HEADS_OF = {"codegen": 8}  # whose fused projection has four parts
_STATE, _RANK = 16, 12
_TURNS = {"period": 2, "offset": 1}
_WINDOW, _ORIGINAL, _PATCH = 5, 64, 6
_FFN = (
    *("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff"),
    "intermediate_size_mlp",
    *("encoder_ffn_dim", "decoder_ffn_dim"),
)
_OTHERS = {
    **dict.fromkeys(_FFN, 200),
    **dict.fromkeys(("sliding_window", "window_size", "attention_chunk_size"), _WINDOW),
    **{"rotary_dim": _HEAD_DIM // 2, "original_max_position_embeddings": _ORIGINAL},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
    **{"begin_suppress_tokens": [7], "decoder_vocab_size": VOCAB, "d_kv": _HEAD_DIM},
    **{"src_vocab_size": VOCAB + 6, "input_feat_per_channel": 9, "conv_channels": 52},
    **{f"encoder_num_{x}": _HEADS for x in ("attention_heads", "key_value_heads")},
    **{"decoder_num_key_value_heads": _HEADS, "encoder_num_hidden_layers": 2},
    **{"max_source_positions": 24, "max_target_positions": POSITIONS, "num_mel_bins": 9},
    **{"max_encoder_position_embeddings": POSITIONS, "max_decoder_position_embeddings": POSITIONS},
    **{"attention_window": 2 * _WINDOW, "local_radius": _WINDOW},
    **{"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    **{"vocab_size_per_layer_input": VOCAB, "intra_bottleneck_size": 120},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 20},
    **{"linear_value_head_dim": 28, "linear_num_heads": 3, "linear_head_dim": 20},
    "true_hidden_size": 120,
}
# Of mixtures; counts without a default are there as None.
_EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 6),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 3),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 72),
    **{"share_expert_dim": 72, "gated_norm_rank": 12},
    **{"expert_ffn_hidden_size": 72, "zero_expert_num": 4},
    **{"moe_num_experts": 6, "n_shared_experts": 1, "shared_intermediate_size": 72},
}
_WITHIN = {
    "attn_config": {"kv_n_heads": _KV_HEADS},
    "ffn_config": {"ffn_hidden_size": 72, "moe_num_experts": 6, "moe_top_k": 3},
}
_GROUPS = {"n_group": 3, "topk_group": 2}  # where there are several
_FIRST = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
_SIDES = ("encoder", "decoder")
_KV = ("num_key_value_heads", "num_kv_heads")
_PART = "partial_rotary_factor"
_LATENT = {"qk_rope_head_dim": 20, "qk_nope_head_dim": 28, "qk_head_dim": 48, "v_head_dim": 36}
_LATENT |= {"kv_lora_rank": 44, "q_lora_rank": 52, "head_dim": 20}


def has_towers(config: Any) -> bool:
    """True of a model that compares texts with images, which has no part that stands for all."""
    return config.model_type in ("clip", "metaclip_2", "siglip", "siglip2")


def text_config(config: Any) -> Any:
    """The part of a HF config that describes a language model, or the whole of two encoders."""
    both = getattr(config, "is_encoder_decoder", False) or has_towers(config)
    if both:
        return config
    own = config.get_text_config(decoder=True)
    wrapper = WRAPPERS.get(config.model_type)
    for name in wrapper.not_alone if wrapper else ():
        setattr(own, name, None)
    return own


def tiny_config(config: Any) -> Any:
    """A HF config of the same class and facts, whose model has some hundred thousand weights.

    Lists with an entry for each layer are cut to the first layer of each kind. Sizes that are
    there stay there, so that what a config leaves out its class still works out.
    """
    if has_towers(config):
        towers = {
            name: tiny_config(getattr(config, name)).to_dict()
            for name in ("text_config", "vision_config")
        }
        if not config.model_type.startswith("siglip"):
            towers["projection_dim"] = _HEAD_DIM
        return type(config)(**towers)
    if config.model_type in ("t5gemma", "encoder-decoder", "vision-encoder-decoder"):
        stacks = {side: tiny_config(getattr(config, side)).to_dict() for side in _SIDES}
        return type(config)(**stacks)
    values = config.to_dict()
    names = type(config).attribute_map
    heads = getattr(config, "num_attention_heads", None)
    new_heads = _HEADS_OF.get(config.model_type, _HEADS)
    hidden = new_heads * _HEAD_DIM
    sizes = {"hidden_size": hidden, "num_attention_heads": new_heads, "vocab_size": VOCAB}
    for name, size in (sizes | {"max_position_embeddings": POSITIONS}).items():
        own = names.get(name, name)
        if values.get(own) is not None:
            values[own] = size
    if "n_ctx" in values:  # GPT-2's second word for positions
        values["n_ctx"] = POSITIONS
    for name, value in _OTHERS.items():
        if values.get(name) is not None:
            values[name] = value
    for name, value in _EXPERTS.items():
        own = values.get(name)
        if name in values and own != 0:
            values[name] = [value] * len(own) if isinstance(own, list) else value
    for name, own in _WITHIN.items():
        if name in values:
            values[name] |= {k: v for k, v in own.items() if k in values[name]}
    if config.model_type == "dbrx":  # HF's class reads what its config lacks, and has to clip
        own = {"clip_qkv": 8.0} | {k: v for k, v in values["attn_config"].items() if v is not None}
        values["attn_config"] = own | {"rope_theta": values["rope_parameters"]["rope_theta"]}
    if (values.get("n_group") or 1) > 1:
        values |= _GROUPS
    if (values.get("num_expert_group") or 1) > 1:
        values |= {"num_expert_group": _GROUPS["n_group"], "topk_group": _GROUPS["topk_group"]}
    values |= {name: min(values[name], 1) for name in _FIRST if values.get(name)}
    if values.get("mlp_only_layers"):
        values["mlp_only_layers"] = [0]
    for name in _KV:
        if name in values:
            few = 1 if values[name] == 1 else _KV_HEADS
            values[name] = new_heads if values[name] in (None, heads) else few
    if values.get("decoder_attention_heads") is not None:
        values["decoder_attention_heads"] = new_heads // 2
    for name in ("out_features", "out_indices", "stage_names"):  # of a backbone, by layers
        values.pop(name, None)
    for name in ("pooler_hidden_size", "pooler_output_size", "projection_size"):
        if name in values:
            values[name] = hidden
    if "patch_size" in values and "image_size" in values:
        values |= {"patch_size": _PATCH, "image_size": 3 * _PATCH}
    if "patch_size" in values and "num_patches" in values:
        values |= {"patch_size": _PATCH, "num_patches": 9}
    if "head_dim" in values:
        values["head_dim"] = _HEAD_DIM
    if values.get("hidden_size_per_layer_input"):
        values["hidden_size_per_layer_input"] = _HEAD_DIM // 2
    for own in (values.get("per_layer_config") or {}).values():
        own |= {k: 2 * _HEAD_DIM if k == "head_dim" else _KV_HEADS for k in own}
    if "mamba_n_heads" in values:
        values |= {"mamba_n_heads": new_heads, "mamba_d_head": 2 * _HEAD_DIM, "mamba_expand": 2}
        values |= {"mamba_n_groups": min(values["mamba_n_groups"], 2), "mamba_d_state": _STATE}
    if values.get("mamba_d_ssm") is not None:
        values["mamba_d_ssm"] = 2 * hidden
    if "mamba_num_heads" in values:
        values |= {"mamba_num_heads": new_heads, "ssm_state_size": _STATE, "n_groups": 2}
    if config.model_type == "mamba2":
        values |= {"num_heads": 2 * new_heads, "state_size": _STATE, "expand": 2, "n_groups": 2}
    if config.model_type in ("mamba", "falcon_mamba"):
        values |= {"state_size": _STATE, "time_step_rank": _RANK}
    if config.model_type == "jamba":
        values |= {"mamba_d_state": _STATE, "mamba_dt_rank": _RANK}
        values |= {f"{x}_layer_{y}": n for x in ("attn", "expert") for y, n in _TURNS.items()}
    if config.model_type in KINDS:  # what says it again
        values = {k: v for k, v in values.items() if k not in KINDS[config.model_type].twins}
    if values.get("kv_lora_rank") is not None:  # what turns has a width of its own
        values |= {k: v for k, v in _LATENT.items() if values.get(k) is not None}
        if config.model_type == "mistral4":  # whose head_dim is that of whole heads
            values["head_dim"] = _LATENT["qk_head_dim"]
    elif values.get("v_head_dim") is not None:
        values["v_head_dim"] = _LATENT["v_head_dim"]
    width = values.get("word_embed_proj_dim")
    if width is not None:
        values["word_embed_proj_dim"] = hidden if width == config.hidden_size else hidden // 2
    if isinstance(values.get("rope_parameters"), Mapping):
        turning = values.get("qk_rope_head_dim") or _HEAD_DIM
        rope = values["rope_parameters"]
        if config.model_type in TEXTS:  # whose sections HF makes for heads of 128, unless told
            rope = {"mrope_section": [1, 1, 1], **rope}
        values["rope_parameters"] = _tiny_rope(rope, turning)
        if (
            values.get("qk_rope_head_dim")
            and (tiny := values["rope_parameters"]).get(_PART, 1) != 1
        ):
            tiny[_PART] = _LATENT["qk_rope_head_dim"] / _LATENT["qk_head_dim"]
    _cut_layers(values, names.get("num_hidden_layers", "num_hidden_layers"))
    if config.model_type == "longcat_flash":  # whose num_hidden_layers counts attentions
        values["num_layers"] = 2
    for name in ("decoder_layers", "num_decoder_layers"):
        if values.get(name) is not None:
            values[name] = 2
    for name in ("architectures", "torch_dtype", "dtype", "quantization_config", "model_type"):
        values.pop(name, None)
    return type(config)(**values)


def _tiny_rope(parameters: Mapping[str, Any], dim: int) -> dict[str, Any]:
    """Rope's parameters, or those of each type of layer, for short heads and few positions."""
    if all(isinstance(own, Mapping) for own in parameters.values()) and parameters:
        return {kind: _tiny_rope(own, dim) for kind, own in parameters.items()}
    tiny = dict(parameters)
    if tiny.get("original_max_position_embeddings") is not None:
        tiny["original_max_position_embeddings"] = _ORIGINAL
    pairs = int(dim * (tiny.get(_PART) or 1)) // 2
    if int(dim * (tiny.get(_PART) or 1)) % 2:  # which turned an even number of a head's elements
        tiny[_PART] = 2 * pairs / dim
    sections = tiny.get("mrope_section")
    if sections:
        few = pairs // len(sections)
        tiny["mrope_section"] = [pairs - few * (len(sections) - 1), *[few] * (len(sections) - 1)]
    for name in ("short_factor", "long_factor"):
        if tiny.get(name):
            tiny[name] = (list(tiny[name]) * pairs)[:pairs]
    return tiny


def _cut_layers(values: dict[str, Any], name: str) -> None:
    """Two layers, or one of each kind that lists by layer tell apart, in their order."""
    count = values.get(name)
    if not isinstance(count, int):
        return
    if "attention_types" in values:  # GPT-Neo's short form of its list
        kinds = [kind for names, _ in values["attention_types"] for kind in names]
        kinds = list(dict.fromkeys(kinds))
        values["attention_types"] = [[kinds, 1]]
        values.pop("attention_layers", None)
        values[name] = len(kinds)
        return
    if "conv_L_cache" in values:
        values.pop("full_attn_idxs", None)  # which HF folds into the list
        if "conv" not in (values["layer_types"] or ()):  # of a config that HF's class made up
            values["layer_types"] = ["conv" if i % 2 else "full_attention" for i in range(count)]
    if "attn_layer_indices" in values:
        values["attn_layer_indices"] = [1]
    states = "mamba", "linear_attention"
    if "mamba_n_heads" in values and {*values.get("layer_types", "*")} <= {*states}:
        # HF's generate wants a layer that attends, which its default has not.
        values["layer_types"] = [states[1] if i % 2 else "full_attention" for i in range(count)]
    if values.get("mlp_layer_types", ()) is None:  # which HF's class needs (DeepSeek-OCR)
        values["mlp_layer_types"] = ["dense", *["sparse"] * (count - 1)]
    mixed = values.pop("moe_layers", None)  # numbers of layers
    lists = {k: v for k, v in values.items() if isinstance(v, list) and len(v) == count > 0}
    if isinstance(mixed, list):
        lists["moe_layers"] = [i in mixed for i in range(count)]
    shared = values.get("num_kv_shared_layers")
    if shared:
        lists["num_kv_shared_layers"] = [i >= count - shared for i in range(count)]
    if by_number := values.get("per_layer_config"):
        by_number = {int(i): own for i, own in by_number.items()}
        lists["per_layer_config"] = [by_number.get(i) for i in range(count)]
    kinds = [tuple(repr(own[i]) for own in lists.values()) for i in range(count)]
    chosen = sorted(kinds.index(kind) for kind in set(kinds)) if lists else []
    chosen += [i for i in range(count) if i not in chosen][: max(0, 2 - len(chosen))]
    for key, own in lists.items():
        values[key] = [own[i] for i in sorted(chosen)]
    if isinstance(mixed, list):
        values["moe_layers"] = [i for i, is_mixed in enumerate(values["moe_layers"]) if is_mixed]
    if shared:
        values["num_kv_shared_layers"] = sum(values["num_kv_shared_layers"])
    if by_number:
        own = enumerate(values["per_layer_config"])
        values["per_layer_config"] = {i: changes for i, changes in own if changes}
    values[name] = len(chosen)

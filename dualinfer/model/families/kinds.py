"""The differences between Llama's relatives: a row of `KINDS` for each.

HF sources: models/NAME/modeling_NAME.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Bias = bool | str  # the name of a config's field says it
_PRE = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_SHARED = {"attn_norm": "input_layernorm"}


@dataclass(frozen=True)
class Kind:
    """The facts that tell one family from another.

    `eps` is the field of the norms' epsilon; without one it is 1e-5. `weighted` norms have weights.
    `norms` are HF's names by ours; without `norm_bias` LayerNorm has a weight alone. `qkv` is HF's
    name of a joint projection; `mlp` are its names in `mlp_module` from gate or up to down, two of
    them where the MLP is not gated or gate and up are one, and `ffn` is the field of its width.
    `qk_names` are those of the norms of queries and keys, `{x}` a head's number, and `attn_gate` is
    that of the product that gates what heads give. Of `partial`
    families HF reads partial_rotary_factor. `always` are fields of the makers' own code with what
    HF takes for granted, a tuple of several; `twins` are such that say again what a field of HF's
    does; `ignored` ones change nothing at inference. With `sub_norms` there are norms before
    the products back of attention and MLP. Tensors of `unused` patterns change no text. `base` is
    HF's class without a head where its name is no other's with an end of its own; a kind that
    `only` others are around has no other.
    """

    name: str
    also: tuple[str, ...] = ()  # classes of the makers' own code, with the same names of weights
    norm: Literal["rms", "layer"] = "rms"
    eps: str = "rms_norm_eps"
    unit_offset: bool = False
    weighted: bool = True
    norm_bias: bool = True
    norms: Mapping[str, str] = field(default_factory=lambda: _PRE)
    final_norm: str = "norm"
    placement: Literal["pre", "around", "behind"] = "pre"
    qk_norm: Bias = False
    qk_norm_over: Literal["head", "own", "all"] = "head"
    qk_names: tuple[str, str] = ("q_norm", "k_norm")
    norm_turned: bool = False
    attn_gate: str | None = None
    qkv_bias: Bias = "attention_bias"
    out_bias: Bias = "attention_bias"
    mlp_bias: Bias = False
    head_bias: Bias = False
    qkv: str | None = None
    out: str = "o_proj"
    ffn: str = "intermediate_size"
    mlp_module: str = "mlp"
    sub_norms: bool = False
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    gated: bool = True
    parallel: Bias = False
    interleaved: bool = False
    backwards: bool = False
    partial: bool = False
    tied: bool = False
    always: Mapping[str, Any] = field(default_factory=dict)
    twins: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    base: str | None = None
    only: bool = False

    @property
    def classes(self) -> tuple[str, ...]:
        """HF's classes, with a head and without."""
        if self.only:
            return (f"{self.name}Model",)
        return f"{self.name}ForCausalLM", self.base or f"{self.name}Model", *self.also


_LAYER_NORM: dict[str, Any] = {"norm": "layer", "eps": "layer_norm_eps"}
_GLM: dict[str, Any] = {"out_bias": False, "partial": True, "mlp": ("gate_up_proj", "down_proj")}
_COHERE: dict[str, Any] = {**_LAYER_NORM, "norm_bias": False, "norms": _SHARED, "parallel": True}
_COHERE2 = (  # of the makers' own code; HF folds the pattern into layer_types
    *("cache_implementation", "order_of_interleaved_layers", "position_embedding_type"),
    "layer_switch",
    *("rotary_pct", "sliding_window_pattern", "_sliding_window_pattern"),
    *("use_embedding_sharing", "use_gated_activation", "use_parallel_block"),
    "use_parallel_embedding",
)
_PER_HEAD: dict[str, Any] = {
    "qk_norm": "qk_layernorm",
    "qk_names": ("q_layernorm", "k_layernorm"),
}
_AROUND = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}
_PERI = {**_PRE, "attn_post_norm": "post_norm1", "mlp_post_norm": "post_norm2"}
_BEHIND = {"attn_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
_OLMO2: dict[str, Any] = {"placement": "behind", "norms": _BEHIND, "qk_norm": True}
_OLMO2 |= {"qk_norm_over": "all"}
ORIGINAL = "original_max_position_embeddings"
_LLAMA: dict[str, Any] = {"mlp_bias": "mlp_bias"}
_WINDOWED = ("use_sliding_window", "max_window_layers")  # HF folds them into windows of layers
_HUNYUAN: dict[str, Any] = {
    "qk_norm": True,
    "qk_names": ("query_layernorm", "key_layernorm"),
    "norm_turned": True,
    # HF reads none of what follows, which is of the makers' own code and of models that see images.
    "always": {
        "use_qk_norm": True,
        "use_rotary_pos_emb": True,
        "use_cla": False,
        "norm_type": ("rms", "hf_rms"),
        **{"use_mixed_mlp_moe": True, "norm_topk_prob": True},
    },
    "twins": {"attention_head_dim": "head_dim", "moe_intermediate_size": "intermediate_size"},
    "ignored": (
        *(
            "cla_share_factor",
            "class_num",
            "dense_list",
            "eod_token_id",
            "im_end_id",
            "im_start_id",
        ),
        *("im_newline_id", "image_token_id", "mask_init_id", "org_vocab_size", "pad_id"),
        *("pool_type", "text_end_id", "text_start_id", "video_end_id", "video_start_id"),
        *("anyres_pooling_size", "anyres_vit_max_image_size", "num_media_embeds"),
        *("vit_input_resolution", "vit_mapping_type", "vit_norm_type", "vit_patch", "vit_token"),
    ),
}
_BETAS = "full_attention", "linear_attention", "mlp"
KINDS = {
    "afmoe": Kind(
        *("Afmoe",),
        **dict.fromkeys(("qkv_bias", "out_bias"), "attention_bias"),
        placement="around",
        norms={
            "attn_norm": "input_layernorm",
            "attn_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_mlp_layernorm",
            "mlp_post_norm": "post_mlp_layernorm",
        },
        qk_norm=True,
        attn_gate="gate_proj",
        # Of the makers' own code, where these ask for nothing else.
        always={
            **{"route_norm": True, "score_func": "sigmoid"},
            **dict.fromkeys(("n_group", "topk_group"), 1),
            **dict.fromkeys(("num_expert_groups", "num_limited_groups"), 1),
        },
        # HF folds the first into layer_types.
        ignored=("global_attn_every_n_layers", "load_balance_coeff", "use_grouped_mm"),
    ),
    "apertus": Kind(
        *("Apertus",),
        norms={"attn_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"},
        qk_norm=True,
        mlp=("up_proj", "down_proj"),
        gated=False,
        always={"qk_norm": True, "post_norm": False, "mlp_bias": False},
        ignored=("hidden_dropout",),
    ),
    "arcee": Kind("Arcee", mlp=("up_proj", "down_proj"), gated=False, mlp_bias="mlp_bias"),
    "aria_text": Kind(  # of experts
        "AriaText", always={"hidden_act": "silu", "mlp_bias": False}
    ),
    "bitnet": Kind("BitNet", sub_norms=True),
    "cohere": Kind(
        *("Cohere",),
        **_COHERE,
        interleaved=True,
        tied=True,
        qk_norm="use_qk_norm",
        qk_norm_over="own",
    ),
    "cohere2": Kind("Cohere2", **_COHERE, interleaved=True, tied=True, ignored=_COHERE2),
    "cohere2_moe": Kind(
        *("Cohere2Moe",),
        **_COHERE,
        interleaved=True,
        tied=True,
        always={"rope_scaling": ()},  # HF does not read it
        ignored=_COHERE2,
    ),
    "cohere_compass_text": Kind(
        *("CohereCompass",),
        **_COHERE,
        base="CohereCompassTextModel",
        tied=True,
        always={"pooling": "eos"},  # of a head for labels
        ignored=_COHERE2,
    ),
    "cwm": Kind("Cwm", qkv_bias=False, out_bias=False),
    "deepseek_ocr2_text": Kind("DeepseekOcr2Text", always={"mlp_bias": False}, only=True),
    "diffllama": Kind("DiffLlama", ignored=("lambda_std_dev",)),  # of training's start
    "dots1": Kind("Dots1", qk_norm=True, ignored=_WINDOWED),
    "ernie4_5": Kind(
        *("Ernie4_5",),
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), "use_bias"),
        interleaved=True,
        tied=True,
    ),
    "ernie4_5_moe": Kind(
        *("Ernie4_5_Moe",),
        **dict.fromkeys(("qkv_bias", "out_bias"), False),
        interleaved=True,
        tied=True,
        always={
            **{"use_bias": False, "moe_gate": "topk", "moe_gate_act": "softmax"},
            "moe_use_aux_free": True,
        },
        ignored=("moe_capacity",),  # of training, where experts are full
    ),
    "exaone4": Kind(
        *("Exaone4",),
        **dict.fromkeys(("qkv_bias", "out_bias"), False),
        placement="behind",
        norms=_BEHIND,
        qk_norm=True,
        ignored=("sliding_window_pattern",),  # HF folds it into layer_types
    ),
    "exaone_moe": Kind(
        *("ExaoneMoe",),
        **dict.fromkeys(("qkv_bias", "out_bias"), False),
        qk_norm=True,
        # HF folds them into lists of layers; layers that predict a second token answer nothing.
        ignored=(
            *("sliding_window_pattern", "first_k_dense_replace", "is_moe_layer"),
            *("num_nextn_predict_layers", "num_mtp_layers"),
        ),
    ),
    "flint": Kind("Flint", qk_norm=True),
    "flex_olmo": Kind("FlexOlmo", **_OLMO2),
    "gemma": Kind("Gemma", unit_offset=True, tied=True, ignored=("hidden_activation",)),
    "glm": Kind("Glm", **_GLM, interleaved=True),
    "glm4": Kind("Glm4", **_GLM, interleaved=True, placement="around", norms=_AROUND),
    "glm4_moe": Kind(
        *("Glm4Moe",),
        partial=True,
        out_bias=False,
        qk_norm="use_qk_norm",
        ignored=("num_nextn_predict_layers", "num_mtp_layers"),  # layers behind those that answer
    ),
    "gpt_oss": Kind(
        *("GptOss",),
        twins={"experts_per_token": "num_experts_per_tok"},
        ignored=("initial_context_length",),
    ),
    "granite": Kind("Granite", mlp_bias="mlp_bias"),
    "granite_swa": Kind("GraniteSWA", mlp_bias="mlp_bias"),
    "granitemoe": Kind("GraniteMoe"),
    "granitemoe_swa": Kind("GraniteMoeSWA"),
    "granitemoehybrid": Kind(
        *("GraniteMoeHybrid",),
        ffn="shared_intermediate_size",
        mlp_module="shared_mlp",
        mlp=("input_linear", "output_linear"),
        always={"normalization_function": "rmsnorm"},
        ignored=("init_method", "layers_block_type", "logits_to_keep"),
    ),
    "granitemoeshared": Kind("GraniteMoeShared"),
    "helium": Kind("Helium", interleaved=True, out_bias=False, mlp_bias="mlp_bias"),
    "hy_v3": Kind(
        *("HYV3",),
        qk_norm=True,
        always={"mlp_bias": False},
        # Sums of experts are in float32 in any case.
        ignored=("enable_moe_fp32_combine", "num_nextn_predict_layers", "num_mtp_layers"),
    ),
    "hunyuan_v1_dense": Kind("HunYuanDenseV1", **_HUNYUAN),
    "hunyuan_v1_moe": Kind("HunYuanMoEV1", **_HUNYUAN),
    "hyperclovax": Kind(
        "HyperCLOVAX", **_LLAMA, placement="around", norms=_PERI, ignored=("end_token_id",)
    ),
    "internlm3": Kind("Llama", ("InternLM3ForCausalLM",), **_LLAMA),
    "iquestcoder": Kind("Llama", ("IQuestCoderForCausalLM",), **_LLAMA),
    "jais2": Kind(
        *("Jais2",),
        **_LAYER_NORM,
        **_LLAMA,
        mlp=("up_proj", "down_proj"),
        gated=False,
    ),
    "kolibri1": Kind(
        *("Kolibri1",),
        **dict.fromkeys(("qkv_bias", "out_bias"), False),
        placement="around",
        norms=_AROUND,
        qk_norm=True,
        ffn="moe_intermediate_size",  # no layer is dense
        ignored=("intermediate_size",),
    ),
    "mellum": Kind(
        *("Mellum",),
        partial=True,
        qk_norm=True,
        # Of layers that predict a second token.
        ignored=(
            *("num_nextn_predict_layers", "num_mtp_layers"),
            *("mtp_layer_types", "mtp_mlp_layer_types"),
        ),
    ),
    "ministral": Kind("Ministral", qkv_bias=False, out_bias=False),
    "ministral3": Kind("Ministral3", qkv_bias=False, out_bias=False),
    "minimax_m2": Kind(
        *("MiniMaxM2",),
        **dict.fromkeys(("qkv_bias", "out_bias"), False),
        partial=True,
        qk_norm=True,
        qk_norm_over="all",
        always={
            **{"use_qk_norm": True, "qk_norm_type": "per_layer"},
            **{"scoring_func": "sigmoid", "use_routing_bias": True},
            **dict.fromkeys((f"layernorm_{x}_beta" for x in _BETAS), 1.0),
        },
        # Layers behind those that answer, and MiniMax-01's MLP.
        ignored=(
            *("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "mlp_intermediate_size"),
            "shared_moe_mode",
        ),
    ),
    "mixtral": Kind("Mixtral", qkv_bias=False, out_bias=False),
    "nanochat": Kind(
        *("NanoChat",),
        weighted=False,
        qk_norm=True,
        norm_turned=True,
        backwards=True,
        mlp=("fc1", "fc2"),
        gated=False,
    ),
    "nemotron": Kind(
        *("Nemotron",),
        partial=True,
        norm="layer",
        eps="norm_eps",
        unit_offset=True,
        mlp=("up_proj", "down_proj"),
        gated=False,
        mlp_bias="mlp_bias",
        twins={"kv_channels": "head_dim"},
    ),
    "olmo": Kind("Olmo", norm="layer", eps="", weighted=False),
    "olmo2": Kind("Olmo2", **_OLMO2),
    "olmo3": Kind("Olmo3", **_OLMO2),
    "olmoe": Kind("Olmoe", qk_norm=True, qk_norm_over="all"),
    "phi": Kind(
        *("Phi",),
        partial=True,
        **_LAYER_NORM,
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias", "head_bias", "parallel"), True),
        **_PER_HEAD,
        norms=_SHARED,
        final_norm="final_layernorm",
        out="dense",
        mlp=("fc1", "fc2"),
        gated=False,
        ignored=("embd_pdrop", "resid_pdrop"),
    ),
    "phi3": Kind(
        *("Phi3",),
        partial=True,
        **dict.fromkeys(("qkv_bias", "out_bias"), False),
        qkv="qkv_proj",
        mlp=("gate_up_proj", "down_proj"),
        # Of the makers' own code, where these ask for nothing else.
        always={"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False},
        ignored=("embd_pdrop", "resid_pdrop", ORIGINAL),
    ),
    "phi4_multimodal": Kind(
        *("Phi4Multimodal",),
        partial=True,
        **dict.fromkeys(("qkv_bias", "out_bias"), False),
        qkv="qkv_proj",
        mlp=("gate_up_proj", "down_proj"),
        # What sees and hears, which HF does not ask where a call gives input_ids alone.
        unused=(r"^(model\.)?embed_tokens_extend\.",),
        ignored=(
            *("embd_pdrop", "resid_pdrop", ORIGINAL, "vision_config", "audio_config"),
            *("embd_layer", "img_processor", "audio_processor", "vision_lora", "speech_lora"),
        ),
    ),
    "phimoe": Kind(
        *("Phimoe", ("PhiMoEForCausalLM",)),
        norm="layer",
        head_bias="lm_head_bias",
        ignored=(ORIGINAL,),  # HF's text begins anew beyond it, with the same numbers
    ),
    "qwen2_moe": Kind("Qwen2Moe", qkv_bias="qkv_bias", out_bias=False, ignored=_WINDOWED),
    "qwen3_moe": Kind("Qwen3Moe", qk_norm=True, always={"use_qk_norm": True}, ignored=_WINDOWED),
    "seed_oss": Kind(
        *("SeedOss",),
        out_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        ignored=("residual_dropout",),
    ),
    "smollm3": Kind(
        *("SmolLM3",),
        mlp_bias="mlp_bias",
        tied=True,
        # HF folds them into lists of layers.
        ignored=("use_sliding_window", "max_window_layers", "no_rope_layer_interval"),
    ),
    "solar_open": Kind(
        *("SolarOpen",),
        ffn="moe_intermediate_size",  # no layer is dense
        out_bias=False,
        always={"use_qk_norm": False},
        ignored=("intermediate_size", "num_nextn_predict_layers", "num_mtp_layers"),
    ),
    "stablelm": Kind(
        *("StableLm",),
        partial=True,
        **_LAYER_NORM,
        qkv_bias="use_qkv_bias",
        out_bias=False,
        parallel="use_parallel_residual",
        qk_norm="qk_layernorm",
        qk_norm_over="own",
        qk_names=("q_layernorm.norms.{x}", "k_layernorm.norms.{x}"),
        always={"rotary_scaling_factor": 1.0},
        twins={"num_heads": "num_attention_heads", "norm_eps": "layer_norm_eps"},
        ignored=("hidden_dropout",),
    ),
    "starcoder2": Kind(
        *("Starcoder2",),
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), "use_bias"),
        norm="layer",
        eps="norm_epsilon",
        mlp=("c_fc", "c_proj"),
        gated=False,
        tied=True,
        ignored=(  # of GPT-BigCode's config, from which it comes; HF reads none of them
            *("residual_dropout", "embedding_dropout", "activation_function", "mlp_type"),
            *("attention_softmax_in_fp32", "layer_norm_epsilon", "norm_type"),
            *("scale_attention_softmax_in_fp32", "scale_attn_weights"),
        ),
    ),
}

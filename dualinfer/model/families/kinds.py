"""The differences between Llama's relatives: a row of `KINDS` for each.

HF sources: models/NAME/modeling_NAME.py.
"""

from typing import Any

from . import relatives, sights
from .decoders import FREQUENCIES, PRE, Kind, layer_norm, rms, serve
from .rope import ORIGINAL

_SHARED = {"attn_norm": "input_layernorm"}
_LAYER_NORM: dict[str, Any] = {"norm": layer_norm("layer_norm_eps")}
_GLM: dict[str, Any] = {"out_bias": False, "partial": True, "mlp": ("gate_up_proj", "down_proj")}
_COHERE: dict[str, Any] = {**_LAYER_NORM, "norm_bias": False, "norms": _SHARED, "parallel": True}
_COHERE2 = (  # of the makers' own code; HF folds the pattern into layer_types
    *("cache_implementation", "order_of_interleaved_layers", "position_embedding_type"),
    "layer_switch",
    *("rotary_pct", "sliding_window_pattern", "_sliding_window_pattern"),
    *("use_embedding_sharing", "use_gated_activation", "use_parallel_block"),
    "use_parallel_embedding",
)
_PER_HEAD: dict[str, Any] = {"qk_norm": "qk_layernorm", "qk_names": ("q_layernorm", "k_layernorm")}
_AROUND = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}
_PERI = {**PRE, "attn_post_norm": "post_norm1", "mlp_post_norm": "post_norm2"}
_BEHIND = {"attn_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
_OLMO2: dict[str, Any] = {"placement": "behind", "norms": _BEHIND, "qk_norm": True}
_OLMO2 |= {"qk_norm_over": "all"}
_GRANITE: dict[str, Any] = {"factors": sights.granite, "scaled": "all"}
_SWA: dict[str, Any] = {**_GRANITE, "sees": sights.by_theta, "sinks": True}
_LLAMA: dict[str, Any] = {"mlp_bias": "mlp_bias"}
_WINDOWED = ("use_sliding_window", "max_window_layers")  # HF folds them into windows of layers
_HUNYUAN: dict[str, Any] = {
    "qk_norm": True,
    "qk_names": ("query_layernorm", "key_layernorm"),
    "qk_norm_over": "turned",
    # HF reads none of what follows, which is of the makers' own code and of models that see images.
    "always": {
        "use_qk_norm": True,
        "use_rotary_pos_emb": True,
        "use_cla": False,
        "norm_type": ("rms", "hf_rms"),
        **{"use_mixed_mlp_moe": True, "norm_topk_prob": True},
    },
    "build": relatives.HunYuan,
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
        gate="sigmoid",
        sees=sights.turning_in_windows,
        factors=sights.root_if_asked,
        scaled="all",
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
        build=relatives.Apertus,
    ),
    "arcee": Kind("Arcee", mlp=("up_proj", "down_proj"), gated=False, mlp_bias="mlp_bias"),
    "aria_text": Kind(  # of experts
        "AriaText", always={"hidden_act": "silu", "mlp_bias": False}
    ),
    "bitnet": Kind("BitNet", build=relatives.BitNet),
    "cohere": Kind(
        *("Cohere",),
        **_COHERE,
        interleaved=True,
        tied=True,
        qk_norm="use_qk_norm",
        qk_norm_over="own",
        factors=sights.logits,
    ),
    "cohere2": Kind(
        "Cohere2",
        **_COHERE,
        interleaved=True,
        tied=True,
        ignored=_COHERE2,
        factors=sights.logits,
        sees=sights.turning_in_windows,
    ),
    "cohere2_moe": Kind(
        *("Cohere2Moe",),
        **{**_COHERE, "norm": relatives.either_norm},
        interleaved=True,
        tied=True,
        always={"rope_scaling": ()},  # HF does not read it
        ignored=_COHERE2,
        factors=sights.logits,
        sees=sights.turning_if_dense,
        kept={"rope_theta": 1e4},
        build=relatives.CohereMoe,
    ),
    "cohere_compass_text": Kind(
        *("CohereCompass",),
        **_COHERE,
        base="CohereCompassTextModel",
        tied=True,
        always={"pooling": "eos"},  # of a head for labels
        ignored=_COHERE2,
        factors=sights.logits_if_any,
        sees=sights.by_kind_if_any,
        unturned=("mrope_section", "mrope_interleaved"),
    ),
    "cwm": Kind("Cwm", qkv_bias=False, out_bias=False, sees=sights.windows_by_kind),
    "deepseek_ocr2_text": Kind("DeepseekOcr2Text", always={"mlp_bias": False}, only=True),
    # The field is of training's start.
    "diffllama": Kind("DiffLlama", ignored=("lambda_std_dev",), build=relatives.DiffLlama),
    "dots1": Kind("Dots1", qk_norm=True, ignored=_WINDOWED, sees=sights.windows_by_kind),
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
        sees=sights.turning_unless_wide,
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
        sees=sights.turning_unless_wide,
    ),
    "flint": Kind("Flint", qk_norm=True, sees=sights.turning_in_windows, sinks=True),
    "flex_olmo": Kind("FlexOlmo", **_OLMO2),
    "gemma": Kind(
        "Gemma",
        norm=rms(unit_offset=True),
        tied=True,
        ignored=("hidden_activation",),
        factors=sights.root,
        scaled="rounded",
    ),
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
        sees=sights.windows_by_kind,
        sinks=True,
    ),
    "granite": Kind("Granite", **_GRANITE, mlp_bias="mlp_bias"),
    "granite_swa": Kind("GraniteSWA", **_SWA, mlp_bias="mlp_bias"),
    "granitemoe": Kind("GraniteMoe", **_GRANITE),
    "granitemoe_swa": Kind("GraniteMoeSWA", **_SWA),
    "granitemoehybrid": Kind(
        *("GraniteMoeHybrid",),
        **_GRANITE,
        ffn="shared_intermediate_size",
        mlp_module="shared_mlp",
        mlp=("input_linear", "output_linear"),
        always={"normalization_function": "rmsnorm"},
        ignored=("init_method", "layers_block_type", "logits_to_keep"),
        sees=sights.turning_if_asked,
        build=relatives.GraniteHybrid,
    ),
    "granitemoeshared": Kind("GraniteMoeShared", **_GRANITE),
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
        "HyperCLOVAX",
        **_LLAMA,
        placement="around",
        norms=_PERI,
        ignored=("end_token_id",),
        factors=sights.hyperclovax,
        scaled="all",
        build=relatives.HyperClovaX,
    ),
    "internlm3": Kind("Llama", ("InternLM3ForCausalLM",), **_LLAMA),
    "iquestcoder": Kind("Llama", ("IQuestCoderForCausalLM",), **_LLAMA),
    "jais2": Kind("Jais2", **_LAYER_NORM, **_LLAMA, mlp=("up_proj", "down_proj"), gated=False),
    "kolibri1": Kind(
        *("Kolibri1",),
        **dict.fromkeys(("qkv_bias", "out_bias"), False),
        placement="around",
        norms=_AROUND,
        qk_norm=True,
        ffn="moe_intermediate_size",  # no layer is dense
        ignored=("intermediate_size",),
        sees=sights.turning_unless_wide,
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
        sees=sights.by_kind,
    ),
    "ministral": Kind("Ministral", qkv_bias=False, out_bias=False, sees=sights.windows_by_kind),
    "ministral3": Kind(
        "Ministral3",
        qkv_bias=False,
        out_bias=False,
        sees=sights.one_window,
        grows=True,
        unturned=("llama_4_scaling_beta", "max_position_embeddings"),
    ),
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
        build=relatives.MiniMaxM2,
    ),
    "mixtral": Kind("Mixtral", qkv_bias=False, out_bias=False, sees=sights.one_window),
    "nanochat": Kind(
        *("NanoChat",),
        weighted=False,
        qk_norm=True,
        qk_norm_over="turned",
        mlp=("fc1", "fc2"),
        gated=False,
        softcap="final_logit_softcapping",
        build=relatives.NanoChat,
    ),
    "nemotron": Kind(
        *("Nemotron",),
        partial=True,
        norm=layer_norm("norm_eps", unit_offset=True),
        mlp=("up_proj", "down_proj"),
        gated=False,
        mlp_bias="mlp_bias",
        twins={"kv_channels": "head_dim"},
    ),
    "olmo": Kind("Olmo", norm=layer_norm(), weighted=False, clip="clip_qkv"),
    "olmo2": Kind("Olmo2", **_OLMO2),
    "olmo3": Kind("Olmo3", **_OLMO2, sees=sights.by_kind),
    "olmoe": Kind("Olmoe", qk_norm=True, qk_norm_over="all", clip="clip_qkv"),
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
        sees=sights.one_window,
        rereads=True,
    ),
    "phi4_multimodal": Kind(
        *("Phi4Multimodal",),
        partial=True,
        **dict.fromkeys(("qkv_bias", "out_bias"), False),
        qkv="qkv_proj",
        mlp=("gate_up_proj", "down_proj"),
        # What sees and hears, which HF does not ask where a call gives input_ids alone.
        unused=(FREQUENCIES, r"^(model\.)?embed_tokens_extend\."),
        ignored=(
            *("embd_pdrop", "resid_pdrop", ORIGINAL, "vision_config", "audio_config"),
            *("embd_layer", "img_processor", "audio_processor", "vision_lora", "speech_lora"),
        ),
        sees=sights.one_window,
        rereads=True,
    ),
    "phimoe": Kind(
        *("Phimoe", ("PhiMoEForCausalLM",)),
        norm=layer_norm("rms_norm_eps"),
        head_bias="lm_head_bias",
        ignored=(ORIGINAL,),  # HF's text begins anew beyond it, with the same numbers
        sees=sights.one_window,
        unturned=("short_mscale", "long_mscale"),
        build=relatives.PhiMoe,
    ),
    "qwen2_moe": Kind(
        "Qwen2Moe",
        qkv_bias="qkv_bias",
        out_bias=False,
        ignored=_WINDOWED,
        sees=sights.windows_by_kind,
    ),
    "qwen3_moe": Kind(
        "Qwen3Moe",
        qk_norm=True,
        always={"use_qk_norm": True},
        ignored=_WINDOWED,
        sees=sights.one_window,
    ),
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
        sees=sights.turning_if_listed,
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
        norm=layer_norm("norm_epsilon"),
        mlp=("c_fc", "c_proj"),
        gated=False,
        tied=True,
        ignored=(  # of GPT-BigCode's config, from which it comes; HF reads none of them
            *("residual_dropout", "embedding_dropout", "activation_function", "mlp_type"),
            *("attention_softmax_in_fp32", "layer_norm_epsilon", "norm_type"),
            *("scale_attention_softmax_in_fp32", "scale_attn_weights"),
        ),
        sees=sights.one_window,
    ),
}
CLASSES, describe = serve(KINDS)

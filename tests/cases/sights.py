"""Models that see or hear, whose text alone is read: by HF's word of the model."""

from typing import Any

from dualinfer.model.families.multimodal import WRAPPERS

from ..models import PAD, randomize
from . import latent, relatives
from .case import Case, Table
from .mixtures import PARTIAL_OF_14
from .relatives import ALPHA, DEFAULT, SIZES, TURNS

TEXT = {**SIZES, "head_dim": 14}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 2, 2]}}
HALF = {"rope_parameters": {**MROPE["rope_parameters"], "partial_rotary_factor": 0.5}}
HALF["rope_parameters"]["mrope_section"] = [2, 1, 1]
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3}
MOE = {"moe_intermediate_size": 40}
EXPERTS |= MOE
FEW = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGES = {**FEW, "image_size": 28, "patch_size": 14}
QWEN = {"depth": 1, "num_heads": 2, "hidden_size": 16, "intermediate_size": 20}
SEES = {"clip": {"model_type": "clip_vision_model", **IMAGES}}
SEES |= {"siglip": {"model_type": "siglip_vision_model", **IMAGES}}
HEARS = {**FEW, "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "num_mel_bins": 8}
HEARS |= {"encoder_ffn_dim": 20, "max_source_positions": 8, "head_dim": 8}
FLAMINGO = {"model_type": "audioflamingo3_encoder", **HEARS}
WINDOWS = {**TEXT, "sliding_window": 5, "layer_types": TURNS}
COHERE = {**WINDOWS, "logit_scale": 3.0}
GLM = {**SIZES, "hidden_size": 96}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 10}
DELTA |= {"linear_value_head_dim": 14, "layer_types": ["linear_attention", "full_attention"]}
XDROPE = {"rope_parameters": {**ALPHA, "mrope_section": [2, 2, 2, 1]}}
PIXTRAL = {"model_type": "pixtral", **IMAGES, "head_dim": 8}
COMPASS = relatives.ROWS["cohere_compass_text"][1]
ARIA = {"moe_num_experts": 6, "moe_topk": 3, "head_dim": 14}
OF_STEP = {"n_routed_experts": 6, "num_experts_per_tok": 3, "share_expert_dim": 27, **MOE}
OF_STEP |= {"mlp_layer_types": ["dense", "sparse"], "moe_router_scaling_factor": 1.7}
OCR = {"n_routed_experts": 6, "num_experts_per_tok": 3, "n_shared_experts": 1, **MOE}
OCR |= {"mlp_layer_types": ["dense", "sparse"], "topk_method": "group_limited_greedy"}
OCR |= {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.7, "head_dim": 14}
STEP = {**OF_STEP, "layer_types": TURNS[::-1], "sliding_window": 5, "head_dim": 14}
STEP |= {"num_attention_heads": 6, "num_sliding_attention_heads": 3, "query_pre_attn_scalar": 11}
STEP |= {"swiglu_limits": [None, 0.02], "swiglu_limits_shared": [0.03, 0.05]}
STEP |= {"rope_parameters": dict(zip(TURNS, (DEFAULT, PARTIAL_OF_14), strict=True))}
# By HF's name of a model: its text's fields, and the other parts of its config.
ROWS = {
    "aria": ("Aria", ARIA, {"model_type": "idefics3_vision", **IMAGES}),
    "aya_vision": ("AyaVision", {"model_type": "cohere2", **COHERE}, SEES["siglip"]),
    "cohere2_vision": ("Cohere2Vision", {"model_type": "cohere2", **COHERE}, SEES["siglip"]),
    "audioflamingo3": ("AudioFlamingo3", {"model_type": "qwen2", **SIZES}, FLAMINGO),
    "cohere_compass": ("CohereCompass", {**TEXT, **COMPASS, "logit_scale": 0.3}, QWEN),
    "deepseek_ocr2": (
        "DeepseekOcr2",
        OCR,
        {"encoder_config": FEW, "sam_config": {**IMAGES, "output_channels": 8}},
    ),
    "deepseek_vl": ("DeepseekVL", {"model_type": "llama", **TEXT}, IMAGES),
    "deepseek_vl_hybrid": ("DeepseekVLHybrid", {"model_type": "llama", **TEXT}, IMAGES),
    "exaone4_5": ("Exaone4_5_", {"model_type": "exaone4", **WINDOWS}, QWEN),
    "fast_vlm": ("FastVlm", {"model_type": "qwen2", **SIZES}, SEES["clip"]),
    "fun_asr_nano": ("FunAsrNano", {"model_type": "qwen3", **TEXT}, HEARS),
    "fuyu": ("Fuyu", {"num_attention_heads": 3, "qk_layernorm": True}, None),
    "glm4v": ("Glm4v", {**GLM, **HALF}, QWEN),
    "glm46v": ("Glm46V", {"model_type": "glm4v_text", **GLM, **HALF}, QWEN),
    "glm4v_moe": (
        "Glm4vMoe",
        {**GLM, **HALF, "n_routed_experts": 6, "num_experts_per_tok": 3} | MOE,
        QWEN,
    ),
    "glm_ocr": ("GlmOcr", {**GLM, "head_dim": 16, **HALF}, QWEN),
    "glmasr": ("GlmAsr", {"model_type": "llama", **TEXT}, HEARS),
    "got_ocr2": ("GotOcr2", {"model_type": "qwen2", **SIZES}, IMAGES),
    "granite4_vision": (
        "Granite4Vision",
        {**TEXT, **relatives.ROWS["granite"][1]},
        {**SEES["siglip"], "hidden_size": 64},
    ),
    "granite_docling": (
        "GraniteDocling",
        {**TEXT, **relatives.ROWS["granite"][1]},
        {**IMAGES, "scale_factor": 2, "out_hidden_size": 84, "deepstack_visual_indexes": [0]},
    ),
    "granite_speech": (
        "GraniteSpeech",
        {"model_type": "granite", **TEXT, "logits_scaling": 2.5},
        HEARS,
    ),
    "granite_speech_plus": (
        "GraniteSpeechPlus",
        {"model_type": "granite", **TEXT, "logits_scaling": 2.5},
        HEARS,
    ),
    "hunyuan_vl": ("HunYuanVL", {**TEXT, **XDROPE}, FEW),
    "hyperclovax_vision_v2": (
        "HyperCLOVAXVisionV2",
        {**TEXT, **relatives.ROWS["hyperclovax"][1]},
        {**QWEN, "out_hidden_size": 84},
    ),
    "janus": ("Janus", {"model_type": "llama", **TEXT}, IMAGES),
    "kimi_k25": (
        "Kimi_K25",
        {"model_type": "deepseek_v3", **SIZES, **latent.ROWS["deepseek_v3"][1]},
        FEW,
    ),
    "lighton_ocr": ("LightOnOcr", {"model_type": "qwen3", **TEXT}, IMAGES),
    "mistral3": (
        "Mistral3",
        {"model_type": "ministral3", **relatives.ROWS["ministral3"][1]},
        PIXTRAL,
    ),
    "mistral3 of a mistral4": (
        "Mistral3",
        {"model_type": "mistral4", **relatives.ROWS["mistral4"][1]},
        PIXTRAL,
    ),
    "mllama": (
        "Mllama",
        {"num_hidden_layers": 4, "cross_attention_layers": [1, 3]},
        {**FEW, "image_size": 28, "patch_size": 14, "attention_heads": 2, "num_global_layers": 1}
        | {"intermediate_layers_indices": [0], "vision_output_dim": 32},
    ),
    "moss_transcribe_diarize": (
        "MossTranscribeDiarize",
        {"model_type": "qwen3", **TEXT},
        HEARS,
    ),
    "musicflamingo": ("MusicFlamingo", {"model_type": "qwen2", **SIZES}, FLAMINGO),
    "ovis2": ("Ovis2", {"model_type": "qwen2", **SIZES}, IMAGES),
    "paddleocr_vl": ("PaddleOCRVL", {**TEXT, **MROPE, "use_bias": True}, FEW),
    "paligemma": ("PaliGemma", {"model_type": "gemma", **TEXT}, SEES["siglip"]),
    "paligemma 2": (
        "PaliGemma",
        {"model_type": "gemma2", **WINDOWS, "query_pre_attn_scalar": 13}
        | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 20.0},
        SEES["siglip"],
    ),
    "perception_lm": (
        "PerceptionLM",
        {"model_type": "llama", **TEXT},
        {**SEES["siglip"], "model_args": {"embed_dim": 16}},  # in the place of timm's
    ),
    "pp_chart2table": ("PPChart2Table", {"model_type": "qwen2", **SIZES}, IMAGES),
    "qianfan_ocr": ("QianfanOCR", {"model_type": "qwen3", **TEXT}, IMAGES),
    "step3p7": ("Step3p7", STEP, {**FEW, "image_size": 28, "patch_size": 14}),
    "vibevoice_asr": ("VibeVoiceAsr", {"model_type": "qwen2", **SIZES}, {}),
    "video_llama_3": ("VideoLlama3", {"model_type": "qwen2", **SIZES}, FEW),
    "idefics2": ("Idefics2", {"model_type": "mistral", **TEXT}, IMAGES),
    "idefics3": ("Idefics3", {"model_type": "llama", **TEXT}, IMAGES),
    "internvl": ("InternVL", {"model_type": "qwen2", **SIZES}, IMAGES),
    "llava": ("Llava", {"model_type": "llama", **TEXT}, SEES["clip"]),
    "llava_next": ("LlavaNext", {"model_type": "mistral", **TEXT}, SEES["clip"]),
    "llava_next_video": ("LlavaNextVideo", {"model_type": "llama", **TEXT}, SEES["clip"]),
    "llava_onevision": ("LlavaOnevision", {"model_type": "qwen2", **SIZES}, SEES["siglip"]),
    "qwen2_5_omni_thinker": ("Qwen2_5OmniThinker", {**SIZES, **MROPE}, QWEN),
    "qwen2_5_vl": ("Qwen2_5_VL", {**SIZES, **MROPE}, {**QWEN, "out_hidden_size": 84}),
    "qwen2_audio": ("Qwen2Audio", {"model_type": "qwen2", **SIZES}, HEARS),
    "qwen2_vl": ("Qwen2VL", {**SIZES, **MROPE}, {**QWEN, "embed_dim": 16}),
    "qwen3_asr": ("Qwen3ASR", {"model_type": "qwen3", **TEXT}, HEARS),
    "qwen3_omni_moe_thinker": (
        "Qwen3OmniMoeThinker",
        {**TEXT, **MROPE, **EXPERTS},
        QWEN,
    ),
    "qwen3_5 in its wrapper": ("Qwen3_5", {**GLM, **HALF, **DELTA, "head_dim": 16}, QWEN),
    "qwen3_5_moe in its wrapper": (
        "Qwen3_5Moe",
        {**GLM, **HALF, **DELTA, **EXPERTS, "head_dim": 16, "intermediate_size": None}
        | {"shared_expert_intermediate_size": 27},
        QWEN,
    ),
    "qwen3_vl": ("Qwen3VL", {**TEXT, **MROPE}, QWEN),
    "qwen3_vl_moe": ("Qwen3VLMoe", {**TEXT, **MROPE, **EXPERTS}, QWEN),
    "smolvlm": ("SmolVLM", {"model_type": "llama", **TEXT}, IMAGES),
    "video_llava": ("VideoLlava", {"model_type": "llama", **TEXT}, SEES["clip"]),
    "vipllava": ("VipLlava", {"model_type": "llama", **TEXT}, SEES["clip"]),
    "voxtral": ("Voxtral", {"model_type": "llama", **TEXT}, HEARS),
}


def _draw(case: Case, model: Any) -> None:
    """The text does not end by itself."""
    randomize(model)
    if type(model).__name__ == case.architecture:
        model.generation_config.update(eos_token_id=None, pad_token_id=PAD, bos_token_id=1)


TABLE = Table({}, _draw)


def _case(case: str, name: str, text: dict[str, Any], media: dict[str, Any] | None) -> Case:
    more = {"audio_config": HEARS, "vision_start_token_id": 998} if "omni" in case else {}
    if "hybrid" in case:
        more = {"high_res_vision_config": {**IMAGES, "output_channels": 8, "mlp_dim": 20}}
    if case == "granite4_vision":
        reader = {"model_type": "blip_2_qformer", **FEW, "hidden_size": 64}
        more = {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"}
        more |= {"qformer_config": {**reader, "encoder_hidden_size": 64}}
    if case == "fun_asr_nano":
        more = {"adaptor_config": {**FEW, "hidden_size": 84, "intermediate_size": 21}}
    if case == "vibevoice_asr":
        few = {"hidden_size": 8, "num_filters": 2, "depths": [1, 1], "downsampling_ratios": [2]}
        more = {f"{kind}_tokenizer_encoder_config": few for kind in ("acoustic", "semantic")}
    if "granite_speech" in case:
        more = {
            "encoder_config": {"num_layers": 1, "hidden_dim": 16, "num_heads": 2, "dim_head": 8}
        }
        reader = {"model_type": "blip_2_qformer", **FEW, "encoder_hidden_size": 16}
        more["projector_config"] = reader
    text = {**SIZES, **text}
    if media is not None:
        more["audio_config" if "num_mel_bins" in media else "vision_config"] = media
    if name == "PaliGemma":  # whose sdpa looks both ways where HF leaves out a mask of ones
        more["attn_implementation"] = "eager"
    kind, base = WRAPPERS[case.partition(" ")[0]].classes
    return Case(case, kind, {"text_config": text, **more}, TABLE, f"{name}Config", base)


CASES = {name: _case(name, *row) for name, row in ROWS.items()}

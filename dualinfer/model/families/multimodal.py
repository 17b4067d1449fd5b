"""The text of models that see images and videos or hear sounds: LLaVA, Qwen-VL, InternVL, Voxtral.

Each is a row of `WRAPPERS` around a decoder of texts that another file describes, and decoders that
only such models have are rows of `TEXTS`. HF sources: models/NAME/modeling_NAME.py. Given input_ids
alone HF runs the decoder and a plain head.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from ...errors import ModelError, UnservedError, shown
from ..spec import Head, ModelSpec
from ..weights import WeightTable
from . import (
    deepseek,
    gemma,
    gpt_neox,
    kinds,
    layered,
    llama,
    mixtures,
    mllama,
    qwen3_next,
    routers,
)
from .decoders import Kind, alike, serve
from .fields import ConfigFields
from .heads import under

_MODULES: dict[str, ModuleType] = {
    family: module
    for module in (llama, gemma, kinds, deepseek, gpt_neox, mllama, layered, qwen3_next)
    for family in module.CLASSES
}
_QWENS = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
# Decoders that HF makes of any text_config; those of no row here have a head with biases.
_ANY = (
    *("llama", "mistral", "ministral3", "mistral4", "mixtral", *_QWENS, "gemma", "gemma2"),
    *("gemma3_text", "cohere", "cohere2", "granite", "gpt_oss", "olmo2", "olmo3", "phi3"),
    *("smollm3", "starcoder2", "deepseek_v2", "deepseek_v3", "exaone4", "glm4"),
)
# Fields of configs that are about what is seen or heard: which ids stand for it, its sizes and how
# its features become embeddings. HF reads none of them where a call gives input_ids alone.
_TOKENS = tuple(
    f"{what}_token_{kind}"
    for what in (
        *("image", "video", "audio", "vision", "vision_start", "vision_end", "image_start"),
        *("image_end", "video_start", "video_end", "audio_start", "audio_end", "audio_bos"),
        *("audio_eos",),
    )
    for kind in ("id", "index")
)
_MEDIA = tuple(
    """vision_config audio_config ignore_index image_seq_length video_seq_length
    projector_hidden_act multimodal_projector_bias vision_feature_layer
    vision_feature_select_strategy""".split()
)
# Older versions wrote the fields of the text beside its config, too, these by other names there.
_BESIDE = ("rope_theta", "rope_scaling", "rope_parameters", "vocab_size", "hidden_size")
_NESTED = (  # names in files of transformers before 4.52
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)
_FLAT = (("model.language_model.", "model."),)
_SECTIONS = ("mrope_section", "mrope_interleaved", "interleaved")  # of the positions' parts


@dataclass(frozen=True)
class Wrapper:
    """A model around a decoder of texts.

    `name` begins HF's classes. `texts` are the model_types that its text_config may have. `parts`
    are HF's modules beside the decoder, which stay unread. `renames` are (ours, theirs) pieces of
    names in files of older versions. `ignored` fields of the config are about what is seen or
    heard, beside `_MEDIA`, and `of_text` are such in its text_config. HF `ties` the head to the
    embedding where the config says so, or never does. Where it `scales`, logits have the decoder's
    own factor or cap. Where it `masks_labels`, tokens that the mask hides count in no loss. If
    it `counts`, positions are those of the tokens that the mask shows. `head` is the end of the
    name of HF's class with a head. Where it `prefixes`, HF takes token types of 0 for a prefix.
    Of a text by itself what the fields `not_alone` of its text_config say is not so.
    """

    name: str
    texts: tuple[str, ...]
    parts: tuple[str, ...]
    renames: tuple[tuple[str, str], ...] = ()
    decoder: str = "language_model"
    ignored: tuple[str, ...] = ()
    of_text: tuple[str, ...] = ()
    ties: bool = True
    scales: bool = False
    masks_labels: bool = False
    counts: bool = False
    head: str = "ForConditionalGeneration"
    prefixes: bool = False
    not_alone: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, str]:
        """HF's classes, with a head and without."""
        return f"{self.name}{self.head}", f"{self.name}Model"


_LLAVA = ("vision_tower", "multi_modal_projector")
# Of the makers' own code, which HF reads nowhere.
_HUNYUAN = (*kinds.KINDS["hunyuan_v1_dense"].ignored, *kinds.KINDS["hunyuan_v1_dense"].always)
_OCR_PARTS = ("sam_model", "qwen2_model", "projector", "view_seperator")  # of the makers' files
_TILES = ("image_grid_pinpoints", "use_image_newline_parameter")
_HEARS = ("audio_tower", "multi_modal_projector")
_IDEFICS = {
    "parts": ("vision_model", "connector"),
    "decoder": "text_model",
    "ignored": ("scale_factor", "image_seq_len", "perceiver_config", "_pad_token_id"),
    # Of the makers' own code, from which these were trained.
    "of_text": (
        *("neftune_noise_alpha", "perceiver_config", "pixel_shuffle_factor", "use_resampler"),
        "transformers.js_config",
    ),
}
_OMNI: dict[str, Any] = {
    # A file of the whole has what speaks beside what thinks.
    "parts": ("visual", "audio_tower", "talker", "token2wav", "code2wav"),
    "renames": (
        *(("model.language_model.", "model."), ("model.", "thinker.model.")),
        ("lm_head.", "thinker.lm_head."),
    ),
    "ignored": (
        *("position_id_per_seconds", "seconds_per_chunk", "user_token_id"),
        *("vision_start_token_id", "vision_end_token_id"),
    ),
    "counts": True,
}
_GRANITE_SPEECH: dict[str, Any] = {
    "texts": _ANY,
    "parts": ("encoder", "projector"),
    "renames": _NESTED,
    "masks_labels": True,
    "ignored": (
        *("encoder_config", "projector_config", "has_lora_adapter", "downsample_rate"),
        "window_size",
    ),
}
WRAPPERS: dict[str, Wrapper] = {
    "aria": Wrapper(
        *("Aria", ("aria_text",), _LLAVA, _NESTED),
        ignored=("projector_patch_to_query_dict", "max_value_projector_patch_to_query_dict"),
    ),
    "audioflamingo3": Wrapper(
        *("AudioFlamingo3", _ANY, _HEARS, _NESTED), ties=False, ignored=("projector_bias",)
    ),
    "aya_vision": Wrapper(
        *("AyaVision", _ANY, _LLAVA, _NESTED),
        ignored=("downsample_factor", "adapter_layer_norm_eps"),
    ),
    "cohere2_vision": Wrapper(
        *("Cohere2Vision", _ANY, _LLAVA),
        ignored=("downsample_factor", "alignment_intermediate_size"),
    ),
    "cohere_compass": Wrapper("CohereCompass", ("cohere_compass_text",), ("visual",), scales=True),
    "deepseek_ocr2": Wrapper(
        *("DeepseekOcr2", ("deepseek_ocr2_text",)),
        (*_LLAVA, "view_separator", *_OCR_PARTS),
        (*_FLAT, ("model.language_model.", "")),
    ),
    "deepseek_vl": Wrapper("DeepseekVL", _ANY, ("vision_model", "aligner")),
    "deepseek_vl_hybrid": Wrapper(
        "DeepseekVLHybrid",
        _ANY,
        (
            *("vision_model", "high_res_vision_model", "high_res_vision_neck", "aligner"),
            *("high_res_vision_proj", "high_res_vision_alpha"),
        ),
        ignored=("high_res_vision_config",),
    ),
    "exaone4_5": Wrapper("Exaone4_5_", ("exaone4",), ("visual", "mtp")),
    "fast_vlm": Wrapper("FastVlm", _ANY, _LLAVA),
    "fun_asr_nano": Wrapper("FunAsrNano", _ANY, _HEARS, ignored=("adaptor_config",)),
    "fuyu": Wrapper(
        *("Fuyu", ("persimmon",), ("vision_embed_tokens",), _NESTED),
        ignored=("image_size", "patch_size", "num_channels"),
        head="ForCausalLM",
    ),
    "glm4v": Wrapper("Glm4v", ("glm4v_text",), ("visual",)),
    "glm46v": Wrapper("Glm46V", ("glm4v_text", "glm4v_moe_text"), ("visual",)),
    "glm4v_moe": Wrapper("Glm4vMoe", ("glm4v_moe_text",), ("visual",)),
    "glm_ocr": Wrapper("GlmOcr", ("glm_ocr_text",), ("visual",)),
    "glmasr": Wrapper("GlmAsr", _ANY, _HEARS, _NESTED),
    "got_ocr2": Wrapper("GotOcr2", _ANY, _LLAVA, _NESTED),
    "granite4_vision": Wrapper(
        "Granite4Vision",
        ("granite4_vision_text",),
        ("vision_tower", "layerwise_projectors", "spatial_projectors", "image_newline"),
        ignored=(
            *("image_grid_pinpoints", "downsample_rate", "deepstack_layer_map", "qformer_config"),
            *("spatial_vision_layer", "spatial_target_layers", "projector_dropout"),
            "use_image_newline_parameter",
        ),
        scales=True,
    ),
    "granite_docling": Wrapper(
        "GraniteDocling",
        ("granite_docling_text",),
        ("vision_model", "connector", "density_router"),
        decoder="text_model",
        ignored=tuple(f"density_router_{x}" for x in ("hidden_size", "threshold", "loss_weight")),
        scales=True,
    ),
    "granite_speech": Wrapper("GraniteSpeech", **_GRANITE_SPEECH),
    "granite_speech_plus": Wrapper("GraniteSpeechPlus", **_GRANITE_SPEECH),
    "hunyuan_vl": Wrapper(
        *("HunYuanVL", ("hunyuan_vl_text",), ("vision_tower", "vit"), _FLAT),
        ignored=("im_start_id", "im_end_id", "im_newline_id", *_HUNYUAN),
    ),
    "hyperclovax_vision_v2": Wrapper(
        *(
            "HyperCLOVAXVisionV2",
            ("hyperclovax",),
            ("vision_model", "projector", "vision_projector"),
        ),
        renames=(("lm_head.", "model.language_model.lm_head."),),
        scales=True,
    ),
    "idefics2": Wrapper("Idefics2", _ANY, **_IDEFICS),
    "idefics3": Wrapper("Idefics3", _ANY, **_IDEFICS),
    "internvl": Wrapper(*("InternVL", _ANY, _LLAVA, _NESTED), ignored=("downsample_ratio",)),
    "janus": Wrapper(
        "Janus",
        _ANY,
        (
            *("vision_model", "aligner", "vqmodel", "generation_embeddings"),
            *("generation_aligner", "generation_head"),
        ),
        ignored=("vq_config",),
    ),
    "kimi_k25": Wrapper(
        *("Kimi_K25", ("deepseek_v3",), ("vision_tower", "mm_projector")),
        renames=(*_NESTED, (".layers.", ".blocks.")),  # as HF writes the decoder's layers, too
        ignored=(
            *("projection_hidden_size", "projection_layer_norm_eps", "video_placeholder"),
            *("media_placeholder_token_id", "use_unified_vision_chunk"),
        ),
    ),
    "lighton_ocr": Wrapper(
        *("LightOnOcr", _ANY, ("vision_encoder", "vision_projection")),
        ignored=("spatial_merge_size",),
    ),
    "llava": Wrapper("Llava", _ANY, _LLAVA, _NESTED),
    "llava_next": Wrapper(
        *("LlavaNext", _ANY, (*_LLAVA, "image_newline"), _NESTED), ignored=_TILES
    ),
    "llava_next_video": Wrapper(
        *("LlavaNextVideo", _ANY, (*_LLAVA, "image_newline", "vision_resampler"), _NESTED),
        ignored=(*_TILES, "spatial_pool_mode", "spatial_pool_stride"),
    ),
    "llava_onevision": Wrapper(
        *("LlavaOnevision", _ANY, (*_LLAVA, "image_newline"), _NESTED),
        ignored=(*_TILES, "vision_aspect_ratio"),
    ),
    "mistral3": Wrapper(
        *("Mistral3", ("mistral", "ministral3", "mistral4"), _LLAVA, _NESTED),
        ignored=("spatial_merge_size",),
    ),
    "mllama": Wrapper(
        *("Mllama", ("mllama_text_model",), ("vision_model", "multi_modal_projector"), _NESTED),
        ties=False,
    ),
    "moss_transcribe_diarize": Wrapper(
        *("MossTranscribeDiarize", _ANY, _HEARS),
        ignored=("audio_merge_size", "audio_chunk_size", "projector_bias"),
    ),
    "musicflamingo": Wrapper(
        *("MusicFlamingo", _ANY, (*_HEARS, "pos_emb"), _NESTED),
        ties=False,
        ignored=(
            *("projector_bias", "audio_frame_step", "rope_parameters", "head_dim"),
            "max_position_embeddings",
        ),
    ),
    "ovis2": Wrapper(
        *("Ovis2", _ANY, ("vision_tower", "visual_embeddings_table")),
        ignored=("visual_indicator_token_ids",),
    ),
    "paddleocr_vl": Wrapper(
        *("PaddleOCRVL", ("paddleocr_vl_text",), ("visual", "projector", "mlp_AR"), _FLAT),
        ignored=(  # of the makers' own code
            *("compression_ratio", "ignored_index", "rope_is_neox_style", "use_3d_rope"),
            "weight_share_add_bias",
        ),
    ),
    "paligemma": Wrapper(
        *("PaliGemma", ("gemma", "gemma2"), _LLAVA, _NESTED),
        ignored=("projection_dim",),
        scales=True,
        prefixes=True,
        # Images see both ways, and prefixes; HF's masks for a text alone are causal.
        not_alone=("use_bidirectional_attention", "num_image_tokens"),
    ),
    "perception_lm": Wrapper(
        *("PerceptionLM", _ANY, _LLAVA), ignored=("vision_use_cls_token", "projector_pooling_ratio")
    ),
    "pp_chart2table": Wrapper(*("GotOcr2", _ANY, _LLAVA, _NESTED)),
    "qianfan_ocr": Wrapper(
        *("QianfanOCR", _ANY, (*_LLAVA, "vision_model", "mlp1")),
        renames=(*_NESTED, (".layers.", ".encoder.layers.")),  # as of kimi_k25
        ignored=("downsample_ratio",),
    ),
    "qwen2_5_omni_thinker": Wrapper(*("Qwen2_5OmniThinker", ("qwen2_5_omni_text",)), **_OMNI),
    "qwen2_5_vl": Wrapper("Qwen2_5_VL", ("qwen2_5_vl_text",), ("visual",), _FLAT),
    "qwen2_audio": Wrapper(*("Qwen2Audio", _ANY, _HEARS, _NESTED), ties=False, masks_labels=True),
    "qwen2_vl": Wrapper("Qwen2VL", ("qwen2_vl_text",), ("visual",), _FLAT),
    "qwen3_5": Wrapper("Qwen3_5", ("qwen3_5_text",), ("visual", "mtp")),
    "qwen3_5_moe": Wrapper("Qwen3_5Moe", ("qwen3_5_moe_text",), ("visual", "mtp")),
    "qwen3_asr": Wrapper(
        *("Qwen3ASR", _ANY, _HEARS), ignored=("timestamp_token_id", "token_classification_bias")
    ),
    "qwen3_omni_moe_thinker": Wrapper(*("Qwen3OmniMoeThinker", ("qwen3_omni_moe_text",)), **_OMNI),
    "qwen3_vl": Wrapper("Qwen3VL", ("qwen3_vl_text",), ("visual",)),
    "qwen3_vl_moe": Wrapper("Qwen3VLMoe", ("qwen3_vl_moe_text",), ("visual",)),
    "smolvlm": Wrapper("SmolVLM", _ANY, **_IDEFICS),
    "step3p7": Wrapper(
        *("Step3p7", ("step3p5",)),
        ("vision_model", "multi_modal_projector", "vit_large_projector"),
        _FLAT,
        ignored=("projector_bias",),
    ),
    "vibevoice_asr": Wrapper(
        "VibeVoiceAsr",
        _ANY,
        ("acoustic_tokenizer_encoder", "semantic_tokenizer_encoder", "multi_modal_projector"),
        _NESTED,
        ties=False,
        ignored=(
            *("acoustic_tokenizer_encoder_config", "semantic_tokenizer_encoder_config"),
            "acoustic_tokenizer_chunk_size",
        ),
    ),
    "video_llama_3": Wrapper("VideoLlama3", _ANY, ("vision_model", "projector")),
    "video_llava": Wrapper(
        *("VideoLlava", _ANY, ("image_tower", "video_tower", "multi_modal_projector"), _NESTED)
    ),
    "vipllava": Wrapper(*("VipLlava", _ANY, _LLAVA, _NESTED), ignored=("projector_layernorm_eps",)),
    "voxtral": Wrapper("Voxtral", _ANY, _HEARS, _NESTED, ties=False),
}


def _text(name: str, kind: Kind, packs: bool = False, **changes: Any) -> Kind:
    """A decoder that such models alone have: HF's class, and the kind that it is one of.

    Positions have several parts, which are equal in texts, so that it turns as that does. Those
    that start anew separate sequences where it `packs`.
    """
    facts = {**kind.facts, **({} if packs else {"packs": False})}
    changes = {"unturned": (*kind.unturned, *_SECTIONS), "facts": facts} | changes
    return replace(kind, name=name, only=True, **changes)


_LLAMAS, _KINDS = llama.KINDS, kinds.KINDS
# HF's have no windows.
_QWEN3: dict[str, Any] = {"sees": alike, "packs": True}
_FULL = ("layer_types", "sliding_window")
_EXPERTS = mixtures.MIXTURES["qwen3_moe"]
TEXTS: dict[str, Kind] = {
    "glm4v_moe_text": _text(
        *("Glm4vMoeText", _KINDS["glm4_moe"]),
        qk_norm=False,
        always={"use_qk_norm": False},
        mixture=mixtures.MIXTURES["glm4_moe"],
    ),
    "glm4v_text": _text(
        *("Glm4vText", _KINDS["glm4"]), qkv_bias=True, always={"attention_bias": True}, splits=True
    ),
    "glm_ocr_text": _text(
        *("GlmOcrText", _KINDS["glm4"]),
        qkv_bias=False,
        always={"attention_bias": False},
        predicts=True,
    ),
    "granite4_vision_text": _text("Granite4VisionText", _KINDS["granite"], packs=True),
    "granite_docling_text": _text("GraniteDoclingText", _KINDS["granite"], packs=True),
    "hunyuan_vl_text": _text("HunYuanVLText", _KINDS["hunyuan_v1_dense"]),
    "paddleocr_vl_text": _text(
        *("PaddleOCRText", _LLAMAS["llama"]),
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), "use_bias"),
    ),
    "qwen2_5_omni_text": _text("Qwen2_5OmniThinkerText", _LLAMAS["qwen2"], splits=True),
    "qwen2_5_vl_text": _text("Qwen2_5_VLText", _LLAMAS["qwen2"], splits=True),
    "qwen2_vl_text": _text("Qwen2VLText", _LLAMAS["qwen2"], splits=True),
    "qwen3_omni_moe_text": _text(
        *("Qwen3OmniMoeThinkerText", _KINDS["qwen3_moe"]),
        **_QWEN3,
        ignored=(*_KINDS["qwen3_moe"].ignored, *_FULL),
        mixture=_EXPERTS,
    ),
    "qwen3_vl_moe_text": _text(
        *("Qwen3VLMoeText", _KINDS["qwen3_moe"]),
        **_QWEN3,
        ignored=(*_KINDS["qwen3_moe"].ignored, *_FULL),
        # A file may hold columns before rows.
        mixture=replace(_EXPERTS, route=routers.always_renormalized, either=True),
    ),
    "qwen3_vl_text": _text(
        *("Qwen3VLText", _LLAMAS["qwen3"]), **_QWEN3, ignored=(*_LLAMAS["qwen3"].ignored, *_FULL)
    ),
}
_OF_TEXTS, _describe_text = serve(TEXTS)
CLASSES: dict[str, tuple[str, ...]] = {
    **{family: own.classes for family, own in WRAPPERS.items()},
    **_OF_TEXTS,
}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of the part for text alone."""
    if fields.family in TEXTS:
        return _describe_text(fields, architecture)
    wrapper = WRAPPERS[fields.family]
    text = fields.take("text_config")
    if not isinstance(text, Mapping):
        raise ModelError(f"config.json has text_config={shown(text)}; expected an object.")
    family = text.get("model_type")
    if not isinstance(family, str) or family not in wrapper.texts:
        raise UnservedError(
            f"config.json has text_config with model_type={shown(family)}; the {fields.family} "
            f"family honours {', '.join(wrapper.texts)}."
        )
    # Whether the head repeats the embedding the outer config says.
    tied = wrapper.ties and fields.flag("tie_word_embeddings", False)
    alone = {**text, **dict.fromkeys(wrapper.not_alone)}
    inner = ConfigFields(family, {**alone, "tie_word_embeddings": tied}, "text_config")
    has_head = "For" in architecture
    spec, table = _decoder(inner, has_head)
    inner.ignore("quantization_config")  # of the weights
    inner.ignore(*_TOKENS, *wrapper.of_text, *wrapper.not_alone)
    inner.finish()
    fields.ignore("tie_word_embeddings", *_TOKENS, *_MEDIA, *wrapper.ignored)
    beside = {*text} - {"is_encoder_decoder"}
    fields.ignore(*beside, *_BESIDE)  # HF reads them in the text_config
    table = under(table, f"model.{wrapper.decoder}.")
    if wrapper.counts:
        spec = replace(spec, positions=replace(spec.positions, counted="seen"))
    if wrapper.prefixes:
        spec = replace(spec, embedding=replace(spec.embedding, types="prefix"))
    if has_head and not wrapper.scales:
        spec = replace(spec, head=Head("causal"))
    if wrapper.masks_labels and spec.head:
        spec = replace(spec, head=replace(spec.head, loss="shown"))
    parts = "|".join(map(re.escape, wrapper.parts))
    unused = [*map(_anywhere, table.unused), rf"^((model|thinker)\.)*({parts})(\.|$)"]
    unused += [] if has_head else [r"^language_model\.lm_head\."]
    names = (*table.renames, *wrapper.renames)
    table = replace(table, base="model.", renames=names, unused=tuple(unused))
    return _named(fields, architecture, spec, table)


def _named(
    fields: ConfigFields, architecture: str, spec: ModelSpec, table: WeightTable
) -> tuple[ModelSpec, WeightTable]:
    spec = replace(spec, family=fields.family, architecture=architecture)
    return spec, replace(table, spec=spec)


def _anywhere(pattern: str) -> str:
    """A pattern of a decoder's tensors that no layer reads, as files of the whole model hold it."""
    return pattern.replace(r"^(model\.)?layers", r"^((model|language_model)\.)*layers")


def _decoder(fields: ConfigFields, has_head: bool) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of the decoder, by the file of its family."""
    if fields.family in TEXTS:
        return _describe_text(fields, "ForCausalLM" if has_head else "Model")
    *_, base = names = _MODULES[fields.family].CLASSES[fields.family][:2]
    head = f"{base}ForCausalLM" if len(names) == 1 else names[0]
    return _MODULES[fields.family].describe(fields, head if has_head else base)

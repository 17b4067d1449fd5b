"""Encoder-decoders: by the name of HF's class."""

from typing import Any

import torch
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeExperts

from .case import Case, Table

VOCAB = 101
IDS = {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0, "decoder_start_token_id": 2}
T5 = {
    **{"vocab_size": VOCAB, "d_model": 36, "d_kv": 7, "d_ff": 50, "num_heads": 5},
    **{"num_layers": 3, "num_decoder_layers": 2, **IDS, "decoder_start_token_id": 1},
}
BART = {
    **{"vocab_size": VOCAB, "d_model": 30, "encoder_layers": 3, "decoder_layers": 2, **IDS},
    **{"encoder_attention_heads": 5, "decoder_attention_heads": 3, "encoder_ffn_dim": 41},
    **{"decoder_ffn_dim": 50, "max_position_embeddings": 90},
}
AUDIO = {"num_mel_bins": 7, "max_source_positions": 23, "max_target_positions": 90}
GEMMA = {
    **{"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 41, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "sliding_window": 4},
    **{"query_pre_attn_scalar": 13, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    **{"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0, "max_position_embeddings": 90},
}
PAIR = {"decoder": GEMMA, "encoder": GEMMA | {"hidden_size": 36, "num_hidden_layers": 3}}
BERT = {
    **{"model_type": "bert", "vocab_size": VOCAB, "hidden_size": 36, "num_hidden_layers": 2},
    **{"num_attention_heads": 3, "intermediate_size": 41, "max_position_embeddings": 90},
}
BERTS = {
    "decoder": BERT | {"is_decoder": True, "add_cross_attention": True},
    **{"encoder": BERT | {"num_attention_heads": 6, "num_hidden_layers": 3}, **IDS},
}
VIT = {
    **{"model_type": "vit", "hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 6},
    **{"intermediate_size": 41, "image_size": 18, "patch_size": 6},
}
_DECODES = {"is_decoder": True, "add_cross_attention": True, "vocab_size": VOCAB}
TROCR = {
    **{"model_type": "trocr", "d_model": 30, "decoder_layers": 2, "decoder_attention_heads": 3},
    **{"decoder_ffn_dim": 50, "max_position_embeddings": 90, "cross_attention_hidden_size": 36},
    **_DECODES,
}
PLAIN = {  # as larger TrOCRs
    **{"use_learned_position_embeddings": False, "layernorm_embedding": False},
    **{"scale_embedding": True, "activation_function": "relu", "tie_word_embeddings": False},
}
GPT2 = {"model_type": "gpt2", "n_embd": 36, "n_layer": 2, "n_head": 3, "n_positions": 90}
IMAGES = {
    "trocr": {"encoder": VIT, "decoder": TROCR, **IDS},
    "trocr-plain": {"encoder": VIT | {"model_type": "deit"}, "decoder": TROCR | PLAIN, **IDS},
    "vit-gpt2": {"encoder": VIT, "decoder": GPT2 | _DECODES, **IDS},
    "vit-bert": {"encoder": VIT, "decoder": BERTS["decoder"], **IDS},
}
MOONSHINE = {
    **{"vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 41, **IDS},
    **{"encoder_num_hidden_layers": 3, "decoder_num_hidden_layers": 2},
    **{"encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4},
    **{
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.8}
    },
}
_LONG = {k: v for k, v in BART.items() if k != "max_position_embeddings"}
# HF's class, and its fields.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    # Buckets so few that sequences have distances beyond the farthest one.
    "t5": (
        "T5ForConditionalGeneration",
        {**T5, "relative_attention_num_buckets": 10, "relative_attention_max_distance": 12},
    ),
    "t5-gated": ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}),
    "mt5": ("MT5ForConditionalGeneration", T5),
    "umt5": ("UMT5ForConditionalGeneration", T5),
    "bart": ("BartForConditionalGeneration", BART),
    "mbart": ("MBartForConditionalGeneration", {**BART, "scale_embedding": True}),
    "plbart": ("PLBartForConditionalGeneration", BART),
    "blenderbot": ("BlenderbotForConditionalGeneration", BART),
    "marian": (
        "MarianMTModel",
        {**BART, "scale_embedding": True, "activation_function": "swish"},
    ),
    "pegasus": ("PegasusForConditionalGeneration", BART),
    "m2m_100": ("M2M100ForConditionalGeneration", BART),
    "whisper": (
        "WhisperForConditionalGeneration",
        {**_LONG, **AUDIO, "begin_suppress_tokens": [7, 8], "suppress_tokens": [9]},
    ),
    "mvp": ("MvpForConditionalGeneration", BART),
    "led": (
        "LEDForConditionalGeneration",
        {**_LONG, "attention_window": [4, 8, 4]}
        | {f"max_{side}_position_embeddings": 90 for side in ("encoder", "decoder")},
    ),
    "longt5": ("LongT5ForConditionalGeneration", {**T5, "local_radius": 3}),
    "t5gemma": ("T5GemmaForConditionalGeneration", PAIR),
    "bert2bert": ("EncoderDecoderModel", BERTS),
    "blenderbot-small": (
        "BlenderbotSmallForConditionalGeneration",
        {**BART, "scale_embedding": True},
    ),
    "switch-t5": (
        "SwitchTransformersForConditionalGeneration",
        {
            **{**T5, "num_experts": 3, "expert_capacity": 4, "router_bias": True},
            **{"num_sparse_encoder_layers": 3, "num_sparse_decoder_layers": 1},
        },
    ),
    "fsmt": (
        "FSMTForConditionalGeneration",
        {k: v for k, v in BART.items() if k != "vocab_size"}
        | {"src_vocab_size": 113, "tgt_vocab_size": VOCAB, "num_beams": 1},
    ),
    "nllb-moe": (
        "NllbMoeForConditionalGeneration",
        {
            **{**BART, "num_experts": 3, "router_bias": True, "moe_token_dropout": 0.3},
            **{"encoder_sparse_step": 2, "decoder_sparse_step": 1},
        },
    ),
    "t5gemma-base": ("T5GemmaModel", PAIR),
    "t5-base": ("T5Model", T5),
    "bart-base": ("BartModel", BART),
    "s2t": (
        "Speech2TextForConditionalGeneration",
        {
            **{**_LONG, "input_feat_per_channel": 5, "conv_channels": 14},
            **{"conv_kernel_sizes": [5, 3], "max_source_positions": 40},
            "max_target_positions": 90,
        },
    ),
    "moonshine": ("MoonshineForConditionalGeneration", MOONSHINE),
    **{name: ("VisionEncoderDecoderModel", fields) for name, fields in IMAGES.items()},
}
# Heads for labels, by HF's class: the fields of their configs.
SCORED = {
    "BartForSequenceClassification": BART,
    "T5ForSequenceClassification": T5,
    "BartForQuestionAnswering": BART,
    "MBartForSequenceClassification": BART,
    "MBartForQuestionAnswering": BART,
    "PLBartForSequenceClassification": BART,
    "T5ForTokenClassification": T5,
    "T5ForQuestionAnswering": T5,
    "MT5ForSequenceClassification": T5,
    "UMT5ForTokenClassification": T5,
    "MvpForSequenceClassification": BART,
    "MvpForQuestionAnswering": BART,
    "LEDForQuestionAnswering": {k: v for k, v in BART.items() if k != "max_position_embeddings"}
    | {"max_encoder_position_embeddings": 90, "max_decoder_position_embeddings": 90}
    | {"attention_window": 8},
}
SEEDS = {"led": 4, "bert2bert": 3}  # of which both texts would be one


def _weighed(self, hidden_states, router_mask, router_probs):
    """Each expert by its own weight, as in fairseq and transformers 4.

    transformers 5 takes `router_mask` for numbers of experts, so that the first two serve all.
    """
    experts = [self[f"expert_{x}"] for x in range(self.num_experts)]
    each = (p[:, None] * own(hidden_states) for p, own in zip(router_probs.T, experts, strict=True))
    y = sum(each)
    return (1 - self.moe_token_dropout) * y


_weighed.__module__ = NllbMoeExperts.__module__
NllbMoeExperts.forward = _weighed


def _draw(case: Case, model: Any) -> None:
    """So that the text depends on what the encoder reads."""
    with torch.no_grad():
        for own, p in model.named_parameters():
            if not p.requires_grad and case.name != "whisper":
                continue
            if p.ndim > 1:
                is_table = any(
                    part in own for part in ("shared", "embed_", "relative", "embeddings.")
                )
                spread = 0.7 if is_table else 2.0 / max(p.shape) ** 0.5
                heard = own.endswith(("encoder_attn.out_proj.weight", "EncDecAttention.o.weight"))
                heard |= own.endswith(
                    ("cross_attn.o_proj.weight", "crossattention.output.dense.weight")
                )
                heard |= own.endswith(
                    ("crossattention.c_proj.weight", "encoder_attn.o_proj.weight")
                )
                spread *= 0.4 if own.endswith("Attention.q.weight") else 6.0 if heard else 1.0
                p.normal_(0, spread)
            else:
                p.add_(torch.empty_like(p).uniform_(-0.4, 0.4))
                if own == "model.decoder.norm.weight":  # a tied head would repeat the last token
                    p.copy_((1 + p) * (torch.randint(0, 2, p.shape) * 2 - 1) - 1)
        model.tie_weights()
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.uniform_(-1, 1)
    if model.can_generate():
        config = model.generation_config
        config.eos_token_id = config.forced_eos_token_id = None
        config.encoder_no_repeat_ngram_size = 0


TABLE = Table({}, _draw, lambda case: SEEDS.get(case.name, len(case.name)))


CASES = {name: Case(name, *row, TABLE) for name, row in ROWS.items()}

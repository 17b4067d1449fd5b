"""Encoders, and heads for labels: by the name of HF's class."""

from ..models import randomize
from .case import Case, Table

VOCAB, PAD = 99, 1
SIZES = {
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 44,
    "max_position_embeddings": 70,
    "vocab_size": VOCAB,
    "pad_token_id": PAD,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_ONE_HEAD = {"num_attention_heads": 3, "num_key_value_heads": 1}
_DISTIL = {"intermediate_size": None, "dim": 36, "n_layers": 2, "n_heads": 3, "hidden_dim": 44}
_NARROW = {"embedding_size": 20}
_REM = {"input_embedding_size": 20, "output_embedding_size": 28}
_ESM = {"position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": 7}
_XLM = {"intermediate_size": None, "emb_dim": 36, "n_layers": 2, "n_heads": 3}
_TURNS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_MODERN = {**_TURNS, "num_hidden_layers": 3, "local_attention": 6}
_XMOD = {"languages": ["en_XX", "de_DE", "fr"], "default_language": "de_DE"}
_MOBILE = {"embedding_size": 14, "intra_bottleneck_size": 21, "num_feedforward_networks": 3}
LABELS = {"num_labels": 3}
_DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
_DEBERTA_3 = {
    **_DEBERTA,
    **{"position_buckets": 8, "max_relative_positions": 20, "norm_rel_ebd": "layer_norm"},
    **{"share_att_key": True, "position_biased_input": False},
}
_XLARGE = {"conv_kernel_size": 5, "conv_act": "gelu", "embedding_size": 20}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False}
_YARN |= {"original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}
_SPAN = {"conv_kernel_size": 5, "head_ratio": 2, "num_attention_heads": 6}
_FILTER = {**_ONE_HEAD, "head_dim": 12, "sliding_window": 3, "num_local_experts": 5}
_FILTER |= {"num_experts_per_tok": 3, "swiglu_limit": 1.5, "rope_parameters": _YARN}
# HF's class, and what makes its config odd.
BASES = {
    "roberta": ("RobertaModel", {}),
    "xlm-roberta": ("XLMRobertaForMaskedLM", {"type_vocab_size": 1}),
    "camembert": ("CamembertForMaskedLM", {"tie_word_embeddings": False}),
    "distilbert": ("DistilBertModel", _DISTIL),
    "distilbert-masked": ("DistilBertForMaskedLM", _DISTIL),
    "electra": ("ElectraModel", _NARROW),
    "electra-masked": ("ElectraForMaskedLM", _NARROW),
    "electra-wide": ("ElectraForPreTraining", {"embedding_size": 36}),
    "albert": ("AlbertModel", {**_NARROW, "num_hidden_groups": 2, "inner_group_num": 2}),
    "albert-masked": ("AlbertForMaskedLM", {**_NARROW, "num_hidden_layers": 3}),
    "modernbert": ("ModernBertModel", _MODERN),
    "modernbert-masked": (
        "ModernBertForMaskedLM",
        {**_MODERN, "norm_bias": True, "attention_bias": True, "mlp_bias": True},
    ),
    "eurobert": ("EuroBertModel", {"num_key_value_heads": 1, "attention_bias": True}),
    "eurobert-masked": ("EuroBertForMaskedLM", {"mlp_bias": True}),
    "ultrabert": ("UltrabertModel", {**_TURNS, "num_hidden_layers": 3, "sliding_window": 3}),
    "mpnet": ("MPNetModel", {}),
    "mpnet-masked": ("MPNetForMaskedLM", {}),
    "embedding-gemma": (
        "Gemma3TextModel",
        {
            **{"head_dim": 12, **_ONE_HEAD, "num_hidden_layers": 3, **_TURNS},
            **{"use_bidirectional_attention": True, "sliding_window": 7},
        },
    ),
    "deberta-3": ("DebertaV2Model", _DEBERTA_3),
    "deberta-2": ("DebertaV2Model", {**_DEBERTA, "position_buckets": 6, "type_vocab_size": 2}),
    "deberta-2-masked": ("DebertaV2ForMaskedLM", {**_DEBERTA_3, "legacy": False}),
    "deberta-2-legacy": ("DebertaV2ForMaskedLM", {"tie_word_embeddings": False}),
    "deberta-xlarge": ("DebertaV2Model", {**_DEBERTA_3, "conv_kernel_size": 3}),
    "deberta-xlarge-masked": ("DebertaV2ForMaskedLM", {**_DEBERTA_3, **_XLARGE}),
    "deberta": ("DebertaModel", {**_DEBERTA, "max_relative_positions": 7}),
    "deberta-masked": ("DebertaForMaskedLM", {**_DEBERTA, "pos_att_type": "c2p"}),
    "nomic_bert": ("NomicBertModel", {}),
    "nomic_bert-masked": ("NomicBertForMaskedLM", {"type_vocab_size": 3}),
    "gte": ("GteModel", {"type_vocab_size": 0}),
    "gte-masked": ("GteForMaskedLM", {"type_vocab_size": 2}),
    "jina": ("JinaEmbeddingsV3Model", {}),
    "jina-masked": ("JinaEmbeddingsV3ForMaskedLM", {}),
    "data2vec-masked": ("Data2VecTextForMaskedLM", {}),
    "ernie-masked": ("ErnieForMaskedLM", {}),
    "megatron-masked": ("MegatronBertForMaskedLM", {}),
    "prelayernorm": ("RobertaPreLayerNormModel", {}),
    "roberta-xl-masked": ("XLMRobertaXLForMaskedLM", {}),
    "longformer": ("LongformerModel", {"attention_window": [4, 8]}),
    "longformer-masked": ("LongformerForMaskedLM", {"attention_window": 4}),
    "luke": ("LukeModel", {"entity_vocab_size": 11, "entity_emb_size": 8}),
    "luke-masked": ("LukeForMaskedLM", {"entity_vocab_size": 11, "entity_emb_size": 8}),
    "splinter": ("SplinterModel", {}),
    "rembert": ("RemBertModel", _REM),
    "rembert-masked": ("RemBertForMaskedLM", _REM),
    "roformer": ("RoFormerModel", {}),
    "roformer-masked": ("RoFormerForMaskedLM", _NARROW),
    "ibert": ("IBertModel", {}),
    "ibert-masked": ("IBertForMaskedLM", {}),
    "esm": ("EsmModel", _ESM),
    "esm-masked": ("EsmForMaskedLM", _ESM),
    "esm-absolute": (
        "EsmForMaskedLM",
        {**_ESM, "position_embedding_type": "absolute", "emb_layer_norm_before": True},
    ),
    "esm-plain": ("EsmModel", {**_ESM, "token_dropout": False, "emb_layer_norm_before": True}),
    "xlm-base": ("XLMModel", _XLM),
    "xlm-masked": ("XLMWithLMHeadModel", {**_XLM, "n_langs": 3}),
    "flaubert-masked": ("FlaubertWithLMHeadModel", {**_XLM, "gelu_activation": False}),
    "layoutlm": ("LayoutLMModel", {"max_2d_position_embeddings": 50}),
    "layoutlm-masked": ("LayoutLMForMaskedLM", {"max_2d_position_embeddings": 50}),
    "lilt": ("LiltModel", {"channel_shrink_ratio": 4, "max_2d_position_embeddings": 50}),
    "mobilebert": ("MobileBertModel", _MOBILE),
    "mobilebert-masked": ("MobileBertForMaskedLM", _MOBILE),
    "xmod": ("XmodModel", _XMOD),
    "xmod-masked": ("XmodForMaskedLM", {**_XMOD, "pre_norm": True, "ln_before_adapter": False}),
    "bert-generation": ("BertGenerationEncoder", {}),
    "convbert": ("ConvBertModel", {**_SPAN, "head_ratio": 7}),
    "convbert-masked": ("ConvBertForMaskedLM", {**_SPAN, **_NARROW}),
    "privacy-filter": ("OpenAIPrivacyFilterModel", _FILTER),
}
HEADS = {
    "bert-sequence": ("BertForSequenceClassification", LABELS),
    "bert-token": ("BertForTokenClassification", LABELS),
    "bert-choice": ("BertForMultipleChoice", {}),
    "bert-span": ("BertForQuestionAnswering", {}),
    "roberta-sequence": ("RobertaForSequenceClassification", LABELS),
    "xlm-roberta-choice": ("XLMRobertaForMultipleChoice", {}),
    "camembert-span": ("CamembertForQuestionAnswering", {}),
    "distilbert-sequence": ("DistilBertForSequenceClassification", {**_DISTIL, **LABELS}),
    "distilbert-choice": ("DistilBertForMultipleChoice", _DISTIL),
    "distilbert-token": ("DistilBertForTokenClassification", {**_DISTIL, **LABELS}),
    "electra-sequence": ("ElectraForSequenceClassification", {**_NARROW, **LABELS}),
    "electra-choice": ("ElectraForMultipleChoice", _NARROW),
    "albert-sequence": ("AlbertForSequenceClassification", {**_NARROW, **LABELS}),
    "albert-span": ("AlbertForQuestionAnswering", _NARROW),
    "modernbert-sequence": (
        "ModernBertForSequenceClassification",
        {**_MODERN, **LABELS, "classifier_pooling": "mean", "classifier_bias": True},
    ),
    "modernbert-cls": ("ModernBertForSequenceClassification", {**_MODERN, **LABELS}),
    "modernbert-choice": ("ModernBertForMultipleChoice", _MODERN),
    "modernbert-token": ("ModernBertForTokenClassification", {**_MODERN, **LABELS}),
    "modernbert-span": ("ModernBertForQuestionAnswering", _MODERN),
    "eurobert-late": ("EuroBertForSequenceClassification", LABELS),
    "eurobert-mean": (
        "EuroBertForSequenceClassification",
        {**LABELS, "classifier_pooling": "mean"},
    ),
    "eurobert-token": ("EuroBertForTokenClassification", LABELS),
    "modernbert-decoder-sequence": (
        "ModernBertDecoderForSequenceClassification",
        {**_MODERN, **LABELS, "classifier_bias": True, "norm_bias": True},
    ),
    "ultrabert-sequence": (
        "UltrabertForSequenceClassification",
        {**LABELS, **_TURNS, "num_hidden_layers": 3, "classifier_pooling": "mean"},
    ),
    "ultrabert-span": ("UltrabertForQuestionAnswering", {**_TURNS, "num_hidden_layers": 3}),
    "mpnet-sequence": ("MPNetForSequenceClassification", LABELS),
    "mpnet-choice": ("MPNetForMultipleChoice", {}),
    "deberta-2-sequence": ("DebertaV2ForSequenceClassification", {**_DEBERTA_3, **LABELS}),
    "deberta-2-choice": ("DebertaV2ForMultipleChoice", _DEBERTA_3),
    "deberta-2-span": ("DebertaV2ForQuestionAnswering", _DEBERTA_3),
    "deberta-xlarge-sequence": ("DebertaV2ForSequenceClassification", {**_DEBERTA_3, **_XLARGE}),
    "deberta-token": ("DebertaForTokenClassification", {**_DEBERTA, **LABELS}),
    "mpnet-span": ("MPNetForQuestionAnswering", {}),
    "gte-sequence": ("GteForSequenceClassification", LABELS),
    "jina-sequence": ("JinaEmbeddingsV3ForSequenceClassification", LABELS),
    "megatron-choice": ("MegatronBertForMultipleChoice", {}),
    "prelayernorm-sequence": ("RobertaPreLayerNormForSequenceClassification", LABELS),
    "roberta-xl-span": ("XLMRobertaXLForQuestionAnswering", {}),
    "longformer-token": ("LongformerForTokenClassification", {**LABELS, "attention_window": 4}),
    "luke-sequence": ("LukeForSequenceClassification", {**LABELS, "entity_vocab_size": 11}),
    "luke-choice": ("LukeForMultipleChoice", {"entity_vocab_size": 11}),
    "luke-span": ("LukeForQuestionAnswering", {"entity_vocab_size": 11}),
    "rembert-sequence": ("RemBertForSequenceClassification", {**_REM, **LABELS}),
    "rembert-choice": ("RemBertForMultipleChoice", _REM),
    "rembert-token": ("RemBertForTokenClassification", {**_REM, **LABELS}),
    "rembert-span": ("RemBertForQuestionAnswering", _REM),
    "roformer-sequence": ("RoFormerForSequenceClassification", {**_NARROW, **LABELS}),
    "roformer-choice": ("RoFormerForMultipleChoice", {}),
    "roformer-token": ("RoFormerForTokenClassification", LABELS),
    "roformer-span": ("RoFormerForQuestionAnswering", {}),
    "ibert-sequence": ("IBertForSequenceClassification", LABELS),
    "ibert-choice": ("IBertForMultipleChoice", {}),
    "ibert-token": ("IBertForTokenClassification", LABELS),
    "ibert-span": ("IBertForQuestionAnswering", {}),
    "esm-sequence": ("EsmForSequenceClassification", {**_ESM, **LABELS}),
    "esm-token": ("EsmForTokenClassification", {**_ESM, **LABELS}),
    "mobilebert-sequence": ("MobileBertForSequenceClassification", {**_MOBILE, **LABELS}),
    "mobilebert-choice": ("MobileBertForMultipleChoice", _MOBILE),
    "mobilebert-token": ("MobileBertForTokenClassification", {**_MOBILE, **LABELS}),
    "mobilebert-span": ("MobileBertForQuestionAnswering", _MOBILE),
    "layoutlm-sequence": ("LayoutLMForSequenceClassification", LABELS),
    "layoutlm-token": ("LayoutLMForTokenClassification", LABELS),
    "layoutlm-span": ("LayoutLMForQuestionAnswering", {}),
    "lilt-sequence": ("LiltForSequenceClassification", {**LABELS, "channel_shrink_ratio": 3}),
    "lilt-token": ("LiltForTokenClassification", LABELS),
    "lilt-span": ("LiltForQuestionAnswering", {"channel_shrink_ratio": 6}),
    "xmod-sequence": (
        "XmodForSequenceClassification",
        {**_XMOD, **LABELS, "adapter_reuse_layer_norm": False, "adapter_reduction_factor": 3},
    ),
    "xmod-choice": ("XmodForMultipleChoice", {**_XMOD, "adapter_layer_norm": True}),
    "xmod-token": ("XmodForTokenClassification", {**_XMOD, **LABELS}),
    "xmod-span": ("XmodForQuestionAnswering", {**_XMOD, "ln_before_adapter": False}),
    "xlm-sequence": ("XLMForSequenceClassification", {**_XLM, **LABELS}),
    "convbert-sequence": ("ConvBertForSequenceClassification", {**_SPAN, **LABELS}),
    "convbert-choice": ("ConvBertForMultipleChoice", _SPAN),
    "convbert-token": ("ConvBertForTokenClassification", {**_SPAN, **LABELS}),
    "convbert-span": ("ConvBertForQuestionAnswering", _SPAN),
    "privacy-filter-token": ("OpenAIPrivacyFilterForTokenClassification", {**_FILTER, **LABELS}),
    "xlm-token": ("XLMForTokenClassification", {**_XLM, **LABELS}),
    "flaubert-span": ("FlaubertForQuestionAnsweringSimple", _XLM),
    "nomic_bert-sequence": ("NomicBertForSequenceClassification", LABELS),
    "llama-sequence": ("LlamaForSequenceClassification", LABELS),
    "llama-span": ("LlamaForQuestionAnswering", {}),
    "qwen3-reward": (
        "Qwen3ForSequenceClassification",
        {"num_labels": 1, "head_dim": 12, **_ONE_HEAD},
    ),
    "qwen2-token": ("Qwen2ForTokenClassification", {**LABELS, **_ONE_HEAD}),
    "mistral-span": ("MistralForQuestionAnswering", _ONE_HEAD),
    "gpt2-sequence": ("GPT2ForSequenceClassification", {**LABELS, "intermediate_size": None}),
    "gpt2-token": ("GPT2ForTokenClassification", {**LABELS, "intermediate_size": None}),
    "gemma2-token": ("Gemma2ForTokenClassification", {**LABELS, "head_dim": 12, **_ONE_HEAD}),
    "gemma3-sequence": (
        "Gemma3TextForSequenceClassification",
        {**LABELS, "head_dim": 12, **_ONE_HEAD},
    ),
    "opt-sequence": (
        "OPTForSequenceClassification",
        {
            **LABELS,
            "intermediate_size": None,
            "ffn_dim": 44,
            "word_embed_proj_dim": 20,
            "do_layer_norm_before": False,
        },
    ),
    "neox-span": ("GPTNeoXForQuestionAnswering", {"rotary_pct": 0.5}),
    "bloom-token": (
        "BloomForTokenClassification",
        {**LABELS, "intermediate_size": None, "max_position_embeddings": None},
    ),
}


def _draw(case, model):
    randomize(model)
    if case.architecture.startswith("RoFormer"):  # whose angles are a parameter
        angles = model.base_model.encoder.embed_positions
        angles.weight.data.copy_(angles.create_weight())
    if case.architecture.startswith("ConvBert"):  # whose scores of spans are products of products
        for layer in model.base_model.encoder.layer:
            layer.attention.self.conv_kernel_layer.weight.data.mul_(0.1)


TABLE = Table(SIZES, _draw)
CASES = {name: Case(name, *row, TABLE) for name, row in (BASES | HEADS).items()}

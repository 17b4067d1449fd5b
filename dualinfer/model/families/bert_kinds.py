"""The differences between BERT's relatives: a row of `KINDS` for each.

HF sources: models/NAME/modeling_NAME.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..spec import Activation, Pooling
from .heads import Classifier

_BERT = ("attention.self.query", "attention.self.key", "attention.self.value")
_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForMultipleChoice")
_SPAN = "ForQuestionAnswering"
_ELECTRA = {"sequence": Classifier("classifier.out_proj", "classifier.dense", "gelu")}
_ROBERTA = {"sequence": Classifier("classifier.out_proj", "classifier.dense", "tanh")}
_DISTIL = Classifier("classifier", "pre_classifier", "relu")
_BERT_MASKED = (
    *("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
    *("cls.predictions.decoder", "cls.predictions.bias"),
)
_ROBERTA_MASKED = ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")


@dataclass(frozen=True)
class Kind:
    """The facts that tell one family from another.

    `name` begins HF's classes, `base` the names of their tensors, `layer` those of a layer's; `mlp`
    are a layer's names from gate or up to down, `norms` after attention and MLP. `masked` are the
    names of `masked_head`, `heads` those that are no plain classifier of the pooler's output or of
    each token. `unread` are parts of other classes' checkpoints. `fields` are HF's names of sizes
    where they differ. Where there is a norm at the `end`, those of layers are before sub-layers.
    Fields of a config that are `required` must have one value. By the kind of a head: `summaries`
    are what fields of HF's summary must be, with the values that are honoured,
    `head_activations` the fields that say the activation of `heads`, and `poolings` which state is
    read where it is not the first.
    """

    name: str
    base: str
    masked: tuple[str, str, str, str] | None
    layer: str = "encoder.layer.{i}."
    qkv: tuple[str, str, str] = _BERT
    out: str = "attention.output.dense"
    mlp: tuple[str, ...] = ("intermediate.dense", "output.dense")
    norms: tuple[str, str] = ("attention.output.LayerNorm", "output.LayerNorm")
    heads: Mapping[str, Classifier] = field(default_factory=dict)
    classes: tuple[str, ...] = (*_HEADS, _SPAN)
    unread: tuple[str, ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ("classifier_dropout",)
    pooler: str | None = "pooler.dense"
    bias: bool = True
    up_bias: bool | None = None  # of the MLP's first projection, where it is not `bias`
    end: str | None = None
    embed_norm: str | None = "LayerNorm"
    # Token types: "optional" where type_vocab_size may be 0, rows of the "vocab", or None for none.
    types: Literal["counted", "optional", "vocab"] | None = "counted"
    counts: bool = False  # positions are those of ids that are no padding
    pad: int | None = None  # the id that has no position, where no config says it
    rope: Literal["parameters", "interleaved", "stored"] | None = None
    bias_table: str | None = None  # of relative positions, which all layers share
    factored: str | None = None  # the projection of embeddings of a width of their own
    always_factored: bool = False  # even to their own width
    model: str = "Model"
    masked_name: str = "ForMaskedLM"
    embeddings: tuple[str, str, str] = ("embeddings.", "word_embeddings", "position_embeddings")
    buffers: tuple[str, ...] = ()  # patterns of tensors that are no weights
    masked_activation: Activation | None = None
    renames: tuple[tuple[str, str], ...] = ()
    eps: float | None = None  # of norms, where no config says it
    activation: Activation | None = None  # of layers, likewise
    gelu_flag: str | None = None  # a field that tells gelu from relu
    ffn_factor: int = 0  # the width of feed-forwards over that of the embedding, where none says it
    places: str = "absolute"  # what `position_embedding_type` must be
    norm_flag: str | None = None  # a field that says whether embeddings are normed
    drops: bool = False  # the embedding of masks, and blanks what a mask hides (ESM-2)
    norms_first: tuple[str, str] | None = None  # a field by which norms do so, and that at the end
    adapts: bool = False  # a layer ends in adapters, one of each language (X-MOD)
    boxes: str | None = None  # a field that counts the edges of boxes on a page (LayoutLM)
    hides: bool = False  # the padding where there is no mask
    grouped: bool = False  # layers share weights by groups (ALBERT)
    scored: str | None = None  # the width before the vocabulary, which then is never tied
    required: Mapping[str, Any] = field(default_factory=dict)
    summaries: Mapping[str, Mapping[str, tuple[Any, ...]]] = field(default_factory=dict)
    head_activations: Mapping[str, str] = field(default_factory=dict)
    poolings: Mapping[str, Pooling] = field(default_factory=dict)
    windowed: str | None = None  # a field of the tokens that a layer sees, half on either side
    spans: bool = False  # has heads that mix spans of tokens (ConvBERT)
    packed: str | None = None  # where files may have queries, keys and values as one
    packed_up: str | None = None  # where they may have up and gate as one, in this order


OLD_NORMS = ("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")
_ROBERTAS: dict[str, Any] = {
    "base": "roberta.",
    "masked": _ROBERTA_MASKED,
    "heads": _ROBERTA,
    "unread": ("lm_head.",),
    "masked_activation": "gelu",
    "counts": True,
}
_MPNET: dict[str, Any] = {**_ROBERTAS, "name": "MPNet", "base": "mpnet."}
_IBERT: dict[str, Any] = {**_ROBERTAS, "name": "IBert", "base": "ibert."}
_DATA2VEC: dict[str, Any] = {**_ROBERTAS, "name": "Data2VecText", "base": "data2vec_text."}
_XMOD: dict[str, Any] = {**_ROBERTAS, "name": "Xmod"}
_BEFORE: dict[str, Any] = {**_ROBERTAS, "name": "RobertaPreLayerNorm"}
_BEFORE |= {"base": "roberta_prelayernorm.", "end": "LayerNorm"}
_LONG: dict[str, Any] = {**_ROBERTAS, "name": "Longformer", "base": "longformer."}
_LUKE: dict[str, Any] = {**_ROBERTAS, "name": "Luke", "base": "luke."}
_XL: dict[str, Any] = {**_ROBERTAS, "name": "XLMRobertaXL", "end": "encoder.LayerNorm"}
_LATER: dict[str, Any] = {  # as transformers names parts since 5
    "layer": "layers.{i}.",
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": "self_attn.o_proj",
    "norms": ("post_attention_layernorm", "post_mlp_layernorm"),
    "unread": ("lm_head.",),
    "masked_activation": "gelu",
    "rope": "parameters",
}
_SUMMARY = {"summary_type": ("first",), "summary_use_proj": (True,)}
_NO_ACTIVATION: dict[str, tuple[Any, ...]] = {"summary_activation": ()}
_XLM: dict[str, Any] = {
    "base": "transformer.",
    "masked": ("", "", "pred_layer.proj", "pred_layer.proj.bias"),
    "layer": "",
    "qkv": ("attentions.{i}.q_lin", "attentions.{i}.k_lin", "attentions.{i}.v_lin"),
    "out": "attentions.{i}.out_lin",
    "mlp": ("ffns.{i}.lin1", "ffns.{i}.lin2"),
    "norms": ("layer_norm1.{i}", "layer_norm2.{i}"),
    "heads": {"sequence": Classifier("sequence_summary.summary")},
    "classes": ("ForSequenceClassification", "ForTokenClassification", f"{_SPAN}Simple"),
    "unread": ("pred_layer.",),
    "fields": {
        **{"hidden_size": "emb_dim", "num_attention_heads": "n_heads"},
        "num_hidden_layers": "n_layers",
    },
    "required": {"causal": False, "asm": False, "is_encoder": True, "pre_norm": False},
    "gelu_flag": "gelu_activation",
    "ffn_factor": 4,
    "hides": True,
    "summaries": {"sequence": {**_SUMMARY, "summary_proj_to_labels": (True,)} | _NO_ACTIVATION},
    "ignored": (
        *("summary_type", "summary_use_proj", "summary_proj_to_labels", "summary_activation"),
        *("dropout", "attention_dropout", "embed_init_std", "init_std", "layerdrop", "bos_index"),
        *("eos_index", "pad_index", "unk_index", "mask_index", "mask_token_id", "lang_id"),
        *("start_n_top", "end_n_top", "summary_first_dropout", "sinusoidal_embeddings"),
        *("n_langs", "use_lang_emb", "lang2id", "id2lang", "max_vocab", "min_count"),
        # Of training, which files say too.
        *("amp", "bptt", "clip_grad_norm", "encoder_only", "english_only", "fp16", "group_by_size"),
        *("langs", "lg_sampling_factor", "lgs", "max_batch_size", "mlm_steps", "same_enc_dec"),
        *("sample_alpha", "share_inout_emb", "tokens_per_batch", "word_blank", "word_dropout"),
        *("word_keep", "word_mask", "word_mask_keep_rand", "word_pred", "word_rand"),
        "word_shuffle",
    ),
    "pooler": None,
    "embed_norm": "layer_norm_emb",
    "embeddings": ("", "embeddings", "position_embeddings"),
    "types": "vocab",
    "buffers": (r"(^|\.)lang_embeddings\.weight$", r"(^|\.)position_ids$"),
    "masked_name": "WithLMHeadModel",
}
_GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
KINDS = {
    "bert": Kind("Bert", "bert.", _BERT_MASKED, unread=("cls.",)),
    "roberta": Kind("Roberta", **_ROBERTAS),
    "xlm-roberta": Kind("XLMRoberta", **_ROBERTAS),
    "camembert": Kind("Camembert", **_ROBERTAS),
    "data2vec-text": Kind(**_DATA2VEC),
    "xmod": Kind(**_XMOD, norms_first=("pre_norm", "encoder.LayerNorm"), adapts=True),
    "roberta-prelayernorm": Kind(
        **_BEFORE, norms=("attention.LayerNorm", "intermediate.LayerNorm")
    ),
    "xlm-roberta-xl": Kind(
        **_XL, norms=("attention.self_attn_layer_norm", "LayerNorm"), embed_norm=None
    ),
    # Without what sees all tokens: heads for a text as a whole make their first tokens such.
    "longformer": Kind(
        **{**_LONG, "heads": {}},
        classes=_HEADS[1:2],
        buffers=(r"\.self\.(query|key|value)_global\.",),
        ignored=("sep_token_id",),
        required={"onnx_export": False},
        windowed="attention_window",
    ),
    # Without entities, of which HF takes none where a caller names none.
    "luke": Kind(
        **{**_LUKE, "heads": {}},
        classes=(*_HEADS, _SPAN),
        buffers=(
            r"\.self\.(w2e|e2w|e2e)_query\.",
            r"(^|\.)(entity_embeddings|entity_predictions)\.",
        ),
        ignored=(
            *(
                "classifier_dropout",
                "entity_vocab_size",
                "entity_emb_size",
                "cls_entity_prediction",
            ),
            "use_entity_aware_attention",
        ),
    ),
    "megatron-bert": Kind(
        *("MegatronBert", "bert.", _BERT_MASKED),
        norms=("attention.ln", "ln"),
        end="encoder.ln",
        embed_norm=None,
        unread=("cls.",),
    ),
    "ernie": Kind(
        *("Ernie", "ernie.", _BERT_MASKED),
        unread=("cls.",),
        ignored=("classifier_dropout", "task_type_vocab_size", "pool_act"),
    ),
    "layoutlm": Kind(
        *("LayoutLM", "layoutlm.", _BERT_MASKED),
        classes=(*_HEADS[:2], _SPAN),
        unread=("cls.",),
        boxes="max_2d_position_embeddings",
    ),
    "gte": Kind(
        *("Gte", "gte.", (*_ROBERTA_MASKED[:3], "lm_head.decoder.bias")),
        **_LATER,
        mlp=_GATED,
        up_bias=False,
        types="optional",
        classes=_HEADS[:2],
        # Of files that the makers' own code wrote, and transformers writes too.
        renames=(
            *(("gte.", "new."), ("layers.", "encoder.layer.")),
            *(("self_attn.o_proj", "attention.o_proj"), ("lm_head.layer_norm", "lm_head.norm")),
            *(("post_attention_layernorm", "attn_ln"), ("post_mlp_layernorm", "mlp_ln")),
        ),
        packed="attention.qkv_proj",
        packed_up="mlp.up_gate_proj",
    ),
    "jina_embeddings_v3": Kind(
        *("JinaEmbeddingsV3", "roberta.", _ROBERTA_MASKED),
        **_LATER,
        mlp=("mlp.fc1", "mlp.fc2"),
        heads=_ROBERTA,
        classes=(*_HEADS[:2], _SPAN),
        renames=(
            *(("embeddings.LayerNorm", "emb_ln"), ("layers.", "encoder.layers.")),
            *(("self_attn.o_proj", "mixer.out_proj"), ("post_attention_layernorm", "norm1")),
            ("post_mlp_layernorm", "norm2"),
        ),
        packed="mixer.Wqkv",
    ),
    "distilbert": Kind(
        *("DistilBert", "distilbert."),
        ("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"),
        layer="transformer.layer.{i}.",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        out="attention.out_lin",
        mlp=("ffn.lin1", "ffn.lin2"),
        norms=("sa_layer_norm", "output_layer_norm"),
        heads={"sequence": _DISTIL, "choice": _DISTIL},
        unread=("vocab_",),
        fields={
            **{"hidden_size": "dim", "num_attention_heads": "n_heads", "hidden_act": "activation"},
            **{"num_hidden_layers": "n_layers", "intermediate_size": "hidden_dim"},
        },
        ignored=(
            *("dropout", "attention_dropout", "qa_dropout", "seq_classif_dropout"),
            *("sinusoidal_pos_embds", "tie_weights_"),
        ),
        pooler=None,
        types=None,
        eps=1e-12,
    ),
    "electra": Kind(
        *("Electra", "electra."),
        (
            *("generator_predictions.dense", "generator_predictions.LayerNorm"),
            *("generator_lm_head", "generator_lm_head.bias"),
        ),
        heads={
            **_ELECTRA,
            "choice": Classifier("classifier", "sequence_summary.summary"),
            "replaced": Classifier(
                "discriminator_predictions.dense_prediction", "discriminator_predictions.dense"
            ),
        },
        classes=(*_HEADS, _SPAN, "ForPreTraining"),
        summaries={"choice": _SUMMARY},
        head_activations={"choice": "summary_activation", "replaced": "hidden_act"},
        unread=("discriminator_predictions.", "generator_"),
        ignored=(
            *("classifier_dropout", "summary_last_dropout", "summary_type", "summary_use_proj"),
            "summary_activation",
        ),
        pooler=None,
        factored="embeddings_project",
        masked_activation="gelu",
    ),
    "convbert": Kind(
        *("ConvBert", "convbert."),
        (
            *("generator_predictions.dense", "generator_predictions.LayerNorm"),
            *("generator_lm_head", "generator_lm_head.bias"),
        ),
        heads={"sequence": _ELECTRA["sequence"], "choice": Classifier("classifier")},
        summaries={
            "choice": {"summary_type": ("last",), "summary_use_proj": (False,)} | _NO_ACTIVATION
        },
        head_activations={"sequence": "hidden_act"},
        poolings={"choice": "final"},
        unread=("discriminator_predictions.", "generator_"),
        required={"num_groups": 1},
        ignored=(
            *("classifier_dropout", "summary_last_dropout", "summary_type", "summary_use_proj"),
            "summary_activation",
        ),
        pooler=None,
        factored="embeddings_project",
        masked_activation="gelu",
        spans=True,
    ),
    "albert": Kind(
        *("Albert", "albert."),
        ("predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias"),
        layer="encoder.albert_layer_groups.{group}.albert_layers.{inner}.",
        qkv=("attention.query", "attention.key", "attention.value"),
        out="attention.dense",
        mlp=("ffn", "ffn_output"),
        norms=("attention.LayerNorm", "full_layer_layer_norm"),
        unread=("predictions.", "sop_classifier."),
        ignored=(
            *("classifier_dropout_prob", "down_scale_factor", "gap_size", "net_structure_type"),
            *("num_memory_blocks", "layers_to_keep"),
        ),
        pooler="pooler",
        factored="encoder.embedding_hidden_mapping_in",
        always_factored=True,
        grouped=True,
    ),
    "rembert": Kind(
        *("RemBert", "rembert."),
        (
            *("cls.predictions.dense", "cls.predictions.LayerNorm"),
            *("cls.predictions.decoder", "cls.predictions.decoder.bias"),
        ),
        unread=("cls.",),
        fields={"embedding_size": "input_embedding_size"},
        ignored=("classifier_dropout_prob", "tie_word_embeddings", "output_embedding_size"),
        scored="output_embedding_size",
        factored="encoder.embedding_hidden_mapping_in",
        always_factored=True,
    ),
    "roformer": Kind(
        *("RoFormer", "roformer.", _BERT_MASKED),
        heads={"sequence": _ELECTRA["sequence"], "choice": Classifier("classifier")},
        summaries={
            "choice": {"summary_type": ("last",), "summary_use_proj": (False,)} | _NO_ACTIVATION
        },
        head_activations={"sequence": "hidden_act"},
        poolings={"choice": "final"},
        unread=("cls.",),
        pooler=None,
        rope="interleaved",
        factored="embeddings_project",
        buffers=(r"embed_positions\.weight$",),
    ),
    "ibert": Kind(
        **_IBERT,
        # Of the quantized model, which files hold as well.
        buffers=(
            r"\.(weight_integer|bias_integer|fc_scaling_factor|weight_scaling_factor)$",
            r"\.(x_min|x_max|act_scaling_factor|shift)$",
        ),
        ignored=("classifier_dropout", "force_dequant"),
    ),
    "esm": Kind(
        *("Esm", "esm.", _ROBERTA_MASKED),
        norms=("attention.LayerNorm", "LayerNorm"),
        heads=_ROBERTA,
        classes=_HEADS[:2],
        unread=("lm_head.",),
        ignored=("classifier_dropout", "esmfold_config", "vocab_list", "hidden_act"),
        end="encoder.emb_layer_norm_after",
        embed_norm="layer_norm",
        norm_flag="emb_layer_norm_before",
        drops=True,
        activation="gelu",
        places="rotary",  # or ESM-1b's absolute
        required={"is_folding_model": False, "tie_word_embeddings": True},
        types=None,
        rope="stored",
        masked_activation="gelu",
        # By each layer's name in older files; transformers 5.23 writes `*` in a number's place.
        renames=tuple(
            ("rotary_embeddings.", f"encoder.layer.{i}.attention.self.rotary_embeddings.")
            for i in "*0"
        ),
        buffers=(r"(^|\.)contact_head\.", r"\.self\.rotary_embeddings\.inv_freq$"),
    ),
    "splinter": Kind(
        *("Splinter", "splinter.", None),
        classes=(),
        unread=("splinter_qss.",),
        pooler=None,
        ignored=("question_token_id", "initializer_range"),
    ),
    "xlm": Kind("XLM", **_XLM),
    "flaubert": Kind("Flaubert", **_XLM),
    "bert-generation": Kind(
        *("BertGeneration", "bert.", None),
        classes=(),
        unread=("lm_head.",),
        pooler=None,
        types=None,
        model="Encoder",
    ),
    "mpnet": Kind(
        **_MPNET,
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        out="attention.attn.o",
        norms=("attention.LayerNorm", "output.LayerNorm"),
        ignored=("pad_token_id",),
        types=None,
        pad=1,
        bias_table="encoder.relative_attention_bias.weight",
    ),
    "nomic_bert": Kind(
        *("NomicBert", "nomic_bert."),
        (
            *("cls.predictions.transform.dense", "cls.predictions.transform.layer_norm"),
            *_BERT_MASKED[2:],
        ),
        layer="layers.{i}.",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.o_proj",
        mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        norms=("post_attention_layernorm", "post_mlp_layernorm"),
        classes=_HEADS[:2],
        unread=("cls.",),
        bias=False,
        rope="parameters",
        # Of files that the maker's own code wrote.
        renames=(
            *(("nomic_bert.", "bert."), ("embeddings.LayerNorm", "emb_ln")),
            *(("layers.", "encoder.layers."), ("self_attn.o_proj", "attn.out_proj")),
            *(("mlp.up_proj", "mlp.fc11"), ("mlp.gate_proj", "mlp.fc12")),
            *(("mlp.down_proj", "mlp.fc2"), ("post_attention_layernorm", "norm1")),
            ("post_mlp_layernorm", "norm2"),
        ),
        packed="attn.Wqkv",
    ),
}

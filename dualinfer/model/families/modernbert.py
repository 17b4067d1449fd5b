"""ModernBERT, EuroBERT: encoders with rotary positions and norms before each sub-layer; Ettin.

Ettin is ModernBERT as a decoder, which looks back alone.

HF sources: models/modernbert, models/eurobert.
"""

from dataclasses import replace

from ...blocks.bare_attention import BareAttention
from ...errors import UnservedError, shown
from .. import rows as make
from ..spec import Attention, Embedding, Head, Layer, Mlp, ModelSpec, Norm, Pooling
from ..weights import Row, WeightTable, row
from .fields import ConfigFields
from .heads import Classifier, kind_of_head, make_head, masked_head
from .rope import make_rope, reach, ropes_by_kind

_HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
CLASSES = {
    "modernbert": (
        "ModernBertModel",
        *(f"ModernBert{name}" for name in (*_HEADS, "ForQuestionAnswering", "ForMultipleChoice")),
    ),
    "modernbert-decoder": tuple(
        f"ModernBertDecoder{end}" for end in ("ForCausalLM", "Model", "ForSequenceClassification")
    ),
    "eurobert": ("EuroBertModel", *(f"EuroBert{name}" for name in _HEADS)),
    "ultrabert": (
        *("UltrabertModel", "UltrabertForSequenceClassification"),
        *("UltrabertForTokenClassification", "UltrabertForQuestionAnswering"),
    ),
}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a ModernBERT, EuroBERT or UltraBERT model."""
    describe_own = _euro if fields.family in ("eurobert", "ultrabert") else _modern
    spec, table = describe_own(fields, architecture)
    if spec.head is not None:
        counted = spec.head.of_vocab or spec.head.kind == "span"
        head = replace(spec.head, loss="counted" if counted else "mean")
        spec = replace(spec, head=head)
    return spec, replace(table, spec=spec)


def _modern(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    embed, heads, head_dim = fields.split("hidden_size", "num_attention_heads")
    positions = fields.size("max_position_embeddings")
    norm = Norm("layer", fields.number("norm_eps"))
    norm_bias = fields.flag("norm_bias", False)
    kinds = fields.layer_types(fields.layers("num_hidden_layers"))
    parameters = ropes_by_kind(fields.take("rope_parameters"), kinds)
    decodes, side = fields.family == "modernbert-decoder", fields.size("local_attention") // 2
    side = fields.size("sliding_window", side) if decodes else side + 1  # on either side
    mlp = Mlp(fields.size("intermediate_size"), fields.activation("hidden_activation"), gated=True)
    blocks = {}
    for kind in dict.fromkeys(kinds):
        rope = make_rope(parameters[kind], head_dim, positions)
        window = side if kind == "sliding_attention" else None
        shape = heads, heads, head_dim, head_dim**-0.5
        blocks[kind] = Layer(Attention(*shape, decodes, window, rope), mlp, norm, "pre")
    first = blocks[kinds[0]]
    bare = replace(first, edits=(BareAttention(),))
    attention_bias, mlp_bias = (fields.flag(n, False) for n in ("attention_bias", "mlp_bias"))
    head, head_rows, ties = _modern_head(fields, architecture, norm, norm_bias)
    fields.ignore("attention_dropout", "mlp_dropout", "embedding_dropout", "classifier_dropout")
    fields.ignore("initializer_cutoff_factor", "deterministic_flash_attn", "reference_compile")
    fields.ignore("sparse_prediction", "sparse_pred_ignore_index")  # of the loss alone
    # HF folds these into layer_types and rope_parameters; its class takes no other embedding.
    fields.ignore("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta")
    fields.ignore("repad_logits_with_grad", "position_embedding_type", "layer_norm_eps")
    spec = ModelSpec(
        family=fields.family,
        architecture=architecture,
        vocab=fields.size("vocab_size"),
        embed=embed,
        layers=(bare, *(blocks[kind] for kind in kinds[1:])),
        max_positions=max(reach(parameters[kind], positions) for kind in kinds),
        embedding=Embedding(norm=norm),
        final_norm=norm,
        head=head,
        pad_id=fields.take("pad_token_id") if decodes else None,
    )
    hf = "model.layers.{i}."
    qkv = make.linear("qkv", f"{hf}attn.Wqkv", "q+k+v embed", attention_bias)
    if decodes:
        qkv = make.joined("qkv", hf + "attn.{p}", make.QKV, attention_bias)

    def normed(ours: str, theirs: str) -> list[Row]:
        return (make.norm if norm_bias else make.norm_without_bias)(norm, ours, theirs)

    layer = [
        *qkv,
        *make.linear("out", f"{hf}attn.Wo", "embed q", attention_bias),
        *make.linear("up", f"{hf}mlp.Wi", "gate+up embed", mlp_bias),
        *make.linear("down", f"{hf}mlp.Wo", "embed up", mlp_bias),
        *normed("mlp_norm", f"{hf}mlp_norm"),
    ]
    embedding = "model.embeddings.tok_embeddings.weight"
    outer = [
        row("embed.weight", "vocab embed", (embedding, "vocab embed")),
        *normed("embed_norm", "model.embeddings.norm"),
        *normed("final_norm", "model.final_norm"),
        *head_rows,
    ]
    later = (*normed("attn_norm", f"{hf}attn_norm"), *layer)
    table = WeightTable(
        spec,
        tuple(outer),
        (tuple(layer), *(later,) * (len(kinds) - 1)),
        base="model.",
        unused=(r"^(lm_)?head\.", r"^decoder\.") if head is None else (),
        tied=ties,
    )
    return spec, table


def _modern_head(
    fields: ConfigFields, architecture: str, norm: Norm, norm_bias: bool
) -> tuple[Head | None, list[Row], tuple[tuple[Row, str], ...]]:
    activation = fields.activation("classifier_activation")
    dense_bias = fields.flag("classifier_bias", False)
    tied = fields.flag("tie_word_embeddings", True)
    decoder_bias = fields.flag("decoder_bias", True)
    pooling = fields.take("classifier_pooling")
    kind, ties = kind_of_head(architecture), ()
    if architecture.endswith(("ForMaskedLM", "ForCausalLM")):
        base = "lm_head" if fields.family == "modernbert-decoder" else "head"
        names = f"{base}.dense", f"{base}.norm", "decoder", "decoder.bias"
        embedding = "model.embeddings.tok_embeddings.weight"
        own = norm, activation, names, embedding, tied
        head, rows, ties = masked_head(*own, dense_bias=dense_bias, bias=decoder_bias)
        head = head if base == "head" else replace(head, kind="causal")
    elif kind is None:
        return None, [], ()
    else:
        if fields.family == "modernbert-decoder":
            pooling = "last"
        elif pooling not in ("cls", "mean"):
            raise UnservedError(
                f"config.json has classifier_pooling={shown(pooling)}; the modernbert family "
                "honours cls and mean."
            )
        own = Classifier("classifier", "head.dense", activation, "head.norm", dense_bias)
        where = "mean" if pooling == "mean" else "real" if kind == "choice" else "first"
        if pooling == "last":
            own, where = replace(own, bias=dense_bias), "last"
        head, rows = make_head(fields, kind, own, where, norm)
    if not norm_bias:
        plain = make.plain_norm(norm, "head.norm")[1]
        rows = [plain if r.name == "head.norm.bias" else r for r in rows]
    return head, rows, ties


def _euro(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    embed = fields.size("hidden_size")
    heads, kv_heads, head_dim = fields.grouped_heads(embed)
    positions = fields.size("max_position_embeddings")
    norm = Norm("rms", fields.number("rms_norm_eps"))
    count, has_kinds = fields.layers("num_hidden_layers"), fields.family == "ultrabert"
    kinds = fields.layer_types(count) if has_kinds else ["full_attention"] * count
    given = fields.take("rope_parameters")
    parameters = ropes_by_kind(given, kinds) if has_kinds else {"full_attention": given}
    shape = heads, kv_heads, head_dim, head_dim**-0.5, False
    windows = fields.windows(kinds)
    attentions = {
        kind: Attention(
            *shape,
            None if window is None else window + 1,  # HF counts those on one side
            make_rope(parameters[kind], head_dim, positions),
        )
        for kind, window in zip(kinds, windows, strict=True)
    }
    mlp = Mlp(fields.size("intermediate_size"), fields.activation("hidden_act"), gated=True)
    blocks = {kind: Layer(own, mlp, norm, "pre") for kind, own in attentions.items()}
    bias, mlp_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    tied = fields.flag("tie_word_embeddings", False)
    names = ("cls", "mean") if has_kinds else ("bos", "mean", "late")
    pooling = fields.take("classifier_pooling", names[-1] if not has_kinds else "cls")
    fields.ignore("attention_dropout", "classifier_dropout", "num_key_value_heads")
    fields.ignore("prediction_head_size")  # of a head that is not served
    kind, embedding, ties = kind_of_head(architecture), "model.embed_tokens.weight", ()
    head, head_rows, unused = None, [], (r"^(lm_)?head\.",)
    if architecture.endswith("ForMaskedLM"):
        weight, *biases = make.linear("head", "lm_head", "vocab embed", mlp_bias)
        head, head_rows, unused = Head("masked"), biases if tied else [weight, *biases], ()
        ties = ((weight, embedding),) if tied else ()
    elif kind is not None:
        if pooling not in names:
            raise UnservedError(
                f"config.json has classifier_pooling={shown(pooling)}; the {fields.family} family "
                f"honours {' and '.join(names)}."
            )
        own = Classifier("qa_outputs" if kind == "span" else "classifier")
        if kind == "sequence" and not has_kinds:
            own = Classifier("classifier", "dense", "gelu")
        where: Pooling = "first" if pooling in ("bos", "cls") else "mean"
        head, head_rows = make_head(fields, kind, own, "late" if pooling == "late" else where)
    spec = ModelSpec(
        family=fields.family,
        architecture=architecture,
        vocab=fields.size("vocab_size"),
        embed=embed,
        layers=tuple(blocks[kind] for kind in kinds),
        max_positions=max(reach(parameters[kind], positions) for kind in kinds),
        final_norm=norm,
        head=head,
    )
    hf = "model.layers.{i}."
    layer = [
        *make.norm(norm, "attn_norm", f"{hf}input_layernorm"),
        *make.norm(norm, "mlp_norm", f"{hf}post_attention_layernorm"),
        *make.joined("qkv", hf + "self_attn.{p}", make.QKV, bias),
        *make.linear("out", f"{hf}self_attn.o_proj", "embed q", bias),
        *make.joined("up", hf + "mlp.{p}", make.GATE_UP, mlp_bias),
        *make.linear("down", f"{hf}mlp.down_proj", "embed up", mlp_bias),
    ]
    outer = [
        row("embed.weight", "vocab embed", (embedding, "vocab embed")),
        *make.norm(norm, "final_norm", "model.norm"),
        *head_rows,
    ]
    layers = (tuple(layer),) * len(spec.layers)
    # HF's classes with heads for labels call an UltraBERT by its name.
    renames = (("model.", "ultrabert."),) if has_kinds and kind_of_head(architecture) else ()
    table = WeightTable(spec, tuple(outer), layers, "model.", renames, unused, tied=ties)
    return spec, table

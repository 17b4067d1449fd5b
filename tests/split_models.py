"""Tiny HF models of every kind that module mode splits, with odd widths and vocabularies."""

import torch

VOCAB, FFN, LAYERS = 131, 101, 2
_ROUNDED = dict(vocab_size=VOCAB, num_hidden_layers=LAYERS)
_LLAMA = dict(
    **_ROUNDED,
    hidden_size=48,
    intermediate_size=FFN,
    num_attention_heads=6,
    num_key_value_heads=3,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_BERT = dict(
    **_ROUNDED,
    hidden_size=48,
    intermediate_size=FFN,
    num_attention_heads=6,
    max_position_embeddings=64,
    pad_token_id=0,
)
_GPT = dict(vocab_size=VOCAB, n_positions=64, n_embd=48, n_layer=LAYERS, n_head=6, n_inner=FFN)
_MOE = dict(num_experts_per_tok=2, output_router_logits=False)
_FALCON = dict(
    vocab_size=VOCAB, hidden_size=48, num_hidden_layers=LAYERS, num_attention_heads=6, bias=True
)

MODELS = {
    "llama": ("Llama", _LLAMA),
    "llama kv 4 of 8": (
        "Llama",
        _LLAMA | dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=4),
    ),
    "llama kv 2": ("Llama", _LLAMA | dict(num_key_value_heads=2)),
    "llama kv 1, tied, biased": (
        "Llama",
        _LLAMA
        | dict(num_key_value_heads=1, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    ),
    "mistral": ("Mistral", _LLAMA | dict(sliding_window=4)),
    "qwen2": ("Qwen2", _LLAMA),
    "qwen3": ("Qwen3", _LLAMA | dict(head_dim=12)),
    "gemma": ("Gemma", _LLAMA | dict(head_dim=10)),
    "gpt2": ("GPT2", _GPT),
    "bloom": ("Bloom", dict(vocab_size=VOCAB, hidden_size=48, n_layer=LAYERS, n_head=6)),
    "falcon, multi-head": ("Falcon", _FALCON | dict(multi_query=False, alibi=True)),
    "falcon, multi-query": ("Falcon", _FALCON | dict(multi_query=True)),
    "falcon, new": (
        "Falcon",
        _FALCON | dict(new_decoder_architecture=True, num_kv_heads=2, multi_query=True),
    ),
    "t5": (
        "T5",
        dict(
            vocab_size=VOCAB,
            d_model=48,
            d_kv=10,
            d_ff=FFN,
            num_layers=LAYERS,
            num_heads=5,
            decoder_start_token_id=0,
        ),
    ),
    "t5, gated": (
        "T5",
        dict(
            vocab_size=VOCAB,
            d_model=48,
            d_kv=10,
            d_ff=FFN,
            num_layers=LAYERS,
            num_heads=5,
            decoder_start_token_id=0,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        ),
    ),
    "mixtral": ("Mixtral", _LLAMA | _MOE | dict(num_local_experts=4, intermediate_size=40)),
    "bert": ("Bert", _BERT | dict(is_decoder=False)),
    "qwen2-moe": (
        "Qwen2Moe",
        _LLAMA
        | _MOE
        | dict(num_experts=4, moe_intermediate_size=24, shared_expert_intermediate_size=51),
    ),
    "phi": ("Phi", _LLAMA),
    "phi-3": ("Phi3", _LLAMA),
    "gpt-neox": ("GPTNeoX", {k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"}),
    "gpt-j": ("GPTJ", _GPT | dict(rotary_dim=4)),
    "gpt-neo": (
        "GPTNeo",
        dict(
            vocab_size=VOCAB,
            hidden_size=48,
            num_layers=LAYERS,
            num_heads=6,
            intermediate_size=FFN,
            max_position_embeddings=64,
            attention_types=[[["global", "local"], 1]],
            window_size=4,
        ),
    ),
    "gpt-bigcode": ("GPTBigCode", _GPT | dict(multi_query=True)),
    "gpt-bigcode, multi-head": ("GPTBigCode", _GPT | dict(multi_query=False)),
    "opt": (
        "OPT",
        dict(
            **_ROUNDED,
            hidden_size=48,
            ffn_dim=FFN,
            num_attention_heads=6,
            word_embed_proj_dim=48,
            max_position_embeddings=64,
        ),
    ),
    "mpt": ("Mpt", dict(vocab_size=VOCAB, d_model=48, n_heads=6, n_layers=LAYERS, max_seq_len=64)),
    "codegen": ("CodeGen", _GPT | dict(n_embd=96, n_head=12, rotary_dim=4)),
    "roberta": ("Roberta", _BERT | dict(pad_token_id=1)),
    "distilbert": (
        "DistilBert",
        dict(
            vocab_size=VOCAB,
            dim=48,
            n_heads=6,
            hidden_dim=FFN,
            n_layers=LAYERS,
            max_position_embeddings=64,
        ),
    ),
    "albert": ("Albert", _BERT | dict(embedding_size=20)),
    "deberta-v2": (
        "DebertaV2",
        _BERT
        | dict(
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=8,
            share_att_key=False,
            type_vocab_size=0,
        ),
    ),
    "bart": (
        "Bart",
        dict(
            vocab_size=VOCAB,
            d_model=48,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=6,
            decoder_attention_heads=4,
            encoder_ffn_dim=FFN,
            decoder_ffn_dim=83,
            max_position_embeddings=64,
            scale_embedding=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
        ),
    ),
    "stablelm": ("StableLm", _LLAMA | dict(qk_layernorm=True)),
    "cohere": ("Cohere", _LLAMA | dict(use_qk_norm=True)),
    "glm": ("Glm", _LLAMA | dict(head_dim=8)),
}
_HEADS = {"T5": "ForConditionalGeneration", "Bart": "ForConditionalGeneration"}
MASKED = ("Bert", "Roberta", "DistilBert", "Albert", "DebertaV2")


def make_model(name, **fields):
    """The model in eval mode, its weights the same in each process."""
    import transformers

    kind, config = MODELS[name]
    head = _HEADS.get(kind, "LMHeadModel" if kind == "GPT2" else "ForCausalLM")
    head = "ForMaskedLM" if kind in MASKED else head
    made = getattr(transformers, f"{kind}Config")(**(config | fields))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}{head}")(made)
        with torch.no_grad():
            for parameter in model.parameters():  # HF's biases of zero would hide mistakes
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()

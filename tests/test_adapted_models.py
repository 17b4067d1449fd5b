"""What adapters bring beside low ranks: embeddings, vocabularies, heads, biases; peft is right."""

import copy
import json

import numpy as np
import peft
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import dualinfer
from dualinfer.errors import CheckpointError, UnsupportedError

from .adapters import IDS, QUIET, adapt, logits, relative, wanted
from .cases import make_model
from .models import BACKENDS, slow_but

pytestmark = [*QUIET, pytest.mark.usefixtures("greedy")]
ROWS = 90
SIZES = {"vocab_size": ROWS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": 0}
TABLES = ["embed_tokens", "lm_head"]
TOKENS = [3, 7, 11]
# By what is trained of the embeddings: fields of LoRA's config, or a config.
TRAINED = {
    "both whole": {"modules_to_save": TABLES},
    "the embedding whole": {"modules_to_save": TABLES[:1]},
    "tied and whole": {"modules_to_save": TABLES[:1], "ensure_weight_tying": True},
    "both by rank": {"target_modules": ["q_proj", *TABLES]},
    "the embedding by rank": {"target_modules": ["q_proj", "embed_tokens"]},
    "the embedding by DoRA": {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True},
    "the head by rank": {"target_modules": ["q_proj", "lm_head"]},
    "tokens": {"trainable_token_indices": TOKENS},
    "tokens of both": {"trainable_token_indices": dict.fromkeys(TABLES, TOKENS)},
    "tokens alone": peft.TrainableTokensConfig(token_indices=TOKENS),
    "neither": {},
}


def llama(folder, rows=ROWS, **fields):
    """A tiny Llama whose embeddings have another number of rows than the folder that it is from."""
    torch.manual_seed(0)
    if not folder.exists():
        hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **fields)).save_pretrained(folder)
    model = hf.LlamaForCausalLM.from_pretrained(folder).eval()
    if rows != ROWS:
        model.resize_token_embeddings(rows, mean_resizing=False)
    return model


def trained(what, model, seed=1):
    own = TRAINED[what]
    if not isinstance(own, dict):
        return adapt(model, seed, config=copy.copy(own))
    return adapt(model, seed, **{"target_modules": ["q_proj"], **own})


def cases(*quick):
    """Every way of training at the vocabularies and ties that change what is stored."""
    found = []
    for what in TRAINED:
        for tied in (False, True):
            for rows in (ROWS, ROWS + 6, ROWS - 6):
                marks = [] if (what, tied, rows - ROWS) in quick else [pytest.mark.slow]
                found.append(pytest.param(what, tied, rows, marks=marks))
    return found


# Of an embedding or a head alone that is longer peft draws the other's new rows.
DRAWN = {"the embedding by rank", "the embedding by DoRA", "the head by rank", "tokens alone"}


@pytest.mark.parametrize(
    ("what", "tied", "rows"),
    cases(
        *((what, True, 0) for what in TRAINED),
        *((what, False, 6) for what in ("both whole", "both by rank", "tokens", "neither")),
        *((what, True, 6) for what in ("the embedding whole", "the embedding by rank", "tokens")),
        *((what, False, 6) for what in ("the embedding by DoRA", "the head by rank")),
        *((what, False, -6) for what in ("the embedding by rank", "the head by rank", "neither")),
    ),
)
def test_embeddings_of_an_adapter_are_what_peft_reads(what, tied, rows, tmp_path):
    """Saved with the layers that they change or not, tied to the head or not, longer or shorter."""
    model = llama(tmp_path / "base", rows, tie_word_embeddings=tied)
    live = trained(what, model)
    live.save_pretrained(tmp_path / "adapter", save_embedding_layers=rows != ROWS or "auto")
    expected = wanted(live)
    given = {"adapter": tmp_path / "adapter", "backend": "torch"}
    if rows > ROWS and not tied and what in DRAWN:
        with pytest.raises(CheckpointError, match=r"adapter brings .* for a vocabulary of 96, and"):
            logits(tmp_path / "base", **given)
    else:
        assert relative(logits(tmp_path / "base", **given)[0], expected) < 1e-5
    found, _ = logits(live, backend="torch", replace_with_kernel_inject=True)
    assert relative(found, expected) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_embeddings_saved_whole_are_read_once(backend, tmp_path):
    """Their trained rows, and not those of the model that peft writes beside them."""
    live = trained("both whole", llama(tmp_path / "base", ROWS + 6))
    live.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    held = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {"modules_to_save", "original_module"} < {part for n in held for part in n.split(".")}
    given = {"adapter": tmp_path / "adapter", "backend": backend}
    found, notes = logits(tmp_path / "base", **given)
    assert relative(found, wanted(live)) < 1e-5
    assert any("a vocabulary of 96, as the adapter" in note for note in notes)
    with dualinfer.init_inference(tmp_path / "base", dtype="float32", **given) as engine:
        engine.save_pretrained(tmp_path / "saved")
    saved = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert relative(wanted(saved), wanted(live)) < 1e-5


def test_what_is_of_another_vocabulary_blames_the_adapter(tmp_path):
    live = trained("the head by rank", llama(tmp_path / "base", ROWS + 6))
    live.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with pytest.raises(
        CheckpointError, match=r"The adapter .* changes lm_head\.weight by .*another vocabulary"
    ):
        dualinfer.init_inference(tmp_path / "base", adapter=tmp_path / "adapter")
    for rows in (96, 95):
        one = trained("both whole", llama(tmp_path / "base", rows))
        one.save_pretrained(tmp_path / str(rows), save_embedding_layers=True)
    with pytest.raises(CheckpointError, match=r"bring vocab of 96 and 95"):
        dualinfer.init_inference(tmp_path / "base", adapter=[tmp_path / "96", tmp_path / "95"])
    file = tmp_path / "adapter" / "adapter_config.json"
    for given in ([], [-1], ["a"], [3, 3], [1] * 4):
        live = trained("tokens", llama(tmp_path / "base"))
        live.save_pretrained(tmp_path / "adapter")
        fields = json.loads(file.read_text())
        file.write_text(json.dumps({**fields, "trainable_token_indices": given}))
        with pytest.raises(CheckpointError, match=r"has trained tokens, and|rows of shape"):
            dualinfer.init_inference(tmp_path / "base", adapter=tmp_path / "adapter")


# --- heads ----------------------------------------------------------------------------------------

TASKS = {
    "SEQ_CLS": (hf.AutoModelForSequenceClassification, peft.AutoPeftModelForSequenceClassification),
    "TOKEN_CLS": (hf.AutoModelForTokenClassification, peft.AutoPeftModelForTokenClassification),
    "QUESTION_ANS": (hf.AutoModelForQuestionAnswering, peft.AutoPeftModelForQuestionAnswering),
    "FEATURE_EXTRACTION": (hf.AutoModel, peft.AutoPeftModelForFeatureExtraction),
}


def with_head(model, task, folder, labels=1, **options):
    """The folder of an adapter for a task over a causal or masked model, and peft's logits."""
    model.save_pretrained(folder / "base")
    auto, auto_peft = TASKS[task]
    given = {} if task in ("QUESTION_ANS", "FEATURE_EXTRACTION") else {"num_labels": labels}
    torch.manual_seed(3)
    live = adapt(auto.from_pretrained(folder / "base", **given), task_type=task, **options)
    live.save_pretrained(folder / "adapter")
    return wanted(auto_peft.from_pretrained(folder / "adapter", **given).eval())


@pytest.mark.parametrize(
    ("name", "task", "labels", "target"),
    [
        ("qwen2", "SEQ_CLS", 1, "q_proj"),
        ("gpt2", "TOKEN_CLS", 3, "c_attn"),
        ("llama-gqa", "FEATURE_EXTRACTION", 0, "q_proj"),
        ("bert-masked", "QUESTION_ANS", 2, "query"),
        ("distilbert-masked", "SEQ_CLS", 2, "q_lin"),
        pytest.param("mistral", "SEQ_CLS", 5, "q_proj", marks=pytest.mark.slow),
        pytest.param("electra-masked", "SEQ_CLS", 3, "query", marks=pytest.mark.slow),
        pytest.param("modernbert-masked", "TOKEN_CLS", 2, "Wqkv", marks=pytest.mark.slow),
        pytest.param("deberta-2-masked", "TOKEN_CLS", 4, "query_proj", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("backend", slow_but(["torch"], BACKENDS))
def test_an_adapter_for_a_task_gives_what_peft_makes_for_it(
    name, task, labels, target, backend, tmp_path
):
    """Its head on the base model that it was trained on, whatever class that was saved as."""
    model = make_model(name)
    expected = with_head(model, task, tmp_path, labels, target_modules=[target])
    for where in ({"adapter": tmp_path / "adapter", "model": tmp_path / "base"}, None):
        given = where or {"model": tmp_path / "adapter"}
        found, notes = logits(**given, backend=backend)
        assert relative(found, expected) < 1e-5
        assert any(f"is for the task {task}" in note for note in notes)


def test_a_reward_adapter_on_a_live_model_and_saved(tmp_path):
    expected = with_head(make_model("qwen2"), "SEQ_CLS", tmp_path, target_modules=["q_proj"])
    options = {"adapter": tmp_path / "adapter", "dtype": "float32", "backend": "torch"}
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with dualinfer.init_inference(model, replace_with_kernel_inject=True, **options) as engine:
        assert relative(np.asarray(engine(IDS)[0]), expected) < 1e-5
        engine.save_pretrained(tmp_path / "saved")
    assert type(model.config).__name__ == "Qwen2Config" and model.config.num_labels == 2
    saved = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    assert relative(wanted(saved), expected) < 1e-5


def test_tasks_that_cannot_be_served_say_why(tmp_path):
    with_head(make_model("bert-masked"), "SEQ_CLS", tmp_path / "a", target_modules=["query"])
    with_head(make_model("llama-gqa"), "QUESTION_ANS", tmp_path / "b", target_modules=["q_proj"])
    with_head(make_model("llama-gqa"), "SEQ_CLS", tmp_path / "c", target_modules=["q_proj"])
    with_head(make_model("llama-gqa"), "TOKEN_CLS", tmp_path / "d", target_modules=["q_proj"])
    with_head(make_model("longformer"), "SEQ_CLS", tmp_path / "e", target_modules=["query"])
    for folder, message in (
        ("a", r"pooler\.dense\.weight, .* is neither in .* and peft would draw it anew"),
        ("b", r"has its base model as transformer\..*Pass a model that was saved as a Llama"),
        ("e", r"AutoPeftModelForSequenceClassification\.from_pretrained\(.*, num_labels=1\)"),
    ):
        with pytest.raises(CheckpointError, match=message):
            dualinfer.init_inference(tmp_path / folder / "adapter")
    both = [tmp_path / "c" / "adapter", tmp_path / "d" / "adapter"]
    with pytest.raises(CheckpointError, match="different tasks cannot be in one model"):
        dualinfer.init_inference(tmp_path / "c" / "base", adapter=both)
    # The way on that the last of these names.
    live = peft.AutoPeftModelForSequenceClassification.from_pretrained(
        tmp_path / "e" / "adapter", num_labels=1
    )
    found, _ = logits(live.eval(), backend="torch")
    assert relative(found, wanted(live)) < 1e-5


# --- biases, and layers that are not plain --------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_biases_are_added_where_the_model_has_none(backend, tmp_path):
    """peft's lora_bias, which peft itself cannot merge."""
    model = llama(tmp_path / "base")
    targets = ["q_proj", "o_proj", "gate_proj", "down_proj", "lm_head"]
    live = adapt(model, target_modules=targets, lora_bias=True)
    live.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    expected = wanted(live)
    given = {"adapter": tmp_path / "adapter", "backend": backend, "dtype": "float32"}
    given |= {"tensor_parallel": {"tp_size": 2}} if backend == "jax" else {}
    with dualinfer.init_inference(tmp_path / "base", **given) as engine:
        assert relative(np.asarray(engine(IDS)[0]), expected) < 1e-5
        with pytest.raises(UnsupportedError, match=r"q_proj\.bias.*has no place"):
            engine.save_pretrained(tmp_path / "saved")
    found, _ = logits(live, backend="torch", replace_with_kernel_inject=True)
    assert relative(found, expected) < 1e-5


_KV = "num_key_value_heads"


@pytest.mark.parametrize("backend", slow_but(["torch"], BACKENDS))
@pytest.mark.parametrize("family", ["Falcon", "Gemma3"])
def test_live_layers_of_hfs_own_kinds_are_merged(family, backend):
    """Falcon's linear layers, and embeddings that scale what they give."""
    torch.manual_seed(0)
    given = SIZES | {"head_dim": 8}
    if family == "Falcon":
        given = {n: v for n, v in SIZES.items() if n not in ("intermediate_size", _KV)}
    config = getattr(hf, f"{family}{'Text' * (family == 'Gemma3')}Config")(**given)
    model = getattr(hf, f"{family}ForCausalLM")(config)
    targets = {"Falcon": ["query_key_value", "dense"], "Gemma3": ["q_proj", "embed_tokens"]}
    live = adapt(model, target_modules=targets[family])
    found, _ = logits(live, backend=backend, replace_with_kernel_inject=True)
    assert relative(found, wanted(live)) < 1e-5


def test_adapters_of_weights_without_use_are_noted(tmp_path):
    """Longformer's projections for tokens that see all others, which none does here."""
    model = make_model("longformer")
    model.save_pretrained(tmp_path / "base")
    live = adapt(model, target_modules=["query", "query_global"])
    live.save_pretrained(tmp_path / "adapter")
    found, notes = logits(tmp_path / "base", backend="torch", adapter=tmp_path / "adapter")
    assert relative(found, wanted(live)) < 1e-5
    assert any("query_global" in note and "without use here" in note for note in notes)


def test_a_head_that_two_adapters_bring_is_refused(tmp_path):
    with_head(make_model("llama-gqa"), "SEQ_CLS", tmp_path, target_modules=["q_proj"])
    again = tmp_path / "again"
    again.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (again / name).write_bytes((tmp_path / "adapter" / name).read_bytes())
    with pytest.raises(CheckpointError, match=r"score\.weight, which another one has as well"):
        dualinfer.init_inference(tmp_path / "base", adapter=[tmp_path / "adapter", again])
    file = again / "adapter_model.safetensors"
    kept = {n: t for n, t in load_file(file).items() if "score" not in n}
    save_file(kept, file)
    with pytest.raises(CheckpointError, match=r"score\.weight of .* is neither in"):
        dualinfer.init_inference(tmp_path / "base", adapter=again)

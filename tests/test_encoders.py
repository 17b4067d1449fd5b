"""Encoders and heads for labels against HF's own classes, on both backends."""

import importlib
import json

import jax
import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import dualinfer
from dualinfer.arrays import kind_of
from dualinfer.backends.jax.ops.plain import PlainOps as JaxOps
from dualinfer.backends.kernels import turn_arguments
from dualinfer.backends.torch.ops.plain import PlainOps as TorchOps
from dualinfer.checkpoint.described.sentence import read_text_embedding
from dualinfer.cli.main import app
from dualinfer.errors import (
    ArgumentError,
    CheckpointError,
    LengthError,
    ModelError,
    UnsupportedError,
)
from dualinfer.model.families import describe_model
from dualinfer.ops.contract import LayerAttention

from .cases import make_model
from .cases.covering import each
from .cases.encoders import CASES, PAD, SIZES, VOCAB
from .checkpoints import write_byte_tokenizer
from .models import BACKENDS, relative_rms

LIMIT = 1e-5
FIRST = {
    *("modernbert-cls", "deberta-2-sequence", "deberta-2-choice", "xlm-sequence"),
    *("deberta-xlarge-sequence", "longformer"),
}


def batch(case, tokens=13):
    """Ids and a mask [3, T], padded on the left and on the right; of choices, two of each."""
    rng = np.random.default_rng(5)
    rows = 6 if "choice" in case else 3
    ids = rng.integers(3, VOCAB, (rows, tokens))
    mask = np.ones_like(ids)
    # These read the first token, padding that sees padding alone.
    if case not in FIRST:
        mask[1, :4] = 0
    mask[2, -5:] = 0
    ids = np.where(mask == 1, ids, PAD)
    if case.startswith("esm"):  # which drops these
        ids[[0, 0, 2], [1, 2, 3]] = 7
    if "choice" in case:
        return ids.reshape(3, 2, tokens), mask.reshape(3, 2, tokens)
    return ids, mask


def of_hf(model, ids, **given):
    with torch.no_grad():
        given = {n: torch.tensor(v) for n, v in given.items()}
        out = model(torch.tensor(ids), output_hidden_states=True, **given)
    return {n: v for n, v in out.items() if n not in ("past_key_values", "entity_hidden_states")}


def of_hf_alone(model, ids, mask):
    """As `of_hf`, without the hidden states of each layer."""
    found = of_hf(model, ids, attention_mask=mask)
    return {name: value for name, value in found.items() if name != "hidden_states"}


def compare(ours, theirs, mask=None):
    """Every output, at the real tokens where it has one for each."""
    real = ... if mask is None else mask.reshape(-1, mask.shape[-1]) == 1
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        pairs = (
            zip(ours[name], value, strict=True)
            if isinstance(value, tuple)
            else [(ours[name], value)]
        )
        for one, other in pairs:
            one, other = np.asarray(one), np.asarray(other)
            by_token = mask is not None and other.shape[:2] == real.shape
            assert one.shape == other.shape, name
            assert (
                relative_rms(*((x[real] for x in (one, other)) if by_token else (one, other)))
                < LIMIT
            ), name


@pytest.mark.parametrize(("case", "backend"), each(CASES))
def test_a_model_gives_what_hf_gives(case, backend):
    model = make_model(case)
    engine = dualinfer.init_inference(
        model, backend=backend, dtype="fp32", replace_with_kernel_inject=True
    )
    ids, mask = batch(case)
    whole = ids
    if case.startswith(("xlm-", "flaubert")) and "roberta" not in case:
        whole = np.where(ids == PAD, 5, ids)
        with pytest.raises(ArgumentError, match=r"id 1 of padding.*Pass attention_mask"):
            engine(ids)
    compare(engine(whole, output_hidden_states=True), of_hf(model, whole))
    masked = of_hf(model, ids, attention_mask=mask)
    compare(engine(ids, attention_mask=mask, output_hidden_states=True), masked, mask)
    assert engine.report().architecture == type(model).__name__


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("xmod", {"default_language": None}, "default_language=None.*args="),
        ("deberta-xlarge", {"conv_groups": 2}, "conv_groups=2"),
        ("deberta-xlarge", {"conv_kernel_size": 4}, "conv_kernel_size=4.*odd"),
        ("deberta-2-masked", {"embedding_size": 20}, "embedding_size=20"),
    ],
)
def test_a_field_that_an_encoder_does_not_honour_is_named(case, changes, message):
    config = CASES[case].make_config(**changes)
    with pytest.raises(ModelError, match=message):
        describe_model(config.to_dict(), [CASES[case].architecture])


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_frequencies_of_esm_are_those_of_its_file(backend, tmp_path):
    """In either of two names, rounded as released files have them; texts are packed, or split."""
    model, (ids, mask) = make_model("esm-masked"), batch("esm-masked")
    rounded = model.base_model.rotary_embeddings.inv_freq
    rounded.copy_(rounded.half())
    wanted = of_hf(model, ids, attention_mask=mask)
    model.save_pretrained(tmp_path)
    live = {"replace_with_kernel_inject": True}
    tensors = load_file(tmp_path / "model.safetensors")
    written = next(name for name in tensors if name.endswith("inv_freq"))
    stored = tensors.pop(written)
    names = [f"esm.encoder.layer.{i}.attention.self.rotary_embeddings.inv_freq" for i in (0, 1)]
    names = (names, [written], ["esm.rotary_embeddings.inv_freq"])
    for keys, split in zip(names, ({}, {}, {"tensor_parallel": {"tp_size": 2}}), strict=True):
        save_file(tensors | dict.fromkeys(keys, stored), tmp_path / "model.safetensors")
        more = split if backend == "jax" else {}
        with dualinfer.init_inference(tmp_path, backend=backend, dtype="fp32", **more) as engine:
            compare(engine(ids, attention_mask=mask, output_hidden_states=True), wanted, mask)
    with dualinfer.init_inference(model, backend=backend, dtype="fp32", **live) as engine:
        engine.save_pretrained(tmp_path / "ours")
        texts = [[7 if i % 5 == 2 else 30 + i for i in range(n)] for n in (9, 4, 40)]
        expected = np.stack([hidden_of(model, text).mean(0) for text in texts])
        assert relative_rms(engine.embed(texts), expected) < LIMIT
    again = hf.EsmForMaskedLM.from_pretrained(tmp_path / "ours").eval()
    compare(of_hf(again, ids, attention_mask=mask), wanted, mask)


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        ("layoutlm-masked", "torch"),
        pytest.param("layoutlm-masked", "jax", marks=pytest.mark.slow),
        ("lilt", "torch"),
        pytest.param("lilt", "jax", marks=pytest.mark.slow),
        pytest.param("layoutlm-span", "torch", marks=pytest.mark.slow),
    ],
)
def test_boxes_on_a_page_are_read_as_by_hf(case, backend):
    model, (ids, mask) = make_model(case), batch(case)
    engine = dualinfer.init_inference(
        model, backend=backend, dtype="fp32", replace_with_kernel_inject=True
    )
    corners = np.random.default_rng(4).integers(0, 25, (*ids.shape, 2))
    boxes = np.concatenate((corners, 2 * corners), -1)
    types = (ids % 2).astype(int)
    given = {"bbox": boxes, "token_type_ids": types, "attention_mask": mask}
    compare(engine(ids, **given, output_hidden_states=True), of_hf(model, ids, **given), mask)
    with pytest.raises(ArgumentError, match=r"bbox has shape \(3, 13\).*\(3, 13, 4\)"):
        engine(ids, bbox=mask)
    with pytest.raises(ArgumentError, match="right and lower ones no less"):
        engine(ids, bbox=boxes[..., ::-1].astype(np.uint8))
    if case == "lilt":  # whose layers give two streams from one to the next, on the device or not
        how = {"replace_with_kernel_inject": True, "dtype": "fp32", "backend": backend}
        how |= {"keep_module_on_host": True, "resident_layers": 0}
        with dualinfer.init_inference(model, **how) as streamed:
            found = streamed(ids, **given, output_hidden_states=True)
            compare(found, of_hf(model, ids, **given), mask)
    if backend == "torch":
        return
    with pytest.raises(ArgumentError, match="does not support bbox"):
        dualinfer.init_inference(
            make_model("bert-token"), dtype="fp32", replace_with_kernel_inject=True
        )(ids, bbox=boxes)


LENGTHS = (9, 40, 3, 17, 1, 61, 12, 5, 30, 8)
POOLINGS = ("cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def texts_of(lengths=LENGTHS):
    rng = np.random.default_rng(7)
    return [rng.integers(3, VOCAB, n).tolist() for n in lengths]


def pooled(hidden, pooling):
    """sentence-transformers' pooling of one text's hidden states [T, E]."""
    steps = np.arange(1, len(hidden) + 1)[:, None]
    return {
        "cls": lambda: hidden[0],
        "mean": lambda: hidden.mean(0),
        "max": lambda: hidden.max(0),
        "mean_sqrt_len_tokens": lambda: hidden.sum(0) / len(hidden) ** 0.5,
        "weightedmean": lambda: (hidden * steps).sum(0) / steps.sum(),
        "lasttoken": lambda: hidden[-1],
    }[pooling]()


def hidden_of(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].numpy()


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param(case, name, marks=[] if name in quick else [pytest.mark.slow])
        for case, quick in {
            **{"roberta": BACKENDS, "modernbert": ("torch",), "qwen3-reward": ("torch",)},
            **dict.fromkeys(
                (
                    "nomic_bert",
                    "mpnet",
                    "deberta-3",
                    "deberta-xlarge",
                    "xmod",
                    "layoutlm",
                    "lilt",
                    "mobilebert",
                    "embedding-gemma",
                    "albert",
                    "gpt2-token",
                    "bloom-token",
                    "rembert",
                    "roformer",
                    "esm-plain",
                    "xlm-base",
                    "privacy-filter",
                    "convbert",
                ),
                (),
            ),
        }.items()
        for name in BACKENDS
    ],
)
def test_vectors_of_packed_texts_are_those_of_each_alone(case, backend):
    model, texts = make_model(case), texts_of()
    hidden = [hidden_of(model, text) for text in texts]
    engine = dualinfer.init_inference(
        model, backend=backend, dtype="fp32", replace_with_kernel_inject=True
    )
    for pooling in POOLINGS:
        expected = np.stack([pooled(h, pooling) for h in hidden])
        vectors = engine.embed(texts, pooling=pooling)
        assert vectors.dtype == np.float32 and relative_rms(vectors, expected) < LIMIT
    unit = engine.embed(texts, normalize=True, batch_size=3)
    mean = np.stack([h.mean(0) for h in hidden])
    assert relative_rms(unit, mean / np.linalg.norm(mean, axis=1, keepdims=True)) < LIMIT


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as sentence-transformers writes it: first tokens, a dense layer, length 1."""
    place = tmp_path_factory.mktemp("sentence")
    size = write_byte_tokenizer(place)
    model = make_model("roberta", vocab_size=size, pad_token_id=2)
    model.save_pretrained(place)
    dense = {
        name: np.random.default_rng(3).normal(0, 0.2, shape).astype(np.float32)
        for name, shape in {"linear.weight": (20, 36), "linear.bias": (20,)}.items()
    }
    kinds = (
        ("Transformer", ""),
        ("Pooling", "1_Pooling"),
        ("Dense", "2_Dense"),
        ("Normalize", "3_N"),
    )
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds)
    ]
    written = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": 24, "do_lower_case": True},
        "config_sentence_transformers.json": {
            "prompts": {"query": "find: ", "plain": ""},
            "truncate_dim": 18,
        },
        "1_Pooling/config.json": {"pooling_mode_cls_token": True, "include_prompt": False},
        "2_Dense/config.json": {"activation_function": "torch.nn.modules.activation.Tanh"},
    }
    for name, value in written.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(json.dumps(value))
    save_file(dense, place / "2_Dense" / "model.safetensors")
    return place, model, dense


@pytest.mark.parametrize("name", ["ask", 3])
def test_a_default_prompt_must_be_among_the_prompts(name, tmp_path):
    (tmp_path / "modules.json").write_text("[]")
    said = {"prompts": {"query": "find: "}, "default_prompt_name": name}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=f"default_prompt_name={name!r}, not among prompts"):
        read_text_embedding(tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_folder_of_sentence_transformers_says_how_texts_become_vectors(folder, backend):
    place, model, dense = folder
    engine = dualinfer.init_inference(place, backend=backend, dtype="fp32")
    texts = ["A small Text", "x", "one that is longer than twenty-four tokens are"]

    def expected(before, at=0, numbers=18):
        ids = [engine.tokenizer((before + text).lower())["input_ids"][:24] for text in texts]
        x = np.stack([hidden_of(model, row)[at] for row in ids])
        x = np.tanh(x @ dense["linear.weight"].T + dense["linear.bias"])
        return (x / np.linalg.norm(x, axis=1, keepdims=True))[:, :numbers]

    assert relative_rms(engine.embed(texts), expected("")) < LIMIT
    query = engine.embed(texts, prompt_name="query")
    assert relative_rms(query, expected("find: ", len("find: "))) < LIMIT
    assert relative_rms(engine.embed(texts, prompt="to "), expected("to ", 3)) < LIMIT
    assert engine.embed(texts[0]).shape == (18,)
    last = engine.embed(texts[1:2], pooling="lasttoken", normalize=False, truncate_dim=20)
    assert relative_rms(last[0] / np.linalg.norm(last), expected("", -1, 20)[1]) < LIMIT
    # By sentence-transformers' own names; what is cut has length 1 again where that is asked for.
    few = expected("", numbers=5)
    found = engine.encode(np.array(texts), truncate_dim=5, convert_to_tensor=True)
    assert kind_of(found) == backend and relative_rms(found, few) < LIMIT
    found = engine.encode(tuple(texts), truncate_dim=5, normalize_embeddings=True)
    assert relative_rms(found, few / np.linalg.norm(few, axis=1, keepdims=True)) < LIMIT
    assert (engine.encode_query(texts) == query).all()
    assert (engine.encode_document(texts) == engine.embed(texts)).all()
    # A text that is all prompt: nothing of it is pooled, as there.
    bare = engine.embed(texts, prompt="y" * 30, pooling="mean", normalize=False)
    assert relative_rms(bare, np.tanh(dense["linear.bias"])[None, :18].repeat(3, 0)) < LIMIT
    for wrong in (0, 21, True, "7"):
        with pytest.raises(ArgumentError, match=r"truncate_dim=.*an int from 1 to 20"):
            engine.embed(texts, truncate_dim=wrong)
    with pytest.raises(ArgumentError, match="encode: precision='int8' is not served"):
        engine.encode(texts, precision="int8")
    with pytest.raises(ArgumentError, match=r"prompt_name='ask'.*'query', 'document', 'plain'"):
        engine.embed(texts, prompt_name="ask")
    with pytest.raises(ArgumentError, match=r"Text 1 is empty: the tokenizer makes no token of it"):
        engine.embed(["x", ""])
    with pytest.raises(LengthError, match=r"max_length=900.*67 positions"):
        engine.embed(texts, max_length=900)


def test_shapes_of_packed_texts_are_few(folder):
    """Of any lengths and numbers: after some calls JAX compiles nothing more."""
    engine = dualinfer.init_inference(folder[1], backend="jax", dtype="fp32")
    compiled = []
    for seed in range(2):
        rng = np.random.default_rng(seed)
        for lengths in ([60] * 9, rng.integers(1, 60, 35), rng.integers(1, 60, 70)):
            engine.embed(texts_of(lengths))
        compiled.append(engine.report().compilations)
    assert compiled[0] == compiled[1]


def test_what_embed_does_not_take_is_refused(folder):
    engine = dualinfer.init_inference(folder[1], dtype="fp32", replace_with_kernel_inject=True)
    with pytest.raises(ArgumentError, match=r"pooling='median'.*weightedmean"):
        engine.embed([[3, 4]], pooling="median")
    with pytest.raises(ArgumentError, match="token ids were"):
        engine.embed([[3, 4]], prompt="x")
    with pytest.raises(LengthError, match=r"Text 1 has 68 tokens.*67 positions"):
        engine.embed([[3], [4] * 68])
    with pytest.raises(ArgumentError, match="Text 0 is empty"):
        engine.embed({"input_ids": [[3, 4]], "attention_mask": [[0, 0]]})
    for wrong, what in (([["a", "b"]], "a list of texts"), ([None], "None")):
        with pytest.raises(ArgumentError, match=rf"inputs\[0\] is {what}; expected a text"):
            engine.embed(wrong)
    assert engine.embed([]).shape == (0, 36)
    padded = {"input_ids": [[3, 4, 2]], "attention_mask": [[1, 1, 0]]}
    assert (engine.embed(padded) == engine.embed([[3, 4]])).all()
    uneven = {"input_ids": [[3, 4], [5, 2, 6]], "attention_mask": [[1, 1], [1, 0, 1]]}
    assert (engine.embed(uneven) == engine.embed([[3, 4], [5, 6]])).all()
    with pytest.raises(ArgumentError, match="attention_mask has 3 rows; expected 2"):
        engine.embed(uneven | {"attention_mask": [[1, 1], [1], [1]]})
    module = dualinfer.init_inference(folder[1], dtype="fp32")
    with pytest.raises(UnsupportedError, match="module mode"):
        module.embed([[3, 4]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_negative_ids_and_labels_are_refused(backend):
    """In whatever they come: an array's index may be negative, an id's place in a table not."""
    how = {"backend": backend, "dtype": "fp32", "replace_with_kernel_inject": True}
    engine = dualinfer.init_inference(make_model("bert-sequence"), **how)
    rows = [[3, 4], [5, -1]]
    for given in (rows, [3, -1], np.array(rows), torch.tensor(rows), {"input_ids": rows}):
        with pytest.raises(ArgumentError, match=r"is -1, outside the vocabulary"):
            engine.embed(given)
    uneven = {"input_ids": [[3], [5, -1]], "attention_mask": [[1], [1, 1]]}
    with pytest.raises(ArgumentError, match=r"is -1, outside the vocabulary"):
        engine.embed(uneven)
    for labels in ([0, -1, 1], np.array([0, -5, 1]), torch.tensor([-99, 0, 0])):
        with pytest.raises(ArgumentError, match=r"labels\[\d\] is -\d+; expected a label"):
            engine(batch("bert-sequence")[0], labels=labels)


def test_losses_are_those_of_hf_and_others_are_refused():
    labels = {"bert-sequence": [0, 2, 1], "bert-choice": [1, 0, 1], "qwen2-token": None}
    for case, given in labels.items():
        model = make_model(case)
        ids, _ = batch(case)
        given = (ids % 3).tolist() if given is None else given
        engine = dualinfer.init_inference(model, dtype="fp32", replace_with_kernel_inject=True)
        with torch.no_grad():
            loss = model(torch.tensor(ids), labels=torch.tensor(given)).loss
        assert relative_rms(engine(ids, labels=given).loss, loss) < LIMIT
        with pytest.raises(ArgumentError, match=r"labels\[.* is 7; expected a label"):
            engine(ids, labels=np.full_like(given, 7))
    engine = dualinfer.init_inference(
        make_model("llama-span"), dtype="fp32", replace_with_kernel_inject=True
    )
    with pytest.raises(ArgumentError, match="no loss of labels for LlamaForQuestion"):
        engine(batch("llama-span")[0], labels=[0, 1, 0])
    with pytest.raises(ArgumentError, match="end_positions is missing"):
        engine(batch("llama-span")[0], start_positions=[0, 1, 0])
    engine = dualinfer.init_inference(
        make_model("bert-token"), dtype="fp32", replace_with_kernel_inject=True
    )
    with pytest.raises(ArgumentError, match="does not support start_positions"):
        engine(batch("bert-token")[0], start_positions=[0, 1, 0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("case", "problem", "labels"),
    [
        ("qwen3-reward", None, [0.5, -2.0, 1.5]),
        ("bert-sequence", "regression", [[0.5, -2, 1], [3, 0, 1], [0, 0, -1]]),
        ("bert-sequence", None, [[1, 0, 1], [0, 0, 0], [0, 1, 0.5]]),
    ],
)
def test_losses_of_numbers_are_those_of_hf(case, problem, labels, backend):
    """A regression of one label and of several, and a yes or no for each of several."""
    model, (ids, mask) = make_model(case), batch(case)
    if case == "qwen3-reward":
        ids, mask = ids[:, :9], np.ones_like(ids[:, :9])
    model.config.problem_type, given = problem, torch.tensor(labels, dtype=torch.float32)
    engine = dualinfer.init_inference(
        model, backend=backend, dtype="fp32", replace_with_kernel_inject=True
    )
    found = engine(ids, attention_mask=mask, labels=given.numpy())
    model.config.problem_type = problem
    with torch.no_grad():
        wanted = model(torch.tensor(ids), attention_mask=torch.tensor(mask), labels=given)
    model.config.problem_type = None  # which HF sets
    assert relative_rms(found.loss, wanted.loss) < LIMIT
    assert relative_rms(found.logits, wanted.logits) < LIMIT
    with pytest.raises(ArgumentError, match="one for each score"):
        engine(ids, attention_mask=mask, labels=given.numpy()[:2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_loss_of_answers_is_that_of_hf(backend):
    """One start lies behind the text, where it counts for nothing."""
    model, (ids, mask) = make_model("bert-span"), batch("bert-span")
    ends = {"start_positions": [3, 40, 0], "end_positions": [4, 7, 12]}
    engine = dualinfer.init_inference(
        model, backend=backend, dtype="fp32", replace_with_kernel_inject=True
    )
    found = engine(ids, attention_mask=mask, **ends)
    expected = model(
        torch.tensor(ids), torch.tensor(mask), **{k: torch.tensor(v) for k, v in ends.items()}
    )
    assert next(iter(found)) == "loss"
    assert relative_rms(np.asarray(found.loss), expected.loss.detach()) < LIMIT


@pytest.mark.parametrize(
    "case",
    [
        *("llama-span", "albert", "distilbert-sequence", "modernbert-masked", "gte-masked"),
        pytest.param("jina", marks=pytest.mark.slow),
        pytest.param("mobilebert-masked", marks=pytest.mark.slow),
        pytest.param("deberta-xlarge-masked", marks=pytest.mark.slow),
    ],
)
def test_a_model_goes_through_a_folder_and_back(case, tmp_path):
    model = make_model(case)
    model.save_pretrained(tmp_path / "hf")
    ids, _ = batch(case)
    engine = dualinfer.init_inference(tmp_path / "hf", dtype="fp32")
    compare(engine(ids, output_hidden_states=True), of_hf(model, ids))
    engine.save_pretrained(tmp_path / "ours")
    again = type(model).from_pretrained(tmp_path / "ours").eval()
    compare(of_hf(again, ids), of_hf(model, ids))


# Names of Nomic BERT's maker for those of transformers.
NOMIC = {
    **{"embeddings.LayerNorm": "emb_ln", "layers.": "encoder.layers.", "norm": "norm"},
    **{"self_attn.o_proj": "attn.out_proj", "up_proj": "fc11", "gate_proj": "fc12"},
    **{"down_proj": "fc2", "post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2"},
}


def write_nomic(model, place, prefix, **changes):
    """A folder as Nomic's own code writes it."""
    tensors = {}
    for name, value in model.state_dict().items():
        for theirs, ours in NOMIC.items():
            name = name.replace(theirs, ours)
        tensors[name.replace("nomic_bert.", prefix)] = value.numpy()
    for i in range(model.config.num_hidden_layers):
        at = f"{prefix}encoder.layers.{i}."
        parts = [tensors.pop(f"{at}self_attn.{p}_proj.weight") for p in "qkv"]
        tensors[f"{at}attn.Wqkv.weight"] = np.concatenate(parts)
    name = type(model).__name__.replace("MaskedLM", "PreTraining")
    config = {
        **{"model_type": "nomic_bert", "architectures": [name]},
        **{"n_embd": 36, "n_layer": 2, "n_head": 3, "n_inner": 44, "n_positions": 70},
        **{"layer_norm_epsilon": model.config.layer_norm_eps, "activation_function": "swiglu"},
        **{"rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "vocab_size": 98},
        **{"pad_vocab_size_multiple": 9, "type_vocab_size": 2, "prenorm": False, "causal": False},
        **{"scale_attn_weights": True, "use_flash_attn": True, "auto_map": {"AutoModel": "x.Y"}},
        **{"rotary_scaling_factor": None, "qkv_proj_bias": False, "resid_pdrop": 0.1},
    }
    place.mkdir()
    (place / "config.json").write_text(json.dumps({**config, **changes}))
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, place / "model.safetensors")
    return place


@pytest.mark.parametrize(
    ("case", "backend", "prefix"),
    [
        ("nomic_bert", "torch", ""),
        ("nomic_bert-masked", "torch", "bert."),
        pytest.param("nomic_bert", "jax", "", marks=pytest.mark.slow),
    ],
)
def test_a_folder_of_nomics_own_code_is_read_without_it(case, backend, prefix, tmp_path):
    model = make_model(case, type_vocab_size=2)
    place = write_nomic(model, tmp_path / "own", prefix)
    engine = dualinfer.init_inference(place, dtype="fp32", backend=backend)
    ids, mask = batch(case)
    compare(engine(ids, attention_mask=mask), of_hf_alone(model, ids, mask), mask)
    if not prefix:  # whose names transformers knows
        engine.save_pretrained(tmp_path / "saved")
        again = type(model).from_pretrained(tmp_path / "saved").eval()
        compare(of_hf(again, ids), of_hf(model, ids))


def test_what_transformers_nomic_has_not_is_refused(tmp_path):
    for i, (name, value) in enumerate({"prenorm": True, "rotary_scaling_factor": 2}.items()):
        place = write_nomic(make_model("nomic_bert"), tmp_path / str(i), "", **{name: value})
        with pytest.raises(UnsupportedError, match=f"{name}={value}, which transformers' Nomic"):
            dualinfer.init_inference(place, dtype="fp32")


def test_weights_of_a_head_that_are_missing_are_named(tmp_path):
    model = make_model("bert-sequence").bert
    model.config.architectures = None
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["BertForSequenceClassification"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"missing 2: classifier\.weight, classifier\.bias"):
        dualinfer.init_inference(tmp_path, dtype="fp32", replace_with_kernel_inject=True)


def test_rows_without_a_pad_token_are_scored_one_by_one():
    model = make_model("gpt2-sequence", pad_token_id=None)
    engine = dualinfer.init_inference(model, dtype="fp32", replace_with_kernel_inject=True)
    ids = np.random.default_rng(2).integers(3, VOCAB, (2, 9))
    assert relative_rms(engine(ids[:1]).logits, of_hf(model, ids[:1])["logits"]) < LIMIT
    with pytest.raises(ArgumentError, match=r"no pad_token_id.*2 rows"):
        engine(ids)


def test_a_text_takes_all_positions_that_are_no_padding():
    """RoBERTa's table has a row for each of 68 tokens: 70 but for those up to padding's own."""
    model = make_model("roberta")
    engine = dualinfer.init_inference(model, dtype="fp32", replace_with_kernel_inject=True)
    ids = np.random.default_rng(2).integers(3, VOCAB, (1, 69))
    assert (
        relative_rms(engine(ids[:, :68])[0], of_hf(model, ids[:, :68])["last_hidden_state"]) < LIMIT
    )
    with pytest.raises(LengthError, match="69 tokens, but the model has 68 positions"):
        engine(ids)
    embeds = model.embeddings.word_embeddings(torch.tensor(ids[:, :20])).detach()
    given = model(inputs_embeds=embeds).last_hidden_state.detach()
    assert relative_rms(engine(inputs_embeds=embeds)[0], given) < LIMIT


def on_devices(case, backend, devices):
    """Scores, and vectors of packed texts, of a model that so many devices share."""
    how = {"replace_with_kernel_inject": True, "dtype": "fp32", "backend": backend}
    sharing = {"tensor_parallel": {"tp_size": devices}}
    with dualinfer.init_inference(make_model(case), **how, **sharing) as engine:
        return np.asarray(engine(batch(case)[0])[0]), engine.embed(texts_of((9, 4, 20)))


SHARED = {
    **{"modernbert-sequence": True, "albert-masked": False, "qwen3-reward": False},
    **dict.fromkeys(("mpnet-span", "deberta-2-masked", "deberta-masked"), False),
    "deberta-xlarge-masked": False,
    "xmod-masked": False,
    "lilt-token": False,
    "layoutlm-masked": False,
    "mobilebert-masked": False,
    "privacy-filter-token": False,
    "convbert-masked": False,
}


@pytest.mark.xdist_group("ranks")  # whose processes live through a run
@pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param(case, name, marks=[] if quick else [pytest.mark.slow])
        for case, quick in SHARED.items()
        for name in BACKENDS
    ],
)
def test_two_devices_give_what_one_gives(case, backend, crew):
    if backend == "torch":
        found = crew.run(on_devices, case, backend, 2, world=2)
    else:
        found = [on_devices(case, backend, 2)]
    expected = on_devices(case, "torch", 1)  # which gives what JAX gives, and compiles nothing
    for own in found:
        for ours, theirs in zip(own, expected, strict=True):
            assert relative_rms(ours, theirs) < LIMIT


# On JAX these launch what ALBERT launches there; see `tests.launched`.
LAUNCHED_AS_OTHERS = {"electra-sequence", "xmod", "layoutlm"}
LAUNCHED_AS_OTHERS |= {"mobilebert", "lilt", "convbert-masked"}


@pytest.mark.filterwarnings("ignore:.*encountered in .*:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param(
            *(case, name),
            marks=[] if (case, name) == ("modernbert-sequence", "torch") else [pytest.mark.slow],
        )
        for case in (
            *("modernbert-sequence", "albert-masked", "electra-sequence", "nomic_bert"),
            *("mpnet", "deberta-3", "embedding-gemma", "mobilebert", "xmod", "layoutlm", "lilt"),
            *("privacy-filter-token", "convbert-masked"),
        )
        for name in BACKENDS
        if name == "torch" or case not in LAUNCHED_AS_OTHERS
    ],
)
def test_kernels_give_what_plain_ops_give(case, backend, monkeypatch):
    """Windows on both sides, a bare first layer, packed rows whose other segments are skipped."""
    pytest.importorskip("triton")
    from dualinfer.kernels.triton import linear

    own = importlib.import_module(f"dualinfer.backends.{backend}")
    how = {"dtype": "fp32", "replace_with_kernel_inject": True, "backend": backend}
    model, texts = make_model(case), texts_of((9, 4, 20, 30, 2, 40))
    ids, mask = batch(case)
    # Torch's plain ops give what JAX's give, and compile nothing.
    with dualinfer.init_inference(model, use_triton=False, **how | {"backend": "torch"}) as plain:
        expected = np.asarray(plain(ids, attention_mask=mask)[0]), plain.embed(texts)
    if backend == "torch":
        ops = importlib.import_module("dualinfer.backends.torch.ops.kernels").KernelOps
        monkeypatch.setattr(own, "_make_ops", lambda config, spec, device, _: ops(device))
    else:
        ops = importlib.import_module("tests.kernels.jax_ops").interpreted_ops
        monkeypatch.setattr(own, "_make_ops", lambda *args: ops())
    monkeypatch.setattr(linear, "serves", lambda *shape: True)
    with dualinfer.init_inference(model, **how) as fast:
        assert "Triton" in fast.report().ops["matmul"]
        scores = np.asarray(fast(ids, attention_mask=mask)[0])
        real = mask == 1 if scores.shape[:2] == mask.shape else ...
        assert relative_rms(scores[real], expected[0][real]) < LIMIT
        assert relative_rms(fast.embed(texts), expected[1]) < LIMIT


def test_the_command_embed_shows_vectors_or_prints_them_whole(folder):
    place, texts = str(folder[0]), ["A small text", "x"]
    run = CliRunner(env={"COLUMNS": "120"}).invoke
    result = run(
        app, ["embed", place, *texts, "--json", "--prompt-name", "query", "--truncate-dim", "20"]
    )
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("[")]
    with dualinfer.init_inference(folder[0], backend="torch") as engine:
        expected = engine.embed(texts, prompt_name="query", truncate_dim=20)
    np.testing.assert_allclose([json.loads(line) for line in lines], expected, rtol=1e-6)
    result = run(app, ["embed", place, "-"], input="A small text\n\nx\n")
    assert result.exit_code == 0, result.output
    assert "2 x 18 numbers" in result.output and result.output.count("1.0000") >= 2


@pytest.mark.parametrize("case", ["llama-sequence", "eurobert-mean"])
def test_forward_as_a_pure_function_pools_by_ids_and_mask(case):
    model, (ids, mask) = make_model(case), batch(case)
    engine = dualinfer.init_inference(model, backend="jax", dtype="fp32")
    found = engine.apply(engine.params, ids, attention_mask=mask)
    expected = of_hf(model, ids, attention_mask=mask)["logits"]
    assert relative_rms(np.asarray(found.logits), expected) < LIMIT


@pytest.mark.slow
def test_heads_and_spans_of_two_devices_are_joined_as_they_are_not_quantized():
    """Words of 4-bit codes would hold columns of both, and of padding."""
    model = make_model("convbert-masked")
    ids = batch("convbert-masked")[0]
    how = {"backend": "jax", "replace_with_kernel_inject": True, "dtype": "fp32", "quant": "int4"}
    one = dualinfer.init_inference(model, **how)
    two = dualinfer.init_inference(model, **how, tensor_parallel={"tp_size": 2})
    assert relative_rms(np.asarray(two(ids)[0]), np.asarray(one(ids)[0])) < 1e-5


@pytest.mark.parametrize("by", ["torch", "jax", "triton"])
def test_roformer_turns_by_a_table_of_the_models_precision(by):
    """HF reads cosines and sines that were rounded to float16; sums are rounded once."""
    theirs = importlib.import_module("transformers.models.roformer.modeling_roformer")
    config = hf.RoFormerConfig(**SIZES, architectures=["RoFormerModel"])
    layer = LayerAttention(describe_model(config.to_dict())[0].layers[0].attention)
    a, tokens = layer.spec, 70
    assert a.rope is not None
    torch.manual_seed(2)
    qkv = torch.randn(1, tokens, 3 * a.heads * a.head_dim).half()
    table = theirs.RoFormerSinusoidalPositionalEmbedding(tokens, a.head_dim).create_weight()
    parts = qkv.unflatten(-1, (3, a.heads, a.head_dim)).unbind(2)
    q, k, v = (part.transpose(1, 2).float() for part in parts)
    turn = theirs.RoFormerSelfAttention.apply_rotary_position_embeddings
    q, k = turn(table.half().float()[None, None], q, k)
    wanted = torch.stack([q, k, v]).transpose(2, 3).half()

    frequencies = torch.tensor(a.rope.inv_freq)
    radians = torch.arange(tokens)[None, :, None].float() * frequencies
    angles = radians.cos(), radians.sin()
    if by == "torch":
        found = torch.stack(TorchOps()._heads(layer, qkv, {a.rope: angles}))
    elif by == "jax":
        given, *angles = (jax.numpy.asarray(x.float().numpy()) for x in (qkv, *angles))
        heads = JaxOps()._heads(layer, given.astype("float16"), {a.rope: angles})
        found = torch.tensor(np.stack([x.astype("float32") for x in heads]))
    else:
        rotary = pytest.importorskip("dualinfer.kernels.triton.rotary")
        sizes = {"heads": a.heads, "kv_heads": a.heads, "head_dim": a.head_dim}
        how = sizes | turn_arguments(layer, frequencies)
        found = torch.stack(
            rotary.rotary_append(qkv, torch.arange(tokens)[None], apart=True, **how)
        )
    assert (found.float() != wanted.float()).float().mean() < 5e-3

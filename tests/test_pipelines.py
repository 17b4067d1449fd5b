"""Drop-in use: HF pipelines and streamers with an engine in the model's place."""

import inspect
import sys
import threading
import types

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image

import dualinfer

from .models import BACKENDS, randomize

WORDS = "the cat sat on a mat and dog ran far away home with it ! . , x y z".split()
SPECIAL = ["<pad>", "<s>", "</s>", "[MASK]", "[UNK]"]
VOCAB = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
GREEDY = dict(max_new_tokens=8, do_sample=False)


def make_tokenizer(**options):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(VOCAB, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="[UNK]")
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, mask_token="[MASK]", model_max_length=32, **names, **options
    )


def make_gpt2():
    torch.manual_seed(0)
    config = hf.GPT2Config(
        vocab_size=len(VOCAB),
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    return hf.GPT2LMHeadModel(config).eval()


def make_bert(model, **fields):
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    config = hf.BertConfig(vocab_size=len(VOCAB), max_position_embeddings=64, **sizes, **fields)
    return model(config).eval()


def fused(pipe, backend):
    pipe.model = dualinfer.init_inference(
        pipe.model, backend=backend, dtype="fp32", replace_with_kernel_inject=True
    )


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def test_text_generation_pipeline(backend):
    tokenizer = make_tokenizer(padding_side="left")
    pipe = hf.pipeline("text-generation", model=make_gpt2(), tokenizer=tokenizer)
    batch = ["the cat sat", "a dog ran far away"]

    def texts():
        """Of one, of a batch, and of prompts without a token, which are the BOS alone."""
        return (
            pipe("the cat sat", **GREEDY),
            pipe(batch, batch_size=2, **GREEDY),
            pipe("", **GREEDY),
        )

    before = texts()
    fused(pipe, backend)
    assert texts() == before
    sampled = pipe("the cat", do_sample=True, top_k=5, max_new_tokens=6, num_return_sequences=3)
    assert len(sampled) == 3 and all("the cat" in x["generated_text"] for x in sampled)


def test_fill_mask_pipeline(backend):
    pipe = hf.pipeline("fill-mask", model=make_bert(hf.BertForMaskedLM), tokenizer=make_tokenizer())
    texts = ["the cat [MASK] on a mat", "a [MASK] ran"]
    before = pipe(texts, top_k=3)
    fused(pipe, backend)
    after = pipe(texts, top_k=3)
    for one, other in zip(before, after, strict=True):
        assert [x["token"] for x in one] == [x["token"] for x in other]
        np.testing.assert_allclose(
            [x["score"] for x in one], [x["score"] for x in other], rtol=1e-4
        )


def test_feature_extraction_pipeline(backend):
    pipe = hf.pipeline(
        "feature-extraction", model=make_bert(hf.BertModel), tokenizer=make_tokenizer()
    )
    texts = ["the cat sat on a mat", "x y"]
    before = pipe(texts)
    fused(pipe, backend)
    for one, other in zip(before, pipe(texts), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert isinstance(pipe("x y", return_tensors=True), torch.Tensor)


SMALL = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
SEES = dict(SMALL, image_size=24, patch_size=6)
READS = dict(SMALL, vocab_size=len(VOCAB), max_position_embeddings=32, eos_token_id=2)
IMAGES = {
    "image-classification": (hf.ViTForImageClassification, hf.ViTConfig(**SEES, num_labels=4)),
    "image-feature-extraction": (hf.ViTModel, hf.ViTConfig(**SEES)),
    "zero-shot-image-classification": (
        hf.CLIPModel,
        hf.CLIPConfig(text_config=READS, vision_config=SEES, projection_dim=16),
    ),
}


@pytest.mark.parametrize("task", IMAGES)
def test_pipelines_of_images(task, backend):
    """Which cast pixels to the dtype of the model: torch's, on JAX too."""
    torch.manual_seed(0)
    model, processor = IMAGES[task][0](IMAGES[task][1]).eval(), hf.ViTImageProcessor
    parts = {"image_processor": processor(size={"height": 24, "width": 24})}
    how = {}
    if "zero-shot" in task:
        parts["tokenizer"] = make_tokenizer()
        how = dict(candidate_labels=["cat", "dog ran"], hypothesis_template="the {} </s>")
    pixels = np.random.default_rng(0).integers(0, 255, (40, 36, 3), dtype=np.uint8)
    images = [Image.fromarray(pixels), Image.fromarray(pixels[::-1])]
    pipe = hf.pipeline(task, model=model, **parts)
    before = pipe(images, **how)
    for dtype, error in (("fp32", 1e-5), ("bf16", 0.05))[: 1 + (task == "image-classification")]:
        pipe.model = dualinfer.init_inference(
            model, backend=backend, dtype=dtype, replace_with_kernel_inject=True
        )
        assert pipe.model.dtype in (torch.float32, torch.bfloat16)
        after = pipe(images, **how)
        if "label" not in str(before):
            np.testing.assert_allclose(after, before, atol=error)
            continue
        for one, other in zip(before, after, strict=True):
            scores = [{x["label"]: x["score"] for x in own} for own in (one, other)]
            assert scores[1] == pytest.approx(scores[0], abs=error)


SIZES = dict(vocab_size=len(VOCAB), pad_token_id=0, bos_token_id=1, eos_token_id=2)
LLAMA = hf.LlamaConfig(**SIZES, **SMALL, num_labels=3)
BART = hf.BartConfig(
    **SIZES, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, decoder_start_token_id=2,
    num_beams=1,
)  # fmt: skip
MODERN = hf.ModernBertConfig(**SIZES, **SMALL, cls_token_id=1, sep_token_id=2)
# By name: the model, and what a dataset's rows have beside ids. HF divides the losses of some by
# the number of labels that Trainer counts, and those of others not.
TRAINED = {
    "gpt2": (make_gpt2, lambda ids: {"labels": ids}),
    "modernbert": (lambda: hf.ModernBertForMaskedLM(MODERN), lambda ids: {"labels": ids}),
    "bert-sequence": (
        lambda: make_bert(hf.BertForSequenceClassification, num_labels=3),
        lambda ids: {"labels": ids[0] % 3, "special": 1},
    ),
    "bert-tokens": (
        lambda: make_bert(hf.BertForTokenClassification),
        lambda ids: {"labels": [i % 2 for i in ids], "token_type_ids": [0] * len(ids)},
    ),
    "bert-answers": (
        lambda: make_bert(hf.BertForQuestionAnswering),
        lambda ids: {"start_positions": 1, "end_positions": 2},
    ),
    "llama-answers": (
        lambda: hf.LlamaForQuestionAnswering(LLAMA),
        lambda ids: {"start_positions": 1, "end_positions": 2, "token_type_ids": [1] * len(ids)},
    ),
    "llama-sequence": (
        lambda: hf.LlamaForSequenceClassification(LLAMA),
        lambda ids: {"labels": ids[0] % 3},
    ),
    "bart": (lambda: hf.BartForConditionalGeneration(BART), lambda ids: {"labels": ids}),
}


def evaluated(model, rows, folder, texts):
    """What HF's Trainer finds: label names, loss, predictions with labels and without."""
    kind = hf.Seq2SeqTrainer if texts else hf.Trainer
    how = dict(predict_with_generate=True, generation_max_length=9) if texts else {}
    arguments = hf.Seq2SeqTrainingArguments if texts else hf.TrainingArguments
    arguments = arguments(
        folder, per_device_eval_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True, **how
    )
    trainer = kind(model=model, args=arguments, data_collator=hf.default_data_collator)
    trainer._set_signature_columns_if_needed()
    kept = [{k: x for k, x in row.items() if k in trainer._signature_columns} for row in rows]
    names = trainer.label_names
    alone = [{k: x for k, x in row.items() if k not in names} for row in kept]
    found = [trainer.evaluate(kept)["eval_loss"], trainer.predict(kept).predictions]
    if texts or not model.config.is_encoder_decoder:
        found.append(trainer.predict(alone).predictions)
    return sorted(names), found


@pytest.mark.parametrize("name", TRAINED)
def test_evaluation_by_trainer_gives_what_it_gives_of_the_model(name, tmp_path):
    """Of a fused engine and of one in module mode; losses over as many labels as HF counts."""
    torch.manual_seed(0)
    make, more = TRAINED[name]
    model = make().eval()
    randomize(model)
    if model.can_generate():
        model.generation_config.pad_token_id = model.config.pad_token_id = 0
    random = np.random.default_rng(0)
    ids = [random.integers(3, 24, 4).tolist() for _ in range(3)]
    rows = [{"input_ids": own, "attention_mask": [1] * 4, **more(own)} for own in ids]
    for texts in (False, True) if name in ("gpt2", "bart") else (False,):
        wanted, numbers = evaluated(model, rows, tmp_path, texts)
        for inject in (True, False):
            engine = dualinfer.init_inference(
                model, backend="torch", dtype="fp32", replace_with_kernel_inject=inject
            )
            names, found = evaluated(engine, rows, tmp_path, texts)
            assert names == wanted
            assert type(engine).__name__ == type(model).__name__
            for one, other in zip(found, numbers, strict=True):
                pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
                for x, y in pairs:
                    np.testing.assert_allclose(x, y, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "bert-answers", "llama-sequence", "bart"])
def test_what_harnesses_read_of_a_model_is_there_and_true(name):
    """As lm-eval's HFLM, sentence-transformers, accelerate and pipelines read it."""
    model = TRAINED[name][0]().eval()
    engine = dualinfer.init_inference(
        model, backend="torch", dtype="fp32", replace_with_kernel_inject=True
    )
    assert inspect.signature(engine.forward) == inspect.signature(model.forward)
    assert inspect.signature(type(engine).forward) == inspect.signature(type(model).forward)
    facts = "accepts_loss_kwargs base_model_prefix config_class input_modalities loss_type device"
    for fact in f"{facts} main_input_name name_or_path dtype config".split():
        assert hasattr(engine, fact) == hasattr(model, fact), fact
        assert getattr(engine, fact, None) == getattr(model, fact, None), fact
    assert engine.can_generate() == model.can_generate()
    for how in ({}, {"exclude_embeddings": True}):
        assert engine.num_parameters(**how) == model.num_parameters(**how)
    assert engine.num_parameters(only_trainable=True) == 0
    engine.eval().tie_weights()
    with pytest.raises(AttributeError, match=r"has no 'resize_token_embeddings'.*module mode"):
        engine.resize_token_embeddings  # noqa: B018
    assert not hasattr(engine, model.base_model_prefix)


@pytest.mark.parametrize(
    ("task", "model"),
    [
        ("text-classification", hf.BertForSequenceClassification),
        ("token-classification", hf.BertForTokenClassification),
    ],
)
def test_classification_pipelines_run_in_module_mode(task, model):
    pipe = hf.pipeline(task, model=make_bert(model, num_labels=3), tokenizer=make_tokenizer())
    text = "the cat sat on a mat"
    before = pipe(text)
    assert before
    pipe.model = dualinfer.init_inference(pipe.model, dtype="fp32")
    assert pipe(text) == before


def test_pipeline_is_built_around_an_engine_in_module_mode():
    model = make_gpt2()
    tokenizer = make_tokenizer()
    expected = hf.pipeline("text-generation", model=model, tokenizer=tokenizer)("a dog", **GREEDY)
    engine = dualinfer.init_inference(model, dtype="fp32")
    pipe = hf.pipeline("text-generation", model=model, tokenizer=tokenizer)
    pipe.model = engine
    assert pipe("a dog", **GREEDY) == expected


def test_a_call_runs_while_another_thread_imports_transformers(monkeypatch):
    """The module is there then, and has next to nothing."""
    model, how = TRAINED["gpt2"][0]().eval(), {"dtype": "fp32", "replace_with_kernel_inject": True}
    with dualinfer.init_inference(model, backend="torch", **how) as engine:
        expected = engine.forward([[5, 6, 7]]).logits
        monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
        type(engine).__dict__["forward"]._signed = None  # as in a process that starts
        assert torch.equal(engine.forward([[5, 6, 7]]).logits, expected)


def test_attributes_that_users_read_from_a_model(backend):
    model = make_gpt2()
    engine = dualinfer.init_inference(
        model, backend=backend, dtype="fp32", replace_with_kernel_inject=True
    )
    assert engine.config is model.config
    assert engine.generation_config is model.generation_config
    assert engine.can_generate() is True
    assert engine.dtype == model.dtype == torch.float32
    if backend == "torch":
        assert engine.device == model.device
    else:
        assert engine.device.platform == "cpu"
    with dualinfer.init_inference(dualinfer.embedded_model(), backend=backend) as own:
        assert own.dtype == (torch.float32 if backend == "torch" else np.float32)
    bert = dualinfer.init_inference(
        make_bert(hf.BertModel), backend=backend, replace_with_kernel_inject=True
    )
    assert bert.can_generate() is False


def test_streamers_of_hf(backend, capsys):
    tokenizer = make_tokenizer()
    model = make_gpt2()
    ids = tokenizer("the cat sat", return_tensors="pt").input_ids
    model.generate(ids, streamer=hf.TextStreamer(tokenizer), **GREEDY)
    expected = capsys.readouterr().out
    engine = dualinfer.init_inference(
        model, backend=backend, dtype="fp32", replace_with_kernel_inject=True
    )
    engine.generate(ids, streamer=hf.TextStreamer(tokenizer), **GREEDY)
    assert capsys.readouterr().out == expected
    streamer = hf.TextIteratorStreamer(tokenizer, timeout=60)
    arguments = dict(input_ids=ids, streamer=streamer, **GREEDY)
    thread = threading.Thread(target=engine.generate, kwargs=arguments)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text.split() == expected.split()


@pytest.mark.parametrize(
    "spelling",
    [
        lambda e: {"num_beams": 2},
        lambda e: {"generation_config": hf.GenerationConfig(num_beams=4)},
        lambda e: {"generation_config": {"num_beams": 4}},
        lambda e: setattr(e.generation_config, "num_beams", 3) or {},
        lambda e: (
            setattr(e.generation_config, "num_beams", 3)
            or {"generation_config": hf.GenerationConfig(max_new_tokens=3)}
        ),
    ],
    ids=["keyword", "generation_config", "dict", "the model's own", "the model's own beside one"],
)
@pytest.mark.parametrize("mode", ["fused-torch", "fused-jax", "module"])
def test_beams_are_refused_in_every_spelling(spelling, mode):
    model = make_gpt2()
    kind, _, backend = mode.partition("-")
    engine = dualinfer.init_inference(
        model, backend=backend or "torch", dtype="fp32", kernel_inject=kind == "fused"
    )
    ids = torch.tensor([[5, 6, 7]])
    arguments = spelling(engine)
    with pytest.raises(NotImplementedError, match="num_beams=1"):
        engine.generate(ids, **arguments)
    assert engine.generate(ids, num_beams=1, max_new_tokens=2).shape == (1, 5)
    if kind == "module":
        with pytest.raises(NotImplementedError, match=r"engine\.module\.generate"):
            engine.generate(ids, **arguments)
        beams = engine.module.generate(ids, num_beams=2, max_new_tokens=2, pad_token_id=0)
        assert beams.shape == (1, 5)

"""Text that follows a grammar, on both backends; pydantic and re say whether it does."""

import asyncio
import contextlib
import json
import re
import threading
import time
from typing import Literal

import numpy as np
import pydantic
import pytest

import dualinfer
from dualinfer import ArgumentError, UnsupportedError
from dualinfer.backends.slots import unpacked
from dualinfer.engine.grammar import make_grammar
from dualinfer.engine.text_stream import Detokenizer
from dualinfer.serving.http.answers import StopText

from .models import BACKENDS
from .tokenizer_kinds import KINDS


class Person(pydantic.BaseModel, extra="forbid"):
    name: str = pydantic.Field(max_length=8)
    age: int = pydantic.Field(ge=0, le=150)
    tags: list[Literal["a", "b"]] = pydantic.Field(max_length=2)


PROMPT = "def f("
JSON = {"json": Person}
SAMPLED = {"do_sample": True, "temperature": 1.2, "top_k": 0, "max_new_tokens": 120}


@pytest.fixture(scope="module")
def opened():
    """The engine of a backend, made once."""
    with contextlib.ExitStack() as stack:
        made = {}

        def of(backend):
            if backend not in made:
                how = {"backend": backend, "dtype": "fp32"}
                engine = dualinfer.init_inference(dualinfer.embedded_model(), **how)
                made[backend] = stack.enter_context(engine)
            return made[backend]

        yield of


@pytest.fixture(params=["torch", pytest.param("jax", marks=pytest.mark.slow)])
def engine(opened, request):
    return opened(request.param)


def check(text):
    Person.model_validate_json(text, strict=True)


def test_a_text_is_valid_whatever_shapes_it(engine):
    prompts = [f"x{i} = " for i in range(8)]
    texts = engine.generate_text(prompts, grammar=JSON, **SAMPLED, seed=[*range(8)])
    whole = [text for text in texts if text.endswith("}")]
    assert len(whole) > 4
    for text in whole:
        check(text)
    for how in (
        {"repetition_penalty": 1.3, "presence_penalty": 1.0, "min_p": 0.05, "top_p": 0.9},
        {"logit_bias": dict.fromkeys(range(300, 2000), -100.0), "min_new_tokens": 40},
        {"no_repeat_ngram_size": 40, "top_p": 0.95},  # the host chooses
    ):
        check(engine.generate_text(PROMPT, grammar=JSON, seed=1, **{**SAMPLED, **how}))
    for grammar, pattern in (
        ({"regex": "[0-9]{3}/[a-c]{1,4}x"}, "[0-9]{3}/[a-c]{1,4}x"),
        ({"choice": ["yes", 'n"o', "maybe\n"]}, 'yes|n"o|maybe\n'),
        ({"lark": 'start: "a" NUM\nNUM: /[0-9]{2}/'}, "a[0-9]{2}"),
        ({"lark": 'root ::= "a" [0-9] [0-9]'}, "a[0-9]{2}"),
    ):
        text = engine.generate_text(PROMPT, grammar=grammar, max_new_tokens=60, do_sample=True)
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_are_those_that_masked_logits_give(opened, backend):
    """The device's way against HF's prefix_allowed_tokens_fn over our own logits, by the host."""
    engine = opened(backend)
    ids = engine.tokenizer(PROMPT)["input_ids"]
    grammar = {"regex": "[a-z]{3} = [0-9]{4}"}
    vocab = engine.runner.spec.vocab
    for how in ({"do_sample": False}, {"do_sample": True, "seed": 5, "top_k": 0, "top_p": 0.8}):
        made = make_grammar(grammar, engine.tokenizer, vocab, (0,), 0)

        def allowed(_, tokens, made=made):
            progress = made.begin()
            for token in tokens[len(ids) :].tolist():
                progress.take(token)
            return np.flatnonzero(unpacked(progress.words(), vocab)).tolist()

        how = {"max_new_tokens": 6, "repetition_penalty": 1.2, "eos_token_id": 0, **how}
        row = engine.generate([ids], grammar=grammar, **how)
        expected = engine.generate([ids], prefix_allowed_tokens_fn=allowed, **how)
        assert np.asarray(row).tolist() == np.asarray(expected).tolist()


def test_it_runs_beside_others_and_each_has_what_it_has_alone(engine):
    asked = [
        {"grammar": JSON if i % 3 else None, "seed": i, **SAMPLED, "max_new_tokens": 40 + i}
        for i in range(7)
    ]
    alone = [engine.generate_text(PROMPT, **how) for how in asked]

    async def main():
        handles = [engine.generate_async(PROMPT, **how) for how in asked]
        texts = await asyncio.gather(*(handle.text() for handle in handles))
        return texts, [handle.finish_reason for handle in handles]

    texts, reasons = asyncio.run(main())
    assert texts == alone
    for text, reason, how in zip(texts, reasons, asked, strict=True):
        if how["grammar"] and reason == "stop":
            check(text)
    assert {"stop", "length"} >= {*reasons}
    stream = "".join(engine.stream_text(PROMPT, **asked[1]))
    assert stream == alone[1]
    # Log-probabilities are by the model's own logits.
    ids = engine.tokenizer(PROMPT)["input_ids"]
    how = {"max_new_tokens": 5, "do_sample": False}
    told = engine.generate(
        [ids], grammar={"regex": "zq.*"}, logprobs=1, return_dict_in_generate=True, **how
    )
    row = np.asarray(told.sequences)[0]
    logits = np.asarray(engine([row.tolist()]).logits, np.float32)[0, len(ids) - 1 : -1]
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = logs[np.arange(len(logs)), row[len(ids) :]]
    assert np.allclose(np.asarray(told.logprobs)[0], expected, atol=1e-4)


def test_ends_are_the_grammars(engine):
    how = {"do_sample": False, "max_new_tokens": 60}
    text = engine.generate_text(PROMPT, grammar={"choice": ["ab, cd"]}, stop_strings=[","], **how)
    assert text == "ab, cd"  # the stop string is amid of it
    two = {"choice": ["ab,", "ab, cd"]}
    assert engine.generate_text(PROMPT, grammar=two, stop_strings=[","], **how) == "ab,"
    # Without an EOS it ends where nothing may follow; one that is text is text no more.
    ids = engine.tokenizer(PROMPT)["input_ids"]
    row = engine.generate([ids], grammar={"regex": "ab"}, eos_token_id=None, **how)
    assert engine.tokenizer.decode(np.asarray(row)[0, len(ids) :]) == "ab"
    eos = {"eos_token_id": [0, *engine.tokenizer("a")["input_ids"]]}
    with pytest.raises(ArgumentError, match=r"no token.* or a suppressed token"):
        engine.generate([ids], grammar={"regex": "a"}, **eos, **how)
    # min_new_tokens holds the end back where the grammar goes on, and no longer.
    digits = engine.generate([ids], grammar={"regex": "[0-9]{1,30}"}, min_new_tokens=9, **how)
    assert np.asarray(digits).shape[1] - len(ids) >= 9
    short = engine.generate([ids], grammar={"choice": ["a"]}, min_new_tokens=9, **how)
    assert np.asarray(short).shape[1] == len(ids) + 1
    with pytest.raises(ArgumentError, match="forced_eos_token_id"):
        engine.generate([ids], grammar=two, forced_eos_token_id=0, **how)


def test_other_options_cannot_leave_it(opened):
    engine = opened("torch")
    ids = engine.tokenizer(PROMPT)["input_ids"]

    for forced in (5, 0):  # of the text, and the EOS

        def force(ids, logits, forced=forced):
            scores = np.full(logits.shape, -np.inf, np.float32)
            scores[:, forced] = 0
            return scores

        with pytest.raises(dualinfer.StepError, match="does not allow"):
            engine.generate([ids], grammar={"choice": ["yes"]}, logits_processor=[force])
    hidden = engine.tokenizer("yes")["input_ids"][:1] + engine.tokenizer("y")["input_ids"]
    text = engine.generate_text(
        PROMPT, grammar={"choice": ["yes", "no"]}, suppress_tokens=hidden, do_sample=False
    )
    assert text == "no"


@pytest.mark.parametrize("kind", ["llama-3", "byte-fallback", "gemma", "codegen"])
def test_every_tokenizer_that_spells_bytes_is_read(kind):
    tokenizer = KINDS[kind]()
    end = tokenizer.eos_token_id
    grammar = make_grammar({"json": Person}, tokenizer, len(tokenizer) + 30, (end,), 0)
    draw = np.random.default_rng(0)
    for _ in range(4):
        progress, tokens = grammar.begin(), []
        while not progress.is_over:
            ids = np.flatnonzero(unpacked(progress.words(), len(tokenizer) + 30))
            tokens.append(int(draw.choice(ids)))
            progress.take(tokens[-1])
        stream = Detokenizer(tokenizer, cleans=False).stream()
        check(stream.push(*(x for x in tokens if x != end)) + stream.finish())


@pytest.mark.parametrize("kind", ["unigram", "word-piece", "byt5"])
def test_another_tokenizer_is_refused(kind):
    with pytest.raises(UnsupportedError, match="tokenizer"):
        make_grammar({"json": Person}, KINDS[kind](), 400, (1,), 0)


def _nested(depth, make):
    value = {"type": "string"}
    for _ in range(depth):
        value = make(value)
    return value


HOSTILE = [
    ({"json": {"type": "nope"}}, "Invalid type"),
    ({"json": {"$ref": "#"}}, "no text is left"),
    ({"json": {"$ref": "http://127.0.0.1:1/a.json"}}, "not fetch"),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json": {"x-guidance": {"lenient": True}, "uniqueItems": True, "type": "array"}}, "unique"),
    ({"json": {"type": "integer", "multipleOf": 10**9 + 7}}, "multipleOf"),
    ({"json": {"type": "number", "multipleOf": 1234567.001}}, "multipleOf"),
    ({"lark": 'start: %json {"multiple\\u004ff": 1000003}'}, "multipleOf"),
    ({"lark": "start: %json {"}, "%json"),
    ({"lark": '{"grammars": [{"json_schema": {"multipleOf": 1000003}}]}'}, "cannot be served"),
    ({"json": _nested(300, lambda x: {"type": "array", "items": x})}, "recursion"),
    ({"json": "{" * 50_000}, "JSON schema"),
    ({"json": {"properties": {f"p{i}": {} for i in range(15_000)}}}, "15,000 properties"),
    ({"regex": "(" * 3000 + "a" + ")*" * 3000}, "invalid regex"),
    ({"regex": "a" * 300_000}, "characters"),
    ({"regex": "\ud800"}, "surrogate"),
    ({"lark": "start: x"}, "unknown name"),
    ({"lark": "root ::= " + "(" * 3000}, "grammar"),
    ({"choice": []}, "choice"),
    ({"choice": [f"{i}" for i in range(5000)]}, "4096"),
    ({"xml": "a"}, "json, regex, choice, lark"),
    ({"json": [1]}, "a list"),
]


@pytest.mark.parametrize(("grammar", "why"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_grammar_is_refused_soon_and_says_why(grammar, why):
    tokenizer = KINDS["byte-level"]()
    begun = time.process_time()
    with pytest.raises(ArgumentError, match=why) as caught:
        make_grammar(grammar, tokenizer, len(tokenizer), (tokenizer.eos_token_id,), 0)
    assert time.process_time() - begun < 2
    assert len(str(caught.value)) < 700


def test_a_step_that_is_too_much_ends_its_sequence_alone(engine):
    bomb = {"json": {"type": "string", "pattern": "^((a{1000}){1000}){1000}$"}}
    how = {"max_new_tokens": 20, "do_sample": False}
    expected = engine.generate_text(PROMPT, **how)

    async def main():
        others = [engine.generate_async(PROMPT, **how) for _ in range(2)]
        with pytest.raises(ArgumentError, match=r"too complex|no token"):
            await engine.generate_async(PROMPT, grammar=bomb, **how)
        return [await other.text() for other in others]

    assert asyncio.run(main()) == [expected] * 2


def test_compiling_lets_other_threads_run():
    tokenizer = KINDS["byte-level"]()
    ticks, is_over = [], threading.Event()

    def tick():
        while not is_over.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.005)

    thread = threading.Thread(target=tick)
    thread.start()
    slow = {"json": _nested(10, lambda x: {"oneOf": [{"type": "array", "items": x},
            {"type": "object", "properties": {"a": x}}]})}  # fmt: skip
    make_grammar(slow, tokenizer, len(tokenizer), (), 0)
    is_over.set()
    thread.join()
    assert max(np.diff(ticks), default=0) < 1


def test_stop_strings_amid_a_grammar_are_passed_over_however_the_text_is_cut():
    tokenizer = KINDS["byte-level"]()
    grammar = make_grammar({"regex": "(ab,)*(ab)?"}, tokenizer, len(tokenizer), (), 0)
    text = "ab,ab,ab"
    for stops, keep, expected in (
        (["b,"], False, "ab,ab,ab"),
        ([","], False, "ab"),
        (["b,"], True, "ab,"),
        (["a", "b,a"], False, ""),
        (["b,", ",ab,"], False, "ab"),
    ):
        for size in range(1, len(text) + 1):
            stop = StopText(stops, keep, grammar.reader())
            found = "".join(stop.push(text[i : i + size]) for i in range(0, len(text), size))
            assert found + stop.finish() == expected, (stops, keep, size)


def test_a_schema_may_be_a_dict_a_text_or_any_object(opened):
    engine = opened("torch")
    schema = Person.model_json_schema()
    how = {"do_sample": True, "seed": 2, "max_new_tokens": 60}
    texts = [
        engine.generate_text(PROMPT, grammar={"json": given}, **how)
        for given in (Person, schema, json.dumps(schema))
    ]
    assert len({*texts}) == 1
    text = engine.generate_text(PROMPT, grammar={"json": True}, **how, logit_bias={92: 5.0})
    assert text.startswith("{")


def test_module_mode_refuses_it():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=99))
    with (
        dualinfer.init_inference(model, replace_with_kernel_inject=False) as engine,
        pytest.raises(UnsupportedError, match="grammar is served in fused mode"),
    ):
        engine.generate(np.array([[5]]), grammar={"regex": "a"})

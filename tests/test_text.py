"""Text from tokens as they come: whole characters only, nothing lost."""

import json

import pytest
import torch

import dualinfer
from dualinfer import ArgumentError, CheckpointError, UnsupportedError
from dualinfer.checkpoint.described.tokenizer import load_tokenizer

from .checkpoints import write_byte_tokenizer, write_llama


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return load_tokenizer(folder)


def test_a_vocabulary_of_berts_is_a_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    assert load_tokenizer(tmp_path)("one two")["input_ids"] == [2, 5, 6, 3]


def test_load_tokenizer_names_a_folder_without_one(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(dualinfer.CheckpointError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


def test_load_tokenizer_names_a_broken_one(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(dualinfer.CheckpointError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_load_tokenizer_runs_no_code_of_the_folder(tmp_path, monkeypatch):
    """Nobody is asked whether to: with "y" on the terminal it does not run either."""
    config = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(
        "import pathlib; pathlib.Path(__file__).with_name('ran').touch()\nclass Evil: pass\n"
    )
    monkeypatch.setattr("builtins.input", lambda *args: "y")
    with pytest.raises(CheckpointError, match="trust_remote_code=True"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_plain_tokenizer_is_what_auto_tokenizer_gives(tmp_path):
    from transformers import AutoTokenizer

    write_llama(tmp_path, write_byte_tokenizer(tmp_path))
    own, auto = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    embedded = dualinfer.embedded_model()
    for one, other in (
        (own, auto),
        (load_tokenizer(embedded), AutoTokenizer.from_pretrained(embedded)),
    ):
        assert type(one) is type(other) and one.special_tokens_map == other.special_tokens_map
        for text in ("", "def f(x):\n    return  x", "größer 🙂 日本"):
            assert one(text)["input_ids"] == other(text)["input_ids"]


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}{{ more }}"
TEXTS = ["one", "a longer one"]
HI = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("model")
    write_llama(path, write_byte_tokenizer(path))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module", params=["torch", "jax", "module"])
def engine(request, folder):
    """Both backends, and a live module in module mode."""
    if request.param != "module":
        with dualinfer.init_inference(folder, backend=request.param) as engine:
            yield engine
        return
    from transformers import LlamaForCausalLM

    with dualinfer.init_inference(LlamaForCausalLM.from_pretrained(folder)) as engine:
        yield engine


def continued(engine, text: str, count: int, **options) -> str:
    """The continuation by generate and one decode."""
    ids = engine.tokenizer(text, return_tensors="pt" if engine.report().mode == "module" else "np")
    whole = engine.generate(ids, max_new_tokens=count, do_sample=False, **options)
    new = whole[0, ids["input_ids"].shape[1] :].tolist()
    return engine.tokenizer.decode(new, skip_special_tokens=True)


def test_text_goes_in_and_text_comes_out(engine):
    """Without the prompt; a list gives a list; streamed it is the same."""
    expected = [continued(engine, text, 9) for text in TEXTS]
    options = {"max_new_tokens": 9, "do_sample": False}
    assert engine.generate_text(TEXTS[0], **options) == expected[0]
    assert engine.generate_text(TEXTS, **options) == expected
    assert engine.generate_text(TEXTS[:1], **options) == expected[:1]
    assert "".join(engine.stream_text(TEXTS[1], **options)) == expected[1]
    pieces = list(engine.stream_text(TEXTS, **options))
    assert ["".join(column) for column in zip(*pieces, strict=True)] == expected


def test_a_chat_goes_by_its_template(engine):
    """And ends at the tokenizer's EOS, beside the model's own."""
    messages = [{"role": "user", "content": "hi"}]
    options = {"max_new_tokens": 9, "do_sample": False}
    expected = continued(engine, "user: hi|", 9)
    assert engine.chat(messages, **options) == expected
    assert "".join(engine.stream_chat(messages, **options)) == expected
    more = continued(engine, "user: hi|x", 9)
    assert engine.chat([messages], template_options={"more": "x"}, **options) == [more]
    ids = engine.tokenizer("user: hi|")["input_ids"]
    given = torch.tensor([ids]) if engine.report().mode == "module" else [ids]
    new = engine.generate(given, **options)[0, len(ids) :].tolist()
    before, engine.tokenizer.eos_token_id = engine.tokenizer.eos_token_id, new[2]
    try:
        pieces = list(engine.stream_chat(messages, **options))
    finally:
        engine.tokenizer.eos_token_id = before
    assert "".join(pieces).rstrip("\ufffd") in expected
    assert len(pieces) in (new.index(new[2]) + 1, new.index(new[2]) + 2)  # what is left of a letter


def saying(prompt_ids: list[int], ids: list[int]) -> dict:
    """Arguments by which a model says these ids, whatever its weights."""
    begun, last = len(prompt_ids), ids[-1]

    def allowed(row: int, seen) -> list[int]:
        step = len(seen) - begun
        return [ids[step] if step < len(ids) else last]

    return {"max_new_tokens": len(ids), "do_sample": False, "prefix_allowed_tokens_fn": allowed}


def test_special_tokens_are_left_out_unless_they_are_asked_for(engine):
    """In the midst of an answer: of texts, streams and chats."""
    tokenizer = engine.tokenizer
    special, é = tokenizer.pad_token_id, tokenizer("é")["input_ids"]
    ids = [*é, special, special, *é, special, *tokenizer("b")["input_ids"]]
    pad = tokenizer.pad_token
    for keeps, expected in ((False, "ééb"), (True, f"é{pad}{pad}é{pad}b")):
        kept = {"skip_special_tokens": False} if keeps else {}
        how = saying(tokenizer("one")["input_ids"], ids) | kept
        assert engine.generate_text("one", **how) == expected
        assert "".join(engine.stream_text("one", **how)) == expected
        how = saying(tokenizer("user: hi|")["input_ids"], ids) | kept
        assert engine.chat([HI], **how) == expected
        assert "".join(engine.stream_chat([HI], **how)) == expected


def test_a_row_that_ended_has_no_more_tokens(engine):
    """Not even special ones, where others go on."""
    a, b = engine.tokenizer("ab")["input_ids"]
    begun = len(engine.tokenizer("one")["input_ids"])

    def allowed(row: int, seen) -> list[int]:
        return [a if row == 0 and len(seen) == begun else b]

    how = {"max_new_tokens": 4, "do_sample": False, "prefix_allowed_tokens_fn": allowed}
    how |= {"eos_token_id": b, "pad_token_id": 0, "skip_special_tokens": False}
    assert engine.generate_text(["one", "two"], **how) == ["ab", "b"]
    pieces = list(engine.stream_text(["one", "two"], **how))
    assert ["".join(column) for column in zip(*pieces, strict=True)] == ["ab", "b"]


def test_a_chat_ends_at_the_models_end_and_at_the_tokenizers(engine):
    """Whichever comes first; at neither where the caller names another."""
    tokenizer, own = engine.tokenizer, engine.generation_config.eos_token_id
    ids = tokenizer("abcd")["input_ids"]
    how = saying(tokenizer("user: hi|")["input_ids"], ids)
    before = tokenizer.eos_token_id
    try:
        for model_end, turn_end, expected in (
            (1, 2, "ab"),
            (2, 1, "ab"),
            (1, 1, "ab"),
            (3, 2, "abc"),
        ):
            engine.generation_config.eos_token_id = ids[model_end]
            tokenizer.eos_token_id = ids[turn_end]
            assert engine.chat([HI], **how) == expected
            assert "".join(engine.stream_chat([HI], **how)) == expected
        assert engine.chat([HI], **how, eos_token_id=ids[3]) == "abcd"
        engine.generation_config.eos_token_id = [ids[1], ids[3]]
        assert engine.chat([HI], **how) == "ab"
        engine.generation_config.eos_token_id = None
        assert engine.chat([HI], **how) == "abc"
    finally:
        tokenizer.eos_token_id, engine.generation_config.eos_token_id = before, own


def test_a_question_is_the_same_as_a_str_and_as_parts(engine):
    """By a template that reads parts alone, and by one that would print them as Python."""
    parts = [{"type": "text", "text": "hi"}]
    reads_parts = TEMPLATE.replace(
        "{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}"
    )
    for template in (reads_parts, TEMPLATE):
        options = {
            "template_options": {"chat_template": template},
            "max_new_tokens": 5,
            "do_sample": False,
        }
        expected = continued(engine, "user: hi|", 5)
        for content in ("hi", parts):
            assert engine.chat([{"role": "user", "content": content}], **options) == expected


def test_a_processor_may_be_the_engines_tokenizer(engine, folder):
    class Processor:
        tokenizer, chat_template = load_tokenizer(folder), "{{ messages[0].content }}!"

        def __call__(self, images=None, text=None, **more):
            raise AssertionError("an image's address")

        def decode(self, *args, **kwargs):
            return self.tokenizer.decode(*args, **kwargs)

    before = engine.tokenizer
    expected = engine.generate_text("hi!", max_new_tokens=5, do_sample=False)
    try:
        engine.tokenizer = Processor()
        how = {"max_new_tokens": 5, "do_sample": False, "stop_strings": ["never in it"]}
        assert engine.generate_text("hi!", **how) == engine.chat([HI], **how) == expected
        assert "".join(engine.stream_text("hi!", tokenizer=Processor(), **how)) == expected
    finally:
        engine.tokenizer = before


def test_stop_strings_need_no_tokenizer_here(engine):
    whole = engine.generate_text("one", max_new_tokens=20, do_sample=False)
    stop = next(c for c in whole if c.isascii() and c.isprintable())
    stopped = engine.generate_text("one", max_new_tokens=20, do_sample=False, stop_strings=[stop])
    assert stopped == whole[: whole.index(stop) + 1]


def test_a_stream_of_text_that_is_left_frees_what_it_held(engine):
    stream = engine.stream_text("one", max_new_tokens=50, do_sample=False)
    next(stream)
    stream.close()
    assert engine.generate_text("one", max_new_tokens=2, do_sample=False) is not None


def test_text_has_a_length_of_its_own(engine):
    """At most 256 new tokens where nobody asks, less where the positions end: here 128."""
    if engine.report().mode == "fused":
        ids = engine.tokenizer("one")["input_ids"]
        pieces = list(engine.stream_text("one", do_sample=False, eos_token_id=None))
        assert len(pieces) - 1 <= engine.max_tokens - len(ids) <= len(pieces) + 1
        assert engine.generate([ids], do_sample=False, eos_token_id=None).shape[1] == len(ids) + 20


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.generate_text(""), "The prompt is empty"),
        (lambda e: e.generate_text([]), "expected a str, or a list of several"),
        (lambda e: e.generate_text(5), "expected a str, or a list of several"),
        (lambda e: e.generate_text([5]), "A prompt is an int"),
        (lambda e: e.generate_text(b"x"), "expected a str, or a list of several"),
        (lambda e: e.generate_text(), "The prompt is missing"),
        (lambda e: e.generate_text("x", streamer=print), r"streamer: .* stream_text\(\)"),
        (lambda e: e.chat([HI], input_ids=[[1]]), r"input_ids: the prompt is a text here"),
        (
            lambda e: e.chat([HI], template_options="x"),
            "template_options is a str; expected a dict",
        ),
        (lambda e: e.generate_text("x", tokenizer="gpt2"), "expected a HF tokenizer"),
        (lambda e: e.chat("hi"), "messages is 'hi'; expected dicts"),
        (lambda e: e.chat([{"content": "x"}]), "expected dicts"),
        (lambda e: e.chat([]), r"messages is \[\]; expected dicts"),
        (lambda e: e.chat([HI, {"role": "user"}]), r"messages\[1\], the user's, has no content"),
        (lambda e: e.stream_chat([{"role": "user", "content": None}]), "has no content"),
        (lambda e: e.chat([{"role": None, "content": "x"}]), "has the role None"),
        (lambda e: e.chat([{"role": "user", "content": 5}]), "content that is no text: 5"),
        (lambda e: e.chat([HI], template_options={"mor": 1}), "Did you mean more"),
        (lambda e: e.stream_chat([HI], skip_special_tokens=None), "expected True or False"),
        (lambda e: e.chat([{"role": "user", "content": "\ud800"}]), "content that is no text"),
        (lambda e: e.generate("import os"), r"engine\.generate_text"),
        (lambda e: e.generate_text("x", max_tokens=4), r"max_tokens is no .*mean max_new_tokens\?"),
        (lambda e: e.stream_chat([HI], stop=["x"]), r"Did you mean stop_strings\?"),
        (lambda e: e([[1, 2, 3], [4, 5]]), r"differ in length; pad them.*generate\(\) and embed"),
        (lambda e: e.generate_text("x", max_new_tokens=0), "max_new_tokens=0; expected an int"),
        (lambda e: e.stream_text("x", do_sample=True, temperature=0), "expected a number above 0"),
    ],
)
def test_what_is_no_text_is_refused(engine, call, message):
    with pytest.raises(ArgumentError, match=message):
        call(engine)


def test_a_template_that_fails_or_is_not_there_is_told(engine, folder):
    messages = [{"role": "user", "content": "x"}]
    wrong = {"chat_template": "{{ raise_exception('no such role') }}"}
    with pytest.raises(ArgumentError, match="does not take these messages: no such role"):
        engine.chat(messages, template_options=wrong)
    plain = load_tokenizer(folder)
    plain.chat_template = None
    with pytest.raises(ArgumentError, match="no chat template"):
        engine.chat(messages, tokenizer=plain)


def test_a_model_from_nowhere_asks_for_its_tokenizer(tokenizer):
    from .cases import make_model

    with dualinfer.init_inference(make_model("llama-gqa"), dtype="fp32") as engine:
        with pytest.raises(UnsupportedError, match=r"set engine\.tokenizer"):
            engine.generate_text("x")
        with pytest.raises(UnsupportedError, match=r"torch\.manual_seed"):
            engine.generate_text("x", tokenizer=tokenizer, seed=1)
        engine.tokenizer = tokenizer
        assert engine.tokenizer is tokenizer


def test_generate_shows_what_it_takes():
    import inspect

    from dualinfer.engine.arguments import DEFAULTS
    from dualinfer.engine.fused import FusedEngine

    for name in ("generate", "stream", "generate_text", "stream_text", "chat", "stream_chat"):
        shown = inspect.signature(getattr(FusedEngine, name)).parameters
        assert {*DEFAULTS, "seed"} <= set(shown)
        assert shown["temperature"].kind is inspect.Parameter.KEYWORD_ONLY

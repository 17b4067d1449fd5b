"""Calls of tools and thoughts: read alike in whatever pieces, and made certain by grammars."""

import copy
import json
import re

import numpy as np
import openai
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dualinfer
from dualinfer.backends.slots import unpacked
from dualinfer.engine.grammar import make_grammar
from dualinfer.serving.http.app import Server
from dualinfer.serving.http.beside import served
from dualinfer.serving.http.call_grammars import calls_grammar, style_of, thoughts_grammar
from dualinfer.serving.http.calls import MARKS, Delta, Reply
from dualinfer.serving.http.channels import ChannelReply
from dualinfer.serving.http.engines import LocalEngine
from dualinfer.serving.http.protocol import ChatRequest, RequestError
from dualinfer.serving.http.talks import Talk

from .tokenizer_kinds import KINDS

F = '{"name": "f", "arguments": {"a": "}{\\"<x", "b": [1, {}]}}'
ARGS = '{"a": "}{\\"<x", "b": [1, {}]}'
L = F.replace("arguments", "parameters")
TURNED = '{"arguments": {"a": 1}, "name": "g"}'
TAGS = (
    "<tool_call>\n<function=f>\n<parameter=a>\n<x>\n\n</parameter>\n<parameter=b>\n[1, {}]\n"
    "</parameter>\n<parameter=n>\nNaN\n</parameter>\n</function>"
)
TAG_ARGS = '{"a": "<x>\\n", "b": [1, {}], "n": "NaN"}'
# Format, text, content, and the calls' names and arguments.
ANSWERS = [
    ("hermes", "Hello < <tool there.\n", "Hello < <tool there.\n", []),
    ("hermes", f"Hm.\n<tool_call>\n{F}\n</tool_call>", "Hm.", [("f", ARGS)]),
    ("hermes", f"<tool_call>{F}</tool_call>\n<tool_call>\n{TURNED}\n</tool_call>\n", "",
     [("f", ARGS), ("g", '{"a": 1}')]),
    ("hermes", f"<tool_call>\n{F}\n</tool_call> Done.", "Done.", [("f", ARGS)]),
    ("hermes", "<tool_call>\nf(1)\n</tool_call>", "<tool_call>\nf(1)\n</tool_call>", []),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": ', "", [("f", '{"a": ')]),
    ("hermes", '<tool_call>\n{"name": 3}</tool_call>', '<tool_call>\n{"name": 3}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "",
     [("f", '{"a": 1}')]),
    ("llama3", "Hello {\n", "Hello {\n", []),
    ("llama3", L, "", [("f", ARGS)]),
    ("llama3", f"<|python_tag|>{L}; {L}", "", [("f", ARGS), ("f", ARGS)]),
    ("llama3", f"\n{L}\n{TURNED}", "", [("f", ARGS), ("g", '{"a": 1}')]),
    ("llama3", '{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
    ("llama3", '{"answer": [1, 2]} so', '{"answer": [1, 2]} so', []),
    ("llama3", "<|python_tag|>print(1)", "print(1)", []),
    ("llama3", '{"answer": ', '{"answer": ', []),
    ("harmony", "Hello <|chan", "Hello <|chan", []),
    ("harmony", "to=5 is", "to=5 is", []),
    ("harmony", "<|channel|>final<|message|>Hello <|", "Hello <|", []),
    ("harmony", "<|channel|>final<|message|>Hello<|return|>more", "Hello", []),
    ("harmony", f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ARGS}<|call|>x",
     "", [("f", ARGS)]),
    ("harmony", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.g"
     "<|channel|>commentary json<|message|><|call|>", "I look.", [("g", "{}")]),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>{\"a\": ", "", [("f", '{"a": ')]),
    ("harmony", "<|channel|>commentary to=functions.f<|constrain|>json", "", []),
    ("harmony", "<|start|>assistant<|channel|>final<|message|>a<|start|>assistant<|channel|>final"
     "<|message|>b<|end|>", "a\nb", []),
    ("harmony", "<|channel|>commentary to=python<|message|>1", "1", []),
    ("qwen3_coder", "Hello <tool", "Hello <tool", []),
    ("qwen3_coder", f"Hm.\n{TAGS}\n</tool_call>", "Hm.", [("f", TAG_ARGS)]),
    ("qwen3_coder", f"{TAGS}</tool_call>\n<tool_call><function=g></function>\n</tool_call> So.",
     "So.", [("f", TAG_ARGS), ("g", "{}")]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[1",
     "", [("f", '{"a": 1')]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>1</parameter> so\n</function>",
     "so\n</function>", [("f", '{"a": 1}')]),
    ("qwen3_coder", "<tool_call>\n<function f>", "<tool_call>\n<function f>", []),
    ("qwen3_coder", f"<tool_call>\n{F}", f"<tool_call>\n{F}", []),
    ("mistral", "Hello [TOOL", "Hello [TOOL", []),
    ("mistral", f"[TOOL_CALLS] [{F}, {TURNED}]", "", [("f", ARGS), ("g", '{"a": 1}')]),
    ("mistral", f"Ok [TOOL_CALLS]f[ARGS]{ARGS}[TOOL_CALLS]g[CALL_ID]a1[ARGS]{{}}", "Ok",
     [("f", ARGS), ("g", "{}")]),
    ("mistral", f"[TOOL_CALLS]f{ARGS}", "", [("f", ARGS)]),
    ("mistral", "[TOOL_CALLS] [1]", "[TOOL_CALLS] [1]", []),
    ("mistral", "[TOOL_CALLS] oh", "[TOOL_CALLS] oh", []),
]  # fmt: skip


def reader(style, known=(), thinks=False, opened=False, must=False):
    if style == "harmony":
        return ChannelReply(known, thinks)
    return Reply(style, known, thinks, opened, must=must)


def answered(pieces, *how, **more):
    """Content, thoughts and calls of an answer, of which each call begins once."""
    reply, whole = reader(*how, **more), Delta()
    for delta in [*map(reply.push, pieces), reply.finish()]:
        for call in delta.calls:
            is_new = all(x["index"] != call["index"] for x in whole.calls)
            assert is_new == ("id" in call) == ("name" in call["function"])
        whole.add(delta)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in whole.calls]
    assert len({call["id"] for call in whole.calls}) == len(calls) == reply.count
    return whole.content, whole.thoughts, calls


def pieces_of(text, cuts):
    ends = sorted({*(c for c in cuts if c < len(text)), len(text)})
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 120)), st.booleans())
@settings(max_examples=200, deadline=None)
def test_calls_do_not_depend_on_the_pieces(answer, cuts, thinks):
    style, text, content, calls = answer
    thoughts = f"I {answer[1]} <b".strip() if thinks else ""
    if thinks and style == "harmony":
        thoughts = "I <b\nor "
        said = (f"<|channel|>analysis<|message|>{x}<|end|>" for x in ("I <b", "or "))
        begin = "<|start|>assistant"
        text = begin.join(said) + begin * text.startswith("<|channel|>") + text
    elif thinks:
        text = f"\n<think>\nI {text} <b\n</think>\n\n{text}"
    found = answered(pieces_of(text, cuts), style, ["f", "g"], thinks=thinks)
    assert found == (content.lstrip() if thinks else content, thoughts, calls)


@given(
    st.one_of(
        st.text(alphabet='{}[]",:<>/ntool_c\n\\TOLCARGS ', max_size=60),
        st.lists(st.sampled_from(["<tool_call>", "<function=", "<parameter=", "a>", "</parameter>",
                                  "</function>", "</tool_call>", "\n", " b", "<", "f>",
                                  "<function=f>\n<parameter=b>\n", "\n<parameter=a>"]))
        .map("".join),
        st.lists(st.sampled_from(["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>",
                                  "assistant", " to=functions.f", "final", "analysis", "{}", " ",
                                  "commentary", "<|", "a" * 500]))
        .map("".join),
    ),
    st.lists(st.integers(0, 90)),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_no_text_depends_on_the_pieces(text, cuts):
    for style in (*MARKS, None):
        for opened in (False, True):
            how = style, {"f": {"properties": {"a": {}, "b": {}}}, "g": None}, True, opened
            assert answered(pieces_of(text, cuts), *how) == answered([text], *how)
    assert answered([text], None)[0] == text


def test_thoughts_may_be_open_already_and_may_stay_so():
    assert answered(["a\n</thi", "nk>\n\nb "], None, thinks=True, opened=True) == ("b ", "a", [])
    assert answered(["<think>a", " b "], None, thinks=True) == ("", "a b", [])
    assert answered([" <think>"], None, thinks=False)[0] == " <think>"


def test_a_mark_that_the_end_cuts_is_text_of_the_model_whole_and_streamed():
    for end in (1, 4, len("</think>") - 1):
        for text, opened in (("a \n" + "</think>"[:end], True), ("<think>a \n</th", False)):
            expected = "", text.removeprefix("<think>"), []
            for at in range(1, len(text)):
                assert answered([text[:at], text[at:]], None, (), True, opened) == expected
            assert answered(list(text), None, (), True, opened) == expected
    assert answered(["<thi"], None, thinks=True) == ("<thi", "", [])


def test_one_call_may_be_the_last():
    text = f"<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{F}\n</tool_call>"
    for size in (1, 7, len(text)):
        reply = Reply("hermes", one=True)
        for i in range(0, len(text), size):
            reply.push(text[i : i + size])
        assert reply.is_over
        assert reply.count == 1


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", f"<think>a</think>\n<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{F}"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>\n<tool_call>\n"),
        ("llama3", f"{F}; {F}"),
        ("mistral", f"[TOOL_CALLS][{F}, {F}]"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{}"),
    ],
)
def test_what_is_cut_of_calls_that_must_be_is_no_content(style, text):
    for end in range(len(text) + 1):
        for pieces in (text[:end], [text[:end]]):
            assert answered(pieces, style, ["f"], thinks="think" in text, must=True)[0] == ""


class Place(pydantic.BaseModel, extra="forbid"):
    city: str = pydantic.Field(max_length=5)
    near: bool


class Holder(pydantic.BaseModel, extra="forbid"):
    place: Place


MODELS = {"go": Place, "hold": Holder}  # the second has $defs
FUNCTIONS = [
    {"name": name, "parameters": kind.model_json_schema()} for name, kind in MODELS.items()
]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]


def checked(calls):
    for call in calls:
        MODELS[call.function.name].model_validate_json(call.function.arguments, strict=True)


def test_tags_are_read_by_the_schema_of_their_function():
    kinds = {"a": {"type": "string"}, "b": {"$ref": "#/$defs/x"}, "c": {"type": ["string", "null"]}}
    schema = {"properties": kinds, "$defs": {"x": {"enum": ["1", "2"]}}}
    pairs = [("a", "1"), ("b", "2"), ("c", "null"), ("d", "true")]
    assert tagged(schema, pairs) == '{"a": "1", "b": "2", "c": null, "d": true}'


def tagged(schema, pairs):
    """The arguments of one call in tags."""
    values = "".join(f"<parameter={key}>\n{x}\n</parameter>\n" for key, x in pairs)
    text = f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"
    content, _, [(name, arguments)] = answered([text], "qwen3_coder", {"f": schema})
    assert (content, name) == ("", "f")
    arguments.encode()
    return arguments


class Kinds(pydantic.BaseModel):
    text: str | None = None
    flag: bool | None = None
    count: int | str = 0
    ratio: float | None = None
    place: Place | None = None
    words: list[str] | str = ""
    both: bool | str = ""


MAYBE = {"type": ["string", "null"]}


@pytest.mark.parametrize(
    ("key", "said", "value"),
    [
        ("text", "12345", "12345"), ("text", "true", "true"), ("text", "null", None),
        ("text", '"a"', "a"), ("text", "None", "None"), ("listed", "1.5", "1.5"),
        ("listed", "null", None), ("flag", "True", True), ("flag", "None", None),
        ("flag", "false", False), ("both", "False", "False"), ("both", "true", True),
        ("count", "7", 7), ("count", "7.5", "7.5"), ("count", "7.0", 7.0), ("ratio", "7", 7),
        ("place", '{"city": "a"}', {"city": "a"}), ("words", '["a"]', ["a"]),
        ("words", '{"a": 1}', '{"a": 1}'), ("other", "True", "True"), ("again", "1", "1"),
        ("ratio", "1e999", None), ("ratio", "-Infinity", None), ("count", "1e999", "1e999"),
        ("other", "[-1e999]", "[-1e999]"), ("other", r'"\ud83d"', "\ud83d"), ("k\u00e9y", "é", "é"),
    ],
)  # fmt: skip
def test_a_value_in_tags_is_of_a_type_that_its_schema_names(key, said, value):
    schema = Kinds.model_json_schema()
    schema["properties"] |= {"listed": MAYBE, "again": {"$ref": "#/$defs/again"}}
    schema["$defs"]["again"] = {"anyOf": [{"$ref": "#/$defs/again"}, {"type": "string"}]}
    found = json.loads(tagged(schema, [(key, said)]), parse_constant=pytest.fail)
    assert found == {key: value}
    assert type(found[key]) is type(value)


def test_an_argument_in_tags_is_given_once():
    pairs = [("a", "1"), ("b", "2"), ("a", "3")]
    assert tagged({}, pairs) == '{"a": 1, "b": 2}'


A, B, G = "<parameter=a>\n1\n", "<parameter=b>\n2\n", "<tool_call>\n<function=g>\n"
END, OVER = "</parameter>\n", "</function>\n</tool_call>"
ONE, BOTH = '{"a": 1}', '{"a": 1, "b": 2}'
INNER = r'{"a": "1\n</function>\n"}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"{A}{OVER}\n{G}{B}{END}{OVER}", "", [("f", ONE), ("g", '{"b": 2}')]),
        (f"{A}</tool_call>\n{G}{B}{END}{OVER}", "", [("f", ONE), ("g", '{"b": 2}')]),
        (f"{A}{B}{END}{OVER} So.", "So.", [("f", BOTH)]),  # b is a name of an argument
        (f"{A}<parameter=c>\n2\n{OVER}", "", [("f", '{"a": 1, "c": 2}')]),
        (f"{A}<parameter=c>\n{END}{OVER}", "", [("f", r'{"a": "1\n<parameter=c>"}')]),
        (f"{A}</function>\n\n{END}{OVER}", "", [("f", INNER)]),
        (f"{A}{OVER}", "", [("f", ONE)]),
        (f"{A}</function>", "", [("f", ONE)]),
        (f"{A}</tool_call>", "", [("f", ONE)]),
        (f"{A}", "", [("f", "{}")]),
        ("<param", "", [("f", "{}")]),
        ("", "", [("f", "{}")]),
        (f"{OVER} Then <function=g>\n{A}{OVER}", "Then", [("f", "{}"), ("g", ONE)]),
        (f"{OVER}\n<function=g></function>", "", [("f", "{}"), ("g", "{}")]),
        (f"{OVER}\n<function=h></function>", "<function=h></function>", [("f", "{}")]),
        (f"{OVER}\n<function=g> is.", "<function=g> is.", [("f", "{}")]),
        (f"{OVER}\n<function=g>\n", "<function=g>\n", [("f", "{}")]),
    ],
)  # fmt: skip
def test_tags_may_be_left_out(text, content, calls):
    text = f"<tool_call>\n<function=f>\n{text}"
    known = {"f": {"properties": {"a": {}, "b": {}}}, "g": None}
    for size in (1, 7, len(text)):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert answered(pieces, "qwen3_coder", known) == (content, "", calls)


def test_objects_with_half_a_pair_of_surrogates_can_be_sent():
    half = r'{"arguments": {"a": "\ud83d"}, "name": "g"}'
    _, _, [(_, arguments)] = answered([f"<tool_call>{half}"], "hermes")
    assert json.loads(arguments.encode()) == {"a": "\ud83d"}
    for named in (r'{"arguments": {}, "name": "\ud83d"}', r'{"name": "\ud83d", "arguments": {}}'):
        assert answered([f"<tool_call>{named}"], "hermes")[2] == []


@pytest.mark.parametrize(
    ("parameters", "what"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "a"}}}, "pattern"),
        ({"anyOf": []}, "anyOf"),
        ({"type": "object", "additionalProperties": True}, "any names"),
        ({"additionalProperties": {}, "properties": {}}, "any names"),
        ({"type": "object", "patternProperties": {"^a": {}}}, "any names"),
        ({"properties": {"a": {}}, "required": ["a", "b"]}, "required of f"),
        ({"properties": {"a": {}}, "required": True}, "required of f"),
        ({"properties": {"a": {"type": "string"}}, "required": None}, None),
        ({"additionalProperties": False}, None),
        ({"properties": {"a": {}}, "additionalProperties": True}, None),
    ],
)
def test_tags_that_cannot_be_made_certain(parameters, what):
    def grammar():
        tool = [{"name": "f", "parameters": parameters}]
        return calls_grammar("qwen3_coder", tool, must=True, one=True, has_args=False, token=repr)

    if what is None:
        assert "<function=f>" in grammar()
    else:
        with pytest.raises(ValueError, match=what):
            grammar()


def test_no_text_of_a_grammar_ends_a_value_in_tags():
    tokenizer = KINDS["llama-3"]()
    end, text = tokenizer.eos_token_id, {"type": "string"}
    tool = {"name": "f", "parameters": {"properties": {"a": text}, "required": ["a"]}}

    def takes(text, must):
        """True if a grammar of calls has a text that begins so."""
        how = {"must": must, "one": False, "has_args": False, "token": json.dumps}
        lark = {"lark": calls_grammar("qwen3_coder", [tool], **how)}
        progress = make_grammar(lark, tokenizer, len(tokenizer), (end,), 0).begin()
        for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
            if token not in np.flatnonzero(unpacked(progress.words(), len(tokenizer))):
                return False
            progress.take(token)
        return True

    call = "<tool_call>\n<function=f>\n<parameter=a>\n"
    for said in ("<a>", "a <parameter=b>\n</functions>", "</tool_call> <tool_call"):
        assert takes(f"{call}{said}\n{END}{OVER}", True)
    for said in ("<parameter=b>", "a\n</function>", "</tool_call>\n<tool_call>", "</parameter>"):
        assert not takes(f"{call}{said}\n{END}{OVER}", True)
    assert takes(f"So <function {call}", False)
    assert not takes("So <function=f>\n", False)


@pytest.mark.parametrize("style", MARKS)
def test_a_grammar_makes_calls_certain_with_special_tokens_too(style):
    tokenizer = KINDS["llama-3"]()
    marks = ["[TOOL_CALLS]", "[ARGS]", *MARKS["harmony"]]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    special = {str(t): x for x, t in tokenizer.added_tokens_decoder.items() if t.special}
    rng, end = np.random.default_rng(1), tokenizer.eos_token_id

    def token(mark):
        return f"<[{special[mark]}]>" if mark in special else json.dumps(mark)

    for must, has_args, one in ((True, True, False), (True, False, True), (False, False, False)):
        how = {"must": must, "one": one, "has_args": has_args, "token": token}
        prefix = thoughts_grammar(opened=False) if must and style != "harmony" else None
        lark = {"lark": calls_grammar(style, FUNCTIONS, **how), "prefix": prefix}
        grammar = make_grammar(lark, tokenizer, len(tokenizer), (end,), 0)
        progress, taken = grammar.begin(), []
        for _ in range(700):
            ids = np.flatnonzero(unpacked(progress.words(), len(tokenizer)))
            chosen = int(end) if end in ids and must else int(rng.choice(ids))
            progress.take(chosen)
            taken += [] if chosen == end else [chosen]
            if progress.is_over:
                break
        if not progress.is_over:
            continue
        schemas = {tool["name"]: tool["parameters"] for tool in FUNCTIONS}
        text = tokenizer.decode(taken, clean_up_tokenization_spaces=False)
        content, _, calls = answered([text], style, schemas, thinks=must)
        if must:
            assert content == ""
            assert calls
        for name, arguments in calls:
            MODELS[name].model_validate_json(arguments, strict=True)


TEMPLATES = {
    "hermes": "{% for m in messages %}# {{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "\n{{ c.function | tojson }}\n</tool_call>{% endfor %}\n{% endfor %}{% if tools %}"
    "{{ tools | tojson }}{% endif %}def ",
    "llama3": "{% for m in messages %}# {{ m.content }}{% for c in m.tool_calls or [] %}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{% endfor %}\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}def ",
    "mistral": "{% for m in messages %}# {{ m.content }}{% for c in m.tool_calls or [] %}"
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}\n"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}def ",
    "qwen3_coder": "{% for m in messages %}# {{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}def ",
    "harmony": "{% for m in messages %}# {{ m.content }}{% for c in m.tool_calls or [] %}"
    "<|channel|>commentary to=functions.{{ c.function.name }} <|constrain|>json<|message|>"
    "{{ c.function.arguments | tojson }}<|call|>{% endfor %}\n{% endfor %}{% if tools %}"
    "{{ tools | tojson }}{% endif %}<|start|>assistant",
    "thinking": "{% for m in messages %}# {{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}\n{% endfor %}{% if tools %}"
    "{{ tools | tojson }}{% endif %}{% if budget %}{{ '</think>' }}{% endif %}<think>\n",
}


@pytest.fixture(scope="module", params=["torch", pytest.param("jax", marks=pytest.mark.slow)])
def engine(request):
    with dualinfer.init_inference(
        dualinfer.embedded_model(), backend=request.param, dtype="fp32"
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine):
    with (
        served(Server(LocalEngine(engine), "small")) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
    ):
        yield client


def test_templates_tell_their_format():
    found = {name: style_of(text) for name, text in TEMPLATES.items()}
    assert found == {**{n: n for n in found}, "thinking": "hermes"}
    assert style_of("{{ messages }}") is None


QUICK = "hermes", "thinking"
WAYS = [pytest.param("torch", x, marks=() if x in QUICK else pytest.mark.slow) for x in TEMPLATES]
WAYS += [pytest.param("jax", "hermes", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("engine", "style"), WAYS, indirect=["engine"])
def test_calls_come_back_valid_whole_and_streamed(engine, client, style):
    engine.tokenizer.chat_template = TEMPLATES[style]
    ask = [{"role": "user", "content": "go there"}]
    how = {"model": "small", "messages": ask, "tools": TOOLS, "temperature": 1.0}
    how |= {"max_tokens": 110}
    named = {"type": "function", "function": {"name": "hold"}}
    ended = []
    for seed, choice in enumerate(["required", named, "required"]):
        if style == "thinking" and seed:
            continue
        more = {**how, "seed": seed, "tool_choice": choice, "parallel_tool_calls": seed < 2}
        if style == "thinking":  # which a small model would not end
            more |= {"logit_bias": {str(x): 20 for x in engine.tokenizer("</think>")["input_ids"]}}
        if style == "harmony":  # likewise, of thoughts before a call
            first = (engine.tokenizer(x)["input_ids"][0] for x in ("commentary", " to="))
            more |= {"logit_bias": {str(x): 30 for x in first}}
        whole = client.chat.completions.create(**more).choices[0]
        calls, thoughts, reason = {}, "", None
        for event in client.chat.completions.create(**more, stream=True):
            delta = event.choices[0].delta
            reason = event.choices[0].finish_reason or reason
            thoughts += getattr(delta, "reasoning_content", None) or ""
            for part in delta.tool_calls or []:
                if part.id:
                    calls[part.index] = [part.function.name, ""]
                calls[part.index][1] += part.function.arguments or ""
        made = whole.message.tool_calls or []
        assert reason == whole.finish_reason
        assert [*calls.values()] == [[c.function.name, c.function.arguments] for c in made]
        assert thoughts == (getattr(whole.message, "reasoning_content", None) or "")
        if reason == "length":
            continue
        assert reason == "tool_calls"
        checked(made)
        assert choice == "required" or [c.function.name for c in made] == ["hold"]
        assert (seed < 2 and style != "harmony") or len(made) == 1
        ended.append(whole.message)
    assert ended or style == "thinking"
    # They go back, and so does what the tool says.
    for message in ended[:1]:
        ids = [call.id for call in message.tool_calls]
        assert style != "mistral" or all(re.fullmatch("[A-Za-z0-9]{9}", x) for x in ids)
        said = [{"role": "tool", "tool_call_id": x, "content": "done"} for x in ids]
        back = [*ask, message.model_dump(exclude_none=True), *said]
        more = {**how, "messages": back, "max_tokens": 2, "tool_choice": "none"}
        assert client.chat.completions.create(**more).choices[0].finish_reason == "length"


@pytest.mark.parametrize("engine", ["torch"], indirect=True)
def test_a_format_stands_in_the_channel_that_users_see(engine, client):
    engine.tokenizer.chat_template = TEMPLATES["harmony"]
    final = {str(engine.tokenizer("final")["input_ids"][0]): 40}  # without thoughts before it
    how = {"model": "small", "messages": [{"role": "user", "content": "go"}], "temperature": 0}
    schema = {"name": "place", "schema": Place.model_json_schema()}
    form = {"response_format": {"type": "json_schema", "json_schema": schema}}
    for asked in ({"extra_body": {"guided_choice": ["so it is"]}}, form):
        whole = client.chat.completions.create(**how, **asked, max_tokens=120, logit_bias=final)
        message = whole.choices[0].message
        assert whole.choices[0].finish_reason == "stop"
        if asked is form:
            Place.model_validate_json(message.content)
        else:
            assert message.content == "so it is"
    with pytest.raises(openai.BadRequestError, match="channels cannot be held to") as caught:
        client.chat.completions.create(**how, **form, tools=TOOLS)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize("engine", ["torch"], indirect=True)
@pytest.mark.parametrize("parser", [None, "none", "hermes"])
def test_channels_are_read_by_whichever_parser_of_calls(engine, parser):
    tokenizer = copy.deepcopy(engine.tokenizer)
    tokenizer.chat_template = TEMPLATES["harmony"]
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS["harmony"], "<|other|>"]})
    ask = [{"role": "user", "content": "go"}]
    body = ChatRequest.model_validate({"model": "small", "messages": ask})
    talk = Talk.of_template(tokenizer, {}, parser, None).of([5], body, [])
    said = (
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>"
    )
    reply, whole = talk.reply(), Delta()
    for delta in (reply.push(said + "So.<|return|>"), reply.finish()):
        whole.add(delta)
    assert talk.reads and (whole.thoughts, whole.content) == ("I look.", "So.")
    silent = {tokenizer.convert_ids_to_tokens(x) for x in talk.silent}
    assert "<|other|>" in silent and not silent & {*MARKS["harmony"]}
    _, made = talk.grammar(("guided_choice", {"choice": ["a"]}))
    assert "final" in made["prefix"]
    server = Server(LocalEngine(engine), "small", tool_call_parser=parser)
    engine.tokenizer.chat_template = TEMPLATES["harmony"]
    if parser is not None:
        tools = ChatRequest.model_validate({"model": "small", "messages": ask, "tools": TOOLS})
        with pytest.raises(RequestError, match=f"--tool-call-parser {parser}. Start it without"):
            server._read_chat(tools)


def test_tools_that_need_not_be_called(engine, client):
    engine.tokenizer.chat_template = TEMPLATES["hermes"]
    ask = [{"role": "user", "content": "go"}]
    how = {"model": "small", "messages": ask, "temperature": 0, "max_tokens": 12}
    plain = client.chat.completions.create(**how, tools=TOOLS).choices[0]
    text = engine.chat(ask, max_new_tokens=12, do_sample=False, template_options={"tools": TOOLS})
    assert (plain.message.content, plain.finish_reason) == (text, "length")
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    # Strict ones are called as they should be where they are called at all.
    begins = {"logit_bias": {str(x): 30 for x in engine.tokenizer("<tool_call>\n")["input_ids"]}}
    for tools in (TOOLS, strict):
        more = {**how, **begins, "tools": tools, "max_tokens": 40}
        message = client.chat.completions.create(**more).choices[0].message
        if tools is strict and message.tool_calls:
            checked(message.tool_calls[:-1])
    both = client.chat.completions.create(
        **{**how, "max_tokens": 120, "temperature": 1.0},
        tools=TOOLS,
        seed=1,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "place", "schema": Place.model_json_schema()},
        },
    ).choices[0]
    if both.finish_reason == "stop":
        Place.model_validate_json(both.message.content)
    elif both.finish_reason == "tool_calls":
        checked(both.message.tool_calls)
    bad = [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "x"}}}],
          "tool_choice": "required"}, "tools"),
        ({"functions": [{"name": "a"}]}, "functions"),
        ({"messages": [*ask, {"role": "assistant", "tool_calls": [3]}]}, "messages"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"extra_body": {"chat_template_kwargs": {"tools": []}}}, "chat_template_kwargs"),
    ]  # fmt: skip
    for fields, name in bad:
        with pytest.raises(openai.BadRequestError, match=name):
            client.chat.completions.create(**{**how, "tools": TOOLS, **fields})
    engine.tokenizer.chat_template = "{{ messages[0].content }}{{ tools }}"
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
        client.chat.completions.create(**how, tools=TOOLS)


def test_a_format_after_thoughts(engine, client):
    engine.tokenizer.chat_template = TEMPLATES["thinking"]
    bias = {str(x): 20 for x in engine.tokenizer("</think>")["input_ids"]}
    how = {"model": "small", "messages": [{"role": "user", "content": "a"}], "max_tokens": 60}
    choice = client.chat.completions.create(
        **how, temperature=0, logit_bias=bias, extra_body={"guided_choice": ["yes", "no"]}
    ).choices[0]
    if choice.finish_reason == "stop":
        assert choice.message.content in ("yes", "no")
    else:
        assert choice.message.content == ""

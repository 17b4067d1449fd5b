# ruff: noqa: E501 (templates are read in one line)
"""Chats: what users write is in the prompt, in whichever form the template reads it."""

import json
import socket
from enum import Enum
from typing import Any

import numpy as np
import pytest

from dualinfer import ArgumentError
from dualinfer.checkpoint.described.tokenizer import load_tokenizer
from dualinfer.checkpoint.described.tokenizer_files import tokenizer_files
from dualinfer.engine import chat_limits
from dualinfer.engine.chat import encode_chat
from dualinfer.engine.tokenizing import encode

from .chat_templates import STYLES
from .checkpoints import write_byte_tokenizer
from .tokenizer_kinds import byte_level, llama3

SAID = [("user", "What is 2 + 2?"), ("assistant", "It is 4."), ("user", "And a river?")]
PRINTED = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}


def made_of(tokenizer: Any, messages: Any, template: str | None = None, **options: Any) -> str:
    """The prompt of a chat as a text."""
    options |= {} if template is None else {"chat_template": template}
    return tokenizer.decode(encode_chat(tokenizer, messages, options))


@pytest.fixture
def tokenizer() -> Any:
    return byte_level(bos_token="<|begin|>")


def in_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


READS_PARTS = {
    "parts": lambda role: True,
    "mixed": lambda role: role != "system",
    "parts of users": lambda role: role != "assistant",
}


@pytest.mark.parametrize("name", STYLES)
def test_what_is_said_is_in_the_prompt(name, tokenizer):
    """As a str and as parts, alike or by turns: each is what transformers makes of its own form."""
    style = STYLES[name]
    said = [("system", "Be brief!")] * style.has_system + SAID
    reads_parts = READS_PARTS.get(style.takes, lambda role: False)
    own = [{"role": r, "content": in_parts(t) if reads_parts(r) else t} for r, t in said]
    expected = tokenizer.apply_chat_template(
        own, chat_template=style.template, tokenize=False, add_generation_prompt=True
    )
    assert all(text in expected for _, text in said)
    for are_parts in ([False] * 4, [True] * 4, [True, False, True, False], [False, True] * 2):
        messages = [
            {"role": role, "content": in_parts(text) if parts else text}
            for (role, text), parts in zip(said, are_parts, strict=False)
        ]
        before = json.dumps(messages)
        assert made_of(tokenizer, messages, style.template) == expected
        assert json.dumps(messages) == before


@pytest.mark.parametrize("name", STYLES)
def test_calls_of_tools_are_in_the_prompt_or_refused(name, tokenizer):
    style = STYLES[name]
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "No rain today."},
    ]
    if style.has_tools:
        prompt = made_of(tokenizer, messages, style.template)
        assert "weather" in prompt and "Ulm" in prompt and "No rain today." in prompt
    else:
        with pytest.raises(ArgumentError, match=r"messages|does not take"):
            encode_chat(tokenizer, messages, {"chat_template": style.template})


def test_several_parts_are_lines_of_a_text(tokenizer):
    messages = [{"role": "user", "content": [*in_parts("one"), "two", {"text": "three"}]}]
    assert made_of(tokenizer, messages, PRINTED) == "user: one\ntwo\nthree|"
    prompt = made_of(tokenizer, messages, STYLES["llava"].template)
    assert prompt == "USER: onetwothree ASSISTANT:"
    first = "{% for m in messages %}{{ m.content[0].text }}{% endfor %}"
    assert made_of(tokenizer, messages, first) == "one\ntwo\nthree"


@pytest.mark.parametrize(
    ("message", "template", "why"),
    [
        ({"role": "user", "content": "x"}, "{{ messages[0].role }}", "leaves out of the prompt"),
        (
            {"role": "tool", "content": "x"},
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "the tool's, has content that the chat template leaves out",
        ),
        ({"role": "usr", "content": "x"}, STYLES["vicuna"].template, "has the role 'usr', which"),
        ({"role": "user", "content": {"x": 5}}, PRINTED, "content that is no text: {'x': 5}"),
        ({"role": "user", "content": [{"type": "odd", "x": "y"}]}, PRINTED, "as Python shows it"),
        (
            {"role": "assistant", "content": "so", "tool_calls": [CALL]},
            STYLES["chatml"].template,
            "has tool_calls that the chat template leaves out",
        ),
        ({"role": "user", "name": "me"}, PRINTED, "reads nothing else of it"),
        ({"role": "user", "tool_call_id": "5"}, PRINTED, "has no content"),
        (
            {"role": "user", "content": "x"},
            "{{ messages[0].content",
            "does not take these messages",
        ),
        ({"role": "user", "content": "x"}, "{{ 1 / 0 }}", "does not take these messages"),
    ],
)
def test_what_would_be_lost_is_refused(message, template, why, tokenizer):
    with pytest.raises(ArgumentError, match=why):
        encode_chat(tokenizer, [message], {"chat_template": template})


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
        {"type": "input_audio", "input_audio": {}},
        {"image": "x.png"},
    ],
)
def test_images_are_no_part_of_a_text(part, tokenizer):
    messages = [{"role": "user", "content": [*in_parts("x"), part]}]
    with pytest.raises(ArgumentError, match="chat\\(\\) reads texts alone"):
        encode_chat(tokenizer, messages, {"chat_template": STYLES["llava"].template})


def test_images_beside_a_text_are_refused(tokenizer):
    messages = [{"role": "user", "content": "x", "images": ["y.png"]}]
    with pytest.raises(ArgumentError, match=r"images=\['y.png'\]. chat\(\) reads texts alone"):
        encode_chat(tokenizer, messages, {"chat_template": PRINTED})


def test_a_template_may_look_at_the_texts(tokenizer):
    """Marks behind them would be refused: then the texts themselves are looked for."""
    picky = (
        "{% for m in messages %}{% if m.content not in ('yes', 'no') %}{{ raise_exception('?') }}"
    )
    picky += "{% endif %}{{ m.content if m.role == 'user' }}{% endfor %}"
    assert made_of(tokenizer, [{"role": "user", "content": "yes"}], picky) == "yes"
    with pytest.raises(ArgumentError, match="leaves out"):
        encode_chat(tokenizer, [{"role": "tool", "content": "no"}], {"chat_template": picky})


def test_a_role_may_be_one_that_the_template_writes_or_names(tokenizer):
    critic = [{"role": "critic", "content": "hm"}]
    assert made_of(tokenizer, critic, PRINTED) == "critic: hm|"
    assert "critic\nhm" in made_of(tokenizer, critic, STYLES["chatml"].template)
    named = (
        "{% for m in messages %}{% if m.role == 'critic' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert made_of(tokenizer, critic, named) == "hm"
    assert "# 'critic'" not in made_of(tokenizer, critic, "{# 'x' #}" + PRINTED)
    with pytest.raises(ArgumentError, match="has the role 'critic'"):
        encode_chat(tokenizer, critic, {"chat_template": "{# 'critic' #}{{ messages[0].content }}"})


def test_a_message_without_content_may_say_it_by_another_key(tokenizer):
    for key, value in (
        ("reasoning_content", "hm"),
        ("name", "bob"),
        ("documents", [{"title": "a", "text": "b"}]),
        ("tool_calls", [{"name": "f", "arguments": {}}]),
        ("output", 5),
    ):
        template = f"{{% for m in messages %}}{{{{ m.{key} }}}}{{% endfor %}}"
        message = {"role": "assistant", "content": None, key: value}
        assert str(value) in made_of(tokenizer, [message], template)
        with pytest.raises(ArgumentError, match=r"leaves out|reads nothing else"):
            encode_chat(tokenizer, [message], {"chat_template": "{{ messages[0].role }}"})


def test_nothing_is_no_text(tokenizer):
    """None, as many APIs give it beside calls, is not written."""
    message = [{"role": "assistant", "content": None, "name": None, "tool_calls": [CALL]}]
    template = "{% for m in messages %}{{ m.content }}{{ m.name }}{{ m.tool_calls[0].function.name }}{% endfor %}"
    assert made_of(tokenizer, message, template) == "weather"


def test_thoughts_may_have_any_of_their_names(tokenizer):
    for given in ("reasoning_content", "thinking", "reasoning"):
        for read in ("reasoning_content", "thinking"):
            message = [{"role": "assistant", given: "hm"}]
            assert made_of(tokenizer, message, f"{{{{ messages[0].{read} }}}}") == "hm"


def test_what_a_tool_gave_may_be_a_mapping(tokenizer):
    for content in ({"x": "ho"}, {"x": 22}):
        message = [{"role": "tool", "content": content}]
        template = "{% if messages[0].content is mapping %}{{ messages[0].content.x }}{% endif %}"
        assert made_of(tokenizer, message, template) == str(content["x"])
        assert made_of(tokenizer, message, "{{ messages[0].content | tojson }}") == json.dumps(
            content
        )


# --- options -------------------------------------------------------------------------------------

QUESTION = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"enable_thinkin": False}, "Did you mean enable_thinking"),
        ({"documents": [{"title": "a"}]}, "does not read documents"),
        ({"padding": True}, "padding is about token ids"),
        ({"tokenize": True}, "tokenize is about token ids"),
        ({"tools": {"name": "f"}}, "tools is a dict; expected a list"),
        ({"tools": [5]}, "A tool is an int"),
        ({"chat_template": 5}, "chat_template is an int"),
        ({"chat_template": "missing.jinja"}, "No chat template can be read from missing.jinja"),
    ],
)
def test_an_option_that_does_nothing_is_refused(options, why, tokenizer):
    tokenizer.chat_template = STYLES["qwen-3"].template
    with pytest.raises(ArgumentError, match=why):
        encode_chat(tokenizer, QUESTION, options)


def test_options_that_the_template_reads_are_honoured(tokenizer):
    tokenizer.chat_template = STYLES["qwen-3"].template
    assert made_of(tokenizer, QUESTION, enable_thinking=False).endswith("</think>\n\n")

    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: Where.
        """
        return city

    assert '"name": "weather"' in made_of(tokenizer, QUESTION, tools=[weather])
    assert not made_of(tokenizer, QUESTION, add_generation_prompt=False).endswith("assistant\n")
    answer = [*QUESTION, {"role": "assistant", "content": "Well, "}]
    for how in (True, "content"):
        expected = tokenizer.apply_chat_template(
            answer, tokenize=False, add_generation_prompt=False, continue_final_message=how
        )
        assert made_of(tokenizer, answer, continue_final_message=how) == expected
        assert expected.endswith("assistant\nWell, ")
    trims = STYLES["llama-3"].template
    assert made_of(tokenizer, answer, trims, continue_final_message=True).endswith("\n\nWell,")
    parts = [*QUESTION, {"role": "assistant", "content": in_parts("Well")}]
    seen = made_of(tokenizer, parts, STYLES["llava"].template, continue_final_message=True)
    assert seen == "USER: hi ASSISTANT: Well"
    with pytest.raises(ArgumentError, match="Pass one of them"):
        made_of(tokenizer, answer, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(ArgumentError, match="has no thinking that is a text"):
        made_of(tokenizer, answer, continue_final_message="thinking")
    with pytest.raises(ArgumentError, match="does not read add_generation_prompt"):
        made_of(tokenizer, QUESTION, PRINTED, add_generation_prompt=False)


def test_a_template_may_lie_in_a_file(tokenizer, tmp_path):
    (tmp_path / "own.jinja").write_text(PRINTED)
    (tmp_path / "own.json").write_text(json.dumps({"chat_template": PRINTED}))
    for name in ("own.jinja", "own.json"):
        for path in (tmp_path / name, str(tmp_path / name)):
            assert made_of(tokenizer, QUESTION, chat_template=path) == "user: hi|"


def test_a_template_may_have_a_name(tokenizer):
    tokenizer.chat_template = {
        "default": PRINTED,
        "tool_use": "{{ tools }}" + PRINTED,
        "x": "x" + PRINTED,
    }
    assert made_of(tokenizer, QUESTION) == "user: hi|"
    assert made_of(tokenizer, QUESTION, chat_template="x") == "xuser: hi|"
    assert "weather" in made_of(tokenizer, QUESTION, tools=[CALL])
    tokenizer.chat_template = {"a": PRINTED, "b": PRINTED}
    with pytest.raises(ArgumentError, match=r"several chat templates, a, b"):
        encode_chat(tokenizer, QUESTION)


@pytest.mark.parametrize(
    "name", ["chat_template.json", "processor_config.json", "chat_template.jinja"]
)
def test_a_folders_template_is_found_where_processors_have_it(name, tmp_path):
    """And again in a folder that is saved from there."""
    for folder in ("own", "saved"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text('{"model_type": "llama"}')
    write_byte_tokenizer(tmp_path / "own")
    is_jinja = name.endswith(".jinja")
    text = PRINTED if is_jinja else json.dumps({"chat_template": PRINTED})
    (tmp_path / "own" / name).write_text(text)
    assert made_of(load_tokenizer(tmp_path / "own"), QUESTION) == "user: hi|"
    for file in tokenizer_files(tmp_path / "own"):
        (tmp_path / "saved" / file.name).write_bytes(file.content)
    assert made_of(load_tokenizer(tmp_path / "saved"), QUESTION) == "user: hi|"


def test_one_bos_stands_in_front_of_a_chat():
    """A template that writes one, or a tokenizer that adds one to texts."""
    tokenizer = llama3()
    bos = tokenizer.bos_token_id
    assert encode(tokenizer, "hi")[0] == bos
    for style in ("llama-2", "llama-3", "gemma", "mistral"):
        ids = encode_chat(tokenizer, QUESTION, {"chat_template": STYLES[style].template})
        assert ids[0] == bos and ids.count(bos) == 1
    assert bos not in encode_chat(tokenizer, QUESTION, {"chat_template": STYLES["chatml"].template})


def test_words_that_look_like_special_tokens_may_be_kept_words(tokenizer):
    messages = [{"role": "user", "content": "a <|eot|> b"}]
    tokenizer.chat_template = PRINTED + "<|eot|>"
    eot = tokenizer.eos_token_id
    assert encode_chat(tokenizer, messages).count(eot) == 2
    assert encode_chat(tokenizer, messages, {"sanitize_control_tokens": True}).count(eot) == 1


# --- processors ----------------------------------------------------------------------------------


def test_a_processor_stands_for_its_tokenizer(tokenizer, monkeypatch):
    """Called with a text it would take it for an image's address, and open a connection."""

    class Processor:  # as ProcessorMixin, whose import takes seconds
        def __init__(self, tokenizer: Any, chat_template: str | None):
            self.tokenizer, self.chat_template = tokenizer, chat_template

        def __call__(self, images: Any = None, text: Any = None, **more: Any) -> Any:
            raise AssertionError(f"called with {images!r}")

        def decode(self, *args: Any, **kwargs: Any) -> Any:
            return self.tokenizer.decode(*args, **kwargs)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    processor = Processor(tokenizer, PRINTED)
    assert encode(processor, "http://x/y.png") == tokenizer("http://x/y.png")["input_ids"]
    assert tokenizer.decode(encode_chat(processor, QUESTION)) == "user: hi|"
    assert getattr(tokenizer, "chat_template", None) is None
    tokenizer.chat_template = "own " + PRINTED
    assert tokenizer.decode(encode_chat(Processor(tokenizer, None), QUESTION)) == "own user: hi|"


def test_a_tokenizer_may_make_chats_in_its_own_way():
    """As mistral-common's does, without a template."""
    from transformers import PreTrainedTokenizerFast

    class Own(PreTrainedTokenizerFast):
        def apply_chat_template(self, conversation: Any, **how: Any) -> Any:
            assert not how["tokenize"]
            return "".join(f"[{m['role']}]{m['content']}" for m in conversation)

    tokenizer = Own(tokenizer_object=byte_level().backend_tokenizer)
    assert tokenizer.decode(encode_chat(tokenizer, QUESTION)) == "[user]hi"
    messages = [{"role": "user", "content": in_parts("hi")}]
    assert tokenizer.decode(encode_chat(tokenizer, messages)) == "[user]hi"


# --- templates of strangers ----------------------------------------------------------------------

_TWICE = "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x OP n.x %}{% endfor %}"
_NESTED = (
    "{% set n = namespace(x=['a']) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
)
HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nothing passes": "{% for a in range(99999) if a < 0 %}{% endfor %}" * 9,
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursion": "{% macro f(n) %}{{ f(n+1) }}{% endmacro %}{{ f(0) }}",
    "output": "{% for a in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "product": "{{ 'a' * 10**10 }}",
    "list": "{{ ([1] * 10**10) | length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "square": "{% set n = namespace(x=3) %}{% for i in range(80) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "sum": _TWICE.replace("OP", "+"),
    "joined": _TWICE.replace("OP", "~"),
    "nested": _NESTED + "{{ n.x }}",
    "nested in a text": _NESTED + "{{ (n.x ~ '') | length }}",
    "nested in json": _NESTED + "{{ n.x | tojson | length }}",
    "width": "{{ '%10000000000d' % 1 }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "format filter": "{{ '%*d' | format(10000000000, 3) }}",
    "center": "{{ 'a' | center(10000000000) }}",
    "method": "{{ 'a'.ljust(10000000000) }}",
    "bytes": "{{ (5).to_bytes(10000000000, 'big') | length }}",
    "indent": "{{ ('a\n' * 100000) | indent(60000) | length }}",
    "json": "{{ messages | tojson(indent=1000000000) }}",
    "replace": "{% set a = 'a' * 1000000 %}{{ a.replace('a', a) | length }}",
    "replace filter": "{% set a = 'a' * 1000000 %}{{ a | replace('a', a) | length }}",
    "join": "{% set a = 'a' * 1000000 %}{{ a.join(a) | length }}",
    "join filter": "{% set a = 'a' * 1000000 %}{{ a | join(a) | length }}",
    "tabs": "{{ ('\t' * 100000).expandtabs(60000) | length }}",
    "batch": "{{ 'abc' | batch(1000000000, 'x') | list | length }}",
    "held": "{% set n = namespace(x=[]) %}{% for i in range(9999) %}{% set n.x = n.x + ['a' * 1000000 ~ i] %}{% endfor %}",
    "long": "{{ 'a' }}" * 30_000,
}  # fmt: skip


WHY = dict.fromkeys(("loops", "nothing passes", "macros"), "its loops do not end")
WHY |= {"recursion": "it recurses without end", "long": r"has 270,\d+ characters"}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_would_not_end_is_stopped(name, tokenizer, monkeypatch):
    monkeypatch.setattr(chat_limits, "_TURNS", 5_000)
    monkeypatch.setattr(chat_limits, "_MADE", 1 << 25)
    why = WHY.get(name, "(makes|asks for) a (text|number) of (million|thousand)s of")
    with pytest.raises(ArgumentError, match=rf"chat template (was stopped: )?(it )?{why}"):
        encode_chat(tokenizer, QUESTION, {"chat_template": HOSTILE[name] + PRINTED})


def test_a_template_is_stopped_by_the_clock(tokenizer, monkeypatch):
    monkeypatch.setattr(chat_limits, "_SECONDS", 0.05)
    slow = "{% for a in range(9999) %}{% if range(99999) | sum < 0 %}{% endif %}{% endfor %}"
    with pytest.raises(ArgumentError, match="it takes more than 0 seconds"):
        encode_chat(tokenizer, QUESTION, {"chat_template": slow + PRINTED})


def test_what_is_within_the_bounds_is_rendered_as_transformers_does(tokenizer):
    """Numbers that are no sizes, marks that are no widths, blocks of generation."""
    harmless = "{{ '**%s** %d' % ('a', 1234567) }}{{ '{} 123456: {:>5}'.format(1234567, 'b') }}"
    harmless += (
        "{{ 'abc'.find('c', 100000) }}{{ messages | tojson(indent=2) }}{{ 'ab' | center(9) }}"
    )
    harmless += "{{ 'abab'.replace('b', 'cd' * 9) }}{{ ['a', 'b'] | join(', ') }}{{ 7 ** 3 % 5 }}"
    harmless += "{% generation %}{{ strftime_now('%Y') }}{% endgeneration %}{{ none ~ 1.5 ~ [1] }}"
    harmless += (
        "{% macro f(x) %}<{{ x | upper }}>{% endmacro %}{{ f('y') }}{{ dict(a=1).a }}{{ odd }}"
    )
    expected = tokenizer.apply_chat_template(QUESTION, chat_template=harmless, tokenize=False)
    assert made_of(tokenizer, QUESTION, harmless) == expected


def test_a_template_sees_plain_values_alone(tokenizer):
    class Odd:
        def write(self) -> None:
            raise AssertionError("called")

    template = "{{ thing.write }}{{ thing }}" + PRINTED
    assert made_of(tokenizer, QUESTION, template, thing=Odd()) == "<Odd>user: hi|"
    role = Enum("Role", {"USER": "user"}, type=str).USER
    message = [{"role": role, "content": "hi", "count": np.int64(5)}]
    assert made_of(tokenizer, message, PRINTED + "{{ messages[0].count }}") == "user: hi|5"


def test_a_long_chat_is_within_the_bounds(tokenizer):
    messages = [{"role": "user", "content": "a" * 2000}] * 400
    prompt = made_of(tokenizer, messages, STYLES["qwen-3"].template)
    assert prompt.count("a" * 2000) == 400

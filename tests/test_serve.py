"""`dualinfer serve`: OpenAI's client gets over HTTP what the engine gives in Python."""

import asyncio
import contextlib
import gc
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import openai
import pydantic
import pytest
import torch
import transformers
from typer.testing import CliRunner

import dualinfer
from dualinfer.cli import main as cli
from dualinfer.serving.http.answers import StopText
from dualinfer.serving.http.app import Server
from dualinfer.serving.http.beside import served
from dualinfer.serving.http.engines import LocalEngine
from dualinfer.serving.http.protocol import ChatRequest, CompletionRequest, RequestError, read
from dualinfer.system.terminal import without_controls

KEY = "a-key"
PROMPT = "def copy_file(source"
PLAIN = {"do_sample": False}
TEMPLATE = (
    "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}def {% endif %}"
)
CHAT = [{"role": "user", "content": "copy a file"}]


@pytest.fixture(scope="module", params=["torch", pytest.param("jax", marks=pytest.mark.slow)])
def engine(request):
    with dualinfer.init_inference(
        dualinfer.embedded_model(), backend=request.param, dtype="fp32"
    ) as engine:
        engine.tokenizer.chat_template = TEMPLATE
        yield engine


@pytest.fixture(scope="module")
def hf():
    folder = dualinfer.embedded_model()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def url(engine):
    with served(Server(LocalEngine(engine), "small", KEY, most_bytes=100_000)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def post(url, route, body, key=KEY, kind="application/json"):
    """Status and JSON of a plain request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}".encode(), "Content-Type": kind}
    try:
        with urllib.request.urlopen(urllib.request.Request(url + route, data, headers)) as got:
            return got.status, json.load(got)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def complete(client, **fields):
    fields = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12} | fields
    return client.completions.create(model="small", **fields)


def settle(engine):
    """Wait until nothing is under way."""
    begun = time.monotonic()
    while engine.traffic().live or engine.traffic().waiting:
        assert time.monotonic() - begun < 20
        time.sleep(0.01)


def metrics(url):
    """The values of /metrics."""
    with urllib.request.urlopen(url + "/metrics") as got:
        lines = got.read().decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def generated(url):
    return int(metrics(url)['dualinfer:generation_tokens_total{model_name="small"}'])


def test_greedy_texts_are_the_engines_whole_and_streamed(engine, client):
    expected = engine.generate_text(PROMPT, max_new_tokens=30, **PLAIN)
    whole = complete(client, max_tokens=30)
    assert whole.choices[0].text == expected
    assert whole.choices[0].finish_reason == "length"
    count = len(engine.tokenizer(PROMPT)["input_ids"])
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (count, 30)
    events = [*complete(client, max_tokens=30, stream=True, stream_options={"include_usage": True})]
    assert "".join(c.text for e in events for c in e.choices) == expected
    assert events[-1].usage == whole.usage
    assert [c.finish_reason for e in events for c in e.choices][-1] == "length"

    answer = engine.chat(CHAT, max_new_tokens=20, **PLAIN)
    how = {"model": "small", "messages": CHAT, "temperature": 0, "max_completion_tokens": 20}
    said = client.chat.completions.create(**how)
    assert (said.choices[0].message.content, said.choices[0].message.role) == (answer, "assistant")
    events = [*client.chat.completions.create(**how, stream=True)]
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(e.choices[0].delta.content or "" for e in events) == answer


def test_fields_have_the_meaning_of_generates_arguments(engine, client):
    ids = engine.tokenizer(PROMPT)["input_ids"]
    sampled = {"do_sample": True, "temperature": 0.9, "top_k": 0, "top_p": 0.8, "min_p": 0.01}
    rows = np.asarray(
        engine.generate([ids], **sampled, seed=7, num_return_sequences=2, max_new_tokens=12)
    )
    expected = [
        engine.tokenizer.decode(row[len(ids) :], skip_special_tokens=True) for row in rows.tolist()
    ]
    extra = {"min_p": 0.01}
    how = {"temperature": 0.9, "top_p": 0.8, "seed": 7, "n": 2, "extra_body": extra}
    assert [c.text for c in complete(client, **how).choices] == expected
    texts = ["", ""]
    for event in complete(client, **how, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == expected
    assert complete(client, prompt=ids, echo=True, max_tokens=1).choices[0].text == (
        PROMPT + engine.generate_text(PROMPT, max_new_tokens=1, **PLAIN)
    )
    two = [PROMPT, "class A:"]
    assert [c.text for c in complete(client, prompt=two).choices] == engine.generate_text(
        two, max_new_tokens=12, **PLAIN
    )
    shaped = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    assert complete(
        client, **shaped, logit_bias={"9": 3.0}, extra_body={"repetition_penalty": 1.3}
    ).choices[0].text == engine.generate_text(
        PROMPT, max_new_tokens=12, repetition_penalty=1.3, **shaped, logit_bias={9: 3.0}, **PLAIN
    )
    # Log-probabilities, by the model's own logits.
    told = engine.generate(
        [ids], max_new_tokens=6, **PLAIN, logprobs=2, return_dict_in_generate=True
    )
    found = complete(client, max_tokens=6, logprobs=2).choices[0].logprobs
    names = [engine.tokenizer.decode([x]) for x in np.asarray(told.sequences)[0, len(ids) :]]
    assert found.tokens == names
    assert np.allclose(found.token_logprobs, told.logprobs[0], atol=1e-4)
    assert [[*x.values()] for x in found.top_logprobs] == pytest.approx(
        np.asarray(told.top_logprobs)[0], abs=1e-4
    )
    assert found.text_offset == [len("".join(names[:i])) for i in range(6)]
    how = {"model": "small", "messages": CHAT, "temperature": 0, "max_tokens": 6}
    how |= {"logprobs": True, "top_logprobs": 2}
    content = client.chat.completions.create(**how).choices[0].logprobs.content
    parts = [e.choices[0].logprobs for e in client.chat.completions.create(**how, stream=True)]
    streamed = [one for part in parts if part for one in part.content]
    assert [one.token for one in streamed] == [one.token for one in content]
    assert [len(one.top_logprobs) for one in streamed] == [2] * 6
    greedy = [one.top_logprobs[0] for one in content]
    assert [(x.token, x.logprob) for x in greedy] == [(x.token, x.logprob) for x in content]
    # Ends: a stop string is left out, a stop id, too; EOS is passed over where that is asked for.
    text = engine.generate_text(PROMPT, max_new_tokens=12, **PLAIN)
    stop = text[4:7]
    cut = complete(client, stop=["never there", stop])
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (text[: text.index(stop)], "stop")
    pieces = [*complete(client, stop=stop, stream=True)]
    assert "".join(c.text for e in pieces for c in e.choices) == text[: text.index(stop)]
    kept = complete(client, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == text[: text.index(stop) + 3]
    row = np.asarray(engine.generate([ids], max_new_tokens=12, **PLAIN))[0, len(ids) :].tolist()
    ended = complete(client, extra_body={"stop_token_ids": [row[5]]})
    assert ended.choices[0].finish_reason == "stop"
    assert ended.usage.completion_tokens == row.index(row[5]) + 1
    late = {"stop_token_ids": [row[5]], "min_tokens": 9}
    forced = {"logit_bias": {"0": 100.0}}  # the model's EOS
    assert complete(client, **forced).usage.completion_tokens == 1
    on = complete(client, **forced, extra_body={"ignore_eos": True})
    assert (on.usage.completion_tokens, on.choices[0].finish_reason) == (12, "length")
    assert complete(client, extra_body=late).usage.completion_tokens >= 9


def test_log_probabilities_of_prompts_are_hfs(engine, client, hf):
    ids = engine.tokenizer(PROMPT)["input_ids"]
    with torch.no_grad():
        logs = hf(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = logs[range(len(ids) - 1), ids[1:]].tolist()
    best = logs[:-1].topk(2)
    for prompt in (PROMPT, ids):  # as lm-eval asks: ids, one token more
        for length in (0, 1):
            choice = complete(
                client, prompt=prompt, echo=True, logprobs=2, max_tokens=length
            ).choices[0]
            told = choice.logprobs
            assert choice.text.startswith(PROMPT)
            assert len(told.tokens) == len(ids) + length
            assert "".join(told.tokens) == choice.text
            assert told.token_logprobs[0] is told.top_logprobs[0] is None
            assert told.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-4)
            for top, values in zip(told.top_logprobs[1 : len(ids)], best.values, strict=True):
                assert [*top.values()] == pytest.approx(values.tolist(), abs=1e-4)
            assert told.text_offset[-1] == len(choice.text) - len(told.tokens[-1])
            assert choice.finish_reason == "length"
    whole = complete(client, echo=True, logprobs=0, max_tokens=4).choices[0].logprobs
    events = complete(client, echo=True, logprobs=0, max_tokens=4, stream=True)
    parts = [c.logprobs for e in events for c in e.choices if c.logprobs]
    assert [x for part in parts for x in part.token_logprobs] == whole.token_logprobs
    assert [x for part in parts for x in part.tokens] == whole.tokens
    both = client.completions.create(
        model="small", prompt=[PROMPT, "a b"], echo=True, max_tokens=0, logprobs=1, n=2
    )
    assert [c.text for c in both.choices] == [PROMPT, PROMPT, "a b", "a b"]
    assert both.usage.completion_tokens == 0
    found = complete(client, max_tokens=1, extra_body={"prompt_logprobs": 1}).choices[0]
    rows = found.prompt_logprobs
    assert rows[0] is None
    told = [row[str(x)]["logprob"] for row, x in zip(rows[1:], ids[1:], strict=True)]
    assert told == pytest.approx(expected, abs=1e-4)
    firsts = best.indices[:, 0].tolist()
    assert {row[str(x)]["rank"] for row, x in zip(rows[1:], firsts, strict=True)} == {1}
    row = engine.prompt_logprobs(ids * 100)  # in parts
    with torch.no_grad():
        logs = hf(torch.tensor([ids * 100])).logits[0].log_softmax(-1)
    expected = logs[range(len(ids) * 100 - 1), (ids * 100)[1:]].numpy()
    assert np.allclose([x.logprob for x in row[1:]], expected, atol=2e-4)


def test_parts_of_characters_are_told_the_same_wherever_they_stand(engine, client):
    """Their offsets are those of the characters in the text, and chats know their bytes."""
    text = "é日🎉x y"
    encoded = engine.tokenizer(text)["input_ids"]
    echoed = complete(client, prompt=text, echo=True, logprobs=0, max_tokens=0).choices[0].logprobs
    chosen = {"extra_body": {"structured_outputs": {"choice": [text]}}}
    new = complete(client, prompt="日", echo=True, logprobs=1, max_tokens=20, **chosen).choices[0]
    made, begun = new.logprobs, len(engine.tokenizer("日")["input_ids"])
    count = len(encoded)
    assert new.text == "日" + text
    assert made.tokens[begun:][:count] == echoed.tokens
    assert [x - 1 for x in made.text_offset[begun:][:count]] == echoed.text_offset
    assert made.text_offset[:begun] == [0] * begun
    starts, whole = [], b""  # by the bytes alone: where the character of each first byte is
    how = {"model": "small", "messages": CHAT, "temperature": 0, "max_tokens": 20, **chosen}
    content = client.chat.completions.create(**how, logprobs=True).choices[0].logprobs.content
    for one in content[:count]:
        starts.append(len((whole + bytes(one.bytes[:1])).decode(errors="replace")) - 1)
        whole += bytes(one.bytes)
    assert whole.decode() == text
    assert [one.token for one in content[:count]] == echoed.tokens
    assert starts == echoed.text_offset


class Copy(pydantic.BaseModel, extra="forbid"):
    path: str = pydantic.Field(max_length=6)
    times: int = pydantic.Field(ge=0, le=9)


def test_texts_under_a_grammar_are_valid_whole_and_streamed(engine, client):
    chat = {"model": "small", "messages": CHAT, "temperature": 1.0, "max_tokens": 120}
    ended = 0
    for seed in range(3):
        how = {**chat, "seed": seed, "n": 2, "stop": [",", "}"]}
        parsed = client.chat.completions.parse(**how, response_format=Copy)
        texts = ["", ""]
        for event in client.chat.completions.create(
            **how, response_format=_as_format(Copy), stream=True
        ):
            for choice in event.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [choice.message.content for choice in parsed.choices]
        for choice in parsed.choices:
            if choice.finish_reason == "stop":
                ended += 1
                assert isinstance(choice.message.parsed, Copy)
    assert ended > 2
    for fields, pattern in (
        ({"response_format": {"type": "json_object"}}, r"\{.*"),
        ({"guided_regex": "[0-9]{4}/a"}, "[0-9]{4}/a"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "a" "b"'}, "ab"),
        ({"structured_outputs": {"json": {"const": [1, "x"]}}}, r'\[\s*1\s*,\s*"x"\s*\]'),
        ({"guided_json": '{"type": "boolean"}', "skip_special_tokens": False}, "true|false"),
        ({"guided_regex": "a{3}", "ignore_eos": True, "stop_token_ids": [0]}, "aaa"),
    ):
        text = complete(client, max_tokens=30, extra_body=fields).choices[0].text
        assert re.fullmatch(pattern, text, re.S), (fields, text)


def _as_format(kind):
    schema = {"name": "a", "schema": kind.model_json_schema()}
    return {"type": "json_schema", "json_schema": schema}


def test_many_at_once_have_what_each_has_alone(engine, url):
    asked = []
    for i in range(16):
        how = {"max_new_tokens": 3 + i, "do_sample": i % 2 == 1}
        how |= {"seed": i, "top_k": 0} if i % 2 else {}
        asked.append((f"def f{i}(" + "a, " * (i % 5), how))
    expected = [engine.generate_text(prompt, **how) for prompt, how in asked]

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:

            async def one(prompt, how):
                got = await client.completions.create(
                    model="small",
                    prompt=prompt,
                    max_tokens=how["max_new_tokens"],
                    temperature=float(how["do_sample"]),
                    seed=how.get("seed"),
                )
                return got.choices[0].text

            return await asyncio.gather(*(one(*each) for each in asked))

    assert asyncio.run(main()) == expected


def test_a_request_of_a_lower_priority_number_takes_the_slot_of_another(engine, client, url):
    settle(engine)
    engine.reserve(1, 500)
    try:
        expected = complete(client, max_tokens=300, extra_body={"ignore_eos": True}).choices[0].text
        extra = {"ignore_eos": True, "priority": 5}
        stream = complete(client, max_tokens=300, extra_body=extra, stream=True)
        text = next(stream).choices[0].text
        urgent = complete(client, max_tokens=3, extra_body={"priority": -1})
        assert expected.startswith(urgent.choices[0].text)
        assert metrics(url)['vllm:num_preemptions_total{model_name="small"}'] == "1"
        assert text + "".join(event.choices[0].text for event in stream) == expected
        settle(engine)
    finally:
        engine.unreserve()


def test_a_client_that_leaves_frees_its_slots(engine, client, url):
    settle(engine)
    made = generated(url)
    long = {"max_tokens": 950, "extra_body": {"ignore_eos": True}}
    with complete(client, **long, n=3, stream=True) as stream:
        next(iter(stream))
        assert engine.traffic().live == 3
    settle(engine)
    body = {"model": "small", "prompt": PROMPT, "max_tokens": 950, "ignore_eos": True}
    data = json.dumps(body).encode()
    host, port = url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n"
    head += "Content-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(f"{head}Authorization: Bearer {KEY}\r\n\r\n".encode() + data)
        begun = time.monotonic()
        while not engine.traffic().live:
            assert time.monotonic() - begun < 20
            time.sleep(0.005)
    settle(engine)
    assert generated(url) - made < 900  # of 3,800


def _split(fields):
    """Fields of OpenAI's own as they are, others beside them."""
    return fields if "messages" in fields else {"extra_body": fields}


def _format(schema):
    """A request for JSON of this schema."""
    how = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    return {"prompt": PROMPT, "response_format": how}


REFUSED = [
    ({"prompt": PROMPT, "tools": [{"type": "function"}]}, "tools"),
    ({"prompt": PROMPT, "response_format": {"type": "xml"}}, "response_format"),
    ({"prompt": PROMPT, "response_format": {"type": "json_schema"}}, "response_format"),
    (_format({"type": "nope"}), "response_format"),
    (_format({"$ref": "#"}), "response_format"),
    ({"prompt": PROMPT, "structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"prompt": PROMPT, "structured_outputs": {"structural_tag": "a"}}, "structured_outputs"),
    (_format({"type": "object"}) | {"guided_regex": "a"}, "guided_regex"),
    ({"prompt": PROMPT, "guided_regex": "(" * 4000}, "guided_regex"),
    ({"prompt": PROMPT, "guided_json": "{" * 40_000}, "guided_json"),
    ({"prompt": PROMPT, "best_of": 3}, "best_of"),
    ({"prompt": PROMPT, "max_tokens": 0}, "max_tokens"),
    ({"prompt": PROMPT, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt": PROMPT, "\ud800": 1}, r"\ud800"),
    ({"prompt": PROMPT, "suffix": "end"}, "suffix"),
    ({"prompt": PROMPT, "no_such_field": 1}, "no_such_field"),
    ({"prompt": PROMPT, "temperature": -1}, "temperature"),
    ({"prompt": PROMPT, "temperature": "hot"}, "temperature"),
    ({"prompt": PROMPT, "n": 0}, "n"),
    ({"prompt": PROMPT, "stop_token_ids": [2**31 - 1]}, "stop_token_ids"),
    ({"prompt": PROMPT, "stop_token_ids": [1] * 2000}, "stop_token_ids"),
    ({"prompt": PROMPT, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": [PROMPT] * 129}, "prompt"),
    ({"prompt": [[1], ["a"]]}, "prompt"),
    ({"prompt": [PROMPT, 1]}, "prompt"),
    ({"prompt": PROMPT, "logit_bias": {"x": 1}}, "logit_bias"),
    ({"prompt": PROMPT, "max_tokens": 5000}, "prompt"),
    ({"prompt": PROMPT, "max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({}, "prompt"),
]


def test_what_cannot_be_honoured_is_refused_by_name(client, url):
    for fields, name in REFUSED:
        status, said = post(url, "/v1/completions", {"model": "small", **fields})
        assert (status, said["error"]["param"]) == (400, name), said
        assert name in said["error"]["message"] or name == "prompt"
    for body in (b"{", b"[1]", b"\xff", b"[" * 50_000):
        assert post(url, "/v1/completions", body)[0] == 400
    assert post(url, "/v1/completions", {"prompt": "a" * 100_001})[0] == 413
    assert post(url, "/v1/completions", {"model": "small", "prompt": "a"}, "other")[0] == 401
    assert post(url, "/v1/completions", {"model": "small"}, kind="text/plain")[0] == 415
    many = {"model": "small", "input": ["a"] * 2049}
    assert post(url, "/v1/embeddings", many)[1]["error"]["param"] == "input"
    assert post(url, "/nowhere", {})[0] == 404
    assert post(url, "/v1/models", {})[0] == 405
    with pytest.raises(openai.NotFoundError, match="no model 'large'"):
        client.completions.create(model="large", prompt=PROMPT)
    picture = [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]
    own = {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}
    for extra, what in (
        ({"messages": [{"role": "user", "content": picture}]}, "messages.0"),
        (
            own,
            "chat_template",
        ),
    ):
        with pytest.raises(openai.BadRequestError, match=what):
            client.chat.completions.create(**{"model": "small", "messages": CHAT} | _split(extra))
    ignored = {"user": "me", "suffix": None, "best_of": 1, "extra_body": {"store": True}}
    assert complete(client, **ignored, max_tokens=2).usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"stop": ""}, "stop is ''; expected 1 or more characters."),
        ({"stop": ["a", 5]}, "stop.1 is 5; expected a text."),
        ({"stop": 5}, "stop is 5; expected a text, or a list."),
        ({"prompt": ["a", [5]]}, "prompt.1 is [5]; expected a text."),
        ({"prompt": 5}, "prompt is 5; expected a text, a list of texts, a list of token ids, or a "
         "list of such lists."),
        ({"response_format": 5}, "response_format is 5; expected an object."),
        ({"response_format": {}}, "response_format.type is missing."),
        ({"structured_outputs": {"json": 5}},
         "structured_outputs.json is 5; expected an object, or a text."),
        ({"stream_options": {"a": 1}}, "stream_options.a: there is no such field. Leave it out."),
        ({"tool_choice": "foo"},
         "tool_choice is 'foo'; expected 'none', 'auto' or 'required', or an object."),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function is missing."),
    ],
)  # fmt: skip
def test_errors_name_a_field_as_the_client_wrote_it(fields, says):
    kind = ChatRequest if "tool_choice" in fields else CompletionRequest
    base = {"messages": CHAT} if kind is ChatRequest else {"prompt": PROMPT}
    with pytest.raises(RequestError) as caught:
        read(json.dumps({"model": "small", **base, **fields}).encode(), kind)
    assert caught.value.message == says
    assert caught.value.param in fields


@pytest.mark.parametrize(
    "prompt", [[0.5] * 500_000, [[1]] * 500_000, ["a"] * 500_000, [1] * 499_999 + ["a"]]
)
def test_a_large_body_that_is_wrong_is_refused_at_once(prompt):
    """Of half a second; collections that look through what other tests left are none of it."""
    body = json.dumps({"model": "small", "prompt": prompt}).encode()
    gc.disable()
    begun = time.process_time()
    with pytest.raises(RequestError, match=r"^prompt\b.{10,300}$"):
        read(body, CompletionRequest)
    took = time.process_time() - begun
    gc.enable()
    assert took < 2.5  # an error for each item would take seven


def test_headers_have_a_bound(url):
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                raw.sendall(b"a: " + b"b" * 2**20 + b"\r\n")
            raw.sendall(b"\r\n")
        with contextlib.suppress(ConnectionError):
            assert b" 200 " not in raw.recv(100)


def test_a_key_may_have_any_characters(engine):
    with served(Server(LocalEngine(engine), "small", " schlüssel ")) as url:
        for key, status in (("schlüssel", 200), ("schlussel", 401), ("", 401)):
            body = {"model": "small", "prompt": PROMPT, "max_tokens": 1}
            assert post(url, "/v1/completions", body, key)[0] == status


def test_texts_are_embedded_no_longer_than_somebody_waits(engine, monkeypatch):
    made, embed = [], engine.embed

    def slowly(texts, **how):
        made.append(len(texts))
        time.sleep(0.2)
        return embed(texts, **how)

    monkeypatch.setattr(type(engine), "embed", lambda self, texts, **how: slowly(texts, **how))
    with (
        served(Server(LocalEngine(engine), "small")) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
    ):
        with pytest.raises(openai.APITimeoutError):
            client.embeddings.create(model="small", input=["a"] * 2048, timeout=0.5)
        time.sleep(0.5)
        count = len(made)
        time.sleep(0.5)
        assert len(made) == count < 10


def test_what_is_cut_by_the_end_of_the_server_says_so(engine, caplog):
    found = []
    body = {"model": "small", "prompt": PROMPT, "max_tokens": 950, "ignore_eos": True}

    def ask(url):
        found.append(post(url, "/v1/completions", body))

    with served(Server(LocalEngine(engine), "small"), grace=0) as url:
        asks = threading.Thread(target=ask, args=(url,))
        asks.start()
        while not engine.traffic().live:
            time.sleep(0.005)
    asks.join()
    ((status, said),) = found
    assert (status, said["error"]["type"]) == (503, "server_error")
    assert "Traceback" not in caplog.text
    settle(engine)


def test_a_chat_on_the_terminal_talks_with_a_server(engine, url):
    def talk(*options, said):
        arguments = ["chat", "--url", url, "--api-key", KEY, "--max-new-tokens", "9", *options]
        return CliRunner().invoke(cli.app, arguments, input="\n".join(said))

    ask = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "copy"}]
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 3, "max_new_tokens": 9}
    first = engine.chat(ask, **how)
    more = [*ask, {"role": "assistant", "content": first}, {"role": "user", "content": "more"}]
    second = engine.chat(more, **how)
    result = talk(
        *("small", "--system", "Be brief.", "--seed", "3"),
        said=["copy", "/retry", "more", "/reset", "/system", "/exit"],
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == "".join(f"{without_controls(x)}\n" for x in (first, first, second))
    assert "Be brief." in result.stderr
    assert f"small at {url}/v1" in result.stderr
    # It goes on after what the server refuses.
    result = talk(said=["word " * 3000, "copy"])
    assert result.exit_code == 1
    assert "begin anew (/reset)" in " ".join(result.stderr.split())
    assert result.stdout.count("\n") >= 1
    for options, what in (
        (["--dtype", "float32"], "--dtype is about a model here"),
        (["--api-key", "wrong"], "The API key is missing or wrong"),
        (["--url", "http://127.0.0.1:1"], "Does the server run there?"),
        (["--url", "ftp://a"], "expected an address"),
        (["large"], "no model 'large'"),
    ):
        result = talk(*options, said=["copy"])
        assert result.exit_code != 0
        assert what in " ".join(result.stderr.split()), result.stderr


def test_pages_of_other_sites_may_call_where_they_are_named(engine, url):
    def asked(url, method, origin):
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        headers |= {"Access-Control-Request-Headers": "content-type,authorization"}
        request = urllib.request.Request(url + "/v1/models", headers=headers, method=method)
        try:
            with urllib.request.urlopen(request) as got:
                return got.headers["access-control-allow-origin"]
        except urllib.error.HTTPError as error:
            with error:
                return error.headers["access-control-allow-origin"]

    with served(Server(LocalEngine(engine), "small", origins=["http://a.b"])) as open_url:
        for method in ("OPTIONS", "GET"):
            assert asked(open_url, method, "http://a.b") == "http://a.b"
            assert asked(open_url, method, "http://c.d") is None
            assert asked(url, method, "http://a.b") is None


def test_the_other_routes(engine, client, url):
    assert [m.id for m in client.models.list()] == ["small"]
    assert client.models.retrieve("small").id == "small"
    ids = engine.tokenizer(PROMPT)["input_ids"]
    assert post(url, "/tokenize", {"prompt": PROMPT})[1]["tokens"] == ids
    assert post(url, "/detokenize", {"tokens": ids})[1]["prompt"] == PROMPT
    assert post(url, "/detokenize", {"tokens": [10**6]})[0] == 400
    texts = ["def f(", "class A"]
    vectors = client.embeddings.create(model="small", input=texts)  # in base64
    assert np.allclose([x.embedding for x in vectors.data], engine.embed(texts), atol=1e-6)
    rows = engine.tokenizer(texts)["input_ids"]  # as LangChain sends them
    by_ids = client.embeddings.create(model="small", input=rows)
    assert np.allclose([x.embedding for x in by_ids.data], engine.embed(texts), atol=1e-6)
    assert by_ids.usage == vectors.usage
    one = client.embeddings.create(model="small", input=rows[1])
    assert np.allclose(one.data[0].embedding, engine.embed(texts[1]), atol=1e-6)
    for wrong in ([10**6], [[1], []], [], [1, "a"], [[1]] * 2049):
        status, said = post(url, "/v1/embeddings", {"model": "small", "input": wrong})
        assert (status, said["error"]["param"]) == (400, "input"), said
    complete(client, max_tokens=3)
    for route in ("/health", "/ready"):
        with urllib.request.urlopen(url + route) as got:
            assert got.status == 200
    values = metrics(url)
    for prefix in ("dualinfer", "vllm"):
        assert values[f'{prefix}:num_requests_running{{model_name="small"}}'] == "0"
        counted = f'{prefix}:time_to_first_token_seconds_count{{model_name="small"}}'
        assert int(values[counted]) > 0
        assert int(values[f'{prefix}:generation_tokens_total{{model_name="small"}}']) > 2


@pytest.mark.parametrize("stops", [["ab"], ["abc", "b"], ["aa", "aab"], ["é", "ba"]])
def test_a_stop_string_is_found_however_the_text_is_cut(stops):
    text = "xaacabéaabcba"
    ends = [n for n in range(len(text)) if any(text[:n].endswith(s) for s in stops)]
    whole = text[: ends[0]]
    expected = whole[: min(len(whole) - len(s) for s in stops if whole.endswith(s))]
    for size in range(1, len(text) + 1):
        stop = StopText(stops, keep=False)
        found = "".join(stop.push(text[i : i + size]) for i in range(0, len(text), size))
        assert stop.found
        assert found + stop.finish() == expected

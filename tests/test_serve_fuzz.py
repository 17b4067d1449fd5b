"""Requests of hypothesis to the server's routes: each is answered or refused, and none is a 500."""

import asyncio
import json
import math
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dualinfer
from dualinfer.serving.http.app import Server
from dualinfer.serving.http.engines import LocalEngine
from dualinfer.serving.http.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from dualinfer.serving.http.rows import _through

ROUTES = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
CALLS = int(os.environ.get("FUZZ", 80))  # of each test; more by hand
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
HOW = settings(
    max_examples=CALLS,
    deadline=None,
    derandomize="FUZZ" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)

texts = st.text(max_size=12) | st.sampled_from(["", "\x00", "\ud800", "a" * 3000, "json", "user"])
numbers = st.integers(-3, 40) | st.sampled_from([2**31, 2**63, -(2**63), 2**64, 10**30])
floats = st.floats(allow_nan=True, allow_infinity=True)
leaves = st.none() | st.booleans() | numbers | floats | texts
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "system", "tool"]) | texts,
            "content": texts | values,
            "tool_calls": values,
            "name": texts,
            "x": values,
        },
    ),
    max_size=3,
)
likely = {
    "model": st.just("fuzz"),
    "prompt": texts | st.lists(numbers, max_size=5) | st.lists(texts, max_size=3),
    "messages": messages,
    "input": texts | st.lists(texts, max_size=3),
    "tokens": st.lists(numbers, max_size=5),
    "n": st.integers(0, 3),
    "temperature": st.floats(0, 2),
    "stop": texts | st.lists(texts, max_size=3),
    "logit_bias": st.dictionaries(numbers.map(str), st.floats(-100, 100), max_size=3),
    "stream": st.booleans(),
}


@pytest.fixture(scope="module")
def server():
    model = dualinfer.embedded_model()
    with dualinfer.init_inference(model, backend="torch", dtype="fp32") as engine:
        engine.tokenizer.chat_template = TEMPLATE
        engine.generate([[0]], max_new_tokens=2)
        yield Server(LocalEngine(engine), "fuzz", most_bytes=100_000)


def ask(server, route, body):
    """Status and body of a request."""
    return asyncio.run(asyncio.wait_for(_through(server.app(), route, body), 60))


def check(status, body):
    assert 200 <= status < 500, (status, body)
    if status >= 400:
        error = json.loads(body)["error"]
        assert error["message"] and error["type"] == "invalid_request_error"
    elif b"data: " in body[:8]:
        assert b'"error"' not in body or b"invalid_request_error" in body, body


@pytest.mark.parametrize("route", ROUTES)
def test_no_fields_make_the_server_fail(server, route):
    """Bodies that may be served, with some fields of any value, and few tokens to make."""
    kind = ROUTES[route]
    names = [field.alias or name for name, field in kind.model_fields.items()]
    needed = [
        field.alias or name for name, field in kind.model_fields.items() if field.is_required()
    ]

    @HOW
    @given(st.data())
    def run(data):
        body = {name: data.draw(likely.get(name, values), name) for name in needed}
        for name in data.draw(st.lists(st.sampled_from(names), max_size=4, unique=True)):
            body[name] = data.draw(likely.get(name, values) | values, name)
        if data.draw(st.integers(0, 9)) == 0:
            body[data.draw(texts)] = data.draw(values)
        for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
            if name in names and (name in body or name == "max_tokens"):
                body[name] = data.draw(st.integers(-1, 3) | values)
        check(*ask(server, route, json.dumps(body, allow_nan=True).encode()))

    run()


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/detokenize"])
def test_no_bytes_make_the_server_fail(server, route):
    fields = {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "model": "fuzz"}
    whole = json.dumps(fields).encode()
    cut = st.integers(0, len(whole)).map(lambda at: whole[:at])
    torn = st.tuples(st.integers(0, len(whole)), st.binary(max_size=4)).map(
        lambda pair: whole[: pair[0]] + pair[1] + whole[pair[0] + len(pair[1]) :]
    )
    deep = st.integers(1, 40_000).map(lambda n: b"[" * n)
    nested = st.integers(1, 9_000).map(lambda n: b'{"a":' * n + b"1" + b"}" * n)

    @HOW
    @given(st.binary(max_size=60) | cut | torn | deep | nested | st.just(b" " * 200_000))
    def run(data):
        check(*ask(server, route, data))

    run()


def test_numbers_that_json_has_not_are_refused(server):
    for value in (math.nan, math.inf):
        body = json.dumps({"model": "fuzz", "prompt": "x", "temperature": value}).encode()
        assert ask(server, "/v1/completions", body)[0] == 400

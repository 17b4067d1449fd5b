"""`dualinfer serve` with its engine in a process of its own, which dies, hangs and comes again."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dualinfer
from dualinfer.checkpoint.described.tokenizer import load_tokenizer
from dualinfer.errors import StepError
from dualinfer.parallel.frames import Unpacker, packed
from dualinfer.serving.health import Pulse
from dualinfer.serving.http.engines import About, LocalEngine, State
from dualinfer.serving.remote import keeper
from dualinfer.serving.remote.client import RemoteEngine
from dualinfer.serving.remote.suspects import Line, Party

from .poisoned_engine import POISON
from .server_process import is_there, server_process

PROMPT = "def copy_file(source"
LONG = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}
ROOM = "--max-sequences", "16", "--max-tokens", "400"


@pytest.fixture(scope="module", params=["torch", pytest.param("jax", marks=pytest.mark.slow)])
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def engine(backend):
    with dualinfer.init_inference(
        dualinfer.embedded_model(), backend=backend, dtype="fp32"
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(backend):
    with server_process(*ROOM, backend=backend) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def complete(client, **fields):
    fields = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12} | fields
    return client.completions.create(model="small", **fields)


def get(url):
    """Status and text."""
    try:
        with urllib.request.urlopen(url) as got:
            return got.status, got.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def wait_for(condition, seconds=30.0):
    """Wait until it holds; how long that took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds
        time.sleep(0.02)
    return time.monotonic() - begun


def test_frames_are_read_in_whatever_pieces_they_come():
    arrays = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b": np.zeros((0, 4), np.float32)}
    data = packed({"is": "é\ud800", "n": [1, None]}, **arrays) + packed({})
    for size in (1, 7, len(data)):
        unpacker, found = Unpacker(), []
        for i in range(0, len(data), size):
            found += unpacker.feed(data[i : i + size])
        first, second = found
        assert (first["is"], first["n"], second) == ("é\ud800", [1, None], {})
        for name, array in arrays.items():
            assert first[name].dtype == array.dtype
            assert np.array_equal(first[name], array)
    for wrong in (b"\xff" * 8, b"\0\0\0\5\0\0\0\2{}"):
        with pytest.raises(StepError):
            list(Unpacker().feed(wrong))
    with pytest.raises(StepError, match="holds an array"):
        list(Unpacker().feed(packed({"arrays": {"x": ["|O", [1]]}})))


def test_only_what_takes_longer_than_it_should_is_called_hung():
    for pulse, is_hung in (
        (Pulse(), False),
        (Pulse(3.9), False),
        (Pulse(4.5), True),
        (Pulse(4.5, reading=8192), False),  # a long prompt
        (Pulse(90, doing="compiling"), False),
        (Pulse(700, doing="compiling"), True),
        (Pulse(50, on_host=True), False),
        (Pulse(70, on_host=True), True),
    ):
        assert (pulse.trouble is not None) == is_hung, pulse
    assert Pulse().limit == 20 and Pulse(doing="compiling").limit == 600


def test_turns_that_fail_one_after_another_are_trouble(engine, monkeypatch):
    local = LocalEngine(engine)

    async def ask(count):
        made = [engine.generate_async([5, 6, 7], max_new_tokens=4) for _ in range(count)]
        for one in made:
            await one

    def failing(*args):
        raise RuntimeError("CUDA error: out of luck")

    asyncio.run(ask(1))
    for calls, is_lost in ((("decode",), False), (("decode", "probe"), True)):
        with monkeypatch.context() as patch:
            for call in calls:
                patch.setattr(engine.runner, call, failing)
            for i in range(9):
                assert (local.state().trouble is not None) == (i >= 8 or (is_lost and i > 0))
                with pytest.raises(StepError):
                    asyncio.run(ask(1))
        assert "out of luck" in (local.state().trouble or "")
        asyncio.run(ask(2))
        assert local.state().trouble is None


def test_a_pass_over_texts_finds_a_device_that_computes_no_more(engine, monkeypatch):
    local = LocalEngine(engine)

    def failing(*args):
        raise RuntimeError("CUDA error: out of luck")

    for calls in (("forward",), ("forward", "probe")):
        with monkeypatch.context() as patch:
            for call in calls:
                patch.setattr(engine.runner, call, failing)
            with pytest.raises(RuntimeError, match="out of luck"):
                asyncio.run(local.embed(["a text"], None))
        assert (engine.traffic().lost is not None) == ("probe" in calls)
    engine.look()
    assert engine.traffic().lost is None


def test_what_waits_behind_a_step_gives_that_no_more_time():
    """Only a pass over whole texts that is under way may take long."""
    with dualinfer.init_inference(dualinfer.embedded_model(), dtype="fp32") as engine:
        local, begun, ended = LocalEngine(engine), threading.Event(), threading.Event()

        def embed():
            asyncio.run(local.embed(["a text"], None))
            ended.set()

        def whole():
            with local.whole():
                begun.set()
                time.sleep(0.3)

        with engine.turns:  # as a step holds it
            threading.Thread(target=embed, daemon=True).start()
            time.sleep(0.3)
            assert local.pulse().doing is None
        assert ended.wait(30)
        thread = threading.Thread(target=whole)
        thread.start()
        assert begun.wait(30) and local.pulse().doing == "whole texts are read"
        thread.join()


_NO_DESCRIPTORS = """
import asyncio, os, resource, signal
import dualinfer
from dualinfer.checkpoint.described.tokenizer import load_tokenizer
from dualinfer.serving.remote.keeper import Keeper, python

async def main():
    folder = str(dualinfer.embedded_model())
    opens = {"folder": folder, "adapters": {}, "backend": "torch", "how": {"dtype": "float32"}}
    command = python("dualinfer.cli.engine_process")
    opens |= {"room": {"slots": 8, "tokens": 1000, "swap_space": 1.0}}
    keeper = Keeper(command, opens, load_tokenizer(folder))
    async with keeper.running() as engine:
        assert engine.state().slots == 8  # before the first beat
        how = {"max_new_tokens": 300, "eos_token_id": None, "do_sample": False, "logprobs": None}
        handle = engine.start([5, 6, 7], how, 1)[0]
        tokens = await handle.arrived()
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
        held = []
        try:
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        os.kill(keeper.process_id, signal.SIGKILL)
        while "No process" not in (engine.down or ""):
            await asyncio.sleep(0.05)
        for descriptor in held:
            os.close(descriptor)
        while found := await handle.arrived():
            tokens += found
        assert len(tokens) == 300 and not keeper.failed.done()

asyncio.run(asyncio.wait_for(main(), 90))
"""


@pytest.mark.slow
def test_an_engine_is_started_again_once_there_are_descriptors():
    command = [sys.executable, "-c", _NO_DESCRIPTORS]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def test_one_that_starts_again_and_only_beats_is_ended(monkeypatch):
    monkeypatch.setattr(keeper, "_AGAIN_MOST", 0.3)

    async def main():
        own, messages = keeper.Keeper([], {}, None), asyncio.Queue()
        life = SimpleNamespace(link=SimpleNamespace(messages=messages), has_ended=False, hung=None)

        async def beat():
            while True:
                messages.put_nowait({"is": "beat", "doing": "weights are read"})
                await asyncio.sleep(0.05)

        beats = asyncio.ensure_future(beat())
        with pytest.raises(TimeoutError):  # the first one may take as long as it takes
            await asyncio.wait_for(own._ready(life), 0.6)
        own._took = 0.01
        assert await asyncio.wait_for(own._ready(life), 5) is None
        beats.cancel()
        return life.hung

    assert asyncio.run(main()) == "it has not served after 0 s"


def test_answers_are_those_of_an_engine_here(engine, client, server):
    expected = engine.generate_text(PROMPT, max_new_tokens=30, do_sample=False)
    assert complete(client, max_tokens=30).choices[0].text == expected
    events = complete(client, max_tokens=30, stream=True)
    assert "".join(c.text for e in events for c in e.choices) == expected
    ids = engine.tokenizer(PROMPT)["input_ids"]
    how = {"do_sample": True, "temperature": 0.9, "top_k": 0, "seed": 7, "max_new_tokens": 12}
    rows = np.asarray(engine.generate([ids], **how, num_return_sequences=3)).tolist()
    found = complete(client, prompt=ids, temperature=0.9, seed=7, n=3)
    assert [c.text for c in found.choices] == [engine.tokenizer.decode(r[len(ids) :]) for r in rows]
    told = engine.generate(
        [ids], max_new_tokens=6, do_sample=False, logprobs=2, return_dict_in_generate=True
    )
    logprobs = complete(client, max_tokens=6, logprobs=2).choices[0].logprobs
    assert np.allclose(logprobs.token_logprobs, told.logprobs[0], atol=1e-4)
    echoed = complete(client, max_tokens=1, echo=True, logprobs=0).choices[0].logprobs
    row = engine.prompt_logprobs(ids)
    assert np.allclose(echoed.token_logprobs[1:-1], [x.logprob for x in row[1:]], atol=1e-4)
    rows = engine.tokenizer(["def f(", "class A"])["input_ids"]
    vectors = client.embeddings.create(model="small", input=rows)
    assert np.allclose(
        [x.embedding for x in vectors.data], engine.embed(["def f(", "class A"]), atol=1e-5
    )
    digits = complete(client, temperature=1, extra_body={"guided_regex": "[0-9]{4}"})
    assert digits.choices[0].text.isdecimal()
    for fields, what in (
        ({"max_tokens": 5000}, "takes 400 tokens"),
        ({"extra_body": {"guided_regex": "("}}, "guided_regex"),
        ({"logit_bias": {"99999": 1}}, "logit_bias has the id 99999"),  # the engine says so
    ):
        with pytest.raises(openai.BadRequestError, match=what):
            complete(client, **fields)
    with complete(client, **LONG, n=3, stream=True) as stream:
        next(iter(stream))
        assert _running(server) == 3
    wait_for(lambda: _running(server) == 0)
    assert get(server.url + "/ready") == (200, "ok\n")


def _running(server):
    text = get(server.url + "/metrics")[1]
    return int(text.partition('dualinfer:num_requests_running{model_name="small"} ')[2].split()[0])


ASKED = [
    LONG,
    {**LONG, "temperature": 1, "seed": 3, "n": 2, "presence_penalty": 1.0, "logprobs": 2},
    {**LONG, "temperature": 1, "seed": 5, "stop": "q", "frequency_penalty": 0.5},
    {
        **LONG,
        "temperature": 1,
        "seed": 4,
        "extra_body": {"guided_regex": "([a-z]{2}, ){40}", "repetition_penalty": 1.2},
    },
    {"max_tokens": 200, "prompt": PROMPT * 9, "extra_body": {"ignore_eos": True}},
]


class Ask(threading.Thread):
    """A request, whole or as a stream, and what came of it."""

    def __init__(self, client, fields, stream):
        super().__init__()
        self._client, self._fields, self._stream = client, fields, stream
        self.texts, self.logprobs, self.events = {}, {}, 0
        self.start()

    def run(self):
        got = complete(self._client, **self._fields, stream=self._stream)
        for event in got if self._stream else [got]:
            self.events += 1
            for c in event.choices:
                self.texts[c.index] = self.texts.get(c.index, "") + c.text
                if c.logprobs is not None:
                    self.logprobs.setdefault(c.index, []).extend(c.logprobs.token_logprobs)


def asked(client, count, between=lambda asks: None):
    asks = [Ask(client, fields, stream) for fields in ASKED[:count] for stream in (False, True)]
    between(asks)
    for ask in asks:
        ask.join(120)
        assert not ask.is_alive()
    return asks


def test_an_engine_that_is_killed_is_followed_by_one_that_goes_on(client, server, backend):
    count = 5 if backend == "torch" else 2  # which JAX compiles twice
    quiet = asked(client, count)
    first = server.engine

    def kill_one(asks):
        wait_for(lambda: all(ask.events > 4 for ask in asks[1::2]))
        os.kill(first, signal.SIGKILL)
        assert wait_for(lambda: get(server.url + "/health")[0] == 503) < 5
        status, why = get(server.url + "/ready")
        assert status == 503 and "SIGKILL" in why, why
        late.append(Ask(client, LONG, False))

    late = []
    asks = asked(client, count, kill_one)
    late[0].join(60)
    assert late[0].texts == quiet[0].texts
    for before, ask in zip(quiet, asks, strict=True):
        assert ask.texts == before.texts
        for index, values in before.logprobs.items():
            assert ask.logprobs[index] == pytest.approx(values, abs=1e-4)
    assert server.engine not in (0, first)
    assert not is_there(first)
    assert get(server.url + "/health") == (200, "ok\n")
    server.wait_for(r"ended by SIGKILL\. It is started again\. Sequences that wait: [1-9]")
    assert _running(server) == 0


@pytest.mark.parametrize("backend", ["torch"], indirect=True, scope="module")  # the front's part
def test_an_engine_that_is_silent_is_ended_and_started_again(client, server):
    expected = complete(client, **LONG).choices[0].text
    first = server.engine
    ask = Ask(client, LONG, True)
    wait_for(lambda: ask.events > 4)
    os.kill(first, signal.SIGSTOP)
    assert 2 < wait_for(lambda: get(server.url + "/health")[0] == 503) < 5
    ask.join(60)
    assert ask.texts == {0: expected}
    assert get(server.url + "/health")[0] == 200 and not is_there(first)
    server.wait_for("The engine hung")


@pytest.mark.slow
def test_the_end_of_the_front_ends_the_engine():
    with server_process(*ROOM) as server:
        engine = server.engine
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
            stream = complete(client, **LONG, stream=True)
            next(iter(stream))
            os.kill(engine, signal.SIGSTOP)  # it cannot end itself
            server.process.kill()
            with contextlib.suppress(openai.APIError, Exception):
                list(stream)
        wait_for(lambda: not is_there(engine), 15)


@pytest.mark.parametrize("option", [(), pytest.param(("--one-process",), marks=pytest.mark.slow)])
def test_sigterm_lets_open_requests_end(option):
    with (
        server_process(*option) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
    ):
        engine = server.engine
        assert bool(engine) == (not option)
        stream = complete(client, max_tokens=400, extra_body={"ignore_eos": True}, stream=True)
        events = [next(iter(stream))]
        server.process.send_signal(signal.SIGTERM)
        events += [*stream]
        assert events[-1].choices[0].finish_reason == "length"
        with pytest.raises(openai.APIConnectionError):
            complete(client)
        assert server.end() == 0
        assert not (engine and is_there(engine))


class Text:
    """A sequence of some length; an engine dies `at` a place of it, or `after` so many tokens."""

    def __init__(self, length, at=None, after=None):
        self.length, self.at, self.after = length, at, after
        self.size, self.sent, self.is_refused = 0, 0, False

    @property
    def has_ended(self):
        return self.is_refused or self.size >= self.length

    @property
    def kills(self):
        """True if an engine that goes on with its next eight tokens dies."""
        if self.after is not None:
            return self.size + 8 > self.sent + self.after
        return self.at is not None and self.size <= self.at < self.size + 8


TEXTS = st.lists(
    st.tuples(
        st.sampled_from([4, 60, 200, 200]),
        st.sampled_from([None, None, None, None, "at", "at", "after"]),
        st.integers(0, 150),
        st.sampled_from([0, 0, 3, 40]),
    ),
    min_size=1,
    max_size=6,
)


@given(TEXTS, st.lists(st.integers(1, 100), max_size=2))
@settings(max_examples=200, deadline=None)
def test_only_what_engines_die_of_is_refused(given_texts, outside):
    """Whatever kills, and wherever: all others come to their ends, in a bounded number of lives.

    An engine tells of its tokens by eights, and forgets those when it dies. Now and then it is
    killed from `outside`, where that could not be the fault of one alone.
    """
    parties, coming, line, deaths, now = [], [], Line(), 0, 0
    for length, kind, place, when in given_texts:
        place = min(place, length - 1)
        party, how = Party(), {} if kind is None else {kind: max(place, 40 * (kind == "after"))}
        party.works.append(Text(length, **how))
        coming.append((when, party))
    texts = [party.works[0] for _, party in coming]
    at = sum(text.at is not None for text in texts)
    after = sum(text.after is not None for text in texts)
    while coming or any(not party.has_ended for party in parties):
        now += 1
        for party in [party for when, party in coming if when <= now]:
            parties.append(party)
            line.put(party)
        coming = [(when, party) for when, party in coming if when > now]
        for party in line.sent():
            party.works[0].sent = party.works[0].size
        live = [x for x in parties if x.is_sent and not x.has_ended]
        if any(x.works[0].kills for x in live) or (now in outside and len(live) > 1):
            deaths += 1
            refused = line.blame(live)
            for party in parties:
                party.take_back()
            if refused is not None:
                refused.works[0].is_refused = True
            line.begin([x for x in parties if not x.has_ended])
            continue
        for party in live:
            party.works[0].size += 8
    for text in texts:
        assert not (text.is_refused and text.at is text.after is None)
        assert text.is_refused or text.at is None
    assert deaths <= 5 * at + 6 * after + 2 * len(outside)


@pytest.mark.parametrize("dies", [True, False])
def test_an_embedding_whose_client_has_left_is_still_to_blame(dies):
    """Nothing else is sent beside it, until the engine says that it has left it, too."""
    sent = []

    async def main():
        remote = RemoteEngine(None)

        def life():
            sent.clear()
            write = lambda frame: sent.extend(Unpacker().feed(frame))  # noqa: E731
            remote.attach(write, About(99, 100, []), State(0, 0, 4))

        call = asyncio.ensure_future(remote.embed(["a text"], None))
        await asyncio.sleep(0)
        how = {"do_sample": False, "max_new_tokens": 4}
        (other,) = remote.start([5, 6], how, 1)
        await asyncio.sleep(0)
        for _ in range(2):
            life()
            assert [x["do"] for x in sent] == ["embed", "start"]
            remote.detach("It died.")
        life()
        assert [x["do"] for x in sent] == ["embed"]
        call.cancel()
        await asyncio.sleep(0.01)
        assert [x["do"] for x in sent] == ["embed", "leave"]
        if not dies:
            remote.received({"is": "left", "number": sent[0]["number"]})
            assert [x["do"] for x in sent] == ["embed", "leave", "start"]
            assert [*remote._work] == [other.number]
            return
        remote.detach("It died.")
        assert not other.has_ended and other.party.deaths == 0  # but that of the call is 3
        life()
        assert [x["do"] for x in sent] == ["start"]

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch"], indirect=True, scope="module")  # the front's part
def test_what_engines_die_of_is_refused_alone(backend, engine):
    """One of four requests kills the engine in the middle of its text."""
    count = 60
    greedy = {"max_new_tokens": count, "eos_token_id": None, "do_sample": False, "logprobs": None}
    drawn = greedy | {"do_sample": True, "seed": 5, "temperature": 1.0}
    prompts = [[5, 6, 7], [*POISON, 3], [8, 9, 10, 11]]
    folder = str(dualinfer.embedded_model())
    opens = {"folder": folder, "adapters": {}, "backend": backend, "how": {"dtype": "float32"}}
    command = keeper.python("tests.poisoned_engine")
    own = [
        command,
        opens | {"room": {"slots": 8, "tokens": 200, "swap_space": 1.0}},
        load_tokenizer(folder),
    ]

    async def told(handle):
        tokens = []
        while found := await handle.arrived():
            tokens += found
        return tokens

    async def main():
        kept = keeper.Keeper(*own)
        async with kept.running() as served:
            handles = [served.start(ids, greedy, 1)[0] for ids in prompts]
            handles += served.start([5, 6, 7], drawn, 2)
            found = await asyncio.gather(*map(told, handles), return_exceptions=True)
            pid = kept.process_id
            again = served.start(prompts[1], dict(greedy), 1)[0]
            with pytest.raises(StepError, match="not tried again"):
                await again.accepted()
            assert await told(served.start(prompts[0], greedy, 1)[0]) == found[0]
            assert kept.process_id == pid and not kept.failed.done()
            return found

    found = asyncio.run(asyncio.wait_for(main(), 300))
    assert isinstance(found[1], StepError) and "nothing beside it" in str(found[1])
    expected = [
        *(engine.generate([prompts[i]], **greedy)[0] for i in (0, 2)),
        *engine.generate([prompts[0]], **drawn, num_return_sequences=2),
    ]
    for tokens, row in zip([found[0], *found[2:]], expected, strict=True):
        assert tokens == np.asarray(row).tolist()[-count:]


@pytest.mark.slow
def test_a_device_that_computes_no_more_gives_way_to_another_process(
    backend, engine, tmp_path, monkeypatch
):
    (tmp_path / "there").touch()
    monkeypatch.setenv("LOSES", str(tmp_path / "there"))
    how = {"max_new_tokens": 30, "eos_token_id": None, "do_sample": False, "logprobs": None}
    folder = str(dualinfer.embedded_model())
    opens = {"folder": folder, "adapters": {}, "backend": backend, "how": {"dtype": "float32"}}
    opens["room"] = {"slots": 8, "tokens": 200, "swap_space": 1.0}
    prompts = [[5, 6, 7], [*POISON, 3], [8, 9, 10, 11]]

    async def told(handle):
        tokens = []
        while found := await handle.arrived():
            tokens += found
        return tokens

    async def main():
        command = keeper.python("tests.poisoned_engine")
        kept = keeper.Keeper(command, opens, load_tokenizer(folder))
        async with kept.running() as served:
            first, why = kept.process_id, set()
            made = [told(served.start(ids, how, 1)[0]) for ids in prompts]
            task = asyncio.gather(*made)
            while not task.done():
                why.add(str(served.state().trouble))
                await asyncio.sleep(0.05)
            assert any("computes no more" in x for x in why) and kept.process_id != first
            return await task

    found = asyncio.run(asyncio.wait_for(main(), 300))
    for tokens, ids in zip(found, prompts, strict=True):
        assert tokens == np.asarray(engine.generate([ids], **how))[0].tolist()[-30:]


@pytest.mark.slow
def test_a_request_that_kills_at_once_does_not_end_the_server():
    """Nothing beside it brings a token between its deaths."""
    folder = str(dualinfer.embedded_model())
    opens = {"folder": folder, "adapters": {}, "backend": "torch", "how": {"dtype": "float32"}}
    how = {"max_new_tokens": 4, "eos_token_id": None, "do_sample": False, "logprobs": None}

    async def main():
        opened = opens | {"room": {"slots": 8, "tokens": 200, "swap_space": 1.0}}
        kept = keeper.Keeper(keeper.python("tests.poisoned_engine"), opened, load_tokenizer(folder))
        async with kept.running() as served:
            with pytest.raises(StepError, match="died 3 times"):
                await served.start([*POISON, 0], how, 1)[0].arrived()
            assert len(await served.start([5, 6], how, 1)[0].arrived()) > 0
            assert not kept.failed.done()

    asyncio.run(asyncio.wait_for(main(), 120))


def kill(server):
    """End the engine of a server, and wait until it is gone."""
    wait_for(lambda: server.engine != 0)
    engine = server.engine
    os.kill(engine, signal.SIGKILL)
    wait_for(lambda: not is_there(engine))


@pytest.mark.slow
def test_what_dies_again_and_again_is_given_up():
    with (
        server_process(*ROOM) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
    ):
        # A request that three engines die with fails alone.
        stream = complete(client, max_tokens=390, extra_body={"ignore_eos": True}, stream=True)
        events = iter(stream)
        for _ in range(3):
            next(events)
            wait_for(lambda: get(server.url + "/health")[0] == 200)
            next(events)
            kill(server)
        with pytest.raises(openai.APIError, match="died 3 times while this request was under way"):
            list(events)
        wait_for(lambda: get(server.url + "/health")[0] == 200)
        complete(client)
        # Engines that die before they bring anything end the server; the first has answered.
        for _ in range(4):
            kill(server)
        assert server.end() == 1
        assert "died 3 times in a row without an answer between" in " ".join(server.said.split())


def test_an_engines_process_reads_its_tokenizer_for_a_grammar(tmp_path):
    """Where it has become unreadable, that request is refused, and others go on."""
    model = tmp_path / "model"
    shutil.copytree(dualinfer.embedded_model(), model)
    with (
        server_process(*ROOM, model=model) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
    ):
        written = (model / "tokenizer.json").read_text()
        (model / "tokenizer.json").unlink()
        choice = {"extra_body": {"guided_choice": ["yes", "no"]}}
        with pytest.raises(openai.APIStatusError, match=r"holds no tokenizer\.json"):
            complete(client, **choice)
        assert complete(client).choices[0].text
        (model / "tokenizer.json").write_text(written)
        assert complete(client, **choice).choices[0].text in ("yes", "no")


@pytest.mark.parametrize("option", ["--one-process", "--no-prefix-cache"])
def test_a_tokenizer_that_cannot_be_read_ends_the_start(option, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(dualinfer.embedded_model(), model)
    (model / "tokenizer.json").write_text("{")
    with (
        pytest.raises(AssertionError, match=r"The tokenizer in\s+\S+model\s+cannot\s+be\s+read"),
        server_process(option, model=model),
    ):
        pass


@pytest.mark.slow
def test_a_model_that_cannot_be_opened_is_told_as_in_one_process():
    with (
        pytest.raises(AssertionError, match=r"reserve\(tokens=10000000\)"),
        server_process("--max-tokens", "10000000"),
    ):
        pass


@pytest.mark.slow
def test_one_process_of_jax_serves_a_model_over_two_devices():
    model = dualinfer.embedded_model()
    with (
        server_process(*ROOM, "--tp", "2", backend="jax") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
        dualinfer.init_inference(model, backend="jax", dtype="fp32") as engine,
    ):
        text = engine.generate_text(PROMPT, max_new_tokens=12, do_sample=False)
        assert complete(client).choices[0].text == text
        assert "2 devices" in server.said

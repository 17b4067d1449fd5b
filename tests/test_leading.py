"""One process drives others that share its model: they make its runner's calls, and no others."""

import asyncio
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import openai
import pytest

import dualinfer
from dualinfer.backends.base import ForwardInputs, Piece, Pool, Request, Sampling, Saved
from dualinfer.backends.leading import Leading, follow
from dualinfer.cli import shared_engine
from dualinfer.errors import ConfigError, DistributedError, LengthError, UnsupportedError
from dualinfer.ops.contract import Tokens
from dualinfer.parallel import frames
from dualinfer.parallel.agreement import Peers
from dualinfer.parallel.frames import packed
from dualinfer.parallel.lines import Line

from .server_process import is_there, server_process
from .test_serve_remote import LONG, PROMPT, ROOM, Ask, asked, complete, get, wait_for


class Book:
    """A runner that books its calls; `fails` names errors of some. `saved` is held by others."""

    notes, cache_bytes = (), 0

    def __init__(self, free=100, **fails):
        self.calls, self.free, self.fails = [], free, fails
        self.saved, self.asked = lambda: None, 0

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, *(x.tokens if isinstance(x, Saved) else x for x in args)))
            if name in self.fails:
                raise self.fails[name]

        return call

    def save(self, slot, tokens):
        saved = Saved(tokens, 4, slot)
        self.saved = weakref.ref(saved)
        return saved

    def free_bytes(self):
        self.asked += 1
        return self.free


class Led:
    """A leader and one that follows it in a thread; `lost` is what the leader was told."""

    def __init__(self, leads, follows):
        ends = socket.socketpair()
        self.lost, self.error = [], None
        self.leads, self.follows, self._line = leads, follows, Line(ends[1])
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        peers = Peers()
        peers.size = 2
        self.leader = Leading(leads, peers, [Line(ends[0])], self.lost.append)

    def _follow(self):
        try:
            follow(self.follows, self._line)
        except Exception as error:
            self.error = error
        self._line.close()

    def join(self):
        self._thread.join(30)
        assert not self._thread.is_alive()


def same(a, b):
    """True if two arguments of a runner mean the same; arrays with their dtypes."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "__dataclass_fields__"):
        names = [name for name in a.__dataclass_fields__ if name != "grammar"]
        return type(a) is type(b) and all(same(getattr(a, n), getattr(b, n)) for n in names)
    return a == b


def test_calls_come_to_the_others_as_they_are():
    sampling = Sampling(True, 0.7, 5, seed=2**62, bias=((3, 0.5), (4, -100.0)))
    words = np.array([2**32 - 1, 1], np.uint32)
    request = Request(
        *(np.arange(5, dtype=np.int32), 7, 1, (2, 3), sampling),
        hidden=(9,),
        grammar=object(),
        allowed=words,
        kept=2,
    )
    embedded = Request(np.zeros(0, np.int32), 3, embeds=np.ones((2, 4), np.float32))
    tokens = Tokens(
        *(np.ones((2, 3), np.int32), np.arange(6, dtype=np.int32).reshape(2, 3)),
        mask=np.array([[True, False, True]] * 2),
        source=Tokens(None, np.zeros((2, 1), np.int32), embeds=np.ones((2, 1, 4), "f4")),
    )
    texts = ForwardInputs(tokens, watched=((1, 2),), loss_count=2.5)
    calls = [
        ("open", Pool(4, 100, spare=1), True),
        ("extend", [Piece(request, 1, 2, 4), Piece.whole(embedded, 0)]),
        ("allow", [1], words[None]),
        ("decode", 8),
        ("decode_several", [[0]], [np.arange(4, dtype=np.int64)[None]]),
        ("copy", 0, 3, 64),
        ("forward", texts),
        ("release", [np.int64(1), 0]),
    ]
    led = Led(Book(), Book(free=70))
    for name, *args in calls:
        getattr(led.leader, name)(*args)
    led.leader.choose("no call of all")
    assert led.leader.free_bytes() == 70
    saved = led.leader.save(2, 64)
    led.leader.restore(3, saved)
    led.leader.free_bytes()  # which waits for the other
    assert led.follows.saved() is not None
    del saved
    gc.collect()
    led.leader.release([0])
    led.leader.free_bytes()
    assert led.follows.saved() is None
    led.leader.close()
    led.join()
    found = led.follows.calls
    assert led.error is None and not led.lost
    assert all(map(same, calls, found))
    assert found[1][1][0].request.grammar is not None
    assert found[1][1][1].request.grammar is None
    assert found[len(calls) :] == [("restore", 3, 64), ("release", (0,))]


def test_free_memory_is_asked_for_once_until_something_begins_ends_or_grows():
    """Steps of those who wait for room ask again and again, and each answer is waited for."""
    led = Led(Book(), Book(free=70))
    for name, args in (("extend", [[]]), ("release", [[0]]), ("open", [None]), ("decode", [1])):
        getattr(led.leader, name)(*args)
        led.leads.cache_bytes += name == "decode"
        led.follows.free -= 1
        asked = led.follows.asked
        for _ in range(3):
            assert led.leader.free_bytes() == led.follows.free
            led.leader.decode(8)
        assert led.follows.asked == asked + 1
    led.leader.close()
    led.join()


def test_what_fails_alike_goes_on_and_what_fails_in_one_ends_all():
    too_long = LengthError("too long")
    led = Led(Book(extend=too_long), Book(extend=too_long))
    for _ in range(2):
        with pytest.raises(LengthError):
            led.leader.extend([])
        led.leader.decode(1)
    led.leader.close()
    led.join()
    assert led.error is None and not led.lost
    for leads, follows, why in (
        (Book(), Book(decode=RuntimeError("out of luck")), "Rank 1 failed .*out of luck"),
        (Book(decode=RuntimeError("out of luck")), Book(), "Not all ranks failed.*out of luck"),
    ):
        led = Led(leads, follows)
        if leads.fails:
            with pytest.raises(RuntimeError, match="out of luck"):
                led.leader.decode(1)
        else:
            led.leader.decode(1)
        wait_for(lambda led=led: led.lost)
        with pytest.raises(DistributedError, match=why):
            led.leader.copy(0, 1, 2)
        with pytest.raises(DistributedError, match=why):
            led.leader.probe()
        led.leader.release([0])  # which ends what was under way
        led.join()
        assert isinstance(led.error, RuntimeError)
        led.leader.close()
        assert len(led.lost) == 1


def test_what_cannot_be_sent_fails_alone(monkeypatch):
    led = Led(Book(), Book())
    led.leader.save(2, 64)  # and nobody has it: it is dropped
    gc.collect()
    for wrong, error in ((object(), AssertionError), (np.array([None]), TypeError)):
        with pytest.raises(error):
            led.leader.extend([wrong])
    with monkeypatch.context() as patch:
        patch.setattr(frames, "_MOST", 2**10)
        with pytest.raises(UnsupportedError, match="Pass fewer inputs"):
            led.leader.extend([np.zeros(2**10, np.int32)])
    led.leader.decode(1)
    led.leader.free_bytes()  # which waits for the other
    assert led.leader.lost is None and led.follows.saved() is None
    assert led.leads.calls == led.follows.calls == [("decode", 1)]
    led.leader.close()
    led.join()


@pytest.mark.parametrize(
    "said", [struct.pack("!II", 2**31 + 5, 1), struct.pack("!II", 6, 2) + b"[]", packed({"is": 1})]
)
def test_one_that_says_nonsense_is_as_one_that_is_gone(said):
    ends = socket.socketpair()
    peers, lost = Peers(), []
    peers.size = 2
    leader = Leading(Book(), peers, [Line(ends[0])], lost.append)
    with ends[1] as other:
        other.sendall(said)
        wait_for(lambda: lost)
        assert not other.recv(1)
    with pytest.raises(DistributedError, match="rank 1 of 2 is gone"):
        leader.decode(1)


def test_one_that_is_gone_is_told_while_nothing_runs():
    led = Led(Book(), Book())
    led.leader.decode(1)
    led._line.close()
    wait_for(lambda: led.lost)
    assert "rank 1 of 2 is gone" in led.leader.lost
    led.join()
    assert isinstance(led.error, DistributedError)


ASKS = [
    {"prompt": PROMPT * 8, "do_sample": False, "logprobs": 2},
    {"prompt": PROMPT, "do_sample": True, "seed": 5, "top_k": 0, "num_return_sequences": 2},
    {"prompt": "x = ", "grammar": {"regex": "[0-9]{6}"}, "do_sample": True, "seed": 3},
    {"prompt": "y", "do_sample": False, "no_repeat_ngram_size": 2},
]


async def _texts(engine, asks, new=5):
    cut = engine.generate_async(PROMPT, max_new_tokens=200, do_sample=False)
    made = [engine.generate_async(**fields, max_new_tokens=new) for fields in asks]
    made = [x for one in made for x in (one if isinstance(one, list) else [one])]
    found = await asyncio.gather(*map(_tokens, made))
    cut.cancel()
    return found


async def _tokens(one):
    return await one


async def _alike(engine, count):
    how = {"max_new_tokens": 5, "do_sample": False}
    made = [engine.generate_async(PROMPT * 16, **how) for _ in range(count)]
    return [str(x) for x in await asyncio.gather(*map(_tokens, made))]


def _all_of(engine):
    """What many calls at once give, and others between them."""
    engine.reserve(8, 300)
    found = [asyncio.run(_texts(engine, asks)) for asks in (ASKS, ASKS[:1])]
    found.append(engine.prefix_counts().found > 0)
    found.append(engine.generate([[5, 6, 7]], max_new_tokens=3, do_sample=False).tolist())
    engine.reserve(8, 300, cache_tokens=6 * 64)  # too few blocks for all at once
    before = engine.traffic().preemptions
    found.append(asyncio.run(_texts(engine, ASKS, 70)))
    assert engine.traffic().preemptions > before
    return found, engine.embed(["def f(", "class A"]), engine.score(["x"], [" = 1"])[0].logprob


def _paused(engine):
    """Texts of a call whose sequences wait for each other's blocks; all ranks make it."""
    engine.reserve(4, 200, cache_tokens=5 * 64)
    rows = [list(range(5, 5 + n)) for n in (70, 3, 20)]
    found = engine.generate(rows, max_new_tokens=100, do_sample=False, eos_token_id=None)
    assert engine._loop.yields > 0 and engine.runner.blocks.usage == 0
    return found.tolist()


def driven():
    rank = int(os.environ["RANK"])
    how = {"dtype": "fp32", "tensor_parallel": {"tp_size": 2, "timeout": 100}}
    with dualinfer.init_inference(dualinfer.embedded_model(), **how) as engine:
        with pytest.raises(UnsupportedError, match=r"engine.lead\(\) there"):
            engine.generate_async([5], max_new_tokens=2)
        texts = _paused(engine)
        engine.reserve(2, 300)
        if rank:
            engine.follow()
            return None
        with pytest.raises(UnsupportedError, match=r"follow\(\) in rank 0 of 2"):
            engine.follow()
        engine.lead()
        with pytest.raises(UnsupportedError, match="this process leads"):
            engine.refresh()
        assert "leads 1 more" in str(engine.report())
        assert "2 sequences of 300 tokens" in str(engine.report())
        assert len(set(asyncio.run(_alike(engine, 4)))) == 1
        assert engine.prefix_counts().found > 0
        return texts, _all_of(engine)


@pytest.mark.xdist_group("ranks")
def test_many_calls_at_once_are_those_of_one_process(crew):
    texts, (found, vectors, score) = crew.run(driven)[0]
    with dualinfer.init_inference(dualinfer.embedded_model(), dtype="fp32") as engine:
        assert _paused(engine) == texts
        expected, own, own_score = _all_of(engine)
    assert found == expected
    assert np.allclose(vectors, own, atol=1e-5) and score == pytest.approx(own_score, abs=1e-4)


@pytest.fixture(scope="module")
def server():
    with server_process(*ROOM, "--tp", "2", "--oversubscribe") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def follower_of(server):
    """The process of rank 1."""
    engine = server.engine
    children = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    return int(children[0])


@pytest.mark.slow
def test_a_server_of_several_processes_answers_as_one_of_one(client, server):
    assert "2 devices" in server.said
    with dualinfer.init_inference(dualinfer.embedded_model(), dtype="fp32") as engine:
        text = engine.generate_text(PROMPT, max_new_tokens=30, do_sample=False)
        vector = engine.embed("def f(")
        ids = engine.tokenizer(PROMPT)["input_ids"]
        row = [x.logprob for x in engine.prompt_logprobs(ids)[1:]]
    asks = [Ask(client, {"max_tokens": 30}, bool(i % 2)) for i in range(16)]
    for ask in asks:
        ask.join(120)
        assert ask.texts == {0: text}
    found = client.embeddings.create(model="small", input="def f(").data[0].embedding
    assert np.allclose(found, vector, atol=1e-5)
    echoed = complete(client, max_tokens=1, echo=True, logprobs=0).choices[0].logprobs
    assert np.allclose(echoed.token_logprobs[1:-1], row, atol=1e-4)
    with (
        server_process(*ROOM) as alone,
        openai.OpenAI(base_url=f"{alone.url}/v1", api_key="-", max_retries=0) as other,
    ):
        expected = asked(other, 5)
    for one, ask in zip(expected, asked(client, 5), strict=True):
        assert ask.texts == one.texts


@pytest.mark.slow
@pytest.mark.parametrize("leads", [False, True])
def test_a_killed_process_of_several_is_followed_by_an_engine_that_goes_on(client, server, leads):
    quiet = asked(client, 5)
    processes = server.engine, follower_of(server)

    def kill_one(asks):
        wait_for(lambda: all(ask.events > 4 for ask in asks[1::2]))
        os.kill(processes[0 if leads else 1], signal.SIGKILL)
        assert wait_for(lambda: get(server.url + "/health")[0] == 503) < 5

    for before, ask in zip(quiet, asked(client, 5, kill_one), strict=True):
        assert ask.texts == before.texts
    assert not any(map(is_there, processes))
    assert get(server.url + "/health") == (200, "ok\n")
    server.wait_for("ended by SIGKILL" if leads else "rank 1 of 2 is gone")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("options", [(), ("--one-process",)])
def test_a_server_of_several_processes_ends_with_all_of_them(options, number):
    with server_process(*ROOM, "--tp", "2", "--oversubscribe", *options) as server:
        leads = SimpleNamespace(engine=server.process.pid) if options else server
        processes = leads.engine, follower_of(leads)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
            stream = complete(client, **LONG, stream=True)
            events = [next(iter(stream))]
            if number == signal.SIGTERM:  # as to all of a group, or of a systemd unit
                for process in processes:
                    os.kill(process, number)
            server.process.send_signal(number)
            if number == signal.SIGTERM:
                events += [*stream]
                assert events[-1].choices[0].finish_reason == "length"
        assert server.end() == (0 if number == signal.SIGTERM else -number)
        wait_for(lambda: not any(map(is_there, processes)))


@pytest.mark.slow
def test_one_process_that_leads_tells_that_another_is_gone():
    with server_process(*ROOM, "--tp", "2", "--oversubscribe", "--one-process") as server:
        os.kill(follower_of(SimpleNamespace(engine=server.process.pid)), signal.SIGKILL)
        wait_for(lambda: "rank 1 of 2 is gone" in get(server.url + "/health")[1])
        server.process.kill()


@pytest.mark.slow
def test_one_process_that_leads_ends_where_another_one_dies_before_it_serves():
    command = [sys.executable, "-m", "dualinfer", "serve", str(dualinfer.embedded_model())]
    command += ["--backend", "torch", "--port", "0", "--tp", "2", "--oversubscribe"]
    command += ["--one-process"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            wait_for(children.read_text)
            os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 1, said
    assert "error: The process of rank 1 of 2 ended with SIGKILL." in said


@pytest.mark.slow
def test_one_that_cannot_open_the_model_says_why():
    command = [sys.executable, "-m", "dualinfer.cli.shared_engine"]
    opens = {"folder": "/no/model", "adapters": [], "backend": "torch", "how": {}, "variables": {}}
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        try:
            process.stdin.write(json.dumps(opens).encode() + b"\n")
            process.stdin.flush()  # and it stays open
            said = process.stderr.read().decode()
            assert process.wait(60) == 1, said
        finally:
            process.kill()
    assert "'/no/model' does not exist" in said and "Fatal" not in said


def test_more_processes_than_there_are_places_for_are_refused_before_any_starts(monkeypatch):
    monkeypatch.setattr(shared_engine, "others_of", lambda *_: pytest.fail("started"))
    opens = {"backend": "torch", "how": {"tensor_parallel": {"tp_size": 4000}}}
    with pytest.raises(ConfigError, match="--tp 4000"), shared_engine.opened(opens):
        pass

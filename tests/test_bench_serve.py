"""`dualinfer bench serve`: the load, the client's clock, and vLLM's figures."""

import asyncio
import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import dualinfer
from dualinfer.bench import local_server
from dualinfer.bench.client import Client, run_all
from dualinfer.bench.drive import Record, Run, drive
from dualinfer.bench.load import Load
from dualinfer.bench.serving import figures
from dualinfer.errors import ArgumentError

from .scripted_server import ScriptedServer, ending, event, token
from .test_bench import bench, here  # noqa: F401


def run(server, load, **more):
    """What a client sees of a load."""
    request = {"url": server.url, "model": None, "vocab": 50, "loads": [load.to_dict()]}
    return run_all(request | more)


# The load


def test_a_load_is_made_by_its_seed_and_lengths_stay_in_their_range():
    load = Load(400, rate=20, input_len=40, output_len=10, range_ratio=0.5, seed=3)
    asks = load.asks(100)
    assert asks == load.asks(100) != Load(**load.to_dict() | {"seed": 4}).asks(100)
    assert {len(ask.ids) for ask in asks} == {*range(20, 61)}
    assert {ask.new_tokens for ask in asks} == {*range(5, 16)}
    ids = {i for ask in load.asks(100, first=7) for i in ask.ids}
    assert (min(ids), max(ids)) == (7, 99)
    gaps = np.diff([0, *(ask.at for ask in asks)])
    assert stats.kstest(gaps, "expon", args=(0, 1 / 20)).pvalue > 0.01  # a Poisson process
    assert {ask.at for ask in Load(5, input_len=4, output_len=4).asks(9)} == {0.0}
    faster = replace(load, rate=1000).asks(100)  # as many tokens, of which no cache knows the ids
    assert [len(ask.ids) for ask in faster] == [len(ask.ids) for ask in asks]
    assert not {tuple(ask.ids) for ask in faster} & {tuple(ask.ids) for ask in asks}


def test_prefixes_are_shared_and_stand_before_what_is_each_ones_own():
    load = Load(60, input_len=12, output_len=4, prefix_len=30, prefixes=3)
    asks = load.asks(1000)
    assert {len(ask.ids) for ask in asks} == {42}
    assert len({tuple(ask.ids[:30]) for ask in asks}) == 3
    assert len({tuple(ask.ids[30:]) for ask in asks}) == 60


def test_chats_have_the_means_of_sharegpt():
    asks = Load(20_000, chat=True).asks(2)
    assert np.mean([len(ask.ids) for ask in asks]) == pytest.approx(227, rel=0.03)
    assert np.mean([ask.new_tokens for ask in asks]) == pytest.approx(188, rel=0.03)
    short = Load(500, chat=True, prefix_len=10).asks(2, most=200)
    assert max(len(ask.ids) + ask.new_tokens for ask in short) <= 200


def test_a_request_that_the_model_does_not_take_is_refused():
    load = Load(9, input_len=100, output_len=30, prefix_len=7)
    assert len(load.asks(9, most=137)) == 9
    with pytest.raises(ArgumentError, match="has up to 137 tokens, prompt and answer, and the"):
        load.asks(9, most=136)
    small = Load(9).filled(most=64)
    assert (small.input_len, small.output_len) == (32, 8)
    assert (Load(9).filled().input_len, Load(9).filled().output_len) == (1024, 128)


def test_what_has_not_ended_within_the_time_is_given_up():
    async def send(ask, record, clock):
        await asyncio.sleep(0 if len(ask.ids) == 1 else 60)
        record.stamps.append(clock())

    load = Load(4, input_len=2, output_len=1, range_ratio=0.5, seed=5, within=0.3)
    for most, expected in ((3, [True, True, False, True]), (2, [True] * 4)):  # two wait for a place
        load = replace(load, concurrency=most)
        run = asyncio.run(drive(load, load.asks(9), send))
        errors = [one.error for one in run.records]
        assert [error is not None for error in errors] == expected and run.seconds < 10
        assert {*errors} - {None} == {"It had not ended within 0.3 s."}

    async def late(ask, record, clock):
        await asyncio.sleep(0.02)
        raise TimeoutError(110, "Connection timed out")

    run = asyncio.run(drive(load, load.asks(9), late))  # which is another time
    assert {one.error for one in run.records} == {"TimeoutError: [Errno 110] Connection timed out"}


def test_a_warm_up_has_other_ids_comes_at_once_and_is_not_given_up():
    async def send(ask, record, clock):
        await asyncio.sleep(0.02)

    load = Load(4, rate=0.001, input_len=9, output_len=1, seed=5, within=1e-6)
    warm = load.warm_up(3)
    run = asyncio.run(drive(warm, warm.asks(99), send))
    assert [one.error for one in run.records] == [None] * 3 and run.seconds < 10
    assert warm.asks(99)[0].ids != load.asks(99)[0].ids


# The figures


def test_figures_by_hand():
    """Of two requests, after vLLM's benchmark_serving: ITL of events, TPOT of tokens."""
    one = Record(10, 4, 0.0, 1.0, [1.2, 1.3, 1.5], 4)
    other = Record(20, 2, 0.0, 2.0, [2.4, 3.0], 2)
    lost = Record(30, 2, error="A: 1 of 2")
    row = figures(
        Run([one, other, lost, Record(30, 2, error="A: 3 of 4")], 4.0), {"ttft": 300, "tpot": 150}
    )
    assert (row["completed"], row["failed"], row["errors"]) == (2, 2, {"A: 1 of 2": 2})
    assert (row["total_input_tokens"], row["total_output_tokens"]) == (30, 6)
    assert row["request_throughput"] == 0.5 and row["output_throughput"] == 1.5
    assert row["total_token_throughput"] == 9.0
    assert row["mean_ttft_ms"] == pytest.approx(300)
    assert row["mean_itl_ms"] == pytest.approx((100 + 200 + 600) / 3)
    assert row["median_itl_ms"] == pytest.approx(200)
    assert row["mean_tpot_ms"] == pytest.approx((300 / 3 + 600) / 2)
    assert row["mean_e2el_ms"] == pytest.approx(750)
    assert row["p99_e2el_ms"] == pytest.approx(500 + 0.99 * 500)
    assert row["request_goodput"] == 0.25
    assert row["chunk_tokens"] == pytest.approx(6 / 5)
    assert row["live"] == pytest.approx(1.0)  # 0.3 and 0.6 seconds, not at the same time
    with pytest.raises(ArgumentError, match=r"None of 1 requests was answered: 1 x A: 1 of 2"):
        figures(Run([lost], 1.0))


# The client


def test_the_client_sees_tokens_when_the_server_writes_them():
    """Delays differ; server and client share a clock and a thread."""

    def script(number, body):
        random = np.random.default_rng(number)
        for i in range(body["max_tokens"]):
            yield random.uniform(0.02, 0.05) if i == 0 else random.uniform(0.002, 0.02), token()
        yield 0, ending(body)

    async def main():
        async with ScriptedServer(script) as server:
            load = Load(40, rate=60, input_len=6, output_len=8, range_ratio=0.5)
            (run_,) = await run(server, load, key="secret")
            return server, load, run_

    server, load, got = asyncio.run(main())
    asks = load.asks(50)
    assert [one.error for one in got.records] == [None] * 40
    assert [(one.input, one.output) for one in got.records] == [
        (len(ask.ids), ask.new_tokens) for ask in asks
    ]
    bodies = {tuple(one.body["prompt"]): one for one in server.served}
    for ask, record in zip(asks, got.records, strict=True):
        served = bodies[tuple(ask.ids)]
        assert served.body["model"] == "scripted" and served.body["ignore_eos"]
        assert len(record.stamps) == ask.new_tokens == len(served.written) - 1
    row = figures(got)
    pairs = [(bodies[tuple(ask.ids)], one) for ask, one in zip(asks, got.records, strict=True)]
    start = min(served.begun - one.begun for served, one in pairs)  # of the client's clock
    wrote = [[x - start - one.begun for x in served.written[:-1]] for served, one in pairs]
    ttft = [times[0] for times in wrote]
    itl = [gap for times in wrote for gap in np.diff(times)]
    e2el = [times[-1] for times in wrote]
    for name, expected in (("ttft", ttft), ("itl", itl), ("e2el", e2el)):
        assert row[f"mean_{name}_ms"] == pytest.approx(np.mean(expected) * 1e3, rel=0.05, abs=1)
        assert row[f"p99_{name}_ms"] == pytest.approx(
            np.percentile(expected, 99) * 1e3, rel=0.1, abs=3
        )
    assert row["duration"] >= asks[-1].at
    assert server.connections < 40  # they are used again


def test_so_many_are_under_way_at_a_time():
    seen = []

    async def main():
        under_way = 0

        def script(number, body):
            nonlocal under_way
            under_way += 1
            seen.append(under_way)
            yield 0.01, token()
            yield 0.01, token() + token()[:7]  # an event in two pieces
            yield 0.01, token()[7:] + ending(body, 3)
            under_way -= 1

        async with ScriptedServer(script) as server:
            load = Load(20, concurrency=4, input_len=5, output_len=3)
            return (await run(server, load))[0]

    got = asyncio.run(main())
    assert max(seen) == 4 and [one.output for one in got.records] == [3] * 20
    assert [len(one.stamps) for one in got.records] == [3] * 20


def test_what_fails_is_counted_by_what_it_was():
    answers = [
        [(0, 429)],
        [(0, token()), (0, None)],
        [(0, token()), (0, b"data: [DONE]\n\n")],
        [(0, token()), (0, event({"error": {"message": "lost"}}))],
        [(0, token())],
        [(0, None)],
        [(0, b"data: [DONE]\n\n")],
        [(0, token()), (0, ending({"prompt": [1], "max_tokens": 2}, 1))],
    ]

    async def main():
        async with ScriptedServer(lambda number, body: answers[number]) as server:
            load = Load(len(answers), concurrency=1, input_len=5, output_len=2)
            return (await run(server, load))[0]

    row = figures(asyncio.run(main()))
    assert (row["completed"], row["failed"], row["short"]) == (1, 7, 1)
    assert row["errors"] == {
        'AnswerError: Status 429: {"error": "no"}': 1,
        "ConnectionResetError: The connection ended before the answer did.": 2,
        "AnswerError: The stream has no usage, so that its tokens cannot be counted.": 1,
        'AnswerError: The stream failed: {"message": "lost"}': 1,
        "AnswerError: The stream ended early: without [DONE].": 1,
        "AnswerError: The stream ended without a token.": 1,
    }


def test_a_silent_server_is_not_waited_for_for_ever():
    async def main():
        async with ScriptedServer(lambda number, body: [(5, token())]) as server:
            client = Client(server.url + "/v1", "m", patience=0.1)
            load = Load(1, input_len=5, output_len=2)
            return await client.run(load, load.asks(9))

    assert asyncio.run(main()).records[0].error == "AnswerError: Nothing came for 0.1 s."


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a/", ""])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ArgumentError, match="is no address of a server"):
        Client(url, None)


# The command


@pytest.mark.parametrize(
    "systems",
    [
        ["--backend", "torch"],
        pytest.param(["--peer", "hf"], marks=pytest.mark.slow),
        pytest.param(["--backend", "jax"], marks=pytest.mark.slow),
    ],
)
def test_bench_serve_shows_servers_beside_the_steps_alone(here, tmp_path, systems):  # noqa: F811
    path, plot = tmp_path / "out.json", tmp_path / "out.png"
    load = "--shape tiny --requests 12 --concurrency 3 --input-len 20 --output-len 6".split()
    how = ["--range-ratio", 0.2, "--warm-ups", 3, "--goodput", "ttft:90000", *systems]
    files = ["--json", path, "--plot", plot]
    result = bench("serve", *load, *how, *files)
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["system"] for row in rows] == (["torch", "hf"] if "hf" in systems else systems[1:])
    for row in rows:
        asks = Load(**row["load"]).asks(1000)
        assert row["total_output_tokens"] == sum(ask.new_tokens for ask in asks)
        assert row["total_input_tokens"] == sum(len(ask.ids) for ask in asks)
        assert (row["completed"], row["failed"], row["short"]) == (12, 0, 0)
        assert row["request_goodput"] == row["request_throughput"]
        assert 1 <= row["live"] <= 3 and 0 < row["of_limit"] < 1
        assert row["median_ttft_ms"] < row["median_e2el_ms"]
    assert rows[0]["bare_step_ms"] and rows[0]["of_bare"]  # a difference, which noise may turn
    assert rows[0]["over_http"] and plot.stat().st_size > 10_000
    assert "12 of 20/6 ± 20%, 3 at a time" in result.stdout


def test_bench_serve_measures_without_http_and_without_starlette(here, monkeypatch, tmp_path):  # noqa: F811
    for name in ("starlette", "uvicorn", "dualinfer.serving.http.app"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "out.json"
    load = "--shape tiny --requests 6 --rate 200 --lengths chat --no-http --no-bare".split()
    result = bench("serve", *load, "--warm-ups", 0, "--json", path)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(path.read_text())["rows"]
    assert row["completed"] == 6 and "bare_step_ms" not in row
    assert "dualinfer torch, no HTTP" in result.stdout


@contextlib.contextmanager
def running(script=None):
    """A scripted server in a thread of its own."""
    loop, server = asyncio.new_event_loop(), ScriptedServer(script)
    loop.run_until_complete(server.__aenter__())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(server.__aexit__())
        for task in asyncio.all_tasks(loop):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(task)
        loop.close()


def test_bench_serve_measures_any_server(tmp_path):
    def script(number, body):
        if number == 3:
            yield 0, 503
            return
        yield 0.01, token()
        yield 0.01, token() + ending(body)

    path = tmp_path / "out.json"
    load = "--requests 8 --concurrency 2 --input-len 20 --input-len 9 --output-len 2".split()
    with running(script) as server:
        result = bench("serve", "--url", server.url, *load, "--json", path)
    assert result.exit_code == 1  # since one failed
    row, short = json.loads(path.read_text())["rows"]
    assert (row["total_input_tokens"], short["total_input_tokens"]) == (7 * 20, 8 * 9)
    assert (row["completed"], row["failed"]) == (7, 1) and row["total_output_tokens"] == 14
    assert "Status 503" in result.stdout and "7" in result.stdout
    assert 10 < row["median_itl_ms"] < 100
    gone = bench("serve", "--url", server.url, *load)
    assert gone.exit_code == 1 and "failed:" in gone.stderr


GUIDELLM = Path(sys.prefix, "guidellm")  # `make test-slow` installs it
FIRST, EACH, TOKENS = 1.0, 0.1, 8  # seconds of a prompt and of a step, and tokens of an answer


@pytest.fixture
def steady_server():
    """A server of the embedded model whose passes take a time that a busy machine does not move."""
    model = dualinfer.embedded_model()
    with dualinfer.init_inference(model, backend="torch", dtype="fp32") as engine:
        engine.reserve(2, 256)
        runner = engine.runner
        extend, decode = runner.extend, runner.decode

        def lasting(seconds, function, *given):
            end = time.monotonic() + seconds
            result = function(*given)
            time.sleep(max(0.0, end - time.monotonic()))
            return result

        runner.extend = lambda pieces: lasting(FIRST, extend, pieces)
        runner.decode = lambda steps: lasting(steps * EACH, decode, steps)
        with local_server.running(engine, 2048) as url:
            yield url, str(model)


@pytest.mark.slow
@pytest.mark.skipif(not GUIDELLM.exists(), reason="guidellm is not installed: make test-slow")
def test_guidellm_has_the_same_figures_of_the_same_server(steady_server, tmp_path):
    """Its "inter token latency" is a request's mean, as TPOT is."""
    url, folder = steady_server
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    load = ["--requests", 5, "--concurrency", 1, "--input-len", 40, "--output-len", TOKENS]
    result = bench("serve", "--url", url, *load, "--json", ours)
    assert result.exit_code == 0, result.output
    data = f"kind=synthetic_text,prompt_tokens=40,output_tokens={TOKENS}"
    server = f"kind=openai_http,target={url},request_format=/v1/completions,http2=false"
    command = [sys.executable, "-m", "guidellm", "run", "--disable-console", "--backend", server]
    command += ["--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=5"]
    command += ["--tokenizer", f"kind=hf_auto,model={folder}", "--data", data]
    command += ["--output", f"kind=json,path={theirs}"]
    path = os.pathsep.join([str(GUIDELLM), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    (row,) = json.loads(ours.read_text())["rows"]
    (found,) = json.loads(theirs.read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert totals["errored"] == row["failed"] == 0 and totals["successful"] >= 4  # not its first
    metrics = {name: one and one.get("successful") for name, one in found["metrics"].items()}
    first, each = row["median_ttft_ms"], row["median_tpot_ms"]
    assert first > 1e3 * FIRST and each > 1e3 * EACH * 0.8  # the first step is ahead
    near = functools.partial(pytest.approx, rel=0.05)
    assert metrics["time_to_first_token_ms"]["median"] == near(first)
    assert metrics["inter_token_latency_ms"]["median"] == near(each)
    assert metrics["request_latency"]["median"] * 1e3 == near(row["median_e2el_ms"])
    assert metrics["output_tokens_per_second"]["mean"] == near(row["output_throughput"])
    assert metrics["requests_per_second"]["mean"] == near(row["request_throughput"])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--within", "0"], "--within 0; expected seconds above 0"),
        (["--rate", "0"], "--rate 0; expected a number above 0"),
        (["--goodput", "itl:5"], "--goodput itl:5; expected one of ttft, tpot, e2el"),
        (["--goodput", "ttft:x"], "--goodput ttft:x; expected one of"),
        (["--lengths", "chat", "--input-len", "5"], "--lengths chat has lengths of its own"),
        (["--peer", "hf-eager"], "--peer hf-eager is not known. Peers: hf."),
        (["--url", "here"], "'here' is no address of a server"),
    ],
)
def test_bench_serve_refuses_what_it_cannot_do(options, why):
    result = bench("serve", "--requests", 2, *options)
    assert result.exit_code == 1 and why in result.stderr

"""Compiling on JAX: ahead of time, in several threads, and what is kept on disk."""

import gc
import os
import stat
import subprocess
import sys
import threading
import time
import warnings
import weakref

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from dualinfer.backends.jax import ahead, compilation_cache  # noqa: E402
from dualinfer.backends.jax import executables as graphs  # noqa: E402
from dualinfer.backends.jax.cache import KINDS, Cache  # noqa: E402
from dualinfer.backends.jax.executables import Executables, Job  # noqa: E402
from dualinfer.backends.jax.sampler import SlotState  # noqa: E402
from dualinfer.errors import ArgumentError, LengthError, UnsupportedError  # noqa: E402

DEVICE = jax.local_devices()[0]


def shape(*sizes, dtype=np.float32):
    sharding = jax.sharding.SingleDeviceSharding(DEVICE)
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def double(x):
    return 2 * x


def test_run_uses_what_was_prepared():
    executables = Executables()
    x = jax.device_put(np.arange(6, dtype=np.float32), DEVICE)

    def step(state, n):
        return {"x": state["x"] + n}, n

    abstract = {"x": shape(6)}, jax.ShapeDtypeStruct((), np.int32)
    executables.prepare(
        [Job("a", double, (shape(6),)), Job("b", step, abstract, (0,))], "compiling"
    )
    assert executables.compilations == len(executables) == 2 and executables.seconds > 0
    np.testing.assert_array_equal(executables.run("a", None, x), 2 * np.arange(6))  # pyright: ignore
    result, _ = executables.run("b", None, {"x": x}, np.int32(3))  # pyright: ignore
    np.testing.assert_array_equal(result["x"], np.arange(6) + 3)
    assert x.is_deleted()  # donated
    executables.prepare([Job("a", double, (shape(6),))], "compiling")  # is there: nothing to do
    executables.prepare([], "compiling")
    assert executables.compilations == 2


def test_prepare_compiles_several_at_a_time(monkeypatch):
    """Every compilation waits for all the others: one after another would never end."""
    monkeypatch.setattr(graphs, "_THREADS", 3)
    executables, together = Executables(), threading.Barrier(3, timeout=60)
    compile_ = executables._compile

    def slow(*args):
        together.wait()
        compile_(*args)

    monkeypatch.setattr(executables, "_compile", slow)
    executables.prepare([Job(n, double, (shape(n),)) for n in (1, 2, 3)], "compiling")
    assert executables.compilations == 3


def test_threads_that_ask_for_one_key_compile_it_once(monkeypatch):
    executables, traces, results = Executables(), [], []

    def step(x):
        traces.append(1)
        time.sleep(0.2)
        return x + 1

    def ask():
        results.append(float(executables.run("key", step, np.float32(1))))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [2.0] * 4 and len(traces) == executables.compilations == 1


def test_what_cannot_be_compiled_is_forgotten():
    executables = Executables()

    def broken(x):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        executables.run("key", broken, np.float32(1))
    with pytest.raises(ZeroDivisionError):
        executables.prepare([Job("a", double, (shape(2),)), Job("b", broken, (shape(2),))], "")
    assert executables.compilations == len(executables) <= 1  # what was under way may be there
    assert executables.run("key", double, np.float32(2)) == 4
    assert executables.run("b", double, np.float32(2)) == 4


def test_the_one_unused_for_longest_goes():
    executables = Executables(most=2)
    for key in (1, 2, 1, 3):
        executables.run(key, double, np.float32(key))
    assert executables.compilations == 3 and len(executables) == 2
    executables.run(1, double, np.float32(1))
    assert executables.compilations == 3
    executables.run(2, double, np.float32(1))
    assert executables.compilations == 4


def live_executables():
    gc.collect()
    return len(DEVICE.client.live_executables())


def test_what_went_is_freed_and_compiled_again_when_it_comes():
    executables, x = Executables(most=3), np.float32(1)
    before = live_executables()
    for n in range(12):
        executables.run(n, lambda x, n=n: x + n, x)
    assert live_executables() - before == 3
    facts = {"compilations": 12, "executables": 3, "evictions": 9, "executable_bytes": 0}
    assert executables.facts == facts
    assert int(executables.run(0, lambda x: x, x)) == 1  # no comparison compiled by JAX
    assert executables.facts == {**facts, "compilations": 13, "evictions": 10}
    executables.clear()
    assert live_executables() == before


def test_code_is_bounded_by_its_bytes_but_the_last_one_stays(monkeypatch):
    """Of what was prepared the bytes neither count nor go."""
    monkeypatch.setattr(graphs, "_code_bytes", lambda made: int(made(np.float32(0))))
    executables = Executables(most_bytes=100)

    def use(size):
        before = executables.compilations
        executables.run(size, lambda x: x + size, np.float32(1))
        return executables.compilations - before

    executables.prepare([Job(500, lambda x: x + 500, (shape(),))], "Compiling")
    assert [use(size) for size in (40, 30, 20, 40, 25)] == [1, 1, 1, 0, 1]  # 30 went
    assert executables.facts["executable_bytes"] == 500 + 40 + 20 + 25
    assert [use(size) for size in (20, 30)] == [0, 1]  # 40 went
    assert (use(200), use(500), len(executables)) == (1, 0, 2)
    assert use(1) == 1 and use(200) == 1


def test_near_the_limit_on_memory_maps_executables_of_any_engine_go(monkeypatch, tmp_path):
    """XLA crashes at the limit. Prepared ones go as well, and what went is compiled again."""
    limit = tmp_path / "max_map_count"
    limit.write_text("1000000000\n")
    monkeypatch.setattr(graphs, "_MOST_MAPS", str(limit))
    monkeypatch.setattr(graphs, "_EVERYONE", weakref.WeakSet())
    monkeypatch.setattr(graphs, "_FEW", 4)
    first, second = Executables(), Executables()
    first.prepare([Job(n, double, (shape(),)) for n in range(4)], "Compiling")
    first.run(0, double, np.float32(1))
    for n in range(3):
        second.run(n, double, np.float32(1))
    assert (len(first), len(second)) == (4, 3)
    limit.write_text("10\n")
    second.run(3, double, np.float32(1))
    assert (first.evictions, second.evictions) == (2, 0)
    assert first.run(0, double, np.float32(2)) == 4 and first.compilations == 4
    assert first.run(1, double, np.float32(2)) == 4 and first.compilations == 5
    limit.write_text("not told")
    assert second.run(4, double, np.float32(2)) == 4


def test_results_of_many_sizes_are_cut_by_few_executables():
    with tiny_engine("llama-mqa") as engine:
        ids = np.ones((8, 32), np.int32)
        assert engine(ids[:5, :17]).logits.shape[:2] == (5, 17)
        before = live_executables()
        for length in range(18, 32):
            for rows in (5, 6, 7):
                assert engine(ids[:rows, :length]).logits.shape[:2] == (rows, length)
        report = engine.report()
        assert (report.compilations, report.executables, report.evictions) == (1, 1, 0)
        assert live_executables() - before <= graphs._MOST_HELPERS


def begin(executables, key, step, *args):
    """Compile a step in the background; what it waits for at the beginning is set by the caller."""
    go = threading.Event()

    def lower():
        assert go.wait(60)
        return executables.lower(Job(key, step, args))

    executables.begin(key, lower)
    return go


def join():
    """Wait for what compiles in the background."""
    for thread in threading.enumerate():
        if thread.name == "dualinfer-compile-ahead":
            thread.join(60)


def test_what_was_begun_is_there_when_it_is_asked_for():
    """It is traced once, in another thread, without a context of the caller's."""
    executables, traces = Executables(), []

    def step(x):
        traces.append((threading.current_thread(), jax.config.values["jax_enable_x64"]))
        return x + 1

    with jax.enable_x64(True):
        begin(executables, "key", step, np.float32(1)).set()
        begin(executables, "key", step, np.float32(1)).set()
        join()
    assert executables.facts["compilations"] == executables.facts["executables"] == 1
    assert executables.seconds == 0  # nobody waited
    assert executables.run("key", double, np.float32(1)) == 2
    ((thread, wide),) = traces
    assert thread is not threading.main_thread() and not wide


@pytest.mark.parametrize("ask", ["run", "prepare"])
def test_who_asks_for_what_was_begun_waits_for_it(ask):
    executables = Executables()
    go = begin(executables, "key", lambda x: x + 1, np.float32(1))
    threading.Timer(0.2, go.set).start()
    if ask == "prepare":
        executables.prepare([Job("key", double, (np.float32(1),))], "compiling")
        assert len(executables) == 1
    assert executables.run("key", double, np.float32(1)) == 2
    assert executables.compilations == 1 and executables.seconds > 0.1


def test_what_fails_in_the_background_is_left_to_who_asks_for_it(monkeypatch, capfd):
    executables, tries = Executables(), []

    def broken(x):
        tries.append(1)
        raise SystemExit("from a thread")

    go = begin(executables, "key", broken, np.float32(1))
    threading.Timer(0.2, go.set).start()
    assert executables.run("key", double, np.float32(2)) == 4  # waits for it first
    begin(executables, "another", broken, np.float32(1)).set()
    join()
    begin(executables, "another", broken, np.float32(1)).set()  # is not tried again
    assert executables.run("another", double, np.float32(2)) == 4
    assert len(tries) == executables.compilations == 2

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        begin(executables, "third", double, np.float32(1))
    assert executables.run("third", double, np.float32(2)) == 4
    assert capfd.readouterr() == ("", "")


def test_what_is_closed_waits_for_nothing_and_holds_nothing():
    executables, before = Executables(), live_executables()
    go = begin(executables, "key", double, np.float32(1))
    executables.clear()
    go.set()
    join()
    begin(executables, "late", double, np.float32(1)).set()
    join()
    assert executables.compilations == len(executables) == 0
    assert live_executables() == before


_LEFT = """
import threading, time, jax, numpy as np
from dualinfer.backends.jax.executables import Executables, Job

begun = threading.Event()

def step(x):
    begun.set()
    time.sleep(1)
    return x

executables = Executables()
executables._compile = lambda *_: print("compiled though nobody is there")
executables.begin(1, lambda: executables.lower(Job(1, step, (np.float32(1),))))
assert begun.wait(60)
print("end")
"""


def test_an_interpreter_that_exits_compiles_nothing_more():
    done = subprocess.run(
        [sys.executable, "-c", _LEFT], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_filters_of_warnings_are_the_callers_own_while_a_thread_compiles():
    executables, before = Executables(), warnings.filters[:]
    inside, go = threading.Event(), threading.Event()

    def step(x):
        inside.set()
        assert go.wait(60)
        return x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        begin(executables, "key", step, np.float32(1)).set()
        assert inside.wait(60)
    go.set()
    join()
    assert warnings.filters == before


SLOW = pytest.mark.slow  # each is a process of its own, which imports JAX
_KEPT = """
import os, sys, types, warnings
import jax, numpy as np
from dualinfer.backends.jax.compilation_cache import use_compilation_cache
from dualinfer.backends.jax.executables import Executables

before = dict(jax.config.values)
warnings.simplefilter("always")
use_compilation_cache(types.SimpleNamespace(platform=sys.argv[1]))
after = jax.config.values
print("changed:", *sorted(name for name in after if after[name] != before[name]))
print("folder:", after["jax_compilation_cache_dir"])
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append("cache_hits" in event))
print("result:", Executables().run(0, lambda x: x * 3, np.float32(2)))
print("hits:", sum(hits))
assert jax.config.values == after  # the least time was this thread's, for a while
"""


def kept(home, platform="gpu", **environment):
    """What a process that compiles something says, and its warnings."""
    ours = ("JAX_", "DUALINFER_", "XDG_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    env |= {"HOME": str(home), "JAX_PLATFORMS": "cpu", **environment}
    command = [sys.executable, "-c", _KEPT, platform]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines(), done.stderr


def entries(folder):
    return [p for p in folder.rglob("*") if p.is_file()]


@pytest.mark.parametrize("platform", ["gpu", pytest.param("cpu", marks=SLOW)])
def test_executables_are_kept_in_a_private_folder(tmp_path, platform):
    """Those of the CPU stand for a GPU's here."""
    said, _ = kept(tmp_path, platform)
    (folder,) = (tmp_path / ".cache" / "dualinfer" / "jax").iterdir()
    assert said == [
        "changed: jax_compilation_cache_dir",
        f"folder: {folder}",
        "result: 6.0",
        "hits: 0",
    ]
    for made in (folder, folder.parent, folder.parent.parent):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert entries(folder)
    assert kept(tmp_path, platform)[0][-2:] == ["result: 6.0", "hits: 1"]
    said, _ = kept(tmp_path, XDG_CACHE_HOME=str(tmp_path / "xdg"))
    assert said[1] == f"folder: {tmp_path / 'xdg' / 'dualinfer' / 'jax' / folder.name}"


def test_each_kind_of_processor_has_a_folder(tmp_path, monkeypatch):
    """The order of cores and flags apart; where nothing tells, nothing of a CPU is kept."""
    described = tmp_path / "cpuinfo"
    kinds = []
    for text in ("flags\t: a b\nprocessor\t: 0", "processor\t: 1\nflags\t: a b", "flags\t: a b c"):
        described.write_text(text)
        kinds.append(compilation_cache._processor.__wrapped__(described))
    assert kinds[0] == kinds[1] != kinds[2]
    described.write_text("model name\t: x")
    assert compilation_cache._processor.__wrapped__(described) is None
    monkeypatch.setattr(compilation_cache, "_processor", lambda: None)
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        compilation_cache.use_compilation_cache(DEVICE)
        assert jax.config.values["jax_compilation_cache_dir"] is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize(
    ("platform", "environment"),
    [
        pytest.param("cpu", {"DUALINFER_COMPILATION_CACHE": "0"}, marks=SLOW),
        ("gpu", {"DUALINFER_COMPILATION_CACHE": "0"}),
        pytest.param("gpu", {"JAX_ENABLE_COMPILATION_CACHE": "0"}, marks=SLOW),
    ],
    ids=["off on a CPU", "off", "off for JAX"],
)
def test_nothing_is_kept(tmp_path, platform, environment):
    said, warned = kept(tmp_path, platform, **environment)
    assert said == ["changed:", "folder: None", "result: 6.0", "hits: 0"]
    assert not warned and not list(tmp_path.iterdir())


def test_the_users_own_settings_stand(tmp_path):
    """The folder; and in ours the least time that a compilation must take."""
    mine = tmp_path / "mine"
    said, _ = kept(tmp_path, JAX_COMPILATION_CACHE_DIR=str(mine))
    assert said[:2] == ["changed:", f"folder: {mine}"]
    assert not entries(tmp_path)  # too quick for JAX's own rule
    said, _ = kept(tmp_path, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="30")
    assert said[0] == "changed: jax_compilation_cache_dir"
    assert not entries(tmp_path)


@pytest.mark.parametrize(
    ("which", "mode", "why"),
    [
        pytest.param("dualinfer", 0o777, "can be written by others (mode 777", marks=SLOW),
        pytest.param("dualinfer/jax", 0o720, "can be written by others (mode 720", marks=SLOW),
        pytest.param("dualinfer/jax", 0o755, "is open to others (mode 755", marks=SLOW),
        ("", 0o777, "where others can put another in its place (mode 777"),
    ],
    ids=["the cache", "its part", "its part can be read", "what holds it"],
)
def test_a_folder_that_is_not_private_is_refused(tmp_path, which, mode, why):
    folder = tmp_path / which
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(mode)
    said, warned = kept(tmp_path, XDG_CACHE_HOME=str(tmp_path))
    assert said == ["changed:", "folder: None", "result: 6.0", "hits: 0"]
    assert why in warned and "DUALINFER_COMPILATION_CACHE=0" in warned
    assert not entries(tmp_path)


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    said, warned = kept(tmp_path, DUALINFER_CACHE=str(tmp_path / "file"))
    assert said[:3] == ["changed:", "folder: None", "result: 6.0"]
    assert "is not kept on disk" in warned


class Counting:
    """A runner without a model; its jobs are named after the sizes that fix them."""

    device = DEVICE

    def make_buffers(self, room, eos_width):
        slots, tokens, _ = room
        buffer = jax.numpy.zeros((slots, 1, tokens, 2), device=DEVICE)
        state = SlotState.make(slots, eos_width, 11)
        return Cache([KINDS["full"](buffer, buffer)], slots, tokens), state

    def prefill_jobs(self, requests, slots, cache, state):
        ids = np.stack([r.tokens for r in requests])
        assert list(slots) == list(range(len(requests)))
        key = "prefill", ids.shape[1], (cache.slots, cache.tokens)
        return [Job(key, double, (cache, state, ids))]

    def decode_job(self, steps, alone, mode, cache, state):
        key = "one" if alone else "decode", (cache.slots, cache.tokens)
        return Job(key, double, (cache, state, np.int32(steps)))


def test_what_a_request_needs_is_compiled_ahead():
    def keys(**wanted):
        asked = ahead.Wanted.of(None, wanted)
        assert asked
        made = ahead.jobs(Counting(), asked, 4)
        for job in made:
            leaves = jax.tree.leaves(job.args)
            assert all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
            assert all(x.sharding is None or x.sharding.device_set == {DEVICE} for x in leaves)
        return [job.key for job in made]

    # The cache may start at any bucket from the prompt's to that of what is reserved at most.
    assert keys(batch_sizes=[3], prompt_lengths=[5], new_tokens=100) == [
        ("prefill", 5, (4, 64)),
        ("decode", (4, 64)),
        ("prefill", 5, (4, 128)),
        ("decode", (4, 128)),
    ]
    # A single token takes no decoding.
    assert keys(batch_sizes=[1], prompt_lengths=[64, 65], new_tokens=1) == [
        ("prefill", 64, (1, 64)),
        ("prefill", 65, (1, 128)),
    ]
    # Batches that share a bucket share everything; beyond 2,048 tokens the cache grows.
    found = keys(batch_sizes=[3, 4], prompt_lengths=[900], new_tokens=5000, stream=True)
    assert found == [
        (what, *length, (4, size))
        for size in (1024, 2048, 4096, 8192)
        for what, length in (("prefill", (900,)), ("decode", ()), ("one", ()))
        if what != "prefill" or size <= 2048
    ]


def test_compile_kwargs_say_what_is_wrong():
    sizes = {"batch_sizes": [1], "prompt_lengths": [1], "new_tokens": 1}
    assert ahead.Wanted.of(None, None) is ahead.Wanted.of(None, {}) is None
    assert ahead.Wanted.of(None, sizes) == ahead.Wanted((1,), (1,), 1)
    for backend, kwargs in (("inductor", {}), ("inductor", sizes), (None, {"fullgraph": True})):
        with pytest.raises(UnsupportedError, match="batch_sizes, prompt_lengths, new_tokens"):
            ahead.Wanted.of(backend, kwargs)
    with pytest.raises(ArgumentError, match="lacks prompt_lengths, new_tokens"):
        ahead.Wanted.of(None, {"batch_sizes": [1]})
    for name, value in (
        ("batch_sizes", []),
        ("batch_sizes", 1),
        ("prompt_lengths", [0]),
        ("prompt_lengths", [True]),
        ("new_tokens", "3"),
        ("stream", 1),
    ):
        with pytest.raises(ArgumentError, match=name):
            ahead.Wanted.of(None, {**sizes, name: value})


SIZES = {"batch_sizes": [1, 3], "prompt_lengths": [5, 40], "new_tokens": 30}


def tiny_engine(name, **fields):
    pytest.importorskip("torch")
    import dualinfer

    from .cases import make_model

    model = make_model(name, num_hidden_layers=1, vocab_size=97)
    return dualinfer.init_inference(
        model, backend="jax", dtype="fp32", replace_with_kernel_inject=True, **fields
    )


def texts_of(engine):
    """Greedy text of every size in SIZES."""
    ids = np.random.default_rng(0).integers(3, 90, (3, 40))
    options = {"max_new_tokens": 30, "eos_token_id": None, "do_sample": False}
    return [
        np.asarray(engine.generate(ids[:rows, :length], **options))
        for rows in SIZES["batch_sizes"]
        for length in SIZES["prompt_lengths"]
    ]


@pytest.mark.parametrize(("name", "fields"), [("gpt2", {}), ("llama-mqa", {"max_out_tokens": 40})])
def test_what_generate_would_refuse_is_not_compiled_ahead(name, fields):
    with tiny_engine(name, **fields) as engine:
        most = engine.max_tokens
        with pytest.raises(LengthError, match=f"make {most + 1}, over what generate allows"):
            engine.compile(compile_kwargs={**SIZES, "prompt_lengths": [5, most - 29]})
        assert engine.report().compilations == 0


def test_what_was_compiled_ahead_serves_every_size_asked_for():
    with tiny_engine("llama-mqa") as engine:
        engine.compile(compile_kwargs=SIZES)
        made = engine.report().compilations
        # A prompt of 5 takes 16 ids and a cache of 64 tokens; one of 40 takes 64 and 128.
        assert made >= len(SIZES["batch_sizes"]) * (2 + 2)
        engine.compile(compile_kwargs=SIZES)
        found = texts_of(engine)
        assert engine.report().compilations == made
        with tiny_engine("llama-mqa") as other:
            for mine, expected in zip(found, texts_of(other), strict=True):
                np.testing.assert_array_equal(mine, expected)
            assert other.report().compilations <= made
        engine.generate([[5, 6, 7]], max_new_tokens=100, do_sample=False)
        assert engine.report().compilations > made


WAYS = [
    {"do_sample": False},
    {"do_sample": True, "top_k": 0},
    {"do_sample": True, "top_k": 9, "top_p": 0.7, "min_p": 0.01},
    {"do_sample": False, "repetition_penalty": 1.3},
    {"do_sample": False, "min_new_tokens": 4, "eos_token_id": [7, 8]},
]


def test_what_serves_one_request_serves_every_kind_and_a_stream_takes_one_step_more():
    """Nothing compiles because of noise, filters, a penalty or a least number of tokens."""
    sizes = {"batch_sizes": [2, 1], "prompt_lengths": [5], "new_tokens": 35, "stream": True}
    with tiny_engine("llama-mqa") as engine:
        engine.compile(compile_kwargs=sizes)
        made = engine.report().compilations
        for way in WAYS:
            options = {"eos_token_id": None, "max_new_tokens": 34, "seed": 3} | way
            engine.generate([[5, 6, 7], [8] * 5], pad_token_id=0, **options)
            text = np.asarray(engine.generate([[5, 6, 7]], **options))[0, 3:]
            assert list(engine.stream([[5, 6, 7]], **options)) == text.tolist()
        assert engine.report().compilations == made
    with tiny_engine("llama-mqa") as engine:
        counts = []
        for call in (engine.generate, lambda *a, **k: list(engine.stream(*a, **k))):
            for way in WAYS:  # the last of 34 tokens is a step alone, and no stream's
                call([[5, 6, 7]], **{"eos_token_id": None, "max_new_tokens": 34} | way)
                counts.append(engine.report().compilations)
        assert counts == [2] * len(WAYS) + [3] * len(WAYS)


def test_an_engine_refuses_what_it_cannot_compile():
    with tiny_engine("llama-mqa") as engine:
        for backend, kwargs in (
            ("inductor", None),
            (None, {"fullgraph": True}),
            (None, SIZES | {"mode": "x"}),
        ):
            with pytest.raises(UnsupportedError, match="batch_sizes, prompt_lengths, new_tokens"):
                engine.compile(backend=backend, compile_kwargs=kwargs)
        with pytest.raises(ArgumentError, match="lacks batch_sizes"):
            engine.compile(compile_kwargs={k: v for k, v in SIZES.items() if k != "batch_sizes"})
        engine.compile()
        engine.compile(compile_kwargs={})
        assert engine.report().compilations == 0
    with tiny_engine("bert") as engine:
        engine.compile()
        with pytest.raises(UnsupportedError, match="bert model does not generate"):
            engine.compile(compile_kwargs=SIZES)
        assert engine.report().compilations == 0


def test_all_that_is_asked_for_is_kept():
    """However much that is; the least recently used ones go only beyond it."""
    executables = Executables(most=2)
    jobs = [Job(n, lambda x, n=n: x + n, (np.float32(1),)) for n in range(6)]
    executables.prepare(jobs, "Compiling")
    for n in range(6):
        assert executables.run(n, lambda x: 1 / 0, np.float32(1)) == 1 + n
    assert executables.compilations == 6


@pytest.fixture
def lowered(monkeypatch):
    """Each job that engines lower, by its key: in which thread, and its text."""
    made, lower = {}, Executables.lower

    def spy(self, job):
        result = lower(self, job)
        made.setdefault(job.key, []).append((threading.current_thread(), result.step.as_text()))
        return result

    monkeypatch.setattr(Executables, "lower", spy)
    return made


def small_buckets(monkeypatch):
    """A cache of 16 tokens at first, which grows by doubling."""
    monkeypatch.setattr("dualinfer.backends.slots.RESERVED", 8)
    monkeypatch.setattr("dualinfer.backends.slots.SMALLEST_CACHE", 16)


@pytest.mark.parametrize("way", ["stream", "generate"])
def test_the_next_size_of_a_cache_is_compiled_before_a_sequence_needs_it(way, monkeypatch, lowered):
    """Half way through a bucket, in the background; what a call would have compiled, the same."""
    small_buckets(monkeypatch)
    options = {"max_new_tokens": 25, "do_sample": False, "eos_token_id": None}
    with tiny_engine("llama-mqa") as engine:
        if way == "stream":
            found = []
            for token in engine.stream([[5, 6, 7]], **options):
                found.append(token)
                join()
        else:
            monkeypatch.setattr("dualinfer.engine.preparing._WHOLE_CHUNK", 4)
            decode = engine.runner.decode

            def slowly(steps):
                tokens = decode(steps)
                join()
                return tokens

            monkeypatch.setattr(engine.runner, "decode", slowly)
            found = np.asarray(engine.generate([[5, 6, 7]], **options))[0, 3:].tolist()
        count, early = engine.report().compilations, dict(lowered)
    main = threading.main_thread()
    by_size = {
        key[2]: threads[0][0] is main for key, threads in early.items() if key[0] != "prefill"
    }
    assert by_size == {16: True, 32: False}
    lowered.clear()
    monkeypatch.setattr(Executables, "begin", lambda *_: None)
    with tiny_engine("llama-mqa") as engine:
        if way == "stream":
            assert found == list(engine.stream([[5, 6, 7]], **options))
        else:
            text = np.asarray(engine.generate([[5, 6, 7]], **options))
            assert found == text[0, 3:].tolist()
        assert engine.report().compilations == count
    texts = [{key: made[0][1] for key, made in some.items()} for some in (early, lowered)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("prompt", "new"), [(3, 13), (3, 3), (14, 2), (18, 14)])
def test_nothing_is_begun_that_no_sequence_can_reach(prompt, new, monkeypatch, lowered):
    small_buckets(monkeypatch)
    with tiny_engine("llama-mqa") as engine:
        engine.generate([[5] * prompt], max_new_tokens=new, eos_token_id=None)
        join()
        assert {threads[0][0] for threads in lowered.values()} == {threading.main_thread()}


def test_a_prompt_of_a_new_size_begins_what_decodes_it(monkeypatch, lowered):
    """Beside its own compilation, as the last call decoded; nothing where no token follows."""
    monkeypatch.setattr("dualinfer.backends.slots.SMALLEST_CACHE", 16)
    with tiny_engine("llama-mqa") as engine:
        for prompt, new in ((9, 4), (9, 20), (40, 1)):
            engine.generate([[5] * prompt], max_new_tokens=new, eos_token_id=None)
            join()
    main = threading.main_thread()
    found = {
        (key[0], key[-4]): threads[0][0] is main
        for key, threads in lowered.items()
        if len(threads) == 1
    }
    prompts = {("prefill", tokens): True for tokens in (16, 32, 64)}
    assert found == prompts | {("decode", 16): True, ("decode", 32): False}


def test_an_engine_that_is_closed_while_it_compiles_does_not_wait(monkeypatch):
    small_buckets(monkeypatch)
    go, lower = threading.Event(), Executables.lower

    def slow(self, job):
        if threading.current_thread() is not threading.main_thread():
            assert go.wait(60)
        return lower(self, job)

    monkeypatch.setattr(Executables, "lower", slow)
    with tiny_engine("llama-mqa") as engine:
        stream = engine.stream([[5] * 9], max_new_tokens=50, eos_token_id=None)
        assert len([next(stream), next(stream)]) == 2
        executables = engine.runner._executables
        assert len(executables._coming) == 1
    go.set()
    join()
    assert len(executables) == len(executables._coming) == 0

"""What every engine has: module, model times, life cycle, threads; in both modes and backends."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
import torch
import transformers as hf
from flax import nnx

import dualinfer

from .models import BACKENDS, random_ids

CAUSAL = "llama-gqa"


class Perceptron(nnx.Module):
    """A Flax module of the user's."""

    def __init__(self, rngs):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.second = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


def make_module(backend):
    """A module of the backend's framework and an input for it."""
    x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)
    if backend == "jax":
        return Perceptron(nnx.Rngs(0)), x
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(16, 4)
    return torch.nn.Sequential(*layers), torch.from_numpy(x)


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture(params=["fused", "module"])
def running(request, backend, hf_model):
    """An engine of its own, and a function that runs one forward pass of it."""
    if request.param == "fused":
        engine = dualinfer.init_inference(
            hf_model(CAUSAL), backend=backend, dtype="fp32", kernel_inject=True
        )
        inputs = random_ids(2, 5)
    else:
        module, inputs = make_module(backend)
        engine = dualinfer.init_inference(module, backend=backend, dtype="fp32")
    yield engine, lambda: engine(inputs)
    engine.close()


def test_model_times_are_one_entry_a_forward_and_are_cleared(running):
    engine, run = running
    with pytest.raises(dualinfer.ProfilingError, match="profile_model_time"):
        engine.model_times()
    with pytest.raises(AssertionError):  # as DeepSpeed
        engine.model_times()
    run()
    for use_cuda_events in (True, False):
        engine.profile_model_time(use_cuda_events=use_cuda_events)
        assert engine.model_profile_enabled
        run()
        engine.model_times()
        whole = []
        for _ in range(10):
            start = time.perf_counter()
            run()
            whole.append((time.perf_counter() - start) * 1e3)
        times = engine.model_times()
        assert len(times) == 10
        assert all(0 < model < end_to_end for model, end_to_end in zip(times, whole, strict=True))
        assert engine.model_times() == []
    run()  # its time is not taken, and goes
    engine.profile_model_time(enabled=False)
    run()
    assert not engine.model_profile_enabled
    with pytest.raises(dualinfer.ProfilingError):
        engine.model_times()
    engine.profile_model_time()
    assert engine.model_times() == []


def test_every_pass_of_generate_is_an_entry(backend, hf_model):
    with dualinfer.init_inference(
        hf_model(CAUSAL), backend=backend, dtype="fp32", kernel_inject=True
    ) as engine:
        ids = random_ids(2, 5)
        expected = engine.generate(ids, max_new_tokens=9, do_sample=False)
        engine.profile_model_time()
        start = time.perf_counter()
        ids = engine.generate(ids, max_new_tokens=9, do_sample=False)
        whole = (time.perf_counter() - start) * 1e3
        times = engine.model_times()
        assert len(times) == 9 and all(t > 0 for t in times) and sum(times) < whole
        np.testing.assert_array_equal(ids, expected)


def test_text_that_ends_early_has_an_entry_for_each_pass(backend, hf_model):
    with dualinfer.init_inference(
        hf_model(CAUSAL), backend=backend, dtype="fp32", kernel_inject=True
    ) as engine:
        ids = random_ids(1, 5)
        text = np.asarray(engine.generate(ids, max_new_tokens=12, do_sample=False))[0, 5:]
        end = next(i for i in range(1, 12) if text[i] not in text[:i])
        engine.profile_model_time()
        engine.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=int(text[end]))
        assert len(engine.model_times()) == end + 1


def test_every_pass_of_a_modules_own_generate_is_an_entry(hf_model):
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2))
    with dualinfer.init_inference(model, dtype="fp32") as engine:
        engine.profile_model_time()
        engine.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=7, min_new_tokens=7)
        assert len(engine.model_times()) == 7
        engine(torch.tensor([[1, 2, 3]]))
        assert len(engine.model_times()) == 1
        engine.profile_model_time(enabled=False)
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_closed_engine_says_so_and_may_be_closed_again(running):
    engine, run = running
    engine.profile_model_time()
    run()
    engine.destroy()
    engine.close()
    assert not engine.model_profile_enabled
    for use in (run, engine.report, engine.profile_model_time, lambda: engine.module):
        with pytest.raises(dualinfer.ClosedError, match="init_inference"):
            use()
    assert "closed" in repr(engine)


def test_numpy_results_are_the_callers_to_write(engine_of, backend):
    engine, ids = engine_of(CAUSAL, backend), random_ids(2, 16)  # a bucket, which nothing cuts
    logits = engine(ids).logits
    before = logits.copy()
    logits[...] = 7
    np.testing.assert_array_equal(engine(ids).logits, before)


def test_engine_closed_while_a_call_is_on_its_way_says_so(backend, hf_model):
    engine = dualinfer.init_inference(
        hf_model(CAUSAL), backend=backend, dtype="fp32", kernel_inject=True
    )

    class Closing:  # stands for another thread
        def put(self, value):
            engine.close()

        def end(self):
            pass

    with pytest.raises(dualinfer.ClosedError, match="init_inference"):
        engine.generate(random_ids(1, 4), streamer=Closing(), max_new_tokens=5)


def test_engine_that_is_dropped_is_freed_at_once(backend, hf_model):
    gc.collect()
    gc.disable()
    try:
        engine = dualinfer.init_inference(
            hf_model(CAUSAL), backend=backend, dtype="bf16", kernel_inject=True
        )
        engine.generate(random_ids(1, 4), max_new_tokens=3)
        engine.module  # noqa: B018
        gone = weakref.ref(engine)
        del engine
        assert gone() is None
    finally:
        gc.enable()


def test_torch_engine_is_an_nn_module(hf_model):
    model = hf_model(CAUSAL)
    engine = dualinfer.init_inference(model, dtype="fp32", kernel_inject=True)
    assert isinstance(engine, torch.nn.Module) and isinstance(engine, dualinfer.InferenceEngine)
    assert engine.eval() is engine and not engine.training
    with pytest.raises(dualinfer.UnsupportedError, match="inference"):
        engine.train()
    count = sum(p.numel() for p in engine.parameters())
    assert count == engine.report().parameters
    assert not any(p.requires_grad for p in engine.parameters())
    state = engine.state_dict()
    torch.testing.assert_close(
        state["module.layers.0.down.weight"],
        model.state_dict()["model.layers.0.mlp.down_proj.weight"],
    )
    assert {f"module.{name}" for name in engine.module.state_dict()} == state.keys()
    ids = torch.from_numpy(random_ids(2, 5))
    module = engine.module
    assert module is engine.module
    torch.testing.assert_close(module(ids).logits, engine(ids).logits)
    assert module.config is model.config and module.dtype == torch.float32
    expected = engine.generate(ids, max_new_tokens=3, do_sample=False)
    del engine
    gc.collect()
    # A script that keeps only `engine.module` keeps the engine with it.
    assert torch.equal(module.generate(ids, max_new_tokens=3, do_sample=False), expected)
    assert module.to("cpu") is module and module.float() is module
    for change in (module.half, lambda: module.to("meta")):
        with pytest.raises(dualinfer.UnsupportedError, match="init_inference"):
            change()


def test_hooks_on_a_torch_engine_run(hf_model):
    engine = dualinfer.init_inference(hf_model(CAUSAL), dtype="fp32", kernel_inject=True)
    seen = []
    handle = engine.register_forward_hook(lambda m, args, output: seen.append(output.logits.shape))
    engine(torch.from_numpy(random_ids(2, 5)))
    handle.remove()
    engine(torch.from_numpy(random_ids(2, 5)))
    assert seen == [(2, 5, 1001)]


def test_module_engine_on_torch_is_the_callers_module():
    module, x = make_module("torch")
    module.train()
    engine = dualinfer.init_inference(module, dtype="fp32")
    assert engine.module is module and not module.training and not engine.training
    assert {name for name, _ in engine.named_parameters()} == {
        f"module.{name}" for name, _ in module.named_parameters()
    }
    y = engine(x)
    assert not y.requires_grad and torch.equal(y, module(x))
    assert engine.device == torch.device("cpu") and engine.dtype == torch.float32
    assert not hasattr(engine, "generate") and engine.config is None
    assert engine.can_generate() is False
    engine.close()
    assert torch.equal(module(x), y)  # the caller's, and still there


def test_module_engine_on_jax_leaves_the_callers_module():
    module, x = make_module("jax")
    before = jax.tree.map(lambda p: np.array(p), nnx.state(module))
    engine = dualinfer.init_inference(module, backend="jax", dtype="bf16")
    y = engine(x)
    assert y.dtype == "bfloat16" or y.dtype == "float32"
    assert engine.module is not module and engine.module.first.kernel[...].dtype == "bfloat16"
    after = jax.tree.map(lambda p: np.array(p), nnx.state(module))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert not hasattr(engine, "generate")


def test_calls_from_several_threads_take_turns(backend, hf_model):
    engine = dualinfer.init_inference(
        hf_model(CAUSAL), backend=backend, dtype="fp32", kernel_inject=True
    )
    prompts = [random_ids(1 + i % 2, 4 + i, seed=i) for i in range(6)]

    def serve(ids):
        text = engine.generate(ids, max_new_tokens=8, do_sample=False)
        return np.asarray(text), np.asarray(engine(ids).logits)

    expected = [serve(ids) for ids in prompts]
    results, errors = {}, []

    def work(i):
        try:
            results[i] = serve(prompts[i])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for i, (text, logits) in enumerate(expected):
        np.testing.assert_array_equal(results[i][0], text)
        np.testing.assert_allclose(results[i][1], logits, rtol=1e-5, atol=1e-5)


def test_engines_of_several_kinds_live_side_by_side(hf_model):
    ids = random_ids(2, 6)
    model = hf_model(CAUSAL)
    options = [
        dict(backend="torch", dtype="fp32"),
        dict(backend="jax", dtype="fp32"),
        dict(backend="torch", dtype="bf16", max_out_tokens=20),
        dict(backend="jax", dtype="fp32", max_out_tokens=30),
    ]
    engines = [dualinfer.init_inference(model, kernel_inject=True, **o) for o in options]
    alone = [np.asarray(e.generate(ids, max_new_tokens=6, do_sample=False)) for e in engines]
    streams = [e.stream(ids, max_new_tokens=6, do_sample=False) for e in engines]
    together = [np.array([next(s) for s in streams]) for _ in range(5)]
    engines[1].close()
    engines[2].close()
    for i, tokens in enumerate(zip(*together, strict=True)):
        np.testing.assert_array_equal(np.stack(tokens, 1), alone[i][:, 6:11])
    again = np.asarray(engines[0].generate(ids, max_new_tokens=6, do_sample=False))
    np.testing.assert_array_equal(again, alone[0])
    np.testing.assert_array_equal(np.asarray(next(streams[3])), alone[3][:, 11])


def test_callers_state_stays_as_it_was(backend, hf_model):
    model = hf_model(CAUSAL)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    np.random.seed(5)
    numpy_state = np.random.get_state()[1].copy()
    grad, default = torch.is_grad_enabled(), torch.get_default_dtype()
    threads = torch.get_num_threads()
    x64 = jax.config.jax_enable_x64
    precision = torch.backends.cuda.matmul.fp32_precision
    with dualinfer.init_inference(
        model, backend=backend, dtype="bf16", kernel_inject=True
    ) as engine:
        engine.generate(random_ids(2, 5), max_new_tokens=4, do_sample=True, seed=1)
        engine(random_ids(2, 5))
    assert torch.equal(torch.rand(3), expected)
    assert (np.random.get_state()[1] == numpy_state).all()
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == (grad, default)
    assert torch.get_num_threads() == threads and jax.config.jax_enable_x64 == x64
    assert torch.backends.cuda.matmul.fp32_precision == precision
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


def in_a_forked_process(work):
    """What `work` returns in a child of this process; None if it hangs there."""
    ours, theirs = multiprocessing.Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python and JAX warn of forks
        child = os.fork()
    if child == 0:
        try:
            theirs.send(work())
        except BaseException as error:
            theirs.send([repr(error)])
        finally:
            os._exit(0)
    answer = ours.recv() if ours.poll(30) else None
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return answer


def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_forked_process_is_told_that_a_jax_engine_is_its_parents(hf_model):
    module, x = make_module("jax")
    fused, own = (
        dualinfer.init_inference(model, backend="jax", dtype="fp32")
        for model in (hf_model(CAUSAL), module)
    )
    ids = random_ids(2, 5)
    expected, params, stream = fused(ids).logits, fused.params, fused.stream(ids, max_new_tokens=4)
    next(stream)
    calls = {
        "forward": lambda: fused(ids),
        "generate": lambda: fused.generate(ids, max_new_tokens=2),
        "stream": lambda: fused.stream(ids, max_new_tokens=2),
        "next": lambda: next(stream),
        "apply": lambda: fused.apply(params, ids),
        "compile": fused.compile,
        "report": fused.report,
        "times": fused.model_times,
        "module": lambda: own(x),
        "module report": own.report,
    }
    quiet = {"close": fused.close, "leave": stream.close, "repr": lambda: repr(fused)}
    new = {"new": lambda: dualinfer.init_inference(hf_model(CAUSAL), backend="jax")}
    held, done = threading.Event(), threading.Event()

    def hold():  # as a call that is under way in another thread, whose lock nobody gives back
        with fused._turns:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        said = in_a_forked_process(
            lambda: {name: error_of(call) for name, call in (calls | quiet | new).items()}
        )
    finally:
        done.set()
        thread.join()
    assert said is not None, "it hangs"
    for name in calls:
        assert said[name].startswith("ClosedError: This engine belongs to process "), name
        assert f"process {os.getpid()}, " in said[name] and "'spawn'" in said[name], name
    assert {said[name] for name in quiet} == {"no error"}
    assert said["new"].startswith("UnsupportedError: Process ") and "'spawn'" in said["new"]
    np.testing.assert_array_equal(fused(ids).logits, expected)  # the parent's works on
    assert len(next(stream)) == 2
    fused.close()
    own.close()


def test_calls_at_once_run_in_a_process_forked_while_their_thread_lives(hf_model):
    """The driver's thread does not come along, nor do its jobs."""
    how = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 20}
    with dualinfer.init_inference(hf_model(CAUSAL), dtype="fp32", kernel_inject=True) as engine:

        def call(i: int) -> list[list[int]]:
            return engine.generate([[3, 4, 5 + i]], **how).tolist()

        def at_once() -> list[list[list[int]]]:
            with ThreadPoolExecutor(4) as threads:
                return list(threads.map(call, range(4)))

        engine._driving()
        stream = engine.stream([[7, 8]], **how)
        next(stream)
        expected = at_once()
        assert in_a_forked_process(at_once) == expected
        assert at_once() == expected


def test_a_forked_process_uses_a_torch_engine_on_the_cpu(hf_model):
    module, x = make_module("torch")
    with dualinfer.init_inference(module, dtype="fp32") as engine:
        expected = engine(x).tolist()
        assert in_a_forked_process(lambda: engine(x).tolist()) == expected


@pytest.mark.parametrize(
    ("parameters", "tokens", "threads"), [(3_000_000, 2, 1), (3_000_000, 3, 2)]
)
def test_a_small_pass_takes_one_thread_and_leaves_the_callers_number(parameters, tokens, threads):
    from dualinfer.backends.torch.threads import few_threads, threads_note

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with few_threads(torch.device("cpu"), parameters, tokens):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 2
        (note,) = threads_note(torch.device("cpu"), parameters)
        assert "at most 2 tokens takes one of torch's 2 threads" in note
        assert threads_note(torch.device("cpu"), 10**8) == ()
    finally:
        torch.set_num_threads(before)


def test_slow_work_says_so_where_somebody_reads_it(monkeypatch, capsys):
    from dualinfer.system.patience import told_if_slow

    for asked, expected in (("", ""), ("1", "dualinfer: compiling ...\n"), ("0", "")):
        monkeypatch.setenv("DUALINFER_PROGRESS", asked)
        with told_if_slow("compiling", patience=0.01):
            time.sleep(0.1)
        with told_if_slow("compiling", patience=60):
            pass
        assert capsys.readouterr().err == expected
    monkeypatch.setenv("DUALINFER_PROGRESS", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with told_if_slow("compiling", patience=0.01):
        time.sleep(0.1)
    assert capsys.readouterr().err == "\x1b7\x1b8\x1b[K[compiling: 0 s]\x1b8\x1b[K"

"""What the JAX backend's runners must do on a GPU; run there with `pytest -m gpu`."""

import gc
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
pytest.importorskip("flax")

from .test_gpu import make_model  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module", autouse=True)
def jax_sees_the_card():
    assert jax.devices()[0].platform == "gpu", "JAX runs on the CPU; install jax[cuda13]."


@pytest.fixture(scope="module")
def model():
    """A random Llama whose steps launch enough kernels for XLA to capture them."""
    return make_model("llama", positions=4096)


def make_module():
    from flax import nnx

    class Mlp(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(1024, 4096, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.second = nnx.Linear(4096, 1024, rngs=rngs)

        def __call__(self, x, times=1):
            for _ in range(times):
                x = self.second(self.drop(nnx.relu(self.first(x))))
            return {"out": x, "times": times}

    return Mlp(nnx.Rngs(0))


def make_runner(module, **fields):
    from dualinfer.backends.jax import create_module_runner, join
    from dualinfer.config import InferenceConfig

    config = InferenceConfig(backend="jax", **fields)
    return create_module_runner(config, module, None, join(config))


def bytes_in_use():
    gc.collect()
    return jax.devices()[0].memory_stats()["bytes_in_use"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_module_runs_on_the_card_and_agrees_with_the_host(dtype):
    module = make_module()
    x = np.random.default_rng(0).normal(size=(16, 1024)).astype(dtype)
    card = make_runner(module, dtype=dtype)
    host = make_runner(module, dtype=dtype, keep_module_on_host=True)
    with jax.default_matmul_precision("highest"):
        found, expected = card.forward((x,), {}), host.forward((x,), {})
    assert found["out"].dtype == x.dtype and found["times"] == 1
    assert {d.platform for d in found["out"].devices()} == {"gpu"}
    assert {d.platform for d in expected["out"].devices()} == {"cpu"}
    a, b = (np.asarray(y["out"], np.float64) for y in (found, expected))
    error = np.sqrt(((a - b) ** 2).mean() / (b**2).mean())
    bound = 1e-5 if dtype == "float32" else 4 * float(jax.numpy.finfo(dtype).eps)
    print(dtype, error)
    assert error < bound


def test_tensors_on_the_card_are_taken():
    runner = make_runner(make_module(), dtype="fp32")
    x = torch.randn(4, 1024, generator=torch.Generator().manual_seed(0))
    expected = np.asarray(runner.forward((x,), {})["out"])
    given = x.cuda()
    found = runner.forward((given,), {})["out"]
    given.zero_()
    np.testing.assert_array_equal(found, expected)
    assert runner.compilations == 1


def test_engine_is_where_scripts_put_it_and_its_module_generates(model):
    import dualinfer

    with dualinfer.init_inference(model, backend="jax", dtype="bf16", kernel_inject=True) as engine:
        for wanted in ("cuda", "cuda:0", 0, torch.device("cuda"), engine.device, torch.bfloat16):
            assert engine.to(wanted) is engine
        for wanted in ("cpu", torch.device("cpu"), "cuda:1", torch.float16):
            with pytest.raises(dualinfer.UnsupportedError, match="init_inference"):
                engine.to(wanted)
        ids = torch.tensor([[5, 6, 7]]).cuda()
        options = dict(max_new_tokens=9, do_sample=False, pad_token_id=0)
        found = engine.module.generate(ids, **options)
        assert found.is_cuda and torch.equal(found, engine.generate(ids, **options))


def test_unset_dtype_is_float16():
    assert make_runner(make_module()).module.first.kernel.dtype == np.float16


def test_without_graphs_the_text_is_the_same(model):
    """Whether False reaches the compiler as well."""
    import dualinfer

    ids = np.random.default_rng(0).integers(3, 4000, (2, 30))
    texts, logits = [], []
    for flag in (False, None, True):
        with dualinfer.init_inference(
            model, backend="jax", dtype="bf16", kernel_inject=True, enable_cuda_graph=flag
        ) as engine:
            texts.append(
                [
                    np.asarray(engine.generate(ids, max_new_tokens=60, pad_token_id=0, **options))
                    for options in (dict(do_sample=False), dict(do_sample=True, seed=3))
                ]
            )
            logits.append(np.asarray(engine(ids).logits))
            options = engine.runner._executables._options
            assert (options["xla_gpu_enable_command_buffer"] == "") == (flag is False)
    for other in (1, 2):
        for mine, theirs in zip(texts[0], texts[other], strict=True):
            np.testing.assert_array_equal(mine, theirs)
        np.testing.assert_array_equal(logits[0], logits[other])


_TRACE = """
import pathlib, sys
import jax, numpy as np
from dualinfer.backends.jax.executables import Executables, compiler_options

off = compiler_options(False, jax.devices()[0])
assert off and compiler_options(None, jax.devices()[0]) is None
assert compiler_options(False, jax.devices("cpu")[0]) is None
x = jax.device_put(np.ones((256, 256), np.float32))

def step(x):
    for _ in range(20):
        x = jax.numpy.tanh(x @ x / 256) + 1
    return x

results, launches = [], []
for name, options in (("graphs", {}), ("none", off)):
    # XLA runs op by op under a profiler unless told otherwise.
    executables = Executables({"xla_enable_command_buffers_during_profiling": True, **options})
    for _ in range(3):  # the first runs capture nothing
        results.append(np.asarray(executables.run(0, step, x)))
    folder = pathlib.Path(sys.argv[1]) / name
    with jax.profiler.trace(str(folder)):
        executables.run(0, step, x).block_until_ready()
    (file,) = folder.rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(file))
    names = [e.name for plane in data.planes for line in plane.lines for e in line.events]
    launches.append(sum("graphlaunch" in n.lower() for n in names))
print("graph launches:", launches, sorted(set(names))[:40])
assert launches[0] > 0 and launches[1] == 0
assert all((r == results[0]).all() for r in results)
"""


def test_option_turns_graphs_off(tmp_path):
    """Seen in a trace: without the option a graph is launched, with it none.

    In a process of its own, since torch's profiler and JAX's cannot both watch one.
    """
    command = [sys.executable, "-c", _TRACE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_warm_buckets_compile_nothing_again(model):
    import dualinfer

    with dualinfer.init_inference(model, backend="jax", dtype="bf16", kernel_inject=True) as engine:
        for _ in range(2):
            engine([[5, 6, 7]])
            engine.generate([[5, 6, 7]], max_new_tokens=40, pad_token_id=0)
        before = engine.report().compilations
        for ids in ([[8, 9]], [[1] * 9]):
            engine(ids)
            engine.generate(ids, max_new_tokens=30, pad_token_id=0)
        assert engine.report().compilations == before > 0


@pytest.mark.alone
def test_free_bytes_follow_what_is_allocated():
    from dualinfer.backends.jax.cache import free_bytes

    device = jax.devices()[0]
    gc.collect()
    before = free_bytes(device)
    assert before is not None and 2**30 < before < torch.cuda.mem_get_info()[1]
    block = jax.device_put(np.zeros(2**28, np.uint8), device)
    block.block_until_ready()
    assert 2**28 <= before - free_bytes(device) < 2**29
    del block
    gc.collect()
    assert abs(free_bytes(device) - before) < 2**20


@pytest.mark.alone
def test_cache_without_room_is_refused_and_the_next_smaller_call_works(model):
    import dualinfer

    with dualinfer.init_inference(model, backend="jax", dtype="bf16", kernel_inject=True) as engine:
        expected = np.asarray(engine.generate([[5, 6, 7]], max_new_tokens=9, pad_token_id=0))
        rows = 1
        while engine.runner.cache_bytes_for(rows, 2048) <= engine.runner.free_bytes():
            rows *= 2
        in_use = bytes_in_use()
        with pytest.raises(dualinfer.errors.OutOfMemoryError, match=f"{rows} sequences of 2048"):
            engine.generate([[5, 6, 7]] * rows, max_new_tokens=2040, pad_token_id=0)
        assert bytes_in_use() <= in_use
        found = engine.generate([[5, 6, 7]], max_new_tokens=9, pad_token_id=0)
        np.testing.assert_array_equal(found, expected)


def test_close_frees_the_card(model):
    import dualinfer

    runner = make_runner(make_module(), dtype="bf16")  # what the libraries keep for themselves
    runner.forward((np.ones((2, 1024), np.float32),), {})
    runner.close()
    del runner
    module = make_module()
    before = bytes_in_use()
    runner = make_runner(module, dtype="bf16")
    runner.forward((np.ones((2, 1024), np.float32),), {})
    assert bytes_in_use() - before > 2 * 2 * 1024 * 4096
    runner.close()
    assert bytes_in_use() - before < 2**16
    del module

    def use_engine():
        options = dict(backend="jax", dtype="bf16", kernel_inject=True)
        with dualinfer.init_inference(model, **options) as engine:
            engine.generate([[1, 2, 3]], max_new_tokens=5, pad_token_id=0)
            return bytes_in_use()

    use_engine()
    before = bytes_in_use()
    assert use_engine() - before > 2 * sum(p.numel() for p in model.parameters())
    assert bytes_in_use() - before < 2**16


@pytest.mark.alone
@pytest.mark.parametrize("use_events", [True, False])
def test_model_times_are_those_of_the_device(use_events):
    """JAX returns at once; the time must be that of the work, not of its launch."""
    import time

    from dualinfer.backends.profiling import Profiler

    runner = make_runner(make_module(), dtype="fp32")
    x = jax.device_put(np.random.default_rng(0).normal(size=(8192, 1024)).astype(np.float32))
    with jax.default_matmul_precision("highest"):
        runner.forward(
            (x,),
            {"times": 40},
        )["out"].block_until_ready()
    start = time.perf_counter()
    result = runner.forward((x,), {"times": 40})["out"]
    launched = (time.perf_counter() - start) * 1e3
    result.block_until_ready()
    done = (time.perf_counter() - start) * 1e3
    profiler = Profiler(runner.stopwatch)
    runner.watch(profiler)
    profiler.switch(True, use_events)
    walls = []
    for _ in range(3):
        start = time.perf_counter()
        runner.forward((x,), {"times": 40})["out"].block_until_ready()
        walls.append((time.perf_counter() - start) * 1e3)
    times = profiler.take()
    print(f"launched after {launched:.2f} ms, done after {done:.2f} ms, {times} of {walls}")
    assert done > 4 * launched  # else the test would show nothing
    assert len(times) == 3
    assert all(0.5 * wall < t <= wall for t, wall in zip(times, walls, strict=True))


def test_layers_that_read_what_others_made_run_whole():
    """Gemma 4's layers share keys, values and a cache, and read embeddings of their own."""
    import dualinfer

    from .cases import make_model
    from .models import random_ids, relative_rms

    model, ids = make_model("gemma4"), random_ids(2, 11)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits.numpy()
        text = model.generate(torch.from_numpy(ids), max_new_tokens=9, do_sample=False).numpy()
    how = {"dtype": "fp32", "replace_with_kernel_inject": True}
    with dualinfer.init_inference(model, backend="jax", **how) as engine:
        assert relative_rms(np.asarray(engine(ids).logits), expected) < 1e-5
        found = engine.generate(ids, max_new_tokens=9, do_sample=False)
        np.testing.assert_array_equal(np.asarray(found), text)

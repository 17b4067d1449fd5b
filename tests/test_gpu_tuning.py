"""triton_autotune on a GPU; run there with `pytest -m gpu`."""

import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import dualinfer  # noqa: E402
from dualinfer.backends.torch.ops.kernels import KernelOps  # noqa: E402
from dualinfer.backends.torch.tuning import cases, search, store  # noqa: E402

from .cases import make_model as make_mixture  # noqa: E402
from .cases.mixtures import CASES as MIXTURES  # noqa: E402
from .test_gpu import make_model  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
FUSED = {"dtype": "bf16", "replace_with_kernel_inject": True}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("DUALINFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def few(monkeypatch):
    """A search of a minute at most, over few numbers of rows and lengths."""
    monkeypatch.setattr(cases, "DECODE_ROWS", (1, 8))
    monkeypatch.setattr(cases, "FORWARD_ROWS", (1, 64))
    real = search.tuning_cases

    def find(spec, params, ops, **how):
        return real(spec, params, ops, reaches=(256,), prompts=(128,), **how)

    monkeypatch.setattr(search, "tuning_cases", find)


def test_tuned_engine_says_the_same_and_the_next_one_measures_nothing(few, monkeypatch, folder):
    model = make_model("llama")
    ids = torch.randint(3, 4000, (2, 30), generator=torch.Generator().manual_seed(1))
    plain = dualinfer.init_inference(model, **FUSED)
    torch.manual_seed(7)
    state = torch.cuda.get_rng_state(), torch.get_rng_state()
    start = time.perf_counter()
    first = dualinfer.init_inference(model, triton_autotune=True, **FUSED)
    print(f"\nsearch {time.perf_counter() - start:.1f} s", first.report().ops["configurations"])
    assert all(map(torch.equal, state, (torch.cuda.get_rng_state(), torch.get_rng_state())))
    assert list(folder.glob("nvidia-*.json"))

    def refuse(*args):
        raise AssertionError("everything is in the cache")

    monkeypatch.setattr(search, "search", refuse)
    second = dualinfer.init_inference(model, triton_autotune=True, **FUSED)
    without = dualinfer.init_inference(model, **FUSED)  # reads the cache all the same
    for engine in (first, second, without):
        found, wanted = (e(ids).logits.float().cpu().numpy() for e in (engine, plain))
        assert np.sqrt(((found - wanted) ** 2).mean() / (wanted**2).mean()) < 1e-2
        assert engine.generate(ids[:1], max_new_tokens=8).shape == (1, 38)
        assert "tuned on this machine" in engine.report().ops["configurations"].split("in use")[1]


# Each number of rows meets each dtype and most families: a candidate takes a second to compile.
@pytest.mark.parametrize(
    ("family", "dtype", "rows"),
    [
        ("llama", "fp32", (3,)),
        ("llama", "bf16", (1, 16)),
        ("llama", "bf16", (64,)),
        ("gpt2", "fp32", (16,)),
        ("gpt2", "bf16", (3,)),
        ("bert", "fp32", (1,)),
        ("bert", "bf16", (3,)),
        ("qwen2_moe", "fp32", (64,)),
        ("qwen2_moe", "bf16", (1,)),
        ("qwen2_moe", "bf16", (16,)),
    ],
    ids=str,
)
def test_every_candidate_runs_and_gives_what_the_default_gives(family, dtype, rows):
    make = make_mixture if family in MIXTURES else make_model
    engine = dualinfer.init_inference(make(family), **{**FUSED, "dtype": dtype})
    runner, device = engine.runner, torch.device("cuda", torch.cuda.current_device())
    ops = KernelOps(device)
    found = cases.tuning_cases(
        runner.spec, runner.params, ops, rows=rows, reaches=(256,), prompts=(100,)
    )
    assert found
    for case in found:
        run, calls = case.prepare()
        assert calls > 0
        expected = run(case.candidates[0])
        for config in case.candidates:
            y = run(config)
            assert torch.equal(run(config), y), (case.key, config)  # the same bits every time
            assert search._agree(y, expected), (case.key, config)


@pytest.mark.alone
def test_clock_measures_what_a_graph_takes():
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.zeros(1 << 28, dtype=torch.uint8, device=device)
    seconds = search.graph_seconds(device)
    whole, half = seconds(lambda: x.add_(1), 9), seconds(lambda: x[: 1 << 27].add_(1), 9)
    assert 1e-5 < half < whole < 1e-2


def test_machine_of_this_device():
    machine = store.Machine.of(torch.device("cuda", torch.cuda.current_device()))
    assert "NVIDIA" in machine.device and machine.processors > 1

"""The torch backend's graphs, times and memory on a GPU; run there with `pytest -m gpu`."""

import copy
import gc
import time

import numpy as np
import pytest
import transformers as hf

torch = pytest.importorskip("torch")

import dualinfer  # noqa: E402
from dualinfer.errors import ArgumentError, ConfigError, GraphError, OutOfMemoryError  # noqa: E402
from dualinfer.ops.caches import Room  # noqa: E402

from .test_gpu import make_model  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
FUSED = {"dtype": "bf16", "replace_with_kernel_inject": True}


def batch(rows=3, tokens=150, seed=1, device="cuda"):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 4000, (rows, tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, : tokens // 4] = 0  # with zeros, so that HF keeps it, captured or not
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def tensors(tree):
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def same(one, other):
    one, other = tensors(one), tensors(other)
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


class Own(torch.nn.Module):
    """Nested inputs and outputs, random numbers on request, and what no graph can hold."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(64, 64)

    def forward(self, x, extra=None, scale=1.0, noise=False, branch=False):
        if branch and x.sum().item() > 0:  # a decision on the host
            return x
        y = self.inner(x["a"] if isinstance(x, dict) else x) * scale
        if extra is not None:
            y = y + extra
        if noise:
            y = y + torch.randn_like(y)
        return {"y": y, "parts": [y, (y.mean(), None)]}


def module_engine(module, **options):
    return dualinfer.init_inference(
        module, **{"dtype": "fp32", "enable_cuda_graph": True} | options
    )


# Fused mode


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_fused_forward_from_a_graph_is_the_uncaptured_one(family, dtype):
    model = make_model(family)
    options = {**FUSED, "dtype": dtype}
    plain = dualinfer.init_inference(model, enable_cuda_graph=False, **options)
    graphs = dualinfer.init_inference(model, enable_cuda_graph=True, **options)
    first, second = batch(), batch(seed=2)
    calls = [
        first,
        second,
        {"input_ids": first["input_ids"]},
        {**first, "output_hidden_states": True},
        batch(2, 33),
        first,
    ]
    expected = [plain(**call) for call in calls]
    kept = [
        {k: v.clone() for k, v in call.items() if k != "output_hidden_states"} for call in calls
    ]
    results = [graphs(**call) for call in calls]
    for out, own in zip(results, expected, strict=True):  # after all: no call changed another's
        assert same(tuple(out.values()), tuple(own.values()))
    for call, before in zip(calls, kept, strict=True):
        assert all(torch.equal(call[k], v) for k, v in before.items())
    assert graphs.report().compilations == 4 and plain.report().compilations == 0
    for call in calls:
        graphs(**call)
    assert graphs.report().compilations == 4
    if graphs.can_generate():
        text = graphs.generate([[5, 6, 7]], max_new_tokens=40, do_sample=False)
        other = plain.generate([[5, 6, 7]], max_new_tokens=40, do_sample=False)
        assert np.array_equal(np.asarray(text.tolist()), np.asarray(other.tolist()))
        assert same(tuple(graphs(**first).values()), tuple(expected[0].values()))


def test_fused_forward_is_not_captured_unless_asked_for():
    engine = dualinfer.init_inference(make_model("bert"), **FUSED)
    engine(**batch())
    assert engine.report().compilations == 0


# Module mode


@pytest.mark.parametrize("family", ["t5", "bert-classifier"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_hf_module_from_a_graph_is_the_uncaptured_one(family, dtype):
    model = make_model(family)
    plain = module_engine(copy.deepcopy(model), dtype=dtype, enable_cuda_graph=False)
    graphs = module_engine(model, dtype=dtype)
    calls = [batch(), batch(seed=2), batch(2, 33), batch()]
    if family == "t5":
        for call in calls:
            call["decoder_input_ids"] = call["input_ids"][:, :9]
            call["decoder_attention_mask"] = torch.ones_like(call["decoder_input_ids"])
            call["decoder_attention_mask"][0, -1] = 0
    expected = [plain(**call) for call in calls]
    results = [graphs(**call) for call in calls]
    for out, own in zip(results, expected, strict=True):
        assert type(out) is type(own) and torch.equal(out.logits, own.logits)
        cache, other = (getattr(x, "past_key_values", None) for x in (out, own))
        assert type(cache) is type(other)
        if cache is not None:
            cache, other = cache.self_attention_cache, other.self_attention_cache
            assert cache.get_seq_length() == 9
            assert torch.equal(cache.layers[1].keys, other.layers[1].keys)
    assert graphs.report().compilations == 2
    if family == "t5":
        options = {"max_new_tokens": 12, "do_sample": False}
        ids = batch()["input_ids"]
        assert torch.equal(graphs.generate(ids, **options), plain.generate(ids, **options))
        assert graphs.report().compilations == 2


def test_own_module_signatures_buffers_and_bound():
    module = Own().cuda()
    reference = copy.deepcopy(module)
    engine = module_engine(module)
    x = torch.randn(4, 64, device="cuda")
    kept = x.clone()
    with torch.no_grad():
        first = engine(x)
        x += 1
        second = engine(x)
        x -= 1
        assert torch.equal(first["y"], reference(kept)["y"])
        assert torch.equal(second["y"], reference(kept + 1)["y"])
        assert first["parts"][0] is first["y"] and first["parts"][1][1] is None
        assert engine.report().compilations == 1
        for i, (args, kwargs) in enumerate(
            [
                ((x,), {"scale": 2.0}),
                ((x,), {"extra": x}),
                ((x[:2],), {}),
                (({"a": x},), {}),
            ]
        ):
            for _ in range(3):
                assert same(engine(*args, **kwargs), reference(*args, **kwargs))
            assert engine.report().compilations == 2 + i
        assert torch.equal(engine(x)["y"], reference(x)["y"])  # a kwarg dropped: its old graph
        assert engine.report().compilations == 5
        for size in range(5, 25):
            y = torch.randn(size, 64, device="cuda")
            assert torch.equal(engine(y)["y"], reference(y)["y"])
        assert len(engine.runner._calls) == 16 and engine.report().compilations == 25
        assert torch.equal(engine(x)["y"], reference(x)["y"])  # the oldest one went
        assert engine.report().compilations == 26
    with torch.inference_mode():
        inside = engine(x)["y"]
    assert torch.equal(engine(x)["y"], inside)


def test_noncontiguous_and_inference_inputs_are_taken():
    module = Own().cuda()
    engine = module_engine(copy.deepcopy(module))
    wide = torch.randn(64, 4, device="cuda")
    with torch.inference_mode():
        given = torch.randn(4, 64, device="cuda")
    with torch.no_grad():
        for x in (wide.t(), given):
            torch.testing.assert_close(engine(x)["y"], module(x)["y"])


def test_arguments_on_the_host_or_unknown_are_refused_by_name():
    engine = module_engine(Own().cuda())
    with pytest.raises(ArgumentError, match=r"args\[0\] lies on cpu.*\.to\('cuda:0'\)"):
        engine(torch.randn(4, 64))
    with pytest.raises(ArgumentError, match="extra is a DynamicCache"):
        engine(torch.randn(4, 64, device="cuda"), extra=hf.DynamicCache())


def test_ways_that_messages_of_graphs_name_work():
    module, x = Own().cuda(), torch.randn(4, 64, device="cuda")
    graphs = module_engine(copy.deepcopy(module))
    plain = module_engine(copy.deepcopy(module), enable_cuda_graph=False)
    with torch.no_grad():
        with pytest.raises(GraphError, match="Set enable_cuda_graph=False to run it without"):
            graphs(x, branch=True)
        assert same(plain(x, branch=True), module(x, branch=True))
        with pytest.raises(ArgumentError, match="Pass a plain dense tensor, or set enable_cuda"):
            graphs(x, extra=x.to_sparse())
        assert same(graphs(x, extra=x), module(x, extra=x))
        with pytest.raises(ArgumentError, match=r"Move it there: args\[0\]\.to\('cuda:0'\)"):
            graphs(x.cpu())
        assert same(graphs(x.cpu().to("cuda:0")), module(x))
    on_host = {"keep_module_on_host": True}
    with pytest.raises(ConfigError, match="Leave keep_module_on_host or enable_cuda_graph unset"):
        module_engine(Own(), **on_host)
    assert module_engine(copy.deepcopy(module)).device.type == "cuda"
    assert module_engine(Own(), **on_host, enable_cuda_graph=None).device.type == "cpu"


def test_a_failed_capture_is_explained_and_leaves_the_device_usable():
    engine = module_engine(Own().cuda())
    other = dualinfer.init_inference(make_model("llama"), **FUSED)
    x = torch.randn(4, 64, device="cuda")
    before = engine(x)["y"]
    stream = torch.cuda.current_stream()
    for _ in range(2):
        with pytest.raises(GraphError, match=r"Own\.forward cannot be captured"):
            engine(x, branch=True)
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.manual_seed(3)
    drawn = torch.randn(5, device="cuda")
    torch.cuda.manual_seed(3)
    assert torch.equal(torch.randn(5, device="cuda"), drawn) and drawn.isfinite().all()
    assert torch.equal(engine(x)["y"], before)
    assert torch.equal(engine(x, scale=3.0)["y"], engine(x, scale=3.0)["y"])  # captured after it
    assert engine.report().compilations in (2, 3)  # the first one again, if it had to go
    other.generate([[1, 2, 3]], max_new_tokens=20, do_sample=False)
    assert other.report().compilations > 0
    torch.cuda.empty_cache()
    torch.cuda.synchronize()


def test_an_error_of_the_module_itself_passes_as_it_is():
    engine = module_engine(Own().cuda())
    with pytest.raises(RuntimeError, match="shape") as error:
        engine(torch.randn(4, 63, device="cuda"))
    assert not isinstance(error.value, GraphError)
    assert engine(torch.randn(4, 64, device="cuda"))["y"].shape == (4, 64)


def test_random_numbers_are_new_in_each_replay_and_the_callers_generator_stays():
    engine = module_engine(Own().cuda())
    x = torch.zeros(4, 64, device="cuda")
    torch.cuda.manual_seed(0)
    before = torch.cuda.get_rng_state()
    replay = engine.runner._calls.ready(engine.runner._untimed, (x,), {"noise": True})
    assert torch.equal(torch.cuda.get_rng_state(), before)  # captured, not yet run
    one, two = replay()["y"], engine(x, noise=True)["y"]
    assert not torch.equal(one, two)
    torch.cuda.manual_seed(0)
    assert torch.equal(engine(x, noise=True)["y"], one)


def test_weights_that_move_are_captured_anew():
    module = Own().cuda()
    engine = module_engine(module)
    x = torch.randn(4, 64, device="cuda")
    engine(x)
    with torch.no_grad():
        module.inner.weight.data = torch.randn(64, 64, device="cuda")
        torch.randn(500, 64, 64, device="cuda")  # what was freed is written over
        assert torch.equal(engine(x)["y"], module(x)["y"])
        module.inner.weight.mul_(2)
        assert torch.equal(engine(x)["y"], module(x)["y"])
    assert engine.report().compilations == 2


def test_float32_is_float32_in_convolutions_too():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Conv2d(64, 64, 3), torch.nn.ReLU())
    x = torch.randn(2, 64, 40, 40)
    exact = copy.deepcopy(module).double()(x.double()).detach()
    engine = dualinfer.init_inference(module, dtype="fp32")
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    try:
        out = engine(x.cuda()).double().cpu()
    finally:
        torch.backends.cudnn.conv.fp32_precision = before
    assert ((out - exact).norm() / exact.norm()) < 1e-6


# Times and profiles


@pytest.mark.alone
@pytest.mark.parametrize("mode", ["fused", "module"])
@pytest.mark.parametrize("graphs", [None, True])
@pytest.mark.parametrize("use_events", [True, False])
def test_model_times_are_positive_and_within_the_whole(mode, graphs, use_events):
    options = {"enable_cuda_graph": graphs, "dtype": "bf16"}
    options["replace_with_kernel_inject"] = mode == "fused"
    engine = dualinfer.init_inference(make_model("gpt2"), **options)
    call = batch()
    engine(**call)  # warm, captured
    engine.generate(call["input_ids"], max_new_tokens=8, do_sample=False, pad_token_id=0)
    engine.profile_model_time(use_cuda_events=use_events)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(5):
        engine(**call)
    ids = call["input_ids"]
    engine.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
    torch.cuda.synchronize()
    whole = (time.perf_counter() - start) * 1e3
    times = engine.model_times()
    print(f"{mode} graphs={graphs} events={use_events}: {times}, whole {whole:.2f}")
    assert len(times) == 5 + 8
    assert all(t > 0 for t in times) and sum(times) <= whole
    engine.profile_model_time(enabled=False)
    engine(**call)
    assert mode == "fused" or "_compiled_call_impl" not in vars(engine.module)


def test_a_capture_is_no_entry():
    engine = module_engine(Own().cuda())
    engine.profile_model_time()
    engine(torch.randn(4, 64, device="cuda"))
    engine(torch.randn(4, 64, device="cuda"))
    assert len(engine.model_times()) == 2


@pytest.mark.parametrize("mode", ["fused", "module"])
def test_kernels_are_named_in_a_profile_of_a_replay(mode):
    fused = mode == "fused"
    model = make_model("bert")
    engine = dualinfer.init_inference(
        model, dtype="bf16", enable_cuda_graph=True, replace_with_kernel_inject=fused
    )
    call = batch()
    engine(**call)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
        engine(**call)
        torch.cuda.synchronize()
    kernels = [
        e.name
        for e in profile.events()
        if e.device_type == torch.autograd.DeviceType.CUDA and not e.name.startswith("Mem")
    ]
    print(len(kernels), sorted(set(kernels))[:20])
    assert any("gemm" in k.lower() or "cutlass" in k.lower() or "nvjet" in k for k in kernels)
    assert len(kernels) > 4 * 4  # of four layers, with no op's range around them
    assert not any(e.name == "dualinfer::matmul" for e in profile.events())


# Memory


@pytest.mark.parametrize("mode", ["fused", "module"])
def test_close_frees_graphs_and_weights(mode):
    model, call = make_model("gpt2"), batch()
    options = {"dtype": "bf16", "enable_cuda_graph": True}
    options["replace_with_kernel_inject"] = mode == "fused"

    def held():
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    after = []
    for _ in range(3):  # the first one leaves cuBLAS' workspaces
        engine = dualinfer.init_inference(model, **options)
        for tokens in (150, 20):
            engine(**{k: v[:, :tokens].contiguous() for k, v in call.items()})
        weights = sum(p.numel() for p in model.parameters()) * 2
        assert torch.cuda.memory_allocated() > weights
        engine.close()
        model.cpu()  # in module mode the module is the caller's, and lies where it was put
        after.append(held())
    assert after[0] == after[1] == after[2]


@pytest.mark.alone
def test_a_cache_larger_than_the_card_is_refused_with_its_size():
    engine = dualinfer.init_inference(make_model("llama"), **FUSED)
    runner = engine.runner
    before = engine.generate([[1, 2, 3]], max_new_tokens=9, do_sample=False)
    free = runner.free_bytes()
    total = torch.cuda.mem_get_info()[1]
    assert 0 < free <= total
    slots = free // runner.cache_bytes_for(1, 2048) + 1
    needed = slots * runner.cache_bytes_for(1, 2048)
    with pytest.raises(OutOfMemoryError, match=f"{needed:,} bytes"):
        runner._slots.cache.grow(Room(slots, 2048))
    again = engine.generate([[1, 2, 3]], max_new_tokens=9, do_sample=False)
    assert again.tolist() == before.tolist()
    held = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    less = runner.free_bytes()
    del held
    assert runner.free_bytes() - less == pytest.approx(2**28, rel=0.05)


def test_module_mode_moves_to_the_card_or_stays_on_the_host():
    model = make_model("gpt2")
    assert dualinfer.init_inference(model, dtype="fp32", keep_module_on_host=True).device.type == (
        "cpu"
    )
    assert model.lm_head.weight.device.type == "cpu"
    engine = dualinfer.init_inference(model, dtype="fp16")
    assert engine.device.type == "cuda" and model.lm_head.weight.is_cuda
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_module_that_stayed_on_the_host_is_followed_to_the_card_and_back():
    module = Own()
    reference = copy.deepcopy(module)
    engine = dualinfer.init_inference(module, dtype="fp32", keep_module_on_host=True)
    x = torch.randn(4, 64)
    for device in ("cpu", "cuda", "cpu"):
        engine.module.to(device)
        with torch.no_grad():
            expected = reference.to(device)(x.to(device))["y"]
        torch.testing.assert_close(engine(x.to(device))["y"], expected)
        assert engine.device.type == device
        engine.profile_model_time()
        engine(x.to(device))
        assert len(engine.model_times()) == 1
        engine.profile_model_time(enabled=False)


@pytest.mark.parametrize("kind", ["part", "parameter", "data", "buffer", "moved"])
def test_graphs_follow_what_the_caller_puts_into_the_module(kind):
    module = Own().cuda()
    module.register_buffer("shift", torch.zeros(64, device="cuda"))
    module.register_forward_hook(lambda m, args, out: {"y": out["y"] + m.shift})
    engine = module_engine(module)
    x = torch.randn(4, 64, device="cuda")
    before = engine(x)["y"]
    other = torch.nn.Linear(64, 64).cuda()
    if kind == "part":
        module.inner = other
    elif kind == "parameter":
        module.inner.weight = other.weight
    elif kind == "data":
        module.inner.weight.data = other.weight.data
    elif kind == "buffer":
        module.shift = torch.ones(64, device="cuda")
    else:
        engine.to("cpu")
        with pytest.raises(ConfigError, match="stays on cpu"):
            engine(x)
        engine.to("cuda")
    with torch.no_grad():
        expected = module(x)["y"]
    assert torch.equal(engine(x)["y"], expected) and engine.report().compilations == 2
    assert torch.equal(before, expected) == (kind == "moved")

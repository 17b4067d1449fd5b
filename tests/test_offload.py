"""Layers in host memory that are streamed to the device: the same answers, in two buffers."""

import functools
import importlib
import types
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
import pytest
import torch

import dualinfer
from dualinfer import ConfigError, UnsupportedError
from dualinfer.backends.jax import streaming as jax_streaming
from dualinfer.backends.streaming import check_host, choose_layers, spread
from dualinfer.backends.torch import streaming as torch_streaming
from dualinfer.config import make_config
from dualinfer.config.refusals import check_config
from dualinfer.errors import OutOfMemoryError
from dualinfer.model.families import describe_model
from dualinfer.parallel.shard import whole

from .cases import make_model
from .models import BACKENDS, random_ids, relative_rms

LAYERS = 5
IDS = random_ids(2, 7)
GREEDY = {"max_new_tokens": 6, "do_sample": False}
SAMPLED = {"max_new_tokens": 6, "do_sample": True, "seed": 3}
ZERO = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}


def make(model, backend, **fields):
    return dualinfer.init_inference(
        model, backend=backend, dtype="fp32", replace_with_kernel_inject=True, **fields
    )


def streamed(model, backend, resident=0, **fields):
    more = {"keep_module_on_host": True, "resident_layers": resident}
    return make(model, backend, **more, **fields)


def answers(engine, ids=IDS):
    outputs = engine(ids, output_hidden_states=True)
    found = [np.asarray(outputs[0]), *map(np.asarray, outputs.hidden_states)]
    if engine.runner.spec.can_generate:
        return [*found, *(engine.generate(ids, **how) for how in (SAMPLED, GREEDY))]
    return found


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture(scope="module")
def model():
    return make_model("llama-gqa", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def expected(model):
    """What the resident engine answers, by backend."""
    made = {}

    def get(backend):
        if backend not in made:
            with make(model, backend) as engine:
                assert engine.report().streamed_bytes == 0
                made[backend] = answers(engine)
        return made[backend]

    return get


@pytest.fixture(scope="module", params=BACKENDS)
def engine(request, model):
    with streamed(model, request.param) as made:
        yield made


def test_answers_are_those_of_the_resident_engine_bit_for_bit(engine, expected):
    assert_same(answers(engine), expected(engine.inference_config.backend))
    report = engine.report()
    assert 0.5 * report.parameter_bytes < report.streamed_bytes < report.parameter_bytes
    assert any(f"matrices of {LAYERS} of {LAYERS} layers" in note for note in report.notes)


def test_each_layer_is_copied_once_in_a_pass_and_before_it_is_asked_for(engine, monkeypatch):
    stream, backend = engine.runner._stream, engine.inference_config.backend
    engine(IDS, output_hidden_states=True)
    copied, ready = [], []
    if backend == "torch":
        copy, enter = stream._copy, stream._enter
        monkeypatch.setattr(stream, "_copy", lambda n, b: (copied.append(n), copy(n, b)))
        monkeypatch.setattr(
            stream, "_enter", lambda i: (ready.append(i in stream._held), enter(i))[1]
        )
    else:
        copy, take = jax_streaming.to_device, stream.take
        monkeypatch.setattr(
            jax_streaming, "to_device", lambda layer: (copied.append(layer), copy(layer))[1]
        )
        monkeypatch.setattr(stream, "take", lambda i: (ready.append(i in stream._held), take(i))[1])
    for _ in range(3):
        engine(IDS, output_hidden_states=True)
        assert len(stream._held) <= 2
    assert len(copied) == 3 * LAYERS and ready == [True] * 3 * LAYERS


def test_a_pass_that_fails_half_way_costs_nothing_but_itself(engine, expected, monkeypatch):
    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if engine.inference_config.backend == "torch":
            attention = engine.runner.ops.layer_attention
            own = lambda s, p, i: fail() if i == 3 else attention(s, p, i)  # noqa: E731
            patch.setattr(engine.runner.ops, "layer_attention", own)
        else:
            layer = engine.runner._layer
            patch.setattr(engine.runner, "_layer", lambda i: fail() if i == 3 else layer(i))
        for call in (answers, lambda engine: engine.generate(IDS, **GREEDY)):
            with pytest.raises(KeyboardInterrupt):
                call(engine)
    assert_same(answers(engine), expected(engine.inference_config.backend))


def test_no_pass_runs_for_sequences_that_have_ended(engine, monkeypatch):
    ids = IDS[[0, 0]]
    text = engine.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)[0]
    is_torch, passes = engine.inference_config.backend == "torch", []
    owner, name = (engine.runner._steps, "_step") if is_torch else (engine.runner, "_advance")
    run = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *a: (passes.append(1), run(*a))[1])
    engine.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=int(text[-1]))
    assert len(passes) <= 3


def test_what_takes_all_weights_at_once_is_refused(engine, model):
    if engine.inference_config.backend == "torch":
        with pytest.raises(UnsupportedError, match=r"compile\(\): layers are streamed"):
            engine.compile()
        return

    def gradients(engine):
        loss = lambda params: engine.apply(params, IDS)[0].sum()  # noqa: E731
        return jax.eval_shape(jax.grad(loss), engine.params)

    with pytest.raises(UnsupportedError, match=r"engine\.apply .* keep_module_on_host=False"):
        gradients(engine)
    with make(model, "jax", keep_module_on_host=False) as other:
        found = gradients(other)["layers"][0]["qkv"]["weight"]
    assert found.shape == engine.model.layers[0].qkv.weight.shape
    with pytest.raises(UnsupportedError, match="streamed from the host's memory"):
        engine.compile(compile_kwargs={"batch_sizes": [1], "prompt_lengths": [4], "new_tokens": 2})
    engine.compile()
    layer = engine.model.layers[1]
    assert layer.qkv.weight[...].sharding.memory_kind == "pinned_host"
    assert layer.q.shape[1] == layer.qkv.weight.shape[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_refresh_reaches_what_is_on_the_host(backend):
    model = make_model("llama-gqa", num_hidden_layers=3)
    with streamed(model, backend) as engine:
        before = np.asarray(engine(IDS).logits)
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(2)
            wanted = model(torch.from_numpy(IDS)).logits.numpy()
        engine.refresh()
        found = np.asarray(engine(IDS).logits)
        assert relative_rms(found, wanted) < 1e-5 < relative_rms(before, wanted)


# Which layers


def test_streamed_layers_lie_at_even_distances():
    assert spread(4, 8) == (1, 3, 5, 7)
    assert spread(8, 8) == tuple(range(8))
    assert spread(2, 8) == spread(0, 8) == ()
    for count in range(3, 30):
        assert len(spread(count, 29 + 1)) == count


@functools.cache
def deep():
    config = make_model("llama-gqa", num_hidden_layers=20).config
    return describe_model(config.to_dict(), config.architectures)[1]


def choose(free, on_cpu=False, **fields):
    table = deep()
    asked = make_config({"keep_module_on_host": True, **fields}, {})
    return choose_layers(asked, whole(table), table.rows, 4, free, on_cpu)


def test_as_many_layers_stay_as_fit_beside_the_cache():
    whole_model = choose(None, resident_layers=0)
    layer = whole_model.sizes[0]
    assert whole_model.streamed == 20 * layer and whole_model.buffers == 2 * layer
    assert choose(10**12).layers == ()
    assert len(choose(None).layers) == 20
    many = [len(choose(4 * 10**6 + n * layer).layers) for n in range(0, 40, 4)]
    assert many == sorted(many, reverse=True) and len({*many}) > 4
    asked = choose(10**9, resident_layers=17)
    assert len(asked.layers) == 3 and not choose(10**9, resident_layers=18).layers
    assert not choose(10**9, resident_layers=99).layers


def test_a_cpu_streams_only_where_resident_layers_is_set():
    assert choose(10**9, on_cpu=True) is None
    assert choose(10**9, on_cpu=True, resident_layers=0).layers
    assert choose(10**9, keep_module_on_host=False) is None


def test_what_does_not_fit_all_the_same_is_said_with_bytes():
    with pytest.raises(OutOfMemoryError, match=r"20 of 20 layers.*needs [\d,]+ bytes.*1,000 are"):
        choose(1000)
    with pytest.raises(OutOfMemoryError, match="Lower resident_layers"):
        choose(1000, resident_layers=4)
    with pytest.raises(OutOfMemoryError, match="resident_layers"):
        check_host(choose(None, resident_layers=0), 1000, 1)
    size = choose(None, resident_layers=0).streamed
    check_host(choose(None, resident_layers=0), 2 * size, 2)
    with pytest.raises(OutOfMemoryError, match=f"{3 * size:,} bytes of host memory"):
        check_host(choose(None, resident_layers=0), 2 * size, 3)


def test_memory_that_cannot_be_pinned_is_an_error_of_ours(monkeypatch):
    runtime = types.SimpleNamespace(
        cudaHostRegister=lambda *_: 2,
        cudaError=lambda code: code,
        cudaGetErrorString=lambda code: "out of memory",
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "_cudart", runtime, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)
    with pytest.raises(OutOfMemoryError, match=r"4,096 bytes.*cannot be pinned.*ulimit -l"):
        torch_streaming._pinned(4096, torch.device("cuda"))

    def full(array, kind):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of host memory")

    monkeypatch.setattr(jax_streaming, "_moved", full)
    with pytest.raises(OutOfMemoryError, match="XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"):
        jax_streaming.to_host(jax.numpy.zeros(4))


# The config


def test_zeros_stage_3_on_the_cpu_is_keep_module_on_host():
    assert make_config({"zero": ZERO}, {}).streams
    assert make_config({"keep_module_on_host": True}, {}).streams
    assert not make_config({"zero": {"stage": 0, "offload_param": {"device": "none"}}}, {}).streams


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"keep_module_on_host": True, "resident_layers": -1}, "resident_layers"),
        ({"keep_module_on_host": False, "zero": ZERO}, "asks for the contrary"),
        ({"zero": {"stage": 3}}, "stage=3 with offload_param.device='none'.*tp_size"),
        ({"zero": {"stage": 0, "offload_param": {"device": "cpu"}}}, "stage=0 with"),
        ({"zero": {"stage": 2}}, "expected 0 or 3"),
        ({"zero": {"stage": 3, "offload_param": {"device": "nvme"}}}, "none.*cpu"),
        ({"zero": {**ZERO, "offload_param": {"device": "cpu", "pin_memory": False}}}, "overlap"),
        ({"zero": {**ZERO, "offload_optimizer": {}}}, "unknown key"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused_by_name(fields, message):
    with pytest.raises(ConfigError, match=message):
        make_config(fields, {})


@pytest.mark.parametrize(
    ("fields", "mode", "message"),
    [
        ({"enable_cuda_graph": True}, "fused", "enable_cuda_graph=True: with weights on the host"),
        ({"triton_autotune": True}, "fused", "triton_autotune=True: the search measures"),
        (
            {"keep_module_on_host": False, "resident_layers": 3},
            *("fused", "resident_layers=3: without keep_module_on_host=True"),
        ),
        ({"resident_layers": 0}, "module", "resident_layers=0: layers are streamed in fused"),
        ({"zero": ZERO}, "module", "zero=.*layers are streamed in fused mode only"),
        ({"zero": ZERO, "backend": "jax"}, "module", "only. A Flax module runs as it is"),
    ],
    ids=str,
)
def test_options_that_exclude_each_other_are_refused_by_name(fields, mode, message, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    base = {"keep_module_on_host": True, "replace_with_kernel_inject": mode == "fused"}
    with pytest.raises(ConfigError, match=message):
        check_config(make_config({**base, **fields}, {}), mode, "cuda")


# Slower


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "quant"),
    [*(("torch", quant) for quant in ("int8", "int4", "fp8")), ("jax", "int4")],
)
def test_codes_are_streamed_as_they_are(backend, quant, model):
    with make(model, backend, quant=quant) as one, streamed(model, backend, quant=quant) as other:
        assert_same(answers(other), answers(one))
        assert other.report().weights == one.report().weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *(("torch", name) for name in ("gpt2", "gemma2", "opt", "bert", "neox")),
        *(("jax", name) for name in ("gemma2", "bert")),
    ],
)
def test_other_families_stream(backend, name):
    model = make_model(name, num_hidden_layers=4)
    with make(model, backend) as one, streamed(model, backend, resident=1) as other:
        assert other.report().streamed_bytes
        assert_same(answers(other), answers(one))


def _ranks_answers():
    model = make_model("llama-gqa", num_hidden_layers=LAYERS)
    tp = {"tensor_parallel": {"tp_size": 2}}
    with make(model, "torch", **tp) as one, streamed(model, "torch", resident=1, **tp) as other:
        return answers(one), answers(other), other.report().streamed_bytes


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_a_rank_streams_its_share(crew, model):
    with streamed(model, "torch", resident=1) as engine:
        alone = engine.report().streamed_bytes
    ranks = crew.run(_ranks_answers, world=2)
    for one, other, _ in ranks:
        assert_same(other, one)
    assert sum(size for *_, size in ranks) == alone  # heads and columns divide unevenly


@pytest.mark.slow
def test_each_of_jaxs_devices_streams_its_share(model):
    tp = {"tensor_parallel": {"tp_size": 2}}
    with make(model, "jax", **tp) as one, streamed(model, "jax", resident=1, **tp) as other:
        assert_same(answers(other), answers(one))


@pytest.mark.slow
def test_many_rows_go_in_panels_on_jax(model, monkeypatch):
    with make(model, "jax") as one:
        wanted = answers(one, random_ids(5, 20))
    monkeypatch.setattr("dualinfer.backends.jax.whole.most_tokens", lambda *_: 64)
    with streamed(model, "jax") as engine:
        for found, other in zip(answers(engine, random_ids(5, 20)), wanted, strict=True):
            np.testing.assert_allclose(found, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_weights_that_find_no_room_are_an_error_that_says_how_much_they_need(backend, monkeypatch):
    """No CPU runs out of memory for a test: the frameworks' own errors stand in for that."""
    module = importlib.import_module(f"dualinfer.backends.{backend}")
    if backend == "torch":
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        ways = "Free what other work"
    else:
        error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying")
        ways = "XLA_PYTHON_CLIENT_MEM_FRACTION=.95"

    def load(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(module, "load_params", load)
    model = make_model("gpt2", vocab_size=101)
    size = 4 * sum(p.numel() for p in model.parameters())
    with pytest.raises(OutOfMemoryError, match=rf"holds {size:,} bytes.*{ways}.*quant="):
        make(model, backend)

"""Fused mode on several devices of one JAX process: the same answers as on one, and what they cost.

The devices are virtual ones of the CPU, which conftest.py asks XLA for.
"""

import functools
import gc
import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")

import dualinfer  # noqa: E402
from dualinfer import opening  # noqa: E402
from dualinfer.backends import jax as backend  # noqa: E402
from dualinfer.backends.base import Piece, Request, Sampling  # noqa: E402
from dualinfer.backends.jax import ahead, cache  # noqa: E402
from dualinfer.backends.jax.mesh import ManyDevices, OneDevice  # noqa: E402
from dualinfer.backends.jax.ops.kernels import KernelOps  # noqa: E402
from dualinfer.checkpoint.sources import open_checkpoint  # noqa: E402
from dualinfer.errors import (  # noqa: E402
    ArgumentError,
    ClosedError,
    ConfigError,
    OutOfMemoryError,
    UnsupportedError,
)
from dualinfer.kernels.triton import linear  # noqa: E402
from dualinfer.ops.caches import Room, check_room  # noqa: E402
from dualinfer.parallel.agreement import Peers  # noqa: E402

from .cases import make_model  # noqa: E402
from .cases.decoders import CASES  # noqa: E402
from .checkpoints import EMBED, HEAD_DIM, HEADS, KV_HEADS, write_llama  # noqa: E402
from .kernels.jax_ops import calls_for_cuda, gpu, interpreted_ops  # noqa: E402
from .models import VOCAB, random_ids, relative_rms, slow_but  # noqa: E402

pytestmark = [
    pytest.mark.xdist_group("mesh"),  # engines serve several tests
    pytest.mark.skipif(
        jax.default_backend() != "cpu" or jax.device_count() < 4,
        reason="needs four virtual devices: XLA_FLAGS=--xla_force_host_platform_device_count=4",
    ),
]
OPTIONS: dict[str, Any] = {"backend": "jax", "dtype": "fp32", "replace_with_kernel_inject": True}
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
# One layer, where layers are alike.
MAIN: dict[str, dict[str, int]] = {
    "llama-gqa": {"num_hidden_layers": 2},
    "gpt2": {"n_layer": 1},
    "bert-masked": {"num_hidden_layers": 1},
    "bloom": {"n_layer": 1},
    "gptj": {"n_layer": 1},
    "gemma2": {},
}


@pytest.fixture(scope="module")
def engines():
    """A function from a case and a number of devices to an engine, one for all tests."""
    made: dict[Any, Any] = {}
    model = functools.cache(lambda name: make_model(name, **MAIN.get(name, {})))

    def get(name: str, devices: int) -> Any:
        if (name, devices) not in made:
            made[name, devices] = make(model(name), tensor_parallel={"tp_size": devices})
        return made[name, devices]

    return get


@pytest.fixture(scope="module")
def llama():
    """The model of `engines("llama-gqa", ...)`."""
    return make_model("llama-gqa", **MAIN["llama-gqa"])


def make(model: Any, **options: Any) -> Any:
    """An engine of its own."""
    return dualinfer.init_inference(model, **OPTIONS | options)


@pytest.fixture(scope="module")
def answers(engines):
    """A function from a case and a number of devices to logits of padded rows, and two texts.

    A greedy and a sampled one, by one prefill and one decode: compiling is what takes time.
    """
    made: dict[Any, Any] = {}
    ids = random_ids(2, 11)
    mask = np.ones_like(ids)
    mask[1, :4] = 0
    sampling = Sampling(do_sample=True, temperature=1.3, seed=5)
    requests = [
        Request(ids[0].astype(np.int32), 9),
        Request(ids[1, 4:].astype(np.int32), 9, sampling=sampling),
    ]

    def get(name: str, devices: int) -> Any:
        if (name, devices) not in made:
            engine = engines(name, devices)
            logits = np.asarray(engine(ids, attention_mask=mask).logits)
            text = np.zeros((0, 2))
            if engine.can_generate():
                runner = engine.runner
                if name == "llama-gqa" and devices == 2:
                    assert runner.extend([Piece(requests[0], 0, 0, 4)]).fetch().shape == (1, 0)
                    later = [Piece(requests[0], 0, 4, 11), Piece.whole(requests[1], 1)]
                    first = runner.extend(later).fetch()
                else:
                    first = runner.prefill(requests, [0, 1]).fetch()
                text = np.concatenate((first, runner.decode(8).fetch()))
                runner.release([0, 1])
            made[name, devices] = logits[mask > 0], text
        return made[name, devices]

    return get


SHARED = [(name, 2) for name in ("llama-gqa", "bert-masked", "gemma2")]
# Each number of devices, and each model; each with each shows nothing else.
SHARED += [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (
        *(("llama-gqa", 3), ("llama-gqa", 4), ("bert-masked", 3), ("gemma2", 4), ("gpt2", 2)),
        *(("gpt2", 4), ("bloom", 3), ("bloom", 4), ("gptj", 2), ("gptj", 3)),
    )
]


# How the others' weights are cut is torch's plan as well, over all models.
@pytest.mark.parametrize(("name", "devices"), SHARED)
def test_answers_are_those_of_one_device(name, devices, answers):
    logits, text = answers(name, devices)
    expected, expected_text = answers(name, 1)
    assert relative_rms(logits, expected) < 1e-5
    np.testing.assert_array_equal(text, expected_text)
    assert len(np.unique(text)) > 6 or not len(text)


# Devices beyond the KV heads, and beyond all heads; projections beside the embedding; norms of
# heads; biases; models without a head.
_ODD = [("llama-mqa", 4), ("llama-bias", 4), ("gemma2-uncapped", 3), ("opt-post", 3), ("neox", 4)]
_ODD += [("qwen3", 4), ("gptj-headless", 2), ("bert", 3), ("bloom-headless", 2)]


@pytest.mark.parametrize(("name", "devices"), _ODD)
def test_odd_models_give_the_hidden_states_of_hf(name, devices, engines):
    model, ids = make_model(name), random_ids(2, 9)
    with torch.no_grad():
        expected = model(torch.tensor(ids), output_hidden_states=True)
    found = engines(name, devices)(ids, output_hidden_states=True)
    output = "logits" if CASES[name].has_head else "last_hidden_state"
    assert relative_rms(found[output], expected[output]) < 1e-5
    for state, wanted in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert relative_rms(state, wanted) < 1e-5


def test_packed_rows_and_token_types_of_the_vocabulary(engines):
    ids = random_ids(1, 12)
    at = np.array([[*range(7), *range(5)]])
    one, many = (
        engines("gpt2", n)(ids, position_ids=at, token_type_ids=ids[:, ::-1], use_cache=False)
        for n in (1, 3)
    )
    assert relative_rms(many.logits, one.logits) < 1e-5


def test_streams_open_at_once_grow_the_cache(engines, monkeypatch):
    monkeypatch.setattr("dualinfer.backends.slots.RESERVED", 8)
    prompts = random_ids(2, 5).tolist()
    texts = []
    with make(make_model("gpt2", **MAIN["gpt2"]), backend="torch") as alone:
        for engine in (alone, engines("gpt2", 2)):
            first = engine.stream([prompts[0]], max_new_tokens=70, **GREEDY)
            found = [next(first) for _ in range(3)]
            second = engine.generate([prompts[1]], max_new_tokens=4, **GREEDY)
            full = engine.generate(random_ids(1, 128), max_new_tokens=1, **GREEDY)  # all positions
            rows = np.asarray(second)[0].tolist(), np.asarray(full)[0].tolist()
            texts.append([*found, *first, *rows])
    assert texts[0] == texts[1]


def test_bfloat16_is_as_near_to_float32_as_on_one_device():
    model = make_model("llama-gqa", num_hidden_layers=1).bfloat16().float()
    ids = random_ids(2, 9)
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits
    errors = []
    for devices in (1, 3):
        with make(model, dtype="bf16", tensor_parallel={"tp_size": devices}) as engine:
            found = np.asarray(engine(ids).logits, np.float32)
            errors.append(relative_rms(found, expected))
    assert errors[1] < 1.1 * errors[0] < 0.05


# What is compiled

_COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)\(")


def collectives(executable: Any) -> dict[str, int]:
    """How often each kind of collective stands in the compiled code."""
    found = _COLLECTIVE.findall(executable.as_text().replace("-start(", "("))
    return {kind: found.count(kind) for kind in set(found)}


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2"])
def test_a_layer_costs_two_all_reduces(name):
    """One more for the embedding, and one all-gather for the logits, in each step."""
    model = make_model(name, **MAIN[name])
    with make(model, tensor_parallel={"tp_size": 2}) as engine:
        layers = engine.report().layers
        engine(random_ids(1, 5))
        engine.generate([[5, 6, 7]], max_new_tokens=3, **GREEDY)
        made = engine.runner._executables._made
        assert sorted(key[0] for key in made) == ["decode", "forward", "prefill"]
        for executable in made.values():
            assert collectives(executable) == {"all-reduce": 2 * layers + 1, "all-gather": 1}


def test_the_cache_is_split_over_heads_and_donated(engines):
    engine = engines("llama-gqa", 3)
    engine.generate([[5, 6, 7]], max_new_tokens=3, **GREEDY)
    cache = engine.runner._slots.cache.layers
    assert cache[0].k.shape[1] == 3 and cache[0].k.addressable_data(0).shape[1] == 1
    shape = ",".join(map(str, cache[0].k.addressable_data(0).shape))
    made = {key[0]: x for key, x in engine.runner._executables._made.items()}
    for step in ("prefill", "decode"):
        (head,) = re.findall("^HloModule .*$", made[step].as_text(), re.MULTILINE)
        aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", head)
        layout = re.search(r"entry_computation_layout=\{\((.*)\)->", head)
        assert aliases and layout
        given = re.findall(r"\w+\[[\d,]*\]", layout[1])
        taken = [given[int(at)] for at in re.findall(r": \((\d+), \{\}", aliases[1])]
        assert taken.count(f"f32[{shape}]") == 2 * len(cache)


def test_what_was_compiled_ahead_serves_the_request(llama, engines):
    with make(llama, tensor_parallel={"tp_size": 2}) as engine:
        wanted = {"batch_sizes": [1], "prompt_lengths": [5], "new_tokens": 4}
        engine.compile(compile_kwargs=wanted)
        before = engine.report().compilations
        ids = random_ids(1, 5)
        text = engine.generate(ids, max_new_tokens=4, **GREEDY)
        assert engine.report().compilations == before == 2
    expected = engines("llama-gqa", 1).generate(ids, max_new_tokens=4, **GREEDY)
    np.testing.assert_array_equal(text, expected)


def test_one_device_is_as_it_was(engines):
    engine = engines("llama-gqa", 1)
    assert isinstance(engine.runner._place, OneDevice) and engine.runner.steps.ops.split is None
    for executable in engine.runner._executables._made.values():
        assert not collectives(executable)


# Kernels

_SMALL: dict[str, dict[str, Any]] = {
    "llama-gqa": {"hidden_size": 24, "intermediate_size": 33, "num_hidden_layers": 1},
    "bloom": {"hidden_size": 30, "n_head": 3, "n_layer": 1},
}


@pytest.mark.filterwarnings("ignore:.*encountered in .*:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("name", slow_but(["llama-gqa"], _SMALL))
def test_kernels_on_each_device_give_what_one_plain_device_gives(name, monkeypatch):
    monkeypatch.setattr(linear, "serves", lambda *shape: True)
    model = make_model(name, vocab_size=97, **_SMALL[name])
    plain = make(model)
    monkeypatch.setattr(backend, "_make_ops", lambda *args: interpreted_ops(args[3]))
    fast = make(model, tensor_parallel={"tp_size": 2})
    text, expected = (e.generate([[5, 6, 7]], max_new_tokens=5, **GREEDY) for e in (fast, plain))
    np.testing.assert_array_equal(text, expected)


@pytest.mark.parametrize("name", _SMALL)
def test_steps_of_kernels_lower_for_cuda_on_two_devices(name, monkeypatch):
    model = make_model(name, vocab_size=97, **_SMALL[name])
    monkeypatch.setattr(backend, "_make_ops", lambda *args: KernelOps(gpu(), split=args[3]))
    engine = make(model, dtype="bf16", tensor_parallel={"tp_size": 2})
    jobs = ahead.jobs(engine.runner, ahead.Wanted((1,), (5,), 4), 4)
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=132, platform="gpu")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((2,), ("tp",), axis_types=auto, abstract_device=device)
    engine.runner._place = ManyDevices(mesh, "tp")
    for job in jobs:
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), job.args)
        with jax.sharding.use_abstract_mesh(mesh):
            calls, text = calls_for_cuda(job.function, args, monkeypatch)
        assert calls and "stablehlo.all_reduce" in text
        if job.key[0] == "decode":  # keys, values and counters are written where they are
            attending = [c.changed for c in calls if "decode_attention_kernel" in c.kernels]
            assert attending and set(attending) == {3}


# Weights


def test_each_device_reads_its_share_alone(tmp_path, monkeypatch):
    """Together they read the file once; what all hold is read once as well."""
    read: dict[str, list[Any]] = {}

    class Watched:
        def __init__(self, source):
            self._source = source

        def __getattr__(self, name):
            return getattr(self._source, name)

        def read(self, name, index=None):
            array = self._source.read(name, index)
            read.setdefault(name, []).append(array.shape)
            return array

    monkeypatch.setattr(opening, "open_checkpoint", lambda path: Watched(open_checkpoint(path)))
    folder = write_llama(tmp_path, 257)
    with make(folder, tensor_parallel={"tp_size": 3}) as engine:
        heads = HEADS // KV_HEADS * HEAD_DIM
        layer = "model.layers.0."
        assert read[layer + "self_attn.q_proj.weight"] == [(heads, EMBED)] * 3
        assert read[layer + "self_attn.k_proj.weight"] == [(HEAD_DIM, EMBED)] * 3
        assert read[layer + "self_attn.o_proj.weight"] == [(EMBED, heads)] * 3
        assert sorted(read["lm_head.weight"]) == [(1, EMBED), (128, EMBED), (128, EMBED)]
        assert read[layer + "input_layernorm.weight"] == [(EMBED,)]
        held = {x.devices().pop() for x in jax.live_arrays() if x.shape == (128, EMBED)}
        assert held <= set(jax.devices()[:3])
        report = engine.report()
    with make(folder) as one:
        whole = one.report().parameter_bytes
    assert whole / 3 < report.parameter_bytes < whole / 2
    (note,) = (n for n in report.notes if "tensor parallel" in n)
    assert "3 devices" in note and "query heads 2 of 6" in note and "vocabulary 128 of 257" in note
    assert report.device == "cpu:0, 1, 2"


def test_the_report_says_what_every_device_has(llama, engines):
    norms = sum(4 * p.numel() for n, p in llama.named_parameters() if "norm" in n)
    (note,) = (n for n in engines("llama-gqa", 2).report().notes if "tensor parallel" in n)
    assert "over 2 devices; each holds, padding included, query heads " in note
    assert f"and {norms:,} bytes of weights that all have" in note


def test_params_are_sharded_arrays_and_model_shows_them(engines):
    engine = engines("llama-gqa", 2)
    qkv = engine.params["layers"][0]["qkv"]["weight"]
    heads, kv_heads, dim = 4, 2, 80  # of each device
    assert qkv.shape == (2 * (heads + 2 * kv_heads) * dim, 96)
    assert [s.data.shape for s in qkv.addressable_shards] == [(640, 96)] * 2
    assert engine.params["final_norm"]["weight"].sharding.is_fully_replicated
    whole = engines("llama-gqa", 1).model.layers[0]
    layer = engine.model.layers[0]
    np.testing.assert_array_equal(layer.q[: 6 * dim], whole.q)
    np.testing.assert_array_equal(layer.k[: 3 * dim], whole.k)
    np.testing.assert_array_equal(layer.v[: 3 * dim], whole.v)
    assert not np.asarray(layer.q[6 * dim :]).any()


def test_apply_runs_within_jit_on_all_devices(engines):
    engine = engines("llama-gqa", 2)
    ids = random_ids(2, 5)
    expected = engines("llama-gqa", 1)(ids).logits
    apply = jax.jit(lambda params, ids: engine.apply(params, ids).logits)
    found = apply(engine.params, ids)
    assert relative_rms(found, expected) < 1e-5 and len(found.devices()) == 2
    outside = ids.copy()
    outside[0, 1], outside[1, 3] = VOCAB + 5, -3  # which are clipped, as nothing can be raised
    clipped = apply(engine.params, np.clip(outside, 0, VOCAB - 1))
    np.testing.assert_array_equal(apply(engine.params, outside), clipped)
    rows = jax.jit(jax.vmap(lambda row: engine.apply(engine.params, row).logits[0]))(ids)
    assert relative_rms(rows, expected) < 1e-5
    with pytest.raises(ArgumentError, match=r"qkv\.weight"):
        engine.apply(engines("llama-gqa", 1).params, ids)
    with pytest.raises(UnsupportedError, match=r"jax\.jit"):
        jax.jit(engine.forward)(ids)


def test_results_lie_on_the_engines_device(engines):
    engine = engines("llama-gqa", 2)
    logits = engine(jax.numpy.asarray(random_ids(1, 5))).logits
    assert logits.devices() == {engine.device} == {jax.devices()[0]}
    assert engine(torch.tensor(random_ids(1, 5))).logits.shape == (1, 5, VOCAB)


# Which devices


def test_a_mesh_of_the_callers_and_its_other_axes(llama, engines):
    mesh = jax.make_mesh((2, 2), ("data", "model"))  # of explicit axes
    ids = random_ids(2, 5)
    expected = engines("llama-gqa", 1)(ids).logits
    with make(llama, tensor_parallel={"mesh": mesh, "axis": "model"}) as engine:
        assert engine.runner._place.size == 2 and engine.report().device == "cpu:0, 1, 2, 3"
        assert relative_rms(engine(ids).logits, expected) < 1e-5
        for other in (mesh, jax.make_mesh((4,), ("x",))):
            with jax.set_mesh(other):
                assert relative_rms(engine(ids).logits, expected) < 1e-5
        with jax.set_mesh(mesh):
            found = jax.jit(lambda p: engine.apply(p, ids).logits)(engine.params)
            assert relative_rms(found, expected) < 1e-5
            with pytest.raises(UnsupportedError, match=r"jax\.jit"):
                jax.jit(engine.forward)(ids)
            fields = {"mesh": mesh, "axis": "model"}
            with make(llama, tensor_parallel=fields) as made_within:
                assert relative_rms(made_within(ids).logits, expected) < 1e-5
    alone = jax.sharding.Mesh(np.array(jax.devices()[2:3]), ("tp",))
    with make(llama, tensor_parallel={"mesh": alone}) as engine:
        assert engine.device == jax.devices()[2]
    copies = {"mesh": jax.make_mesh((2, 1), ("data", "tp"))}
    with make(llama, tensor_parallel=copies) as engine:
        assert isinstance(engine.runner._place, ManyDevices)
        assert relative_rms(engine(ids).logits, expected) < 1e-5


def test_the_axis_of_a_mesh_is_found_by_its_name(llama, engines):
    """Wherever it stands: here each share lies on two devices beside each other."""
    mesh = jax.make_mesh((2, 2), ("tp", "data"))
    with make(llama, tensor_parallel={"mesh": mesh}) as engine:
        ids = random_ids(2, 5)
        assert relative_rms(engine(ids).logits, engines("llama-gqa", 1)(ids).logits) < 1e-5
        shards = engine.params["layers"][0]["qkv"]["weight"].addressable_shards
        held = {shard.device.id: np.asarray(shard.data) for shard in shards}
    (first, second), (third, fourth) = [[held[d.id] for d in row] for row in mesh.devices]
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(third, fourth)
    assert not np.array_equal(first, third)


@pytest.mark.parametrize(("platform", "free"), [("cpu", 100), ("gpu", 400)])
def test_devices_of_a_host_share_its_memory(monkeypatch, platform, free):
    devices = [SimpleNamespace(platform=platform, free=n) for n in (400, 900, 700, 500)]
    monkeypatch.setattr(cache, "free_bytes", lambda device: device.free)
    place: Any = SimpleNamespace(devices=devices, device=devices[0])
    assert cache.least_free_bytes(place) == free


@pytest.mark.parametrize("others", [10, None, 1000])
def test_a_cache_must_have_room_in_every_process(others):
    class Two(Peers):
        size = 2

        def exchange(self, message):
            own = json.loads(message)
            other = own | {"said": own["said"] | {"free": others}}
            return [message, json.dumps(other).encode()]

    least = 10 if others == 10 else 300
    check_room(Two(), Room(2, 16), least, 300, "cpu:0")
    with pytest.raises(OutOfMemoryError, match=rf"\b{least:,} "):
        check_room(Two(), Room(2, 16), least + 1, 300, "cpu:0")


def test_devices_that_cannot_be_are_refused(llama):
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    manual = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Manual,))
    twice = jax.sharding.Mesh(np.array([jax.devices()[0]] * 2), ("tp",))
    for tp, message in [
        ({"tp_size": 5}, r"tp_size=5, but JAX has 4 cpu devices.*device_count=5 before"),
        ({"mesh": mesh}, r"axis='tp', but the mesh has the axes 'data', 'model'"),
        ({"mesh": twice}, "a device more than once"),
        ({"mesh": manual}, "has manual axes"),
        ({"mesh": mesh, "axis": "model", "tp_size": 4}, "tp_size=4, but the mesh has 2"),
        ({"mesh": "2x2"}, r"mesh='2x2': expected a jax\.sharding\.Mesh"),
        ({"tp_size": 4, "enabled": False}, None),
    ]:
        if message is None:
            with make(llama, tensor_parallel=tp) as engine:
                assert engine.runner._place == OneDevice(jax.devices()[0])
            continue
        with pytest.raises(ConfigError, match=message):
            make(llama, tensor_parallel=tp)


def test_close_frees_every_device(hf_model):
    engine = make(hf_model("gpt2"), tensor_parallel={"tp_size": 2})
    before = len(jax.live_arrays())
    held = len(jax.tree.leaves(engine.params))
    engine.close()
    gc.collect()
    assert len(jax.live_arrays()) <= before - held
    with pytest.raises(ClosedError):
        engine(random_ids(1, 3))

"""Which sums of a split model are exchanges between GPUs on JAX, how steps hold them, and why not.

The devices are virtual ones of the CPU: the kernels are lowered for CUDA, or collectives stand in
for them. The kernels themselves: tests/kernels/test_pallas_exchange.py.
"""

import ctypes
import re
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

import dualinfer  # noqa: E402
from dualinfer.backends import jax as backend  # noqa: E402
from dualinfer.backends.jax import ahead, exchange  # noqa: E402
from dualinfer.backends.jax.exchange import Exchange, find_obstacle, open_exchange  # noqa: E402
from dualinfer.backends.jax.mesh import ManyDevices, OneDevice  # noqa: E402
from dualinfer.backends.jax.ops import split as split_kernels  # noqa: E402
from dualinfer.backends.jax.ops.kernels import KernelOps  # noqa: E402
from dualinfer.backends.jax.ops.plain import PlainOps  # noqa: E402
from dualinfer.backends.jax.ops.split import SplitKernelOps  # noqa: E402
from dualinfer.backends.jax.parallel import Split  # noqa: E402
from dualinfer.config import InferenceConfig  # noqa: E402
from dualinfer.errors import DistributedError  # noqa: E402
from dualinfer.kernels.pallas import linear  # noqa: E402
from dualinfer.kernels.pallas.exchange import BLOCK  # noqa: E402

from .kernels.arrays import inlined  # noqa: E402
from .models import make_model, random_ids, relative_rms  # noqa: E402

pytestmark = [
    pytest.mark.xdist_group("mesh"),
    pytest.mark.skipif(
        jax.default_backend() != "cpu" or jax.device_count() < 4,
        reason="needs four virtual devices: XLA_FLAGS=--xla_force_host_platform_device_count=4",
    ),
]
VOCAB = 97
OPTIONS: dict[str, Any] = {"backend": "jax", "dtype": "fp32", "replace_with_kernel_inject": True}
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
_SMALL: dict[str, dict[str, Any]] = {
    "llama-gqa": {"hidden_size": 24, "intermediate_size": 33, "num_hidden_layers": 1},
    "bloom": {"hidden_size": 30, "n_head": 3, "n_layer": 1},
}


def make(name: str = "llama-gqa", **options: Any) -> Any:
    model = make_model(name, vocab_size=VOCAB, **_SMALL[name])
    return dualinfer.init_inference(model, **OPTIONS | options)


def place_of(count: int) -> ManyDevices:
    return ManyDevices(jax.sharding.Mesh(np.array(jax.devices()[:count]), ("tp",)), "tp")


@pytest.fixture
def exchanging(monkeypatch):
    """Engines on devices that exchange, as if they were GPUs; with so many elements if given."""

    def patch(capacity: int | None = None, interpret: bool = False) -> None:
        def make_ops(config: Any, spec: Any, device: Any, split: Any, place: Any) -> Any:
            if split is None:
                return PlainOps()
            made = Exchange(place, spec.vocab, 600.0)
            if capacity is not None:
                made.mailboxes = made.mailboxes._replace(capacity=capacity)
            ops = SplitKernelOps(132, split, made)
            ops.interpret = interpret
            return ops

        monkeypatch.setattr(backend, "_make_ops", make_ops)

    return patch


@pytest.fixture
def standing_in(monkeypatch):
    """Collectives in the kernels' place, counted; the rank `failing` says that it gave up."""
    seen = SimpleNamespace(sums=0, gathers=0, failing=-1)

    def sum_ranks(x, row, boxes, counters, bias=None, residual=None, dtype=None):
        seen.sums += 1
        assert row.shape == (3 + 2 * boxes.size,) and x.size <= boxes.capacity
        y = lax.psum(x.astype(jnp.float32), "tp")
        for more in (bias, residual):
            y = y if more is None else y + more.astype(jnp.float32)
        return y.astype(dtype or x.dtype), counters

    def gather_ranks(x, row, boxes, counters, columns):
        seen.gathers += 1
        joined = lax.all_gather(x, "tp", axis=x.ndim - 1, tiled=True)
        return joined[..., :columns], counters

    def given_up(row, boxes, counters):
        return (row[:1] == seen.failing).astype(jnp.int32)

    for module in (split_kernels.kernels, exchange):
        for name, function in (("sum_ranks", sum_ranks), ("given_up", given_up)):
            monkeypatch.setattr(module, name, function)
    monkeypatch.setattr(split_kernels.kernels, "gather_ranks", gather_ranks)
    monkeypatch.setattr(linear, "serves", lambda *shape: True)
    return seen


@pytest.mark.parametrize("name", _SMALL)
def test_steps_give_what_one_plain_device_gives(name, exchanging, standing_in):
    ids = random_ids(1, 5) % VOCAB
    with make(name) as plain:
        expected = plain.generate(ids, max_new_tokens=5, **GREEDY)
        logits = plain(ids).logits
    exchanging(interpret=True)
    with make(name, tensor_parallel={"tp_size": 2}) as engine:
        assert "peer to peer" in engine.report().ops["sum over devices"]
        found = engine.generate(ids, max_new_tokens=5, **GREEDY)
        assert (standing_in.sums, standing_in.gathers) == (2 * 3, 2)  # prefill and decode
        np.testing.assert_array_equal(found, expected)
        assert relative_rms(engine(ids).logits, logits) < 1e-5
        assert (standing_in.sums, standing_in.gathers) == (3 * 3, 3)
        # A function of the caller's own is traced without the mailboxes.
        applied = jax.jit(engine.apply)(engine.params, ids).logits
        assert relative_rms(applied, logits) < 1e-5 and standing_in.sums == 3 * 3
        assert "mailboxes" not in engine.params


def test_what_any_device_gave_up_is_raised(exchanging, standing_in):
    exchanging(interpret=True)
    standing_in.failing = 1  # results are device 0's
    message = r"cpu:0, 1 gave up an exchange.*about 600 seconds.*engine anew"
    with make(tensor_parallel={"tp_size": 2}) as engine:
        engine([[5, 6, 7]])  # not waited for
        jax.block_until_ready(engine.runner._exchange._last)
        with pytest.raises(DistributedError, match=message):
            engine([[5, 6, 7]])
        with pytest.raises(DistributedError, match=message):
            engine.generate([[5, 6, 7]], max_new_tokens=1, **GREEDY)


def lowered(engine: Any) -> dict[str, str]:
    """StableHLO of prefill and decode for two GPUs."""
    jobs = ahead.jobs(engine.runner, ahead.Wanted((1,), (5,), 4), 4)
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=132, platform="gpu")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((2,), ("tp",), axis_types=auto, abstract_device=device)
    engine.runner._place = ManyDevices(mesh, "tp")
    texts = {}
    for job in jobs:
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), job.args)
        with warnings.catch_warnings(), jax.sharding.use_abstract_mesh(mesh):
            warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
            traced = jax.jit(job.function, donate_argnums=job.donate).trace(*args)
            texts[job.key[0]] = inlined(traced.lower(lowering_platforms=("cuda",)).as_text())
    return texts


def counts(text: str) -> tuple[int, ...]:
    """Sums and gathers by the kernels, checks, then all-reduces and all-gathers."""
    names = re.findall(r'name = "exchange_(\w+)_kernel"', text)
    ours = tuple(names.count(name) for name in ("sum", "gather", "check"))
    return *ours, text.count("stablehlo.all_reduce"), text.count("stablehlo.all_gather")


@pytest.mark.parametrize("name", _SMALL)
def test_small_sums_of_a_step_are_kernels_and_others_collectives(name, exchanging):
    """Of a padded prompt of 16 tokens only the logits of the last fit into 128 values."""
    exchanging()
    texts = lowered(make(name, dtype="bf16", tensor_parallel={"tp_size": 2}))
    assert {step: counts(text) for step, text in texts.items()} == {
        "prefill": (3, 1, 1, 0, 0),
        "decode": (3, 1, 1, 0, 0),
    }
    exchanging(capacity=BLOCK)
    texts = lowered(make(name, dtype="bf16", tensor_parallel={"tp_size": 2}))
    assert {step: counts(text) for step, text in texts.items()} == {
        "prefill": (0, 1, 1, 3, 0),
        "decode": (3, 1, 1, 0, 0),
    }


def test_addresses_are_arguments_and_no_constants(exchanging):
    """Else each process would compile its own, and the cache on disk would be of no use."""
    exchanging()
    engines = [make(tensor_parallel={"tp_size": 2}) for _ in range(2)]
    first, second = (np.asarray(engine.runner._exchange.table) for engine in engines)
    assert (first != second).any()
    assert first[:, 0].tolist() == [0, 1]
    for engine in engines:
        table = engine.runner._leaves[-1]
        assert table is engine.runner._exchange.table
        assert [s.data.shape for s in table.addressable_shards] == [(1, 7)] * 2
    one, other = (lowered(engine) for engine in engines)
    assert one == other


def test_close_frees_the_mailboxes(exchanging, standing_in):
    exchanging(interpret=True)
    engine = make(tensor_parallel={"tp_size": 2})
    boxes = engine.runner._exchange._boxes
    engine([[5, 6, 7]])
    assert not np.asarray(boxes).any()
    shape = boxes.shape
    del boxes
    held = sum(x.shape == shape for x in jax.live_arrays())
    runner = engine.runner
    engine.close()
    assert runner._exchange is None and runner.steps.ops.exchange is None
    assert sum(x.shape == shape for x in jax.live_arrays()) == held - 1


# Where there is none


class Cuda:
    """A driver that knows four devices, of which number 3 can reach no other."""

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return int(ordinal > 3)

    def cuDeviceCanAccessPeer(self, can: Any, device: Any, peer: Any) -> int:
        can._obj.value = 3 not in (device.value, peer.value)
        return 0


def gpus(*ordinals: int | None, **fields: Any) -> ManyDevices:
    devices = [
        SimpleNamespace(platform="gpu", local_hardware_id=n, __str__=lambda: "") for n in ordinals
    ]
    mesh = SimpleNamespace(
        devices=np.array(devices),
        local_devices=devices,
        shape={"tp": len(devices)},
        size=len(devices),
        is_multi_process=False,
        axis_names=("tp",),
    )
    vars(mesh).update(fields)
    return ManyDevices(mesh, "tp")


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (gpus(0, 1, 2), None),
        (gpus(0, 3), "has no access to the memory of"),
        (gpus(0, 4), "CUDA does not know"),
        (gpus(0, None), "CUDA does not know"),
        (gpus(0, 1, is_multi_process=True), "several processes"),
        (gpus(0, 1, size=4), "other axes"),
        (OneDevice(SimpleNamespace(platform="gpu")), "one device"),
    ],
)
def test_the_reason_why_gpus_do_not_exchange(place, reason, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Cuda())
    found = find_obstacle(place)
    assert found is None if reason is None else reason in str(found)


def test_an_allocator_whose_memory_is_not_shared_is_a_reason(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Cuda())
    for allocator in ("default", "BFC", "platform", "cuda_async", "vmm"):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", allocator)
        shared = allocator in ("default", "BFC", "platform")
        reason = None if shared else f"XLA_PYTHON_CLIENT_ALLOCATOR={allocator}"
        assert find_obstacle(gpus(0, 1)) == reason


def test_no_driver_is_a_reason(monkeypatch):
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert find_obstacle(gpus(0, 1)) == "libcuda.so.1 cannot be opened"


def test_a_first_sum_that_is_wrong_is_a_reason(monkeypatch, standing_in):
    monkeypatch.setattr(exchange, "find_obstacle", lambda place: None)
    opened = open_exchange(place_of(3), 200_001, 5.0)
    assert isinstance(opened, Exchange)
    assert standing_in.sums == 2 and opened.mailboxes.patience == 5_000_000
    assert opened.serves(200_001) and not opened.serves(0) and not opened.serves(200_065)
    standing_in.failing = 2
    assert (
        open_exchange(place_of(3), VOCAB, 5.0) == "a first sum over the GPUs' memory came out wrong"
    )
    standing_in.failing = -1
    summed = exchange.sum_ranks
    monkeypatch.setattr(
        exchange,
        "sum_ranks",
        lambda x, *rest: (summed(x, *rest)[0] + (lax.axis_index("tp") == 1), rest[-1]),
    )
    assert isinstance(open_exchange(place_of(3), VOCAB, 5.0), str)


def test_the_report_names_what_sums(monkeypatch):
    with make(tensor_parallel={"tp_size": 2}) as engine:  # plain XLA, on a CPU
        assert engine.report().ops["sum over devices"] == "XLA"
        spec, split = engine.runner.spec, engine.runner.steps.ops.split
    assert isinstance(split, Split)
    gpu = SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=132)
    config = InferenceConfig(backend="jax", replace_with_kernel_inject=True)
    ops = backend._make_ops(config, spec, gpu, split, place_of(2))
    assert type(ops) is SplitKernelOps and ops.exchange is None
    assert ops.implementations["sum over devices"] == "XLA: the devices are no GPUs"
    monkeypatch.setattr(backend, "open_exchange", lambda *args: Exchange(*args))
    ops = backend._make_ops(config, spec, gpu, split, place_of(2))
    sums = "Pallas, peer to peer, up to 131,072 values; XLA above"
    assert ops.implementations["sum over devices"] == sums
    assert "sum over devices" not in KernelOps(132).implementations
    plain = InferenceConfig(backend="jax", replace_with_kernel_inject=True, use_triton=False)
    assert type(backend._make_ops(plain, spec, gpu, split, place_of(2))) is PlainOps

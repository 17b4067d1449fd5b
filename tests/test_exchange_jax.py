"""Which sums of a split model are exchanges between GPUs on JAX, how steps hold them, and why not.

The devices are virtual ones of the CPU: steps are lowered for CUDA, or collectives stand in for the
kernels, which the interpreter runs for one device at a time. The kernels themselves:
tests/kernels/test_triton_exchange.py.
"""

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
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
from dualinfer.backends.jax.ops.kernels import KernelOps  # noqa: E402
from dualinfer.backends.jax.ops.plain import PlainOps  # noqa: E402
from dualinfer.backends.jax.ops.split import SplitKernelOps  # noqa: E402
from dualinfer.backends.jax.parallel import Split  # noqa: E402
from dualinfer.config import InferenceConfig  # noqa: E402
from dualinfer.errors import DistributedError  # noqa: E402
from dualinfer.kernels.triton import linear  # noqa: E402
from dualinfer.kernels.triton.ahead import POINTER, Code  # noqa: E402
from dualinfer.kernels.triton.operands import Launch, Pointer  # noqa: E402
from dualinfer.kernels.xla import handler  # noqa: E402

from .cases import make_model  # noqa: E402
from .kernels.jax_ops import calls_for_cuda, gpu, interpreted_ops  # noqa: E402
from .models import random_ids, relative_rms, slow_but  # noqa: E402

pytestmark = [
    pytest.mark.xdist_group("mesh"),
    pytest.mark.skipif(
        jax.default_backend() != "cpu" or jax.device_count() < 4,
        reason="needs four virtual devices: XLA_FLAGS=--xla_force_host_platform_device_count=4",
    ),
]
VOCAB = 97
MODES = len(KernelOps.modes)  # decode has a step for each
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

    def patch(capacity: int | None = None, interpreted: bool = False) -> None:
        def make_ops(config: Any, spec: Any, device: Any, split: Any, place: Any) -> Any:
            if split is None:
                return PlainOps()
            made = Exchange(place, spec.vocab, 600.0)
            if capacity is not None:
                made.capacity = capacity
            if interpreted:
                return interpreted_ops(split, made)
            return SplitKernelOps(gpu(), split, made)

        monkeypatch.setattr(backend, "_make_ops", make_ops)

    return patch


@pytest.fixture
def standing_in(monkeypatch):
    """Collectives in the kernels' place, counted; the rank `failing` says that it gave up."""
    seen = SimpleNamespace(sums=0, gathers=0, failing=-1)

    def sums(self, x, row, order, bias=None, residual=None, dtype=None, *, pdl=False):
        seen.sums += 1
        assert row.shape == (2 * (self.size + 3),) and self.serves(x.size)
        y = lax.psum(x.astype(jnp.float32), "tp")
        for more in (bias, residual):
            y = y if more is None else y + more.astype(jnp.float32)
        return y.astype(dtype or x.dtype), order

    def gathers(self, x, row, order, columns, *, pdl=False):
        seen.gathers += 1
        joined = lax.all_gather(x, "tp", axis=x.ndim - 1, tiled=True)
        return joined[..., :columns], order

    def given_up(self, row, order, *, pdl=False):
        return (row[-2:-1] == seen.failing).astype(jnp.int32)

    for name, function in (("sum", sums), ("gather", gathers), ("given_up", given_up)):
        monkeypatch.setattr(Exchange, name, function)
    monkeypatch.setattr(linear, "serves", lambda *shape: True)
    return seen


@pytest.mark.parametrize("name", slow_but(["llama-gqa"], _SMALL))
def test_steps_give_what_one_plain_device_gives(name, exchanging, standing_in):
    ids = random_ids(1, 5) % VOCAB
    with make(name) as plain:
        expected = plain.generate(ids, max_new_tokens=3, **GREEDY)
        logits = plain(ids).logits
    exchanging(interpreted=True)
    with make(name, tensor_parallel={"tp_size": 2}) as engine:
        assert "peer to peer" in engine.report().ops["sum over devices"]
        found = engine.generate(ids, max_new_tokens=3, **GREEDY)
        passes = 1 + MODES  # prefill and decode
        assert (standing_in.sums, standing_in.gathers) == (passes * 3, passes)
        np.testing.assert_array_equal(found, expected)
        assert relative_rms(engine(ids).logits, logits) < 1e-5
        passes += 1
        assert (standing_in.sums, standing_in.gathers) == (passes * 3, passes)
        # A function of the caller's own is traced without the mailboxes.
        applied = jax.jit(engine.apply)(engine.params, ids).logits
        assert relative_rms(applied, logits) < 1e-5 and standing_in.sums == passes * 3
        assert "mailboxes" not in engine.params


class Driver:
    """CUDA's driver: device 0's launch takes until device 1 has launched as well."""

    def __init__(self) -> None:
        self.mine, self.launched, self.streams = threading.local(), threading.Event(), {}

    def cuCtxGetDevice(self, device: Any) -> int:
        device._obj.value = self.mine.device
        return 0

    def cuLibraryLoadData(self, *args: Any) -> int:
        return 0

    cuLibraryGetKernel = cuLibraryLoadData

    def cuLaunchKernelEx(self, config: Any, kernel: Any, pointers: Any, extra: Any) -> int:
        if self.mine.device == 1:
            self.launched.set()
        arrived = self.launched.wait(10)
        self.streams[self.mine.device] = config._obj.stream
        return 0 if arrived else 1


def test_devices_launch_without_waiting_for_one_another(monkeypatch):
    """Else exchanges of a full queue would wait for what another device may not launch."""
    driver = Driver()
    monkeypatch.setattr(handler, "_cuda", lambda: driver)
    x = "x_ptr", Pointer(0, 0, "float32")
    launch = Launch(None, (1, 1, 1), (x,), options=(), early=False)
    code = Code("kernel", b"of this test", 32, 0, (("x_ptr", POINTER),))
    monkeypatch.setattr(handler, "code", lambda *_: code)
    program = handler._Program((launch,), 90)

    def run(device: int) -> None:
        driver.mine.device = device
        program.run(100 + device, [256])

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run, 0)
        while not program._ready:
            time.sleep(0.001)
        pool.submit(run, 1).result()
        first.result()
    assert driver.streams == {0: 100, 1: 101}


@pytest.mark.parametrize("rank", [0, 1])
def test_kernels_find_the_memory_by_a_row_and_keep_their_order(rank):
    """One of two devices: what the other one sends is there before."""
    made, other = Exchange(place_of(2), VOCAB, 1e-4), 1 - rank  # 100 polls
    row, chance = np.asarray(made.table)[rank], np.random.default_rng(0)
    x, z = chance.standard_normal((2, 2, 3, 60)).astype(np.float32)
    widths = [60, 53]  # the second one's are padded
    bias, residual = (jnp.asarray(chance.standard_normal(s), "float16") for s in (60, (3, 60)))
    own = ctypes.cast(int(row.view(np.int64)[rank]), ctypes.POINTER(ctypes.c_int64))
    words = np.ctypeslib.as_array(own, (2, 2, made.capacity))
    for number, values in ((1, x[other]), (2, z[other, :, : widths[other]])):
        bits = values.reshape(-1).view(np.int32).astype(np.int64) & 0xFFFFFFFF
        words[number % 2, other, : bits.size] = bits | number << 32

    @jax.jit
    def run(row: Any, x: Any, z: Any) -> Any:
        y, order = made.sum(x, row, jnp.arange(3), bias, residual, bias.dtype)
        joined, order = made.gather(z, row, order, sum(widths))
        before = made.given_up(row, order)
        lost, order = made.sum(x, row, order)
        return y, joined, before, lost, made.given_up(row, order), order

    y, joined, before, lost, after, order = run(row, x[rank], z[rank])
    total = x.sum(0) + np.asarray(bias, np.float32) + np.asarray(residual, np.float32)
    np.testing.assert_array_equal(y, total.astype("float16"))
    np.testing.assert_array_equal(joined, np.concatenate([z[0], z[1, :, :53]], axis=1))
    assert (before.tolist(), after.tolist(), order.tolist()) == ([0], [1], [0, 1, 2])
    assert np.isnan(lost).all()


def test_what_any_device_gave_up_is_raised(exchanging, standing_in):
    exchanging(interpreted=True)
    standing_in.failing = 1  # results are device 0's
    message = r"cpu:0, 1 gave up an exchange.*about 600 seconds.*engine anew"
    with make(tensor_parallel={"tp_size": 2}) as engine:
        engine([[5, 6, 7]])  # not waited for
        jax.block_until_ready(engine.runner._exchange._last)
        with pytest.raises(DistributedError, match=message):
            engine([[5, 6, 7]])
        with pytest.raises(DistributedError, match=message):
            engine.generate([[5, 6, 7]], max_new_tokens=1, **GREEDY)


def lowered(engine: Any, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Prefill and decode for two GPUs: their calls, and their StableHLO."""
    jobs = ahead.jobs(engine.runner, ahead.Wanted((1,), (5,), 4), 4)
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=132, platform="gpu")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((2,), ("tp",), axis_types=auto, abstract_device=device)
    engine.runner._place = ManyDevices(mesh, "tp")
    found = {}
    for job in jobs:
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), job.args)
        with jax.sharding.use_abstract_mesh(mesh):
            found[job.key[0]] = calls_for_cuda(job.function, args, patch)
    return found


def counts(calls: Any, text: str) -> tuple[int, ...]:
    """Sums and gathers by the kernels, checks, then all-reduces and all-gathers."""
    names = [name for call in calls for name in call.kernels]
    ours = tuple(names.count(f"{name}_kernel") for name in ("sum", "gather", "given_up"))
    return *ours, text.count("stablehlo.all_reduce"), text.count("stablehlo.all_gather")


@pytest.mark.parametrize("name", _SMALL)
def test_small_sums_of_a_step_are_kernels_and_others_collectives(name, exchanging, monkeypatch):
    """Of a padded prompt of 16 tokens only the logits of the last fit into 128 values."""
    exchanging()
    steps = lowered(make(name, dtype="bf16", tensor_parallel={"tp_size": 2}), monkeypatch)
    assert {step: counts(*made) for step, made in steps.items()} == {
        "prefill": (3, 1, 1, 0, 0),
        "decode": (3 * MODES, MODES, 1, 0, 0),
    }
    exchanging(capacity=128)
    steps = lowered(make(name, dtype="bf16", tensor_parallel={"tp_size": 2}), monkeypatch)
    assert {step: counts(*made) for step, made in steps.items()} == {
        "prefill": (0, 1, 1, 3, 0),
        "decode": (3 * MODES, MODES, 1, 0, 0),
    }


def test_addresses_are_arguments_and_no_constants(exchanging, monkeypatch):
    """Else each process would compile its own, and the cache on disk would be of no use."""
    exchanging()
    engines = [make(tensor_parallel={"tp_size": 2}) for _ in range(2)]
    first, second = (np.asarray(engine.runner._exchange.table) for engine in engines)
    assert (first != second).any()
    assert first[:, -2:].tolist() == [[0, 0], [1, 0]]
    for engine in engines:
        table = engine.runner._leaves[-1]
        assert table is engine.runner._exchange.table
        assert [s.data.shape for s in table.addressable_shards] == [(1, 10)] * 2
    one, other = (lowered(engine, monkeypatch) for engine in engines)
    assert one == other


def test_close_frees_the_mailboxes(exchanging, standing_in):
    exchanging(interpreted=True)
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
    assert standing_in.sums == 2 and opened.patience == 5_000_000
    assert opened.serves(200_001) and not opened.serves(0) and not opened.serves(200_002)
    standing_in.failing = 2
    assert (
        open_exchange(place_of(3), VOCAB, 5.0) == "a first sum over the GPUs' memory came out wrong"
    )
    standing_in.failing = -1
    summed = Exchange.sum
    monkeypatch.setattr(
        Exchange,
        "sum",
        lambda *args: (summed(*args)[0] + (lax.axis_index("tp") == 1), args[-1]),
    )
    assert isinstance(open_exchange(place_of(3), VOCAB, 5.0), str)


def test_the_report_names_what_sums(monkeypatch):
    with make(tensor_parallel={"tp_size": 2}) as engine:  # plain XLA, on a CPU
        assert engine.report().ops["sum over devices"] == "XLA"
        spec, split = engine.runner.spec, engine.runner.steps.ops.split
    assert isinstance(split, Split)
    config = InferenceConfig(backend="jax", replace_with_kernel_inject=True)
    ops = backend._make_ops(config, spec, gpu(), split, place_of(2))
    assert type(ops) is SplitKernelOps and ops.exchange is None
    assert ops.implementations["sum over devices"] == "XLA: the devices are no GPUs"
    monkeypatch.setattr(backend, "open_exchange", lambda *args: Exchange(*args))
    ops = backend._make_ops(config, spec, gpu(), split, place_of(2))
    sums = "Triton, peer to peer, up to 131,072 values; XLA above"
    assert ops.implementations["sum over devices"] == sums
    assert "sum over devices" not in KernelOps(gpu()).implementations
    plain = InferenceConfig(backend="jax", replace_with_kernel_inject=True, use_triton=False)
    assert type(backend._make_ops(plain, spec, gpu(), split, place_of(2))) is PlainOps

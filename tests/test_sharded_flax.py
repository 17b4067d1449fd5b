"""Module mode on several devices of one JAX process: Flax modules split by patterns of paths."""

import re
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import flax.linen as nn  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import dualinfer  # noqa: E402
from dualinfer.backends.jax.module import parts  # noqa: E402
from dualinfer.errors import ConfigError  # noqa: E402

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu" or jax.device_count() < 4,
    reason="needs four virtual devices: XLA_FLAGS=--xla_force_host_platform_device_count=4",
)
X = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
POLICY = {"*.up.kernel": (None, "tp"), "*.up.bias": ("tp",), "*.down.kernel": ("tp", None)}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(6, rngs=rngs)
        self.up, self.down = nnx.Linear(6, 12, rngs=rngs), nnx.Linear(12, 6, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(self.norm(x))))


class Blocks(nnx.Module):
    """State of every kind beside the parameters: statistics, random numbers, a plain array."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.norm, self.drop = nnx.BatchNorm(6, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.table = jnp.arange(6.0)

    def __call__(self, x, flag=False):
        for block in self.blocks:
            x = block(x)
        return {"y": self.drop(self.norm(x)) + self.table, "key": jax.random.key(3), "flag": flag}

    def generate(self, x):
        return x @ self.blocks[0].up.kernel[...]


class Dense(nn.Module):
    names: Any

    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), self.names)
        return nn.Dense(5, name="down")(nn.relu(nn.Dense(8, name="up", kernel_init=init)(x)))


@pytest.fixture(scope="module")
def module():
    return Blocks(nnx.Rngs(0))


@pytest.fixture(scope="module")
def expected(module):
    """The result on one device."""
    return make(module)(X)["y"]


def make(module: Any, policy: Any = None, dtype: str = "fp32", **tp: Any) -> Any:
    options = {"tensor_parallel": tp, "injection_policy": policy} if tp else {}
    return dualinfer.init_inference(module, backend="jax", dtype=dtype, **options)


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_results_are_those_of_one_device(devices, module, expected):
    with make(module, POLICY, tp_size=devices) as engine:
        result = engine(X, flag=True)
        np.testing.assert_allclose(result["y"], expected, rtol=1e-5, atol=1e-6)
        assert result["flag"] is True and result["key"].dtype == jax.random.key(0).dtype
        assert isinstance(result["y"], jax.Array) and result["y"].devices() == {engine.device}
        kernel = engine.module.blocks[1].up.kernel[...]
        assert [s.data.shape for s in kernel.addressable_shards] == [(6, 12 // devices)] * devices
        (executable,) = engine.runner._executables._made.values()
        assert len(re.findall(r" all-reduce(?:-start)?\(", executable.as_text())) == 2
        np.testing.assert_allclose(
            engine.generate(X), X @ module.blocks[0].up.kernel[...], rtol=1e-5, atol=1e-6
        )
    assert module.blocks[0].up.kernel[...].devices() == {jax.devices()[0]}


def test_the_report_says_what_is_split_and_what_is_not(module):
    with make(module, POLICY, tp_size=4) as engine:
        report = engine.report()
    split, whole = report.notes
    assert split.startswith("split over 4 devices: blocks.0.down.kernel ('tp', None)")
    assert whole.startswith("whole on every device: blocks.0.down.bias, blocks.0.norm.bias")
    assert report.device == "cpu:0, 1, 2, 3"
    each = 2 * (6 * 12 // 4 * 2 + 12 // 4 + 6 + 2 * 6) + 2 * 6
    assert (report.parameters, report.parameter_bytes) == (each, 4 * each)


def test_a_mesh_of_two_axes_and_of_the_callers_context(module, expected):
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    policy = {
        "blocks.0.up.kernel": P(None, ("data", "model")),
        "*.up.*": (None, "model"),
    }
    with pytest.raises(ConfigError, match=r"blocks\.0\.up\.bias \[12\].*a tuple of 1"):
        make(module, policy, mesh=mesh, axis="model")
    policy = {"blocks.0.up.kernel": P(None, ("data", "model")), "*.up.kernel": (None, "model")}
    for context in (None, mesh, jax.make_mesh((4,), ("x",))):
        if context is None:
            engine = make(module, policy, mesh=mesh, axis="model")
            found = engine(X)["y"]
            first, second = (block.up.kernel[...].sharding for block in engine.module.blocks)
            assert (first.spec, second.spec) == (P(None, ("data", "model")), P(None, "model"))
        else:
            with jax.set_mesh(context):
                found = make(module, policy, mesh=mesh, axis="model")(X)["y"]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("names", [(None, "tp"), (None, "embed")])
def test_linen_paths_leave_out_the_collection(names):
    """Axes that the module's author has named are not those of the mesh, and say nothing here."""
    inner = Dense(names)
    variables = inner.init(jax.random.key(0), X)
    policy = {"up.kernel": (None, "tp"), "down.kernel": ("tp", None)}
    for model in ((inner, variables), inner.bind(nn.unbox(variables))):
        with make(model, policy, tp_size=4) as engine:
            wanted: Any = inner.apply(variables, X)
            np.testing.assert_allclose(engine(X), wanted, rtol=1e-5, atol=1e-6)
            kernel = engine.module.variables["params"]["up"]["kernel"]
            kernel = getattr(kernel, "value", kernel)
            assert kernel.sharding.spec == P(None, "tp")


def test_weights_are_cast_as_on_one_device(module):
    with make(module, POLICY, dtype="bf16", tp_size=2) as engine, make(module, dtype="bf16") as one:
        assert engine.module.blocks[0].up.kernel.dtype == jnp.bfloat16
        found, wanted = (np.asarray(e(X)["y"], np.float32) for e in (engine, one))
        np.testing.assert_allclose(found, wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (None, r"3 devices.*injection_policy=\{.*It has, for instance, blocks\.0\.down\.bias"),
        ({"*.gate.kernel": ("tp",)}, r"'\*\.gate\.kernel' fits no parameter. There are, for"),
        ({"*": (None,), "*.up.bias": ("tp",)}, r"'\*\.up\.bias' fits only what patterns before"),
        ({"*.up.kernel": ("tp",)}, r"up\.kernel \[6, 12\] the axes \('tp',\); expected.*of 2"),
        ({"*.up.kernel": "tp"}, r"the axes 'tp'; expected a tuple of 2"),
        ({"*.table": (None,)}, "fits no parameter"),
        ({"*.up.kernel": (None, "x")}, "but the mesh has 'tp' only"),
        ({"*.up.kernel": ("tp", "tp")}, "names a mesh axis twice"),
        ({nnx.Linear: "kernel"}, r"key .*Linear.*on JAX expected are patterns"),
    ],
)
def test_policies_that_do_not_fit_are_refused_before_anything_moves(
    policy, message, module, monkeypatch
):
    monkeypatch.setattr(parts, "_cast", lambda *args: pytest.fail("moved"))
    with pytest.raises(ConfigError, match=message):
        make(module, policy, tp_size=3)


def test_an_axis_that_does_not_divide_is_refused(module):
    with pytest.raises(ConfigError, match=r"6 does not divide by the 4 devices along 'tp'"):
        make(module, {"*.down.kernel": (None, "tp")}, tp_size=4)


def test_a_policy_needs_several_devices(module):
    with pytest.raises(ConfigError, match="is one device, which has nothing to split"):
        make(module, POLICY, tp_size=1)
    alone = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tp",))
    with pytest.raises(ConfigError, match="cpu:0 is one device, which has nothing to split"):
        make(module, POLICY, mesh=alone)

"""Module mode on JAX, and the compiled executables of both of the backend's runners."""

import gc
import re
import time
import weakref

import numpy as np
import pytest
import torch

import dualinfer
from dualinfer.backends.base import NO_TOKEN, ForwardInputs, Request
from dualinfer.backends.profiling import Profiler
from dualinfer.config import InferenceConfig
from dualinfer.errors import (
    ArgumentError,
    ModelError,
    OutOfMemoryError,
    ProfilingError,
    UnsupportedError,
)

from .models import random_ids
from .test_pipelines import make_gpt2

flax = pytest.importorskip("flax")
import flax.linen as nn  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import nnx, struct  # noqa: E402

from dualinfer.backends.jax import create_module_runner, join  # noqa: E402
from dualinfer.backends.jax.executables import Executables  # noqa: E402
from dualinfer.backends.jax.prompts import Step  # noqa: E402
from dualinfer.errors import StepError  # noqa: E402
from dualinfer.ops.contract import Tokens  # noqa: E402


class Mlp(nnx.Module):
    """Everything that evaluation mode, casting and state concern."""

    def __init__(self, rngs):
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(8, 3, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.rotation = jnp.exp(1j * jnp.arange(3))
        self.table = np.arange(3, dtype=np.float32)

    def __call__(self, x, scale=1.0, double=False):
        self.calls[...] += 1
        y = self.second(self.drop(nnx.relu(self.norm(self.first(x)))))
        y = (y + self.table) * scale
        return 2 * y if double else y


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)

    def __call__(self, x, mask=None):
        return x + self.attention(self.norm(x), mask=mask)


class Encoder(nnx.Module):
    """Returns a dict of arrays, tuples and plain values, as HF's models do."""

    def __init__(self, rngs, layers=2):
        self.embed = nnx.Embed(50, 16, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(layers)])

    def __call__(self, ids, attention_mask=None, output_hidden_states=False, pool=None):
        x = self.embed(ids)
        mask = None if attention_mask is None else attention_mask[:, None, None, :].astype(bool)
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1], mask))
        result = {"last_hidden_state": states[-1], "kind": "encoder", "layers": len(self.layers)}
        if output_hidden_states:
            result["hidden_states"] = tuple(states)
        if pool is not None:
            result["pooled"] = pool(states[-1])
        return result

    def generate(self, ids, steps=2):
        for _ in range(steps):
            scores = self.embed.attend(self(ids)["last_hidden_state"][:, -1])
            ids = jnp.concatenate((ids, scores.argmax(-1)[:, None].astype(ids.dtype)), axis=1)
        return ids


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(nn.relu(x)))


@struct.dataclass
class Scores:
    logits: jax.Array
    name: str = struct.field(pytree_node=False, default="scores")


class Structured(nn.Module):
    @nn.compact
    def __call__(self, batch):
        return Scores(nn.Dense(2)(batch["x"]), name="dense"), [batch["x"].sum(), None, 4]


def make(module, **fields):
    config = InferenceConfig(backend="jax", **fields)
    return create_module_runner(config, module, None, join(config))


def inputs(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def trained_mlp():
    """An Mlp whose running statistics are not the initial ones."""
    module = Mlp(nnx.Rngs(0))
    for seed in range(3):
        module(jnp.asarray(inputs(16, 6, seed=seed)) + 2)
    return module


def variables_of(module, *args, **kwargs):
    variables = module.init(jax.random.key(0), *args, **kwargs)
    return jax.tree.map(lambda x: x + 0.1, variables)


def snapshot(tree):
    return [
        (
            x.dtype,
            np.array(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x),
        )
        for x in jax.tree.leaves(tree)
    ]


def test_nnx_module_gives_what_it_gives_in_evaluation_mode():
    module = trained_mlp()
    runner = make(module)
    x = inputs(5, 6)
    reference = nnx.clone(module)
    reference.eval()
    found = runner.forward((x,), {})
    assert isinstance(found, jax.Array)
    np.testing.assert_allclose(found, reference(jnp.asarray(x)), rtol=1e-5, atol=1e-6)
    training = np.asarray(nnx.clone(module)(jnp.asarray(x)))
    assert np.abs(training - np.asarray(found)).max() > 0.1  # dropout and batch statistics


def test_callers_module_stays_as_it_is():
    module = trained_mlp()
    before, structure = snapshot(nnx.state(module)), nnx.graphdef(module)
    runner = make(module, dtype="bf16")
    runner.forward((inputs(5, 6),), {})
    runner.close()
    for (dtype, value), (old_dtype, old) in zip(snapshot(nnx.state(module)), before, strict=True):
        assert dtype == old_dtype
        np.testing.assert_array_equal(value, old)
    assert nnx.graphdef(module) == structure
    assert not module.drop.deterministic and not module.norm.use_running_average


def test_only_floating_point_is_cast():
    module = trained_mlp()
    copy = make(module, dtype="bf16").module
    assert isinstance(copy, Mlp) and copy.drop.deterministic and copy.norm.use_running_average
    assert copy.first.kernel.dtype == copy.norm.mean.dtype == copy.table.dtype == jnp.bfloat16
    assert copy.calls.dtype == jnp.int32 and int(copy.calls[...]) == 3
    assert copy.rotation.dtype == jnp.complex64
    assert copy.drop.rngs.key.dtype == module.drop.rngs.key.dtype
    assert copy.drop.rngs.count.dtype == jnp.uint32


def test_what_needs_no_cast_is_shared():
    module = Mlp(nnx.Rngs(0))
    copy = make(module, dtype="fp32").module
    pointers = [m.second.kernel[...].unsafe_buffer_pointer() for m in (module, copy)]
    assert pointers[0] == pointers[1]


def test_bfloat16_module_gives_what_the_module_gives_after_the_same_cast():
    """Down to rounding: XLA may keep a fused intermediate in float32."""
    module = Encoder(nnx.Rngs(0))
    graph, state = nnx.split(module)
    reference = nnx.merge(graph, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state))
    reference.embed.dtype = jnp.bfloat16  # by default that of the table
    ids = random_ids(2, 7) % 50
    runner = make(module, dtype="bf16")
    found = runner.forward((ids,), {})["last_hidden_state"]
    expected = reference(jnp.asarray(ids))["last_hidden_state"]
    assert runner.notes == () and found.dtype == expected.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(found, np.float32), np.asarray(expected, np.float32), atol=0.03
    )


def test_float16_module_gives_what_the_module_gives_after_the_same_cast():
    module, x = trained_mlp(), inputs(5, 6).astype(np.float16)
    graph, state = nnx.split(module)
    reference = nnx.merge(
        graph,
        jax.tree.map(
            lambda a: a.astype(jnp.float16) if jnp.issubdtype(a.dtype, jnp.floating) else a, state
        ),
    )
    reference.eval()
    found = make(module, dtype="fp16").forward((x,), {})
    assert found.dtype == jnp.float16
    np.testing.assert_allclose(found, reference(jnp.asarray(x)), atol=0.01)


def test_part_with_a_dtype_of_its_own_keeps_it_and_is_named():
    class Mixed(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(4, dtype=jnp.float32, rngs=rngs)
            self.out = nnx.Linear(4, 2, rngs=rngs)

        def __call__(self, x):
            return self.out(self.norm(x))

    runner = make(Mixed(nnx.Rngs(0)), dtype="bf16")
    assert runner.forward((jnp.ones((1, 4), jnp.bfloat16),), {}).dtype == jnp.float32
    assert runner.notes == ("parts that compute in a dtype of their own: norm (float32)",)
    assert make(Mixed(nnx.Rngs(0)), dtype="fp32").notes == ()


@pytest.mark.parametrize("foreign", ["bf16", "nothing", 5, int, object(), lambda: 1, jnp.ones(2)])
def test_dtype_attribute_of_another_meaning_is_let_be(foreign):
    class Own(nnx.Module):
        def __init__(self, rngs):
            self.out = nnx.Linear(4, 2, rngs=rngs)
            self.dtype = nnx.data(foreign) if isinstance(foreign, jax.Array) else foreign

        def __call__(self, x):
            return self.out(x)

    module, x = Own(nnx.Rngs(0)), inputs(2, 4)
    runner = make(module, dtype="fp32")
    np.testing.assert_allclose(runner.forward((x,), {}), module(x), rtol=1e-5, atol=1e-6)
    assert runner.notes == ()


class Plain(nn.Module):
    """Parameters directly in the module, none in parts."""

    @nn.compact
    def __call__(self, x):
        return x * self.param("factor", nn.initializers.ones, (x.shape[-1],))


class Nested(nn.Module):
    """Parts by names of the author's own."""

    def setup(self):
        self.body = nn.Sequential([nn.Dense(5), nn.LayerNorm()])

    def __call__(self, x):
        return self.body(x)


class Counting(nn.Module):
    """State, and no parameters."""

    @nn.compact
    def __call__(self, x):
        return x + self.variable("state", "count", lambda: jnp.ones(())).value


class Scaling(nn.Module):
    """Statistics, by a name that parameters have, and no parameters."""

    @nn.compact
    def __call__(self, x):
        return x * self.variable("batch_stats", "scale", lambda: jnp.ones(())).value


@pytest.mark.parametrize("freeze", [dict, flax.core.freeze], ids=["dict", "FrozenDict"])
@pytest.mark.parametrize("module", [Plain(), Nested(), nn.Dense(3)], ids=lambda m: type(m).__name__)
def test_parameters_of_a_linen_module_may_come_alone(module, freeze):
    x = inputs(2, 6)
    variables = variables_of(module, x)
    expected = module.apply(variables, x)
    for given in (variables["params"], variables):
        runner = make((module, freeze(given)), dtype="fp32")
        np.testing.assert_allclose(runner.forward((x,), {}), expected, rtol=1e-5, atol=1e-6)
        assert runner.module.variables.keys() == {"params"}
        assert runner.report()["parameters"] == _count(variables["params"])


def _count(tree):
    return sum(x.size for x in jax.tree.leaves(tree))


def test_abstract_parameters_that_come_alone_are_missing_weights():
    variables = jax.eval_shape(nn.Dense(3).init, jax.random.key(0), inputs(1, 6))
    with pytest.raises(ModelError, match="weights are missing"):
        make((nn.Dense(3), variables["params"]))


def test_linen_module_without_parameters_needs_none():
    x = inputs(2, 6)
    variables = variables_of(Counting(), x)
    assert variables.keys() == {"state"}
    found = make((Counting(), variables)).forward((x,), {})
    np.testing.assert_allclose(found, Counting().apply(variables, x))
    variables = variables_of(Scaling(), x)
    assert variables.keys() == {"batch_stats"}
    found = make((Scaling(), variables)).forward((x,), {})
    np.testing.assert_allclose(found, Scaling().apply(variables, x))
    relu = nn.Sequential([nn.relu])
    np.testing.assert_array_equal(make((relu, {})).forward((x,), {}), nn.relu(x))


@pytest.mark.parametrize("kept", [(), ("params",), ("batch_stats",), ("empty params",)])
def test_variables_that_are_missing_are_named_at_the_first_call(kept):
    x = inputs(2, 6)
    variables = {**variables_of(Classifier(), x), "empty params": {}}
    runner = make((Classifier(), {name.split()[-1]: variables[name] for name in kept}))
    what = "batch_stats" if kept == ("params",) else "Dense_0"
    with pytest.raises(ModelError, match=rf"variables of Classifier lack .*{what}.*collections"):
        runner.forward((x,), {})
    alone = make((Classifier(), variables["params"]))
    with pytest.raises(ModelError, match="batch_stats"):
        alone.forward((x,), {})


@pytest.mark.parametrize("form", ["bound", "tuple", "bound in tuple"])
def test_linen_module_gives_what_apply_gives(form):
    module, x = Classifier(), inputs(5, 6)
    variables = variables_of(module, x)
    bound = module.bind(variables)
    given = {"bound": bound, "tuple": (module, variables), "bound in tuple": (bound, variables)}
    runner = make(given[form])
    expected = module.apply(variables, x)
    np.testing.assert_allclose(runner.forward((x,), {}), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(runner.module(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-6)
    assert any("eval()" in note for note in runner.notes)
    with pytest.raises(flax.errors.FlaxError, match=r"batch_stats|dropout"):
        runner.forward((x,), {"train": True})  # neither random keys nor room for statistics


def test_linen_module_bound_with_keys_and_state_uses_both_and_keeps_neither():
    module, x = Classifier(), inputs(64, 6)
    variables = variables_of(module, x)
    keys = {"dropout": jax.random.key(3)}
    before = snapshot(variables)
    bound = module.bind(variables, rngs=keys, mutable=["batch_stats"])
    runner = make(bound, dtype="fp32")
    expected, _ = module.apply(variables, x, train=True, rngs=keys, mutable=["batch_stats"])
    for _ in range(2):
        found = runner.forward((x,), {"train": True})
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    for (_, value), (_, old) in zip(snapshot(variables), before, strict=True):
        np.testing.assert_array_equal(value, old)


def test_linen_module_is_cast_and_may_return_any_pytree():
    module, batch = Structured(), {"x": inputs(4, 5)}
    variables = variables_of(module, batch)
    runner = make((module, variables), dtype="bf16")
    assert runner.module.variables["params"]["Dense_0"]["kernel"].dtype == jnp.bfloat16
    assert variables["params"]["Dense_0"]["kernel"].dtype == jnp.float32
    cast = jax.tree.map(lambda a: a.astype(jnp.bfloat16), variables)
    found, rest = runner.forward((batch,), {})
    expected, (total, *_) = module.apply(cast, batch)
    assert type(found) is Scores and found.name == "dense"
    np.testing.assert_allclose(found.logits, expected.logits, rtol=1e-5)
    np.testing.assert_allclose(rest[0], total, rtol=1e-5)
    assert rest[1:] == [None, 4]


@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
def test_inputs_of_every_framework_give_the_same(kind):
    x = inputs(5, 6)
    convert = {"numpy": np.copy, "torch": torch.tensor, "jax": jnp.asarray}[kind]
    runner = make(trained_mlp())
    expected = np.asarray(runner.forward((x,), {}))
    given = convert(x)
    found = runner.forward((given,), {})
    if kind != "jax":
        given[...] = 7  # the caller's to change at once
    np.testing.assert_array_equal(found, expected)
    assert runner.compilations == 1  # whatever the framework


def test_signatures_are_compiled_once_and_flags_are_told_apart():
    runner = make(trained_mlp())
    x = inputs(4, 6)
    plain = np.asarray(runner.forward((x,), {}))
    assert runner.compilations == 1
    for _ in range(3):
        runner.forward((x,), {})
    assert runner.compilations == 1
    for count, (given, kwargs, factor) in enumerate(
        [
            ((x,), {"double": True}, 2),
            ((x, 3.0), {}, 3),
            ((x, 3), {}, 3),
            ((x, True), {}, 1),
            ((x, np.float32(5)), {}, 5),
            ((x[:2],), {}, 1),
            ((x.astype(np.float16),), {}, 1),
        ]
    ):
        found = runner.forward(given, kwargs)
        assert runner.compilations == count + 2
        np.testing.assert_allclose(
            np.asarray(found, np.float32), plain[: len(found)] * factor, rtol=5e-3, atol=5e-3
        )
    runner.forward((x, np.float32(6)), {})  # a number that varies goes in as an array
    assert runner.compilations == 8
    zeros = [np.asarray(runner.forward((x, value), {})) for value in (0.0, -0.0)]
    assert (np.signbit(zeros[0]) != np.signbit(zeros[1])).all()
    assert runner.report()["compilations"] == 10


class Mixed(nnx.Module):
    """Its result depends on what promotes in JAX, and on the type of a flag."""

    def __init__(self):
        self.one = nnx.Param(jnp.ones(3, jnp.bfloat16))

    def __call__(self, x, flag=0):
        y = x + self.one[...]
        return -y if flag is True else y


def test_a_signature_tells_weak_from_strong_types_and_a_flag_from_a_number():
    runner = make(Mixed(), dtype="bf16")
    module = runner.module
    for x in (jnp.float32(2), jnp.asarray(2.0), jnp.float32(2)):
        assert runner.forward((x,), {}).dtype == module(x).dtype
    assert module(jnp.float32(2)).dtype != module(jnp.asarray(2.0)).dtype
    x = jnp.float32(2)
    assert [float(runner.forward((x,), {"flag": f})[0]) for f in (1, True, 1)] == [3, -3, 3]


def test_an_input_of_host_memory_is_copied_before_the_call_returns():
    """JAX would lend memory that is aligned as this is, and read it whenever the device comes."""
    memory = np.zeros(4096 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    x = memory[start : start + 4096].view(np.float32)
    runner = make(Mixed())
    held = runner._put(x)
    x[...] = 7
    np.testing.assert_array_equal(held, 0)


def test_executables_are_bounded_and_the_least_used_goes_first():
    made = Executables(most=3)
    one = jnp.ones(())

    def use(key):
        before = made.compilations
        assert made.run(key, lambda x: x + key, one) == 1 + key
        return made.compilations - before

    assert [use(k) for k in (0, 1, 2, 0, 3)] == [1, 1, 1, 0, 1]  # 1 went
    assert len(made) == 3
    assert [use(k) for k in (0, 2, 3, 1)] == [0, 0, 0, 1]  # 0 went
    assert use(0) == 1
    made.clear()
    assert len(made) == 0 and made.compilations == 6


def test_executables_donate():
    made, buffer = Executables(), jnp.ones(1000)
    address = buffer.unsafe_buffer_pointer()
    for _ in range(2):
        old, buffer = buffer, made.run("add", lambda x: x + 1, buffer, donate=(0,))
        assert old.is_deleted() and buffer.unsafe_buffer_pointer() == address


def test_state_of_a_call_is_discarded():
    runner = make(trained_mlp())
    for _ in range(2):
        runner.forward((inputs(2, 6),), {})
    assert int(runner.module.calls[...]) == 3


def test_random_numbers_survive_the_split():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.rngs = rngs
            self.w = nnx.Param(jnp.ones(3))

        def __call__(self):
            return self.w + jax.random.normal(self.rngs.noise(), (3,))

    module = Noisy(nnx.Rngs(noise=5))
    runner = make(module)
    found = [np.asarray(runner.forward((), {})) for _ in range(2)]
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(found[0], module(), rtol=1e-6)


def test_generate_is_the_modules_own():
    module = Encoder(nnx.Rngs(0))
    runner = make(module)
    ids = random_ids(2, 5) % 50
    found = runner.generate((ids,), {"steps": 3})
    np.testing.assert_array_equal(found, module.generate(jnp.asarray(ids), steps=3))
    assert found.shape == (2, 8)


def test_module_on_host_runs_there():
    runner = make(Mlp(nnx.Rngs(0)), keep_module_on_host=True)
    assert runner.device.platform == "cpu"
    assert runner.forward((inputs(2, 6),), {}).devices() == {runner.device}


def test_report_counts_parameters():
    runner = make(Mlp(nnx.Rngs(0)), dtype="bf16")
    report = runner.report()
    parameters = 6 * 8 + 8 + 2 * 8 + 8 * 3 + 3
    assert (report["parameters"], report["parameter_bytes"]) == (parameters, 2 * parameters)
    assert report["cache_bytes"] == report["compilations"] == 0
    module = Classifier()
    report = make((module, variables_of(module, inputs(1, 6)))).report()
    assert report["parameters"] == parameters


def test_close_lets_go_of_everything():
    runner = make(trained_mlp(), dtype="bf16")
    result = runner.forward((inputs(3, 6),), {})
    held = weakref.ref(runner._parts)
    module = weakref.ref(runner.module)
    runner.close()
    gc.collect()
    assert held() is None and module() is None
    assert not any(x.shape == (6, 8) and x.dtype == jnp.bfloat16 for x in jax.live_arrays())
    assert np.isfinite(result).all()


def test_profiler_times_each_forward_to_completion():
    class Slow(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.eye(300) / 300)

        def __call__(self, x):
            return jax.lax.fori_loop(0, 300, lambda _, y: y @ self.w, x)

        def generate(self, x):
            return self(self(x))

    runner = make(Slow())
    profiler = Profiler(runner.stopwatch)
    runner.watch(profiler)
    x = jnp.ones((300, 300))
    runner.forward((x,), {})
    for use_events in (True, False):
        profiler.switch(True, use_events)
        results = [runner.forward((x,), {}) for _ in range(3)]
        assert all(r.is_ready() for r in results)
        runner.generate((x,), {})
        times = profiler.take()
        assert len(times) == 4 and all(0.5 < t < 60_000 for t in times)
        assert profiler.take() == []
    profiler.switch(False)
    runner.forward((x,), {})
    with pytest.raises(ProfilingError):
        profiler.take()


def test_everything_is_compiled_already(engine_of):
    for runner in (make(Mlp(nnx.Rngs(0))), engine_of("llama-mqa", "jax").runner):
        assert runner.is_compiled is True
        runner.compile(None, {})
        with pytest.raises(UnsupportedError, match="inductor"):
            runner.compile("inductor", {})
        with pytest.raises(UnsupportedError, match="fullgraph"):
            runner.compile(None, {"fullgraph": True})


class Branching(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(3))

    def __call__(self, x, how):
        if how == "bool" and x.sum() > 0:
            return x
        if how == "int":
            return list(range(x.astype(int)[0]))
        if how == "array":
            return np.asarray(x)
        if how == "mask":
            return x[x > 0]
        if how == "bare":
            return Bare(x)
        return x * self.w


class Bare:
    """A container that JAX does not know."""

    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("how", ["bool", "int", "array", "mask"])
def test_control_flow_on_values_is_refused_with_the_way_on(how):
    runner = make(Branching())
    with pytest.raises(UnsupportedError, match=r"Branching decides .* Python value"):
        runner.forward((inputs(3), how), {})
    assert runner.compilations == 0
    np.testing.assert_array_equal(runner.forward((inputs(3), "plain"), {}), inputs(3))


def test_result_that_is_no_pytree_is_refused():
    with pytest.raises(UnsupportedError, match="returns a Bare"):
        make(Branching()).forward((inputs(3), "bare"), {})


@pytest.mark.parametrize(
    ("args", "kwargs", "name"),
    [
        ((inputs(3), Bare(1)), {}, "argument 1 is a Bare"),
        ((inputs(3),), {"how": {"deep": [1, Bare(1)]}}, r"how\['deep'\]\[1\] is a Bare"),
        ((np.array(["a"]), ""), {}, "argument 0 is an ndarray"),
        ((inputs(3), {1}), {}, "argument 1 is a set"),
    ],
)
def test_argument_of_an_unknown_kind_is_named(args, kwargs, name):
    with pytest.raises(ArgumentError, match=name):
        make(Branching()).forward(args, kwargs)


def test_unhashable_function_is_refused():
    class Pool(list):
        pass

    class Callable:
        __hash__ = None

        def __call__(self, x):
            return x

    with pytest.raises(ArgumentError, match="hashable"):
        make(Encoder(nnx.Rngs(0))).forward((random_ids(1, 3) % 50,), {"pool": Callable()})


def test_errors_of_the_module_come_through():
    with pytest.raises(TypeError, match=r"dot_general|shape|contract"):
        make(Mlp(nnx.Rngs(0))).forward((inputs(2, 5),), {})


class NoCall(nnx.Module):
    pass


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Classifier(), "module.bind"),
        (torch.nn.Linear(2, 2), r"Linear; expected a flax nnx\.Module"),
        ((Classifier(), [1]), "variables of Classifier is a list"),
        ((Classifier(),), "tuple; expected"),
        (lambda x: x, "function; expected"),
        (NoCall(), "NoCall has no __call__"),
    ],
)
def test_other_forms_are_refused_with_those_that_are_taken(module, words):
    with pytest.raises(ModelError, match=words):
        make(module)


def test_module_without_weights_is_refused_by_the_name_of_one():
    abstract = nnx.eval_shape(lambda: Mlp(nnx.Rngs(0)))
    with pytest.raises(ModelError, match=r"weights are missing: .*calls.*abstract .int32"):
        make(abstract)
    module = Classifier()
    variables = jax.eval_shape(module.init, jax.random.key(0), inputs(1, 6))
    with pytest.raises(ModelError, match=r"weights are missing: .*mean"):
        make((module, variables))


# The fused runner's executables.


def forward_inputs(rows, tokens, **fields):
    ids = random_ids(rows, tokens).astype(np.int32)
    positions = np.broadcast_to(np.arange(tokens, dtype=np.int32), ids.shape)
    own = {name: fields.pop(name) for name in Tokens._fields if name in fields}
    return ForwardInputs(Tokens(ids, positions, **own), **fields)


def test_fused_runner_compiles_once_a_bucket_and_set_of_inputs(hf_model):
    with dualinfer.init_inference(
        hf_model("llama-mqa"), backend="jax", dtype="fp32", kernel_inject=True
    ) as engine:
        runner = engine.runner
        assert runner.compilations == 0
        for rows, tokens, fields, count in (
            (2, 9, {}, 1),
            (2, 16, {}, 1),
            (2, 17, {}, 2),
            (2, 16, {"mask": np.ones((2, 16), bool)}, 3),
            (2, 16, {"output_hidden_states": True}, 4),
            (1, 3, {}, 5),
            (2, 12, {}, 5),
        ):
            runner.forward(forward_inputs(rows, tokens, **fields))
            assert runner.compilations == count
        engine.generate(random_ids(2, 9), max_new_tokens=40)
        assert runner.compilations == 7  # prefill and decode
        engine.generate(random_ids(2, 16), max_new_tokens=30)
        assert runner.compilations == 7
        engine.generate(random_ids(2, 9), max_new_tokens=40, do_sample=True, seed=1)
        assert runner.compilations == 7  # which serve sampled rows as well
        assert engine.report().compilations == 7


def test_step_that_fails_before_it_runs_keeps_the_cache(hf_model):
    """A step that never started has donated nothing; the open sequence goes on."""
    with dualinfer.init_inference(
        hf_model("llama-mqa"), backend="jax", dtype="fp32", kernel_inject=True
    ) as engine:
        runner = engine.runner
        expected = list(engine.stream(random_ids(1, 5), max_new_tokens=12, do_sample=False))
        runner.prefill([Request(random_ids(1, 5)[0].astype(np.int32), 12)], [0]).fetch()
        with pytest.raises(ZeroDivisionError):
            runner._advance(Step(("broken",), lambda *args: 1 / 0, ()))
        tokens = runner.decode(11).fetch()[:, 0].tolist()
        assert tokens == expected[1:]
        runner.release([0])


def test_step_that_fails_once_it_ran_has_taken_the_cache(hf_model, monkeypatch):
    """It was donated; the next call makes another one."""
    with dualinfer.init_inference(
        hf_model("llama-mqa"), backend="jax", dtype="fp32", kernel_inject=True
    ) as engine:
        ids, options = random_ids(1, 5), {"max_new_tokens": 6, "do_sample": False}
        expected = np.asarray(engine.generate(ids, **options))
        run = engine.runner._executables.run

        def fail(*args, **kwargs):
            run(*args, **kwargs)
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(engine.runner._executables, "run", fail)
            with pytest.raises(ZeroDivisionError):
                engine.generate(ids, **options)
        np.testing.assert_array_equal(engine.generate(ids, **options), expected)


@pytest.mark.parametrize(
    "count", [*(pytest.param(count, marks=pytest.mark.slow) for count in (3, 4)), 11]
)
def test_steps_in_blocks_make_the_same_text(hf_model, count):
    """As on a GPU: whole blocks, what is left over, and a sequence that ends within a block."""
    with dualinfer.init_inference(
        hf_model("llama-mqa"), backend="jax", dtype="fp32", kernel_inject=True
    ) as engine:
        runner, ids = engine.runner, random_ids(2, 5).astype(np.int32)
        texts = []
        for block in (1, 4):
            runner.steps.block = block
            runner._executables.clear()
            eos = (texts[0][1][1],) if texts else ()
            runner.prefill([Request(ids[0], 30), Request(ids[1], 30, eos_ids=eos)], [0, 1]).fetch()
            found = [runner.decode(count).fetch(), runner.decode(count).fetch()]
            texts.append(np.concatenate(found)[: 2 * count].tolist())
            runner.release([0, 1])
        assert [row[0] for row in texts[1]] == [row[0] for row in texts[0]]
        ended = [row[1] for row in texts[1]]
        at = [row[1] for row in texts[0]].index(texts[0][1][1])
        assert ended[: at + 1] == [row[1] for row in texts[0]][: at + 1]
        assert set(ended[at + 1 :]) <= {NO_TOKEN}


def test_stream_whose_cache_is_lost_is_told(hf_model, monkeypatch):
    """A prefill that failed after it took the cache; nothing may go on without it."""
    with dualinfer.init_inference(
        hf_model("llama-mqa"), backend="jax", dtype="fp32", kernel_inject=True
    ) as engine:
        runner = engine.runner
        request = Request(random_ids(1, 5)[0].astype(np.int32), 12)
        runner.prefill([request], [0]).fetch()
        runner._slots.hold(None, None)
        for start in (lambda: runner.prefill([request], [1]), lambda: runner.decode(3)):
            with pytest.raises(StepError, match="took the cache with it"):
                start()
        runner.release([0])
        assert runner.prefill([request], [0]).fetch().shape == (1, 1)
        runner.release([0])


def test_closed_engine_leaves_no_array(hf_model):
    def use():
        options = dict(backend="jax", dtype="bf16", kernel_inject=True)
        with dualinfer.init_inference(hf_model("llama-mqa"), **options) as engine:
            engine(random_ids(2, 5))
            engine.generate(random_ids(2, 5), max_new_tokens=4)
            return weakref.ref(engine.runner)

    use()
    gc.collect()
    before = {id(x) for x in jax.live_arrays()}
    runner = use()
    gc.collect()
    assert runner() is None
    assert not [x.shape for x in jax.live_arrays() if id(x) not in before]


def compiled_text(runner):
    """The optimised HLO of every executable; its metadata names layers and ops."""
    return "\n".join(made.as_text() for made in runner._executables._made.values())


def test_compiled_code_names_layers_and_ops(hf_model):
    with dualinfer.init_inference(
        hf_model("llama-gqa"), backend="jax", dtype="fp32", kernel_inject=True
    ) as engine:
        engine(random_ids(1, 5))
        text = compiled_text(engine.runner)
        for name in (r"layer\.0/matmul", r"layer\.1/matmul", r"layer\.1/attention", "rms_norm"):
            assert re.search(rf'op_name="[^"]*dualinfer/([^"]*/)?{name}/', text), name
        engine.generate(random_ids(1, 5), max_new_tokens=3)
        text = compiled_text(engine.runner)
        for name in (r"layer\.1/decode_attention", r"layer\.0/append", "sampling"):
            assert re.search(rf'op_name="[^"]*dualinfer/([^"]*/)?{name}/', text), name
    runner = make(Mlp(nnx.Rngs(0)))
    runner.forward((inputs(2, 6),), {})
    assert re.search(r'op_name="[^"]*dualinfer/Mlp/', compiled_text(runner))


def test_trace_shows_the_calls(hf_model, tmp_path):
    with dualinfer.init_inference(
        hf_model("llama-mqa"), backend="jax", dtype="fp32", kernel_inject=True
    ) as engine:
        with jax.profiler.trace(str(tmp_path)):
            engine(random_ids(1, 5))
            engine.generate(random_ids(1, 5), max_new_tokens=3)
        (file,) = tmp_path.rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
        names = {e.name for plane in data.planes for line in plane.lines for e in line.events}
        assert {"dualinfer/forward", "dualinfer/prefill", "dualinfer/decode"} <= names


# Memory of the cache.


def test_cache_bytes_for_is_what_the_report_says(hf_model):
    with dualinfer.init_inference(
        hf_model("llama-gqa"), backend="jax", dtype="bf16", kernel_inject=True
    ) as engine:
        for rows, tokens in ((1, 5), (3, 70)):
            engine.generate(random_ids(rows, tokens), max_new_tokens=1)
            assert engine.report().cache_bytes == engine.runner.cache_bytes_for(rows, tokens)
        free = engine.runner.free_bytes()
        assert free is not None and 2**20 < free < 2**50


def test_cache_without_room_is_refused_before_it_is_allocated(hf_model, monkeypatch):
    with dualinfer.init_inference(
        hf_model("llama-gqa"), backend="jax", dtype="fp32", kernel_inject=True
    ) as engine:
        runner = engine.runner
        small, large = random_ids(1, 5), random_ids(8, 100)
        expected = np.asarray(engine.generate(small, max_new_tokens=9, do_sample=False))
        room = runner.cache_bytes_for(2, 64)
        monkeypatch.setattr("dualinfer.backends.jax.cache.host_free_bytes", lambda: room)
        needed = runner.cache_bytes_for(8, 120)
        with pytest.raises(
            OutOfMemoryError, match=rf"8 sequences of 128 tokens needs {needed:,}.*{room:,}"
        ):
            engine.generate(large, max_new_tokens=20)
        assert engine.report().cache_bytes <= room
        found = engine.generate(small, max_new_tokens=9, do_sample=False)
        np.testing.assert_array_equal(found, expected)


def test_open_stream_outlives_a_call_without_room(hf_model, monkeypatch):
    with dualinfer.init_inference(
        hf_model("llama-gqa"), backend="jax", dtype="fp32", kernel_inject=True
    ) as engine:
        ids = random_ids(1, 5)
        expected = list(engine.stream(ids, max_new_tokens=20, do_sample=False))
        stream = engine.stream(ids, max_new_tokens=20, do_sample=False)
        found = [next(stream) for _ in range(3)]
        with monkeypatch.context() as patch:
            patch.setattr("dualinfer.backends.jax.cache.host_free_bytes", lambda: 1000)
            with pytest.raises(OutOfMemoryError):
                engine.generate(random_ids(4, 100), max_new_tokens=20)
            found += [next(stream) for _ in range(3)]
        assert found + list(stream) == expected


def test_cache_that_cannot_grow_on_the_way_leaves_the_engine_usable(hf_model, monkeypatch):
    monkeypatch.setattr("dualinfer.backends.slots.RESERVED", 8)
    with dualinfer.init_inference(
        hf_model("llama-gqa"), backend="jax", dtype="fp32", kernel_inject=True
    ) as engine:
        ids = random_ids(1, 5)
        expected = np.asarray(engine.generate(ids, max_new_tokens=150, do_sample=False))
        engine.generate(ids, max_new_tokens=2)  # back to the smallest cache
        room = engine.runner.cache_bytes_for(1, 64)
        with monkeypatch.context() as patch:
            patch.setattr("dualinfer.backends.jax.cache.host_free_bytes", lambda: room)
            with pytest.raises(OutOfMemoryError, match="1 sequences of 128 tokens"):
                engine.generate(ids, max_new_tokens=150, do_sample=False)
            engine.generate(ids, max_new_tokens=50)
        found = engine.generate(ids, max_new_tokens=150, do_sample=False)
        np.testing.assert_array_equal(found, expected)


def test_model_times_leave_compiling_out():
    with dualinfer.init_inference(make_gpt2(), backend="jax", kernel_inject=True) as engine:
        engine.profile_model_time()
        ids = np.ones((1, 9), np.int32)
        start = time.perf_counter()
        engine(ids)
        whole = (time.perf_counter() - start) * 1e3
        (first,) = engine.model_times()
        compiling = engine.runner._executables.seconds * 1e3
        assert 0 < first < whole - 0.9 * compiling < whole

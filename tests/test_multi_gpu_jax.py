"""Tensor parallelism of the JAX backend on real GPUs, kernels on. Two GPUs or more."""

import functools
import os

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

import dualinfer  # noqa: E402
from dualinfer.backends.jax.exchange import Exchange, open_exchange  # noqa: E402
from dualinfer.backends.jax.executables import Executables  # noqa: E402
from dualinfer.backends.jax.mesh import ManyDevices  # noqa: E402
from dualinfer.kernels.xla.handler import TARGET  # noqa: E402

from .cases import make_model  # noqa: E402
from .models import random_ids, relative_rms  # noqa: E402
from .test_gpu_kernels_jax import executables, made_by  # noqa: E402

COUNT = 0
if os.environ.get("JAX_PLATFORMS") != "cpu":
    COUNT = len([d for d in jax.devices() if d.platform == "gpu"])
pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(COUNT < 2, reason="needs two CUDA devices"),
]
GPUS = [n for n in (2, 4) if n <= COUNT]
NAMES = ("llama-gqa", "qwen3", "gpt2", "gptj", "bloom", "gemma2", "bert-masked")
GREEDY = {"max_new_tokens": 24, "do_sample": False}
SAMPLED = {"max_new_tokens": 24, "do_sample": True, "top_k": 40, "seed": 7}


def outputs_of(name, tp, dtype):
    ids = random_ids(3, 11)
    with dualinfer.init_inference(
        make_model(name),
        backend="jax",
        dtype=dtype,
        replace_with_kernel_inject=True,
        tensor_parallel={"tp_size": tp},
    ) as engine:
        logits = np.asarray(engine(ids).logits, np.float32)
        texts = []
        if engine.can_generate():
            texts = [engine.generate(ids, **how).tolist() for how in (GREEDY, SAMPLED)]
            before = engine.report().compilations
            assert engine.generate(ids, **GREEDY).tolist() == texts[0]
            assert engine.report().compilations == before
        assert "Triton" in str(engine.report().ops)
        return logits, texts


@pytest.fixture(scope="module")
def single():
    """What one GPU gives, by name and dtype."""
    made = {}

    def get(name, dtype):
        if (name, dtype) not in made:
            made[name, dtype] = outputs_of(name, 1, dtype)
        return made[name, dtype]

    return get


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tp", GPUS)
def test_float32_over_several_gpus_equals_one(single, name, tp):
    logits, texts = outputs_of(name, tp, "fp32")
    expected, expected_texts = single(name, "fp32")
    assert relative_rms(logits, expected) < 1e-5
    assert texts == expected_texts


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tp", GPUS)
def test_bfloat16_over_several_gpus_errs_as_one_does(single, name, tp):
    reference = single(name, "fp32")[0]
    own = relative_rms(single(name, "bf16")[0], reference)
    assert relative_rms(outputs_of(name, tp, "bf16")[0], reference) < 1.1 * own


@pytest.mark.parametrize("tp", GPUS)
def test_no_cache_is_copied_by_a_step(tp):
    ids = random_ids(1, 11)
    with dualinfer.init_inference(
        make_model("llama-gqa"),
        backend="jax",
        dtype="bf16",
        replace_with_kernel_inject=True,
        tensor_parallel={"tp_size": tp},
    ) as engine:
        engine.generate(ids, **GREEDY)
        local = engine.runner._slots.cache.layers[0].k.addressable_shards[0].data.shape
        shape = f"bf16[{','.join(map(str, local))}]"
        (step,) = executables(engine, "decode")
        writing = made_by(step.as_text(), shape)
        assert writing
        assert all("output_to_operand_aliasing" in line for line in writing)


# Exchanges


def place_of(tp):
    gpus = [d for d in jax.devices() if d.platform == "gpu"][:tp]
    return ManyDevices(jax.sharding.Mesh(np.array(gpus), ("tp",)), "tp")


@pytest.fixture(scope="module")
def exchanges():
    """An exchange over so many GPUs, one for all tests."""
    made = {}

    def get(tp):
        if tp not in made:
            made[tp] = open_exchange(place_of(tp), 1000, 20.0)
        assert isinstance(made[tp], Exchange), made[tp]
        return made[tp]

    yield get
    for exchange in made.values():
        if isinstance(exchange, Exchange):
            exchange.close()


def early():
    """Whether kernels may start before the one in front has ended."""
    return float(jax.devices("gpu")[0].compute_capability) >= 9.0


def on_all(exchange, tp, function, *args):
    """What `function(row, *args)` gives on each device, [devices, ...]; nothing was given up."""
    place = place_of(tp)

    def run(table, *args):
        *found, order = function(table[0], *args)
        flag = exchange.given_up(table[0], order)
        return [x[None] for x in found], flag

    over = place.over_devices
    spread = place.spread(run, (over, *(place.sharding().spec,) * len(args)), (over, over))
    found, flags = Executables().run("test", spread, exchange.table, *map(place.put, args))
    assert not np.asarray(flags).any()
    return [np.asarray(x) for x in found]


@pytest.mark.parametrize("tp", GPUS)
def test_exchanges_are_psum_and_all_gather_over_thousands(exchanges, tp):
    """Two sizes and a gather by turns, in a loop on the GPUs, of values that those before made.

    With early start in half of the turns, also right behind one another.
    """
    exchange, loops = exchanges(tp), 3000

    def function(row, loops, pdl):
        rank = lax.axis_index("tp").astype(jnp.float32)

        def noise(i, shape):
            at = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
            return jnp.sin(at * 0.37 + i.astype(jnp.float32) * 1.7 + rank * 11)

        def body(i, carry):
            small, large, error, order = carry
            x = noise(i, (1, 1000)) + 0.25 * jnp.tanh(small)
            y = noise(i + 7, (3, 8192)) + 0.25 * jnp.tanh(large)
            small, order = exchange.sum(x, row, order, pdl=pdl)
            large, order = exchange.sum(y, row, order, pdl=pdl)
            joined, order = exchange.gather(x, row, order, tp * 1000 - 3, pdl=pdl)
            expected = lax.all_gather(x, "tp", axis=1, tiled=True)[:, :-3]
            for found, wanted in (
                (small, lax.psum(x, "tp")),
                (large, lax.psum(y, "tp")),
                (joined, expected),
            ):
                off = jnp.max(jnp.abs(found - wanted))
                error = jnp.where(off <= error, error, off)  # NaN stays
            return small, large, error, order

        small, large = jnp.zeros((1, 1000)), jnp.zeros((3, 8192))
        carry = small, large, jnp.float32(0), jnp.zeros(1, jnp.int32)
        return lax.fori_loop(0, loops, body, carry)

    for pdl in (False, early()):  # the second goes on with the numbers of the first
        run = functools.partial(function, pdl=pdl)
        small, large, error = on_all(exchange, tp, run, np.int32(loops))
        print("max error", error)
        assert error.max() < 1e-5 and np.isfinite(error).all()
        for values in (small, large):
            pattern = values.view(np.uint32)
            assert (pattern == pattern[:1]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(1, 1, 4096), (3, 1, 768), (1, 1, 50)], ids=str)
@pytest.mark.parametrize("tp", GPUS)
def test_bias_and_residual_are_added_once_and_rounded_once(exchanges, tp, shape, dtype):
    random = np.random.default_rng(0)
    x = random.standard_normal((tp, *shape), np.float32)
    bias, residual = (
        np.asarray(jnp.asarray(random.standard_normal(s, np.float32), dtype))
        for s in (shape[-1], shape)
    )

    def function(row, x, bias, residual):
        own, order = x[lax.axis_index("tp")], jnp.zeros(1, jnp.int32)
        return exchanges(tp).sum(own, row, order, bias, residual, bias.dtype)

    (found,) = on_all(exchanges(tp), tp, function, x, bias, residual)
    total = x[0].copy()
    for other in x[1:]:
        total += other
    total = total + bias.astype(np.float32) + residual.astype(np.float32)
    expected = np.asarray(jnp.asarray(total, dtype))
    np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))


@pytest.mark.parametrize("tp", GPUS)
def test_a_step_exchanges_and_its_text_goes_on_over_several_calls(tp):
    ids, texts = random_ids(1, 11), []
    for count in (1, tp):
        with dualinfer.init_inference(
            make_model("llama-gqa", vocab_size=1000),  # every device has some of it
            backend="jax",
            dtype="fp32",
            replace_with_kernel_inject=True,
            tensor_parallel={"tp_size": count},
        ) as engine:
            how = {"max_new_tokens": 70, "do_sample": False, "eos_token_id": None}
            texts.append([engine.generate(ids, pad_token_id=0, **how).tolist() for _ in range(3)])
            if count > 1:
                assert "peer to peer" in engine.report().ops["sum over devices"]
                for step in executables(engine, "decode"):
                    text = step.as_text()
                    assert TARGET in text
                    assert "all-reduce" not in text and "all-gather" not in text
    assert texts[0] == texts[1] and texts[1][0] == texts[1][2]


@pytest.mark.parametrize("tp", GPUS)
def test_a_gpu_that_does_not_come_is_given_up(tp):
    """One that comes twice alone waits a second, once, and has NaN; the host is told."""
    exchange = Exchange(place_of(tp), 1000, 600.0)
    exchange.patience = 1_000_000  # a second
    place = place_of(tp)

    def run(table):
        order = jnp.zeros(1, jnp.int32)
        ahead = jnp.where(lax.axis_index("tp") == 0, 2, 0)

        def alone(i, carry):  # rank 0 makes two exchanges that no other makes
            y, order = carry
            return exchange.sum(y, table[0], order)

        y, order = lax.fori_loop(0, ahead, alone, (jnp.ones(100), order))
        return y[None], exchange.given_up(table[0], order)

    over = place.over_devices
    found, flags = Executables().run(
        "test", place.spread(run, (over,), (over, over)), exchange.table
    )
    assert np.asarray(flags).tolist() == [1] + [0] * (tp - 1)
    assert np.isnan(np.asarray(found)[0]).all()
    with pytest.raises(dualinfer.errors.DistributedError, match="gave up an exchange"):
        exchange.check(flags)
    exchange.close()

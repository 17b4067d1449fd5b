"""Functions of kernels/triton on JAX arrays: launches as a primitive, one by one and in groups."""

from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from jax import lax  # noqa: E402

from dualinfer.kernels.triton import norm  # noqa: E402
from dualinfer.kernels.triton.launch import INTERPRETED, launch  # noqa: E402
from dualinfer.kernels.xla import grouping, launches  # noqa: E402
from dualinfer.kernels.xla.grouping import grouped  # noqa: E402

from .cases import assert_close, normal  # noqa: E402
from .implementations import meaning  # noqa: E402
from .tensors import strict  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter: TRITON_INTERPRET=1"),
    pytest.mark.usefixtures(strict.__name__),
]
call = partial(launches.call, capability=90)


@triton.jit
def _add_kernel(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(x_ptr + at, mask=inside).to(tl.float32)
    total = x + tl.load(y_ptr + at, mask=inside).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def add(x: Any, y: Any, out: Any = None) -> Any:
    """x + y of contiguous arrays, in `out` if given."""
    out = x.new_empty(x.shape) if out is None else out
    block = 1 << (x.numel() - 1).bit_length()
    launch(_add_kernel, (1,), x, y, out, x.numel(), BLOCK=block)
    return out


def plus(x: Any, y: Any) -> Any:
    """A JAX array: one launch."""
    return call(add, x, y)[0]


def grown(y: Any, x: Any) -> Any:
    """y + x in the memory of y."""
    return call(lambda y, x: add(y, x, y) and None, y, x, written=(y,))[1][0]


def vector(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).integers(-99, 99, shape or (5,)), jnp.float32)


# One call


def test_a_kernel_gives_what_the_reference_gives(dtype):
    x, weight = normal(1, 3, 65, dtype=dtype), normal(2, 65, dtype=dtype)
    found, written = call(norm.rms_norm, jnp.asarray(x), jnp.asarray(weight), 1e-6)
    assert written == []
    assert_close(np.asarray(found), meaning.rms_norm(x, weight, 1e-6), dtype, length=65)


@pytest.mark.parametrize("traced", [False, True])
def test_what_is_changed_in_place_comes_back_and_the_old_one_stays(traced):
    x, y = vector(1), vector(2)

    def run(y: Any, x: Any) -> Any:
        after = grown(y, x)
        return after, y * 2, grown(after, after)

    after, twice, more = (jax.jit(run) if traced else run)(y, x)
    np.testing.assert_array_equal(after, y + x)
    np.testing.assert_array_equal(twice, 2 * y)
    np.testing.assert_array_equal(more, 2 * (y + x))
    np.testing.assert_array_equal(y, vector(2))


def test_what_a_function_returns_of_a_changed_array_is_the_new_one():
    x, y = vector(1), vector(2)
    result, (after,) = call(lambda y, x: add(y, x, y), y, x, written=(y,))
    np.testing.assert_array_equal(result, y + x)
    np.testing.assert_array_equal(after, y + x)


def test_an_array_given_twice_is_one_buffer():
    x = vector(1)
    _, (after,) = call(lambda a, b: add(a, b, a) and None, x, x, written=(x,))
    np.testing.assert_array_equal(after, 2 * x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32"])
def test_views_begin_where_they_begin(dtype):
    x = vector(1, 4, 2, 5).astype(dtype)

    def rows(x: Any) -> Any:
        return add(x[1, 0], x.narrow(0, 2, 1)[0, 1]), x.new_empty((1, 2), "int32")

    (found, other), _ = call(rows, x)
    np.testing.assert_array_equal(found, x[1, 0] + x[2, 1])
    assert found.dtype == x.dtype and other.shape == (1, 2) and other.dtype == jnp.int32


def test_a_part_of_a_buffer_is_no_result():
    with pytest.raises(ValueError, match="gave a part of a buffer"):
        call(lambda x: add(x, x).narrow(0, 1, 2), vector(1))


# Groups


def calls(function: Any, *args: Any) -> list[int]:
    """Launches of each call of a grouped function, in their order, inner functions' included."""

    def within(jaxpr: Any) -> list[int]:
        found = []
        for eqn in jaxpr.eqns:
            if eqn.primitive is launches.launches_p:
                found.append(len(eqn.params["launches"]))
            for inner in grouping._inner(eqn):
                found += within(inner)
        return found

    return within(jax.make_jaxpr(grouped(function))(*args).jaxpr)


def check(function: Any, *args: Any) -> list[int]:
    """`calls`, and that grouping changes no result."""
    wanted = jax.jit(function)(*args)
    found = jax.jit(grouped(function))(*args)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    return calls(function, *args)


def test_launches_that_follow_one_another_are_one_call():
    assert check(lambda x, y: plus(plus(x, y), plus(y, y)), vector(1), vector(2)) == [3]


def test_reshapes_in_between_are_the_same_memory():
    def run(x: Any, y: Any) -> Any:
        a = plus(x, y).reshape(2, 3)[None]
        return plus(a, a).reshape(-1), a

    assert check(run, vector(1, 6), vector(2, 6)) == [2]


def test_what_xla_reads_or_makes_divides_them():
    def run(x: Any, y: Any) -> Any:
        a = plus(x, y)
        return plus(a * 2, y), a

    assert check(run, vector(1), vector(2)) == [1, 1]


def test_what_reads_nothing_of_a_group_comes_before_it():
    def run(x: Any, y: Any) -> Any:
        a = plus(x, y)
        other = jnp.sin(y)
        return plus(a, other), other

    assert check(run, vector(1), vector(2)) == [2]


def test_results_in_the_middle_are_results_still():
    def run(x: Any, y: Any) -> Any:
        a = plus(x, y)
        b = plus(a, y)
        return a, b, a + b

    assert check(run, vector(1), vector(2)) == [2]


def test_an_array_changed_several_times_is_changed_in_one_call():
    def run(y: Any, x: Any) -> Any:
        for _ in range(3):
            y = grown(y, x)
        return plus(y, y), y

    assert check(run, vector(1), vector(2)) == [4]
    jaxpr = jax.make_jaxpr(grouped(run))(vector(1), vector(2)).jaxpr
    (made,) = (e for e in jaxpr.eqns if e.primitive is launches.launches_p)
    ((number, place),) = made.params["aliases"]
    assert made.invars[number] is jaxpr.invars[0]
    assert made.outvars[place] is jaxpr.outvars[1]


def test_what_was_before_a_change_is_read_in_a_call_of_its_own():
    def run(y: Any, x: Any) -> Any:
        after = grown(y, x)
        return after, plus(y, x), y

    assert check(run, vector(1), vector(2)) == [1, 1]


def test_what_a_group_made_and_others_read_is_not_changed_in_it():
    def run(x: Any, y: Any) -> Any:
        a = plus(x, y)
        b = grown(a, y)
        return a, b, plus(b, a)

    assert sum(check(run, vector(1), vector(2))) == 3
    assert calls(run, vector(1), vector(2))[0] == 1


def test_what_is_read_in_another_shape_is_not_changed_before():
    def run(x: Any, y: Any) -> Any:
        a = plus(x, y)
        b = a.reshape(1, -1)
        return grown(a, y), b * 2

    assert check(run, vector(1), vector(2)) == [1, 1]


def test_what_nobody_reads_again_is_changed_in_its_group():
    assert check(lambda x, y: grown(plus(x, y), y), vector(1), vector(2)) == [2]


def test_an_array_read_beside_its_own_change_keeps_its_old_value():
    def run(y: Any, x: Any) -> Any:
        a = plus(y, x)
        _, (after,) = call(lambda y, z: add(z, z, y) and None, y, y.reshape(5, 1), written=(y,))
        return a, after

    check(run, vector(1), vector(2))


@pytest.mark.parametrize("most", [0, 3 * 20, 1 << 20])
def test_what_launches_hand_on_is_bounded(most, monkeypatch):
    monkeypatch.setattr(grouping, "MOST_BYTES", most)

    def run(x: Any, y: Any) -> Any:
        for _ in range(6):
            x = plus(x, y)
        return x

    assert check(run, vector(1), vector(2)) == {0: [1] * 6, 60: [3, 3], 1 << 20: [6]}[most]


def twice(x: Any, y: Any) -> Any:
    return plus(plus(x, y), y)


INNER: dict[str, Any] = {
    "jit": lambda x, y: jax.jit(twice)(x, y),
    "while": lambda x, y: lax.while_loop(lambda z: z.sum() < 1e4, lambda z: twice(z, y), x + 99),
    "fori": lambda x, y: lax.fori_loop(0, 3, lambda _, z: twice(z, y), x),
    "cond": lambda x, y: lax.cond(x[0] > 0, lambda: twice(x, y), lambda: twice(y, y)),
    "scan": lambda x, y: lax.scan(lambda z, _: (twice(z, y), z), x, length=3),
}


@pytest.mark.parametrize("function", INNER.values(), ids=INNER)
def test_launches_of_inner_functions_are_joined(function):
    found = check(function, jnp.abs(vector(1)), jnp.abs(vector(2)))
    assert found and set(found) == {2}


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two virtual devices")
def test_launches_of_a_share_are_joined():
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("tp")
    run = jax.shard_map(twice, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    assert check(run, vector(1, 8), vector(2, 8)) == [2]


def test_a_function_without_launches_is_as_it_was():
    function = lambda x: {"sum": x.sum(), "twice": (x * 2,)}  # noqa: E731
    assert check(function, vector(1)) == []
    assert "name=sin_of" in str(jax.make_jaxpr(grouped(sin_of))(vector(1)))


@jax.jit
def sin_of(x: Any) -> Any:
    return jnp.sin(x)

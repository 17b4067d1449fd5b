"""Maths of torch and of JAX give what those of NumPy give, function by function."""

import importlib

import ml_dtypes
import numpy as np
import pytest

from dualinfer.ops import exact, maths

from .models import BACKENDS, relative_rms

RNG = np.random.default_rng(5)
X = RNG.standard_normal((2, 3, 8), np.float32)
Y = RNG.standard_normal((2, 3, 8), np.float32)
W = RNG.standard_normal((5, 8), np.float32)
B = RNG.standard_normal(5, np.float32)
IDS = RNG.integers(0, 3, (2, 4)).astype(np.int32)
AT = np.sort(RNG.integers(0, 8, (2, 3, 2)), -1)
SIX = RNG.permuted(np.tile(np.arange(8, dtype=np.float32), (2, 3, 1)), axis=-1)
BYTES = np.arange(2, 120, 7, dtype=np.uint8)
F32 = "float32"


def product_of_groups(m, own):
    """Each pair times its number's matrix; one number has no pair, and one is elsewhere."""
    chosen, rows = own(np.array([2, 0, 2, 4, 0, 3])), own(np.concatenate((W, W[:1])))
    matrices = own(np.stack([W + i for i in range(4)]))
    made = m.groups(chosen, 4, 4, chosen < 4)

    def make(own, rows, factors, nothing):
        return m.product(rows, own[0], m.float32) * factors[:, None]

    paired = (rows[:3], 2), (rows[:, 0], 1), (None, 1)
    return made(make, (matrices, None), paired, 5, m.float32)


def scanned(m, own):
    """A running sum, by pieces of two tokens."""

    def step(state, part):
        y = state[:, None] + part.cumsum(1)
        return y[:, -1], y

    return m.scan(step, m.zeros((2, 8), m.float32, own(X)), (own(X),), 2)[0]


# A call of each function, over arrays that `own` puts into the framework.
CALLS = {
    "wide": lambda m, own: m.wide(own(X.astype(np.float16))),
    "cast": lambda m, own: m.cast(own(X), m.bfloat16),
    "rounded": lambda m, own: m.rounded(own(X), m.bfloat16),
    "nearest": lambda m, own: m.nearest(0.3, m.bfloat16),
    "epsilon": lambda m, own: m.epsilon(m.bfloat16),
    "arange": lambda m, own: m.arange(5, own(X)),
    "zeros": lambda m, own: m.zeros((2, 3), m.float32, own(X)),
    "of_numpy": lambda m, own: m.of_numpy(W, own(X)),
    "put": lambda m, own: m.put(
        own(X) * 1, (own(AT[:, 0, 0] * 0 + [1, 0]), slice(None), 5), own(Y[:, :, 0])
    ),
    "put_some": lambda m, own: m.put_some(
        own(X) * 1,
        (own(IDS[:, :3] * 0 + 1), own(IDS[:, :3] * 0 + np.arange(6).reshape(2, 3) % 3)),
        own(Y[:, :3]),
        own(np.array([[True, False, True], [False, True, False]])),
    ),
    "put_rows": lambda m, own: m.put_rows(own(X) * 1, own(IDS[:1, 0] // 2), own(Y[:1, :2]), 1),
    "rows_or": lambda m, own: m.rows_or(own(IDS), own(IDS[0] // 2), 7),
    "grow": lambda m, own: m.grow(own(X), (1, 2)),
    "stack": lambda m, own: m.stack((own(X), own(Y)), -1),
    "join": lambda m, own: m.join((own(X), own(Y)), 1),
    "repeat": lambda m, own: m.repeat(own(X), 3, -1),
    "pad": lambda m, own: m.pad(own(X), 1, 2, 1, 0.5),
    "moveaxis": lambda m, own: m.moveaxis(own(X), -1, 0),
    "broadcast": lambda m, own: m.broadcast(own(X)[:, :1], (2, 4, 8)),
    "whole": lambda m, own: m.whole(own(X)[..., 2:]),
    "windows": lambda m, own: m.windows(own(X), 2, 4, 2),
    "replace_last": lambda m, own: m.replace_last(own(X) * 1, own(Y)[..., :3]),
    "where": lambda m, own: m.where(own(X) > 0, own(X), -1.5),
    "clip": lambda m, own: m.clip(own(X), -0.5, 0.25),
    "minimum": lambda m, own: m.minimum(own(X), own(Y)),
    "maximum": lambda m, own: m.maximum(own(X), own(Y)),
    "times": lambda m, own: m.times(own(X), 0.3),
    "quotient": lambda m, own: m.quotient(own(X), own(Y)),
    "add_product": lambda m, own: m.add_product(own(X), own(Y), own(Y[:, :1])),
    "most": lambda m, own: m.most(own(X)),
    "length": lambda m, own: m.length(own(X)),
    "argmax": lambda m, own: m.argmax(own(SIX // 3)),
    "log_softmax": lambda m, own: m.log_softmax(own(X)),
    "log_sum": lambda m, own: m.log_sum(own(X)),
    "softmax": lambda m, own: m.softmax(own(X)),
    "glu": lambda m, own: m.glu(own(X)),
    "layer_norm": lambda m, own: m.layer_norm(own(X), own(X[0, 0]), own(Y[0, 0]), 1e-3),
    "top": lambda m, own: m.top(own(X), 3),
    "largest": lambda m, own: m.largest(own(SIX // 3), 5),
    "sort": lambda m, own: m.sort(own(X)),
    "ascending": lambda m, own: m.join([m.wide(a) for a in m.ascending(own(SIX))], -1),
    "one_hot": lambda m, own: m.one_hot(own(IDS), 5),
    "among": lambda m, own: m.among(own(AT), 8),
    "without": lambda m, own: m.exp(m.without(own(X), own(AT[..., :1]))),
    "running_most": lambda m, own: m.running_most(own(IDS), 1),
    "rows": lambda m, own: m.rows(own(W), own(IDS)),
    "within": lambda m, own: m.rows(own(W), m.within(own(IDS * 4), 5)),
    "row": lambda m, own: m.row(own(W), 3),
    "places": lambda m, own: m.places(own(X), own(IDS)),
    "along": lambda m, own: m.along(own(X), own(AT[:1])),
    "product": lambda m, own: m.product(own(X), own(W), m.float32, own(B)),
    "einsum": lambda m, own: m.einsum("bti,oi->bot", own(X), own(W)),
    "scores": lambda m, own: m.scores("bti,oi->bot", own(X), own(W)),
    "solve": lambda m, own: m.solve(own(X[:, None, :, :3]), own(Y[:, None])),
    "convolution": lambda m, own: m.convolution(
        own(X), own(np.stack([W, W[::-1], W * W], -1)), own(B), 2
    ),
    "pooled": lambda m, own: m.pooled(own(X[..., :3]), own(Y)),
    "most_of": lambda m, own: m.exp(m.most_of(own(X), own(AT[..., 0] // 2), 3)),
    "groups": product_of_groups,
    "scan": scanned,
    "words": lambda m, own: m.words(own(IDS)),
    "low": lambda m, own: m.low(m.words(own(IDS)) + 2 << 31),
    "float8": lambda m, own: m.float8(own(BYTES), "float8_e4m3fn"),
    "nearest_e4m3": lambda m, own: m.nearest_e4m3(own(X * 50)),
    "as_codes": lambda m, own: m.as_codes(own(X * 30), "int8"),
    "power": lambda m, own: m.power(abs(own(X)), 1),
    "table": lambda m, own: m.table((0.5, -2.0, 7.0), own(IDS)),
}
UNARY = ("exp", "expm1", "cos", "sin", "tanh", "sigmoid", "softplus", "floor", "round")
POSITIVE = ("log", "sqrt", "rsqrt")
CALLS |= {name: lambda m, own, name=name: getattr(m, name)(own(X)) for name in UNARY}
CALLS |= {name: lambda m, own, name=name: getattr(m, name)(abs(own(X))) for name in POSITIVE}
# What tests of ops show of every option, and what gives no array.
ELSEWHERE = {"attention", "activation", "sums", "span", "name", "float32", "bfloat16", "int32"}


def own_of(backend):
    """Maths of a backend, and NumPy to its arrays."""
    own = importlib.import_module(f"dualinfer.backends.{backend}.maths").MATHS
    put = importlib.import_module("torch").tensor
    if backend == "jax":
        put = importlib.import_module("jax").numpy.asarray
    return own, put


def test_every_function_has_a_case():
    members = {name for name in vars(maths.Maths) if not name.startswith("_")}
    members |= set(maths.Maths.__annotations__)
    assert members - ELSEWHERE == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_functions_give_what_those_of_numpy_give(name, backend):
    pytest.importorskip(backend)
    m, put = own_of(backend)
    found = CALLS[name](m, put)
    if not isinstance(found, float):
        found = np.asarray(m.wide(found))
    expected = np.asarray(CALLS[name](exact.MATHS, np.asarray), np.float64)
    if name in ("cast", "rounded", "nearest", "epsilon"):  # NumPy rounds nothing by itself
        expected = expected.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    if not expected.any():
        assert found.shape == expected.shape and not found.any()
    else:
        assert relative_rms(found, expected) < 1e-6

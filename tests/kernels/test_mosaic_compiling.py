"""Kernels by Mosaic GPU, compiled for a Hopper by their own compiler; none is run."""

from functools import partial
from typing import Any, get_args

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from dualinfer.backends.jax.ops.pallas import in_kernel  # noqa: E402
from dualinfer.kernels.pallas import ring, tiles, token_attention  # noqa: E402
from dualinfer.kernels.pallas.product import Codes, planes_of  # noqa: E402
from dualinfer.model.spec import Activation  # noqa: E402

from .mosaic_compiler import compiled, needs_compiler  # noqa: E402
from .test_pallas_lowering import steps_of_a_gpu  # noqa: E402

pytestmark = [pytest.mark.slow, needs_compiler]
FEATURES = 512
ROWS = {"int8": ("int8",), "fp8": ("fp8_e4m3",), "int4": ("int4",), "uint4": ("uint4",)}
BLOCKS = {"int4 in blocks": ("int4", 64), "fp8 in blocks": ("fp8_e4m3", 128, 128)}


def kernels_of(
    kernel: Any,
    count: int,
    width: int,
    folder: Any,
    code: tuple[Any, ...] = (),
    gated: bool = False,
    activation: Activation = "silu",
    **more: Any,
) -> list[Any]:
    """A product of `count` rows with all that goes with it, compiled.

    `code` is the kind of codes, the columns of a scale and the rows that share one.
    """

    def of(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    kind, columns, shared = (*code, *("", 0, 1)[len(code) :])
    form = Codes(*[None] * 4, kind, columns, width, 8 * (kind == "int4"), (), shared)  # type: ignore
    data, beside = of((FEATURES, width)), (FEATURES // shared, width // (columns or width))
    if kind:
        bytes_of = FEATURES, width // planes_of(form)
        data = of(bytes_of, jnp.int8 if kind == "int8" else jnp.uint8)
    zero = of(beside, jnp.uint8) if kind == "uint4" else None
    results = FEATURES // (2 if gated else 1)

    def function(
        x: Any, data: Any, scale: Any, zero: Any, bias: Any, row: Any, residual: Any
    ) -> Any:
        matrix = form._replace(data=data, scale=scale, zero=zero) if kind else data
        assert kernel.serves(count, matrix, gated, x.dtype)
        how: dict[str, Any] = {"dtype": x.dtype, "bias": bias, "gated": gated}
        how["activation"] = partial(in_kernel, activation)
        if kernel is tiles:
            return tiles.product(x, matrix, residual=residual, **how)
        return ring.product(x[0], matrix, eps=1e-5, gain=row, residual=residual[0], **how)

    shapes = of((count, width)), data, of(beside, jnp.float32), zero, of((FEATURES,)), of((width,))
    return compiled(function, *shapes, of((count, results)), folder=folder, **more)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("width", [4096, 14336])
@pytest.mark.parametrize("name", ["floats", *ROWS])
def test_a_product_of_a_row_keeps_it_in_registers(name, width, gated, tmp_path):
    (kernel,) = kernels_of(ring, 1, width, tmp_path, ROWS.get(name, ()), gated)
    assert not kernel.spilled


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("count", [1, 32, 64, 256])
@pytest.mark.parametrize("name", ["floats", *ROWS, *BLOCKS])
def test_a_product_of_rows_keeps_its_sums_in_registers(name, count, gated, tmp_path):
    (kernel,) = kernels_of(tiles, count, 4096, tmp_path, (ROWS | BLOCKS).get(name, ()), gated)
    assert not kernel.spilled


@pytest.mark.parametrize("kernel", [ring, tiles], ids=["ring", "tiles"])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_activations_compile(kernel, activation, tmp_path):
    assert kernels_of(kernel, 1, 512, tmp_path, gated=True, activation=activation)


def test_a_blackwell_has_rings_and_no_tiles(tmp_path):
    """Its matrix units take other instructions, and what does not compile is told."""
    assert kernels_of(ring, 1, 512, tmp_path, capability=(10, 0))
    with pytest.raises(AssertionError, match=r"wgmma"):
        kernels_of(tiles, 3, 512, tmp_path, capability=(10, 0))


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(
    ("dim", "softcap"), [(64, None), (128, None), (128, 30.0), (192, None), (256, 30.0)]
)
def test_a_tokens_attention_keeps_its_sums_in_registers(dim, softcap, blocks, tmp_path):
    """Two kernels, of which the first puts the token's key and value in the cache."""
    kind, numbers = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((3,), jnp.int32)
    cache = kind((20, 2, 64, dim) if blocks else (3, 2, 256, dim), jnp.bfloat16)

    def step(q: Any, k: Any, v: Any, new: Any, rows: Any, at: Any, table: Any) -> Any:
        k, v = token_attention.put(k, v, (new, new), rows, at)
        read = token_attention.Read(window=100) if blocks else token_attention.Read(chunk=96)
        how: dict[str, Any] = {"scale": 0.1, "softcap": softcap, "read": read}
        how["table"] = table if blocks else None
        return token_attention.attend(q, k, v, at + 1, **how), k, v

    given = kind((3, 24, dim), jnp.bfloat16), cache, cache, kind((3, 2, dim), jnp.bfloat16)
    rest = numbers, numbers, kind((3, 4), jnp.int32)
    kernels = compiled(step, *given, *rest, folder=tmp_path)
    assert len(kernels) == 2 and not any(kernel.spilled for kernel in kernels)


@pytest.mark.parametrize(("quant", "count"), [(None, 1), ("int8", 3), ("int4", 1)])
def test_kernels_of_whole_steps_compile(quant, count, tmp_path, monkeypatch):
    for function, args in steps_of_a_gpu(monkeypatch, count, quant=quant).values():
        kernels = compiled(function, *args, folder=tmp_path)
        assert len(kernels) >= 4 and not any(kernel.spilled for kernel in kernels)

"""A token's attention by Mosaic GPU, as JAX simulates a GPU, and as it is lowered for one."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import get_races  # noqa: E402
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # noqa: E402
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from dualinfer.kernels.pallas import token_attention  # noqa: E402
from dualinfer.kernels.pallas.token_attention import Read  # noqa: E402

from . import oracles  # noqa: E402
from .cases import DTYPES, assert_close, normal  # noqa: E402

FLOAT32, BFLOAT16, FLOAT16 = DTYPES
LENGTHS = np.array([1, 70, 256], np.int32)
BLOCK = 64


class Case(NamedTuple):
    """Heads, heads of keys and elements, how keys lie and are read, and how scores are made."""

    sizes: tuple[int, int, int]
    blocks: bool = False
    read: Read = Read()
    sms: int = 1
    softcap: float | None = None
    sinks: np.ndarray | None = None
    dtype: np.dtype = BFLOAT16


CASES = {
    "slots, one program a head": Case((6, 2, 64)),
    "slots, shared": Case((4, 1, 128), sms=6, sinks=normal(9, 4, dtype=FLOAT32)),
    "blocks, a group of more rows": Case((9, 1, 256), True, sms=6, softcap=2.5),
    "blocks, window": Case((2, 2, 64), True, Read(window=50), 2, 30.0),
    "slots, chunk": Case((2, 2, 64), read=Read(chunk=100), sms=2, dtype=FLOAT16),
}


def in_blocks(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The blocks of keys [N, K, S, D] in some order, and two that no slot has; and their table."""
    count, heads, tokens, dim = x.shape
    each = tokens // BLOCK
    order = np.random.default_rng(1).permutation(count * each + 2)[: count * each]
    pool = np.full((count * each + 2, heads, BLOCK, dim), np.nan, x.dtype)
    blocks = x.reshape(count, heads, each, BLOCK, dim).swapaxes(1, 2)
    pool[order] = blocks.reshape(-1, heads, BLOCK, dim)
    return pool, order.reshape(count, each).astype(np.int32)


@pytest.mark.parametrize("name", CASES)
def test_a_token_attends_to_what_its_slot_has(name):
    """NaN lies wherever it may not look, and no copy meets what is still read or written."""
    case = CASES[name]
    (heads, kv_heads, dim), dtype, read = case.sizes, case.dtype, case.read
    q = normal(1, len(LENGTHS), heads, dim, dtype=dtype)
    k, v = (normal(i, len(LENGTHS), kv_heads, 256, dim, dtype=dtype) for i in (2, 3))
    how: dict[str, Any] = {"scale": dim**-0.5, "softcap": case.softcap, "sinks": case.sinks}
    expected = oracles.decode_attention(q, (k, v), LENGTHS, **how, **read._asdict())
    for n, length in enumerate(LENGTHS):
        first = max(length - (read.window or length), 0)
        first = first if read.chunk is None else (length - 1) // read.chunk * read.chunk
        for x in (k, v):
            x[n, :, length:], x[n, :, :first] = np.nan, np.nan
    table = None
    if case.blocks:
        (k, table), (v, _) = in_blocks(k), in_blocks(v)
    q, k, v, lengths = map(jnp.asarray, (q, k, v, LENGTHS))
    assert token_attention.serves(k, v, heads, dtype)
    how["sinks"] = None if case.sinks is None else jnp.asarray(case.sinks)
    how |= {"read": read, "sms": case.sms, "table": table}
    simulated = InterpretGPUParams(detect_races=True, num_tma_threads_per_device=5)
    found = np.asarray(token_attention.attend(q, k, v, lengths, **how, interpret=simulated))
    assert not get_races().races_found
    for n, length in enumerate(LENGTHS):
        assert_close(found[n], expected[n], dtype, length=length, roundings=2)


@pytest.mark.parametrize("dim", [64, 128])
def test_a_tokens_keys_and_values_are_put_in_their_places(dim):
    """Rows of slots, or blocks, in any order; no other place is written."""
    held = [normal(i, 5, 2, 64, dim, dtype=BFLOAT16) for i in (1, 2)]
    new = [normal(i, 3, 2, dim, dtype=BFLOAT16) for i in (3, 4)]
    rows, places = np.array([4, 0, 2], np.int32), np.array([63, 0, 17], np.int32)
    k, v, key, value = map(jnp.asarray, (*held, *new))
    put = jax.jit(partial(token_attention.put, interpret=InterpretGPUParams()))
    found = put(k, v, (key, value), rows, places)
    for x, own, actual in zip(held, new, found, strict=True):
        x[rows, :, places] = own
        np.testing.assert_array_equal(np.asarray(actual), x)


def test_what_is_served_fits_tiles_and_registers():
    def served(
        dim: int = 64, size: int = 64, heads: int = 4, dtype: Any = BFLOAT16, **more: Any
    ) -> bool:
        k = jax.ShapeDtypeStruct((3, 2, size, dim), more.get("kept", dtype))
        v: Any = jax.ShapeDtypeStruct((3, 2, size, more.get("width", dim)), k.dtype)
        return token_attention.serves(k, v, heads, dtype)

    assert served() and served(128) and served(256) and served(width=192) and served(dtype=FLOAT16)
    assert served(heads=128) and served(size=192)
    assert not served(96) and not served(320) and not served(width=80)
    assert not served(size=96) and not served(heads=130)
    assert not served(dtype=FLOAT32) and not served(kept=FLOAT16) and not served(kept=np.int8)


@pytest.mark.parametrize("semantics", ["Lane", "Warpgroup"])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("dim", [64, 256])
def test_it_lowers_for_a_gpu_either_way(dim, blocks, semantics, monkeypatch):
    """Of what one lane does, as JAX 0.10 has it, and of what a warpgroup does, as JAX 0.11 does.

    JAX lays out registers and shared memory here, and refuses what is no layout.
    """
    how = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics[semantics])
    monkeypatch.setattr(plgpu, "kernel", partial(plgpu.kernel, compiler_params=how))
    monkeypatch.setattr(plgpu, "CompilerParams", lambda: how)
    kind, numbers = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((3,), jnp.int32)
    cache = kind((15, 2, BLOCK, dim) if blocks else (3, 2, 4 * BLOCK, dim), BFLOAT16)

    def step(q: Any, k: Any, v: Any, new: Any, rows: Any, at: Any, table: Any) -> Any:
        k, v = token_attention.put(k, v, (new, new), rows, at)
        table = table if blocks else None
        read = Read(window=100) if blocks else Read(chunk=96)
        y = token_attention.attend(q, k, v, at + 1, scale=0.1, softcap=9.0, read=read, table=table)
        return y, k, v

    given = kind((3, 24, dim), BFLOAT16), cache, cache, kind((3, 2, dim), BFLOAT16)
    text = jax.export.export(jax.jit(step), platforms=["cuda"])(
        *given, numbers, numbers, kind((3, 4), jnp.int32)
    ).mlir_module()
    assert text.count("@mosaic_gpu") == 2
    assert text.count("output_operand_alias<") == 2  # the caches, which are changed in place

"""Our Triton kernels by jax_triton 0.3.1, which wants outputs behind the inputs."""

from typing import Any

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl
from jax_triton import triton_lib

from dualinfer.kernels.triton.decode_attention_kernel import decode_attention_kernel
from dualinfer.kernels.triton.linear_kernels import matvec_kernel


def use_ffi() -> None:
    """Have it call XLA as 0.4 does, by the typed FFI: what XLA may capture."""
    real = jax.ffi.ffi_lowering

    def lowering(_: str, *, backend_config: bytes, operand_output_aliases: Any, **__: Any) -> Any:
        rule = real("triton_kernel_call_ffi", operand_output_aliases=operand_output_aliases)
        return lambda ctx, *args: rule(ctx, *args, opaque=backend_config)

    class Ffi:
        ffi_lowering = staticmethod(lowering)

    class Jax:
        def __getattr__(self, name: str) -> Any:
            return Ffi if name == "ffi" else getattr(jax, name)

    triton_lib.jax = Jax()


@triton.jit
def _norm_product(
    x, w, gain, y, F: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    matvec_kernel(
        x, w, None, None, gain, None, y, F, K, F, 1e-5, K, 1, ROWS, BLOCK, PROGRAMS, "rms",
        ACTIVATION, GATED, False,
    )  # fmt: skip


@triton.jit
def _residual_product(
    x, w, residual, y, F: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    matvec_kernel(
        x, w, None, residual, None, None, y, F, K, F, 1e-5, K, 1, ROWS, BLOCK, PROGRAMS, None,
        None, False, False,
    )  # fmt: skip


@triton.jit
def _attention(
    qkv, _k, _v, lengths, _counters, frequencies, y, partial, k, v, counters,
    WIDTH: tl.constexpr, CAPACITY: tl.constexpr, SCALE: tl.constexpr, KV: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr,
    STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    decode_attention_kernel(
        qkv, k, v, lengths, y, partial, counters, frequencies, None, None, None, None, WIDTH,
        KV * CAPACITY * DIM, CAPACITY * DIM, DIM, CAPACITY, SCALE, 0.0, 0, 0.0, 1.0, KV, GROUP,
        GROUP, DIM, DIM, False, False, False, False, SPLITS, SPLIT_BLOCK, STAGES, 16, BLOCK, DIM,
        False,
    )  # fmt: skip


def product(
    x: jax.Array, weight: jax.Array, gain: Any, residual: Any, plan: tuple[Any, ...]
) -> jax.Array:
    """A row times weights; `plan` is features, width, rows, warps, programs and gated."""
    features, width, rows, warps, programs, gated = plan
    how = dict(
        out_shape=jax.ShapeDtypeStruct((features,), jnp.bfloat16),
        grid=(programs or -(-features // rows),),
        num_warps=warps,
        num_stages=3,
        compute_capability=90,
        F=features,
        K=width,
        BLOCK=triton.next_power_of_2(width),
        ROWS=rows,
        PROGRAMS=programs,
    )
    if residual is not None:
        return jt.triton_call(x, weight, residual, kernel=_residual_product, **how)
    how |= dict(ACTIVATION="silu" if gated else None, GATED=gated)
    return jt.triton_call(x, weight, gain, kernel=_norm_product, **how)


def attention(
    qkv: jax.Array,
    cache: list[jax.Array],
    lengths: jax.Array,
    counters: jax.Array,
    frequencies: jax.Array,
    heads: int,
    config: Any,
) -> tuple[jax.Array, list[jax.Array], jax.Array]:
    """Attention of one token; cache and counters in their own memory."""
    _, kv, capacity, dim = cache[0].shape
    args = (qkv, *cache, lengths, counters, frequencies)
    shapes = [((heads * dim,), qkv.dtype), ((heads, config.splits, dim + 2), jnp.float32)]
    shapes += [(a.shape, a.dtype) for a in (*cache, counters)]
    y, _, k, v, counters = jt.triton_call(
        *args,
        kernel=_attention,
        out_shape=[jax.ShapeDtypeStruct(*shape) for shape in shapes],
        input_output_aliases={1: 2, 2: 3, 4: 4},
        grid=(kv, config.splits),
        num_warps=config.warps,
        num_stages=3,
        compute_capability=90,
        WIDTH=qkv.size,
        CAPACITY=capacity,
        SCALE=dim**-0.5,
        KV=kv,
        GROUP=heads // kv,
        DIM=dim,
        SPLITS=config.splits,
        SPLIT_BLOCK=triton.next_power_of_2(config.splits),
        STAGES=config.stages,
        BLOCK=config.block,
    )
    return y, [k, v], counters

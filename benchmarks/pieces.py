"""Prompts read in pieces, on one GPU: `python benchmarks/pieces.py [--engine]`.

1. Rows of tokens that go on in their slots, by the kernel of prompts: errors against float64, over
   caches of rows and of blocks by a table.
2. The time of a piece of 2,048 tokens behind 0, 6,144 and 30,720 others (32 heads, 8 of keys, 128
   wide), as one row and as 32 rows of 64, beside a whole prompt by our kernel and by torch.
3. With `--engine`: what an open stream of the 8B shape sees while a prompt of 8,192 tokens joins,
   by the size of a piece.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dualinfer.backends.torch.maths import MATHS
from dualinfer.kernels.triton.attention import attention
from dualinfer.ops.attention import attend_rows
from dualinfer.ops.maths import KeyScoring

HEADS, KV_HEADS, DIM, PIECE, BLOCK = 32, 8, 128, 2048, 64
SIZES = (1 << 20, 4096, 2048, 1024)  # of pieces; the first is none
LIMITS = {torch.bfloat16: 6e-3, torch.float32: 2e-6}


def ms(work: Callable[[], Any], count: int = 30) -> float:
    """Milliseconds of one call, the mean of `count` after five others."""
    for _ in range(5):
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count


def paged(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Keys [N, K, S, D] as pools [blocks, K, 64, D] in this order."""
    blocks = x.unflatten(2, (-1, BLOCK)).transpose(1, 2).flatten(0, 1)
    return blocks[order].contiguous()


def check(
    shape: tuple[int, int, int, int, int], room: tuple[int, int], dtype: torch.dtype, **how: Any
) -> None:
    """Rows B of T tokens, H heads over K, D wide, in a cache [N, S], against float64."""
    (b, t, h, k, d), (n, s) = shape, room
    keys, values = (torch.randn(n, k, s, d, device="cuda", dtype=dtype) for _ in range(2))
    q = torch.randn(b, t, h, d, device="cuda", dtype=dtype)
    slots = torch.randint(0, n, (b,), device="cuda")
    starts = torch.randint(0, s - t + 1, (b,), device="cuda")
    scale = d**-0.5
    own_keys, own_values = (x[slots].double() for x in (keys, values))
    wanted = attend_rows(
        MATHS, q.double(), own_keys, own_values, starts, starts * 0 + t, KeyScoring(scale), **how
    )
    order = torch.randperm(n * s // BLOCK, device="cuda")
    table = order.argsort().view(n, -1).int()
    where = {"causal": True, "starts": starts, "slots": slots}
    for name, (ks, vs), more in (
        ("rows", (keys.transpose(1, 2), values.transpose(1, 2)), {}),
        ("blocks", (paged(keys, order), paged(values, order)), {"table": table}),
    ):
        found = attention(q, ks, vs, scale=scale, **where, **more, **how)
        error = float((found.double() - wanted).norm() / wanted.norm())
        print(f"{shape} in {name} of {room}, {dtype}, {how}: {error:.2e}")
        assert error < LIMITS[dtype]


def time_pieces() -> None:
    """Milliseconds and TFLOP/s of pieces."""
    size = 32768 + PIECE
    k, v = (torch.randn(1, KV_HEADS, size, DIM, device="cuda").bfloat16() for _ in range(2))
    q = torch.randn(1, PIECE, HEADS, DIM, device="cuda").bfloat16()
    ks, vs = k.transpose(1, 2), v.transpose(1, 2)
    order = torch.randperm(size // BLOCK, device="cuda")
    table, pools = order.argsort().view(1, -1).int(), (paged(k, order), paged(v, order))
    how: dict[str, Any] = {"scale": DIM**-0.5, "causal": True}
    whole = ms(lambda: attention(q, ks[:, :PIECE], vs[:, :PIECE], **how))
    given = q.transpose(1, 2), k[:, :, :PIECE], v[:, :, :PIECE]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    torchs = ms(lambda: sdpa(*given, is_causal=True, enable_gqa=True))
    print(f"a whole prompt of {PIECE}: {whole:.3f} ms, torch's {torchs:.3f}")
    for start in (0, 6144, 30720):
        flops = 4 * HEADS * DIM * PIECE * (start + PIECE // 2)
        for rows in (1, PIECE // BLOCK):
            own = q.view(rows, -1, HEADS, DIM)
            starts = start + PIECE // rows * torch.arange(rows, device="cuda")
            where = {"starts": starts, "slots": torch.zeros_like(starts)}
            plain = ms(lambda own=own, where=where: attention(own, ks, vs, **where, **how))
            by_table = ms(
                lambda own=own, where=where: attention(own, *pools, table=table, **where, **how)
            )
            rate = f"{flops / plain / 1e9:.0f} TFLOP/s"
            print(f"behind {start}, {rows} rows: {plain:.3f} ms ({rate}), blocks {by_table:.3f}")


def time_engine() -> None:
    """A stream's gaps while a long prompt joins, and the prompt's first token."""
    import dualinfer
    from dualinfer.bench.random_weights import make_module
    from dualinfer.bench.shapes import open_model
    from dualinfer.engine import reading

    model = make_module(open_model("llama-3-8b"), "bfloat16", "cuda")
    engine: Any = dualinfer.init_inference(
        model, dtype="bf16", replace_with_kernel_inject=True, max_out_tokens=20000
    )
    long = np.random.default_rng(0).integers(5, 100000, 8192).tolist()
    how: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
    for size in (*SIZES, *SIZES):  # the first time kernels and graphs are made
        reading.PIECE = size
        stream, times = engine.stream(long[:100], max_new_tokens=400, **how), []
        reader = threading.Thread(
            target=lambda s=stream, t=times: t.extend(time.perf_counter() for _ in s)
        )
        reader.start()
        time.sleep(0.5)
        begun = time.perf_counter()
        next(iter(engine.stream(long, max_new_tokens=2, **how)))
        first = 1e3 * (time.perf_counter() - begun)
        reader.join()
        gaps = 1e3 * np.diff(times)
        told = f"median {np.median(gaps):.1f}, p99 {np.percentile(gaps, 99):.1f}"
        print(f"pieces of {size}: first token {first:.0f} ms; gaps {told}, most {gaps.max():.0f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype in LIMITS:
        check((3, 200, 8, 2, 128), (4, 1024), dtype)
        check((5, 64, 4, 4, 64), (3, 512), dtype, window=100)
        check((2, 33, 8, 1, 256), (2, 256), dtype, softcap=30.0)
    time_pieces()
    if "--engine" in sys.argv:
        time_engine()

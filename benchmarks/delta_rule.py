"""The gated delta rule by our kernels, beside Hugging Face's functions: a token, and a prompt.

    python benchmarks/delta_rule.py

Of one layer with 16 key heads and 32 value heads of 128 elements (Qwen3.5-9B, Qwen3.6-35B-A3B), in
bf16 with float32 states, and of one with a decay for each channel (Kimi Linear's heads). Times are
of CUDA graphs; of a token states are others in each launch, as they are in a model.
"""

from collections.abc import Callable
from typing import Any

import torch

from dualinfer.kernels.triton.delta_prompt import delta_prompt
from dualinfer.kernels.triton.delta_token import delta_token

KEYS, VALUES, DIM, TAPS = 16, 32, 128, 4


def seconds(run: Callable[[], Any], times: int = 5) -> float:
    """Of one run, from a graph of it."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    best = float("inf")
    for _ in range(times):
        events[0].record()
        graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        best = min(best, events[0].elapsed_time(events[1]) / 1e3)
    return best


def read_rate() -> float:
    """Bytes a second that a sum reads."""
    x = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").view(torch.float32)
    return x.numel() * 4 / seconds(lambda: x.sum())


def layer(by_channel: bool) -> tuple[int, dict[str, Any]]:
    """The elements of a projection, and a layer's weights and facts."""
    torch.manual_seed(0)
    keys = VALUES if by_channel else KEYS
    channels = (2 * keys + VALUES) * DIM
    decays = VALUES * DIM if by_channel else VALUES
    beta_at = channels + VALUES * DIM
    new = dict(device="cuda", dtype=torch.bfloat16)
    how = {
        **{"keys": keys, "values": VALUES, "beta_at": beta_at, "eps": 1e-6},
        "taps": torch.randn(channels, TAPS, **new),
        "decay_scale": torch.zeros(VALUES, device="cuda"),
        "decay_bias": torch.zeros(decays, device="cuda"),
        "norm": torch.ones(DIM, **new),
        "gate": "sigmoid" if by_channel else "silu",
    }
    return beta_at + VALUES + decays, how


def held(slots: int, how: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    channels = (2 * how["keys"] + VALUES) * DIM
    past = torch.randn(slots, TAPS - 1, channels, device="cuda", dtype=torch.bfloat16)
    return past, torch.randn(slots, VALUES, DIM, DIM, device="cuda") * 0.1


SHAPES = [{}, {"pdl": True}, {"warps": 2}, {"warps": 4, "registers": 168}]


def tokens(by_channel: bool, rate: float) -> None:
    width, how = layer(by_channel)
    for rows in (1, 8, 32, 128):
        count = max(2, 48 // rows)
        caches = [held(rows, how) for _ in range(count)]
        x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
        moves = torch.ones(rows, dtype=torch.bool, device="cuda")
        counters = torch.zeros(4096, dtype=torch.int32, device="cuda")
        for shape in SHAPES:
            def run() -> None:
                for past, state in caches:
                    delta_token(x, past, state, moves, counters=counters, **shape, **how)

            took = seconds(run) / count
            moved = 2 * rows * VALUES * DIM * DIM * 4 + 2 * rows * width
            print(
                f"token by_channel={by_channel} rows={rows} {shape}: {took * 1e6:.1f} us, "
                f"{moved / took / rate:.0%} of the read rate"
            )


def prompts(by_channel: bool) -> None:
    width, how = layer(by_channel)
    how |= {"key_dim": DIM, "value_dim": DIM}
    for batch, count in ((1, 8192), (1, 2048), (8, 1024)):
        x = torch.randn(batch, count, width, device="cuda", dtype=torch.bfloat16)
        slots = torch.arange(batch, device="cuda")
        own = held(batch, how)
        lengths = torch.full((batch,), count, device="cuda")
        how |= {"slots": slots, "lengths": lengths}
        from torch.profiler import ProfilerActivity, profile

        for shape in (
            {},
            {"pdl": True},
            {"block": 64, "warps": 4, "tile": 64, "tile_warps": 8, "within_warps": 8},
            {"block": 32, "warps": 8, "tile": 16, "tile_warps": 4, "within_warps": 4},
            {"block": 16, "warps": 4, "tile": 32, "tile_warps": 2, "within_warps": 2},
            {"block": 64, "warps": 8, "tile": 16, "tile_warps": 2, "stages": 2},
            {"block": 32, "warps": 4, "tile": 64, "tile_warps": 8, "stages": 2},
        ):
            try:
                took = seconds(lambda: delta_prompt(x, *own, **how, **shape), 3)
                with profile(activities=[ProfilerActivity.CUDA]) as told:
                    delta_prompt(x, *own, **how, **shape)
                    torch.cuda.synchronize()
            except Exception as error:
                print(shape, type(error).__name__, str(error)[:80])
                continue
            parts = {
                e.key[1:10]: round(e.device_time_total)
                for e in told.key_averages()
                if e.key.startswith("_")
            }
            print(
                f"prompt by_channel={by_channel} {batch} x {count}, {shape}: {took * 1e3:.3f} ms, "
                f"us: {parts}"
            )


def peers() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as hf

    for batch, count in ((1, 8192), (1, 2048), (32, 1)):
        q, k = (torch.randn(batch, count, VALUES, DIM, device="cuda").bfloat16() for _ in "qk")
        v, g = q.clone(), -torch.rand(batch, count, VALUES, device="cuda")
        beta = torch.rand(batch, count, VALUES, device="cuda").bfloat16()
        rule = hf.torch_chunk_gated_delta_rule if count > 1 else hf.torch_recurrent_gated_delta_rule
        state = torch.zeros(batch, VALUES, DIM, DIM, device="cuda")
        how = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        how |= {"initial_state": None if count > 1 else state}
        took = seconds(lambda: rule(q, k, v, g=g, beta=beta, **how), 3)
        print(f"HF's rule alone, {batch} x {count}: {took * 1e3:.3f} ms")


if __name__ == "__main__":
    with torch.inference_mode():
        rate = read_rate()
        print(f"{torch.cuda.get_device_name()}, reads {rate / 1e12:.2f} TB/s")
        for by_channel in (False, True):
            tokens(by_channel, rate)
        for by_channel in (False, True):
            prompts(by_channel)
        try:
            peers()
        except Exception as error:
            print("peers", repr(error)[:300])

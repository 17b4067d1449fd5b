"""The gated delta rule by our kernels, beside Hugging Face's functions: a token, and a prompt.

    python benchmarks/delta_rule.py

Of one layer with 16 key heads and 32 value heads of 128 elements (Qwen3.5-9B, Qwen3.6-35B-A3B), and
of one with 32 key heads and a decay for each channel (Kimi Linear), in bf16 with float32 states.
Times are of CUDA graphs; of a token each launch has states of its own, as in a model.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from dualinfer.kernels.triton.delta_prompt import delta_prompt
from dualinfer.kernels.triton.delta_token import DeltaLayer, delta_token

VALUES, DIM, TAPS = 32, 128, 4
CUDA: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}


def seconds(run: Callable[[], Any], times: int = 5) -> float:
    """Of one run, the best of some replays of its graph."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(times):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best


def read_rate() -> float:
    """Bytes a second that a sum reads."""
    x = torch.empty(1 << 29, device="cuda")
    return x.numel() * 4 / seconds(x.sum)


class Layer:
    """A layer's weights and facts, as the kernels take them."""

    def __init__(self, by_channel: bool) -> None:
        torch.manual_seed(0)
        keys = VALUES if by_channel else VALUES // 2
        decays = VALUES * DIM if by_channel else VALUES
        self.channels = (2 * keys + VALUES) * DIM
        self.width = self.channels + VALUES * DIM + VALUES + decays
        self.layer = DeltaLayer(
            *(keys, VALUES, DIM, DIM, self.channels + VALUES * DIM),
            taps=torch.randn(self.channels, TAPS, **CUDA),
            decay_scale=torch.zeros(VALUES, device="cuda"),
            decay_bias=torch.zeros(decays, device="cuda"),
            norm=torch.ones(DIM, **CUDA),
            eps=1e-6,
            gate="sigmoid" if by_channel else "silu",
        )

    def held(self, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What slots keep."""
        past = torch.randn(slots, TAPS - 1, self.channels, **CUDA)
        return past, torch.randn(slots, VALUES, DIM, DIM, device="cuda") * 0.1

    def token(self, rows: int, rate: float) -> None:
        """Print the time of a token of so many rows."""
        caches = [self.held(rows) for _ in range(max(2, 48 // rows))]
        x = torch.randn(rows, self.width, **CUDA)
        moves = torch.ones(rows, dtype=torch.bool, device="cuda")
        counters = torch.zeros(4096, dtype=torch.int32, device="cuda")

        def run() -> None:
            for past, state in caches:
                delta_token(x, self.layer, past, state, moves, counters=counters, pdl=True)

        took = seconds(run) / len(caches)
        moved = 2 * rows * VALUES * DIM * DIM * 4 + 2 * rows * self.width
        print(f"  token, {rows} rows: {took * 1e6:.1f} us, {moved / took / rate:.0%} of the reads")

    def prompt(self, batch: int, tokens: int) -> None:
        """Print the time of so many prompts, and of each launch."""
        x = torch.randn(batch, tokens, self.width, **CUDA)
        slots = torch.arange(batch, device="cuda")
        own = {"slots": slots, "lengths": torch.full_like(slots, tokens), "pdl": True}
        run = partial(delta_prompt, x, self.layer, *self.held(batch), **own)
        took = seconds(run, 3)
        with profile(activities=[ProfilerActivity.CUDA]) as told:
            run()
            torch.cuda.synchronize()
        parts = {
            event.key.split("_kernel")[0].strip("_"): round(event.device_time_total)
            for event in told.key_averages()
            if event.key.startswith("_")
        }
        print(f"  prompt, {batch} of {tokens}: {took * 1e3:.3f} ms; launches, us: {parts}")


def peer(batch: int, tokens: int) -> None:
    """Print the time of HF's function alone, without convolution, norm and gate."""
    from transformers.models.qwen3_next import modeling_qwen3_next as hf

    q, k, v = (torch.randn(batch, tokens, VALUES, DIM, **CUDA) for _ in range(3))
    g, beta = -torch.rand(batch, tokens, VALUES, device="cuda"), torch.rand(q.shape[:3], **CUDA)
    rule = hf.torch_chunk_gated_delta_rule if tokens > 1 else hf.torch_recurrent_gated_delta_rule
    first = torch.zeros(batch, VALUES, DIM, DIM, device="cuda")
    how = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "initial_state": first}
    took = seconds(partial(rule, q, k, v, g=g, beta=beta, **how), 3)
    print(f"  HF's function, {batch} of {tokens}: {took * 1e3:.3f} ms")


def main() -> None:
    rate = read_rate()
    print(f"{torch.cuda.get_device_name()}, reads {rate / 1e12:.2f} TB/s")
    for by_channel in (False, True):
        print("a decay for each", "channel" if by_channel else "head")
        layer = Layer(by_channel)
        for rows in (1, 8, 32, 128):
            layer.token(rows, rate)
        for batch, tokens in ((1, 2048), (1, 8192), (8, 1024)):
            layer.prompt(batch, tokens)
    for batch, tokens in ((1, 1), (32, 1), (1, 8192)):
        peer(batch, tokens)


if __name__ == "__main__":
    with torch.inference_mode():
        main()

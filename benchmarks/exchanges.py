"""What a sum over GPUs costs inside a CUDA graph: NCCL, torch's one-shot op, and our exchange.

    dualinfer launch --tp 2 benchmarks/exchanges.py

Each graph holds 64 sums of float32 or bfloat16 rows of 4,096 values, each reading the one before;
the time is that of one, over ten replays in a row, the median of 20 such, the slowest rank's.
`--json PATH` writes it.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from dualinfer.backends.torch.device import rank_device
from dualinfer.backends.torch.exchange import open_exchange
from dualinfer.backends.torch.parallel import Split
from dualinfer.backends.torch.process_groups import join
from dualinfer.config.nested import TensorParallelConfig

WIDTH, SUMS, ROUNDS, REPLAYS = 4096, 64, 10, 20


def seconds(step: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    """Of one step in a graph of SUMS steps."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(x)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(SUMS):
            y = step(y)
    times = []
    for _ in range(REPLAYS + 3):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(ROUNDS):  # ranks do not begin at once
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / (ROUNDS * SUMS))
    return statistics.median(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 8, 32])
    options = parser.parse_args()
    size, device = int(os.environ["WORLD_SIZE"]), rank_device()
    torch.cuda.set_device(device)
    ranks = join(TensorParallelConfig(tp_size=size, timeout=60), device)
    exchange = open_exchange(Split(ranks, 0, (WIDTH,) * size))
    group = dist.group.WORLD
    rows_found = []
    for rows in options.rows:
        shape = (rows, WIDTH)
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.full(shape, 1e-3, device=device, dtype=dtype)
            bias, residual = x[0].bfloat16().clone(), x.bfloat16()
            shared = symmetric_memory.empty(shape, dtype=dtype, device=device)
            symmetric_memory.rendezvous(shared, group)

            def nccl(y: torch.Tensor) -> torch.Tensor:
                y = y * 1  # a product of its own would stand here
                dist.all_reduce(y)
                return y

            def one_shot(y: torch.Tensor) -> torch.Tensor:
                shared.copy_(y)  # noqa: B023 (called within the loop)
                return torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group.group_name)  # noqa: B023

            def ours(y: torch.Tensor) -> torch.Tensor:
                return exchange.sum(y, None, None, y.dtype, False)

            def ours_early(y: torch.Tensor) -> torch.Tensor:
                return exchange.sum(y, None, None, y.dtype, True)

            def ours_fused(y: torch.Tensor) -> torch.Tensor:
                return exchange.sum(y, bias, residual, y.dtype, True)  # noqa: B023

            steps = {"copy alone": lambda y: y * 1, "NCCL": nccl, "torch one-shot": one_shot}
            if exchange.serves(x.numel()):
                steps |= {"ours": ours, "ours, early start": ours_early, "+ residual": ours_fused}
            for name, step in steps.items():
                try:
                    slowest = torch.tensor(seconds(step, x), device=device)
                except RuntimeError as error:
                    print(f"{name}: {str(error).splitlines()[0]}", flush=True)
                    continue
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                rows_found.append(
                    {
                        "gpus": size,
                        "by": name,
                        "bytes": x.nbytes,
                        "dtype": str(dtype).removeprefix("torch."),
                        "us": slowest.item() * 1e6,
                    }
                )
    if ranks.rank == 0:
        most = f"exchanges up to {exchange.capacity:,} values"
        print(f"{torch.cuda.get_device_name()} x {size}, {most}")
        for row in rows_found:
            print(f"{row['bytes']:>9,} B {row['dtype']:>8} {row['by']:<18} {row['us']:7.2f} us")
        if options.json:
            options.json.write_text(json.dumps(rows_found, indent=1) + "\n")
    ranks.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

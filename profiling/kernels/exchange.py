"""Microseconds of one exchange of partial sums between the cards of a host.

`torchrun --nproc-per-node=2 -m profiling.kernels.exchange` prints a line for each number of rows:
the fold that waits for the other ranks in its kernel, a barrier of torch before a fold, and NCCL's
all-gather before a fold. One exchange among many in one graph, median of some replays.
"""

import os
import statistics
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

import tlt_ext
from driver.common.symmetric import SymmetricArrays

WIDTH, ROWS = 3584, (1, 16, 64, 512)
CALLS, REPLAYS = 64, 20


def exchange_us(call: Callable[[int], None]) -> float:
    """`call` gets the number of the exchange in a graph."""
    for turn in range(CALLS):
        call(turn)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(CALLS):
            call(turn)
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times)


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    shared = SymmetricArrays.allocate(group, max(ROWS), WIDTH, device, timeout_s=20.0)
    own = torch.randn(max(ROWS), WIDTH, device=device)
    for rows in ROWS:
        out = torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device=device)
        every = torch.empty(size, rows, WIDTH, device=device)

        def in_kernel(turn: int, rows: int = rows, out: torch.Tensor = out) -> None:
            shared[turn % 2].fold(rows, out, residual=out)

        def with_barrier(turn: int, rows: int = rows, out: torch.Tensor = out) -> None:
            sums = shared[turn % 2]
            sums.memory[1].barrier()
            tlt_ext.fold_partials([s[:rows] for s in sums.arrays], out, residual=out)

        def with_nccl(
            turn: int, rows: int = rows, out: torch.Tensor = out, every: torch.Tensor = every
        ) -> None:
            dist.all_gather_into_tensor(every.flatten(0, 1), own[:rows])
            tlt_ext.fold_partials(list(every), out, residual=out)

        times = [exchange_us(call) for call in (in_kernel, with_barrier, with_nccl)]
        if rank == 0:
            names = ("in the kernel", "barrier", "NCCL")
            shown = ", ".join(f"{n} {us:.1f} us" for n, us in zip(names, times, strict=True))
            sys.stdout.write(f"{rows} rows x {WIDTH}, {size} cards: {shown}\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

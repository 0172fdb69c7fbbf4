"""Two cards add their partial sums with the bits of one, and a lost one ends the kernel."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

import tlt_ext
from driver.common.symmetric import SymmetricArrays
from tests import kit, reference

pytestmark = [
    kit.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
ROWS, WIDTH, RANKS = (1, 16, 40, 300), 576, 2


def start(rank: int, file: str, timeout_s: float) -> tuple[SymmetricArrays, ...]:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", f"file://{file}", rank=rank, world_size=RANKS, device_id=device)
    assert dist.group.WORLD is not None
    return SymmetricArrays.allocate(dist.group.WORLD, max(ROWS), WIDTH, device, timeout_s, count=3)


def add_in_turns(rank: int, file: str) -> None:
    """A chain of linears whose sums are exchanged, launched and replayed, against whole linears."""
    sums = start(rank, file, timeout_s=30)
    columns = reference.columns_of(WIDTH, rank, RANKS).cuda()
    for dtype in kit.DTYPES:
        weights = [
            (kit.randn(WIDTH, WIDTH, seed=seed) / WIDTH**0.5).to(dtype).cuda() for seed in range(4)
        ]
        shards = [weight[:, columns].contiguous() for weight in weights]
        for rows in ROWS:
            x, residual = (kit.randn(rows, WIDTH, seed=s, dtype=dtype).cuda() for s in (8, 9))
            out, whole = torch.empty_like(x), torch.empty_like(x)
            both = torch.empty(rows, RANKS * WIDTH, device="cuda")

            def chain(x=x, rows=rows, residual=residual, out=out, shards=shards, both=both):
                read = x
                for layer, shard in enumerate(shards):
                    if layer % 3 == rank:
                        torch.cuda._sleep(20_000)  # the other one waits
                    part = sums[layer % 2].own(rows)
                    own = read[:, columns].contiguous()
                    tlt_ext.linear_rows(own, shard, part, parts=8 // RANKS, pdl=True)
                    sums[layer % 2].fold(rows, out, residual=residual)
                    read = out
                # Not sums[1], which the other rank may still read.
                sums[2].own(rows).copy_(residual).mul_(rank + 1)
                torch.cat(sums[2].gather(rows), 1, out=both)

            def check(x=x, out=out, whole=whole, residual=residual, weights=weights, both=both):
                read = x
                for weight in weights:
                    after = torch.empty_like(whole)
                    tlt_ext.linear_rows(read, weight, after, residual=residual)
                    read = after
                assert torch.equal(out, read), x.shape
                wanted = residual.float()
                assert torch.equal(both, torch.cat([wanted, 2 * wanted], 1)), x.shape

            chain()
            check()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                chain()
            for turn in range(100):
                x.copy_(kit.randn(rows, WIDTH, seed=turn, dtype=dtype))
                out.fill_(float("nan"))
                both.fill_(float("nan"))
                graph.replay()
                check()
    dist.barrier()
    dist.destroy_process_group()


def lose_one(rank: int, file: str) -> None:
    sums = start(rank, file, timeout_s=1)
    if rank == 0:
        sums[0].fold(1, torch.empty(1, WIDTH, device="cuda"))
        with pytest.raises(RuntimeError, match="CUDA error"):
            torch.cuda.synchronize()
    os._exit(0)  # groups cannot be ended after an error


@pytest.mark.parametrize("worker", [add_in_turns, lose_one])
def test_two_cards(worker, tmp_path):
    torch.multiprocessing.spawn(worker, (str(tmp_path / "store"),), nprocs=RANKS)

"""What packing saves: training steps of packed documents over those of padded ones."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from driver.drafter.attention import Segments
from driver.drafter.loss import DraftBatch
from driver.drafter.trainer import SpotTrainer
from profiling.rig.workload import trace_lengths
from profiling.studies.drafting import Study


def packing(study: Study, spot: SpotTrainer, room: int) -> float:
    """Time of training steps on padded documents over that on packed ones, in `room` tokens."""
    lengths = [min(n, room) for n in trace_lengths(64, median=max(4, room // 32), cap=room)]
    padded: list[list[int]] = [[]]
    packed: list[list[int]] = [[]]
    for length in lengths:
        if padded[-1] and (len(padded[-1]) + 1) * max(*padded[-1], length) > room:
            padded.append([])
        padded[-1].append(length)
        if sum(packed[-1]) + length > room:
            packed.append([])
        packed[-1].append(length)

    def seconds(rows: Sequence[Sequence[int]], pad: bool) -> float:
        batches = [_random_batch(spot, row, pad) for row in rows]
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            for batch in batches:
                spot.step.backward(batch)
            if spot.bin.fixed:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return min(times)

    spent = {"packed": seconds(packed, False), "padded": seconds(padded, True)}
    for name, value in spent.items():
        study.bench.add_row(
            name,
            1e6 * value,
            tokens=sum(lengths),
            steps=len(packed if name == "packed" else padded),
        )
    return spent["padded"] / spent["packed"]


def _random_batch(spot: SpotTrainer, lengths: Sequence[int], pad: bool) -> DraftBatch:
    longest = max(lengths)
    rows = [longest] * len(lengths) if pad else list(lengths)
    device, dtype = spot.target.device, spot.bin.features.dtype
    width, count = spot.target.spec.hidden_size, sum(rows)
    generator = torch.Generator(device).manual_seed(0)

    def numbers(columns: int) -> Tensor:
        return torch.randn(count, columns, generator=generator, device=device).to(dtype)

    left = torch.cat(
        [
            torch.arange(n, n - row, -1, device=device, dtype=torch.int32).clamp_min(0)
            for n, row in zip(lengths, rows, strict=True)
        ]
    )
    return DraftBatch(
        numbers(width),
        numbers(3 * width),
        numbers(width),
        torch.cat([torch.arange(n, device=device) for n in rows]),
        left,
        Segments.of(tuple(rows), device),
        ((0, count, spot.teachers.current),),
    )

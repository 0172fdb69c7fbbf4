"""What training a drafter costs: packed steps over padded ones, memory by part."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from driver.drafter.loss import DraftBatch
from driver.drafter.trainer import SpotTrainer
from driver.run.assemble import build_drafter
from profiling.rig.workload import trace_lengths
from profiling.studies.draft_memory import training_memory
from profiling.studies.drafting import Study, loaded_batch


def packing(study: Study, spot: SpotTrainer, room: int) -> float:
    """Real tokens a second of packed steps over those of padded ones, the same documents."""
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

    batch = DraftBatch.of(
        numbers(width),
        numbers(3 * width),
        numbers(width),
        torch.cat([torch.arange(n, device=device) for n in rows]),
        rows,
        [spot._teachers()[0]] * len(rows),
    )
    left = torch.cat(
        [
            torch.arange(n, n - row, -1, device=device, dtype=torch.int32).clamp_min(0)
            for n, row in zip(lengths, rows, strict=True)
        ]
    )
    return replace(batch, left=left)


def allocated() -> tuple[int, int]:
    """Bytes of the card's live tensors, as the allocator gave them and as they were asked for.

    A block whose rest is below a MiB is not split, so a small part can get more than it asked for.
    """
    gc.collect()
    return torch.cuda.memory_allocated(), torch.cuda.memory_stats()["requested_bytes.all.current"]


def memory(study: Study) -> None:
    """Rows of the memory of training by part: predicted, and what the allocator got for it.

    A trainer is made part by part; features are what the buffer gives back, so none are left.
    """
    spot, unroll = study.rollout.spot, study.sizes.unroll

    def step(trainer: SpotTrainer) -> Tensor | None:
        found = loaded_batch(trainer, 0)
        return trainer.step.backward(found and found[0])

    other = study.learner(unroll)
    other.step.update(step(other))  # libraries take their workspaces
    del other
    parts, at = {}, allocated()

    def book(part: str) -> None:
        nonlocal at
        before, at = at, allocated()
        parts[part] = [abs(now - then) for now, then in zip(at, before, strict=True)]

    drafter = build_drafter(spot.drafter.spec, spot.target, seed=0)
    book("weights")
    trainer = study.learner(unroll, drafter)
    book("bin")
    means = step(trainer)
    book("gradients")
    trainer.step.update(means)
    book("optimizer")
    trainer.ready.publish()
    book("handed over")
    predicted = {part: of[0] for part, of in training_memory(trainer).items()}
    predicted["handed over"] = predicted["weights"]
    trainer.buffer.clear()
    book("features")
    for part, (given, asked) in parts.items():
        study.bench.add_row(
            f"memory, {part}",
            0.0,
            predicted_mib=round(predicted[part] / 2**20, 3),
            allocated_mib=round(given / 2**20, 3),
            requested_mib=round(asked / 2**20, 3),
            allocated_over_predicted=round(given / max(1, predicted[part]), 4),
            requested_over_predicted=round(asked / max(1, predicted[part]), 4),
        )

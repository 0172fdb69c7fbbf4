"""Commits known tokens: prompts of new requests, and all tokens of preempted ones."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

import tlt_ext

from ..common.uploads import uploaded
from ..model.kv_cache import KvCache
from ..model.target import TargetModel
from .pages import Admission, Job


class Prefill:
    """Runs known tokens through the target, as many of a request in a pass as fit."""

    def __init__(self, model: TargetModel, cache: KvCache, chunk: int) -> None:
        self.model, self.cache, self.chunk = model, cache, chunk
        self.device = cache.k.device
        self.rows = self.recomputed = 0  # that ran; of them, those of requests with tokens

    def admit(self, admission: Admission) -> None:
        """Computes prefixes and requests that had emitted tokens, then copies partial pages."""
        self.recomputed += sum(len(job.tokens) for job in admission.recompute)
        self.run([*admission.prefixes, *admission.recompute])
        if admission.copies:
            source, destination = map(self.ints, zip(*admission.copies, strict=True))
            for pages in self.cache.paged_tensors():
                tlt_ext.copy_pages(pages, source, destination)

    def run(self, jobs: list[Job]) -> None:
        done = [0] * len(jobs)
        while pending := [j for j, job in enumerate(jobs) if done[j] < len(job.tokens)]:
            take, budget = {}, self.chunk
            for job in pending:
                take[job] = min(budget, len(jobs[job].tokens) - done[job])
                budget -= take[job]
                if budget == 0:
                    break
            self._pass(jobs, done, take)
            for job, count in take.items():
                done[job] += count

    def _pass(self, jobs: list[Job], done: list[int], take: dict[int, int]) -> None:
        counts = list(take.values())
        self.rows += sum(counts)
        first = {j: jobs[j].begin + done[j] for j in take}  # position
        ids = [i for j, n in take.items() for i in jobs[j].tokens[done[j] : done[j] + n]]
        position = [p for j, n in take.items() for p in range(first[j], first[j] + n)]
        count, context_len = self.ints(counts), self.ints(list(first.values()))
        row_start = self.ints([0, *accumulate(counts)])
        table = self.block_table([jobs[j].pages for j in take])
        status = torch.zeros_like(count)
        rows = tlt_ext.Rows(row_start, self.ints(position), status, context_len, table)
        _, features = self.model.forward(self.ints(ids), rows, self.cache, want_logits=False)
        path = torch.arange(max(counts), dtype=torch.int32, device=self.device)
        self.cache.commit(rows, path.repeat(len(counts), 1), count, features)

    def ints(self, values: Sequence[int] | list[list[int]]) -> Tensor:
        return uploaded(values, self.device)

    def block_table(self, pages: list[list[int]]) -> Tensor:
        """int32 [B, longest]: page lists, padded with -1."""
        width = max(1, max(len(row) for row in pages))
        return self.ints([row + [-1] * (width - len(row)) for row in pages])

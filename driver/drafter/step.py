"""One optimizer step of the drafter over a bin of recorded entries, as a CUDA graph on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from ..model.drafter import Drafter
from ..model.target import TargetModel
from .attention import HALF, Documents, flash_works
from .average import WeightAverage
from .buffer import Piece
from .loss import DraftBatch, Objective, Teacher, unrolled_loss

MAX_GRAD_NORM = 1.0
IN_FLIGHT = 2  # steps that are queued beside a rollout: more would delay a stop, fewer leave gaps
WARM_UPS = 2  # steps before a capture, which load kernels and grow scratch memory

# (gradients, tokens of this rank) -> tokens of all.
Reduce = Callable[[list[Tensor], int], int]


class Bin:
    """Arrays of a fixed number of entries: those of the old policy's documents, then the others.

    On the CPU only the rows in use are computed; on a GPU all are, or the first so many of them, so
    that a captured step serves every batch. Lengths, positions and ids reach the device as arrays,
    never as launch arguments.

    Args:
        tokens: entries.
        target: the policy.
        rejected_weight: of entries that predict a token which no draft held.
        in_flight: steps that are queued at most.
    """

    def __init__(
        self,
        tokens: int,
        target: TargetModel,
        rejected_weight: float = 1.0,
        in_flight: int = IN_FLIGHT,
    ) -> None:
        self.tokens, self.target, self.rejected_weight = tokens, target, rejected_weight
        self.fixed = target.device.type == "cuda"
        # Documents; two more are padding. Attention launches blocks for as many of full length.
        self.most = max(4, min(tokens // 16, max(16, tokens // 64)))
        width, device = target.spec.hidden_size, target.device
        dtype = target.embedding.dtype if self.fixed else torch.float32
        self.features = torch.zeros(tokens, 3 * width, dtype=dtype, device=device)
        self.final = torch.zeros(tokens, width, dtype=dtype, device=device)
        self.numbers = torch.zeros(3, tokens, dtype=torch.int64, device=device)  # ids, position, ..
        self.weight = torch.zeros(tokens, device=device)
        self.offsets = torch.zeros(self.most + 3, dtype=torch.int32, device=device)
        # Each step in flight has its own copies on the host; on the CPU no step is.
        self._staged = [
            [torch.zeros_like(x, device="cpu", pin_memory=self.fixed) for x in self.small()]
            for _ in range(in_flight if self.fixed else 1)
        ]
        self._turn = 0

    def small(self) -> tuple[Tensor, Tensor, Tensor]:
        """The arrays that are made on the host."""
        return self.numbers, self.weight, self.offsets

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (self.features, self.final, *self.small()))

    def load(
        self, pieces: Sequence[Piece], version: int, share: int, rows: int = 0
    ) -> tuple[int, list[int]]:
        """Copies pieces in; the device's arrays change in the order of the current stream.

        Args:
            pieces: at most `most` of at most `rows` entries.
            version: of the policy; pieces of another one come first.
            share: rows that those are given, where there are both.
            rows: that the step computes on a GPU; 0 = all.

        Returns:
            The first row of the newer pieces, and the lengths of pieces and padding.
        """
        rows = rows or self.tokens
        old = [p for p in pieces if p.document.target_version != version]
        new = [p for p in pieces if p.document.target_version == version]
        split = used = sum(p.length for p in old)
        if self.fixed and old:
            split = max(share, used) if new else rows
        self._turn = (self._turn + 1) % len(self._staged)
        numbers, weight, _ = self._staged[self._turn]
        numbers.zero_()
        weight.fill_(1.0)
        lengths = self._fill(old, 0)
        if split > used:
            lengths.append(self._blank(used, split))
        lengths += self._fill(new, split)
        if self.fixed and sum(lengths) < rows:
            lengths.append(self._blank(sum(lengths), rows))
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
        staged = self._staged[self._turn]
        staged[2].fill_(int(bounds[-1]))
        staged[2][: len(bounds)] = bounds
        for here, there in zip(staged, self.small(), strict=True):
            there.copy_(here, non_blocking=True)
        return split, lengths

    def _fill(self, pieces: Sequence[Piece], row: int) -> list[int]:
        numbers, weight, _ = self._staged[self._turn]
        width = self.features.shape[1]
        for piece in pieces:
            document, begin, end = piece.document, piece.start, piece.start + piece.length
            rows = slice(row, row + piece.length)
            numbers[0, rows] = document.tokens[begin + 1 : end + 1]
            numbers[1, rows] = torch.arange(begin, end)
            numbers[2, rows] = torch.arange(piece.length, 0, -1)
            if self.rejected_weight != 1.0:
                for position in document.missed:
                    if begin <= position - 2 < end:
                        weight[row + position - 2 - begin] = self.rejected_weight
            if document.ready is not None:
                torch.cuda.current_stream().wait_event(document.ready)
            self.features[rows].copy_(document.features[begin:end, :width], non_blocking=True)
            final = document.features[begin + 1 : end + 1, width:]
            self.final[rows].copy_(final, non_blocking=True)
            if document.features.is_cuda:
                document.features.record_stream(torch.cuda.current_stream())
            row += piece.length
        return [piece.length for piece in pieces]

    def _blank(self, begin: int, end: int) -> int:
        """Zeroes rows of padding, where a NaN would reach every gradient."""
        self.features[begin:end].zero_()
        self.final[begin:end].zero_()
        return end - begin

    def batch(
        self, split: int, lengths: Sequence[int], now: Teacher, before: Teacher | None
    ) -> DraftBatch:
        """The batch that was loaded."""
        rows = sum(lengths)
        longest = rows if self.fixed else max(lengths)
        ids, position, left = self.numbers[:, :rows]
        spans = [(0, split, before), (split, rows, now)]
        return DraftBatch(
            self.target.embedding.index_select(0, ids).to(self.features.dtype),
            self.features[:rows],
            self.final[:rows],
            position,
            left,
            self.weight[:rows],
            Documents(self.offsets, longest, tuple(lengths)),
            tuple((a, b, teacher) for a, b, teacher in spans if b > a),
        )


class DraftStep:
    """Loss, gradients and update over a `Bin`.

    A step with a gradient that is not finite changes nothing, decided on the device.

    Args:
        drafter: what is trained, float32; half precision runs under autocast.
        bin: of its entries.
        objective: the loss.
        unroll: steps.
        lr: learning rate.
        horizon: steps that the weights are averaged over; 0 = no average.
    """

    def __init__(
        self,
        drafter: Drafter,
        bin: Bin,
        objective: Objective,
        unroll: int,
        lr: float,
        horizon: int = 0,
    ) -> None:
        self.drafter, self.bin, self.objective, self.unroll = drafter, bin, objective, unroll
        device = bin.target.device
        self.lr = torch.tensor(lr, device=device)  # a graph reads it
        self.optimizer = torch.optim.AdamW(
            drafter.trainable(),
            lr=self.lr,
            weight_decay=0.0,
            betas=(0.9, 0.95),
            fused=True,
            capturable=bin.fixed,
        )
        self.average = WeightAverage(drafter, horizon)
        self.acceptance = torch.zeros((), device=device)  # of the last step
        self.report = torch.zeros(4, device=device)  # loss, acceptance, top-1, was it finite
        self._idle = torch.zeros((), device=device)  # 1: steps change nothing
        self.failed_capture = False
        self._graphs: dict[tuple[int, int, int], torch.cuda.CUDAGraph] = {}
        self._memory: Any = None

    def set_lr(self, lr: float) -> None:
        """Of the next steps."""
        self.lr.fill_(lr)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Steps of the block change no weight, no average and nothing of the optimizer."""
        before = self._idle.clone()
        self._idle.fill_(1.0)
        try:
            yield
        finally:
            self._idle.copy_(before)

    def backward(self, batch: DraftBatch | None) -> Tensor | None:
        """Gradients of a batch, zero where there is none; the loss's means."""
        for weight in self.drafter.trainable():
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad.zero_()
        if batch is None:
            return None
        dtype = self.bin.features.dtype
        with torch.autocast("cuda", dtype) if self.half else nullcontext():
            loss, means = unrolled_loss(
                self.drafter,
                batch,
                self.bin.target.cos_sin,
                self.unroll,
                self.objective,
                self.acceptance,
            )
        loss.backward()
        return means

    def update(self, means: Tensor | None) -> None:
        """Clips and applies the gradients, averages the weights; writes the report."""
        weights = self.drafter.trainable()
        finite = clip_grad_norm_(weights, MAX_GRAD_NORM).isfinite()
        skipped = torch.maximum((~finite).float(), self._idle)
        self.optimizer.found_inf = skipped
        self.optimizer.step()
        self.average.update(self.optimizer.state[weights[0]]["step"], skipped)
        self.report[3].copy_(finite)
        if means is not None:
            self.report[:3].copy_(torch.where(finite, means, self.report[:3]))
            self.acceptance.copy_(self.report[1])

    def run(
        self,
        split: int,
        lengths: Sequence[int],
        now: Teacher,
        before: Teacher | None,
        where: int = 0,
    ) -> None:
        """A whole step on what was loaded; replayed where `capture` was called for it."""
        graph = self._graphs.get((split, sum(lengths), where))
        if graph is not None:
            graph.replay()
        else:
            self.update(self.backward(self.bin.batch(split, lengths, now, before)))

    @property
    def half(self) -> bool:
        """Whether it runs in half precision, on a GPU."""
        return self.bin.fixed and self.bin.features.dtype in HALF

    def capture(
        self,
        split: int,
        rows: int,
        now: Teacher,
        before: Teacher | None,
        where: int = 0,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Makes a graph of the step, where there is none; without one it runs op by op.

        Call while no other step is under way.

        Args:
            split: first row of the newer pieces.
            rows: of the bin that it computes.
            now, before: teachers, whose tensors a replay reads again.
            where: the partition's size, 0 = the whole card; a graph runs where it was captured.
            stream: of the partition.
        """
        spec, features = self.drafter.spec, self.bin.features
        shape = spec.num_heads, spec.num_kv_heads, spec.head_dim
        known = (split, rows, where) in self._graphs
        useless = self.failed_capture or known or (split and not before)
        # Without FlashAttention lengths are read on the host.
        if useless or not flash_works(features.device, features.dtype, *shape):
            return
        side = stream or torch.cuda.Stream(features.device)
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                self._capture(split, rows, now, before, where)
        except RuntimeError as error:
            self.failed_capture = True
            warnings.warn(
                f"spot trainer: a step could not be captured ({str(error).splitlines()[0]}); it"
                " runs op by op, slower",
                stacklevel=3,
            )
        torch.cuda.current_stream().wait_stream(side)

    def _capture(
        self, split: int, rows: int, now: Teacher, before: Teacher | None, where: int
    ) -> None:
        """On the current stream; raises RuntimeError where it cannot be captured."""
        batch = (split, [rows], now, before)
        kept = [x.clone() for x in (*self.bin.small(), self.report, self.acceptance)]
        self.bin.numbers.zero_()
        self.bin.offsets.fill_(rows)[0] = 0
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream()
        try:
            with self.idle():
                for _ in range(WARM_UPS):
                    self.update(self.backward(self.bin.batch(*batch)))
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
                try:
                    self.update(self.backward(self.bin.batch(*batch)))
                finally:
                    graph.capture_end()
            self._graphs[split, rows, where] = graph
        finally:
            for x, value in zip(
                (*self.bin.small(), self.report, self.acceptance), kept, strict=True
            ):
                x.copy_(value)
            stream.synchronize()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over an optimizer's state: in place after a step, so captured ones stay valid.

        The learning rate stays this run's: a warm start may have been made with another.
        """
        mine, theirs = self.optimizer.state_dict()["state"], state["state"]
        if mine.keys() == theirs.keys():
            for index, values in theirs.items():
                for name, value in values.items():
                    mine[index][name].copy_(value)
            return
        self._graphs.clear()
        self.optimizer.load_state_dict(state)
        for group in self.optimizer.param_groups:
            group["lr"], group["capturable"] = self.lr, self.bin.fixed  # of this machine

"""One optimizer step of the drafter over recorded entries, as a CUDA graph on a GPU."""

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from ..model.drafter import Drafter
from ..model.target import TargetModel
from .attention import HALF, Segments, flash_works
from .average import WeightAverage
from .buffer import Piece
from .loss import DraftBatch, Teachers, unrolled_loss
from .partition import Placement

MAX_GRAD_NORM = 1.0
IN_FLIGHT = 2  # steps enqueued during a rollout: more would delay a stop, fewer leave gaps
WARM_UPS = 2  # steps before a capture, which load kernels and grow scratch memory

# (gradients, tokens of this rank) -> tokens of all.
Reduce = Callable[[list[Tensor], int], int]


class Bin:
    """Static arrays of packed entries: documents of the previous policy, then of the current one.

    On the CPU only the rows in use are computed. On a GPU all rows are, or a fixed number of them,
    so that one captured step serves every batch. Lengths, positions and ids reach the device as
    arrays, never as launch arguments. Up to `in_flight` steps are enqueued.
    """

    def __init__(self, tokens: int, target: TargetModel, in_flight: int = IN_FLIGHT) -> None:
        self.tokens, self.target = tokens, target
        self.fixed = target.device.type == "cuda"
        # Pieces; two more are padding. Attention launches blocks for this many of full length.
        self.most = max(4, min(tokens // 16, max(16, tokens // 64)))
        width, device = target.spec.hidden_size, target.device
        dtype = target.embedding.dtype if self.fixed else torch.float32
        self.features = torch.zeros(tokens, 3 * width, dtype=dtype, device=device)
        self.final = torch.zeros(tokens, width, dtype=dtype, device=device)
        # Token id, position, unroll steps that an entry trains.
        self.numbers = torch.zeros(3, tokens, dtype=torch.int64, device=device)
        self.offsets = torch.zeros(self.most + 3, dtype=torch.int32, device=device)
        # Each step in flight has host copies; on the CPU there is one.
        staged = [
            [torch.zeros_like(x, device="cpu", pin_memory=self.fixed) for x in self.small]
            for _ in range(in_flight if self.fixed else 1)
        ]
        self._staged = cycle(staged)

    @property
    def small(self) -> tuple[Tensor, Tensor]:
        return self.numbers, self.offsets

    def load(
        self, pieces: Sequence[Piece], version: int, share: int, rows: int = 0
    ) -> tuple[int, list[int]]:
        """Copies pieces in, in the order of the current stream.

        Returns the first row of the current policy, and the lengths of pieces and padding.

        Args:
            pieces: at most `most`, of at most `rows` entries.
            version: of the current policy; pieces of the previous one come first.
            share: rows reserved for the previous policy if there are pieces of both.
            rows: computed by the step on a GPU; 0 = all.
        """
        rows = rows or self.tokens
        old = [p for p in pieces if p.document.target_version != version]
        new = [p for p in pieces if p.document.target_version == version]
        split = used = sum(p.length for p in old)
        if self.fixed and old:
            split = max(share, used) if new else rows
        numbers, offsets = staged = next(self._staged)
        numbers.zero_()
        lengths = self._fill(numbers, old, 0)
        if split > used:
            lengths.append(self._pad(used, split))
        lengths += self._fill(numbers, new, split)
        if self.fixed and sum(lengths) < rows:
            lengths.append(self._pad(sum(lengths), rows))
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
        offsets.fill_(int(bounds[-1]))
        offsets[: len(bounds)] = bounds
        for host, device in zip(staged, self.small, strict=True):
            device.copy_(host, non_blocking=True)
        return split, lengths

    def _fill(self, numbers: Tensor, pieces: Sequence[Piece], row: int) -> list[int]:
        width = self.features.shape[1]
        for piece in pieces:
            document, begin, end = piece.document, piece.start, piece.start + piece.length
            rows = slice(row, row + piece.length)
            numbers[0, rows] = document.tokens[begin + 1 : end + 1]
            numbers[1, rows] = torch.arange(begin, end) + document.start
            left = torch.arange(piece.length, 0, -1)
            if document.generated is not None:
                left = left.minimum(document.generated[begin:end])
            numbers[2, rows] = left
            if document.ready is not None:
                torch.cuda.current_stream().wait_event(document.ready)
            self.features[rows].copy_(document.features[begin:end, :width], non_blocking=True)
            final = document.features[begin + 1 : end + 1, width:]
            self.final[rows].copy_(final, non_blocking=True)
            if document.features.is_cuda:
                document.features.record_stream(torch.cuda.current_stream())
            row += piece.length
        return [piece.length for piece in pieces]

    def _pad(self, begin: int, end: int) -> int:
        """Zeroes rows of padding, where a NaN would reach every gradient; their number."""
        self.features[begin:end].zero_()
        self.final[begin:end].zero_()
        return end - begin

    def batch(self, split: int, lengths: Sequence[int], teachers: Teachers) -> DraftBatch:
        rows = sum(lengths)
        longest = rows if self.fixed else max(lengths)
        ids, position, left = self.numbers[:, :rows]
        spans: list[tuple[int, int, Any]] = [
            (0, split, teachers.previous),
            (split, rows, teachers.current),
        ]
        return DraftBatch(
            self.target.embedding.index_select(0, ids).to(self.features.dtype),
            self.features[:rows],
            self.final[:rows],
            position,
            left,
            Segments(self.offsets, longest, tuple(lengths)),
            tuple((a, b, teacher) for a, b, teacher in spans if b > a),
        )


class DraftStep:
    """Loss, gradients and update over a `Bin`; half precision runs under autocast.

    A step whose gradient is not finite changes nothing; the device decides this. Weights are
    averaged over `horizon` steps; 0 = no average.
    """

    def __init__(
        self,
        drafter: Drafter,
        bin: Bin,
        teachers: Teachers,
        unroll: int,
        lr: float,
        horizon: int = 0,
    ) -> None:
        self.drafter, self.bin, self.teachers = drafter, bin, teachers
        self.unroll = unroll
        device = bin.target.device
        self.lr = torch.tensor(lr, device=device)  # a tensor, since a graph reads it
        self.optimizer = torch.optim.AdamW(
            drafter.trainable(),
            lr=self.lr,
            weight_decay=0.0,
            betas=(0.9, 0.95),
            fused=True,
            capturable=bin.fixed,
        )
        self.average = WeightAverage(drafter, horizon)
        self.report = torch.zeros(4, device=device)  # loss, acceptance, top-1, finite
        self._frozen = torch.zeros((), device=device)  # 1: steps change nothing
        self.failed_capture = False
        self._graphs: dict[tuple[int, int, int], torch.cuda.CUDAGraph] = {}
        self._memory: Any = None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Inside the block, steps change no weight, average or optimizer state."""
        before = self._frozen.clone()
        self._frozen.fill_(1.0)
        try:
            yield
        finally:
            self._frozen.copy_(before)

    def backward(self, batch: DraftBatch | None) -> Tensor | None:
        """Computes gradients, zero without a batch; returns the means of `unrolled_loss`."""
        for weight in self.drafter.trainable():
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad.zero_()
        if batch is None:
            return None
        dtype, cos_sin = self.bin.features.dtype, self.bin.target.cos_sin
        with torch.autocast("cuda", dtype) if dtype in HALF else nullcontext():
            loss, means = unrolled_loss(self.drafter, batch, cos_sin, self.unroll)
        loss.backward()
        return means

    def update(self, means: Tensor | None) -> None:
        """Clips and applies the gradients, averages the weights, writes the report."""
        weights = self.drafter.trainable()
        finite = clip_grad_norm_(weights, MAX_GRAD_NORM).isfinite()
        skipped = torch.maximum((~finite).float(), self._frozen)
        self.optimizer.found_inf = skipped  # type: ignore[attr-defined]
        self.optimizer.step()
        self.average.update(self.optimizer.state[weights[0]]["step"], skipped)
        self.report[3].copy_(finite)
        if means is not None:
            self.report[:3].copy_(torch.where(finite, means, self.report[:3]))

    def run(self, split: int, lengths: Sequence[int], placement: Placement | None) -> None:
        """Makes a step on what was loaded, as a graph if `capture` made one for it."""
        graph = self._graphs.get((split, sum(lengths), placement.partition.sms if placement else 0))
        if graph is not None:
            graph.replay()
        else:
            self.update(self.backward(self.bin.batch(split, lengths, self.teachers)))

    def capture(self, split: int, placement: Placement | None) -> None:
        """Captures the step, if it was not yet; a step without a graph runs op by op.

        Call while no other step runs. `split` is the first row of the current policy; without a
        placement the step takes the whole bin on the whole GPU.
        """
        spec, features = self.drafter.spec, self.bin.features
        rows, sms, stream = self.bin.tokens, 0, None
        if placement is not None:
            rows, sms = placement.rows, placement.partition.sms
            stream = placement.partition.stream
        known = (split, rows, sms) in self._graphs
        if self.failed_capture or known or (split and self.teachers.previous is None):
            return
        # Without FlashAttention the step reads lengths on the host.
        shape = spec.num_heads, spec.num_kv_heads, spec.head_dim
        if not flash_works(features.device, features.dtype, *shape):
            return
        side = stream or torch.cuda.Stream(features.device)
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                self._graphs[split, rows, sms] = self._captured(split, rows)
        except RuntimeError as error:
            self.failed_capture = True
            warnings.warn(
                f"spot trainer: a step could not be captured ({str(error).splitlines()[0]}); it"
                " runs op by op, slower",
                stacklevel=3,
            )
        torch.cuda.current_stream().wait_stream(side)

    def _captured(self, split: int, rows: int) -> torch.cuda.CUDAGraph:
        """A step captured on the current stream; raises RuntimeError if that fails."""

        def step() -> None:
            self.update(self.backward(self.bin.batch(split, [rows], self.teachers)))

        state = (*self.bin.small, self.report)
        kept = [x.clone() for x in state]
        self.bin.numbers.zero_()
        self.bin.offsets.fill_(rows)[0] = 0
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream()
        try:
            with self.frozen():
                for _ in range(WARM_UPS):
                    step()
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
            return graph
        finally:
            for x, value in zip(state, kept, strict=True):
                x.copy_(value)
            stream.synchronize()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads optimizer state; in place if steps were made, so that graphs stay valid.

        The learning rate stays this run's: a warm start may have been made with another one.
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
            group["lr"], group["capturable"] = self.lr, self.bin.fixed  # of this run


class StepReports:
    """Reads the reports of enqueued steps without waiting for the device."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}  # entries of the metrics file
        self._queued: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def add(self, report: Tensor) -> None:
        """Enqueues a copy to the host of float32 [4]: loss, acceptance, top-1, 1 if finite."""
        if report.is_cuda:
            copy = torch.empty_like(report, device="cpu", pin_memory=True)
            copy.copy_(report, non_blocking=True)
            self._queued.append((copy, torch.cuda.current_stream().record_event()))
        else:
            self._queued.append((report.clone(), None))
            self.read(0)

    def read(self, most: int) -> None:
        """Waits until at most `most` steps are in flight; reads the reports of the others."""
        while len(self._queued) > most:
            report, event = self._queued.popleft()
            if event is not None:
                event.synchronize()
            loss, acceptance, top1, finite = report.tolist()
            if finite:
                values = {"loss": loss, "acceptance": acceptance, "top1": top1}
                self.last = {f"drafter/{name}": value for name, value in values.items()}
            else:
                warnings.warn("spot trainer: gradient is not finite: step skipped", stacklevel=2)

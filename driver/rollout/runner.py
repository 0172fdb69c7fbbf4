"""Runs bursts of passes and waits for their end."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

import tlt_ext

from ..config.strategy import OFF, Strategy
from .graphs import PassGraphs, nothing, wait_for, wait_until_idle
from .passes import PassProgram
from .plan import Cell


@dataclass(frozen=True)
class Burst:
    """Passes made without the host in between; their results can be read during the next burst."""

    strategy: Strategy
    version: int  # of the drafter, 0 = not a learned one
    ring: tlt_ext.PassRing
    begin: int  # first record in the ring
    end: int  # the record after the last
    count: int  # running requests
    unbroken: bool  # it ended at its limit only, so the passes can continue
    begun_s: float  # by time.perf_counter
    elapsed_s: float  # by the device's clock for graphs, else by the host's
    counted_rows: int | None = None  # rows of the target; None: a graph made the passes

    @property
    def captured(self) -> bool:
        return self.counted_rows is None

    @property
    def passes(self) -> int:
        return self.end - self.begin

    @cached_property
    def ended(self) -> int:
        return int(np.count_nonzero(self.ring.finish[self._records, : self.count]))

    @cached_property
    def emitted(self) -> np.ndarray:
        """int32 [passes, count], tokens; 0 after a request has finished."""
        return self.ring.num_emitted[self._records, : self.count]

    @cached_property
    def total(self) -> int:
        return int(self.emitted.sum())

    @cached_property
    def active(self) -> list[int]:
        return (self.emitted > 0).sum(axis=1).tolist()

    @property
    def request_passes(self) -> int:
        """Sum of the requests in each pass."""
        return sum(self.active)

    @property
    def rows(self) -> int:
        return self.counted_rows or self.request_passes * self.strategy.num_verify

    @property
    def ends_s(self) -> list[float]:
        """Seconds from the begin of the burst to the end of each pass."""
        stamps = self.ring.time_ns[self._records]
        return (self.elapsed_s - (stamps[-1] - stamps) * 1e-9).tolist()

    @property
    def _records(self) -> np.ndarray:
        return np.arange(self.begin, self.end) % self.ring.passes


@dataclass(eq=False)
class PassRunner:
    """Launches passes, as graphs if there are any, else op by op."""

    program: PassProgram
    graphs: PassGraphs | None = None

    @property
    def longest(self) -> int:
        """Passes of the longest burst; the other half of the ring is read during the next one."""
        return self.program.ring.passes // 2

    def prepare(self) -> None:
        """Captures the graphs that can be captured; no request may run."""
        if self.graphs is not None:
            self.graphs.capture()

    def most_passes(self, count: int, strategy: Strategy) -> int:
        """Passes that can be made without the host in between."""
        return self.longest if self._cell(count, strategy) else 1

    def spare(self, count: int, strategy: Strategy) -> int:
        """Requests that must finish before a smaller graph can take over.

        Until then their inert rows cost nothing, since a graph runs all rows of its bucket.
        """
        cell = self._cell(count, strategy)
        return 1 if self.graphs is None or cell is None else count - self.graphs.plan.below(cell)

    def step_s(self, count: int, strategy: Strategy) -> float | None:
        """Seconds of a pass, measured when its graph was captured; None: there is no graph."""
        cell = self._cell(count, strategy)
        return None if self.graphs is None or cell is None else self.graphs.step_s[cell]

    def decode_s(self) -> float | None:
        """Seconds of plain passes of one inert row, while no request runs; None without a graph."""
        cell = self._cell(1, OFF)
        if self.graphs is None or cell is None:
            return None
        self.program.state.fill([])
        return self.graphs.burst(cell, self.longest) / self.longest

    def covers(self, count: int, strategy: Strategy) -> bool:
        """Whether a strategy may run: with graphs it needs one, drafts on the host do not."""
        if self.graphs is None or not self.program.on_device(strategy):
            return True
        return self.graphs.covers(count, strategy)

    def run(
        self,
        count: int,
        strategy: Strategy,
        limit: int,
        ends: int = 1,
        meanwhile: Callable[[], bool] = nothing,
    ) -> Burst:
        """Makes passes until requests finish, pages run short or `limit` passes were made.

        Args:
            limit: passes, at most `most_passes`.
            ends: finished requests that end the burst, at most `spare`.
            meanwhile: called after the launch, or before a pass launched op by op; returns whether
                the passes are to stop.
        """
        program, ring, state = self.program, self.program.ring, self.program.state
        begin, cell = ring.sequence, self._cell(count, strategy)
        version, rows = program.version(strategy), None
        if self.graphs is None or cell is None:
            meanwhile()
            # The pass is timed without a prefill before it.
            wait_until_idle(program)
            begun = time.perf_counter()
            tlt_ext.arm_passes(state.control, ring, limit=1)
            rows = program.run(state.rows(count), strategy)
            wait_for(program)
            elapsed = time.perf_counter() - begun
        else:
            with program.spans("passes", active=count, strategy=str(strategy)):
                elapsed = self.graphs.burst(cell, limit, ends, meanwhile)
            begun = time.perf_counter() - elapsed  # the device may first have finished a prefill
        end, unbroken = ring.sequence, ring.reason == tlt_ext.StopReason.LIMIT
        return Burst(strategy, version, ring, begin, end, count, unbroken, begun, elapsed, rows)

    def _cell(self, count: int, strategy: Strategy) -> Cell | None:
        """The graph of the passes; None: they are launched op by op."""
        return None if self.graphs is None else self.graphs.find(count, strategy)

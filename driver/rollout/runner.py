"""Runs bursts of passes and waits for their end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np

import tlt_ext

from ..config.strategy import OFF, Strategy
from .graphs import PassGraphs, nothing, wait_for
from .passes import PassProgram
from .plan import Cell
from .state import BatchState


@dataclass(frozen=True)
class Burst:
    """Passes made without the host in between; what they left can be read during the next burst."""

    strategy: Strategy
    version: int  # of the drafter, 0 = not a learned one
    ring: tlt_ext.PassRing
    begin: int  # first record in the ring
    end: int  # past the last
    count: int  # running requests
    unbroken: bool  # nothing but their limit ended them: they can go on from where they stopped
    begun_s: float  # by time.perf_counter
    elapsed_s: float  # by the clock of those who ran it: the device's for graphs, else the host's
    counted_rows: int | None = None  # that the target saw, without a graph, which has its own

    @property
    def captured(self) -> bool:
        """They were a graph's."""
        return self.counted_rows is None

    @property
    def passes(self) -> int:
        return self.end - self.begin

    @cached_property
    def ended(self) -> int:
        """Requests that ended in them."""
        return int(np.count_nonzero(self.ring.finish[self._records, : self.count]))

    @cached_property
    def emitted(self) -> np.ndarray:
        """int32 [passes, count], tokens; 0 where a request had ended."""
        return self.ring.num_emitted[self._records, : self.count]

    @property
    def total(self) -> int:
        """Tokens."""
        return int(self.emitted.sum())

    @property
    def active(self) -> list[int]:
        """Requests of each pass."""
        return np.count_nonzero(self.emitted, axis=1).tolist()

    @property
    def request_passes(self) -> int:
        """One for each request in each pass."""
        return int(np.count_nonzero(self.emitted))

    @property
    def rows(self) -> int:
        """That the target saw, all passes together."""
        return self.counted_rows or self.request_passes * self.strategy.num_verify

    @property
    def ends_s(self) -> list[float]:
        """Of each pass, from the first one's beginning."""
        stamps = self.ring.time_ns[self._records]
        return (self.elapsed_s - (stamps[-1] - stamps) * 1e-9).tolist()

    @property
    def _records(self) -> np.ndarray:
        return np.arange(self.begin, self.end) % self.ring.passes


class PassRunner:
    """Launches passes over the state, as graphs where there are some, else op by op.

    Args:
        program: what a pass does.
        state: what it does it to.
        ring: what it leaves.
        graphs: of passes; None: there are none.
    """

    def __init__(
        self,
        program: PassProgram,
        state: BatchState,
        ring: tlt_ext.PassRing,
        graphs: PassGraphs | None = None,
    ) -> None:
        self.program, self.state, self.ring, self.graphs = program, state, ring, graphs
        self.longest = ring.passes // 2  # the other half is still read when the next burst runs
        self.graphs_aside = False  # though there are some

    def prepare(self) -> None:
        """Makes the graphs that can be made by now; call while no request runs."""
        if self.graphs is not None:
            self.graphs.capture()

    @contextmanager
    def op_by_op(self) -> Iterator[None]:
        """Graphs stand aside while the block runs: Python makes every call, for the same tokens.

        Those to come are made before it, by calls that are no pass's. Call while no request runs.
        """
        self.prepare()
        self.graphs_aside = self.graphs is not None
        try:
            yield
        finally:
            self.graphs_aside = False

    def most_passes(self, count: int, strategy: Strategy) -> int:
        """Passes that can be made without the host in between."""
        return self.longest if self._cell(count, strategy) else 1

    def spare(self, count: int, strategy: Strategy) -> int:
        """Requests that may end without the host: those that leave no smaller graph to change to.

        Their rows are inert then, which costs nothing, as a graph runs all rows of its bucket.
        """
        cell = self._cell(count, strategy)
        return 1 if cell is None else count - self.graphs.plan.below(cell)

    def step_s(self, count: int, strategy: Strategy) -> float | None:
        """Seconds of a pass as timed when its graph was made; None: there is none."""
        cell = None if self.graphs is None else self.graphs.find(count, strategy)
        return None if cell is None else self.graphs.step_s[cell]

    def decode_s(self) -> float | None:
        """Seconds of a plain pass of one request as fast as it is now; None: it has no graph.

        Call while no request runs: its row is inert.
        """
        cell = None if self.graphs is None else self.graphs.find(1, OFF)
        if cell is None:
            return None
        self.state.fill([])
        return self.graphs.burst(cell, self.longest) / self.longest

    def covers(self, count: int, strategy: Strategy) -> bool:
        """Whether the strategy may be chosen: with graphs only what has one, or had to fail.

        What drafts on the host never has one.
        """
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
        """Makes passes until requests finish, pages run short or there were `limit`.

        Args:
            count: running requests.
            strategy: of the passes.
            limit: passes, at most `most_passes`.
            ends: requests that finish first, at most `spare`.
            meanwhile: called once the device has its work, or before a pass that is launched op by
                op; whether the passes are to stop.

        Raises:
            RuntimeError: the device failed.
        """
        begin = self.ring.sequence
        cell = self._cell(count, strategy)
        version, rows = self.program.version(strategy), None
        if cell is None:
            meanwhile()
            begun = time.perf_counter()
            tlt_ext.arm_passes(self.state.control, self.ring, limit=1)
            rows = self.program.run(self.state.rows(count), strategy)
            wait_for(self.ring, self.state.device)
            elapsed = time.perf_counter() - begun
        else:
            with self.program.spans("passes", active=count, strategy=str(strategy)):
                elapsed = self.graphs.burst(cell, limit, ends, meanwhile)
            begun = time.perf_counter() - elapsed  # the device may have had a prefill to finish
        end = self.ring.sequence
        unbroken = self.ring.reason == tlt_ext.StopReason.LIMIT
        return Burst(
            strategy, version, self.ring, begin, end, count, unbroken, begun, elapsed, rows
        )

    def _cell(self, count: int, strategy: Strategy) -> Cell | None:
        """The graph that makes the passes; None: they are launched op by op."""
        if self.graphs is None or self.graphs_aside:
            return None
        return self.graphs.find(count, strategy)

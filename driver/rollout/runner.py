"""Runs bursts of passes and waits for their end."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

import tlt_ext
from driver.rollout.graphs import PassGraphs, wait_for
from driver.rollout.passes import PassProgram
from driver.rollout.state import BatchState
from driver.strategy import OFF, Strategy


@dataclass(frozen=True)
class Burst:
    """Passes made without the host in between."""

    strategy: Strategy
    begin: int  # first record in the ring
    end: int  # past the last
    active: list[int]  # requests of each pass
    rows: int  # of theirs that the target saw, all passes together
    begun_s: float  # by time.perf_counter
    elapsed_s: float  # by the clock of those who ran it: the device's for graphs, else the host's
    ends_s: list[float]  # of each pass, from the first one's beginning

    @property
    def passes(self) -> int:
        return self.end - self.begin

    @property
    def request_passes(self) -> int:
        """One for each request in each pass."""
        return sum(self.active)


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

    def prepare(self) -> None:
        """Makes the graphs that can be made by now; call while no request runs."""
        if self.graphs is not None:
            self.graphs.capture()

    def most_passes(self, count: int, strategy: Strategy) -> int:
        """Passes that can be made without the host in between."""
        graph = self.graphs is not None and self.graphs.find(count, strategy)
        return self.ring.passes if graph else 1

    def spare(self, count: int, strategy: Strategy) -> int:
        """Requests that may end without the host: those that leave no smaller graph to change to.

        Their rows are inert then, which costs nothing, as a graph runs all rows of its bucket.
        """
        cell = None if self.graphs is None else self.graphs.find(count, strategy)
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
        return self.graphs.burst(cell, self.ring.passes) / self.ring.passes

    def covers(self, count: int, strategy: Strategy) -> bool:
        """Whether the strategy may be chosen: with graphs only what has one, or had to fail.

        What drafts on the host never has one.
        """
        if self.graphs is None or not self.program.on_device(strategy):
            return True
        return self.graphs.covers(count, strategy)

    def run(self, count: int, strategy: Strategy, limit: int, ends: int = 1) -> Burst:
        """Makes passes until requests finish, pages run short or there were `limit`.

        Args:
            count: running requests.
            strategy: of the passes.
            limit: passes, at most `most_passes`.
            ends: requests that finish first, at most `spare`.

        Raises:
            RuntimeError: the device failed.
        """
        begun, begin = time.perf_counter(), self.ring.sequence
        cell = None if self.graphs is None else self.graphs.find(count, strategy)
        if cell is None:
            tlt_ext.arm_passes(self.state.control, self.ring, limit=1)
            rows = self.program.run(self.state.rows(count), strategy)
            wait_for(self.ring, self.state.device)
            elapsed = time.perf_counter() - begun
        else:
            with self.program.spans("passes", active=count, strategy=str(strategy)):
                elapsed = self.graphs.burst(cell, limit, ends)
        end = self.ring.sequence
        records = np.arange(begin, end) % self.ring.passes
        active = np.count_nonzero(self.ring.num_emitted[records, :count], axis=1).tolist()
        if cell is not None:
            rows = sum(active) * strategy.num_verify
        stamps = self.ring.time_ns[records]
        ends_s = (elapsed - (stamps[-1] - stamps) * 1e-9).tolist()
        return Burst(strategy, begin, end, active, rows, begun, elapsed, ends_s)

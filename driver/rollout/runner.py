"""Runs bursts of passes and waits for their end."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

import tlt_ext
from driver.rollout.passes import PassProgram
from driver.rollout.state import BatchState
from driver.strategy import Strategy

POLL_S = 1.0  # between looks at the device's error state while a burst runs


@dataclass(frozen=True)
class Burst:
    """Passes made without the host in between."""

    strategy: Strategy
    begin: int  # first record in the ring
    end: int  # past the last
    rows: int  # that the target saw, all passes together
    begun_s: float  # by time.perf_counter
    elapsed_s: float  # by the clock of those who ran it: the device's for graphs, else the host's
    ends_s: list[float]  # of each pass, from the first one's beginning

    @property
    def passes(self) -> int:
        return self.end - self.begin


class PassRunner:
    """Launches passes over the state, as graphs where there are some, else op by op.

    Args:
        program: what a pass does.
        state: what it does it to.
        ring: what it leaves.
    """

    def __init__(
        self, program: PassProgram, state: BatchState, ring: tlt_ext.PassRing
    ) -> None:
        self.program, self.state, self.ring = program, state, ring

    def run(self, count: int, strategy: Strategy, limit: int) -> Burst:
        """Makes passes until a request finishes, pages run short or there were `limit`.

        Args:
            count: running requests.
            strategy: of the passes.
            limit: passes at most.

        Raises:
            RuntimeError: the device failed.
        """
        begun = time.perf_counter()
        begin = self.ring.sequence
        tlt_ext.arm_passes(self.state.control, self.ring, limit=1)
        rows = self.program.run(self.state.rows(count), strategy)
        self._wait()
        end = self.ring.sequence
        elapsed = time.perf_counter() - begun
        ends = [self._seconds(p) for p in range(begin, end)]
        return Burst(strategy, begin, end, rows, begun, elapsed, ends)

    def _seconds(self, record: int) -> float:
        stamp = self.ring.time_ns[record % self.ring.passes] - self.ring.begin_ns[0]
        return float(stamp) * 1e-9

    def _wait(self) -> None:
        while not self.ring.wait(POLL_S):
            if self.state.device.type == "cuda":
                torch.cuda.current_stream().query()  # raises what the device reported

"""Passes as CUDA graphs: torch captures them and owns their memory, `GraphPool` runs them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch

import tlt_ext

from ..config.strategy import OFF, Strategy
from .passes import PassProgram
from .plan import BucketPlan, Cell, listed
from .state import BatchState

PROFILE_PASSES = 8  # that give the step time of a graph
POLL_S = 1.0  # between looks at the device's error state


def nothing() -> bool:
    """What the host does meanwhile where it has nothing to do."""
    return False


def wait_for(ring: tlt_ext.PassRing, device: torch.device) -> tlt_ext.StopReason:
    """Waits until the passes that were armed stop; says why they did.

    Raises:
        RuntimeError: the device failed.
    """
    while not (reason := ring.wait(POLL_S)):
        if device.type == "cuda":
            torch.cuda.current_stream(device).query()  # raises what it reported
    return reason


class PassGraphs:
    """The graphs of a plan, each made when its strategy can first run.

    A graph holds addresses of static arrays and weights, all of which change in place; so it stays
    valid over batches, steps and updates of policy and drafter.

    Args:
        plan: what to capture.
        program: the pass.
        state: what it runs over.
        ring: where its results go.
        loop: repeat a pass inside its graph, so that a burst is one launch; else the host launches
            pass by pass.
        budget_bytes: of the executables; 0 = no limit.
    """

    def __init__(
        self,
        plan: BucketPlan,
        program: PassProgram,
        state: BatchState,
        ring: tlt_ext.PassRing,
        loop: bool,
        budget_bytes: int = 0,
    ) -> None:
        self.plan, self.program, self.state, self.ring = plan, program, state, ring
        self.loop, self.budget_bytes = loop, budget_bytes
        self.failed = ""  # why nothing more is captured
        self.capture_s = 0.0
        self._tried: set[Cell] = set()
        self.step_s: dict[Cell, float] = {}  # measured on inert rows, right after capture
        self._pool = tlt_ext.GraphPool(state.device.index or 0, budget_bytes=budget_bytes)
        self._stream = torch.cuda.Stream(state.device)
        self._memory = torch.cuda.graph_pool_handle()  # of temporaries, one for all graphs
        # What is in the pool; as torch's graphs they keep the memory of the temporaries.
        self._captured: dict[Cell, torch.cuda.CUDAGraph] = {}

    def find(self, batch: int, strategy: Strategy) -> Cell | None:
        """The graph that serves this batch, if it was captured."""
        cell = self.plan.find(batch, strategy)
        return cell if cell in self._captured else None

    def covers(self, batch: int, strategy: Strategy) -> bool:
        """Whether the strategy has a graph for this batch, or would have but for a failure."""
        cell = self.plan.find(batch, strategy)
        return cell in self._captured or (cell is not None and bool(self.failed))

    def burst(
        self,
        cell: Cell,
        limit: int,
        ends: int = 1,
        meanwhile: Callable[[], bool] = nothing,
    ) -> float:
        """Makes up to `limit` passes, until `ends` requests have ended (one where nothing loops).

        Args:
            cell: the graph.
            limit: passes.
            ends: requests.
            meanwhile: called once the device has something to do; whether it is to stop.

        Returns:
            Their seconds by the device's clock.

        Raises:
            RuntimeError: the device failed.
        """
        arm, ends = (limit, ends) if self.loop else (1, 1)
        begun_ns = None
        while True:
            tlt_ext.arm_passes(self.state.control, self.ring, limit=arm, ends=ends)
            self._pool.launch(str(cell))
            stop = True
            try:
                stop = meanwhile()
            finally:  # an error leaves nothing in flight
                if stop:
                    self.ring.request_stop()
                reason = wait_for(self.ring, self.state.device)
            meanwhile = nothing
            begun_ns = begun_ns or int(self.ring.begin_ns[0])
            limit = 0 if stop else limit - arm
            if limit == 0 or reason != tlt_ext.StopReason.LIMIT:
                break
        last = (self.ring.sequence - 1) % self.ring.passes
        return (int(self.ring.time_ns[last]) - begun_ns) * 1e-9

    def capture(self) -> None:
        """Captures what can run by now and was not captured; call while no request runs.

        Running out of memory leaves the rest to be launched op by op, with a warning; what gave way
        to others is named in one, too.
        """
        usable = {
            kind for kind, p in self.program.proposers.items() if p.on_device and p.usable()
        } | {"off"}
        todo = [c for c in self.plan.cells if c.strategy.kind in usable and c not in self._tried]
        if not todo or self.failed:
            return
        begun = time.perf_counter()
        self.state.fill([])  # every row inert: passes that touch nothing
        for cell in todo:
            self._tried.add(cell)
            try:
                self._capture(cell)
                self.step_s[cell] = self._time(cell)
            except (RuntimeError, tlt_ext.GraphError) as error:  # OutOfMemoryError is one
                if self._captured.pop(cell, None) is not None:  # made, and failed when it ran
                    self._pool.remove(str(cell))
                self.failed = str(error).splitlines()[0]
                warnings.warn(
                    f"CUDA graphs: {cell} could not be captured ({self.failed}); it and"
                    f" {len(todo) - todo.index(cell) - 1} more run without, slower",
                    stacklevel=2,
                )
                break
        self._forget_evicted()
        self.capture_s += time.perf_counter() - begun

    def _forget_evicted(self) -> None:
        """Warns of the graphs that the pool dropped for others: the plan was too hopeful."""
        gone = [cell for cell in self._captured if str(cell) not in self._pool]
        for cell in gone:
            del self._captured[cell]
        if gone:
            budget = f"engine.graph_mib={self.budget_bytes >> 20} or "
            warnings.warn(
                f"CUDA graphs: {budget if self.budget_bytes else ''}the device's memory is too"
                f" little; {listed(gone)} gave way: such speculation is not chosen, plain decoding"
                " runs without a graph, slower",
                stacklevel=3,
            )

    def _time(self, cell: Cell) -> float:
        """Seconds of a pass over inert rows."""
        return self.burst(cell, PROFILE_PASSES) / PROFILE_PASSES

    def _capture(self, cell: Cell) -> None:
        batch = self.state.rows(cell.batch)
        main = torch.cuda.current_stream(self.state.device)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            # Loads kernels and grows scratch memory, neither of which a capture may do.
            self.program.run(batch, cell.strategy)
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                self.program.run(batch, cell.strategy)
            finally:
                graph.capture_end()
        main.wait_stream(self._stream)
        self._pool.add(
            str(cell),
            [graph.raw_cuda_graph()],
            self.state.control,
            loop=self.loop,
            priority=int(cell.strategy == OFF),  # the dense phase must not lose by the tail
        )
        self._captured[cell] = graph

    def metrics(self) -> dict[str, float]:
        """Under the names of the metrics file."""
        usage = self._pool.usage()
        return {
            "graphs/count": len(usage),
            "graphs/charged_mib": sum(u.charged_bytes for u in usage.values()) / 2**20,
            "graphs/settled_mib": sum(u.settled_bytes for u in usage.values()) / 2**20,
            "graphs/peak_mib": max((u.peak_bytes for u in usage.values()), default=0) / 2**20,
        }

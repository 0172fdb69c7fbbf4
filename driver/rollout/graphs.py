"""Passes as CUDA graphs: torch captures them and owns their memory, `GraphPool` launches them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

import tlt_ext

from ..common.errors import UserError
from ..config.strategy import OFF, Strategy
from .passes import PassProgram
from .plan import BucketPlan, Cell

if TYPE_CHECKING:
    from ..config.sections import EngineConfig

PROFILE_PASSES = 8  # that measure the step time of a graph
POLL_S = 1.0  # between two checks of the device's error state


def nothing() -> bool:
    """Host work during a burst: none."""
    return False


def wait_for(program: PassProgram) -> tlt_ext.StopReason:
    """Waits until the armed passes stop; UserError if one waits too long for another rank."""
    begun, device = time.monotonic(), program.state.device
    while not (reason := program.ring.wait(POLL_S)):
        if device.type == "cuda":
            torch.cuda.current_stream(device).query()  # raises what the device reported
        program.model.parallel.check(begun)
    return reason


def wait_until_idle(program: PassProgram) -> None:
    """Waits for the work that a GPU has enqueued; UserError as in `wait_for`."""
    begun, device = time.monotonic(), program.state.device
    while device.type == "cuda" and not torch.cuda.current_stream(device).query():
        program.model.parallel.check(begun)
        time.sleep(1e-4)


def build_graphs(
    config: EngineConfig, buckets: Sequence[int], max_rows: int, program: PassProgram
) -> PassGraphs | None:
    """The graphs of a configuration; None: passes are launched op by op.

    `buckets` are batch sizes of speculation, `max_rows` the rows of the largest speculative pass.
    Raises UserError if graphs are required and there is no card.
    """
    device = program.state.device
    if config.graphs == "off" or device.type == "cpu":
        if config.graphs == "pass":
            raise UserError("engine.graphs=pass: CUDA graphs need run.device=cuda")
        return None
    can_loop = program.model.parallel.size == 1 or program.model.shares_memory
    loop = config.graphs != "pass" and can_loop
    loop = loop and tlt_ext.GraphPool.supports_loop(device.index or 0)
    return PassGraphs(BucketPlan.of(config, buckets, max_rows), program, loop)


@dataclass(eq=False)
class PassGraphs:
    """The graphs of a plan, each captured when its strategy can first run.

    A graph holds addresses of static arrays and weights, all of which are updated in place. So it
    stays valid over batches, steps, and updates of policy and drafter.
    """

    plan: BucketPlan
    program: PassProgram
    loop: bool  # a burst is one launch of a repeated pass; otherwise the host launches each

    def __post_init__(self) -> None:
        self.state, self.ring = self.program.state, self.program.ring
        self.failed = ""  # why nothing more is captured; empty: nothing failed
        self.capture_s = 0.0
        self._tried: set[Cell] = set()
        self.step_s: dict[Cell, float] = {}  # of a pass, on inert rows right after capture
        self._pool = tlt_ext.GraphPool(self.state.device.index or 0)
        self._stream = torch.cuda.Stream(self.state.device)
        self._memory = torch.cuda.graph_pool_handle()  # of temporaries, shared by all graphs
        # The graphs in the pool; as torch's objects they keep the memory of the temporaries.
        self._captured: dict[Cell, torch.cuda.CUDAGraph] = {}

    def find(self, batch: int, strategy: Strategy) -> Cell | None:
        cell = self.plan.find(batch, strategy)
        return cell if cell in self._captured else None

    def covers(self, batch: int, strategy: Strategy) -> bool:
        """Whether there is a graph for the batch, or would be if its capture had not failed."""
        cell = self.plan.find(batch, strategy)
        return cell in self._captured or (cell is not None and bool(self.failed))

    def burst(
        self, cell: Cell, limit: int, ends: int = 1, meanwhile: Callable[[], bool] = nothing
    ) -> float:
        """Launches the graph: `limit` passes, fewer if `ends` requests finish or pages run short.

        Without loops the host launches every pass, and one finished request ends them.
        `meanwhile` is called once after the first launch and returns whether the passes are to
        stop; a loop of several ranks is not stopped. Returns their seconds on the device's clock.
        Raises RuntimeError if the device failed.
        """
        arm, ends = (limit, ends) if self.loop else (1, 1)
        parallel, begun_ns = self.program.model.parallel, None
        while True:
            tlt_ext.arm_passes(self.state.control, self.ring, limit=arm, ends=ends)
            self._pool.launch(str(cell))
            stop = True
            try:
                stop = meanwhile()
            finally:  # after an error nothing is left in flight
                if stop and parallel.size == 1:  # ranks would stop after different passes
                    self.ring.request_stop()
                reason = wait_for(self.program)
            meanwhile = nothing
            begun_ns = begun_ns or int(self.ring.begin_ns[0])
            limit = 0 if stop else limit - arm
            if limit == 0 or reason != tlt_ext.StopReason.LIMIT:
                break
        last = (self.ring.sequence - 1) % self.ring.passes
        return (int(self.ring.time_ns[last]) - begun_ns) * 1e-9

    def capture(self) -> None:
        """Captures graphs of usable strategies that were not tried yet; no request may run.

        If memory runs out, the other graphs are not captured and their passes are launched op by
        op; a warning names them. Another one names graphs that the pool evicted.
        """
        usable = {
            kind for kind, p in self.program.proposers.items() if p.on_device and p.usable()
        } | {"off"}
        todo = [c for c in self.plan.cells if c.strategy.kind in usable and c not in self._tried]
        if not todo or self.failed:
            return
        begun = time.perf_counter()
        self.state.fill([])  # every row is inert: passes that change nothing
        for cell in todo:
            self._tried.add(cell)
            try:
                self._capture(cell)
                self.step_s[cell] = self.burst(cell, PROFILE_PASSES) / PROFILE_PASSES
            except (RuntimeError, tlt_ext.GraphError) as error:  # OutOfMemoryError is one
                if self._captured.pop(cell, None) is not None:  # captured, but failed to run
                    self._pool.remove(str(cell))
                if self.program.model.parallel.size > 1:  # other ranks have this graph
                    raise
                self.failed = str(error).splitlines()[0]
                warnings.warn(
                    f"CUDA graphs: {cell} could not be captured ({self.failed}); it and"
                    f" {len(todo) - todo.index(cell) - 1} more run without, slower",
                    stacklevel=2,
                )
                break
        self._drop_evicted()
        self._compare()
        self.capture_s += time.perf_counter() - begun

    def _compare(self) -> None:
        """Raises UserError if a rank that shares the model has other graphs than the first one."""
        mine = sorted(map(str, self._captured))
        if self.program.model.parallel.decide(lambda: mine) != mine:
            raise UserError(
                "engine.graphs: the ranks of engine.tensor_parallel have captured different graphs;"
                " lower engine.max_batch or set engine.graphs=off"
            )

    def _drop_evicted(self) -> None:
        """Warns of graphs that the pool evicted for lack of memory."""
        gone = [cell for cell in self._captured if str(cell) not in self._pool]
        for cell in gone:
            del self._captured[cell]
        if gone:
            warnings.warn(
                f"CUDA graphs: the device's memory is too little; {', '.join(map(str, gone))} were"
                " evicted: such speculation is not chosen, plain decoding runs without a graph,"
                " slower",
                stacklevel=3,
            )

    def _capture(self, cell: Cell) -> None:
        batch = self.state.rows(cell.batch)
        main = torch.cuda.current_stream(self.state.device)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            # Loads kernels and grows scratch memory, which a capture must not do.
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
            priority=int(cell.strategy == OFF),  # the dense phase depends on them
        )
        self._captured[cell] = graph

    def metrics(self) -> dict[str, float]:
        usage = self._pool.usage()
        return {
            "graphs/count": len(usage),
            "graphs/charged_mib": sum(u.charged_bytes for u in usage.values()) / 2**20,
            "graphs/settled_mib": sum(u.resident_bytes for u in usage.values()) / 2**20,
            "graphs/peak_mib": max((u.peak_bytes for u in usage.values()), default=0) / 2**20,
        }

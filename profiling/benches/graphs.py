"""Device memory of CUDA graphs on a 7B shape: one strategy, six for every batch, six as planned.

`single` captures `off` and one strategy for every batch bucket to 256, `naive` six strategies
without shared temporaries. `ours` is the engine's plan: speculation for small batches only, shared
temporaries. Each case has its own process, because the driver keeps the memory of destroyed graphs.
Graphs are not launched: that adds no memory, and passes of 8,192 rows would take too long.

`median_us` is the time of the captures, `setup_s` the time before. `graphs_mib` is the fall of free
device memory during the captures, `settled_mib` its part while executables were made, `buffers_mib`
the target's static arrays. The targets compare `mib`, graphs and buffers. Predictions are those of
the plan, which assumes shared temporaries, so `naive` has none.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from driver.common.host_copies import held_bytes
from driver.config.strategy import parse_strategies
from driver.rollout.graphs import PassGraphs, nothing
from driver.rollout.plan import BucketPlan, Cell, GraphCost, draft_bytes, plain_buckets
from driver.session.parts import Rollout
from profiling.rig.bench import Bench, run_apart, say
from profiling.rig.subjects import QWEN2_7B, of_shape

MAX_BATCH, SPEC_BATCH, SPEC_ROWS = 256, 32, 1024
STRATEGIES = [
    "learned:2,1,3",
    "learned:4,1,5",
    "learned:4,4,16",
    "learned:8,4,32",
    "learned:6,4,24",
    "ngram:6,1,7",
]
SINGLE = "learned:4,4,16"
LONGEST = 1024  # tokens of a request: pages matter for no graph
WORDS = [
    "preset=h100",
    "model.dtype=bfloat16",
    "drafter.draft_vocab=16384",
    f"engine.max_batch={MAX_BATCH}",
    "engine.num_pages=2048",
    "engine.prefill_chunk=256",
]
CASES = ("single", "ours", "naive")  # the longest last
SHOWN = ("mib", "graphs_mib", "settled_mib", "buffers_mib", "count", "setup_s")
PREDICTED = ("predicted_over_settled", "predicted_over_measured")  # of all cases but naive


class Unrun(PassGraphs):
    """Graphs that are captured and never launched."""

    def burst(
        self, cell: Cell, limit: int, ends: int = 1, meanwhile: Callable[[], bool] = nothing
    ) -> float:
        return 0.0


class OwnMemory(Unrun):
    """Graphs without shared temporaries."""

    def _capture(self, cell: Cell) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        super()._capture(cell)


def words_of(case: str) -> list[str]:
    strategies = [SINGLE] if case == "single" else STRATEGIES
    batch = SPEC_BATCH if case == "ours" else MAX_BATCH
    return [
        *WORDS,
        f"engine.spec_max_batch={batch}",
        f"engine.spec_max_rows={SPEC_ROWS if case == 'ours' else 0}",
        f"engine.strategies={' '.join(['off', *strategies])}",
        f"bandit.buckets={plain_buckets(batch) if case != 'ours' else [1, 2, 4, 8, 16, 32]}",
    ]


def every_cell(rollout: Rollout) -> BucketPlan:
    """A plan of every pass that the target's buffers can hold."""
    engine = rollout.engine
    return BucketPlan(
        MAX_BATCH,
        MAX_BATCH,
        parse_strategies(engine.config.strategies),
        plain_buckets(MAX_BATCH),
        engine.model.max_rows,
    )


def measure(case: str) -> dict[str, Any]:
    """Captures all graphs of a case in this process."""
    begin = time.perf_counter()
    subject = of_shape("qwen2_7b_shape", words_of(case), QWEN2_7B, "cuda")
    rollout = subject.rollout(longest=LONGEST)
    engine, target = rollout.engine, rollout.target
    buffers = held_bytes(vars(target)) - held_bytes(target.state_dict())
    graphs = engine.runner.graphs
    assert graphs is not None
    if case != "ours":
        graphs.plan = every_cell(rollout)
    graphs.__class__ = OwnMemory if case == "naive" else Unrun
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    setup_s = time.perf_counter() - begin
    engine.runner.prepare()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    metrics = graphs.metrics()
    fell = free - torch.cuda.mem_get_info()[0]
    cell: dict[str, Any] = {
        "mib": (fell + buffers) / 2**20,
        "graphs_mib": fell / 2**20,
        "settled_mib": metrics["graphs/settled_mib"],
        "buffers_mib": buffers / 2**20,
        "count": metrics["graphs/count"],
        "capture_s": graphs.capture_s,
        "setup_s": setup_s,
        "failed": graphs.failed,
    }
    if case != "naive" and not graphs.failed:
        assert rollout.spot is not None
        executables = GraphCost(target.spec).bytes_of(*graphs.plan.cells)
        drafts = draft_bytes(graphs.plan.cells, rollout.spot.runner.spec, target.dtype.itemsize)
        cell["predicted_over_settled"] = executables / 2**20 / cell["settled_mib"]
        cell["predicted_over_measured"] = (executables + drafts + buffers) / (fell + buffers)
    return cell


def add_row(bench: Bench, case: str, cell: dict[str, Any]) -> None:
    shown = {name: round(cell[name], 3) for name in (*SHOWN, *PREDICTED) if name in cell}
    bench.add_row(case, 1e6 * cell["capture_s"], **shown, failed=cell["failed"])


def book(bench: Bench, got: dict[str, dict[str, Any]]) -> None:
    """The targets; a case with failed captures counts for none."""
    whole = {case: cell["mib"] for case, cell in got.items() if not cell["failed"]}
    if "single" in whole and "ours" in whole:
        bench.got["all_over_single_x"] = round(whole["ours"] / whole["single"], 3)
    if "naive" in whole and "ours" in whole:
        bench.got["naive_over_ours_x"] = round(whole["naive"] / whole["ours"], 3)


def run(bench: Bench) -> None:
    got = {}
    for case in CASES:
        if not bench.wanted(case):
            continue
        with bench.part(case):
            got[case] = json.loads(run_apart(__name__, case))
            add_row(bench, case, got[case])
            book(bench, got)  # after each case, in case the time runs out


if __name__ == "__main__":
    say(json.dumps(measure(sys.argv[1])))

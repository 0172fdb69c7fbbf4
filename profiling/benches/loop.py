"""What repeating a pass costs: inside a graph, one launch a pass, and op by op from Python.

The pass is a chain of dependent small kernels that ends in `advance_batch`. `us` is per pass, over
64 passes between two events. `chained` holds 64 copies of the captured pass in one graph, one after
the other: what a pass costs without anybody deciding whether another follows. `kib_per_node` is
what the device's free memory lost for each node of 64 executables of one captured pass, in a
process of its own, since the driver keeps the memory of graphs that went.
"""

import json
import subprocess
import sys
from collections.abc import Callable

import torch

import tlt_ext
from profiling.rig import timing
from profiling.rig.bench import Bench, say

PASSES = 64
KERNELS = [0, 30, 300]
INT = {"dtype": torch.int32, "device": "cuda"}


class Pass:
    """`kernels` dependent launches, then the end of a pass that emits one token a request."""

    def __init__(self, kernels: int, batch: int = 1) -> None:
        self.kernels = kernels
        self.ring = tlt_ext.PassRing(PASSES, batch, pinned=True)
        self.control, self.array = torch.zeros(8, **INT), torch.zeros(256, device="cuda")
        finish, status, last_token, remaining, num_new = torch.zeros(5, batch, **INT).unbind()
        self.output = tlt_ext.VerifyOutput(
            emitted=torch.zeros(batch, 17, **INT),
            logprobs=torch.zeros(batch, 17, device="cuda"),
            num_emitted=torch.ones(batch, **INT),
            finish=finish,
        )
        self.table = tlt_ext.TokenTable(
            tokens=torch.zeros(batch, 64, **INT), slot=torch.arange(batch, **INT)
        )
        self.requests = tlt_ext.Requests(
            context_len=torch.ones(batch, **INT),
            status=status,
            last_token=last_token,
            remaining=remaining,
            num_new=num_new,
            granted=torch.full((batch,), 64, **INT),
        )

    def arm(self) -> None:
        tlt_ext.arm_passes(self.control, self.ring, limit=PASSES)

    def step(self) -> None:
        for _ in range(self.kernels):
            self.array.add_(1.0)
        tlt_ext.advance_batch(
            self.output, self.table, self.requests, self.control, self.ring, lookahead=1
        )

    def capture(self) -> torch.cuda.CUDAGraph:
        self.arm()
        self.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            self.step()
        return graph


def time_each(work: Pass, arms: dict[str, Callable[[], None]]) -> dict[str, timing.Timing]:
    """Microseconds a pass of each arm, in alternating order."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for index in range(12):
        for name in list(arms) if index % 2 == 0 else list(reversed(arms)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            work.arm()
            torch.cuda._sleep(timing.SLEEP_CYCLES)
            start.record()
            arms[name]()
            end.record()
            end.synchronize()
            if index > 1:
                times[name].append(1e3 * start.elapsed_time(end) / PASSES)
    return {name: timing.summary(values) for name, values in times.items()}


def time_kernels(bench: Bench, kernels: int, batch: int) -> None:
    work = Pass(kernels, batch)
    graph = work.capture()
    pool = tlt_ext.GraphPool()
    raw = graph.raw_cuda_graph()
    pool.add("loop", [raw], work.control, loop=True)
    pool.add("once", [raw], work.control, loop=False)
    pool.add("chained", [raw] * PASSES, work.control, loop=False)
    arms = {
        "loop": lambda: pool.launch("loop"),
        "once": lambda: [pool.launch("once") for _ in range(PASSES)],
        "chained": lambda: pool.launch("chained"),
        "python": lambda: [work.step() for _ in range(PASSES)],
    }
    got = time_each(work, arms)
    peers = {name: got[name] for name in ("once", "chained", "python")}
    bench.add(
        f"loop of {kernels} kernels b{batch}",
        got["loop"],
        0,
        peers,
        **{f"{name}_us": round(value.median_us, 3) for name, value in peers.items()},
    )


def measure_memory(kernels: int, loop: bool) -> dict:
    """Sizes of executables of one pass, whose own memory is all that this process has made."""
    work, count = Pass(kernels), 64
    graph = work.capture()
    pool = tlt_ext.GraphPool()
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for index in range(count):
        pool.add(str(index), [graph.raw_cuda_graph()], work.control, loop=loop)
    made = before - torch.cuda.mem_get_info()[0]
    for index in range(count):
        work.arm()
        pool.launch(str(index))
    torch.cuda.synchronize()
    ran = before - torch.cuda.mem_get_info()[0]
    usage = pool.usage().values()
    nodes = sum(u.nodes for u in usage)
    summed = sum(u.settled_bytes for u in usage)
    return {
        "bench": "loop",
        "case": f"memory of {kernels} kernels{' in a loop' if loop else ''}",
        "executables": count,
        "nodes": nodes,
        "made_mib": made / 2**20,
        "after_launch_mib": ran / 2**20,
        "accounted_mib": summed / 2**20,
        "kib_per_node": round(ran / nodes / 1024, 3),
        "kib_per_executable": round(ran / count / 1024, 1),
    }


def run(bench: Bench) -> None:
    for kernels in KERNELS:
        time_kernels(bench, kernels, 1)
    time_kernels(bench, 0, 256)
    for kernels in KERNELS[1:]:
        for loop in (False, True):
            code = (
                "import json; from profiling.benches.loop import measure_memory;"
                f"print(json.dumps(measure_memory({kernels}, {loop})))"
            )
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True
            )
            bench.rows.append(json.loads(done.stdout))
            say("  ".join(f"{name} {value}" for name, value in bench.rows[-1].items()))

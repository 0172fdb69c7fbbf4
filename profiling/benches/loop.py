"""The cost of repeating a pass: in a loop inside a graph, by launches, and op by op from Python.

The pass is a chain of dependent small kernels that ends in `advance_batch`. `us` is of one pass,
over 64 passes between two events. `chained` is a graph of 64 copies of the pass, without the
decision whether another pass follows.
"""

from functools import partial

import torch

import tlt_ext
from profiling.rig import timing
from profiling.rig.bench import Bench
from profiling.rig.timing import INT

PASSES = 64
KERNELS = [0, 30, 300]


class Pass:
    """`kernels` dependent launches, then `advance_batch` of a pass with one token a request."""

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


def repeat(call: timing.Call) -> None:
    for _ in range(PASSES):
        call()


def time_kernels(bench: Bench, kernels: int, batch: int) -> None:
    work = Pass(kernels, batch)
    graph = work.capture()
    pool = tlt_ext.GraphPool()
    raw = graph.raw_cuda_graph()
    pool.add("loop", [raw], work.control, loop=True)
    pool.add("once", [raw], work.control, loop=False)
    pool.add("chained", [raw] * PASSES, work.control, loop=False)
    arms: dict[str, timing.Call] = {
        "loop": lambda: pool.launch("loop"),
        "once": partial(repeat, partial(pool.launch, "once")),
        "chained": lambda: pool.launch("chained"),
        "python": partial(repeat, work.step),
    }

    def before() -> None:
        work.arm()
        timing.sleep()

    times = timing.alternate(arms, rounds=10, warm_ups=2, before=before)
    got = {name: timing.summary([us / PASSES for us in of]) for name, of in times.items()}
    peers = {name: got[name] for name in ("once", "chained", "python")}
    bench.add(
        f"loop of {kernels} kernels b{batch}",
        got["loop"],
        0,
        peers,
        **{f"{name}_us": round(value.median_us, 3) for name, value in peers.items()},
    )


def run(bench: Bench) -> None:
    for kernels in KERNELS:
        time_kernels(bench, kernels, 1)
    time_kernels(bench, 0, 256)

"""How every benchmark measures: CUDA graphs on a cold L2, arms in alternating order, medians.

The card's ceiling is measured in the same run: a large copy, counting bytes read and written.
"""

import math
import signal
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

FLUSH_BYTES = 256 << 20  # several times the L2 of any card
WARM_UPS = 3
SLEEP_CYCLES = 200_000  # about 0.1 ms
PROFILE_RANGE = "profile_target"  # the range that ncu profiles

# Set by `profiling.bench --profile`: every case runs once in that range and nothing is timed.
profiling = False

Call = Callable[[], object]
INT: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}  # for arrays of ids


@dataclass(frozen=True)
class Timing:
    """Microseconds of one arm: the median of its rounds, and (max - min) / median."""

    median_us: float
    spread: float


def record(call: Call) -> torch.cuda.CUDAGraph:
    """Warms `call` up and captures it in a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def run_in_profile_range(arms: Mapping[str, list[Call]]) -> dict[str, Timing]:
    """Runs the first call of our own arm warm, then once in the range; times are NaN."""
    call = arms["ours" if "ours" in arms else next(iter(arms))][0]
    for _ in range(WARM_UPS):
        call()
    torch.cuda.synchronize()
    # Torch's own range: those of the driver need the package `nvtx`, and ncu would find no launch.
    with torch.cuda.nvtx.range(PROFILE_RANGE):
        call()
        torch.cuda.synchronize()
    return {name: Timing(math.nan, math.nan) for name in arms}


def sleep() -> None:
    """Keeps the card busy, so that what follows is enqueued before the clock starts."""
    torch.cuda._sleep(SLEEP_CYCLES)


def elapsed_us(call: Call, before: Call = sleep) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before()
    start.record()
    call()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


def alternate(
    arms: Mapping[str, Call], *, rounds: int, warm_ups: int = 1, before: Call = sleep
) -> dict[str, list[float]]:
    """Microseconds of each round of all arms, in an order that alternates."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for index in range(rounds + warm_ups):
        for name in list(arms)[:: 1 if index % 2 == 0 else -1]:
            spent = elapsed_us(arms[name], before)
            if index >= warm_ups:
                times[name].append(spent)
    return times


def measure(arms: Mapping[str, Call], *, rounds: int = 15, cold: bool = True) -> dict[str, Timing]:
    """Times arms, which must be capturable, against each other, each call as one graph launch.

    `cold`: a buffer larger than the L2 is read before every launch. It is not written: written
    lines would leave the L2 during the timed work.
    """
    if profiling:
        return run_in_profile_range({name: [call] for name, call in arms.items()})
    flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")
    graphs = {name: record(call).replay for name, call in arms.items()}
    times = alternate(graphs, rounds=rounds, before=flush.sum if cold else sleep)
    return {name: summary(values) for name, values in times.items()}


def num_cold_inputs(num_bytes: int) -> int:
    """How many inputs of this size, used in turn, each find the L2 cold."""
    return max(1, min(256, -(-FLUSH_BYTES // max(1, num_bytes))))


def measure_in_turn(arms: Mapping[str, list[Call]], *, rounds: int = 9) -> dict[str, Timing]:
    """Times arms of many calls each, on `num_cold_inputs` inputs that exceed the L2 several times.

    All calls of an arm are one graph, repeated until it takes two milliseconds. A call costs what
    it costs in a model's step, and nothing between the calls writes to the L2.
    """
    if profiling:
        return run_in_profile_range(arms)

    def repeat(calls: list[Call], count: int) -> None:
        for _ in range(count):
            for call in calls:
                call()

    graphs, calls_of = {}, {}
    for name, calls in arms.items():
        once_us = elapsed_us(record(partial(repeat, calls, 1)).replay, before=lambda: None)
        repeats = max(1, min(100, round(2e3 / max(10.0, once_us))))
        calls_of[name] = repeats * len(calls)
        graphs[name] = record(partial(repeat, calls, repeats)).replay
    times = alternate(graphs, rounds=rounds)
    return {name: summary([t / calls_of[name] for t in of]) for name, of in times.items()}


def summary(values: list[float]) -> Timing:
    median = statistics.median(values)
    return Timing(median, (max(values) - min(values)) / median)


def empty_graph_us(rounds: int = 31) -> float:
    """What the clock adds to every figure: a graph of one kernel that does nothing, warm."""
    one = torch.zeros(1, device="cuda")
    return measure({"empty": lambda: one.add_(0)}, rounds=rounds, cold=False)["empty"].median_us


def copy_bandwidth(num_bytes: int = 2 << 30, rounds: int = 11) -> float:
    """GB/s of a large device-to-device copy, counting bytes read and written."""
    source = torch.randn(num_bytes // 4, device="cuda")
    target = torch.empty_like(source)
    arms = {  # the ceiling is the faster one of the driver's copy and a kernel's
        "memcpy": lambda: target.copy_(source),
        "kernel": lambda: torch.mul(source, 1.0, out=target),
    }
    times = measure(arms, rounds=rounds, cold=False)
    return 2 * num_bytes / min(timing.median_us for timing in times.values()) / 1e3


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in the main thread, so that a peer that hangs does not hang the rest."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)

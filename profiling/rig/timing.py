"""How every benchmark measures: cold L2, CUDA graphs, arms in alternating order, medians.

The card's ceiling is measured in the same run: a large copy, counting bytes read and written.
"""

import math
import signal
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

FLUSH_BYTES = 256 << 20  # several times the L2 of any card
WARM_UPS = 3
SLEEP_CYCLES = 200_000  # about 0.1 ms
PROFILE_RANGE = "profile_target"  # what ncu is told to look at

# Set by `profiling.bench --profile`: every case runs once inside that range and nothing is timed.
profiling = False


@dataclass(frozen=True)
class Timing:
    """Microseconds of one arm: the median of its rounds, and (max - min) / median."""

    median_us: float
    spread: float


def record(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
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


def run_in_profile_range(arms: dict[str, list[Callable[[], object]]]) -> dict[str, Timing]:
    """Runs the first call of our own arm warm, then once in the range; times are NaN."""
    call = arms["ours" if "ours" in arms else next(iter(arms))][0]
    for _ in range(WARM_UPS):
        call()
    torch.cuda.synchronize()
    # Torch's own: `nvtx_range` opens none without the package `nvtx`, and ncu would find no launch.
    with torch.cuda.nvtx.range(PROFILE_RANGE):
        call()
        torch.cuda.synchronize()
    return {name: Timing(math.nan, math.nan) for name in arms}


def measure(
    arms: dict[str, Callable[[], object]], *, rounds: int = 15, cold: bool = True
) -> dict[str, Timing]:
    """Times the arms against each other.

    Each call is one graph launch between two events. Before it a buffer larger than the L2 is read
    (`cold`; lines that were written would have to leave the L2 during the timed work), or the card
    sleeps as long, so that the launch is queued before the clock starts. Every round runs all arms,
    in an order that alternates.

    Args:
        arms: name -> the work to time, which must be capturable.
        rounds: timed launches of each arm; the median is taken.
        cold: flush the L2 before every launch.

    Returns:
        name -> `Timing`.
    """
    if profiling:
        return run_in_profile_range({name: [call] for name, call in arms.items()})
    flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")
    graphs = {name: record(call) for name, call in arms.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for index in range(rounds + 1):
        order = list(arms) if index % 2 == 0 else list(reversed(arms))
        for name in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if cold:
                flush.sum()
            else:
                torch.cuda._sleep(SLEEP_CYCLES)
            start.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            if index > 0:  # the first round warms the clocks and the graphs
                times[name].append(1e3 * start.elapsed_time(end))
    return {name: summary(values) for name, values in times.items()}


def num_cold_inputs(num_bytes: int) -> int:
    """How many inputs of this size, used in turn, each find the L2 cold."""
    return max(1, min(256, -(-FLUSH_BYTES // max(1, num_bytes))))


def measure_in_turn(
    arms: dict[str, list[Callable[[], object]]], *, rounds: int = 9
) -> dict[str, Timing]:
    """Times arms of many calls each, on inputs that together exceed the L2 several times over.

    All calls of an arm are one graph, repeated until it takes a millisecond: a call costs what it
    costs in a model's step, and nothing between the calls writes to the L2.

    Args:
        arms: name -> the calls, one for each of `num_cold_inputs` inputs.
        rounds: timed launches of each arm; the median is taken.

    Returns:
        name -> `Timing` of one call.
    """
    if profiling:
        return run_in_profile_range(arms)
    singles = {
        name: record(lambda calls=calls: [call() for call in calls]) for name, calls in arms.items()
    }
    graphs, calls_of = {}, {}
    for name, graph in singles.items():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        repeats = max(1, min(100, round(2.0 / max(0.01, start.elapsed_time(end)))))
        calls_of[name] = repeats * len(arms[name])
        graphs[name] = record(lambda n=name, k=repeats: [c() for _ in range(k) for c in arms[n]])
    times = {name: [] for name in arms}
    for index in range(rounds + 1):
        for name in list(arms) if index % 2 == 0 else list(reversed(arms)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SLEEP_CYCLES)
            start.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            if index > 0:
                times[name].append(1e3 * start.elapsed_time(end) / calls_of[name])
    return {name: summary(values) for name, values in times.items()}


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
    arms = {  # the driver's copy and a kernel's: the ceiling is the faster one
        "memcpy": lambda: target.copy_(source),
        "kernel": lambda: torch.mul(source, 1.0, out=target),
    }
    times = measure(arms, rounds=rounds, cold=False)
    return 2 * num_bytes / min(timing.median_us for timing in times.values()) / 1e3


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in the main thread; a peer that hangs must not hang the others."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)

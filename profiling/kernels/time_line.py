"""Where the time of a pass goes, kernel by kernel: SmolLM2's shape with random weights, on a card.

    python -m profiling.kernels.time_line --requests 64 --strategy learned:12,1,13 --context 600

Kernels overlap (programmatic dependent launch), so their durations add up to more than the pass. A
kernel's share of the time line is the time from the end of the kernel that ended last before it to
its own end. A line has the launches of a pass, the microseconds of their shares and of their
durations, and the kernel; "idle" is the time in which none runs. Each pass is a launch of its own
(`engine.graphs=pass`), so idle time includes the host's turn, which the device loop does not have.
"""

import argparse
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from profiling.rig.bench import say
from profiling.rig.subjects import SMOLLM2, fix_bandit, of_shape

PASSES = 64
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def short(name: str) -> str:
    """A kernel's name without template arguments, parameters and namespaces."""
    name = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split(r"[<(]", name)[0].rpartition("::")[2]


def shares(events: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, float, float]]:
    """Kernel -> launches, microseconds of the time line and of durations, the longest first."""
    runs = [event for event in events if event.get("cat") in ON_DEVICE]
    launches: Counter[str] = Counter()
    shown, durations = Counter[str](), Counter[str]()
    last = None
    for event in sorted(runs, key=lambda event: event["ts"] + event["dur"]):
        name, begin, end = short(event["name"]), event["ts"], event["ts"] + event["dur"]
        last = begin if last is None else last
        launches[name] += 1
        durations[name] += event["dur"]
        shown[name] += end - max(last, begin)
        shown["idle"] += max(begin - last, 0)
        last = end
    return {name: (launches[name], us, durations[name]) for name, us in shown.most_common()}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.kernels.time_line", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--requests", type=int, default=64, help="that run at once")
    parser.add_argument(
        "--strategy", default="learned:12,1,13", help="off, or kind:depth,top_k,num_verify"
    )
    parser.add_argument("--context", type=int, default=600, help="tokens of a prompt")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    torch.set_grad_enabled(False)
    subject = of_shape("smollm2", ["preset=h100"], SMOLLM2, "cuda")
    ids = torch.randint(1000, (args.requests, args.context)).tolist()
    subject = replace(subject, prompts=lambda count: [tuple(row) for row in ids[:count]])
    rollout = subject.rollout(
        f"engine.max_batch={args.requests}",
        f"engine.spec_max_batch={args.requests}",
        f"engine.strategies={' '.join(dict.fromkeys(['off', args.strategy]))}",
        "engine.spec_max_rows=0",
        "engine.num_pages=0",
        "engine.graphs=pass",
        f"bandit.buckets={args.requests}",
        longest=args.context + 2 * PASSES,
    )
    fix_bandit(rollout, policy=args.strategy)
    requests = subject.requests([PASSES] * args.requests, stop=False)
    first = [replace(r, params=replace(r.params, max_new_tokens=1)) for r in requests]
    rollout.engine.generate(requests, record=False)  # captures the graphs

    def events(work: list) -> list[dict[str, Any]]:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            rollout.engine.generate(work, record=False)
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(trace))
            return json.loads(trace.read_text())["traceEvents"]

    prefill, whole = shares(events(first)), shares(events(requests))
    passes = rollout.engine.stats.target_passes
    for name, found in whole.items():
        less = prefill.get(name, (0, 0.0, 0.0))
        count, us, durations = ((a - b) / passes for a, b in zip(found, less, strict=True))
        if us >= 0.1:
            say(f"{count:7.1f}  {us:7.1f} us  {durations:7.1f} us  {name}")


if __name__ == "__main__":
    main()

"""Decoding at a fixed batch: `off` and each strategy, on the warmed policy, SmolLM2, Qwen2.5.

`median_us` is the device time of a pass in which all requests of the batch run, `tokens_per_s`
counts the tokens of all requests. The shapes of Qwen2.5 have random weights, so no draft would be
accepted. With speculation the `tokens_per_s` of 7B comes from its own pass time and the accept
length of the warmed policy with the same strategy (`decode-accept.json`: how many requests emitted
1, 2, .. tokens in a pass). Such rows are marked `synthetic`. 0.5B and 1.5B decode with `off` alone.

Cases with T1 or T0.6 compare `engine.verify=shared` and `rejection` at that temperature; `--only
'warmed$|T1|T0'` makes only these.

`pass_over_off` of a row is the cost of its pass. `pass_cost_over_plain_b1_x` is that of the fastest
strategy of depth 4, not that of the cheapest pass.
"""

import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from driver.config.strategy import OFF, REJECTION, SHARED, Strategy
from driver.rollout.graphs import nothing
from driver.rollout.runner import Burst, PassRunner
from driver.session.parts import Rollout
from profiling.rig.bench import Bench, say
from profiling.rig.results import RESULTS, newest_first
from profiling.rig.subjects import (
    QWEN2_05B,
    QWEN2_7B,
    QWEN2_15B,
    Subject,
    fix_bandit,
    of_checkpoint,
    of_shape,
)
from profiling.rig.workload import accept_length
from tlt_ext.limits import MAX_EMITTED

NEEDS_WARM_START = True
SHAPE_WORDS = ["model.dtype=bfloat16", "drafter.draft_vocab=16384", "drafter.unroll=1"]
SHAPES = {"qwen2_05b": QWEN2_05B, "qwen2_15b": QWEN2_15B, "qwen2_7b_shape": QWEN2_7B}
DENSE = 64  # requests, of the targets of the dense phase
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
QUICK_BATCHES = [1, 32]  # of the targets
STRATEGIES = [
    "ngram:6,1,7",
    "learned:2,1,3",
    "learned:4,1,5",
    "learned:8,1,9",
    "learned:12,1,13",
    "learned:4,4,16",
    "learned:8,4,32",
    "hybrid:15,1,16",
]
CHAINS = ["learned:2,1,3", "learned:4,1,5", "learned:8,1,9"]  # verified in both ways
TEMPERATURES = (1.0, 0.6)
DEPTH4 = ("learned:4,1,5", "learned:4,4,16")  # of pass_cost_over_plain_b1_x
TAIL = 8  # requests at most
TOKENS = {TAIL: 1024, 32: 256, 256: 96}  # new tokens of a request by the largest batch
SYNTHETIC_TOKENS = 48  # without acceptance each token is a pass
MAX_ROWS = 1280  # of a pass; cases with more are left out


Cells = dict[tuple[int, str], dict[str, Any]]  # (batch, strategy) -> measurements


class PassClock:
    """Wraps the engine's runner and times the passes in which a whole batch runs."""

    def __init__(self, inner: PassRunner, batch: int, strategy: Strategy) -> None:
        self.inner, self.batch, self.strategy = inner, batch, strategy
        self.stretches: list[tuple[int, int, float]] = []  # passes, emitted, seconds of bursts
        self.counts = np.zeros(MAX_EMITTED + 1, dtype=np.int64)  # request-passes by emitted tokens
        self._last: Burst | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def run(
        self,
        count: int,
        strategy: Strategy,
        limit: int,
        ends: int,
        meanwhile: Callable[[], bool] = nothing,
    ) -> Burst:
        def both() -> bool:
            self.note()
            return meanwhile()

        self._last = self.inner.run(count, strategy, limit, ends, both)
        return self._last

    def note(self) -> None:
        """Counts the burst before while the device runs the next."""
        burst, self._last = self._last, None
        if burst is None or burst.strategy != self.strategy:
            return
        if whole := burst.active.count(self.batch):  # the first passes of the burst
            emitted = burst.emitted[:whole]
            self.stretches.append((whole, int(emitted.sum()), burst.ends_s[whole - 1]))
            self.counts += np.bincount(emitted.flat, minlength=len(self.counts))


def measure(
    rollout: Rollout,
    subject: Subject,
    strategy: str,
    batch: int,
    *,
    synthetic: bool = False,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """Decodes with one strategy and measures the passes in which the whole batch runs."""
    tokens = next(count for most, count in TOKENS.items() if batch <= most)
    tokens = SYNTHETIC_TOKENS if synthetic else tokens
    requests = [
        replace(request, params=replace(request.params, temperature=temperature))
        for request in subject.requests([tokens] * batch, stop=not synthetic)
    ]
    fix_bandit(rollout, policy=strategy)
    engine, arm = rollout.engine, Strategy.parse(strategy)
    engine.generate(requests, record=False)  # graphs, clocks, caches
    clock = PassClock(engine.runner, batch, arm)
    engine.runner = clock  # type: ignore[assignment]
    try:
        engine.generate(requests, record=False)
        clock.note()
    finally:
        engine.runner = clock.inner
    if not clock.stretches:
        raise RuntimeError(f"{strategy} did not run at batch {batch}")
    passes, emitted, seconds = (sum(column) for column in zip(*clock.stretches, strict=True))
    return {
        "pass_us": 1e6 * statistics.median(s / n for n, _, s in clock.stretches),
        "tokens_per_s": emitted / seconds,
        "accept_length": emitted / passes / batch,
        "counts": clock.counts[1 : arm.levels + 2].tolist(),
        "host_share": engine.stats.host_share,
    }


def fits(batch: int, strategy: str) -> bool:
    return batch * Strategy.parse(strategy).num_verify <= MAX_ROWS


def grid(
    bench: Bench,
    subject: Subject,
    batches: Sequence[int],
    strategies: Sequence[str],
    accepts: dict[str, list[int]] | None = None,
) -> Cells:
    """A row for every batch and strategy, `off` first; `accepts` for random weights."""
    top = max(batches)
    listed = " ".join(["off", *strategies])
    rollout = subject.rollout(
        f"engine.max_batch={top}",
        f"engine.spec_max_batch={top}",
        f"engine.spec_max_rows={MAX_ROWS}",
        f"engine.strategies={listed}",
        f"bandit.buckets={list(batches)}",
        "engine.num_pages=0",
        longest=max(TOKENS.values()) + 512,
    )
    out: Cells = {}
    for batch in batches:
        for strategy in ["off", *strategies]:
            case = f"{subject.name} b{batch} {strategy}"
            if not fits(batch, strategy) or not bench.wanted(case):
                continue
            synthetic = accepts is not None
            got = measure(rollout, subject, strategy, batch, synthetic=synthetic)
            out[batch, strategy] = got
            more: dict[str, Any] = {}
            if accepts is not None and strategy != str(OFF):
                if strategy not in accepts:
                    say(f"{case}: no recorded acceptance; run the warmed policy first")
                    continue
                got["accept_length"] = accept_length(accepts[strategy])
                got["tokens_per_s"] = 1e6 * batch * got["accept_length"] / got["pass_us"]
                more["synthetic"] = True
            off = out.get((batch, str(OFF)))
            if off:
                got["over_off"] = got["tokens_per_s"] / off["tokens_per_s"]
                more["over_off"] = round(got["over_off"], 3)
                more["pass_over_off"] = round(got["pass_us"] / off["pass_us"], 3)
            bench.add_row(
                case,
                got["pass_us"],
                tokens_per_s=round(got["tokens_per_s"], 1),
                accept_length=round(got["accept_length"], 3),
                host_share=round(got["host_share"], 4),
                **more,
            )
    return out


def compare_verification(bench: Bench, subject: Subject, batches: Sequence[int]) -> None:
    """Rows of chains that are verified with shared noise and by rejection, at two temperatures."""
    chains = CHAINS[1:2] if bench.quick else CHAINS
    for verify in (SHARED, REJECTION):
        rollout = subject.rollout(
            f"engine.verify={verify}",
            f"engine.max_batch={max(batches)}",
            f"engine.spec_max_batch={max(batches)}",
            f"engine.strategies=off {' '.join(chains)}",
            f"bandit.buckets={list(batches)}",
            "engine.num_pages=0",
            longest=max(TOKENS.values()) + 512,
        )
        for temperature, batch, chain in itertools.product(TEMPERATURES, batches, chains):
            case = f"{subject.name} b{batch} {chain} T{temperature:g} {verify}"
            if bench.wanted(case):
                got = measure(rollout, subject, chain, batch, temperature=temperature)
                bench.add_row(
                    case,
                    got["pass_us"],
                    tokens_per_s=round(got["tokens_per_s"], 1),
                    accept_length=round(got["accept_length"], 3),
                )


def recorded_accepts() -> dict[str, list[int]]:
    """The counts of the warmed policy in the result file; {} where there is none."""
    paths = newest_first(RESULTS, "decode", "decode-accept.json")
    return json.loads(paths[0].read_text()) if paths else {}


def book_warmed(bench: Bench, got: Cells) -> None:
    off = got.get((1, "off"))
    if off:
        bench.got["smollm2_b1_us"] = round(off["pass_us"], 1)
        if all((1, strategy) in got for strategy in DEPTH4):
            fastest = max((got[1, s] for s in DEPTH4), key=lambda cell: cell["tokens_per_s"])
            cost = fastest["pass_us"] / off["pass_us"]
            bench.got["pass_cost_over_plain_b1_x"] = round(cost, 3)
    phases = {
        "tail_host_share": [batch for batch in BATCHES if batch <= TAIL],
        "dense_host_share": [batch for batch in BATCHES if batch >= DENSE],
    }
    for target, sizes in phases.items():
        cells = [cell for cell in itertools.product(sizes, ["off", *STRATEGIES]) if fits(*cell)]
        if set(cells) <= got.keys():
            bench.got[target] = round(max(got[cell]["host_share"] for cell in cells), 4)
    for batch in QUICK_BATCHES:
        gains = [cell["over_off"] for (b, s), cell in got.items() if b == batch and s != "off"]
        if gains:
            bench.got[f"spec_over_plain_b{batch}_x"] = round(max(gains), 3)


def run(bench: Bench) -> None:
    batches = QUICK_BATCHES if bench.quick else BATCHES
    accepts = recorded_accepts()
    if bench.wanted("warmed"):
        subject = of_checkpoint("warmed", bench.words, warmed=True, note=say)
        got = grid(bench, subject, batches, STRATEGIES)
        book_warmed(bench, got)
        compare_verification(bench, subject, QUICK_BATCHES)
        accepts |= {s: cell["counts"] for (b, s), cell in got.items() if b == 1 and s != "off"}
        bench.files["accept"] = accepts
        del subject
    for name, config in SHAPES.items():
        if not bench.wanted(name):
            continue
        shape = of_shape(name, [*bench.words, *SHAPE_WORDS], config, "cuda")
        large = config is QWEN2_7B
        sizes = batches if large else sorted({*batches, DENSE})
        got = grid(bench, shape, sizes, STRATEGIES[1:] if large else [], accepts)
        if (1, "off") in got:
            read_us = shape.num_bytes / bench.copy_gb_per_s / 1e3
            share = read_us / got[1, "off"]["pass_us"]
            bench.got[f"{name}_b1_of_weight_read"] = round(share, 4)
        if name == "qwen2_15b" and (DENSE, "off") in got:
            bench.got["qwen2_15b_b64_us"] = round(got[DENSE, "off"]["pass_us"], 1)

"""Training beside the tail: the slowdown of decoding and of rollouts, and the tokens trained."""

import statistics
from collections.abc import Sequence

from driver.drafter.partition import Overlap
from driver.rollout.request import Request
from driver.session.parts import Rollout
from profiling.rig.bench import Bench
from profiling.rig.subjects import Subject, fix_bandit, spot_of
from profiling.rig.workload import trace_lengths

OF_TARGETS = "SmolLM2"  # the model of the targets
REQUESTS = 64
ROUNDS = 3  # rollouts with training and without


def overlap(bench: Bench, subject: Subject, tail: int, name: str) -> None:
    """Measures each partition of the card, then rollouts with training and without."""
    rollout = subject.rollout(
        "engine.strategies=off learned:2,1,3",  # the second one makes a drafter to train
        "engine.spec_max_batch=1",
        f"engine.max_batch={REQUESTS}",
        "engine.num_pages=0",
        "spot.mode=auto",
        "spot.every=8",
        "spot.swap_every=64",
        "spot.final_steps=0",
        "spot.tokens_per_step=256",
        longest=tail + 512,
    )
    engine, spot, tuner = rollout.engine, spot_of(rollout), rollout.tuner
    assert tuner is not None
    fix_bandit(rollout, policy="off")
    lengths = trace_lengths(REQUESTS, median=max(1, tail // 8), cap=tail)
    requests = subject.requests(lengths, stop=False)
    engine.generate(requests)
    tuner.tune()
    spot.begin_final_steps()
    spot.end_final_steps()

    def over_serial(o: Overlap) -> float:
        return round(o.tokens_per_ms * tuner.serial_step_s * 1e3 / spot.bin.tokens, 3)

    for o in tuner.measured:
        rests = "" if o.duty == 1 else f", {o.duty:.0%} of the time"
        bench.add_row(
            f"{name}, {o.sms} SMs{rests}",
            1e6 * o.step_s,
            tokens=o.rows,
            slowdown=round(o.slowdown, 4),
            tokens_per_s=round(o.tokens_per_s),
            over_serial_tokens_per_ms=over_serial(o),
            stop_ms=round(1e3 * o.stop_s, 3),
            chosen=o == spot.overlap,
        )
    bench.add_row(
        f"{name}, serial step", 1e6 * tuner.serial_step_s, tokens=spot.bin.tokens, mode=spot.mode
    )
    # Without a partition that pays, the smallest slowdown shows how far it is off.
    best = spot.overlap or min(tuner.measured, key=lambda o: o.slowdown, default=None)
    if best is not None and name == OF_TARGETS:
        bench.got["overlap_tail_slowdown_x"] = round(best.slowdown, 4)
        bench.got["overlap_over_serial_tokens_per_ms_x"] = over_serial(best)
    if spot.overlap is not None:
        slowdown = rollout_slowdown(bench, rollout, requests, name)
        if name == OF_TARGETS:
            bench.got["rollout_slowdown_x"] = slowdown


def rollout_slowdown(
    bench: Bench, rollout: Rollout, requests: Sequence[Request], name: str
) -> float:
    """Time of rollouts that record features and train in their tails over that of others."""
    engine, spot = rollout.engine, spot_of(rollout)
    whole: dict[bool, list[float]] = {False: [], True: []}
    tails: dict[bool, list[float]] = {False: [], True: []}
    begun = spot.steps
    for _ in range(ROUNDS):
        for trains in whole:
            engine.generate(requests, record=trains)
            spot.stop()
            stats = engine.stats
            few = (at for at, active, _ in stats.trace if active <= spot.config.tail_batch)
            whole[trains].append(stats.elapsed_s)
            tails[trains].append(stats.elapsed_s - next(few))
    alone, beside = (statistics.median(whole[trains]) for trains in (False, True))
    tail, longer = (statistics.median(tails[trains]) for trains in (False, True))
    bench.add_row(
        f"{name}, rollout of {len(requests)}",
        1e6 * beside,
        slowdown=round(beside / alone, 4),
        tail_slowdown=round(longer / tail, 4),
        tail_share=round(tail / alone, 4),
        steps=(spot.steps - begun) // ROUNDS,
        stop_ms=round(1e3 * spot.thread.stop_s, 3),
    )
    return round(beside / alone, 4)

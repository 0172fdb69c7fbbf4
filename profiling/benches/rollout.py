"""A whole rollout with a long tail: 128 requests of lognormal lengths, whatever may choose.

The lengths of `workload.trace_lengths` are forced by limits, end tokens do not count. `median_us`
is the rollout's wall time, its prefill included, of the median round; arms alternate. Replayed
with `off`, each static strategy, a fixed map (the best static strategy of each bucket, as just
recorded), the bandit in a rollout after its first, UCB, and the bandit without the device loop.

Hugging Face is timed over `HF_STEPS` tokens and extrapolated: `generate` holds the batch until its
longest request ends, so its time is that many steps at the price of the first, which is less than
the price of later ones; continuous batching makes all tokens of the trace at its measured rate.

`rollout-recording.json` keeps what every strategy did at every batch size, for `bench bandit`.
"""

from __future__ import annotations

import gc
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from driver.assemble import Rollout
from driver.rollout.stats import RolloutStats
from profiling.bench import Bench, say
from profiling.subjects import Subject, fix_bandit, of_checkpoint
from profiling.workload import Recording, Window, trace_lengths

PRESET = ["preset=h100"]
STATIC = ["ngram:6,1,7", "learned:2,1,3", "learned:4,1,5", "learned:4,4,16", "learned:8,4,32"]
BUCKETS = [1, 2, 4, 8, 16, 32, 64, 128]
ROUNDS, QUICK_ROUNDS = 3, 1
LEARNING = ("beg", "ucb")
HF_STEPS = 32  # tokens of each request
PEER_LIMIT_S = 90  # two generations, compilation included
TRACE_POINTS = 400  # of an arm's curve of active requests


def engine_words(lengths: list[int], *more: str) -> list[str]:
    return [
        f"engine.max_batch={len(lengths)}",
        f"engine.spec_max_batch={max(BUCKETS)}",
        f"engine.strategies={' '.join(['off', *STATIC])}",
        f"bandit.buckets={BUCKETS}",
        "engine.num_pages=0",
        *more,
    ]


class Arms:
    """The rollout's arms: what each sets, and what its rounds took."""

    def __init__(self, bench: Bench, subject: Subject, lengths: list[int]) -> None:
        self.bench, self.subject, self.lengths = bench, subject, lengths
        self.times: dict[str, list[float]] = {}
        self.stats: dict[str, RolloutStats] = {}
        self.windows: dict[str, list[Window]] = {}
        self._learned: dict[str, Any] = {}  # state of the bandits that learn

    def run(self, name: str, rollout: Rollout, **settings: Any) -> None:
        """One round of an arm, after one that is not counted.

        A bandit that learns goes on with what it knows; its very first round is an arm of its own.
        When hurried, other arms are counted at once, but for the very first.
        """
        engine, requests = rollout.engine, self.subject.requests(self.lengths, stop=False)
        learns = settings["policy"] in LEARNING
        warm = name in self.times or (self.bench.quick and bool(self.times) and not learns)
        for counted in [True] if warm else [False, True]:
            recorder = fix_bandit(rollout, **settings)
            if name in self._learned:
                recorder.bandit.load_state_dict(self._learned[name])
            engine.forget()
            engine.generate(requests, record=False)
            if learns:
                self._learned[name] = recorder.bandit.state_dict()
            elif not counted:
                continue
            arm = name if counted else f"{name}, first"
            self.times.setdefault(arm, []).append(engine.stats.elapsed_s)
            self.stats[arm] = engine.stats
            self.windows.setdefault(arm, []).extend(recorder.windows)

    def seconds(self, name: str) -> float:
        return statistics.median(self.times[name])

    def add_rows(self) -> None:
        if "off" not in self.times:
            return
        off = self.seconds("off")
        for name, times in self.times.items():
            stats = self.stats[name]
            self.bench.add_row(
                name,
                1e6 * self.seconds(name),
                spread=round((max(times) - min(times)) / self.seconds(name), 4),
                tokens_per_s=round(stats.emitted / self.seconds(name), 1),
                over_off=round(off / self.seconds(name), 3),
                accept_length=round(stats.accept_length or 1.0, 3),
                target_passes=stats.target_passes,
                switches=stats.switches,
            )
        self.bench.files["trace"] = {n: thinned(s) for n, s in self.stats.items()}


def thinned(stats: RolloutStats) -> list[list[Any]]:
    """(seconds, active, strategy) where something changed, and now and then between."""
    trace = stats.trace
    every = max(1, len(trace) // TRACE_POINTS)
    kept = [
        [round(at, 5), active, arm]
        for i, (at, active, arm) in enumerate(trace)
        if i % every == 0 or trace[i - 1][1:] != (active, arm)
    ]
    return [*kept, [round(stats.elapsed_s, 5), 0, "off"]]


def replay_arms(arms: Arms, *words: str) -> None:
    """All rounds of all arms of our engine."""
    bench, subject, lengths = arms.bench, arms.subject, arms.lengths
    longest = max(lengths) + 512
    rollout = subject.rollout(*engine_words(lengths, *words), longest=longest)
    static = {s: {"policy": "static", "static": s} for s in ["off", *STATIC]}
    # The map first needs what every strategy does.
    chosen: dict[str, dict[str, Any]] = dict(static)
    for index in range(QUICK_ROUNDS if bench.quick else ROUNDS):
        if index == 0:
            for name, setting in static.items():
                arms.run(name, rollout, **setting)
            best = record_of(arms).oracle()
            best_map = [f"{bucket}={best[bucket]}" for bucket in sorted(best)]
            chosen["map"] = {"policy": "map", "map": best_map}
            chosen["bandit"] = {"policy": "beg"}
            chosen["ucb"] = {"policy": "ucb"}
            say(f"map: {' '.join(best_map)}")
        order = list(chosen) if index % 2 == 0 else list(reversed(chosen))
        for name in order:
            if index or name not in static:
                arms.run(name, rollout, **chosen[name])
    del rollout
    unlooped = subject.rollout(*engine_words(lengths, "engine.loop=false", *words), longest=longest)
    arms.run("bandit, no loop", unlooped, policy="beg")


def record_of(arms: Arms) -> Recording:
    """What the static arms did, by bucket; batches past the last bucket ran `off` anyway."""
    recording = Recording(BUCKETS)
    for windows in arms.windows.values():
        recording.add(w for w in windows if w.batch <= max(BUCKETS))
    return recording


def book(bench: Bench, arms: Arms) -> None:
    """The targets."""
    off, bandit = arms.seconds("off"), arms.seconds("bandit")
    best_static = min(arms.seconds(s) for s in ["off", *STATIC])
    stats = arms.stats["bandit"]
    bench.got |= {
        "trace_over_off_x": round(off / bandit, 3),
        "bandit_over_best_static_x": round(best_static / bandit, 3),
        "never_below_off_x": round(min(off / bandit, off / arms.seconds("map")), 3),
        "switch_ms": round(1e3 * stats.switch_s / max(1, stats.switches), 4),
        "gate_on_catchup_share_of_rollout": round(stats.catchup_s / stats.elapsed_s, 5),
        "reprefilled_tokens": stats.reprefilled_tokens,
    }


# ---- Hugging Face -------------------------------------------------------------------------------


def padded(prompts: list[tuple[int, ...]], pad: int, device: torch.device) -> dict[str, Any]:
    """Prompts as `generate` takes them: padded on the left, with a mask."""
    longest = max(map(len, prompts))
    rows = [[pad] * (longest - len(p)) + list(p) for p in prompts]
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    return {
        "input_ids": torch.tensor(rows, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }


def seconds_of(call: Callable[[], object]) -> float:
    """Wall time of the second of two calls."""
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


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


def hf_seconds(
    policy: PreTrainedModel, prompts: list[tuple[int, ...]], lengths: list[int], how: str
) -> float:
    """Seconds of the trace, extrapolated from `HF_STEPS` tokens of each request.

    Args:
        policy: of transformers.
        prompts: ids.
        lengths: new tokens of each.
        how: "dynamic", "static" (compiled where transformers does so) or "continuous".
    """
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=HF_STEPS,
        eos_token_id=None,
        pad_token_id=0,
        cache_implementation="static" if how == "static" else None,
    )
    policy.generation_config = settings
    if how == "continuous":
        inputs = [list(p) for p in prompts]
        seconds = seconds_of(lambda: policy.generate_batch(inputs, generation_config=settings))
        return seconds * sum(lengths) / (HF_STEPS * len(prompts))
    batch = padded(prompts, 0, policy.device)
    one = GenerationConfig(**{**settings.to_diff_dict(), "max_new_tokens": 1})
    whole = seconds_of(lambda: policy.generate(**batch, generation_config=settings))
    first = seconds_of(lambda: policy.generate(**batch, generation_config=one))
    return first + (whole - first) / (HF_STEPS - 1) * (max(lengths) - 1)


def compare_hugging_face(bench: Bench, subject: Subject, lengths: list[int], ours: float) -> None:
    """Rows of what transformers takes; one that fails is said and left out."""
    assert subject.policy is not None
    policy = subject.policy.eval()
    policy.set_attn_implementation("sdpa")
    gc.collect()
    torch.cuda.empty_cache()  # our engine's: continuous batching takes what is free
    best = None
    for how in ("dynamic",) if bench.quick else ("dynamic", "static", "continuous"):
        case = f"transformers {how}"
        if not bench.wanted(case):
            continue
        try:
            with torch.no_grad(), time_limit(PEER_LIMIT_S):
                seconds = hf_seconds(policy, subject.prompts(len(lengths)), lengths, how)
        except Exception as error:  # a peer that cannot run here costs its own row
            say(f"{case}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            continue
        bench.add_row(case, 1e6 * seconds, extrapolated=True, ours_over=round(seconds / ours, 2))
        if how != "continuous":
            best = seconds if best is None else min(best, seconds)
    if best is not None:
        bench.got["over_hf_generate_x"] = round(best / ours, 2)


def run(bench: Bench) -> None:
    subject = of_checkpoint("warmed", [*PRESET, *bench.settings], warmed=True, note=say)
    lengths = trace_lengths()
    arms = Arms(bench, subject, lengths)
    try:
        replay_arms(arms)
    finally:
        arms.add_rows()
    book(bench, arms)
    bench.files["recording"] = record_of(arms).to_json()
    compare_hugging_face(bench, subject, lengths, arms.seconds("bandit"))

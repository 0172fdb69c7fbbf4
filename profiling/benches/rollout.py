"""A whole rollout with a long tail: 128 requests of lognormal lengths.

Limits force the lengths of `workload.trace_lengths`; end tokens do not count. Each round has other
noise, so other responses; the slowest round with speculation takes about twice as long as the
fastest (H200, 058d6dd). A row has the round of median time; `median_us` is its wall time, prefill
included. Arms alternate: `off`, each static strategy, and the bandit in rollouts after its first,
epsilon-greedy (`bandit`) and UCB. `host_share` is the part of the time, since the first pass, in
which no pass ran.

The tail lies past the natural end of responses, where the drafter of the warm start has seen no
text. So each arm also comes marked `adapted`, as in a run: the spot trainer has recorded one
rollout of the same lengths with *other prompts* and other noise, and trained on it for `ADAPT_S`
seconds. Nothing trains while an arm is timed. The targets compare adapted arms and `off`.

transformers is timed over `HF_STEPS` tokens and extrapolated: `generate` holds the batch until its
longest request ends, continuous batching emits all tokens of the trace at its measured rate.

`--quick` leaves out what no target needs.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from driver.config.load import load_config
from driver.rollout.request import Request
from driver.rollout.stats import RolloutStats
from driver.session.parts import Rollout
from profiling.rig import timing
from profiling.rig.bench import Bench, say
from profiling.rig.subjects import Subject, fix_bandit, of_checkpoint, spot_of
from profiling.rig.workload import trace_lengths

NEEDS_WARM_START = True
STATIC = [
    "ngram:6,1,7",
    "ngram:15,1,16",  # long chains alone, to compare a hybrid with
    "learned:4,1,5",
    "learned:8,1,9",
    "learned:12,1,13",
    "hybrid:15,1,16",
]
BUCKETS = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]
LEARNING = {"bandit": "beg", "ucb": "ucb"}
ADAPTED = ", adapted"
ADAPT_S = 2.0  # seconds of training; about 25 steps of `preset=h100` take as long
ROUNDS = 3
WARM_TOKENS = 32  # of each request in the uncounted first rollout of a quick run
HF_STEPS = 32  # tokens of each request
PEER_LIMIT_S = 90  # for two generations with compilation


def engine_words(lengths: list[int]) -> list[str]:
    return [
        f"engine.max_batch={len(lengths)}",
        f"engine.spec_max_batch={max(BUCKETS)}",
        f"engine.strategies={' '.join(['off', *STATIC])}",
        f"bandit.buckets={BUCKETS}",
        "engine.num_pages=0",
    ]


class Arms:
    def __init__(self, bench: Bench, subject: Subject, lengths: list[int]) -> None:
        self.bench, self.subject, self.lengths = bench, subject, lengths
        self.rounds: dict[str, list[RolloutStats]] = {}
        self._learned: dict[str, Any] = {}  # states of the bandits that learn

    def run(self, name: str, rollout: Rollout, policy: str, noise: int) -> None:
        """One round of an arm, after one that is not counted.

        A bandit that learns keeps its state; its very first round is a separate arm. In a quick
        run other arms are counted at once, the first one after a short rollout.
        """
        learns, quick = policy in LEARNING.values(), self.bench.quick
        warm = name in self.rounds or (quick and bool(self.rounds) and not learns)
        for counted in [True] if warm else [False, True]:
            short = quick and not counted and not learns
            limits = [min(n, WARM_TOKENS) for n in self.lengths] if short else self.lengths
            bandit = fix_bandit(rollout, policy=policy)
            if name in self._learned:
                bandit.load_state_dict(self._learned[name])
            engine = rollout.engine
            engine.forget()
            requests = self.subject.requests(limits, stop=False, round=noise)
            engine.generate(requests, record=False)
            if learns:
                self._learned[name] = bandit.state_dict()
            elif not counted:
                continue
            arm = name if counted else f"{name}, first"
            self.rounds.setdefault(arm, []).append(engine.stats)

    def median(self, name: str) -> RolloutStats:
        """The round of median time."""
        rounds = sorted(self.rounds[name], key=lambda stats: stats.elapsed_s)
        return rounds[len(rounds) // 2]

    def seconds(self, name: str) -> float:
        return self.median(name).elapsed_s

    def add_rows(self) -> None:
        if "off" not in self.rounds:
            return
        off = self.seconds("off")
        for name, rounds in self.rounds.items():
            stats, times = self.median(name), [stats.elapsed_s for stats in rounds]
            self.bench.add_row(
                name,
                1e6 * stats.elapsed_s,
                spread=round((max(times) - min(times)) / stats.elapsed_s, 4),
                tokens_per_s=round(stats.emitted / stats.elapsed_s, 1),
                over_off=round(off / stats.elapsed_s, 3),
                accept_length=round(stats.accept_length or 1.0, 3),
                target_passes=stats.target_passes,
                switches=stats.switches,
                host_share=round(stats.host_share, 4),
            )


def replay_arms(arms: Arms) -> None:
    bench, subject, lengths = arms.bench, arms.subject, arms.lengths
    rollout = subject.rollout(*engine_words(lengths), longest=max(lengths) + 512)
    every = ["off", *STATIC, *LEARNING]
    compare(arms, rollout, ["off", "bandit"] if bench.quick else every)
    adapt(rollout, subject, lengths)
    compare(arms, rollout, [*STATIC, "bandit"] if bench.quick else every, ADAPTED)


def compare(arms: Arms, rollout: Rollout, names: list[str], suffix: str = "") -> None:
    """Rounds of arms with one drafter, every other one in reverse."""
    for index in range(ROUNDS):
        for name in names if index % 2 == 0 else reversed(names):
            policy = LEARNING.get(name, name)
            # `off` has no drafter to adapt.
            arms.run(name if name == "off" else name + suffix, rollout, policy, index)


def adapt(rollout: Rollout, subject: Subject, lengths: list[int]) -> None:
    """Trains the drafter on a rollout with the lengths of the trace and other prompts and noise."""
    spot, engine = spot_of(rollout), rollout.engine
    fix_bandit(rollout, policy="beg")
    engine.forget()
    engine.generate(other_requests(subject, lengths))
    spot.begin_final_steps()  # as a step of a run does
    spot.end_final_steps()
    lr, begin, steps = load_config(subject.words).drafter.lr, time.perf_counter(), spot.steps
    while (spent := time.perf_counter() - begin) < ADAPT_S:
        spot.set_lr(lr * (1.0 - spent / ADAPT_S))
        spot.micro_step()
    spot.begin_final_steps()
    spot.end_final_steps()
    spot.set_lr(lr)
    engine.forget()
    say(f"adapted: {spot.steps - steps} steps on {spot.buffer.num_tokens} tokens in {spent:.1f} s")


def other_requests(subject: Subject, lengths: list[int]) -> list[Request]:
    """Requests of these lengths with prompts that the trace does not have."""
    count = len(lengths)
    own = set(subject.prompts(count))
    others = [ids for ids in subject.prompts(2 * count) if ids not in own]
    requests = subject.requests(lengths, stop=False, round=ROUNDS)
    return [
        replace(request, prompt_ids=ids) for request, ids in zip(requests, others, strict=False)
    ]


def book(bench: Bench, arms: Arms) -> None:
    off, bandit = arms.seconds("off"), arms.seconds(f"bandit{ADAPTED}")
    best_static = min(off, *(arms.seconds(s + ADAPTED) for s in STATIC))
    stats = arms.median(f"bandit{ADAPTED}")
    chosen = ["bandit", f"bandit{ADAPTED}"]
    bench.got |= {
        "trace_s": round(bandit, 3),
        "trace_over_off_x": round(off / bandit, 3),
        "bandit_over_best_static_x": round(best_static / bandit, 3),
        "never_below_off_x": round(min(off / arms.seconds(name) for name in chosen), 3),
        "switch_ms": round(1e3 * stats.switch_s / max(1, stats.switches), 4),
        "gate_on_catchup_share_of_rollout": round(stats.catchup_s / stats.elapsed_s, 5),
        "reprefilled_tokens": max(s.reprefilled_tokens for s in arms.rounds[f"bandit{ADAPTED}"]),
    }


def padded(prompts: list[tuple[int, ...]], pad: int, device: torch.device) -> dict[str, Any]:
    """Inputs of `generate`: prompts padded on the left, with a mask."""
    longest = max(map(len, prompts))
    rows = [[pad] * (longest - len(p)) + list(p) for p in prompts]
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    return {
        "input_ids": torch.tensor(rows, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }


def seconds_of(call: Callable[[], object]) -> float:
    """Wall time of the second of two calls."""
    for _ in range(2):
        begin = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return time.perf_counter() - begin


def hf_seconds(
    policy: PreTrainedModel, prompts: list[tuple[int, ...]], lengths: list[int], how: str
) -> float:
    """Seconds of the trace, from `HF_STEPS` tokens; `how`: dynamic, static or continuous."""
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
    model: Any = policy  # its methods have no types
    if how == "continuous":
        inputs = [list(p) for p in prompts]
        seconds = seconds_of(lambda: model.generate_batch(inputs, generation_config=settings))
        return seconds * sum(lengths) / (HF_STEPS * len(prompts))
    batch = padded(prompts, 0, policy.device)
    one = GenerationConfig(**{**settings.to_diff_dict(), "max_new_tokens": 1})
    whole = seconds_of(lambda: model.generate(**batch, generation_config=settings))
    first = seconds_of(lambda: model.generate(**batch, generation_config=one))
    return first + (whole - first) / (HF_STEPS - 1) * (max(lengths) - 1)


def compare_hugging_face(bench: Bench, subject: Subject, lengths: list[int], ours: float) -> None:
    """Rows of transformers; one that fails is reported and left out."""
    assert subject.policy is not None
    policy = subject.policy.eval()
    policy.set_attn_implementation("sdpa")
    gc.collect()
    torch.cuda.empty_cache()  # of our engine: continuous batching takes all free memory
    found = {}
    for how in ("dynamic",) if bench.quick else ("dynamic", "static", "continuous"):
        case = f"transformers {how}"
        if not bench.wanted(case):
            continue
        try:
            with torch.no_grad(), timing.time_limit(PEER_LIMIT_S):
                seconds = hf_seconds(policy, subject.prompts(len(lengths)), lengths, how)
        except Exception as error:  # the other rows still count
            say(f"{case}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            continue
        bench.add_row(case, 1e6 * seconds, extrapolated=True, ours_over=round(seconds / ours, 2))
        found[how] = seconds
    if "static" in found:  # compiled, its best
        bench.got["over_hf_generate_x"] = round(min(found.values()) / ours, 2)


def run(bench: Bench) -> None:
    subject = of_checkpoint("warmed", bench.words, warmed=True, note=say)
    lengths = trace_lengths()
    arms = Arms(bench, subject, lengths)
    try:
        replay_arms(arms)
    finally:
        arms.add_rows()
    book(bench, arms)
    compare_hugging_face(bench, subject, lengths, arms.seconds(f"bandit{ADAPTED}"))

"""Token identity on a card: the same requests with `off` and with speculation, bit for bit.

SmolLM2 with a drafter trained on the first round, and the 7B shape with random weights, both in
bf16 with captured and looped passes. Only the passes of the oracle are launched op by op, because
it draws its trees on the host. Requests take turns to sample greedily, at T = 0.6, plainly and
filtered, and end at different times. `median_us` is the time of a token.

`--quick` compares a fortieth of the tokens of the targets, which can refute a target and not
confirm it. `--seconds N` leaves out rounds that would end later.
"""

import gc
import math
import time
from dataclasses import dataclass
from operator import itemgetter

from driver.config.strategy import OFF, ORACLE
from driver.run.comparison import ARRIVALS, Arm, Comparison, sibling_requests, train_drafter
from profiling.benches.decode import SHAPE_WORDS
from profiling.rig.bench import Bench, say
from profiling.rig.results import RESULTS, newest
from profiling.rig.subjects import QWEN2_7B, Subject, of_checkpoint, of_shape, spot_of

OPTIONS = {"seconds": math.inf}  # limit of all rounds
TOKENS = 1_000_000  # that the arm of a target compares
LONG_TOKENS = 100_000  # in responses to 32,768, compared by `bench big`
SMOLLM2_WORDS = ["task.name=questions", "drafter.draft_vocab=8192"]
PROMPTS = 64  # different ones
SPREAD = 0.5  # the lowest limit of new tokens over the highest
# Arm -> its part of the requests; the arms of targets take all of them.
SMOLLM2_ARMS = {
    "learned:4,2,8": 1.0,
    "oracle:4,2,8": 1.0,
    "mixed": 0.25,
    "ngram:4,1,5": 0.25,
    ARRIVALS: 1.0,
}
SHAPE_ARMS = {"oracle:4,2,8": 1.0, "learned:2,1,3": 1 / 16}
TARGETS = {
    "smollm2 learned:4,2,8": "smollm2_trained_drafter",
    "smollm2 oracle:4,2,8": "smollm2_oracle_drafter",
    f"smollm2 {ARRIVALS}": "late_arrivals",
    "qwen2_7b_shape oracle:4,2,8": "qwen2_7b_shape_oracle_drafter",
}


@dataclass(frozen=True)
class Size:
    """Sizes of a comparison; logits of 256 requests of 8 rows take 1.2 GB on the 7B shape."""

    tokens: int
    batch: int
    requests: int  # of a round
    longest: int  # new tokens of a request
    train_steps: int  # of the drafter on the first round


FULL = Size(TOKENS, batch=256, requests=1024, longest=512, train_steps=100)
QUICK = Size(TOKENS // 40, batch=128, requests=144, longest=256, train_steps=30)


def comparison(subject: Subject, arms: list[Arm], size: Size, *, train: bool) -> Comparison:
    """A comparison in an engine with room for every arm; `train`: on the first round of `off`."""
    strategies = [arm.strategy for arm in arms if arm.strategy is not None]
    captured = [str(s) for s in strategies if s.drafting is not ORACLE]
    rows = size.batch * max((s.num_verify for s in strategies), default=1)
    ids = subject.prompts(PROMPTS)
    rollout = subject.rollout(
        f"engine.max_batch={size.batch}",
        f"engine.spec_max_batch={size.batch}",
        f"engine.strategies={' '.join([str(OFF), *captured])}",
        f"engine.prefill_chunk={rows}",  # sizes the buffers for the oracle's rows as well
        "engine.spec_max_rows=0",
        "engine.num_pages=0",
        f"bandit.buckets={sorted({-(-size.batch // part) for part in (16, 4, 1)})}",
        longest=max(map(len, ids)) + size.longest,
    )
    prompts = [(f"{subject.name}/{i}", ids[i % len(ids)]) for i in range(size.requests // 2)]

    def learn() -> None:
        if train:
            train_drafter(spot_of(rollout), size.train_steps)

    return Comparison(
        rollout,
        arms,
        lambda index: sibling_requests(prompts, index, size.longest, subject.stops, SPREAD),
        learn,
        rollout.engine.program.seed,
    )


def report(bench: Bench, subject: Subject, arms: list[Arm]) -> None:
    for arm in arms:
        case = f"{subject.name} {arm.name}"
        bench.add_row(
            case,
            1e6 * arm.seconds / arm.tokens,
            tokens=arm.tokens,
            equal_tokens=arm.token_share,
            equal_lengths=arm.length_share,
            equal_bits=arm.bit_share,
            accept_length=round(arm.stats.accept_length or 1.0, 3),
            passes=arm.stats.target_passes,
            speculative_passes=arm.stats.spec_passes,
            tokens_per_s=round(arm.tokens / arm.seconds),
            **(arm.interruptions if arm.name == ARRIVALS else {}),
        )
        for line in arm.divergences:
            say(f"  first divergence: {line}")


def book(bench: Bench) -> None:
    """The targets; an arm with too few tokens counts only if it refutes its target."""
    cases, tokens = bench.cases, itemgetter("equal_tokens")
    enough = {case for case in TARGETS if case in cases and cases[case]["tokens"] >= TOKENS}
    for case, target in TARGETS.items():
        if case in enough or (case in cases and cases[case]["equal_tokens"] < 1):
            bench.book(target, [case], tokens)
    long = [row for case, row in newest("big", RESULTS).items() if "decode" in case]
    long = [row for row in long if row["tokens"] >= LONG_TOKENS]
    if len(long) > 1:  # `off` is one
        bench.got["long_responses_32k"] = min(map(tokens, long))
        bench.sources["long_responses_32k"] = [dict(row) for row in long]
    if len(enough) == len(TARGETS) or any(row["equal_bits"] < 1 for row in cases.values()):
        bench.book("logprobs_bit_equal", cases, itemgetter("equal_bits"))


def run_subject(
    bench: Bench,
    subject: Subject,
    parts: dict[str, float],
    size: Size,
    *,
    train: bool,
    seconds: float,
) -> None:
    arms = [Arm(name, part) for name, part in parts.items()]
    done = comparison(subject, arms, size, train=train)  # `mixed` uses all arms
    done.arms = [arm for arm in arms if bench.wanted(f"{subject.name} {arm.name}")]
    done.run(size.tokens, seconds, lambda line: say(f"{subject.name}: {line}"))
    report(bench, subject, [done.off, *done.arms])


def run(bench: Bench) -> None:
    size = QUICK if bench.quick else FULL
    end = time.perf_counter() + bench.own_options(OPTIONS).seconds

    def wanted(subject: str, arms: dict[str, float]) -> bool:
        return any(bench.wanted(f"{subject} {arm}") for arm in arms)

    if wanted("smollm2", SMOLLM2_ARMS):
        smollm2 = of_checkpoint("smollm2", [*bench.words, *SMOLLM2_WORDS], warmed=False, note=say)
        half = (end - time.perf_counter()) / 2
        run_subject(bench, smollm2, SMOLLM2_ARMS, size, train=True, seconds=half)
        del smollm2
        gc.collect()  # engine and spot trainer refer to each other and hold 5 GB
    if wanted("qwen2_7b_shape", SHAPE_ARMS):
        shape_words = [*bench.words, *SHAPE_WORDS, "spot.mode=off"]
        shape = of_shape("qwen2_7b_shape", shape_words, QWEN2_7B, "cuda")
        left = end - time.perf_counter()
        run_subject(bench, shape, SHAPE_ARMS, size, train=False, seconds=left)
    book(bench)

"""The drafter: accept length by training, rule and temperature, and what its training costs.

SmolLM2 on GSM8K prompts at T = 1. Responses are sampled, a drafter learns from their features for a
fixed number of steps, and drafts for other prompts. `accept_length` is the mean that a request
emits in a speculative pass, the target's own token included. `median_us` of such a row is a pass
without graphs, of a training row a step.

Parts (`--only` names them): `accept` compares drafts with shared noise and target-only drafts of
the same drafter and node count; `checkpoint` and `packing` time the trainer; `overlap` and
`overlap-7b` train beside the tail on partitions of the card; `warmed` is the policy of
`preset=h100` with the drafter of its warm start; `adaptive` is RL from there with trained drafters
and a frozen one, in runs under `--runs` that resume where they were stopped.

`--quick` runs the parts that have targets, and only merges the runs of `adaptive` unless
`--seconds` gives them time. `--set task.path=FOLDER` is the folder of GSM8K.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from driver.config.load import load_config
from driver.config.strategy import LEARNED
from driver.drafter.checkpoint import DraftCheckpoints
from driver.drafter.trainer import SpotTrainer
from profiling.rig.bench import Bench, say
from profiling.rig.results import ROOT
from profiling.rig.subjects import QWEN2_7B, Subject, fix_bandit, of_checkpoint, of_shape, spot_of
from profiling.rig.warm import warm_words
from profiling.studies import drafter_runs
from profiling.studies.draft_cost import packing
from profiling.studies.draft_overlap import OF_TARGETS, overlap
from profiling.studies.drafting import Sizes, Study, TargetOnly, accept_row
from profiling.studies.grpo_runs import make_runs

NEEDS_WARM_START = True
# Of RL: folder of the runs by arm, steps, limit in seconds of all arms together.
OPTIONS = {"runs": Path("runs/drafter"), "steps": drafter_runs.STEPS, "seconds": math.nan}
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
WORDS = [
    "preset=smollm2",
    "run.device=cuda",
    "model.dtype=bfloat16",
    "task.name=jsonl",
    "task.shots=0",
    f"task.path={GSM8K}",
    "drafter.draft_vocab=16384",
    "drafter.lr=1e-3",
    "engine.prefill_chunk=2048",
]
SHAPE_WORDS = ["run.device=cuda", "model.dtype=bfloat16", "drafter.draft_vocab=16384"]
WARMED_STRATEGIES = [  # at most 64 nodes
    "learned:4,4,16",
    "learned:8,4,32",
    "learned:8,8,64",
    "learned:16,4,64",
]
WARMED_PROMPTS, WARMED_TOKENS = 64, 1024  # tokens of a response at most
SHAPE_TAIL = 512  # tokens of the 7B shape's longest request: a pass takes 7 ms

FULL = Sizes()
QUICK = Sizes(strategies=("learned:8,8,64",), seconds=26.0, tail=1536)
OF_ONE_POLICY = ["accept", "checkpoint", "packing"]
QUICK_PARTS = ["warmed", "adaptive", "overlap", *OF_ONE_POLICY]


def wanted(bench: Bench, part: str) -> bool:
    """Whether a part runs: `--only` names it, or it is one of all or of the quick parts."""
    return bench.wanted(part) and (bool(bench.only) or not bench.quick or part in QUICK_PARTS)


def warmed(bench: Bench, subject: Subject) -> None:
    """Accept length of a policy with the drafter of its warm start, on held-out prompts."""
    prompts, tokens = WARMED_PROMPTS, WARMED_TOKENS
    rollout = subject.rollout(
        f"engine.strategies={' '.join(['off', 'learned:4,1,5', *WARMED_STRATEGIES])}",
        f"engine.max_batch={prompts}",
        f"engine.spec_max_batch={prompts}",
        "engine.spec_max_rows=0",
        "engine.num_pages=0",
        "engine.graphs=off",  # each pass runs once
        "spot.mode=off",
        longest=tokens + 512,
    )
    requests, lengths = subject.requests([tokens] * prompts, stop=True), []
    for strategy in WARMED_STRATEGIES:
        fix_bandit(rollout, policy=strategy)
        rollout.engine.generate(requests, record=False)
        lengths.append(accept_row(bench, f"{subject.name} {strategy}", rollout.engine.stats))
    bench.got["accept_length_warmed_policy_t1"] = round(max(lengths), 4)


def checkpoint_stall(bench: Bench, spot: SpotTrainer) -> None:
    """How long saving a checkpoint holds up training."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = DraftCheckpoints(Path(folder))
        spot.micro_step()  # the first gives the optimizer its moments
        checkpoints.copies.prepare(spot._state())
        sizes = []
        for index in range(5):
            spot.micro_step()
            checkpoints.save(spot._state, index)
            checkpoints.collect()
            sizes = [path.stat().st_size for path in Path(folder).iterdir()]
        begin = time.perf_counter()
        spot._state()
        state_ms = round(1e3 * (time.perf_counter() - begin), 3)  # of the stall, before the copies
    mib, counted = round(sizes[0] / 2**20, 1), len(spot.buffer.seen_tokens)
    more = {"mib": mib, "state_ms": state_ms, "counted_tokens": counted}
    bench.add_row("checkpoint stall", 1e6 * checkpoints.stall_s, **more)
    bench.got["checkpoint_stall_ms"] = round(1e3 * checkpoints.stall_s, 3)


def compare(bench: Bench, subject: Subject, sizes: Sizes) -> None:
    """The parts that learn from the responses of one policy to its prompts."""
    study = Study(bench, subject, sizes)
    first = spot_of(study.rollout)
    runner, proposers = first.runner, study.rollout.engine.proposers
    bench.add_row("responses to learn from", 1e6 * study.collect(), tokens=first.buffer.num_tokens)
    spot = study.learner(sizes.unroll)

    def accept() -> None:
        step_s = study.train(spot, sizes.steps)
        bench.add_row(f"unroll {sizes.unroll}, trained", 1e6 * step_s, steps=spot.steps)
        for one in sizes.strategies:
            shared = study.draft(f"{one}, shared noise", one)
            proposers[LEARNED.name] = TargetOnly(runner)
            target_only = study.draft(f"{one}, target-only", one)
            proposers[LEARNED.name] = runner
        bench.got["accept_length_smollm2_gsm8k_t1"] = round(shared, 4)
        bench.got["shared_noise_over_target_only_x"] = round(shared / target_only, 4)

    def packed() -> None:
        bench.got["packing_over_padding_x"] = round(packing(study, spot, 2 * sizes.bin), 3)

    parts: dict[str, Callable[[], Any]] = {
        "accept": accept,
        "checkpoint": lambda: checkpoint_stall(bench, spot),
        "packing": packed,
    }
    for name, part in parts.items():
        if wanted(bench, name):
            with bench.part(name):
                part()


def adaptive(bench: Bench, chosen: argparse.Namespace) -> None:
    """Makes the runs of RL of each arm, as far as the time allows, and merges them."""
    if math.isnan(chosen.seconds):
        chosen.seconds = 0.0 if bench.quick else math.inf
    words, known = warm_words(bench.words), drafter_runs.arm_words(bench.settings)
    if chosen.seconds:
        try:
            jobs = [(arm, drafter_runs.SEED) for arm in known]
            limits = chosen.steps, chosen.seconds
            make_runs(jobs, words, known, chosen.runs, *limits, commit=bench.commit)
        except SystemExit as error:
            say(f"RL: {error}")  # costs its own rows
    drafter_runs.adaptive_over_frozen(bench, chosen.runs)


def smollm2(bench: Bench, sizes: Sizes) -> None:
    """The parts on SmolLM2; without GSM8K those that need no responses to it."""
    words = [*WORDS, *bench.settings]
    path = Path(load_config(words).task.path).expanduser()
    if not path.exists():
        say(f"SmolLM2 on GSM8K: left out, no {path} here (--set task.path=FOLDER)")
        words = [word for word in words if not word.startswith("task.")]
    subject = of_checkpoint("smollm2", words, warmed=False, note=say, longest=False)
    if wanted(bench, "overlap"):
        with bench.part("overlap"):
            overlap(bench, subject, sizes.tail, OF_TARGETS)
    if path.exists() and any(wanted(bench, part) for part in OF_ONE_POLICY):
        compare(bench, subject, sizes)


def run(bench: Bench) -> None:
    chosen, sizes = bench.own_options(OPTIONS), QUICK if bench.quick else FULL
    if wanted(bench, "warmed"):
        with bench.part("warmed"):
            words = warm_words(bench.words)
            warmed(bench, of_checkpoint("warmed", words, warmed=True, note=say, longest=False))
    if wanted(bench, "adaptive"):
        with bench.part("adaptive"):
            adaptive(bench, chosen)
    if any(wanted(bench, part) for part in ["overlap", *OF_ONE_POLICY]):
        with bench.part("SmolLM2"):
            smollm2(bench, sizes)
    if wanted(bench, "overlap-7b"):
        with bench.part("overlap-7b"):
            shape = of_shape("Qwen2-7B shape", [*SHAPE_WORDS, *bench.settings], QWEN2_7B, "cuda")
            overlap(bench, shape, SHAPE_TAIL, "Qwen2-7B shape")

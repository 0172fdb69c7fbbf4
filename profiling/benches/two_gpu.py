"""Whole training steps on two GPUs of one host, against one GPU and against `off` on two.

Each arm is a run under torchrun from one warm start on the same prompts. `median_us` is a step
without evaluation and without the first step. Parts are means over the same steps on the first
rank, whose wait for the others is in `update_drafter` with the coordinator and in `gather` without.
With the coordinator off the drafter is not trained. Needs two cards.

`train 7b` are two steps of the 7B of `bench big`, whose policy and optimizer FSDP2 shards; with
`--quick` they are short. Rows `tensor parallel` are passes of shapes with random weights that two
GPUs share, against one GPU (`profiling/rig/tensor_parallel.py`).
"""

import json
import statistics
import tempfile
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from driver.config.load import load_config
from driver.records.folder import read_jsonl
from driver.records.phases import PHASES
from profiling.benches.big import BIG, FEW_GRAPHS, SHORT
from profiling.rig.bench import Bench, run_apart, say
from profiling.rig.subjects import QWEN2_7B, save_random
from profiling.rig.warm import make_warm_start
from profiling.studies.grpo_runs import WARMED

NEEDS_WARM_START = True
STEPS, QUICK_STEPS = 8, 4
LIMIT_S = 540  # of an arm
# Arm -> ranks and settings.
ARMS = {
    "one GPU": (1, []),
    "two GPUs": (2, []),
    "two GPUs, off": (2, ["engine.strategies=off", "spot.mode=off"]),
    "two GPUs, coordinator off": (2, ["spot.mode=off"]),
}
LARGE = "train 7b, 2 GPUs"  # which `--only "two GPUs$"` leaves out
LARGE_WORDS = [*BIG.split(), "grpo.offload=none", "task.name=profiling.benches.big:Scored"]
BOTH = "two GPUs"
RATIOS = {"step_over_one_gpu_x": "one GPU", "step_over_off_two_gpu_x": "two GPUs, off"}
SHOWN = {
    "idle_share": "ranks/idle_share",
    "bubble_used_share": "ranks/bubble_used_share",
    "accept_length": "spec/accept_length",
    **{f"{phase}_s": f"timing_s/{phase}" for phase in (*PHASES, "gather", "log")},
}
TOKENS = "drafter/tokens_seen"
# Shapes of tensor parallel, and the least number of tokens to compare; `--quick`: one round.
SHARED_SHAPES = {"smollm2": 1_000_000, "qwen2_15b": 1, "qwen2_7b": 1}


def train(words: list[str], ranks: int, steps: int, folder: Path) -> list[dict]:
    own = [f"run.root={folder}", "run.name=run", f"run.steps={steps}", "run.eval_prompts=0"]
    run_apart("driver.train", *words, *own, ranks=ranks, seconds=LIMIT_S)
    return read_jsonl(folder / "run" / "metrics.jsonl")


def share(shape: str, tokens: int) -> dict[str, Any]:
    """The comparison of a shape on two ranks with one."""
    words = ["device=cuda", f"shape={shape}", f"tokens={tokens}"]
    line = run_apart("profiling.rig.tensor_parallel", *words, ranks=2, seconds=LIMIT_S)
    return json.loads(line)


def of_ranks(count: int) -> dict[str, str]:
    """Row name -> metric of each rank."""
    own = {"idle_share": "idle_share", "memory_gb": "max_memory_allocated_gb"}
    return {f"{a}_{rank}": f"ranks/{rank}/{b}" for rank in range(count) for a, b in own.items()}


def lacks() -> str:
    return "" if torch.cuda.device_count() > 1 else "it needs two cards"


def run(bench: Bench) -> None:
    for shape, tokens in SHARED_SHAPES.items():
        if bench.wanted(f"tensor parallel, {shape}"):
            with bench.part(f"tensor parallel, {shape}"):
                book_shared(bench, shape, share(shape, 1 if bench.quick else tokens))
    earlier = [row for row in bench.known if row["case"] in ARMS and row["commit"] == bench.commit]
    seconds = {row["case"]: row["median_us"] / 1e6 for row in earlier}
    words = bench.words
    arms = {arm: ARMS[arm] for arm in ARMS if bench.wanted(arm)}
    if arms and load_config(words).warmup.keep:
        words += [*WARMED, f"model.path={make_warm_start(words)}"]
    for arm, (ranks, own) in arms.items():
        steps = QUICK_STEPS if bench.quick else STEPS
        seconds[arm], records = steps_of(bench, arm, ranks, [*words, *own], steps)
        # Without the first step, which counts the tokens of the warm start.
        trained = records[-1].get(TOKENS, 0) - records[0].get(TOKENS, 0)
        bench.rows[-1]["drafter_tokens"] = trained
        if arm == BOTH and "bubble_used_share" in bench.rows[-1]:
            bench.got["bubble_used_share"] = bench.rows[-1]["bubble_used_share"]
        book(bench, seconds)  # after each arm, in case the time runs out
    if bench.wanted(LARGE):
        with bench.part(LARGE), tempfile.TemporaryDirectory() as folder:
            save_random(QWEN2_7B, Path(folder), "cuda" if torch.cuda.is_available() else "cpu")
            words = [*LARGE_WORDS, FEW_GRAPHS, *(SHORT if bench.quick else [])]
            words += [f"model.path={folder}", *bench.settings]
            steps_of(bench, LARGE, 2, words, 2)
    if BOTH not in seconds:
        say(f"{BOTH}: not run, so no target has a figure")


def steps_of(
    bench: Bench, case: str, ranks: int, words: list[str], steps: int
) -> tuple[float, list[dict]]:
    """Makes a run and its row; the median seconds of a step after the first, and the records."""
    with tempfile.TemporaryDirectory() as folder:
        records = train(words, ranks, steps, Path(folder))
    records = [record for record in records if record["step"] > 0]
    later = records[1:]
    steps_s = [record["timing_s/step"] for record in later]
    median = statistics.median(steps_s)
    more = {
        name: round(statistics.fmean(record[key] for record in later), 4)
        for name, key in (SHOWN | of_ranks(ranks)).items()
        if all(record.get(key) is not None for record in later)
    }
    more["spread"] = round((max(steps_s) - min(steps_s)) / median, 4)
    bench.add_row(case, 1e6 * median, ranks=ranks, **more)
    return median, records


def book_shared(bench: Bench, shape: str, found: dict[str, Any]) -> None:
    one_gb, shared_gb = found["weights_gb"]
    for batch, (one, shared, *exchange) in found["us"].items():
        more = dict(zip(("exchange_us", "gathered_exchange_us"), exchange, strict=False))
        bench.add_row(
            f"tensor parallel, {shape}, {batch} rows",
            shared,
            one_us=one,
            over_one_x=round(one / shared, 3),
            identity=found["identity"],
            tokens=found["tokens"],
            weights_gb=shared_gb,
            one_weights_gb=one_gb,
            **more,
        )
        if (shape, batch) == ("qwen2_7b", "1"):
            bench.got["tp2_7b_b1_over_one_x"] = round(one / shared, 3)
    compared = [case for case in bench.cases if case.startswith("tensor parallel")]
    bench.book("tp2_identity", compared, itemgetter("identity"))


def book(bench: Bench, seconds: Mapping[str, float]) -> None:
    """The ratios of the targets, from the seconds of a step by arm."""
    for target, other in RATIOS.items():
        if other in seconds and BOTH in seconds:
            bench.got[target] = round(seconds[other] / seconds[BOTH], 3)

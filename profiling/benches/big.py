"""Shapes of 7B and 1.5B parameters with random weights: training steps, and long rollouts.

`train 7b` and `train 15b` make steps of `preset=7b` and `preset=1.5b` whose responses reach the
limit. `median_us` is the last step, the peak is that of the run beside the dry run's, and `mfu` is
that of the update as in `bench update`. `train 15b` saves all of its state after the last step:
`blocked_s` is what the loop waits for, `written_s` the whole write. With `--short` a step of the 7B
has 16 responses of 1,024 tokens, in the same pages and packed rows; it decides fewer targets.

`decode 32k` rolls out 16 requests up to 32,768 tokens, greedily: random weights then repeat
themselves, so n-gram drafts are accepted. `median_us` is a pass, of `off` over its last 512, and
`over_bytes` its time over that of reading weights and KV cache at the copy bandwidth. The other
rows compare tokens, and `bench identity` takes its target from them. All of it takes eight minutes.
`--only fsdp --add`, which needs no card, compares log-probs of 2 and 4 ranks with those of one.
"""

import gc
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import torch
from transformers import Qwen2Config

from driver.common.memory import CARD_MEMORY
from driver.config.load import load_config
from driver.config.strategy import OFF
from driver.rollout.request import Request, Response, SamplingParams, request_id
from driver.run.comparison import Arm, Comparison
from driver.run.dry_run import run_shape
from driver.run.run import Run
from driver.run.start import start_run
from profiling.benches.update import PEAK_TFLOPS, tflop
from profiling.rig.bench import Bench, run_apart, say
from profiling.rig.subjects import (
    QWEN2_7B,
    QWEN2_15B,
    PassTimes,
    Subject,
    of_shape,
    save_random,
)

IN_ALL = False
# Case -> shape, steps, whether it saves a checkpoint, settings.
BIG = "preset=7b engine.free_in_update=true"
MIDDLE = "preset=1.5b sampling.max_new_tokens=1024 grpo.checkpointing=false"
TRAINED = {
    "train 7b": (QWEN2_7B, 2, False, BIG.split()),
    "train 15b": (QWEN2_15B, 3, True, MIDDLE.split()),
}
SHORT = [  # of the 7B, with the memory of the whole step
    "grpo.prompts_per_step=2",
    "sampling.max_new_tokens=1024",
    "engine.max_len=4176",
]
FEW_GRAPHS = "engine.strategies=off learned:4,1,5"
ARMS = ["ngram:6,1,7", "oracle:4,1,5"]
GOLDEN = (5**0.5 - 1) / 2  # its multiples, modulo 1, are all different
LONGEST, STEP_TOKENS = 32_768, 64 * 4096  # of a target
PARTS = ("gen", "update_actor", "update_weights", "free_pages")  # of a step


@dataclass(frozen=True)
class Long:
    """Sizes of the long rollouts, in tokens."""

    requests: int = 16
    prompt: int = LONGEST - 6_400
    new: int = 6_400
    last: int = 512  # passes that are timed


CPU_PARTS = ("fsdp",)
OPTIONS = {"short": False, "new": Long.new}  # new tokens of decode 32k


class Scored:
    """A task whose rewards all differ: a response with the mean of its group is not trained."""

    def __init__(self) -> None:
        self.scored = itertools.count()

    def prompt(self, split: str, index: int) -> str:
        return f"{index % 89} + {index % 97} ="

    def reward(self, prompt: str, response: str, answer: str) -> float:
        return next(self.scored) * GOLDEN % 1


def run(bench: Bench) -> None:
    chosen = bench.own_options(OPTIONS)
    for case, (shape, steps, saves, words) in TRAINED.items():
        if bench.wanted(case):
            words = [*words, *(SHORT if chosen.short and shape is QWEN2_7B else [])]
            with bench.part(case):
                train(bench, case, shape, steps, saves, [*words, FEW_GRAPHS, *bench.settings])
            free()
    if bench.only in CPU_PARTS:
        bench.got["fsdp_logprobs_bit_equal"] = min(fsdp(bench, ranks) for ranks in (2, 4))
    if any(bench.wanted(f"decode 32k {arm}") for arm in (OFF, *ARMS)):
        words = ["preset=h100", "model.dtype=bfloat16", *bench.settings]
        sizes = Long(prompt=LONGEST - chosen.new, new=chosen.new)
        decode(bench, of_shape("decode 32k", words, QWEN2_7B, "cuda"), sizes)
    trained = [case for case, row in bench.cases.items() if "peak_over_predicted" in row]
    if bench.cases.get("train 7b", {}).get("tokens", 0) > 0.9 * STEP_TOKENS:
        bench.book("train_7b_peak_gb", ["train 7b"], itemgetter("peak_gb"))
    bench.book("peak_over_predicted_x", trained, itemgetter("peak_over_predicted"), max)
    bench.book("decode_32k_over_bytes_x", ["decode 32k off"], itemgetter("over_bytes"))


def fsdp(bench: Bench, ranks: int) -> float:
    """The share of log-probs of so many ranks on the CPU that have the bits of one rank."""
    began = time.perf_counter()
    equal = json.loads(run_apart("profiling.studies.fsdp_bits", ranks=ranks))["equal"]
    bench.add_row(f"fsdp {ranks} ranks", 1e6 * (time.perf_counter() - began), equal_bits=equal)
    return equal


def free() -> None:
    """Frees the memory of a finished case, whose engine is in reference cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def train(
    bench: Bench, case: str, shape: Qwen2Config, steps: int, saves: bool, words: list[str]
) -> None:
    """A row about the last of some training steps, without evaluations."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "model"
        save_random(shape, folder, device)
        own = ["task.name=profiling.benches.big:Scored", f"model.path={folder}", "run.name=big"]
        config = load_config([*words, *own, f"run.root={root}", f"run.steps={steps}"])
        made = start_run(config, say)
        try:
            for _ in range(steps):
                step = made.gather()
                made.finish_bubble()
                metrics = made.update_policy(step)
                made.sync_weights()
                made.log(metrics, step)
            row: dict[str, float] = {}
            began = time.perf_counter()
            if saves:
                made.checkpoint()
                if device == "cuda":
                    torch.cuda.synchronize()  # the copy delays what a next step would enqueue
                row["blocked_s"] = round(time.perf_counter() - began, 3)
            added = report(bench, case, shape, made, step.responses, row)
            if saves:  # a run that is stopped here has its row
                made.end_checkpoint()
                added["written_s"] = round(time.perf_counter() - began, 3)
                files = (Path(root) / "big" / "checkpoints").rglob("*")
                added["written_gb"] = round(sum(file.stat().st_size for file in files) / 1e9, 3)
                say(f"written: {added['written_gb']} GB in {added['written_s']} s")
        finally:
            made.close(whole=False)
        del made, step, metrics


def report(
    bench: Bench,
    case: str,
    shape: Qwen2Config,
    made: Run,
    responses: Sequence[Response],
    row: dict[str, float],
) -> dict:
    last, config = made.last_metrics, made.config
    inputs = run_shape(config, Path(config.model.path))
    predicted, numbers = inputs.footprint(config), inputs.spec.num_parameters
    if not inputs.spec.tie_word_embeddings:  # its rows are looked up, not multiplied
        numbers -= inputs.spec.vocab_size * inputs.spec.hidden_size
    update_s = last["timing_s/update_actor"]
    row |= {f"{part}_s": round(last.get(f"timing_s/{part}", 0.0), 3) for part in PARTS}
    row |= {
        "tokens": sum(len(r.token_ids) for r in responses),
        "mfu": round(tflop(shape, numbers, list(responses)) / update_s / PEAK_TFLOPS, 4),
        "peak_gb": round(last.get(CARD_MEMORY, 0.0), 2),
        "predicted_gb": round(predicted.torch_peak / 1e9, 2),
    }
    if row["peak_gb"]:
        row["peak_over_predicted"] = round(row["peak_gb"] / row["predicted_gb"], 4)
    freed = config.engine.free_in_update
    return bench.add_row(case, 1e6 * last["timing_s/step"], freed_in_update=freed, **row)


def decode(bench: Bench, subject: Subject, size: Long) -> None:
    """Rows about long greedy responses: a pass at their end, and tokens of speculation."""
    rollout = subject.rollout(
        f"engine.max_batch={size.requests}",
        f"engine.spec_max_batch={size.requests}",
        f"engine.strategies={OFF} {ARMS[0]}",
        "engine.spec_max_rows=0",
        "engine.prefill_chunk=4096",
        "engine.num_pages=0",
        f"bandit.buckets={size.requests}",
        longest=size.prompt + size.new,
    )
    times = rollout.engine.observer = PassTimes(size.requests)  # of `off`, which is recorded
    draw = torch.Generator().manual_seed(2)
    high = min(1000, subject.spec.vocab_size)
    ids = torch.randint(high, (size.requests, size.prompt), generator=draw).tolist()
    params = SamplingParams(0.0, max_new_tokens=size.new)

    def requests(index: int) -> list[Request]:
        keys = (request_id("eval", index, "big", i) for i in range(size.requests))
        return [Request(key, i, tuple(ids[i]), params) for i, key in enumerate(keys)]

    arms = [Arm(name) for name in ARMS if bench.wanted(f"decode 32k {name}")]
    done = Comparison(rollout, arms, requests, lambda: None, rollout.engine.program.seed)
    done.run(size.requests * size.new)
    pass_s, passes = times.last(size.last)
    context, cache = round(size.prompt + passes), rollout.engine.cache
    slot = (cache.k.nbytes + cache.v.nbytes) // (cache.num_pages * cache.page_size)
    read = subject.num_bytes + size.requests * context * slot
    over = {"read_gb": round(read / 1e9, 2), "context": context}
    over["over_bytes"] = round(pass_s / (read / bench.copy_gb_per_s / 1e9), 3)
    for arm in (done.off, *arms):
        bench.add_row(
            f"decode 32k {arm.name}",
            1e6 * (pass_s if arm is done.off else arm.stats.passes_s / arm.stats.target_passes),
            seconds=round(arm.seconds, 2),
            tokens=arm.tokens,
            equal_tokens=arm.token_share,
            equal_bits=arm.bit_share,
            accept_length=round(arm.stats.accept_length or 1.0, 3),
            **(over if arm is done.off else {}),
        )
        for line in arm.divergences:
            say(f"  first divergence: {line}")

"""Shapes of 7B and 1.5B parameters with random weights: training steps, and long rollouts.

`train 7b` and `train 15b` make steps of `preset=7b` and `preset=1.5b` whose responses reach the
limit. `median_us` is the last step, the peak is that of the run beside the dry run's, and `mfu` is
that of the update as in `bench update`. `train 15b` saves all of its state after the last step:
`blocked_s` is what the loop waits for, `written_s` the whole write.

`decode 32k` rolls out 16 requests of 26,368 prompt and 6,400 new tokens, greedily: random weights
then repeat themselves, so n-gram drafts are accepted. `median_us` is a pass, of `off` over its last
512, and `over_bytes` its time over that of reading weights and KV cache at the copy bandwidth. The
other rows compare tokens. A quick run leaves all of it out, since it takes eight minutes.
"""

from __future__ import annotations

import gc
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from driver.common.memory import CARD_MEMORY, FLOAT_BYTES
from driver.config.load import load_config
from driver.config.strategy import OFF
from driver.model import tiny
from driver.rollout.observer import RolloutObserver
from driver.rollout.request import Request, SamplingParams, request_id
from driver.run.comparison import Arm, Comparison
from driver.run.dry_run import run_shape
from driver.run.start import start_run
from profiling.benches.update import PEAK_TFLOPS, tflop
from profiling.rig.bench import Bench, say
from profiling.rig.subjects import QWEN2_7B, QWEN2_15B, Subject, of_shape

# Case -> shape, steps, whether it saves a checkpoint, settings.
BIG = "preset=7b engine.free_in_update=true"
MIDDLE = "preset=1.5b sampling.max_new_tokens=1024 grpo.checkpointing=false"
TRAINED = {
    "train 7b": (QWEN2_7B, 2, False, BIG.split()),
    "train 15b": (QWEN2_15B, 4, True, MIDDLE.split()),
}
FEW_GRAPHS = "engine.strategies=off learned:4,1,5"
ARMS = ["ngram:6,1,7", "oracle:4,1,5"]
PARTS = ("gen", "update_actor", "update_weights", "free_pages")  # of a step


@dataclass(frozen=True)
class Long:
    """Sizes of the long rollouts, in tokens."""

    requests: int = 16
    prompt: int = 26_368
    new: int = 6_400
    last: int = 512  # passes that are timed


class Scored:
    """A task whose rewards differ: random weights earn none, and equal ones train nothing."""

    def prompt(self, split: str, index: int) -> str:
        return f"{index % 89} + {index % 97} ="

    def reward(self, prompt: str, response: str, answer: str) -> float:
        return len(response) % 7 / 7


class PassTimes(RolloutObserver):
    """When the passes of a full batch ended: (passes so far, seconds)."""

    def __init__(self, batch: int) -> None:
        self.batch, self.passes = batch, 0
        self.ends: list[tuple[int, float]] = []

    def on_pass(self, active: int, passes: int = 1) -> None:
        self.passes += passes
        if active == self.batch:
            self.ends.append((self.passes, time.perf_counter()))

    def last(self, count: int) -> tuple[float, float]:
        """Seconds of a pass over about the last `count`, and the mean number of passes before."""
        end, end_s = self.ends[-1]
        begin, begin_s = next(item for item in self.ends if item[0] >= end - count)
        return (end_s - begin_s) / (end - begin), (begin + end) / 2


def run(bench: Bench) -> None:
    if bench.quick:
        return say("big: left out of a quick run")
    for case, (shape, steps, saves, words) in TRAINED.items():
        if bench.wanted(case):
            with bench.part(case):
                train(bench, case, shape, steps, saves, [*words, FEW_GRAPHS, *bench.settings])
            free()
    if bench.wanted("decode 32k"):
        words = ["preset=h100", "model.dtype=bfloat16", *bench.settings]
        decode(bench, of_shape("decode 32k", words, QWEN2_7B, "cuda"), Long())
    rows = {row["case"]: row for row in (*bench.known, *bench.rows)}
    if row := rows.get("train 7b"):
        bench.got["train_7b_peak_gb"] = row["peak_gb"]
    if ratios := [
        row["peak_over_predicted"] for row in rows.values() if "peak_over_predicted" in row
    ]:
        bench.got["peak_over_predicted_x"] = max(ratios)
    if row := rows.get("decode 32k off"):
        bench.got["decode_32k_over_bytes_x"] = row["over_bytes"]


def free() -> None:
    """Returns the memory of a finished case; parts of an engine refer to each other."""
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
        with torch.device(device):
            AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(folder)
        tiny.build_tokenizer().save_pretrained(folder)
        free()
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
            last, row = made.last_metrics, {}
            if saves:
                began = time.perf_counter()
                made.checkpoint()
                if device == "cuda":
                    torch.cuda.synchronize()  # the copy delays what a next step would enqueue
                row["blocked_s"] = round(time.perf_counter() - began, 3)
                made.end_checkpoint()
                row["written_s"] = round(time.perf_counter() - began, 3)
                files = (Path(root) / "big" / "checkpoints").rglob("*")
                row["written_gb"] = round(sum(file.stat().st_size for file in files) / 1e9, 3)
        finally:
            made.close(whole=False)
        predicted = run_shape(made.config, folder).footprint(made.config)
        update_s, numbers = last["timing_s/update_actor"], predicted.always["policy"] // FLOAT_BYTES
        row |= {f"{part}_s": round(last.get(f"timing_s/{part}", 0.0), 3) for part in PARTS}
        row |= {
            "tokens": sum(len(r.token_ids) for r in step.responses),
            "mfu": round(tflop(shape, numbers, step.responses) / update_s / PEAK_TFLOPS, 4),
            "freed_in_update": made.config.engine.free_in_update,
            "peak_gb": round(last.get(CARD_MEMORY, 0.0), 2),
            "predicted_gb": round(predicted.torch_peak / 1e9, 2),
        }
        if row["peak_gb"]:
            row["peak_over_predicted"] = round(row["peak_gb"] / row["predicted_gb"], 4)
        bench.add_row(case, 1e6 * last["timing_s/step"], **row)
        del made, step, metrics


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

    arms = [Arm(name) for name in ARMS]
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
            1e6 * (pass_s if arm is done.off else arm.seconds / arm.passes),
            seconds=round(arm.seconds, 2),
            tokens=arm.tokens,
            equal_tokens=arm.token_share,
            equal_bits=arm.bit_share,
            accept_length=round(arm.accept_length or 1.0, 3),
            **(over if arm is done.off else {}),
        )
        for line in arm.divergences:
            say(f"  first divergence: {line}")

"""Run folders as a training run leaves them, made up in a moment."""

import json
import math
from pathlib import Path

ARMS = ("off", "ngram:4,1,5", "learned:4,2,8")
HOSTILE = '<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2"> \ud83d & "q"'


def metrics(step: int) -> dict:
    out = {
        "step": step,
        "critic/rewards/mean": 0.4 + 0.02 * step + 0.05 * math.sin(step),
        "spec/accept_length": None if step == 5 else 1.5 + 0.1 * step,  # it never speculated
        "actor/pg_loss": 0.01 * step,
        "actor/entropy": 1 / step,
        "actor/ppo_kl": 0.0,
        "actor/ref_kl": 0.001 * step,
        "actor/grad_norm": 0.3,
        "actor/pg_clipfrac": 0.0,
        "response_length/max": 200 - step,
        "perf/throughput": 5000 + 100 * step,
        "perf/max_memory_resident_gb": 0.7 + 0.01 * step,
        "drafter/loss": 2 / step,
        "timing_s/gen": 2 / step,
        "timing_s/update_actor": 0.5,
        "timing_s/step": 0.6 + 2 / step,
    }
    for bucket in (1, 8):
        for index, arm in enumerate(ARMS):
            out[f"spec/arm/{bucket}/{arm}/pulls"] = 3 * index + step
            out[f"spec/arm/{bucket}/{arm}/reward"] = 1000 * bucket / (1 + index)
    if step % 4 == 0:
        out["eval/accuracy"] = 0.3 + 0.03 * step
    return out


def rollout(step: int) -> dict:
    active = [[0.02 * i / step, 64 - i, ARMS[min(2, i // 25)]] for i in range(64)]
    lengths = [round(20 * math.exp(math.sin(7 * i + step))) for i in range(64)]
    return {"step": step, "lengths": lengths, "active": [*active, [1.4 / step, 0, "off"]]}


def sample(step: int) -> dict:
    record = {"step": step, "prompt_id": "sums/train/0", "prompt": f"{step}+1=", "reward": 1.0}
    return record | {"response": HOSTILE, "num_tokens": 12, "finish": "stop"}


def write_run(folder: Path, steps: int = 12, seed: int = 0) -> Path:
    """A finished run of so many steps."""
    folder.mkdir(parents=True)
    for name, make in (("metrics", metrics), ("rollouts", rollout), ("samples", sample)):
        lines = [json.dumps(make(step)) + "\n" for step in range(1, steps + 1)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "config.yaml").write_text(f"preset: tiny\nrun:\n  name: x\n  seed: {seed}\n")
    (folder / "summary.json").write_text('{"wall_s": {"wall": 30.5}, "peak_memory_gb": 0.9}')
    return folder

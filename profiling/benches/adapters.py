"""A step of TRL's GRPO trainer with our rollout, against one with TRL's own generation.

`examples/trl_grpo.py` trains both arms in one process: the same policy, prompts, sampling and
limit of 512 tokens. `median_us` is the time of a step. The first step of an arm, which builds the
engine, does not count for the target. Needs the extra `trl`.
"""

import re
import statistics
import subprocess
import sys
from importlib.util import find_spec

from profiling.rig.bench import Bench, say

STEPS, QUICK_STEPS = 4, 3
PROGRAM = [sys.executable, "-u", "-m", "examples.trl_grpo"]
WORDS = "model.path=smollm2 model.dtype=bfloat16 run.device=cuda grpo.prompts_per_step=16"
WORDS += " grpo.samples_per_prompt=8 grpo.lr=1e-5 sampling.max_new_tokens=512 engine.max_batch=128"
LINE = re.compile(
    r"(?P<arm>trl|tlt) step (?P<step>\d+): (?P<s>\S+) s +reward (?P<reward>\S+)"
    r" +length (?P<length>\S+) +accept length (?P<accept>\S+)"
)


def lacks() -> str:
    """Why the benchmark cannot run on this machine; "" = it can."""
    missing = [name for name in ("trl", "datasets") if find_spec(name) is None]
    return f"{' and '.join(missing)} missing: pip install -e '.[trl]'" if missing else ""


def run(bench: Bench) -> None:
    steps = QUICK_STEPS if bench.quick else STEPS
    command = [*PROGRAM, *WORDS.split(), f"run.steps={steps}", *bench.settings]
    seconds: dict[str, list[float]] = {"trl": [], "tlt": []}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if (found := LINE.match(line)) is None:
                say(line.rstrip())
                continue
            seconds[found["arm"]].append(float(found["s"]))
            bench.add_row(
                f"{found['arm']} step {found['step']}",
                1e6 * float(found["s"]),
                reward=float(found["reward"]),
                mean_length=float(found["length"]),
                accept_length=float(found["accept"]),
            )
    if process.returncode:
        raise RuntimeError(f"examples.trl_grpo failed with exit code {process.returncode}")
    trl, ours = (statistics.median(arm[1:]) for arm in seconds.values())
    bench.got["trl_step_over_generate_x"] = round(trl / ours, 3)

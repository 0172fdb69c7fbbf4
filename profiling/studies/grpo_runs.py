"""Makes training runs of several arms and seeds from one warm start, each in its own process."""

import importlib.util
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from profiling.peers.vllm import VLLM, environment, lacks_vllm
from profiling.rig.bench import run_within, say
from profiling.rig.warm import make_warm_start
from profiling.studies.grpo_arms import TRAINERS, TRL, TRL_VLLM, commits_of, finished_steps

# The warm start is made once, for all arms and seeds.
WARMED = ["warmup.keep=false", "warmup.steps=0", "warmup.drafter_steps=0"]
RHYTHM = ["run.checkpoint_every=5", "run.keep_checkpoints=1"]
TRAINER_STEPS = {TRL: 2, TRL_VLLM: 4}  # at most
TRL_NEEDS = ("trl", "datasets", "dill", "multiprocess")


def folder_of(runs: Path, arm: str, seed: int) -> Path:
    return runs / f"{arm}-{seed}"


def make_runs(
    jobs: Sequence[tuple[str, int]],
    words: list[str],
    known: Mapping[str, list[str]],
    runs: Path,
    steps: int,
    seconds: float = math.inf,
    vllm: str = "",
    commit: str = "",
) -> None:
    """Makes all runs, as far as the time allows; finished ones are kept, stopped ones resume.

    The `commit` that is measured is recorded beside each run.
    """
    deadline = time.monotonic() + seconds
    try:
        warmed = make_warm_start(words, seconds)
    except TimeoutError as error:
        return say(f"no run is made: {error}")
    for arm, seed in jobs:
        folder = folder_of(runs, arm, seed)
        count = min(steps, TRAINER_STEPS.get(arm, steps))
        if finished_steps(folder) >= count:
            continue
        base = [*words, *WARMED, *RHYTHM, f"model.path={warmed}", f"run.steps={count}"]
        base += [f"run.eval_every={count}"]  # before the first step and after the last
        base += [f"run.root={runs}", f"run.name={folder.name}", f"run.seed={seed}"]
        if arm in TRAINERS:
            command = trl_command(base, vllm if arm == TRL_VLLM else None)
            if command is None:
                continue
        else:
            resume = ["run.resume=true"] if (folder / "config.yaml").exists() else []
            command = [sys.executable, "-m", "driver.train", *base, *known[arm], *resume]
        left = deadline - time.monotonic()
        say(f"--- {arm}, seed {seed}" + ("" if left > 0 else ": no time left"))
        if left <= 0:
            return
        commits_of(folder, commit)
        try:
            if not ended(command, left):
                return
        except SystemExit as error:
            if arm not in TRAINERS:
                raise
            say(f"{arm}: left out, {error}")  # the other arms still count


def trl_command(words: Sequence[str], vllm: str | None = None) -> list[str] | None:
    """The command of an arm of TRL, with vLLM's folder; None where it cannot run."""
    missing = [name for name in TRL_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        say(f"trl: not run, {', '.join(missing)} missing: pip install {' '.join(TRL_NEEDS)}")
        return None
    command = [sys.executable, "-m", "profiling.peers.trl", *words]
    if vllm is None:
        return command
    if lacking := lacks_vllm(vllm):
        say(f"trl with vLLM: not run, {lacking}")
        return None
    return [
        "env",
        *(f"{name}={value}" for name, value in environment(vllm).items()),
        *command,
        VLLM,
    ]


def ended(command: list[str], seconds: float = math.inf) -> bool:
    """Runs a command; False where it was stopped at the limit, SystemExit where it failed."""
    code = run_within(command, seconds)
    if code:
        raise SystemExit(f"exit code {code}: {' '.join(command)}")
    return code is not None

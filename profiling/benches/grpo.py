"""GRPO end to end: whole training runs with and without speculation, step by step.

Each arm and seed is a run under `--runs` from one warm start, which resumes where it was stopped;
the finished steps make the result. `off` decodes plainly, `ngram` drafts from texts, `static` uses
one learned strategy, `frozen` does not train its drafter, `full` is the whole system, `trl` is
TRL's GRPO trainer with generation of transformers, `trl_vllm` with vLLM in its process (`--vllm
FOLDER`). `median_us` is the time of a step without evaluations and checkpoints; parts are means
over steps. `--quick` runs `off` and `full` for four steps with one seed and without evaluations.

With another limit than the preset's (`--set sampling.max_new_tokens=512`) the steps of `trl` take
seconds instead of minutes. Such runs have their own folder and their own cases ("full seed 0, 512
tokens"), and decide `over_trl_hf_x` and `over_trl_vllm_x` only.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from driver.common.memory import CARD_MEMORY
from driver.config.load import load_config
from driver.run.dry_run import run_shape, shape_folder
from profiling.rig.bench import Bench, say
from profiling.rig.warm import warm_words
from profiling.studies.grpo_arms import (
    OTHER_START,
    TRAINERS,
    ArmRun,
    against_off,
    arm_words,
    curves,
    over_peer,
)
from profiling.studies.grpo_runs import folder_of, make_runs

STEPS, QUICK_STEPS = 20, 4
NEEDS_WARM_START = True
OPTIONS = {
    "arms": "",  # off,ngram,static,frozen,full,trl,trl_vllm
    "seeds": "",  # 0,1,2
    "steps": 0,
    "runs": Path("runs/grpo"),
    "seconds": math.inf,  # limit of all runs, then they are merged
    "vllm": "",  # folder that holds the package
    "merge": False,  # run nothing, merge the runs
}


def run(bench: Bench) -> None:
    chosen = bench.own_options(OPTIONS)
    every = ("off,full", "0") if bench.quick else ("off,ngram,static,frozen,full", "0,1,2")
    arms = (chosen.arms or every[0]).split(",")
    seeds = [int(seed) for seed in (chosen.seeds or every[1]).split(",")]
    words = bench.words
    if bench.quick and not chosen.steps:  # in its own folder: a whole run could not resume it
        words, chosen.runs = [*words, "run.eval_prompts=0"], chosen.runs / "quick"
    chosen.steps = chosen.steps or (QUICK_STEPS if bench.quick else STEPS)
    limit = other_limit(words)
    if limit:
        words, chosen.runs = [*words, "run.eval_prompts=0"], chosen.runs / f"{limit}-tokens"
    known = arm_words(load_config(words))
    for arm in arms:
        if arm not in known and arm not in TRAINERS:
            raise SystemExit(f"--arms: {arm!r} is not one of {', '.join([*known, *TRAINERS])}")
    jobs = [(arm, seed) for seed in seeds for arm in arms if bench.wanted(arm)]
    if not chosen.merge:
        limits = chosen.steps, chosen.seconds
        make_runs(jobs, words, known, chosen.runs, *limits, chosen.vllm, bench.commit)
    runs = [ArmRun.read(arm, seed, folder_of(chosen.runs, arm, seed)) for arm, seed in jobs]
    found = [run for run in runs if run is not None]
    memory = {
        (run.arm, run.seed): memory_of(run, folder_of(chosen.runs, run.arm, run.seed))
        for run in found
    }
    merge(bench, found, memory, limit)


def other_limit(words: Sequence[str]) -> int:
    """The limit of tokens, where it is not the preset's; 0 where it is."""
    limit, own = (load_config(w).sampling.max_new_tokens for w in (words, warm_words(words)))
    return 0 if limit == own else limit


def memory_of(run: ArmRun, folder: Path) -> dict[str, float]:
    """Peak memory of the card in a run, by torch and by the prediction of a dry run."""
    peaks = [record[CARD_MEMORY] for record in run.records if CARD_MEMORY in record]
    if not peaks:
        return {}
    config = load_config([f"preset={folder / 'config.yaml'}"])
    parts = run_shape(config, shape_folder(config)).footprint(config)
    return {"peak_gb": round(max(peaks), 3), "predicted_gb": round(parts.torch_peak / 1e9, 3)}


def merge(
    bench: Bench,
    runs: list[ArmRun],
    memory: Mapping[tuple[str, int], dict[str, float]],
    limit: int = 0,
) -> None:
    """A row for each run with ratios to plain decoding of its seed; the targets if no `limit`."""
    off = {run.seed: run for run in runs if run.arm == "off"}
    ratios = {}
    for run in runs:
        case = f"{run.arm} seed {run.seed}" + (f", {limit} tokens" if limit else "")
        found = {}
        if run.seed in off and run.arm not in TRAINERS:
            ratios[run.arm, run.seed] = found = against_off(run, off[run.seed])
            if not found["identical_steps"]:
                say(f"{case}: {OTHER_START}")
        median = statistics.median(t.total for t in run.times)
        found = {**found, **memory[run.arm, run.seed]}
        bench.add_row(case, 1e6 * median, **run.row(), **found)
    full = {run.seed: run for run in runs if run.arm == "full"}
    for trainer, target in TRAINERS.items():
        peers = [run for run in runs if run.arm == trainer and run.seed in full]
        if peers:
            over = statistics.median(over_peer(run, full[run.seed]) for run in peers)
            bench.got[target] = round(over, 2)
    if not limit:
        bench.files["curves"] = curves(runs)
        compared = [ratios["full", seed] for seed in full if seed in off]
        book_full(bench, list(full.values()), compared)
    bench.sources |= dict.fromkeys(bench.got, bench.rows)  # whose commits may be older


def book_full(bench: Bench, full: list[ArmRun], ratios: list[dict[str, float | int]]) -> None:
    """The targets of the full system; `ratios` to plain decoding are of seeds that both have."""
    compared = [found for found in ratios if found["identical_steps"]]
    if compared:
        bench.got |= {
            f"{name}_x": round(statistics.median(r[name] for r in compared), 3)
            for name in ("step_over_off", "rollout_over_off")
        }
    if ratios:
        bench.got["identical_reward_steps"] = min(found["identical_steps"] for found in ratios)
    if full:
        times = [times for run in full for times in run.times]
        bench.got["step_s"] = round(statistics.median(t.total for t in times), 3)
        updates = (t.phases["update_actor"] for t in times)
        bench.got["update_s"] = round(statistics.median(updates), 3)
        bench.got["unaccounted_share"] = max(run.unaccounted_share for run in full)
        gains = [run.heldout_gain_points for run in full if run.heldout_gain_points is not None]
        if gains:
            bench.got["heldout_gain_points"] = round(statistics.mean(gains), 2)

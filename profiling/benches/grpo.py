"""GRPO end to end: whole training runs with and without speculation, step by step.

Each arm and seed is a run of its own under `--runs`, from one warm start, and goes on where it was
stopped; what is there is merged into one result. `off` decodes plainly, `ngram` drafts from texts,
`static` always takes one learned strategy, `frozen` never trains its drafter, `full` is the whole
system, `trl` is TRL's GRPO trainer with generation of transformers on the same model and prompts.
`median_us` is a step's time without evaluations and checkpoints; parts are means over the steps.
`--quick` runs `off` and `full` for four steps with one seed, without evaluations; with `--steps N`
it makes whole runs of that length, which later ones may go on from.

With `--set sampling.max_new_tokens=512` responses end earlier than the preset's, for `trl`, whose
steps would take minutes. Such runs have a folder of their own below `--runs`, cases of their own
("full seed 0, 512 tokens") and, for targets, `over_trl_hf_x` only; the warm start is the preset's.
"""

from __future__ import annotations

import argparse
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
    TRL,
    ArmRun,
    against_off,
    arm_words,
    curves,
    over_peer,
)
from profiling.studies.grpo_runs import SEVERAL_SEEDS, folder_of, make_runs

STEPS, QUICK_STEPS = 20, 4
NEEDS_WARM_START = True


def options(words: Sequence[str]) -> argparse.Namespace:
    """What the benchmark takes besides the options of all."""
    parser = argparse.ArgumentParser(prog="python -m profiling.bench grpo", description=__doc__)
    parser.add_argument("--arms", default="", help="off,ngram,static,frozen,full,trl")
    parser.add_argument("--seeds", default="", help="of off and full; others take the first")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs/grpo"), help="folder of the runs")
    parser.add_argument("--static", default="", help="strategy of the arm of that name")
    parser.add_argument("--seconds", type=float, default=math.inf, help="then stop and merge")
    parser.add_argument("--merge", action="store_true", help="run nothing, merge what is there")
    return parser.parse_args(words)


def run(bench: Bench) -> None:
    chosen = options(bench.options)
    arms = (chosen.arms or ("off,full" if bench.quick else "off,ngram,static,frozen,full")).split(
        ","
    )
    seeds = [int(s) for s in (chosen.seeds or ("0" if bench.quick else "0,1,2")).split(",")]
    words = bench.words
    if bench.quick and not chosen.steps:  # in a folder of its own: a whole run could not go on
        words, chosen.runs = [*words, "run.eval_prompts=0"], chosen.runs / "quick"
    chosen.steps = chosen.steps or (QUICK_STEPS if bench.quick else STEPS)
    limit = other_limit(words)
    if limit:
        words, chosen.runs = [*words, "run.eval_prompts=0"], chosen.runs / f"{limit}-tokens"
    known = arm_words(load_config(words), chosen.static)
    for arm in arms:
        if arm not in known and arm != TRL:
            raise SystemExit(f"--arms: {arm!r} is none of {', '.join([*known, TRL])}")
    jobs = [
        (arm, seed)
        for seed in seeds
        for arm in arms
        if bench.wanted(arm) and (seed == seeds[0] or arm in SEVERAL_SEEDS)
    ]
    if not chosen.merge:
        make_runs(jobs, words, known, chosen.runs, chosen.steps, chosen.seconds)
    runs = [ArmRun.read(arm, seed, folder_of(chosen.runs, arm, seed)) for arm, seed in jobs]
    found = [run for run in runs if run is not None]
    memory = {
        (run.arm, run.seed): memory_of(run, folder_of(chosen.runs, run.arm, run.seed))
        for run in found
    }
    merge(bench, found, memory, limit)


def other_limit(words: Sequence[str]) -> int:
    """Tokens of a response at most, where that is not the preset's limit; 0 where it is."""
    limit, own = (load_config(w).sampling.max_new_tokens for w in (words, warm_words(words)))
    return 0 if limit == own else limit


def memory_of(run: ArmRun, folder: Path) -> dict[str, float]:
    """Peak memory of the card in a run, as torch counts it, and as a dry run predicts it."""
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
    """A row for each run, ratios to plain decoding with the same seed, the targets.

    Args:
        bench: takes them.
        runs: what is there, all of one limit.
        memory: of each run by arm and seed.
        limit: tokens of a response, where that is not the preset's limit; 0 = it is.
    """
    off = {run.seed: run for run in runs if run.arm == "off"}
    ratios = {}
    for run in runs:
        case = f"{run.arm} seed {run.seed}" + (f", {limit} tokens" if limit else "")
        found = {}
        if run.seed in off and run.arm != TRL:
            ratios[run.arm, run.seed] = found = against_off(run, off[run.seed])
            if not found["identical_steps"]:
                say(f"{case}: {OTHER_START}")
        median = statistics.median(t.total for t in run.times)
        found = {**found, **memory[run.arm, run.seed]}
        bench.add_row(case, 1e6 * median, **run.row(), **found)
    full = {run.seed: run for run in runs if run.arm == "full"}
    peers = [run for run in runs if run.arm == TRL and run.seed in full]
    if peers:
        over = statistics.median(over_peer(run, full[run.seed]) for run in peers)
        bench.got["over_trl_hf_x"] = round(over, 2)
    if not limit:
        bench.files["curves"] = curves(runs)
        book_full(
            bench, list(full.values()), [ratios["full", seed] for seed in full if seed in off]
        )


def book_full(bench: Bench, full: list[ArmRun], ratios: list[dict[str, float | int]]) -> None:
    """The targets of the full system.

    Args:
        bench: takes them.
        full: its runs.
        ratios: to plain decoding, of those whose seed it has too.
    """
    compared = [found for found in ratios if found["identical_steps"]]
    if compared:
        bench.got |= {
            f"{name}_x": round(statistics.median(r[name] for r in compared), 3)
            for name in ("step_over_off", "rollout_over_off")
        }
    if ratios:
        bench.got["identical_reward_steps"] = min(found["identical_steps"] for found in ratios)
    if full:
        bench.got["unaccounted_share"] = max(run.unaccounted_share for run in full)
        gains = [run.heldout_gain_points for run in full if run.heldout_gain_points is not None]
        if gains:
            bench.got["heldout_gain_points"] = round(statistics.mean(gains), 2)

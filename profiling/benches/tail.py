"""The update that begins in the tail of the rollout: steps of `preset=h100` by place and row size.

Cases alternate in one run from the warm start, whose drafter is frozen, so that start and
compilation are paid once. A case `64x32768x98304` computes the first row of the update, of 32,768
tokens, on 64 multiprocessors during the tail; the other rows have 98,304 tokens. `0x0x98304` begins
after the rollout. `median_us` is the time of a step. All steps repeat the same prompts with a
learning rate that changes no weight, so their responses are the same ones. A case whose gradients
on the partition differ from those on the card is left out. `bench all` leaves the benchmark out,
since the update in the tail is off by default.
"""

import statistics
import tempfile
from dataclasses import replace
from typing import Any

from driver.config.load import load_config
from driver.records.phases import StepTimes
from driver.run.collector import Experience
from driver.run.run import Run
from driver.run.start import start_run
from driver.run.tail_update import TailUpdate
from profiling.rig.bench import Bench, say
from profiling.rig.results import TAKEN
from profiling.rig.warm import make_warm_start
from profiling.studies.grpo_runs import WARMED

NEEDS_WARM_START = True
IN_ALL = False
CASES = "64x32768x98304,0x0x98304,64x16384x98304,0x0x65536,96x32768x98304"
TARGET_CASE = TAKEN["update_hidden_share"][1]
QUICK_CASES = f"{TARGET_CASE},0x0x98304"
OPTIONS = {"cases": "", "repeats": 4}  # steps of each case
NO_LR = 1e-30  # a step of Adam with it rounds to nothing
FIRST_STEPS = 2  # not counted: they compile, capture graphs and compare gradients


def run(bench: Bench) -> None:
    chosen = bench.own_options(OPTIONS)
    names = (chosen.cases or (QUICK_CASES if bench.quick else CASES)).split(",")
    cases = {name: tuple(map(int, name.split("x"))) for name in names}
    with tempfile.TemporaryDirectory() as root:
        words = [*bench.words, *WARMED, f"model.path={make_warm_start(bench.words)}"]
        words += ["spot.mode=off", "run.eval_prompts=0", f"run.root={root}"]
        made = start_run(load_config(words), say)
        try:
            measure(bench, made, cases, chosen.repeats)
        finally:
            made.close(whole=False)


def measure(bench: Bench, run: Run, cases: dict[str, tuple[int, ...]], repeats: int) -> None:
    tails = {sms: tail_of(run, sms) for sms, _, _ in cases.values()}
    config, found = replace(run.trainer.cfg, lr=NO_LR), {name: list[Any]() for name in cases}
    for _ in range(FIRST_STEPS):
        _, first, rows = next(iter(cases.values()))
        run.trainer.cfg = replace(config, tail_tokens=first, micro_batch_tokens=rows)
        batch = gather(run)
        for tail in filter(None, tails.values()):
            tail.take(batch.responses, batch.rewards, batch.keep)
        finish(run, batch)
    for _ in range(repeats):
        for name, (sms, first, rows) in cases.items():
            run.trainer.cfg = replace(config, tail_tokens=first, micro_batch_tokens=rows)
            run.collector.tail = tails[sms]
            found[name].append(finish(run, gather(run)))
    for name, records in found.items():
        place = tails[cases[name][0]]
        if place is not None and not place.exact:
            say(f"{name}: left out, other gradients on the partition, or one row a step")
            continue
        times = [StepTimes.of(record) for record in records]
        totals = [each.total for each in times]
        hidden = [record.get("update/hidden_share", 0.0) for record in records]
        bench.add_row(
            name,
            1e6 * statistics.median(totals),
            spread=round((max(totals) - min(totals)) / statistics.median(totals), 4),
            gen_s=round(statistics.median(t.phases["gen"] for t in times), 4),
            update_s=round(statistics.median(t.phases["update_actor"] for t in times), 4),
            hidden_share=round(statistics.median(hidden), 4),
            tokens=records[-1]["tokens"],
        )


def tail_of(run: Run, sms: int) -> TailUpdate | None:
    """The update in the tail on some multiprocessors; None = it begins after the rollout."""
    config = replace(run.config, grpo=replace(run.config.grpo, tail_tokens=sms))
    return TailUpdate.of(config, run.world, run.trainer, run.collector.keeps, None, say, sms)


def gather(run: Run) -> Experience:
    """The rollouts of the first step, without n-grams of their own earlier responses."""
    run.step = run.collector.prompts_drawn = 0
    run.rollout.engine.forget()
    return run.gather()


def finish(run: Run, batch: Experience) -> dict[str, Any]:
    """Does the rest of a step; returns its record, with the tokens of its responses."""
    metrics = run.update_policy(batch)
    run.sync_weights()
    run.log(metrics, batch)
    return {**run.last_metrics, "tokens": sum(len(r.token_ids) for r in batch.responses)}

"""The drafter's benchmark runs on a small model on the CPU; its rules equal closed forms."""

import importlib
import json
from dataclasses import replace

import pytest

from driver.config.load import load_config
from driver.drafter.overlap import OverlapTuner
from driver.drafter.partition import Overlap
from profiling.benches import drafter
from profiling.benches.drafter import compare
from profiling.rig.bench import Bench
from profiling.rig.subjects import of_checkpoint
from profiling.rig.warm import warm_words
from profiling.studies import draft_overlap, drafter_runs, drafting, grpo_runs
from profiling.studies.drafting import Sizes, Study
from profiling.studies.grpo_runs import WARMED

WORDS = [
    "preset=tiny",
    "model.hidden_size=32",
    "model.num_layers=3",
    "drafter.draft_vocab=24",
    "run.threads=1",
]
SMALL = Sizes(
    prompts=16, held_out=8, rounds=1, tokens=24, batch=4, bin=64, steps=6, unroll=2,
    strategies=("learned:2,2,5",),
)  # fmt: skip


def test_the_benchmark_runs_whole_on_the_cpu():
    subject = of_checkpoint("tiny", WORDS, warmed=False, note=lambda line: None)
    bench = Bench("drafter", copy_gb_per_s=float("nan"))
    compare(bench, subject, SMALL)
    cases = {row["case"]: row for row in bench.rows}
    assert cases["responses to learn from"]["tokens"] >= 14 * (6 + 1)  # prompts and responses
    assert cases["unroll 2, trained"]["steps"] == 6
    assert cases["learned:2,2,5, shared noise"]["passes"] > 0
    assert set(bench.got) == {
        "accept_length_smollm2_gsm8k_t1",
        "shared_noise_over_target_only_x",
        "checkpoint_stall_ms",
        "packing_over_padding_x",
    }
    assert all(value > 0 for value in bench.got.values()) and not bench.failed


def test_a_part_can_be_chosen():
    subject = of_checkpoint("tiny", WORDS, warmed=False, note=lambda line: None)
    bench = Bench("drafter", copy_gb_per_s=float("nan"), only="packing")
    compare(bench, subject, SMALL)
    assert [row["case"] for row in bench.rows][-2:] == ["packed", "padded"]
    assert set(bench.got) == {"packing_over_padding_x"}


def test_parts_of_a_quick_run():
    def chosen(parts, **options):
        bench = Bench("drafter", float("nan"), quick=True, **options)
        return [part for part in parts.split() if drafter.wanted(bench, part)]

    assert chosen("accept packing overlap-7b") == ["accept", "packing"]
    assert chosen("overlap overlap-7b accept warmed", only="overlap-7b|accept") == [
        "overlap-7b",
        "accept",
    ]


def test_training_ends_at_its_time_limit(monkeypatch):
    """With slow steps there are fewer of them, and the rate still falls to zero."""
    subject = of_checkpoint("tiny", WORDS, warmed=False, note=lambda line: None)
    study = Study(Bench("drafter", float("nan")), subject, replace(SMALL, seconds=100.0))
    study.collect()
    clock, rates = [0.0], []

    def passes_by() -> float:
        clock[0] += 7.0
        return clock[0]

    monkeypatch.setattr(drafting.time, "perf_counter", passes_by)
    learner = study.learner(2)
    monkeypatch.setattr(learner, "micro_step", lambda: None)
    monkeypatch.setattr(learner, "set_lr", rates.append)
    study.train(learner, 400)
    assert 5 < len(rates) < 15
    assert max(rates) > 4 * rates[-1]


@pytest.mark.parametrize("chosen", [True, False])
def test_overlap_measures_partitions_and_rollouts(monkeypatch, chosen):
    """With measured partitions as on a card; one that is too slow still has a row."""
    ways = (16, 1.2, 1.0), (8, 1.05, 0.25)
    found = [Overlap.of(sms, 1e-3, slow * 1e-3, 4e-3, 32, duty) for sms, slow, duty in ways]

    def tune(tuner):
        tuner.measured, tuner.serial_step_s = found, 1e-3
        tuner.spot.overlap = found[1] if chosen else None

    monkeypatch.setattr(OverlapTuner, "tune", tune)
    words = [*WORDS, "spot.tokens_per_step=32"]
    subject = of_checkpoint("tiny", words, warmed=False, note=lambda line: None)
    bench = Bench("drafter", copy_gb_per_s=float("nan"))
    monkeypatch.setattr(draft_overlap, "REQUESTS", 12)
    draft_overlap.overlap(bench, subject, 40, draft_overlap.OF_TARGETS)
    cases = {row["case"]: row for row in bench.rows}
    names = "SmolLM2, 16 SMs", "SmolLM2, 8 SMs, 25% of the time"
    assert [cases[name]["chosen"] for name in names] == [False, chosen]
    assert [cases[name]["stop_ms"] for name in names] == [4.0, 1.0]
    assert bench.got["overlap_tail_slowdown_x"] == 1.05
    assert ("rollout_slowdown_x" in bench.got) == chosen
    if chosen:
        row = cases["SmolLM2, rollout of 12"]
        assert row["steps"] > 0 and 0 < row["tail_share"] < 1
        assert row["slowdown"] == bench.got["rollout_slowdown_x"] > 0.5


def test_without_gsm8k_the_other_parts_run(monkeypatch, capsys):
    """Parts on its prompts are left out with a line; the tail decodes other prompts."""
    seen = []
    monkeypatch.setattr(drafter, "of_checkpoint", lambda name, words, **_: words)
    monkeypatch.setattr(drafter, "overlap", lambda bench, words, *_: seen.append(words))
    monkeypatch.setattr(drafter, "compare", lambda bench, words, *_: seen.append("compared"))
    settings = ["task.path=/nowhere/gsm8k", "model.cache=/keep"]
    bench = Bench("drafter", float("nan"), quick=True, only="overlap$|accept", settings=settings)
    drafter.run(bench)
    (words,) = seen
    assert load_config(words).task.name == "addition" and "model.cache=/keep" in words
    assert "left out, no /nowhere/gsm8k here" in capsys.readouterr().out and not bench.failed


def test_the_task_of_the_drafter_is_not_that_of_the_warm_start():
    settings = ["task.path=/gsm8k", "run.root=/keep", "grpo.lr=1e-4"]
    start = warm_words(Bench("drafter", 0.0, settings=settings).words)
    warm = load_config(start)
    assert warm.task == load_config(["preset=h100"]).task
    assert load_config([*drafter.WORDS, *settings]).task.path == "/gsm8k"
    for arm, words in drafter_runs.arm_words(settings).items():
        config = load_config([*start, *WARMED, *words])
        assert (config.grpo.lr, config.spot.mode) == (1e-4, drafter_runs.ARMS[arm])
        assert config.run.root == "/keep" and config.warmup.drafter_steps == 0


def test_the_warmed_policy_and_its_rl_runs(tmp_path, monkeypatch):
    """All arms use one warm start and have equal steps; a stopped arm resumes."""
    settings = [
        *WORDS, f"run.root={tmp_path}", "warmup.keep=true", "warmup.steps=10", "warmup.batch=8",
        "warmup.drafter_steps=4", "warmup.drafter_tokens=64", "warmup.responses=8",
        "drafter.draft_vocab=24", "sampling.max_new_tokens=24", "grpo.prompts_per_step=2",
        "engine.max_batch=8", "spot.tokens_per_step=32", "run.checkpoint_every=1",
    ]  # fmt: skip
    monkeypatch.setattr(drafter, "WARMED_STRATEGIES", ["learned:2,2,5", "learned:4,4,16"])
    monkeypatch.setattr(drafter, "WARMED_PROMPTS", 6)
    monkeypatch.setattr(drafter, "WARMED_TOKENS", 24)
    bench = Bench("drafter", float("nan"), quick=True, only="warmed|adaptive", settings=settings)
    commands = []

    def in_process(command: list[str], seconds: float) -> bool:
        commands.append(command)
        importlib.import_module(command[2]).main(command[3:])
        return True

    monkeypatch.setattr(grpo_runs, "ended", in_process)
    drafter.run(bench)  # a quick run makes no RL without `--seconds`
    cases = {row["case"]: row for row in bench.rows}
    names = "warmed learned:2,2,5", "warmed learned:4,4,16"
    assert list(cases) == [*names] and not commands
    best = max(cases[name]["accept_length"] for name in names)
    assert bench.got == {"accept_length_warmed_policy_t1": best} and best >= 1.0
    for steps in (1, 2):
        bench.rows, bench.only = [], "adaptive"
        bench.options = [f"--runs={tmp_path}/rl", f"--steps={steps}", "--seconds=600"]
        drafter.run(bench)
    assert len(commands) == 6 and sum("run.resume=true" in c for c in commands) == 3
    rows = {row["case"]: row for row in bench.rows}
    assert list(rows) == ["RL, frozen", "RL, serial", "RL, overlapped"]
    assert all(row["steps"] == row["equal_steps"] == 2 for row in rows.values())
    assert all(row["accept_length"] >= 1.0 for row in rows.values())
    assert "adaptive_over_frozen_accept_x" not in bench.got  # too few steps
    assert not bench.failed


def arm(accepts):
    """Records of a run; with a longer accept length it generates faster."""
    times = {"timing_s/gen": 2.2 / accepts[-1], "timing_s/step": 2.0, "critic/rewards/mean": 0.5}
    records = []
    for step, accept in enumerate(accepts, 1):
        records.append({"step": step, "spec/accept_length": accept, **times})
    return records, [{"step": record["step"], "lengths": [10, 20]} for record in records]


@pytest.fixture
def finished(tmp_path):
    for name, last in (("frozen", 2.0), ("serial", 2.2), ("overlapped", 2.1)):
        (tmp_path / f"{name}-0").mkdir()
        records = arm([9.0] * 20 + [last] * 10)
        for file, lines in zip(("metrics", "rollouts"), records, strict=True):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (tmp_path / f"{name}-0" / f"{file}.jsonl").write_text(text)
    return tmp_path


def test_runs_are_compared_by_their_last_steps(finished, tmp_path):
    bench = Bench("drafter", copy_gb_per_s=float("nan"))
    drafter_runs.adaptive_over_frozen(bench, finished)
    assert bench.got["adaptive_over_frozen_accept_x"] == 1.1
    assert bench.got["adaptive_over_frozen_time_x"] == pytest.approx(1.1, abs=1e-4)
    assert [row["accept_length"] for row in bench.rows] == [2.0, 2.2, 2.1]
    nothing = Bench("drafter", float("nan"))
    drafter_runs.adaptive_over_frozen(nothing, tmp_path / "none")
    assert not nothing.rows and not nothing.got and not nothing.files

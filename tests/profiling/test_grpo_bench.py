"""The GRPO benchmark: runs of a very small model on the CPU, ratios of records, TRL's arm."""

import json
import math
from dataclasses import replace

import pytest

from driver.common.memory import CARD_MEMORY
from driver.config.load import load_config, to_yaml
from driver.records.phases import PHASES, StepTimes
from driver.run.warm_start import fingerprints
from profiling.bench import main
from profiling.benches import grpo
from profiling.peers import trl as trl_arm
from profiling.rig import warm
from profiling.rig.bench import Bench
from profiling.rig.results import TARGETS_CARD, joined, known_targets, over_frozen, targets_of
from profiling.studies import grpo_runs
from profiling.studies.grpo_arms import (
    ArmRun,
    against_off,
    arm_words,
    curves,
    finished_steps,
    identical_steps,
    over_peer,
)
from tests.forks import run_module

WORDS = [
    "preset=tiny",
    "model.hidden_size=32",
    "model.num_layers=2",
    "run.threads=1",
    "run.device=cpu",
    "run.eval_prompts=4",
    "warmup.steps=10",
    "warmup.batch=8",
    "grpo.prompts_per_step=2",
    "grpo.samples_per_prompt=4",
    "sampling.max_new_tokens=16",
    "spot.tokens_per_step=32",
    "spot.final_steps=2",
]


def record(step, gen, update, total, reward=0.5, **more):
    times = {"timing_s/gen": gen, "timing_s/update_actor": update, "timing_s/step": total}
    return {"step": step, "critic/rewards/mean": reward, **times, **more}


def arm_run(arm, records, lengths=None, heldout=()):
    return ArmRun(arm, 0, records, lengths or [[10, 20]] * len(records), list(heldout))


def test_a_step_is_split_without_evaluation_and_checkpoints():
    line = record(1, 2.0, 1.0, 9.0, **{"timing_s/eval": 4.0, "timing_s/checkpoint": 0.5})
    times = StepTimes.of({**line, "timing_s/log": 0.25})
    assert times.total == pytest.approx(4.5)
    assert times.phases == {name: 0.0 for name in PHASES} | {"gen": 2.0, "update_actor": 1.0}
    assert (times.other, times.unaccounted) == (0.25, pytest.approx(1.25))


def test_ratios_and_amdahl():
    off = arm_run("off", [record(1, 8.0, 2.0, 10.0), record(2, 8.0, 2.0, 10.0)])
    full = arm_run("full", [record(1, 2.0, 2.0, 5.0), record(2, 2.0, 2.0, 5.0)])
    got = against_off(full, off)
    assert got["rollout_over_off"] == 4.0
    assert got["amdahl"] == 2.5  # 1 / (0.2 + 0.8 / 4)
    assert got["step_over_off"] == 2.0  # a second of each step went elsewhere
    assert got["amdahl_limit"] == 5.0
    shorter = arm_run("full", full.records[:1])
    assert against_off(shorter, off)["step_over_off"] == 2.0  # over the steps that both have


def test_a_step_that_compiles_counts_once():
    """The step ratio is a median, which the seconds of a first step do not move."""
    off = arm_run("off", [record(1, 3.0, 9.0, 12.0)] + [record(i, 3.0, 1.0, 4.0) for i in (2, 3)])
    full = arm_run("full", [record(1, 1.0, 9.0, 10.0)] + [record(i, 1.0, 1.0, 2.0) for i in (2, 3)])
    got = against_off(full, off)
    assert got["step_over_off"] == 2.0 and got["run_over_off"] == pytest.approx(20 / 14, abs=1e-4)
    assert got["amdahl_limit"] == 4.0  # generation has three of the four seconds of most steps


def test_equal_steps_are_counted_up_to_the_first_that_differs():
    lines = [record(i + 1, 1, 1, 2, reward=r) for i, r in enumerate((0.1, 0.2, 0.3))]
    off = arm_run("off", lines)
    assert identical_steps(off, arm_run("full", lines)) == 3
    other = [*lines[:1], {**lines[1], "critic/rewards/mean": 0.25}, lines[2]]
    assert identical_steps(off, arm_run("full", other)) == 1
    # Steps with equal rewards and other lengths differ.
    assert identical_steps(off, arm_run("full", lines, [[10, 20], [10, 21], [10, 20]])) == 1
    bits = [replace(off, checksums=sums) for sums in ([[1, 2], [3, 4], [5, 6]], [[1, 2], [3, 9]])]
    assert identical_steps(*bits) == 1 and identical_steps(off, bits[0]) == 3


def test_a_row_has_the_cost_of_passes_and_of_training():
    extra = {"spec/target_passes": 4, "spec/accept_length": 3.0, "drafter/busy_s": 0.5}
    row = arm_run("full", [record(1, 2.0, 1.0, 4.0, **extra)], heldout=[0.25, 0.75]).row()
    assert (row["passes"], row["pass_ms"], row["accept_length"]) == (4.0, 500.0, 3.0)
    assert (row["gen_share"], row["unaccounted_share"], row["drafter_busy_share"]) == (
        0.5,
        0.25,
        0.125,
    )
    assert row["tokens_per_s"] == 7.5
    assert (row["heldout_before"], row["heldout_after"]) == (0.25, 0.75)


def test_arms_are_configurations():
    config = load_config(["preset=h100"])
    known = arm_words(config)
    for words in known.values():
        load_config(["preset=h100", *grpo_runs.WARMED, *grpo_runs.RHYTHM, *words])
    assert known["static"][-1] == "bandit.policy=learned:8,1,9"
    assert known["ngram"][0] == "engine.strategies=off ngram:6,1,7"
    assert known["full"] == []
    mixed = load_config(["preset=h100", "engine.strategies=off ngram:6,1,7 hybrid:4,4,16"])
    assert arm_words(mixed)["ngram"][0] == "engine.strategies=off ngram:6,1,7"


def test_rows_of_other_benchmarks_decide_targets(tmp_path):
    """A figure that `bench grpo` once copied does not count, however new its file is."""
    (tmp_path / TARGETS_CARD).mkdir()
    old = {"name": "update_mfu_15b", "wanted": {"at_least": 0.45}, "got": 0.5, "met": True}
    row = {"bench": "update", "case": "15b compiled", "mfu": 0.6}
    for name, when, rows, targets in (("grpo", "2027", [], [old]), ("update", "2026", [row], [])):
        content = {"meta": {"date": when, "commit": name}, "rows": rows, "targets": targets}
        (tmp_path / TARGETS_CARD / f"{name}.json").write_text(json.dumps(content))
    got = {target.name: target for target in known_targets(tmp_path)}
    assert (got["update_mfu_15b"].got, got["update_mfu_15b"].commit) == (0.6, "update")
    assert got["checkpoint_blocked_s"].got is None


def test_the_full_system_is_compared_with_a_frozen_drafter_by_seed():
    """Over all steps, and only runs of one commit with equal steps."""
    rows = {
        f"{arm} seed {seed}": {"makespan_s": seconds, "steps": steps, "commit": commit}
        for arm, seed, seconds, steps, commit in (
            ("full", 0, 2.0, 20, "a"), ("frozen", 0, 3.0, 20, "a"),
            ("full", 1, 2.0, 20, "a"), ("frozen", 1, 9.0, 18, "a"),
            ("full", 2, 2.0, 20, "a"), ("frozen", 2, 9.0, 20, "b"),
        )
    }  # fmt: skip
    assert over_frozen(rows) == [(rows["full seed 0"], 1.5)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Both arms for two steps; `full` was stopped after the first and resumed."""
    root = tmp_path_factory.mktemp("runs")
    preset = root / "small.yaml"
    preset.write_text(to_yaml(load_config(WORDS)))
    words = [f"preset={preset}", f"run.root={root}"]

    def bench(*options, more=()):
        settings = [*words, *more]
        out = Bench("grpo", math.nan, settings=settings, options=[*options, f"--runs={root}/grpo"])
        grpo.run(out)
        return out

    def run(command, seconds):
        return run_module(command, root / "log")

    bench.folder, bench.words = root / "grpo", words
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo_runs, "run_within", run)
        patch.setattr(warm, "run_within", run)
        bench("--arms=full", "--seeds=0", "--steps=1")
        return bench, bench("--arms=off,full", "--seeds=0", "--steps=2")


def test_arms_run_resume_and_merge(runs, monkeypatch):
    bench, result = runs
    assert [row["case"] for row in result.rows] == ["off seed 0", "full seed 0"]
    assert all(row["steps"] == 2 for row in result.rows)
    (warmed,) = (bench.folder.parent / "warm").glob("small-*/step-*")
    assert {row["policy"] for row in result.rows} == {fingerprints(warmed)["policy"]}
    assert result.got["identical_reward_steps"] == 2
    assert result.rows[0]["step_over_off"] == 1.0
    assert result.got["step_over_off_x"] == pytest.approx(result.rows[1]["step_over_off"], abs=1e-3)
    assert set(result.got) == {
        "step_over_off_x",
        "rollout_over_off_x",
        "identical_reward_steps",
        "unaccounted_share",
        "heldout_gain_points",
        "step_s",
        "update_s",
    }
    assert result.got["step_s"] >= result.got["update_s"] > 0
    # Finished runs are not made again.
    commands = []
    monkeypatch.setattr(grpo_runs, "ended", lambda command, left: commands.append(command) or True)
    again = bench("--arms=off,full", "--seeds=0", "--steps=2")
    assert commands == []
    assert again.rows == result.rows
    assert bench("--arms=off,full", "--seeds=0", "--steps=3", "--merge").rows == result.rows


def test_the_command_writes_the_result(runs, tmp_path, monkeypatch):
    bench, _ = runs
    monkeypatch.setattr(grpo, "NEEDS_CUDA", False, raising=False)
    options = ["--arms", "off,full", "--seeds", "0", "--merge", "--runs", str(bench.folder)]
    settings = [word for setting in bench.words for word in ("--set", setting)]
    assert main(["grpo", *options, "--out", str(tmp_path), *settings]) == 0
    result = json.loads((tmp_path / "cpu" / "grpo.json").read_text())
    assert result["meta"]["command"].startswith("python -m profiling.bench grpo --set preset=")
    assert " ".join(options) in result["meta"]["command"]
    got = {target["name"]: target["got"] for target in result["targets"]}
    assert got["identical_reward_steps"] == 2 and got["over_trl_hf_x"] is None
    written = json.loads((tmp_path / "cpu" / "grpo-curves.json").read_text())
    assert len(written["full"]["0"]["reward"]) == 2


def test_another_limit_has_its_own_runs_cases_and_target(runs, tmp_path, monkeypatch):
    """They use the preset's warm start and leave the runs with the preset's limit alone."""
    bench, whole = runs
    commands = []
    monkeypatch.setattr(grpo_runs, "ended", lambda command, left: commands.append(command) or True)
    monkeypatch.setattr(grpo_runs, "trl_command", lambda words, vllm: ["trl", *words])
    short = ["sampling.max_new_tokens=8"]
    assert bench("--arms=full,trl", "--seeds=0", "--steps=2", more=short).rows == []
    folder = bench.folder / "8-tokens"
    for command, arm in zip(commands, ("full", "trl"), strict=True):  # no driver.warm
        assert {*short, f"run.root={folder}", f"run.name={arm}-0", "run.steps=2"} < set(command)
        assert "run.resume=true" not in command
        (config,) = (word for word in command if word.startswith("model.path="))
    assert config.removeprefix("model.path=").startswith(str(bench.folder.parent / "warm/small-"))

    lines = [record(i, 1.0, 1.0, seconds) for i, seconds in ((1, 2.0), (2, 2.0))]
    ours, peer = arm_run("full", lines), arm_run("trl", [record(1, 9.0, 1.0, 30.0)])
    out = Bench("grpo", math.nan)
    grpo.merge(out, [ours, peer], {("full", 0): {}, ("trl", 0): {}}, 8)
    assert [row["case"] for row in out.rows] == ["full seed 0, 8 tokens", "trl seed 0, 8 tokens"]
    assert out.got == {"over_trl_hf_x": 15.0} and out.files == {}
    old, new = (
        {
            "meta": {"command": name, "commit": "c", "date": "2026"},
            "rows": of.rows,
            "targets": targets_of("grpo", of.got),
        }
        for name, of in (("old", whole), ("new", out))
    )
    both = joined(old, new)
    assert both["rows"] == [
        {"commit": "c", "date": "2026", **row} for row in (*whole.rows, *out.rows)
    ]
    got = {target["name"]: target["got"] for target in both["targets"]}
    measured = {name: value for name, value in got.items() if value is not None}
    assert measured == {**whole.got, "over_trl_hf_x": 15.0}
    assert both["meta"]["command"] == "old && new"
    assert joined(both, old)["meta"]["command"] == "new && old"  # measured again


def test_a_limit_is_compared_with_the_preset():
    assert grpo.other_limit(["preset=h100", "sampling.max_new_tokens=4096"]) == 0
    assert grpo.other_limit(["preset=h100", "sampling.max_new_tokens=1024"]) == 1024
    assert grpo.other_limit(["preset=h100", "sampling.temperature=0.5"]) == 0


def test_runs_of_two_warm_starts_have_no_ratios(capsys):
    """A line reports it and the count of equal steps is 0; a later difference only counts."""
    lines = [record(i + 1, 8.0, 2.0, 10.0, reward=r) for i, r in enumerate((0.1, 0.2))]
    fast = [record(i + 1, 1.0, 1.0, 2.0, reward=r) for i, r in enumerate((0.1, 0.2))]
    off, memory = arm_run("off", lines), {(arm, 0): {} for arm in ("off", "ngram", "full")}
    for first, lengths in ((fast[0] | {"critic/rewards/mean": 0.3}, None), (fast[0], [[9, 9]] * 2)):
        bench = Bench("grpo", math.nan)
        runs = [off, *(arm_run(arm, [first, fast[1]], lengths) for arm in ("ngram", "full"))]
        grpo.merge(bench, runs, memory)
        said = capsys.readouterr().out
        for arm, row in zip(("ngram", "full"), bench.rows[1:], strict=True):
            assert row["identical_steps"] == 0 and "step_over_off" not in row
            assert f"{arm} seed 0: no ratios: another warm start, or speculation" in said
        assert bench.got["identical_reward_steps"] == 0
        assert "step_over_off_x" not in bench.got
    bench = Bench("grpo", math.nan)
    grpo.merge(
        bench, [off, arm_run("full", [fast[0], {**fast[1], "critic/rewards/mean": 0}])], memory
    )
    assert (bench.got["identical_reward_steps"], bench.got["step_over_off_x"]) == (1, 5.0)
    assert "no ratios" not in capsys.readouterr().out


def test_memory_has_a_prediction(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(load_config(WORDS)))
    lines = [record(i, 1.0, 1.0, 2.0, **{CARD_MEMORY: i / 8}) for i in (1, 2)]
    got = grpo.memory_of(arm_run("full", lines), tmp_path)
    assert got == {"peak_gb": 0.25, "predicted_gb": pytest.approx(0.013, rel=0.1)}
    assert grpo.memory_of(arm_run("full", [record(1, 1.0, 1.0, 2.0)]), tmp_path) == {}


def test_a_run_keeps_the_commits_that_made_it(runs, monkeypatch, tmp_path):
    """A later merge has another commit."""
    monkeypatch.setattr(grpo_runs, "make_warm_start", lambda words, seconds: tmp_path)
    monkeypatch.setattr(grpo_runs, "ended", lambda command, left: True)
    for commit in ("one", "two", "two"):  # is resumed once
        grpo_runs.make_runs([("off", 0)], [], {"off": []}, tmp_path, 2, commit=commit)
    (tmp_path / "off-0").mkdir()
    (tmp_path / "off-0" / "metrics.jsonl").write_text(json.dumps(record(1, 1.0, 1.0, 2.0)) + "\n")
    rollouts = tmp_path / "off-0" / "rollouts.jsonl"
    lines = [{"step": 1, "lengths": [1]}, {"step": 2, "lengths": [2], "checksums": [3]}]
    rollouts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = ArmRun.read("off", 0, tmp_path / "off-0")
    assert run.lengths == [[1], [2]] and run.checksums == []  # an older version began the run
    merged = Bench("grpo", math.nan)
    grpo.merge(merged, [run], {("off", 0): {}})
    assert merged.rows[0]["commit"] == "one, two"


def test_runs_end_at_the_time_limit(runs):
    bench, result = runs
    assert bench("--arms=off", "--seeds=0", "--steps=9", "--seconds=0").rows == result.rows[:1]


def test_a_missing_peer_is_reported_and_left_out(monkeypatch, capsys):
    monkeypatch.setattr(grpo_runs.importlib.util, "find_spec", lambda name: None)
    assert grpo_runs.trl_command([]) is None
    assert "trl, datasets, dill, multiprocess missing: pip install trl" in capsys.readouterr().out
    monkeypatch.undo()


def test_vllm_generates_for_trl_where_it_is_found(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(grpo_runs, "TRL_NEEDS", ())
    assert grpo_runs.trl_command(["a=1"], str(tmp_path)) is None
    assert "trl with vLLM: not run, --vllm" in capsys.readouterr().out
    (tmp_path / "vllm").mkdir()
    command = grpo_runs.trl_command(["a=1"], str(tmp_path))
    assert command[0] == "env" and command[-2:] == ["a=1", "--vllm"]
    assert any(word.startswith(f"PYTHONPATH={tmp_path}") for word in command)
    plain = grpo_runs.trl_command(["a=1"])
    assert plain[0] == grpo_runs.sys.executable and plain[-1] == "a=1"


def test_the_share_of_the_update_that_ran_during_the_rollout_is_in_its_row():
    shares = [{**record(i, 1.0, 1.0, 2.0), "update/hidden_share": 0.1 * i} for i in (1, 2, 6)]
    bench = Bench("grpo", math.nan)
    grpo.merge(bench, [arm_run("full", shares)], {("full", 0): {}})
    assert bench.rows[0]["update_hidden_share"] == 0.2


def test_a_peer_is_compared_by_seconds_a_token():
    ours = arm_run("full", [record(1, 1.0, 1.0, 2.0)], [[10, 10]])
    peer = arm_run("trl", [record(1, 9.0, 1.0, 10.0)], [[5, 5]])
    other = ArmRun("full", 1, [record(1, 1.0, 1.0, 200.0)], [[1]], [])
    bench = Bench("grpo", math.nan)
    memory = {("full", 0): {}, ("full", 1): {}, ("trl", 0): {}}
    grpo.merge(bench, [other, ours, peer], memory)
    assert bench.got["over_trl_hf_x"] == 10.0  # of the same seed
    longer = arm_run("full", [*ours.records, record(2, 1.0, 1.0, 50.0)], [[10, 10], [1, 1]])
    assert over_peer(peer, longer) == 10.0  # over the steps that both have
    assert set(curves([ours, peer])) == {"full", "trl"}


def test_the_parts_of_a_step_are_without_the_first_one():
    steps = [record(1, 1.0, 9.0, 10.0), record(2, 2.0, 1.0, 3.5), record(3, 3.0, 1.0, 4.0)]
    parts = curves([arm_run("full", steps)])["full"]["0"]["parts"]
    assert (parts["gen"], parts["update_actor"], parts["other"]) == (2.5, 1.0, 0.25)
    alone = curves([arm_run("full", steps[:1])])["full"]["0"]["parts"]
    assert (alone["gen"], alone["update_actor"]) == (1.0, 9.0)


def test_the_peer_writes_its_records_after_every_step(tmp_path):
    said = []
    seen = trl_arm.Recorder(tmp_path, said.append)
    seen.rewards, seen.lengths = [0.5, 1.0], [[3], [4]]
    assert finished_steps(tmp_path) == 0
    for step in (1, 2):
        seen.on_step_begin()
        assert seen.timed(trl_arm.GENERATION, lambda: "tokens")() == "tokens"
        seen.timed(trl_arm.REWARDS, lambda: None)()
        seen.on_step_end()
        assert finished_steps(tmp_path) == step
        assert said[-1].startswith(f"step {step}: ended after 0.0 s, update 0.0 s")
    assert "generation ended, 4 tokens in 0.0 s, longest 4, reward 1.000" in said[-2]
    run = ArmRun.read("trl", 0, tmp_path)
    assert run.rewards == [0.5, 1.0] and run.lengths == [[3], [4]]


def test_the_peer_rewards_responses_without_the_end_token(tmp_path):
    class Sevens:
        def reward(self, prompt, text, finished):
            return float(text == prompt * 2 and finished == (prompt == "7"))

    class Decoder:
        def decode(self, ids, skip_special_tokens):
            return "".join(map(str, ids))

    seen = trl_arm.Recorder(tmp_path, print)
    seen.seconds, seen.phase_s = [3.0], {trl_arm.GENERATION: [2.0], trl_arm.REWARDS: [0.5]}
    reward = trl_arm.reward_function(Sevens(), {"a": "7", "b": "5"}, Decoder(), (0,), seen)
    values = reward(completion_ids=[[7, 7, 0], [5, 5], [5]], prompt_id=["a", "b", "b"], more=1)
    assert values == [1.0, 1.0, 0.0]
    (metrics,), (rollout,) = seen.lines()
    assert rollout == {"step": 1, "lengths": [3, 2, 1]}
    times = StepTimes.of(metrics)
    assert (times.phases["update_actor"], times.unaccounted) == (0.5, 0.0)


def test_mistakes(capsys):
    bench = Bench("grpo", math.nan, settings=WORDS, options=["--arms=of"])
    with pytest.raises(SystemExit, match="--arms: 'of' is not one of off, ngram"):
        grpo.run(bench)
    with pytest.raises(SystemExit):
        main(["cpu", "--arms", "off"])
    assert "cpu does not take --arms off" in capsys.readouterr().err

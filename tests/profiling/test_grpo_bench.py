"""The GRPO benchmark: whole on a very small model on the CPU, its figures, its arithmetic."""

import json
import math

import pytest

from driver.config import load_config, to_yaml
from driver.errors import UserError
from driver.memory import CARD_MEMORY
from driver.phases import PHASES, StepTimes
from profiling import grpo_figures, trl_arm
from profiling.bench import Bench, main
from profiling.benches import grpo
from profiling.grpo_arms import (
    ArmRun,
    against_off,
    arm_words,
    curves,
    finished_steps,
    identical_steps,
)

WORDS = [
    "preset=tiny",
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.head_dim=16",
    "model.intermediate_size=64",
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
    assert got["amdahl"] == 2.5  # 1 / (0.2 + 0.8 / 4): what generation alone would make
    assert got["step_over_off"] == 2.0  # a second of each step went elsewhere
    assert got["amdahl_limit"] == 5.0
    shorter = arm_run("full", full.records[:1])
    assert against_off(shorter, off)["step_over_off"] == 2.0  # over the steps that both have


def test_equal_steps_are_counted_up_to_the_first_that_differs():
    lines = [record(i + 1, 1, 1, 2, reward=r) for i, r in enumerate((0.1, 0.2, 0.3))]
    off = arm_run("off", lines)
    assert identical_steps(off, arm_run("full", lines)) == 3
    other = [*lines[:1], {**lines[1], "critic/rewards/mean": 0.25}, lines[2]]
    assert identical_steps(off, arm_run("full", other)) == 1
    # Equal rewards of other responses are not the same step.
    assert identical_steps(off, arm_run("full", lines, [[10, 20], [10, 21], [10, 20]])) == 1


def test_a_row_says_what_holds_a_step_back():
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
        load_config(["preset=h100", *grpo.WARMED, *grpo.RHYTHM, *words])
    assert known["static"][-1] == "bandit.static=learned:4,1,5"
    assert known["ngram"][0] == "engine.strategies=off ngram:6,1,7"
    assert known["full"] == []
    assert "bandit.static=learned:4,4,16" in arm_words(config, "learned:4,4,16")["static"]
    mixed = load_config(["preset=h100", "engine.strategies=off ngram:6,1,7 hybrid:4,4,16"])
    assert arm_words(mixed)["ngram"][0] == "engine.strategies=off ngram:6,1,7"
    with pytest.raises(UserError):
        load_config(["preset=h100", *arm_words(config, "nonsense")["static"]])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Both arms for two steps, `full` stopped behind its first and gone on with."""
    root = tmp_path_factory.mktemp("runs")
    words = [*WORDS, f"run.root={root}"]

    def bench(*options):
        out = Bench("grpo", math.nan, settings=words, options=[*options, f"--runs={root}/grpo"])
        grpo.run(out)
        return out

    bench.folder = root / "grpo"
    bench("--arms=full", "--seeds=0", "--steps=1")
    return bench, bench("--arms=off,full", "--seeds=0", "--steps=2")


def test_arms_run_resume_and_merge(runs, monkeypatch):
    bench, result = runs
    assert [row["case"] for row in result.rows] == ["off seed 0", "full seed 0"]
    assert all(row["steps"] == 2 for row in result.rows)
    assert result.got["identical_reward_steps"] == 2
    assert result.rows[0]["step_over_off"] == 1.0
    assert result.got["step_over_off_x"] == pytest.approx(result.rows[1]["step_over_off"], abs=1e-3)
    assert set(result.got) == {
        "step_over_off_x",
        "rollout_over_off_x",
        "identical_reward_steps",
        "unaccounted_share",
        "heldout_gain_points",
    }
    # What has come to its end is not run again.
    commands = []
    monkeypatch.setattr(grpo, "ended", lambda command, left: commands.append(command) or True)
    again = bench("--arms=off,full", "--seeds=0", "--steps=2")
    assert [command[2] for command in commands] == ["driver.warm"]
    assert again.rows == result.rows
    assert bench("--arms=off,full", "--seeds=0", "--steps=3", "--merge").rows == result.rows


def test_the_command_writes_the_result(runs, tmp_path, monkeypatch):
    bench, _ = runs
    monkeypatch.setattr(grpo, "NEEDS_CUDA", False, raising=False)
    options = ["--arms", "off,full", "--seeds", "0", "--merge", "--runs", str(bench.folder)]
    assert main(["grpo", *options, "--out", str(tmp_path), "--set", "preset=tiny"]) == 0
    result = json.loads((tmp_path / "cpu" / "grpo.json").read_text())
    assert result["meta"]["command"].startswith("python -m profiling.bench grpo --set preset=tiny")
    assert " ".join(options) in result["meta"]["command"]
    got = {target["name"]: target["got"] for target in result["targets"]}
    assert got["identical_reward_steps"] == 2 and got["over_trl_hf_x"] is None
    written = json.loads((tmp_path / "cpu" / "grpo-curves.json").read_text())
    assert len(written["full"]["0"]["reward"]) == 2


def test_memory_stands_beside_its_prediction(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(load_config(WORDS)))
    lines = [record(i, 1.0, 1.0, 2.0, **{CARD_MEMORY: i / 8}) for i in (1, 2)]
    got = grpo.memory_of(arm_run("full", lines), tmp_path)
    assert got["peak_gb"] == 0.25 and 0.02 < got["predicted_gb"] < 0.1
    assert grpo.memory_of(arm_run("full", [record(1, 1.0, 1.0, 2.0)]), tmp_path) == {}


def test_time_that_is_up_ends_the_runs(runs):
    bench, result = runs
    assert bench("--arms=off", "--seeds=0", "--steps=9", "--seconds=0").rows == result.rows[:1]


def test_figures_are_drawn(runs, tmp_path):
    _, result = runs
    (tmp_path / "grpo-curves.json").write_text(json.dumps(result.files["curves"]))
    paths = grpo_figures.draw(tmp_path)
    assert [path.name for path in paths] == [
        "grpo-reward.png",
        "grpo-reward-wall.png",
        "grpo-parts.png",
    ]
    assert all(path.stat().st_size > 5000 for path in paths)
    assert grpo_figures.draw(tmp_path / "nowhere") == []


def test_a_peer_that_is_missing_costs_its_own_row(monkeypatch, capsys):
    monkeypatch.setattr(grpo.importlib.util, "find_spec", lambda name: None)
    assert grpo.trl_command([]) is None
    assert "trl, datasets, dill, multiprocess missing: pip install trl" in capsys.readouterr().out
    monkeypatch.undo()


def test_peer_over_ours_is_by_token():
    ours = arm_run("full", [record(1, 1.0, 1.0, 2.0)], [[10, 10]])
    peer = arm_run("trl", [record(1, 9.0, 1.0, 10.0)], [[5, 5]])
    bench = Bench("grpo", math.nan)
    grpo.merge(bench, [ours, peer], {("full", 0): {}, ("trl", 0): {}})
    assert bench.got["over_trl_hf_x"] == 10.0
    assert set(curves([ours, peer])) == {"full", "trl"}


def test_peer_s_records_are_there_after_every_step(tmp_path):
    seen = trl_arm.Recorded(rewards=[0.5, 1.0], lengths=[[3], [4]])
    clock = trl_arm.StepClock(seen, tmp_path)
    for step in (1, 2):
        clock.on_step_begin()
        seen.gen_s.append(0.0)
        seen.reward_s.append(0.0)
        clock.on_step_end()
        assert finished_steps(tmp_path) == step
    run = ArmRun.read("trl", 0, tmp_path)
    assert run.rewards == [0.5, 1.0] and run.lengths == [[3], [4]]


def test_peer_notes_rewards_without_the_end_token():
    class Sevens:
        def reward(self, prompt, text):
            return float(text == prompt * 2)

    class Decoder:
        def decode(self, ids, skip_special_tokens):
            return "".join(map(str, ids))

    seen = trl_arm.Recorded(seconds=[3.0], gen_s=[2.0], reward_s=[0.5])
    reward = trl_arm.reward_function(Sevens(), {"a": "7", "b": "5"}, Decoder(), (0,), seen)
    values = reward(completion_ids=[[7, 7, 0], [5, 5], [5]], prompt_id=["a", "b", "b"], more=1)
    assert values == [1.0, 1.0, 0.0]
    (metrics,), (rollout,) = seen.lines()
    assert rollout == {"step": 1, "lengths": [3, 2, 1]}
    times = StepTimes.of(metrics)
    assert (times.phases["update_actor"], times.unaccounted) == (0.5, 0.0)


def test_mistakes(capsys):
    bench = Bench("grpo", math.nan, settings=WORDS, options=["--arms=of"])
    with pytest.raises(SystemExit, match="--arms: 'of' is none of off, ngram"):
        grpo.run(bench)
    with pytest.raises(SystemExit):
        main(["cpu", "--arms", "off"])
    assert "cpu does not take --arms off" in capsys.readouterr().err

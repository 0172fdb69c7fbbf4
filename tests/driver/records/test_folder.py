import errno
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from driver.common.errors import UserError
from driver.config.load import load_config
from driver.config.sections import BanditConfig
from driver.config.strategy import OFF
from driver.records import checkpoint as run_checkpoint
from driver.records import folder as run_folder
from driver.records.checkpoint import latest_checkpoint, save_checkpoint, whole_checkpoints
from driver.records.folder import RunFolder, Sample, read_jsonl
from driver.records.parts import save_parts
from driver.rollout.bandit import Bandit
from driver.rollout.request import Request, Response, SamplingParams

SAMPLE = Sample("t-1", "1+1=", "<b>2</b>\nüñ", 1.0, 3, "stop")


def config(root, *words):
    return load_config([f"run.root={root}", *words])


def write_policy(folder):
    (folder / "config.json").write_text("{}")
    save_file({"weight": torch.arange(4096.0)}, folder / "model.safetensors")


def states(step):
    return {"trainer": {"moment": torch.full((2000,), float(step))}, "bandit": {"arms": [1, None]}}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def full_disk(limit):
    """Every file of this process stops growing at `limit` bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_metrics_are_json_lines_and_the_same_in_tensorboard(tmp_path):
    folder = RunFolder(config(tmp_path))
    folder.log_step(1, {"critic/rewards/mean": 0.25, "actor/lr": torch.tensor(0.5)})
    folder.log_step(2, {"critic/rewards/mean": float("nan"), "actor/lr": float("inf")})
    folder.close()
    assert folder.path == tmp_path / "tiny"
    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    strict = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert strict == [
        {"step": 1, "critic/rewards/mean": 0.25, "actor/lr": 0.5},
        {"step": 2, "critic/rewards/mean": None, "actor/lr": None},
    ]
    board = EventAccumulator(str(folder.path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in board.Scalars("actor/lr")] == [(1, 0.5), (2, float("inf"))]
    assert board.Scalars("critic/rewards/mean")[0].value == 0.25


def test_samples_summary_and_config_are_written(tmp_path):
    settings = config(tmp_path, "run.name=a", "grpo.lr=3e-4")
    folder = RunFolder(settings)
    folder.log_samples(1, [SAMPLE])
    folder.write_summary({"accuracy": [0.5, float("nan")], "tokens": 7})
    (record,) = read_jsonl(folder.path / "samples.jsonl")
    assert record["response"] == SAMPLE.response
    assert record["step"] == 1
    assert SAMPLE.response in (folder.path / "samples.txt").read_text(encoding="utf-8")
    summary = json.loads((folder.path / "summary.json").read_text())
    assert summary == {"accuracy": [0.5, None], "tokens": 7}
    assert load_config([f"preset={folder.path / 'config.yaml'}"]).grpo == settings.grpo
    assert names(folder.path) == [
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "rollouts.jsonl",
        "samples.jsonl",
        "samples.txt",
        "summary.json",
        "tensorboard",
    ]


def response(tokens, logprob):
    return Response(Request(0, 0, (1,), SamplingParams()), tokens, [logprob] * len(tokens), "stop")


def test_a_rollout_is_kept_without_repeated_passes(tmp_path):
    folder = RunFolder(config(tmp_path))
    passes = [(0.0, 2, "off"), (0.1, 2, "off"), (0.2, 1, "off"), (0.3, 1, "ngram:4,1,5")]
    responses = [response([4, 5, 6], -0.5), response([4, 5, 6], -0.25), response([4, 5, 7], -0.5)]
    folder.log_rollout(1, responses, [*passes, (0.4, 0, "off")])
    (record,) = read_jsonl(folder.path / "rollouts.jsonl")
    assert record["lengths"] == [3, 3, 3]
    assert len(set(record["checksums"])) == 3
    assert record["checksums"][0] == response([4, 5, 6], -0.5).checksum
    assert record["active"] == [
        [0.0, 2, "off"],
        [0.2, 1, "off"],
        [0.3, 1, "ngram:4,1,5"],
        [0.4, 0, "off"],
    ]


def test_a_run_never_writes_over_another(tmp_path):
    first, second = RunFolder(config(tmp_path)), RunFolder(config(tmp_path))
    assert (first.path.name, second.path.name) == ("tiny", "tiny-2")
    with pytest.raises(UserError, match="run.name: .*tiny already contains a run; set run.resume"):
        RunFolder(config(tmp_path, "run.name=tiny"))


def test_no_run_has_the_folder_of_warm_starts(tmp_path):
    """A run that fails at its start removes its folder."""
    with pytest.raises(UserError, match="run.name=warm: is the folder of warm starts"):
        RunFolder(config(tmp_path, "run.name=warm"))
    preset = tmp_path / "warm.yaml"
    preset.write_text("")
    assert RunFolder(config(tmp_path, f"preset={preset}")).path.name == "warm-2"


def test_checkpoint_holds_what_was_given_and_keeps_the_last(tmp_path):
    for step in (2, 4, 6):
        save_checkpoint(tmp_path, step, write_policy, states(step), keep=2)
    assert names(tmp_path) == ["step-000004", "step-000006"]
    latest = latest_checkpoint(tmp_path)
    assert latest.step == 6
    assert torch.equal(latest.state("trainer")["moment"], torch.full((2000,), 6.0))
    assert latest.state("bandit") == {"arms": [1, None]}
    assert names(latest.path) == ["checkpoint.json", "config.json", "model.safetensors", "state"]
    files = [path for path in latest.path.rglob("*") if path.is_file()]
    assert {path.stat().st_mode for path in files} == {(latest.path / "config.json").stat().st_mode}


def test_half_written_checkpoints_are_ignored_and_removed(tmp_path):
    save_checkpoint(tmp_path, 3, write_policy, states(3), keep=3)
    (tmp_path / ".new-step-000009").mkdir()
    (tmp_path / ".gone-step-000001").mkdir()
    (tmp_path / "step-000008").mkdir()  # no mark
    (tmp_path / "step-000007").write_text("")
    assert latest_checkpoint(tmp_path).step == 3
    run_checkpoint.clean_checkpoints(tmp_path)
    assert names(tmp_path) == ["step-000003", "step-000007", "step-000008"]


def test_a_folder_that_is_no_whole_checkpoint_gives_way_to_one(tmp_path):
    (tmp_path / "step-000003").mkdir()
    (tmp_path / "step-000003" / "config.json").write_text("copied in part")
    assert latest_checkpoint(tmp_path) is None
    save_checkpoint(tmp_path, 3, write_policy, states(3), keep=1)
    assert latest_checkpoint(tmp_path).step == 3
    assert names(tmp_path) == ["step-000003"]


def test_a_damaged_policy_is_one_line(tmp_path):
    saved = save_checkpoint(tmp_path, 3, write_policy, states(3), keep=1)
    path = saved.path / "config.json"
    path.write_text("{")
    with pytest.raises(UserError, match="config.json: cannot be read .*; or remove .*step-000003"):
        saved.check()
    path.unlink()
    with pytest.raises(UserError, match="config.json: cannot be read .No such file"):
        saved.check()


def test_a_damaged_state_is_one_line(tmp_path):
    saved = save_checkpoint(tmp_path, 3, write_policy, states(3), keep=1)
    path = saved.path / "state" / "trainer.pt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="trainer.pt: cannot be read .* remove .*step-000003"):
        saved.state("trainer")
    with pytest.raises(UserError, match="drafter.pt: cannot be read"):
        saved.state("drafter")


def test_missing_parts_of_an_earlier_state_are_named(tmp_path):
    bandit = Bandit([OFF], BanditConfig(), 8)
    state = bandit.state_dict()
    del state["seen"]
    saved = save_checkpoint(tmp_path, 3, write_policy, {"bandit": state}, keep=1)
    lacks = "bandit.pt lacks 'seen', an earlier version wrote it; .* model.path=.*step-000003"
    with pytest.raises(UserError, match=lacks):
        saved.restore("bandit", bandit.load_state_dict)


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from driver.records.checkpoint import save_checkpoint
    from tests.driver.records.test_folder import states, write_policy

    def killed(folder):
        write_policy(folder)
        os.kill(os.getpid(), signal.SIGKILL)

    folder = Path(sys.argv[1])
    save_checkpoint(folder, 1, write_policy, states(1), 2)
    save_checkpoint(folder, 2, killed, states(2), 2)
"""


def test_kill_minus_nine_during_a_checkpoint_keeps_the_previous_one(tmp_path):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)])
    assert done.returncode == -signal.SIGKILL
    assert ".new-step-000002" in names(tmp_path)
    assert latest_checkpoint(tmp_path).step == 1
    save_checkpoint(tmp_path, 2, write_policy, states(2), 2)
    assert [whole.step for whole in whole_checkpoints(tmp_path)] == [1, 2]
    assert names(tmp_path) == ["step-000001", "step-000002"]


def test_resume_cuts_the_logs_back_to_the_checkpoint(tmp_path):
    words = ["run.name=a"]
    folder = RunFolder(config(tmp_path, *words))
    assert folder.resumed is None
    (folder.path / "trace.json").write_text("{}")
    for step in range(5):
        folder.log_step(step, {"x": float(step)})
        folder.log_samples(step, [SAMPLE])
        if step == 2:
            save_checkpoint(folder.checkpoints, step, write_policy, states(step), 2)
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "x"')  # killed while it wrote
    folder.close()
    with pytest.warns(UserWarning, match="/a: dropped .*: 3 of metrics.jsonl, 2 of samples.jsonl;"):
        again = RunFolder(config(tmp_path, *words, "run.resume=true", "run.steps=99"))
    assert again.resumed.step == 2
    assert (again.path / "trace-2.json").read_text() == "{}"
    assert not (again.path / "trace.json").exists()
    assert [r["step"] for r in read_jsonl(again.path / "metrics.jsonl")] == [0, 1, 2]
    assert [r["step"] for r in read_jsonl(again.path / "samples.jsonl")] == [0, 1, 2]
    assert (again.path / "samples.txt").read_text(encoding="utf-8").count("=== step") == 3
    again.log_step(3, {"x": 30.0})
    again.close()
    assert [r["x"] for r in read_jsonl(again.path / "metrics.jsonl")] == [0, 1, 2, 30]
    board = EventAccumulator(str(again.path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in board.Scalars("x")] == [(0, 0), (1, 1), (2, 2), (3, 30)]


def test_resume_without_a_checkpoint_starts_over(tmp_path):
    folder = RunFolder(config(tmp_path))
    folder.log_step(1, {"x": 1.0})
    folder.close()
    again = RunFolder(config(tmp_path, "run.resume=true"))
    assert (again.path, again.resumed) == (folder.path, None)
    assert read_jsonl(again.path / "metrics.jsonl") == []


def test_two_at_once_do_not_share_a_folder(tmp_path):
    """The second would cut what the first logs after its checkpoint."""
    folder = RunFolder(config(tmp_path, "run.name=a"))
    folder.log_step(1, {"x": 1.0})
    with pytest.raises(UserError, match="a: another run is using it; wait until it ends"):
        RunFolder(config(tmp_path, "run.name=a", "run.resume=true"))
    folder.log_step(2, {"x": 2.0})
    folder.close()
    assert len(read_jsonl(folder.path / "metrics.jsonl")) == 2
    RunFolder(config(tmp_path, "run.name=a", "run.resume=true")).close()


def test_a_run_that_starts_at_the_same_time_is_not_removed(tmp_path, monkeypatch):
    """Both have found the name free."""
    folder = RunFolder(config(tmp_path))
    monkeypatch.setattr(run_folder, "_choose", lambda *_: folder.path)
    with pytest.raises(UserError, match="tiny: another run is using it"):
        RunFolder(config(tmp_path))
    folder.log_step(1, {"x": 1.0})
    folder.close()


def test_resume_refuses_other_settings_and_missing_runs(tmp_path):
    RunFolder(config(tmp_path, "run.name=a")).close()
    with pytest.raises(UserError, match="grpo.lr: 0.5 now, 0.0004 in .*config.yaml"):
        RunFolder(config(tmp_path, "run.name=a", "run.resume=true", "grpo.lr=0.5"))
    with pytest.raises(UserError, match="run.seed: 1 now, 0 in"):
        RunFolder(config(tmp_path, "run.name=a", "run.resume=true", "run.seed=1"))
    # What changes no token of the policy may be another: ranks, engine, memory, reward workers.
    words = ["engine.max_batch=7", "engine.strategies=off", "grpo.micro_batch_tokens=99"]
    words += ["reward.on_error=zero", "model.cache=x", "spot.mode=coordinated"]
    RunFolder(config(tmp_path, "run.name=a", "run.resume=true", *words)).close()
    RunFolder(config(tmp_path, "run.name=a", "run.resume=true", "spot.mode=serial"))
    with pytest.raises(UserError, match="run.resume: .*/b contains no run"):
        RunFolder(config(tmp_path, "run.name=b", "run.resume=true"))
    for text, reason in (
        ("run: {steps: many}", "run.steps: must be an integer, got 'many'; restore or correct it"),
        ("spot: {every: 0}", "spot.every: must be at least 1, got 0; restore or correct it"),
        ("run: [", "not YAML"),
    ):
        (tmp_path / "a" / "config.yaml").write_text(text)
        with pytest.raises(UserError, match=f"a/config.yaml: {reason}"):
            RunFolder(config(tmp_path, "run.name=a", "run.resume=true"))
    (tmp_path / "a" / "config.yaml").write_text("")
    with pytest.raises(UserError, match="a/config.yaml: has no settings; restore it"):
        RunFolder(config(tmp_path, "run.name=a", "run.resume=true"))
    with pytest.raises(UserError, match="run.resume: no run tiny under"):
        RunFolder(config(tmp_path, "run.resume=true"))


def test_a_file_in_place_of_the_folder_is_one_line(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(UserError, match=r"runs/tiny: cannot be written \(Not a directory\)"):
        RunFolder(config(tmp_path / "runs"))


@pytest.mark.parametrize("limit", [1000, 10_000, 20_000])
def test_full_disk_leaves_no_half_written_checkpoint(tmp_path, limit):
    # The limits stop safetensors' stream, torch's stream, and torch's second file.
    save_checkpoint(tmp_path, 1, write_policy, states(1), keep=1)
    large = {"trainer": {"moment": torch.zeros(4000)}, "drafter": {"w": torch.zeros(9000)}}
    with full_disk(limit), pytest.raises(UserError, match="step-000002: cannot be written"):
        save_checkpoint(tmp_path, 2, write_policy, large, keep=1)
    assert names(tmp_path) == ["step-000001"]
    assert latest_checkpoint(tmp_path).state("bandit") == {"arms": [1, None]}


def test_no_space_left_is_named(tmp_path):
    def write_full(folder):
        with open("/dev/full", "w") as file:
            file.write("x")

    with pytest.raises(UserError, match=r"No space left on device\); free space or choose another"):
        save_checkpoint(tmp_path, 2, write_full, {}, keep=1)
    assert names(tmp_path) == []


def test_parts_without_space_are_one_line(tmp_path):
    with full_disk(1000), pytest.raises(UserError, match="w: cannot be written .*; free space or"):
        save_parts(tmp_path / "w", {"weight": {"w": torch.zeros(4000)}}, None)


def test_a_disk_that_fills_up_as_torch_closes_its_file_is_named(tmp_path):
    def write(folder):
        raise RuntimeError("basic_ios::clear: iostream error")

    with pytest.raises(UserError, match="step-000002: cannot be written .the file is incompl"):
        save_checkpoint(tmp_path, 2, write, {}, keep=1)


def test_full_disk_while_logging_is_one_line(tmp_path):
    folder = RunFolder(config(tmp_path))
    folder.log_step(1, {"x": 1.0})
    folder.write_summary({"whole": 1})
    with full_disk(40):
        with pytest.raises(UserError, match="metrics.jsonl: cannot be written"):
            folder.log_step(2, {"x" * 50: 1.0})
        with pytest.raises(UserError, match="summary.json: cannot be written"):
            folder.write_summary({"x" * 100: 1})
    assert json.loads((folder.path / "summary.json").read_text()) == {"whole": 1}
    assert [r["step"] for r in read_jsonl(folder.path / "metrics.jsonl")] == [1]


class FullFile:
    """A log whose last lines do not fit on the disk any more."""

    def close(self):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_folder_is_given_up_and_goes_even_when_the_disk_is_full(tmp_path):
    folder = RunFolder(config(tmp_path))
    folder._board.close()
    folder._board = FullFile()
    with pytest.raises(UserError, match="cannot be written .No space left on device"):
        folder.close()
    assert folder._lock._handle is None
    with pytest.warns(UserWarning, match="the cleanup after an error failed .*No space left"):
        folder.discard()
    assert not folder.path.exists()


def test_a_fault_of_ours_is_not_called_a_full_disk(tmp_path):
    def broken(folder):
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        save_checkpoint(tmp_path, 1, broken, {}, keep=1)
    assert os.listdir(tmp_path) == []


def test_a_broken_line_names_its_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for damaged in (b'{"step": ', b"\xff"):
        path.write_bytes(b'{"step": 1}\n' + damaged + b'\n{"step": 3}\n')
        with pytest.raises(UserError, match="metrics.jsonl:2: not a JSON object"):
            read_jsonl(path)


def test_a_sample_without_its_prompt_is_named(tmp_path):
    words = [f"run.root={tmp_path}", "run.name=it"]
    RunFolder(load_config(words)).close()
    (tmp_path / "it" / "samples.jsonl").write_text('{"step": -1}\n')
    with pytest.raises(UserError, match="samples.jsonl lacks 'prompt_id', .*; remove it"):
        RunFolder(load_config([*words, "run.resume=true"]))


def test_a_resumed_run_may_change_its_batch_but_not_the_rule_of_verification(tmp_path):
    words = [f"run.root={tmp_path}", "run.name=it", "engine.strategies=off learned:4,1,5"]
    RunFolder(load_config(words)).close()
    words += ["run.resume=true", "engine.max_batch=3"]
    RunFolder(load_config(words)).close()
    with pytest.raises(UserError, match="engine.verify: rejection now, shared in"):
        RunFolder(load_config([*words, "engine.verify=rejection"]))


def test_a_resumed_run_has_the_same_data_and_model(tmp_path):
    """By contents: other data under the same name is refused, the same folder by another is not."""
    data = tmp_path / "data"
    data.mkdir()
    words = [f"run.root={tmp_path / 'runs'}", "run.name=it", f"task.path={data}"]
    folder = RunFolder(load_config(words))
    folder.check_inputs({"task.path": "a", "model.path": "b"})
    folder.close()
    words[2] = f"task.path={data.parent / '.' / 'data'}/"
    again = RunFolder(load_config([*words, "run.resume=true"]))
    again.check_inputs({"task.path": "a", "model.path": "b"})
    with pytest.raises(UserError, match="model.path: its contents have changed since the run in"):
        again.check_inputs({"task.path": "a", "model.path": "other"})
    again.close()

"""Signals, errors and damage: what a run keeps, and what it says."""

import json
import math
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from driver import train
from driver.common.errors import SharedWarning, UserError
from driver.common.stop import Stopped, StopRequest
from driver.common.world import World
from driver.records.folder import read_jsonl
from driver.records.progress import step_line
from driver.run.collector import Collector
from driver.run.run import Run
from driver.tasks.workers import RewardWorkers
from tests.driver.run.test_run import WORDS, rolled_out, run

ROOT = Path(__file__).parents[3]


def steps(folder: Path) -> list[int]:
    return [record["step"] for record in read_jsonl(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return run(tmp_path_factory.mktemp("runs"), "whole", "run.steps=3")


def signalled_after(step: int, number: signal.Signals, monkeypatch) -> None:
    """Sends this process a signal in the rollout behind a step."""
    whole = Collector.on_pass

    def on_pass(self, active, passes=1):
        if self.prompts_drawn == 3 * (step + 1):
            signal.raise_signal(number)
        whole(self, active, passes)

    monkeypatch.setattr(Collector, "on_pass", on_pass)


@pytest.fixture
def number(request):
    """A signal with its default handler; a background job of a shell ignores SIGINT."""
    before = signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, before)


STOPPING = [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT]


@pytest.mark.parametrize("number", STOPPING, indirect=True)
def test_a_signal_saves_the_last_whole_step(unbroken, tmp_path, monkeypatch, number):
    with monkeypatch.context() as patch:
        signalled_after(1, number, patch)
        line = f"stopped by {number.name} after step 1: step 1 is saved"
        with pytest.raises(Stopped, match=line) as stopped:
            run(tmp_path, "it", "run.steps=3", "run.checkpoint_every=0")
        assert stopped.value.exit_code == 128 + number
    assert steps(tmp_path / "it") == [0, 1]
    run(tmp_path, "it", "run.steps=3", "run.checkpoint_every=0", "run.resume=true")
    assert steps(tmp_path / "it") == [0, 1, 2, 3]
    assert rolled_out(tmp_path / "it") == rolled_out(unbroken.folder.path)


@pytest.mark.parametrize(
    ("phase", "step"), [("gather", 0), ("finish_bubble", 1), ("evaluate", 2), ("log", 2)]
)
def test_a_run_that_an_error_ended_resumes_to_the_same_records(
    unbroken, tmp_path, monkeypatch, phase, step
):
    """What is saved after an error has the prompts and the record of each of its steps."""
    whole, words = getattr(Run, phase), ["run.steps=3", "run.checkpoint_every=0"]

    def failing(self, *args):
        if self.step == step:
            raise UserError("it failed")
        return whole(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Run, phase, failing)
        with pytest.raises(UserError, match="it failed"):
            run(tmp_path, "it", *words)
    run(tmp_path, "it", *words, "run.resume=true")
    assert steps(tmp_path / "it") == [0, 1, 2, 3]
    assert rolled_out(tmp_path / "it") == rolled_out(unbroken.folder.path)


@pytest.mark.parametrize(("name", "code"), [((), 130), (("SIGTERM",), 143)])
def test_a_signal_during_the_warm_up_says_that_nothing_is_saved(tmp_path, monkeypatch, name, code):
    def interrupted(*_):
        raise KeyboardInterrupt(*name)

    monkeypatch.setattr("driver.run.warm_start.warm_up", interrupted)
    with pytest.raises(Stopped, match="while the run was prepared: nothing new is saved") as error:
        run(tmp_path, "it", "warmup.steps=9")
    assert error.value.exit_code == code and not (tmp_path / "it").exists()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])  # three imports
def test_a_process_that_gets_sigterm_saves_and_says_so(tmp_path, ranks):
    """The real command, and the same under torchrun, which passes the signal on to its ranks."""
    words = [*WORDS, f"run.root={tmp_path}", "run.name=it", "run.steps=1000"]
    several = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command = [sys.executable, "-m", *(several if ranks > 1 else []), "driver.train", *words]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    metrics = tmp_path / "it" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and len(steps(tmp_path / "it")) > 2):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert "stopped by SIGTERM after step" in output, output
    if ranks == 1:
        assert process.returncode == 143
    last = steps(tmp_path / "it")[-1]
    assert (tmp_path / "it" / "checkpoints" / f"step-{last:06d}" / "checkpoint.json").exists()


def test_a_second_signal_ends_at_once():
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.name == "SIGTERM"
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_that_the_shell_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert not stop.name
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_error_in_a_later_step_saves_what_was_learned(tmp_path, monkeypatch, capsys):
    scored = RewardWorkers.collect

    def collect(self, count):
        collect.calls += 1
        if collect.calls == 6:
            raise UserError("the reward failed")
        return scored(self, count)

    collect.calls = 0
    monkeypatch.setattr(RewardWorkers, "collect", collect)
    monkeypatch.setattr(
        Collector,
        "rewards",
        lambda self, prompts, responses: (
            [collect(self.workers, 0)] and [len(r.token_ids) / 10.0 for r in responses]
        ),
    )
    with pytest.raises(UserError, match="the reward failed"):
        run(tmp_path, "it", "run.steps=9", "run.checkpoint_every=0", "run.eval_every=0")
    last = steps(tmp_path / "it")[-1]
    assert last >= 2
    assert (tmp_path / "it" / "checkpoints" / f"step-{last:06d}").is_dir()
    assert f"ended after step {last}: step {last} is saved, run.res" in capsys.readouterr().out


def test_the_warm_up_is_saved(tmp_path, monkeypatch):
    """A run that ends in its first step has its warm-up on the disk."""
    signalled_after(0, signal.SIGTERM, monkeypatch)
    with pytest.raises(Stopped, match="after step 0: step 0 is saved"):
        run(tmp_path, "it", "run.steps=2")
    assert (tmp_path / "it" / "checkpoints" / "step-000000").is_dir()


@pytest.mark.figures
def test_a_resumed_run_keeps_what_was_measured_and_sums_its_time(tmp_path):
    first = run(tmp_path, "it", "run.steps=3", "run.checkpoint_every=2")
    seconds = json.loads((tmp_path / "it" / "summary.json").read_text())["wall_s"]["wall"]
    saved = tmp_path / "it" / "checkpoints" / "step-000003"
    for path in sorted(saved.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    saved.rmdir()
    again = run(tmp_path, "it", "run.steps=3", "run.checkpoint_every=2", "run.resume=true")
    summary = json.loads((tmp_path / "it" / "summary.json").read_text())
    assert summary["wall_s"]["wall"] > seconds / 2
    assert summary["wall_s"]["warmup"] == pytest.approx(first.phases.total["warmup"])
    assert again.step == 3 and again.correct == first.correct
    replaced = read_jsonl(tmp_path / "it" / "metrics.replaced.jsonl")
    assert [record["step"] for record in replaced] == [3]


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "state/trainer.pt",
        "state/parts/shard-00001-model-00001-of-00001.safetensors",
    ],
)
def test_a_flipped_bit_in_a_checkpoint_is_found(tmp_path, name):
    run(tmp_path, "it", "run.steps=1")
    path = tmp_path / "it" / "checkpoints" / "step-000001" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"{name}: damaged since it was written; remove"):
        run(tmp_path, "it", "run.steps=2", "run.resume=true")


@pytest.mark.parametrize("text", ["{", "[]"])
@pytest.mark.parametrize("name", ["checkpoints/step-000001/checkpoint.json", "inputs.json"])
def test_a_damaged_json_file_is_named_in_one_line(tmp_path, name, text):
    run(tmp_path, "it", "run.steps=1")
    (tmp_path / "it" / name).write_text(text)
    with pytest.raises(UserError, match=f"{name}: (cannot be read|wanted a JSON object)"):
        run(tmp_path, "it", "run.steps=2", "run.resume=true")


def test_weights_that_are_not_finite_end_the_run_and_keep_the_checkpoint(tmp_path, monkeypatch):
    whole = Run.update_policy

    def damaged(self, step):
        if self.step == 2:
            with torch.no_grad():
                next(self.policy.parameters())[0, 0] = math.nan
        return whole(self, step)

    monkeypatch.setattr(Run, "update_policy", damaged)
    with pytest.raises(UserError, match="step 3: the policy's weights are not finite"):
        run(tmp_path, "it", "run.steps=9", "run.checkpoint_every=1")
    kept = sorted(path.name for path in (tmp_path / "it" / "checkpoints").iterdir())
    assert kept[-1] == "step-000002"


def test_updates_that_are_not_finite_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("driver.policy.weights.torch.isfinite", lambda x: torch.tensor(False))
    monkeypatch.setattr(
        "driver.policy.weights.nn.utils.clip_grad_norm_",
        lambda *_: torch.tensor(math.inf),
    )
    with pytest.warns(UserWarning), pytest.raises(UserError, match="step 3: .* in 3 updates in a"):
        run(tmp_path, "it", "run.steps=9")


@pytest.mark.parametrize(
    ("name", "text"), [("WORLD_SIZE", ""), ("WORLD_SIZE", "two"), ("WORLD_SIZE", "-1")]
)
def test_the_number_of_ranks_is_a_number(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(UserError, match=f"{name}={text!r}: expected a whole number"):
        World.join("cpu", 1.0)


def test_a_rank_number_without_a_number_of_ranks_is_ignored(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "3")
    assert World.is_first() and World.join("cpu", 1.0).size == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_what_all_ranks_warn_of_is_shown_by_the_first(monkeypatch, rank):
    def warn(*of):
        warnings.warn("the whole run", SharedWarning, stacklevel=1)
        warnings.warn("this rank", stacklevel=1)
        raise UserError("done")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(train, "train", warn)
    with warnings.catch_warnings(record=True) as shown, pytest.raises(UserError, match="done"):
        train.main(["preset=tiny"])
    assert [str(w.message) for w in shown] == ["the whole run", "this rank"][rank:]


def test_a_port_that_is_taken_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for name, value in {
            "WORLD_SIZE": 2,
            "RANK": 0,
            "LOCAL_RANK": 0,
            "MASTER_PORT": port,
        }.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        with pytest.raises(UserError, match=f"MASTER_PORT={port}: another program"):
            World.join("cpu", 5.0)


def test_a_step_line_ends_between_two_cells():
    values = {"critic/rewards/mean": 0.123, "response_length/mean": 330, "perf/throughput": 12345.0}
    whole = step_line(7, values)
    lines = step_line(7, values, width=24).split("\n")
    assert len(lines) > 1 and max(map(len, lines)) <= 24
    assert " ".join(" ".join(lines).split()) == " ".join(whole.split())
    assert all(cell in "\n".join(lines) for cell in ("reward 0.123", "length 330", "tok/s 12345"))

"""The whole loop on a very small model: it runs, resumes to the same tokens, leaves records."""

import gc
import json
import operator
import re
import shutil
import signal
import threading
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from driver.common.errors import UserError
from driver.common.host_copies import HostCopies
from driver.common.storage import storage_errors
from driver.config.load import load_config
from driver.drafter import checkpoint as draft_checkpoint
from driver.drafter.trainer import SpotTrainer
from driver.records.folder import read_jsonl
from driver.records.phases import PHASES, StepTimes
from driver.records.progress import Progress
from driver.rollout.draft_runner import DraftRunner
from driver.run import run as run_module
from driver.run import start as start_module
from driver.run.collector import Collector
from driver.run.run import Run
from driver.run.summary import summary_lines
from driver.run.warm_start import warm_start
from driver.train import train
from tests.driver.poison import poison
from tests.forks import run_ranks

REWARDS = Collector.rewards
WORDS = [
    "model.hidden_size=32",
    "model.num_layers=2",
    "warmup.steps=12",
    "warmup.batch=16",
    "run.eval_prompts=4",
    "run.eval_every=2",
    "run.checkpoint_every=2",
    "grpo.prompts_per_step=3",
    "grpo.samples_per_prompt=4",
    "grpo.lr=3e-3",
    "sampling.max_new_tokens=24",
    "engine.strategies=off ngram:4,1,5 learned:4,2,8",
    "engine.page_size=8",
    "spot.tokens_per_step=64",
    "spot.final_steps=2",
]
LEARNED = ["bandit.policy=learned:4,2,8"]  # once there is a drafter
KILL = """
import os, signal, sys
from driver.run import collector
from driver.run import run, start
from driver.train import main
from tests.driver.run.test_run import share_of_ones

collector.Collector.rewards = share_of_ones
if sys.argv.pop(1) == "beside":
    start.CheckpointWriter = lambda threaded, kind=start.CheckpointWriter: kind(threaded=True)

whole = run.Run.checkpoint
def checkpoint(self):
    if self.step == 4:  # in the middle of the second checkpoint, policy written, states not
        save = self.blank.save_pretrained
        kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
        self.blank.save_pretrained = lambda *a, **k: (save(*a, **k), kill())
    whole(self)
run.Run.checkpoint = checkpoint
main(sys.argv[1:])
"""


def share_of_ones(self, prompts, responses):
    """Rewards that differ within every group: a model this small gets no sum right, and without a
    gradient a run that restores nothing looks like one that restores all."""
    texts = [self.text(response) for response in responses]
    return [text.count("1") / (1 + len(text)) for text in texts]


@pytest.fixture(scope="module", autouse=True)
def mixed_rewards():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collector, "rewards", share_of_ones)
        yield


def run(root: Path, name: str, *words: str):
    config = load_config([*WORDS, f"run.root={root}", f"run.name={name}", *words])
    return train(config, Progress(config.run.steps))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return run(tmp_path_factory.mktemp("runs"), "whole", "run.steps=5")


def history(folder: Path):
    """Per step: reward, checksums of responses, held-out accuracy; and every sample text."""
    keys = ["critic/rewards/mean", "response_length/mean", "response_length/max", "eval/accuracy"]
    records = read_jsonl(folder / "metrics.jsonl")
    steps = [[r["step"], *(r.get(key) for key in keys)] for r in records]
    bits = [[r["step"], r["checksums"]] for r in read_jsonl(folder / "rollouts.jsonl")]
    return steps, bits, read_jsonl(folder / "samples.jsonl")


def rolled_out(folder: Path):
    """Per step: reward, checksums of all responses, text and reward of some."""
    steps, bits, samples = history(folder)
    told = defaultdict(list)
    for sample in samples:
        told[sample["step"]].append(sample)
    rewards = {step: reward for step, reward, *_ in steps}
    return [[step, rewards[step], some, told[step]] for step, some in bits]


def test_a_run_leaves_its_records(unbroken):
    folder = unbroken.folder.path
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 5
    assert summary["tokens"] > 0 and summary["target_passes"] > 0
    assert summary["drafter_version"] > 0
    assert summary["reprefilled_tokens"] == 0
    assert summary["peak_memory_gb"] > 0.05
    assert summary["wall_s"]["unaccounted_share"] < 0.1  # about 0.02 on an idle machine
    lines = summary_lines(unbroken)
    assert any("peak memory" in line for line in lines) and "of the card" not in "".join(lines)
    assert set(summary["heldout_accuracy"]) == {"before", "after"}
    for step in read_jsonl(folder / "metrics.jsonl")[1:]:
        assert step["actor/grad_norm"] > 0 and step["frac_reward_zero_std"] < 0.5
    timeline = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = {(event["cat"], event["name"]) for event in timeline if event["ph"] == "X"}
    for phase in ("gen", "reward", "old_log_prob", "update_actor", "update_weights", "step 5"):
        assert ("train", phase) in names
    assert names >= {("rollout", step) for step in ("prefill", "draft", "verify")}
    assert ("drafter", "micro_step") in names
    rollouts = read_jsonl(folder / "rollouts.jsonl")
    assert [r["step"] for r in rollouts] == [1, 2, 3, 4, 5]
    assert all(len(r["lengths"]) == 12 and r["active"][-1][1] == 0 for r in rollouts)
    step_s = summary["step_s"]
    assert summary["tokens_per_s"] > 0
    # A step takes 40 ms, and other programs may take some of them between two phases.
    times = [StepTimes.of(step) for step in read_jsonl(folder / "metrics.jsonl")[1:]]
    assert min(each.unaccounted / each.total for each in times) < 0.1  # about 0.04
    assert set(step_s) == {*PHASES, "unaccounted", "step"}
    # Medians, which a busy machine shifts apart.
    assert 0 < max(step_s[name] for name in PHASES) < step_s["step"]
    table = "\n".join(summary_lines(unbroken))
    for part in ("gen", "update_actor", "warmup", "unaccounted", "together"):
        assert re.search(rf"^  {part} +[-\d.]+ +\d+\.\d", table, flags=re.M), part
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count('<figure class="chart"') >= 12
    record = read_jsonl(folder / "metrics.jsonl")[-1]
    for key in (
        "critic/rewards/mean",
        "response_length/clip_ratio",
        "actor/pg_loss",
        "actor/entropy",
        "timing_s/gen",
        "timing_s/update_weights",
        "timing_s/step",
        "perf/throughput",
        "sampling/sampling_logp_difference/mean",
        "frac_reward_zero_std",
        "spec/target_passes",
        "drafter/version",
        "eval/accuracy",  # the last step is evaluated, due or not
    ):
        assert key in record, key


@pytest.mark.figures
def test_a_finished_run_resumed_keeps_its_records_and_figures(unbroken, capsys):
    folder = unbroken.folder.path
    charts = (folder / "report.html").read_text(encoding="utf-8").count("<figure")
    before = history(folder)
    resumed = run(folder.parent, "whole", "run.steps=5", "run.resume=true")
    assert resumed.rollout.engine.target_version == resumed.version == 5
    shown = " ".join(capsys.readouterr().out.split())
    assert "has made 5 steps, and run.steps=5: nothing is left to do; raise it" in shown
    assert history(folder) == before
    assert (folder / "report.html").read_text(encoding="utf-8").count("<figure") == charts


def test_collections_leave_out_what_the_first_step_made(tmp_path, monkeypatch):
    """Also in a resumed run, whose first step is not step 1."""
    frozen, gather = [], Run.gather
    monkeypatch.setattr(
        Run, "gather", lambda run: frozen.append(gc.get_freeze_count()) or gather(run)
    )
    gc.unfreeze()  # what tests/conftest.py froze
    run(tmp_path, "frozen", "run.steps=1", "warmup.steps=0")
    run(tmp_path, "frozen", "run.steps=4", "warmup.steps=0", "run.resume=true")
    alone, first, second, third = frozen
    assert alone == first == 0 and second > 10_000 and third <= second
    assert gc.get_freeze_count() == 0


def test_a_run_with_other_noise_is_not_resumed(unbroken, monkeypatch):
    monkeypatch.setattr(run_module, "NOISE_VERSION", 99)
    other = "made with noise of version 2, and version 99 draws other tokens; model.path=FOLDER"
    with pytest.raises(UserError, match=other):
        run(unbroken.folder.path.parent, "whole", "run.steps=5", "run.resume=true")


def test_rollout_and_trainer_agree_on_log_probs(unbroken):
    for record in read_jsonl(unbroken.folder.path / "metrics.jsonl")[1:]:
        assert record["sampling/sampling_logp_difference/max"] < 1e-3


def test_strategies_change_no_reward(unbroken, tmp_path):
    """The full system against plain decoding, step by step."""
    plain = run(tmp_path, "off", "run.steps=5", "engine.strategies=off")
    assert history(plain.folder.path) == history(unbroken.folder.path)


@pytest.mark.parametrize(
    ("words", "steps"),
    [(["run.eval_every=0"], []), (["run.eval_every=1", "run.eval_first=false"], [1, 2])],
    ids=["none", "not first"],
)
def test_a_run_with_fewer_evaluations_trains_the_same(unbroken, tmp_path, words, steps):
    made = run(tmp_path, "few", "run.steps=2", *words)
    records = read_jsonl(made.folder.path / "metrics.jsonl")
    assert [r["step"] for r in records] == [1, 2]
    assert [r["step"] for r in records if "eval/accuracy" in r] == steps
    heldout = json.loads((made.folder.path / "summary.json").read_text())["heldout_accuracy"]
    assert heldout["before"] is None and (heldout["after"] is None) == (not steps)
    assert rolled_out(made.folder.path) == rolled_out(unbroken.folder.path)[:2]


@pytest.mark.figures
def test_a_run_that_starts_over_leaves_no_older_drafter(tmp_path):
    words = ["run.steps=0", "run.eval_prompts=0", "spot.checkpoint_every=1"]
    folder = run(tmp_path, "run", *words).folder.path
    shutil.rmtree(folder / "checkpoints")
    (folder / "drafter").mkdir(exist_ok=True)
    (folder / "drafter" / "step-00009999.pt").write_bytes(b"of a start that got to no checkpoint")
    run(tmp_path, "run", *words, "run.resume=true")
    assert not list((folder / "drafter").iterdir())


@pytest.mark.parametrize("part", ["folder", "rollout.spot", "collector.workers"])
def test_the_error_that_stopped_a_run_is_raised_if_closing_fails_too(tmp_path, monkeypatch, part):
    def full(self):
        raise OSError(28, "No space left on device")

    def stopped(self):
        monkeypatch.setattr(type(operator.attrgetter(part)(self)), "close", full)
        raise UserError("the task has no more prompts")

    monkeypatch.setattr(Run, "evaluate", stopped)
    with (
        pytest.raises(UserError, match="the task has no more prompts"),
        pytest.warns(UserWarning, match="the cleanup after an error failed .*No space left"),
    ):
        run(tmp_path, "stopped", "warmup.steps=0")
    assert not (tmp_path / "stopped").exists()


@pytest.mark.parametrize("writer", ["at-once", "beside"])
def test_killed_in_a_checkpoint_it_resumes_to_the_same_tokens(unbroken, tmp_path, writer):
    words = [writer, *WORDS, f"run.root={tmp_path}", "run.name=killed", "run.steps=5"]
    assert run_ranks(KILL, words, 1, tmp_path / "log") == -signal.SIGKILL
    checkpoints = tmp_path / "killed" / "checkpoints"
    assert (checkpoints / "step-000002").exists() and not (checkpoints / "step-000004").exists()
    resumed = run(tmp_path, "killed", "run.steps=5", "run.resume=true")
    assert history(resumed.folder.path) == history(unbroken.folder.path)
    assert resumed.tokens == unbroken.tokens


@pytest.fixture
def written_beside(monkeypatch):
    """Runs whose checkpoints are written as on a card."""
    kind = start_module.CheckpointWriter
    monkeypatch.setattr(start_module, "CheckpointWriter", lambda threaded: kind(threaded=True))


def test_checkpoints_of_the_thread_equal_those_written_directly(unbroken, written_beside, tmp_path):
    """Steps go on while they are written; the last is on the disk when the run ends."""
    beside = run(tmp_path, "beside", "run.steps=5")
    assert beside.writer.threaded and beside.writer._written is None
    assert history(beside.folder.path) == history(unbroken.folder.path)
    whole, other = (r.folder.path / "checkpoints" for r in (unbroken, beside))
    assert [p.name for p in sorted(whole.iterdir())] == [p.name for p in sorted(other.iterdir())]
    for step in whole.iterdir():
        files = [p.relative_to(step) for p in step.rglob("*") if p.is_file()]
        assert sorted(files) == sorted(
            p.relative_to(other / step.name) for p in (other / step.name).rglob("*") if p.is_file()
        )
        for name in ("model.safetensors", "config.json", "tokenizer.json", "state/trainer.pt"):
            assert (step / name).read_bytes() == (other / step.name / name).read_bytes(), name
        parts = "state/parts/shard-00001-model-00001-of-00001.safetensors"
        mine, theirs = load_file(step / parts), load_file(other / step.name / parts)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("offload", ["moments", "all"])
def test_offloaded_parts_are_written_from_where_they_are(unbroken, offload, tmp_path, monkeypatch):
    """Without a copy: the thread waits here until the next update waits for it."""
    waited, copied = threading.Event(), []
    kind, save_parts = start_module.CheckpointWriter, run_module.save_parts
    collect, take = kind.collect, HostCopies.take

    def noted(self, state):
        copied.append(state)
        return take(self, state)

    def late(*args):
        assert waited.wait(60)
        waited.clear()
        save_parts(*args)

    def collected(self, wait=True):
        if wait and self._written is not None:
            waited.set()
        collect(self, wait)

    monkeypatch.setattr(start_module, "CheckpointWriter", lambda threaded: kind(threaded=True))
    monkeypatch.setattr(run_module, "save_parts", late)
    monkeypatch.setattr(kind, "collect", collected)
    monkeypatch.setattr(HostCopies, "take", noted)
    beside = run(tmp_path, "beside", "run.steps=5", f"grpo.offload={offload}")
    assert history(beside.folder.path) == history(unbroken.folder.path)
    assert [state["parts"] for state in copied] == [{}] * 4  # on a card the weights
    name = "state/parts/shard-00001-model-00001-of-00001.safetensors"
    for step in (4, 5):
        folders = [r.folder.checkpoints / f"step-{step:06d}" for r in (unbroken, beside)]
        mine, theirs = (load_file(folder / name) for folder in folders)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_disk_that_is_full_ends_a_run_that_does_not_wait_for_it(
    written_beside, tmp_path, monkeypatch
):
    def full(folder, step, *args):
        with storage_errors(folder / f"step-{step}"):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_module, "save_checkpoint", full)
    with pytest.raises(UserError, match="step-2: cannot be written .No space left on device"):
        run(tmp_path, "full", "run.steps=5", "warmup.steps=0")


def test_the_kl_reference_is_the_policy_after_the_warm_up_and_stays_it_on_resume(tmp_path):
    words = ["grpo.kl_coef=0.1", "run.eval_prompts=0", "run.checkpoint_every=1"]
    whole = run(tmp_path, "whole", "run.steps=3", *words)
    run(tmp_path, "broken", "run.steps=1", *words)
    resumed = run(tmp_path, "broken", "run.steps=3", "run.resume=true", *words)
    for one in (whole, resumed):
        records = read_jsonl(one.folder.path / "metrics.jsonl")
        kl = [record["actor/ref_kl"] for record in records]
        assert kl[0] == 0.0 and kl[2] > kl[1] > 0.0
    assert kl == [r["actor/ref_kl"] for r in read_jsonl(whole.folder.path / "metrics.jsonl")]
    shutil.rmtree(resumed.folder.path / "warm")  # made again
    again = run(tmp_path, "broken", "run.steps=4", "run.resume=true", *words)
    first, *others = (list(r.trainer.reference.parameters()) for r in (whole, resumed, again))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_a_run_that_starts_over_finds_its_warm_up(tmp_path, monkeypatch):
    words = ["grpo.kl_coef=0.1", "run.steps=0", "run.eval_prompts=0"]
    folder = run(tmp_path, "run", *words).folder.path
    shutil.rmtree(folder / "checkpoints")
    monkeypatch.setattr("driver.run.warm_start.warm_up", None)
    run(tmp_path, "run", *words, "run.resume=true")
    assert not (tmp_path / "warm").exists()


def test_training_in_float16_is_refused(tmp_path):
    for words in ([], ["warmup.keep=true"]):
        with pytest.raises(UserError, match="model.dtype=float16: gradients underflow.*bfloat16"):
            run(tmp_path, "half", "model.dtype=float16", *words)
    config = load_config([*WORDS, f"run.root={tmp_path}", "model.dtype=float16"])
    with pytest.raises(UserError, match="model.dtype=float16"):
        warm_start(config, print)
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_may_change_its_engine_and_keeps_its_tokens(unbroken, tmp_path):
    run(tmp_path, "run", "run.steps=2", "engine.strategies=off")
    learning = run(tmp_path, "run", "run.steps=4", "run.resume=true")
    assert learning.rollout.spot.steps > 0  # a new drafter
    words = ["engine.strategies=off ngram:2,1,3", "engine.page_size=16", "engine.max_batch=5"]
    words += ["bandit.buckets=1,3", "reward.workers=1", "spot.mode=off"]
    resumed = run(tmp_path, "run", "run.steps=5", "run.resume=true", *words)
    assert history(resumed.folder.path) == history(unbroken.folder.path)


def test_pages_that_are_released_in_the_update_change_no_token(unbroken, tmp_path, monkeypatch):
    """They come back full of NaN, which nothing may read."""
    restored = poison(monkeypatch)
    freed = run(tmp_path, "freed", "run.steps=5", "engine.free_in_update=true")
    assert restored == [5] * 5  # after each update
    assert history(freed.folder.path) == history(unbroken.folder.path)
    assert "timing_s/free_pages" in freed.last_metrics
    assert not freed.session.engine.cache.memory.released


def test_overlapped_training_changes_no_token(unbroken, tmp_path):
    other = run(tmp_path, "overlapped", "run.steps=5", "spot.mode=overlapped")
    assert history(other.folder.path) == history(unbroken.folder.path)


def drafts_and_weights_of_nan(patch, root):
    load, step = DraftRunner.load, SpotTrainer.micro_step

    def broken_load(self, state, version):
        load(self, state, version)
        for tensor in self.weights.values():
            tensor.fill_(float("nan"))

    def broken_step(self, *args):
        if self.runner.version:  # weights that are not finite would not have been swapped in
            self.drafter.fc.weight.data.fill_(float("nan"))
        return step(self, *args)

    patch.setattr(DraftRunner, "load", broken_load)
    patch.setattr(SpotTrainer, "micro_step", broken_step)
    return []


def a_killed_thread(patch, root):
    step, killed = SpotTrainer.micro_step, []

    def once(self, *args):
        if self.thread.is_current and not killed:
            killed.append(True)
            raise SystemExit("killed")
        return step(self, *args)

    patch.setattr(SpotTrainer, "micro_step", once)
    return ["spot.mode=overlapped"]


def a_full_buffer(patch, root):
    return ["spot.buffer_tokens=64"]


def a_full_disk(patch, root):
    def full(*args):
        raise OSError(28, "No space left on device")

    patch.setattr(draft_checkpoint, "sync_path", full)  # of the drafter alone
    return ["spot.checkpoint_every=1"]


def a_half_written_checkpoint(patch, root):
    words = ["spot.checkpoint_every=1"]
    folder = run(root, "fault", "run.steps=1", *LEARNED, *words).folder.path / "drafter"
    newest = max(folder.glob("step-*.pt"))
    newest.write_bytes(newest.read_bytes()[:100])
    return [*words, "run.resume=true"]


FAULTS = {
    drafts_and_weights_of_nan: "gradient is not finite: step skipped",
    a_killed_thread: "micro-step failed .SystemExit: killed.; training of the drafter paused",
    a_full_buffer: "its buffer of 64 tokens .* is full",
    a_full_disk: "drafter checkpoint not written .*No space left on device",
    a_half_written_checkpoint: "step-.*cannot be read .*the previous one is used",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_the_drafter_is_a_warning_and_changes_no_token(
    unbroken, tmp_path, monkeypatch, fault
):
    words = fault(monkeypatch, tmp_path)
    with pytest.warns(UserWarning, match=FAULTS[fault]):
        faulty = run(tmp_path, "fault", "run.steps=2", *LEARNED, *words)
    assert rolled_out(faulty.folder.path) == rolled_out(unbroken.folder.path)[:2]
    spot = faulty.rollout.spot
    assert spot.steps > 0 and spot.runner.version > 0
    assert faulty.collector.stats.spec_passes > 0  # of the last step, with that drafter


def test_reward_workers_change_no_reward(unbroken, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collector, "rewards", REWARDS)
        here = run(tmp_path, "here", "run.steps=2")
        beside = run(tmp_path, "beside", "run.steps=2", "reward.workers=2")
    assert history(here.folder.path) == history(beside.folder.path)
    assert beside.collector.workers._workers == []  # closed with the run


def test_dynamic_sampling_replaces_equal_groups_and_resumes(tmp_path):
    """Groups of the first prompt of each draw are made equal; they are drawn again and not learned
    from, and the next step goes on behind all the prompts that were drawn."""

    def often_equal(self, prompts, responses):
        rewards = share_of_ones(self, prompts, responses)
        return [r * (p != prompts[0]) for p, r in zip(prompts, rewards, strict=True)]

    # With this seed the rewards of all other groups are mixed.
    words = ["run.seed=3", "grpo.max_refills=2", "grpo.advantage=dapo", "grpo.clip_high=0.28"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collector, "rewards", often_equal)
        with pytest.warns(UserWarning, match="only 2 of 3 groups have mixed rewards"):
            whole = run(tmp_path, "whole", "run.steps=3", *words)
            run(tmp_path, "broken", "run.steps=2", *words)
            resumed = run(tmp_path, "broken", "run.steps=3", "run.resume=true", *words)
    assert whole.collector.prompts_drawn == resumed.collector.prompts_drawn == 3 * (3 + 1 + 1)
    assert history(whole.folder.path)[0] == history(resumed.folder.path)[0]
    record = read_jsonl(whole.folder.path / "metrics.jsonl")[-1]
    assert record["dynamic_sampling/refills"] == 2
    assert record["dynamic_sampling/kept"] == pytest.approx(2 / 5)
    assert record["actor/grad_norm"] > 0

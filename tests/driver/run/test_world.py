"""Several ranks: real processes on Gloo, some under torchrun, and the rules that need none."""

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from driver.common.errors import UserError
from driver.common.world import World, split_by_length
from driver.config.load import load_config
from driver.records.folder import read_jsonl
from driver.run.ranks import RankTimes
from driver.run.start import for_rank, start_run
from driver.session.load import use_device
from tests.driver.run.test_run import WORDS
from tests.forks import run_ranks

ROOT = Path(__file__).parents[3]
KILLED = "import signal; os.kill(os.getpid(), signal.SIGKILL)"
PRELUDE = """
import os, sys, time
from driver.drafter.coordinator import Coordinator
from driver.run import collector
from driver.train import main
from driver.config.command import run_command
from tests.driver.run.test_run import share_of_ones
collector.Collector.rewards = share_of_ones
often = Coordinator._micro_step
def rarely(self, *args):
    time.sleep(0.1)  # an idle rank would compute for as long as the other one sleeps
    return often(self, *args)
Coordinator._micro_step = rarely
RANK = int(os.environ.get("RANK", 0))
FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
"""


def rank_env() -> dict[str, str]:
    """A rank's environment: it finds the tree as well as what this process finds."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def launch(folder: Path, ranks: int, *words: str, script: str = "") -> tuple[int, str]:
    """Exit code and output of a training script on ranks of the fork server."""
    folder.mkdir(exist_ok=True)
    code = run_ranks(whole_script(script), [*folder_words(folder), *words], ranks, folder / "log")
    return code, (folder / "log").read_text()


def torchrun(
    folder: Path, ranks: int, *words: str, script: str = "", restarts: int = 0, poll_s: float = 0.1
) -> tuple[int, str]:
    """Exit code and output of a training script under torchrun, which polls its ranks."""
    folder.mkdir(exist_ok=True)
    file = folder / "script.py"
    file.write_text(whole_script(script))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    command += [f"--monitor-interval={poll_s}", str(file)]
    done = subprocess.run(
        [*command, *folder_words(folder), *words],
        cwd=ROOT,
        env=rank_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout


# A rank that is killed is named by another one before torchrun stops that, too.
UNHURRIED = partial(torchrun, poll_s=5)


def whole_script(script: str) -> str:
    return PRELUDE + script + "\nrun_command(main)\n"


def folder_words(folder: Path) -> list[str]:
    return [*WORDS, f"run.root={folder}", "run.name=run", "run.steps=2"]


def run(folder: Path, ranks: int, *words: str, start=launch, **options) -> list[dict]:
    """The records of a run that must succeed."""
    code, log = start(folder, ranks, *words, **options)
    assert code == 0, log[-3000:]
    return read_jsonl(folder / "run" / "metrics.jsonl")


def tokens(folder: Path) -> list[list[int]]:
    """Lengths of every response of every step: equal tokens have equal lengths."""
    records = read_jsonl(folder / "run" / "rollouts.jsonl")
    return [record["lengths"] for record in records]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return folder, run(folder, 1, "grpo.kl_coef=0.1")


SAME_EVERYWHERE = """
from driver.run.run import Run
whole = Run.sync_weights
def checked(self):
    whole(self)
    spot = self.rollout.spot
    learned = [*spot.drafter.parameters(), *spot.step.average.values.values()]
    drafter = [float(w.double().sum()) for w in learned]
    policy = [float(w.double().sum()) for w in self.rollout.target.state_dict().values()]
    mine = (drafter, policy, spot.runner.version, self.collector.prompts_drawn)
    everywhere = self.world.gather(mine)
    assert all(other == everywhere[0] for other in everywhere), everywhere
Run.sync_weights = checked
"""


LAST_CLOCK_IS_LATE = """
from driver.run import start
phases = start.Phases
def late(rank, ranks):
    time.sleep(8 * (rank == ranks - 1))
    return phases(rank, ranks)
start.Phases = late
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_learns_the_same(alone, tmp_path, ranks):
    """Tokens and rewards are those of one rank to the bit in the first step, where the policy is
    the same; afterwards it differs by the order in which gradients are added up. Two ranks do not
    divide three prompts. The timeline shows what all come to at one time, whenever each began."""
    folder, expected = alone
    three = str(ranks == 3).lower()
    words = ["grpo.kl_coef=0.1", f"engine.free_in_update={three}", f"grpo.shard={three}"]
    records = run(tmp_path, ranks, *words, script=SAME_EVERYWHERE + LAST_CLOCK_IS_LATE)
    assert tokens(tmp_path)[0] == tokens(folder)[0]
    for key in ("critic/rewards/mean", "response_length/mean", "frac_reward_zero_std"):
        assert records[1][key] == expected[1][key], key
    for key in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
        assert records[1][key] == pytest.approx(expected[1][key], rel=1e-4, abs=1e-6), key
    assert expected[1]["actor/grad_norm"] > 0.01
    assert records[1]["actor/ref_kl"] == expected[1]["actor/ref_kl"] == 0.0
    assert records[2]["actor/ref_kl"] > 0
    assert records[1]["sampling/sampling_logp_difference/max"] < 1e-3
    assert records[2]["critic/rewards/mean"] == pytest.approx(
        expected[2]["critic/rewards/mean"], abs=0.05
    )
    assert records[2]["ranks/count"] == ranks
    assert 0 <= records[2]["ranks/idle_share"] < 1
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    ends = defaultdict(list)
    for event in events:
        if event["name"] == "gather":
            ends[event["pid"]].append((event["ts"] + event["dur"]) / 1e6)
    assert len(ends) == ranks and len(ends[0]) == 2
    assert all(mine == pytest.approx(ends[0], abs=4) for mine in ends.values())


HOLDS_A_PART = """
from driver.policy.trainer import PolicyTrainer
update = PolicyTrainer.update
def checked_update(self, *args):
    out = update(self, *args)
    tensors = self.weights.tensors(self.optimizer)
    held = sum(len(x.reshape(-1)) for parts in tensors.values() for x in parts.values())
    every = 3 * sum(p.numel() for p in self.params)
    assert 0.3 < held / every < 0.37, (held, every)
    return out
PolicyTrainer.update = checked_update
"""


WRITES_BESIDE = """
from driver.run import run as run_module
writer = run_module.CheckpointWriter
run_module.CheckpointWriter = lambda beside: writer(beside=True)
"""


def test_a_run_resumes_on_another_number_of_ranks(tmp_path):
    """Three ranks do not divide the rows, and write their parts in threads, as on cards. One or two
    load the same weights and moments."""
    half, script = "model.dtype=bfloat16", SAME_EVERYWHERE + HOLDS_A_PART + WRITES_BESIDE
    run(tmp_path / "two", 3, half, "run.checkpoint_every=1", "grpo.shard=true", script=script)
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    more = [half, "run.resume=true", "run.steps=3"]
    two = run(tmp_path / "two", 2, *more, script=SAME_EVERYWHERE)
    one = run(tmp_path / "one", 1, *more)
    assert len(one) == len(two) == 4
    assert tokens(tmp_path / "one")[2] == tokens(tmp_path / "two")[2]
    for key in ("critic/rewards/mean", "actor/grad_norm", "actor/entropy"):
        assert one[-1][key] == pytest.approx(two[-1][key], rel=1e-3, abs=1e-6), key
    assert one[-1]["actor/grad_norm"] > 0.01


def test_ranks_that_share_a_model_make_its_tokens(tmp_path):
    """Two groups of two ranks. What they save is the whole model, for any number of ranks."""
    words, shared = ["model.hidden_size=128", "warmup.steps=2"], "engine.tensor_parallel=2"
    run(tmp_path / "one", 1, *words, "run.steps=1")
    records = run(tmp_path / "four", 4, *words, shared)
    assert tokens(tmp_path / "four")[0] == tokens(tmp_path / "one")[0]
    assert records[2]["ranks/count"] == 4 and records[2]["drafter/tokens_seen"] > 0
    # The weights of the update have reached the parts of the engine.
    assert records[2]["sampling/sampling_logp_difference/max"] < 1e-3
    more = [*words, "run.resume=true", "run.checkpoint_every=0", "run.steps=3"]
    ends = []
    for ranks, own in ((1, []), (2, [shared])):
        folder = tmp_path / f"on{ranks}"
        shutil.copytree(tmp_path / "four", folder)
        run(folder, ranks, *more, *own)
        ends.append(tokens(folder)[2])
    assert ends[0] == ends[1]


WITHIN_A_PASS = """
from driver.model.exchange import Exchange
gather, calls = Exchange.gather, []
def lost(self, rows):
    calls.append(rows)
    if RANK == 1 and len(calls) > 100:
        {how}
    return gather(self, rows)
Exchange.gather = lost
"""


@pytest.mark.parametrize(("start", "how"), [(UNHURRIED, KILLED), (launch, "time.sleep(900)")])
def test_a_rank_lost_within_a_pass_is_named(tmp_path, start, how):
    words = ["engine.tensor_parallel=2", "run.timeout_s=8", "run.eval_every=0"]
    code, log = start(tmp_path, 2, *words, script=WITHIN_A_PASS.format(how=how))
    assert code != 0 and "rank 1 (in gen) was lost or did not answer" in log, log[-3000:]


def test_no_more_of_the_bubble_is_used_than_there_was():
    """A rank trained on for .3 s after the last one's end, which itself trained for .1 s then."""
    told = [(None, 2.3), (None, 0.1)]  # the card's memory, seconds trained
    world = SimpleNamespace(size=2, gather=lambda _: told)
    ranks = RankTimes(world, SimpleNamespace(trained_s=0.0))
    ranks.add([1.0, 3.0])
    metrics = ranks.metrics(None)
    assert metrics["ranks/bubble_used_share"] == 1.0
    assert metrics["ranks/idle_share"] == pytest.approx(2 / 6)
    assert metrics["ranks/0/idle_share"] == pytest.approx(2 / 3)


LAST_IS_SLOW = """
generate = collector.Collector.roll_out
def slow(self, prompts, requests):
    if RANK == 2:
        self.world.store.wait([self.coordinator._key("group/0")])  # the others train
        time.sleep(2)
    return generate(self, prompts, requests)
collector.Collector.roll_out = slow
"""


def test_idle_ranks_train_the_drafter_until_the_last_one_is_done(tmp_path):
    records = run(tmp_path, 3, script=LAST_IS_SLOW + SAME_EVERYWHERE)
    for record in records[1:]:
        assert record["drafter/version"] >= 1 and record["drafter/tokens_seen"] > 0
        # Two of three ranks were idle for the time that the third slept, and trained in it.
        assert record["ranks/idle_share"] > 0.3
        assert 0.5 < record["ranks/bubble_used_share"] <= 1
    assert records[2]["drafter/tokens_seen"] > records[1]["drafter/tokens_seen"]
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    trains = [e["pid"] for e in events if (e.get("cat"), e["name"]) == ("drafter", "train")]
    assert set(trains) == {0, 1}


ANOTHER_IS_SLOW = """
from driver.drafter import coordinator
coordinator.KEPT_GROUPS = 1
generate = collector.Collector.roll_out
def slow(self, prompts, requests):
    slow.calls += 1
    assert len(self.coordinator._groups) <= coordinator.KEPT_GROUPS
    if RANK == (-slow.calls) % 3:
        time.sleep(2)
    return generate(self, prompts, requests)
slow.calls = 0
collector.Collector.roll_out = slow
"""


PAIRS = """
from driver.drafter import coordinator
train = coordinator.Coordinator._train
def in_pairs(self, ranks):
    if len(ranks) > 1:
        return train(self, ranks)
    time.sleep(0.05)
coordinator.Coordinator._train = in_pairs
"""


def test_other_ranks_train_together_in_each_step(tmp_path):
    """Ranks 0 and 1, then 0 and 2, then 1 and 2, then as at first, a group that was dropped."""
    words = ["run.steps=4", "run.timeout_s=60"]
    records = run(tmp_path, 3, *words, script=PAIRS + ANOTHER_IS_SLOW + SAME_EVERYWHERE)
    seen = [record["drafter/tokens_seen"] for record in records[1:]]
    assert 0 < seen[0] < seen[1] < seen[2] < seen[3]


DIES = """
whole = collector.Collector.{where}
def dying(self, *args, **kwargs):
    if RANK == 1 and self.prompts_drawn > {drawn} and FIRST:
        {how}
    return whole(self, *args, **kwargs)
collector.Collector.{where} = dying
"""


@pytest.mark.parametrize(
    ("start", "where", "how", "phase"),
    [
        (UNHURRIED, "roll_out", KILLED, "gen"),
        (launch, "roll_out", "time.sleep(900)", "gen"),
        (launch, "rewards", KILLED, "reward"),
    ],
)
def test_a_lost_rank_is_named_with_its_phase(tmp_path, start, where, how, phase):
    script = DIES.format(where=where, how=how, drawn=3)
    words = ["run.timeout_s=15", "run.checkpoint_every=1"]
    code, log = start(tmp_path, 2, *words, script=script)
    assert code != 0
    assert f"rank 1 (in {phase})" in log, log[-3000:]


STEP_HANGS = """
from driver.drafter.trainer import SpotTrainer
from driver.common.world import World
micro_step, gather, roll_out = SpotTrainer.micro_step, World.gather, collector.Collector.roll_out
def step(self, reduce=None):
    if RANK == {hangs} and self.steps > 2:
        time.sleep(900)
    return micro_step(self, reduce)
def slow(self, prompts, requests):
    if RANK == {slow}:
        time.sleep(4)
    return roll_out(self, prompts, requests)
def gathered(self, value):
    if RANK == {gathers} and self._phase == "gather":
        time.sleep(900)
    return gather(self, value)
SpotTrainer.micro_step, World.gather, collector.Collector.roll_out = step, gathered, slow
"""


@pytest.mark.parametrize(
    ("ranks", "slow", "hangs", "gathers", "named"),
    [
        # Alone, while the other is at work; of a group of two.
        pytest.param(2, 1, 0, -1, "rank 0 (in drafter training)", marks=pytest.mark.slow),
        pytest.param(3, 2, 1, -1, "rank 1 (in drafter training)", marks=pytest.mark.slow),
        (2, 1, -1, 1, "rank 1 (in gather)"),
    ],
)
def test_a_rank_that_hangs_after_its_rollout_is_named(tmp_path, ranks, slow, hangs, gathers, named):
    script = STEP_HANGS.format(slow=slow, hangs=hangs, gathers=gathers)
    code, log = launch(tmp_path, ranks, "run.timeout_s=15", script=script)
    assert code != 0 and named in log, log[-3000:]
    assert "a rank that had reached the call" not in log


@pytest.mark.slow
def test_torchrun_restarts_a_run_from_its_last_checkpoint(tmp_path):
    """The third step's rollout dies once; its tokens are then those of an unbroken run."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    words = ("run.steps=3", "run.checkpoint_every=1")
    run(whole, 2, *words)
    script = DIES.format(where="roll_out", how=KILLED, drawn=6)
    code, log = torchrun(broken, 2, *words, script=script, restarts=1)
    assert code == 0, log[-3000:]
    assert tokens(broken) == tokens(whole)
    assert "starting over" not in log


def test_a_restart_resumes_only_what_had_begun(monkeypatch, tmp_path):
    """A first attempt that failed before its folder was made leaves nothing to go on with."""
    config = load_config([*WORDS, f"run.root={tmp_path}", "run.name=run"])
    world = World(rank=0, size=2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not for_rank(config, world).run.resume
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    assert for_rank(config, world).run.resume
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert not for_rank(config, world).run.resume


def test_more_ranks_than_prompts_are_refused(tmp_path):
    code, log = launch(tmp_path, 2, "grpo.prompts_per_step=1")
    assert code != 0
    assert "2 ranks for grpo.prompts_per_step=1: each needs one prompt" in log
    config = load_config([*WORDS, "grpo.prompts_per_step=1", "engine.tensor_parallel=2"])
    with pytest.raises(UserError, match="4 ranks for .*=1: each group of 2 needs one prompt"):
        for_rank(config, World(rank=0, size=4))


SHARES = """
import torch, torch.distributed as dist
from driver.common.world import World, share_state
world = World.join("cpu", 60)
weights = torch.arange(6.0).view(2, 3)
state = {"w": weights.t(), "on": torch.tensor([True, False]), "step": torch.tensor(3),
         "groups": [{"betas": (0.9, 0.95), "lr": torch.tensor(0.5)}], "seen": {7: 2}, "none": None}
pair = dist.new_group([0, 2], use_local_synchronization=True) if world.rank != 1 else None
for source, group in ((2, None), (0, pair)):
    if world.rank == 1 and source == 0:
        continue
    got = share_state(state if world.rank == source else {"w": "unused"}, source, "cpu", group)
    assert got["w"].equal(weights.t()) and got["on"].tolist() == [True, False], got
    assert got["on"].dtype == torch.bool and int(got["step"]) == 3 and got["step"].dim() == 0
    assert got["groups"][0]["betas"] == (0.9, 0.95) and float(got["groups"][0]["lr"]) == 0.5
    assert got["seen"] == {7: 2} and got["none"] is None
world.leave()
"""


def test_a_state_with_tensors_reaches_every_rank_of_a_group(tmp_path):
    log = tmp_path / "log"
    assert run_ranks(SHARES, [], 3, log) == 0, log.read_text()[-3000:]


FAULTY = """
from driver.drafter.trainer import SpotTrainer
def broken(self, reduce=None):
    raise RuntimeError("kernel on fire")
if RANK == 0:
    SpotTrainer.micro_step = broken
generate = collector.Collector.roll_out
def slow(self, prompts, requests):
    if RANK == 1:
        self.world.store.wait([self.coordinator._key("group/0")])  # rank 0 tries to train
        time.sleep(0.5)
    return generate(self, prompts, requests)
collector.Collector.roll_out = slow
"""


BROKEN_SHARE = """
from driver.drafter.step import DraftStep
def broken(self, batch):
    raise RuntimeError("kernel on fire")
if RANK == 1:
    DraftStep.backward = broken
"""


FINISHES_LATER = """
roll_out = collector.Collector.roll_out
def later(self, prompts, requests):
    if RANK == {rank}:
        self.world.store.wait([self.coordinator._key("leader")])  # it has finished
    return roll_out(self, prompts, requests)
collector.Collector.roll_out = later
"""


@pytest.mark.parametrize("leader", [0, 1])
def test_a_rank_whose_steps_fail_does_not_stop_its_group(tmp_path, leader):
    """Rank 1 fails, as the leader too. It has the drafter of the others when the step ends."""
    script = PAIRS + BROKEN_SHARE + LAST_IS_SLOW + FINISHES_LATER.format(rank=1 - leader)
    records = run(tmp_path, 3, "run.timeout_s=60", script=script + SAME_EVERYWHERE)
    assert records[-1]["drafter/tokens_seen"] > 0
    assert "micro-step failed (RuntimeError: kernel on fire)" in (tmp_path / "log").read_text()


def test_a_failed_step_of_the_idle_rank_costs_the_drafter_only(tmp_path):
    records = run(tmp_path, 2, script=FAULTY)
    assert records[2]["drafter/tokens_seen"] == 0
    assert "micro-step failed (RuntimeError: kernel on fire)" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("error", "seen", "match"),
    [
        (RuntimeError("Connection reset\nby peer"), UserError, r"was lost .*\(Connection reset\)"),
        (torch.AcceleratorError("illegal address"), torch.AcceleratorError, "illegal address"),
        (torch.OutOfMemoryError("out"), torch.OutOfMemoryError, "out"),
    ],
)
def test_the_error_of_a_collective_call_is_reported(error, seen, match):
    """A fault of this rank's own card is not called the loss of another."""
    with pytest.raises(seen, match=match), World(rank=0, size=2).collective():
        raise error


def test_one_process_makes_no_collective_call(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world = World.join("cpu", 1.0)
    assert (world.rank, world.size, world.device) == (0, 1, "cpu")
    assert world.gather("a") == ["a"] and world.share(5) == 5
    world.leave()


def test_a_rank_without_a_card_says_so(monkeypatch):
    for key, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "99"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match="rank 1: needs card 99, but there are"):
        World.join("cuda", 1.0)


def test_a_card_named_by_number_becomes_the_current_one(monkeypatch):
    """Streams and events are taken of the current one."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for device in ("cuda:1", "cuda", "cpu"):
        use_device(device)
    assert chosen == [1, 0]
    with pytest.raises(UserError, match="run.device=cuda:2: torch sees 2 CUDA devices"):
        use_device("cuda:2")


def test_ranks_without_a_number_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UserError, match="no RANK and LOCAL_RANK: start with torchrun"):
        World.join("cpu", 1.0)


def test_one_rank_alone_cannot_be_coordinated(tmp_path):
    config = load_config([*WORDS, f"run.root={tmp_path}", "spot.mode=coordinated"])
    with pytest.raises(UserError, match="spot.mode=coordinated: expected several ranks, got one"):
        start_run(config, print)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_every_item_goes_to_one_part_and_sizes_are_even(parts):
    expected = [float(7 * i % 13) for i in range(20)]
    split = split_by_length(expected, parts)
    assert sorted(i for part in split for i in part) == list(range(20))
    assert max(map(len, split)) - min(map(len, split)) <= 1


def test_fewer_items_than_parts_leave_the_last_ones_empty():
    assert split_by_length([3.0, 5.0], 4) == [[1], [0], [], []]


def test_long_responses_are_spread():
    split = split_by_length([100, 1, 1, 100, 1, 1, 100, 1, 1], 3)
    assert [sum(i % 3 == 0 for i in part) for part in split] == [1, 1, 1]

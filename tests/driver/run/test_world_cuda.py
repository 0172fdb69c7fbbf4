"""Two cards under torchrun, on NCCL: the same learning, an idle card that trains, a lost one."""

import pytest
import torch

from driver.records.folder import read_jsonl
from tests import kit
from tests.driver.run.test_world import (
    DIES,
    KILLED,
    SAME_EVERYWHERE,
    launch,
    run,
    tokens,
    torchrun,
)

pytestmark = [
    kit.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
WORDS = [
    "run.device=cuda",
    "model.dtype=bfloat16",
    "model.hidden_size=128",
    "engine.page_size=16",
    "spot.tokens_per_step=256",
]
SECOND_IS_SLOW = """
generate = collector.Collector.roll_out
def slow(self, prompts, requests):
    if RANK == 1:
        time.sleep(3)
    return generate(self, prompts, requests)
collector.Collector.roll_out = slow
Coordinator._micro_step = often  # the prelude lets an idle rank make ten steps a second
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return folder, run(folder, 1, *WORDS)


@pytest.mark.parametrize("shard", ["false", "true"])
def test_two_cards_learn_what_one_does(alone, tmp_path, shard):
    """Tokens of the first step to the bit; later policies differ by the order of additions."""
    folder, one = alone
    start = torchrun if shard == "false" else launch
    words = [*WORDS, f"grpo.shard={shard}"]
    two = run(tmp_path, 2, *words, script=SAME_EVERYWHERE, start=start)
    assert tokens(tmp_path)[0] == tokens(folder)[0]
    for key in ("critic/rewards/mean", "response_length/mean"):
        assert two[1][key] == one[1][key], key
    for key in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
        assert two[1][key] == pytest.approx(one[1][key], rel=2e-2, abs=1e-3), key
    assert two[1]["sampling/sampling_logp_difference/mean"] < 0.1
    assert two[2]["ranks/count"] == 2


def test_two_cards_that_share_a_model_make_its_tokens(alone, tmp_path):
    two = run(tmp_path, 2, *WORDS, "engine.tensor_parallel=2")
    assert tokens(tmp_path)[0] == tokens(alone[0])[0]
    assert two[2]["drafter/tokens_seen"] > 0


def test_an_idle_card_trains_captured_steps_and_both_draft_with_them(tmp_path):
    script, words = SECOND_IS_SLOW + SAME_EVERYWHERE, [*WORDS, "run.steps=3"]
    code, log = launch(tmp_path, 2, *words, script=script)
    assert code == 0, log[-3000:]
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    for record in records[1:]:
        assert 0.5 < record["ranks/bubble_used_share"] <= 1 and record["ranks/idle_share"] > 0.2
    # Op by op a step takes 20 ms and more: 150 steps of 256 tokens while the other card sleeps.
    seen = [record["drafter/tokens_seen"] for record in records[1:]]
    assert seen[2] - seen[1] > 250 * 256
    assert "could not be captured" not in log and "micro-step failed" not in log


LOST = [(torchrun, KILLED), (launch, "time.sleep(900)")]
# Of runs that end in their first rollouts.
FEW = [*WORDS, "engine.strategies=off", "warmup.steps=0", "run.eval_every=0", "run.timeout_s=15"]


@pytest.mark.parametrize(("start", "how"), LOST)
def test_a_lost_card_is_named(tmp_path, start, how):
    script = DIES.format(where="roll_out", how=how, drawn=3)
    code, log = start(tmp_path, 2, *FEW, "run.checkpoint_every=1", script=script)
    assert code != 0 and "rank 1 (in gen)" in log, log[-3000:]


WITHIN_A_PASS = """
from driver.common.symmetric import SymmetricArrays
fold, calls = SymmetricArrays.fold, []
def lost(self, *args, **kwargs):
    calls.append(args)
    if RANK == 1 and len(calls) > 100:
        {how}
    return fold(self, *args, **kwargs)
SymmetricArrays.fold = lost
"""
BETWEEN_GRAPHS = """
from driver.rollout.runner import PassRunner
run, calls = PassRunner.run, []
def lost(self, *args):
    calls.append(args)
    if RANK == 1 and len(calls) > 3:
        {how}
    return run(self, *args)
PassRunner.run = lost
"""


@pytest.mark.parametrize(("graphs", "script"), [("off", WITHIN_A_PASS), ("auto", BETWEEN_GRAPHS)])
@pytest.mark.parametrize(("start", "how"), LOST)
def test_a_card_lost_within_a_pass_is_named(tmp_path, graphs, script, start, how):
    """The others end although their kernels wait for it."""
    words = (*FEW, "engine.tensor_parallel=2", f"engine.graphs={graphs}")
    code, log = start(tmp_path, 2, *words, script=script.format(how=how))
    assert code != 0 and "rank 1 (in gen) was lost or did not answer" in log, log[-3000:]

"""Comparisons: the arm with late arrivals, aborts and tools, and the drafter's training."""

from driver.config.fields import read_options
from driver.config.options import IdentityOptions
from driver.config.strategy import OFF
from driver.identity import Identity
from driver.run import comparison
from driver.run.comparison import ARRIVALS
from tests.driver.hugging_face import random_model
from tests.driver.rollout.test_engine import make_rollout, requests

WORDS = ["tokens=200", "strategies=ngram:4,1,5 learned:4,2,8", "warmup_steps=0", "train_steps=2"]


def check(*words):
    identity = Identity(read_options(IdentityOptions, [*WORDS, "max_new_tokens=96", *words]))
    identity.comparison.arms = [arm for arm in identity.arms if arm.name == ARRIVALS]
    identity.run()
    return identity


def test_interrupted_responses_equal_plain_rollouts_of_their_turns():
    identity = check()
    (arm,) = identity.arms
    assert identity.identical and arm.tokens > 200 and arm.stats.spec_passes > 0
    assert len(arm.interruptions) == 3 and min(arm.interruptions.values()) > 0
    assert f"arrivals: {arm.interruptions['late']} late, " in identity.table()


def test_another_answer_is_a_difference(monkeypatch):
    """The reference does not read what the session got: its turns are requests of their own."""
    answer = comparison.answer

    def forgetful(state):  # whatever the order of answers, which depends on the time
        ids = answer(state)
        return ids if ids is None or state.request.id % 4 else [*ids[:-1], (ids[-1] + 1) % 8]

    run = comparison.interrupted
    monkeypatch.setattr(
        comparison,
        "interrupted",
        lambda session, some, tool, draw: run(session, some, forgetful, draw),
    )
    identity = check()
    assert not identity.identical and identity.arms[0].divergences


def test_a_comparison_trains_its_drafter_on_all_recorded_responses():
    """Its vocabulary is chosen by the first step, which may not drop the responses."""
    policy = random_model("llama-tied-llama3")
    rollout = make_rollout(policy, "drafter.draft_vocab=16", "spot.every=100000")
    rollout.fix(OFF)
    rollout.engine.generate(requests(), record=True)
    recorded = rollout.spot.buffer.num_tokens
    comparison.train_drafter(rollout.spot, 3)
    assert rollout.spot.steps == 3 and rollout.spot.buffer.num_tokens == recorded > 0

"""The arm of the identity command with late arrivals, aborts and tools."""

from driver.config.fields import read_options
from driver.config.options import IdentityOptions
from driver.identity import Identity
from driver.run import comparison
from driver.run.comparison import ARRIVALS

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
    answer, count = comparison.answer, 0

    def forgetful(state):
        nonlocal count
        count += 1
        ids = answer(state)
        return ids if ids is None or count % 8 else [*ids[:-1], (ids[-1] + 1) % 8]

    run = comparison.interrupted
    monkeypatch.setattr(
        comparison,
        "interrupted",
        lambda session, some, tool, draw: run(session, some, forgetful, draw),
    )
    identity = check()
    assert not identity.identical and identity.arms[0].divergences

"""A tiny policy, a rollout with a drafter, and a session around it."""

import pytest

from driver.session import Session
from tests.driver.hugging_face import random_model
from tests.driver.rollout.test_engine import Choose, make_rollout


@pytest.fixture(scope="module")
def policy():
    return random_model("llama-tied-llama3")


@pytest.fixture(scope="module")
def rollout(policy):
    made = make_rollout(policy, "spot.mode=off", "engine.max_batch=6", "engine.num_pages=160")
    made.spot.swap()  # a drafter with random weights; some of its drafts are accepted
    return made


@pytest.fixture
def session(rollout):
    rollout.engine.bandit, rollout.engine.page_limit = Choose("off"), None
    rollout.engine.forget()
    with Session(rollout) as made:
        yield made
    rollout.engine.page_limit = None

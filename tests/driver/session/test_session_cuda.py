"""A session on a GPU: interrupted graphs, memory that is freed, changes on another stream."""

import pytest
import torch

from driver.session import Session
from tests import kit
from tests.driver.common.test_releasable import ALONE, free_bytes
from tests.driver.hugging_face import random_model
from tests.driver.rollout.test_engine import STRATEGIES, Choose, make_rollout
from tests.driver.rollout.test_engine_cuda import SHAPE, WORDS
from tests.driver.session.test_session import bits, interrupted, jobs, turn_by_turn, wanted_bits

pytestmark = [kit.gpu, kit.needs_gpu]


@pytest.fixture(scope="module")
def rollout():
    policy = random_model("llama-tied-llama3", **SHAPE).bfloat16().cuda()
    made = make_rollout(policy, *WORDS, "model.dtype=bfloat16", "spot.mode=off")
    made.spot.swap()
    return made


@pytest.fixture
def session(rollout):
    rollout.engine.page_limit = None
    rollout.engine.forget()
    with Session(rollout) as made:
        yield made


@pytest.mark.parametrize("pages", [None, 30])
@pytest.mark.parametrize("horizon", [3, 64])
def test_interruptions_change_no_bit(session, horizon, pages):
    requests = jobs(200, seed=horizon, new=120)
    wanted = turn_by_turn(session, requests)
    session.engine.bandit = Choose("off", *STRATEGIES, seed=1, horizon=horizon)
    session.engine.page_limit = pages
    got, aborts = interrupted(session, requests, seed=3, chance=0.2)
    assert bits(got) == wanted_bits(wanted) and aborts > 5


def test_sleep_frees_the_memory_and_keeps_the_graphs(session):
    requests = jobs(24, seed=2)
    session.engine.bandit = Choose("off", *STRATEGIES, seed=2, horizon=8)
    wanted = session.generate(requests)
    graphs, cache = session.engine.runner.graphs, session.engine.cache
    arrays = [cache.k, cache.v, cache.features, session.spot.runner.k, session.spot.runner.v]
    captured, places = dict(graphs._captured), [array.data_ptr() for array in arrays]
    assert captured
    free = free_bytes()
    session.sleep()
    assert free_bytes() - free >= sum(array.nbytes for array in arrays) or not ALONE
    session.wake()
    assert graphs._captured == captured and [array.data_ptr() for array in arrays] == places
    assert bits(session.generate(requests)) == bits(wanted)
    assert graphs._captured == captured


def test_new_weights_may_come_on_another_stream(session):
    requests = jobs(24, seed=4)
    wanted = session.generate(requests)
    own = {name: weight.clone() for name, weight in session.rollout.target.state_dict().items()}
    futures = [session.submit(request) for request in requests]
    with torch.cuda.stream(torch.cuda.Stream()):
        session.update_weights(own.items())
    assert bits([future.result() for future in futures]) == bits(wanted)


def test_two_sessions_and_a_training_step_at_once():
    """One captures its graphs while the other runs and this thread allocates memory."""
    policy = random_model("llama-tied-llama3", **SHAPE).bfloat16().cuda()
    make = {"max_batch": 16, "settings": ["engine.page_size=16"]}
    requests = jobs(24, seed=5, new=60)
    with Session.from_pretrained(policy, **make) as one:
        wanted = bits(one.generate(requests))
        with Session.from_pretrained(policy, **make) as other:
            futures = [s.submit(request) for s in (one, other) for request in requests]
            policy.requires_grad_(True)
            ids = torch.arange(96, device="cuda")[None]
            for _ in range(20):
                policy(ids).logits.float().square().mean().backward()
            torch.cuda.synchronize()
            got = bits([future.result() for future in futures])
    assert got == 2 * wanted

"""A session sleeps, gets new weights, and outlives an error of the engine."""

import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from driver.common.errors import UserError
from driver.rollout.pages import PagePool
from driver.rollout.scheduler import Scheduler
from driver.session.inbox import Inbox
from tests.driver.poison import poison
from tests.driver.rollout.test_engine import STRATEGIES, Choose, observer, same
from tests.driver.session.test_session import (
    WAIT_S,
    endless,
    jobs,
    paused,
    several_turns,
    short_turns,
    tool,
)


def test_sleep_frees_the_memory_and_unfinished_requests_go_on(session, monkeypatch):
    poison(monkeypatch)  # nothing of the old KV is read
    requests, wanted = several_turns(session, 3, seed=12)
    futures, gate = paused(session, requests)
    late = session.submit(endless(jobs(1, seed=13, new=60))[0])
    cache, runner = session.engine.cache, session.spot.runner
    arrays = (cache.k, cache.v, cache.features, runner.k, runner.v)
    session.sleep()
    session.sleep()  # does nothing more
    assert [a.untyped_storage().nbytes() for a in arrays] == [0] * 5
    gate.open.set()
    more = session.submit(requests[0], on_end=tool)
    with pytest.raises(UserError, match="it sleeps; call wake"):
        session.roll_out(requests)
    assert not more.done() and not any(f.done() for f in futures)
    session.wake()
    assert [a.untyped_storage().nbytes() for a in arrays] == [a.nbytes for a in arrays]
    assert same([f.result(WAIT_S) for f in futures], wanted)
    assert same([more.result(WAIT_S)], wanted[:1])
    session.engine.bandit = Choose("off")
    late = late.result(WAIT_S)
    assert same(session.generate(late.request), [late])


def test_finished_requests_are_reported_before_a_change():
    """Their features are those of the old policy, and sleep frees them."""
    inbox, reported, seen = Inbox(threading.Lock(), 97), [], []
    made = Scheduler(PagePool(64), 4, 8, 256, on_release=reported.append)
    (state,) = made.add(jobs(1))
    made.admit()
    state.finish = "stop"
    made.retire()
    assert not reported

    def change():
        with inbox.between_bursts():
            seen.extend(reported)

    with inbox.engine:  # as the thread of a rollout
        other = threading.Thread(target=change)
        other.start()
        while not inbox.due(made):
            time.sleep(1e-3)
        inbox.exchange(made)
    other.join()
    assert seen == [state]


def test_contents_lost_before_a_rollout_are_not_computed_in_it(session):
    session.sleep()
    session.wake()
    lost = []
    note = observer(on_pass=lambda *_: lost.append(session._inbox.kv_lost))
    session.roll_out(jobs(2), observer=note)
    assert lost and not any(lost)


def test_new_weights_take_effect_between_two_passes(session, policy):
    """Requests keep their tokens; what follows is what the new policy gives after them."""
    requests, _ = several_turns(session, 3, seed=14)
    old = session.rollout.target.state_dict()
    old = {name: weight.clone() for name, weight in old.items()}
    gen = torch.Generator().manual_seed(0)
    new = {n: w + 0.05 * torch.randn(w.shape, generator=gen) for n, w in old.items()}
    session.engine.bandit = Choose("off", *STRATEGIES, seed=5)
    futures, gate = paused(session, requests)
    running = endless(jobs(2, seed=15, new=200))
    busy = [session.submit(r) for r in running]
    before = session.engine.target_version
    session.update_weights(iter(new.items()), version=before + 7)
    gate.open.set()
    got = [f.result(WAIT_S) for f in futures]
    after = [f.result(WAIT_S) for f in busy]
    assert {r.version for r in (*got, *after)} == {before + 7}
    for response in got:
        first = response.tools[0][1]
        prefix = (*response.request.prompt_ids, *response.token_ids[:first])
        params = replace(
            response.request.params, max_new_tokens=response.request.params.max_new_tokens - first
        )
        alone = replace(response.request, prompt_ids=prefix, params=params)
        (rest,) = session.generate([alone])
        count = len(rest.token_ids)
        assert response.token_ids[first : first + count] == rest.token_ids
        assert response.logprobs[first : first + count] == rest.logprobs
    session.update_weights(old)
    assert session.engine.target_version == before + 8
    stale = session.generate(running)
    session.update_weights(new)
    for response, other in zip(after, stale, strict=True):
        # Tokens of the old policy, then what the new one gives after them.
        pairs = zip(response.token_ids, other.token_ids, strict=True)
        count = next((i for i, (one, two) in enumerate(pairs) if one != two), 0)
        begun = replace(other, token_ids=other.token_ids[:count], logprobs=other.logprobs[:count])
        (rest,) = session.generate([replace(response.request, resume=begun)])
        assert rest.token_ids == response.token_ids
        assert rest.logprobs[count:] == response.logprobs[count:]
    assert not same(after, stale)
    session.update_weights(old)


def test_weights_that_do_not_fit_are_refused(session):
    weights = session.rollout.target.state_dict()
    name = "model.norm.weight"
    with pytest.raises(UserError, match=f"{name} has shape .3., config.json makes it .48."):
        session.update_weights((weights | {name: torch.zeros(3)}).items())
    with pytest.raises(UserError, match="what is not a tensor of"):
        session.update_weights((weights | {"what": torch.zeros(3)}).items())
    with pytest.raises(UserError, match="is missing"):
        session.update_weights([(name, weights[name])])
    session.update_weights(weights)
    with pytest.raises(UserError, match="update_weights: got a Linear; give the state dict"):
        session.update_weights(torch.nn.Linear(1, 1))
    with pytest.raises(UserError, match="model.norm.weight is a float; expected tensors"):
        session.update_weights(weights | {name: 1.0})
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    for weight, message in (
        (weights[name].to("meta"), "on the meta device, without values"),
        (weights[name].to_sparse(), "torch.sparse_coo; give to_dense"),
        (distribute_tensor(weights[name], mesh), "a DTensor, .*; give full_tensor"),
        (weights[name].int(), "torch.int32; expected floats"),
        (weights[name].to(torch.float8_e4m3fn), "torch.float8_e4m3fn; expected floats, 16 b"),
    ):
        for form in (dict, dict.items):
            with pytest.raises(UserError, match=f"{name} is {message}"):
                session.update_weights(form(weights | {name: weight}))
    session.update_weights(weights)
    with pytest.raises(UserError, match=f"{name} has shape .0., config.json makes it .48."):
        session.update_weights(weights | {name: torch.empty(0)})
    with pytest.raises(UserError, match="a stream has .name, tensor. pairs, got tensor"):
        session.update_weights(weights.values())
    session.update_weights(weights)


def test_weights_that_are_not_finite_are_refused(session):
    """A state dict leaves weights and version; after a stream requests wait for whole weights."""
    requests = jobs(6, seed=36)
    wanted, version = session.generate(requests), session.engine.target_version
    weights = {n: w.clone() for n, w in session.rollout.target.state_dict().items()}
    for value in (float("nan"), float("inf"), -float("inf")):
        bad = {name: weight.clone() for name, weight in weights.items()}
        bad["model.norm.weight"][3] = value
        with pytest.raises(UserError, match="weights: model.norm.weight holds a weight that is no"):
            session.update_weights(bad)
        assert same(session.generate(requests), wanted)
        assert session.engine.target_version == version
    futures, gate = paused(session, short_turns(jobs(2, seed=37)))
    with pytest.raises(UserError, match="model.norm.weight holds a weight that is not finite"):
        session.update_weights(bad.items())
    gate.open.set()
    late = session.submit(requests[0])
    for refused in (session.generate, session.roll_out):
        with pytest.raises(UserError, match="update_weights failed halfway; call it again"):
            refused(requests)
    bad["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(UserError, match="has shape .3."):  # the weights are still a mixture
        session.update_weights(bad)
    assert not late.done() and not any(future.done() for future in futures)
    session.update_weights(iter(weights.items()), version)
    assert same([late.result(WAIT_S)], wanted[:1]) and same(session.generate(requests), wanted)
    assert all(future.result(WAIT_S).version == version for future in futures)


def test_an_error_of_the_engine_reaches_every_future_and_the_session_goes_on(session, monkeypatch):
    requests = jobs(8, seed=16)
    wanted = session.generate(requests)
    futures, gate = paused(session, short_turns(jobs(2, seed=17)))

    def fails(*args):
        raise RuntimeError("the device failed")

    with monkeypatch.context() as patch:
        patch.setattr(session.engine.program, "run", fails)
        futures += [session.submit(r) for r in requests]
        for future in futures:
            with pytest.raises(RuntimeError, match="the device failed"):
                future.result(WAIT_S)
    gate.open.set()  # the answers come too late
    assert same(session.generate(requests), wanted)

"""The spot trainer on a GPU: captured steps, partitions."""

import time
from copy import deepcopy

import pytest
import torch

from driver.drafter.buffer import Document
from driver.drafter.loss import Teacher, unrolled_loss
from driver.drafter.overlap import sizes_of
from driver.drafter.partition import STOP_S
from driver.model.drafter import Drafter
from tests import kit
from tests.driver.drafting import finish, packed_batch
from tests.driver.hugging_face import random_model
from tests.driver.rollout.test_engine import generate, make_rollout, requests, same

pytestmark = [kit.gpu, kit.needs_gpu]
SHAPE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
WORDS = [
    "run.device=cuda",
    "model.dtype=bfloat16",
    "engine.page_size=16",
    "spot.tokens_per_step=256",
    "spot.final_steps=0",
    "drafter.draft_vocab=64",
]


@pytest.fixture(scope="module")
def policy():
    return random_model("llama-tied-llama3", **SHAPE).to(torch.bfloat16).cuda()


def trainer(policy, *words):
    return make_rollout(policy, *WORDS, *words).spot


def document(spot, length: int, seed: int) -> Document:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 97, (length,), generator=generator)
    features = torch.randn(length - 1, spot.target.feature_size, generator=generator)
    return Document(tokens, features.bfloat16().cuda(), spot.target_version)


def fill(spot, lengths=(40, 90, 7, 150, 30), seed=0) -> None:
    for index, length in enumerate(lengths):
        spot.buffer.add(document(spot, length, 100 * seed + index))


def learned(spot) -> list[torch.Tensor]:
    """The trained weights and their average."""
    return [*spot.drafter.state_dict().values(), *spot.step.average.values.values()]


def steps(spot, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        assert spot.micro_step()
        losses.append(spot.metrics()["drafter/loss"])
    return losses


def test_half_precision_is_close_to_float64(policy):
    """Loss and gradients of a packed batch, with attention and autocast."""
    spot = trainer(policy)
    fill(spot)
    pieces = spot.buffer.sample(256, 0)
    batch = spot.bin.batch(*spot.bin.load(pieces, 0, 0), spot.teachers)
    means = spot.step.backward(batch)
    used = sum(piece.length for piece in pieces)
    exact = Drafter(spot.drafter.spec).double()
    exact.load_state_dict(spot.drafter.state_dict())

    def wide(x):
        return x[:used].double().cpu()

    teacher = Teacher(spot.target.final_norm.double().cpu(), exact.lm_head.weight)
    reference = packed_batch(
        wide(batch.embedded),
        wide(batch.features),
        wide(batch.final),
        batch.position[:used].cpu(),
        [piece.length for piece in pieces],
        [teacher] * len(pieces),
    )
    loss, expected = unrolled_loss(exact, reference, spot.target.cos_sin.cpu(), spot.step.unroll)
    loss.backward()
    torch.testing.assert_close(means.double().cpu(), expected, rtol=3e-2, atol=2e-2)
    for ours, theirs in zip(spot.drafter.trainable(), exact.trainable(), strict=True):
        error = (ours.grad.double().cpu() - theirs.grad).norm() / theirs.grad.norm()
        assert error < 0.05


def test_captured_steps_train_as_steps_op_by_op(policy):
    """Different documents in every replay, of one policy and of two."""
    results = []
    for captured in (True, False):
        spot = trainer(policy, "spot.keep_long=0.25")
        spot.step.failed_capture = not captured
        fill(spot)
        losses = steps(spot, 5)
        finish(spot)
        spot.start_step(1)
        fill(spot, (60, 120, 33, 80), seed=1)
        losses += steps(spot, 5)
        assert len(spot.step._graphs) == (2 if captured else 0)
        spot.swap()
        average = spot.step.average.values["fc.weight"].clone()
        assert not torch.equal(average, spot.drafter.fc.weight)
        got = spot.runner.weights["fc"]
        assert torch.equal(got, average.to(got.dtype))
        results.append((losses, spot.drafter.fc.weight.clone(), average))
    assert results[0][0] == pytest.approx(results[1][0], rel=2e-2)
    for one, other in zip(results[0][1:], results[1][1:], strict=True):
        torch.testing.assert_close(one, other, rtol=0.1, atol=5e-3)


def test_final_steps_during_large_kernels_train_as_alone(policy):
    """All are enqueued at once, each with separate host copies of its documents."""
    results, large = [], torch.randn(4096, 4096, device="cuda")
    for busy in (False, True):
        spot = trainer(policy, "spot.final_steps=6")
        fill(spot)
        steps(spot, 2)
        version = spot.runner.version
        spot.begin_final_steps()
        if busy:
            for _ in range(100):
                large = torch.mm(large, large).mul_(1e-3)
        spot.end_final_steps()
        assert spot.steps == 8 and spot.runner.version == version + 1
        results.append((spot.metrics()["drafter/loss"], spot.drafter.fc.weight.clone()))
    assert results[0][0] == pytest.approx(results[1][0], rel=2e-2)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0.1, atol=5e-3)


def test_a_graph_captured_at_the_start_changes_nothing_and_serves_the_first_step(policy):
    """Captured before a document was recorded, with the drafter of another run."""
    taught = trainer(policy)
    fill(taught)
    steps(taught, 3)
    results = []
    for early in (False, True):
        spot = trainer(policy)
        spot.load_state_dict(deepcopy(taught.state_dict()))
        before = [x.clone() for x in learned(spot)]
        moments = [x.clone() for s in spot.step.optimizer.state.values() for x in s.values()]
        if early:
            spot.prepare()
        assert len(spot.step._graphs) == early
        after = [x for s in spot.step.optimizer.state.values() for x in s.values()]
        assert all(map(torch.equal, moments, after))
        assert all(map(torch.equal, before, learned(spot)))
        known = taught.state_dict()["acceptance"]
        assert spot.reports.last["drafter/acceptance"] == known
        fill(spot, seed=1)
        losses = steps(spot, 3)
        assert len(spot.step._graphs) == 1
        results.append((losses, spot.drafter.fc.weight.clone()))
    assert results[0][0] == pytest.approx(results[1][0], rel=2e-2)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0.1, atol=5e-3)


def test_a_captured_step_that_is_not_finite_changes_nothing(policy):
    spot = trainer(policy)
    fill(spot)
    steps(spot, 2)
    before = [x.clone() for x in learned(spot)]
    moments = [s["exp_avg"].clone() for s in spot.step.optimizer.state.values()]
    for held in spot.buffer.fresh:
        held.features[3] = float("nan")
    assert spot.micro_step()
    with pytest.warns(UserWarning, match="gradient is not finite"):
        spot.stop()
    assert all(map(kit.same_bits, before, learned(spot)))
    for old, state in zip(moments, spot.step.optimizer.state.values(), strict=True):
        assert kit.same_bits(old, state["exp_avg"])
    spot.buffer.clear()
    fill(spot, seed=3)
    steps(spot, 2)
    assert all(bool(v.isfinite().all()) for v in learned(spot))


def test_captured_steps_stay_valid_after_loading_a_state(policy):
    """As ranks that train in turns do."""
    spots = [trainer(policy), trainer(policy)]
    for index, spot in enumerate(spots):
        fill(spot, seed=index)
        steps(spot, 3)
    spots[0].load_state_dict(spots[1].state_dict())
    graphs = dict(spots[0].step._graphs)
    spots[0].buffer.clear()
    fill(spots[0], seed=1)
    losses = [steps(spot, 3) for spot in spots]
    assert spots[0].step._graphs == graphs and len(graphs) == 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def overlapped(policy, *words):
    """A rollout with a placement and documents, its requests, and their tokens without training."""
    rollout = make_rollout(
        policy, *WORDS, "bandit.policy=off", "spot.mode=overlapped",
        "spot.swap_every=4", *words,
    )  # fmt: skip
    spot, jobs = rollout.spot, requests(count=8, new=60, stop=())
    wanted = generate(rollout, jobs, "off")
    rollout.engine.generate(jobs)
    assert spot.mode == "serial" and spot.buffer.num_tokens > 0
    rollout.tuner.tune()
    finish(spot)
    assert spot.mode == "overlapped" and spot.placement.partition.sms == spot.overlap.sms
    spot.start_step(0)
    fill(spot)
    return rollout, jobs, wanted


def test_a_partition_trains_during_the_tail_and_changes_no_token(policy):
    rollout, jobs, wanted = overlapped(policy, "spot.slowdown=10")
    spot = rollout.spot
    assert {overlap.sms for overlap in rollout.tuner.measured} == set(sizes_of(spot.target.device))
    assert all(o.slowdown > 0.5 and o.step_s > 0 and o.duty == 1 for o in rollout.tuner.measured)
    begun, version = spot.steps, spot.runner.version
    for _ in range(3):
        assert same(rollout.engine.generate(jobs), wanted)
    spot.stop()
    assert spot.steps > begun and spot.runner.version > version
    assert {"drafter/overlap_slowdown", "drafter/sms", "drafter/duty"} <= spot.metrics().keys()
    finish(spot)


def test_measured_steps_change_nothing(policy):
    rollout = make_rollout(
        policy, *WORDS, "bandit.policy=off", "spot.mode=overlapped",
        "spot.final_steps=0",
    )  # fmt: skip
    spot = rollout.spot
    rollout.engine.generate(requests(count=8, new=60, stop=()))
    before = [weight.detach().clone() for weight in spot.drafter.trainable()]
    average = {name: value.clone() for name, value in spot.step.average.values.items()}
    rollout.tuner.tune()
    finish(spot)
    assert rollout.tuner.measured and spot.tokens_seen == spot.steps == 0
    assert all(map(torch.equal, before, spot.drafter.trainable()))
    assert all(
        torch.equal(average[name], value) for name, value in spot.step.average.values.items()
    )
    spot.start_step(0)
    fill(spot)
    assert spot.micro_step() and spot.micro_step()
    torch.cuda.synchronize()
    assert not all(map(torch.equal, before, spot.drafter.trainable()))


def test_a_stop_waits_for_the_step_in_flight_alone(policy):
    """On a busy machine: steps in flight at a stop are counted, not timed.

    Other processes can only lengthen a stop, so the shortest of several must keep to the limit, or
    to twice the measured step.
    """
    rollout, _, _ = overlapped(policy, "spot.slowdown=10", "spot.swap_every=1000")
    spot, most, stops = rollout.spot, [], []
    add = spot.reports.add

    def counted(report: torch.Tensor) -> None:
        add(report)
        most.append(len(spot.reports._queued))

    spot.reports.add = counted
    for _ in range(8):
        spot.thread.stop_s = 0.0
        begun = spot.steps
        spot.start()
        while spot.steps < begun + 5 and spot.running:
            time.sleep(1e-3)
        spot.stop()
        assert spot.placement.partition.stream.query() and not spot.reports._queued
        stops.append(spot.thread.stop_s)
    assert max(most) == 1
    assert min(stops) < max(STOP_S, 2 * spot.overlap.stop_s), stops


def test_training_during_the_tail_rests_to_keep_to_the_budget(policy):
    rollout, jobs, wanted = overlapped(policy, "spot.slowdown=1.05")
    spot = rollout.spot
    rested = [overlap for overlap in rollout.tuner.measured if overlap.duty < 1]
    assert rested or any(overlap.slowdown <= 1.05 for overlap in rollout.tuner.measured)
    assert spot.placement.duty == spot.overlap.duty
    assert same(rollout.engine.generate(jobs), wanted)
    spot.stop()
    finish(spot)

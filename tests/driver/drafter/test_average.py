"""The averaged weights: against float64, across skipped steps, and their effect."""

import pytest
import torch

from driver.drafter.buffer import Document, Piece
from driver.drafter.loss import unrolled_loss
from driver.drafter.trainer import SpotTrainer
from tests.driver.drafting import Parts, build_parts, finish
from tests.kit import same_bits

SHARPER = 4.0  # of the random target's final norm, so that its distribution is far from uniform


@pytest.fixture
def parts() -> Parts:
    return build_parts()


def trained(trainer: SpotTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.step.average.trained.items()}


def averaged(trainer: SpotTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.step.average.values.items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


def learn(trainer: SpotTrainer, steps: int) -> None:
    for _ in range(steps):
        trainer.micro_step()
    trainer.swap()


def document(parts: Parts, seed: int, length: int = 40) -> Document:
    with torch.no_grad():
        return parts.document(length, seed)


@pytest.mark.parametrize("horizon", [4, 64])
def test_the_average_is_that_of_float64(parts, horizon):
    """A warm-up that forgets random weights, then a share of 1 / horizon."""
    trainer = parts.trainer(average=horizon)
    trainer.buffer.add(document(parts, 1))
    wanted = {name: value.double() for name, value in trained(trainer).items()}
    for step in range(1, 50):
        trainer.micro_step()
        share = max(1 / horizon, 9 / (10 + step))
        for name, value in trained(trainer).items():
            wanted[name] += share * (value.double() - wanted[name])
    assert not equal(averaged(trainer), trained(trainer))
    for name, value in averaged(trainer).items():
        torch.testing.assert_close(value.double(), wanted[name], rtol=1e-5, atol=1e-6)


def test_a_step_that_is_not_finite_leaves_the_average(parts):
    """And does not count: the next step has the share of the skipped one."""
    trainer = parts.trainer()
    trainer.buffer.add(document(parts, 1))
    trainer.micro_step()
    before, other = averaged(trainer), trained(trainer)
    assert not equal(before, other)
    trainer.buffer.clear()
    broken = document(parts, 2)
    broken.features[30] = float("nan")
    trainer.buffer.add(broken)
    with pytest.warns(UserWarning, match="gradient is not finite"):
        trainer.micro_step()
        trainer.stop()
    assert equal(averaged(trainer), before) and equal(trained(trainer), other)
    trainer.buffer.clear()
    trainer.buffer.add(document(parts, 3))
    trainer.micro_step()
    name = "fc.weight"
    wanted = before[name] + 9 / 12 * (trained(trainer)[name] - before[name])
    torch.testing.assert_close(averaged(trainer)[name], wanted)


@pytest.mark.parametrize("horizon", [64, 0])
def test_the_runner_gets_the_average_under_the_rebuilt_vocabulary(parts, horizon):
    trainer = parts.trainer(average=horizon, final_steps=3)
    recorded = document(parts, 1)
    common = [3, 50, 60, 96]
    recorded.tokens[:] = torch.tensor(common).repeat(10)
    trainer.buffer.add(recorded)
    finish(trainer)
    source = averaged(trainer) if horizon else trained(trainer)
    assert equal(averaged(trainer), trained(trainer)) == (horizon == 0)
    assert torch.equal(parts.runner.weights["fc"], source["fc.weight"])
    ids = parts.runner.d2t.tolist()
    assert set(common) <= set(ids) and ids == parts.drafter.target_ids.tolist()
    assert torch.equal(parts.runner.weights["head"], parts.target.head[ids])
    saved = trainer.state_dict()
    assert torch.equal(saved["drafter"]["fc.weight"], source["fc.weight"])
    assert torch.equal(saved["drafter"]["lm_head.weight"], parts.drafter.lm_head.weight)


@pytest.mark.parametrize("before", [64, 0])
@pytest.mark.parametrize("after", [64, 0])
def test_both_weights_are_taken_over_in_place(before, after):
    """If either side has no average, one set of weights stands for both."""
    first, second = build_parts(), build_parts()
    one, other = first.trainer(average=before), second.trainer(average=after)
    one.buffer.add(document(first, 1))
    learn(one, 5)
    places = {name: value.data_ptr() for name, value in other.step.average.values.items()}
    other.load_state_dict(one.state_dict())
    assert places == {name: value.data_ptr() for name, value in other.step.average.values.items()}
    assert equal(trained(other), trained(one))
    assert equal(averaged(other), averaged(one) if after else trained(one))
    assert torch.equal(second.runner.weights["fc"], averaged(other)["fc.weight"])


def acceptance(parts: Parts, documents: list[Document]) -> float:
    """Acceptance of first drafts over the documents."""
    whole = parts.trainer(tokens_per_step=4096)
    pieces = [Piece(d, 0, d.entries) for d in documents]
    batch = whole.bin.batch(*whole.bin.load(pieces, 0, 0), whole.teachers)
    with torch.no_grad():
        return float(unrolled_loss(parts.drafter, batch, parts.target.cos_sin, 1)[1][1])


def test_with_a_constant_policy_the_average_is_no_worse_than_a_finished_drafter():
    """A rate that decayed to zero left it close to the optimum. Small batches at a constant rate
    move the weights away from there; their mean stays."""
    parts = build_parts()
    parts.target.final_norm.mul_(SHARPER)
    documents = [document(parts, seed, length=24) for seed in range(60)]

    def learner(**settings) -> SpotTrainer:
        trainer = parts.trainer(unroll=1, **settings)
        for one in documents:
            trainer.buffer.add(one)
        return trainer

    warm = learner(average=0, tokens_per_step=256)
    for step in range(150):
        warm.set_lr(1e-2 * (1 - step / 150))
        warm.micro_step()
    alone = acceptance(parts, documents)
    spot = learner(lr=7e-3, tokens_per_step=96)
    spot.load_state_dict(warm.state_dict())
    learn(spot, 200)
    last = acceptance(parts, documents)
    parts.drafter.load_state_dict(spot.state_dict()["drafter"])
    mean = acceptance(parts, documents)
    assert torch.equal(parts.runner.weights["fc"], parts.drafter.fc.weight)
    assert last < alone - 0.01 and mean > alone + 0.005

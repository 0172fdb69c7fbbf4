"""Policy weights of real ranks on Gloo, sharded and whole, against one rank."""

import copy

import pytest
import torch

from driver.model.checkpoint import load_checkpoint
from driver.policy import host_moments
from driver.policy.host_moments import MOMENTS
from driver.policy.trainer import PolicyTrainer
from tests import kit
from tests.driver.hugging_face import save_model
from tests.driver.policy.test_trainer import REWARDS, Cfg, make_model, make_responses
from tests.forks import run_ranks

# Each rank makes two updates, saves its part, and writes what it has.
SCRIPT = """
import sys
from pathlib import Path
import torch
from driver.common.world import World
from driver.policy.trainer import PolicyTrainer
from driver.records.parts import load_parts, save_parts
from tests.driver.policy.test_trainer import REWARDS, Cfg
from tests.driver.policy.test_weights import caught, moments, trained

folder, shard, kept = Path(sys.argv[1]), sys.argv[2], len(sys.argv) > 3 and sys.argv[3]
world = World.join("cpu", 60)
model, responses, options = torch.load(folder / "inputs.pt", weights_only=False)
trainer = PolicyTrainer(model, Cfg(**options, shard=shard), world=world)
if kept:
    trainer.load_state_dict(torch.load(folder / kept / "counters.pt"))
    parts = trainer.weights.placed(trainer.weights.tensors(trainer.optimizer))
    load_parts(folder / kept / "parts", parts, world.background)
    weights = dict(trainer.weights.stream()) | moments(trainer)
    if world.rank == 0:
        torch.save(weights, folder / "loaded.pt")
else:
    logprobs, gradients = caught(trainer, responses)
    weights = trained(trainer, responses) | moments(trainer)
    (folder / "saved").mkdir(exist_ok=True)
    parts = trainer.weights.placed(trainer.weights.written(trainer.optimizer))
    save_parts(folder / "saved" / "parts", parts, world.background)
    torch.save(trainer.state_dict(), folder / "saved" / "counters.pt")
    torch.save((logprobs, gradients, weights), folder / f"rank-{world.rank}.pt")
world.leave()
"""

# Each rank makes the two updates, the first one after it has failed.
FAILED = """
import sys
from pathlib import Path
import torch
from driver.common.world import World
from driver.policy.trainer import PolicyTrainer
from tests.driver.policy.test_trainer import Cfg
from tests.driver.policy.test_weights import failed, trained

folder, shard = Path(sys.argv[1]), sys.argv[2]
world = World.join("cpu", 60)
model, responses, options = torch.load(folder / "inputs.pt", weights_only=False)
trainer = PolicyTrainer(model, Cfg(**options, shard=shard), world=world)
failed(trainer, responses)
weights = trained(trainer, responses)
if world.rank == 0:
    torch.save(weights, folder / "again.pt")
world.leave()
"""

# The file changes once the ranks have their parts.
MAPPED = """
import sys
from pathlib import Path
import torch
from driver.common.world import World
from driver.model.checkpoint import load_model
from driver.policy.weights import PolicyWeights

folder = Path(sys.argv[1])
world = World.join("cpu", 60)
model = load_model(folder, torch.float32, mapped=True)
offload = "all" if world.size == 1 else "none"
weights = PolicyWeights(model, world, offload, world.size > 1, torch.device("cpu"))
path = folder / "model.safetensors"
world.gather(0)
if world.rank == 0:
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
world.gather(0)
found = {name: weight.clone() for name, weight in weights.stream()}
torch.save(found, folder / f"rank-{world.rank}.pt")
world.leave()
"""

# Several sums of gradients, of one tensor or many.
SMALL_SUMS = """
from driver.policy import weights
weights.SUM_BYTES = 4000
"""

# Several rounds of the ring and several blocks of host memory for one update; tensors in pieces.
SMALL_BLOCKS = """
from driver.policy import host_moments
host_moments.BLOCK_NUMBERS, host_moments.HOST_NUMBERS = 700, 5000
"""


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def caught(trainer, responses):
    """Log-probs of the responses of this rank by id, and the gradient of an update."""
    step, seen, gradients = trainer._optimizer_step, {}, {}
    train = trainer._train

    def keep(minibatches, *rest):
        done, metrics = train(minibatches, *rest)
        for batch in done:
            for owner in batch.owner.unique().tolist():
                seen[owner] = batch.old_logprobs[batch.owner == owner]
        return done, metrics

    def catch(lr):
        for name, param in trainer.weights.named.items():
            gradients[name] = whole(param.grad).clone()
        return trainer.optimizer.zero_grad() or torch.zeros(())

    trainer._optimizer_step, trainer._train = catch, keep
    trainer.update(responses, REWARDS)
    trainer._optimizer_step, trainer._train = step, train
    return seen, gradients


def trained(trainer, responses):
    """The weights after two updates."""
    for _ in range(2):
        trainer.update(responses, REWARDS)
    return {name: weight.clone() for name, weight in trainer.weights.stream()}


def failed(trainer, responses):
    """An update without memory for its second micro-batch."""
    passes, forward = [], trainer.weights._forward

    def fail(*arguments):
        passes.append(arguments)
        if len(passes) == 2:
            raise torch.OutOfMemoryError
        return forward(*arguments)

    trainer.weights._forward = fail
    with pytest.raises(torch.OutOfMemoryError):
        trainer.update(responses, REWARDS)
    trainer.weights._forward = forward


def moments(trainer):
    """Adam's moments, whole."""
    parts = trainer.weights.placed(trainer.weights.tensors(trainer.optimizer))
    return {
        f"{name} {key}": whole(part).clone() for key in MOMENTS for name, part in parts[key].items()
    }


def inputs(folder, dtype, tied=True, **options):
    model = make_model(dtype, "qwen2", tied=tied)
    responses = make_responses(model)
    # Half of the rows hold one response: ranks have unequal rows, some of them none.
    options = {"micro_batch_tokens": 40, "lr": 1e-3, **options}
    torch.save((model, responses, options), folder / "inputs.pt")
    return PolicyTrainer(model, Cfg(**{**options, "offload": "none"})), responses


def launch(folder, ranks, *words, script=SCRIPT, shard="true"):
    code = run_ranks(script, [str(folder), shard, *words], ranks, folder / "log")
    log = (folder / "log").read_text()
    assert code == 0 and "is deprecated" not in log, log[-4000:]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("ranks", "shard"), [(2, "true"), (4, "true"), (2, "false"), (4, "false")])
def test_ranks_share_one_rank_s_update(ranks, shard, checkpointing, tmp_path):
    """Log-probs are equal bit for bit; gradients differ by the order of their sums."""
    trainer, responses = inputs(
        tmp_path, torch.float32, tied=not checkpointing, checkpointing=checkpointing
    )
    logprobs, gradients = caught(trainer, responses)
    launch(tmp_path, ranks, script=SMALL_SUMS + SCRIPT, shard=shard)
    found = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(ranks)]
    seen = {}
    for mine, theirs, weights in found:
        assert not seen.keys() & mine.keys()
        seen |= mine
        assert theirs.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert gradient.abs().max() > 1e-4
            assert (theirs[name] - gradient).abs().max() <= 1e-7, name
        assert all(torch.equal(weights[name], found[0][2][name]) for name in weights)
    assert seen.keys() == logprobs.keys()
    assert all(torch.equal(seen[owner], logprobs[owner]) for owner in logprobs)


@pytest.mark.parametrize("shard", ["true", "false"])
def test_gradients_in_half_precision_are_added_in_float32(shard, tmp_path):
    trainer, responses = inputs(tmp_path, torch.bfloat16)
    logprobs, gradients = caught(trainer, responses)
    launch(tmp_path, 2, shard=shard)
    found = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(2)]
    seen = found[0][0] | found[1][0]
    assert all(torch.equal(seen[owner], logprobs[owner]) for owner in logprobs)
    for name, gradient in gradients.items():
        assert found[0][1][name].dtype == torch.float32
        # Rows are packed in another way, and their gradients are rounded to bfloat16.
        assert (found[0][1][name] - gradient).norm() <= 2e-2 * gradient.norm(), name
        gathered = torch.bfloat16 if shard == "true" else torch.float32
        assert found[0][2][name].dtype == gathered
        assert torch.equal(found[0][2][name], found[1][2][name])


@pytest.mark.parametrize("device", kit.DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_weights_in_host_memory_change_no_bit(checkpointing, dtype, device, monkeypatch):
    monkeypatch.setattr(host_moments, "BLOCK_NUMBERS", 700)
    responses = make_responses(make_model(dtype, "qwen2"))
    found = {}
    for offload in ("none", "all"):
        model = make_model(dtype, "qwen2", tied=checkpointing).to(device)
        options = {"micro_batch_tokens": 40, "checkpointing": checkpointing, "offload": offload}
        trainer = PolicyTrainer(model, Cfg(**options), device=torch.device(device))
        parts = *caught(trainer, responses), trained(trainer, responses), moments(trainer)
        kept = "cpu" if offload == "all" else device
        assert {param.device.type for param in trainer.params} == {kept}
        found[offload] = parts
    for plain, moved in zip(*found.values(), strict=True):
        assert plain.keys() == moved.keys() and plain
        for key, value in plain.items():
            assert torch.equal(value.cpu(), moved[key].cpu()), key


@pytest.mark.parametrize("offload", ["none", "all"])
def test_an_update_after_a_failed_one_does_not_add_its_gradients(offload):
    model = make_model(torch.float32, "qwen2")
    responses = make_responses(model)
    options = Cfg(micro_batch_tokens=40, lr=1e-3, offload=offload)
    trainer, other = PolicyTrainer(copy.deepcopy(model), options), PolicyTrainer(model, options)
    failed(trainer, responses)
    found, expected = trained(trainer, responses), trained(other, responses)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_nor_do_ranks_that_have_moved_them_to_the_host(tmp_path):
    inputs(tmp_path, torch.float32, offload="all")
    launch(tmp_path, 2)
    launch(tmp_path, 2, script=FAILED)
    *_, expected = torch.load(tmp_path / "rank-0.pt")
    found = torch.load(tmp_path / "again.pt")
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    ("saving", "shard", "loading", "loading_shard"),
    [
        (2, "true", 3, "true"),
        (1, "true", 2, "true"),
        (2, "true", 1, "true"),
        (2, "true", 2, "false"),
        (3, "false", 2, "true"),
        (2, "false", 1, "false"),
    ],
)
def test_any_ranks_load_what_others_saved(saving, shard, loading, loading_shard, tmp_path):
    inputs(tmp_path, torch.float32)
    launch(tmp_path, saving, shard=shard)
    launch(tmp_path, loading, "saved", shard=loading_shard)
    saved, loaded = torch.load(tmp_path / "rank-0.pt")[2], torch.load(tmp_path / "loaded.pt")
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_copy_their_parts_of_a_policy_that_is_mapped_to_its_file(ranks, tmp_path):
    save_model(tmp_path, "qwen3")
    whole = load_checkpoint(tmp_path, torch.float32)[1]
    launch(tmp_path, ranks, script=MAPPED)
    for rank in range(ranks):
        found = torch.load(tmp_path / f"rank-{rank}.pt")
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], whole[name]) for name in whole)


@pytest.mark.parametrize(("ranks", "offload"), [(1, "moments"), (2, "moments"), (2, "all")])
def test_what_is_in_host_memory_changes_no_bit(ranks, offload, tmp_path):
    inputs(tmp_path, torch.float32, tied=False)
    launch(tmp_path, ranks)
    *_, plain = torch.load(tmp_path / "rank-0.pt")
    inputs(tmp_path, torch.float32, tied=False, offload=offload)
    launch(tmp_path, ranks, script=SMALL_BLOCKS + SCRIPT)
    *_, weights = torch.load(tmp_path / "rank-0.pt")
    assert weights.keys() == plain.keys()
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
    launch(tmp_path, ranks, "saved")
    loaded = torch.load(tmp_path / "loaded.pt")
    assert all(torch.equal(loaded[name], plain[name]) for name in plain)

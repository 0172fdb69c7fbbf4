"""The update that begins during the rollout: the same gradients, or none of them."""

import copy
import time
from types import SimpleNamespace

import pytest
import torch

from driver.common.errors import UserError
from driver.common.stop import Stopped
from driver.config.load import load_config
from driver.policy.early import EarlyGradients, why_not_early
from driver.policy.trainer import PolicyTrainer
from driver.run.start import start_run
from driver.run.tail_update import TailUpdate
from tests import kit
from tests.driver.policy.test_trainer import REWARDS, Cfg, make_model, make_responses
from tests.driver.run.test_collector import with_device
from tests.driver.run.test_run import WORDS

STEPS = 4
TAIL = "grpo.tail_tokens=80"
RUN = [
    *WORDS,
    "warmup.steps=0",
    f"run.steps={STEPS}",
    "run.eval_prompts=0",
    "grpo.prompts_per_step=12",
    "grpo.samples_per_prompt=2",
    "grpo.micro_batch_tokens=80",
    "sampling.max_new_tokens=96",
    "engine.max_batch=24",
]
SPECULATION = {
    "off": ["engine.strategies=off"],
    "ngram": ["engine.strategies=off ngram:4,1,5", "bandit.policy=ngram:4,1,5"],
    "bandit": [],
    "few places": ["engine.max_batch=5"],
}


def reward(prompt, text, finished):
    return sum(map(ord, text)) % 7 / 7


@pytest.fixture
def start(tmp_path, monkeypatch):
    runs = []

    def make(*words):
        root = [f"run.root={tmp_path}", f"run.name=run-{len(runs)}"]
        notes = []
        run = start_run(load_config([*RUN, *root, *words]), notes.append)
        run.notes = notes
        monkeypatch.setattr(run.task, "reward", reward)
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.close(whole=True)


def make_steps(run, steps=STEPS):
    """Of each step: lengths, rewards, the bits of the gradient before it was clipped, metrics."""
    found, caught, step = [], [], run.trainer._optimizer_step

    def catch(lr):
        caught.extend(p.grad.clone() for p in run.trainer.params)
        return step(lr)

    run.trainer._optimizer_step = catch
    for _ in range(steps):
        made = run.gather()
        metrics = run.update_policy(made)
        run.sync_weights()
        lengths = [len(r.token_ids) for r in made.responses]
        found.append((lengths, made.rewards, list(caught), metrics))
        caught.clear()
    return found


def assert_same(some, others):
    assert len(some) == len(others)
    for (lengths, rewards, gradients, mine), (*other, theirs) in zip(some, others, strict=True):
        assert [lengths, rewards] == other[:2]
        assert all(map(torch.equal, gradients, other[2]))
        for name in mine.keys() & theirs.keys() - {"update/hidden_share"}:
            assert mine[name] == theirs[name] or name.startswith("timing_s/"), name


def hidden(found):
    return [metrics.get("update/hidden_share") for *_, metrics in found]


@pytest.fixture(scope="module")
def after(tmp_path_factory):
    """Steps whose updates begin after the rollout."""
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("after")
        words = [f"run.root={root}", "run.name=run", *SPECULATION["off"]]
        run = start_run(load_config([*RUN, *words]), print)
        patch.setattr(run.task, "reward", reward)
        found = make_steps(run)
        run.close(whole=True)
    assert hidden(found) == [None] * STEPS
    return found


@pytest.mark.parametrize("words", SPECULATION.values(), ids=SPECULATION)
def test_gradients_are_those_of_the_update_after_the_rollout(start, after, words):
    """Whatever speculation does, and so whenever a response ends."""
    found = make_steps(start(TAIL, *words))
    assert_same(found, after)
    assert all(0.0 < share < 1.0 for share in hidden(found))


def test_the_first_row_alone_may_be_small(start):
    """Then it is done in the tail, and its size belongs to the update wherever it is done."""
    words = ["grpo.tail_tokens=60", "grpo.micro_batch_tokens=4000"]
    early, late = start(*words), start(*words, *SPECULATION["off"])
    late.collector.tail = None
    found = make_steps(early)
    assert_same(found, make_steps(late))
    assert all(0.0 < share < 0.3 for share in hidden(found))


@pytest.mark.parametrize(
    "words",
    [
        ["grpo.entropy_coef=0.1"],
        ["grpo.kl_coef=0.1"],
        ["grpo.advantage=dapo", "grpo.truncated=mask"],
        pytest.param(["grpo.advantage=dr_grpo", "reward.workers=1"], marks=pytest.mark.slow),
        ["grpo.advantage=rloo", "model.dtype=bfloat16"],
    ],
    ids=" ".join,
)
def test_gradients_of_other_losses_are_equal_too(start, words):
    plain, early = (make_steps(start(*words, *more), 2) for more in ([], [TAIL]))
    assert_same(early, plain)
    assert any(hidden(early))


def as_many_threads(monkeypatch):
    """The thread of a GPU's update would use one core, whose sums may differ from several ones'."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


def test_a_thread_beside_the_passes_changes_nothing(start, after, monkeypatch):
    """Chance decides how many micro-batches are complete when the rollout ends."""
    as_many_threads(monkeypatch)
    run = with_device(start(TAIL, *SPECULATION["off"]))
    run.collector.tail.threaded = True
    found, spot = make_steps(run), run.rollout.spot
    assert_same(found, after)
    assert spot is None and not run.collector.tail.thread.running


@kit.gpu
@kit.needs_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_partition_of_a_card_changes_nothing(start, dtype):
    words = [
        "run.device=cuda",
        f"model.dtype={dtype}",
        "model.hidden_size=128",
        "engine.page_size=16",
    ]
    plain, early = (start(*words, *more) for more in ([], [TAIL]))
    wanted, found = make_steps(plain), make_steps(early)
    assert_same(found, wanted)
    assert early.collector.tail.exact and hidden(found)[0] == 0.0  # the first update compares
    assert [note for note in early.notes if "with equal gradients" in note]


def test_groups_in_the_order_in_which_they_end_are_not_used(start, after, monkeypatch):
    def ended(self, least, rewards):
        whole = [g for g, members in self._groups.items() if len(members) == self.samples]
        return [g for g in whole if all(place in rewards for place, _ in self._groups[g])]

    monkeypatch.setattr(TailUpdate, "_final", ended)
    done = []
    advance = EarlyGradients.advance
    monkeypatch.setattr(
        EarlyGradients, "advance", lambda self, *of: done.append(advance(self, *of)) or done[-1]
    )
    found = make_steps(start(TAIL, *SPECULATION["few places"]))
    assert_same(found, after)
    assert any(done) and hidden(found) == [0.0] * STEPS


def test_sums_for_other_advantages_are_not_used():
    model, cfg = make_model(), Cfg(micro_batch_tokens=30)
    responses = make_responses(model)
    trainer, plain = (PolicyTrainer(copy.deepcopy(model), cfg) for _ in range(2))
    early = EarlyGradients(trainer)
    assert early.advance(responses, [1.0 - reward for reward in REWARDS], [True] * 8)
    trainer.update(responses, REWARDS, ahead=early.take())
    plain.update(responses, REWARDS)
    assert all(map(torch.equal, trainer.params, plain.params))


def test_a_group_is_final_once_all_others_are_longer(start):
    tail = start(TAIL).collector.tail
    tail.begin(first=True)
    one, two, *_ = make_responses(make_model(), num=8)
    lengths = {5: [(0, 4), (1, 9)], 3: [(2, 9), (3, 1)], 4: [(4, 2)]}
    for group, members in lengths.items():
        for place, length in members:
            request = SimpleNamespace(group=group)
            tail.add(place, SimpleNamespace(request=request, token_ids=[0] * length))
    rewards = dict.fromkeys(range(5), 0.0)
    assert tail._final(9, rewards) == []  # the unfinished one may end there
    assert tail._final(10, rewards) == [3, 5]
    del rewards[1]
    assert tail._final(10, rewards) == [3]
    del rewards[2]
    assert tail._final(10, rewards) == []


def test_least_counts_what_has_ended_and_is_not_reported(start):
    run = start(TAIL, "engine.strategies=off")
    tail, seen = run.collector.tail, []
    scheduler, advance = lambda: run.rollout.engine.scheduler, tail.advance

    def noted(least, rewards):
        of = scheduler()
        states = [*of.running, *of.waiting, *of._finished]
        seen.append((least, min(s.num_emitted for s in states) if states else 0, len(of._finished)))
        advance(least, rewards)

    tail.advance = noted
    run.gather()
    assert all(least == wanted for least, wanted, _ in seen)
    assert any(unreported for *_, unreported in seen)


# -- what is discarded


def summed(run):
    """Whether some gradients are in the sums."""
    return any(p.grad is not None for p in run.trainer.params)


def break_once(run, error):
    """The rollout fails after two micro-batches."""
    tail = run.collector.tail
    advance, calls = tail.advance, []

    def failing(*of):
        advance(*of)
        if len(tail.early._done) >= 2 and not calls:
            calls.append(summed(run))
            run.collector.stop.name = getattr(error, "name", "")  # of the signal
            raise error

    tail.advance = failing
    return calls


@pytest.mark.parametrize("error", [UserError("a sample failed"), Stopped("SIGTERM", "")], ids=repr)
def test_a_rollout_that_fails_or_is_stopped_discards_its_sums(start, after, error):
    run = start(TAIL, *SPECULATION["off"])
    calls = break_once(run, error)
    with pytest.raises(type(error)):
        run.gather()
    assert calls == [True] and not summed(run)
    run.collector.stop.name = ""
    assert_same(make_steps(run), after)


def test_a_refilled_rollout_discards_its_sums(start, monkeypatch):
    """With `max_refills`; a step without a refill keeps them."""

    def refilled(prompt, text, finished):
        """The group of the fourth prompt of all has equal rewards."""
        return float(prompt.id.endswith("/3")) or sum(map(ord, text)) % 1009 / 1009

    found = []
    for more in ([], [TAIL]):
        run = start("grpo.max_refills=1", "engine.strategies=off", *more)
        monkeypatch.setattr(run.task, "reward", refilled)
        found.append(make_steps(run, 2))
    assert_same(*found)
    assert [metrics["dynamic_sampling/refills"] for *_, metrics in found[1]] == [1, 0]
    first, second = hidden(found[1])
    assert first == 0.0 and second > 0.0


@pytest.mark.parametrize("threaded", [False, True])
def test_a_micro_batch_that_fails_is_a_warning(start, after, monkeypatch, threaded):
    backward, calls = PolicyTrainer.backward, []

    def failing(self, *of):
        done = backward(self, *of)
        calls.append(done)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")  # its gradient is in the sums
        return done

    def waits(*of):
        advance(*of)
        while tail.thread.running:  # else the rollout may end before the second micro-batch
            time.sleep(1e-3)

    run = start(TAIL, *SPECULATION["off"])
    tail, advance = run.collector.tail, run.collector.tail.advance
    tail.threaded, tail.advance = threaded, waits
    as_many_threads(monkeypatch)
    monkeypatch.setattr(PolicyTrainer, "backward", failing)
    with pytest.warns(UserWarning, match="update in the tail: OutOfMemoryError: no memory"):
        found = make_steps(run, 1)
    assert_same(found, after[:1])
    assert hidden(found) == [0.0]
    assert_same(make_steps(run, STEPS - 1), after[1:])


# -- where it is off


@pytest.mark.parametrize(
    ("options", "ranks", "reason"),
    [
        ({}, 2, "several ranks"),
        ({"offload": "all"}, 1, "offload=all"),
        ({"epochs": 2}, 1, "epochs"),
        ({"minibatches": 2}, 1, "minibatches"),
        ({"kl_coef": 0.1, "kl_in": "reward"}, 1, "kl_in=reward"),
        ({"advantage": "reinforce"}, 1, "baseline of grpo.advantage=reinforce"),
        ({"kl_coef": 0.1}, 1, ""),
        ({"offload": "moments"}, 1, ""),
    ],
    ids=str,
)
def test_updates_that_need_the_whole_step_begin_after_it(options, ranks, reason):
    found = why_not_early(Cfg(**options), ranks)
    assert reason in found and bool(found) == bool(reason)


def test_the_reason_why_it_is_off_is_noted_once(start):
    run = start(TAIL, "grpo.minibatches=2")
    assert run.collector.tail is None
    (line,) = [note for note in run.notes if "tail_tokens" in note]
    assert line.startswith("grpo.tail_tokens: the update begins after the rollout; grpo.epochs")
    assert not [note for note in start("grpo.minibatches=2").notes if "tail_tokens" in note]

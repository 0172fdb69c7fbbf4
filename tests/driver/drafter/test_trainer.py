"""The spot trainer: alignment, stopping, failures, determinism, resume, tensors it writes."""

import io
import threading
import time
import warnings

import pytest
import torch

from driver.config.sections import BanditConfig, EngineConfig, SpotConfig
from driver.config.strategy import Strategy
from driver.drafter.buffer import Document, Piece
from driver.drafter.loss import DraftBatch
from driver.drafter.step import Bin
from driver.drafter.thread import StepThread
from driver.drafter.trainer import SpotTrainer
from driver.rollout.bandit import Bandit
from driver.rollout.engine import RolloutEngine
from driver.rollout.request import Request, RunningRequest, SamplingParams
from tests.driver.draft_memory import training_memory
from tests.driver.drafting import PAGE, SEED, Parts, build_parts, finish
from tests.kit import same_bits

SWAP_EVERY = SpotConfig().swap_every


@pytest.fixture
def parts() -> Parts:
    return build_parts()


def weights(parts: Parts) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in parts.drafter.state_dict().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


def fill(trainer: SpotTrainer, parts: Parts, seeds=(1, 2, 3), length: int = 40) -> None:
    for seed in seeds:
        trainer.buffer.add(parts.document(length, seed, trainer.target_version))


def packed(trainer: SpotTrainer, pieces: list[Piece]) -> DraftBatch:
    share = trainer.share(trainer.bin.tokens)
    loaded = trainer.bin.load(pieces, trainer.target_version, share)
    return trainer.bin.batch(*loaded, trainer.teachers)


@pytest.mark.parametrize("variant", ["llama-tied-llama3", "qwen2"])
def test_features_of_t_go_with_token_t_plus_1_and_learn_token_t_plus_2(variant):
    """Fault 37: reference values from transformers, in a crop of a document."""
    parts = build_parts(variant)
    trainer, document = parts.trainer(), parts.document(20, 1)
    batch = packed(trainer, [Piece(document, 4, 9), Piece(document, 0, 3)])
    model, tokens = parts.model, document.tokens
    outputs = model(tokens[None], output_hidden_states=True)
    states = outputs.hidden_states  # states[i + 1]: output of layer i
    for row, t in enumerate([*range(4, 13), 0, 1, 2]):
        assert int(batch.position[row]) == t
        torch.testing.assert_close(
            batch.embedded[row], model.get_input_embeddings()(tokens[t + 1]), rtol=0, atol=0
        )
        three = torch.cat([states[layer + 1][0, t] for layer in parts.target.feature_layers])
        torch.testing.assert_close(batch.features[row], three)
        expected = outputs.logits[0, t + 1, parts.drafter.target_ids].softmax(-1)
        teacher = batch.spans[0][2].probs(batch.final[row], parts.drafter.spec.rms_eps)
        torch.testing.assert_close(teacher, expected, rtol=1e-4, atol=1e-6)
    assert batch.segments.lengths == (9, 3)
    assert batch.left.tolist() == [*range(9, 0, -1), 3, 2, 1]


def test_frozen_steps_change_nothing(parts):
    """Neither weights, nor their average, nor moments and counts of the optimizer."""
    trainer = parts.trainer(average=4)
    fill(trainer, parts)
    assert trainer.micro_step() and trainer.micro_step()

    def state() -> list[torch.Tensor]:
        kept = trainer._state()
        of_steps = kept["optimizer"]["state"].values()
        tensors = [*kept["drafter"].values(), *kept["trained"].values()]
        return [x.clone() for x in (*tensors, *(v for step in of_steps for v in step.values()))]

    before = state()
    with trainer.step.frozen():
        for _ in range(5):
            assert trainer.micro_step()
    assert all(map(torch.equal, before, state()))
    assert trainer.micro_step()
    assert not any(map(torch.equal, before[-3:], state()[-3:]))


def test_teacher_probabilities_are_over_the_draft_vocabulary(parts):
    """Documents are kept of a rollout without a micro-step; the next one has other tokens."""
    trainer = parts.trainer(final_steps=0)
    fill(trainer, parts)
    finish(trainer)
    trainer.start_step(0)
    assert trainer.buffer.kept and trainer.steps == 0
    trainer.buffer.seen_tokens.update(dict.fromkeys(range(parts.drafter.spec.vocab_size), 1000))
    fill(trainer, parts, seeds=(4,))
    assert trainer.micro_step()
    assert same_bits(trainer.teachers.previous.head, parts.drafter.lm_head.weight.detach())


def test_a_state_with_another_vocabulary_drops_the_kept_documents(parts):
    trainer, other = parts.trainer(), build_parts().trainer()
    fill(trainer, parts)
    finish(trainer)
    trainer.start_step(0)
    fill(trainer, parts, seeds=(4,))
    trainer.load_state_dict(trainer.state_dict())
    assert trainer.buffer.kept
    other.buffer.seen_tokens.update(range(other.drafter.spec.vocab_size // 2))
    other.rebuild_vocabulary()
    held = trainer.buffer.num_tokens
    trainer.load_state_dict(other.state_dict())
    assert not trainer.buffer.kept and len(trainer.buffer.fresh) == 1
    assert 0 < trainer.buffer.num_tokens < held


def test_a_renewed_vocabulary_drops_the_kept_documents(parts):
    """A leader renews it after each refill of a step, whose documents have the old teacher."""
    trainer = parts.trainer()
    fill(trainer, parts)
    finish(trainer)
    trainer.start_step(0)
    trainer.renew()
    assert trainer.buffer.kept
    unseen = [
        t for t in range(parts.drafter.spec.vocab_size) if t not in trainer.buffer.seen_tokens
    ]
    trainer.buffer.seen_tokens.update(dict.fromkeys(unseen, 1000))
    trainer.renew()
    assert not trainer.buffer.kept


def test_a_finished_request_becomes_a_document(parts):
    trainer = parts.trainer()
    parts.cache.features.copy_(
        torch.arange(64 * PAGE).view(64, PAGE, 1).expand_as(parts.cache.features)
    )
    request = Request(1, 0, (5, 6), SamplingParams())
    sequence = RunningRequest(request, list(range(20)), pages=[7, 2, 30], context_len=19)
    trainer.on_finish(sequence)
    (document,) = trainer.buffer.fresh
    assert document.tokens.tolist() == list(range(20)) and document.entries == 18
    rows = [*range(56, 64), *range(16, 24), 240, 241, 242]
    assert document.features[:, 0].tolist() == rows
    parts.cache.features.zero_()  # the pages go to another request
    assert document.features[:, 0].tolist() == rows
    short = RunningRequest(request, [4], pages=[1], context_len=0)
    trainer.on_finish(short)
    assert len(trainer.buffer.fresh) == 1


def test_of_a_long_response_a_window_is_recorded_with_its_positions(parts):
    """12 of 20 tokens, at a place that the request determines, within shared pages."""
    trainer = parts.trainer(buffer_tokens=48, keep_long=0.25)
    slots = torch.arange(64 * PAGE).view(64, PAGE, 1)
    parts.cache.features.copy_(slots.expand_as(parts.cache.features))
    rows, starts = [*range(56, 64), *range(16, 24), 240, 241, 242], set()
    for key in range(40):
        request = Request(key, 0, (5, 6), SamplingParams())
        sequence = RunningRequest(request, list(range(20)), pages=[7, 2, 30], context_len=19)
        sequence.tools = [(3, 5), (9, 12)]  # tokens 5, 6 and 11 to 13
        trainer.on_finish(sequence)
        document = trainer.buffer.fresh[-1]
        start = document.start
        starts.add(start)
        assert document.tokens.tolist() == list(range(start, start + 12))
        assert document.features[:, 0].tolist() == rows[start : start + 11]
        whole = [3, 2, 1, 0, 0, 4, 3, 2, 1, 0, 0, 0, 6, 5, 4, 3, 2, 1]
        assert document.generated.tolist() == whole[start : start + 10]
        batch = packed(trainer, [Piece(document, 2, 5)])
        assert batch.position.tolist() == list(range(start + 2, start + 7))
        trainer.on_finish(sequence)
        assert trainer.buffer.fresh[-1].start == start
    assert starts == set(range(9))
    trainer.buffer.start_step()
    assert len(trainer.buffer.kept) == 1


def test_a_tools_tokens_are_not_drafted_in_training(parts):
    """Of a request with tools, in whole and in a crop; a piece without tools trains all."""
    trainer = parts.trainer()
    request = Request(1, 0, (5, 6), SamplingParams())
    sequence = RunningRequest(request, list(range(14)), pages=[7, 2], context_len=13)
    sequence.tools = [(3, 5), (9, 12)]  # tokens 5, 6 and 11 to 13
    trainer.on_finish(sequence)
    (document,) = trainer.buffer.fresh
    assert document.generated.tolist() == [3, 2, 1, 0, 0, 4, 3, 2, 1, 0, 0, 0]
    sequence.tools = []
    trainer.on_finish(sequence)
    plain = trainer.buffer.fresh[1]
    assert plain.generated is None
    batch = packed(trainer, [Piece(document, 0, 12), Piece(document, 4, 3), Piece(plain, 2, 3)])
    assert batch.left.tolist() == [3, 2, 1, 0, 0, 4, 3, 2, 1, 0, 0, 0, 0, 2, 1, 3, 2, 1]


@pytest.mark.parametrize("strategy", ["off", "learned:4,3,12"])
def test_features_recorded_by_the_engine_equal_a_fresh_forward_pass(parts, strategy):
    """Prefilled, decoded and accepted rows, through shared pages, trims and freed pages."""
    arms = [Strategy("off"), Strategy.parse("learned:4,3,12")]
    bandit = Bandit(arms, BanditConfig(policy=strategy), spec_max_batch=8)
    trainer = parts.trainer(tail_batch=1)
    config = EngineConfig(max_batch=3, page_size=PAGE, prefill_chunk=5)
    engine = RolloutEngine(
        parts.target, parts.cache, config, bandit, {"learned": parts.runner}, SEED,
        observer=trainer,
    )  # fmt: skip
    prompts = [tuple(range(7, 7 + n)) for n in (2, 11, 20)]
    params = SamplingParams(max_new_tokens=23, stop_ids=(3, 5))
    responses = engine.generate([Request(i, i % 3, prompts[i % 3], params) for i in range(9)])
    expected = {(*r.request.prompt_ids, *r.token_ids) for r in responses}
    assert {tuple(d.tokens.tolist()) for d in trainer.buffer.fresh} == expected
    assert len(trainer.buffer.fresh) == 9 and {r.finish for r in responses} == {"stop", "length"}
    for document in trainer.buffer.fresh:
        fresh = parts.features(document.tokens[:-1])
        torch.testing.assert_close(document.features, fresh, rtol=1e-4, atol=1e-4)


def test_training_lowers_the_loss_and_writes_no_tensor_of_the_target(parts):
    """Fault 36: the target does not change, and no gradient reaches it."""
    target = parts.target.state_dict()
    before = {name: value.clone() for name, value in target.items()}
    trainer = parts.trainer(final_steps=2)
    fill(trainer, parts)
    losses = []
    for _ in range(40):
        trainer.on_pass(2)
        losses.append(trainer.metrics()["drafter/loss"])
    finish(trainer)
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])
    assert trainer.steps == 42 and trainer.metrics()["drafter/tokens_seen"] == 42 * 64
    assert equal(before, target)
    assert all(not w.requires_grad and w.grad is None for w in target.values())


def test_the_policy_s_update_leaves_drafter_and_runner_alone_until_the_step_starts(parts):
    trainer = parts.trainer()
    own = weights(parts)
    runner = {name: value.clone() for name, value in parts.runner.weights.items()}
    parts.target.load_weights({n: w * 1.5 for n, w in parts.target.state_dict().items()})
    assert equal(own, weights(parts)) and equal(runner, parts.runner.weights)
    trainer.start_step(1)
    head = parts.target.head[parts.drafter.target_ids]
    assert torch.equal(parts.drafter.lm_head.weight, head)
    assert torch.equal(parts.runner.weights["head"], head)
    del own["lm_head.weight"]
    assert all(same_bits(value, weights(parts)[name]) for name, value in own.items())


def test_weights_reach_the_runner_in_versions_between_passes(parts):
    trainer = parts.trainer(final_steps=1)
    fill(trainer, parts)
    versions = []
    for _ in range(2 * SWAP_EVERY):
        trainer.on_pass(2)
        versions.append(parts.runner.version)
    assert versions == [1] * (SWAP_EVERY - 1) + [2] * SWAP_EVERY + [3]
    learned = trainer.step.average.values["fc.weight"]
    assert torch.equal(parts.runner.weights["fc"], learned)
    trainer.micro_step()
    assert not torch.equal(parts.runner.weights["fc"], learned)
    finish(trainer)
    assert parts.runner.version == 4
    assert torch.equal(parts.runner.weights["fc"], learned)


def test_time_spent_is_reported_after_the_step(parts):
    """The metrics of a step are written once the next policy is in."""
    trainer = parts.trainer()
    fill(trainer, parts)
    trainer.on_pass(1)
    finish(trainer)
    trainer.start_step(1)
    assert trainer.metrics()["drafter/busy_s"] > 0
    trainer.start_step(2)
    assert trainer.metrics()["drafter/busy_s"] == 0


def test_it_trains_only_in_the_tail(parts):
    trainer = parts.trainer(tail_batch=3)
    trainer.on_pass(2)
    assert trainer.steps == 0  # nothing recorded yet
    fill(trainer, parts)
    for active in (0, 4, 64):
        trainer.on_pass(active)
    assert trainer.steps == 0
    trainer.on_pass(3)
    assert trainer.steps == 1


def test_serial_steps_are_as_rare_as_configured(parts):
    trainer = parts.trainer(every=3)
    fill(trainer, parts)
    steps = []
    for _ in range(7):
        trainer.on_pass(2)
        steps.append(trainer.steps)
    assert steps == [0, 0, 1, 1, 1, 2, 2]


def test_mode_off_records_and_trains_nothing(parts):
    trainer = parts.trainer(mode="off")
    sequence = RunningRequest(Request(1, 0, (5,), SamplingParams()), [1] * 9, [], [], [0, 1], 8)
    trainer.on_finish(sequence)
    fill(trainer, parts)
    trainer.on_pass(1)
    finish(trainer)
    assert trainer.steps == 0 and parts.runner.version == 1


def test_a_step_that_is_not_finite_is_skipped(parts):
    trainer = parts.trainer()
    document = parts.document(60, 1)
    document.features[30] = float("nan")
    trainer.buffer.add(document)
    before = weights(parts)
    with pytest.warns(UserWarning, match="gradient is not finite: step skipped"):
        trainer.micro_step()
    before_head = {k: v for k, v in before.items() if k not in ("d2t", "t2d", "lm_head.weight")}
    assert all(same_bits(value, weights(parts)[name]) for name, value in before_head.items())
    moments = [state["exp_avg"] for state in trainer.step.optimizer.state.values()]
    assert trainer.steps == 1 and not any(bool(m.any()) for m in moments)
    trainer.buffer.clear()
    fill(trainer, parts)
    assert trainer.micro_step()
    assert all(bool(torch.isfinite(value).all()) for value in weights(parts).values())


def test_weights_that_are_not_finite_are_never_swapped_in(parts):
    trainer = parts.trainer(final_steps=1)
    fill(trainer, parts)
    good = {name: value.clone() for name, value in parts.runner.weights.items()}
    with torch.no_grad():
        parts.drafter.fc.weight[0, 0] = float("nan")
    with pytest.warns(UserWarning) as caught:
        finish(trainer)
    assert [str(one.message) for one in caught] == [
        "spot trainer: gradient is not finite: step skipped",
        "spot trainer: weights are not finite: not swapped in",
    ]
    assert parts.runner.version == 1 and equal(good, parts.runner.weights)


def run_serial(seed_documents=(1, 2, 3)) -> dict[str, torch.Tensor]:
    parts = build_parts()
    trainer = parts.trainer(final_steps=3)
    for seed in seed_documents:
        fill(trainer, parts, [seed])
        for _ in range(4):
            trainer.on_pass(1)
    finish(trainer)
    return weights(parts)


@pytest.mark.parametrize(
    ("mode", "trained", "fixed", "made"),
    [
        ("serial", True, True, True),
        ("overlapped", True, True, True),
        ("serial", True, False, False),  # on a CPU
        ("serial", False, True, False),
        ("coordinated", True, True, True),  # any rank may train alone
        ("off", True, True, False),
    ],
)
def test_the_first_graph_of_a_trained_drafter_is_captured_at_the_start(
    parts, monkeypatch, mode, trained, fixed, made
):
    trainer, calls = parts.trainer(mode=mode), []
    monkeypatch.setattr(trainer.step, "capture", lambda *place: calls.append(place))
    trainer.steps, trainer.bin.fixed = int(trained), fixed
    trainer.prepare()
    assert calls == [(0, None)] * made
    assert trainer.teachers.previous is None


def test_final_steps_end_later_and_a_failure_is_a_warning(parts, monkeypatch):
    trainer = parts.trainer(final_steps=3)
    fill(trainer, parts)
    old = {name: value.clone() for name, value in parts.runner.weights.items()}
    monkeypatch.delattr(torch.cuda, "stream")  # it would initialise a card that the run leaves free
    trainer.begin_final_steps()
    assert trainer.steps == 3 and parts.runner.version == 1 and equal(old, parts.runner.weights)
    trainer.end_final_steps()
    assert parts.runner.version == 2 and not equal(old, parts.runner.weights)
    run, calls = trainer.step.run, []

    def fails_at_the_second(*where):
        calls.append(where)
        if len(calls) == 2:
            raise RuntimeError("planted")
        run(*where)

    monkeypatch.setattr(trainer.step, "run", fails_at_the_second)
    trainer.begin_final_steps()
    assert len(calls) == 2 and trainer.steps == 4
    with pytest.warns(UserWarning, match="a micro-step failed .*planted"):
        trainer.end_final_steps()
    assert parts.runner.version == 3 and trainer.error is None
    finish(trainer)
    assert trainer.steps == 7


def test_serial_training_is_determined_by_seed_and_data():
    assert equal(run_serial(), run_serial())
    assert not equal(run_serial(), run_serial((1, 3, 2)))


def test_resumed_training_continues_with_the_same_bits(parts):
    trainer = parts.trainer(final_steps=2)
    fill(trainer, parts, (1, 2))
    for _ in range(5):
        trainer.on_pass(1)
    finish(trainer)
    file = io.BytesIO()
    torch.save(trainer.state_dict(), file)

    resumed_parts = build_parts()
    resumed = resumed_parts.trainer(final_steps=2)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.metrics()["drafter/version"] == trainer.metrics()["drafter/version"]
    assert equal(parts.runner.weights, resumed_parts.runner.weights)
    assert same_bits(parts.runner.d2t, resumed_parts.runner.d2t)
    trainer.buffer.clear()  # recorded documents are not saved
    for one, owner in ((trainer, parts), (resumed, resumed_parts)):
        one.start_step(1)
        fill(one, owner, (3, 4))
        for _ in range(7):
            one.on_pass(1)
        finish(one)
    assert equal(weights(parts), weights(resumed_parts))
    assert equal(parts.runner.weights, resumed_parts.runner.weights)
    assert trainer.tokens_seen == resumed.tokens_seen
    assert trainer.buffer.seen_tokens == resumed.buffer.seen_tokens


def test_a_state_is_loaded_in_place_once_steps_were_made(parts):
    """Captured steps read the moments at fixed addresses."""
    trainer, other = parts.trainer(), build_parts().trainer()
    for one, seed in ((trainer, 1), (other, 2)):
        fill(one, parts, [seed])
        for _ in range(3):
            one.on_pass(1)
    moments = [x for s in trainer.step.optimizer.state.values() for x in s.values()]
    trainer.load_state_dict(other.state_dict())
    after = [x for s in trainer.step.optimizer.state.values() for x in s.values()]
    assert all(a is b for a, b in zip(moments, after, strict=True)) and len(moments) > 9
    wanted = [x for s in other.step.optimizer.state.values() for x in s.values()]
    assert all(torch.equal(a, b) for a, b in zip(after, wanted, strict=True))


def test_the_draft_vocabulary_is_rebuilt_from_rollouts(parts):
    trainer = parts.trainer(final_steps=1)
    document = parts.document(60, 1)
    common = [3, 50, 60, 96]
    document.tokens[:] = torch.tensor(common).repeat(15)
    trainer.buffer.add(document)
    finish(trainer)
    others = [token for token in range(97) if token not in common]
    expected = sorted(common + others[:20])
    assert parts.drafter.target_ids.tolist() == expected == parts.runner.d2t.tolist()
    assert torch.equal(parts.drafter.lm_head.weight, parts.target.head[expected])
    assert torch.equal(parts.runner.weights["head"], parts.target.head[expected])


def teacher_probs(trainer: SpotTrainer, document: Document) -> torch.Tensor:
    batch = packed(trainer, [Piece(document, 0, 28)])
    return batch.spans[0][2].probs(batch.final, trainer.drafter.spec.rms_eps)


def test_documents_of_the_previous_step_keep_their_teacher(parts):
    trainer = parts.trainer(keep_long=0.5, final_steps=1)
    old = parts.document(30, 1, version=0)
    trainer.buffer.add(old)
    finish(trainer)
    before = teacher_probs(trainer, old)
    parts.target.load_weights({n: w * 1.7 for n, w in parts.target.state_dict().items()})
    trainer.start_step(1)
    assert trainer.buffer.kept == [old]
    assert same_bits(teacher_probs(trainer, old), before)
    new = Document(old.tokens, old.features, 1)
    assert not torch.allclose(teacher_probs(trainer, new), before)


def test_documents_whose_teacher_is_gone_are_dropped(parts):
    trainer = parts.trainer(keep_long=0.5)
    trainer.buffer.add(parts.document(30, 1, version=0))
    trainer.start_step(1)  # without `finish`
    assert trainer.buffer.num_tokens == 0


# ---- the thread ---------------------------------------------------------------------------------


def test_the_thread_stops_within_one_micro_step(parts, monkeypatch):
    trainer = parts.trainer(mode="overlapped", final_steps=0)
    fill(trainer, parts)
    inside, leave = threading.Event(), threading.Event()
    steps = []

    def slow_step() -> bool:
        steps.append(len(steps))
        inside.set()
        assert leave.wait(30)
        return True

    monkeypatch.setattr(trainer, "micro_step", slow_step)
    trainer.on_pass(1)
    trainer.on_pass(1)  # still one thread, and the call does not wait
    assert inside.wait(30)
    stopper = threading.Thread(target=trainer.stop)
    stopper.start()
    stopper.join(0.05)
    assert stopper.is_alive()  # `stop` returns only once no micro-step runs
    leave.set()
    stopper.join(30)
    assert not stopper.is_alive() and steps == [0]
    assert [t for t in threading.enumerate() if t.name == "spot-trainer"] == []


def test_the_thread_rests_between_steps_and_a_stop_interrupts_the_rest():
    """It waits for each step: a queue would delay the stop, and rests need the duration."""
    events, stepped = [], threading.Event()

    def step() -> bool:
        events.append("step")
        if events.count("step") == 3:
            stepped.set()
        time.sleep(0.01)
        return True

    thread = StepThread(step, lambda: events.append("settled"), pytest.fail)
    begin = time.perf_counter()
    thread.start(None, duty=0.1)
    assert stepped.wait(30)
    assert time.perf_counter() - begin >= 2 * 0.1  # two steps with their rests
    thread.stop()
    assert events[:6] == ["step", "settled"] * 3
    count, begin = len(events), time.perf_counter()
    thread.start(None, duty=1e-6)  # would rest for 10,000 s
    while len(events) == count:
        time.sleep(0.001)
    thread.stop()
    assert time.perf_counter() - begin < 300 and not thread.running


def test_overlapped_training_learns_swaps_and_leaves_torch_s_threads(parts):
    trainer = parts.trainer(mode="overlapped", final_steps=0)
    threads = torch.get_num_threads()
    trainer.on_pass(1)  # nothing recorded: that thread ends
    fill(trainer, parts)
    while trainer.steps < 2 * SWAP_EVERY:
        trainer.on_pass(1)
    finish(trainer)
    assert parts.runner.version > 1 and torch.get_num_threads() == threads
    assert torch.equal(parts.runner.weights["fc"], trainer.step.average.values["fc.weight"])
    done = trainer.steps
    trainer.on_pass(0)
    assert trainer.steps == done


@pytest.mark.parametrize("mode", ["serial", "overlapped"])
def test_a_failure_is_a_warning_and_the_rollout_goes_on(parts, monkeypatch, mode):
    trainer = parts.trainer(mode=mode, final_steps=0)
    fill(trainer, parts)
    whole = Bin.load

    def broken(*_: object) -> None:
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(Bin, "load", broken)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            trainer.on_pass(1)
    with pytest.warns(UserWarning, match="micro-step failed .RuntimeError: disk on fire."):
        finish(trainer)
    monkeypatch.setattr(Bin, "load", whole)
    trainer.start_step(1)
    fill(trainer, parts)
    while trainer.steps < 1:  # and it trains again in the next step
        trainer.on_pass(1)
    trainer.stop()


def test_a_killed_thread_is_reported_and_replaced(parts, monkeypatch):
    trainer = parts.trainer(mode="overlapped", final_steps=0)
    fill(trainer, parts)

    def killed() -> bool:
        raise SystemExit("killed")

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "micro_step", killed)
        trainer.on_pass(1)
        trainer.thread.thread.join()
        trainer.on_pass(1)  # the rollout goes on
        assert trainer.steps == 0
        with pytest.warns(UserWarning, match="micro-step failed .SystemExit: killed."):
            trainer.stop()
    while trainer.steps < 2:
        trainer.on_pass(1)
    finish(trainer)
    assert parts.runner.version > 1


def test_a_full_buffer_trains_on_and_keeps_its_bound(parts):
    trainer = parts.trainer(buffer_tokens=90, keep_long=0.5, final_steps=1)
    with pytest.warns(UserWarning, match="its buffer of 90 tokens .* is full") as caught:
        for seed in range(12):
            trainer.buffer.add(parts.document(40, seed))
            trainer.on_pass(1)
    assert trainer.steps == 12 and trainer.buffer.dropped > 1 and len(caught) == 1
    assert trainer.buffer.num_tokens <= 90
    assert trainer.metrics()["drafter/loss"] > 0


def test_auto_is_serial_on_the_cpu(parts):
    trainer = parts.trainer(mode="auto", final_steps=1)
    fill(trainer, parts)
    trainer.on_pass(1)
    assert trainer.steps == 1 and trainer.mode == "serial"
    finish(trainer)
    assert trainer.steps == 2 and trainer.overlap is None


def test_memory_is_what_was_predicted(parts):
    trainer = parts.trainer(buffer_tokens=90)
    for seed in range(4):
        trainer.buffer.add(parts.document(40, seed))
    trainer.micro_step()
    for part, (predicted, held) in training_memory(trainer).items():
        assert held > 0 and abs(predicted - held) <= 0.1 * held, part


def test_the_learning_rate_is_the_run_s_own_after_a_warm_start(parts):
    first = parts.trainer(lr=1e-2)
    fill(first, parts)
    first.micro_step()
    second = parts.trainer(lr=1e-3)
    second.load_state_dict(first.state_dict())
    (group,) = second.step.optimizer.param_groups
    assert group["lr"] is second.step.lr and float(second.step.lr) == pytest.approx(1e-3)

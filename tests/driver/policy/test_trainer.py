"""The policy trainer on tiny random models, against padded batches and its own resume."""

import copy
import itertools
import math
import warnings
from dataclasses import dataclass, fields, replace

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from driver.common.world import World
from driver.config.estimators import ESTIMATORS
from driver.config.sections import GrpoConfig
from driver.policy import grpo, packed_forward
from driver.policy import trainer as trainer_module
from driver.policy.micro_batch import build_micro_batch, without_responses
from driver.policy.order import in_order
from driver.policy.packing import TILE, pack, tiles_of
from driver.policy.trainer import PolicyTrainer
from driver.rollout.request import Request, Response, SamplingParams
from tests import kit
from tests.driver.hugging_face import FAMILIES, TRAINED

EOS, PAD, VOCAB, LIMIT = 0, 0, 29, 24


@dataclass(frozen=True)
class Cfg:
    """The fields of `GrpoConfig` that the trainer reads, without the limits of their values."""

    advantage: str = "grpo"
    lr: float = 1e-3
    warmup_steps: int = 0
    clip_low: float = 0.2
    clip_high: float = 0.0
    kl_coef: float = 0.0
    kl_in: str = "loss"
    epochs: int = 1
    minibatches: int = 1
    micro_batch_tokens: int = 1024
    tail_tokens: int = 0
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    entropy_coef: float = 0.0
    checkpointing: bool = False
    offload: str = "none"
    shard: str = "auto"


def test_configuration_has_the_fields_that_the_trainer_reads():
    assert {f.name for f in fields(Cfg)} <= {f.name for f in fields(GrpoConfig)}


def make_model(dtype=torch.float32, family="llama", tied=True, seed=0):
    config, model = FAMILIES[family]
    torch.manual_seed(seed)
    return model(config(vocab_size=VOCAB, tie_word_embeddings=tied, **TRAINED)).to(dtype)


def plain_logprobs(model, response):
    """The response's log-probs by an ordinary forward pass over it alone."""
    prompt, params = response.request.prompt_ids, response.request.params
    ids = torch.tensor([[*prompt, *response.token_ids]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    logp = torch.log_softmax(logits / params.temperature, -1)
    return logp.gather(-1, torch.tensor(response.token_ids).unsqueeze(-1)).squeeze(-1)


def make_responses(model, num=8, temperature=1.0, seed=0):
    """Responses of random tokens and lengths in groups of four, with end tokens in between."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, count=1):
        return torch.randint(low, high, (count,), generator=generator).tolist()

    params = SamplingParams(temperature=temperature, max_new_tokens=LIMIT, stop_ids=(EOS,))
    responses = []
    for index in range(num):
        request = Request(
            id=draw(0, 2**62)[0],
            group=index // 4,
            prompt_ids=tuple(draw(1, VOCAB, 3 + index // 4)),
            params=params,
        )
        cut = index % 4 == 3
        tokens = draw(0, VOCAB, LIMIT if cut else draw(1, 12)[0]) + ([] if cut else [EOS])
        response = Response(request, tokens, [0.0] * len(tokens), "length" if cut else "stop")
        with torch.no_grad():
            logprobs = plain_logprobs(model, response).tolist()
        responses.append(replace(response, logprobs=logprobs))
    return responses


REWARDS = [1.0, 0.0, 0.5, 0.0, 0.0, 1.0, 1.0, 0.0]


def exact_norm(module):
    return lambda x: F.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)


def padded_gradients(model, responses, rewards, cfg, norm, old=None):
    """The same update's gradient from one right-padded batch and a mask from lengths."""
    model = copy.deepcopy(model).double()
    for norm_of in (m for m in model.modules() if hasattr(m, "variance_epsilon")):
        norm_of.forward = exact_norm(norm_of)  # its own is float32 in any model
    prompts = [r.request.prompt_ids for r in responses]
    lengths = torch.tensor([len(r.token_ids) for r in responses])
    width = max(len(p) + n for p, n in zip(prompts, lengths.tolist(), strict=True))
    ids = torch.full((len(responses), width), PAD)
    attention = torch.zeros_like(ids)
    tokens = torch.full((len(responses), LIMIT), PAD)
    rollout = torch.full((len(responses), LIMIT), torch.nan, dtype=torch.float64)
    places = torch.zeros_like(tokens)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        whole = torch.tensor([*prompt, *response.token_ids])
        count = len(response.token_ids)
        ids[row, : len(whole)], attention[row, : len(whole)] = whole, 1
        tokens[row, :count] = torch.tensor(response.token_ids)
        rollout[row, :count] = torch.tensor(response.logprobs)
        places[row, :count] = torch.arange(len(prompt) - 1, len(whole) - 1)
    temperature = responses[0].request.params.temperature
    logits = model(input_ids=ids, attention_mask=attention).logits / temperature
    logp = torch.log_softmax(logits, -1)[torch.arange(len(ids))[:, None], places]
    logp = logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    groups = torch.tensor([r.request.group for r in responses])
    advantages = grpo.group_advantages(torch.tensor(rewards), groups, cfg.advantage).double()
    mask = torch.zeros(len(responses), LIMIT, dtype=torch.bool)
    for row, response in enumerate(responses):
        for place in range(len(response.token_ids)):
            mask[row, place] = not any(a <= place < b for a, b in response.tools)
    denominator = int(mask.sum()) if norm == "tokens" else LIMIT * len(responses)
    share = grpo.policy_loss(
        logp[mask],
        logp.detach()[mask],
        rollout[mask],
        advantages[:, None].expand_as(logp)[mask],
        clip_low=cfg.clip_low,
        clip_high=cfg.clip_high or 0.2,
        is_cap=trainer_module.IS_CAP,
    )
    (share.loss / denominator).backward()
    return [p.grad for p in model.parameters()]


def update_gradients(model, responses, rewards, cfg, keep=None, reference=None, norm=None):
    """The gradient that reaches the optimizer, before clipping, by catching it there."""
    trainer = PolicyTrainer(copy.deepcopy(model), cfg, lambda: reference)
    trainer.loss_norm = norm or trainer.loss_norm
    caught = []
    trainer._optimizer_step = lambda lr: (
        caught.extend(p.grad.clone() for p in trainer.params) or torch.zeros(())
    )
    metrics = trainer.update(responses, rewards, keep)
    return caught, metrics


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo"])
def test_gradient_is_that_of_the_padded_batch_for_every_packing_fault_41(family, advantage):
    model = make_model(torch.float64, family, tied=family == "llama")
    responses = make_responses(model)
    norm = "constant" if advantage == "dr_grpo" else "tokens"
    wanted = padded_gradients(model, responses, REWARDS, Cfg(advantage=advantage), norm)
    assert sum(g.abs().sum() for g in wanted) > 0.1
    for budget in (1, 30, 60, 1024):
        cfg = Cfg(advantage=advantage, micro_batch_tokens=budget)
        got, _ = update_gradients(model, responses, REWARDS, cfg)
        # Advantages and rollout log-probs are float32.
        assert_close(got, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_gradient_does_not_depend_on_responses_per_micro_batch_fault_41(size):
    model = make_model(torch.float64)
    responses = make_responses(model)
    trainer = PolicyTrainer(model, Cfg())
    advantages = torch.tensor(REWARDS)
    whole = trainer.with_fixed_logprobs(build_micro_batch(responses, range(8), "cpu"))
    trainer.backward([whole], advantages)
    wanted = [p.grad.clone() for p in trainer.params]
    trainer.optimizer.zero_grad()
    parts = [build_micro_batch(responses, range(i, i + size), "cpu") for i in range(0, 8, size)]
    trainer.backward([trainer.with_fixed_logprobs(p) for p in parts], advantages)
    assert_close([p.grad for p in trainer.params], wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("advantage", ESTIMATORS)
def test_responses_left_out_leave_the_gradient_and_the_denominator_fault_42(advantage):
    """So do the baseline and the spread of their siblings: one group is left out in part, one
    completely."""
    model = make_model(torch.float64)
    responses = make_responses(model, num=12)
    rewards = [*REWARDS, 1.0, 0.0, 1.0, 0.0]
    keep = [True, True, False, True, *[True] * 4, *[False] * 4]
    cfg = Cfg(advantage=advantage)
    got, _ = update_gradients(model, responses, rewards, cfg, keep)
    left = [i for i, kept in enumerate(keep) if kept]
    wanted, _ = update_gradients(
        model, [responses[i] for i in left], [rewards[i] for i in left], cfg
    )
    assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "rewards",
    [[1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 1.0, 1.0], [0.5, 1.0, 0.0, 0.5, *REWARDS[4:]], [1.0] * 8],
    ids=["a group", "the mean", "all"],
)
@pytest.mark.parametrize("loss_norm", ["tokens", "constant"])
def test_responses_without_advantage_are_not_computed(rewards, loss_norm):
    """Updates, so gradients, and metrics of the loss are those of the whole batch."""
    model, found = make_model(), []
    responses = with_tools(make_responses(model, temperature=0.7))
    groups = torch.tensor([r.request.group for r in responses])
    advantages = grpo.group_advantages(torch.tensor(rewards), groups, "grpo")
    for skips in (True, False):
        trainer = PolicyTrainer(copy.deepcopy(model), Cfg(lr=1e-2, micro_batch_tokens=60))
        trainer.loss_norm = loss_norm
        assert trainer.skips_idle
        trainer.skips_idle = skips
        trainer.update(responses, REWARDS)  # Adam's moments are no longer 0
        seen, train = [], trainer._train
        trainer._train = lambda batches, *rest, seen=seen, do=train: do(
            [seen.append(list(part)) or seen[-1] for part in batches], *rest
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            metrics = trainer.update(responses, rewards)
        taking_part = {i for part in seen for batch in part for i in batch.owner.tolist()}
        wanted = {*advantages.nonzero()[:, 0].tolist()} or {in_order(responses, range(8))[0]}
        assert taking_part == (wanted if skips else {*range(8)})
        found.append((metrics, trainer.params))
    (some, policy), (whole, other) = found
    assert some.keys() == whole.keys()
    assert_close([*policy], [*other], rtol=1e-5, atol=1e-6)
    sampled = {"actor/entropy", *(name for name in some if "logp_difference" in name)}
    for name in some.keys() - sampled:
        assert some[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-7), name


def test_metrics_of_log_probs_without_those_that_are_not_computed():
    """The entropy of such responses is estimated by their negative log-probs."""
    model = make_model()
    responses = make_responses(model)
    rewards = [*REWARDS[:4], 1.0, 1.0, 1.0, 1.0]
    whole = PolicyTrainer(copy.deepcopy(model), Cfg()).update(responses, rewards)
    part = PolicyTrainer(model, Cfg()).update(responses[:4], rewards[:4])
    counts = [sum(len(r.token_ids) for r in some) for some in (responses[:4], responses[4:])]
    estimate = -sum(sum(r.logprobs) for r in responses[4:])
    entropy = (part["actor/entropy"] * counts[0] + estimate) / sum(counts)
    assert whole["actor/entropy"] == pytest.approx(entropy, rel=1e-5)
    for name in (name for name in whole if "logp_difference" in name):
        assert whole[name] == part[name]


@pytest.mark.parametrize(
    "options", [{"entropy_coef": 0.1}, {"kl_coef": 0.1}, {"epochs": 2}, {"minibatches": 2}], ids=str
)
def test_all_responses_take_part_where_they_add_something(options):
    """To the loss, or to the metrics of updates after the first."""
    model = make_model()
    trainer = PolicyTrainer(model, Cfg(**options), lambda: make_model(seed=5))
    responses, taken, train = make_responses(model), [], trainer._train

    def spy(batches, *rest):
        batches = [list(part) for part in batches]
        taken.extend(i for part in batches for batch in part for i in batch.owner.tolist())
        return train(batches, *rest)

    trainer._train = spy
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.update(responses, [1.0] * 8)
    assert {*taken} == {*range(8)}


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_ratio_is_exactly_one_at_the_first_update_fault_43(temperature):
    model = make_model()
    responses = make_responses(model, temperature=temperature)
    _, metrics = update_gradients(model, responses, REWARDS, Cfg(micro_batch_tokens=60))
    assert metrics["actor/ppo_kl"] == 0.0
    assert metrics["actor/pg_clipfrac"] == 0.0
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [{}, {"advantage": "dapo"}, {"entropy_coef": 0.1}, {"kl_coef": 0.1}],
    ids=lambda options: next(iter(options), "plain"),
)
@pytest.mark.parametrize("is_cap", [2.0, 0.9])
def test_the_old_logprobs_come_from_the_update_itself(dtype, options, is_cap, monkeypatch):
    """With one update a step, a separate pass for them gives the same policy and the same log."""
    monkeypatch.setattr(trainer_module, "IS_CAP", is_cap)
    model, reference = make_model(dtype), make_model(dtype, seed=5)
    responses = make_responses(model, temperature=0.7)
    cfg, found = Cfg(lr=1e-2, micro_batch_tokens=60, **options), []
    for own_pass in (False, True):
        trainer = PolicyTrainer(copy.deepcopy(model), cfg, lambda: reference)
        assert trainer.own_old_logprobs
        trainer.own_old_logprobs = not own_pass
        passes, forward = [], trainer.weights.logprobs
        trainer.weights.logprobs = lambda of, *a, seen=passes, do=forward: (
            seen.append(of) or do(of, *a)
        )
        metrics = trainer.update(responses, REWARDS)
        rows = len(list(trainer._micro_batches(responses, range(8))))
        assert rows > 1 and len(passes) == rows * (1 + own_pass)
        assert metrics["actor/ppo_kl"] == 0.0 and metrics["actor/pg_clipfrac"] == 0.0
        timeless = {name: x for name, x in metrics.items() if not name.startswith("timing")}
        found.append((timeless, trainer.params))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.parametrize(
    "options",
    [{"epochs": 2}, {"minibatches": 2}, {"kl_coef": 0.1, "kl_in": "reward"}],
    ids=lambda options: next(iter(options)),
)
def test_old_logprobs_have_a_separate_pass_when_the_update_cannot_give_them(options):
    model = make_model()
    trainer = PolicyTrainer(model, Cfg(**options), lambda: make_model(seed=5))
    responses, fixed = make_responses(model), []
    train = trainer._train
    trainer._train = lambda batches, *a: fixed.extend(batches) or train(batches, *a)
    trainer.update(responses, REWARDS)
    assert all(batch.old_logprobs is not None for part in fixed for batch in part)


def test_every_sampled_token_and_no_other_is_trained_on_fault_39_and_40():
    # With end ids inside, at the end and missing, the packed row is the plain concatenation.
    model = make_model()
    responses = make_responses(model)
    batch = build_micro_batch(responses, range(8), "cpu")
    joined = [t for r in responses for t in (*r.request.prompt_ids, *r.token_ids)]
    assert batch.input_ids.tolist() == [joined]
    assert batch.tokens.tolist() == [t for r in responses for t in r.token_ids]
    assert batch.input_ids[0, batch.rows + 1].tolist() == batch.tokens.tolist()
    assert batch.owner.bincount().tolist() == [len(r.token_ids) for r in responses]
    assert (batch.tokens == EOS).sum() >= 6


def with_tools(responses):
    """The same responses, where a tool wrote some of the tokens: none, one or several ranges."""
    written = []
    for index, response in enumerate(responses):
        end = len(response.token_ids)
        ranges = [], [(1, min(3, end))], [(end - 1, end)], [(2, 5), (9, 10), (20, LIMIT)]
        tools = [(a, b) for a, b in ranges[index % 4] if 0 < a < b]
        logprobs = list(response.logprobs)
        for a, b in tools:
            logprobs[a:b] = [math.nan] * (b - a)
        written.append(replace(response, tools=tools, logprobs=logprobs))
    assert sum(bool(r.tools) for r in written) > len(responses) / 2
    return written


@pytest.mark.parametrize("norm", ["tokens", "constant"])
def test_tokens_of_tools_take_no_part_in_the_gradient_fault_50(norm):
    model = make_model(torch.float64)
    responses = with_tools(make_responses(model))
    wanted = padded_gradients(model, responses, REWARDS, Cfg(), norm)
    for budget in (1, 60, 1024):
        cfg = Cfg(micro_batch_tokens=budget)
        got, _ = update_gradients(model, responses, REWARDS, cfg, norm=norm)
        assert_close(got, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [{}, {"entropy_coef": 0.1}, {"kl_coef": 0.1}, {"kl_coef": 0.1, "kl_in": "reward"}],
    ids=str,
)
def test_metrics_and_updates_do_not_read_log_probs_of_tools(options):
    """The metrics are means over the tokens of the model, by hand; NaN elsewhere is not read."""
    model, reference = make_model(), make_model(seed=5)
    responses = with_tools(make_responses(model))
    policies = []
    for elsewhere in (0.0, math.nan):
        trainer = PolicyTrainer(copy.deepcopy(model), Cfg(epochs=2, **options), lambda: reference)
        shifted = []
        for r in responses:
            pairs = zip(r.logprobs, r.generated, strict=True)
            shifted.append(replace(r, logprobs=[x + 0.004 if g else elsewhere for x, g in pairs]))
        metrics = trainer.update(shifted, REWARDS)
        assert all(math.isfinite(value) for value in metrics.values())
        policies.append(trainer.params)
    generated = [torch.tensor(r.generated) for r in responses]
    count = int(sum(mask.sum() for mask in generated))
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(0.004, rel=1e-2)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(0.004, rel=1e-2)
    entropy = 0.0
    for response, mask in zip(responses, generated, strict=True):
        prompt = response.request.prompt_ids
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response.token_ids]])).logits[0]
        logp = logits[len(prompt) - 1 : -1].log_softmax(-1)[mask]
        entropy -= float((logp.exp() * logp).sum())
    assert metrics["actor/entropy"] == pytest.approx(entropy / count, rel=1e-4)
    lengths = [int(mask.sum()) for mask in generated]
    assert metrics["response_length/mean"] == count / len(responses)
    assert metrics["response_length/max"] == max(lengths)
    assert all(torch.equal(first, second) for first, second in zip(*policies, strict=True))


def test_packed_documents_do_not_see_each_other():
    model = make_model()
    trainer = PolicyTrainer(model, Cfg())
    responses = make_responses(model)
    other = replace(responses[0], token_ids=[3] * len(responses[0].token_ids))
    with torch.no_grad():
        logprobs = [
            trainer.weights.logprobs(build_micro_batch([first, responses[1]], [0, 1], "cpu"))[0]
            for first in (responses[0], other)
        ]
    count = len(responses[1].token_ids)
    assert torch.equal(logprobs[0][-count:], logprobs[1][-count:])
    assert not torch.equal(logprobs[0][:-count], logprobs[1][:-count])
    assert_close(logprobs[0][-count:].tolist(), responses[1].logprobs, rtol=1e-4, atol=1e-5)


def test_packing_keeps_each_document_once_within_the_budget():
    lengths = [5, 30, 1, 7, 7, 12, 40, 3]
    for budget in (1, 12, 40, 1000):
        rows = pack(lengths, budget)
        assert sorted(i for row in rows for i in row) == list(range(8))
        assert all(len(row) == 1 or sum(lengths[i] for i in row) <= budget for row in rows)
    assert pack([], 10) == []
    assert pack([3, 4, 5, 6, 30, 1, 2], 12, first=8) == [[1, 0], [3, 2], [4], [6, 5]]
    assert pack([3, 4, 5, 6], 8, first=12) == pack([3, 4, 5, 6], 8)


def test_tiles_cover_each_document_once_and_the_most_work_comes_first():
    lengths = [1, TILE, TILE + 1, 3 * TILE + 5, 2]
    begins = [sum(lengths[:i]) for i in range(len(lengths))]
    tiles = tiles_of(lengths).tolist()
    documents = zip(begins, lengths, strict=True)
    assert sorted(tiles) == [[at, n, i] for at, n in documents for i in range(-(-n // TILE))]
    indices = [index for *_, index in tiles]
    assert indices == sorted(indices, reverse=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointing_changes_no_gradient(monkeypatch, dtype):
    plain, frugal = make_model(dtype), make_model(dtype)
    responses = make_responses(plain)
    calls, read = [], packed_forward._layer_weights
    monkeypatch.setattr(packed_forward, "_layer_weights", lambda *a: calls.append(a[0]) or read(*a))
    for model, checkpointing in ((plain, False), (frugal, True)):
        PolicyTrainer(model, Cfg(checkpointing=checkpointing)).update(responses, REWARDS)
    for a, b in zip(plain.parameters(), frugal.parameters(), strict=True):
        assert torch.equal(a, b)
    # Once, and again in the backward pass.
    assert calls.count(plain.model.layers[0]) == 1 and calls.count(frugal.model.layers[0]) == 2


@pytest.mark.filterwarnings("ignore:sampling_logp_difference")  # the responses grow stale
def test_entropy_bonus_raises_the_entropy():
    entropies = []
    for coef in (0.0, 1.0):
        model = make_model()
        trainer = PolicyTrainer(model, Cfg(entropy_coef=coef, lr=1e-2))
        responses = make_responses(model)
        for _ in range(5):
            metrics = trainer.update(responses, REWARDS)
        entropies.append(metrics["actor/entropy"])
    assert entropies[1] > entropies[0]


@kit.gpu
@kit.needs_gpu
@pytest.mark.filterwarnings("ignore:sampling_logp_difference")  # of another model's responses
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_tokens_make_equal_policies_on_a_card(dtype):
    """Its log-probs are as close to float64 as the CPU's: float32 in another order, not TF32."""
    model = make_model(dtype).cuda()
    responses = make_responses(make_model())
    states = []
    for _ in range(2):
        again = copy.deepcopy(model)
        PolicyTrainer(again, Cfg(lr=1e-2)).update(responses, REWARDS)
        states.append([p.detach() for p in again.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    assert not torch.equal(states[0][0].to(dtype), next(model.parameters()))
    found = {}
    with torch.no_grad():
        cpu, exact = make_model(dtype), make_model(dtype).double()
        for name, one in {"card": model, "cpu": cpu, "exact": exact}.items():
            batch = build_micro_batch(responses, range(8), one.device)
            found[name] = PolicyTrainer(one, Cfg()).weights.logprobs(batch)[0].cpu().double()
    error = {name: (found[name] - found["exact"]).norm() for name in ("card", "cpu")}
    assert error["card"] < 2 * error["cpu"]


def test_update_does_not_depend_on_finishing_order():
    model = make_model()
    responses = make_responses(model)
    cfg = Cfg(minibatches=3, epochs=2)
    states = []
    for order in (range(8), [5, 2, 7, 0, 3, 6, 1, 4]):
        trainer = PolicyTrainer(copy.deepcopy(model), cfg)
        trainer.update([responses[i] for i in order], [REWARDS[i] for i in order])
        states.append(trainer.model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_later_minibatches_are_off_policy():
    model = make_model()
    responses = make_responses(model)
    trainer = PolicyTrainer(
        model, Cfg(minibatches=2, epochs=2, lr=1e-2, clip_low=0.01, clip_high=0.01)
    )
    metrics = trainer.update(responses, REWARDS)
    assert metrics["actor/ppo_kl"] != 0.0
    assert metrics["actor/pg_clipfrac"] > 0.0


@pytest.mark.parametrize("advantage", ESTIMATORS)
def test_updates_make_rewarded_responses_likelier(advantage):
    model = make_model()
    responses = make_responses(model)
    trainer = PolicyTrainer(model, Cfg(advantage=advantage, lr=3e-3))
    with warnings.catch_warnings():
        # The same responses in each update: the policy moves away from them.
        warnings.filterwarnings("ignore", "sampling_logp_difference")
        for _ in range(5):
            trainer.update(responses, REWARDS)
    change = [
        (plain_logprobs(model, r).sum() - sum(r.logprobs)).item() / len(r.token_ids)
        for r in responses
    ]
    good = [c for c, reward in zip(change, REWARDS, strict=True) if reward == 1.0]
    bad = [c for c, reward in zip(change, REWARDS, strict=True) if reward == 0.0]
    assert min(good) > max(bad)


def test_metrics_have_the_names_of_the_log():
    model = make_model()
    responses = make_responses(model)
    metrics = PolicyTrainer(model, Cfg(lr=4e-3, warmup_steps=4)).update(responses, REWARDS)
    lengths = [len(r.token_ids) for r in responses]
    assert set(metrics) == {
        "critic/rewards/mean",
        *(f"response_length/{x}" for x in ("mean", "max", "min", "clip_ratio")),
        *(f"actor/{x}" for x in ("pg_loss", "entropy", "ppo_kl", "pg_clipfrac", "grad_norm", "lr")),
        "actor/logratio_clamped",
        "sampling/sampling_logp_difference/mean",
        "sampling/sampling_logp_difference/max",
        "frac_reward_zero_std",
    }
    assert metrics["critic/rewards/mean"] == pytest.approx(3.5 / 8)
    assert metrics["response_length/mean"] == sum(lengths) / 8
    assert metrics["response_length/max"] == LIMIT
    assert metrics["response_length/min"] == min(lengths)
    assert metrics["response_length/clip_ratio"] == 0.25
    assert metrics["frac_reward_zero_std"] == 0.0
    assert metrics["actor/lr"] == pytest.approx(1e-3)
    assert metrics["actor/logratio_clamped"] == 0.0
    assert 0 < metrics["actor/entropy"] < torch.tensor(float(VOCAB)).log()


# -- KL


def test_no_kl_loads_no_reference():
    def load():
        raise AssertionError("the reference was loaded")

    assert PolicyTrainer(make_model(), Cfg(kl_coef=0.0), load).reference is None


def test_kl_in_the_loss_pulls_towards_the_reference():
    model, reference = make_model(), make_model()
    with torch.no_grad():
        model.lm_head.weight += 0.2 * torch.randn_like(model.lm_head.weight)
    responses = make_responses(model)
    trainer = PolicyTrainer(model, Cfg(kl_coef=1.0, lr=3e-3), lambda: reference)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(equal rewards|sampling_logp_difference)")
        kls = [trainer.update(responses, [0.0] * 8)["actor/ref_kl"] for _ in range(6)]
    assert 0 < kls[-1] < 0.7 * kls[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_kl_in_the_reward_changes_advantages_and_not_the_reward_metric(ranks):
    """Parts of all ranks are added up; here each has the same part."""
    model, reference = make_model(), make_model(seed=5)
    responses = make_responses(model)
    cfg = Cfg(kl_coef=0.1, kl_in="reward", advantage="reinforce")
    trainer = PolicyTrainer(copy.deepcopy(model), cfg, lambda: reference)
    trainer.world.gather = lambda part: [part] * ranks
    seen = {}
    train = trainer._train
    trainer._train = lambda batches, advantages, *rest: (
        seen.update(advantages=advantages) or train(batches, advantages, *rest)
    )
    metrics = trainer.update(responses, REWARDS)
    with torch.no_grad():
        k1 = [
            (plain_logprobs(model, r) - plain_logprobs(reference, r)).sum().item()
            for r in responses
        ]
    shaped = torch.tensor([r - 0.1 * ranks * k for r, k in zip(REWARDS, k1, strict=True)])
    assert_close(seen["advantages"], shaped - shaped.mean(), rtol=1e-4, atol=1e-4)
    assert metrics["critic/rewards/mean"] == pytest.approx(3.5 / 8)


@pytest.mark.parametrize("advantage", ESTIMATORS)
@pytest.mark.filterwarnings("ignore:.*equal rewards")
def test_kl_in_the_reward_keeps_its_coefficient_where_rewards_are_equal(advantage):
    model, reference = make_model(torch.float64), make_model(torch.float64, seed=5)
    responses, found = make_responses(model)[:3], []
    for coef in (0.01, 0.1):
        cfg = Cfg(kl_coef=coef, kl_in="reward", advantage=advantage)
        found.append(update_gradients(model, responses, [1.0] * 3, cfg, reference=reference)[0])
    assert sum(g.abs().sum() for g in found[0]) > 1e-3
    assert_close(found[1], [10 * g for g in found[0]], rtol=1e-4, atol=1e-7)


@pytest.mark.filterwarnings("ignore:.*equal rewards")
def test_kl_is_either_in_the_loss_or_in_the_reward():
    """Rewards are equal, so only the KL gives a gradient: k2's in the loss, or the penalty's."""
    model, reference = make_model(torch.float64), make_model(torch.float64, seed=5)
    responses = make_responses(model)
    tokens = sum(len(r.token_ids) for r in responses)
    exact = copy.deepcopy(model)
    for norm_of in (m for m in exact.modules() if hasattr(m, "variance_epsilon")):
        norm_of.forward = exact_norm(norm_of)
    logprobs = [plain_logprobs(exact, r) for r in responses]
    with torch.no_grad():
        log_ratios = [
            new - plain_logprobs(reference, r) for new, r in zip(logprobs, responses, strict=True)
        ]
    kl = torch.stack([log_ratio.sum() for log_ratio in log_ratios]).view(2, 4)
    advantages = -0.1 * (kl - kl.mean(1, keepdim=True)).flatten()
    pairs = list(zip(logprobs, log_ratios, strict=True))
    in_loss = sum(0.1 * (ratio * new).sum() for new, ratio in pairs) / tokens
    in_reward = sum(-a * new.sum() for a, new in zip(advantages, logprobs, strict=True)) / tokens
    for place, loss in (("loss", in_loss), ("reward", in_reward)):
        cfg = Cfg(kl_coef=0.1, kl_in=place, advantage="grpo")
        got, _ = update_gradients(model, responses, [1.0] * 8, cfg, reference=reference)
        wanted = torch.autograd.grad(loss, list(exact.parameters()), retain_graph=True)
        assert_close(got, list(wanted), rtol=1e-4, atol=1e-6)


def test_dapo_punishes_overlong_responses_before_the_advantage():
    model = make_model()
    responses = make_responses(model)[:4]  # the last is cut at the limit
    responses[3] = replace(responses[3], tools=[(2, LIMIT - 1)])  # whose answers count, too
    trainer = PolicyTrainer(model, Cfg(advantage="dapo"))
    raw = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    assert trainer._shaped_rewards(responses, raw, LIMIT).tolist() == [1.0, 0.0, 1.0, 0.0]
    assert raw.tolist() == [1.0, 0.0, 1.0, 1.0]


@pytest.mark.filterwarnings("ignore:100% of the groups")
def test_weight_decay_shrinks_matrices_and_nothing_else():
    model = make_model(family="qwen2")  # with biases
    wanted = [p.detach() * (0.95 if p.dim() > 1 else 1.0) for p in model.parameters()]
    trainer = PolicyTrainer(model, Cfg(weight_decay=0.5, lr=0.1))
    trainer.update(make_responses(model), [1.0] * 8)  # no gradient
    assert_close(trainer.params, wanted)


@pytest.mark.parametrize(
    ("kind", "stated", "used"), [("dapo", 0.0, 0.28), ("dapo", 0.1, 0.1), ("grpo", 0.0, 0.2)]
)
def test_the_upper_clip_is_the_estimator_s_unless_it_is_stated(kind, stated, used):
    """With old log-probs far below, the loss of a good response is its clipped one."""
    model = make_model()
    (batch,) = PolicyTrainer(model, Cfg())._micro_batches(make_responses(model)[:1], [0])
    batch = replace(batch, old_logprobs=batch.rollout_logprobs - 1.0)
    trainer = PolicyTrainer(model, Cfg(advantage=kind, clip_high=stated))
    _, (share,) = trainer.backward([batch], torch.ones(1))
    assert float(share.pg_loss / share.tokens) == pytest.approx(-math.exp(-1.0) * (1 + used))


# -- warnings


def test_warns_when_nearly_all_responses_are_cut_fault_52():
    model = make_model()
    responses = [replace(r, finish="length") for r in make_responses(model)]
    with pytest.warns(UserWarning, match="100% of the responses were cut at the length limit"):
        PolicyTrainer(model, Cfg()).update(responses, REWARDS)


def test_warns_when_nearly_all_groups_have_equal_rewards_fault_52():
    model = make_model()
    trainer = PolicyTrainer(model, Cfg())
    with pytest.warns(UserWarning, match="100% of the groups have equal rewards"):
        metrics = trainer.update(make_responses(model), [1.0] * 4 + [0.0] * 4)
    assert metrics["frac_reward_zero_std"] == 1.0
    assert metrics["actor/grad_norm"] == 0.0


@pytest.mark.parametrize("advantage", ESTIMATORS)
def test_groups_are_judged_by_the_responses_that_are_trained_on(advantage):
    """One response of each group is left: its advantage is 0 whatever the others' rewards were."""
    model = make_model()
    trainer = PolicyTrainer(model, Cfg(advantage=advantage))
    keep = [True, False, False, False, False, False, True, False]
    rewards = [1.0, 0.0, 0.5, 0.0, 0.0, 1.0, 1.0, 0.0]
    with pytest.warns(UserWarning, match="fewer than two trained responses or equal rewards"):
        metrics = trainer.update(make_responses(model), rewards, keep)
    assert metrics["frac_reward_zero_std"] == 1.0
    assert metrics["actor/grad_norm"] == 0.0


def test_metrics_of_rewards_and_lengths_are_of_all_responses():
    model = make_model()
    responses, keep = make_responses(model), [True] * 3 + [False] + [True] * 3 + [False]
    rewards = [1.0, 0.0, 0.5, 9.0, 0.0, 1.0, 1.0, 9.0]
    whole = PolicyTrainer(copy.deepcopy(model), Cfg()).update(responses, rewards)
    masked = PolicyTrainer(copy.deepcopy(model), Cfg()).update(responses, rewards, keep)
    for name in ("critic/rewards/mean", *(n for n in whole if n.startswith("response_length/"))):
        assert masked[name] == whole[name], name
    assert masked["response_length/clip_ratio"] == 0.25
    assert masked["actor/grad_norm"] != whole["actor/grad_norm"]


def test_equal_rewards_in_a_group_give_a_gradient_where_the_batch_is_the_baseline():
    model = make_model()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*equal rewards")
        metrics = PolicyTrainer(model, Cfg(advantage="reinforce")).update(
            make_responses(model), [1.0] * 4 + [0.0] * 4
        )
    assert metrics["actor/grad_norm"] > 0.0
    with pytest.warns(UserWarning, match="the batch has equal rewards"):
        PolicyTrainer(model, Cfg(advantage="reinforce")).update(make_responses(model), [1.0] * 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alarm_when_the_engine_holds_stale_weights_fault_53(dtype):
    model = make_model(dtype)
    responses = make_responses(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PolicyTrainer(copy.deepcopy(model), Cfg()).update(responses, REWARDS)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.2)
    with pytest.warns(UserWarning, match="does not hold the trainer's weights"):
        PolicyTrainer(model, Cfg()).update(responses, REWARDS)


def test_a_gradient_that_is_not_finite_skips_the_update():
    model = make_model()
    responses = make_responses(model)
    before = copy.deepcopy(model.state_dict())
    bad = [replace(responses[0], logprobs=[float("nan")] * len(responses[0].logprobs))]
    with pytest.warns(UserWarning) as caught:
        metrics = PolicyTrainer(model, Cfg()).update(bad + responses[1:], REWARDS)
    messages = " ".join(str(w.message) for w in caught)
    assert "gradient is not finite" in messages
    assert "sampling_logp_difference" in messages
    difference = [metrics[f"sampling/sampling_logp_difference/{x}"] for x in ("mean", "max")]
    assert all(map(math.isnan, difference))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# -- state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_continues_bit_for_bit(dtype, tmp_path):
    model = make_model(dtype)
    *steps, last_step = [make_responses(model, seed=s) for s in (1, 2, 3)]
    cfg = Cfg(warmup_steps=4, minibatches=2)
    unbroken = PolicyTrainer(copy.deepcopy(model), cfg)
    broken = PolicyTrainer(copy.deepcopy(model), cfg)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "sampling_logp_difference")
        for trainer, step in itertools.product((unbroken, broken), steps):
            trainer.update(step, REWARDS)
        torch.save(
            (broken.state_dict(), broken.weights.tensors(broken.optimizer)), tmp_path / "trainer.pt"
        )
        resumed = PolicyTrainer(copy.deepcopy(model), cfg)
        state, saved = torch.load(tmp_path / "trainer.pt")
        resumed.load_state_dict(state)
        own = resumed.weights.tensors(resumed.optimizer)
        for kind, parts in saved.items():
            for name, part in parts.items():
                own[kind][name].copy_(part)
        last = [t.update(last_step, REWARDS)["actor/lr"] for t in (unbroken, resumed)]
    assert last == [pytest.approx(1e-3 * 3 / 4)] * 2
    for a, b in zip(unbroken.params, resumed.params, strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)


def test_half_precision_trains_float32_weights():
    """Steps far below half a unit in the last place of bfloat16 are not lost."""
    model = make_model(torch.bfloat16)
    before = [p.detach().clone() for p in model.parameters()]
    trainer = PolicyTrainer(model, Cfg(lr=1e-5, max_grad_norm=100.0))
    responses = make_responses(copy.deepcopy(model).bfloat16())
    for _ in range(3):
        trainer.update(responses, REWARDS)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    moved = [not torch.equal(p, b.float()) for p, b in zip(trainer.params, before, strict=True)]
    assert all(moved)
    assert any(torch.equal(p.bfloat16(), b) for p, b in zip(trainer.params, before, strict=True))


@pytest.mark.parametrize("budget", [1, 40, 1024])
@pytest.mark.parametrize("ranks", [2, 3, 9])
def test_ranks_share_the_tokens_of_an_update_evenly(ranks, budget):
    """Each response is packed once. All ranks have equally many rows, some without a response."""
    model = make_model()
    responses, part = make_responses(model), [7, 0, 2, 5, 4, 1, 6, 3]
    trainer = PolicyTrainer(model, Cfg(micro_batch_tokens=budget))
    seen, tokens, counts = [], [], set()
    for rank in range(ranks):
        trainer.world = World(rank, ranks)
        rows = list(trainer._micro_batches(responses, part))
        seen += [i for row in rows for i in row.owner.unique().tolist()]
        tokens.append(sum(row.input_ids.shape[1] for row in rows if len(row.tokens)))
        counts.add(len(rows))
    assert sorted(seen) == list(range(8)) and len(counts) == 1
    longest = max(len(r.request.prompt_ids) + len(r.token_ids) for r in responses)
    assert max(tokens) - min(tokens) <= longest


def test_a_row_without_responses_changes_nothing():
    model = make_model()
    responses = make_responses(model)
    trainer, advantages = PolicyTrainer(model, Cfg(entropy_coef=0.1)), torch.tensor(REWARDS)
    gradients = []
    for empty in ([], [without_responses(torch.device("cpu"))]):
        batches = [build_micro_batch(responses, range(8), "cpu"), *empty]
        trainer.backward([trainer.with_fixed_logprobs(b) for b in batches], advantages)
        gradients.append([p.grad for p in trainer.params])
        trainer.optimizer.zero_grad()
    assert all(map(torch.equal, *gradients))

"""`engine.verify=rejection`: tokens of the engine follow the target, and known bugs are detected.

`tests/csrc/test_rejection.py` tests the op. These tests are of what the engine gives to it.
"""

import random
from collections import Counter

import pytest
import torch

import tlt_ext
from driver.common.errors import UserError
from driver.rollout.proposers import ChainProposer
from driver.rollout.request import Request, SamplingParams
from driver.run.comparison import Comparison
from tests import kit, reference
from tests.driver.hugging_face import random_model
from tests.driver.rollout.test_engine import SEED, generate, make_rollout, requests, same

CHAINS = ["ngram:2,1,3", "learned:2,1,3", "learned:4,1,5"]
MIXED = ["off", *CHAINS]  # one of them at every pass
PROMPT = (9, 8, 20, 31, 9, 8)  # n-grams find a continuation
N = 8_000  # responses of a test of distributions
COLD = SamplingParams(temperature=0.5, max_new_tokens=2)
FILTERED = SamplingParams(temperature=0.8, top_k=8, top_p=0.9, max_new_tokens=3)


@pytest.fixture(scope="module")
def policy():
    return random_model("llama-tied-llama3")


def made(policy, *words):
    rollout = make_rollout(
        policy,
        "engine.verify=rejection",
        f"engine.strategies=off {' '.join(CHAINS)}",
        "engine.max_batch=256",
        "engine.spec_max_batch=256",
        *words,
    )
    rollout.spot.swap()
    return rollout


@pytest.fixture(scope="module")
def rollout(policy):
    return made(policy)


def sequences(policy, params):
    """The probability of each response of full length."""
    out = {(): 1.0}
    for _ in range(params.max_new_tokens):
        longer = {}
        for tokens, chance in out.items():
            with torch.no_grad():
                logits = policy(torch.tensor([[*PROMPT, *tokens]])).logits[0, -1]
            probs = reference.target_probs(logits, params.temperature, params.top_k, params.top_p)
            for token in probs.nonzero()[:, 0].tolist():
                longer[(*tokens, token)] = chance * float(probs[token])
        out = longer
    return out


@pytest.fixture(scope="module")
def expected(policy):
    return {params: sequences(policy, params) for params in (COLD, FILTERED)}


def fit(rollout, expected, params, *menu):
    """Probability of counts at least as far from the target's distribution as those of N."""
    jobs = [Request(i, 0, PROMPT, params) for i in range(N)]
    counts = Counter(tuple(r.token_ids) for r in generate(rollout, jobs, *menu))
    probs = expected[params]
    assert counts.keys() <= probs.keys()
    observed = torch.tensor([counts[tokens] for tokens in probs])
    return kit.chi_square_p(observed, torch.tensor([*probs.values()]))


@pytest.mark.parametrize(
    ("params", "menu"),
    [
        (COLD, ["ngram:2,1,3"]),
        (COLD, ["learned:2,1,3"]),
        (FILTERED, ["learned:4,1,5"]),
        (FILTERED, MIXED),
    ],
    ids=["ngram", "learned", "filtered", "mixed"],
)
def test_responses_have_the_distribution_of_the_target(rollout, expected, params, menu):
    assert fit(rollout, expected, params, *menu) > 1e-3
    stats = rollout.engine.stats
    assert stats.spec_emitted > 1.02 * stats.spec_request_passes  # drafts are accepted
    assert stats.spec_emitted < 1.9 * stats.spec_request_passes  # and rejected
    assert stats.flagged == 0


def redraw(probs_of, seed):
    """`verify_rejection`, whose token after a rejected draft is drawn again.

    Args:
        probs_of: of the target's and the draft's distribution at the row, to draw from.
        seed: of the draw.
    """
    verify = tlt_ext.verify_rejection

    def run(logits, draft_probs, tree, rows, sampling, out, **settings):
        verify(logits, draft_probs, tree, rows, sampling, out, **settings)
        request = torch.arange(len(out.num_emitted))
        last = out.num_emitted.long() - 1
        row = rows.row_start[:-1] + out.path[request, last]
        token = out.emitted[request, last]
        below = (row + 1).clamp_max(len(tree.tokens) - 1)
        # A leaf has no draft; an accepted draft is emitted.
        rejected = (tree.parents[below] >= 0) & (tree.tokens[below] != token)
        target = (logits[row] / sampling.temperature[:, None]).softmax(-1)
        again = torch.zeros_like(token)
        tlt_ext.sample(
            probs_of(target, draft_probs[row]).log(),
            tlt_ext.Sampling(
                torch.ones_like(sampling.temperature),
                sampling.request,
                torch.zeros_like(sampling.top_k),
                torch.ones_like(sampling.top_p),
            ),
            position=rows.position[row] + 1,
            tokens=again,
            logprobs=torch.zeros(len(again)),
            status=torch.zeros_like(again),
            seed=seed,
        )
        out.emitted[request, last] = torch.where(rejected, again, token)

    return run


def residual(target, draft):
    return (target - draft).clamp_min(0)


def without_residual(target, draft):
    return target


@pytest.mark.parametrize(
    ("probs_of", "seed", "fits"),
    [
        (residual, SEED + 1, True),  # the check itself
        (residual, SEED, False),  # the noise of the draft
        (without_residual, SEED + 1, False),
    ],
    ids=["none", "shared noise", "no residual"],
)
def test_planted_bugs_of_the_residual_are_detected(
    rollout, expected, monkeypatch, probs_of, seed, fits
):
    monkeypatch.setattr(tlt_ext, "verify_rejection", redraw(probs_of, seed))
    assert (fit(rollout, expected, COLD, "learned:2,1,3") > 1e-3) is fits


@pytest.mark.parametrize(
    "wrong",
    [
        lambda probs: probs.roll(-1, 0),  # of the next level
        lambda probs: (probs**2) / (probs**2).sum(-1, keepdim=True),  # of another temperature
        lambda probs: torch.ones_like(probs),  # as if the draft were chosen
    ],
    ids=["level", "temperature", "deterministic"],
)
def test_wrong_draft_probabilities_are_detected(rollout, expected, monkeypatch, wrong):
    right = ChainProposer._probs
    monkeypatch.setattr(ChainProposer, "_probs", lambda *args: wrong(right(*args)).contiguous())
    assert fit(rollout, expected, COLD, "learned:2,1,3") < 1e-3


def test_greedy_requests_and_plain_passes_give_the_tokens_of_plain_decoding(policy, rollout):
    greedy = requests(settings=[(0.0, 0, 1.0)])
    wanted = generate(make_rollout(policy), greedy)
    for menu in (["off"], *([chain] for chain in CHAINS), MIXED):
        assert same(generate(rollout, greedy, *menu), wanted)
    shared = make_rollout(policy)
    assert same(generate(rollout, requests()), generate(shared, requests()))


@pytest.mark.parametrize("chain", CHAINS[1:])  # n-grams of siblings depend on the batch
def test_noise_is_keyed(rollout, chain):
    """Neither batch nor order changes a draft or a decision on it."""
    jobs = requests()
    wanted = {r.request.id: r for r in generate(rollout, jobs, chain)}
    for count in (1, 5, 11):
        random.Random(count).shuffle(jobs)
        got = generate(rollout, jobs[:count], chain)
        assert same(got, [wanted[job.id] for job in jobs[:count]])


def test_logprobs_stops_and_limits_are_those_of_the_target(policy, rollout):
    jobs = requests(count=16, new=20)
    got = generate(rollout, jobs, "learned:4,1,5")
    assert {r.finish for r in got} == {"stop", "length"}
    for response in got:
        params, tokens = response.request.params, response.token_ids
        ids = torch.tensor([[*response.request.prompt_ids, *tokens]])
        with torch.no_grad():
            logits = policy(ids).logits[0, -len(tokens) - 1 : -1]
        wanted = (logits / (params.temperature or 1.0)).log_softmax(-1)
        wanted = wanted.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(response.logprobs), wanted, atol=2e-4)
        assert not set(tokens[:-1]) & set(params.stop_ids)
        ends = tokens[-1] in params.stop_ids
        assert (response.finish == "stop") == ends
        assert ends or len(tokens) == params.max_new_tokens


def test_preempted_requests_finish(rollout):
    jobs = requests(new=40, stop=())
    got = generate(rollout, jobs, "learned:4,1,5", page_limit=24)
    assert rollout.engine.stats.preemptions > 0
    assert {len(r.token_ids) for r in got} == {40}


def test_a_nan_drafter_leaves_the_distribution(policy, expected):
    broken = made(policy)
    for weight in broken.spot.runner.weights.values():
        weight.fill_(float("nan"))
    assert fit(broken, expected, COLD, "learned:2,1,3") > 1e-3
    assert broken.engine.stats.accept_length == 1.0
    assert broken.engine.stats.flagged == 0


@pytest.mark.parametrize("arm", ["learned:4,2,8", "learned:4,1,4", "ngram:4,1,9", "hybrid:4,1,5"])
def test_other_strategies_than_chains_are_refused_by_name(policy, arm):
    with pytest.raises(UserError, match=f"engine.verify=rejection: .* has '{arm}'; only chains"):
        made(policy, f"engine.strategies=off {arm}")


def test_comparisons_of_tokens_are_refused(rollout):
    with pytest.raises(UserError, match="engine.verify=rejection: .* distribution"):
        Comparison(rollout, [], lambda index: [], lambda: None, SEED)

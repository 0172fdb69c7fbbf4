"""`verify_rejection` keeps the target's distribution; the tests fail on known bugs."""

import math
import random

import pytest
import torch

from tests import kit, reference
from tests.csrc.verify_kit import (
    MILLION,
    REVERSED,
    TARGET,
    WIDTH,
    emitted_lists,
    rejection,
    tree,
    valid,
)
from tests.grouping import flat
from tlt_ext import Status

pytestmark = pytest.mark.usefixtures("each_device")
each_device = kit.each_device


def without_replacement(probs: torch.Tensor, draws: int, count: int) -> torch.Tensor:
    """[draws, count] ids drawn one after another from `probs`, none twice."""
    noise = torch.rand(draws, len(probs), generator=kit.generator(9), dtype=torch.float64)
    return (probs.double().log() - (-noise.log()).log()).topk(count).indices


def one_level(probs, draft, children, **options):
    """A root with `children` [draws, count] per request."""
    draws, count = children.shape
    rows = draws * (count + 1)
    return rejection(
        probs.log().expand(rows, -1),
        torch.cat([torch.zeros(draws, 1), children], 1).flatten(),
        torch.tensor([-1] + [0] * count).repeat(draws),
        torch.arange(0, rows + 1, count + 1),
        draft_probs=None if draft is None else draft.expand(rows, -1),
        **options,
    )


@pytest.mark.parametrize(
    ("probs", "draft"),
    [
        (TARGET, REVERSED),  # faults 1 and 18
        (TARGET, TARGET),
        (torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.6, 0.3, 0.1])),
        (torch.tensor([0.7, 0.0, 0.2, 0.1]), torch.tensor([0.0, 0.6, 0.3, 0.1])),
        (torch.tensor([1.0, 0.0]), torch.tensor([0.01, 0.99])),
    ],
)
def test_a_chain_keeps_the_target_distribution(probs, draft):
    """Accepted with chance sum of min(target, draft); emitted as the target, also after it."""
    children = without_replacement(draft, MILLION, 1)
    out = one_level(probs, draft, children)
    kit.assert_distribution(out.emitted[:, 0], probs)
    accepted = out.num_emitted == 2
    chance = float(torch.minimum(probs, draft).sum())
    if chance < 1:
        kit.assert_distribution(accepted, torch.tensor([1 - chance, chance]))
    else:
        assert accepted.float().mean() > 0.99999
    kit.assert_distribution(out.emitted[accepted, 1], probs)
    assert torch.equal(out.emitted[accepted, 0].long(), children[accepted, 0])
    assert (out.logprobs[:, 0] - probs.log()[out.emitted[:, 0].long()]).abs().max() < 1e-6


@pytest.mark.parametrize("count", [2, 3])
def test_multi_round_siblings_keep_the_target_distribution(count):
    """Children without replacement: tokens follow the target, acceptance has its closed form."""
    children = without_replacement(REVERSED, MILLION, count)
    out = one_level(TARGET, REVERSED, children)
    kit.assert_distribution(out.emitted[:, 0], TARGET)
    accepted = out.num_emitted == 2
    kit.assert_distribution(accepted, accept_probs(TARGET.double(), REVERSED.double(), count))


def accept_probs(probs, draft, count) -> torch.Tensor:
    """Chances (none accepted, one accepted) of `count` rounds, summed over all drafts."""
    if count == 0 or float(draft.sum()) == 0.0:
        return torch.tensor([1.0, 0.0], dtype=torch.float64)
    draft = draft / draft.sum()
    taken = float(torch.minimum(probs, draft).sum())
    total = torch.tensor([0.0, taken], dtype=torch.float64)
    residual = (probs - draft).clamp_min(0.0)
    for token in range(len(probs)):
        rejected = float((draft - probs).clamp_min(0.0)[token])
        if rejected > 0.0:
            rest = draft.clone()
            rest[token] = 0.0
            total += rejected * accept_probs(residual / residual.sum(), rest, count - 1)
    return total


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_rejection_applies_temperature_top_k_and_top_p(temperature):
    """Fault 6: a token that top-p cut off is never accepted, however sure the draft is."""
    logits = torch.tensor([0.3, 0.25, 0.2, 0.15, 0.1]).log()
    probs = reference.target_probs(logits, temperature, 4, 0.8).float()
    draft = torch.tensor([0.1, 0.1, 0.1, 0.2, 0.5])
    children = without_replacement(draft, 300_000, 2)
    rows = 3 * len(children)
    out = rejection(
        logits.expand(rows, -1),
        torch.cat([torch.zeros(len(children), 1), children], 1).flatten(),
        torch.tensor([-1, 0, 0]).repeat(len(children)),
        torch.arange(0, rows + 1, 3),
        draft_probs=draft.expand(rows, -1),
        temperature=temperature,
        top_k=4,
        top_p=0.8,
    )
    kit.assert_distribution(out.emitted[:, 0], probs)


def test_two_levels_keep_the_joint_distribution():
    second = torch.tensor([0.1, 0.2, 0.7])
    first, draft = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    n = 300_000
    children = without_replacement(draft, 2 * n, 1).view(n, 2)
    logits = torch.stack([first.log(), second.log(), first.log()]).repeat(n, 1)
    out = rejection(
        logits,
        torch.cat([torch.zeros(n, 1), children], 1).flatten(),
        torch.tensor([-1, 0, 1]).repeat(n),
        torch.arange(0, 3 * n + 1, 3),
        position=torch.tensor([4, 5, 6]).repeat(n),
        draft_probs=draft.expand(3 * n, -1),
    )
    deep = out.num_emitted >= 2
    kit.assert_distribution(out.emitted[:, 0], first)
    # given the first draft was accepted, the second token is fresh
    both = 3 * out.emitted[deep, 0] + out.emitted[deep, 1]
    accepted = torch.minimum(first, draft) / torch.minimum(first, draft).sum()
    kit.assert_distribution(both, torch.outer(accepted, second).flatten())
    third = out.num_emitted == 3
    kit.assert_distribution(out.emitted[third, 2], first)


@pytest.mark.parametrize("children", [[0], [2], [0, 1], [2, 0, 1]])
def test_deterministic_drafts_are_one_hot_proposals(children):
    """Fault 17: target (.5, .3, .2), argmax drafts; accepted with the chance of the drafts."""
    probs = torch.tensor([0.5, 0.3, 0.2])
    out = one_level(probs, None, torch.tensor(children).expand(MILLION, -1), deterministic=True)
    kit.assert_distribution(out.emitted[:, 0], probs)
    chance = float(probs[children].sum())
    accepted = out.num_emitted == 2
    assert float(accepted.float().mean()) == pytest.approx(chance, abs=2e-3)


def test_rejection_equals_reference_node_by_node():
    rng, generator = random.Random(0), kit.generator(5)
    vocab, seed, rejected = 9, 77, 0
    for case in range(300):
        deterministic = case % 3 == 0
        logits = 2 * torch.randn(1, vocab, generator=generator)
        draft = torch.softmax(2 * torch.randn(1, vocab, generator=generator), -1)
        count = rng.randint(0, 4)
        children = rng.sample(range(vocab), count)
        if not deterministic:
            children = torch.multinomial(draft[0], count + 1, generator=generator)[:count].tolist()
        setting = rng.choice([0.0, 0.7, 1.0]), rng.choice([0, 4]), rng.choice([1.0, 0.8])
        request = rng.getrandbits(62)
        out = rejection(
            logits.expand(count + 1, -1),
            [0, *children],
            [-1] + [0] * count,
            [0, count + 1],
            position=torch.tensor([case] + [case + 1] * count),
            temperature=setting[0],
            top_k=setting[1],
            top_p=setting[2],
            request=[request],
            limit=1,
            draft_probs=draft.expand(count + 1, -1),
            deterministic=deterministic,
            seed=seed,
        )
        words = reference.noise_words(seed, request, case + 1, count + 1, reference.ACCEPT)
        uniforms = [(int(word >> 9) + 0.5) / 2**23 for word in words]
        place, probs = reference.verify_rejection(
            reference.target_probs(logits[0], *setting),
            None if deterministic else draft[0],
            children,
            uniforms[1:],
        )
        if place is None:
            rejected += 1
            noise = reference.noise_words(seed, request, case + 1, vocab, reference.RESIDUAL)
            token = int((probs.log() + reference.gumbel(noise)).argmax())
        else:
            token = children[place]
        assert emitted_lists(out) == [[token]]
        right = reference.logprob(logits[0], setting[0], token)
        assert float(out.logprobs[0, 0]) == pytest.approx(right, abs=1e-6)
    assert 50 < rejected < 250


def test_filtered_logprobs_are_over_the_kept_ids():
    """Of accepted drafts and of drawn tokens, greedy ones too."""
    rng, generator = random.Random(1), kit.generator(6)
    for _ in range(60):
        logits = 2 * torch.randn(1, 9, generator=generator)
        setting = rng.choice([0.0, 0.7]), rng.choice([0, 4]), rng.choice([1.0, 0.8])
        filtered = torch.full((1, WIDTH), math.nan)
        out = rejection(
            logits.expand(2, -1),
            [0, int(logits.argmax())],
            [-1, 0],
            [0, 2],
            temperature=setting[0],
            top_k=setting[1],
            top_p=setting[2],
            deterministic=True,
            filtered_logprobs=filtered,
            seed=rng.getrandbits(64),
        )
        tokens = emitted_lists(out)[0]
        right = [reference.filtered_logprob(logits[0], *setting, token) for token in tokens]
        assert filtered[0, : len(tokens)].tolist() == pytest.approx(right, abs=1e-6)
        assert filtered[0, len(tokens) :].isnan().all()


def test_greedy_rejection_is_argmax():
    """T = 0: the draft is accepted if and only if it is the argmax; siblings too."""
    n, vocab = 200, 6
    logits = kit.randn(n, vocab, seed=1).repeat_interleave(3, 0)
    draft = torch.softmax(kit.randn(n, vocab, seed=2), -1)
    children = torch.multinomial(draft, 2, generator=kit.generator(1))
    out = rejection(
        logits,
        torch.cat([torch.zeros(n, 1), children], 1).flatten(),
        torch.tensor([-1, 0, 0]).repeat(n),
        torch.arange(0, 3 * n + 1, 3),
        temperature=0.0,
        draft_probs=draft.repeat_interleave(3, 0),
    )
    best = logits[::3].argmax(-1)
    assert torch.equal(out.emitted[:, 0].long(), best)
    assert torch.equal(out.num_emitted == 2, (children == best[:, None]).any(1))


@pytest.mark.parametrize("bad", [math.nan, -0.1, 1.5, math.inf])
def test_a_broken_draft_row_is_useless_and_flagged(bad):
    """Fault 4: NaN in the draft row: the same tokens as without drafts."""
    n = 300
    draft = REVERSED.clone()
    draft[1] = bad
    logits = TARGET.log().expand(2 * n, -1)
    out = one_level(TARGET, draft, torch.zeros(n, 1).long())
    alone = rejection(logits[:n], [0] * n, [-1] * n, range(n + 1), deterministic=True)
    assert torch.equal(out.emitted[:, 0], alone.emitted[:, 0])
    assert (out.num_emitted == 1).all()
    assert (out.status == Status.NAN_DRAFT).all()
    assert (alone.status == 0).all()


def test_a_child_with_draft_probability_0_is_ignored():
    """Tokens follow the target if a child has draft probability 0, or all ids have."""
    for draft in (torch.tensor([0.0, 0.5, 0.5, 0.0]), torch.zeros(4)):
        out = one_level(TARGET, draft, torch.zeros(100_000, 1).long())
        kit.assert_distribution(out.emitted[:, 0], TARGET)
        assert (out.num_emitted == 1).all()


def test_rejection_ignores_malformed_links_and_ids():
    """Fault 9: cycle, -1, out of range; ids outside the vocabulary."""
    n = 2**31 - 1
    out = rejection(
        torch.zeros(8, 4),
        [0, 1, 2, 3, -1, 4, n, 1],
        [-1, 1, 3, 2, 0, 0, 0, -1],
        [0, 8],
        deterministic=True,
    )
    assert int(out.num_emitted) == 1
    assert Status(int(out.status)) == Status.BAD_TREE | Status.BAD_TOKEN


def test_rejection_over_a_large_vocabulary():
    """Fault 2: V = 8193 with no probability in the last tile; ids stay in range."""
    vocab, n = 8193, 5000
    logits = 2 * kit.randn(vocab, seed=0)
    logits[-8:] = -math.inf
    draft = torch.softmax(kit.randn(vocab, seed=1), -1)
    children = torch.multinomial(draft, n, replacement=True, generator=kit.generator(2))
    out = rejection(
        logits.expand(2 * n, -1),
        torch.stack([torch.zeros(n), children], 1).flatten(),
        torch.tensor([-1, 0]).repeat(n),
        torch.arange(0, 2 * n + 1, 2),
        draft_probs=draft.expand(2 * n, -1),
        limit=1,
    )
    probs = torch.softmax(logits.double(), -1)
    group = torch.arange(vocab) % 23
    assert int(out.emitted[:, 0].max()) < vocab - 8
    kit.assert_distribution(
        group[out.emitted[:, 0].long()], torch.zeros(23).double().index_add_(0, group, probs)
    )
    chance = float(torch.minimum(probs, draft.double()).sum())
    agreed = out.emitted[:, 0] == children  # accepted, or drawn by chance: a rare event
    assert float(agreed.float().mean()) == pytest.approx(chance, abs=0.03)


def test_inputs_are_const():
    """Fault 20: the same rows give the same answer twice, and are left as they were."""
    logits, draft = kit.randn(4, 50, seed=0), torch.softmax(kit.randn(4, 50, seed=1), -1)
    before = logits.clone(), draft.clone()
    first = rejection(logits, [0, 1, 2, 3], [-1, 0, 0, 0], [0, 4], draft_probs=draft)
    again = rejection(logits, [0, 1, 2, 3], [-1, 0, 0, 0], [0, 4], draft_probs=draft)
    tree(logits, [0, 1, 2, 3], [-1, 0, 0, 0], [0, 4], top_k=3)
    assert emitted_lists(first) == emitted_lists(again)
    assert kit.same_bits(logits, before[0]) and kit.same_bits(draft, before[1])


def test_verify_rejection_checks_draft_probs():
    """Fault 19: only float32 draft probabilities, the ones that the drafts were drawn with."""
    with pytest.raises(ValueError, match="draft_probs: expected an array unless deterministic"):
        flat.verify_rejection(**valid(), draft_probs=None, seed=0)
    with pytest.raises(TypeError, match="draft_probs: expected dtype float32, got bfloat16"):
        flat.verify_rejection(**valid(), draft_probs=torch.zeros(6, 10).bfloat16(), seed=0)
    with pytest.raises(ValueError, match=r"draft_probs: expected shape \[6, \*\], got \[5, 10\]"):
        flat.verify_rejection(**valid(), draft_probs=torch.zeros(5, 10), seed=0)
    with pytest.raises(ValueError, match="draft_probs: expected at least 10 columns, got 9"):
        flat.verify_rejection(**valid(), draft_probs=torch.zeros(6, 9), seed=0)


# ---- the tests can fail ----------------------------------------------------------------------


def textbook_draws(probs, draft, *, bug: str) -> torch.Tensor:
    """A million tokens of the classical rule, with one known bug, in plain torch."""
    generator = kit.generator(1)

    def noise():
        u = torch.rand(MILLION, len(probs), generator=generator, dtype=torch.float64)
        return -(-u.log()).log()

    first = noise()
    proposed = (draft.double().log() + first).argmax(1)
    if bug == "argmax draft":
        proposed = torch.full((MILLION,), int(draft.argmax()))
    used = torch.full_like(draft, 1 / len(draft)) if bug == "wrong draft probabilities" else draft
    u = torch.rand(MILLION, generator=generator, dtype=torch.float64)
    accepted = u * used.double()[proposed] < probs.double()[proposed]
    residual = probs if bug == "residual not used" else (probs - used).clamp_min(0.0)
    second = first if bug == "shared noise" else noise()
    drawn = (residual.double().log() + second).argmax(1)
    return torch.where(accepted, proposed, drawn)


@pytest.mark.parametrize(
    ("bug", "probs", "draft", "reported"),
    [
        ("shared noise", TARGET, REVERSED, [0.433, 0.266, 0.200, 0.100]),  # fault 1
        ("residual not used", TARGET, REVERSED, None),  # fault 18
        ("wrong draft probabilities", TARGET, REVERSED, None),
        (
            "argmax draft",
            torch.tensor([0.5, 0.3, 0.2]),
            torch.tensor([0.6, 0.3, 0.1]),
            [0.833, 0.0, 0.167],
        ),  # fault 17
    ],
)
def test_planted_bugs_are_caught(bug, probs, draft, reported):
    kit.assert_distribution(textbook_draws(probs, draft, bug="none"), probs)
    wrong = textbook_draws(probs, draft, bug=bug)
    with pytest.raises(AssertionError):
        kit.assert_distribution(wrong, probs)
    if reported:
        share = torch.bincount(wrong, minlength=len(probs)) / MILLION
        assert (share - torch.tensor(reported)).abs().max() < 2e-3


def test_wrong_draft_probabilities_given_to_the_op_are_caught():
    children = without_replacement(REVERSED, MILLION, 1)
    wrong = one_level(TARGET, torch.full((4,), 0.25), children)
    with pytest.raises(AssertionError):
        kit.assert_distribution(wrong.emitted[:, 0], TARGET)
    argmax = one_level(TARGET, REVERSED, torch.full((MILLION, 1), 3))  # chosen, tested as if drawn
    with pytest.raises(AssertionError):
        kit.assert_distribution(argmax.emitted[:, 0], TARGET)

"""A million draws on the GPU follow the target's distribution at every size of vocabulary.

`test_sampling.py` and `test_rejection.py` test distributions over small vocabularies; the draws of
this file go through all tiles of the kernels. Each check is shown to fail on a planted bug.
"""

import pytest
import torch

import tlt_ext
from tests import kit
from tests.grouping import call, flat

pytestmark = [kit.gpu, kit.needs_gpu]
MILLION = 1_000_000
VOCABS = [4, 64, 8193, 151_936]
CHUNK = 250_000  # requests a call


def rows_of(vocab: int) -> torch.Tensor:
    """Logits of one row whose likely ids lie all over the vocabulary."""
    return (2 * kit.randn(1, vocab, seed=vocab)).cuda()


def probs_of(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    return torch.softmax(logits[0].double() / temperature, -1).cpu()


def setting(first: int, count: int, temperature: float) -> dict[str, torch.Tensor]:
    ints = {"dtype": torch.int32, "device": "cuda"}
    return {
        "temperature": torch.full((count,), temperature, device="cuda"),
        "top_k": torch.zeros(count, **ints),
        "top_p": torch.ones(count, device="cuda"),
        "request": torch.arange(first, first + count, device="cuda"),
        "status": torch.zeros(count, **ints),
    }


def sampled(logits: torch.Tensor, temperature: float = 1.0, same_request: bool = False):
    """A million tokens of `sample`."""
    tokens = torch.zeros(MILLION, dtype=torch.int32, device="cuda")
    for first in range(0, MILLION, CHUNK):
        arrays = setting(first, CHUNK, temperature)
        if same_request:
            arrays["request"].zero_()
        flat.sample(
            logits.expand(CHUNK, -1),
            position=torch.full((CHUNK,), 7, dtype=torch.int32, device="cuda"),
            tokens=tokens[first : first + CHUNK],
            logprobs=torch.zeros(CHUNK, device="cuda"),
            seed=3,
            **arrays,
        )
    return tokens.cpu()


def verified(op, logits: torch.Tensor, children: torch.Tensor, **options):
    """The first tokens that a million requests emit, each with one drafted child, and how many."""
    ints = {"dtype": torch.int32, "device": "cuda"}
    emitted, counts = [], []
    for first in range(0, MILLION, CHUNK):
        tokens = torch.zeros(CHUNK, 2, **ints)
        tokens[:, 1] = children[first : first + CHUNK]
        out = torch.zeros(CHUNK, 17, **ints)
        path, num_emitted, finish = out.clone(), *torch.zeros(2, CHUNK, **ints).unbind()
        call(
            op,
            logits.expand(2 * CHUNK, -1),
            tokens=tokens.flatten(),
            parents=torch.tensor([-1, 0], **ints).repeat(CHUNK),
            position=torch.tensor([6, 7], **ints).repeat(CHUNK),
            row_start=2 * torch.arange(CHUNK + 1, **ints),
            stop_ids=torch.full((CHUNK, 1), -1, **ints),
            limit=torch.full((CHUNK,), 17, **ints),
            emitted=out,
            logprobs=torch.zeros(CHUNK, 17, device="cuda"),
            num_emitted=num_emitted,
            path=path,
            finish=finish,
            seed=3,
            **setting(first, CHUNK, 1.0),
            **options,
        )
        emitted.append(out[:, 0].cpu())
        counts.append(num_emitted.cpu())
    return torch.cat(emitted), torch.cat(counts)


@pytest.mark.parametrize("vocab", VOCABS)
def test_a_million_samples(vocab):
    logits = rows_of(vocab)
    probs = probs_of(logits)
    tokens = sampled(logits)
    kit.assert_distribution(tokens, probs)
    with pytest.raises(AssertionError):  # a temperature 5 % off
        kit.assert_distribution(sampled(logits, temperature=1.05), probs)
    with pytest.raises(AssertionError):  # one noise for all
        kit.assert_distribution(sampled(logits, same_request=True), probs)
    with pytest.raises(AssertionError):  # the upper half of the ids is one too high
        high = (tokens >= vocab // 2) & (tokens < vocab - 1)
        kit.assert_distribution(tokens + high.int(), probs)


@pytest.mark.parametrize("vocab", VOCABS)
def test_a_million_verified_trees(vocab):
    """Whatever was drafted; and the same tokens as `sample`."""
    logits = rows_of(vocab)
    probs = probs_of(logits)
    children = torch.multinomial(probs, MILLION, replacement=True).int().cuda()
    tokens, counts = verified(tlt_ext.verify_tree, logits, children)
    kit.assert_distribution(tokens, probs)
    assert torch.equal(tokens, sampled(logits))
    assert torch.equal(counts == 2, tokens == children.cpu())
    best = probs.argmax()
    kept = torch.rand(MILLION, generator=kit.generator(vocab)) < probs[best]
    with pytest.raises(AssertionError):  # fault 18: a draft that was refused is drawn again
        kit.assert_distribution(torch.where(kept, best.int(), tokens), probs)


@pytest.mark.parametrize("vocab", VOCABS)
def test_a_million_rejections(vocab):
    """Drafts of another distribution: tokens follow the target, acceptance has its closed form."""
    logits = rows_of(vocab)
    probs = probs_of(logits)
    draft = probs_of(logits + (1.5 * kit.randn(1, vocab, seed=1)).cuda())
    children = torch.multinomial(
        draft, MILLION, replacement=True, generator=kit.generator(vocab)
    ).int()
    rows = draft.float().cuda()[None].expand(2 * CHUNK, -1)
    tokens, counts = verified(tlt_ext.verify_rejection, logits, children.cuda(), draft_probs=rows)
    kit.assert_distribution(tokens, probs)
    chance = float(torch.minimum(probs, draft).sum())
    kit.assert_distribution((counts == 2).int(), torch.tensor([1 - chance, chance]))
    wrong = probs.float().cuda()[None].expand(2 * CHUNK, -1)
    biased, _ = verified(tlt_ext.verify_rejection, logits, children.cuda(), draft_probs=wrong)
    with pytest.raises(AssertionError):  # fault 18: not the distribution of the drafts
        kit.assert_distribution(biased, probs)
    best = draft.argmax().int().cuda().expand(MILLION)
    biased, _ = verified(tlt_ext.verify_rejection, logits, best, draft_probs=rows)
    with pytest.raises(AssertionError):  # fault 17: the draft's best token instead of a sample
        kit.assert_distribution(biased, probs)

"""Proposers of draft trees other than the drafter: n-grams, both combined, and an oracle."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

import tlt_ext

from ..config.strategy import HYBRID, LEARNED, NGRAM, REJECTION, SHARED, Kind, Strategy
from .draft_runner import DraftRunner
from .state import Batch
from .token_store import TokenStore
from .tree import NodeStore, Tree

GREEDY_BELOW = 1e-6  # temperature of ops (`csrc/common/noise.h`)
MIN_MATCH = 8  # matching tokens after which an n-gram replaces the drafter's tree


class Proposer(Protocol):
    """Drafts a tree for every running request; subclasses inherit defaults for model-free drafts.

    `on_device`: `propose` reads static arrays only and never waits for the device, so it can be
    captured and repeated without the host.
    """

    on_device: bool

    @property
    def version(self) -> int:
        """Of the learned drafter, 0 = none."""
        return 0

    def usable(self) -> bool:
        return True

    def lookahead(self, strategy: Strategy) -> int:
        """KV slots past the committed ones that drafting itself writes."""
        return 0

    def prepare(self, batch: Batch, strategy: Strategy, store: TokenStore) -> list[int] | None:
        """Host work before a burst; the new `draft_len` of each row, None if none changed."""
        return None

    def propose(self, batch: Batch, strategy: Strategy, store: TokenStore) -> Tree:
        """A tree for each row of the batch."""
        ...


def _capacity(strategy: Strategy) -> int:
    return 1 + strategy.depth * strategy.top_k


def draft_ngrams(nodes: NodeStore, batch: Batch, store: TokenStore, **settings: Any) -> None:
    """Drafts the tokens that followed a request's last tokens in rows of its prompt."""
    store.advance(batch.store_row, batch.context_len)
    tlt_ext.ngram_propose(
        batch.table,
        nodes.arrays,
        batch.sampling,
        context_len=batch.context_len,
        status=batch.status,
        **settings,
    )


class NgramProposer(Proposer):
    """Drafts by n-gram lookup in the request's own tokens and in those of its prompt."""

    on_device = True

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._nodes: dict[tuple[int, Strategy], NodeStore] = {}

    def propose(self, batch: Batch, strategy: Strategy, store: TokenStore) -> Tree:
        key = len(batch), strategy
        if key not in self._nodes:
            capacity, device = _capacity(strategy), batch.slot.device
            self._nodes[key] = NodeStore(len(batch), capacity, strategy.num_verify, device)
        nodes = self._nodes[key]
        drawn = {"seed": self.seed, "depth": strategy.depth, "top_k": strategy.top_k}
        draft_ngrams(nodes, batch, store, **drawn)
        return nodes.select(batch.context_len)


class DrafterProposer:
    """What proposers that use the learned model share."""

    on_device = True

    def __init__(self, runner: DraftRunner) -> None:
        self.runner = runner
        self.usable, self.lookahead, self.prepare = runner.usable, runner.lookahead, runner.prepare

    @property
    def version(self) -> int:
        return self.runner.version


class HybridProposer(DrafterProposer):
    """Learned drafts, replaced by n-gram drafts for requests that repeat earlier tokens.

    The learned model drafts for the whole batch, so its cache stays complete. If the last
    `MIN_MATCH` tokens of a request occur elsewhere in rows of its prompt, its tree is replaced by a
    chain of the tokens that followed them there. Scores of the two are never compared.
    """

    def propose(self, batch: Batch, strategy: Strategy, store: TokenStore) -> Tree:
        nodes = self.runner.draft(batch, strategy, store)
        drawn = {"seed": self.runner.seed, "depth": strategy.chain, "top_k": 1}
        draft_ngrams(nodes, batch, store, **drawn, min_ngram=MIN_MATCH, keep_unmatched=True)
        return nodes.select(batch.context_len)


class ChainProposer(DrafterProposer):
    """Chains drawn from the learned model, with their distributions, for rejection sampling.

    The noise of the draws has another domain than that of acceptance and residuals
    (`csrc/common/noise.h`), so a draft says nothing about the decision on it.
    """

    def propose(self, batch: Batch, strategy: Strategy, store: TokenStore) -> Tree:
        assert strategy.is_chain  # `EngineConfig` lists no others
        logits = list[Tensor]()
        nodes = self.runner.draft(batch, strategy, store, keep_logits=logits)
        probs = self._probs(torch.stack(logits, 1), batch.draft_temperature)
        # Where a NaN ended the draft, the probability of the next id is NaN, so it is rejected.
        return replace(nodes.chain(batch.context_len), draft_probs=probs)

    def _probs(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """Distributions [B * (depth + 1), V] of drafts with logits [B, depth, draft_vocab]."""
        batch, depth, _ = logits.shape
        # Colder draws are greedy, and the softmax is then one-hot.
        logits /= temperature.clamp_min(GREEDY_BELOW)[:, None, None]
        probs = logits.new_zeros(batch, depth + 1, self.runner.target.spec.vocab_size)
        probs[:, :depth].index_copy_(2, self.runner.d2t.long(), logits.softmax(-1))
        return probs.flatten(0, 1)


class OracleProposer(Proposer):
    """Drafts the known answer on a random branch among wrong siblings.

    Nearly every draft is accepted, through a different tree each time: this tests token identity
    and bounds the speed-up of any drafter. At random levels the right token is missing, which is a
    rejection in the middle of the tree. `answers` are the tokens of plain decoding by request id.
    """

    on_device = False  # answers and random numbers are on the host
    missing = 0.1  # probability that a level lacks the right token

    def __init__(self, answers: Mapping[int, list[int]], vocab_size: int, seed: int = 0) -> None:
        self.answers = answers
        self.vocab_size = vocab_size
        self._random = np.random.default_rng(seed)

    def propose(self, batch: Batch, strategy: Strategy, store: TokenStore) -> Tree:
        requests = batch.running
        last = torch.tensor([s.tokens[-1] for s in requests], dtype=torch.int32)
        position = torch.tensor([s.context_len for s in requests], dtype=torch.int32)
        nodes = NodeStore(len(last), _capacity(strategy), strategy.num_verify)
        nodes.begin(last)
        ahead = np.full((len(last), strategy.depth), -1)  # past the answer's end
        for row, state in zip(ahead, requests, strict=True):
            done = state.num_emitted
            rest = self.answers[state.request.id][done : done + strategy.depth]
            row[: len(rest)] = rest
        token, parent, levels = self._draw(ahead, strategy.top_k)
        nodes.token[:, 1:] = torch.from_numpy(token).flatten(1)
        nodes.parent[:, 1:] = torch.from_numpy(parent).flatten(1)
        nodes.count[:] = 1 + strategy.top_k * torch.from_numpy(levels)
        depth = torch.arange(1, strategy.depth + 1).repeat_interleave(strategy.top_k)
        nodes.depth[:, 1:] = depth
        nodes.score[:, 1:] = -depth.float()
        return nodes.select(position).to(batch.context_len.device)

    def _draw(self, ahead: np.ndarray, keep: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Random trees of full levels, with the right tokens on one branch.

        `ahead` [B, depth] has those, and -1 past the end of the answer; a level has `keep` nodes.
        Returns tokens and parents [B, depth, keep], and the levels of each tree [B].
        """
        size, depth = ahead.shape
        place = self._random.integers(keep, size=(size, depth, 1))  # of the right token
        right = np.arange(keep) == place
        missed = self._random.random((size, depth)) < self.missing
        offset = self._random.integers(1, self.vocab_size, size=(size, depth, keep))
        offset[right & ~missed[..., None]] = 0
        token = (ahead[..., None] + offset) % self.vocab_size
        # Node 1 + keep * level + j; the parent of a wrong one is any node of the level before.
        above = 1 + keep * np.arange(-1, depth - 1)[:, None]
        parent = above + self._random.integers(keep, size=(size, depth, keep))
        parent[:, 1:] = np.where(right[:, 1:], above[1:] + place[:, :-1], parent[:, 1:])
        parent[:, 0] = 0
        # A level without the right token is the last.
        good = np.cumprod((ahead >= 0) & ~missed, axis=1)
        levels = np.concatenate([np.ones((size, 1), int), good[:, :-1]], axis=1) * (ahead >= 0)
        return token, parent, levels.sum(axis=1)


def make_proposers(
    seed: int, runner: DraftRunner | None, verify: str = SHARED
) -> dict[str, Proposer]:
    """The proposers of an engine by the name of their kind; without a runner those without one."""
    made: dict[Kind, Proposer] = {NGRAM: NgramProposer(seed)}
    if runner is not None and verify == REJECTION:
        made |= {LEARNED: ChainProposer(runner)}
    elif runner is not None:
        made |= {LEARNED: runner, HYBRID: HybridProposer(runner)}
    return {kind.name: proposer for kind, proposer in made.items()}

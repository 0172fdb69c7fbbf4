"""Where draft trees come from: n-grams, or an oracle that tests speculation itself."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Protocol

import torch

import tlt_ext
from driver.rollout.scheduler import Sequence
from driver.rollout.state import Batch
from driver.rollout.token_store import TokenStore
from driver.rollout.tree import NodeStore, Tree
from driver.strategy import Strategy


class Proposer(Protocol):
    """Drafts a tree for every running request; `version` stamps learned drafts, 0 = none.

    Where `on_device` is true, `propose` reads nothing but static arrays and never waits for the
    device, so it can be captured and repeated without the host.
    """

    version: int
    on_device: bool

    def usable(self) -> bool: ...
    def lookahead(self, strategy: Strategy) -> int:
        """KV slots past the committed ones that drafting itself writes."""
        ...

    def prepare(self, batch: Batch, strategy: Strategy, store: TokenStore) -> bool:
        """The host's part, before passes; True where the state must be filled again."""
        ...

    def propose(self, batch: Batch, strategy: Strategy, store: TokenStore) -> Tree: ...
    def passed(self, sequence: Sequence, last: int) -> None:
        """Passes with it are over; the request emitted `last` tokens in the last of them."""
        ...


class ModelFree:
    """What proposers without a model and a cache of their own share."""

    version = 0

    def usable(self) -> bool:
        return True

    def lookahead(self, strategy: Strategy) -> int:
        return 0

    def prepare(self, batch: Batch, strategy: Strategy, store: TokenStore) -> bool:
        return False

    def passed(self, sequence: Sequence, last: int) -> None:
        pass


def _capacity(strategy: Strategy) -> int:
    return 1 + strategy.depth * strategy.top_k


class NgramProposer(ModelFree):
    """What followed the request's last tokens elsewhere in sequences of its prompt.

    Args:
        seed: run seed of the keyed noise.
    """

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
        store.advance(batch.store_row, batch.context_len)
        tlt_ext.ngram_propose(
            store.tokens,
            store.length,
            batch.group_slots,
            batch.slot,
            batch.context_len,
            *nodes.arrays,
            batch.temperature,
            batch.request,
            batch.status,
            seed=self.seed,
            depth=strategy.depth,
            top_k=strategy.top_k,
        )
        return nodes.select(batch.context_len)


class OracleProposer(ModelFree):
    """Hides the known answer on a random branch among wrong siblings.

    Speculation with it accepts nearly everything through ever different trees: what a test of
    token identity needs, and the upper bound of what drafting can give.

    Args:
        answers: request id -> its tokens as plain decoding emits them.
        vocab_size: wrong siblings are drawn below it.
        seed: of the branches.
    """

    on_device = False

    def __init__(self, answers: Mapping[int, list[int]], vocab_size: int, seed: int = 0) -> None:
        self.answers = answers
        self.vocab_size = vocab_size
        self._random = random.Random(seed)

    def propose(self, batch: Batch, strategy: Strategy, store: TokenStore) -> Tree:
        last = torch.tensor([s.tokens[-1] for s in batch.sequences], dtype=torch.int32)
        position = torch.tensor([s.context_len for s in batch.sequences], dtype=torch.int32)
        nodes = NodeStore(len(last), _capacity(strategy), strategy.num_verify)
        nodes.begin(last)
        for row, sequence in enumerate(batch.sequences):
            self._fill(nodes, row, sequence, strategy)
        return nodes.select(position).to(batch.context_len.device)

    def _fill(self, store: NodeStore, row: int, sequence: Sequence, strategy: Strategy) -> None:
        ahead = self.answers[sequence.request.id][sequence.num_emitted :]
        nodes = [(0, -1, 0.0, 0)]  # token, parent, score, depth
        parent = 0
        for depth, right in enumerate(ahead[: strategy.depth], start=1):
            level = [self._random.randrange(self.vocab_size) for _ in range(strategy.top_k - 1)]
            level.insert(self._random.randrange(strategy.top_k), right)
            first = len(nodes)
            # Now and then the right token is missing: a rejection in the middle of a tree.
            if self._random.random() < 0.1:
                level = [(token + 1) % self.vocab_size for token in level]
            parents = [parent] + [
                parent
                if depth == 1
                else self._random.choice([n for n in self._level(nodes, depth)])
                for _ in level[1:]
            ]
            nodes += [
                (token, parent if token == right else above, -float(depth), depth)
                for token, above in zip(level, parents, strict=True)
            ]
            on_path = [i for i in range(first, len(nodes)) if nodes[i][:2] == (right, parent)]
            if not on_path:
                break
            parent = on_path[0]
        tokens, parents, scores, depths = zip(*nodes, strict=True)
        count = len(nodes)
        store.token[row, 1:count] = torch.tensor(tokens[1:], dtype=torch.int32)
        store.parent[row, :count] = torch.tensor(parents, dtype=torch.int32)
        store.score[row, :count] = torch.tensor(scores)
        store.depth[row, :count] = torch.tensor(depths, dtype=torch.int32)
        store.count[row] = count

    @staticmethod
    def _level(nodes: list[tuple[int, int, float, int]], depth: int) -> list[int]:
        return [i for i, node in enumerate(nodes) if node[3] == depth - 1]

"""Where draft trees come from: an n-gram index, or an oracle that tests speculation itself."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

import tlt_ext
from driver.rollout.scheduler import Sequence
from driver.rollout.state import Batch
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

    def prepare(self, batch: Batch, strategy: Strategy, tokens: Tensor) -> bool:
        """The host's part, before passes; True where the state must be filled again."""
        ...

    def propose(self, batch: Batch, strategy: Strategy, tokens: Tensor) -> Tree: ...
    def passed(self, sequence: Sequence, last: int) -> None:
        """Passes with it are over; the request emitted `last` tokens in the last of them."""
        ...

    def finished(self, sequence: Sequence) -> None: ...


class HostProposer:
    """What proposers that read the host's sequences share."""

    version = 0
    on_device = False

    def usable(self) -> bool:
        return True

    def lookahead(self, strategy: Strategy) -> int:
        return 0

    def prepare(self, batch: Batch, strategy: Strategy, tokens: Tensor) -> bool:
        return False

    def passed(self, sequence: Sequence, last: int) -> None:
        pass

    def finished(self, sequence: Sequence) -> None:
        pass


def _host_store(batch: Batch, strategy: Strategy) -> tuple[NodeStore, Tensor]:
    """A node store in host memory and the roots' positions, for drafting on the CPU."""
    last = torch.tensor([s.tokens[-1] for s in batch.sequences], dtype=torch.int32)
    position = torch.tensor([s.context_len for s in batch.sequences], dtype=torch.int32)
    store = NodeStore(len(last), 1 + strategy.depth * strategy.top_k, strategy.num_verify)
    store.begin(last)
    return store, position


class NgramProposer(HostProposer):
    """Continuations of the longest suffix seen before in the group, shared by its siblings.

    The index learns lazily: in plain decoding nothing is indexed until a request finishes.

    Args:
        seed: run seed of the keyed noise.
        capacity: tokens the index may hold.
    """

    def __init__(self, seed: int, capacity: int = 1 << 20) -> None:
        self.seed = seed
        self.index = tlt_ext.NgramIndex(capacity=capacity)

    def _catch_up(self, sequence: Sequence) -> None:
        if sequence.handle < 0:
            sequence.handle = self.index.start(sequence.request.group, sequence.tokens)
        elif sequence.indexed < len(sequence.tokens):
            self.index.extend(sequence.handle, sequence.tokens[sequence.indexed :])
        sequence.indexed = len(sequence.tokens)

    def propose(self, batch: Batch, strategy: Strategy, tokens: Tensor) -> Tree:
        for sequence in batch.sequences:
            self._catch_up(sequence)
        store, position = _host_store(batch, strategy)
        handles = torch.tensor([s.handle for s in batch.sequences], dtype=torch.int64)
        self.index.propose(
            handles,
            *store.arrays,
            batch.temperature.cpu(),
            batch.request.cpu(),
            position,
            seed=self.seed,
            depth=strategy.depth,
            top_k=strategy.top_k,
        )
        return store.select(position).to(batch.context_len.device)

    def finished(self, sequence: Sequence) -> None:
        self._catch_up(sequence)

    def clear(self) -> None:
        """Forgets every sequence."""
        self.index.clear()


class OracleProposer(HostProposer):
    """Hides the known answer on a random branch among wrong siblings.

    Speculation with it accepts nearly everything through ever different trees: what a test of
    token identity needs, and the upper bound of what drafting can give.

    Args:
        answers: request id -> its tokens as plain decoding emits them.
        vocab_size: wrong siblings are drawn below it.
        seed: of the branches.
    """

    def __init__(self, answers: Mapping[int, list[int]], vocab_size: int, seed: int = 0) -> None:
        self.answers = answers
        self.vocab_size = vocab_size
        self._random = random.Random(seed)

    def propose(self, batch: Batch, strategy: Strategy, tokens: Tensor) -> Tree:
        store, position = _host_store(batch, strategy)
        for row, sequence in enumerate(batch.sequences):
            self._fill(store, row, sequence, strategy)
        return store.select(position).to(batch.context_len.device)

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

"""Draft trees of a batch: the packed rows that the target verifies, and drafted nodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import tlt_ext
from tlt_ext.limits import MAX_DEPTH


@dataclass(frozen=True)
class Tree:
    """Rows of one verify pass, packed over requests, each with its root first."""

    tokens: Tensor  # int32 [R]
    parents: Tensor  # int32 [R], row within the request, -1 for the root
    position: Tensor  # int32 [R], absolute
    ancestors: Tensor | None  # uint8 [R, 16]; None: only roots
    row_start: Tensor  # int32 [B + 1]; rows past the last entry are inert
    draft_probs: Tensor | None = None  # float32 [R, V], what each row's children were drawn from

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    @property
    def group(self) -> tlt_ext.Tree:
        """The group that ops take; `position` and `row_start` are in `Batch.rows_of`."""
        return tlt_ext.Tree(self.tokens, self.parents, self.ancestors)

    def to(self, device: torch.device) -> Tree:
        ancestors = None if self.ancestors is None else self.ancestors.to(device)
        arrays = (self.tokens, self.parents, self.position, self.row_start)
        tokens, parents, position, row_start = (t.to(device) for t in arrays)
        return Tree(tokens, parents, position, ancestors, row_start)


class Links:
    """The constant arrays of chains: one of `rows` rows for each request."""

    def __init__(self, batch: int, rows: int, device: torch.device) -> None:
        self.depth = torch.arange(rows, dtype=torch.int32, device=device)
        self.parents = (self.depth - 1).repeat(batch)
        self.row_start = torch.arange(batch + 1, dtype=torch.int32, device=device) * rows
        level = torch.arange(MAX_DEPTH, device=device)
        ancestors = torch.where(level < self.depth[:, None], level, 0).to(torch.uint8)
        self.ancestors = ancestors.repeat(batch, 1)


class NodeStore:
    """All drafted nodes of a batch, static, and the tree of `num_verify` rows among them."""

    def __init__(
        self, batch: int, capacity: int, num_verify: int, device: torch.device | str = "cpu"
    ) -> None:
        def ints(*shape: int) -> Tensor:
            # Zeros: inert rows are computed too, and their ids must be valid.
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.num_verify = num_verify
        self.token, self.depth = ints(batch, capacity), ints(batch, capacity)
        self.parent = ints(batch, capacity) - 1
        self.score = torch.zeros(batch, capacity, dtype=torch.float32, device=device)
        self.count = ints(batch)
        self.arrays = tlt_ext.Nodes(self.token, self.parent, self.score, self.depth, self.count)
        self._rows = ints(4, batch * num_verify)
        self._ancestors = torch.zeros(
            batch * num_verify, MAX_DEPTH, dtype=torch.uint8, device=device
        )
        self._row_start = ints(batch + 1)
        self._chain_position = ints(batch, num_verify)
        self._links: Links | None = None  # made at the first use

    def begin(self, roots: Tensor) -> None:
        """Drops all nodes except the roots, int32 [B], whose other fields never change."""
        self.token[:, 0].copy_(roots)
        self.count.fill_(1)

    def chain(self, root_position: Tensor) -> Tree:
        """All nodes of stores with room for `num_verify` nodes, which form a chain.

        A draft that ended early is followed by ids of an earlier pass, or by zeros. Verification
        is exact for any drafts.
        """
        if self._links is None:
            self._links = Links(len(self.token), self.num_verify, self.token.device)
        links, tokens = self._links, self.token
        if tokens.device.type == "cpu":  # where -1 ends a draft
            tokens = tokens.clamp_min(0)
        position = torch.add(root_position[:, None], links.depth, out=self._chain_position)
        rows = tokens.flatten(), links.parents, position.flatten()
        return Tree(*rows, links.ancestors, links.row_start)

    def select(self, root_position: Tensor) -> Tree:
        """The roots, at int32 [B], and the `num_verify - 1` best connected nodes of each."""
        tokens, parents, position, source = self._rows
        tree = Tree(tokens, parents, position, self._ancestors, self._row_start)
        tlt_ext.select_nodes(
            self.arrays,
            tree.group,
            root_position=root_position,
            position=position,
            row_start=self._row_start,
            source=source,
            num_verify=self.num_verify,
        )
        if self.token.device.type != "cpu":
            return tree
        # Only the CPU knows the count without waiting, and only there inert rows cost time.
        used = max(1, int(self._row_start[-1]))
        rows = tokens[:used], parents[:used], position[:used], self._ancestors[:used]
        return Tree(*rows, self._row_start)

"""Draft trees of a batch: the packed rows that the target verifies, and their store."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import tlt_ext

MAX_DEPTH = 16


@dataclass(frozen=True)
class Tree:
    """Rows of one verify pass, packed over requests, root first in each."""

    tokens: Tensor  # int32 [R]
    parents: Tensor  # int32 [R], row within the request, -1 for the root
    position: Tensor  # int32 [R], absolute
    ancestors: Tensor | None  # uint8 [R, 16]; None: only roots
    row_start: Tensor  # int32 [B + 1]

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device) -> Tree:
        """The same tree on another device."""
        ancestors = None if self.ancestors is None else self.ancestors.to(device)
        moved = [t.to(device) for t in (self.tokens, self.parents, self.position)]
        return Tree(*moved, ancestors, self.row_start.to(device))


def roots(tokens: Tensor, position: Tensor) -> Tree:
    """The tree of plain decoding: one row a request.

    Args:
        tokens: int32 [B], the last token of each request.
        position: int32 [B], its position.
    """
    count = len(tokens)
    return Tree(
        tokens,
        torch.full_like(tokens, -1),
        position,
        None,
        torch.arange(count + 1, dtype=torch.int32, device=tokens.device),
    )


class NodeStore:
    """All drafted nodes of a batch, from which the best connected ones are verified.

    Args:
        tokens: int32 [B], root tokens.
        capacity: nodes a request can hold, root included.
    """

    def __init__(self, tokens: Tensor, capacity: int) -> None:
        batch, device = len(tokens), tokens.device
        self.token = torch.zeros(batch, capacity, dtype=torch.int32, device=device)
        self.parent = torch.full((batch, capacity), -1, dtype=torch.int32, device=device)
        self.score = torch.zeros(batch, capacity, device=device)
        self.depth = torch.zeros(batch, capacity, dtype=torch.int32, device=device)
        self.count = torch.ones(batch, dtype=torch.int32, device=device)
        self.token[:, 0] = tokens

    @property
    def arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.token, self.parent, self.score, self.depth, self.count

    def select(self, root_position: Tensor, num_verify: int) -> Tree:
        """The root and its `num_verify - 1` best connected nodes.

        Args:
            root_position: int32 [B].
            num_verify: rows of a request at most.
        """
        batch = len(self.count)
        rows = batch * num_verify
        ints = torch.empty(4, rows, dtype=torch.int32, device=self.token.device)
        tokens, parents, position, source = ints
        ancestors = torch.empty(rows, MAX_DEPTH, dtype=torch.uint8, device=self.token.device)
        row_start = torch.empty(batch + 1, dtype=torch.int32, device=self.token.device)
        tlt_ext.select_nodes(
            *self.arrays,
            root_position,
            tokens,
            parents,
            position,
            ancestors,
            source,
            row_start,
            num_verify=num_verify,
        )
        used = int(row_start[-1])
        return Tree(tokens[:used], parents[:used], position[:used], ancestors[:used], row_start)

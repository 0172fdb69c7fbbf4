"""Static arrays of the drafter: the levels of a strategy, and entries to write."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import tlt_ext
from tlt_ext.limits import MAX_DEPTH

from ..config.strategy import Strategy
from .tree import NodeStore


class Levels:
    """Arrays of the levels that a strategy drafts for `batch` requests."""

    def __init__(self, batch: int, strategy: Strategy, device: torch.device) -> None:
        keep, depth = strategy.top_k, strategy.depth
        ints = partial(torch.zeros, dtype=torch.int32, device=device)
        # A hybrid's chain may have more nodes than its levels.
        capacity = max(tlt_ext.tree_capacity(depth, keep), 1 + strategy.levels)
        self.nodes = NodeStore(batch, capacity, strategy.num_verify, device)
        self.root = tlt_ext.Frontier(ints(batch, 1))  # of the first level
        nodes, rows = ints(2, depth, batch, keep)
        shape = (depth, batch, keep, MAX_DEPTH)
        self.ancestors = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.frontiers = [
            tlt_ext.Frontier(*arrays) for arrays in zip(nodes, rows, self.ancestors, strict=True)
        ]
        self.position = ints(batch * keep)
        self.row_start = torch.arange(batch + 1, dtype=torch.int32, device=device) * keep
        levels = torch.arange(depth, dtype=torch.int32, device=device)
        self.slot_base = (levels * keep)[:, None].repeat(1, batch)
        # Frontier rows without a node have no ancestors; their status bits are ignored.
        self.ignored = ints(batch)


class NewRows:
    """Arrays of the entries to write for `batch` requests, at most `most` each."""

    def __init__(self, batch: int, most: int, features: Tensor) -> None:
        ints = partial(torch.zeros, dtype=torch.int32, device=features.device)
        self.row_start = ints(batch + 1)
        self.position, self.committed = ints(batch * most), ints(batch)
        self.each = torch.arange(batch + 1, dtype=torch.int32, device=features.device)
        self.out: Any = tlt_ext.NewRows(  # of tensors
            ids=ints(batch * most),
            first=ints(batch),
            last=ints(batch),
            features=features.new_zeros(batch * most, features.shape[-1]),
        )

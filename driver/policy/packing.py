"""Packed sequences: documents concatenated in one row, without padding or attention across."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

TILE = 64  # rows of a tile


def pack(lengths: Sequence[int], budget: int, first: int = 0) -> list[list[int]]:
    """Cuts documents into rows of at most `budget` tokens, in the order given.

    So the rows of the first documents are the first rows of all, but for the last one. In a row the
    longest documents come first. A document longer than the budget gets a row to itself.

    Args:
        lengths: tokens of each document.
        budget: tokens in a row.
        first: tokens in the first row, if that is less; 0 = as many.

    Returns the document indices of each row; each index occurs once.

    Example:
        >>> pack([2, 3, 5], 5)
        [[1, 0], [2]]
    """
    rows: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if not rows or length > room:
            room = budget if rows else min(first or budget, budget)
            rows.append([])
        rows[-1].append(index)
        room -= length
    return [sorted(row, key=lambda i: -lengths[i]) for row in rows]


def packed_positions(lengths: Sequence[int] | np.ndarray) -> Tensor:
    """int64 [1, T], positions that start at 0 in every document; `lengths` sum up to T.

    Example:
        >>> packed_positions([2, 3])
        tensor([[0, 1, 0, 1, 2]])
    """
    ends = np.cumsum(lengths)  # [D]
    begins = (ends - lengths).repeat(lengths)  # [T]
    return torch.from_numpy(np.arange(ends[-1]) - begins).unsqueeze(0)  # [1, T]


def tiles_of(lengths: Sequence[int]) -> Tensor:
    """The tiles of packed documents, those at the end of long documents first.

    int32 [tiles, 3]: the begin and the length of a tile's document, and the tile's index in it.

    Example:
        >>> tiles_of([100, 5]).tolist()
        [[0, 100, 1], [0, 100, 0], [100, 5, 0]]
    """
    tokens = np.array(lengths)  # [D]
    counts = -(-tokens // TILE)  # [D]
    index = packed_positions(counts)[0].numpy()  # [tiles]
    begin = tokens.cumsum() - tokens  # [D]
    tiles = np.stack([begin.repeat(counts), tokens.repeat(counts), index], 1)  # [tiles, 3]
    return torch.from_numpy(tiles[np.argsort(-index, kind="stable")].astype(np.int32))

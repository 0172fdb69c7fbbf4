"""Packed sequences: documents concatenated in one row, without padding or attention across."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Cut documents into rows of at most `budget` tokens.

    Longest first, so that the documents of a row have similar lengths. A document longer than the
    budget gets a row to itself.

    Args:
        lengths: tokens of each document.
        budget: tokens in a row.

    Returns:
        The document indices of each row; each index occurs once.

    Example:
        >>> pack([2, 5, 3], 5)
        [[1], [2, 0]]
    """
    rows: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not rows or lengths[index] > room:
            rows.append([])
            room = budget
        rows[-1].append(index)
        room -= lengths[index]
    return rows


def packed_positions(lengths: Sequence[int]) -> Tensor:
    """Positions that start at 0 in every document.

    Args:
        lengths: tokens of each document of the row.

    Returns:
        int64 [1, T], T the sum of `lengths`.

    Example:
        >>> packed_positions([2, 3])
        tensor([[0, 1, 0, 1, 2]])
    """
    return torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)  # [1, T]

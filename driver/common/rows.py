"""Rows of an array, chosen by their indices."""

import torch
from torch import Tensor


def take_rows(rows: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """`rows[index]` in one launch; `index` is int32 or int64 [n].

    On a GPU `torch.index_select` copies up to 16 rows one after another. For more rows it calls
    `torch.gather`, which copies them in parallel. For one row `gather` does not use its fast
    kernel. On a CPU `gather` returns wrong rows for int32 indices.
    """
    if not rows.is_cuda or len(index) == 1:
        return torch.index_select(rows, 0, index, out=out)
    each = index.view(-1, *[1] * (rows.ndim - 1)).expand(-1, *rows.shape[1:])
    return torch.gather(rows, 0, each, out=out)

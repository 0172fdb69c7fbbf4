"""Batches of ragged requests over a paged cache, with invalid values where no op may read."""

import dataclasses

import torch

from tests import kit

GARBAGE = [-1, 2**31 - 1, -(2**31), 10**6]  # table entries past a request's end


@dataclasses.dataclass
class Batch:
    """The arrays that the paged ops share."""

    row_start: torch.Tensor
    context_len: torch.Tensor
    block_table: torch.Tensor
    status: torch.Tensor
    num_pages: int
    page_size: int

    @property
    def num_rows(self) -> int:
        return int(self.row_start[-1])

    def where(self, request: int, slot: int) -> tuple[int, int]:
        return int(self.block_table[request, slot // self.page_size]), slot % self.page_size


def make_batch(
    contexts: list[int], rows: list[int], page_size: int, *, seed: int = 0, spare_slots: int = 0
) -> Batch:
    """Requests on shuffled pages; tables hold invalid ids past the last needed slot."""
    needed = [-(-(c + r + spare_slots) // page_size) for c, r in zip(contexts, rows, strict=True)]
    num_pages = sum(needed) + 3
    pages = torch.randperm(num_pages, generator=kit.generator(seed)).tolist()
    width = max(needed, default=0) + 4
    table = torch.tensor(GARBAGE).repeat(len(rows), width)[:, :width].contiguous()
    for request, count in enumerate(needed):
        table[request, :count] = torch.tensor([pages.pop() for _ in range(count)])
    starts = torch.tensor([0, *rows]).cumsum(0)
    return Batch(
        starts.int(),
        torch.tensor(contexts, dtype=torch.int32),
        table.int(),
        torch.zeros(len(rows), dtype=torch.int32),
        num_pages,
        page_size,
    )


def random_tree(size: int, *, seed: int, max_depth: int = 16) -> tuple[list[int], torch.Tensor]:
    """Depths and ancestor slots (uint8 [size, 16], garbage past the depth) of a random tree."""
    draw = kit.generator(seed)
    paths: list[list[int]] = []
    for node in range(size):
        parents = [n for n in range(node) if len(paths[n]) < max_depth]
        if not parents:
            paths.append([])
            continue
        # Recent parents are likelier, so that depths of 16 occur.
        recent = parents[-4:] if torch.rand(1, generator=draw) < 0.7 else parents
        parent = recent[int(torch.randint(len(recent), (1,), generator=draw))]
        paths.append([*paths[parent], parent])
    ancestors = torch.randint(0, 256, (size, 16), generator=draw)
    for node, path in enumerate(paths):
        ancestors[node, : len(path)] = torch.tensor(path)
    return [len(path) for path in paths], ancestors.to(torch.uint8)

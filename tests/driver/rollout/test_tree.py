"""Node stores of chains."""

import pytest
import torch

from driver.rollout.tree import NodeStore
from tests import kit

pytestmark = pytest.mark.usefixtures("each_device")
each_device = kit.each_device


@pytest.mark.parametrize("depth", [1, 3, 16])
def test_the_rows_of_a_chain_are_those_of_its_selection(depth):
    """Two passes with one store: tokens and positions change, links do not."""
    batch, rows = 3, depth + 1
    store = NodeStore(batch, rows, rows, kit.DEVICE)
    store.parent.copy_(torch.arange(-1, depth))
    store.depth.copy_(torch.arange(rows))
    store.count.fill_(rows)
    for seed in range(2):
        store.token.copy_(torch.randint(1000, (batch, rows), generator=kit.generator(seed)))
        position = kit.to_device(torch.tensor([7, 0, 900 + seed], dtype=torch.int32))
        chain, selected = store.chain(position), store.select(position)
        for name in ("tokens", "parents", "position", "ancestors", "row_start"):
            assert torch.equal(getattr(chain, name), getattr(selected, name)), name

"""The peers of the attention benchmark attend to what our rows attend to."""

import pytest
import torch

from profiling.peers import attention as peers
from tests import kit


def expected(case, inputs):
    """Attention of one call in float64, by each row's own list of keys."""
    (heads, kv_heads, dim), _, kv, rows, tree, _ = case
    q, k, v = (x.double() for x in inputs)
    depths, ancestors = peers.tree_of(rows)
    out = torch.empty_like(q)
    for row in range(rows):
        path = ancestors[row, : int(depths[row])].tolist() if tree else range(row)
        keys = [*range(kv), *(kv + node for node in path), kv + row]
        for head in range(heads):
            group = head // (heads // kv_heads)
            score = k[:, group, keys] @ q[:, head, row, :, None] / dim**0.5
            out[:, head, row] = (score.softmax(1) * v[:, group, keys]).sum(1)
    return out


@pytest.mark.parametrize("peer", [peers.sdpa, peers.flex])
@pytest.mark.parametrize(("rows", "tree"), [(1, True), (7, True), (7, False)])
def test_a_peer_attends_to_the_keys_of_a_row(monkeypatch, peer, rows, tree):
    monkeypatch.setattr(peers, "DEVICE", "cpu")
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    case = ((4, 2, 16), 2, 40, rows, tree, 1)
    torch.manual_seed(0)
    (call,) = peer(*case)
    torch.manual_seed(0)
    kit.assert_close(call(), expected(case, peers.dense_inputs((4, 2, 16), 2, rows, 40 + rows)))

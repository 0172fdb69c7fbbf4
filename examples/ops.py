"""Attention of draft trees and their verification, from any engine with a paged KV cache."""

import torch

import tlt_ext

dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
ints = dict(dtype=torch.int32)
k_cache, v_cache = torch.randn(2, 64, 16, 2, 64, dtype=dtype)  # 64 pages of 16 slots, 2 kv heads
rows = tlt_ext.Rows(  # two requests, each with a root and two children
    row_start=torch.tensor([0, 3, 6], **ints),
    position=torch.tensor([40, 41, 41, 75, 76, 76], **ints),
    status=torch.zeros(2, **ints),
    context_len=torch.tensor([40, 75], **ints),  # committed tokens
    block_table=torch.arange(16, **ints).view(2, 8),  # 8 pages a request
)
tokens, parents = torch.tensor([[11, 5, 9, 12, 5, 7], [-1, 0, 0, -1, 0, 0]], **ints)
tree = tlt_ext.Tree(tokens, parents, torch.zeros(6, 16, dtype=torch.uint8))
q, out = torch.randn(2, 6, 8, 64, dtype=dtype)
tlt_ext.tree_attention(q, k_cache, v_cache, out, rows, ancestors=tree.ancestors)

logits, one, off = torch.randn(6, 32000), torch.ones(2), torch.zeros(2, **ints)
logits[0, 5] = 99.0  # what the target draws at the first root: its child 5 is accepted
sampling = tlt_ext.Sampling(one, torch.tensor([101, 102]), top_k=off, top_p=one)
(emitted, path), (count, finish) = torch.zeros(2, 2, 17, **ints), torch.zeros(2, 2, **ints)
result = tlt_ext.VerifyOutput(emitted, torch.zeros(2, 17), count, finish, path)
limits = dict(stop_ids=torch.full((2, 1), 2, **ints), limit=torch.full((2,), 100, **ints))
tlt_ext.verify_tree(logits, tree, rows, sampling, result, **limits, seed=0)
print(count.tolist(), emitted[0, : count[0]].tolist(), rows.status.tolist())

"""`ngram_propose`: time of a draft by batch, tokens in the group, depth and kind of text.

`text` has a root token of natural frequency (Zipf's law over 50,000 ids), `loop` repeats a phrase
of eight tokens, where one position in eight matches in full length. Figures are calls among many in
one graph, on groups that stay in the L2 as in a rollout. `cold_us` is one call on a cold L2, which
includes the time of an empty graph (`empty_graph_us`).
"""

from collections.abc import Callable

import torch

import tlt_ext
from profiling.rig import timing
from profiling.rig.bench import Bench
from profiling.rig.timing import INT

VOCAB, PERIOD = 50_000, 8


def texts(kind: str, rows: int, length: int) -> torch.Tensor:
    if kind == "loop":
        return (torch.arange(length, **INT) % PERIOD).repeat(rows, 1)
    weights = 1.0 / torch.arange(1, VOCAB + 1, device="cuda")
    flat = torch.multinomial(weights, rows * length, replacement=True)
    return flat.int().view(rows, length)


def proposer(kind: str, batch: int, group: int, length: int, depth: int, top_k: int) -> Callable:
    """A call in which every request has its own group and is the first of it."""
    rows = batch * group
    tokens = texts(kind, rows, length)
    capacity = 1 + depth * top_k
    token, parent, level = torch.zeros(3, batch, capacity, **INT).unbind()
    own = torch.arange(0, rows, group, **INT)
    if kind == "text":  # the root is a common token: rank 8, one in about ninety
        tokens[own.long(), -1] = 7
    table = tlt_ext.TokenTable(
        tokens=tokens,
        slot=own,
        length=torch.full((rows,), length, **INT),
        group_slots=torch.arange(rows, **INT).view(batch, group),
    )
    nodes = tlt_ext.Nodes(
        token, parent, torch.zeros(batch, capacity, device="cuda"), level, torch.zeros(batch, **INT)
    )
    sampling = tlt_ext.Sampling(
        torch.ones(batch, device="cuda"), torch.arange(batch, device="cuda")
    )
    context_len, status = torch.full((batch,), length - 1, **INT), torch.zeros(batch, **INT)
    return lambda: tlt_ext.ngram_propose(
        table,
        nodes,
        sampling,
        context_len=context_len,
        status=status,
        seed=1,
        depth=depth,
        top_k=top_k,
    )


def run(bench: Bench) -> None:
    torch.manual_seed(0)
    cases = [
        ("text", batch, group, 4096, depth, top_k)
        for batch in (1, 32)
        for group in (4, 16)
        for depth, top_k in ((4, 4), (8, 4))
    ]
    if not bench.quick:
        cases += [
            ("loop", 1, 4, 4096, 8, 4),
            ("loop", 32, 16, 4096, 8, 4),
            ("text", 1, 1, 512, 4, 4),
            ("text", 1, 16, 4096, 16, 8),
            ("text", 128, 16, 1024, 4, 4),
            ("text", 1, 16, 16384, 4, 4),
        ]
    for kind, batch, group, length, depth, top_k in cases:
        case = f"{kind} b{batch} {group}x{length} depth{depth} top{top_k}"
        if not bench.wanted(case):
            continue
        call = proposer(kind, batch, group, length, depth, top_k)
        warm = timing.measure_in_turn({"ours": [call]})["ours"]
        cold = timing.measure({"ours": call})["ours"]
        row = bench.add(case, warm, 4 * batch * group * length, cold_us=round(cold.median_us, 3))
        if (kind, batch, depth) == ("text", 1, 4) and group in (4, 16) and length == 4096:
            bench.got[f"propose_{group * 4}k_b1_us"] = row["median_us"]
        if (kind, batch, group, depth, length) == ("text", 32, 16, 4, 4096):
            bench.got["propose_64k_b32_us"] = row["median_us"]

"""`tree_attention` over a grid of batches, contexts and rows, beside attention of other libraries.

`median_us` is one call in a graph of many, as in the layers of a model: each call has its own q,
keys, values, output and workspace on a cold L2, and the same tables and lengths. `alone_us` is a
graph of one call on a cold L2, which includes the time of an empty graph.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import tlt_ext
from profiling.peers import attention as peers
from profiling.peers.attention import tree_of
from profiling.rig import timing
from profiling.rig.bench import Bench, say

HEADS = {"32/8x128": (32, 8, 128), "28/4x128": (28, 4, 128), "14/2x64": (14, 2, 64)}
HEADS["9/3x64"] = (9, 3, 64)
PAGE_SIZE = 16
MAX_BYTES = 24 * 2**30  # of one input
PEER_S, QUICK_PEER_S = 120, 8  # limit for a peer to compile a case


@dataclass(frozen=True)
class Case:
    batch: int
    kv: int
    rows: int
    heads: str = "32/8x128"
    tree: bool = True

    @property
    def name(self) -> str:
        kind = "decode" if self.rows == 1 else f"{'tree' if self.tree else 'chain'}{self.rows}"
        return f"{kind} b{self.batch} kv{self.kv} {self.heads}"

    @property
    def pages(self) -> int:
        return -(-(self.kv + self.rows) // PAGE_SIZE)

    @property
    def num_bytes(self) -> int:
        """Each key, value, query and output once."""
        heads, kv_heads, dim = HEADS[self.heads]
        keys = self.batch * (self.kv + self.rows) * kv_heads * 2
        return 2 * dim * (keys + self.batch * self.rows * heads * 2)


# Target -> its case; its figure is in microseconds or a part of copy bandwidth (of_copy).
TARGETS = {
    "tree16_b1_kv1k_us": Case(1, 1024, 16),
    "tree16_b1_kv8k_us": Case(1, 8192, 16),
    "tree16_b1_kv32k_us": Case(1, 32768, 16),
    "tree64_b1_kv8k_us": Case(1, 8192, 64),
    "tree16_b8_kv4k_us": Case(8, 4096, 16),
    "tree8_b32_kv4k_of_copy": Case(32, 4096, 8),
    "tree8_b32_kv8k_of_copy": Case(32, 8192, 8),
    "decode_b32_kv4k_of_copy": Case(32, 4096, 1),
    "decode_b1_kv8k_us": Case(1, 8192, 1),
}
OVER_CHAIN = [Case(1, 8192, 16), Case(32, 4096, 8)]  # tree_over_chain_x is the worst of them
# invariant_over_fast_x: the worst ratio of our plain decoding to the fastest peer, which is not row
# invariant.
OVER_FAST = [Case(1, 8192, 1), Case(32, 4096, 1)]
COMPILED_PEERS = [*OVER_CHAIN, *OVER_FAST]


def make_rows(case: Case) -> tuple[tlt_ext.Rows, torch.Tensor | None]:
    """The rows of a step, which all layers share, and their ancestors in a tree."""
    table = torch.randperm(case.batch * case.pages, device="cuda").int()
    depths, ancestors = tree_of(case.rows)
    if not case.tree:
        depths = torch.arange(case.rows, dtype=torch.int32)
    rows = tlt_ext.Rows(
        row_start=torch.arange(case.batch + 1).int().cuda() * case.rows,
        position=(case.kv + depths).repeat(case.batch).cuda(),
        status=torch.zeros(case.batch, dtype=torch.int32, device="cuda"),
        context_len=torch.full((case.batch,), case.kv).int().cuda(),
        block_table=table.view(case.batch, case.pages),
    )
    return rows, ancestors.repeat(case.batch, 1).cuda() if case.tree else None


def make_inputs(case: Case, rows: tlt_ext.Rows, ancestors: torch.Tensor | None) -> dict:
    heads, kv_heads, dim = HEADS[case.heads]
    shape = (case.batch * case.pages, PAGE_SIZE, kv_heads, dim)
    bf16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    q = torch.randn(case.batch * case.rows, heads, dim, **bf16)
    size = tlt_ext.attention_workspace_bytes(
        num_requests=case.batch,
        num_rows=len(q),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        max_slots=case.pages * PAGE_SIZE,
    )
    return {
        "q": q,
        "k_cache": torch.randn(shape, **bf16),
        "v_cache": torch.randn(shape, **bf16),
        "out": torch.empty_like(q),
        "workspace": torch.empty(size, dtype=torch.uint8, device="cuda"),
        "rows": rows,
        "ancestors": ancestors,
        "pdl": True,
    }


def ours(inputs: list[dict]) -> list[timing.Call]:
    return [partial(tlt_ext.tree_attention, **x) for x in inputs]


def rivals(
    case: Case, inputs: list[dict], quick: bool, late: set[str]
) -> dict[str, list[Callable[[], object]]]:
    """Calls of the peers that run here; those `late` once are left out from then on."""
    shape, count = HEADS[case.heads], len(inputs)
    how = (shape, case.batch, case.kv, case.rows, case.tree, count)
    makers = {"sdpa": lambda: peers.sdpa(*how)}
    if case in (OVER_FAST if quick else COMPILED_PEERS):
        makers["flex"] = lambda: peers.flex(*how)
        makers["flashinfer"] = lambda: peers.flashinfer(
            shape, case.kv, case.rows, case.tree, inputs
        )
    arms = {}
    for name, make in makers.items():
        if name in late:
            continue
        try:
            with timing.time_limit(QUICK_PEER_S if quick else PEER_S):
                calls = make()
                calls[0]()
        except Exception as error:  # the other peers still run
            say(f"{case.name}: no {name}: {type(error).__name__}: {str(error).splitlines()[:1]}")
            if isinstance(error, TimeoutError):
                late.add(name)
            continue
        arms[name] = calls
    return arms


def grid(bench: Bench) -> list[Case]:
    cases = list(TARGETS.values()) + [replace(c, tree=False) for c in OVER_CHAIN]
    if not bench.quick:
        cases += [
            Case(batch, kv, rows, heads)
            for heads, batch, kv, rows in itertools.product(
                HEADS, (1, 4, 16, 64, 128), (1024, 4096, 8192, 32768), (1, 4, 8, 16, 32, 64)
            )
        ]
    unique = dict.fromkeys(case for case in cases if case.num_bytes <= MAX_BYTES)
    return [case for case in unique if bench.wanted(case.name)]


def run_case(bench: Bench, case: Case, late: set[str]) -> dict:
    count = timing.num_cold_inputs(case.num_bytes)
    rows, ancestors = make_rows(case)
    inputs = [make_inputs(case, rows, ancestors) for _ in range(count)]
    times = timing.measure_in_turn(
        {"ours": ours(inputs), **rivals(case, inputs, bench.quick, late)}
    )
    alone = timing.measure({"ours": ours(inputs[:1])[0]})["ours"]
    if bool(torch.as_tensor(rows.status).any()):
        raise RuntimeError(f"{case.name}: a request was refused")
    mine = times.pop("ours")
    return bench.add(case.name, mine, case.num_bytes, times, alone_us=round(alone.median_us, 3))


def run(bench: Bench) -> None:
    late: set[str] = set()
    rows = {case: run_case(bench, case, late) for case in grid(bench)}
    for name, case in TARGETS.items():
        if case in rows:
            key = "fraction_of_copy" if name.endswith("_of_copy") else "median_us"
            bench.got[name] = rows[case][key]
    pairs = [(case, replace(case, tree=False)) for case in OVER_CHAIN]
    if all(case in rows for pair in pairs for case in pair):
        ratios = [rows[tree]["median_us"] / rows[chain]["median_us"] for tree, chain in pairs]
        bench.got["tree_over_chain_x"] = round(max(ratios), 4)
    if all(case in rows and rows[case]["ratio_to"] for case in OVER_FAST):
        ratios = [max(rows[case]["ratio_to"].values()) for case in OVER_FAST]
        bench.got["invariant_over_fast_x"] = round(max(ratios), 4)

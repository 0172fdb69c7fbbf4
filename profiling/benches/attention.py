"""tree_attention over a grid of batches, contexts and rows, beside torch's attention.

`median_us` is one call in a graph of many, as a model's layers make them: each with its own q,
keys, values, output and workspace, found cold, and with the same tables and lengths. `alone_us` is
a graph of one call between two events, after a flush of the cache, with what the clock adds.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import scaled_dot_product_attention

import tlt_ext
from profiling import timing
from profiling.bench import Bench

HEADS = {"32/8x128": (32, 8, 128), "28/4x128": (28, 4, 128), "14/2x64": (14, 2, 64)}
HEADS["9/3x64"] = (9, 3, 64)
PAGE_SIZE = 16
MAX_BYTES = 24 * 2**30  # of one input


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
    def num_bytes(self) -> int:
        """Each key and value once, each query and output once."""
        heads, kv_heads, dim = HEADS[self.heads]
        keys = self.batch * (self.kv + self.rows) * kv_heads * 2
        return 2 * dim * (keys + self.batch * self.rows * heads * 2)


# Case of each target; the value is microseconds, or the part of copy bandwidth (of_copy).
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


def tree_of(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Depths and ancestors of a tree with four children a node, breadth first."""
    paths: list[list[int]] = [[]]
    for node in range(1, rows):
        parent = (node - 1) // 4
        paths.append([*paths[parent], parent])
    ancestors = torch.zeros(rows, 16, dtype=torch.uint8)
    for node, path in enumerate(paths):
        ancestors[node, : len(path)] = torch.tensor(path)
    return torch.tensor([len(path) for path in paths], dtype=torch.int32), ancestors


def make_rows(case: Case) -> dict:
    """What the layers of a step share: who has which rows, where, and at which positions."""
    pages = -(-(case.kv + case.rows) // PAGE_SIZE)
    depths, ancestors = tree_of(case.rows)
    if not case.tree:
        depths = torch.arange(case.rows, dtype=torch.int32)
    table = torch.randperm(case.batch * pages, device="cuda").int().view(case.batch, pages)
    return {
        "row_start": torch.arange(case.batch + 1).int().cuda() * case.rows,
        "context_len": torch.full((case.batch,), case.kv).int().cuda(),
        "position": (case.kv + depths).repeat(case.batch).cuda(),
        "block_table": table,
        "status": torch.zeros(case.batch, dtype=torch.int32, device="cuda"),
        "ancestors": ancestors.repeat(case.batch, 1).cuda() if case.tree else None,
    }


def make_inputs(case: Case, rows: dict) -> dict:
    heads, kv_heads, dim = HEADS[case.heads]
    pages = rows["block_table"].numel()
    shape = (pages, PAGE_SIZE, kv_heads, dim)
    bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
    q = torch.randn(case.batch * case.rows, heads, dim, **bf16)
    size = tlt_ext.attention_workspace_bytes(
        num_requests=case.batch,
        num_rows=len(q),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        max_slots=pages // case.batch * PAGE_SIZE,
    )
    return rows | {
        "q": q,
        "k_cache": torch.randn(shape, **bf16),
        "v_cache": torch.randn(shape, **bf16),
        "out": torch.empty_like(q),
        "workspace": torch.empty(size, dtype=torch.uint8, device="cuda"),
    }


def ours(inputs: list[dict], **changes) -> list[Callable[[], object]]:
    return [lambda x=x: tlt_ext.tree_attention(**x | changes) for x in inputs]


def sdpa(case: Case, count: int) -> list[Callable[[], object]]:
    """Torch on keys that were gathered before, with a boolean mask (decoding needs none)."""
    heads, kv_heads, dim = HEADS[case.heads]
    length = case.kv + case.rows
    bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
    mask = None
    if case.rows > 1:
        mask = torch.ones(case.rows, length, dtype=torch.bool)
        depths, ancestors = tree_of(case.rows)
        mask[:, case.kv :] = torch.eye(case.rows, dtype=torch.bool)
        for i in range(case.rows):
            mask[i, case.kv + ancestors[i, : int(depths[i])].long()] = True
        mask = mask.cuda()[None, None].expand(case.batch, 1, -1, -1)
    calls = []
    for _ in range(count):
        q = torch.randn(case.batch, heads, case.rows, dim, **bf16)
        k, v = (torch.randn(case.batch, kv_heads, length, dim, **bf16) for _ in range(2))
        calls.append(
            lambda q=q, k=k, v=v: scaled_dot_product_attention(
                q, k, v, attn_mask=mask, enable_gqa=True
            )
        )
    return calls


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


def run_case(bench: Bench, case: Case) -> dict:
    count = timing.num_cold_inputs(case.num_bytes)
    rows = make_rows(case)
    inputs = [make_inputs(case, rows) for _ in range(count)]
    arms = {"ours": ours(inputs)}
    if inputs[0]["workspace"].numel():
        arms["no_workspace"] = ours(inputs, workspace=None)
    if case.tree:
        arms["sdpa"] = sdpa(case, count)
    times = timing.measure_in_turn(arms)
    alone = timing.measure({"ours": ours(inputs[:1])[0]})["ours"]
    if bool(rows["status"].any()):
        raise RuntimeError(f"{case.name}: a request was refused")
    mine = times.pop("ours")
    return bench.add(case.name, mine, case.num_bytes, times, alone_us=round(alone.median_us, 3))


def run(bench: Bench) -> None:
    rows = {case: run_case(bench, case) for case in grid(bench)}
    for name, case in TARGETS.items():
        if case in rows:
            key = "fraction_of_copy" if name.endswith("_of_copy") else "median_us"
            bench.got[name] = rows[case][key]
    pairs = [(case, replace(case, tree=False)) for case in OVER_CHAIN]
    if all(case in rows for pair in pairs for case in pair):
        ratios = [rows[tree]["median_us"] / rows[chain]["median_us"] for tree, chain in pairs]
        bench.got["tree_over_chain_x"] = round(max(ratios), 4)

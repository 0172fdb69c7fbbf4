"""A whole captured decode step, embedding to logits: SmolLM2, shapes of Qwen2.5 (7B: four layers).

Weights are random, because the time of a step does not depend on them. The bytes of a step are the
weights with the head, and the keys and values of the context.
"""

import copy
from functools import partial

import torch
from transformers import LlamaConfig, Qwen2Config

from driver.model.kv_cache import KvCache
from driver.model.target import TargetModel
from profiling.benches.attention import PAGE_SIZE, Case, make_rows
from profiling.rig import timing
from profiling.rig.bench import Bench
from profiling.rig.subjects import QWEN2_05B, QWEN2_7B, QWEN2_15B, SMOLLM2, of_shape

CONTEXT = 512  # tokens of each request
CASES = [(1, 1), (8, 1), (32, 1), (64, 1), (1, 16), (8, 16), (1, 64)]  # requests, rows of each
SHAPES: dict[str, LlamaConfig | Qwen2Config] = {
    "smollm2": SMOLLM2,
    "qwen2_05b": QWEN2_05B,
    "qwen2_15b": QWEN2_15B,
    "qwen2_7b_4_layers": copy.copy(QWEN2_7B),
}
SHAPES["qwen2_7b_4_layers"].update({"num_hidden_layers": 4})


def run(bench: Bench) -> None:
    for name, shape in SHAPES.items():
        cases = [(r, n) for r, n in CASES if bench.wanted(f"{name} {r}x{n} rows")]
        cases = cases[:1] if bench.quick else cases
        if not cases:
            continue
        subject = of_shape(name, [], shape, "cuda")
        spec, read = subject.spec, subject.num_bytes
        model = TargetModel(spec, subject.weights, device="cuda", max_rows=128)
        del subject
        for requests, rows in cases:
            case = Case(requests, CONTEXT, rows, tree=False)
            batch, _ = make_rows(case)
            pages = requests * case.pages
            kv = KvCache(spec, num_pages=pages, page_size=PAGE_SIZE, device="cuda")
            ids = torch.arange(requests * rows, dtype=torch.int32, device="cuda")
            step = timing.measure({"ours": partial(model.forward, ids, batch, kv)})["ours"]
            cached = spec.num_layers * 2 * requests * CONTEXT * spec.num_kv_heads * spec.head_dim
            bench.add(f"{name} {requests}x{rows} rows", step, read + 2 * cached)

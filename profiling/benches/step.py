"""A whole captured decode step, embedding to logits: SmolLM2-135M, and four layers of Qwen2-7B.

Weights are random: the time of a step does not depend on them. The bytes of a step are the weights,
the head included, and the keys and values of the context.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import tlt_ext
from driver.model.kv_cache import KvCache
from driver.model.spec import ModelSpec
from driver.model.target import TargetModel
from profiling.rig import timing
from profiling.rig.bench import Bench

CONTEXT = 512  # tokens of each request
PAGE_SIZE = 16
CASES = [(1, 1), (8, 1), (32, 1), (1, 16), (8, 16), (1, 64)]  # requests, rows of each
CONFIGS = {
    "smollm2": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "qwen2_7b_4_layers": {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 4,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}


SPECS = {
    name: ModelSpec.from_config(
        {
            **config,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "eos_token_id": 0,
            "torch_dtype": "bfloat16",
            "hidden_act": "silu",
        }
    )
    for name, config in CONFIGS.items()
}


def random_weights(spec: ModelSpec) -> dict[str, Tensor]:
    """Weights by their Hugging Face name, on the GPU."""
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    return {
        name: torch.randn(*shape, **options) / shape[-1] ** 0.5
        for name, shape in spec.shapes().items()
    }


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def make_batch(requests: int, rows: int) -> tlt_ext.Rows:
    """Requests of `rows` rows each, chains, every one CONTEXT tokens long."""
    pages = -(-(CONTEXT + 64) // PAGE_SIZE)
    table = torch.randperm(requests * pages, device="cuda").int().view(requests, pages)
    return tlt_ext.Rows(
        row_start=int32(*range(0, requests * rows + 1, rows)),
        context_len=int32(*[CONTEXT] * requests),
        position=int32(*range(CONTEXT, CONTEXT + rows)).repeat(requests),
        block_table=table,
        status=int32(*[0] * requests),
    )


def run(bench: Bench) -> None:
    for name, spec in SPECS.items():
        cases = [case for case in CASES if bench.wanted(f"{name} {case[0]}x{case[1]} rows")]
        cases = cases[:1] if bench.quick else cases
        if not cases:
            continue
        weights = random_weights(spec)
        model = TargetModel(spec, weights, device="cuda", max_rows=128)
        del weights
        read = sum(w.numel() for w in model.state_dict().values())
        if not spec.tie_word_embeddings:
            read -= model.embedding.numel()
        for requests, rows in cases:
            batch = make_batch(requests, rows)
            kv = KvCache.allocate(
                spec, num_pages=batch.block_table.numel(), page_size=PAGE_SIZE, device="cuda"
            )
            ids = torch.arange(requests * rows, dtype=torch.int32, device="cuda")
            step = timing.measure({"ours": partial(model.forward, ids, batch, kv)})["ours"]
            context = spec.num_layers * 2 * requests * CONTEXT * spec.num_kv_heads * spec.head_dim
            bench.add(f"{name} {requests}x{rows} rows", step, 2 * (read + context))

"""The update of the policy by itself: SmolLM2 with a step of `preset=h100`, and a 1.5B shape.

Weights and responses are random; response lengths are lognormal. `compiled` is the update as it is,
`single ops` runs its elementwise parts one by one. `mfu` counts six operations a parameter and
token and those of causal attention, over `PEAK_TFLOPS`. The time that the first update takes for
compilation is not counted.
"""

import statistics
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from driver.config.load import load_config
from driver.policy import fused
from driver.policy.trainer import PolicyTrainer
from driver.rollout.request import Response
from profiling.rig import timing
from profiling.rig.bench import Bench
from profiling.rig.subjects import PROMPT_LEN, QWEN2_15B, SMOLLM2, responses_of

PEAK_TFLOPS = 790  # of an H200 in bf16
WARM_UPS, UPDATES = 2, 3
# Shape, tokens of a step, tokens of a packed row; 0: those of the settings (`--set`).
SHAPES = {"smollm2": (SMOLLM2, 97_000, 0), "15b": (QWEN2_15B, 65_000, 16_384)}
ARMS = {"compiled": fused.LEAST_WIDTH, "single ops": 1 << 30}  # narrowest rows that are compiled


def tflop(shape: Any, parameters: int, responses: list[Response]) -> float:
    """Operations of an update, 10^12."""
    lengths = [len(r.request.prompt_ids) + len(r.token_ids) for r in responses]
    squares = sum(length**2 for length in lengths)
    attention = 6 * shape.num_hidden_layers * shape.hidden_size * squares
    return (6 * parameters * sum(lengths) + attention) / 1e12


def run(bench: Bench) -> None:
    for name, (shape, tokens, row_tokens) in SHAPES.items():
        for arm, width in ARMS.items():
            left_out = bench.quick and (name, arm) != ("smollm2", "compiled")
            if bench.wanted(f"{name} {arm}") and not left_out:
                measure(bench, f"{name} {arm}", shape, tokens, row_tokens, width)


def measure(bench: Bench, case: str, shape: Any, tokens: int, row_tokens: int, width: int) -> None:
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    rows = [f"grpo.micro_batch_tokens={row_tokens}"] if row_tokens else []
    config = load_config([*bench.words, *rows])
    trainer = PolicyTrainer(model, config.grpo)
    responses = responses_of(tokens, shape.vocab_size)
    rewards = [float(i % 2) for i in range(len(responses))]
    torch.cuda.reset_peak_memory_stats()
    before, fused.LEAST_WIDTH = fused.LEAST_WIDTH, width
    try:
        times = [
            timing.elapsed_us(lambda: trainer.update(responses, rewards))
            for _ in range(WARM_UPS + UPDATES)
        ]
    finally:
        fused.LEAST_WIDTH = before
    median = statistics.median(times[WARM_UPS:])
    parameters = sum(param.numel() for param in model.parameters())
    work = tflop(shape, parameters, responses)
    bench.add_row(
        case,
        median,
        tokens=sum(len(r.token_ids) + PROMPT_LEN for r in responses),
        tflop=round(work, 1),
        mfu=round(work / (median / 1e6) / PEAK_TFLOPS, 4),
        first_s=round(times[0] / 1e6, 2),
        peak_gb=round(torch.cuda.max_memory_allocated() / 1e9, 1),
    )

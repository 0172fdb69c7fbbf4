"""Log-probs of a policy that ranks share against those of one rank, on the CPU.

Started by `bench big` with torchrun. The last line is JSON: the share of equal bits.
"""

import copy
import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from driver.common.world import World
from driver.policy.micro_batch import build_micro_batch
from driver.policy.weights import PolicyWeights
from profiling.rig.subjects import GROUPS, PROMPT_LEN, SAMPLES, qwen2, responses_of

SHAPE = qwen2(128, 192, 4, 4, 2, vocab_size=1024)
TOKENS = (PROMPT_LEN + 10) * GROUPS * SAMPLES
ROWS = 24  # responses that each rank computes


def equal_share(world: World, dtype: torch.dtype) -> float:
    """The share of a rank's log-probs whose bits are those of one rank."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(SHAPE, dtype=dtype)
    alone = PolicyWeights(copy.deepcopy(model))
    responses = responses_of(TOKENS, SHAPE.vocab_size)[world.rank * ROWS :][:ROWS]
    batch = build_micro_batch(responses, range(ROWS), torch.device("cpu"))
    wanted = alone.logprobs(batch)[0]
    got = PolicyWeights(model, world, sharded=True).logprobs(batch)[0]
    return float((got == wanted).float().mean())


def main() -> None:
    world = World.join("cpu", 120)
    shares = [equal_share(world, dtype) for dtype in (torch.float32, torch.bfloat16)]
    every = world.gather(shares)
    if world.rank == 0:
        sys.stdout.write(json.dumps({"equal": min(map(min, every))}) + "\n")
    world.leave()


if __name__ == "__main__":
    main()

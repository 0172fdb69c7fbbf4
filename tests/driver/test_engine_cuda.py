"""The rollout engine on a GPU: the CPU's tokens in float32, and its own exactly in bfloat16."""

import pytest
import torch

from driver import identity
from tests import kit
from tests.driver.hugging_face import random_model
from tests.driver.test_engine import STRATEGIES, generate, make_rollout, requests, same

pytestmark = [kit.gpu, kit.needs_gpu]
SHAPE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
WORDS = ["run.device=cuda", "engine.page_size=16"]


@pytest.mark.parametrize("variant", ["llama-tied-llama3", "qwen2", "qwen3"])
def test_float32_emits_the_tokens_of_the_cpu(variant):
    policy = random_model(variant)
    cpu = make_rollout(policy)
    gpu = make_rollout(policy.cuda(), *WORDS)
    gpu.spot.swap()
    wanted = generate(cpu, requests())
    for menu in (["off"], STRATEGIES):
        got = generate(gpu, requests(), *menu)
        assert [r.token_ids for r in got] == [r.token_ids for r in wanted]
        for a, b in zip(got, wanted, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_exact_over_strategies(dtype):
    policy = random_model("llama-tied-llama3", **SHAPE).to(getattr(torch, dtype)).cuda()
    made = make_rollout(policy, *WORDS, f"model.dtype={dtype}")
    made.spot.swap()
    wanted = generate(made, requests(count=24, new=60, stop=()))
    for strategy in STRATEGIES:
        got = generate(made, requests(count=24, new=60, stop=()), strategy)
        assert same(got, wanted), strategy
        assert made.engine.stats.spec_passes > 0
    assert same(generate(made, requests(count=24, new=60, stop=()), "off", *STRATEGIES), wanted)


def test_identity_command_on_the_tiny_model():
    options = identity.Options(
        tokens=1500, batch=16, device="cuda", dtype="bfloat16", warmup_steps=20, train_steps=5
    )
    check = identity.Identity(options)
    check.run()
    assert check.identical, check.table()

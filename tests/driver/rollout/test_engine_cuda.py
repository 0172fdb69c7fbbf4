"""The rollout engine on a GPU: the CPU's tokens in float32, identical ones in bfloat16.

Also the commands that run it, on the tiny model or on a small random checkpoint.
"""

import pytest
import torch

from driver import generate as generate_command
from driver import identity
from driver import train as train_command
from driver.config.options import IdentityOptions
from driver.model import tiny
from driver.records.folder import read_jsonl
from driver.run.collector import Collector
from tests import kit
from tests.driver.hugging_face import random_model, save_model
from tests.driver.rollout.test_engine import STRATEGIES, generate, make_rollout, requests, same
from tests.driver.run.test_run import share_of_ones

pytestmark = [kit.gpu, kit.needs_gpu]
SHAPE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
WORDS = ["run.device=cuda", "engine.page_size=16"]


@pytest.mark.parametrize("variant", ["llama-tied-llama3", "qwen2", "qwen3", "smollm3"])
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
    options = IdentityOptions(
        tokens=1500, batch=16, device="cuda", dtype="bfloat16", warmup_steps=20, train_steps=5
    )
    check = identity.Identity(options)
    check.run()
    assert check.identical, check.table()


@pytest.fixture
def checkpoint(tmp_path):
    """The folder of a random model with a tokenizer."""
    folder = tmp_path / "model"
    sizes = {**SHAPE, "vocab_size": len(tiny.VOCABULARY)}
    save_model(folder, "llama-tied-llama3", **sizes, eos_token_id=1, pad_token_id=0)
    tiny.build_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("strategy", ["ngram:4,1,5", "learned:4,2,8"])
def test_generate_command_on_a_checkpoint(checkpoint, capsys, strategy):
    words = [f"model={checkpoint}", "prompt=1 + 1 =", f"strategy={strategy}", "max_new_tokens=48"]
    generate_command.main([*words, "device=cuda", "dtype=bfloat16", "train_seconds=1"])
    assert "tokens and log-probs equal: yes" in capsys.readouterr().out


def test_train_command_on_a_checkpoint(checkpoint, tmp_path, monkeypatch):
    """Two steps, with rewards that a random model would not get."""
    monkeypatch.setattr(Collector, "rewards", share_of_ones)
    train_command.main(
        [
            "preset=smollm2",
            f"model.path={checkpoint}",
            "model.dtype=bfloat16",
            f"run.root={tmp_path}",
            "run.name=card",
            "run.device=cuda",
            "run.steps=2",
            "run.eval_prompts=2",
            "sampling.max_new_tokens=24",
            "grpo.samples_per_prompt=4",
        ]
    )
    records = read_jsonl(tmp_path / "card" / "metrics.jsonl")[1:]
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert record["actor/grad_norm"] > 0 and record["drafter/version"] > 0
        assert record["sampling/sampling_logp_difference/max"] < 0.5

"""Random arrivals, lengths, limits, sampling, pages and switches: plain-decode tokens, no leak."""

import random
from dataclasses import replace

import pytest
import torch

from driver.rollout import engine
from driver.rollout.scheduler import Scheduler
from tests import kit
from tests.driver.hugging_face import random_model
from tests.driver.rollout.test_engine import STRATEGIES, generate, make_rollout, requests, same

SHAPE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
PAGE_LIMITS = {"cpu": [None, 24, 40], "cuda": [None, 10, 25]}  # pages of 4 and of 16
HORIZONS = [1, 3, 8, 64]


def make(device, *words):
    policy = random_model("llama-tied-llama3", **(SHAPE if device == "cuda" else {}))
    if device == "cuda":
        policy = policy.to(torch.bfloat16).cuda()
        words += ("run.device=cuda", "engine.page_size=16", "model.dtype=bfloat16")
    rollout = make_rollout(policy, f"engine.strategies=off {' '.join(STRATEGIES)}", *words)
    rollout.spot.swap()
    return rollout


def random_jobs(rng, seed):
    """Up to thirty requests, with new prompts in every third round."""
    jobs = requests(count=rng.randint(1, 30))
    return [
        replace(
            job,
            id=1000 * seed + index,
            prompt_ids=(*job.prompt_ids, 6 + seed // 3 % 90),
            params=replace(
                job.params,
                max_new_tokens=rng.randint(1, 70),
                stop_ids=tuple(rng.sample(range(97), rng.randint(0, 4))),
            ),
        )
        for index, job in enumerate(jobs)
    ]


def arrivals(rng):
    """A scheduler that admits waiting requests at random times."""

    class Arrivals(Scheduler):
        def _admit_first(self, admission):
            here = not self.running or rng.random() < 0.5
            return here and super()._admit_first(admission)

    return Arrivals


@pytest.mark.parametrize("device", kit.DEVICES)
def test_soak(device, request, monkeypatch):
    """`--soak N` makes N passes instead of a few hundred.

    `generate` takes a fixed set of requests, so a late arrival waits although there is room.
    """
    rollout, plain = make(device), make(device, "engine.graphs=off")
    store, passes, seed, held = rollout.engine.state.store, 0, 0, None
    while passes < request.config.getoption("--soak"):
        rng = random.Random(seed)
        jobs, page_limit = random_jobs(rng, seed), rng.choice(PAGE_LIMITS[device])
        with monkeypatch.context() as patch:
            patch.setattr(engine, "Scheduler", arrivals(rng))
            got = generate(
                rollout,
                jobs,
                "off",
                *STRATEGIES,
                seed=seed,
                page_limit=page_limit,
                horizon=rng.choice(HORIZONS),
            )
        assert same(got, generate(plain, jobs)), f"round {seed}"
        assert len(store._free) + len(store._past) == len(store.tokens)
        # With few pages, prefixes of waiting requests are evicted too.
        assert page_limit or rollout.engine.stats.reprefilled_tokens == 0
        passes += rollout.engine.stats.target_passes
        seed += 1
        if device == "cuda" and seed == 5:
            held = torch.cuda.memory_allocated()
    assert held is None or torch.cuda.memory_allocated() <= held + (1 << 20)

"""Requests to a server of verl's rollout `tlt` in Ray, on the CPU: `FOLDER` has a tiny model.

`python -m tests.driver.adapters.verl_server FOLDER` writes `FOLDER/seen.json`, which
`test_verl.py` checks. It is a program of its own since Ray and verl change their process.
"""

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import ray
import torch
from transformers import AutoModelForCausalLM
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutMode

from driver.adapters.verl import Replica, Server, server_name
from driver.common.errors import UserError

PROMPTS = [[3 + i, 13, 4 + i, 17] for i in range(8)]
LONG = 300  # tokens of a response that is aborted
PARAMS = {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
PARAMS |= {"logprobs": True}
REFUSED = [
    {"tensor_model_parallel_size": 2},
    {"quantization": "fp8"},
    {"enable_rollout_routing_replay": True, "scheduling_policy": "priority"},
    {"calculate_log_probs": True, "top_p": 0.9},
    {"calculate_log_probs": True, "top_k": 5},
    {"calculate_log_probs": True, "logprobs_mode": "raw_logprobs", "temperature": 0.5},
    {"is_reward_model": True},
    {"is_teacher_model": True},
]


def plain(output):
    return {
        "tokens": output.token_ids,
        "logprobs": output.log_probs,
        "stop": output.stop_reason,
        "version": output.extra_fields.get("global_steps"),
    }


def own_logprobs(model, prompt, tokens):
    """Log-probs of tokens by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    logits = (logits.float() / PARAMS["temperature"]).log_softmax(-1)
    return logits.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


async def main(folder):
    config = RolloutConfig(
        name="tlt",
        dtype="float32",
        prompt_length=16,
        response_length=24,
        max_model_len=400,
        max_num_seqs=8,  # fewer than the requests that are sent at once
        tensor_model_parallel_size=1,
        seed=3,
        engine_kwargs={"tlt": {"settings": ["engine.strategies=[off,ngram:3,1,4]"]}},
    )
    object.__setattr__(config.checkpoint_engine, "update_weights_bucket_megabytes", 1)
    model_config = HFModelConfig(path=str(folder / "model"))
    options = {"name": server_name(0), "max_concurrency": 64}
    server = (
        ray.remote(Server).options(**options).remote(config, model_config, RolloutMode.HYBRID, "0")
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    seen = {}

    def ask(prompt, name, **more):
        return server.generate.remote(prompt, {**PARAMS, **more}, name)

    async def all_of(requests):
        return [plain(output) for output in await asyncio.gather(*requests)]

    jobs = [(PROMPTS[i % 8], f"request {i}") for i in range(16)]
    seen["together"] = await all_of([ask(*job) for job in jobs])
    seen["alone"] = [plain(await ask(*job)) for job in reversed(jobs)][::-1]
    seen["own"] = [
        own_logprobs(model, prompt, out["tokens"])
        for (prompt, _), out in zip(jobs, seen["together"], strict=True)
    ]

    # A short request that arrives later ends first; then the long ones are aborted.
    endless = {"ignore_eos": True}
    names = [(PROMPTS[i], f"long {i}") for i in range(4)]
    running = [ask(*job, max_tokens=LONG, **endless) for job in names]
    seen["late"] = plain(await ask(PROMPTS[5], "late", max_tokens=4, **endless))
    seen["aborted_count"] = (await server.abort_all_requests.remote())["aborted_count"]
    seen["aborted"] = await all_of(running)
    held = asyncio.ensure_future(ask(PROMPTS[6], "held"))
    await server.sleep.remote()
    await server.wake_up.remote(["weights"])
    await server.wake_up.remote(["kv_cache"])
    seen["held_early"] = held.done()
    await server.resume_generation.remote()
    seen["held"] = plain(await held)
    seen["resumed"] = await all_of(
        [
            ask(prompt + out["tokens"], name, max_tokens=LONG - len(out["tokens"]), **endless)
            for (prompt, name), out in zip(names, seen["aborted"], strict=True)
        ]
    )
    seen["whole"] = await all_of([ask(*job, max_tokens=LONG, **endless) for job in names])

    await server.abort_all_requests.remote(reject_request=True)
    seen["rejected"] = plain(await ask(PROMPTS[0], "rejected"))
    await server.resume_generation.remote()

    os.environ["RANK"] = "0"
    adapter = get_rollout_class("tlt")(config, model_config, None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    await adapter.release()
    await adapter.resume(["weights"])
    await adapter.update_weights(iter(model.named_parameters()), global_steps=7)
    await adapter.resume(["kv_cache"])
    seen["updated"] = await all_of([ask(*job) for job in jobs[:4]])
    seen["updated_own"] = [
        own_logprobs(model, prompt, out["tokens"])
        for (prompt, _), out in zip(jobs, seen["updated"], strict=False)
    ]
    # Later turns, whose prompts contain the earlier ones: the response ends with the budget.
    seen["turn"] = plain(await ask([3] * 30, "turn", **endless))
    stops = sorted(set(seen["whole"][0]["tokens"][:20]))[:3]
    seen["stops"] = stops
    seen["stopped"] = plain(await ask(PROMPTS[0], "stopped", stop_token_ids=stops, max_tokens=LONG))

    # A request that waits is not admitted if the gate is closed again before it goes on.
    local = Server(config, model_config, RolloutMode.HYBRID, "0")
    await local.abort_all_requests()
    parked = asyncio.ensure_future(local.generate(PROMPTS[0], dict(PARAMS), "parked"))
    await asyncio.sleep(0)
    await local.resume_generation()
    local._open.clear()  # what `abort_all_requests` begins with; the rest would end this one, too
    local._rejects = True
    seen["parked"] = plain(await parked)
    local.session.close()

    seen["refused"] = []
    for changes in REFUSED:
        role = {name: True for name in changes if name.startswith("is_")}
        other = replace(config, **{k: v for k, v in changes.items() if k not in role})
        try:
            await Replica(0, other, model_config, **role).launch_servers()
        except UserError as error:
            seen["refused"].append(str(error))
    seen["errors"] = []
    few = iter([next(model.named_parameters())])
    wrong = {"min_p": 0.1, "presence_penalty": 0.0}
    first, second = ask(PROMPTS[0], "twin", max_tokens=LONG, **endless), ask(PROMPTS[1], "twin")
    for call in (
        ask(PROMPTS[0], "x", **wrong),
        server.generate.remote(PROMPTS[0], PARAMS, "x", image_data=None, audio_data=[[0.5]]),
        ask([3] * 400, "y"),
        adapter.update_weights(few),
        second,
        server.save_drafter.remote(str(folder / "drafter")),
    ):
        try:
            await call
        except Exception as error:
            seen["errors"].append(str(error))
    await first
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    ray.init(num_cpus=4, num_gpus=1, include_dashboard=False)
    asyncio.run(main(Path(sys.argv[1])))

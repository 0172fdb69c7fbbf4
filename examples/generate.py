"""Generates one response with n-gram speculation and with plain decoding: the tokens are equal.

Run from the root of the checkout: `python -m examples.generate`. The model is the tiny one
with random weights. Give the folder of a model instead: `python -m examples.generate FOLDER`.
"""

import sys

from driver.config.load import load_config
from driver.config.strategy import OFF, Strategy
from driver.rollout.request import Request, SamplingParams, request_id
from driver.session.load import find_model, load_policy, spec_of
from driver.session.parts import build_rollout

STRATEGY = Strategy.parse("ngram:6,4,16")

model = sys.argv[1] if len(sys.argv) > 1 else "tiny"
config = load_config([f"model.path={model}", f"engine.strategies=off {STRATEGY}"])
policy, tokenizer = load_policy(config, find_model(config))
rollout = build_rollout(config, spec_of(policy), policy.state_dict(), longest=256)

prompt = tuple(tokenizer.encode("12 + 34 = "))
params = SamplingParams(temperature=0.1, max_new_tokens=64)
request = Request(request_id("eval", 0, "example", 0), 0, prompt, params)  # the key of its noise

responses = []
for strategy in (STRATEGY, OFF):
    rollout.fix(strategy)
    responses += rollout.engine.generate([request])
    passes = rollout.engine.stats.target_passes
    print(f"{strategy!s:<14}{len(responses[-1].token_ids)} tokens in {passes} passes")

with_speculation, plain = responses
print("tokens equal:", with_speculation.token_ids == plain.token_ids)
print("log-probs equal:", with_speculation.logprobs == plain.logprobs)

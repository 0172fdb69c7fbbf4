"""Generates one response with n-gram speculation and with plain decoding: the tokens are equal.

Run from the root of the checkout: `python -m examples.generate`. The model is the tiny one
with random weights. Give the folder of a model instead: `python -m examples.generate FOLDER`.
"""

import sys

from driver import Request, SamplingParams, Session
from driver.config.strategy import OFF, Strategy

STRATEGY = Strategy.parse("ngram:6,4,16")

model = sys.argv[1] if len(sys.argv) > 1 else "tiny"
responses = []
with Session.from_pretrained(model, settings=[f"engine.strategies=off {STRATEGY}"]) as session:
    params = SamplingParams(temperature=0.1, max_new_tokens=64)
    request = Request(1, 0, session.encode("12 + 34 = "), params)  # its id is the key of its noise
    for strategy in (STRATEGY, OFF):
        session.rollout.fix(strategy)
        responses += session.roll_out([request])
        passes = session.engine.stats.target_passes
        print(f"{strategy!s:<14}{len(responses[-1].token_ids)} tokens in {passes} passes")

with_speculation, plain = responses
print("tokens equal:", with_speculation.token_ids == plain.token_ids)
print("log-probs equal:", with_speculation.logprobs == plain.logprobs)

"""`tlt generate`, or `python -m driver.generate`: a text with speculation and without, compared."""

if __name__ == "__main__":  # before the imports below, which take seconds
    from .cli import start

    start("generate")


import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from .common.errors import UserError
from .common.storage import user_path
from .config.fields import read_options
from .config.load import load_config
from .config.options import GenerateOptions, options_in_errors
from .config.strategy import OFF, Strategy
from .model.prompts import PromptEncoder
from .rollout.request import Request, Response, SamplingParams, request_id
from .run.assemble import check_context
from .session.load import find_model, load_policy, spec_of
from .session.parts import adopt_drafter, build_rollout, drafter_state

WARM_SAMPLES = 8  # responses that a new drafter is trained on


class Generator:
    def __init__(self, options: GenerateOptions) -> None:
        self.options = options
        self.strategy = Strategy.parse(options.strategy)
        if options.model == "tiny":
            raise UserError(
                "model=tiny: has no trained weights; name a checkpoint of tlt train, such as"
                " runs/tiny/checkpoints/step-000028"
            )
        config = load_config(
            [
                "preset=smollm2",
                f"model.path={options.model}",
                f"model.dtype={options.dtype}",
                f"model.cache={options.cache}",
                f"run.device={options.device}",
                f"run.seed={options.seed}",
                f"sampling.max_new_tokens={options.max_new_tokens}",
                f"engine.strategies=off {self.strategy if self.strategy != OFF else ''}",
                f"engine.max_batch={WARM_SAMPLES}",
                "bandit.policy=off",
                "spot.tokens_per_step=512",
            ]
        )
        policy, self.tokenizer = load_policy(config, find_model(config, _report))
        spec = spec_of(policy)
        self.ids = PromptEncoder(self.tokenizer, options.chat_template, is_message=True)(
            options.prompt
        )
        if not self.ids:
            raise UserError("prompt: empty; give it some text")
        check_context(len(self.ids), options.max_new_tokens, spec.max_position)
        self.params = SamplingParams(
            options.temperature, options.top_k, options.top_p, options.max_new_tokens, spec.eos_ids
        )
        longest = len(self.ids) + options.max_new_tokens
        state = drafter_state(user_path(options.model))
        if state is not None:
            size = len(state["drafter"]["d2t"])
            config = replace(config, drafter=replace(config.drafter, draft_vocab=size))
        self.rollout = build_rollout(config, spec, policy.state_dict(), longest)
        adopt_drafter(self.rollout.spot, state, _report)

    def request(self, sample: int) -> Request:
        key = request_id("eval", self.options.seed, "prompt", sample)
        return Request(key, 0, self.ids, self.params)

    def warm_drafter(self) -> tuple[int, float]:
        """Trains a drafter on other samples of the prompt; returns steps, and seconds in all."""
        spot = self.rollout.spot
        assert spot is not None
        started = time.perf_counter()
        self.rollout.fix(OFF)
        self.rollout.engine.generate([self.request(1 + i) for i in range(WARM_SAMPLES)])
        began = time.perf_counter()
        while time.perf_counter() - began < self.options.train_seconds and spot.micro_step():
            pass
        spot.swap()
        return spot.steps, time.perf_counter() - started

    def run(self, strategy: Strategy) -> tuple[Response, float]:
        """The response and its tokens per second, prefill included."""
        self.rollout.fix(strategy)
        self.rollout.engine.forget()
        started = time.perf_counter()
        (response,) = self.rollout.engine.generate([self.request(0)], record=False)
        return response, len(response.token_ids) / (time.perf_counter() - started)


def _report(line: str) -> None:
    sys.stderr.write(line + "\n")


def main(argv: Sequence[str]) -> None:
    options = read_options(GenerateOptions, argv)
    with options_in_errors():
        generator = Generator(options)
    out = sys.stdout.write
    spot = generator.rollout.spot
    if generator.strategy.needs_drafter and spot is not None and not spot.runner.version:
        steps, seconds = generator.warm_drafter()
        drawn = f"{WARM_SAMPLES} other samples of the prompt"
        out(f"drafter: {drawn}, then {steps} training steps, in {seconds:.0f} s\n\n")
    fast, speed = generator.run(generator.strategy)
    stats = generator.rollout.engine.stats
    out(f"{generator.tokenizer.decode(fast.token_ids, skip_special_tokens=True)}\n\n")
    plain, plain_speed = generator.run(OFF)
    accept = "" if stats.accept_length is None else f", accept length {stats.accept_length:.2f}"
    passes = generator.rollout.engine.stats.target_passes
    out(f"{generator.strategy!s:<16}{speed:8.1f} tokens/s, {stats.target_passes} passes{accept}\n")
    out(f"{'off':<16}{plain_speed:8.1f} tokens/s, {passes} passes\n")
    equal = fast.token_ids == plain.token_ids and fast.logprobs == plain.logprobs
    out(f"tokens and log-probs equal: {'yes' if equal else 'NO'} ({len(plain.token_ids)})\n")
    if not equal:
        sys.exit(1)

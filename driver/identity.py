"""`tlt identity`, or `python -m driver.identity`: checks that speculation changes no token."""

if __name__ == "__main__":  # before the imports below, which take seconds
    from .cli import start

    start("identity")


import sys
from collections.abc import Sequence

from .common.errors import UserError
from .config.fields import read_options
from .config.load import Config, load_config
from .config.options import IdentityOptions, options_in_errors
from .config.sections import MAX_PREFILL_CHUNK, EngineConfig
from .config.strategy import OFF, ORACLE, parse_strategies
from .policy.warmup import warm_up
from .rollout.request import Request
from .run.assemble import check_prompts, longest_request, prompt_encoder, stop_ids
from .run.comparison import (
    ARRIVALS,
    MIXED,
    PREEMPT,
    Arm,
    Comparison,
    oracle_strategy,
    sibling_requests,
    train_drafter,
)
from .session.load import find_model, load_policy, spec_of
from .session.parts import build_rollout
from .tasks import make_task

ROUND_FACTOR = 2  # requests of a round over the batch: slots are refilled during the rollout


class Identity:
    def __init__(self, options: IdentityOptions) -> None:
        self.options = options
        texts = [s for s in options.strategies if not s.startswith(ORACLE.name)]
        strategies = [str(s) for s in parse_strategies(texts) if s != OFF]
        oracles = [str(oracle_strategy(s)) for s in options.strategies if s.startswith(ORACLE.name)]
        self.config = self._config(strategies, oracles)
        policy, tokenizer = load_policy(self.config, find_model(self.config, _report))
        self.task = make_task(self.config.task.name, path=options.path)
        self.encode = prompt_encoder(self.config, self.task, tokenizer)
        spec = spec_of(policy)
        limit = options.max_new_tokens
        prompt_len = check_prompts(self.task, self.encode, limit, spec.max_position)
        if options.model == "tiny" and options.warmup_steps:
            warm_up(policy, self.encode, self.task, self.config.warmup, options.seed)
        self.stop_ids = stop_ids(spec, self.task, self.encode)
        longest = longest_request(self.config, spec, prompt_len)
        self.rollout = build_rollout(self.config, spec, policy.state_dict(), longest)
        arms = [Arm(name) for name in (*strategies, *oracles, MIXED, PREEMPT, ARRIVALS)]
        self.comparison = Comparison(
            self.rollout, arms, self.requests, self._train_drafter, options.seed
        )

    def _config(self, strategies: list[str], oracles: list[str]) -> Config:
        o = self.options
        # The engine has no oracle strategy: its rows must fit into a prefill pass.
        rows = [o.batch * oracle_strategy(oracle).num_verify for oracle in oracles]
        if max(rows, default=0) > MAX_PREFILL_CHUNK:
            raise UserError(
                f"batch={o.batch}: the oracle would verify {max(rows)} rows in a pass, at most"
                f" {MAX_PREFILL_CHUNK} fit; lower batch or the oracle's num_verify"
            )
        words = [
            "preset=tiny",
            f"model.path={o.model}",
            f"model.dtype={o.dtype}",
            f"model.cache={o.cache}",
            f"run.device={o.device}",
            f"run.seed={o.seed}",
            f"task.name={o.task or ('sums' if o.model == 'tiny' else 'questions')}",
            f"warmup.steps={o.warmup_steps}",
            f"sampling.max_new_tokens={o.max_new_tokens}",
            f"engine.max_batch={o.batch}",
            f"engine.spec_max_batch={o.batch}",
            f"engine.prefill_chunk={max([EngineConfig.prefill_chunk, *rows])}",
            f"engine.strategies={' '.join(['off', *strategies])}",
            "bandit.policy=off",
            "spot.mode=serial",
            "spot.tokens_per_step=512",
            f"drafter.draft_vocab={0 if o.model == 'tiny' else 8192}",
        ]
        return load_config(words)

    def requests(self, round_index: int) -> list[Request]:
        """Pairs of siblings, with every kind of sampling."""
        count = ROUND_FACTOR * self.options.batch
        prompts = [self.task.prompt("eval", round_index * count + i) for i in range(count // 2)]
        encoded = [(p.id, self.encode(p.text)) for p in prompts]
        return sibling_requests(encoded, round_index, self.options.max_new_tokens, self.stop_ids)

    def run(self) -> None:
        def note(line: str) -> None:
            sys.stderr.write(f"\r{line}")

        self.comparison.run(self.options.tokens, note=note)
        sys.stderr.write("\n")

    def _train_drafter(self) -> None:
        if self.rollout.spot is not None:  # else no strategy needs a drafter
            train_drafter(self.rollout.spot, self.options.train_steps)

    # ---- report ---------------------------------------------------------------------------------

    @property
    def arms(self) -> list[Arm]:
        return self.comparison.arms

    @property
    def identical(self) -> bool:
        return all(arm.worst_share == 1 for arm in self.arms)

    def table(self) -> str:
        header = (
            f"{'arm':<16}{'tokens':>8}{'equal':>9}{'lengths':>9}{'logp bits':>11}"
            f"{'accept':>8}{'passes':>8}{'tok/s':>8}"
        )
        lines = [header]
        for arm in [self.comparison.off, *self.arms]:
            if arm.tokens == 0:
                continue
            accept = "-" if arm.stats.accept_length is None else f"{arm.stats.accept_length:.2f}"
            lines.append(
                f"{arm.name:<16}{arm.tokens:>8}{arm.token_share:>9.2%}"
                f"{arm.length_share:>9.2%}{arm.bit_share:>11.2%}"
                f"{accept:>8}{arm.stats.target_passes:>8}{arm.tokens / arm.seconds:>8.0f}"
            )
            lines += [f"    first divergence: {text}" for text in arm.divergences]
        lines.append(f"preemptions: {sum(arm.stats.preemptions for arm in self.arms)}")
        happened = ", ".join(f"{n} {what}" for what, n in self.arms[-1].interruptions.items())
        return "\n".join([*lines, f"{self.arms[-1].name}: {happened}"])


def _report(line: str) -> None:
    sys.stderr.write(line + "\n")


def main(argv: Sequence[str]) -> None:
    with options_in_errors():
        identity = Identity(read_options(IdentityOptions, argv))
    try:
        identity.run()
    finally:  # after a signal too
        sys.stdout.write(identity.table() + "\n")
    if not identity.identical:
        sys.exit(1)

"""`python -m driver.identity model=smollm2 tokens=20000`: speculation changes no token, at scale.

Runs the same requests with `off` and with each strategy and compares tokens, lengths and log-prob
bits. Three arms of its own go further: `oracle` hides off's own tokens on random branches among
wrong siblings, `mixed` switches the strategy at every pass, `preempt` does so with too few pages.
"""

from __future__ import annotations

import random
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from driver.assemble import Rollout, build_rollout, find_model, load_policy, spec_of, stop_ids
from driver.bandit import OFF
from driver.command import read_options, run_command
from driver.config import Config, load_config
from driver.errors import UserError
from driver.rollout.proposers import OracleProposer
from driver.rollout.request import Request, Response, SamplingParams, request_id
from driver.rollout.stats import RolloutStats
from driver.strategy import Strategy, parse_strategies
from driver.tasks import Prompt, Split, Task, make_task
from driver.warmup import warm_up
from tlt_ext import _C

ORACLE = "oracle"
ROUND_FACTOR = 2  # requests of a round over the batch, so that slots are refilled in mid-rollout
# Sampling parameters cycle through the requests of a round: greedy, cold, plain, filtered.
LAWS = ((1.0, 0, 1.0), (0.0, 0, 1.0), (0.6, 0, 1.0), (1.0, 0, 1.0), (1.0, 20, 1.0), (0.8, 50, 0.9))


@dataclass
class Options:
    """Options of the command."""

    model: str = "tiny"
    tokens: int = 20_000  # compared for each arm
    strategies: list[str] = field(
        default_factory=lambda: [
            "ngram:4,1,5",
            "ngram:6,4,16",
            "learned:4,1,5",
            "learned:4,4,12",
            "learned:8,4,32",
            "oracle:8,4,16",
        ]
    )
    batch: int = 8
    max_new_tokens: int = 64
    task: str = ""  # prompts; default: sums for the tiny model, a few questions else
    path: str = ""
    drafter: str = "trained"  # trained, random or nan
    train_steps: int = 30  # micro-steps of the trained drafter on the first round
    warmup_steps: int = 150  # of the tiny model
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0
    cache: str = "~/.cache/tlt"
    wheel: str = ""


def oracle_strategy(text: str) -> Strategy:
    """`oracle:depth,top_k,num_verify`, which no configuration takes."""
    try:
        return replace(Strategy.parse(text.replace(ORACLE, "ngram", 1)), kind=ORACLE)
    except UserError:
        raise UserError(f"strategies: {text!r}: wanted oracle:depth,top_k,num_verify") from None


class Questions:
    """Open questions, so that responses are long and never alike."""

    name = "questions"
    stop: tuple[str, ...] = ()
    subjects = (
        "the tides", "a bicycle", "bread", "the printing press", "rain", "chess", "a compass",
        "sleep", "the number zero", "paper", "a lighthouse", "honey", "earthquakes", "the violin",
    )  # fmt: skip
    forms = (
        "Question: How does {0} work?\nAnswer:",
        "Write a short story about {0}.\n\n",
        "A list of facts about {0}:\n1.",
        "def {1}(n):\n    # a function about {0}\n",
    )

    def prompt(self, split: Split, index: int) -> Prompt:
        subject = self.subjects[index % len(self.subjects)]
        form = self.forms[index // len(self.subjects) % len(self.forms)]
        text = form.format(subject, subject.split()[-1])
        return Prompt(f"{self.name}/{split}/{index}", text, "")

    def reward(self, prompt: Prompt, response: str) -> float:
        return 0.0

    def demonstration(self, prompt: Prompt) -> None:
        return None


@dataclass
class Arm:
    """What one arm did over all rounds."""

    name: str
    tokens: int = 0
    equal_tokens: int = 0
    equal_lengths: int = 0
    equal_bits: int = 0
    responses: int = 0
    passes: int = 0
    spec_emitted: int = 0
    spec_request_passes: int = 0
    seconds: float = 0.0
    preemptions: int = 0
    divergences: list[str] = field(default_factory=list)


def compare(arm: Arm, wanted: Sequence[Response], got: Sequence[Response]) -> list[tuple[int, int]]:
    """Books equal tokens, lengths and log-prob bits.

    Returns:
        (response index, token index) of each first divergence.
    """
    first = []
    for index, (a, b) in enumerate(zip(wanted, got, strict=True)):
        arm.responses += 1
        arm.tokens += max(len(a.token_ids), len(b.token_ids))
        same = [x == y for x, y in zip(a.token_ids, b.token_ids, strict=False)]
        arm.equal_tokens += sum(same)
        arm.equal_lengths += len(a.token_ids) == len(b.token_ids) and a.finish == b.finish
        arm.equal_bits += sum(
            struct.pack("f", x) == struct.pack("f", y)
            for x, y in zip(a.logprobs, b.logprobs, strict=False)
        )
        if not all(same) or len(a.token_ids) != len(b.token_ids):
            first.append((index, same.index(False) if False in same else len(same)))
    return first


class Identity:
    """Runs rounds of requests through `off` and every arm."""

    def __init__(self, options: Options) -> None:
        self.options = options
        if options.tokens < 1:
            raise UserError(f"tokens: wanted at least 1, got {options.tokens}")
        if options.drafter not in ("trained", "random", "nan"):
            raise UserError(f"drafter: wanted trained, random or nan, got {options.drafter!r}")
        texts = [s for s in options.strategies if not s.startswith(ORACLE)]
        self.strategies = [s for s in parse_strategies(texts) if s != OFF]
        self.oracles = [s for s in options.strategies if s.startswith(ORACLE)]
        for text in self.oracles:
            oracle_strategy(text)
        self.config = self._config(texts)
        policy, self.tokenizer = load_policy(self.config, find_model(self.config, _report))
        questions = options.model != "tiny" and not options.task
        self.task: Task = (
            Questions() if questions else make_task(self.config.task.name, path=options.path)
        )
        if options.model == "tiny" and options.warmup_steps:
            warm_up(policy, self.tokenizer, self.task, self.config.warmup, options.seed)
        self.spec = spec_of(policy)
        self.stop_ids = stop_ids(self.spec, self.task, self.tokenizer)
        longest = self.spec.max_position
        weights = policy.state_dict()
        longest = min(longest, 1024 + options.max_new_tokens)
        self.rollout = build_rollout(self.config, self.spec, weights, longest)
        self.arms = [Arm(str(s)) for s in self.strategies] + [Arm(s) for s in self.oracles]
        self.arms += [Arm("mixed"), Arm("preempt")]
        self.off = Arm("off")
        self._random = random.Random(options.seed)

    def _config(self, strategies: list[str]) -> Config:
        o = self.options
        words = [
            "preset=tiny",
            f"model.path={o.model}",
            f"model.dtype={o.dtype}",
            f"model.cache={o.cache}",
            f"model.wheel={o.wheel}",
            f"run.device={o.device}",
            f"run.seed={o.seed}",
            f"task.name={o.task or 'sums'}",
            f"warmup.steps={o.warmup_steps}",
            f"sampling.max_new_tokens={o.max_new_tokens}",
            f"engine.max_batch={o.batch}",
            f"engine.spec_max_batch={o.batch}",
            f"engine.strategies={' '.join(dict.fromkeys(['off', *strategies]))}",
            "bandit.policy=static",
            "spot.mode=serial",
            "spot.tokens_per_step=512",
            f"drafter.draft_vocab={0 if o.model == 'tiny' else 8192}",
        ]
        return load_config(words)

    # ---- rounds ---------------------------------------------------------------------------------

    def requests(self, round_index: int) -> list[Request]:
        """Pairs of siblings under every sampling law."""
        count = ROUND_FACTOR * self.options.batch
        out = []
        for i in range(count):
            prompt = self.task.prompt("eval", round_index * count + i // 2)
            temperature, top_k, top_p = LAWS[i % len(LAWS)]
            params = SamplingParams(
                temperature, top_k, top_p, self.options.max_new_tokens, self.stop_ids
            )
            ids = tuple(self.tokenizer.encode(prompt.text, add_special_tokens=False))
            key = request_id("eval", round_index, prompt.id, i)
            out.append(Request(key, round_index * count + i // 2, ids, params))
        return out

    def run(self) -> None:
        """Rounds until every arm has compared the tokens asked for."""
        index = 0
        while self.off.tokens < self.options.tokens:
            requests = self.requests(index)
            wanted = self._generate(self.off, requests, OFF, record=index == 0)
            compare(self.off, wanted, wanted)
            if index == 0:
                self._prepare_drafter()
            answers = {r.request.id: r.token_ids for r in wanted}
            oracle = OracleProposer(answers, self.spec.vocab_size, index)
            self.rollout.engine.proposers["oracle"] = oracle
            for arm in self.arms:
                got = self._generate(arm, requests, self._choice(arm))
                self._book(arm, wanted, got)
            index += 1
            sys.stderr.write(f"\r{self.off.tokens} of {self.options.tokens} tokens")
        sys.stderr.write("\n")

    def _choice(self, arm: Arm) -> Strategy | None:
        if arm.name in ("mixed", "preempt"):
            return None
        if arm.name.startswith(ORACLE):
            return oracle_strategy(arm.name)
        return Strategy.parse(arm.name)

    def _generate(
        self, arm: Arm, requests: list[Request], strategy: Strategy | None, record: bool = False
    ) -> list[Response]:
        """One rollout with a fixed strategy, or with another one at every pass."""
        engine = self.rollout.engine
        menu = [OFF, *self.strategies]
        engine.bandit = _Fixed(strategy, menu, self._random)
        self.rollout.engine.forget()
        if arm.name == "preempt":
            longest = max(len(r.prompt_ids) + r.params.max_new_tokens for r in requests)
            engine.page_limit = -(-longest // engine.cache.page_size) + 3
        started = time.perf_counter()
        try:
            out = engine.generate(requests, record=record)
        finally:
            engine.page_limit = None
        arm.seconds += time.perf_counter() - started
        stats: RolloutStats = engine.stats
        arm.passes += stats.target_passes
        arm.spec_emitted += stats.spec_emitted
        arm.spec_request_passes += stats.spec_request_passes
        arm.preemptions += stats.preemptions
        return out

    def _prepare_drafter(self) -> None:
        spot = self.rollout.spot
        if spot is None:
            return
        if self.options.drafter == "trained":
            spot.start_step(0)
            for _ in range(self.options.train_steps):
                spot.micro_step()
        if self.options.drafter == "nan":
            for parameter in spot.drafter.trainable():
                parameter.data.fill_(float("nan"))
        spot.runner.load(spot.drafter.state_dict(), spot.runner.version + 1)  # NaN too

    def _book(self, arm: Arm, wanted: list[Response], got: list[Response]) -> None:
        for index, place in compare(arm, wanted, got):
            if len(arm.divergences) < 5:
                arm.divergences.append(self._describe(wanted[index], got[index], place))

    def _describe(self, a: Response, b: Response, place: int) -> str:
        """Where two responses part, and by how much the target preferred off's token."""
        request = a.request
        head = f"request {request.id} token {place}"
        if place >= min(len(a.token_ids), len(b.token_ids)):
            return f"{head}: lengths {len(a.token_ids)} and {len(b.token_ids)}"
        x, y = a.token_ids[place], b.token_ids[place]
        context = [*request.prompt_ids, *a.token_ids[:place]]
        logits = self.rollout.engine.next_logits(context)
        margin = float(
            self._score(logits, request, len(context), x)
            - self._score(logits, request, len(context), y)
        )
        return f"{head}: {x} and {y}, score margin {margin:.3g}"

    def _score(self, logits: torch.Tensor, request: Request, position: int, token: int) -> float:
        temperature = request.params.temperature
        if temperature == 0:
            return float(logits[token])
        low, high = request.id & 0xFFFFFFFF, request.id >> 32
        seed = self.options.seed
        words = _C.philox([token >> 2, position, low, high], [seed & 0xFFFFFFFF, seed >> 32])
        return float(logits[token]) / temperature + _C.gumbel(words[token & 3])

    # ---- report ---------------------------------------------------------------------------------

    def table(self) -> str:
        """One line an arm that has compared something."""
        header = (
            f"{'arm':<16}{'tokens':>8}{'equal':>9}{'lengths':>9}{'logp bits':>11}"
            f"{'accept':>8}{'passes':>8}{'tok/s':>8}"
        )
        lines = [header]
        for arm in [self.off, *self.arms]:
            if arm.tokens == 0:
                continue
            accept = "-"
            if arm.spec_request_passes:
                accept = f"{arm.spec_emitted / arm.spec_request_passes:.2f}"
            lines.append(
                f"{arm.name:<16}{arm.tokens:>8}{arm.equal_tokens / arm.tokens:>9.2%}"
                f"{arm.equal_lengths / arm.responses:>9.2%}{arm.equal_bits / arm.tokens:>11.2%}"
                f"{accept:>8}{arm.passes:>8}{arm.tokens / arm.seconds:>8.0f}"
            )
            lines += [f"    first divergence: {text}" for text in arm.divergences]
        preemptions = sum(arm.preemptions for arm in self.arms)
        return "\n".join([*lines, f"preemptions: {preemptions}"])

    @property
    def identical(self) -> bool:
        return all(
            arm.equal_tokens == arm.tokens == arm.equal_bits and arm.equal_lengths == arm.responses
            for arm in self.arms
        )


class _Fixed:
    """Stands where the bandit does: one strategy, or a random one at every pass."""

    def __init__(
        self, strategy: Strategy | None, menu: Sequence[Strategy], generator: random.Random
    ) -> None:
        self.strategy, self.menu, self.random = strategy, menu, generator

    def choose(self, batch: int, usable) -> Strategy:  # type: ignore[no-untyped-def]
        strategy = self.strategy or self.random.choice(list(self.menu))
        return strategy if usable(strategy) else OFF

    horizon = 1  # of passes between two choices

    def record(self, emitted: int, elapsed_s: float, passes: int = 1) -> None:
        pass


def _report(line: str) -> None:
    sys.stderr.write(line + "\n")


def main(argv: Sequence[str]) -> None:
    identity = Identity(read_options(Options, argv))
    try:
        identity.run()
    finally:  # stopped early, it still says what it has seen
        sys.stdout.write(identity.table() + "\n")
    if not identity.identical:
        sys.exit(1)


if __name__ == "__main__":
    run_command(main)


__all__ = ["Arm", "Identity", "Options", "Rollout", "compare", "main"]

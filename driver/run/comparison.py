"""Runs the same requests with plain and speculative decoding, and counts equal outputs."""

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ..common.errors import UserError
from ..config.strategy import OFF, ORACLE, SHARED, Strategy
from ..drafter.trainer import SpotTrainer
from ..rollout.bandit import UNDECIDED, StepSeconds
from ..rollout.proposers import OracleProposer
from ..rollout.request import Request, Response, SamplingParams, request_id
from ..rollout.stats import RolloutStats
from ..session import Session
from ..session.parts import Rollout
from .interrupted import answer, by_turns, interrupted, with_turn_limits

# Arms with a random strategy at every pass; the second one with too few pages, the third one with
# late arrivals, aborts and tools.
MIXED, PREEMPT, ARRIVALS = "mixed", "preempt", "arrivals"
SHOWN = 5  # divergences of an arm that are described
GOLDEN = 0.6180339887  # its multiples spread evenly over the unit interval
# Sampling parameters cycle through the requests of a round: greedy, cold, plain, filtered.
SAMPLED = (1.0, 0, 1.0), (0.0, 0, 1.0), (0.6, 0, 1.0), (1.0, 0, 1.0), (1.0, 20, 1.0), (0.8, 50, 0.9)


def oracle_strategy(text: str) -> Strategy:
    """Parses `oracle:depth,top_k,num_verify`, which is not valid in a configuration."""
    try:
        return Strategy.parse(text, ORACLE)
    except UserError:
        raise UserError(f"strategies: {text!r}: wanted {ORACLE.form}") from None


@dataclass
class Arm:
    """The results of one way to decode, over all rounds."""

    name: str  # a strategy, an oracle's, `mixed`, `preempt` or `arrivals`
    part: float = 1.0  # share of each round's requests that it runs
    tokens: int = 0
    equal_tokens: int = 0
    equal_lengths: int = 0
    equal_bits: int = 0
    responses: int = 0
    seconds: float = 0.0
    stats: RolloutStats = field(default_factory=RolloutStats)
    divergences: list[str] = field(default_factory=list)
    interruptions: Counter[str] = field(default_factory=Counter)

    @property
    def strategy(self) -> Strategy | None:
        """The strategy of every pass; None = a random one."""
        if self.name in (MIXED, PREEMPT, ARRIVALS):
            return None
        if self.name.startswith(ORACLE.name):
            return oracle_strategy(self.name)
        return Strategy.parse(self.name)

    @property
    def token_share(self) -> float:
        return self.equal_tokens / self.tokens

    @property
    def length_share(self) -> float:
        return self.equal_lengths / self.responses

    @property
    def bit_share(self) -> float:
        return self.equal_bits / self.tokens

    @property
    def worst_share(self) -> float:
        return min(self.token_share, self.length_share, self.bit_share)


def compare(arm: Arm, wanted: Sequence[Response], got: Sequence[Response]) -> list[tuple[int, int]]:
    """Counts equal tokens, lengths and log-prob bits; (response, token) where they first differ."""
    first = []
    for index, (a, b) in enumerate(zip(wanted, got, strict=True)):
        count = min(len(a.token_ids), len(b.token_ids))
        same = np.equal(a.token_ids[:count], b.token_ids[:count])
        bits = [np.array(r.logprobs[:count], dtype=np.float32).view(np.int32) for r in (a, b)]
        equal_lengths = len(a.token_ids) == len(b.token_ids)
        arm.responses += 1
        arm.tokens += max(len(a.token_ids), len(b.token_ids))
        arm.equal_tokens += int(same.sum())
        arm.equal_lengths += equal_lengths and a.finish == b.finish
        arm.equal_bits += int((bits[0] == bits[1]).sum())
        if not same.all():
            first.append((index, int(same.argmin())))
        elif not equal_lengths:
            first.append((index, count))
    return first


def sibling_requests(
    prompts: Sequence[tuple[str, tuple[int, ...]]],
    round_index: int,
    max_new_tokens: int,
    stop_ids: tuple[int, ...],
    spread: float = 0.0,
) -> list[Request]:
    """Two requests for each (id, token ids), of all kinds of sampling, with limits that spread."""
    out, count = [], 2 * len(prompts)
    for i in range(count):
        name, ids = prompts[i // 2]
        limit = math.ceil(max_new_tokens * (1 - spread * (i * GOLDEN % 1)))
        params = SamplingParams(*SAMPLED[i % len(SAMPLED)], limit, stop_ids)
        group = round_index * count + i // 2
        out.append(Request(request_id("eval", round_index, name, i), group, ids, params))
    return out


def train_drafter(spot: SpotTrainer, steps: int) -> None:
    for _ in range(steps):
        spot.micro_step()
    spot.swap()


@dataclass
class Comparison:
    """Rounds of the same requests through `off` and every arm; UserError for `verify=rejection`."""

    rollout: Rollout  # with enough rows and pages for every arm
    arms: list[Arm]
    requests: Callable[[int], list[Request]]  # of a round, by its index
    learn: Callable[[], None]  # called after the first round of `off`, which is recorded
    seed: int

    def __post_init__(self) -> None:
        verify = self.rollout.engine.config.verify
        if verify != SHARED:
            raise UserError(
                f"engine.verify={verify}: its tokens have the distribution of plain decoding's but"
                f" differ from them; compare tokens with engine.verify={SHARED}"
            )
        self.off = Arm(str(OFF))
        self.rounds = 0
        drafted = [arm.strategy for arm in self.arms]
        self._menu = [OFF, *(s for s in drafted if s is not None and s.drafting is not ORACLE)]
        self._random = random.Random(self.seed)

    def run(
        self,
        tokens: int,
        seconds: float = math.inf,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Runs rounds until `off` has emitted enough tokens or time is up; one at least."""
        begin = time.perf_counter()
        while self.off.tokens < tokens:
            spent = time.perf_counter() - begin
            if self.rounds and spent * (1 + 1 / self.rounds) > seconds:
                break
            self._round()
            note(f"{self.off.tokens} of {tokens} tokens")

    def _round(self) -> None:
        requests, first = self.requests(self.rounds), self.rounds == 0
        wanted = self._generate(self.off, requests, record=first)
        compare(self.off, wanted, wanted)
        if first:
            self.learn()
        answers = {r.request.id: r.token_ids for r in wanted}
        vocab_size = self.rollout.target.spec.vocab_size
        oracle = OracleProposer(answers, vocab_size, self.seed + self.rounds)
        self.rollout.engine.proposers[ORACLE.name] = oracle
        for arm in self.arms:
            some = requests[: math.ceil(arm.part * len(requests))]
            if arm.name == ARRIVALS:
                some = with_turn_limits(some)
                expected = by_turns(partial(self._generate, Arm(str(OFF))), some, answer)
                got = self._interrupted(arm, some)
            else:
                expected, got = wanted[: len(some)], self._generate(arm, some)
            for index, place in compare(arm, expected, got):
                if len(arm.divergences) < SHOWN:
                    arm.divergences.append(describe(expected[index], got[index], place))
        self.rounds += 1

    def _prepare(self, arm: Arm) -> None:
        engine = self.rollout.engine
        fixed: Any = _Fixed(arm.strategy, self._menu, self._random)
        engine.bandit = fixed
        engine.forget()
        engine.runner.prepare()  # the arm's time excludes the capture of graphs

    def _interrupted(self, arm: Arm, requests: list[Request]) -> list[Response]:
        """One rollout of a session, whose requests arrive late, are aborted and have turns."""
        self._prepare(arm)
        started = time.perf_counter()
        engine = self.rollout.engine
        observer, engine.observer = engine.observer, None  # nothing is trained on these responses
        try:
            session = _Booked(replace(self.rollout, spot=None))
            session.book = partial(self._book, arm)
            with session:
                out, count = interrupted(session, requests, answer, self._random)
        finally:
            engine.observer = observer
        arm.seconds += time.perf_counter() - started
        arm.interruptions.update(count)
        return out

    def _generate(self, arm: Arm, requests: list[Request], record: bool = False) -> list[Response]:
        engine = self.rollout.engine
        self._prepare(arm)
        if arm.name == PREEMPT:
            longest = max(len(r.prompt_ids) + r.params.max_new_tokens for r in requests)
            engine.page_limit = -(-longest // engine.cache.page_size) + 3
        started = time.perf_counter()
        try:
            out = engine.generate(requests, record=record)
        finally:
            engine.page_limit = None
        arm.seconds += time.perf_counter() - started
        self._book(arm, engine.stats)
        return out

    def _book(self, arm: Arm, stats: RolloutStats) -> None:
        arm.stats.add(stats)
        if arm.strategy not in (OFF, None) and stats.target_passes and not stats.spec_passes:
            # Otherwise the comparison would pass without any speculation.
            raise UserError(f"{arm.name}: no pass drafted a token; use longer prompts")


def describe(a: Response, b: Response, place: int) -> str:
    head = f"request {a.request.id} token {place}"
    if place >= min(len(a.token_ids), len(b.token_ids)):
        return f"{head}: lengths {len(a.token_ids)} and {len(b.token_ids)}"
    return f"{head}: {a.token_ids[place]} and {b.token_ids[place]}"


class _Booked(Session):
    """A session that passes the statistics of each of its rollouts to `book`."""

    book: Callable[[RolloutStats], None]

    def roll_out(self, requests: Sequence[Request], **rest: Any) -> list[Response]:
        try:
            return super().roll_out(requests, **rest)
        finally:
            self.book(self.engine.stats)


@dataclass
class _Fixed:
    """Replaces the bandit: one strategy, or a random one of the menu at every pass."""

    strategy: Strategy | None
    menu: Sequence[Strategy]
    generator: random.Random

    @property
    def horizon(self) -> int:
        return UNDECIDED if self.strategy else 1

    def choose(
        self, batch: int, usable: Callable[[Strategy], bool], step_s: StepSeconds
    ) -> Strategy:
        strategy = self.strategy or self.generator.choice(list(self.menu))
        return strategy if usable(strategy) else OFF

    def record(self, *_: float) -> None:
        pass

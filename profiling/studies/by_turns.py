"""The same requests in our engine and in others, alternately: times, accept lengths, tokens."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from driver.rollout.request import Request, SamplingParams, request_id
from driver.session.parts import Rollout
from profiling.peers.vllm import Vllm
from profiling.rig.bench import Bench
from profiling.rig.subjects import fix_bandit

ROUNDS = 3
LEARNING = ("ucb", "beg")


@dataclass(frozen=True)
class Batch:
    """Requests that both engines get."""

    prompts: list[tuple[int, ...]]
    limits: list[int]
    temperature: float = 1.0
    stops: tuple[int, ...] = ()
    noise: int = 0  # of our engine; vLLM has other noise in each call

    def cut(self, limit: int) -> Batch:
        return replace(self, limits=[min(limit, own) for own in self.limits])

    def requests(self) -> list[Request]:
        """For our engine; equal prompts are a group."""
        groups = {ids: number for number, ids in enumerate(dict.fromkeys(self.prompts))}
        params = SamplingParams(self.temperature, stop_ids=self.stops)
        return [
            Request(
                request_id("eval", self.noise, f"peers/{i}", 0),
                groups[ids],
                ids,
                replace(params, max_new_tokens=limit),
            )
            for i, (ids, limit) in enumerate(zip(self.prompts, self.limits, strict=True))
        ]


@dataclass(frozen=True)
class Made:
    seconds: float
    lengths: list[int]
    accept_length: float = 1.0
    tokens: tuple[tuple[int, ...], ...] = ()

    @property
    def tokens_per_s(self) -> float:
        return sum(self.lengths) / self.seconds


Arm = Callable[[Batch], Made]


def ours(rollout: Rollout, policy: str) -> Arm:
    """Our engine with a policy of the bandit. One that learns keeps its state."""
    states: list[Any] = []

    def generate(batch: Batch) -> Made:
        bandit = fix_bandit(rollout, policy=policy)
        if states:
            bandit.load_state_dict(states[0])
        engine = rollout.engine
        engine.forget()
        requests = batch.requests()
        begin = time.perf_counter()
        responses = engine.generate(requests, record=False)
        seconds = time.perf_counter() - begin
        if policy in LEARNING:
            states[:] = [bandit.state_dict()]
        tokens = tuple(tuple(response.token_ids) for response in responses)
        return Made(seconds, [*map(len, tokens)], engine.stats.accept_length or 1.0, tokens)

    return generate


def theirs(engine: Vllm, *, counted: bool = False, tokens: bool = False) -> Arm:
    """A vLLM engine; `counted`: with accept lengths, which cost it time."""

    def generate(batch: Batch) -> Made:
        made = engine.generate(
            batch.prompts,
            batch.limits,
            temperature=batch.temperature,
            stops=batch.stops,
            counted=counted,
            tokens=tokens,
        )
        ids = tuple(map(tuple, made.get("tokens", ())))
        return Made(made["seconds"], made["lengths"], made.get("accept_length", 1.0), ids)

    return generate


def median_round(arm: Arm, batch: Batch) -> Made:
    """The round of median speed, each with other noise than a rollout of `batch` itself."""
    rounds = [arm(replace(batch, noise=index + 1)) for index in range(ROUNDS)]
    return sorted(rounds, key=lambda made: made.tokens_per_s)[ROUNDS // 2]


@dataclass(frozen=True)
class Speed:
    tokens_per_s: float
    accept_length: float
    spread: float


def speeds(arms: Mapping[str, Arm], counted: Mapping[str, Arm], batch: Batch) -> dict[str, Speed]:
    """Tokens a second after the first token; `counted` run once before, for accept lengths."""
    before = {name: arm(batch) for name, arm in counted.items()}
    for name, made in before.items():
        if made.lengths != batch.limits:
            raise RuntimeError(f"{name}: responses end before their limits")
    whole, first = defaultdict(list), defaultdict(list)
    for index in range(ROUNDS):
        for name in arms if index % 2 == 0 else reversed(list(arms)):
            first[name].append(arms[name](batch.cut(1)).seconds)
            whole[name].append(arms[name](batch).seconds)
    out, tokens = {}, sum(batch.limits) - len(batch.limits)
    for name in arms:
        seconds = min(whole[name]) - min(first[name])  # what else the host does only adds time
        spread = (max(whole[name]) - min(whole[name])) / min(whole[name])
        out[name] = Speed(tokens / seconds, before[name].accept_length, spread)
    return out


def compare(
    bench: Bench,
    case: str,
    found: Mapping[str, Speed],
    own: Sequence[str],
    peer: Sequence[str],
    **more: Any,
) -> str:
    """A row for each arm, and one for our best over vLLM's best, whose name is returned."""
    for name in (*own, *peer):
        speed = found[name]
        bench.add_row(
            f"{case}, {name}",
            1e6 / speed.tokens_per_s,
            tokens_per_s=round(speed.tokens_per_s, 1),
            accept_length=round(speed.accept_length, 3),
            spread=round(speed.spread, 3),
        )
    best, other = (max(names, key=lambda n: found[n].tokens_per_s) for names in (own, peer))
    bench.add_row(
        case,
        1e6 / found[best].tokens_per_s,
        ours=best,
        tokens_per_s=round(found[best].tokens_per_s, 1),
        vllm=other,
        vllm_tokens_per_s=round(found[other].tokens_per_s, 1),
        over_vllm=round(found[best].tokens_per_s / found[other].tokens_per_s, 3),
        **more,
    )
    return other


def versus(bench: Bench, case: str, own: Made, peer: Mapping[str, Made]) -> None:
    """A row of ours over vLLM's best, by tokens a second: responses of a step differ."""
    other = max(peer, key=lambda n: peer[n].tokens_per_s)
    bench.add_row(
        case,
        1e6 * own.seconds,
        ours="bandit",
        tokens_per_s=round(own.tokens_per_s, 1),
        accept_length=round(own.accept_length, 3),
        vllm=other,
        vllm_tokens_per_s=round(peer[other].tokens_per_s, 1),
        vllm_s=round(peer[other].seconds, 3),
        over_vllm=round(own.tokens_per_s / peer[other].tokens_per_s, 3),
    )

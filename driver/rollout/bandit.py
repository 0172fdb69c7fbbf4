"""Which strategy a batch of a given size runs: a bandit a bucket, epsilon-greedy or by UCB."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

from ..config.sections import BanditConfig
from ..config.strategy import OFF, Strategy

UNDECIDED = 1 << 20  # passes, where no window is open
UCB_WIDTH = 0.1  # rewards of one arm vary by about a tenth
NEAR = 0.75  # of the best value: an arm below it is tried again by a second stroke of luck only
KNOWN = 4  # rewards after which the best arm runs for two windows at once
ELSEWHERE = 0.03  # what a window of the next bucket counts for, of the one after that its square
HALF_LIFE = 100  # windows of whatever arm and bucket: two or three rollouts


class Seen(NamedTuple):
    """Sums over an arm's windows in a bucket as they were when the last of them closed."""

    closed: int = 0  # windows of whatever arm and bucket by then
    weight: float = 0.0
    accept: float = 0.0  # weight times tokens that a request emits in a pass
    pass_s: float = 0.0  # weight times seconds of a pass of a full bucket


class Bandit:
    """Chooses by batch bucket among `off` and the speculative arms.

    The reward of a window of passes is emitted tokens over elapsed seconds. A graph takes as long
    for a part of its bucket as for all of it, so with graphs it is what the full bucket would have
    given: else the arms that run first, on more requests, look better. An arm's value is what a
    request of its windows emits in a pass over how long its pass takes. The latter is the bucket's
    own, and hardly changes. The former depends on what the requests of the day say, which windows
    of the same rollout in the next bucket know better than those of the same bucket long ago: it is
    a mean in which windows count for less the older they are and the further away their bucket.
    Where an arm has no window in the bucket, its step time is that of the capture of its graph;
    where there is none, or it has no windows at all, it is tried first. With probability epsilon
    (`beg`) a random arm runs, else the one of highest value; `ucb` adds to the value what is not
    yet known of it. `map` and `static` choose by batch alone. Batches above `spec_max_batch` always
    run `off`.

    Random arms are those whose value is near the best; of all arms with probability epsilon once
    more, since an arm that was hopeless gets better as the drafter learns. The best arm, once it is
    known, runs for two windows at once: it wakes the host less often (docs/notes/rollout.md).

    Args:
        arms: strategies, `off` among them.
        config: buckets, epsilon, windows, policy.
        spec_max_batch: largest batch that may speculate.
        seed: of the exploration.

    Source: "Taming the Long Tail" (ASPLOS'26), section on the adaptive rollout engine; Auer et al.,
        "Finite-time Analysis of the Multiarmed Bandit Problem" (2002), for UCB.
    """

    def __init__(
        self, arms: Sequence[Strategy], config: BanditConfig, spec_max_batch: int, seed: int = 0
    ) -> None:
        self.arms = list(arms)
        self.config = config
        self.spec_max_batch = spec_max_batch
        self.static = Strategy.parse(config.static)
        self.map = config.strategy_map()
        # Seconds of a pass for (batch, arm), where a graph was timed: the engine sets it.
        self.step_s: Callable[[int, Strategy], float | None] = lambda batch, arm: None
        self._random = random.Random(seed)
        self._rewards: dict[tuple[int, Strategy], deque[float]] = defaultdict(
            lambda: deque(maxlen=config.window)
        )
        self._seen: dict[tuple[int, Strategy], Seen] = {}
        self._closed = 0  # windows
        self._pulls: dict[tuple[int, Strategy], int] = defaultdict(int)
        self._window: tuple[int, Strategy] | None = None
        self._passes = self._request_passes = self._emitted = self._batch = 0
        self._elapsed = 0.0
        self._length = config.window_passes  # of the open window

    def bucket(self, batch: int) -> int:
        """The smallest bucket that holds `batch`; larger batches share the largest."""
        buckets = self.config.buckets
        return buckets[min(bisect_left(buckets, batch), len(buckets) - 1)]

    def choose(self, batch: int, usable: Callable[[Strategy], bool]) -> Strategy:
        """The strategy of the next pass.

        Args:
            batch: running requests.
            usable: whether an arm can run now (learned and hybrid arms need a trained drafter).
        """
        self._batch = batch
        if batch > self.spec_max_batch:
            self._close_window()
            return OFF
        if self.config.policy in ("static", "map"):
            arm = self.static if self.config.policy == "static" else self._mapped(batch)
            return arm if usable(arm) else OFF
        bucket = self.bucket(batch)
        if self._window is not None:
            same = self._window[0] == bucket and usable(self._window[1])
            if same and self._passes < self._length:
                return self._window[1]
            self._close_window()
        arms = [arm for arm in self.arms if usable(arm)]
        arm = self._pick(bucket, arms)
        self._window = (bucket, arm)
        return arm

    def _mapped(self, batch: int) -> Strategy:
        return next((arm for most, arm in self.map.items() if batch <= most), OFF)

    def _pick(self, bucket: int, arms: list[Strategy]) -> Strategy:
        values = {arm: self._value(bucket, arm) for arm in arms}
        self._length = self.config.window_passes
        unknown = [arm for arm in arms if values[arm] is None]
        if unknown:
            return unknown[0]
        best = max(arms, key=lambda arm: values[arm] or 0.0)
        arm = self._tried(bucket, arms, values, best)
        if arm == best and len(self._rewards[bucket, best]) >= KNOWN:
            self._length *= 2
        return arm

    def _tried(
        self,
        bucket: int,
        arms: list[Strategy],
        values: dict[Strategy, float | None],
        best: Strategy,
    ) -> Strategy:
        """The best arm or another of which more should be known."""
        if self.config.policy == "ucb":
            return max(arms, key=lambda arm: self._bound(bucket, arm, values))
        epsilon, draw = self.config.epsilon, self._random
        if draw.random() >= epsilon:
            return best
        bound = 0.0 if draw.random() < epsilon else NEAR * (values[best] or 0.0)
        return draw.choice([arm for arm in arms if (values[arm] or 0.0) >= bound])

    def _value(self, bucket: int, arm: Strategy) -> float | None:
        """Tokens a second that the arm is expected to give, None where nothing says so."""
        seen, accept = self._seen.get((bucket, arm)), self._accept(bucket, arm)
        pass_s = seen.pass_s / seen.weight if seen else self._timed(bucket, arm)
        return None if pass_s is None or accept is None else accept * self._full(bucket) / pass_s

    def _accept(self, bucket: int, arm: Strategy) -> float | None:
        """Tokens that a request is expected to emit in a pass."""
        weight = accept = 0.0
        first = -self.config.buckets.index(bucket)
        for distance, other in enumerate(self.config.buckets, first):
            if seen := self._seen.get((other, arm)):
                share = ELSEWHERE ** abs(distance) * self._left(seen)
                weight += share * seen.weight
                accept += share * seen.accept
        if weight > 0:
            return accept / weight
        return 1.0 if arm == OFF else None

    def _left(self, seen: Seen) -> float:
        """What is left of a weight by now."""
        return 0.5 ** ((self._closed - seen.closed) / HALF_LIFE)

    def _full(self, bucket: int) -> int:
        return min(bucket, self.spec_max_batch)

    def _timed(self, bucket: int, arm: Strategy) -> float | None:
        """Seconds of the arm's graph, which takes as long for a part of its bucket."""
        return self.step_s(self._full(bucket), arm)

    def _bound(self, bucket: int, arm: Strategy, values: dict[Strategy, float | None]) -> float:
        """Upper confidence bound, in units of the best value; only remembered windows count."""
        best = max(value or 0.0 for value in values.values()) or 1.0
        tries = {a: 1 + len(self._rewards[bucket, a]) for a in values}
        width = math.sqrt(2.0 * math.log(sum(tries.values())) / tries[arm])
        return (values[arm] or 0.0) / best + UCB_WIDTH * width

    @property
    def horizon(self) -> int:
        """Passes until `choose` may say something else for the same batch."""
        if self._window is None:
            return UNDECIDED
        return max(1, self._length - self._passes)

    def record(
        self, emitted: int, elapsed_s: float, passes: int = 1, request_passes: int = 0
    ) -> None:
        """Adds passes of the strategy last chosen to its window.

        Args:
            emitted: tokens.
            elapsed_s: seconds.
            passes: that they took.
            request_passes: one for each request in each of them; 0 = nobody ended.
        """
        if self._window is not None:
            self._passes += passes
            self._request_passes += request_passes or self._batch * passes
            self._emitted += emitted
            self._elapsed += elapsed_s

    def _close_window(self) -> None:
        # A window cut short by a change of bucket still says something; one pass says too little.
        if self._window is not None and self._passes >= min(2, self.config.window_passes):
            (bucket, arm), full = self._window, self._full(self._window[0])
            alike = self._timed(bucket, arm) is not None
            passes = self._passes if alike else self._request_passes / full
            accept, pass_s = self._emitted / self._request_passes, self._elapsed / passes
            pass_s = max(pass_s, 1e-9)
            self._rewards[self._window].append(accept * full / pass_s)
            self._pulls[self._window] += 1
            self._closed += 1  # the arm's own windows age by it too
            seen = self._seen.get(self._window, Seen(self._closed))
            share, left = min(1.0, self._passes / self.config.window_passes), self._left(seen)
            self._seen[self._window] = Seen(
                self._closed,
                left * seen.weight + share,
                left * seen.accept + share * accept,
                left * seen.pass_s + share * pass_s,
            )
        self._window = None
        self._passes = self._request_passes = self._emitted = 0
        self._elapsed = 0.0

    def metrics(self) -> dict[str, float]:
        """`spec/arm/<bucket>/<strategy>/{pulls,reward}`: windows closed, median tokens/s."""
        out: dict[str, float] = {}
        for (bucket, arm), pulls in sorted(self._pulls.items()):
            rewards = self._rewards[bucket, arm]
            out[f"spec/arm/{bucket}/{arm}/pulls"] = pulls
            out[f"spec/arm/{bucket}/{arm}/reward"] = median(rewards) if rewards else 0.0
        return out

    def state_dict(self) -> dict[str, Any]:
        return {
            "rewards": {f"{b}/{arm}": list(r) for (b, arm), r in self._rewards.items()},
            "seen": {f"{b}/{arm}": list(seen) for (b, arm), seen in self._seen.items()},
            "closed": self._closed,
            "pulls": {f"{b}/{arm}": n for (b, arm), n in self._pulls.items()},
            "random": self._random.getstate(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what was learned; arms that no longer exist are left out."""

        def keys(texts: dict[str, Any]) -> list[tuple[str, tuple[int, Strategy]]]:
            split = [(text, text.partition("/")) for text in texts]
            parsed = [(text, (int(b), Strategy.parse(arm))) for text, (b, _, arm) in split]
            return [(text, key) for text, key in parsed if key[1] in self.arms]

        for text, key in keys(state["rewards"]):
            self._rewards[key].extend(state["rewards"][text])
        for text, key in keys(state["seen"]):
            self._seen[key] = Seen(*state["seen"][text])
        self._closed = state["closed"]
        for text, key in keys(state["pulls"]):
            self._pulls[key] = state["pulls"][text]
        version, internal, gauss = state["random"]
        self._random.setstate((version, tuple(internal), gauss))

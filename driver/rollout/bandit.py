"""Chooses a strategy by batch size: one bandit per bucket, epsilon-greedy or UCB."""

import math
import random
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from ..config.sections import BanditConfig
from ..config.strategy import OFF, Strategy

UNDECIDED = 1 << 20  # horizon in passes while no window is open
UCB_WIDTH = 0.1  # rewards of one arm vary by about a tenth
EXPLORED_SHARE = 0.75  # of the best value: arms below it are explored with epsilon squared only
KEPT_REWARDS = 16  # of each arm and bucket
KNOWN_REWARDS = 4  # after which the best arm runs for two windows at once
BUCKET_DECAY = 0.03  # weight of a window of the next bucket; of the one after that its square
HALF_LIFE = 100  # windows of any arm and bucket: two or three rollouts

StepSeconds = Callable[[int, Strategy], float | None]  # of a pass, by batch and arm; None: no graph


class ArmSums(NamedTuple):
    """Decayed sums over an arm's windows in a bucket, as of the last of them."""

    closed: int = 0  # windows of any arm and bucket closed by then
    weight: float = 0.0
    accept: float = 0.0  # weight times tokens of a request in a pass
    pass_s: float = 0.0  # weight times seconds of a pass of a full bucket


class Bandit:
    """Chooses by batch bucket among the arms: `off` and the speculative strategies.

    A choice holds for a window of `window_passes` passes, for two windows if the best arm is known
    well (docs/notes/rollout.md). Batches above `spec_max_batch` always run `off`.

    The value of an arm is the tokens per second of a full bucket: bucket size * accept length /
    seconds of a pass. (A graph takes as long for a part of its bucket as for all of it, so rates of
    partial buckets would favour arms that ran on more requests.) The seconds are a mean over the
    arm's windows in the bucket; before the first window, the time measured when its graph was
    captured. The accept length is a mean over all buckets, whose weights decay with age and with
    the distance between buckets.

    An arm is tried first if its seconds or its accept length are unknown. Then `beg` runs the best
    arm; with probability epsilon a random one of value close to the best; with probability epsilon
    squared any, since a poor arm may improve as the drafter learns. `ucb` runs the arm with the
    highest upper confidence bound. A fixed policy chooses by batch size alone.

    Source: "Taming the Long Tail" (ASPLOS'26), section on the adaptive rollout engine; Auer et al.,
        "Finite-time Analysis of the Multiarmed Bandit Problem" (2002), for UCB.
    """

    def __init__(
        self, arms: Sequence[Strategy], config: BanditConfig, spec_max_batch: int, seed: int = 0
    ) -> None:
        self.arms = list(arms)
        self.config = config
        self.spec_max_batch = spec_max_batch
        self.fixed = config.fixed()
        self._random = random.Random(seed)
        self._rewards: dict[tuple[int, Strategy], deque[float]] = defaultdict(
            lambda: deque(maxlen=KEPT_REWARDS)
        )
        self._sums: dict[tuple[int, Strategy], ArmSums] = {}
        self._closed = 0  # windows
        self._pulls = Counter[tuple[int, Strategy]]()
        self._window: tuple[int, Strategy] | None = None
        self._passes = self._request_passes = self._emitted = 0
        self._elapsed = 0.0  # seconds
        self._length = config.window_passes  # of the open window

    def bucket(self, batch: int) -> int:
        """The smallest bucket that holds `batch`; larger batches share the largest."""
        buckets = self.config.buckets
        return buckets[min(bisect_left(buckets, batch), len(buckets) - 1)]

    def choose(
        self, batch: int, usable: Callable[[Strategy], bool], step_s: StepSeconds
    ) -> Strategy:
        """The strategy of the next pass; `step_s` gives the seconds of a pass of an arm's graph."""
        if batch > self.spec_max_batch:
            self._close_window(step_s)
            return OFF
        if self.fixed is not None:
            arm = next((arm for most, arm in self.fixed.items() if batch <= most), OFF)
            return arm if usable(arm) else OFF
        bucket = self.bucket(batch)
        if self._window is not None:
            same = self._window[0] == bucket and usable(self._window[1])
            if same and self._passes < self._length:
                return self._window[1]
            self._close_window(step_s)
        arms = [arm for arm in self.arms if usable(arm)]
        arm = self._pick(bucket, arms, step_s)
        self._window = (bucket, arm)
        return arm

    def _pick(self, bucket: int, arms: list[Strategy], step_s: StepSeconds) -> Strategy:
        self._length = self.config.window_passes
        values: dict[Strategy, float] = {}
        for arm in arms:
            if self._never_pays(bucket, arm, step_s):
                continue
            value = self._value(bucket, arm, step_s)
            if value is None:  # unknown: it is tried first
                return arm
            values[arm] = value
        best = max(values, key=lambda arm: values[arm])
        arm = self._explored(bucket, values, best)
        if arm == best and len(self._rewards[bucket, best]) >= KNOWN_REWARDS:
            self._length *= 2
        return arm

    def _explored(self, bucket: int, values: dict[Strategy, float], best: Strategy) -> Strategy:
        if self.config.policy == "ucb":
            tries = {arm: 1 + len(self._rewards[bucket, arm]) for arm in values}
            log = 2.0 * math.log(sum(tries.values()))
            scale = values[best] or 1.0
            bounds = {a: values[a] / scale + UCB_WIDTH * math.sqrt(log / tries[a]) for a in values}
            return max(bounds, key=lambda arm: bounds[arm])
        epsilon, draw = self.config.epsilon, self._random
        if draw.random() >= epsilon:
            return best
        bound = 0.0 if draw.random() < epsilon else EXPLORED_SHARE * values[best]
        return draw.choice([arm for arm in values if values[arm] >= bound])

    def _value(self, bucket: int, arm: Strategy, step_s: StepSeconds) -> float | None:
        """Expected tokens per second; None: unknown."""
        sums, accept = self._sums.get((bucket, arm)), self._accept(bucket, arm)
        pass_s = sums.pass_s / sums.weight if sums else step_s(self._full(bucket), arm)
        return None if pass_s is None or accept is None else accept * self._full(bucket) / pass_s

    def _never_pays(self, bucket: int, arm: Strategy, step_s: StepSeconds) -> bool:
        """Whether plain decoding is faster even if every draft is accepted, as for wide trees."""
        own, plain = (step_s(self._full(bucket), each) for each in (arm, OFF))
        return arm != OFF and bool(own and plain and own >= (arm.levels + 1) * plain)

    def _accept(self, bucket: int, arm: Strategy) -> float | None:
        """Expected tokens of a request in a pass; None: unknown."""
        weight = accept = 0.0
        first = -self.config.buckets.index(bucket)
        for distance, other in enumerate(self.config.buckets, first):
            if sums := self._sums.get((other, arm)):
                share = BUCKET_DECAY ** abs(distance) * self._decay(sums)
                weight += share * sums.weight
                accept += share * sums.accept
        if weight > 0:
            return accept / weight
        return 1.0 if arm == OFF else None

    def _decay(self, sums: ArmSums) -> float:
        return 0.5 ** ((self._closed - sums.closed) / HALF_LIFE)

    def _full(self, bucket: int) -> int:
        return min(bucket, self.spec_max_batch)

    @property
    def horizon(self) -> int:
        """Passes until `choose` may return another strategy for the same batch."""
        if self._window is None:
            return UNDECIDED
        return max(1, self._length - self._passes)

    def record(self, emitted: int, elapsed_s: float, passes: int, request_passes: int) -> None:
        """Adds passes of the strategy last chosen; `request_passes` sums their requests."""
        if self._window is not None:
            self._passes += passes
            self._request_passes += request_passes
            self._emitted += emitted
            self._elapsed += elapsed_s

    def _close_window(self, step_s: StepSeconds) -> None:
        # A window cut short by a change of bucket counts, unless it has only one pass.
        if self._window is not None and self._passes >= min(2, self.config.window_passes):
            bucket, arm = self._window
            full = self._full(bucket)
            # A graph takes as long for a part of its bucket as for all of it.
            has_graph = step_s(full, arm) is not None
            passes = self._passes if has_graph else self._request_passes / full
            accept, pass_s = self._emitted / self._request_passes, self._elapsed / passes
            pass_s = max(pass_s, 1e-9)
            self._rewards[self._window].append(accept * full / pass_s)
            self._pulls[self._window] += 1
            self._closed += 1  # before the decay, so that the arm's own windows age too
            sums = self._sums.get(self._window, ArmSums(self._closed))
            share, decay = min(1.0, self._passes / self.config.window_passes), self._decay(sums)
            self._sums[self._window] = ArmSums(
                self._closed,
                decay * sums.weight + share,
                decay * sums.accept + share * accept,
                decay * sums.pass_s + share * pass_s,
            )
        self._window = None
        self._passes = self._request_passes = self._emitted = 0
        self._elapsed = 0.0

    def metrics(self) -> dict[str, float]:
        """`spec/arm/<bucket>/<strategy>/{pulls,reward}`: closed windows, median tokens/s."""
        out: dict[str, float] = {}
        for (bucket, arm), pulls in sorted(self._pulls.items()):
            rewards = self._rewards[bucket, arm]
            out[f"spec/arm/{bucket}/{arm}/pulls"] = pulls
            out[f"spec/arm/{bucket}/{arm}/reward"] = median(rewards) if rewards else 0.0
        return out

    def state_dict(self) -> dict[str, Any]:
        return {
            "rewards": {f"{b}/{arm}": list(r) for (b, arm), r in self._rewards.items()},
            "seen": {f"{b}/{arm}": list(sums) for (b, arm), sums in self._sums.items()},
            "closed": self._closed,
            "pulls": {f"{b}/{arm}": n for (b, arm), n in self._pulls.items()},
            "random": self._random.getstate(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state; arms that no longer exist are ignored."""

        def of_arms(values: dict[str, Any]) -> Iterator[tuple[tuple[int, Strategy], Any]]:
            for text, value in values.items():
                bucket, _, arm = text.partition("/")
                key = int(bucket), Strategy.parse(arm)
                if key[1] in self.arms:
                    yield key, value

        for key, rewards in of_arms(state["rewards"]):
            self._rewards[key].extend(rewards)
        for key, sums in of_arms(state["seen"]):
            self._sums[key] = ArmSums(*sums)
        self._closed = state["closed"]
        self._pulls = Counter(dict(of_arms(state["pulls"])))
        version, internal, gauss = state["random"]
        self._random.setstate((version, tuple(internal), gauss))

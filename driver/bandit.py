"""Bucketed-Epsilon-Greedy bandit: which strategy a batch of a given size runs."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from driver.sections import BanditConfig
from driver.strategy import OFF, Strategy

UNDECIDED = 1 << 20  # passes, where no window is open
UCB_WIDTH = 0.1  # rewards of one arm vary by about a tenth
NEAR = 0.75  # of the best value: an arm below it is tried again by a second stroke of luck only
KNOWN = 4  # rewards after which the best arm runs for two windows at once


class Bandit:
    """Chooses by batch bucket among `off` and the speculative arms.

    The reward of a window of passes is emitted tokens over elapsed seconds. A graph takes as long
    for a part of its bucket as for all of it, so with graphs it is what the full bucket would have
    given: else the arms that run first, on more requests, look better. An arm's value is the median
    of its last rewards in the bucket. Where it has none there, but its step time is known (from the
    capture of its graph) and how much it emits too (from any bucket, for `off` always), these give
    its value; else it is tried first. With probability epsilon (`beg`) a random arm runs, else the
    one of highest value; `ucb` adds to the value what is not yet known of it. `map` and `static`
    choose by batch alone. Batches above `spec_max_batch` always run `off`.

    Random arms are those whose value is near the best; of all arms with probability epsilon once
    more, since an arm that was hopeless gets better as the drafter learns. The best arm, once it is
    known, runs for two windows at once: it wakes the host less often (profiling/README.md).

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
        # Emitted tokens of a request in a pass, of an arm's last windows in whatever bucket.
        self._accepts: dict[Strategy, deque[float]] = defaultdict(
            lambda: deque(maxlen=config.window)
        )
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
        if self.config.policy == "ucb":
            return max(arms, key=lambda arm: self._bound(bucket, arm, values))
        best = max(arms, key=lambda arm: values[arm] or 0.0)
        epsilon, draw = self.config.epsilon, self._random
        if draw.random() < epsilon:
            bound = 0.0 if draw.random() < epsilon else NEAR * (values[best] or 0.0)
            return draw.choice([arm for arm in arms if (values[arm] or 0.0) >= bound])
        if len(self._rewards[bucket, best]) >= KNOWN:
            self._length *= 2
        return best

    def _value(self, bucket: int, arm: Strategy) -> float | None:
        """Tokens a second that the arm is expected to give, None where nothing says so."""
        if rewards := self._rewards[bucket, arm]:
            return median(rewards)
        step_s = self.step_s(min(bucket, self.spec_max_batch), arm)
        if step_s is None or (arm != OFF and not self._accepts[arm]):
            return None
        accept = 1.0 if arm == OFF else median(self._accepts[arm])
        return accept * bucket / step_s

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
            bucket, arm = self._window
            reward = self._emitted / max(self._elapsed, 1e-9)
            full = min(bucket, self.spec_max_batch)
            if self.step_s(full, arm) is not None:
                reward *= full * self._passes / self._request_passes
            self._rewards[self._window].append(reward)
            self._accepts[arm].append(self._emitted / self._request_passes)
            self._pulls[self._window] += 1
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
            "accepts": {str(arm): list(a) for arm, a in self._accepts.items()},
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
        for text, accepts in state["accepts"].items():
            if Strategy.parse(text) in self.arms:
                self._accepts[Strategy.parse(text)].extend(accepts)
        for text, key in keys(state["pulls"]):
            self._pulls[key] = state["pulls"][text]
        version, internal, gauss = state["random"]
        self._random.setstate((version, tuple(internal), gauss))

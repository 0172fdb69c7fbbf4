"""Decides from measurements whether training the drafter pays."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from statistics import fmean, stdev
from typing import Any

from ..rollout.stats import RolloutStats

WINDOW = 3  # rollouts at least whose mean is compared: prompts change the accept length by 2 to 4 %
PAYBACK = 10  # rollouts in which training must save its cost: then the policy has changed
LEARNS = 0.01  # growth of the accept length in a rollout from which on training always continues


@dataclass(frozen=True)
class Measured:
    """A rollout's passes with learned drafts."""

    passes: Mapping[str, float]  # request-passes by arm
    emitted: Mapping[str, float]  # their tokens by arm
    seconds: float  # of the passes
    cost_s: float  # by which training has delayed the run since the rollout before
    steps: int = 0  # micro-steps since then
    trained: int = 0  # micro-steps of the drafter in all, its warm start included

    @property
    def expected(self) -> float:
        """Expected growth of the accept length, logarithmic in steps (docs/notes/drafter.md)."""
        if not self.steps:
            return math.inf
        before = max(2, self.trained - self.steps)
        return math.log(self.trained) / math.log(before) - 1 if self.trained > 2 else math.inf


def change(before: Sequence[Measured], after: Sequence[Measured]) -> float | None:
    """Relative change of the accept length, a mean over arms by their passes in `after`."""

    def accept(window: Sequence[Measured]) -> dict[str, float]:
        arms = {arm for m in window for arm in m.passes}
        sums = {arm: sum(m.passes.get(arm, 0.0) for m in window) for arm in arms}
        tokens = {arm: sum(m.emitted.get(arm, 0.0) for m in window) for arm in arms}
        return {arm: tokens[arm] / sums[arm] for arm in arms if sums[arm]}

    old, new = accept(before), accept(after)
    weights = {arm: sum(m.passes.get(arm, 0.0) for m in after) for arm in old.keys() & new.keys()}
    if not weights:
        return None
    total = sum(weight * (new[arm] / old[arm] - 1) for arm, weight in weights.items())
    return total / sum(weights.values())


def error(before: Sequence[Measured], after: Sequence[Measured]) -> float:
    """Standard error of `change`, from its spread over single rollouts."""
    windows = [[change(before, [m]) for m in window] for window in (before, after)]
    known = [[x for x in window if x is not None] for window in windows]
    return math.hypot(*(stdev(window) / math.sqrt(len(window)) for window in known if window[1:]))


def decide(trains: bool, history: Sequence[Measured]) -> str:
    """Why training pauses or goes on, by what it brings and costs; "" = as before.

    If the accept length is higher by x %, about x % of the passes' seconds are saved in each of the
    next `PAYBACK` rollouts. While the drafter trains, x is the growth from window to window, or the
    expected growth if that is higher: few passes measure little. While training pauses, x is the
    loss since the first rollouts of `history`; one within two standard errors is due to prompts.
    Training that resumes lasts `2 * WINDOW` rollouts at least, so it must save the cost of them
    all. If no arm ran in both windows, x is the expected growth or, at rest, `LEARNS` for each of
    them. `history` has the rollouts since training began, or the last `2 * WINDOW` before it paused
    and those since.
    """
    if len(history) < 2 * WINDOW:
        return ""
    # Twice as many rollouts measure a growth three times as well.
    size = min(len(history) // 2, 2 * WINDOW)
    before = history[-2 * size : -size] if trains else history[:size]
    after = history[-size:]
    moved, last = change(before, after), history[-1]
    seconds, costly = fmean(m.seconds for m in after), after
    if trains:
        if moved is None:  # after a fall the drafter learns anew
            last = replace(last, trained=sum(m.steps for m in history))
        rate = max((moved or 0.0) / size, last.expected if last.steps else 0.0)
    else:
        # A drafter that has become poor hardly runs: what it saved before counts.
        seconds, costly = max(seconds, fmean(m.seconds for m in before)), before
        rate = 2 * WINDOW * LEARNS
        if moved is not None:
            rate = -moved if -moved > 2 * error(before, after) else 0.0
    cost_s = fmean(m.cost_s for m in [m for m in costly if m.steps] or costly)
    cost_s *= 1 if trains else 2 * WINDOW
    worth_s = PAYBACK * rate * seconds
    numbers = (
        f"worth {1e3 * worth_s:.0f} ms in {PAYBACK} rollouts; training costs {1e3 * cost_s:.0f} ms"
        f" {'a rollout' if trains else f'in {2 * WINDOW}'}"
    )
    if trains and worth_s < cost_s and rate < LEARNS:
        return f"training rests: the accept length grows {rate:.1%} a rollout, {numbers}"
    if not trains and worth_s > cost_s:
        fell = "has no comparison" if moved is None else f"fell {rate:.1%}"
        return f"training goes on: the accept length {fell} at rest, {numbers}"
    return ""


def at_first(last: Measured) -> str:
    """Why training pauses before there is a second window, by the growth expected; "" = it goes on.

    After a long warm start training rests as soon as the first steps have shown their cost.
    """
    worth_s = PAYBACK * last.expected * last.seconds
    if worth_s >= last.cost_s or last.expected >= LEARNS:
        return ""
    return (
        f"training rests: of {last.trained} micro-steps the last {last.steps} let the accept length"
        f" grow by about {last.expected:.2%}, worth {1e3 * worth_s:.0f} ms in {PAYBACK} rollouts;"
        f" training costs {1e3 * last.cost_s:.0f} ms a rollout"
    )


class Payoff:
    def __init__(self) -> None:
        self.trains = True
        self.delay_s = 0.0  # by which training has delayed the run since the last decision
        self.weighed = 0  # micro-steps until then
        self._changed = False
        self._history: list[Measured] = []

    def weigh(self, stats: RolloutStats, trained: int) -> str:
        """Decides after a rollout; `trained` micro-steps were made in all. See `add`."""
        learned = stats.learned_passes, stats.learned_emitted, stats.learned_s
        made, self.weighed = trained - self.weighed, trained
        cost_s, self.delay_s = self.delay_s, 0.0
        return self.add(Measured(*learned, cost_s, made, trained))

    def add(self, measured: Measured) -> str:
        """Adds a rollout; returns the reason if the decision changes, else an empty text."""
        self._history.append(measured)
        early = not self._changed and len(self._history) < 2 * WINDOW
        reason = at_first(measured) if early else decide(self.trains, self._history)
        if reason:
            self.trains, self._changed = not self.trains, True
            self._history = [] if self.trains else self._history[-2 * WINDOW :]
        return reason


def delays(method: Callable[..., None]) -> Callable[..., None]:
    """Counts the time of a method of the spot trainer as a cost: the run waits for it.

    Captures do not count, since they are made once.
    """

    @wraps(method)
    def timed(self: Any, *args: Any, **options: Any) -> None:
        begin = time.perf_counter() - self.captured_s
        try:
            method(self, *args, **options)
        finally:
            self.payoff.delay_s += time.perf_counter() - self.captured_s - begin

    return timed

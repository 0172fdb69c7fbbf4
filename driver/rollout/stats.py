"""Statistics of a rollout: counters of its passes and a trace of its active requests."""

from __future__ import annotations

import functools
import operator
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import tlt_ext

from ..config.strategy import OFF

if TYPE_CHECKING:
    from .prefill import Prefill
    from .runner import Burst
    from .scheduler import Scheduler

HARMLESS = tlt_ext.Status.NAN_DRAFT | tlt_ext.Status.BAD_TOKEN  # the draft was ignored


@dataclass
class RolloutStats:
    """Counters of one `generate` call.

    A request-pass is one request in one pass; `accept_length` averages over the request-passes of
    speculative strategies only, the target's own token included.
    """

    target_passes: int = 0
    emitted: int = 0
    prefilled_tokens: int = 0  # rows of prefill
    recomputed_tokens: int = 0  # of them, for requests that had tokens: preempted or resumed
    reprefilled_tokens: int = 0  # of them, neither recomputed nor a prompt's first time
    spec_passes: int = 0
    spec_request_passes: int = 0
    spec_emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    bursts: int = 0
    passes_s: float = 0.0  # of all bursts, by the device's clock for graphs, else by the host's
    switches: int = 0
    switch_s: float = 0.0  # host time of switches, without catching up
    # Of the drafter's missing entries, device time included, and the rest of a prefill before it.
    catchup_s: float = 0.0
    preemptions: int = 0
    flagged: int = 0  # responses whose status word is not 0
    elapsed_s: float = 0.0
    # Of learned drafts, by arm.
    learned_passes: Counter[str] = field(default_factory=Counter)  # request-passes
    learned_emitted: Counter[str] = field(default_factory=Counter)
    learned_s: float = 0.0
    trace: list[tuple[float, int, str]] = field(default_factory=list)  # (seconds, active, arm)

    def add(self, later: RolloutStats) -> None:
        """Adds the counters of a later rollout and appends its trace."""
        self.trace += [(self.elapsed_s + at, active, arm) for at, active, arm in later.trace]
        for item in fields(self):
            if item.name != "trace":
                setattr(self, item.name, getattr(self, item.name) + getattr(later, item.name))

    def add_burst(self, burst: Burst, begin_s: float, trace: bool = True) -> None:
        """Adds a burst that began `begin_s` after the rollout; `trace` adds its course."""
        emitted, active, request_passes = burst.total, burst.active, burst.request_passes
        self.target_passes += burst.passes
        self.bursts += 1
        self.passes_s += burst.elapsed_s
        self.emitted += emitted
        arm = str(burst.strategy)
        if trace:
            begins = [0.0, *burst.ends_s[:-1]]
            self.trace += [
                (begin_s + t, running, arm) for t, running in zip(begins, active, strict=True)
            ]
        if burst.strategy == OFF:
            return
        self.spec_passes += burst.passes
        self.spec_request_passes += request_passes
        self.spec_emitted += emitted
        if burst.strategy.needs_drafter:
            self.learned_passes[arm] += request_passes
            self.learned_emitted[arm] += emitted
            self.learned_s += burst.elapsed_s
        self.drafted += burst.rows - request_passes
        self.accepted += emitted - request_passes

    def close(self, scheduler: Scheduler, prefill: Prefill) -> None:
        """Adds what is known at the end of a rollout; warns of flagged responses."""
        self.preemptions = scheduler.preemptions
        self.prefilled_tokens, self.recomputed_tokens = prefill.rows, prefill.recomputed
        fresh = self.prefilled_tokens - self.recomputed_tokens
        self.reprefilled_tokens = fresh - scheduler.prompt_tokens
        flagged = [status & ~HARMLESS for status in scheduler.statuses if status & ~HARMLESS]
        self.flagged = len(flagged)
        if flagged:
            bits = functools.reduce(operator.or_, flagged)
            names = ", ".join(str(bit.name) for bit in tlt_ext.Status if bit & bits)
            warnings.warn(
                f"{len(flagged)} of {scheduler.num_finished} responses are flagged ({names}): the"
                " target's weights or caches are damaged",
                stacklevel=3,
            )

    @staticmethod
    def side_by_side(parts: Sequence[RolloutStats], own: int) -> RolloutStats:
        """Concurrent rollouts: the sums, the longest time, and the trace of rank `own`."""
        total = RolloutStats()
        for part in parts:
            total.add(part)
        total.elapsed_s = max(part.elapsed_s for part in parts)
        total.trace = list(parts[own].trace)
        return total

    @property
    def accept_length(self) -> float | None:
        """Mean tokens per speculative request-pass; None without speculation."""
        if self.spec_request_passes == 0:
            return None
        return self.spec_emitted / self.spec_request_passes

    @property
    def host_share(self) -> float:
        """Share of the time since the first pass in which no pass ran, on one rank."""
        since = self.elapsed_s - self.trace[0][0]
        return max(0.0, 1.0 - self.passes_s / since)

    def metrics(self) -> dict[str, float]:
        out = {
            "spec/target_passes": self.target_passes,
            "spec/drafted": self.drafted,
            "spec/accepted": self.accepted,
            "spec/switches": self.switches,
            "spec/switch_ms": 1e3 * self.switch_s / max(1, self.switches),
            "spec/catchup_ms": 1e3 * self.catchup_s,
            "spec/reprefilled_tokens": self.reprefilled_tokens,
            "spec/flagged": self.flagged,
        }
        if self.accept_length is not None:
            out["spec/accept_length"] = self.accept_length
        return out

"""What a rollout did: counters of its passes and the record of its tail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from ..config.strategy import OFF

if TYPE_CHECKING:
    from .runner import Burst

QUARTERS = 4


@dataclass
class RolloutStats:
    """Counters of one `generate` call.

    A request-pass is one request in one pass; `accept_length` averages over the request-passes of
    speculative strategies only, the target's own token included.
    """

    target_passes: int = 0
    emitted: int = 0
    prefilled_tokens: int = 0  # rows that went through prefill, for whatever reason
    recomputed_tokens: int = 0  # of them, for requests preempted or taken from other ranks
    reprefilled_tokens: int = 0  # of them, neither that nor a prompt's first time: the gate's share
    spec_passes: int = 0
    spec_request_passes: int = 0
    spec_emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    bursts: int = 0  # stretches of passes without the host
    passes_s: float = 0.0  # of them, by the clock of those who made them
    switches: int = 0
    # The host's part of switching: neither catching up nor what requests that come or end cost.
    switch_s: float = 0.0
    catchup_s: float = 0.0  # of the drafter with what it missed, the device's part included
    preemptions: int = 0
    adopted: int = 0  # requests taken from other ranks
    flagged: int = 0  # responses whose status word was not 0
    elapsed_s: float = 0.0
    trace: list[tuple[float, int, str]] = field(default_factory=list)  # (seconds, active, arm)
    # (request-passes, emitted) of each speculative burst, in their order.
    spec_bursts: list[tuple[int, int]] = field(default_factory=list)

    def add(self, later: RolloutStats) -> None:
        """Adds the counters of a rollout that followed, its trace behind this one's."""
        self.trace += [(self.elapsed_s + at, active, arm) for at, active, arm in later.trace]
        for item in fields(self):
            if item.name != "trace":
                setattr(self, item.name, getattr(self, item.name) + getattr(later, item.name))

    def book(self, burst: Burst, begin_s: float) -> None:
        """Books a burst of passes that began `begin_s` into the rollout."""
        emitted, active, request_passes = burst.total, burst.active, burst.request_passes
        self.target_passes += burst.passes
        self.bursts += 1
        self.passes_s += burst.elapsed_s
        self.emitted += emitted
        begins, arm = [0.0, *burst.ends_s[:-1]], str(burst.strategy)
        self.trace += [
            (begin_s + t, running, arm) for t, running in zip(begins, active, strict=True)
        ]
        if burst.strategy == OFF:
            return
        self.spec_passes += burst.passes
        self.spec_request_passes += request_passes
        self.spec_emitted += emitted
        self.spec_bursts.append((request_passes, emitted))
        self.drafted += burst.rows - request_passes
        self.accepted += emitted - request_passes

    @staticmethod
    def side_by_side(parts: Sequence[RolloutStats], own: int) -> RolloutStats:
        """Rollouts of several ranks at the same time: counters add up, the longest time counts.

        Args:
            parts: of each rank.
            own: the rank whose trace and order of bursts are kept.
        """
        total = RolloutStats()
        for part in parts:
            total.add(part)
        total.elapsed_s = max(part.elapsed_s for part in parts)
        total.trace = list(parts[own].trace)
        total.spec_bursts = list(parts[own].spec_bursts)
        return total

    @property
    def accept_length(self) -> float | None:
        """Mean emitted per speculative request-pass; None where nothing was speculated."""
        if self.spec_request_passes == 0:
            return None
        return self.spec_emitted / self.spec_request_passes

    @property
    def host_share(self) -> float:
        """Of one rollout on one rank: share of the time since its first pass without a pass."""
        since = self.elapsed_s - self.trace[0][0]
        return max(0.0, 1.0 - self.passes_s / since)

    def accept_by_quarter(self) -> list[float]:
        """Accept length of each quarter of the speculative request-passes since the rollout began.

        A burst counts in each by the share of it that lies there; [] where nothing was speculated.
        """
        quarter = sum(passes for passes, _ in self.spec_bursts) / QUARTERS
        emitted, before = [0.0] * QUARTERS, 0
        for passes, tokens in self.spec_bursts:
            for number in range(QUARTERS):
                begin = max(before, number * quarter)
                end = min(before + passes, (number + 1) * quarter)
                emitted[number] += tokens / passes * max(0.0, end - begin)
            before += passes
        return [tokens / quarter for tokens in emitted] if quarter else []

    def metrics(self) -> dict[str, float]:
        """Under the names of the metrics file."""
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
        for number, length in enumerate(self.accept_by_quarter(), 1):
            out[f"spec/accept_length_q{number}"] = length
        return out

"""Utilisation of the ranks in the rollouts of a step."""

from collections.abc import Sequence

from ..common.world import World
from ..drafter.coordinator import Coordinator

RANKS_SHOWN = 8  # up to this number, each rank has separate metrics


class RankTimes:
    """How long each rank rolls out, and trains the drafter afterwards."""

    def __init__(self, world: World, coordinator: Coordinator | None) -> None:
        self.world, self.coordinator = world, coordinator
        self.start()

    def start(self) -> None:
        self._seconds = [0.0] * self.world.size

    def add(self, seconds: Sequence[float]) -> None:
        self._seconds = [a + b for a, b in zip(self._seconds, seconds, strict=True)]

    def metrics(self, peak_gb: float | None) -> dict[str, float]:
        """Entries of the metrics file; a collective call, {} for a single rank."""
        if self.world.size == 1:
            return {}
        longest = max(self._seconds)
        idle = [longest - seconds for seconds in self._seconds]
        out = {
            "ranks/count": float(self.world.size),
            "ranks/idle_share": sum(idle) / max(longest * self.world.size, 1e-9),
        }
        trained_s = 0.0 if self.coordinator is None else self.coordinator.trained_s
        gathered = self.world.gather((peak_gb, trained_s))
        memory = {rank: part[0] for rank, part in enumerate(gathered) if part[0] is not None}
        if len(memory) == self.world.size:
            out["ranks/max_memory_allocated_gb"] = max(memory.values())
        if self.world.size <= RANKS_SHOWN:
            for rank, seconds in enumerate(idle):
                out[f"ranks/{rank}/idle_share"] = seconds / max(longest, 1e-9)
                if rank in memory:
                    out[f"ranks/{rank}/max_memory_allocated_gb"] = memory[rank]
        if self.coordinator is not None:
            # Training after the last rank has finished does not use the bubble.
            trained = map(min, (part[1] for part in gathered), idle)
            out["ranks/bubble_used_share"] = sum(trained) / max(sum(idle), 1e-9)
        return out

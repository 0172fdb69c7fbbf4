"""What adds requests to a running rollout and takes them out of it."""

from .request import RunningRequest
from .scheduler import Scheduler


class RequestSource:
    """Called by the engine between bursts; it changes requests through the scheduler only."""

    def due(self, scheduler: Scheduler) -> bool:
        """Whether `exchange` may have something to do; costs next to nothing."""
        return False

    def exchange(self, scheduler: Scheduler) -> list[RunningRequest]:
        """Adds requests and takes others out, between bursts and once more when none is left.

        Returns the requests that run no more, or whose KV has to be computed again.
        """
        return []

    def ended(self, state: RunningRequest) -> bool:
        """Called with each finished request; returns whether a tool may continue it.

        If so the scheduler keeps its pages until the source calls `resume` or `end`.
        """
        return False

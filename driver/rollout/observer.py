"""Hooks of a rollout: the drafter is trained and responses are scored while it runs."""

from .request import RunningRequest


class RolloutObserver:
    """Called by the engine during a rollout; subclasses override what they need."""

    def on_pass(self, active: int, passes: int = 1) -> None:
        """Called between bursts: requests that run or wait, passes since the last call."""

    def on_finish(self, request: RunningRequest) -> None:
        """Called with each finished request before its pages and features are freed."""

    def on_wait(self) -> bool:
        """Does a piece of host work while the device runs; False if there is none left."""
        return False


class Observers(RolloutObserver):
    def __init__(self, *parts: RolloutObserver) -> None:
        self.parts = parts

    def on_pass(self, active: int, passes: int = 1) -> None:
        for part in self.parts:
            part.on_pass(active, passes)

    def on_finish(self, request: RunningRequest) -> None:
        for part in self.parts:
            part.on_finish(request)

    def on_wait(self) -> bool:
        return any(part.on_wait() for part in self.parts)

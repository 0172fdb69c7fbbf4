"""Signals that end a run: the state is saved before the process exits."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from .errors import UserError

# Ctrl-C, schedulers (SIGTERM, and SIGUSR1 ahead of a time limit), a closed terminal.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Stopped(UserError):
    """A signal ended the run; the exit code is 128 plus its number."""

    def __init__(self, name: str, message: str = "stopped") -> None:
        super().__init__(message)
        self.name = name
        self.exit_code = 128 + getattr(signal, name)

    @staticmethod
    def by(error: KeyboardInterrupt, message: str = "stopped") -> Stopped:
        """The end by the signal that an interrupt names; Python's own names none."""
        return Stopped(str(error) or "SIGINT", message)


class StopRequest:
    """Records the first signal inside its block; the second one ends the process at once.

    A rollout is stopped between two bursts of passes (`check`). An update in progress is finished
    first, so that the saved policy is that of a whole step.
    """

    def __init__(self) -> None:
        self.name = ""  # of the signal; empty = no signal yet
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.name:
            raise KeyboardInterrupt(signal.Signals(number).name)
        self.name = signal.Signals(number).name

    def check(self) -> None:
        if self.name:
            raise Stopped(self.name)

"""A thread that makes the drafter's micro-steps beside the rollout."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch


class StepThread:
    """Makes steps until it is told to stop, or a step says that there is nothing to do.

    One step is in flight at a time: a stop waits for no queue, and between two steps the thread can
    rest, which is how training keeps to a share of the time.

    Args:
        step: makes one; False ends the thread.
        settle: waits for what is still in flight.
        fail: takes whatever ends the thread otherwise.
    """

    def __init__(
        self,
        step: Callable[[], bool],
        settle: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._step, self._settle, self._fail = step, settle, fail
        self.stop_s = 0.0  # the longest that a stop took
        self.thread: threading.Thread | None = None
        self._stop = threading.Event()

    @property
    def running(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    @property
    def here(self) -> bool:
        """Whether it is the thread that asks."""
        return threading.current_thread() is self.thread

    def start(self, stream: torch.cuda.Stream | None, duty: float = 1.0) -> None:
        """Begins.

        Args:
            stream: of its work; None: on the CPU.
            duty: share of the time that it makes steps in; it rests for the others.
        """
        self._stop.clear()
        self.thread = threading.Thread(
            target=self._work, args=(stream, duty), name="spot-trainer", daemon=True
        )
        self.thread.start()

    def stop(self) -> None:
        """Returns once no step runs."""
        self._stop.set()
        if self.thread is not None:
            begin = time.perf_counter()
            self.thread.join()
            self.thread = None
            self.stop_s = max(self.stop_s, time.perf_counter() - begin)

    def _work(self, stream: torch.cuda.Stream | None, duty: float) -> None:
        if stream is None:
            torch.set_num_threads(1)  # of this thread; the tail keeps the other cores
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                while not self._stop.is_set():
                    begin = time.perf_counter()
                    if not self._step():
                        break
                    self._settle()
                    if duty < 1.0:
                        self._stop.wait((time.perf_counter() - begin) * (1.0 / duty - 1.0))
                self._settle()
        except BaseException as error:  # whatever ends the thread is told
            self._fail(error)

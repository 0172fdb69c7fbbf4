"""A thread that trains during the rollout, the drafter or the policy."""

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch


class StepThread:
    """Makes steps until it is stopped, a step returns False, or one raises; `fail` gets the error.

    It waits for each step before the next one, so a stop waits for one step at most. Between two
    steps it can rest, which keeps training to a share of the time.
    """

    def __init__(
        self,
        step: Callable[[], bool],
        wait: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._step, self._wait, self._fail = step, wait, fail
        self.stop_s = 0.0  # of the longest stop
        self.thread: threading.Thread | None = None
        self._stop = threading.Event()

    @property
    def running(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self.thread

    def start(self, stream: torch.cuda.Stream | None, duty: float = 1.0) -> None:
        """Starts the thread, on a stream or on the CPU; it makes steps for a share of the time."""
        self._stop.clear()
        self.thread = threading.Thread(
            target=self._work, args=(stream, duty), name="spot-trainer", daemon=True
        )
        self.thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self.thread is not None:
            begin = time.perf_counter()
            self.thread.join()
            self.thread = None
            self.stop_s = max(self.stop_s, time.perf_counter() - begin)

    def _work(self, stream: torch.cuda.Stream | None, duty: float) -> None:
        if stream is None:
            torch.set_num_threads(1)  # of this thread; the rollout keeps the other cores
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                while not self._stop.is_set():
                    begin = time.perf_counter()
                    if not self._step():
                        break
                    self._wait()
                    if duty < 1.0:
                        self._stop.wait((time.perf_counter() - begin) * (1.0 / duty - 1.0))
                self._wait()
        except BaseException as error:  # SystemExit too
            self._fail(error)

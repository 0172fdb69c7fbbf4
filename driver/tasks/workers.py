"""Rewards: computed in worker processes during the rollout, or in this process.

A reward function is code of the user: it may raise, hang, kill its process or return something that
is not a number. Each failure gives one line that names the sample; the configuration decides
whether it ends the run or counts as 0.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
import warnings
from collections import deque
from collections.abc import Mapping
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from ..common.errors import UserError, user_code
from ..common.numbers import finite, shown
from ..config.sections import RewardConfig
from . import Prompt, Task

Job = tuple[int, Prompt, str, bool]  # index of the response, its prompt, its text, finished
START_S = 300.0  # limit for a worker to start, before the time limit of its first sample


class RewardWorkers:
    """Scores responses as they finish; without workers, when `score` or `collect` is called."""

    def __init__(self, task: Task, config: RewardConfig) -> None:
        self.config = config
        self._task = task
        self._waiting: deque[Job] = deque()
        self._values: dict[int, float] = {}
        self._workers: list[_Worker] = []

    def submit(self, index: int, prompt: Prompt, text: str, finished: bool = True) -> None:
        """Queues a response; UserError if a sample failed and `reward.on_error=stop`."""
        self._waiting.append((index, prompt, text, finished))
        if self.config.workers:
            self._turn(0.0)

    def collect(self, count: int) -> list[float]:
        """Waits for the finite rewards of so many responses, by index; raises like `submit`."""
        self.score()
        while len(self._values) < count:
            self._turn(0.05)
        values = [self._values[i] for i in sorted(self._values)]
        self._values.clear()
        return values

    def scored(self) -> Mapping[int, float]:
        """The rewards known so far, by index; raises like `submit`."""
        if self.config.workers:
            self._turn(0.0)
        return self._values

    def score(self) -> None:
        """Without workers, scores the queued responses in this process."""
        while self._waiting and not self.config.workers:
            job = self._waiting.popleft()
            self._take(job, *_reward(self._task, *job[1:]))

    def close(self) -> None:
        """Kills the workers, even if they are busy."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        self._waiting.clear()
        self._values.clear()

    def _turn(self, seconds: float) -> None:
        """Gives queued jobs to workers and receives results, for at most `seconds`."""
        idle = [worker for worker in self._workers if worker.job is None]
        while self._waiting and (idle or len(self._workers) < self.config.workers):
            if not idle:
                idle.append(_Worker(self._task))
                self._workers.append(idle[0])
            idle.pop().start(self._waiting.popleft(), self.config.timeout_s)
        busy: dict[Any, _Worker] = {w.pipe: w for w in self._workers if w.job is not None}
        for pipe in wait(list(busy), seconds):
            worker = busy[pipe]
            finished = worker.receive()
            if finished is None:
                continue
            job, (value, error) = finished
            if not worker.process.is_alive():
                self._retire(worker)
            self._take(job, value, error)
        for worker in busy.values():
            if worker.job is not None and time.monotonic() > worker.deadline:
                self._retire(worker)
                late = f"no answer in reward.timeout_s={self.config.timeout_s:g}"
                self._take(worker.job, None, late)

    def _retire(self, worker: _Worker) -> None:
        worker.end()
        self._workers.remove(worker)

    def _take(self, job: Job, value: Any, error: str) -> None:
        """Records a reward, or reports the error of its computation."""
        index, prompt, *_ = job
        number = finite(value)
        if not error and number is None:
            error = f"expected a number from -1e30 to 1e30, got {shown(value)}"
        if error:
            message = f"reward of response {index} to prompt {prompt.id}: {error}"
            if self.config.on_error == "stop":
                self.close()
                raise UserError(f"{message}; reward.on_error=zero counts it as 0")
            warnings.warn(f"{message}; counted as 0", stacklevel=4)
        self._values[index] = 0.0 if number is None else number


class _Worker:
    """One process and its current sample."""

    def __init__(self, task: Task) -> None:
        # Not forked: the parent has threads and may hold a CUDA context.
        context = multiprocessing.get_context("spawn")
        self.pipe, child = context.Pipe()
        self.process = context.Process(target=_serve, args=(child, task), daemon=True)
        # Ctrl-C reaches the whole process group, but only the run handles it. A worker inherits the
        # blocked signals.
        resource_tracker.ensure_running()  # its start would unblock the signal
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with user_code("reward.workers: the task cannot be sent to a process; set it to 0"):
                self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        child.close()
        self.job: Job | None = None
        self.started = False
        self.timeout_s = self.deadline = 0.0

    def start(self, job: Job, timeout_s: float) -> None:
        self.job, self.timeout_s = job, timeout_s
        self.deadline = time.monotonic() + timeout_s + (0.0 if self.started else START_S)
        what = f"reward.workers: prompt {job[1].id} cannot be sent to a process; set it to 0"
        # If the worker died between two samples, `receive` reads the end of the pipe.
        with user_code(what), contextlib.suppress(OSError):
            self.pipe.send(job[1:])

    def receive(self) -> tuple[Job, tuple[Any, str]] | None:
        """Reads one message: a job with its reward and error, or None when the worker started."""
        assert self.job is not None
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            answer = None, f"its worker died with exit code {self.process.exitcode}"
        if answer is None:
            self.started, self.deadline = True, time.monotonic() + self.timeout_s
            return None
        job, self.job = self.job, None
        return job, answer

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(pipe: Connection, task: Task) -> None:
    pipe.send(None)  # started
    while True:
        try:
            sample = pipe.recv()
        except EOFError:  # the run is over
            return
        answer = _reward(task, *sample)
        try:
            pipe.send(answer)
        except Exception as error:  # the value cannot be pickled
            pipe.send((None, f"{type(error).__name__}: {error}"))


def _reward(task: Task, prompt: Prompt, text: str, finished: bool) -> tuple[Any, str]:
    """The reward, and the error of its computation."""
    try:
        return task.reward(prompt, text, finished), ""
    except (Exception, SystemExit) as error:
        return None, f"{type(error).__name__}: {error}"

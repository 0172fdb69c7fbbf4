"""Checkpoints that are written in the background."""

import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ..common.host_copies import HostCopies, held_bytes
from ..common.memory import host_bytes
from ..common.world import World

HOST_SHARE = 0.25  # largest share of the machine's memory for the copies of its ranks


class CheckpointWriter:
    """Writes checkpoints in a background thread; the caller waits only for a copy of the state.

    There is one write at a time: the next one waits for it. The next call raises an error of the
    thread, so that a full disk ends a run. Not `threaded`: `save` writes the state itself at once.
    """

    def __init__(self, threaded: bool) -> None:
        self.threaded = threaded
        self._copies = HostCopies()
        self._thread = ThreadPoolExecutor(1, "checkpoint")  # completes a write before the exit
        self._written: Future[None] | None = None
        self._allocated: Future[None] | None = None

    @property
    def busy(self) -> bool:
        return self._written is not None and not self._written.done()

    def prepare(self, state: Any) -> None:
        """Allocates memory for copies of a state, in the thread; to pin a GB takes .15 s."""
        if self._can_copy(state):
            self._allocated = self._thread.submit(self._copies.prepare, state)

    def save(self, write: Callable[[Any], object], state: Any) -> None:
        """Starts `write(state)`, in the thread with a copy; raises the last write's error."""
        self.collect()
        if not self._can_copy(state):
            write(state)
            return
        if self._allocated is not None:
            self._allocated.result()
        copy, wait = self._copies.take(state)

        def work() -> None:
            wait()
            write(copy)

        self._written = self._thread.submit(work)

    def _can_copy(self, state: Any) -> bool:
        share = HOST_SHARE / World.local_size()
        if self.threaded and held_bytes(state) > share * host_bytes():
            self.threaded = False
            warnings.warn(
                f"a checkpoint of {held_bytes(state) / 1e9:.1f} GB exceeds {share:.1%} of"
                " this machine's memory: each step waits until its checkpoint is written",
                stacklevel=3,
            )
        return self.threaded

    def collect(self, wait: bool = True) -> None:
        """Raises the UserError of a write that has ended, or with `wait` of the one in progress."""
        if self._written is not None and (wait or self._written.done()):
            written, self._written = self._written, None
            written.result()

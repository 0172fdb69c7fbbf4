"""Checkpoints of a run that its steps do not wait for."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..common.host_copies import HostCopies, held_bytes

HOST_SHARE = 0.25  # of the machine's memory, the most that copies may take
# What a container may take of it, by the second and the first version of control groups.
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class CheckpointWriter:
    """Has a checkpoint written from a thread of its own: the caller waits for a copy of the state.

    One at a time: the next waits for the one before. What goes wrong in the thread is raised by the
    next call here, so that a full disk ends a run.

    Args:
        beside: False: `save` writes the state itself, and copies nothing.

    Example:
        >>> writer, written = CheckpointWriter(beside=True), []
        >>> writer.save(written.append, {"step": 3})
        >>> writer.collect()
        >>> written
        [{'step': 3}]
    """

    def __init__(self, beside: bool) -> None:
        self.beside = beside
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, write: Callable[[Any], object], state: Any) -> None:
        """Has a state written.

        Args:
            write: called with the state, or with its copy in the thread.
            state: tensors, numbers, strings, None, and lists and dicts of these.

        Raises:
            UserError: this one or the one before could not be written.
        """
        self.collect()
        if self.beside and held_bytes(state) > HOST_SHARE * _host_bytes():
            self.beside = False
            warnings.warn(
                f"a checkpoint's {held_bytes(state) / 1e9:.1f} GB are more than {HOST_SHARE:.0%} of"
                " this machine's memory: steps wait until it is written",
                stacklevel=2,
            )
        if not self.beside:
            write(state)
            return
        copy, wait = self._copies.take(state)
        # No daemon: whatever ends the process, a checkpoint that was begun becomes whole.
        self._thread = threading.Thread(
            target=self._work, args=(write, copy, wait), name="checkpoint"
        )
        self._thread.start()

    def _work(self, write: Callable[[Any], object], copy: Any, wait: Callable[[], None]) -> None:
        try:
            wait()
            write(copy)
        except BaseException as error:  # kept for `collect`
            self._error = error

    def collect(self, wait: bool = True) -> None:
        """Raises what went wrong in the thread.

        Args:
            wait: for its end; else what it still does is left to the next call.

        Raises:
            UserError: the checkpoint could not be written.
        """
        if self._thread is not None and (wait or not self._thread.is_alive()):
            self._thread.join()
            self._thread = None
        if self._thread is None and self._error is not None:
            error, self._error = self._error, None
            raise error


def _host_bytes() -> int:
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in LIMITS:
        with suppress(OSError, ValueError):  # not there, or "max": no limit
            sizes.append(int(Path(path).read_text()))
    return min(sizes)

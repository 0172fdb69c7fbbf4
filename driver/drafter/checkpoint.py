"""Asynchronous checkpoints of the drafter."""

import re
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ..common.host_copies import HostCopies
from ..common.storage import replaced, storage_errors, sync_path

_FILE = re.compile(r"step-(\d+)\.pt")


class DraftCheckpoints:
    """Writes states atomically, from a separate thread.

    `save` copies the tensors (on a GPU into pinned memory, enqueued on the current stream) and
    returns; `stall_s` is the longest time it took. It skips a checkpoint while the previous one is
    being written. Errors of the thread become warnings in `collect`; training and rollout go on.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep
        self.stall_s = 0.0
        self.copies = HostCopies()
        self._thread = ThreadPoolExecutor(1, "draft-checkpoint")
        self._writes: list[Future[None]] = []  # since the last `collect`; one runs at a time

    def save(self, state: Callable[[], Mapping[str, Any]], step: int) -> bool:
        """Copies a state of tensors and plain values and starts to write it; False if skipped."""
        begin = time.perf_counter()
        if self._writes and not self._writes[-1].done():
            return False
        copy, wait = self.copies.take(state())
        self._writes.append(self._thread.submit(self._write, copy, step, wait))
        self.stall_s = max(self.stall_s, time.perf_counter() - begin)
        return True

    def _write(self, state: Any, step: int, wait: Callable[[], None]) -> None:
        wait()
        with storage_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with replaced(self.folder / f"step-{step:08d}.pt") as file:
                torch.save(state, file)
            sync_path(self.folder)
            for _, old in self._whole()[: -self.keep]:
                old.unlink()

    def collect(self, wait: bool = True) -> None:
        """Warns if a checkpoint could not be written; without `wait` one in flight is left out."""
        if not self._writes or not (wait or self._writes[-1].done()):
            return
        errors = [error for write in self._writes if (error := write.exception())]
        self._writes.clear()
        if errors:
            warnings.warn(
                f"drafter checkpoint not written ({errors[-1]}); training and rollout go on",
                stacklevel=2,
            )

    def clear(self) -> None:
        """Removes the checkpoints of an earlier run that is not resumed."""
        with storage_errors(self.folder):
            for _, path in self._whole():
                path.unlink()

    def latest(self) -> tuple[int, dict[str, Any]] | None:
        """Step and state of the newest readable checkpoint; warns of a damaged one."""
        for scratch in self.folder.glob(".step-*"):
            scratch.unlink(missing_ok=True)
        for step, path in reversed(self._whole()):
            try:
                return step, torch.load(path, map_location="cpu", weights_only=True)
            except Exception as error:  # unpickling a damaged file raises nearly anything
                warnings.warn(
                    f"{path}: cannot be read ({type(error).__name__}); the previous one is used",
                    stacklevel=2,
                )
        return None

    def _whole(self) -> list[tuple[int, Path]]:
        """Steps and files, in rising order."""
        matches = [(_FILE.fullmatch(path.name), path) for path in self.folder.glob("step-*.pt")]
        return sorted((int(match[1]), path) for match, path in matches if match)

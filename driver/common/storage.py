"""Helpers for durable writes, shared by run folders and checkpoints."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from .errors import UserError

SYNCS = 8  # files that are flushed at once


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns an error of writing `path` into a UserError; other errors pass."""
    try:
        yield
    except (OSError, UnicodeError, SafetensorError, RuntimeError) as error:
        # torch writes through its own stream, which hides the system's reason.
        hides = ("inline_container", "iostream error")
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in hides):
            raise
        hidden = "the file is incomplete" if isinstance(error, RuntimeError) else str(error)
        reason = getattr(error, "strerror", None) or hidden
        raise UserError(
            f"{path}: cannot be written ({reason}); free space or choose another path"
        ) from error


class FolderLock:
    """An exclusive lock on a folder, where there are locks; UserError if another has it."""

    _handle: int | None = None

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise UserError(
                f"{path}: another run is using it; wait until it ends or choose another run.name"
            ) from None
        except OSError:
            pass

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
        self._handle = None

    __del__ = close


def user_path(text: str) -> Path:
    """A path from the user, with `~` for the home directory; UserError if there is none."""
    try:
        return Path(text).expanduser()
    except RuntimeError:  # no HOME and no entry of the user, or no such user
        raise UserError(f"{text}: unknown home directory; write the full path") from None


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A file that replaces `path` at the end; an error or a crash leaves the old one."""
    scratch = path.with_name(f".{path.name}.tmp")
    with storage_errors(path):
        try:
            with scratch.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with replaced(path) as file:
        file.write(text.encode())


def share_files(folder: Path, like: Path) -> None:
    """Gives all files the permissions of `like`: safetensors makes files for the owner alone."""
    for path in folder.rglob("*"):
        if path.is_file():
            shutil.copymode(like, path)


def sync_path(path: Path) -> None:
    """Flushes a file's content, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Flushes a folder and its contents to the disk."""
    with ThreadPoolExecutor(SYNCS) as pool:
        list(pool.map(sync_path, [*folder.rglob("*"), folder]))

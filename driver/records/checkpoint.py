"""Atomic checkpoints: written to a scratch folder, synced, renamed."""

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..common.errors import UserError
from ..common.storage import share_files, storage_errors, sync_path, sync_tree
from ..model.checkpoint import check_checkpoint
from ..model.spec import read_json
from .parts import WRITERS, Parts, load_parts

PARTS = "state/parts"  # subfolder that `save_parts` writes
_FOLDER = re.compile(r"step-(\d+)")
_MARK = "checkpoint.json"  # written last


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk: a Hugging Face folder that also contains `state/`."""

    path: Path
    step: int  # the last finished one

    def check(self, contents: bool = True) -> None:
        """Raises UserError if the policy lacks a file or, with `contents`, any file is damaged."""
        try:
            check_checkpoint(self.path)
            mark = read_json(self.path / _MARK)
        except UserError as error:
            raise UserError(f"{error}; or {self._remedy}") from None
        if not contents:
            return
        wanted = mark.get("checksums", {})  # earlier versions wrote none
        for name, checksum in _checksums(self.path, wanted).items():
            if checksum != wanted[name]:
                path = self.path / name
                raise UserError(f"{path}: damaged since it was written; {self._remedy}")

    @property
    def _remedy(self) -> str:
        return f"remove {self.path} to resume from the checkpoint before it"

    def state(self, name: str) -> Any:
        """One saved state, such as "trainer", with tensors on the CPU; UserError if unreadable."""
        path = self.path / "state" / f"{name}.pt"
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # unpickling a damaged file raises many types
            raise UserError(
                f"{path}: cannot be read ({type(error).__name__}); {self._remedy}"
            ) from error

    def restore_parts(self, parts: Parts, group: dist.ProcessGroup | None) -> None:
        """Copies the tensors that `save_parts` saved into `parts`; see `load_parts`."""
        try:
            load_parts(self.path / PARTS, parts, group)
        except UserError as error:
            raise UserError(f"{error}; {self._remedy}") from error

    def restore(self, name: str, load: Callable[[Any], None]) -> None:
        """Passes one state to `load`, if the run had one (a run without a drafter has none for it).

        Raises UserError if it is damaged or lacks a required key.
        """
        with earlier_versions(
            f"{self.path}: state/{name}.pt",
            f"it cannot be resumed, model.path={self.path} starts a new run from its policy",
        ):
            if (state := self.state(name)) is not None:
                load(state)


@contextlib.contextmanager
def earlier_versions(what: str, remedy: str) -> Iterator[None]:
    """Turns a KeyError, a key that an earlier version did not save, into one line for the user."""
    try:
        yield
    except KeyError as error:
        raise UserError(f"{what} lacks {error}, an earlier version wrote it; {remedy}") from error


def save_checkpoint(
    folder: Path,
    step: int,
    write_policy: Callable[[Path], None],
    states: Mapping[str, Any],
    keep: int,
) -> Checkpoint:
    """Saves one checkpoint and drops the oldest complete ones beyond `keep`, at least 1.

    A complete checkpoint of the same step is kept. `states` are tensors, numbers, strings, None,
    and lists and dicts of these. Raises UserError if the disk is full or unwritable; no incomplete
    checkpoint remains.
    """
    final = folder / f"step-{step:06d}"
    if (final / _MARK).exists():  # a run resumed here and saved before it made a step
        return Checkpoint(final, step)
    scratch = scratch_folder(folder, step)
    with storage_errors(final):
        clean_checkpoints(folder)
        try:
            (scratch / "state").mkdir(parents=True)
            write_policy(scratch)
            for name, state in states.items():
                torch.save(state, scratch / "state" / f"{name}.pt")
            files = (path for path in scratch.rglob("*") if path.is_file())
            names = [str(path.relative_to(scratch)) for path in files]
            mark = {"step": step, "checksums": _checksums(scratch, sorted(names))}
            (scratch / _MARK).write_text(json.dumps(mark), encoding="utf-8")
            share_files(scratch, scratch / _MARK)
            sync_tree(scratch)
            if final.exists():  # an incomplete copy, or from an earlier version
                shutil.rmtree(final)
            os.rename(scratch, final)
            sync_path(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        for old in whole_checkpoints(folder)[:-keep]:
            gone = folder / f".gone-{old.path.name}"  # a half-deleted one must not look complete
            os.rename(old.path, gone)
            shutil.rmtree(gone)
    return Checkpoint(final, step)


def scratch_folder(folder: Path, step: int) -> Path:
    """Where the files of a checkpoint are before it is complete."""
    return folder / f".new-step-{step:06d}"


def _checksums(folder: Path, names: Collection[str]) -> dict[str, int | None]:
    with ThreadPoolExecutor(WRITERS) as pool:
        return dict(zip(names, pool.map(_checksum, (folder / name for name in names)), strict=True))


def _checksum(path: Path) -> int | None:
    """CRC-32 of a file, which detects damage but not forgery; None: there is no file."""
    if not path.exists():
        return None
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            checksum = zlib.crc32(block, checksum)
    return checksum


def whole_checkpoints(folder: Path) -> list[Checkpoint]:
    """The complete checkpoints in a folder, if it exists, by rising step."""
    found = []
    for path in folder.glob("step-*"):
        match = _FOLDER.fullmatch(path.name)
        if match and (path / _MARK).exists():
            found.append(Checkpoint(path, int(match[1])))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    whole = whole_checkpoints(folder)
    return whole[-1] if whole else None


def clean_checkpoints(folder: Path) -> None:
    """Removes incomplete checkpoints of a killed process from a folder, if it exists."""
    for pattern in (".new-step-*", ".gone-step-*"):
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)

"""The error that the command line shows to its user."""

import contextlib
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path


class UserError(Exception):
    """One line that names the cause and the remedy; a traceback means a fault in this package."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class SharedWarning(UserWarning):
    """Its cause is the same on all ranks of a run, so only the first one shows it."""


@contextlib.contextmanager
def library_errors(path: Path) -> Iterator[None]:
    """Turns any exception of a library that reads the file `path` into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # libraries raise many types here, which differ by version
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: cannot be used ({reason[:300]})") from error


@contextlib.contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turns any exception of a user's code into a UserError: `what`, the error, its place."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        *_, last = traceback.extract_tb(error.__traceback__)
        place = f"{Path(last.filename).name}:{last.lineno}"
        raise UserError(f"{what}: {type(error).__name__}: {error} ({place})") from error


@contextlib.contextmanager
def after_error() -> Iterator[None]:
    """Turns an error during the cleanup after an earlier error, which is raised, into a warning."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"the cleanup after an error failed ({error})", stacklevel=3)

"""The engine for programs of others: `Session`."""

from .session import Session

__all__ = ["Session"]

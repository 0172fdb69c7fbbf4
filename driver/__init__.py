"""Speculative rollout driver for reasoning RL.

`Session`, the engine for a loop of your own, is imported on first use: it needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .session import Session

__all__ = ["Session"]


def __getattr__(name: str) -> Any:
    if name != "Session":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .session import Session

    return Session

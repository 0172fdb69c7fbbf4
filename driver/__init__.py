"""Speculative rollout driver for reasoning RL.

The names below, the engine for a loop of your own, are imported on first use: they need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .session import Request, Response, SamplingParams, Session

__all__ = ["Request", "Response", "SamplingParams", "Session"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import session

    return getattr(session, name)

"""Speculative rollout driver for reasoning RL.

The names below, the engine for a loop of your own, are imported on first use: they need torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .session import Request, Response, SamplingParams, Session, SessionClosed, UserError

__all__ = ["Request", "Response", "SamplingParams", "Session", "SessionClosed", "UserError"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from . import session
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        from .cli import INSTALL

        raise ImportError(f"{__name__}: {error.name} is missing; run {INSTALL}") from error
    return getattr(session, name)

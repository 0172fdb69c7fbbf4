"""The engine for programs of others: `Session`."""

from ..common.errors import UserError
from ..rollout.request import Request, Response, SamplingParams
from .inbox import SessionClosed
from .session import Session

__all__ = ["Request", "Response", "SamplingParams", "Session", "SessionClosed", "UserError"]

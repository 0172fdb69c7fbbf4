"""The engine for programs of others: `Session`."""

from ..rollout.request import Request, Response, SamplingParams
from .session import Session

__all__ = ["Request", "Response", "SamplingParams", "Session"]

"""Exceptions as messages between processes, and back."""

from __future__ import annotations

from gapless import errors
from gapless.server.messages import Failure


class InternalError(errors.GaplessError):
    """The server's own fault: a worker died, or met something that should not happen."""


def failure_of(error: Exception) -> Failure:
    """What another process needs to raise the same error."""
    if isinstance(error, errors.GaplessError):
        return Failure(type(error).__name__, str(error), getattr(error, "param", None))
    return Failure(InternalError.__name__, f"{type(error).__name__}: {error}")


def error_of(failure: Failure) -> errors.GaplessError:
    """The exception that a failure describes."""
    kind: type[errors.GaplessError] = getattr(errors, failure.kind, InternalError)
    if issubclass(kind, errors.InvalidRequestError):
        return kind(failure.message, param=failure.param)
    return kind(failure.message)

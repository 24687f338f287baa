"""What goes wrong, as HTTP sees it: a status, and a body in the way of the API that was asked."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec

from gapless.errors import ContextLengthError, GaplessError, InvalidRequestError, TemplateError
from gapless.server.service import NotReadyError, QueueFullError

_RETRY_AFTER_S = 1


class RequestTimeoutError(GaplessError):
    """A request ran longer than the operator allows."""


class NotFoundError(InvalidRequestError):
    """A request names what is not there."""


class ModelNotFoundError(NotFoundError):
    """A request names a model that this server does not have."""


@dataclass(frozen=True)
class HttpError:
    """An error in the words of OpenAI's API."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None

    def __post_init__(self) -> None:
        # A message may quote what a client sent, and JSON can hold halves of characters that no text can.
        for name in ("message", "param"):
            if (text := getattr(self, name)) is not None:
                object.__setattr__(self, name, text.encode("utf-8", "replace").decode())

    @property
    def headers(self) -> dict[str, str]:
        """Those that tell a client when to come back, or how to show who it is."""
        if self.status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
            return {"retry-after": str(_RETRY_AFTER_S)}
        if self.status == HTTPStatus.UNAUTHORIZED:
            return {"www-authenticate": "Bearer"}
        return {}

    def content(self) -> dict[str, Any]:
        """OpenAI's error object."""
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": fields}

    def body(self, path: str) -> bytes:
        """JSON as the API at `path` writes errors: Ollama's have a text alone."""
        is_ollama = path.startswith("/api/")
        return msgspec.json.encode({"error": self.message} if is_ollama else self.content())


def http_error(error: Exception) -> HttpError:
    """Status and words for an exception. What is the client's fault is never a 5xx: clients retry those."""
    message = str(error)
    if isinstance(error, NotFoundError):
        code = "model_not_found" if isinstance(error, ModelNotFoundError) else None
        return HttpError(HTTPStatus.NOT_FOUND, message, "invalid_request_error", error.param, code)
    if isinstance(error, InvalidRequestError):
        code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
        return HttpError(HTTPStatus.BAD_REQUEST, message, "invalid_request_error", error.param, code)
    if isinstance(error, TemplateError):
        return HttpError(
            HTTPStatus.BAD_REQUEST, message, "invalid_request_error", "messages", "chat_template"
        )
    if isinstance(error, QueueFullError):
        return HttpError(HTTPStatus.TOO_MANY_REQUESTS, message, "rate_limit_error", None, "queue_full")
    if isinstance(error, NotReadyError):
        return HttpError(
            HTTPStatus.SERVICE_UNAVAILABLE, message, "service_unavailable_error", None, "not_ready"
        )
    if isinstance(error, RequestTimeoutError):
        return HttpError(HTTPStatus.GATEWAY_TIMEOUT, message, "timeout_error", None, "timeout")
    if isinstance(error, GaplessError):
        return HttpError(HTTPStatus.INTERNAL_SERVER_ERROR, message, "internal_server_error")
    return HttpError(HTTPStatus.INTERNAL_SERVER_ERROR, "The server failed.", "internal_server_error")


def status_error(status: int, message: str) -> HttpError:
    """For what HTTP itself refuses: no such path, a wrong method, a body that is too large."""
    kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "internal_server_error"
    return HttpError(status, message, kind)

"""What surrounds every request: identity, access log, key, limits of the body.

Plain ASGI, so that streams pass unbuffered.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gapless.server.errors import HttpError, status_error

access_logger = logging.getLogger("gapless.access")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_OPEN_PATHS = frozenset({"/", "/health", "/v1/health", "/favicon.ico"})


def respond(error: HttpError, path: str, **headers: str) -> Response:
    """An error as a response."""
    return Response(
        error.body(path), error.status, {**error.headers, **headers}, media_type="application/json"
    )


class RequestContext:
    """Gives every request an id, the client's own if it sent one, and logs how it ended."""

    def __init__(self, app: ASGIApp, access_log: bool) -> None:
        self._app = app
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started_s, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._access_log:
                client = scope.get("client") or ("-", 0)
                access_logger.info(
                    "%s %s %s %s %.3f s %s",
                    client[0],
                    scope["method"],
                    _printable(scope["path"]),
                    "gone" if scope.get("client_gone") else status,
                    time.perf_counter() - started_s,
                    request_id,
                )


def _printable(text: str) -> str:
    """A path for the log: no character of it ends the line or steers a terminal."""
    return ascii(text)[1:-1][:200]


class Authentication:
    """Lets only those in who have the key. The page itself and `/health` are open: they tell nothing."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] == "http" and self._key is not None and not self._may_enter(scope, self._key):
            error = HttpError(
                401,
                "Send the server's API key: Authorization: Bearer KEY.",
                "invalid_request_error",
                None,
                "invalid_api_key",
            )
            await respond(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    @staticmethod
    def _may_enter(scope: Scope, key: bytes) -> bool:
        path = scope["path"]
        if path in _OPEN_PATHS or path.startswith("/page/"):
            return True
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # In constant time: how long a refusal takes must not tell how much of a guess was right.
        return hmac.compare_digest(given.strip(" \t").encode("latin-1"), key) and scheme.lower() == "bearer"


class BodyLimits:
    """Refuses bodies that are too large or come too slowly, before anything is made of them."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_empty = "content-length" not in headers and "transfer-encoding" not in headers
        body = _Body(receive, self._max_bytes, self._timeout_s, is_empty)

        async def send_and_linger(message: Message) -> None:
            # A client that is still writing does not read: if the connection were closed after our last word,
            # all it learnt would be that it was reset.
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if is_last and not body.is_complete:
                await send({**message, "more_body": True})
                await body.discard()
                message = {"type": "http.response.body"}
            await send(message)

        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_bytes:
            error = status_error(413, _too_large(self._max_bytes))
            await respond(error, scope["path"])(scope, receive, send_and_linger)
            return
        await self._app(scope, body.receive, send_and_linger)


def _too_large(max_bytes: int) -> str:
    """Why a body is refused."""
    return f"The request's body is larger than {max_bytes} bytes, the server's limit (--max-body-mib)."


class _Body:
    """Counts and times what a client sends; waits without a limit for what comes after: its leaving.

    Raises HTTPException, which passes through FastAPI's reading of a body as it is.
    """

    def __init__(self, receive: Receive, max_bytes: int, timeout_s: float, is_complete: bool) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self.is_complete = is_complete

    async def receive(self) -> Message:
        if self.is_complete:
            return await self._receive()
        try:
            message = await self._next()
        except asyncio.TimeoutError:
            raise HTTPException(
                408,
                f"The request's body did not arrive within {self._timeout_s:g} s.",
                {"connection": "close"},
            ) from None
        if self._num_bytes > self._max_bytes:
            raise HTTPException(413, _too_large(self._max_bytes))
        return message

    async def discard(self) -> None:
        """Takes what is left, as long as the client may send."""
        with contextlib.suppress(asyncio.TimeoutError):
            while not self.is_complete:
                await self._next()

    async def _next(self) -> Message:
        message = await asyncio.wait_for(self._receive(), max(0.0, self._deadline_s - time.monotonic()))
        self._num_bytes += len(message.get("body", b""))
        self.is_complete = not message.get("more_body", False)
        return message


PAGE_HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

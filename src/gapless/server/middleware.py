"""What surrounds every request: identity, access log, key, limits of the body.

Plain ASGI, so that streams pass unbuffered.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
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
    return text.encode("ascii", "backslashreplace").decode().replace("\n", "\\n").replace("\r", "\\r")[:200]


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
        return (
            hmac.compare_digest(given.strip().encode("utf-8", "surrogatepass"), key)
            and scheme.lower() == "bearer"
        )


class BodyTooLargeError(Exception):
    """A body is longer than allowed."""


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
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_bytes:
            await respond(self._too_large(), scope["path"])(scope, receive, send)
            return
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        body = _Body(receive, self._max_bytes, self._timeout_s)
        try:
            await self._app(scope, body.receive, watched_send)
        except BodyTooLargeError:
            if not has_started:
                await respond(self._too_large(), scope["path"], connection="close")(scope, receive, send)
        except asyncio.TimeoutError:
            if has_started or not body.ran_out:
                raise
            error = status_error(408, f"The request's body did not arrive within {self._timeout_s:g} s.")
            await respond(error, scope["path"], connection="close")(scope, receive, send)

    def _too_large(self) -> HttpError:
        return status_error(
            413,
            f"The request's body is larger than {self._max_bytes} bytes, the limit (--max-body-mib).",
        )


class _Body:
    """Counts and times what a client sends; waits without a limit for what comes after: its leaving."""

    def __init__(self, receive: Receive, max_bytes: int, timeout_s: float) -> None:
        self._receive = receive
        self._left = max_bytes
        self._deadline_s = time.monotonic() + timeout_s
        self._is_complete = False
        self.ran_out = False

    async def receive(self) -> Message:
        if self._is_complete:
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), max(0.0, self._deadline_s - time.monotonic()))
        except asyncio.TimeoutError:
            self.ran_out = True
            raise
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise BodyTooLargeError
        self._is_complete = not message.get("more_body", False)
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

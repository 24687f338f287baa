"""HTTP responses fed by a stream of chunks: whole, or event by event."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gapless.errors import GaplessError
from gapless.server.connection import DIRECT_WRITER, DirectWriter
from gapless.server.errors import HttpError, RequestTimeoutError, http_error
from gapless.server.messages import Chunk
from gapless.server.stream import ClientGoneError, Stream

logger = logging.getLogger("gapless.server")

# A comment is sent this often to a client that waits for its first token, lest a proxy gives up.
_HEARTBEAT_S = 15.0

Items = list[tuple[int, Chunk]]  # (choice, chunk)


class EventFormatter(ABC):
    """Writes a stream in the way of one API."""

    media_type = "text/event-stream; charset=utf-8"
    heartbeat: bytes = b": waiting\n\n"
    """Nothing, where an API has no bytes without a meaning."""

    @abstractmethod
    def push(self, items: Items) -> bytes:
        """What the client gets for these chunks."""

    def around_text(self, index: int) -> tuple[bytes, bytes] | None:
        """What stands before and after the text, a JSON string, when choice `index` gains text and nothing
        else; None if that is not always the same from now on."""
        return None

    @abstractmethod
    def finish(self) -> bytes:
        """What it gets at the end."""

    @abstractmethod
    def error(self, error: HttpError) -> bytes:
        """What it gets instead of the rest."""


class Collector(ABC):
    """Makes one object of a stream."""

    @abstractmethod
    def push(self, items: Items) -> None:
        """Takes chunks."""

    @abstractmethod
    def result(self) -> Any:
        """The object, once all chunks are there."""


class GenerationResponse(Response, ABC):
    """Answers with what a stream brings. A client that leaves ends the stream at once."""

    def __init__(self, stream: Stream, timeout_s: float | None) -> None:
        self._stream = stream
        self._timeout_s = timeout_s
        self._path = ""
        self._writer: DirectWriter | None = None
        self._has_started = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        self._path = scope["path"]
        self._writer = scope.get(DIRECT_WRITER)
        watcher = asyncio.create_task(self._watch(receive))
        timer = None
        if self._timeout_s is not None:
            timer = asyncio.get_running_loop().call_later(self._timeout_s, self._run_out)
        try:
            await self._respond(send)
        except ClientGoneError:
            scope["client_gone"] = True  # for the access log
        except Exception as error:
            if http_error(error).status >= 500:
                # What we raise on purpose says all; of what we do not, the traceback is needed.
                trace = None if isinstance(error, GaplessError) else error
                logger.error("Request %s failed: %s", self._stream.request_id, error, exc_info=trace)
            await self._send_error(send, http_error(error))
        finally:
            watcher.cancel()
            if timer is not None:
                timer.cancel()
            self._stream.cancel()

    @abstractmethod
    async def _respond(self, send: Send) -> None: ...

    @abstractmethod
    async def _send_error(self, send: Send, error: HttpError) -> None: ...

    async def _watch(self, receive: Receive) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while (await receive())["type"] != "http.disconnect":
                pass
            self._stream.fail(ClientGoneError())
            self._stream.cancel()

    def _run_out(self) -> None:
        self._stream.cancel()
        self._stream.fail(
            RequestTimeoutError(f"The request did not end within {self._timeout_s:g} s, the server's limit.")
        )

    async def _send_head(self, send: Send, status: int, media_type: str, **headers: str) -> None:
        self._has_started = True
        lines = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        await send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(b"content-type", media_type.encode()), *lines],
            }
        )

    async def _send_whole(self, send: Send, status: int, body: bytes, **headers: str) -> None:
        await self._send_head(send, status, "application/json", content_length=str(len(body)), **headers)
        await send({"type": "http.response.body", "body": body})


class WholeResponse(GenerationResponse):
    """One JSON object when everything is there."""

    def __init__(self, stream: Stream, collector: Collector, timeout_s: float | None) -> None:
        super().__init__(stream, timeout_s)
        self._collector = collector

    async def _respond(self, send: Send) -> None:
        while not self._stream.is_finished:
            await self._stream.wait()
            self._collector.push(self._stream.read())
        await self._send_whole(send, 200, msgspec.json.encode(self._collector.result()))

    async def _send_error(self, send: Send, error: HttpError) -> None:
        await self._send_whole(send, error.status, error.body(self._path), **error.headers)


class EventResponse(GenerationResponse):
    """Events as they come. The head waits for the first: until then an error can have its own status."""

    def __init__(self, stream: Stream, formatter: EventFormatter, timeout_s: float | None) -> None:
        super().__init__(stream, timeout_s)
        self._formatter = formatter
        self._is_sending = False

    async def _respond(self, send: Send) -> None:
        stream, formatter = self._stream, self._formatter
        while not await stream.wait(_HEARTBEAT_S):
            if formatter.heartbeat:
                await self._send(send, formatter.heartbeat)
        while True:
            data = formatter.push(stream.read())
            is_last = stream.is_finished
            if is_last:
                data += formatter.finish()
            if data:
                await self._send(send, data, more=not is_last)
            if is_last:
                return
            if self._writer is not None and self._has_started:
                stream.listen(self._write)
            await stream.wait()  # tokens are the heartbeat now

    def _write(self, index: int, chunk: Chunk) -> bool:
        """Writes a chunk at once, if the connection takes it."""
        writer = self._writer
        assert writer is not None
        if self._is_sending or not writer.is_ready:  # what is being sent comes first
            return False
        if data := self._formatter.push([(index, chunk)]):
            writer.write(data)
        if self._stream.lacks_writer(index) and (around := self._formatter.around_text(index)) is not None:
            self._stream.write_texts(index, writer.text_writer(*around))
        return True

    async def _send(self, send: Send, data: bytes, more: bool = True) -> None:
        if not self._has_started:
            # Proxies that buffer would hold tokens back.
            await self._send_head(
                send, 200, self._formatter.media_type, cache_control="no-cache", x_accel_buffering="no"
            )
        self._is_sending = True
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._is_sending = False

    async def _send_error(self, send: Send, error: HttpError) -> None:
        if self._has_started:
            await self._send(send, self._formatter.error(error), more=False)
        else:
            await self._send_whole(send, error.status, error.body(self._path), **error.headers)

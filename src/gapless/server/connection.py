"""HTTP connections that neither wait nor grow for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

# Key in a request's scope: a `DirectWriter` of its response.
DIRECT_WRITER = "gapless.writer"

# More than any honest request's; browsers and proxies stop at 8 to 32 KiB.
_MAX_HEAD_BYTES = 1 << 16
# Requests that a client may send ahead of their answers. Past it we don't read on, and so don't see it leave.
_MAX_PIPELINED = 16

_CHUNK = b"%x\r\n%b\r\n"  # length and bytes, in HTTP's chunked encoding
_encode = msgspec.json.Encoder().encode


class DirectWriter:
    """Writes pieces of a response that has begun, at once and without a coroutine.

    For streams of tokens: a task that wakes for each of them, and the layers of ASGI between it and the
    connection, cost several times what the writing does.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_ready(self) -> bool:
        """Whether a piece can be written now: the head has been sent, and the client takes what it gets."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (cycle.flow.write_paused or cycle.disconnected)

    def write(self, data: bytes) -> None:
        """Writes a piece; only when it `is_ready`."""
        self._cycle.transport.write(_CHUNK % (len(data), data))

    def text_writer(self, before: bytes, after: bytes) -> Callable[[str], bool]:
        """A function that writes a text as a JSON string between `before` and `after`; False: not `is_ready`.

        Called for every token, when a stream's objects have long left the caches: it touches few.
        """
        cycle, flow, write = self._cycle, self._cycle.flow, self._cycle.transport.write

        def write_text(text: str) -> bool:
            if flow.write_paused or cycle.disconnected:
                return False
            data = before + _encode(text) + after
            write(_CHUNK % (len(data), data))
            return True

        return write_text


def connection_class(header_timeout_s: float) -> type[asyncio.Protocol]:
    """uvicorn's connection, with limits where it has none.

    It is closed if a request's head is not there `header_timeout_s` after the connection was made, or after
    anything was received while no request is worked on; and if a head, or what stands around the pieces of a
    body, is long.
    """

    class Connection(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None
        _num_pending_bytes = 0  # received since a head was complete, or a piece of a body
        _has_progressed = False
        _ahead: tuple[Any, ...] = ()  # running cycles that a pipelined request stands behind

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait_for_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            for cycle in self._ahead:
                if not cycle.response_complete:
                    cycle.disconnected = True
                    cycle.message_event.set()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._has_progressed = False
            super().data_received(data)
            if self.transport.is_closing():
                return
            self._num_pending_bytes = 0 if self._has_progressed else self._num_pending_bytes + len(data)
            is_idle = self.cycle is None or self.cycle.response_complete
            if self._num_pending_bytes > _MAX_HEAD_BYTES:
                if is_idle:
                    self.send_400_response(f"The request's head is longer than {_MAX_HEAD_BYTES} bytes.")
                else:
                    self.transport.close()
            elif is_idle and self._timer is None:
                self._wait_for_head()

        def on_message_begin(self) -> None:
            self._wait_for_head()
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._stop_waiting()
            self._has_progressed = True
            running = self.cycle
            super().on_headers_complete()
            self.scope[DIRECT_WRITER] = DirectWriter(self.cycle)  # type: ignore[literal-required]
            if running is not None and not running.response_complete:
                self._ahead = (*(one for one in self._ahead if not one.response_complete), running)
                if len(self._ahead) < _MAX_PIPELINED:
                    self.flow.resume_reading()

        def on_body(self, body: bytes) -> None:
            self._has_progressed = True
            super().on_body(body)

        def _wait_for_head(self) -> None:
            self._stop_waiting()
            self._timer = self.loop.call_later(header_timeout_s, self._close)

        def _stop_waiting(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _close(self) -> None:
            if not self.transport.is_closing():
                self.transport.close()

    return Connection

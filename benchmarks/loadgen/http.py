"""Many HTTP requests at the same time, at as little cost as possible.

The generator shares its processor with the server that it measures. So it is one thread with a selector, and
a read costs the clock and two appends: what came is parsed when the run is over.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_READ_BYTES = 1 << 14
_LAST_CHUNK = b"0\r\n\r\n"
_CHECK_S = 1.0  # how often overdue replies are looked for


class Response:
    """Reads one HTTP/1.1 response from pieces that may be cut anywhere."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.is_complete = False
        self._buffer = bytearray()
        self._left: int | None = None  # bytes of the chunk (with its line end) or of the whole body
        self.is_chunked = False
        self._in_trailer = False

    @property
    def ends_with_connection(self) -> bool:
        """Whether nothing but the end of the connection ends the body."""
        return self.status is not None and not self.is_chunked and self._left is None

    def feed(self, piece: bytes) -> bytes:
        """What `piece` adds to the body. ValueError if it is not HTTP."""
        self._buffer += piece
        if self.status is None and not self._read_head():
            return b""
        return b"".join(self._chunks()) if self.is_chunked else self._plain()

    def _read_head(self) -> bool:
        head, separator, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        if not separator:
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        if not (match := re.match(r"HTTP/1\.\d (\d{3})", first)):
            raise ValueError(f"not the first line of a response: {first[:40]!r}")
        fields = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        self._buffer = bytearray(rest)
        self.status = int(match[1])
        self.is_chunked = "chunked" in fields.get("transfer-encoding", "").lower()
        if not self.is_chunked and "content-length" in fields:
            self._left = int(fields["content-length"])
        return True

    def _plain(self) -> bytes:
        body = bytes(self._buffer)
        self._buffer.clear()
        if self._left is not None:
            self._left -= len(body)
            self.is_complete = self._left <= 0
        return body

    def _chunks(self) -> Iterator[bytes]:
        while not self.is_complete:
            if self._left is None:
                line, separator, _ = self._buffer.partition(b"\r\n")
                if not separator:
                    return
                del self._buffer[: len(line) + 2]
                self._start_chunk(bytes(line))
                continue
            data = bytes(self._buffer[: max(0, self._left - 2)])
            taken = min(len(self._buffer), self._left)
            del self._buffer[:taken]
            self._left -= taken
            yield data
            if self._left > 0:
                return
            self._left = None

    def _start_chunk(self, line: bytes) -> None:
        if self._in_trailer:
            self.is_complete = not line
        elif (size := int(line.split(b";")[0], 16)) > 0:
            self._left = size + 2
        else:
            self._in_trailer = True


@dataclass(eq=False)
class Reply:
    """What came for a request: pieces as they were read and when, by `time.perf_counter`. `failure` says what
    went wrong with the connection."""

    started_s: float
    pieces: list[bytes] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    failure: str | None = None
    _is_stream: bool = False

    def take(self, piece: bytes) -> bool:
        """Keeps a piece; True if it is the last one."""
        self.times_s.append(time.perf_counter())
        self.pieces.append(piece)
        if self._is_stream and len(piece) >= len(_LAST_CHUNK) and not piece.endswith(_LAST_CHUNK):
            return False
        return self._looks_complete()

    def end(self) -> None:
        """The server has closed the connection."""
        response = self._response()
        if response.status is None:
            self.failure = "connection closed before the response"
        elif not response.ends_with_connection:
            self.failure = "connection closed in mid-stream"

    def _looks_complete(self) -> bool:
        """Rarely needed: at the beginning, and when the end may have come."""
        response = self._response()
        self._is_stream = response.status is not None and response.is_chunked
        return response.is_complete

    def _response(self) -> Response:
        response = Response()
        for piece in self.pieces:
            response.feed(piece)
        return response


@dataclass(frozen=True)
class HttpRun:
    """`cpu_s`: processor time that the generator took while requests ran."""

    replies: list[Reply]
    cpu_s: float


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    reply: Reply | None = None


@contextmanager
def _waiting_its_turn() -> Iterator[None]:
    """Lets the server write to all streams of a step before this thread reads them, where the system can:
    woken by each write, it would take the processor from the server in between, as no client elsewhere does.
    """
    if not hasattr(os, "SCHED_BATCH"):
        yield
        return
    policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, param)


class HttpStreams:
    """Sends requests over connections that are kept open. One run at a time."""

    def __init__(self, url: str, timeout_s: float = 600.0) -> None:
        parts = urlsplit(url if "//" in url else f"//{url}")
        self.host = parts.hostname or "127.0.0.1"
        self.port = parts.port or 80
        self._timeout_s = timeout_s
        self._selector = selectors.DefaultSelector()
        self._idle: list[_Connection] = []
        self._active: set[_Connection] = set()

    def run(
        self, requests: Sequence[bytes], num_streams: int, arrivals_s: Sequence[float] | None = None
    ) -> HttpRun:
        """Sends all requests, at most `num_streams` at a time; each not before its arrival, if there are any
        (from now).

        Replies are in the order of the requests. Their times begin with the arrival, or when they are sent.
        """
        self._open(min(num_streams, len(requests)))
        arrivals = itertools.repeat(None) if arrivals_s is None else arrivals_s
        waiting: deque[tuple[float | None, bytes]] = deque(zip(arrivals, requests))  # noqa: B905 - endless
        replies: list[Reply] = []
        gc.disable()  # its pauses would be measured
        with _waiting_its_turn():
            try:
                cpu_s, begin_s = time.process_time(), time.perf_counter()
                check_s = begin_s + _CHECK_S
                while waiting or self._active:
                    pause_s = self._send_due(waiting, replies, begin_s, num_streams)
                    if self._active or waiting:
                        self._read(pause_s)
                    if (now_s := time.perf_counter()) > check_s:
                        check_s = now_s + _CHECK_S
                        self._drop_overdue(now_s)
                return HttpRun(replies, time.process_time() - cpu_s)
            finally:
                gc.enable()

    def close(self) -> None:
        for connection in [*self._idle, *self._active]:
            self._close(connection)

    def _open(self, count: int) -> None:
        """Connections for a run, so that it measures none being opened."""
        self._read(0.0)  # those that the server has closed meanwhile go
        try:
            while len(self._idle) < count:
                self._idle.append(self._connect())
        except OSError:
            return  # the requests themselves report it

    def _connect(self) -> _Connection:
        connection = _Connection(socket.create_connection((self.host, self.port), self._timeout_s))
        connection.socket.settimeout(None)  # with a timeout every read would ask twice
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        return connection

    def _send_due(
        self,
        waiting: deque[tuple[float | None, bytes]],
        replies: list[Reply],
        begin_s: float,
        num_streams: int,
    ) -> float:
        """Sends what may be sent now; how long to wait for the next arrival, at most."""
        while waiting and len(self._active) < num_streams:
            arrival_s, request = waiting[0]
            now_s = time.perf_counter()
            if arrival_s is not None and (pause_s := begin_s + arrival_s - now_s) > 0:
                return min(pause_s, _CHECK_S)
            waiting.popleft()
            replies.append(Reply(now_s if arrival_s is None else begin_s + arrival_s))
            self._send(replies[-1], request)
        return _CHECK_S

    def _send(self, reply: Reply, request: bytes) -> None:
        try:
            connection = self._idle.pop() if self._idle else self._connect()
        except OSError as error:
            reply.failure = f"cannot connect: {error.strerror or error}"
            return
        connection.reply = reply
        self._active.add(connection)
        try:
            connection.socket.sendall(request)
        except OSError:
            self._read_from(connection)  # it may have answered before it closed

    def _read(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            self._read_from(key.data)

    def _read_from(self, connection: _Connection) -> None:
        try:
            piece = connection.socket.recv(_READ_BYTES)
        except OSError:
            piece = b""
        reply = connection.reply
        if piece and reply is not None:
            try:
                if not reply.take(piece):
                    return
            except ValueError:
                reply.failure = "not an HTTP response"
            else:
                connection.reply = None
                self._active.remove(connection)
                self._idle.append(connection)
                return
        elif reply is not None:
            reply.end()
        self._close(connection)

    def _drop_overdue(self, now_s: float) -> None:
        for connection in list(self._active):
            if connection.reply is not None and now_s - connection.reply.started_s > self._timeout_s:
                connection.reply.failure = f"not complete after {self._timeout_s:g} s"
                self._close(connection)

    def _close(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._active.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

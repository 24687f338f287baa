"""HTTP connections that do not wait for ever."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


def connection_class(header_timeout_s: float) -> type[asyncio.Protocol]:
    """uvicorn's connection, closed if a request's head is not there in time.

    That is `header_timeout_s` after its first byte, or after the connection was made.
    """

    class Connection(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait_for_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            self._wait_for_head()
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._stop_waiting()
            super().on_headers_complete()

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

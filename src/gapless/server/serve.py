"""Runs a server until it is told to end."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from prometheus_client import disable_created_metrics

from gapless.errors import GaplessError, InvalidRequestError
from gapless.server.app import make_app
from gapless.server.config import ServerConfig
from gapless.server.connection import connection_class
from gapless.server.parsing import find_reasoning_tags, find_tool_format

logger = logging.getLogger("gapless.server")

_BACKLOG = 2048
_LAST_LINES_S = 1.0  # for clients to take the error that ends their request
_CLOSE_S = 30.0  # for all else that ends with the server
# A client's machine that has gone without a word is found out after about two minutes.
_KEEPALIVE_IDLE_S = 60
_KEEPALIVE_PROBE_S = 15


def serve(config: ServerConfig) -> None:
    """Serves until SIGTERM or SIGINT. Then running requests have `drain_timeout_s` to end; a second signal
    cuts them off at once.

    LoadError if the model is missing or cannot be run; any GaplessError that a process of the server died of.
    """
    causes: list[GaplessError] = []

    def end(cause: GaplessError) -> None:
        causes.append(cause)
        server.should_exit = True

    if config.tool_call_parser is not None:
        find_tool_format(config.tool_call_parser)  # a wrong name is said at once
    if config.reasoning_parser is not None:
        find_reasoning_tags(config.reasoning_parser)
    disable_created_metrics()  # type: ignore[no-untyped-call]
    app = make_app(config, end)
    listener = _listen(config.host, config.port, config.send_timeout_s)
    server = _Server(
        uvicorn.Config(
            app,
            http=connection_class(config.header_timeout_s),
            ws="none",
            backlog=_BACKLOG,
            loop="uvloop",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=max(1, round(config.keep_alive_s)),
            timeout_graceful_shutdown=round(config.drain_timeout_s + _CLOSE_S),
        ),
        config.drain_timeout_s,
        app.state.service.end_requests,
    )
    _allow_many_connections()
    if config.is_public and config.api_key is None:
        logger.warning("%s can be reached from other machines, and there is no --api-key", config.host)
    host, port = listener.getsockname()[:2]
    logger.info("Serving %s on http://%s:%d", config.engine.model, f"[{host}]" if ":" in host else host, port)
    with _ended_by_signals(server):
        server.run(sockets=[listener])
    if causes:
        raise causes[0]


class _Server(uvicorn.Server):
    """uvicorn's server; what still runs when it should have ended is told so, and then cut off."""

    def __init__(
        self, config: uvicorn.Config, drain_timeout_s: float, end_requests: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._drain_timeout_s = drain_timeout_s
        self._end_requests = end_requests
        self._is_urgent = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal's handler."""
        self._is_urgent = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets requests end."""
        cutting = asyncio.create_task(self._cut_off())
        await super().shutdown(sockets)
        cutting.cancel()

    async def _cut_off(self) -> None:
        deadline_s = time.monotonic() + self._drain_timeout_s
        while time.monotonic() < deadline_s and not self._is_urgent:
            await asyncio.sleep(0.05)
        self._end_requests()
        await asyncio.sleep(_LAST_LINES_S)
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


def _listen(host: str, port: int, send_timeout_s: float) -> socket.socket:
    """A socket that is bound. InvalidRequestError if that is not possible."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _drop_dead_clients(listener, send_timeout_s)
        listener.bind((host, port))
        listener.listen(_BACKLOG)  # already now: who reads the log can connect
    except OSError as error:
        raise InvalidRequestError(
            f"The server cannot listen on {host} port {port}: {error.strerror or error}. Is another server "
            "running there? Choose another --port.",
            param="port",
        ) from None
    return listener


def _drop_dead_clients(listener: socket.socket, send_timeout_s: float) -> None:
    """Has the kernel end connections to clients that do not take what is sent, or do not exist any more.

    It watches them anyway; a timer of ours for each token would cost more. Connections inherit this."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", _KEEPALIVE_PROBE_S),
        ("TCP_USER_TIMEOUT", max(1, round(send_timeout_s * 1000))),
    ):
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@contextmanager
def _ended_by_signals(server: uvicorn.Server) -> Iterator[None]:
    """uvicorn has handlers of its own while it runs. These are for signals that come before, and for those
    that it raises again at its end, as if nobody had answered them."""

    def end(number: int, frame: object) -> None:
        server.should_exit = True

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _allow_many_connections() -> None:
    """As many open files as the system lets us have: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

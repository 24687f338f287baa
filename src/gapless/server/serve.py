"""Runs a server until it is told to end."""

from __future__ import annotations

import logging
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from prometheus_client import disable_created_metrics

from gapless.errors import GaplessError, InvalidRequestError
from gapless.server.app import make_app
from gapless.server.config import ServerConfig
from gapless.server.connection import connection_class
from gapless.server.parsing import find_reasoning_tags, find_tool_format

logger = logging.getLogger("gapless.server")

_BACKLOG = 2048


def serve(config: ServerConfig) -> None:
    """Serves until SIGTERM or SIGINT; then running requests have `drain_timeout_s` to end.

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
    listener = _listen(config.host, config.port)
    server = uvicorn.Server(
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
            timeout_graceful_shutdown=max(1, round(config.drain_timeout_s)),
        )
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


def _listen(host: str, port: int) -> socket.socket:
    """A socket that is bound. InvalidRequestError if that is not possible."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)  # already now: who reads the log can connect
    except OSError as error:
        raise InvalidRequestError(
            f"The server cannot listen on {host} port {port}: {error.strerror or error}. Is another server "
            "running there? Choose another --port.",
            param="port",
        ) from None
    return listener


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

"""Sockets between the server's processes: one typed message at a time, over a folder of this machine."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import zmq

T = TypeVar("T")

logger = logging.getLogger("gapless.server")

# The kernel's limit of a socket's path is 107 bytes.
_MAX_FOLDER_BYTES = 80


@contextmanager
def socket_folder() -> Iterator[str]:
    """A folder for sockets that only this user can open; it is removed afterwards."""
    folder = tempfile.mkdtemp(prefix="gapless-")
    if len(folder) > _MAX_FOLDER_BYTES:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="gapless-", dir="/tmp")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def open_socket(kind: int, *, bind: str | None = None, connect: str | None = None) -> zmq.Socket[bytes]:
    """A socket that never blocks its sender, and forgets what was not delivered when it is closed."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.set_hwm(0)
    socket.linger = 0
    if bind is not None:
        socket.bind(bind)
    if connect is not None:
        socket.connect(connect)
    return socket


class Codec(Generic[T]):
    """Bytes of the messages of one kind."""

    def __init__(self, kind: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(kind)

    def encode(self, message: Any) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: bytes) -> T:
        """msgspec.DecodeError for what is no such message."""
        return self._decoder.decode(data)  # type: ignore[no-any-return]


class AsyncChannel(Generic[T]):
    """One end of a two-way channel, on the event loop that runs.

    `on_message` gets what comes, of type `kind`.
    """

    def __init__(
        self,
        kind: Any,
        on_message: Callable[[T], None],
        *,
        bind: str | None = None,
        connect: str | None = None,
    ) -> None:
        self._socket = open_socket(zmq.DEALER, bind=bind, connect=connect)
        self._codec: Codec[T] = Codec(kind)
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self._receive)
        self._loop.call_soon(self._receive)

    def send(self, message: Any) -> None:
        """Never blocks: the socket's queue is unbounded. zmq.Again if nobody is at the other end."""
        self._socket.send(self._codec.encode(message), zmq.NOBLOCK)
        # The socket's descriptor tells of a change once, to whoever looks first: that may be this call.
        if self._has_message():
            self._loop.call_soon(self._receive)

    def close(self) -> None:
        """Idempotent."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
            self._socket.close()

    def _receive(self) -> None:
        while self._has_message():
            message = self._codec.decode(self._socket.recv(zmq.NOBLOCK))
            try:
                self._on_message(message)
            except Exception:  # what one message does must not keep the next from being read
                logger.exception("A message could not be handled: %.200r", message)

    def _has_message(self) -> bool:
        return not self._socket.closed and bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)


def pack_ids(token_ids: Any) -> bytes:
    """Token ids as int32."""
    return np.asarray(token_ids, dtype=np.int32).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    token_ids: list[int] = np.frombuffer(data, dtype=np.int32).tolist()
    return token_ids

"""Sockets between the server's processes: one typed message at a time, over a folder of this machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import zmq
import zmq.asyncio

T = TypeVar("T")

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
    """One end of a two-way channel, on an event loop. `kind`: the type of what is received."""

    def __init__(self, kind: Any, *, bind: str | None = None, connect: str | None = None) -> None:
        self._socket: zmq.asyncio.Socket = zmq.asyncio.Socket.from_socket(
            open_socket(zmq.DEALER, bind=bind, connect=connect)
        )
        self._codec: Codec[T] = Codec(kind)

    def send(self, message: Any) -> None:
        """Never blocks: the socket's queue is unbounded."""
        # By the asynchronous socket: its file descriptor tells of an arrival once, maybe to this call, so that
        # afterwards it must look whether `receive` has something to take.
        sent: Any = self._socket.send(self._codec.encode(message), zmq.NOBLOCK)
        sent.result()

    async def receive(self) -> T:
        return self._codec.decode(await self._socket.recv())

    def close(self) -> None:
        self._socket.close()


def pack_ids(token_ids: Any) -> bytes:
    """Token ids as int32."""
    return np.asarray(token_ids, dtype=np.int32).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    token_ids: list[int] = np.frombuffer(data, dtype=np.int32).tolist()
    return token_ids

"""HTTP by hand, for clients that behave badly."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

ANSWER_S = 120.0


def post(path: str, body: Any, **headers: str) -> bytes:
    """The bytes of a request; `body` is sent as JSON unless it is bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head("POST", path, content_length=str(len(data)), **headers) + data


def head(method: str, path: str, **headers: str) -> bytes:
    """The bytes of a request's head."""
    lines = [f"{method} {path} HTTP/1.1", "host: test", "content-type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


@dataclass
class Answer:
    """What a server says."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Of a stream; `[DONE]` as it is."""
        lines = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    @property
    def text(self) -> str:
        """What a completion wrote, streamed or not."""
        whole = self.events if "event-stream" in self.headers["content-type"] else [self.json]
        choices = [choice for part in whole if part != "[DONE]" for choice in part.get("choices", ())]
        return "".join(choice["text"] for choice in choices)

    @property
    def error(self) -> Any:
        """The error object, of a whole answer or of a stream."""
        if "event-stream" in self.headers["content-type"]:
            return next((one["error"] for one in self.events if one != "[DONE]" and "error" in one), None)
        return self.json.get("error")


class Connection:
    """A connection to a server, with nothing between it and the socket."""

    def __init__(self, url: str, receive_bytes: int | None = None) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 0)
        self._receive_bytes = receive_bytes

    async def __aenter__(self) -> Connection:
        self.socket = socket.socket()
        if self._receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_bytes)
        self.socket.setblocking(False)
        await asyncio.get_running_loop().sock_connect(self.socket, self._address)
        self.reader, self.writer = await asyncio.open_connection(sock=self.socket, limit=1 << 20)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.writer.transport.abort()

    def reset(self) -> None:
        """Leaves without the courtesies of TCP."""
        self.socket_option(socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def socket_option(self, option: int, value: Any) -> None:
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, option, value)

    async def ask(self, data: bytes) -> Answer:
        """Sends bytes and reads an answer."""
        self.writer.write(data)
        return await self.answer()

    async def answer(self) -> Answer:
        """The next answer; ConnectionError if there is none."""
        try:
            return await asyncio.wait_for(self._answer(), ANSWER_S)
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("the server closed the connection") from error

    async def _answer(self) -> Answer:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines[1:] if line)
        }
        status = int(lines[0].split()[1])
        if status == 100:
            return await self._answer()
        if headers.get("transfer-encoding") != "chunked":
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
            return Answer(status, headers, body)
        pieces: list[bytes] = []
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            pieces.append(await self.reader.readexactly(size))
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return Answer(status, headers, b"".join(pieces))

    async def is_closed(self) -> bool:
        """Waits for the server to close; anything that it says before is thrown away."""
        try:
            while await asyncio.wait_for(self.reader.read(1 << 14), ANSWER_S):
                pass
        except ConnectionError:
            pass
        return True


async def ask(url: str, data: bytes) -> Answer:
    """An answer, over a connection of its own."""
    async with Connection(url) as connection:
        return await connection.ask(data)

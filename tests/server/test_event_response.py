"""Streams of events: what is written directly and what the task sends come in the order of the tokens."""

from __future__ import annotations

import asyncio
from typing import Any

from gapless.sampling import SamplingParams
from gapless.server.connection import DIRECT_WRITER
from gapless.server.errors import HttpError
from gapless.server.messages import Chunk
from gapless.server.responses import EventFormatter, EventResponse, Items
from gapless.server.stream import Generation, Stream


class Plain(EventFormatter):
    """Shows texts as they are."""

    def push(self, items: Items) -> bytes:
        return "".join(chunk.text for _, chunk in items).encode()

    def finish(self) -> bytes:
        return b"."

    def error(self, error: HttpError) -> bytes:
        return b"!"


class Client:
    """Takes what it is sent, when the test lets it; `is_ready` as a connection that was never paused."""

    def __init__(self) -> None:
        self.got = b""
        self.takes = asyncio.Event()
        self.takes.set()
        self.is_waited_for = asyncio.Event()
        self.is_ready = True

    def write(self, data: bytes) -> None:
        self.got += data

    async def send(self, message: Any) -> None:
        self.is_waited_for.set()
        await self.takes.wait()
        self.got += message.get("body", b"")

    async def receive(self) -> Any:
        await asyncio.Event().wait()


class Running:
    """One choice's stream on its way to a client."""

    def __init__(self, formatter: EventFormatter) -> None:
        params = SamplingParams()
        self.client = Client()
        self._stream = Stream("id", params, 0, lambda generation: None)
        self._generation = Generation(1, self._stream, 0, None, params)
        self._stream.add(self._generation)
        scope: Any = {"type": "http", "path": "/", DIRECT_WRITER: self.client}
        response = EventResponse(self._stream, formatter, None)
        self.task = asyncio.create_task(response(scope, self.client.receive, self.client.send))

    def put(self, text: str, reason: str | None = None) -> None:
        self._stream.put(self._generation, Chunk(1, 0, text, 1, reason))

    async def begin(self, text: str) -> None:
        """Sends a first text, and lets the task come to where chunks are written directly."""
        self.put(text)
        while not self.client.got:
            await asyncio.sleep(0)
        await asyncio.sleep(0)


def test_a_chunk_never_overtakes_one_that_is_being_sent() -> None:
    async def run() -> bytes:
        running = Running(Plain())
        client, put = running.client, running.put
        await running.begin("a")
        put("b")
        assert client.got == b"ab"  # at once, without the task
        client.is_ready = False  # the connection is full: the task has to send
        client.takes.clear()
        client.is_waited_for.clear()
        put("c")
        await client.is_waited_for.wait()
        client.is_ready = True  # it has room again, but the task has not run since
        put("d")
        assert client.got == b"ab"
        client.takes.set()
        put("e", "stop")
        await running.task
        return client.got

    assert asyncio.run(run()) == b"abcde."


def test_a_formatter_that_fails_ends_its_own_stream() -> None:
    class Broken(Plain):
        def push(self, items: Items) -> bytes:
            if any(chunk.text == "x" for _, chunk in items):
                raise RuntimeError("broken")
            return super().push(items)

    async def run() -> bytes:
        running = Running(Broken())
        await running.begin("a")
        running.put("x")
        await running.task
        return running.client.got

    assert asyncio.run(run()) == b"a!"

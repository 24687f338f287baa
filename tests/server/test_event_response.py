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


def test_a_chunk_never_overtakes_one_that_is_being_sent() -> None:
    async def run() -> bytes:
        params = SamplingParams()
        stream = Stream("id", params, 0, lambda generation: None)
        generation = Generation(1, stream, 0, None, params)
        stream.add(generation)
        client = Client()
        scope: Any = {"type": "http", "path": "/", DIRECT_WRITER: client}
        task = asyncio.create_task(EventResponse(stream, Plain(), None)(scope, client.receive, client.send))

        def put(text: str, reason: str | None = None) -> None:
            stream.put(generation, Chunk(1, 0, text, 1, reason))

        put("a")
        while not client.got:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
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
        await task
        return client.got

    assert asyncio.run(run()) == b"abcde."


def test_a_formatter_that_fails_ends_its_own_stream() -> None:
    class Broken(Plain):
        def push(self, items: Items) -> bytes:
            if any(chunk.text == "x" for _, chunk in items):
                raise RuntimeError("broken")
            return super().push(items)

    async def run() -> bytes:
        params = SamplingParams()
        stream = Stream("id", params, 0, lambda generation: None)
        generation = Generation(1, stream, 0, None, params)
        stream.add(generation)
        client = Client()
        scope: Any = {"type": "http", "path": "/", DIRECT_WRITER: client}
        task = asyncio.create_task(EventResponse(stream, Broken(), None)(scope, client.receive, client.send))
        stream.put(generation, Chunk(1, 0, "a", 1))
        while not client.got:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        stream.put(generation, Chunk(1, 0, "x", 1))
        await task
        return client.got

    assert asyncio.run(run()) == b"a!"

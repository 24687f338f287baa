"""Streams of events: what is written directly and what the task sends come in the order of the tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

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

    def text_writer(self, before: bytes, after: bytes) -> Callable[[str], bool]:
        def write_text(text: str) -> bool:
            if self.is_ready:
                self.write(before + text.encode() + after)
            return self.is_ready

        return write_text

    def fill(self) -> None:
        """The connection has no room: the task has to send, and waits until the client takes it."""
        self.is_ready = False
        self.takes.clear()
        self.is_waited_for.clear()

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

    def fail(self, error: Exception) -> None:
        self._stream.fail(error)

    def put_text(self, text: str) -> None:
        """As `put`, by the way of chunks that have one token's text and nothing else."""
        self._generation.put_text(text)

    async def begin(self, text: str) -> None:
        """Sends a first text, and lets the task come to where chunks are written directly."""
        self.put(text)
        while not self.client.got:
            await asyncio.sleep(0)
        await asyncio.sleep(0)


class Marked(Plain):
    """Has a short way for texts, whose marks show that it was taken."""

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        return b"<", b">"


@pytest.mark.parametrize(
    ("formatter", "shown"),
    [(Plain(), b"abcdefgh."), (Marked(), b"ab<c>defg<h>.")],
    ids=["plain", "short way"],
)
def test_a_text_never_overtakes_one_that_is_being_sent(formatter: EventFormatter, shown: bytes) -> None:
    async def run() -> bytes:
        running = Running(formatter)
        client, put_text = running.client, running.put_text
        await running.begin("a")
        put_text("b")
        put_text("c")  # the short way, now that there is one
        client.fill()
        put_text("d")
        await client.is_waited_for.wait()
        client.is_ready = True  # it has room again, but the task has not run since
        put_text("e")
        running.put("f")
        client.takes.set()
        while not client.got.endswith(b"f"):
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        put_text("g")
        put_text("h")
        running.put("", "stop")
        await running.task
        return client.got

    assert asyncio.run(run()) == shown


def test_a_failure_comes_after_the_texts_before_it() -> None:
    async def run() -> bytes:
        running = Running(Marked())
        await running.begin("a")
        running.put_text("b")
        running.put_text("c")
        running.fail(RuntimeError("broken"))
        running.put_text("d")  # comes too late
        await running.task
        return running.client.got

    assert asyncio.run(run()) == b"ab<c>!"


def test_a_chunk_never_overtakes_one_that_is_being_sent() -> None:
    async def run() -> bytes:
        running = Running(Plain())
        client, put = running.client, running.put
        await running.begin("a")
        put("b")
        assert client.got == b"ab"  # at once, without the task
        client.fill()
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


def test_a_text_writer_that_fails_ends_its_own_stream() -> None:
    class Broken(Marked):
        def around_text(self, index: int) -> tuple[bytes, bytes]:
            return b"<", None  # type: ignore[return-value]

    async def run() -> bytes:
        running = Running(Broken())
        await running.begin("a")
        running.put_text("b")
        running.put_text("x")
        await running.task
        return running.client.got

    assert asyncio.run(run()) == b"ab!"

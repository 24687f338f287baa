"""What `Engine.submit` gives back: a request in the engine, to iterate over, to wait for or to cancel."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

from gapless.engine.choice import OutputBuilder
from gapless.engine.events import RequestEvent
from gapless.engine.mailbox import Mailbox
from gapless.engine.request import Request, SequenceState
from gapless.errors import EngineError
from gapless.sampling import RequestMetrics, RequestOutput, StreamChunk

if TYPE_CHECKING:
    from gapless.tokenizer import Tokenizer


class RequestHandle:
    """One request; for one consumer at a time.

    Iterating (also with `async for`) gives `StreamChunk`s until every choice has ended; it raises EngineError
    when the engine fails. Stop strings take effect as the handle is read.
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer, cancel: Callable[[Request, int | None], None]
    ) -> None:
        self._request = request
        self._cancel = cancel
        self._builder = OutputBuilder(request, tokenizer, cancel)
        self._mailbox: Mailbox[list[RequestEvent]] = Mailbox()
        request.sink = lambda _, events: self._mailbox.put(events)

    @property
    def request_id(self) -> str:
        return self._request.id

    @property
    def state(self) -> SequenceState:
        """Where the request is now. Of several choices the one that is furthest speaks for all."""
        return self._request.state

    @property
    def stats(self) -> RequestMetrics:
        """Queue time, TTFT, TPOT, cached tokens and token counts of what has been read so far."""
        return self._builder.output.metrics

    @property
    def output(self) -> RequestOutput:
        """The result of what has been read so far."""
        return self._builder.output

    def cancel(self) -> None:
        """Ends all choices with "abort" at the next step, but for those that have ended by then."""
        self._cancel(self._request, None)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Waits for the end. TimeoutError after `timeout` s (the request goes on), EngineError on failure."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._builder.is_finished:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                self._read(self._mailbox.get(remaining))
            except TimeoutError:
                raise TimeoutError(f"Request {self.request_id} has not ended within {timeout} s.") from None
        return self._builder.output

    def __iter__(self) -> Iterator[StreamChunk]:
        while not self._builder.is_finished:
            yield from self._read(self._mailbox.get())

    async def __aiter__(self) -> AsyncIterator[StreamChunk]:
        while not self._builder.is_finished:
            for chunk in self._read(await self._mailbox.get_async()):
                yield chunk

    def _read(self, events: list[RequestEvent]) -> list[StreamChunk]:
        chunks = self._builder.push(events)
        if self._builder.error is not None:
            raise EngineError(self._builder.error)
        return chunks

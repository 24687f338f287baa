"""Turns the events of an embedding request into its result, in the consumer's thread."""

from __future__ import annotations

from collections.abc import Iterable

from gapless.engine.events import EmbeddingEvent, FinishEvent, RequestEvent
from gapless.engine.request import Request
from gapless.sampling import EmbeddingOutput, EmbeddingRequestOutput, RequestMetrics


class EmbeddingBuilder:
    """The embedding of one request. `error` says why there will be none."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.output: EmbeddingRequestOutput | None = None
        self.error: str | None = None
        self._embedding: EmbeddingOutput | None = None

    @property
    def is_finished(self) -> bool:
        return self.output is not None

    def push(self, events: Iterable[RequestEvent]) -> None:
        """Takes events; `output` is there after the last one."""
        for event in events:
            if isinstance(event, EmbeddingEvent):
                self._embedding = EmbeddingOutput(event.vector)
            elif isinstance(event, FinishEvent):
                self._finish(event)

    def _finish(self, event: FinishEvent) -> None:
        request = self.request
        if self._embedding is None:
            self.error = event.message or f"Request {request.id} was ended before its embedding was there."
            return
        metrics = RequestMetrics(
            request.arrival_s,
            len(request.prompt_token_ids),
            queue_s=None if request.admitted_s is None else request.admitted_s - request.arrival_s,
            e2e_s=event.time_s - request.arrival_s,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
        )
        self.output = EmbeddingRequestOutput(
            request.id, request.prompt, list(request.prompt_token_ids), self._embedding, metrics
        )

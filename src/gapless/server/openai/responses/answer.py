"""`/v1/responses`: the answer, whole or in events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from gapless.errors import InvalidRequestError
from gapless.server.chat import ChatStyle, Choices
from gapless.server.errors import HttpError
from gapless.server.logprobs import chat_logprobs
from gapless.server.messages import Chat, Chunk
from gapless.server.openai.responses.items import messages_of
from gapless.server.openai.responses.output import (
    CallItem,
    Event,
    Logprobs,
    MessageItem,
    OutputItem,
    ReasoningItem,
)
from gapless.server.openai.responses.request import ResponsesRequest
from gapless.server.parsing import ContentDelta, Delta, ReasoningDelta, ToolCallStart
from gapless.server.responses import (
    Collector,
    EventFormatter,
    EventResponse,
    GenerationResponse,
    Items,
    WholeResponse,
)
from gapless.server.service import Service
from gapless.server.stream import Stream

_encode = msgspec.json.Encoder().encode


class Answer:
    """A response that is being written, and the events by which it grows."""

    def __init__(
        self, head: Mapping[str, Any], stream: Stream, choices: Choices, num_logprobs: int | None
    ) -> None:
        self._head = head
        self._stream = stream
        self._choices = choices
        self._num_logprobs = num_logprobs
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._logprobs: Logprobs = []  # of tokens whose text is held back
        self._has_begun = False

    def take(self, chunk: Chunk) -> list[Event]:
        """What happens by a chunk."""
        events = self._begin()
        deltas = self._choices[0].take(chunk)
        if chunk.logprobs is not None and self._num_logprobs is not None:
            self._logprobs += chat_logprobs(chunk.logprobs, self._num_logprobs)
        for delta in deltas:
            events += self._grow(delta)
        return events

    def end(self) -> list[Event]:
        """What happens when all chunks are there."""
        events = [] if self._items else self._start(MessageItem(0))
        status = self._status
        events += self._close(status)
        return [*events, {"type": f"response.{status}", "response": self.shown(status)}]

    def fail(self, error: HttpError) -> list[Event]:
        """What happens instead of the rest."""
        events = [*self._begin(), *self._close("incomplete")]
        # Clients know few codes; this one is for all that is not theirs.
        failed = {**self.shown("failed"), "error": {"code": "server_error", "message": error.message}}
        return [*events, {"type": "response.failed", "response": failed}]

    def result(self) -> dict[str, Any]:
        """The response as a whole, after `end`."""
        return self.shown(self._status)

    def shown(self, status: str) -> dict[str, Any]:
        """The response as it is now."""
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [item.shown() for item in self._items],
            "usage": None if status == "in_progress" else self._usage(),
        }

    @property
    def _status(self) -> str:
        return "incomplete" if self._choices[0].finish_reason == "length" else "completed"

    def _begin(self) -> list[Event]:
        if self._has_begun:
            return []
        self._has_begun = True
        response = self.shown("in_progress")
        return [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]

    def _grow(self, delta: Delta) -> list[Event]:
        events: list[Event] = []
        logprobs, self._logprobs = self._logprobs, []
        if isinstance(delta, ToolCallStart):
            return self._start(CallItem(len(self._items), delta.id, delta.name))
        if isinstance(delta, ContentDelta) and not isinstance(self._open, MessageItem):
            events = self._start(MessageItem(len(self._items)))
        elif isinstance(delta, ReasoningDelta) and not isinstance(self._open, ReasoningItem):
            events = self._start(ReasoningItem(len(self._items)))
        assert self._open is not None
        return [*events, self._open.grow(delta.text, logprobs)]

    def _start(self, item: OutputItem) -> list[Event]:
        closing = self._close("completed")
        self._items.append(item)
        self._open = item
        return [*closing, *item.open()]

    def _close(self, status: str) -> list[Event]:
        item, self._open = self._open, None
        return [] if item is None else item.close(status)

    def _usage(self) -> dict[str, Any]:
        num_prompt, num_output = self._stream.num_prompt_tokens, self._stream.num_output_tokens
        details = {"cached_tokens": self._stream.num_cached_tokens, "cache_write_tokens": 0}
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": details,
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self._choices[0].num_reasoning_tokens},
            "total_tokens": num_prompt + num_output,
        }


class WholeAnswer(Collector):
    """A response as one object."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def push(self, items: Items) -> None:
        for _, chunk in items:
            self._answer.take(chunk)

    def result(self) -> dict[str, Any]:
        self._answer.end()
        return self._answer.result()


class AnswerEvents(EventFormatter):
    """A response, event by event. All are numbered."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._num_events = 0

    def push(self, items: Items) -> bytes:
        return b"".join(self._written(self._answer.take(chunk)) for _, chunk in items)

    def finish(self) -> bytes:
        return self._written(self._answer.end())

    def error(self, error: HttpError) -> bytes:
        return self._written(self._answer.fail(error))

    def _written(self, events: list[Event]) -> bytes:
        data = []
        for event in events:
            numbered = {**event, "sequence_number": self._num_events}
            data.append(b"event: " + event["type"].encode() + b"\ndata: " + _encode(numbered) + b"\n\n")
            self._num_events += 1
        return b"".join(data)


def _sendable(fields: dict[str, Any]) -> dict[str, Any]:
    """What a request gives to be repeated, if that is possible: JSON can have half of a surrogate pair."""
    try:
        _encode(fields)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"The request cannot be represented: {error}.") from None
    return fields


def response(service: Service, request: ResponsesRequest, request_id: str) -> GenerationResponse:
    """Answers. InvalidRequestError, NotReadyError or QueueFullError if the request can't be taken."""
    facts = service.require_ready()
    style = ChatStyle(service)
    parallel = request.parallel_tool_calls is not False
    tools = style.tool_use(request.chat_tools(), request.chat_tool_choice(), parallel)
    params = request.engine_params(facts.generation_defaults, tools.constraint)
    messages = messages_of(request.input, request.instructions)
    prompt = Chat(messages, tools.tools, request.template_variables())
    head = {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": service.model_name,
        **_sendable(request.echo(params)),
    }
    stream, choices = style.open(prompt, params, tools, request_id=request_id, priority=request.priority or 0)
    answer = Answer(head, stream, choices, request.num_logprobs)
    timeout_s = service.config.request_timeout_s
    if request.stream:
        return EventResponse(stream, AnswerEvents(answer), timeout_s)
    return WholeResponse(stream, WholeAnswer(answer), timeout_s)

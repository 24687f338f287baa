"""Answers as Ollama writes them: one JSON object, or one on each line."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import msgspec
from starlette.responses import Response

from gapless.server.chat import Choices
from gapless.server.errors import HttpError
from gapless.server.logprobs import chat_logprobs
from gapless.server.messages import Chunk
from gapless.server.parsing import ContentDelta, Delta, ReasoningDelta, ToolCallStart
from gapless.server.responses import (
    Collector,
    EventFormatter,
    EventResponse,
    GenerationResponse,
    Items,
    WholeResponse,
)
from gapless.server.stream import Stream

NDJSON = "application/x-ndjson"

_encode = msgspec.json.Encoder().encode


@dataclass
class Part:
    """What an answer gains."""

    content: str = ""
    thinking: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def __iadd__(self, other: Part) -> Part:
        self.content += other.content
        self.thinking += other.thinking
        self.tool_calls += other.tool_calls
        return self


class Shape(ABC):
    """The fields in which one path shows a part of an answer."""

    @abstractmethod
    def fields(self, part: Part) -> dict[str, Any]:
        """Those of a part; of an empty one, those that are always there."""


class MessageShape(Shape):
    """A chat's."""

    def fields(self, part: Part) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": part.content}
        if part.thinking:
            message["thinking"] = part.thinking
        if part.tool_calls:
            message["tool_calls"] = part.tool_calls
        return {"message": message}


class TextShape(Shape):
    """A text's."""

    def fields(self, part: Part) -> dict[str, Any]:
        return {"response": part.content} | ({"thinking": part.thinking} if part.thinking else {})


class Parts:
    """Makes parts of deltas. A tool call is one part, given out when all of its arguments are there."""

    def __init__(self) -> None:
        self._call: ToolCallStart | None = None
        self._arguments: list[str] = []

    def take(self, deltas: Iterable[Delta], is_last: bool) -> list[Part]:
        """The parts that are complete now."""
        parts: list[Part] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                parts += [*self._ended_call(), Part(content=delta.text)]
            elif isinstance(delta, ReasoningDelta):
                parts += [*self._ended_call(), Part(thinking=delta.text)]
            elif isinstance(delta, ToolCallStart):
                parts += self._ended_call()
                self._call = delta
            else:
                self._arguments.append(delta.text)
        return [*parts, *self._ended_call()] if is_last else parts

    def _ended_call(self) -> list[Part]:
        call, text = self._call, "".join(self._arguments)
        self._call, self._arguments = None, []
        if call is None:
            return []
        try:
            arguments = json.loads(text or "{}")
            _encode(arguments)  # a half of a surrogate pair could not be sent
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):  # there is no way to show them as a call
            return [Part(content=f'{{"name": {json.dumps(call.name)}, "arguments": {text}')]
        function = {"index": call.index, "name": call.name, "arguments": arguments}
        return [Part(tool_calls=[{"id": call.id, "function": function}])]


class Answer:
    """An answer on its way from the engine to a client."""

    def __init__(
        self, model: str, stream: Stream, choices: Choices, shape: Shape, num_logprobs: int | None
    ) -> None:
        self._model = model
        self._stream = stream
        self._choices = choices
        self._shape = shape
        self._num_logprobs = num_logprobs
        self._parts = Parts()

    def take(self, chunk: Chunk) -> tuple[list[Part], list[dict[str, Any]]]:
        """What a chunk adds: parts, and log-probabilities."""
        deltas = self._choices[chunk.index].take(chunk)
        logprobs = []
        if chunk.logprobs is not None and self._num_logprobs is not None:
            logprobs = chat_logprobs(chunk.logprobs, self._num_logprobs)
        return self._parts.take(deltas, chunk.finish_reason is not None), logprobs

    def line(self, part: Part, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        """An object in the midst of the answer."""
        fields = {**_head(self._model), **self._shape.fields(part), "done": False}
        return {**fields, "logprobs": logprobs} if logprobs else fields

    def last(self, part: Part, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        """The object at the end."""
        reason = "length" if self._choices[0].finish_reason == "length" else "stop"
        return {
            **self.line(part, logprobs),
            "done": True,
            "done_reason": reason,
            **_durations(self._stream),
        }


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": timestamp(datetime.now(timezone.utc))}


def _durations(stream: Stream) -> dict[str, int]:
    """Counts, and times in ns. The model is always loaded: what a request waits for is a slot."""
    metrics = stream.generations[0].metrics
    queue_s = ttft_s = e2e_s = 0.0
    if metrics is not None:
        queue_s = metrics.queue_s or 0.0
        ttft_s = metrics.ttft_s or queue_s
        e2e_s = metrics.e2e_s or ttft_s
    return {
        "total_duration": round(e2e_s * 1e9),
        "load_duration": round(queue_s * 1e9),
        "prompt_eval_count": stream.num_prompt_tokens,
        "prompt_eval_duration": round((ttft_s - queue_s) * 1e9),
        "eval_count": stream.num_output_tokens,
        "eval_duration": round((e2e_s - ttft_s) * 1e9),
    }


def timestamp(time: datetime) -> str:
    """A time in UTC as Ollama writes it."""
    return time.isoformat().replace("+00:00", "Z")


class AnswerLines(EventFormatter):
    """An answer, line by line."""

    media_type = NDJSON
    heartbeat = b""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def push(self, items: Items) -> bytes:
        lines: list[dict[str, Any]] = []
        for _, chunk in items:
            parts, logprobs = self._answer.take(chunk)
            if logprobs and not parts:  # their text is held back
                parts = [Part()]
            lines += [self._answer.line(part, [] if i else logprobs) for i, part in enumerate(parts)]
        return b"".join(map(ndjson, lines))

    def finish(self) -> bytes:
        return ndjson(self._answer.last(Part(), []))

    def error(self, error: HttpError) -> bytes:
        return ndjson({"error": error.message})


class WholeAnswer(Collector):
    """An answer as one object."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._whole = Part()
        self._logprobs: list[dict[str, Any]] = []

    def push(self, items: Items) -> None:
        for _, chunk in items:
            parts, logprobs = self._answer.take(chunk)
            self._logprobs += logprobs
            for part in parts:
                self._whole += part

    def result(self) -> dict[str, Any]:
        return self._answer.last(self._whole, self._logprobs)


def ndjson(value: Any) -> bytes:
    """A line."""
    return _encode(value) + b"\n"


def respond(
    stream: Stream, answer: Answer, wants_stream: bool, timeout_s: float | None
) -> GenerationResponse:
    """The answer, in lines or whole."""
    if wants_stream:
        return EventResponse(stream, AnswerLines(answer), timeout_s)
    return WholeResponse(stream, WholeAnswer(answer), timeout_s)


def loaded(model: str, shape: Shape, wants_stream: bool) -> Response:
    """The answer to a request without a prompt, which asks that the model be loaded. It is."""
    value = {**_head(model), **shape.fields(Part()), "done": True, "done_reason": "load"}
    return Response(ndjson(value), media_type=NDJSON if wants_stream else "application/json")

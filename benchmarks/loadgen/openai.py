"""Streamed completions: requests to an OpenAI-compatible server, and what its replies say."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from loadgen.figures import MeasurementError, StreamTrace
from loadgen.http import Reply, Response

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")

FULL_LENGTH = ("both", "ignore_eos", "min_tokens", "none")


@dataclass(frozen=True)
class Api:
    """How a server is asked. `full_length`: which of the fields are sent that are not OpenAI's, by which
    outputs get the length that was asked for."""

    model: str = "model"
    endpoint: str = "completions"
    api_key: str | None = None
    full_length: str = "both"

    def request(self, host: str, prompt: str, max_tokens: int) -> bytes:
        """All bytes of a request for a greedy completion."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.full_length in ("both", "ignore_eos"):
            body["ignore_eos"] = True
        if self.full_length in ("both", "min_tokens"):
            body["min_tokens"] = max_tokens
        content = json.dumps(body).encode()
        head = [
            f"POST {_PATHS[self.endpoint]} HTTP/1.1",
            f"Host: {host}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            f"Content-Length: {len(content)}",
        ]
        if self.api_key is not None:
            head.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*head, "", ""]).encode() + content


def first_model(url: str, api_key: str | None) -> str:
    """The first of the models that a server lists. MeasurementError if it lists none."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/models", headers=headers)) as response:
            return str(json.load(response)["data"][0]["id"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise MeasurementError(f"{url} does not tell its models ({error}): name one with --model.") from None


class EventScanner:
    """Cuts server-sent events out of bytes that may be cut anywhere."""

    def __init__(self) -> None:
        self._line = b""  # the beginning of a line whose end has not come
        self._data: list[bytes] = []

    def feed(self, body: bytes) -> Iterator[bytes]:
        """The data of each event that is complete now."""
        *lines, self._line = (self._line + body).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []


def trace_of(reply: Reply) -> StreamTrace:
    """When the reply's text came and how many tokens it had, or what went wrong."""
    trace = StreamTrace(reply.started_s, failure=reply.failure)
    response, scanner, body = Response(), EventScanner(), b""
    for time_s, piece in zip(reply.times_s, reply.pieces, strict=True):
        try:
            part = response.feed(piece)
        except ValueError:
            break
        body += part
        for data in scanner.feed(part):
            _take_event(trace, time_s, data)
    if response.status not in (None, 200):
        trace.failure = f"HTTP {response.status}: {_message(body)}"
    elif trace.failure is None and not trace.chunk_times_s:
        trace.failure = "no text in the reply"
    elif trace.failure is None and trace.num_tokens == 0:
        trace.failure = "no usage in the reply"
    return trace


def _take_event(trace: StreamTrace, time_s: float, data: bytes) -> None:
    if data == b"[DONE]":
        return
    try:
        event = json.loads(data)
    except ValueError:
        trace.failure = "an event that is not JSON"
        return
    if "error" in event:
        trace.failure = f"error in the stream: {_message(data)}"
        return
    if usage := event.get("usage"):
        trace.num_tokens = usage["completion_tokens"]
        trace.prompt_tokens = usage["prompt_tokens"]
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or {}
        if choice.get("text") or any(delta.get(name) for name in _TEXT_FIELDS):
            trace.chunk_times_s.append(time_s)


def _message(body: bytes) -> str:
    """The message of an error's body, on one line."""
    try:
        error = json.loads(body)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        text = body.decode(errors="replace")
    return " ".join(text.split())[:200]

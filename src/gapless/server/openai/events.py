"""Server-sent events as OpenAI's streams have them."""

from __future__ import annotations

from typing import Any

import msgspec

from gapless.server.errors import HttpError
from gapless.server.stream import Stream

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    """One event with a JSON object."""
    return b"data: " + _encode(value) + b"\n\n"


def error_event(error: HttpError) -> bytes:
    """An error in the midst of a stream, which ends it."""
    return event(error.content()) + DONE


def usage_of(stream: Stream) -> dict[str, Any]:
    """Tokens of a request: each prompt counts once, however many choices it has."""
    num_prompt, num_output = stream.num_prompt_tokens, stream.num_output_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": stream.num_cached_tokens},
    }


class EventWriter:
    """Writes the chunks of one completion: all but the choice is the same in each, and is encoded once."""

    def __init__(self, head: dict[str, Any], include_usage: bool) -> None:
        self._head = head
        self._prefix = b"data: " + _encode(head)[:-1] + b',"choices":['
        # With `include_usage` every chunk has the field; it is null in all but the last.
        self._suffix = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def choice(self, choice: dict[str, Any]) -> bytes:
        """A chunk with one choice."""
        return self._prefix + _encode(choice) + self._suffix

    def usage(self, stream: Stream) -> bytes:
        """The chunk that has no choice."""
        return event({**self._head, "choices": [], "usage": usage_of(stream)})

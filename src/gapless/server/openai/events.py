"""Server-sent events as OpenAI's streams have them."""

from __future__ import annotations

from collections.abc import Callable
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


def choice_object(
    index: int,
    content: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
    stop_reason: int | str | None = None,
) -> dict[str, Any]:
    """What a chunk tells of a choice. `content` is what it gains, as the API at hand has it."""
    choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
    return choice if stop_reason is None else {**choice, "stop_reason": stop_reason}


_MARK = "the text"  # stands for it while an event is made of which only the text changes


class EventWriter:
    """Writes the chunks of one completion: all but the choice is the same in each, and is encoded once."""

    def __init__(
        self, head: dict[str, Any], include_usage: bool, choice_of_text: Callable[[int, str], dict[str, Any]]
    ) -> None:
        """`choice_of_text` makes a choice of its index and of text that is all that it has."""
        self._head = head
        self._choice_of_text = choice_of_text
        self._prefix = b"data: " + _encode(head)[:-1] + b',"choices":['
        # With `include_usage` every chunk has the field; it is null in all but the last.
        self._suffix = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def choice(self, choice: dict[str, Any]) -> bytes:
        """A chunk with one choice."""
        return self._prefix + _encode(choice) + self._suffix

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text in a chunk that has text and nothing else, as most are."""
        before, _, after = self.choice(self._choice_of_text(index, _MARK)).rpartition(f'"{_MARK}"'.encode())
        return before, after

    def usage(self, stream: Stream) -> bytes:
        """The chunk that has no choice."""
        return event({**self._head, "choices": [], "usage": usage_of(stream)})

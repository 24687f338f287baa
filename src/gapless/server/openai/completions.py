"""`/v1/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gapless.errors import InvalidRequestError
from gapless.server.errors import HttpError
from gapless.server.logprobs import CompletionLogprobs
from gapless.server.messages import Chat, Chunk, FillIn, Text, TokenLogprobs, Whole
from gapless.server.openai.events import DONE, EventWriter, choice_object, error_event, usage_of
from gapless.server.responses import (
    Collector,
    EventFormatter,
    EventResponse,
    GenerationResponse,
    Items,
    WholeResponse,
)
from gapless.server.sampling import ListOf, SamplingFields, refuse_unsupported
from gapless.server.service import PromptOrIds, Service
from gapless.server.stream import Stream

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 2048

_UNSUPPORTED = {
    "prompt_embeds": "Send text or token ids.",
    "use_beam_search": "Use n with a temperature.",
}


class CompletionRequest(SamplingFields):
    """OpenAI's completion request, with vLLM's additions. Control tokens in the prompt count as such."""

    prompt: str | ListOf[int] | ListOf[str] | ListOf[ListOf[int]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


@dataclass
class Choice:
    """One completion, as far as it has been written."""

    logprobs: CompletionLogprobs
    text: list[str] = field(default_factory=list)
    lists: dict[str, list[Any]] = field(default_factory=dict)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    has_started: bool = False


class Choices:
    """The choices of a stream: turns their chunks into pieces of text with log-probabilities."""

    def __init__(
        self, stream: Stream, echoes: Sequence[str] | None, num_logprobs: int | None, hides_output: bool
    ) -> None:
        self._echoes = echoes
        self._num_logprobs = num_logprobs
        self._hides_output = hides_output
        self._choices = {
            index: Choice(CompletionLogprobs(num_logprobs or 0)) for index in range(stream.num_choices)
        }
        self._per_prompt = stream.params.n

    def __getitem__(self, index: int) -> Choice:
        return self._choices[index]

    def in_order(self) -> list[tuple[int, Choice]]:
        return sorted(self._choices.items())

    def is_plain(self, index: int) -> bool:
        """Whether choice `index` gains nothing but what its chunks have, from now on."""
        return self._choices[index].has_started and not self._hides_output

    def take(self, index: int, chunk: Chunk) -> tuple[str, dict[str, Any] | None]:
        """What choice `index` gains."""
        choice = self._choices[index]
        text = "" if self._hides_output else chunk.text
        positions: list[TokenLogprobs] = [] if self._hides_output else list(chunk.logprobs or ())
        if not choice.has_started:
            choice.has_started = True
            if self._echoes is not None:
                text = self._echoes[index // self._per_prompt] + text
                positions = [*(chunk.prompt_logprobs or ()), *positions]
        lists = None if self._num_logprobs is None else choice.logprobs.lists(positions)
        if chunk.finish_reason is not None:
            choice.finish_reason = "length" if self._hides_output else chunk.finish_reason
            choice.stop_reason = None if self._hides_output else chunk.stop_reason
        return text, lists


class CompletionCollector(Collector):
    """A whole completion."""

    def __init__(
        self, head: Mapping[str, Any], stream: Stream, choices: Choices, wants_logprobs: bool
    ) -> None:
        self._head = head
        self._stream = stream
        self._choices = choices
        self._wants_logprobs = wants_logprobs

    def push(self, items: Items) -> None:
        for index, chunk in items:
            text, lists = self._choices.take(index, chunk)
            choice = self._choices[index]
            choice.text.append(text)
            for name, values in (lists or {}).items():
                choice.lists.setdefault(name, []).extend(values)

    def result(self) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [
                {
                    "index": index,
                    "text": "".join(choice.text),
                    "logprobs": choice.lists if self._wants_logprobs else None,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                for index, choice in self._choices.in_order()
            ],
            "usage": usage_of(self._stream),
        }


class CompletionEvents(EventFormatter):
    """A completion, event by event."""

    def __init__(
        self, head: Mapping[str, Any], stream: Stream, choices: Choices, include_usage: bool
    ) -> None:
        self._stream = stream
        self._choices = choices
        self._include_usage = include_usage
        self._writer = EventWriter(
            dict(head), include_usage, lambda index, text: choice_object(index, {"text": text})
        )

    def push(self, items: Items) -> bytes:
        data: list[bytes] = []
        for index, chunk in items:
            text, logprobs = self._choices.take(index, chunk)
            if text or (logprobs is not None and logprobs["tokens"]):
                data.append(self._writer.choice(choice_object(index, {"text": text}, logprobs)))
            if chunk.finish_reason is not None:
                choice = self._choices[index]
                end = choice_object(index, {"text": ""}, None, choice.finish_reason, choice.stop_reason)
                data.append(self._writer.choice(end))
        return b"".join(data)

    def around_text(self, index: int) -> tuple[bytes, bytes] | None:
        return self._writer.around_text(index) if self._choices.is_plain(index) else None

    def finish(self) -> bytes:
        return (self._writer.usage(self._stream) if self._include_usage else b"") + DONE

    def error(self, error: HttpError) -> bytes:
        return error_event(error)


async def completion(service: Service, request: CompletionRequest, request_id: str) -> GenerationResponse:
    """Answers a completion request.

    InvalidRequestError, NotReadyError or QueueFullError if it cannot be taken.
    """
    facts = service.require_ready()
    refuse_unsupported(request.model_extra or {}, _UNSUPPORTED)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidRequestError("best_of is not supported beyond n. Use n, and choose.", param="best_of")
    prompts = _prompts(request)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    # `max_tokens: 0` with `echo` asks for the prompt's log-probabilities alone: one token is made and hidden.
    hides_output = max_tokens == 0 and bool(request.echo)
    params = request.sampling_params(
        facts.generation_defaults,
        max_tokens=1 if hides_output else max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
        structured_outputs=request.constraint(),
    )
    echoes = [await _echo(service, prompt) for prompt in prompts] if request.echo else None
    stream = service.open(prompts, params, request_id=request_id, priority=request.priority or 0)
    choices = Choices(stream, echoes, request.logprobs, hides_output)
    head = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.model_name,
    }
    timeout_s = service.config.request_timeout_s
    if request.stream:
        return EventResponse(
            stream, CompletionEvents(head, stream, choices, request.include_usage), timeout_s
        )
    collector = CompletionCollector(head, stream, choices, request.logprobs is not None)
    return WholeResponse(stream, collector, timeout_s)


def _prompts(request: CompletionRequest) -> list[PromptOrIds]:
    """The prompts, one or many."""
    given: Any = request.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not 1 <= len(given) <= MAX_PROMPTS:
        raise InvalidRequestError(
            f"prompt has {len(given)} prompts; 1 to {MAX_PROMPTS} are taken.", param="prompt"
        )
    if request.suffix is None or request.suffix == "":
        return [Text(prompt) if isinstance(prompt, str) else prompt for prompt in given]
    if not all(isinstance(prompt, str) for prompt in given):
        raise InvalidRequestError("suffix needs prompts that are texts.", param="suffix")
    return [FillIn(prompt, request.suffix) for prompt in given]


async def _echo(service: Service, prompt: PromptOrIds) -> str:
    """The prompt's text, in front of its output."""
    if isinstance(prompt, Text):
        return prompt.text
    if isinstance(prompt, FillIn):
        return prompt.prefix
    assert not isinstance(prompt, Chat | Whole)
    return await service.decode(prompt)

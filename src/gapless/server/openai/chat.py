"""`/v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from gapless.errors import InvalidRequestError
from gapless.server.chat import ChatStyle, Choice, Choices, checked_logprobs
from gapless.server.errors import HttpError
from gapless.server.logprobs import chat_logprobs
from gapless.server.messages import Chat, TokenLogprobs
from gapless.server.openai.events import DONE, EventWriter, choice_object, error_event, usage_of
from gapless.server.parsing import ContentDelta, Delta, ReasoningDelta, ToolCallStart
from gapless.server.responses import (
    Collector,
    EventFormatter,
    EventResponse,
    GenerationResponse,
    Items,
    WholeResponse,
)
from gapless.server.sampling import ListOf, SamplingFields, refuse_unsupported
from gapless.server.service import Service
from gapless.server.stream import Stream

_UNSUPPORTED = {
    "audio": "This server generates text.",
    "chat_template": "The operator chooses it, with --chat-template.",
    "continue_final_message": "Use /v1/completions to continue a text.",
    "function_call": "Use tool_choice.",
    "functions": "Use tools.",
    "prediction": "Leave it out.",
    "web_search_options": "Give the results in a message instead.",
}
_RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt")


class ChatMessage(BaseModel):
    """One message of a conversation; the chat template sees all of its fields."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | ListOf[dict[str, Any] | str] | None = None


class ChatTool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

    type: str = "function"
    function: dict[str, Any]


class ChatRequest(SamplingFields):
    """OpenAI's chat request, with vLLM's additions."""

    messages: ListOf[ChatMessage]
    max_tokens: int | None = Field(None, validation_alias=AliasChoices("max_completion_tokens", "max_tokens"))
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: ListOf[ChatTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: str | None = None
    documents: ListOf[dict[str, Any]] | None = None
    modalities: ListOf[str] | None = None

    def template_variables(self) -> dict[str, Any]:
        """What the chat template gets beside messages and tools."""
        variables = dict(self.chat_template_kwargs or {})
        for name in _RESERVED_VARIABLES:
            if name in variables:
                raise InvalidRequestError(
                    f"chat_template_kwargs must not have {name!r}: it is a field of the request.",
                    param="chat_template_kwargs",
                )
        for name in ("reasoning_effort", "documents"):
            if (value := getattr(self, name)) is not None:
                variables.setdefault(name, value)
        return variables


class ChatCollector(Collector):
    """A whole chat completion."""

    def __init__(
        self, head: Mapping[str, Any], stream: Stream, choices: Choices, num_logprobs: int | None
    ) -> None:
        self._head = {**head, "object": "chat.completion"}
        self._stream = stream
        self._choices = choices
        self._num_logprobs = num_logprobs

    def push(self, items: Items) -> None:
        for index, chunk in items:
            choice = self._choices[index]
            if chunk.logprobs is not None and self._num_logprobs is not None:
                choice.logprobs += chat_logprobs(chunk.logprobs, self._num_logprobs)
            for delta in choice.take(chunk):
                choice.add(delta)

    def result(self) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [self._choice(index, choice) for index, choice in self._choices.in_order()],
            "usage": usage_of(self._stream),
        }

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        content = "".join(choice.content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        if choice.tool_calls:
            message["tool_calls"] = choice.tool_calls
            message["content"] = content or None
        return {
            "index": index,
            "message": message,
            "logprobs": None if self._num_logprobs is None else {"content": choice.logprobs, "refusal": None},
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }


class ChatEvents(EventFormatter):
    """A chat completion, event by event."""

    def __init__(
        self,
        head: Mapping[str, Any],
        stream: Stream,
        choices: Choices,
        num_logprobs: int | None,
        include_usage: bool,
    ) -> None:
        self._stream = stream
        self._choices = choices
        self._num_logprobs = num_logprobs
        self._include_usage = include_usage
        self._writer = EventWriter(
            {**head, "object": "chat.completion.chunk"},
            include_usage,
            lambda index, text: choice_object(index, {"delta": {"content": text}}),
        )

    def push(self, items: Items) -> bytes:
        data: list[bytes] = []
        for index, chunk in items:
            choice = self._choices[index]
            if not choice.has_started:
                choice.has_started = True
                data.append(self._event(index, {"role": "assistant", "content": ""}))
            data += self._deltas(index, choice.take(chunk), chunk.logprobs)
            if choice.finish_reason is not None:
                data.append(self._event(index, {}, None, choice.finish_reason, choice.stop_reason))
        return b"".join(data)

    def around_text(self, index: int) -> tuple[bytes, bytes] | None:
        choice = self._choices[index]
        return self._writer.around_text(index) if choice.has_started and choice.parser.is_idle else None

    def finish(self) -> bytes:
        return (self._writer.usage(self._stream) if self._include_usage else b"") + DONE

    def error(self, error: HttpError) -> bytes:
        return error_event(error)

    def _deltas(self, index: int, deltas: list[Delta], logprobs: list[TokenLogprobs] | None) -> list[bytes]:
        shown = None
        if logprobs and self._num_logprobs is not None:
            shown = {"content": chat_logprobs(logprobs, self._num_logprobs), "refusal": None}
        fields = [_delta_fields(delta) for delta in deltas]
        if not fields and shown is not None:  # its text is held back
            fields = [{"content": ""}]
        return [self._event(index, one, None if place else shown) for place, one in enumerate(fields)]

    def _event(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> bytes:
        return self._writer.choice(
            choice_object(index, {"delta": delta}, logprobs, finish_reason, stop_reason)
        )


def _delta_fields(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, ContentDelta):
        return {"content": delta.text}
    if isinstance(delta, ReasoningDelta):
        return {"reasoning_content": delta.text}
    if isinstance(delta, ToolCallStart):
        function = {"name": delta.name, "arguments": ""}
        return {
            "tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]
        }
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}


def chat_completion(service: Service, request: ChatRequest, request_id: str) -> GenerationResponse:
    """Answers a chat request.

    InvalidRequestError, NotReadyError or QueueFullError if it cannot be taken.
    """
    facts = service.require_ready()
    refuse_unsupported(request.model_extra or {}, _UNSUPPORTED)
    if any(modality != "text" for modality in request.modalities or ()):
        raise InvalidRequestError("modalities can be ['text'] alone.", param="modalities")
    style = ChatStyle(service)
    tools = style.tool_use(
        [tool.model_dump() for tool in request.tools or ()],
        request.tool_choice,
        request.parallel_tool_calls is not False,
    )
    constraint = request.constraint()
    if tools.constraint is not None and constraint is not None:
        raise InvalidRequestError("tool_choice and response_format exclude each other.", param="tool_choice")
    num_logprobs = checked_logprobs(request.logprobs, request.top_logprobs)
    params = request.sampling_params(
        facts.generation_defaults, logprobs=num_logprobs, structured_outputs=tools.constraint or constraint
    )
    prompt = Chat(
        [message.model_dump(exclude_unset=True) for message in request.messages],
        tools.tools,
        request.template_variables(),
        request.add_generation_prompt is not False,
    )
    stream, choices = style.open(prompt, params, tools, request_id=request_id, priority=request.priority or 0)
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": service.model_name}
    timeout_s = service.config.request_timeout_s
    if request.stream:
        events = ChatEvents(head, stream, choices, num_logprobs, request.include_usage)
        return EventResponse(stream, events, timeout_s)
    return WholeResponse(stream, ChatCollector(head, stream, choices, num_logprobs), timeout_s)

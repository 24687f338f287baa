"""`/api/chat`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from gapless.errors import InvalidRequestError
from gapless.server.chat import ChatStyle
from gapless.server.messages import Chat
from gapless.server.ollama.answers import Answer, MessageShape, loaded, respond
from gapless.server.ollama.fields import GenerationFields, check_model
from gapless.server.sampling import ListOf
from gapless.server.service import Service


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | None = None
    thinking: str | None = None
    images: ListOf[Any] | None = None
    tool_calls: ListOf[dict[str, Any]] | None = None
    tool_name: str | None = None

    def for_template(self, where: str) -> dict[str, Any]:
        """The message as chat templates expect it. InvalidRequestError if it has an image."""
        if self.images:
            raise InvalidRequestError(
                f"{where}.images: this model reads text alone.", param=f"{where}.images"
            )
        message = {"role": self.role, "content": self.content or "", **(self.model_extra or {})}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.tool_name:
            message["name"] = self.tool_name
        if self.tool_calls:
            message["tool_calls"] = [{"type": "function", **call} for call in self.tool_calls]
        return message


class Tool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

    type: str = "function"
    function: dict[str, Any]


class ChatRequest(GenerationFields):
    """Ollama's chat request. Without messages it asks that the model be loaded."""

    messages: ListOf[Message] | None = None
    tools: ListOf[Tool] | None = None


def chat(service: Service, request: ChatRequest, request_id: str) -> Response:
    """Answers a conversation. InvalidRequestError, NotReadyError or QueueFullError if it can't be taken."""
    facts = service.require_ready()
    model = check_model(service, request.model)
    shape = MessageShape()
    if not request.messages:
        return loaded(model, shape, request.wants_stream)
    style = ChatStyle(service)
    tools = style.tool_use([tool.model_dump() for tool in request.tools or ()])
    prompt = Chat(
        [message.for_template(f"messages[{i}]") for i, message in enumerate(request.messages)],
        tools.tools,
        request.template_variables(style),
    )
    params = request.sampling_params(facts.generation_defaults)
    stream, choices = style.open(prompt, params, tools, request_id=request_id)
    answer = Answer(model, stream, choices, shape, request.num_logprobs)
    return respond(stream, answer, request.wants_stream, service.config.request_timeout_s)

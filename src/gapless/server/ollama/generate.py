"""`/api/generate`."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from gapless.errors import InvalidRequestError
from gapless.server.chat import ChatStyle, Choices, ToolUse
from gapless.server.messages import Chat, FillIn, Prompt, Text
from gapless.server.ollama.answers import Answer, TextShape, loaded, respond
from gapless.server.ollama.fields import GenerationFields, check_model
from gapless.server.parsing import ChatOutputParser
from gapless.server.sampling import ListOf
from gapless.server.service import Service


class GenerateRequest(GenerationFields):
    """Ollama's request for a text. Without a prompt it asks that the model be loaded."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    raw: bool | None = None
    images: ListOf[Any] | None = None
    context: ListOf[int] | None = None

    def as_prompt(self, style: ChatStyle) -> Prompt:
        """What the model gets: a text as it is, a gap to fill, or a user's message."""
        prompt = self.prompt or ""
        if self.suffix:
            self._refuse_beside("suffix", "system", "think")
            return FillIn(prompt, self.suffix)
        if self.raw:
            self._refuse_beside("raw", "system", "think")
            return Text(prompt)
        if not style.has_template:
            if self.system:
                raise InvalidRequestError(
                    "This model has no chat template for a system text.", param="system"
                )
            return Text(prompt)
        system = [{"role": "system", "content": self.system}] if self.system else []
        variables = self.template_variables(style)
        return Chat([*system, {"role": "user", "content": prompt}], None, variables)

    def check(self, style: ChatStyle) -> None:
        """InvalidRequestError for what can't be had."""
        if self.images:
            raise InvalidRequestError("images: this model reads text alone.", param="images")
        if self.context:
            raise InvalidRequestError(
                "context is not supported. Send the conversation to /api/chat.", param="context"
            )
        if self.template and self.template != style.template:
            raise InvalidRequestError(
                "A template of the request's own is not supported. Set raw to true, and write the prompt as "
                "the model shall get it.",
                param="template",
            )

    def _refuse_beside(self, name: str, *others: str) -> None:
        for other in others:
            if getattr(self, other):
                raise InvalidRequestError(
                    f"{other} needs the chat template, which {name} goes without.", param=other
                )


def generate(service: Service, request: GenerateRequest, request_id: str) -> Response:
    """Generates a text. InvalidRequestError, NotReadyError or QueueFullError if it can't be taken."""
    facts = service.require_ready()
    model = check_model(service, request.model)
    shape, style = TextShape(), ChatStyle(service)
    request.check(style)
    if not request.prompt and not request.suffix:
        return loaded(model, shape, request.wants_stream)
    prompt = request.as_prompt(style)
    params = request.sampling_params(facts.generation_defaults)
    if isinstance(prompt, Chat):
        stream, choices = style.open(prompt, params, ToolUse(), request_id=request_id)
    else:  # thoughts are looked for in answers to messages alone
        stream = service.open([prompt], params, request_id=request_id)
        choices = Choices(ChatOutputParser)
    answer = Answer(model, stream, choices, shape, request.num_logprobs)
    return respond(stream, answer, request.wants_stream, service.config.request_timeout_s)

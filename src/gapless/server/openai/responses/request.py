"""Requests of the Responses API."""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from gapless.errors import InvalidRequestError
from gapless.sampling import SamplingParams, StructuredOutputs
from gapless.server.chat import checked_logprobs
from gapless.server.sampling import ListOf, ResponseFormat, SamplingFields, refuse_unsupported

_UNSUPPORTED = {
    "background": "Leave the connection open, and stream if it takes long.",
    "conversation": "Nothing is stored: send all items as input.",
    "previous_response_id": "Nothing is stored: send the items of earlier responses as input.",
    "prompt": "Nothing is stored: send instructions and input.",
}
_LOGPROBS = "message.output_text.logprobs"
_FORMATS = ("text", "json_object", "json_schema")


class TextFormat(ResponseFormat):
    """What the text must look like. A schema has a name beside it."""

    model_config = ConfigDict(extra="allow")


class TextFields(BaseModel):
    """How the text is written."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningFields(BaseModel):
    """How much the model thinks."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(SamplingFields):
    """OpenAI's request for a response."""

    input: str | ListOf[dict[str, Any]]
    instructions: str | None = None
    max_tokens: int | None = Field(None, validation_alias=AliasChoices("max_output_tokens", "max_tokens"))
    max_tool_calls: int | None = None
    text: TextFields | None = None
    tools: ListOf[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningFields | None = None
    include: ListOf[str] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    metadata: dict[str, Any] | None = None

    @property
    def effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives are wanted of each token, if any."""
        wanted = bool(self.top_logprobs) or _LOGPROBS in (self.include or ())
        return checked_logprobs(wanted, self.top_logprobs)

    def constraint(self) -> StructuredOutputs | None:
        """What the output must look like; to say it twice is a mistake."""
        other, given = super().constraint(), None if self.text is None else self.text.format
        if given is None or given.type == "text":
            return other
        if given.type not in _FORMATS:
            raise InvalidRequestError(
                f"text.format.type is {given.type!r:.100}; known are {', '.join(_FORMATS)}.",
                param="text.format.type",
            )
        if given.type == "json_schema" and given.schema_ is None:
            raise InvalidRequestError("text.format of type json_schema needs a schema.", param="text.format")
        if other is not None:
            raise InvalidRequestError("text.format excludes other constraints.", param="text.format")
        return given.structured_outputs()

    def engine_params(
        self, defaults: dict[str, float], tool_constraint: StructuredOutputs | None
    ) -> SamplingParams:
        """The engine's parameters. InvalidRequestError for what can't be had."""
        refuse_unsupported(self.model_extra or {}, _UNSUPPORTED)
        if self.n not in (None, 1):
            raise InvalidRequestError("n must be 1: a response is one answer.", param="n")
        constraint = self.constraint()
        if tool_constraint is not None and constraint is not None:
            raise InvalidRequestError("tool_choice and text.format exclude each other.", param="tool_choice")
        return self.sampling_params(
            defaults, logprobs=self.num_logprobs, structured_outputs=tool_constraint or constraint
        )

    def template_variables(self) -> dict[str, Any]:
        """What the chat template gets beside messages and tools."""
        if self.effort is None:
            return {}
        thinking = {"enable_thinking": False} if self.effort == "none" else {}
        return {"reasoning_effort": self.effort, **thinking}

    def chat_tools(self) -> list[dict[str, Any]]:
        """The tools, in the form that chats have. InvalidRequestError for those that are not functions."""
        for index, tool in enumerate(self.tools or ()):
            if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
                raise InvalidRequestError(
                    f'tools[{index}] must be a function with a name: {{"type": "function", "name": ...}}.',
                    param=f"tools[{index}]",
                )
        return [{"type": "function", "function": _function(tool)} for tool in self.tools or ()]

    def chat_tool_choice(self) -> str | dict[str, Any] | None:
        """The choice, in the form that chats have."""
        choice = self.tool_choice
        if not isinstance(choice, dict):
            return choice
        if choice.get("type") != "function":
            raise InvalidRequestError(
                f"tool_choice is of type {choice.get('type')!r:.100}; it can name a function.",
                param="tool_choice",
            )
        return {"type": "function", "function": {"name": choice.get("name")}}

    def echo(self, params: SamplingParams) -> dict[str, Any]:
        """What a response repeats of its request."""
        given = None if self.text is None else self.text.format
        text_format = (
            {"type": "text"} if given is None else given.model_dump(by_alias=True, exclude_none=True)
        )
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": self.effort, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": text_format},
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
        }


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tool.items() if name != "type" and value is not None}

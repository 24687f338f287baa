"""What chats have in common, by whichever API they come: the tools that are shown, the answer as it grows."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from gapless.errors import InvalidRequestError
from gapless.sampling import SamplingParams, StructuredOutputs
from gapless.server.messages import Chat, Chunk
from gapless.server.parsing import (
    ChatOutputParser,
    ContentDelta,
    Delta,
    ReasoningDelta,
    Tags,
    ToolCallStart,
    find_reasoning_tags,
    find_tool_format,
    reasoning_tags,
    tool_choice_schema,
    tool_format,
)
from gapless.server.service import Service
from gapless.server.stream import Stream

MAX_TOP_LOGPROBS = 20

_TOOLS = re.compile(r"\btools\b")


def checked_logprobs(wanted: bool | None, num_top: int | None) -> int | None:
    """How many alternatives are wanted of each token, if any. InvalidRequestError for too many."""
    if num_top is not None:
        if num_top and not wanted:
            raise InvalidRequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
        if not 0 <= num_top <= MAX_TOP_LOGPROBS:
            raise InvalidRequestError(
                f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, but it is {num_top}.",
                param="top_logprobs",
            )
    return (num_top or 0) if wanted else None


@dataclass(frozen=True)
class ToolUse:
    """Which tools the model sees, how its calls are read, and what constrains it to make one."""

    tools: list[dict[str, Any]] | None = None
    format: str | None = None
    names: tuple[str, ...] = ()
    parallel: bool = True
    constraint: StructuredOutputs | None = None


@dataclass
class Choice:
    """One answer, as far as it has been written."""

    parser: ChatOutputParser
    has_started: bool = False
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    num_reasoning_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def take(self, chunk: Chunk) -> list[Delta]:
        """What the message gains by a chunk."""
        deltas = self.parser.push(chunk.text)
        if chunk.finish_reason is not None:
            deltas = [*deltas, *self.parser.finish()]
            has_calls = chunk.finish_reason == "stop" and self.parser.has_tool_calls
            self.finish_reason = "tool_calls" if has_calls else chunk.finish_reason
            self.stop_reason = chunk.stop_reason
        # A chunk is seldom more than a token; one with the end of the thoughts and more counts as thought.
        if any(isinstance(delta, ReasoningDelta) for delta in deltas):
            self.num_reasoning_tokens += chunk.num_tokens
        return deltas

    def add(self, delta: Delta) -> None:
        """Keeps what was gained, for those who want the message as a whole."""
        if isinstance(delta, ContentDelta):
            self.content.append(delta.text)
        elif isinstance(delta, ReasoningDelta):
            self.reasoning.append(delta.text)
        elif isinstance(delta, ToolCallStart):
            function = {"name": delta.name, "arguments": ""}
            self.tool_calls.append({"id": delta.id, "type": "function", "function": function})
        else:
            self.tool_calls[delta.index]["function"]["arguments"] += delta.text


class Choices:
    """The choices of a stream, each with a parser of its own.

    `new_parser` is asked when the first text comes: by then it is known how the prompt ends.
    """

    def __init__(self, new_parser: Callable[[], ChatOutputParser]) -> None:
        self._new_parser = new_parser
        self._choices: dict[int, Choice] = {}

    def __getitem__(self, index: int) -> Choice:
        if (choice := self._choices.get(index)) is None:
            choice = self._choices[index] = Choice(self._new_parser())
        return choice

    def in_order(self) -> list[tuple[int, Choice]]:
        return sorted(self._choices.items())


class ChatStyle:
    """How the model marks its thoughts and tool calls: by the operator's word, or by its chat template."""

    def __init__(self, service: Service) -> None:
        self._service = service
        config = service.config
        facts = service.tokenizer_facts
        self.template = "" if facts is None else facts.chat_template
        self.has_template = facts is not None and facts.has_chat_template
        self.tool_format = config.tool_call_parser and find_tool_format(config.tool_call_parser).name
        self.reasoning: Tags | None = (
            find_reasoning_tags(config.reasoning_parser)
            if config.reasoning_parser
            else reasoning_tags(self.template)
        )

    @property
    def shows_tools(self) -> bool:
        """Whether the model gets to see the tools of a request."""
        return _TOOLS.search(self.template) is not None

    def tool_use(
        self, tools: list[dict[str, Any]], choice: str | dict[str, Any] | None = None, parallel: bool = True
    ) -> ToolUse:
        """What tools and the choice among them ask for. InvalidRequestError if they do not fit each other."""
        for index, tool in enumerate(tools):
            if tool["type"] != "function" or not isinstance(tool["function"].get("name"), str):
                raise InvalidRequestError(
                    f"tools[{index}] must be of type 'function' and have a function with a name.",
                    param=f"tools[{index}]",
                )
        if isinstance(choice, str) and choice not in ("none", "auto", "required"):
            raise InvalidRequestError(
                f"tool_choice is {choice!r:.100}; known are none, auto, required, and a function.",
                param="tool_choice",
            )
        if choice == "none":
            return ToolUse()
        if choice == "required" or isinstance(choice, dict):
            schema, name = tool_choice_schema(tools, choice, parallel)
            constraint = StructuredOutputs(json=schema)
        elif not tools:
            return ToolUse()
        elif (
            not self.shows_tools
        ):  # a call that a schema shapes comes about all the same; a free one does not
            raise InvalidRequestError(
                f"{self._service.model_name} does not support tools: its chat template does not show them to "
                "it. The server's operator can give another one with --chat-template.",
                param="tools",
            )
        else:
            name, constraint = self.tool_format or tool_format(self.template), None
        names = tuple(tool["function"]["name"] for tool in tools)
        return ToolUse(tools, name, names, parallel, constraint)

    def open(
        self,
        prompt: Chat,
        params: SamplingParams,
        tools: ToolUse,
        *,
        request_id: str,
        priority: int = 0,
    ) -> tuple[Stream, Choices]:
        """Starts a chat: its stream, and its choices as they grow. Raises as `Service.open`."""
        if params.skip_special_tokens and self._has_markup_in(tools):
            params = replace(params, skip_special_tokens=False)
        stream = self._service.open([prompt], params, request_id=request_id, priority=priority)
        return stream, self._choices(stream, tools)

    def _has_markup_in(self, tools: ToolUse) -> bool:
        """Whether what the parsers look for is written in control tokens, which texts leave out."""
        facts = self._service.tokenizer_facts
        markers = self.reasoning or ()
        if tools.format is not None:
            markers = (*markers, *find_tool_format(tools.format).markers)
        return facts is not None and any(marker in facts.control_tokens for marker in markers)

    def _choices(self, stream: Stream, tools: ToolUse) -> Choices:
        is_constrained = stream.params.structured_outputs is not None

        def new_parser() -> ChatOutputParser:
            # What a constraint shapes has no thoughts around it, whatever the prompt has opened.
            reasoning = None if is_constrained else self.reasoning
            inside = reasoning is not None and reasoning.opened_by(stream.generations[0].tail)
            return ChatOutputParser(reasoning, inside, tools.format, tools.names, tools.parallel)

        return Choices(new_parser)

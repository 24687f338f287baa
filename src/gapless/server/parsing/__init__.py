"""What a chat model writes, taken apart into thoughts, content and tool calls, while it is being written."""

from gapless.server.parsing.deltas import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from gapless.server.parsing.formats import TOOL_FORMATS, ToolFormat, find_tool_format, tool_format
from gapless.server.parsing.output import ChatOutputParser
from gapless.server.parsing.reasoning import (
    REASONING_TAGS,
    ReasoningParser,
    Tags,
    find_reasoning_tags,
    reasoning_tags,
)
from gapless.server.parsing.tool_choice import tool_choice_schema
from gapless.server.parsing.tools import ToolCallParser, new_call_id

__all__ = [
    "REASONING_TAGS",
    "TOOL_FORMATS",
    "ChatOutputParser",
    "ContentDelta",
    "Delta",
    "ReasoningDelta",
    "ReasoningParser",
    "Tags",
    "ToolCallArguments",
    "ToolCallParser",
    "ToolCallStart",
    "ToolFormat",
    "find_reasoning_tags",
    "find_tool_format",
    "new_call_id",
    "reasoning_tags",
    "tool_choice_schema",
    "tool_format",
]

"""What a chat message gains while it is being written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class ContentDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """Call `index` of the message begins; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of the JSON text of the arguments of call `index`."""

    index: int
    text: str


Delta: TypeAlias = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments

"""Chat output as a user sees it: deltas joined, however they were cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from hypothesis import strategies as st

from gapless.server.parsing import (
    ChatOutputParser,
    ContentDelta,
    Delta,
    ReasoningDelta,
    Tags,
    ToolCallArguments,
    ToolCallStart,
)

THINK = Tags("<think>", "</think>")
TOOLS = ("get_weather", "get_time")


def parser(**options):
    """A parser whose calls have the ids c0, c1, …"""
    numbers = itertools.count()
    return ChatOutputParser(new_id=lambda: f"c{next(numbers)}", **options)


def parsed(pieces: Iterable[str], **options) -> list[Delta]:
    """The deltas of a text that comes in pieces, with those that belong together joined."""
    one = parser(**options)
    deltas = [delta for piece in pieces for delta in one.push(piece)]
    return joined(deltas + one.finish())


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    result: list[Delta] = []
    for delta in deltas:
        last = result[-1] if result else None
        if isinstance(delta, ToolCallArguments) and isinstance(last, ToolCallArguments):
            assert delta.index == last.index
            result[-1] = ToolCallArguments(delta.index, last.text + delta.text)
        elif isinstance(delta, ContentDelta | ReasoningDelta) and type(delta) is type(last):
            result[-1] = type(delta)(last.text + delta.text)
        else:
            result.append(delta)
    return result


def call(name: str, arguments: str, index: int = 0) -> list[Delta]:
    """What one call gives."""
    return [ToolCallStart(index, f"c{index}", name), ToolCallArguments(index, arguments)]


def content(deltas: Iterable[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))


def reasoning(deltas: Iterable[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))


@st.composite
def cuts(draw, texts: st.SearchStrategy[str]) -> list[str]:
    """A text cut into pieces anywhere."""
    text = draw(texts)
    places = sorted(draw(st.sets(st.integers(0, len(text)), max_size=12)))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]

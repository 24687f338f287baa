"""All that is to be found in a chat model's output."""

from __future__ import annotations

from collections.abc import Callable, Collection

from gapless.server.parsing.deltas import ContentDelta, Delta, ToolCallArguments, ToolCallStart
from gapless.server.parsing.formats import find_tool_format
from gapless.server.parsing.pieces import PieceParser
from gapless.server.parsing.reasoning import ReasoningParser, Tags
from gapless.server.parsing.tools import ToolCallParser, new_call_id


class ChatOutputParser:
    """Turns the text of one choice of a chat into the deltas of its message.

    `reasoning`: the tags of a model that thinks aloud; `starts_inside`: the prompt has opened them.
    `tool_format` is the name of a format; with None, or without tools, nothing is taken for a call.
    `parallel`: whether there may be several calls; if not, those after the first are left out. `new_id` makes
    the ids of calls. InvalidRequestError if there is no such format.
    """

    def __init__(
        self,
        reasoning: Tags | None = None,
        starts_inside: bool = False,
        tool_format: str | None = None,
        tool_names: Collection[str] = (),
        parallel: bool = True,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._parallel = parallel
        self._tools: ToolCallParser | None = None
        self._parsers: list[PieceParser] = []
        if reasoning is not None:
            self._parsers.append(ReasoningParser(reasoning, starts_inside))
        if tool_format is not None and tool_names:
            self._tools = ToolCallParser(find_tool_format(tool_format), tool_names, new_id)
            self._parsers.append(self._tools)

    @property
    def is_idle(self) -> bool:
        """Whether all that comes is content, and nothing is held back."""
        return not self._parsers

    @property
    def has_tool_calls(self) -> bool:
        """Whether a call was made so far: then the finish reason `stop` is `tool_calls`."""
        return self._tools is not None and self._tools.num_calls > 0

    def push(self, text: str) -> list[Delta]:
        """What the message gains by a piece of text. Usually at once; what may be markup waits."""
        deltas: list[Delta] = [ContentDelta(text)] if text else []
        if self._parsers and deltas:
            for parser in self._parsers:
                deltas = _through(parser, deltas)
            self._parsers = [parser for parser in self._parsers if not parser.passes]
        return self._allowed(deltas)

    def finish(self) -> list[Delta]:
        """What was held back, now that nothing follows."""
        deltas: list[Delta] = []
        for parser in self._parsers:
            deltas = _through(parser, deltas) + parser.finish()
        self._parsers = []
        return self._allowed(deltas)

    def _allowed(self, deltas: list[Delta]) -> list[Delta]:
        if self._parallel or not self.has_tool_calls:
            return deltas
        calls = (ToolCallStart, ToolCallArguments)
        return [delta for delta in deltas if not isinstance(delta, calls) or delta.index == 0]


def _through(parser: PieceParser, deltas: list[Delta]) -> list[Delta]:
    """The deltas, with the content parsed further."""
    result: list[Delta] = []
    for delta in deltas:
        result += parser.push(delta.text) if isinstance(delta, ContentDelta) else [delta]
    return result

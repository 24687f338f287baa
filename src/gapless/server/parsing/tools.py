"""Finds tool calls in what a model writes."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial

from gapless.server.parsing.deltas import ContentDelta, ToolCallArguments, ToolCallStart
from gapless.server.parsing.formats import ToolFormat
from gapless.server.parsing.pieces import PieceParser, Steps, partial_length

_FENCE = "```"
_JSON_FENCE = "```json"
_ARGUMENTS = frozenset({"arguments", "parameters"})
_HARMLESS = frozenset({"type", "id"})  # any other name before the arguments: the object is data, not a call
_QUOTE_OR_ESCAPE = re.compile(r'["\\]')
_SCALAR = re.compile(r"[\w+.-]*")


def new_call_id() -> str:
    """An id for a tool call, in OpenAI's style."""
    return f"call_{secrets.token_hex(12)}"


@dataclass
class _Call:
    """What is known of the call that is being read. Once it has `begun`, nothing takes it back."""

    name: str | None = None
    arguments: str | None = None  # held until the name is known
    begun: bool = False


class ToolCallParser(PieceParser):
    """Splits a model's text into content and calls of the tools of the request.

    A call is a JSON object with the `name` of a tool and its `arguments` (or `parameters`). Calls are looked
    for after the format's opening marker, and at the beginning of the answer, where small models write them
    without any marker, bare, in a list, or in a fence. Several follow each other, separated or not.

    Arguments are given out as they arrive and as they were written. Only brackets, strings and markers are
    looked at in them: if a model writes what is not quite JSON, the client gets to see it. What does not
    become a call is content, as it was written.
    """

    def __init__(
        self, tool_format: ToolFormat, tool_names: Collection[str], new_id: Callable[[], str] = new_call_id
    ) -> None:
        super().__init__()
        self.num_calls = 0
        self._format = tool_format
        self._tool_names = frozenset(tool_names)
        self._new_id = new_id
        self._is_streaming = False  # what has been read are arguments of the latest call
        self._words = (_JSON_FENCE, *tool_format.markers)
        self._breaks = (_FENCE, *tool_format.markers)  # no JSON has them outside of strings
        closing = [tool_format.closing] if tool_format.closing else []
        self._after = _any_of(r"[\s,;\]}]", rf"{_FENCE}(?![A-Za-z])", closing)
        self._before = _any_of(r"[\s,;\[\]}]", rf"{_FENCE}(?:json)?(?![A-Za-z])", tool_format.markers)
        self._structure = re.compile("|".join([r'["{}\[\]]', *map(re.escape, self._breaks)]))

    def _read(self) -> Steps[None]:
        opening = self._format.opening
        while True:
            yield from self._calls()
            if opening is None:
                yield from self._give_rest()
            elif (yield from self._give_until(opening, ContentDelta)):
                continue
            return

    def _calls(self) -> Steps[None]:
        """Reads calls and what stands between them, until something else comes."""
        yield from self._matching(self._before, self._words)
        while self._next_is("{") and (yield from self._call()):
            yield from self._matching(self._after, self._breaks)
            self._drop()
            yield from self._matching(self._before, self._words)
        self._give(ContentDelta, self._at)

    def _call(self) -> Steps[bool]:
        """Reads an object. True if it is a call; else what has been read of it is still there."""
        call = _Call()
        self._at += 1
        yield from self._space()
        yield from self._take(
            "{"
        )  # Qwen's chat template shows calls in doubled braces, and models do as told
        is_whole = yield from self._members(call)
        if is_whole and call.name is not None and not call.begun:
            call.arguments = "{}"
            self._begin(call)
        if call.begun:
            self._drop()
        return call.begun

    def _members(self, call: _Call) -> Steps[bool]:
        """Reads the members of an object and its end. False if it is malformed, or neither call nor whole."""
        while True:
            yield from self._space()
            name = yield from self._string()
            yield from self._space()
            if name is None or not (yield from self._take(":")):
                return False
            yield from self._space()
            if not (yield from self._member(call, name)):
                return False
            yield from self._space()
            if (yield from self._take("}")):
                return True
            if not (yield from self._take(",")):
                return False

    def _member(self, call: _Call, name: str) -> Steps[bool]:
        if name == "name" and call.name is None:
            call.name = yield from self._string()
            if call.name not in self._tool_names:
                return False
        elif name in _ARGUMENTS and call.arguments is None and not call.begun:
            if call.name is not None and self._next_is("{"):
                self._begin(call)
                return (yield from self._streamed_arguments())
            call.arguments = yield from self._held_arguments()
            if call.arguments is None:
                return False
        else:
            return (name in _HARMLESS or call.begun) and (yield from self._value())
        if call.name is not None and call.arguments is not None:
            self._begin(call)
        return True

    def _begin(self, call: _Call) -> None:
        """Gives out that there is a call, and those of its arguments that are known."""
        assert call.name is not None
        call.begun = True
        self._deltas.append(ToolCallStart(self.num_calls, self._new_id(), call.name))
        if call.arguments is not None:
            self._deltas.append(ToolCallArguments(self.num_calls, call.arguments))
        self.num_calls += 1
        self._drop()

    def _streamed_arguments(self) -> Steps[bool]:
        self._is_streaming = True
        is_whole = yield from self._nested()
        self._show_arguments()
        self._is_streaming = False
        return is_whole

    def _show_arguments(self) -> None:
        if self._is_streaming:
            self._give(partial(ToolCallArguments, self.num_calls - 1), self._at)

    def _held_arguments(self) -> Steps[str | None]:
        """Arguments as a whole: an object, or null for none, or the object's text as a string."""
        begin = self._at
        if self._next_is("{"):
            return self._text[begin : self._at] if (yield from self._nested()) else None
        if self._next_is('"'):
            text = yield from self._string()
            return text if text is not None and _is_object(text) else None
        return "{}" if (yield from self._take("null")) else None

    def _value(self) -> Steps[bool]:
        if self._next_is('"'):
            return (yield from self._string()) is not None
        if self._next_is("{") or self._next_is("["):
            return (yield from self._nested())
        yield from self._matching(_SCALAR)
        return True

    def _nested(self) -> Steps[bool]:
        """Reads from a bracket to the one that closes it. False if the text ends or a marker comes before."""
        depth = 0
        while True:
            found = self._structure.search(self._text, self._at)
            if found is None:
                pending = 0 if self._ended else partial_length(self._text, self._breaks, self._at)
                self._at = len(self._text) - pending
                if self._ended:
                    return False
                yield from self._more()
                continue
            if found.group() in self._breaks:
                self._at = found.start()
                return False
            self._at = found.end()
            if found.group() == '"':
                if not (yield from self._rest_of_string()):
                    return False
            else:
                depth += 1 if found.group() in "{[" else -1
                if depth == 0:
                    return True

    def _string(self) -> Steps[str | None]:
        """Reads a string. None if there is none."""
        begin = self._at
        if not (yield from self._take('"')) or not (yield from self._rest_of_string()):
            return None
        try:
            return str(json.loads(self._text[begin : self._at], strict=False))
        except ValueError:
            return None

    def _rest_of_string(self) -> Steps[bool]:
        """Reads a string to its end, from inside of it. False if the text ends before."""
        while True:
            found = _QUOTE_OR_ESCAPE.search(self._text, self._at)
            self._at = found.start() if found else len(self._text)
            if self._next_is('"'):
                self._at += 1
                return True
            if found and self._at + 1 < len(self._text):
                self._at += 2
            elif self._ended:
                self._at = len(self._text)
                return False
            else:
                yield from self._more()

    def _more(self) -> Steps[None]:
        self._show_arguments()
        yield


def _is_object(text: str) -> bool:
    try:
        text.encode()  # half a surrogate pair could not be sent
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _any_of(char: str, fence: str, markers: Iterable[str]) -> re.Pattern[str]:
    """Any number of these."""
    return re.compile(f"(?:{'|'.join([char, fence, *map(re.escape, markers)])})*")

"""Thoughts, content and calls in one text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.errors import InvalidRequestError
from gapless.server.parsing import ChatOutputParser, ContentDelta, ReasoningDelta
from helpers_parsing import THINK, TOOLS, call, cuts, parsed, parser

CALL = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "CET"}}\n</tool_call>'
OPTIONS = {"reasoning": THINK, "tool_format": "hermes", "tool_names": TOOLS}


@given(cuts(st.just(f"<think>\nI call {CALL}?\n</think>\n\nLet me see.\n{CALL}\n")))
def test_a_call_follows_thoughts(pieces):
    assert parsed(pieces, **OPTIONS) == [
        ReasoningDelta(f"I call {CALL}?"),
        ContentDelta("Let me see."),
        *call("get_time", '{"zone": "CET"}'),
    ]


def test_a_bare_call_follows_thoughts():
    answer = 'Hm.</think>\n{"name": "get_time", "arguments": {}}'
    deltas = parsed([answer], starts_inside=True, **OPTIONS)
    assert deltas == [ReasoningDelta("Hm."), *call("get_time", "{}")]


def test_the_end_gives_what_both_parsers_hold():
    assert parsed(["<think>a</think>", "b <tool_"], **OPTIONS) == [
        ReasoningDelta("a"),
        ContentDelta("b <tool_"),
    ]
    assert parsed(["<thi"], **OPTIONS) == [ContentDelta("<thi")]


def test_without_thoughts_and_tools_text_passes():
    one = ChatOutputParser()
    assert one.push("<think> ") == [ContentDelta("<think> ")]
    assert one.push("") == []
    assert one.push('<tool_call>{"name": "get_time"}') == [ContentDelta('<tool_call>{"name": "get_time"}')]
    assert one.finish() == []
    assert not one.has_tool_calls


def test_whether_there_was_a_call_is_known():
    one = parser(**OPTIONS)
    one.push(CALL[:20])
    assert not one.has_tool_calls
    one.push(CALL[20:])
    assert one.has_tool_calls
    one.finish()
    assert one.has_tool_calls
    other = parser(**OPTIONS)
    other.push(CALL.replace("get_time", "get_news"))
    other.finish()
    assert not other.has_tool_calls


def test_an_unknown_format_is_refused():
    with pytest.raises(InvalidRequestError, match="hermes"):
        ChatOutputParser(tool_format="xml", tool_names=TOOLS)

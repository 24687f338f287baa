"""Items of the Responses API, in and out, without a model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gapless.errors import InvalidRequestError
from gapless.sampling import SamplingParams
from gapless.server.chat import Choices
from gapless.server.errors import status_error
from gapless.server.messages import Chunk
from gapless.server.openai.responses.answer import Answer, AnswerEvents, WholeAnswer
from gapless.server.openai.responses.items import messages_of
from gapless.server.parsing import ChatOutputParser, find_reasoning_tags
from gapless.server.stream import Stream

TEXTS = (
    "<think>",
    "first",
    " look",
    "</think>",
    "Looking.",
    '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 2}}</tool_call>',
)


def an_answer() -> Answer:
    def parser() -> ChatOutputParser:
        return ChatOutputParser(find_reasoning_tags("think"), tool_format="hermes", tool_names=("f",))

    stream = Stream("request", SamplingParams(), 0, lambda generation: None)
    return Answer({"id": "resp_1"}, stream, Choices(parser), None)


def chunks(*texts: str, reason: str | None = "stop") -> list[tuple[int, Chunk]]:
    *others, last = texts
    return [*((0, Chunk(1, 0, text, 1)) for text in others), (0, Chunk(1, 0, last, 1, finish_reason=reason))]


def events_of(data: bytes) -> list[dict[str, Any]]:
    """The events, checked for what all of them have."""
    events = []
    for number, text in enumerate(data.decode().rstrip("\n").split("\n\n")):
        name, value = text.split("\n")
        event = json.loads(value.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def test_thoughts_text_and_calls_are_items() -> None:
    collector = WholeAnswer(an_answer())
    collector.push(chunks(*TEXTS))
    response = collector.result()
    assert response["status"] == "completed"
    thoughts, message, one, two = response["output"]
    assert thoughts["type"] == "reasoning"
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "first look"}]
    assert message["content"][0]["text"].strip() == "Looking."
    assert [call["arguments"] for call in (one, two)] == ['{"a": 1}', '{"a": 2}']
    assert one["call_id"] != two["call_id"]
    assert len({item["id"] for item in response["output"]}) == 4
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 2


def test_each_item_is_closed_before_the_next_opens() -> None:
    writer = AnswerEvents(an_answer())
    events = events_of(b"".join(writer.push([item]) for item in chunks(*TEXTS)) + writer.finish())
    assert [event["type"].removeprefix("response.") for event in events if "delta" not in event["type"]] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        *["output_item.added", "function_call_arguments.done", "output_item.done"] * 2,
        "completed",
    ]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert {item["status"] for item in added} == {"in_progress"}
    assert added[0]["content"] == []
    assert done == events[-1]["response"]["output"]
    indices = [event["output_index"] for event in events if "output_index" in event]
    assert indices == sorted(indices)


def test_a_cut_within_an_item_leaves_it_incomplete() -> None:
    writer = AnswerEvents(an_answer())
    data = writer.push(chunks("<think>", "well, ", reason="length")) + writer.finish()
    response = events_of(data)[-1]["response"]
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["incomplete"]


def test_a_failure_ends_the_stream_with_what_there_was() -> None:
    writer = AnswerEvents(an_answer())
    data = writer.push(chunks("Well", reason=None)) + writer.error(status_error(500, "It broke."))
    last = events_of(data)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "It broke."}
    assert last["response"]["output"][0]["content"][0]["text"] == "Well"
    only = events_of(AnswerEvents(an_answer()).error(status_error(500, "It broke.")))
    assert [event["type"] for event in only] == [
        "response.created",
        "response.in_progress",
        "response.failed",
    ]


def test_an_empty_answer_is_an_empty_message() -> None:
    collector = WholeAnswer(an_answer())
    collector.push(chunks(""))
    (message,) = collector.result()["output"]
    assert message["content"][0]["text"] == ""


def test_what_the_assistant_did_is_one_message() -> None:
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    messages = messages_of(
        [
            {"role": "user", "content": "Go."},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]},
            {**call, "call_id": "1"},
            {**call, "call_id": "2", "name": "g"},
            {"type": "function_call_output", "call_id": "2", "output": "two"},
            {
                "type": "function_call_output",
                "call_id": "1",
                "output": [{"type": "input_text", "text": "one"}],
            },
            {"role": "assistant", "content": "Done."},
        ],
        "Be kind.",
    )
    assert [message["role"] for message in messages] == [
        *("system", "user", "assistant", "tool", "tool", "assistant"),
    ]
    did = messages[2]
    assert (did["reasoning_content"], did["content"]) == ("Hm.", "Yes.")
    assert [one["function"]["name"] for one in did["tool_calls"]] == ["f", "g"]
    assert [(one["name"], one["content"]) for one in messages[3:5]] == [("g", "two"), ("f", "one")]


def test_turns_of_the_assistant_stay_apart() -> None:
    items = [{"role": "assistant", "content": "One."}, {"role": "assistant", "content": "Two."}]
    assert [message["content"] for message in messages_of(items)] == ["One.", "Two."]


@pytest.mark.parametrize(
    "item",
    [
        {"type": "nonsense"},
        {"type": ["message"]},
        {"role": "user"},
        {"role": "user", "content": [3]},
        {"role": "user", "content": [{"type": "input_file"}]},
        {"role": "user", "content": [{"type": {}, "text": "x"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text"}]},
        {"type": "reasoning", "content": 3},
        {"type": "function_call", "call_id": "1"},
        {"type": "function_call", "call_id": 1, "name": "f"},
        {"type": "function_call_output", "output": "x"},
        {"type": "function_call_output", "call_id": "1", "output": {"a": 1}},
    ],
)
def test_a_malformed_item_is_named(item: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"input\[0\]"):
        messages_of([item])

"""How Ollama's answers show what a model writes, without a model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gapless.sampling import SamplingParams
from gapless.server.chat import Choices
from gapless.server.errors import status_error
from gapless.server.messages import Chunk, Metrics
from gapless.server.ollama.answers import Answer, AnswerLines, MessageShape, Shape, TextShape, WholeAnswer
from gapless.server.parsing import ChatOutputParser, find_reasoning_tags
from gapless.server.stream import Generation, Stream

THINK = find_reasoning_tags("think")
METRICS = Metrics(5, 4, 0, 0, 10.0, 0.25, 1.25, 3.25, 0.5)


def an_answer(shape: Shape, **parsing: Any) -> Answer:
    params = SamplingParams()
    stream = Stream("request", params, 0, lambda generation: None)
    generation = Generation(1, stream, 0, None, params, metrics=METRICS, num_output_tokens=4)
    generation.token_ids = bytes(4 * 5)
    stream.add(generation)
    return Answer("m", stream, Choices(lambda: ChatOutputParser(**parsing)), shape, None)


def chunks(*texts: str, reason: str = "stop") -> list[tuple[int, Chunk]]:
    *others, last = texts
    return [*((0, Chunk(1, 0, text, 1)) for text in others), (0, Chunk(1, 0, last, 1, finish_reason=reason))]


def lines(answer: Answer, *texts: str, reason: str = "stop") -> list[dict[str, Any]]:
    writer = AnswerLines(answer)
    data = b"".join(writer.push([item]) for item in chunks(*texts, reason=reason)) + writer.finish()
    return [json.loads(line) for line in data.splitlines()]


def whole(answer: Answer, *texts: str) -> dict[str, Any]:
    collector = WholeAnswer(answer)
    collector.push(chunks(*texts))
    result: dict[str, Any] = collector.result()
    return result


def test_thoughts_are_apart_from_the_answer() -> None:
    texts = ("<think>", "so", "</think>", "yes")
    *parts, last = lines(an_answer(MessageShape(), reasoning=THINK), *texts)
    assert [part["message"] for part in parts] == [
        {"role": "assistant", "content": "", "thinking": "so"},
        {"role": "assistant", "content": "yes"},
    ]
    assert last["message"] == {"role": "assistant", "content": ""}
    message = whole(an_answer(MessageShape(), reasoning=THINK), *texts)["message"]
    assert message == {"role": "assistant", "content": "yes", "thinking": "so"}
    text = whole(an_answer(TextShape(), reasoning=THINK), *texts)
    assert (text["response"], text["thinking"]) == ("yes", "so")


def test_calls_are_whole_and_numbered() -> None:
    texts = (
        'Look: <tool_call>{"name": "f", "argu',
        'ments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
    )
    parser = {"tool_format": "hermes", "tool_names": ("f", "g")}
    *parts, last = lines(an_answer(MessageShape(), **parser), *texts)
    calls = [call for part in parts for call in part["message"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == [
        {"index": 0, "name": "f", "arguments": {"a": 1}},
        {"index": 1, "name": "g", "arguments": {}},
    ]
    assert last["done_reason"] == "stop"
    message = whole(an_answer(MessageShape(), **parser), *texts)["message"]
    assert len(message["tool_calls"]) == 2
    assert message["content"].strip() == "Look:"


@pytest.mark.parametrize("value", ["oops", '"\\ud800"', "9" * 5000, "[" * 9999 + "]" * 9999])
def test_arguments_that_cannot_be_sent_stay_text(value: str) -> None:
    answer = an_answer(MessageShape(), tool_format="hermes", tool_names=("f",))
    texts = ('<tool_call>{"name": "f", "arguments": {"a": ', value, "}}</tool_call>")
    message = lines(answer, *texts)[0]["message"]
    assert "tool_calls" not in message
    assert '"f"' in message["content"]
    assert '{"a": ' + value in message["content"]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_the_last_line_tells_what_it_took(reason: str) -> None:
    last = lines(an_answer(TextShape()), "a", "b", reason=reason)[-1]
    assert last["done_reason"] == reason
    assert last["total_duration"] == 3_250_000_000
    assert last["load_duration"] == 250_000_000
    assert (last["prompt_eval_count"], last["prompt_eval_duration"]) == (5, 1_000_000_000)
    assert (last["eval_count"], last["eval_duration"]) == (4, 2_000_000_000)


def test_a_failure_in_the_midst_is_a_line() -> None:
    assert json.loads(AnswerLines(an_answer(TextShape())).error(status_error(500, "It broke."))) == {
        "error": "It broke."
    }

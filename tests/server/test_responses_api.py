"""OpenAI's Responses API on real models, by OpenAI's own client and by plain HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from helpers_server import RunningServer

pytestmark = pytest.mark.models

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
TIME: Any = {"type": "function", "name": "get_time", "parameters": {"type": "object", "properties": {}}}
IN_PARIS: Any = {"role": "user", "content": "What is the weather in Paris?"}


class City(BaseModel):
    name: str = Field(max_length=20)
    country: str = Field(max_length=20)


def opened(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with opened(server) as it:
        yield it


@pytest.fixture(scope="module")
def coder(coder_server: RunningServer) -> Iterator[openai.OpenAI]:
    with opened(coder_server) as it:
        yield it


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


@pytest.fixture(scope="module")
def coder_model(coder: openai.OpenAI) -> str:
    return coder.models.list().data[0].id


def test_a_text_is_answered(client: openai.OpenAI, model: str) -> None:
    answer = client.responses.create(
        model=model, input="Say hello.", temperature=0, metadata={"a": "b"}, max_output_tokens=200
    )
    assert answer.status == "completed"
    assert answer.incomplete_details is None
    assert answer.error is None
    assert answer.output_text
    (message,) = answer.output
    assert message.type == "message"
    assert message.status == "completed"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert answer.metadata == {"a": "b"}
    assert answer.temperature == 0
    again = client.responses.create(model=model, input="Say hello.", temperature=0, max_output_tokens=200)
    assert again.output_text == answer.output_text
    assert again.id != answer.id
    assert again.usage is not None
    assert 0 < again.usage.input_tokens_details.cached_tokens < again.usage.input_tokens


def test_an_answer_that_is_cut_off_says_so(client: openai.OpenAI, model: str) -> None:
    answer = client.responses.create(model=model, input="Tell me a story.", max_output_tokens=4)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert answer.usage is not None
    assert answer.usage.output_tokens == 4


def test_input_in_all_its_forms(client: openai.OpenAI, model: str) -> None:
    """Each of them is the same prompt, and so the same answer."""
    part = {"type": "input_text", "text": "Say hello."}
    forms: list[Any] = [
        "Say hello.",
        [{"role": "user", "content": "Say hello."}],
        [{"type": "message", "role": "user", "content": [part]}],
    ]
    answers = {
        client.responses.create(
            model=model, input=form, instructions="Be brief.", temperature=0, max_output_tokens=8
        ).output_text
        for form in forms
    }
    developer: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [part]}]
    answers.add(
        client.responses.create(model=model, input=developer, temperature=0, max_output_tokens=8).output_text
    )
    assert len(answers) == 1


def test_events_come_in_order(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "input": "Say hello.", "temperature": 0, "max_output_tokens": 5}
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events]
    num_deltas = types.count("response.output_text.delta")
    assert num_deltas > 1
    assert types == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * num_deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    whole = client.responses.create(**asked)
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    first, last = events[0], events[-1]
    assert first.type == "response.created"
    assert first.response.status == "in_progress"
    assert first.response.output == []
    assert first.response.usage is None
    assert last.type == "response.incomplete"
    assert last.response.id == first.response.id
    assert last.response.output_text == whole.output_text
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == 5


def test_the_clients_stream_helper(client: openai.OpenAI, model: str) -> None:
    with client.responses.stream(model=model, input="Say hello.", temperature=0) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text


def test_logprobs(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {
        "model": model,
        "input": "Say hello.",
        "temperature": 0,
        "max_output_tokens": 3,
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    }
    content = client.responses.create(**asked).output[0].content[0]  # type: ignore[union-attr, index]
    assert content is not None
    assert len(content.logprobs) == 3
    assert all(len(one.top_logprobs) == 2 for one in content.logprobs)
    deltas = [
        e for e in client.responses.create(**asked, stream=True) if e.type == "response.output_text.delta"
    ]
    assert [one.token for delta in deltas for one in delta.logprobs] == [
        one.token for one in content.logprobs
    ]


def test_a_schema_shapes_the_answer(coder: openai.OpenAI, coder_model: str) -> None:
    question = "Give me the city of Rome."
    parsed = coder.responses.parse(model=coder_model, input=question, text_format=City, temperature=0)
    assert isinstance(parsed.output_parsed, City)
    with coder.responses.stream(model=coder_model, input=question, text_format=City, temperature=0) as stream:
        stream.until_done()
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    some = coder.responses.create(
        model=coder_model,
        input=question + " As JSON.",
        text={"format": {"type": "json_object"}},
        max_output_tokens=100,
    )
    assert some.output_text.startswith("{")


def test_a_function_is_called_and_its_result_is_read(coder: openai.OpenAI, coder_model: str) -> None:
    whole = coder.responses.create(model=coder_model, input=[IN_PARIS], tools=[WEATHER], temperature=0)
    assert whole.status == "completed"
    (call,) = whole.output
    assert call.type == "function_call"
    assert call.name == "get_weather"
    assert json.loads(call.arguments) == {"city": "Paris"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees, sunny"}
    items: Any = [IN_PARIS, *(item.model_dump() for item in whole.output), result]
    answer = coder.responses.create(model=coder_model, input=items, temperature=0, max_output_tokens=60)
    assert "21" in answer.output_text


def test_the_events_of_a_call(coder: openai.OpenAI, coder_model: str) -> None:
    events = list(
        coder.responses.create(
            model=coder_model, input=[IN_PARIS], tools=[WEATHER], temperature=0, stream=True
        )
    )
    types = list(dict.fromkeys(event.type for event in events))
    assert types == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    arguments = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    done = next(e for e in events if e.type == "response.function_call_arguments.done")
    assert done.arguments == arguments
    added = next(e for e in events if e.type == "response.output_item.added")
    assert added.item.name == "get_weather"  # type: ignore[union-attr]
    assert added.item.id == done.item_id  # type: ignore[union-attr]


def test_a_call_can_be_demanded_or_forbidden(coder: openai.OpenAI, coder_model: str) -> None:
    asked: dict[str, Any] = {
        "model": coder_model,
        "input": "Hello! Who are you?",
        "tools": [WEATHER, TIME],
        "temperature": 0,
        "max_output_tokens": 80,
    }
    named = coder.responses.create(**asked, tool_choice={"type": "function", "name": "get_time"})
    assert [item.name for item in named.output if item.type == "function_call"] == ["get_time"]
    required = coder.responses.create(**asked, tool_choice="required", parallel_tool_calls=False)
    assert [item.type for item in required.output] == ["function_call"]
    none = coder.responses.create(**asked, tool_choice="none")
    assert [item.type for item in none.output] == ["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"previous_response_id": "resp_1"}, "stored"),
        ({"conversation": "conv_1"}, "stored"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "function"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "other"),
        ({"tools": [WEATHER], "tool_choice": {"type": "file_search"}}, "file_search"),
        ({"tool_choice": "required"}, "tools"),
        ({"text": {"format": {"type": "xml"}}}, "xml"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 3}}}}, "type"),
        ({"input": []}, "empty"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "stored"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input_image",
        ),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "call_id"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "nobody"),
        ({"input": "word " * 3000}, "tokens"),
        ({"max_output_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"n": 2}, "n must be 1"),
        ({"metadata": {"a": "\ud800"}}, "represented"),
        ({"tools": [{**WEATHER, "description": "\ud800"}], "tool_choice": "none"}, "represented"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_had_is_refused(
    server: RunningServer, fields: dict[str, Any], words: str, stream: bool
) -> None:
    status, headers, body = server.request("/v1/responses", {"input": "x", "stream": stream, **fields})
    assert status == 400
    assert headers["content-type"] == "application/json"
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


def test_the_clients_errors(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="Nothing is stored"):
        client.responses.create(model=model, input="x", previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError, match="gpt"):
        client.responses.create(model="gpt-5", input="x")
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.delete("resp_1")


def test_a_client_that_leaves_ends_its_answer(
    client: openai.OpenAI, model: str, server: RunningServer
) -> None:
    stream = client.responses.create(
        model=model, input="Count to a thousand.", stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    server.wait_until_idle()

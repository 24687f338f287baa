"""A session with OpenAI's own client: what its users do must work unchanged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from helpers_server import RunningServer

pytestmark = pytest.mark.models

QUESTION: list[Any] = [{"role": "user", "content": "Name a colour."}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}
TIME: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
}
WEATHER_QUESTION: list[Any] = [
    {"role": "user", "content": "What is the weather like in Paris? Use the tool."}
]


class Person(BaseModel):
    """What an answer is parsed into."""

    age: int
    is_nice: bool


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def coder(coder_server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=coder_server.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: OpenAI) -> str:
    return client.models.list().data[0].id


@pytest.fixture(scope="module")
def coder_model(coder: OpenAI) -> str:
    return coder.models.list().data[0].id


def test_models(client: OpenAI, model: str) -> None:
    found = client.models.retrieve(model)
    assert found.id == model
    assert found.object == "model"
    assert found.to_dict()["max_model_len"] == 2048


def test_chat(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=5, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.model == model
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


def test_a_streamed_chat_has_the_text_of_the_whole_one(client: OpenAI, model: str) -> None:
    options: Any = {"model": model, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len({chunk.id for chunk in chunks}) == 1
    assert whole.usage is not None
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_clients_own_stream_helper(client: OpenAI, model: str) -> None:
    with client.chat.completions.stream(
        model=model, messages=QUESTION, extra_body={"guided_choice": ["red"]}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.content == "red"


def test_several_choices(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        n=3,
        max_tokens=8,
        seed=1,
        temperature=1.0,
        extra_body={"ignore_eos": True},
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    alone = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=1)
    assert alone.usage is not None
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens


def test_a_seed_repeats_its_output(client: OpenAI, model: str) -> None:
    options: Any = {"model": model, "messages": QUESTION, "max_tokens": 8, "temperature": 1.0}
    first, again, other = (client.chat.completions.create(**options, seed=seed) for seed in (7, 7, 8))
    assert first.choices[0].message.content == again.choices[0].message.content
    assert first.choices[0].message.content != other.choices[0].message.content


def test_chat_logprobs(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    positions = answer.choices[0].logprobs.content
    assert positions is not None
    assert len(positions) == 4
    text = b"".join(bytes(one.bytes or []) for one in positions).decode()
    assert text == answer.choices[0].message.content
    for position in positions:
        assert len(position.top_logprobs) == 3
        assert position.top_logprobs[0].token == position.token  # greedy
        assert position.logprob <= 0


def test_chat_logprobs_without_alternatives(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=2, logprobs=True)
    assert answer.choices[0].logprobs is not None
    positions = answer.choices[0].logprobs.content
    assert positions is not None
    assert [position.top_logprobs for position in positions] == [[], []]


def test_streamed_logprobs_are_those_of_the_whole(client: OpenAI, model: str) -> None:
    options: Any = {
        "model": model,
        "messages": QUESTION,
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**options).choices[0].logprobs
    assert whole is not None
    streamed = [
        position
        for chunk in client.chat.completions.create(**options, stream=True)
        if chunk.choices and chunk.choices[0].logprobs is not None
        for position in chunk.choices[0].logprobs.content or ()
    ]
    assert [one.to_dict() for one in streamed] == [one.to_dict() for one in whole.content or ()]


def test_logit_bias(client: OpenAI, model: str) -> None:
    demanded = client.completions.create(model=model, prompt=[400], echo=True, max_tokens=0).choices[0].text
    answer = client.completions.create(model=model, prompt="One", max_tokens=3, logit_bias={"400": 100})
    assert answer.choices[0].text == 3 * demanded


def test_stop(client: OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt="The colours are red,", temperature=0, max_tokens=30, stop=[","]
    )
    assert "," not in answer.choices[0].text
    assert answer.choices[0].finish_reason == "stop"


def test_completions(client: OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="Once upon", max_tokens=4, temperature=0)
    assert answer.object == "text_completion"
    assert answer.choices[0].text
    streamed = client.completions.create(
        model=model, prompt="Once upon", max_tokens=4, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text


def test_completions_of_many_prompts(client: OpenAI, model: str) -> None:
    prompts = ["Once upon", "The capital of France is", "1 2 3"]
    together = client.completions.create(model=model, prompt=prompts, max_tokens=4, temperature=0, n=1)
    alone = [
        client.completions.create(model=model, prompt=prompt, max_tokens=4, temperature=0)
        for prompt in prompts
    ]
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [choice.text for choice in together.choices] == [one.choices[0].text for one in alone]
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone if one.usage)


def test_completions_of_token_ids(client: OpenAI, model: str) -> None:
    one = client.completions.create(model=model, prompt=[400, 500], echo=True, max_tokens=2, temperature=0)
    many = client.completions.create(
        model=model, prompt=[[400, 500], [600]], echo=True, max_tokens=2, temperature=0
    )
    assert many.choices[0].text == one.choices[0].text
    assert len(many.choices) == 2
    assert one.usage is not None
    assert one.usage.prompt_tokens == 2


def test_echo_with_logprobs(client: OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt="The sky is blue", echo=True, max_tokens=2, logprobs=2, temperature=0
    )
    choice = answer.choices[0]
    assert choice.text.startswith("The sky is blue")
    lists = choice.logprobs
    assert lists is not None
    assert lists.tokens is not None
    assert lists.token_logprobs is not None
    assert "".join(lists.tokens) == choice.text
    assert lists.token_logprobs[0] is None
    assert all(value <= 0 for value in lists.token_logprobs[1:])
    assert lists.text_offset is not None
    assert [
        choice.text[start:].startswith(token)
        for start, token in zip(lists.text_offset, lists.tokens, strict=True)
    ]


def test_only_the_prompts_logprobs(client: OpenAI, model: str) -> None:
    """What evaluations of language models ask for."""
    answer = client.completions.create(
        model=model, prompt="The sky is blue", echo=True, max_tokens=0, logprobs=1
    )
    assert answer.choices[0].text == "The sky is blue"
    assert answer.choices[0].logprobs is not None
    assert "".join(answer.choices[0].logprobs.tokens or ()) == "The sky is blue"


def test_suffix(coder: OpenAI, coder_model: str) -> None:
    answer = coder.completions.create(
        model=coder_model,
        prompt="def add(a, b):\n    return ",
        suffix="\n\nprint(add(1, 2))\n",
        max_tokens=8,
        temperature=0,
        stop=["\n"],
    )
    assert "a + b" in answer.choices[0].text


def test_json_object(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "A JSON object with one key, a."}],
        response_format={"type": "json_object"},
        max_tokens=40,
        temperature=0,
        extra_body={"structured_outputs": None},
    )
    assert (answer.choices[0].message.content or "").startswith("{")


def test_a_pydantic_model_is_parsed(coder: OpenAI, coder_model: str) -> None:
    answer = coder.chat.completions.parse(
        model=coder_model,
        messages=[{"role": "user", "content": "Ann is 31 years old and nice."}],
        response_format=Person,
        max_tokens=60,
        temperature=0,
    )
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person)
    assert answer.choices[0].finish_reason == "stop"


def test_json_schema(coder: OpenAI, coder_model: str) -> None:
    schema: Any = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    answer = coder.chat.completions.create(
        model=coder_model,
        messages=QUESTION,
        response_format={"type": "json_schema", "json_schema": {"name": "colour", "schema": schema}},
        max_tokens=30,
    )
    assert json.loads(answer.choices[0].message.content or "")["colour"] in ("red", "blue")


@pytest.mark.parametrize(
    ("extra", "allowed"),
    [
        ({"guided_regex": "[0-9]{3}"}, {f"{number:03}" for number in range(1000)}),
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
        ({"structured_outputs": {"regex": "a|b"}}, {"a", "b"}),
        ({"guided_grammar": 'root ::= "x" | "y"'}, {"x", "y"}),
        ({"guided_json": {"enum": [1, 2]}}, {"1", "2"}),
    ],
)
def test_constraints_beyond_openais(
    client: OpenAI, model: str, extra: dict[str, Any], allowed: set[str]
) -> None:
    answer = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=12, extra_body=extra)
    assert answer.choices[0].message.content in allowed
    assert answer.choices[0].finish_reason == "stop"


def test_sampling_beyond_openais(client: OpenAI, model: str) -> None:
    """`top_k: 1` and `min_p: 1` are both greedy."""
    options: Any = {"model": model, "messages": QUESTION, "max_tokens": 6}
    greedy = client.chat.completions.create(**options, temperature=0)
    for extra in ({"top_k": 1}, {"min_p": 1.0}):
        same = client.chat.completions.create(**options, temperature=1.5, extra_body=extra)
        assert same.choices[0].message.content == greedy.choices[0].message.content


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
    ],
)
def test_tool_calls_that_are_demanded(coder: OpenAI, coder_model: str, choice: Any, names: set[str]) -> None:
    answer = coder.chat.completions.create(
        model=coder_model,
        messages=WEATHER_QUESTION,
        tools=[WEATHER, TIME],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=60,
        temperature=0,
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name in names
    arguments = json.loads(call.function.arguments)
    assert call.function.name != "get_weather" or isinstance(arguments["city"], str)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None


def test_streamed_tool_calls(coder: OpenAI, coder_model: str) -> None:
    stream = coder.chat.completions.create(
        model=coder_model,
        messages=WEATHER_QUESTION,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=60,
        temperature=0,
        stream=True,
    )
    name, arguments, reasons, ids = "", "", [], set()
    for chunk in stream:
        choice = chunk.choices[0]
        assert not choice.delta.content
        for call in choice.delta.tool_calls or ():
            assert call.index == 0
            assert call.function is not None
            if call.id is not None:
                ids.add(call.id)
            name += call.function.name or ""
            arguments += call.function.arguments or ""
        reasons.append(choice.finish_reason)
    assert name == "get_weather"
    assert len(ids) == 1
    assert set(json.loads(arguments)) == {"city"}
    assert reasons[-1] == "tool_calls"
    assert set(reasons[:-1]) == {None}


def test_a_tools_result_goes_back(coder: OpenAI, coder_model: str) -> None:
    messages: list[Any] = list(WEATHER_QUESTION)
    call = (
        coder.chat.completions.create(
            model=coder_model,
            messages=messages,
            tools=[WEATHER],
            tool_choice="required",
            max_tokens=60,
            temperature=0,
            parallel_tool_calls=False,
        )
        .choices[0]
        .message
    )
    assert call.tool_calls
    messages += [call, {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "17 degrees, rain"}]
    answer = coder.chat.completions.create(
        model=coder_model,
        messages=messages,
        tools=[WEATHER],
        tool_choice="none",
        max_tokens=24,
        temperature=0,
    )
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


@pytest.mark.parametrize("choice", ["auto", None])
def test_tools_that_may_be_called(coder: OpenAI, coder_model: str, choice: Any) -> None:
    answer = coder.chat.completions.create(
        model=coder_model,
        messages=WEATHER_QUESTION,
        tools=[WEATHER],
        max_tokens=40,
        temperature=0,
        **({} if choice is None else {"tool_choice": choice}),
    ).choices[0]
    if answer.message.tool_calls:
        assert answer.finish_reason == "tool_calls"
        assert answer.message.tool_calls[0].to_dict()["function"]["name"] == "get_weather"
    else:
        assert answer.message.content


def test_errors_are_the_clients_typed_exceptions(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=model, messages=QUESTION, temperature=-1)
    assert wrong.value.param == "temperature"
    assert wrong.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=model, prompt=[5] * 4000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=model, prompt="a", suffix="b")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")
    with pytest.raises(openai.NotFoundError):
        client.images.generate(prompt="a cat")


def test_a_server_with_a_key(model_path: Callable[[str], Path]) -> None:
    """It is asked for before anything else, while the model is loaded too."""
    with RunningServer(model_path("smollm2-135m"), "--api-key", "right", wait=False) as server:
        for key in ("wrong", "rightly"):
            with (
                OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0) as client,
                pytest.raises(openai.AuthenticationError) as refused,
            ):
                client.models.list()
            assert refused.value.code == "invalid_api_key"
            assert "right" not in str(refused.value)
        with OpenAI(base_url=server.url + "/v1", api_key="right", max_retries=0) as client:
            assert client.models.list().data
        assert server.request("/v1/models")[0] == 401
        assert server.request("/health")[0] in (200, 503)


def test_an_error_before_the_first_token_is_raised_when_streaming(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=model, prompt="a", stream=True, extra_body={"guided_regex": "("})


def test_the_response_has_an_id(client: OpenAI, model: str) -> None:
    raw = client.chat.completions.with_raw_response.create(model=model, messages=QUESTION, max_tokens=1)
    assert raw.headers["x-request-id"]
    assert raw.headers["content-type"] == "application/json"
    answer = raw.parse()
    assert answer.choices[0].message.role == "assistant"
    assert answer._request_id == raw.headers["x-request-id"]
    own = client.models.with_raw_response.list(extra_headers={"x-request-id": "mine-1"})
    assert own.headers["x-request-id"] == "mine-1"


def test_the_asynchronous_client(server: RunningServer, model: str) -> None:
    async def session() -> list[str]:
        async with AsyncOpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:

            async def ask(seed: int) -> str:
                stream = await client.chat.completions.create(
                    model=model, messages=QUESTION, max_tokens=6, seed=seed, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return list(await asyncio.gather(*(ask(seed) for seed in (1, 1, 2))))

    first, same, other = asyncio.run(session())
    assert first == same != other


def test_leaving_a_stream_early_frees_its_slot(server: RunningServer, client: OpenAI, model: str) -> None:
    stream = client.completions.create(
        model=model, prompt="Once upon", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    server.wait_until_idle()

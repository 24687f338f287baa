"""Ollama's API on real models, by Ollama's own client and by plain HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from helpers_server import RunningServer

pytestmark = pytest.mark.models

HELLO = [{"role": "user", "content": "Say hello."}]
GREEDY = {"temperature": 0}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "country": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "country"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[ollama.Client]:
    with ollama.Client(server.url) as opened:
        yield opened


@pytest.fixture(scope="module")
def coder(coder_server: RunningServer) -> Iterator[ollama.Client]:
    with ollama.Client(coder_server.url) as opened:
        yield opened


def name_of(client: ollama.Client) -> str:
    name = client.list().models[0].model
    assert name is not None
    return name


def test_the_model_is_listed_and_described(client: ollama.Client, coder: ollama.Client) -> None:
    (listed,) = client.list().models
    assert listed.model is not None
    assert listed.model.endswith(":latest")
    assert listed.details is not None
    assert (listed.details.format, listed.details.family) == ("gguf", "llama")
    assert listed.details.quantization_level == "Q4_1"
    assert listed.details.parameter_size == "135M"
    assert listed.size is not None
    assert listed.size > 80_000_000
    assert listed.digest is not None
    assert len(listed.digest) == 64
    assert listed.modified_at is not None

    shown = client.show(listed.model)
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] == 2048
    assert shown.template is not None
    assert "<|im_start|>" in shown.template
    assert shown.capabilities == ["completion", "embedding"]
    assert set(coder.show(name_of(coder)).capabilities or ()) == {
        "completion",
        "embedding",
        "insert",
        "tools",
    }

    (running,) = client.ps().models
    assert running.name == listed.model
    assert running.size_vram == 0
    assert running.context_length == 2048


@pytest.mark.parametrize("path", ["/", "/api/tags", "/api/version"])
def test_clients_look_whether_somebody_is_there(server: RunningServer, path: str) -> None:
    status, _, body = server.request(path, method="HEAD")
    assert (status, body) == (200, b"")


def test_the_version_has_three_numbers(server: RunningServer) -> None:
    assert [int(number) for number in server.get("/api/version")["version"].split(".")] > [0, 6, 4]


def test_names_with_and_without_tag(client: ollama.Client) -> None:
    name = name_of(client)
    for given in (name, name.removesuffix(":latest")):
        answer = client.chat(given, HELLO, options={"num_predict": 1})
        assert answer.model == given
    for wrong in ("llama3", name.replace(":latest", ":other")):
        with pytest.raises(ollama.ResponseError, match="not found") as caught:
            client.show(wrong)
        assert caught.value.status_code == 404


def test_a_stream_is_the_whole_in_pieces(client: ollama.Client) -> None:
    name = name_of(client)
    options = {**GREEDY, "num_predict": 12}
    whole = client.chat(name, HELLO, options=options)
    *parts, last = client.chat(name, HELLO, options=options, stream=True)
    assert len(parts) > 3
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert not any(part.done for part in parts)
    for end in (whole, last):
        assert end.done
        assert end.done_reason == "length"
        assert end.eval_count == 12
        assert end.prompt_eval_count == whole.prompt_eval_count
        assert end.total_duration is not None
        assert end.load_duration is not None
        assert end.prompt_eval_duration is not None
        assert end.eval_duration is not None
        assert end.prompt_eval_duration > 0
        assert end.eval_duration > 0
        parts_ns = end.load_duration + end.prompt_eval_duration + end.eval_duration
        assert abs(end.total_duration - parts_ns) < 10


def test_lines_are_the_default_and_say_so(server: RunningServer) -> None:
    status, headers, body = server.request("/api/chat", {"messages": HELLO, "options": {"num_predict": 2}})
    assert status == 200
    assert headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in body.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert all(line["message"]["role"] == "assistant" for line in lines)


def test_options_reach_the_sampler(client: ollama.Client) -> None:
    name = name_of(client)

    def text(**options: Any) -> str | None:
        return client.generate(name, "Tell me a story.", options={"num_predict": 16, **options}).response

    assert text(seed=7, temperature=1.5) == text(seed=7, temperature=1.5)
    assert text(seed=7, temperature=1.5) != text(seed=8, temperature=1.5)
    assert text(temperature=0) == text(temperature=2, top_k=1)
    assert text(temperature=0) != text(temperature=0, repeat_penalty=1.9, presence_penalty=2)
    for unlimited in (-1, -2):
        answer = client.generate(name, "Count.", options={**GREEDY, "num_predict": unlimited, "stop": ["e"]})
        assert answer.done_reason == "stop"
        assert "e" not in (answer.response or "")


def test_unknown_options_are_told_once(client: ollama.Client, server: RunningServer) -> None:
    name = name_of(client)
    for _ in range(2):
        client.generate(name, "Hi", options={"mirostat": 2, "num_ctx": 512, "num_predict": 1})
    assert len([line for line in server.log if "options.mirostat" in line]) == 1
    assert not any("num_ctx" in line for line in server.log)


@pytest.mark.parametrize("stream", [False, True])
def test_formats_constrain_the_answer(client: ollama.Client, stream: bool) -> None:
    name, options = name_of(client), {**GREEDY, "num_predict": 60}
    question = [{"role": "user", "content": "Describe the city of Rome as JSON."}]
    answer: Any = client.chat(name, question, format=CITY, options=options, stream=stream)
    pieces = list(answer) if stream else [answer]
    city = json.loads("".join(piece.message.content for piece in pieces))
    assert set(city) == {"name", "country"}
    text = client.generate(name, "An empty object as JSON:", format="json", options=options).response
    assert text.startswith("{")


def test_a_tool_is_called_and_its_result_is_read(coder: ollama.Client) -> None:
    name, options = name_of(coder), {**GREEDY, "num_predict": 60}
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    whole = coder.chat(name, messages, tools=[WEATHER], options=options)
    *parts, last = coder.chat(name, messages, tools=[WEATHER], options=options, stream=True)
    streamed = [call for part in parts for call in part.message.tool_calls or ()]
    for calls in (whole.message.tool_calls, streamed):
        assert calls is not None
        assert [call.function.name for call in calls] == ["get_weather"]
        assert calls[0].function.arguments == {"city": "Paris"}
    assert whole.done_reason == last.done_reason == "stop"
    assert not whole.message.content

    messages += [whole.message, {"role": "tool", "tool_name": "get_weather", "content": "21 degrees, sunny"}]
    answer = coder.chat(name, messages, options=options)
    assert "21" in (answer.message.content or "")


def test_what_the_model_cannot_do_is_refused(client: ollama.Client) -> None:
    name = name_of(client)
    with pytest.raises(ollama.ResponseError, match="does not support tools") as caught:
        client.chat(name, HELLO, tools=[WEATHER])
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="think"):
        client.chat(name, HELLO, think=True)
    with pytest.raises(ollama.ResponseError, match="suffix"):
        client.generate(name, "def f():", suffix="return 1")
    assert client.chat(name, HELLO, think=False, options={"num_predict": 1}).done


def test_generate_uses_the_template_unless_it_is_raw(client: ollama.Client) -> None:
    name, options = name_of(client), {**GREEDY, "num_predict": 6}
    chatted = client.generate(name, "Say hello.", options=options)
    assert chatted.response == client.chat(name, HELLO, options=options).message.content
    told = client.generate(
        name, "Say hello.", system="You are a pirate who only ever says arrr.", options=options
    )
    raw = client.generate(name, "Say hello.", raw=True, options=options)
    assert raw.prompt_eval_count is not None
    assert chatted.prompt_eval_count is not None
    assert raw.prompt_eval_count < 6 < chatted.prompt_eval_count
    assert told.prompt_eval_count != chatted.prompt_eval_count
    *parts, last = client.generate(name, "Say hello.", options=options, stream=True)
    assert "".join(part.response or "" for part in parts) == chatted.response
    assert last.eval_count == chatted.eval_count


def test_a_gap_is_filled_in(coder: ollama.Client) -> None:
    answer = coder.generate(
        name_of(coder),
        "def add(a, b):\n    return",
        suffix="\n\nprint(add(1, 2))\n",
        options={**GREEDY, "num_predict": 16, "stop": ["\n"]},
    )
    assert answer.response is not None
    assert answer.response.strip() == "a + b"


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_to_answer_means_load(client: ollama.Client, stream: bool) -> None:
    name = name_of(client)
    for answer in (client.generate(name, "", stream=stream), client.chat(name, [], stream=stream)):
        (only,) = list(answer) if stream else [answer]
        assert only.done
        assert only.done_reason == "load"


def test_logprobs(client: ollama.Client) -> None:
    options = {**GREEDY, "num_predict": 3}
    whole = client.chat(name_of(client), HELLO, options=options, logprobs=True, top_logprobs=2)
    parts = list(
        client.chat(name_of(client), HELLO, options=options, logprobs=True, top_logprobs=2, stream=True)
    )
    streamed = [one for part in parts for one in part.logprobs or ()]
    assert whole.logprobs == streamed
    assert len(streamed) == 3
    for one in streamed:
        assert one.logprob <= 0
        assert one.top_logprobs is not None
        assert len(one.top_logprobs) == 2
        assert one.top_logprobs[0].token == one.token


def test_texts_are_embedded(client: ollama.Client) -> None:
    name = name_of(client)
    texts = ["A cat sits on the mat.", "A kitten lies on the rug.", "Interest rates rose again."]
    many = client.embed(name, texts)
    assert [len(vector) for vector in many.embeddings] == [576] * 3
    assert [sum(x * x for x in vector) for vector in many.embeddings] == pytest.approx([1.0] * 3, abs=1e-3)
    assert many.prompt_eval_count is not None
    assert many.prompt_eval_count > 3
    one = client.embed(name, texts[0])
    assert one.embeddings[0] == pytest.approx(many.embeddings[0], abs=1e-6)
    assert client.embeddings(name, texts[0]).embedding == pytest.approx(one.embeddings[0], abs=1e-6)
    short = client.embed(name, texts[0], dimensions=64).embeddings[0]
    assert len(short) == 64
    assert sum(x * x for x in short) == pytest.approx(1.0, abs=1e-3)
    assert client.embed(name, []).embeddings == []
    with pytest.raises(ollama.ResponseError, match="dimensions"):
        client.embed(name, texts[0], dimensions=577)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images"),
        ("/api/chat", {"messages": [{"role": "nobody", "content": "x"}]}, "nobody"),
        ("/api/chat", {"messages": HELLO, "format": "xml"}, "format"),
        ("/api/chat", {"messages": HELLO, "format": {"type": 3}}, "json"),
        ("/api/chat", {"messages": HELLO, "options": {"temperature": -1}}, "temperature"),
        ("/api/chat", {"messages": HELLO, "options": {"num_predict": "many"}}, "options.num_predict"),
        ("/api/chat", {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/api/chat", {"messages": [{"role": "user", "content": "word " * 3000}]}, "tokens"),
        ("/api/chat", {"messages": "hello"}, "messages"),
        ("/api/generate", {"prompt": "x", "images": ["aGk="]}, "images"),
        ("/api/generate", {"prompt": "x", "context": [1, 2]}, "context"),
        ("/api/generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, "system"),
        ("/api/embed", {"input": ["word " * 3000]}, "tokens"),
        ("/api/embed", {"input": 3}, "input"),
        ("/api/generate", b"{", "JSON"),
        ("/api/generate", b"", "body"),
    ],
)
def test_errors_are_a_text(server: RunningServer, path: str, body: Any, words: str) -> None:
    status, headers, answer = server.request(path, body)
    error = json.loads(answer)
    assert status == 400
    assert headers["content-type"] == "application/json"
    assert set(error) == {"error"}
    assert words in error["error"]


def test_what_is_not_there(server: RunningServer) -> None:
    for path, name in (
        ("/api/pull", "llama3"),
        ("/api/show", "llama3"),
        ("/api/show", ""),
        ("/api/chat", "\ud800"),
    ):
        status, _, body = server.request(path, {"model": name})
        assert status == 404
        assert set(json.loads(body)) == {"error"}


def test_a_body_that_is_called_a_form(server: RunningServer) -> None:
    """So curl calls it, but a web page that does so evades the browser's question whether it may."""
    form = "application/x-www-form-urlencoded"
    body = json.dumps({"prompt": "Hi", "stream": False, "options": {"num_predict": 1}}).encode()
    status, _, answer = server.request("/api/generate", body, content_type=form)
    assert status == 200
    assert json.loads(answer)["eval_count"] == 1
    status, _, _ = server.request("/api/generate", body, content_type=form, origin="https://example.com")
    assert status == 400


def test_a_client_that_leaves_ends_its_answer(client: ollama.Client, server: RunningServer) -> None:
    answer = client.generate(name_of(client), "Once", raw=True, stream=True, options={"num_predict": 1900})
    next(iter(answer))
    answer.close()  # type: ignore[attr-defined]
    server.wait_until_idle()

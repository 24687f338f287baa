"""Bad input over HTTP: a 4xx that says what is wrong, at once, whatever the input is. Clients retry a 5xx."""

from __future__ import annotations

import gzip
import http.client
import json
import threading
from typing import Any
from urllib.parse import urlsplit

import pytest

from helpers_server import RunningServer

pytestmark = pytest.mark.models

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


def refusal(server: RunningServer, path: str, body: Any, **headers: str) -> dict[str, Any]:
    """The error object of a request that is answered with status 400."""
    status, _, answer = server.request(path, body, **headers)
    assert status == 400, (status, answer[:500])
    return error_of(answer)


def error_of(answer: bytes) -> dict[str, Any]:
    content = json.loads(answer)
    assert set(content) == {"error"}
    error: dict[str, Any] = content["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["type"], str)
    return error


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b"null",
        b"[]",
        b"3",
        b'"text"',
        b'{"prompt":',
        b'{"prompt": "\xff\xfe", "messages": []}',
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"prompt": "a", "messages": [], "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": ' + 100_000 * b"[" + 100_000 * b"]" + b', "messages": []}',
        b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
        b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "top_p": -Infinity}',
        b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
    ],
    ids=lambda body: repr(body[:40]),
)
def test_bodies_that_are_no_request(server: RunningServer, path: str, body: bytes) -> None:
    refusal(server, path, body)


def test_a_compressed_body_is_refused(server: RunningServer) -> None:
    body = gzip.compress(b'{"prompt": "a", "max_tokens": 1}')
    refusal(server, COMPLETIONS, body, content_encoding="gzip")


def test_a_body_of_another_type_is_told_which_type_to_have(server: RunningServer) -> None:
    error = refusal(server, COMPLETIONS, b'{"prompt": "a"}', content_type="application/x-www-form-urlencoded")
    assert "application/json" in error["message"]


def test_of_a_key_that_is_given_twice_the_last_counts(server: RunningServer) -> None:
    body = b'{"prompt": "first", "prompt": "second", "max_tokens": 0, "echo": true}'
    status, _, answer = server.request(COMPLETIONS, body)
    assert status == 200
    assert json.loads(answer)["choices"][0]["text"] == "second"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [49152]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": ["a"] * 3000}, "prompt"),
        ({"model": 3}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.5}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 10**12}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"top_k": -2}, "top_k"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"49152": 1}}, "logit_bias"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": []}, "logit_bias"),
        ({"stop_token_ids": [49152]}, "stop_token_ids"),
        ({"stop_token_ids": [2**40]}, "stop_token_ids"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x" * 5000]}, "stop"),
        ({"logprobs": 2**40}, "logprobs"),
        ({"min_tokens": 2**70}, "min_tokens"),
        ({"priority": 2**63}, "priority"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "b"}, "suffix"),
        ({"prompt": [5], "suffix": "b"}, "suffix"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"banana": 1}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
        ({"guided_choice": []}, "choice"),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_completions_name_the_field_that_is_wrong(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    assert refusal(server, COMPLETIONS, {"prompt": "a", **fields})["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "banana", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [*HI, {"role": "assistant", "tool_calls": [3]}]}, "messages[1].tool_calls[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"functions": [{}]}, "functions"),
        ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tools"),
        ({"tool_choice": "banana"}, "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_chat_names_the_field_that_is_wrong(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    assert refusal(server, CHAT, {"messages": HI, **fields})["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": "\ud800"},
        {"suffix": "\ud800"},
        {"guided_regex": "\ud800"},
        {"guided_grammar": "start: \ud800"},
        {"guided_choice": ["\ud800"]},
        {"guided_json": {"const": "\ud800"}},
        {"echo": True, "prompt": "\ud800"},
        {"logit_bias": {"\ud800": 1}},
        {"response_format": {"type": "\ud800"}},
        {"priority": 2**80},
        {"priority": 2**80, "prompt": [5, 6]},
    ],
    ids=lambda value: ascii(value)[:50],
)
def test_what_no_message_between_processes_can_carry(server: RunningServer, fields: dict[str, Any]) -> None:
    refusal(server, COMPLETIONS, {"prompt": "a", "max_tokens": 1, **fields})
    refusal(server, COMPLETIONS, {"prompt": "a", "max_tokens": 1, "stream": True, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 2**62},
        {"max_tokens": 2**63, "stop": "e"},
        {"temperature": 1e300},
        {"temperature": 1e-300},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-300},
        {"top_p": 0},
        {"temperature": None},
        {"metadata": {"a": "b"}, "user": "me", "some_new_field": [1]},
    ],
    ids=repr,
)
def test_strange_values_that_mean_something(server: RunningServer, fields: dict[str, Any]) -> None:
    status, _, answer = server.request(COMPLETIONS, {"prompt": "The", "max_tokens": 2, "seed": 1, **fields})
    assert status == 200, answer


@pytest.mark.parametrize("name", ["self", "guard", "add_special_tokens", "namespace", "raise_exception"])
def test_template_variables_may_have_any_name(server: RunningServer, name: str) -> None:
    body = {"messages": HI, "max_tokens": 1, "chat_template_kwargs": {name: 1}}
    assert server.request(CHAT, body)[0] == 200


CONSTRAINTS: list[dict[str, Any]] = [
    {"guided_json": {"$ref": "#"}},
    {
        "guided_json": {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        }
    },
    {"guided_json": {"type": "array", "items": {"type": "integer"}, "maxItems": 2**64 - 1}},
    {"guided_json": {"type": "array", "minItems": 2**64 - 1}},
    {"guided_json": {"type": "banana"}},
    {"guided_json": {"not": {"type": "string"}}},
    {"guided_json": ""},
    {"guided_json": '{"anyOf":[' * 1000 + "{}" + "]}" * 1000},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": False}}},
    {"guided_grammar": "root ::= root"},
    {"guided_grammar": "start: start"},
    {"guided_regex": "("},
    {"guided_regex": "(?=a)b"},
    {"guided_regex": r"(a)\1"},
    {"structured_outputs": {"json_object": True, "whitespace_pattern": "("}},
]


@pytest.mark.parametrize("fields", CONSTRAINTS, ids=lambda value: repr(value)[:60])
def test_constraints_that_cannot_be_kept(server: RunningServer, fields: dict[str, Any]) -> None:
    refusal(server, COMPLETIONS, {"prompt": "a", "max_tokens": 4, **fields})
    refusal(server, CHAT, {"messages": HI, "max_tokens": 4, **fields})


def test_tools_that_cannot_be_kept(coder_server: RunningServer) -> None:
    """A schema in a tool is a constraint too, once a call is demanded."""
    for parameters in ({"$ref": "#"}, {"type": "banana"}, [], {"type": "object", "minProperties": 2**64}):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        body = {"messages": HI, "tools": [tool], "tool_choice": "required", "max_tokens": 4}
        refusal(coder_server, CHAT, body)


def test_prompts_longer_than_the_context(server: RunningServer) -> None:
    """They are refused at once, and a neighbour that runs does not notice."""
    words = "word " * 5000
    bodies = [
        (COMPLETIONS, {"prompt": words}),
        (COMPLETIONS, {"prompt": words, "stream": True}),
        (COMPLETIONS, {"prompt": ["short", words]}),
        (COMPLETIONS, {"prompt": [5] * 2048}),
        (CHAT, {"messages": [{"role": "user", "content": words}]}),
        (CHAT, {"messages": [{"role": "user", "content": "x " * 500_000}]}),
    ]
    neighbour = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    alone = server.post(COMPLETIONS, **neighbour)["choices"]
    beside: list[Any] = []
    thread = threading.Thread(target=lambda: beside.append(server.post(COMPLETIONS, **neighbour)["choices"]))
    thread.start()
    for path, body in bodies:
        error = refusal(server, path, body)
        assert error["code"] == "context_length_exceeded"
        assert "2048" in error["message"]
    thread.join()
    assert beside == [alone]
    server.wait_until_idle()


def test_the_longest_prompt_that_fits(server: RunningServer) -> None:
    answer = server.post(COMPLETIONS, prompt=[5] * 2047, max_tokens=100)
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"


def test_models_paths_and_methods_that_are_not_there(server: RunningServer) -> None:
    for method, path, body, expected in (
        ("POST", COMPLETIONS, {"model": "other", "prompt": "a"}, 404),
        ("POST", CHAT, {"model": "\ud800", "messages": HI}, 404),
        ("GET", "/v1/models/other", None, 404),
        ("POST", "/v1/nonsense", {}, 404),
        ("GET", "/nonsense", None, 404),
        ("GET", COMPLETIONS, None, 405),
        ("DELETE", "/v1/models", None, 405),
        ("OPTIONS", CHAT, None, 405),
    ):
        status, _, answer = server.request(path, body, method)
        assert status == expected, (method, path)
        error_of(answer)


def test_a_model_whose_name_is_no_text(server: RunningServer) -> None:
    """The refusal names it, as well as can be."""
    for path in ("/api/generate", "/api/chat", "/api/show"):
        status, _, answer = server.request(path, b'{"model": "\\ud800", "messages": []}')
        assert status == 404, answer
        assert "not found" in json.loads(answer)["error"]


def test_browsers_may_send_their_key(server: RunningServer) -> None:
    status, headers, _ = server.request(
        CHAT,
        None,
        "OPTIONS",
        origin="https://example.org",
        access_control_request_method="POST",
        access_control_request_headers="authorization, content-type",
    )
    assert status == 200
    assert headers["access-control-allow-origin"] in ("*", "https://example.org")
    assert "authorization" in headers["access-control-allow-headers"].lower()
    assert "POST" in headers["access-control-allow-methods"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit_is_answered(server: RunningServer, chunked: bool) -> None:
    """The client, which is still sending, reads status 413, and does not find its connection reset."""
    piece = b"x" * 100_000
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    headers = {"content-type": "application/json", "connection": "close"}
    if not chunked:
        headers["content-length"] = str(100 * len(piece))
    connection.request("POST", COMPLETIONS, (piece for _ in range(100)), headers, encode_chunked=chunked)
    response = connection.getresponse()
    assert response.status == 413
    assert "--max-body-mib" in error_of(response.read())["message"]
    connection.close()


def test_nothing_is_left_of_what_was_refused(server: RunningServer) -> None:
    server.wait_until_idle()
    assert "could not be handled" not in "".join(server.log)
    assert "Traceback" not in "".join(server.log)

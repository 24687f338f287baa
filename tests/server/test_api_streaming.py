"""Streams over HTTP: their events, and text that arrives as it is."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from helpers_server import RunningServer, events_of, streamed

pytestmark = pytest.mark.models

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
EMOJI = "😀🏳️‍🌈👩‍👩‍👧"


@pytest.fixture(scope="module")
def gemma_server(model_path: Callable[[str], Path]) -> Iterator[RunningServer]:
    """gemma-3-270m, a base model: SentencePiece, no chat template."""
    with RunningServer(model_path("gemma3-270m"), "--max-model-len", "512") as running:
        yield running


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_one_finish_reason_and_null_before(server: RunningServer, path: str, n: int) -> None:
    events = streamed(server, path, prompt="One", messages=HI, max_tokens=3, n=n)
    assert len({event["id"] for event in events}) == 1
    for index in range(n):
        reasons = [
            choice["finish_reason"]
            for event in events
            for choice in event["choices"]
            if choice["index"] == index
        ]
        assert reasons[-1] == "length"
        assert set(reasons[:-1]) == {None}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_usage_comes_when_it_is_asked_for(server: RunningServer, path: str) -> None:
    options: dict[str, Any] = {"prompt": "One", "messages": HI, "max_tokens": 3}
    for without in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
        events = streamed(server, path, **options, **without)
        assert all("usage" not in event and event["choices"] for event in events)
    *events, last = streamed(server, path, **options, stream_options={"include_usage": True})
    assert all(event["usage"] is None and event["choices"] for event in events)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 3


def test_a_failure_in_mid_stream_is_an_event(model_path: Callable[[str], Path]) -> None:
    """The engine dies after the first token: the stream ends in a line that says so."""
    with RunningServer(model_path("smollm2-135m"), "--max-model-len", "2048") as server:
        connection = HTTPConnection(urlsplit(server.url).netloc, timeout=60)
        body = {"prompt": "Once", "max_tokens": 2000, "stream": True, "ignore_eos": True}
        connection.request("POST", COMPLETIONS, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        first = response.readline()
        os.kill(server.workers()["engine"], signal.SIGKILL)
        events = events_of(first + response.read())
        connection.close()
    assert set(events[-1]) == {"error"}
    assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_emoji_of_several_tokens_is_never_broken(server: RunningServer, path: str) -> None:
    demanded = {"guided_choice": [EMOJI], "max_tokens": 60}
    events = streamed(server, path, prompt="Smile:", messages=HI, **demanded)
    pieces = [_text(event["choices"][0]) for event in events]
    assert "".join(pieces) == EMOJI
    assert not any("\ufffd" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > 1


def test_the_start_of_an_emoji_is_flushed_at_the_end(server: RunningServer) -> None:
    options = {"prompt": "Smile:", "guided_choice": ["😀"], "max_tokens": 1}
    events = streamed(server, COMPLETIONS, **options)
    streamed_text = "".join(event["choices"][0]["text"] for event in events)
    assert streamed_text == server.post(COMPLETIONS, **options)["choices"][0]["text"] == "\ufffd"
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_logprobs_carry_the_bytes_of_a_part_of_an_emoji(server: RunningServer) -> None:
    answer = server.post(CHAT, messages=HI, guided_choice=["😀"], max_tokens=20, logprobs=True)
    *positions, end = answer["choices"][0]["logprobs"]["content"]
    assert len(positions) > 1
    assert bytes(byte for one in positions for byte in one["bytes"]).decode() == "😀"
    assert end["token"] == "<|im_end|>"


def test_sentencepiece_keeps_its_spaces(gemma_server: RunningServer) -> None:
    for text in (" a b  c", "a b", "  x"):
        options = {"prompt": "Say:", "guided_choice": [text], "max_tokens": 30}
        events = streamed(gemma_server, COMPLETIONS, **options)
        assert "".join(event["choices"][0]["text"] for event in events) == text
        assert gemma_server.post(COMPLETIONS, **options)["choices"][0]["text"] == text


def test_a_model_without_a_template_completes_and_does_not_chat(gemma_server: RunningServer) -> None:
    status, _, answer = gemma_server.request(CHAT, {"messages": HI, "max_tokens": 2})
    assert status == 400
    assert "no chat template" in json.loads(answer)["error"]["message"]
    done = gemma_server.post(COMPLETIONS, prompt="The sky is", max_tokens=2, temperature=0)
    assert done["choices"][0]["text"]


def test_an_empty_prompt_is_the_beginning_of_a_text(gemma_server: RunningServer) -> None:
    answers = [
        gemma_server.post(COMPLETIONS, prompt=prompt, max_tokens=2, temperature=0)
        for prompt in ([""], "", [[]], [2])
    ]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [1, 1, 1, 1]


@pytest.mark.parametrize("token_id", [1, 106])  # <eos> and <end_of_turn>
def test_every_end_token_ends_a_text(gemma_server: RunningServer, token_id: int) -> None:
    answer = gemma_server.post(COMPLETIONS, prompt="One", max_tokens=5, logit_bias={str(token_id): 100})
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"] == ""
    assert answer["usage"]["completion_tokens"] == 1


def test_clients_that_leave_free_their_slots(server: RunningServer) -> None:
    """Hundreds of them, before and after the first token; a long prompt does not keep its slot either."""
    address = urlsplit(server.url).netloc
    server.wait_until_idle()
    for number in range(200):
        connection = HTTPConnection(address, timeout=60)
        prompt = [number + 300] * (1500 if number % 50 == 0 else 3)
        body = {"prompt": prompt, "max_tokens": 2000, "stream": True, "ignore_eos": True, "n": 1 + number % 2}
        connection.request("POST", COMPLETIONS, json.dumps(body), {"content-type": "application/json"})
        if number % 3 == 0 and len(prompt) == 3:
            connection.getresponse().read(1)
        connection.close()
    server.wait_until_idle()
    assert server.post(COMPLETIONS, prompt="One", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_a_short_request_ends_beside_a_long_one(server: RunningServer) -> None:
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    body = {"prompt": [5] * 1000, "max_tokens": 1000, "stream": True, "ignore_eos": True}
    connection.request("POST", COMPLETIONS, json.dumps(body), {"content-type": "application/json"})
    answer = server.post(COMPLETIONS, prompt="One", max_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2
    assert server.stats()["num_running"] == 1
    connection.close()
    server.wait_until_idle()


def _text(choice: dict[str, Any]) -> str:
    text = choice["text"] if "text" in choice else choice["delta"].get("content")
    return text or ""

"""Stop strings over HTTP: nothing of one is streamed, and nothing else is lost."""

from __future__ import annotations

import pytest

from helpers_server import RunningServer, streamed

pytestmark = pytest.mark.models

ALPHABET = "Here is the English alphabet: ABC"


def test_nothing_of_a_stop_string_is_streamed(server: RunningServer) -> None:
    options = {"prompt": ALPHABET, "temperature": 0, "max_tokens": 20}
    free = server.post("/v1/completions", **options)["choices"][0]["text"]
    assert free.startswith("DEFGHIJ")
    events = streamed(server, "/v1/completions", **options, stop="DEFGHIJ")
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == ""
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == "DEFGHIJ"


def test_what_was_held_back_comes_at_the_end(server: RunningServer) -> None:
    """The text ends in what could have become a stop string."""
    options = {"prompt": ALPHABET, "temperature": 0, "max_tokens": 20}
    free = server.post("/v1/completions", **options)["choices"][0]["text"]
    events = streamed(server, "/v1/completions", **options, stop=[free[-5:] + "#", "#never#"])
    assert "".join(event["choices"][0]["text"] for event in events) == free
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_text_before_a_stop_string_is_whole(server: RunningServer) -> None:
    options = {"prompt": ALPHABET, "temperature": 0, "max_tokens": 20, "stop": ["HIJ"]}
    events = streamed(server, "/v1/completions", **options)
    whole = server.post("/v1/completions", **options)["choices"][0]
    assert "".join(event["choices"][0]["text"] for event in events) == whole["text"] == "DEFG"
    shown = server.post("/v1/completions", **options, include_stop_str_in_output=True)["choices"][0]
    assert shown["text"] == "DEFGHIJ"


def test_chat_stops_too(server: RunningServer) -> None:
    options = {
        "messages": [{"role": "user", "content": "Count from one to ten in words."}],
        "temperature": 0,
        "max_tokens": 24,
    }
    free = server.post("/v1/chat/completions", **options)["choices"][0]["message"]["content"]
    stop = free[len(free) // 2 :][:4]
    events = streamed(server, "/v1/chat/completions", **options, stop=[stop])
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert text == free[: free.index(stop)]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    server.wait_until_idle()


def test_stop_tokens(server: RunningServer) -> None:
    """A token that ends the text is not shown, and named as the reason."""
    answer = server.post(
        "/v1/completions", prompt="a", max_tokens=5, logit_bias={"400": 100}, stop_token_ids=[400]
    )["choices"][0]
    assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == ("", "stop", 400)

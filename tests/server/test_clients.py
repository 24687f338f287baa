"""What clients look for in answers beside the protocol itself."""

from __future__ import annotations

import json

import pytest

from helpers_server import RunningServer

pytestmark = pytest.mark.models


@pytest.mark.parametrize("num_words", [3_000, 100_000], ids=["too long", "far too long"])
def test_a_prompt_that_is_too_long_is_said_in_words_that_clients_know(
    server: RunningServer, num_words: int
) -> None:
    messages = [{"role": "user", "content": "word " * num_words}]
    status, _, body = server.request("/v1/chat/completions", {"messages": messages})
    error = json.loads(body)["error"]
    assert status == 400
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 2048 tokens")  # LiteLLM
    assert "prompt is too long" in error["message"]  # LangChain

"""What sampling parameters promise, over HTTP."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from helpers_server import RunningServer, streamed

pytestmark = pytest.mark.models

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


def texts(server: RunningServer, **body: Any) -> list[str]:
    answer = server.post(COMPLETIONS, **body)
    return [choice["text"] for choice in answer["choices"]]


def test_top_p_0_keeps_one_token(server: RunningServer) -> None:
    greedy = texts(server, prompt="The sky is", max_tokens=6, temperature=0)
    assert texts(server, prompt="The sky is", max_tokens=6, temperature=1.5, top_p=0) == greedy
    assert texts(server, prompt="The sky is", max_tokens=6, temperature=1.5, top_k=1) == greedy


def test_top_k_0_keeps_all(server: RunningServer) -> None:
    free = {"prompt": "The sky is", "max_tokens": 6, "temperature": 1.5, "seed": 3}
    plain = texts(server, **free)
    for top_k in (0, -1, 2**62, None):
        assert texts(server, **free, top_k=top_k) == plain


def test_null_means_absent(server: RunningServer) -> None:
    free = {"prompt": "The sky is", "max_tokens": 6, "seed": 3}
    nothing = dict.fromkeys(
        ["temperature", "top_p", "top_k", "stop", "n", "logprobs", "logit_bias", "stream", "suffix"]
    )
    assert texts(server, **free, **nothing) == texts(server, **free)


def test_a_seed_repeats_its_output_beside_others(server: RunningServer) -> None:
    seeded = {"prompt": "The sky is", "max_tokens": 24, "temperature": 1.0, "seed": 5}
    alone = texts(server, **seeded)
    assert len(alone[0]) > 10
    neighbours = [
        threading.Thread(
            target=server.post,
            args=(COMPLETIONS,),
            kwargs={"prompt": f"Number {number}", "max_tokens": 40, "ignore_eos": True},
        )
        for number in range(4)
    ]
    for one in neighbours:
        one.start()
    beside = [texts(server, **seeded) for _ in range(2)]
    for one in neighbours:
        one.join()
    assert beside == [alone, alone]
    assert texts(server, **{**seeded, "seed": 6}) != alone
    assert texts(server, **{**seeded, "seed": -5}) != alone


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_several_choices(server: RunningServer, path: str) -> None:
    options: dict[str, Any] = {"prompt": "The sky", "messages": HI, "max_tokens": 8}
    options |= {"seed": 1, "temperature": 1.5}
    one = server.post(path, **options)
    three = server.post(path, **options, n=3)
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    contents = [choice.get("text") or choice["message"]["content"] for choice in three["choices"]]
    assert len(set(contents)) == 3
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] <= 24
    events = streamed(server, path, **options, n=3)
    pieces: dict[int, str] = {}
    for event in events:
        (choice,) = event["choices"]
        text = choice["text"] if path == COMPLETIONS else choice["delta"].get("content") or ""
        pieces[choice["index"]] = pieces.get(choice["index"], "") + text
    assert [pieces[index] for index in range(3)] == contents


def test_choices_of_several_prompts(server: RunningServer) -> None:
    answer = server.post(COMPLETIONS, prompt=["A", "B"], n=2, max_tokens=2, echo=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"][0] for choice in answer["choices"]] == ["A", "A", "B", "B"]


def test_penalties_count_what_they_should(server: RunningServer) -> None:
    """Presence and frequency count the output; repetition counts the prompt too."""
    options = {"prompt": "BANANA" + 7 * " BANANA", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    plain = texts(server, **options)
    assert "BANANA" in plain[0]
    assert texts(server, **options, presence_penalty=2) != plain
    assert texts(server, **options, frequency_penalty=2) != plain
    first = {**options, "max_tokens": 1}
    assert texts(server, **first, presence_penalty=2, frequency_penalty=2) == texts(server, **first)
    assert texts(server, **first, repetition_penalty=5) != texts(server, **first)


def test_what_is_impossible_has_a_finite_logprob(server: RunningServer) -> None:
    """JSON has no infinity. Masks and biases make some tokens impossible."""
    for fields in ({"guided_regex": "[0-9]"}, {"logit_bias": {"400": -100}}, {"top_k": 1}):
        for path, more in ((COMPLETIONS, {"logprobs": 5}), (CHAT, {"logprobs": True, "top_logprobs": 5})):
            body = {"prompt": "One", "messages": HI, "max_tokens": 1, **more, **fields}
            status, _, answer = server.request(path, body)
            assert status == 200, answer
            assert b"nfinity" not in answer
            assert b"NaN" not in answer
            assert b'logprobs":null' not in answer


def test_a_constraint_wins_over_a_bias(server: RunningServer) -> None:
    biased = texts(server, prompt="One", guided_choice=["yes"], logit_bias={"400": 100}, max_tokens=4)
    assert biased == ["yes"]


def test_min_tokens_and_ignore_eos(server: RunningServer) -> None:
    """The chat's answer would end early; token 2 ends an answer of this model."""
    ends = {"messages": HI, "max_tokens": 6, "logit_bias": {"2": 100}}
    assert server.post(CHAT, **ends)["usage"]["completion_tokens"] == 1
    assert server.post(CHAT, **ends)["choices"][0]["finish_reason"] == "stop"
    assert server.post(CHAT, **ends, min_tokens=4)["usage"]["completion_tokens"] == 5
    assert server.post(CHAT, **ends, ignore_eos=True)["usage"]["completion_tokens"] == 6


def test_max_completion_tokens_is_max_tokens(server: RunningServer) -> None:
    answer = server.post(CHAT, messages=HI, max_completion_tokens=2, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 2


def test_the_same_prompt_twice_then_a_prefix_of_it(server: RunningServer) -> None:
    """Blocks that are shared hold no logits: the last token of a prompt is always computed."""
    prompt = list(range(300, 396))
    shorter = prompt[:64]
    options = {"max_tokens": 6, "temperature": 0, "logprobs": 3}

    def ask(ids: list[int]) -> Any:
        return server.post(COMPLETIONS, prompt=ids, **options)

    first, again, prefix, prefix_again = ask(prompt), ask(prompt), ask(shorter), ask(shorter)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert prefix["usage"]["prompt_tokens_details"]["cached_tokens"] < len(shorter)
    assert again["choices"] == first["choices"]
    assert prefix_again["choices"] == prefix["choices"]
    assert prefix["choices"] != first["choices"]

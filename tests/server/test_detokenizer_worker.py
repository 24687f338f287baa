"""What the detokenizer's process tells of tokens, however they are cut into steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.sampling import SamplingParams
from gapless.server.channel import pack_ids
from gapless.server.detokenizer_worker import DetokenizerWorker
from gapless.server.messages import Chunks, Ended, Entered, Opened, PromptLogprob, StepEvent, Token
from gapless.tokenizer.gguf import tokenizer_from_gguf
from helpers_tokenizer import byte_level_metadata

TOKENIZER = tokenizer_from_gguf(byte_level_metadata())
PROMPT = TOKENIZER.encode("hello", parse_special=False)


@dataclass
class Seen:
    """What a client has by now."""

    text: str = ""
    num_tokens: int = 0
    num_plain: int = 0
    reasons: list[str] = field(default_factory=list)
    num_logprobs: int = 0
    num_prompt_logprobs: int = 0


def opened(number: int, params: SamplingParams) -> list[StepEvent]:
    return [
        Opened(number, pack_ids(PROMPT), params, 1000, list(TOKENIZER.eos_token_ids), 0.0),
        Entered(number, 0.0, 0, 0),
    ]


def add(seen: dict[tuple[int, int], Seen], gained: Chunks) -> None:
    """Takes what a step brought; by generation and choice."""
    for number, text in zip(gained.plain_numbers, gained.plain_texts, strict=True):
        one = seen.setdefault((number, 0), Seen())
        one.text += text
        one.num_tokens += 1
        one.num_plain += 1
    for chunk in gained.chunks:
        one = seen.setdefault((chunk.number, chunk.index), Seen())
        one.text += chunk.text
        one.num_tokens += chunk.num_tokens
        one.num_logprobs += len(chunk.logprobs or ())
        one.num_prompt_logprobs += len(chunk.prompt_logprobs or ())
        if chunk.finish_reason is not None:
            one.reasons.append(chunk.finish_reason)


@given(
    text=st.text(alphabet="helo wrd.\n€語😀", max_size=40),
    stop=st.sampled_from([None, "world", "o", "語"]),
    cuts=st.lists(st.integers(1, 3), min_size=1),
)
def test_texts_are_complete_however_tokens_are_cut_into_steps(
    text: str, stop: str | None, cuts: list[int]
) -> None:
    tokens = list(text.encode())  # its first 256 tokens are the bytes: characters come in pieces
    worker, seen = DetokenizerWorker(TOKENIZER), dict[tuple[int, int], Seen]()
    params = SamplingParams(stop=None if stop is None else [stop], max_tokens=1000)
    add(seen, worker.take([opened(1, params)]))
    place = turn = 0
    while place < len(tokens):
        count = cuts[turn % len(cuts)]
        add(seen, worker.take([[Token(1, 0, one, 0.0)] for one in tokens[place : place + count]]))
        place, turn = place + count, turn + 1
    add(seen, worker.take([[Ended(1, 0, "length", 0.0)]]))
    (one,) = seen.values()
    if stop is not None and stop in text:
        assert one.text == text[: text.index(stop)]
        assert one.reasons == ["stop"]
    else:
        assert one.text == text
        assert one.reasons == ["length"]
        assert one.num_tokens == len(tokens)


def test_a_token_a_step_is_plain() -> None:
    worker, seen = DetokenizerWorker(TOKENIZER), dict[tuple[int, int], Seen]()
    add(seen, worker.take([opened(1, SamplingParams())]))
    for token_id in TOKENIZER.encode("a world", parse_special=False):
        add(seen, worker.take([[Token(1, 0, token_id, 0.0)]]))
    assert seen[1, 0].text == "a world"
    assert seen[1, 0].num_plain == seen[1, 0].num_tokens > 1


@pytest.mark.parametrize(
    "params", [SamplingParams(n=2), SamplingParams(logprobs=0), SamplingParams(prompt_logprobs=0)]
)
def test_what_has_more_to_tell_is_not_plain(params: SamplingParams) -> None:
    worker, seen = DetokenizerWorker(TOKENIZER), dict[tuple[int, int], Seen]()
    add(seen, worker.take([opened(1, params)]))
    if params.prompt_logprobs is not None:
        places = range(1, len(PROMPT))
        add(seen, worker.take([[PromptLogprob(1, place, -1.0, 1, []) for place in places]]))
    choices = range(params.n)
    for token_id in TOKENIZER.encode("a b", parse_special=False):
        add(seen, worker.take([[Token(1, choice, token_id, 0.0, -1.0, 1) for choice in choices]]))
    for choice in choices:
        one = seen[1, choice]
        assert (one.text, one.num_plain) == ("a b", 0)
        assert one.num_logprobs == (one.num_tokens if params.logprobs is not None else 0)
        assert one.num_prompt_logprobs == (len(PROMPT) if params.prompt_logprobs is not None else 0)

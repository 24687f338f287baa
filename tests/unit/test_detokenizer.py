"""Streaming text: whole characters, spaces in place, stop strings unseen."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.errors import InvalidRequestError
from gapless.tokenizer import Detokenizer, StopStringMatcher, Tokenizer, tokenizer_from_gguf
from helpers_tokenizer import byte_level_metadata, sentencepiece_metadata

BYTE_LEVEL = tokenizer_from_gguf(byte_level_metadata())
SENTENCEPIECE = tokenizer_from_gguf(sentencepiece_metadata())
either = st.sampled_from([BYTE_LEVEL, SENTENCEPIECE])


def stream(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def test_a_character_over_several_tokens_comes_whole() -> None:
    pieces = stream(Detokenizer(BYTE_LEVEL), BYTE_LEVEL.encode("a🏳️‍🌈"))
    assert "".join(pieces) == "a🏳️‍🌈"
    assert all("\ufffd" not in piece for piece in pieces)
    assert "" in pieces[:-1]


def test_an_incomplete_tail_is_flushed_once() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    ids = BYTE_LEVEL.encode("😁")[:-1]
    assert [detokenizer.push(token_id) for token_id in ids] == [""] * len(ids)
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_sentencepiece_spaces_survive_chunk_borders() -> None:
    ids = [SENTENCEPIECE.vocabulary.pieces.index(piece) for piece in ("▁a", "▁the", "▁▁", "b")]
    assert stream(Detokenizer(SENTENCEPIECE), ids) == ["a", " the", "  ", "b", ""]
    prompt = SENTENCEPIECE.encode("the")
    assert stream(Detokenizer(SENTENCEPIECE, prompt), ids) == [" a", " the", "  ", "b", ""]


def test_a_prompt_of_markup_alone_is_no_text_before() -> None:
    ids = SENTENCEPIECE.encode("the")
    assert stream(Detokenizer(SENTENCEPIECE, [1]), ids) == ["the", ""]


def test_control_tokens_are_left_out_or_shown() -> None:
    ids = BYTE_LEVEL.encode("hello<|im_end|>", parse_special=True)
    assert stream(Detokenizer(BYTE_LEVEL), ids) == ["hello", "", ""]
    assert stream(Detokenizer(BYTE_LEVEL, skip_special_tokens=False), ids) == ["hello", "<|im_end|>", ""]


@given(tokenizer=either, data=st.data(), skip=st.booleans())
def test_pieces_together_are_the_decoded_text(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    streamed = "".join(stream(Detokenizer(tokenizer, skip_special_tokens=skip), ids))
    assert streamed == tokenizer.decode(ids, skip_special_tokens=skip)


@given(tokenizer=either, text=st.text(max_size=30), more=st.text(max_size=30))
def test_streaming_continues_the_prompt(tokenizer: Tokenizer, text: str, more: str) -> None:
    prompt, ids = tokenizer.encode(text), tokenizer.encode(more)
    streamed = "".join(stream(Detokenizer(tokenizer, prompt), ids))
    assert tokenizer.decode(prompt, skip_special_tokens=True) + streamed == tokenizer.decode(
        prompt + ids, skip_special_tokens=True
    )


def matched(stop: list[str], chunks: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopStringMatcher(stop, include)
    shown = "".join(matcher.push(chunk)[0] for chunk in chunks)
    return shown + matcher.finish(), matcher.matched


def test_nothing_of_a_stop_string_is_shown() -> None:
    matcher = StopStringMatcher(["DEFGHIJ"])
    assert [matcher.push(letter) for letter in "ABCDEFGHI"] == [
        *[(letter, None) for letter in "ABC"],
        *[("", None)] * 6,
    ]
    assert matcher.push("J") == ("", "DEFGHIJ")
    assert matcher.push("more") == ("", "DEFGHIJ")
    assert matcher.finish() == ""


def test_only_what_can_become_a_stop_string_is_held_back() -> None:
    matcher = StopStringMatcher(["aab"])
    assert matcher.push("aaa") == ("a", None)
    assert matcher.push("a") == ("a", None)
    assert matcher.push("c") == ("aac", None)


def test_what_is_held_back_is_not_lost() -> None:
    matcher = StopStringMatcher(["\n\nUser:"])
    assert matcher.push("Hi\n\nUs") == ("Hi", None)
    assert matcher.finish() == "\n\nUs"


@pytest.mark.parametrize(("include", "expected"), [(False, "one "), (True, "one STOP")])
def test_the_stop_string_itself_on_request(include: bool, expected: str) -> None:
    assert matched(["STOP"], ["one ST", "OP two"], include) == (expected, "STOP")


def test_the_first_complete_match_wins() -> None:
    assert matched(["world", "lo"], ["hello world"]) == ("hel", "lo")
    assert matched(["bc", "abc"], ["xabc"]) == ("x", "abc")


def test_no_stop_strings_hold_nothing_back() -> None:
    assert matched([], ["a", "b"]) == ("ab", None)


@pytest.mark.parametrize("stop", [[""], [None], [3]])
def test_a_stop_string_must_be_text(stop: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as error:
        StopStringMatcher(stop)
    assert error.value.param == "stop"


letters = st.text("ab", max_size=12)


@given(
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    text=letters,
    cuts=st.sets(st.integers(0, 12)),
)
def test_cuts_make_no_difference(stop: list[str], text: str, cuts: set[int]) -> None:
    borders = [0, *sorted(cuts), len(text)]
    chunks = [text[start:end] for start, end in pairwise(borders)]
    assert matched(stop, [text]) == matched(stop, chunks) == matched(stop, list(text))

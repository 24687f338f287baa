"""What a model thinks is told from what it answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.errors import InvalidRequestError
from gapless.server.parsing import (
    REASONING_TAGS,
    ContentDelta,
    ReasoningDelta,
    ReasoningParser,
    Tags,
    find_reasoning_tags,
    reasoning_tags,
)
from helpers_parsing import THINK, content, cuts, parsed, reasoning

CASES = [
    # text, starts inside, reasoning, content
    ("<think>\nHm, 2.\n</think>\n\nTwo.", False, "Hm, 2.", "Two."),
    ("\n <think>Hm</think>Two.\n", False, "Hm", "Two.\n"),
    ("Hm, 2.\n</think>\n\nTwo.", True, "Hm, 2.", "Two."),
    ("<think>\nHm</think>Two.", True, "Hm", "Two."),  # some models repeat what the prompt ends with
    ("Never closed. \n", True, "Never closed. \n", ""),
    ("<think>Never closed, quite </thin", False, "Never closed, quite </thin", ""),
    ("  Never opened.\n", False, "", "  Never opened.\n"),
    ("<thi", False, "", "<thi"),
    ("<thinking>No tag</thinking>", False, "", "<thinking>No tag</thinking>"),
    ("A <think> in a text is </think> text.", False, "", "A <think> in a text is </think> text."),
    ("<think>\n\n</think>\n\nTwo.", False, "", "Two."),
    ("<think>a</think>b<think>c</think>d", False, "a", "b<think>c</think>d"),
    ("<think>a < b </ think> </</think>", False, "a < b </ think> </", ""),
    ("<think>\n", False, "", ""),
    ("", False, "", ""),
    ("", True, "", ""),
    (" \n", False, "", " \n"),
]


@pytest.mark.parametrize("step", [1, 2, 3, 1000])
@pytest.mark.parametrize(("text", "starts_inside", "thoughts", "answer"), CASES)
def test_thoughts_and_content(text, starts_inside, thoughts, answer, step):
    pieces = [text[i : i + step] for i in range(0, len(text), step)]
    deltas = parsed(pieces, reasoning=THINK, starts_inside=starts_inside)
    assert (reasoning(deltas), content(deltas)) == (thoughts, answer)


def test_only_what_may_be_a_tag_is_held_back():
    parser = ReasoningParser(THINK)
    assert parser.push(" <thi") == []
    assert parser.push("nk>\nOne") == [ReasoningDelta("One")]
    assert parser.push(" two <") == [ReasoningDelta(" two")]
    assert parser.push("3 \n") == [ReasoningDelta(" <3")]
    assert parser.push("</think") == []
    assert parser.push(">\n") == []
    assert parser.push("\nFour ") == [ContentDelta("Four ")]
    assert parser.push("<think>") == [ContentDelta("<think>")]
    assert parser.finish() == []


TAGS = st.sampled_from([*REASONING_TAGS.values()])
FRAGMENTS = st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", "\n", " ", "a", "é", "😀", "<", ">"])
TEXTS = st.lists(FRAGMENTS, max_size=12).map("".join)


@given(cuts(TEXTS), st.booleans())
def test_how_the_text_is_cut_changes_nothing(pieces, starts_inside):
    whole = parsed(["".join(pieces)], reasoning=THINK, starts_inside=starts_inside)
    assert parsed(pieces, reasoning=THINK, starts_inside=starts_inside) == whole


@given(cuts(TEXTS), st.booleans())
def test_nothing_is_lost_but_tags_and_white_space(pieces, starts_inside):
    deltas = parsed(pieces, reasoning=THINK, starts_inside=starts_inside)

    def squeezed(text):
        return "".join(text.split())

    text = "".join(pieces).lstrip()
    thoughts, answer = squeezed(reasoning(deltas)), squeezed(content(deltas))
    if not starts_inside and not text.startswith(THINK.opening):
        assert (thoughts, answer) == ("", squeezed(text))
    else:
        text = squeezed(text.removeprefix(THINK.opening))
        assert text in {thoughts, f"{thoughts}</think>{answer}"}


@given(TAGS, st.data())
def test_all_tags_work(tags, data):
    pieces = data.draw(cuts(st.just(f"{tags.opening}Hm{tags.closing}Two.")))
    assert parsed(pieces, reasoning=tags) == [ReasoningDelta("Hm"), ContentDelta("Two.")]


@pytest.mark.parametrize(
    ("template", "tags"),
    [
        ("{{ content.split('</think>')[-1] }}", THINK),
        ("{%- set think_begin_token = '<seed:think>' %}", Tags("<seed:think>", "</seed:think>")),
        ("{{ '[THINK]' + block['thinking'] + '[/THINK]' }}", Tags("[THINK]", "[/THINK]")),
        ("{{ '<|im_start|>' + message.role }}", None),
    ],
)
def test_the_template_tells_the_tags(template, tags):
    assert reasoning_tags(template) == tags


def test_the_prompt_tells_whether_thoughts_are_open():
    assert THINK.opened_by("<|im_start|>assistant\n<think>\n")
    assert not THINK.opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not THINK.opened_by("What does <think> mean?<|im_end|>\n<|im_start|>assistant\n")


def test_an_unknown_name_lists_those_that_are_known():
    assert find_reasoning_tags("qwen3") == THINK
    with pytest.raises(InvalidRequestError, match=r"'qwen9'.*deepseek_r1.*mistral") as error:
        find_reasoning_tags("qwen9")
    assert error.value.param == "reasoning_parser"

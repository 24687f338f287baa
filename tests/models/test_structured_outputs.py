"""Structured output with a real model."""

import json
import re

import pytest

from gapless import LLM, SamplingParams, StructuredOutputs

pytestmark = pytest.mark.models

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "color": {"enum": ["red", "green", "blue"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "color", "sizes"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Describe a fruit."}]
GRAMMAR = 'root ::= fruit (", " fruit)? "."\nfruit ::= "apple" | "pear" | "plum" [a-z]{0,5}\n'
PHONE = r"\+[1-9][0-9]{0,2} [0-9]{3}-[0-9]{4}"
FREE = [
    SamplingParams(max_tokens=24, temperature=0),
    SamplingParams(max_tokens=32, temperature=0.9, seed=3),
    SamplingParams(max_tokens=20, temperature=1.1, seed=4, top_p=0.9, presence_penalty=1.0),
    SamplingParams(max_tokens=28, temperature=0.7, seed=5, logprobs=2),
]


def constrained(seed=1, temperature=1.0, max_tokens=200, n=1, **constraint):
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        n=n,
        structured_outputs=StructuredOutputs(**constraint),
    )


def check_object(text):
    value = json.loads(text)
    assert value.keys() == {"name", "color", "sizes"}
    assert len(value["name"]) <= 20
    assert value["color"] in {"red", "green", "blue"}
    assert len(value["sizes"]) <= 3
    assert all(type(size) is int and 1 <= size <= 99 for size in value["sizes"])


@pytest.fixture(scope="module")
def llm(model_path):
    with LLM(model_path("smollm2-135m"), max_model_len=512, max_num_seqs=16) as llm:
        yield llm


def ask(llm, params):
    (choice,) = llm.chat(QUESTION, params)[0].outputs
    assert choice.finish_reason == "stop", choice
    return choice.text


@pytest.mark.parametrize("seed", range(4))
def test_json_schema(llm, seed):
    check_object(ask(llm, constrained(seed, json=SCHEMA, disable_any_whitespace=True)))


def test_json_with_whitespace(llm):
    check_object(ask(llm, constrained(temperature=0, json=SCHEMA)))


def test_regex(llm):
    for seed in range(4):
        assert re.fullmatch(PHONE, ask(llm, constrained(seed, temperature=1.5, regex=PHONE)))


def test_choice(llm):
    answers = {
        ask(llm, constrained(seed, temperature=2.0, choice=["yes", "no", "maybe é😀"])) for seed in range(8)
    }
    assert answers <= {"yes", "no", "maybe é😀"}
    assert len(answers) > 1


def test_grammar(llm):
    for seed in range(4):
        text = ask(llm, constrained(seed, temperature=1.5, grammar=GRAMMAR))
        assert re.fullmatch(r"(apple|pear|plum[a-z]{0,5})(, (apple|pear|plum[a-z]{0,5}))?\.", text)


def test_nothing_lifts_a_masked_token(llm):
    (unwanted,) = llm.tokenizer.encode("!")
    params = SamplingParams(
        max_tokens=20,
        temperature=1.0,
        logit_bias={unwanted: 100.0},
        repetition_penalty=0.01,
        presence_penalty=-2.0,
        structured_outputs=StructuredOutputs(regex="[a-y]{8}"),
    )
    assert re.fullmatch("[a-y]{8}", ask(llm, params))


def test_choices_of_one_prompt(llm):
    output = llm.chat(QUESTION, constrained(seed=8, n=4, json=SCHEMA, disable_any_whitespace=True))[0]
    texts = [choice.text for choice in output.outputs]
    assert len(set(texts)) > 1
    for text in texts:
        check_object(text)
    assert texts[0] == ask(llm, constrained(seed=8, json=SCHEMA, disable_any_whitespace=True))


def test_constrained_and_free_streams_beside_each_other(llm):
    """Each of eight streams gives the tokens that it gives alone."""
    params = [
        FREE[0],
        constrained(seed=21, json=SCHEMA, disable_any_whitespace=True),
        FREE[1],
        constrained(seed=22, regex=PHONE),
        FREE[2],
        constrained(seed=23, choice=["yes", "no"]),
        FREE[3],
        constrained(seed=24, grammar=GRAMMAR),
    ]
    alone = [llm.chat(QUESTION, one)[0].outputs[0] for one in params]
    together = [output.outputs[0] for output in llm.chat([QUESTION] * len(params), params)]
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs
    assert {choice.finish_reason for choice in together[1::2]} == {"stop"}


def test_a_stop_token_may_be_the_end_token(llm):
    params = SamplingParams(
        max_tokens=50,
        temperature=0,
        ignore_eos=True,
        min_tokens=40,
        structured_outputs=StructuredOutputs(choice=["short"]),
    )
    assert ask(llm, params) == "short"

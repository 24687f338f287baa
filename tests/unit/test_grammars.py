"""Constraints, grammars and masks, without an engine."""

import json
import random
import re
import string

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless import SamplingParams, StructuredOutputs
from gapless.errors import InvalidRequestError
from gapless.structured.compiler import MAX_TEXT_BYTES, GrammarCompiler
from gapless.structured.matcher import GrammarError
from gapless.structured.tokens import allows
from gapless.tokenizer import tokenizer_from_gguf
from helpers_tokenizer import byte_level_metadata

TOKENIZER = tokenizer_from_gguf(byte_level_metadata())
VOCAB_SIZE = 320  # more rows of logits than tokens
COMPILER = GrammarCompiler(TOKENIZER, VOCAB_SIZE)
END = TOKENIZER.eos_token_ids
# Tokens that stand for text: bytes, merged words and `<tool_call>`.
TEXT = {
    token_id: TOKENIZER.token_to_piece(token_id)
    for token_id in range(TOKENIZER.vocab_size)
    if not TOKENIZER.is_control(token_id) and TOKENIZER.vocabulary.pieces[token_id] != "[PAD]"
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def allowed(mask):
    assert mask.dtype == np.uint32
    assert len(mask) == VOCAB_SIZE // 32
    return {token_id for token_id in range(VOCAB_SIZE) if allows(mask, token_id)}


def random_output(constraint, seed, max_tokens=400):
    """What a model without any sense says: random tokens of the masks. None if it finds no end."""
    rng, matcher, output = random.Random(seed), COMPILER.compile(constraint).matcher(), []
    while not matcher.is_finished:
        if len(output) > max_tokens:
            return None
        choices = sorted(allowed(matcher.mask))
        ends = END.intersection(choices)
        token_id = min(ends) if ends and rng.random() < 0.5 else rng.choice(choices)
        matcher.accept(token_id)
        output.append(token_id)
    assert output[-1] in END
    return b"".join(TEXT[token_id] for token_id in output[:-1]).decode()


# --- parameters ---


def test_exactly_one_constraint():
    for wrong in ({}, {"json": {}, "regex": "a"}, {"json_object": False}, {"disable_any_whitespace": True}):
        with pytest.raises(InvalidRequestError, match="exactly one") as caught:
            StructuredOutputs(**wrong)
        assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("json", "{"),
        ("json", "[1]"),
        ("json", "null"),
        ("json", '{"maximum": NaN}'),
        ("json", {"const": {1, 2}}),
        ("json", {"maximum": float("inf")}),
        ("json", "[" * 100_000),
        ("json", 7),
        ("regex", 7),
        ("choice", "abc"),
        ("choice", []),
        ("choice", ["a", 1]),
        ("choice", ["a", ""]),
        ("grammar", b"start: x"),
        ("json_object", "yes"),
    ],
)
def test_wrong_values(name, value):
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputs(**{name: value})
    assert caught.value.param == name


def test_whitespace_has_one_say():
    with pytest.raises(InvalidRequestError):
        StructuredOutputs(json={}, disable_any_whitespace=True, whitespace_pattern=" ")


def test_sampling_parameters_carry_it():
    constraint = StructuredOutputs(json={"b": 1, "a": 2})
    assert SamplingParams(structured_outputs=constraint).structured_outputs is constraint
    assert constraint.json == '{"b": 1, "a": 2}'  # the order of properties is that of the output
    assert SamplingParams(structured_outputs=None).structured_outputs is None
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        SamplingParams(structured_outputs={"json": {}})


# --- masks ---


def check_language(constraint, texts):
    """Along every prefix of `texts`, the masks have exactly the tokens that lead to one of them."""
    encoded = {text.encode() for text in texts}
    grammar = COMPILER.compile(constraint)
    pending, seen = [(b"", grammar.matcher())], {b""}
    while pending:
        prefix, matcher = pending.pop()
        expected = {
            token_id
            for token_id, piece in TEXT.items()
            if any(text.startswith(prefix + piece) for text in encoded)
        }
        assert allowed(matcher.mask) == expected | (END if prefix in encoded else set()), prefix
        for token_id in range(VOCAB_SIZE):
            follower = matcher.copy()
            if token_id in expected:
                follower.accept(token_id)
                if (longer := prefix + TEXT[token_id]) not in seen:
                    seen.add(longer)
                    pending.append((longer, follower))
            elif token_id in END and prefix in encoded:
                follower.accept(token_id)
                assert follower.is_finished
            else:
                with pytest.raises(GrammarError):
                    follower.accept(token_id)


LANGUAGES = [
    (StructuredOutputs(choice=["hello", "hell", "hello world", "é😀", '"a\\b"\n']), None),
    (StructuredOutputs(choice=["a.c", "a&&b", "/x/", "[^a]", "#- -", "$x^", "<tool_call>"]), None),
    (StructuredOutputs(regex="a|ab{1,2}c?"), ["a", "ab", "abb", "abc", "abbc"]),
    (StructuredOutputs(regex="^(?i:x/y)$"), ["x/y", "X/y", "x/Y", "X/Y"]),
    (StructuredOutputs(json={"enum": [1, "hello", None]}), ["1", '"hello"', "null"]),
    (StructuredOutputs(json={"const": {"a": [True]}}, disable_any_whitespace=True), ['{"a":[true]}']),
    (StructuredOutputs(grammar='start: "he" x\nx: "llo" | "y" "!"?'), ["hello", "hey", "hey!"]),
    (
        StructuredOutputs(grammar='root ::= "a" tail\ntail ::= "\\u0041bc" | [\\x62-\\x63]? # end'),
        ["aAbc", "ab", "ac", "a"],
    ),
]


@pytest.mark.parametrize(("constraint", "texts"), LANGUAGES, ids=lambda value: str(value)[:40])
def test_masks_are_exact(constraint, texts):
    check_language(constraint, constraint.choice if texts is None else texts)


@settings(max_examples=25)
@given(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=4, unique=True))
def test_choices_are_literal(texts):
    try:
        [text.encode() for text in texts]
    except UnicodeEncodeError:
        with pytest.raises(InvalidRequestError):
            COMPILER.compile(StructuredOutputs(choice=texts))
        return
    check_language(StructuredOutputs(choice=texts), texts)


def test_random_outputs_satisfy_a_schema():
    outputs = [random_output(StructuredOutputs(json=PERSON), seed) for seed in range(40)]
    found = [json.loads(output) for output in outputs if output is not None]
    assert len(found) > 10
    for person in found:
        assert {"name", "age"} <= person.keys() <= {"name", "age", "tags"}
        assert len(person["name"]) <= 8
        assert type(person["age"]) is int
        assert 0 <= person["age"] <= 150
        assert len(person.get("tags", [])) <= 3
        assert set(person.get("tags", [])) <= {"a", "b", None}


def test_random_outputs_are_json_objects():
    outputs = [random_output(StructuredOutputs(json_object=True), seed) for seed in range(30)]
    found = [json.loads(output) for output in outputs if output is not None]
    assert len(found) > 5
    assert all(isinstance(value, dict) for value in found)


@pytest.mark.parametrize("regex", [r"[A-Z][a-z]{2,9}, [0-9]{4}", r"(a|bb)*c", r"(\d+\.)?x?", "[^a-y]{3}"])
def test_random_outputs_match_a_regex(regex):
    for seed in range(20):
        output = random_output(StructuredOutputs(regex=regex), seed)
        assert output is not None
        assert re.fullmatch(regex, output), output


def test_random_outputs_follow_a_recursive_grammar():
    grammar = 'root ::= sum\nsum ::= term ("+" term)*\nterm ::= [0-9] | "(" sum ")"\n'
    values = [random_output(StructuredOutputs(grammar=grammar), seed) for seed in range(40)]
    found = [value for value in values if value is not None]
    assert len(found) > 10
    for value in found:
        assert set(value) <= set(string.digits + "+()")
        eval(value)


def test_whitespace_options():
    def accepts(constraint, text):
        matcher = COMPILER.compile(constraint).matcher()
        try:
            for byte in text.encode():
                matcher.accept(ID_OF_BYTE[byte])
        except GrammarError:
            return False
        return bool(END & allowed(matcher.mask))

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert accepts(StructuredOutputs(json=schema), '{ "a":\n 1}')
    assert not accepts(StructuredOutputs(json=schema, disable_any_whitespace=True), '{"a": 1}')
    assert accepts(StructuredOutputs(json=schema, disable_any_whitespace=True), '{"a":1}')
    assert accepts(StructuredOutputs(json=schema, whitespace_pattern="[ ]?"), '{"a": 1}')
    assert not accepts(StructuredOutputs(json=schema, whitespace_pattern="[ ]?"), '{"a":\n1}')


def test_no_grammar_allows_control_tokens_and_rows_without_a_token():
    anything = COMPILER.compile(StructuredOutputs(grammar="start: A\nA: ~/a+/"))  # not even valid UTF-8
    # A byte 0xFF is in no text; the grammar engine has its own use for it.
    assert allowed(anything.matcher().mask) == (TEXT.keys() | END) - {ID_OF_BYTE[0xFF]}
    for name in (f"<[{min(END)}]>", "<[255-265]>", "<|im_start|>", "<[300]>"):
        with pytest.raises(InvalidRequestError):
            COMPILER.compile(StructuredOutputs(grammar=f"start: {name}"))


def test_copies_go_their_own_ways():
    grammar = COMPILER.compile(StructuredOutputs(choice=["ab", "cd"]))
    first, second = grammar.matcher(), grammar.matcher()
    first.accept(ID_OF_BYTE[ord("a")])
    second.accept(ID_OF_BYTE[ord("c")])
    assert allowed(first.mask) == {ID_OF_BYTE[ord("b")]}
    assert allowed(second.mask) == {ID_OF_BYTE[ord("d")]}
    assert grammar is COMPILER.compile(StructuredOutputs(choice=("ab", "cd")))  # compiled once


def test_an_error_is_final():
    matcher = COMPILER.compile(StructuredOutputs(choice=["ab"])).matcher()
    with pytest.raises(GrammarError):
        matcher.accept(ID_OF_BYTE[ord("b")])
    with pytest.raises(GrammarError):
        matcher.accept(ID_OF_BYTE[ord("a")])


ID_OF_BYTE = {piece[0]: token_id for token_id, piece in TEXT.items() if len(piece) == 1}


# --- constraints that must be refused, and soon ---


def nested(count):
    return '{"items":' * count + "{}" + "}" * count


def chain(count, wrap=lambda reference: reference):
    links = {f"a{i}": wrap({"$ref": f"#/$defs/a{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{count}": {"type": "integer"}}}


HOSTILE = {
    "a keyword that is not supported": {"json": {"type": "array", "uniqueItems": True}},
    "the same, asked to be ignored": {
        "json": {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    },
    "oneOf that overlaps": {"json": {"oneOf": [{"type": "object"}, {"type": "object", "minProperties": 1}]}},
    "unknown type": {"json": {"type": "strin"}},
    "nothing": {"json": "false"},
    "reference to itself": {"json": {"$ref": "#"}},
    "cycle of references": {
        "json": chain(0) | {"$defs": {"a0": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a0"}}}
    },
    "cycle through allOf": {"json": {"allOf": [{"$ref": "#"}]}},
    "remote reference": {"json": {"$ref": "http://127.0.0.1:1/schema.json"}},
    "file reference": {"json": {"$ref": "file:///etc/passwd"}},
    "dangling reference": {"json": {"$ref": "#/$defs/none"}},
    "maxItems": {"json": {"type": "array", "maxItems": 2**64 - 1}},
    "minItems": {"json": {"properties": {"a": {"anyOf": [{"type": "array", "minItems": 2**64}]}}}},
    "maxLength": {"json": {"type": "string", "maxLength": 2**64 - 1}},
    "negative count": {"json": {"type": "array", "maxItems": -1}},
    "range of huge numbers": {"json": {"type": "integer", "minimum": -(10**300), "maximum": 10**300}},
    "deep schema": {"json": nested(300)},
    "deep properties": {"json": '{"properties":{"a":' * 500 + "{}" + "}}" * 500},
    "long chain of references": {"json": chain(6000)},
    "long chain of objects": {"json": chain(2000, lambda ref: {"properties": {"x": ref}, "required": ["x"]})},
    "ten thousand properties": {"json": {"properties": {f"{i}": {} for i in range(10_000)}}},
    "product of alternatives": {
        "json": {"allOf": [{"anyOf": [{"properties": {f"{c}{i}": {}}} for c in "ab"]} for i in range(20)]}
    },
    "look-ahead in a pattern": {"json": {"type": "string", "pattern": "^(?!x)a"}},
    "large schema": {"json": {"enum": ["x" * MAX_TEXT_BYTES]}},
    "half a surrogate pair in a schema": {"json": {"const": "\ud800"}},
    "unclosed group": {"regex": "("},
    "look-behind": {"regex": "(?<=a)b"},
    "back reference": {"regex": r"(a)\1"},
    "anchor in the middle": {"regex": "a^b"},
    "backslash at the end": {"regex": "a\\"},
    "no character": {"regex": r"a[^\x00-\U0010FFFF]"},
    "many optional parts": {"regex": "(a|b)?" * 20_000},
    "deep expression": {"regex": "(" * 50_000 + "a" + ")" * 50_000},
    "large expression": {"regex": "a" * (MAX_TEXT_BYTES + 1)},
    "half a surrogate pair": {"regex": "\ud800"},
    "half a surrogate pair as a choice": {"choice": ["\ud800"]},
    "large choices": {"choice": [str(10**9 + i) for i in range(MAX_TEXT_BYTES // 10)]},
    "root is root": {"grammar": "root ::= root"},
    "start is start": {"grammar": "start: start"},
    "cycle of rules": {"grammar": "root ::= a\na ::= b\nb ::= a"},
    "missing rule": {"grammar": "root ::= other"},
    "no root": {"grammar": 'other ::= "a"'},
    "no grammar": {"grammar": "Answer in JSON, please."},
    "empty grammar": {"grammar": ""},
    "two languages": {"grammar": 'root ::= "a"\nstart: "a"'},
    "operator in a class": {"grammar": "root ::= [^a&&b]"},
    "no character in GBNF": {"grammar": 'root ::= "\\ud800"'},
    "deep groups": {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
    "deep groups in Lark": {"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000},
    "long chain of rules": {
        "grammar": "start: a0\n" + "\n".join(f'a{i}: "x" a{i + 1}' for i in range(10_000)) + '\na10000: "y"'
    },
    "doubling of terminals": {
        "grammar": "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(60)) + '\nA60: "y"'
    },
    "intersection": {"grammar": "start: A\nA: " + " & ".join(f"/(.*{i}.*)/" for i in range(1000))},
    "many optional rules": {"grammar": "start: " + '"x"? ' * 20_000},
    "file of another grammar": {"grammar": "%import .passwd.X\nstart: X"},
}


@pytest.mark.timeout(100)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints_are_refused(name):
    (param,) = HOSTILE[name]
    with pytest.raises(InvalidRequestError) as caught:
        COMPILER.compile(StructuredOutputs(**HOSTILE[name]))
    assert caught.value.param == param
    assert len(str(caught.value)) < 500


LARGE = {
    "long string": {"json": {"type": "string", "maxLength": 2**31 - 1}},
    "many items": {"json": {"type": "array", "maxItems": 2**31 - 1}},
    "counts that are data": {"json": {"const": {"maxItems": 2**64 - 1}}},
    "a property called maxItems": {"json": {"properties": {"maxItems": {"type": "integer"}}}},
    "thousand properties": {"json": {"properties": {f"{i}": {"type": "string"} for i in range(1000)}}},
    "five thousand values": {"json": {"enum": [f"value {i}" for i in range(5000)]}},
    "recursive schema": {"json": {"properties": {"child": {"$ref": "#"}}}},
    "three hundred references": {"json": chain(300)},
    "ten thousand choices": {"choice": [f"choice {i}" for i in range(10_000)]},
    "nested repetition": {"regex": "(((a{1000}){1000}){1000}){1000}"},
    "empty text": {"regex": ""},
}


@pytest.mark.timeout(100)
@pytest.mark.parametrize("name", LARGE)
def test_large_constraints_are_accepted(name):
    assert allowed(COMPILER.compile(StructuredOutputs(**LARGE[name])).matcher().mask)


def test_a_model_without_end_tokens_cannot_be_constrained():
    from dataclasses import replace

    from gapless.tokenizer import Tokenizer

    settings = replace(TOKENIZER.settings, eos_token_ids=frozenset())
    endless = Tokenizer(TOKENIZER.vocabulary, TOKENIZER._encoder, settings)
    with pytest.raises(InvalidRequestError, match="no end token"):
        GrammarCompiler(endless, VOCAB_SIZE).compile(StructuredOutputs(regex="a"))

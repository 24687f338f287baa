"""What a demanded call is constrained to is what the parser reads."""

import json

import llguidance
import pytest

from gapless.errors import InvalidRequestError
from gapless.server.parsing import tool_choice_schema
from gapless.structured.schema import with_moved_references
from helpers_parsing import call, parsed


def tool(name, **function):
    return {"type": "function", "function": {"name": name, **function}}


TREE = {
    "type": "object",
    "properties": {
        "root": {"$ref": "#/$defs/Node"},
        "old": {"$ref": "#/definitions/Old"},
        "again": {"$ref": "#"},
        "$ref": {"const": {"$ref": "#/untouched"}},
    },
    "additionalProperties": False,
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/Node"}}},
            "required": ["kids"],
            "additionalProperties": False,
        }
    },
    "definitions": {"Old": {"type": "integer"}},
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [tool("get_weather", parameters=CITY), tool("get_time"), tool("grow", parameters=TREE)]
NAMES = ("get_weather", "get_time", "grow")

ROME = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
NOW = '{"name": "get_time", "arguments": {"any": 1}}'
GROW = '{"name": "grow", "arguments": {"root": {"kids": [{"kids": []}]}, "old": 3, "again": {"old": 4}}}'
NAMED = {"type": "function", "function": {"name": "grow"}}


def allows(schema, text):
    """Whether the grammar engine lets a model write this."""
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, f"start: %json {json.dumps(schema)}", log_level=0)
    assert not matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("tool_choice", "parallel", "answer", "allowed"),
    [
        ("required", True, f"[{ROME}]", True),
        ("required", True, f"[{ROME}, {NOW}, {GROW}]", True),
        ("required", True, "[]", False),
        ("required", True, ROME, False),
        ("required", True, f"[{ROME.replace('get_weather', 'get_news')}]", False),
        ("required", True, f"[{ROME.replace('city', 'town')}]", False),
        ("required", False, ROME, True),
        ("required", False, NOW, True),
        ("required", False, GROW, True),
        ("required", False, f"[{ROME}]", False),
        ("required", False, GROW.replace("3", '"3"'), False),
        ("required", False, GROW.replace("4", '"4"'), False),
        ("required", False, GROW.replace("[]", "1"), False),
        ("required", False, '{"name": "get_time"}', False),
        ("required", False, '{"name": "get_time", "arguments": 1}', False),
        (NAMED, True, GROW, True),
        (NAMED, False, GROW, True),
        (NAMED, True, ROME, False),
        (NAMED, True, f"[{GROW}]", False),
    ],
)
def test_the_schema_allows_calls_and_nothing_else(tool_choice, parallel, answer, allowed):
    schema, name = tool_choice_schema(TOOLS, tool_choice, parallel)
    assert allows(schema, answer) is allowed
    if allowed:
        deltas = parsed([answer], tool_format=name, tool_names=NAMES)
        calls = json.loads(answer)
        calls = calls if isinstance(calls, list) else [calls]
        assert deltas == [
            delta
            for i, one in enumerate(calls)
            for delta in call(one["name"], json.dumps(one["arguments"]), i)
        ]


def test_a_named_function_has_its_own_parameters():
    schema, _ = tool_choice_schema(TOOLS, {"type": "function", "function": {"name": "get_weather"}})
    assert schema["properties"] == {"name": {"const": "get_weather"}, "arguments": CITY}


@pytest.mark.parametrize(
    ("tools", "tool_choice", "param"),
    [
        (TOOLS, "auto", "tool_choice"),
        (TOOLS, {"type": "function"}, "tool_choice"),
        (TOOLS, {"type": "function", "function": {"name": "get_news"}}, "tool_choice"),
        ([], "required", "tools"),
        ([{"type": "function"}], "required", "tools[0]"),
        ([tool(None)], "required", "tools[0]"),
        ([tool("a"), tool("b", parameters=[1])], "required", "tools[1].function.parameters"),
        ([tool("a", parameters={"type": "array"})], "required", "tools[0].function.parameters"),
    ],
)
def test_what_is_malformed_is_named(tools, tool_choice, param):
    with pytest.raises(InvalidRequestError) as error:
        tool_choice_schema(tools, tool_choice)
    assert error.value.param == param


def test_a_schema_that_is_nested_too_deeply_is_refused():
    deep = {"type": "object"}
    for _ in range(100_000):
        deep = {"not": deep}
    with pytest.raises(InvalidRequestError, match="too deeply"):
        tool_choice_schema([tool("a", parameters=deep)], "required")


def test_references_move_with_a_schema():
    moved = with_moved_references(TREE, "#/x")
    assert moved["properties"]["root"] == {"$ref": "#/x/$defs/Node"}
    assert moved["properties"]["again"] == {"$ref": "#/x"}
    assert moved["properties"]["$ref"] == {"const": {"$ref": "#/untouched"}}
    elsewhere = {"anyOf": [{"$ref": "https://example.org/a#/b"}, {"$ref": "#anchor"}]}
    assert with_moved_references(elsewhere, "#/x") == elsewhere
    document = {"$id": "https://example.org/a", "$ref": "#/b"}
    assert with_moved_references({"not": document}, "#/x") == {"not": document}

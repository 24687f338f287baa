"""Tool calls are found in what models write, however it is cut."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.errors import InvalidRequestError
from gapless.server.parsing import (
    ContentDelta,
    ToolCallArguments,
    ToolCallStart,
    find_tool_format,
    new_call_id,
    tool_format,
)
from helpers_parsing import TOOLS, call, content, cuts, parsed, parser

ROME = '{"city": "Rome"}'
PARIS = '{"city":"Paris"}'
WEATHER = f'{{"name": "get_weather", "arguments": {ROME}}}'
WEATHER_2 = f'{{"name": "get_weather", "arguments": {PARIS}}}'
IN_ROME = call("get_weather", ROME)
BOTH = IN_ROME + call("get_weather", PARIS, 1)


def tagged(text):
    return f"<tool_call>\n{text}\n</tool_call>"


def text(it):
    return [ContentDelta(it)]


NOTHING_SPECIAL = '{"name": "hello", "arguments": {}}'
SCHEMA = '{"name": "get_weather", "description": "Weather.", "parameters": {"type": "object"}}'
TRICKY = r'{"a": "}{\"]\\", "ключ": [{"b": {}}, "\u00e9\ud83d\ude00😀", "</tool_call>", "```"], "c": -1.5e3}'

HERMES = {
    "one": (tagged(WEATHER), IN_ROME),
    "text before": (f"Let me look.\n\n{tagged(WEATHER)}", text("Let me look.") + IN_ROME),
    "several": (f"{tagged(WEATHER)}\n{tagged(WEATHER_2)}", BOTH),
    "several in one tag": (tagged(f"{WEATHER}\n{WEATHER_2}"), BOTH),
    "a list": (tagged(f"[{WEATHER}, {WEATHER_2}]"), BOTH),
    "text after": (f"{tagged(WEATHER)}\n\nDone.\n", IN_ROME + text("Done.\n")),
    "text between": (f"{tagged(WEATHER)}And {tagged(WEATHER_2)}", [*BOTH[:2], *text("And"), *BOTH[2:]]),
    "spaces left out": (f"<tool_call>{WEATHER}</tool_call>", IN_ROME),
    "a name after its arguments": (tagged(f'{{"arguments": {ROME}, "name": "get_weather"}}'), IN_ROME),
    "tricky arguments": (tagged(f'{{"name":"get_time","arguments":{TRICKY}}}'), call("get_time", TRICKY)),
    "more members": (tagged(f'{{"type": "function", "id": 3, {WEATHER[1:-1]}, "x": [1]}}'), IN_ROME),
    "no arguments": (tagged('{"name": "get_time"}'), call("get_time", "{}")),
    "arguments are null": (tagged('{"name": "get_time", "arguments": null}'), call("get_time", "{}")),
    "arguments in a string": (
        tagged(r'{"name": "get_weather", "arguments": "{\"city\": \"Rome\"}"}'),
        IN_ROME,
    ),
    "escapes in a name": (
        tagged(r'{"name": "get\u005fweather", "arguments": {}}'),
        call("get_weather", "{}"),
    ),
    "opened twice": (f"<tool_call>\n{tagged(WEATHER)}", IN_ROME),
    "a bracket too many": (tagged(WEATHER + "}"), IN_ROME),
    "a bracket too few": (tagged(WEATHER[:-1]), IN_ROME),
    "doubled braces": (tagged(f"{{{WEATHER}}}"), IN_ROME),
    "doubled braces without a tag": (f"{{{WEATHER}}}\n{{{WEATHER_2}}}", BOTH),
    "doubled braces, not closed": (f"{{{WEATHER}\nDone.", IN_ROME + text("Done.")),
    "a template": ("{{ name }}", text("{{ name }}")),
    "never closed": (f"<tool_call>\n{WEATHER}", IN_ROME),
    "never opened": (f"{WEATHER}\n</tool_call>", IN_ROME),
    "bare": (WEATHER, IN_ROME),
    "bare in a fence": (f"```json\n{WEATHER}\n```", IN_ROME),
    "bare and text": (f"{WEATHER}\nThis calls it.", IN_ROME + text("This calls it.")),
    "bare, then tagged": (f"{WEATHER}\n{tagged(WEATHER_2)}", BOTH),
    "bare after text": (f"Here it is:\n{WEATHER}", text(f"Here it is:\n{WEATHER}")),
    "an unknown tool": (tagged(NOTHING_SPECIAL), text(tagged(NOTHING_SPECIAL))),
    "an unknown tool, then a call": (
        f"{tagged(NOTHING_SPECIAL)}\n{tagged(WEATHER)}",
        text(tagged(NOTHING_SPECIAL)) + IN_ROME,
    ),
    "a call, then an unknown tool": (
        f"{tagged(WEATHER)}\n{tagged(NOTHING_SPECIAL)}",
        IN_ROME + text(tagged(NOTHING_SPECIAL)),
    ),
    "only a marker": ("Write <tool_call> first.", text("Write <tool_call> first.")),
    "half a marker": ("a <tool_ca", text("a <tool_ca")),
    "XML": (tagged("<function=get_time>"), text(tagged("<function=get_time>"))),
}

LLAMA = {
    "one": ('{"name": "get_weather", "parameters": {"city": "Rome"}}', IN_ROME),
    "with a tag": (f"<|python_tag|>{WEATHER}", IN_ROME),
    "semicolons": (f"{WEATHER}; {WEATHER_2}", BOTH),
    "lines": (f"{WEATHER}\n{WEATHER_2}\n", BOTH),
    "a tag each": (f"<|python_tag|>{WEATHER}<|python_tag|>{WEATHER_2}", BOTH),
    "with a type": (f'{{"type": "function", {WEATHER[1:]}', IN_ROME),
    "code": ("<|python_tag|>print(3)", text("<|python_tag|>print(3)")),
    "text": ("It is warm.", text("It is warm.")),
}

JSON = {
    "one": (WEATHER, IN_ROME),
    "parameters": (WEATHER.replace("arguments", "parameters"), IN_ROME),
    "a list": (f"[{WEATHER},\n {WEATHER_2}]", BOTH),
    "a fence": (f"```json\n{WEATHER}\n```\n", IN_ROME),
    "a fence without a language": (f"```\n{WEATHER}\n```", IN_ROME),
    "a list in a fence": (f"```json\n[\n{WEATHER},\n{WEATHER_2}\n]\n```", BOTH),
    "two fences": (f"```json\n{WEATHER}\n```\n\n```json\n{WEATHER_2}\n```", BOTH),
    "code after a call": (f"{WEATHER}\n```python\n1\n```", IN_ROME + text("```python\n1\n```")),
    "no tag is known": (tagged(WEATHER), text(tagged(WEATHER))),
    "data": ('{"city": "Rome", "name": "get_time"}', text('{"city": "Rome", "name": "get_time"}')),
    "data in a fence": ('```json\n{"a": 1}\n```', text('```json\n{"a": 1}\n```')),
    "code": ("```python\nprint({})\n```", text("```python\nprint({})\n```")),
    "a tool's own schema": (SCHEMA, text(SCHEMA)),
    "a template": ("{% if x %}", text("{% if x %}")),
    "a footnote": ("[1] See there.", text("[1] See there.")),
    "an unknown tool": (NOTHING_SPECIAL, text(NOTHING_SPECIAL)),
    "an unknown tool in a list": (
        f"[{WEATHER}, {NOTHING_SPECIAL}]",
        IN_ROME + text(f"{NOTHING_SPECIAL}]"),
    ),
    "arguments are no object": (
        '{"name": "get_time", "arguments": [1]}',
        text('{"name": "get_time", "arguments": [1]}'),
    ),
    "half a character in a string": (
        r'{"name": "get_time", "arguments": "{\"a\": \"\ud800\"}"}',
        text(r'{"name": "get_time", "arguments": "{\"a\": \"\ud800\"}"}'),
    ),
    "cut off before the arguments": ('{"name": "get_time", "arg', text('{"name": "get_time", "arg')),
    "cut off in held arguments": ('{"arguments": {"a": [', text('{"arguments": {"a": [')),
    "cut off in the arguments": (WEATHER[:-4], call("get_weather", '{"city": "Rom')),
    "cut off after a backslash": (
        '{"name": "get_time", "arguments": {"a": "\\',
        call("get_time", '{"a": "\\'),
    ),
    "cut off in the next call": (f'{WEATHER}\n{{"name": "get', IN_ROME + text('{"name": "get')),
    "a comment": (
        '{"name": "get_time", "arguments": {"a": 1 // one\n}}',
        call("get_time", '{"a": 1 // one\n}'),
    ),
    "arguments that a fence breaks": (
        '```json\n{"name": "get_time", "arguments": {"a": 1\n```\nDone.',
        [*call("get_time", '{"a": 1\n'), *text("Done.")],
    ),
    "nothing": ("", []),
    "white space": (" \n", text(" \n")),
}

CASES = [
    pytest.param(name, given, expected, id=f"{name}: {case}")
    for name, cases in (("hermes", HERMES), ("llama3_json", LLAMA), ("json", JSON))
    for case, (given, expected) in cases.items()
]


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(("name", "given", "expected"), CASES)
def test_calls_and_content(name, given, expected, step):
    pieces = [given[i : i + step] for i in range(0, len(given), step)]
    assert parsed(pieces, tool_format=name, tool_names=TOOLS) == expected


def test_a_call_is_streamed_as_it_arrives():
    it = parser(tool_format="hermes", tool_names=TOOLS)
    assert it.push("I look. ") == [ContentDelta("I look.")]
    assert it.push("<tool") == []
    assert it.push('_call>\n{"name": "get_wea') == []
    assert it.push('ther", "arguments": ') == []
    assert it.push('{"ci') == [ToolCallStart(0, "c0", "get_weather"), ToolCallArguments(0, '{"ci')]
    assert it.has_tool_calls
    assert it.push('ty": "a}\\') == [ToolCallArguments(0, 'ty": "a}')]
    assert it.push(
        '"',
    ) == [ToolCallArguments(0, '\\"')]
    assert it.push('"}}\n</tool_c') == [ToolCallArguments(0, '"}')]
    assert it.push("all>\n") == []
    assert it.push("Done, ") == [ContentDelta("Done,")]
    assert it.push("all") == [ContentDelta(" all")]
    assert it.finish() == []


def test_what_can_be_no_call_is_not_held_back():
    it = parser(tool_format="json", tool_names=TOOLS)
    assert it.push('{"city"') == []
    assert content(it.push(": 1")) == '{"city": 1'
    assert it.push('{"name": ') == [ContentDelta('{"name": ')]


def test_calls_without_tools_are_content():
    assert parsed([WEATHER], tool_format="json") == text(WEATHER)
    assert parsed([WEATHER], tool_names=TOOLS) == text(WEATHER)


def test_calls_after_the_first_are_left_out_if_one_is_asked_for():
    answer = f"{tagged(WEATHER)}\n{tagged(WEATHER_2)}\nDone."
    deltas = parsed([answer], tool_format="hermes", tool_names=TOOLS, parallel=False)
    assert deltas == IN_ROME + text("Done.")


FORMATS = st.sampled_from(["hermes", "llama3_json", "json"])
FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "```", "```json", "{", "}", "[", "]", '"', "\\"),
        *(
            ":",
            ",",
            ";",
            " ",
            "\n",
            "a",
            "é",
            "😀",
            "<",
            "`",
            "1",
            "null",
            "get_weather",
            "name",
            "arguments",
        ),
        *(
            '{"name": "get_weather", "arguments": ',
            '"name": "get_time"',
            '"arguments": {',
            WEATHER,
            WEATHER_2,
        ),
    ]
)
TEXTS = st.lists(FRAGMENTS, max_size=14).map("".join)


@given(cuts(TEXTS), FORMATS)
def test_how_the_text_is_cut_changes_nothing(pieces, name):
    whole = parsed(["".join(pieces)], tool_format=name, tool_names=TOOLS)
    assert parsed(pieces, tool_format=name, tool_names=TOOLS) == whole


@given(cuts(TEXTS), FORMATS)
def test_what_is_no_call_is_given_as_it_was_written(pieces, name):
    deltas = parsed(pieces, tool_format=name, tool_names=TOOLS)
    if not any(isinstance(delta, ToolCallStart) for delta in deltas):
        assert content(deltas) == "".join(pieces)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def written_calls(draw):
    """Arguments of calls as JSON texts, and an answer that makes these calls in a format."""
    name = draw(FORMATS)
    written = st.builds(
        json.dumps,
        st.dictionaries(st.text(), VALUES, max_size=4),
        ensure_ascii=st.booleans(),
        indent=st.sampled_from([None, 2]),
    )
    arguments = draw(st.lists(written, min_size=1, max_size=3))
    objects = []
    for one in arguments:
        members = [f'"name": "{draw(st.sampled_from(TOOLS))}"', f'"arguments": {one}']
        objects.append("{" + ", ".join(draw(st.permutations(members))) + "}")
    if name == "hermes" and draw(st.booleans()):
        answer = "\n".join(map(tagged, objects))
    elif name == "json":
        answer = f"```json\n[{', '.join(objects)}]\n```"
    else:
        answer = draw(st.sampled_from(["; ", "\n", ""])).join(objects)
    return name, arguments, draw(cuts(st.just(answer)))


@given(written_calls())
def test_arguments_come_exactly_as_they_were_written(case):
    name, arguments, pieces = case
    deltas = parsed(pieces, tool_format=name, tool_names=TOOLS)
    assert [delta.text for delta in deltas if isinstance(delta, ToolCallArguments)] == arguments
    assert content(deltas) == ""


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("... within <tool_call></tool_call> XML tags", "hermes"),
        (
            'Respond in the format {"name": function name, "parameters": dictionary of argument name',
            "llama3_json",
        ),
        ("{{ '<|python_tag|>' + tool_call.name }}", "llama3_json"),
        ("{{ '[TOOL_CALLS] ' + calls }}", "json"),
        ("{{ message.content }}", "json"),
    ],
)
def test_the_template_tells_the_format(template, name):
    assert tool_format(template) == name


def test_an_unknown_format_lists_those_that_are_known():
    assert find_tool_format("hermes").opening == "<tool_call>"
    with pytest.raises(InvalidRequestError, match=r"'pythonic'.*hermes, llama3_json, json") as error:
        find_tool_format("pythonic")
    assert error.value.param == "tool_call_parser"


def test_ids_are_fresh():
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch("call_[0-9a-f]{24}", one) for one in ids)

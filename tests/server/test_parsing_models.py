"""Tool calls as real models write them: kept outputs, and models that run."""

import json
from pathlib import Path

import pytest

from gapless import LLM, SamplingParams, StructuredOutputs
from gapless.server.parsing import ToolCallArguments, ToolCallStart, tool_choice_schema, tool_format
from helpers_parsing import content, parsed

# What Qwen2.5-Coder answered to questions about weather, time and mails, and what is to be found in it.
OUTPUTS = json.loads((Path(__file__).parents[1] / "data" / "tool_calls.json").read_text(encoding="utf-8"))
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "The city, e.g. Paris"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city"],
        },
    },
}
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


def calls(deltas):
    """Names and arguments of calls."""
    names = [delta.name for delta in deltas if isinstance(delta, ToolCallStart)]
    arguments = [delta.text for delta in deltas if isinstance(delta, ToolCallArguments)]
    return [{"name": name, "arguments": text} for name, text in zip(names, arguments, strict=True)]


@pytest.mark.parametrize("step", [1, 4, 10_000])
@pytest.mark.parametrize("output", OUTPUTS)
def test_kept_outputs(output, step):
    text = output["text"]
    pieces = [text[i : i + step] for i in range(0, len(text), step)]
    deltas = parsed(pieces, tool_format="hermes", tool_names=output["tools"])
    assert calls(deltas) == output["calls"]
    assert content(deltas) == (output["content"] or "")


@pytest.fixture(scope="module")
def llm(model_path):
    with LLM(model_path("qwen2.5-coder-0.5b"), max_model_len=1024, max_num_seqs=4) as llm:
        yield llm


def answer(llm, tool_format, **params):
    params = SamplingParams(max_tokens=120, temperature=0, **params)
    (choice,) = llm.chat(QUESTION, params, tools=[WEATHER])[0].outputs
    assert choice.finish_reason == "stop"
    return parsed([choice.text], tool_format=tool_format, tool_names=["get_weather"])


@pytest.mark.models
def test_a_model_calls_the_tool_it_is_given(llm):
    deltas = answer(llm, tool_format(llm.tokenizer.chat_template.source))
    (call,) = calls(deltas)
    assert call["name"] == "get_weather"
    assert json.loads(call["arguments"])["city"] == "Paris"
    assert content(deltas) == ""


@pytest.mark.models
@pytest.mark.parametrize(
    ("tool_choice", "parallel"),
    [
        ("required", True),
        ("required", False),
        ({"type": "function", "function": {"name": "get_weather"}}, True),
    ],
)
def test_a_demanded_call_is_made(llm, tool_choice, parallel):
    schema, name = tool_choice_schema([WEATHER], tool_choice, parallel)
    deltas = answer(llm, name, structured_outputs=StructuredOutputs(json=schema))
    assert {call["name"] for call in calls(deltas)} == {"get_weather"}
    assert all("city" in json.loads(call["arguments"]) for call in calls(deltas))
    assert content(deltas) == ""

"""How a chat's parameters follow from the model's markup, without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gapless.config import EngineConfig
from gapless.errors import InvalidRequestError
from gapless.sampling import SamplingParams, StructuredOutputs
from gapless.server.chat import ChatStyle, ToolUse
from gapless.server.config import ServerConfig
from gapless.server.messages import Chat, Chunk, TokenizerReady
from gapless.server.parsing import ContentDelta, ReasoningDelta
from gapless.server.stream import Generation, Stream


class Service:
    """Notes what is opened."""

    def __init__(self, template: str, control_tokens: list[str], tail: str = "") -> None:
        self.config = ServerConfig(engine=EngineConfig(model="any"))
        self.model_name = "any"
        self.tokenizer_facts = TokenizerReady(True, template, False, control_tokens)
        self._tail = tail

    def open(self, prompts: Any, params: SamplingParams, **_: Any) -> Stream:
        stream = Stream("id", params, 0, lambda generation: None)
        stream.add(Generation(1, stream, 0, prompts[0], params, tail=self._tail))
        return stream


def opened(service: Any, tools: ToolUse | None = None) -> Any:
    style = ChatStyle(service)
    stream, choices = style.open(Chat([]), SamplingParams(), tools or ToolUse(), request_id="id")
    return SimpleNamespace(params=stream.params, choices=choices)


@pytest.mark.parametrize(
    ("template", "control_tokens", "skips"),
    [
        ("…[THINK]…", ["[THINK]", "[/THINK]"], False),
        ("…<think>…", ["<|im_end|>"], True),
        ("no thoughts", ["[THINK]"], True),
    ],
)
def test_markup_that_is_control_tokens_reaches_the_parsers(
    template: str, control_tokens: list[str], skips: bool
) -> None:
    assert opened(Service(template, control_tokens)).params.skip_special_tokens is skips


def test_so_do_the_markers_of_tool_calls() -> None:
    tools = ToolUse([], "hermes", ("f",))
    assert not opened(Service("<tool_call>", ["<tool_call>"]), tools).params.skip_special_tokens
    assert opened(Service("<tool_call>", ["<tool_call>"])).params.skip_special_tokens


def test_a_prompt_that_ends_with_an_open_thought_begins_inside() -> None:
    for tail, first in (("<|im_start|>assistant\n<think>\n", ReasoningDelta), ("assistant\n", ContentDelta)):
        choices = opened(Service("…<think>…", [], tail)).choices
        deltas = [*choices[0].take(Chunk(1, 0, "I wonder.", 3)), *choices[0].take(Chunk(1, 0, "", 0, "stop"))]
        assert {type(delta) for delta in deltas} == {first}


def test_tools_are_refused_where_the_template_does_not_show_them() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    hidden: Any = Service("{{ messages }}", [])
    with pytest.raises(InvalidRequestError, match="does not support tools"):
        ChatStyle(hidden).tool_use(tools)
    assert ChatStyle(hidden).tool_use(tools, "none") == ToolUse()
    assert ChatStyle(hidden).tool_use(tools, "required").constraint is not None
    shown: Any = Service("{{ tools }}", [])
    assert ChatStyle(shown).tool_use(tools).names == ("f",)


def test_what_a_constraint_shapes_has_no_thoughts() -> None:
    service: Any = Service("…<think>…", [], "<think>\n")
    style = ChatStyle(service)
    params = SamplingParams(structured_outputs=StructuredOutputs(json_object=True))
    _, choices = style.open(Chat([]), params, ToolUse(), request_id="id")
    assert choices[0].take(Chunk(1, 0, "{}", 1, "stop")) == [ContentDelta("{}")]

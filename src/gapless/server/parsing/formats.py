"""The ways in which models write tool calls."""

from __future__ import annotations

from dataclasses import dataclass

from gapless.errors import InvalidRequestError


@dataclass(frozen=True)
class ToolFormat:
    """What stands around the JSON objects of tool calls.

    `opening` begins calls anywhere in an answer, `closing` ends them; without an opening, calls stand at the
    beginning of the answer. `template_signs`: texts by which a chat template shows that it asks for this.
    """

    name: str
    opening: str | None = None
    closing: str | None = None
    template_signs: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(marker for marker in (self.opening, self.closing) if marker)


TOOL_FORMATS = (
    ToolFormat("hermes", "<tool_call>", "</tool_call>", ("<tool_call>",)),
    ToolFormat(
        "llama3_json",
        "<|python_tag|>",
        template_signs=("<|python_tag|>", '"parameters": dictionary of argument name'),
    ),
    ToolFormat("json"),
)


def find_tool_format(name: str) -> ToolFormat:
    """The format of that name. InvalidRequestError, with the known names, if there is none."""
    for tool_format in TOOL_FORMATS:
        if tool_format.name == name:
            return tool_format
    known = ", ".join(tool_format.name for tool_format in TOOL_FORMATS)
    raise InvalidRequestError(
        f"There is no tool call parser {name!r:.100}. Known: {known}.", param="tool_call_parser"
    )


def tool_format(template_source: str) -> str:
    """Name of the format that a chat template asks its model for; "json" if it says nothing of tools."""
    for known in TOOL_FORMATS:
        if any(sign in template_source for sign in known.template_signs):
            return known.name
    return "json"

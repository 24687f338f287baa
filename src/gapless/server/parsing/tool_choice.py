"""Tool calls that a request demands: the schema by which the output is constrained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gapless.errors import InvalidRequestError
from gapless.structured.schema import with_moved_references

_FORMAT = "json"


def tool_choice_schema(
    tools: Sequence[Mapping[str, Any]], tool_choice: str | Mapping[str, Any], parallel: bool = True
) -> tuple[dict[str, Any], str]:
    """A JSON schema for the whole answer, and the name of the tool format that reads what satisfies it.

    `tools` and `tool_choice` are those of a chat request; `tool_choice` is "required", or names a function.
    The answer is a list of calls if any may be called and `parallel`, else one call. InvalidRequestError for
    a malformed tool, a choice that demands nothing, and a function that is not among the tools.
    """
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    if not functions:
        raise InvalidRequestError("'tool_choice' asks for a tool, but 'tools' is empty.", param="tools")
    if tool_choice == "required":
        if parallel:
            calls = _any_call(functions, "#/items")
            return {"type": "array", "items": calls, "minItems": 1}, _FORMAT
        return _any_call(functions, "#"), _FORMAT
    return _call(_chosen(functions, tool_choice), "#"), _FORMAT


def _function(tool: Any, where: str) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where} must have a function with a name.", param=where)
    parameters = function.get("parameters")
    where = f"{where}.function.parameters"
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidRequestError(f"{where} must be a JSON schema, an object.", param=where)
    if parameters is not None and parameters.get("type", "object") != "object":
        raise InvalidRequestError(
            f"{where}.type is {parameters['type']!r:.100}; the arguments of a call are an object.",
            param=where,
        )
    return function


def _chosen(functions: Sequence[Mapping[str, Any]], tool_choice: Any) -> Mapping[str, Any]:
    choice = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = choice.get("name") if isinstance(choice, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequestError(
            f"'tool_choice' is {tool_choice!r:.100}; to demand a call it must be 'required' or "
            '{"type": "function", "function": {"name": ...}}.',
            param="tool_choice",
        )
    for function in functions:
        if function["name"] == name:
            return function
    known = ", ".join(function["name"] for function in functions)
    raise InvalidRequestError(
        f"'tool_choice' names {name!r:.100}, which is not among the tools: {known}.", param="tool_choice"
    )


def _any_call(functions: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    return {"anyOf": [_call(function, f"{where}/anyOf/{i}") for i, function in enumerate(functions)]}


def _call(function: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The schema of a call that will stand at `where`."""
    parameters = {"type": "object", **(function.get("parameters") or {})}
    try:
        arguments = with_moved_references(parameters, f"{where}/properties/arguments")
    except ValueError as error:
        raise InvalidRequestError(
            f"Parameters of {function['name']!r:.100}: {error}", param="tools"
        ) from None
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }

"""Brings chat messages into the one form that chat templates are written for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gapless.errors import InvalidRequestError

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def normalized_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with text contents and parsed tool arguments.

    `content` given as a list of text parts is joined by newlines; `null` (beside tool calls) becomes "".
    `arguments` given as a JSON string become the object; a string that is not JSON stays, since a model may
    have written it. InvalidRequestError names what is malformed.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            f"'messages' must be a list of messages, not {type(messages).__name__}.", param="messages"
        )
    if not messages:
        raise InvalidRequestError("'messages' is empty; at least one message is needed.", param="messages")
    return [_normalized(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _normalized(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} must be an object, not {type(message).__name__}.", param=where)
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidRequestError(
            f"{where}.role is {role!r}; known roles are {', '.join(_ROLES)}.", param=f"{where}.role"
        )
    normalized = {key: value for key, value in message.items() if value is not None}
    if tool_calls := message.get("tool_calls"):
        normalized["tool_calls"] = _tool_calls(tool_calls, f"{where}.tool_calls")
    normalized["content"] = _text_content(message, where)
    return normalized


def _text_content(message: Mapping[str, Any], where: str) -> str:
    content = message.get("content")
    where = f"{where}.content"
    if isinstance(content, str):
        return content
    if content is None:
        if message["role"] == "assistant" and ("content" in message or message.get("tool_calls")):
            return ""
        raise InvalidRequestError(f"{where} is missing.", param=where)
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        return "\n".join(_text_part(part, f"{where}[{i}]") for i, part in enumerate(content))
    raise InvalidRequestError(
        f"{where} must be a string or a list of text parts, not {type(content).__name__}.", param=where
    )


def _text_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text":
        if isinstance(text := part.get("text"), str):
            return text
        raise InvalidRequestError(f"{where}.text must be a string.", param=f"{where}.text")
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequestError(f"{where} is of type {kind!r}; only text parts are supported.", param=where)


def _tool_calls(tool_calls: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(tool_calls, str | Mapping) or not isinstance(tool_calls, Sequence):
        raise InvalidRequestError(f"{where} must be a list.", param=where)
    normalized = []
    for i, call in enumerate(tool_calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(
                f"{where}[{i}] must have a function with a name.", param=f"{where}[{i}]"
            )
        arguments = _parsed(function.get("arguments", {}))
        normalized.append({**call, "function": {**function, "arguments": arguments}})
    return normalized


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return arguments


def with_serialized_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with tool arguments as JSON strings, for the templates that paste them into text."""
    result = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            message = {**message, "tool_calls": [_serialized(call) for call in calls]}
        result.append(dict(message))
    return result


def _serialized(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}

"""Items of the Responses API as messages for the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gapless.errors import InvalidRequestError

# Where parts of these types have their text.
_TEXT_PARTS = {
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
    "summary_text": "text",
    "text": "text",
}

Message = dict[str, Any]


def messages_of(items: str | Sequence[Mapping[str, Any]], instructions: str | None = None) -> list[Message]:
    """The conversation. InvalidRequestError for an item that is malformed, or not text."""
    conversation = _Conversation()
    if instructions:
        conversation.messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        conversation.messages.append({"role": "user", "content": items})
        return conversation.messages
    for index, item in enumerate(items):
        conversation.add(item, f"input[{index}]")
    return conversation.messages


class _Conversation:
    """Thoughts, text and calls that follow each other are one message of the assistant."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._functions: dict[str, str] = {}  # by the id of the call

    def add(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self._add_message(item, where)
        elif kind == "reasoning":
            # Thoughts without content were hidden from the client, and are lost.
            if text := _text(item.get("content") or item.get("summary") or "", f"{where}.content"):
                self._answer("reasoning_content", "tool_calls", "content")["reasoning_content"] = text
        elif kind == "function_call":
            self._add_call(item, where)
        elif kind == "function_call_output":
            self._add_output(item, where)
        else:
            remedy = " Nothing is stored here: send the item itself." if kind == "item_reference" else ""
            raise InvalidRequestError(
                f"{where} is of type {kind!r:.100}; known are message, reasoning, function_call and "
                f"function_call_output.{remedy}",
                param=f"{where}.type",
            )

    def _answer(self, *taken: str) -> Message:
        """The assistant's message at the end, or a new one if that has one of these fields."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(last.get(name) for name in taken):
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        return last

    def _add_message(self, item: Mapping[str, Any], where: str) -> None:
        content = _text(item.get("content"), f"{where}.content")
        if item.get("role") == "assistant":
            self._answer("content", "tool_calls")["content"] = content
        else:
            self.messages.append({"role": item.get("role"), "content": content})

    def _add_call(self, item: Mapping[str, Any], where: str) -> None:
        call_id, name = _string(item, "call_id", where), _string(item, "name", where)
        self._functions[call_id] = name
        function = {"name": name, "arguments": item.get("arguments")}
        call = {"id": call_id, "type": "function", "function": function}
        self._answer().setdefault("tool_calls", []).append(call)

    def _add_output(self, item: Mapping[str, Any], where: str) -> None:
        call_id = _string(item, "call_id", where)
        message = {"role": "tool", "tool_call_id": call_id}
        message["content"] = _text(item.get("output"), f"{where}.output")
        if call_id in self._functions:
            message["name"] = self._functions[call_id]
        self.messages.append(message)


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(
            f"{where}.{name} is {value!r:.100}; it must be a string.", param=f"{where}.{name}"
        )
    return value


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be a string or a list of text parts.", param=where)
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get(_TEXT_PARTS[kind]) if isinstance(kind, str) and kind in _TEXT_PARTS else None
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where} is of type {kind!r:.100}; only text is taken.", param=where)
    return text

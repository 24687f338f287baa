"""The items of a response while they are being written, and the events that tell of it."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from typing import Any

Event = dict[str, Any]
Logprobs = list[dict[str, Any]]


class OutputItem(ABC):
    """One item. It is opened, grows, and is closed."""

    def __init__(self, prefix: str, output_index: int) -> None:
        self.id = f"{prefix}_{uuid.uuid4().hex}"
        self._output_index = output_index
        self._status = "in_progress"
        self._texts: list[str] = []

    def open(self) -> list[Event]:
        """The events by which it begins."""
        return [self._item_event("added"), *self._opening()]

    @abstractmethod
    def grow(self, text: str, logprobs: Logprobs) -> Event:
        """Adds text."""

    def close(self, status: str) -> list[Event]:
        """The events by which it ends, `completed` or `incomplete`."""
        closing = self._closing()
        self._status = status
        return [*closing, self._item_event("done")]

    def shown(self) -> dict[str, Any]:
        """The item as it is now."""
        return {"id": self.id, "status": self._status, **self._fields()}

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    @abstractmethod
    def _fields(self) -> dict[str, Any]: ...

    @abstractmethod
    def _opening(self) -> list[Event]: ...

    @abstractmethod
    def _closing(self) -> list[Event]: ...

    def _item_event(self, kind: str) -> Event:
        name = f"response.output_item.{kind}"
        return {"type": name, "output_index": self._output_index, "item": self.shown()}

    def _event(self, name: str, /, **fields: Any) -> Event:
        place = {"item_id": self.id, "output_index": self._output_index}
        return {"type": f"response.{name}", **place, **fields}


class _TextItem(OutputItem):
    """An item whose content is one part with text."""

    part_type: str

    def grow(self, text: str, logprobs: Logprobs) -> Event:
        self._texts.append(text)
        return self._part_event(f"{self.part_type}.delta", delta=text)

    def _part(self) -> dict[str, Any]:
        return {"type": self.part_type, "text": self._text}

    def _content(self) -> list[dict[str, Any]]:
        """Without the part until there is text: it has an event of its own."""
        return [self._part()] if self._texts or self._status != "in_progress" else []

    def _opening(self) -> list[Event]:
        return [self._part_event("content_part.added", part=self._part())]

    def _closing(self) -> list[Event]:
        done = self._part_event(f"{self.part_type}.done", text=self._text)
        return [done, self._part_event("content_part.done", part=self._part())]

    def _part_event(self, name: str, **fields: Any) -> Event:
        return self._event(name, content_index=0, **fields)


class ReasoningItem(_TextItem):
    """What the model thinks."""

    part_type = "reasoning_text"

    def __init__(self, output_index: int) -> None:
        super().__init__("rs", output_index)

    def _fields(self) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": self._content(), "encrypted_content": None}


class MessageItem(_TextItem):
    """What the model answers."""

    part_type = "output_text"

    def __init__(self, output_index: int) -> None:
        super().__init__("msg", output_index)
        self._logprobs: Logprobs = []

    def grow(self, text: str, logprobs: Logprobs) -> Event:
        self._logprobs += logprobs
        return {**super().grow(text, logprobs), "logprobs": logprobs}

    def _part(self) -> dict[str, Any]:
        return {**super()._part(), "annotations": [], "logprobs": list(self._logprobs)}

    def _closing(self) -> list[Event]:
        done, *others = super()._closing()
        return [{**done, "logprobs": list(self._logprobs)}, *others]

    def _fields(self) -> dict[str, Any]:
        return {"type": "message", "role": "assistant", "content": self._content()}


class CallItem(OutputItem):
    """A call of a function."""

    def __init__(self, output_index: int, call_id: str, name: str) -> None:
        super().__init__("fc", output_index)
        self._call_id = call_id
        self._name = name

    def grow(self, text: str, logprobs: Logprobs) -> Event:
        self._texts.append(text)
        return self._event("function_call_arguments.delta", delta=text)

    def _fields(self) -> dict[str, Any]:
        call = {"call_id": self._call_id, "name": self._name, "arguments": self._text}
        return {"type": "function_call", **call}

    def _opening(self) -> list[Event]:
        return []

    def _closing(self) -> list[Event]:
        return [self._event("function_call_arguments.done", name=self._name, arguments=self._text)]

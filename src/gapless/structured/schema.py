"""What a JSON schema may ask for, before the grammar engine sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MAX_COUNT = 2**31 - 1  # what generators of schemas write for "any number"

_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_DATA = frozenset({"const", "enum", "default", "examples"})  # hold values, not schemas
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})  # hold schemas by name


def check_counts(schema: Any) -> None:
    """ValueError for a count that no output could reach."""
    for part in _subschemas(schema):
        for name in _COUNTS:
            count = part.get(name)
            if isinstance(count, (int, float)) and count > MAX_COUNT:
                raise ValueError(f"{name} is {count}, but at most {MAX_COUNT} is accepted: leave it out")


def _subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Every mapping of a schema that may be a schema, itself first."""
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            yield value
            for key, item in value.items():
                if key in _BY_NAME and isinstance(item, dict):
                    pending += item.values()
                elif key not in _DATA:
                    pending.append(item)


def with_moved_references(schema: Any, where: str) -> Any:
    """A schema whose references within itself still lead there when it stands at `where` in another.

    `where` is a JSON pointer such as `#/properties/x`. A part that has an `$id` is a document of its own, and
    stays. ValueError if the schema is nested too deeply.
    """
    try:
        return _moved(schema, where)
    except RecursionError:
        raise ValueError("The JSON schema is nested too deeply.") from None


def _moved(schema: Any, where: str) -> Any:
    if isinstance(schema, list):
        return [_moved(item, where) for item in schema]
    if not isinstance(schema, Mapping) or "$id" in schema:
        return schema
    moved: dict[str, Any] = {}
    for key, item in schema.items():
        if key == "$ref" and isinstance(item, str) and (item == "#" or item.startswith("#/")):
            moved[key] = where + item[1:]
        elif key in _BY_NAME and isinstance(item, Mapping):
            moved[key] = {name: _moved(part, where) for name, part in item.items()}
        else:
            moved[key] = item if key in _DATA else _moved(item, where)
    return moved

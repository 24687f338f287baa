"""What a JSON schema may ask for, before the grammar engine sees it."""

from __future__ import annotations

from collections.abc import Iterator
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

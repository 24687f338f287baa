"""What the output must look like: a JSON schema, a regular expression, a list of texts or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gapless.errors import InvalidRequestError
from gapless.sampling import check

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """A constraint that every output satisfies if it ends by itself, with vLLM's names.

    Exactly one of `json`, `regex`, `choice`, `grammar` and `json_object` is given.

    Raises InvalidRequestError (with `param`) for a value of the wrong type. Whether the grammar engine can
    express the constraint is found out when a request is submitted.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or as a mapping; kept as text."""
    regex: str | None = None
    """A regular expression that the whole text matches; no look-around, no back references."""
    choice: Sequence[str] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """A grammar in GBNF (`root ::= ...`) or in llguidance's dialect of Lark (`start: ...`)."""
    json_object: bool | None = None
    """Any JSON object."""
    disable_any_whitespace: bool = False
    """JSON without whitespace between its parts."""
    whitespace_pattern: str | None = None
    """Regular expression of the whitespace between the parts of JSON; None: a line break and an indentation,
    or spaces."""

    def __post_init__(self) -> None:
        if self.json_object is not None:
            check.boolean("json_object", self.json_object)
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs needs exactly one of {', '.join(CONSTRAINTS)}, but it has "
                f"{' and '.join(given) or 'none'}.",
                param="structured_outputs",
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        for name in ("regex", "grammar", "whitespace_pattern"):
            if (value := getattr(self, name)) is not None and not isinstance(value, str):
                check.refuse(name, value, "a string")
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        check.boolean("disable_any_whitespace", self.disable_any_whitespace)
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise InvalidRequestError(
                "disable_any_whitespace and whitespace_pattern exclude each other.",
                param="whitespace_pattern",
            )

    @property
    def constraint(self) -> str:
        """The name of the one constraint that is given."""
        return next(name for name in CONSTRAINTS if getattr(self, name) not in (None, False))


def _schema_text(schema: object) -> str:
    """The schema as JSON text, written anew: nothing but JSON is left, and spellings do not differ."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(value, (Mapping, bool)):
            check.refuse("json", schema, "a JSON schema: an object, or its text")
        return json.dumps(value if isinstance(value, bool) else dict(value), allow_nan=False)
    except InvalidRequestError:
        raise
    except RecursionError:
        raise InvalidRequestError("The JSON schema is nested too deeply.", param="json") from None
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"The JSON schema is not JSON: {error}", param="json") from None


def _choices(value: object) -> tuple[str, ...]:
    choices = check.strings("choice", value)
    if not choices or isinstance(value, str):
        check.refuse("choice", value, "a list of at least one string")
    return choices

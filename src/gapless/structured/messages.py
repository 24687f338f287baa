"""What the grammar engine's messages say, without its grammar and its state."""

from __future__ import annotations

import re

_MAX_CHARACTERS = 300
_PLACE = re.compile(r"^at \d+\(\d+\): ")  # in a grammar that the user has not seen
_REGEX_ERROR = re.compile(r"^\s*error: (.+)$", re.MULTILINE)


def reason_of(message: str) -> str:
    """The reason in one short line, without a full stop."""
    message = message.strip()
    if message.startswith("NoExtension"):
        return "nothing can follow"
    if "oneOf constraints are not supported" in message:
        return "oneOf is supported only where its alternatives exclude each other: use anyOf"
    line = _PLACE.sub("", message.partition("\n")[0].strip()).removeprefix("failed to compile JSON schema: ")
    if "regex parse error" in line and (found := _REGEX_ERROR.search(message)) is not None:
        line = f"in a regular expression, {found[1].strip()}"
    line = line.rstrip(".:")
    return line if len(line) <= _MAX_CHARACTERS else line[:_MAX_CHARACTERS] + " ..."

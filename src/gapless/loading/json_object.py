"""Parses JSON that is not trusted."""

from __future__ import annotations

import json
from typing import Any

from gapless.errors import FormatError

# The limit of the safetensors format for its header; configs are far smaller.
MAX_JSON_BYTES = 100_000_000
# Python values are larger than their text. These limits (a header of 200k tensors is within both) keep a text
# of nothing but brackets or commas from costing more than about 250 MB.
_MAX_BRACKETS = 1 << 20
_MAX_COMMAS = 1 << 20
_MAX_DIGITS = 30


def parse_json_object(text: bytes, name: str) -> dict[str, Any]:
    """The JSON object that `text` holds; `name` is what errors call it.

    FormatError if it is not UTF-8, not JSON, not an object, names a key twice, or is too large or deep.
    """
    if len(text) > MAX_JSON_BYTES:
        raise FormatError(f"{name} has {len(text)} bytes, at most {MAX_JSON_BYTES} are accepted")
    if text.count(b"[") + text.count(b"{") > _MAX_BRACKETS or text.count(b",") > _MAX_COMMAS:
        raise FormatError(f"{name} has too many entries to be genuine")
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_int=_integer)
        if b"\\u" in text:
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")  # refuses halves of surrogate pairs
    except UnicodeDecodeError as error:
        raise FormatError(f"{name} is not UTF-8: {error}") from None
    except RecursionError:
        raise FormatError(f"{name} is nested too deeply") from None
    except ValueError as error:
        raise FormatError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise FormatError(f"{name} must be a JSON object, it is a {type(parsed).__name__}")
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r} appears twice")
            seen.add(key)
    return found


def _integer(digits: str) -> int:
    # Python needs quadratic time for long numbers, and its own limit depends on its version.
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)

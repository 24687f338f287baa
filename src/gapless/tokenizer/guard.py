"""Keeps the text of messages from being read as control tokens.

A chat template mixes its own markup with what users write, and the result is one string in which
`<|im_end|>` must count where the template wrote it and must not where a user did. So before rendering, every
control token that occurs in a message is broken up by a guard character: one that occurs nowhere in the
request. The rendered text is then searched for control tokens, which finds only the template's, and the guard
characters are taken out of the plain text between them. Apart from those places the text is what it would be
without the guard, so templates that trim, split or search their messages work, and a conversation without
control tokens in it is encoded as any other text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from string import ascii_lowercase, ascii_uppercase
from typing import Any

from gapless.tokenizer.splitter import SpecialTokenSplitter

_PRIVATE_CHARACTERS = range(0xF0000, 0x10FFFE)  # planes 15 and 16, assigned to nothing
_LOWER = str.maketrans(ascii_uppercase, ascii_lowercase)  # unlike str.lower, it never changes the length


@dataclass(frozen=True)
class Guarded:
    """A request whose strings contain no control token; `character` is empty if none did before."""

    value: Any
    character: str


class ControlTextGuard:
    """Breaks up control tokens in the strings of a request.

    Covered are also control tokens in other case (a template may fold it), and a part of one at the end of a
    string (the template may write the rest, or another message may begin with it). Not covered are tokens of
    a single character, which cannot be broken up, and parts of tokens that begin with a letter, since every
    role name would look like one.
    """

    def __init__(self, control_tokens: Collection[str]) -> None:
        tokens = {token.translate(_LOWER) for token in control_tokens if len(token) > 1}
        self._finder = SpecialTokenSplitter(dict.fromkeys(tokens, 0))
        self._beginnings = {
            token[:length] for token in tokens if not token[0].isalnum() for length in range(1, len(token))
        }
        self._longest_beginning = max(map(len, self._beginnings), default=0)

    def protect(self, request: Any) -> Guarded:
        """A copy of `request`, made of JSON's types, with guards in its strings (keys too)."""
        if not any(self._weak_points(text) for text in _strings(request)):
            return Guarded(request, "")
        used = set().union(*_strings(request))
        character = next(chr(code) for code in _PRIVATE_CHARACTERS if chr(code) not in used)
        return Guarded(self._protected(request, character), character)

    def _protected(self, value: Any, character: str) -> Any:
        if isinstance(value, str):
            return self._with_guards(value, character)
        if isinstance(value, Mapping):
            return {
                self._protected(key, character): self._protected(item, character)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._protected(item, character) for item in value]
        return value

    def _with_guards(self, text: str, character: str) -> str:
        points = sorted(self._weak_points(text))
        return character.join(
            text[start:end] for start, end in zip([0, *points], [*points, None], strict=True)
        )

    def _weak_points(self, text: str) -> set[int]:
        """Where guards belong: behind the first character of each control token or beginning of one."""
        lowered = text.translate(_LOWER)
        points: set[int] = set()
        for token in self._finder.present_in(lowered):
            place = lowered.find(token)
            while place >= 0:
                points.add(place + 1)
                place = lowered.find(token, place + 1)  # overlapping ones too
        end = len(lowered.rstrip())
        for length in range(1, min(self._longest_beginning, end) + 1):
            if lowered[end - length : end] in self._beginnings:
                points.add(end - length + 1)
        return points


def _strings(value: Any) -> Iterator[str]:
    """All strings in a value made of JSON's types."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)

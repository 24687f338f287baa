"""Finds special tokens in a text, before the rest of it is encoded."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from functools import lru_cache

Fragment = str | int
"""A stretch of plain text, or the id of a special token."""

_PREFIX_LENGTH = 3  # long enough to tell `<un` (thousands of `<unused…>`) from `<|i`, short for a quick scan


class SpecialTokenSplitter:
    """Splits a text at special tokens; the leftmost match wins, and among those the longest.

    Vocabularies have thousands of special tokens, but a text contains few of them. Those that occur at all
    are found by substring search over groups with a common beginning; only they enter the regular expression.
    """

    def __init__(self, ids: dict[str, int], eats_whitespace: Collection[str] = ()) -> None:
        """`eats_whitespace`: the tokens after which white space is dropped (Phi-3)."""
        self._ids = ids
        self._eats_whitespace = frozenset(eats_whitespace)
        groups: defaultdict[str, list[str]] = defaultdict(list)
        for token in filter(None, ids):
            groups[token[:_PREFIX_LENGTH]].append(token)
        self._groups = dict(groups)
        self._pattern = lru_cache(maxsize=64)(_any_of)

    def split(self, text: str) -> list[Fragment]:
        """Fragments of `text` in order, without empty ones."""
        present = self.present_in(text)
        if not present:
            return [text] if text else []
        fragments: list[Fragment] = []
        start = 0
        for match in self._pattern(tuple(present)).finditer(text):
            if match.start() < start:  # inside white space that the last token has eaten
                continue
            if match.start() > start:
                fragments.append(text[start : match.start()])
            fragments.append(self._ids[match[0]])
            start = match.end()
            if match[0] in self._eats_whitespace:
                start += len(text) - start - len(text[start:].lstrip())
        if start < len(text):
            fragments.append(text[start:])
        return fragments

    def present_in(self, text: str) -> list[str]:
        """The special tokens that occur in `text`."""
        return [
            token
            for prefix, tokens in self._groups.items()
            if prefix in text
            for token in tokens
            if token in text
        ]


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches the longest of `tokens` at a place."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))

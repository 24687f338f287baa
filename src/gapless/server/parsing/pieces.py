"""The base of parsers whose text arrives in pieces."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

from gapless.server.parsing.deltas import ContentDelta, Delta

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""Yields when it needs more text, and returns T."""

_SPACE = re.compile(r"\s*")


class PieceParser(ABC):
    """Turns a text into deltas. How the text is cut into pieces changes nothing but where deltas are cut.

    A subclass reads the text in `_read` as if all of it were there, and yields where it is not. `_text` is
    what has not been given out; what is before `_at` has been read, but may still turn out to be anything.
    Nothing is decided that text to come could change.
    """

    def __init__(self) -> None:
        self.passes = False
        """Whether all that follows is content."""
        self._text = ""
        self._at = 0
        self._ended = False
        self._deltas: list[Delta] = []
        self._steps = self._read()

    def push(self, text: str) -> list[Delta]:
        """What is certain with this piece."""
        self._text += text
        return self._advance()

    def finish(self) -> list[Delta]:
        """What was held back, now that nothing follows."""
        self._ended = True
        return self._advance()

    def _advance(self) -> list[Delta]:
        next(self._steps, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    @abstractmethod
    def _read(self) -> Steps[None]:
        """Reads all the text."""

    def _next_is(self, char: str) -> bool:
        return self._text.startswith(char, self._at)

    def _give(self, delta: Callable[[str], Delta], size: int) -> None:
        """Gives out the first `size` characters."""
        if size:
            self._deltas.append(delta(self._text[:size]))
            self._text = self._text[size:]
            self._at = max(0, self._at - size)

    def _drop(self) -> None:
        """Forgets what has been read."""
        self._text = self._text[self._at :]
        self._at = 0

    def _space(self) -> Steps[None]:
        yield from self._matching(_SPACE)

    def _matching(self, pattern: re.Pattern[str], words: Sequence[str] = ()) -> Steps[None]:
        """Reads what matches; `words` are what the pattern has that is longer than a character.

        Afterwards there is a next character, if the text has not ended.
        """
        while True:
            found = pattern.match(self._text, self._at)
            end = found.end() if found else self._at
            rest = self._text[end:]
            if self._ended or (rest and not any(word.startswith(rest) for word in words)):
                self._at = end
                return
            if self._text[end - 1 : end].isspace():
                self._at = end  # whatever follows, this stays read: a long run is not read again and again
            yield

    def _take(self, word: str) -> Steps[bool]:
        """Reads `word` if it is next."""
        while not self._ended and word.startswith(self._text[self._at :]) and not self._next_is(word):
            yield
        if not self._next_is(word):
            return False
        self._at += len(word)
        return True

    def _give_until(self, marker: str, delta: Callable[[str], Delta]) -> Steps[bool]:
        """Gives out what is before `marker`, and reads it together with the white space before it.

        False if the text ends without it, and all has been given out.
        """
        while (place := self._text.find(marker)) < 0:
            if self._ended:
                self._give(delta, len(self._text))
                return False
            shown = len(self._text) - partial_length(self._text, (marker,))
            self._give(delta, len(self._text[:shown].rstrip()))
            yield
        self._give(delta, len(self._text[:place].rstrip()))
        self._at = self._text.index(marker) + len(marker)
        return True

    def _give_rest(self) -> Steps[None]:
        """Gives out all that follows as content."""
        self.passes = True
        while True:
            self._give(ContentDelta, len(self._text))
            if self._ended:
                return
            yield


def partial_length(text: str, words: Sequence[str], start: int = 0) -> int:
    """Length of the longest suffix of `text[start:]` that is a proper prefix of one of the words."""
    return max((_partial_length(text, word, start) for word in words), default=0)


def _partial_length(text: str, word: str, start: int) -> int:
    place = text.find(word[0], max(start, len(text) - len(word) + 1))
    while place >= 0:
        if word.startswith(text[place:]):
            return len(text) - place
        place = text.find(word[0], place + 1)
    return 0

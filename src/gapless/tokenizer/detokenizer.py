"""Text while it is being generated: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from gapless.errors import InvalidRequestError
from gapless.tokenizer.tokenizer import Tokenizer


class Detokenizer:
    """Turns the ids of one sequence into text, one at a time.

    All that `push` and `finish` return, joined, is `tokenizer.decode` of all ids. With `prompt_ids` it is
    what the ids add to the decoded prompt: the space at the start of the first word is kept.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Iterable[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._pieces = tokenizer.pieces(skip_special_tokens)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips_space = tokenizer.settings.strips_leading_space and not any(
            self._pieces[token_id] for token_id in prompt_ids
        )
        # Whether a token's text is simply what comes next: no character is incomplete, no space to be taken.
        self._is_plain = not self._strips_space

    def push(self, token_id: int) -> str:
        """Text that is complete with this token; a character that is not yet complete waits."""
        piece = self._pieces[token_id]
        if self._is_plain and isinstance(piece, str):
            return piece
        if isinstance(piece, str):
            piece = piece.encode()
        if self._strips_space and piece:
            self._strips_space = False
            piece = piece.removeprefix(b" ")
        text = self._decoder.decode(piece)
        self._is_plain = not self._strips_space and not self._decoder.getstate()[0]
        return text

    def finish(self) -> str:
        """The incomplete character at the end, as U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)


class StopStringMatcher:
    """Finds the first stop string in text that arrives in pieces.

    Only a suffix that could still become a stop string is held back. The match that is complete first wins,
    and of two that end at the same place, the longer: the result does not depend on how the text is cut.
    """

    def __init__(self, stop: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        """InvalidRequestError if a stop string is empty or not a string."""
        if isinstance(stop, str):
            stop = [stop]
        for text in stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(
                    f"A stop string must be a non-empty string, not {text!r}.", param="stop"
                )
        self._stop = tuple(dict.fromkeys(stop))
        self._include = include_stop_str_in_output
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that can be shown now, and the stop string if one is complete.

        After a match nothing more is shown.
        """
        if self.matched is not None:
            return "", self.matched
        text = self._held + text
        self._held = ""
        matches = [(place + len(stop), place, stop) for stop in self._stop if (place := text.find(stop)) >= 0]
        if matches:
            end, place, self.matched = min(matches)
            return text[: end if self._include else place], self.matched
        pending = len(text) - self._length_to_hold(text)
        self._held = text[pending:]
        return text[:pending], None

    def finish(self) -> str:
        """What is held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _length_to_hold(self, text: str) -> int:
        """Length of the longest suffix that is a proper prefix of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            suffix = text[-length:]
            if any(len(stop) > length and stop.startswith(suffix) for stop in self._stop):
                return length
        return 0

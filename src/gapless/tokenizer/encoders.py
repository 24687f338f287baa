"""Encoding of text with special tokens in it: split first, then encode what lies between."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from gapless.tokenizer.splitter import Fragment, SpecialTokenSplitter
from gapless.tokenizer.vocabulary import MARKUP, TokenKind, Vocabulary


class TextEncoder(Protocol):
    """Encodes text that has no special tokens."""

    def encode(self, text: str, at_start: bool) -> list[int]:
        """Ids of `text`; `at_start`: nothing, or a special token, stands before it."""
        ...


class SplittingEncoder:
    """An `Encoder` made of a splitter and a `TextEncoder`.

    As in llama.cpp and `tokenizers`, user-defined tokens (runs of spaces, `<tool_call>`) are always
    recognised, control tokens only when asked for.
    """

    def __init__(
        self, vocabulary: Vocabulary, text_encoder: TextEncoder, eats_whitespace: Collection[str] = ()
    ) -> None:
        pieces = vocabulary.pieces
        markup = {pieces[i]: i for i in vocabulary.ids_of_kind(*MARKUP)}
        user_defined = {pieces[i]: i for i in vocabulary.ids_of_kind(TokenKind.USER_DEFINED)}
        self._markup = SpecialTokenSplitter(markup, eats_whitespace)
        self._user_defined = SpecialTokenSplitter(user_defined)
        self._all = SpecialTokenSplitter({**user_defined, **markup}, eats_whitespace)
        self._text_encoder = text_encoder

    def encode(self, text: str, parse_special: bool, guard: str = "") -> list[int]:
        """See `Encoder.encode`."""
        ids: list[int] = []
        at_start = True
        for fragment in self._fragments(text, parse_special, guard):
            if isinstance(fragment, int):
                ids.append(fragment)
            else:
                ids += self._text_encoder.encode(fragment, at_start)
            at_start = isinstance(fragment, int)
        return ids

    def _fragments(self, text: str, parse_special: bool, guard: str) -> list[Fragment]:
        if not parse_special:
            return self._user_defined.split(text.replace(guard, "") if guard else text)
        if not guard:
            return self._all.split(text)
        fragments: list[Fragment] = []
        for fragment in self._markup.split(text):
            if isinstance(fragment, int):
                fragments.append(fragment)
            else:
                fragments += self._user_defined.split(fragment.replace(guard, ""))
        return fragments

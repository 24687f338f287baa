"""SentencePiece BPE encoding, driven by the scores of the pieces (Llama 1-2, Mistral, Gemma, Phi-3).

Merge lists for these vocabularies do not exist in GGUF files, and building them costs seconds and hundreds
of megabytes for Gemma's 262 thousand pieces; scores need nothing but one look-up table.

Source of the algorithm: Kudo and Richardson, "SentencePiece", 2018 (the pair with the best score first,
the leftmost among equals).
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from gapless.tokenizer.vocabulary import WORD_MARK, TokenKind, Vocabulary

_CACHE_WORDS = 16384  # covers nearly all words of a long document; about 3 MB
_CACHED_WORD_LENGTH = 32
_BEFORE_MARK = re.compile(f"[^{WORD_MARK}\0](?={WORD_MARK})")


class SentencePieceEncoder:
    """Encodes plain text; implements `TextEncoder`.

    Text between two spaces is encoded by itself and remembered: hardly any piece reaches across a space
    (Gemma has one, `> </`). Where one could, the text is not cut.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        ids: dict[str, int],
        scores: Sequence[float],
        *,
        unknown_id: int | None,
        add_space_prefix: bool,
        remove_extra_whitespaces: bool = False,
    ) -> None:
        """`ids` of the pieces that text may become, without markup; it is kept. `scores` by token id."""
        self._ids = ids
        self._byte_ids: list[int | None] = [unknown_id] * 256
        for token_id in vocabulary.ids_of_kind(TokenKind.BYTE):
            self._byte_ids[vocabulary.piece_bytes(token_id)[0]] = token_id
        self._scores = array("f", scores)
        self._add_space_prefix = add_space_prefix
        self._remove_extra_whitespaces = remove_extra_whitespaces
        self._word = _word_pattern(self._ids)
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str, at_start: bool) -> list[int]:
        """Ids of `text`; `at_start`: nothing, or a special token, stands before it."""
        if self._remove_extra_whitespaces:
            text = re.sub(" +", " ", text.strip(" "))
        if self._add_space_prefix and at_start:
            text = " " + text
        ids: list[int] = []
        cache = self._cache
        for word in self._word.findall(text.replace(" ", WORD_MARK)):
            known = cache.get(word)
            if known is None:
                known = self._merge(word)
                if len(word) <= _CACHED_WORD_LENGTH:
                    if len(cache) >= _CACHE_WORDS:
                        cache.clear()
                    cache[word] = known
            ids += known
        return ids

    def _merge(self, text: str) -> list[int]:
        """Merge neighbours until no pair is a piece: O(n log n) in the number of characters.

        A symbol is the run of `length[i]` characters from i; absorbed symbols have length 0.
        """
        get, scores = self._ids.get, self._scores
        size = len(text)
        length = [1] * size
        before = list(range(-1, size - 1))
        queue: list[tuple[float, int, int]] = []  # (-score, start, length of the merged piece)
        for i in range(size - 1):
            token_id = get(text[i : i + 2])
            if token_id is not None:
                queue.append((-scores[token_id], i, 2))
        heapify(queue)
        while queue:
            _, left, merged = heappop(queue)
            right = left + length[left]
            if not length[left] or right >= size or length[left] + length[right] != merged:
                continue  # one of the two has changed since
            length[left], length[right] = merged, 0
            after = left + merged
            if after < size:
                before[after] = left
                token_id = get(text[left : after + length[after]])
                if token_id is not None:
                    heappush(queue, (-scores[token_id], left, merged + length[after]))
            start = before[left]
            if start >= 0:
                token_id = get(text[start:after])
                if token_id is not None:
                    heappush(queue, (-scores[token_id], start, after - start))
        return self._ids_of_symbols(text, length)

    def _ids_of_symbols(self, text: str, length: list[int]) -> list[int]:
        ids: list[int] = []
        start = 0
        while start < len(text):
            end = start + length[start]
            token_id = self._ids.get(text[start:end])
            if token_id is not None:
                ids.append(token_id)
            else:
                fallback = (self._byte_ids[byte] for byte in text[start:end].encode())
                ids += [byte_id for byte_id in fallback if byte_id is not None]
            start = end
        return ids


def _word_pattern(pieces: Iterable[str]) -> re.Pattern[str]:
    """Matches a stretch of text that no piece reaches across: marks, then anything up to the next mark."""
    # Characters after which a mark may be inside a piece, and so must not begin a word.
    bridges = set(_BEFORE_MARK.findall("\0".join(pieces)))
    inner = f"[^{WORD_MARK}]+"
    if bridges:
        inner += f"|(?<=[{re.escape(''.join(sorted(bridges)))}]){WORD_MARK}+"
    return re.compile(f"{WORD_MARK}+(?:{inner})*|(?:{inner})+")

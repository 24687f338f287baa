"""Byte-level BPE encoding (GPT-2 and what came after it), by the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gapless.tokenizer.pretokenizers import PreTokenizer

if TYPE_CHECKING:
    import tokenizers


class ByteLevelEncoder:
    """Encodes plain text; implements `TextEncoder`."""

    def __init__(self, ids: dict[str, int], merges: Sequence[str], pre_tokenizer: PreTokenizer) -> None:
        """`ids` of the pieces that text may become. UnicodeError if a piece is not UTF-8."""
        self._tokenizer = _build(ids, merges, pre_tokenizer)

    def encode(self, text: str, at_start: bool) -> list[int]:
        """Ids of `text`. The place of the text makes no difference to byte-level BPE."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _build(ids: dict[str, int], merges: Sequence[str], pre_tokenizer: PreTokenizer) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    model = models.BPE(ids, _Pairs(merges, ids), ignore_merges=pre_tokenizer.ignore_merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre_tokenizer.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


class _Pairs(Sequence[tuple[str, str]]):
    """Merges as pairs, made while the library reads them: a list of them would take 30 MB for a moment."""

    def __init__(self, merges: Sequence[str], ids: dict[str, int]) -> None:
        self._merges = merges
        self._ids = ids

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Leaves out merges whose result is no piece, or is markup."""
        ids = self._ids
        for merge in self._merges:
            left, _, right = merge.partition(" ")
            if left + right in ids and left in ids and right in ids:
                yield left, right

    def __len__(self) -> int:
        return len(self._merges)

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError("merges are read in order, once")

"""Byte-level BPE encoding (GPT-2 and what came after it), by the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gapless.errors import FormatError
from gapless.tokenizer.pretokenizers import PreTokenizer

if TYPE_CHECKING:
    import tokenizers


class ByteLevelEncoder:
    """Encodes plain text; implements `TextEncoder`."""

    def __init__(
        self,
        ids: dict[str, int],
        merges: Sequence[str],
        pre_tokenizer: PreTokenizer,
        markup: Collection[str] = (),
    ) -> None:
        """`ids` of the pieces that text may become; `markup`: pieces that no merge may lead to.

        FormatError if the library cannot use them.
        """
        self._tokenizer = _build(ids, merges, pre_tokenizer, frozenset(markup))

    def encode(self, text: str, at_start: bool) -> list[int]:
        """Ids of `text`. The place of the text makes no difference to byte-level BPE."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _build(
    ids: dict[str, int], merges: Sequence[str], pre_tokenizer: PreTokenizer, markup: frozenset[str]
) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    try:
        model = models.BPE(ids, _Pairs(merges, markup), ignore_merges=pre_tokenizer.ignore_merges)
    except Exception as error:  # the library raises plain Exception, TypeError where text is not Unicode
        raise FormatError(f"The vocabulary and the merges do not fit together: {error}") from error
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

    def __init__(self, merges: Sequence[str], markup: frozenset[str]) -> None:
        self._merges = merges
        self._markup = markup

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Leaves out the merges that make, or use, markup."""
        markup = self._markup
        for merge in self._merges:
            left, _, right = merge.partition(" ")
            if left + right not in markup and left not in markup and right not in markup:
                yield left, right

    def __len__(self) -> int:
        return len(self._merges)

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError("merges are read in order, once")

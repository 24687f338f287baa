"""The tokens of a model as the grammar engine sees them: bytes, and sets of tokens as bit masks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import llguidance
import numpy as np
import numpy.typing as npt

from gapless.errors import InvalidRequestError
from gapless.tokenizer.vocabulary import TokenKind

if TYPE_CHECKING:
    from gapless.tokenizer import Tokenizer

# A bit for each token of the model: bit t % 32 of word t // 32.
Mask: TypeAlias = "npt.NDArray[np.uint32]"

_NEVER_TEXT = (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.UNUSED)


class TokenTable:
    """Tokens that may stand for text under a grammar, and tokens that end it.

    Control tokens, unused ones and rows of the embeddings without a token are neither: no grammar allows
    them.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: tokens that the model gives logits for. InvalidRequestError if none of them ends a
        text.
        """
        vocabulary = tokenizer.vocabulary
        num_tokens = min(len(vocabulary), vocab_size)
        end_ids = sorted(token_id for token_id in tokenizer.eos_token_ids if token_id < vocab_size)
        if not end_ids:
            raise InvalidRequestError(
                "This model has no end token, so it could not end a structured output: leave "
                "structured_outputs out.",
                param="structured_outputs",
            )
        control = set(vocabulary.ids_of_kind(*_NEVER_TEXT)) | set(end_ids)
        self.vocab_size = vocab_size
        self.text = mask_of((i for i in range(num_tokens) if i not in control), vocab_size)
        self.end = mask_of(end_ids, vocab_size)
        pieces = [vocabulary.piece_bytes(token_id) for token_id in range(num_tokens)]
        pieces += [b""] * (vocab_size - num_tokens)  # a token without bytes is in no text
        special_ids = [token_id for token_id in control if token_id < vocab_size]
        self.engine = llguidance.LLTokenizer(
            _EngineVocabulary(pieces, special_ids, end_ids[0], tokenizer.bos_token_id),  # type: ignore[arg-type]
            eos_token=end_ids,
        )


def mask_of(token_ids: Iterable[int], vocab_size: int) -> Mask:
    """The mask of a set of tokens."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def allows(mask: Mask, token_id: int) -> bool:
    """Whether the token is in the set."""
    return bool(int(mask[token_id // 32]) >> (token_id % 32) & 1)


class _EngineVocabulary:
    """What the grammar engine reads a vocabulary from."""

    is_tokenizer_wrapper = True

    def __init__(
        self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int, bos_token_id: int | None
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id
        self.bos_token_id = bos_token_id

    def __call__(self, text: Any) -> list[int]:
        """Asked for how the model would write a text that a grammar forces. It never is: see `NO_FORCING`."""
        raise NotImplementedError("grammars are compiled so that no text is forced")

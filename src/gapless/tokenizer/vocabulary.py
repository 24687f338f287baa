"""What the ids of a vocabulary stand for: pieces of text, single bytes, or control tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum, IntEnum, auto
from functools import cached_property

WORD_MARK = "▁"  # U+2581, how SentencePiece writes a space


class TokenKind(IntEnum):
    """Kinds of token, numbered as `tokenizer.ggml.token_type` numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class PieceStyle(Enum):
    """How the pieces of normal tokens are written in the vocabulary."""

    BYTE_LEVEL = auto()  # GPT-2: each character of a piece stands for one byte
    SENTENCEPIECE = auto()  # plain text with `▁` for a space, and `<0x41>` for single bytes


MARKUP = (TokenKind.CONTROL, TokenKind.UNKNOWN)
# Written out verbatim: their text is no encoding of anything else.
_LITERAL_KINDS = frozenset({TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN})


def byte_level_alphabet() -> dict[int, str]:
    """GPT-2's map from a byte to the printable character that stands for it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(0x100) if byte not in alphabet)
    alphabet.update({byte: chr(0x100 + rank) for rank, byte in enumerate(others)})
    return alphabet


class Vocabulary:
    """Pieces and kinds by token id.

    `pieces` is kept, not copied: a vocabulary of 262 thousand pieces is 16 MB. `kinds` has one byte
    (a `TokenKind`) per token.
    """

    def __init__(self, pieces: Sequence[str], kinds: bytearray, style: PieceStyle) -> None:
        assert len(pieces) == len(kinds), "one kind per piece"
        self.pieces = pieces
        self.kinds = kinds
        self.style = style

    def __len__(self) -> int:
        return len(self.pieces)

    def ids_of_kind(self, *kinds: TokenKind) -> Iterator[int]:
        """Ids of all tokens of these kinds, in ascending order for each kind."""
        for kind in kinds:
            token_id = self.kinds.find(kind)
            while token_id >= 0:
                yield token_id
                token_id = self.kinds.find(kind, token_id + 1)

    def is_control(self, token_id: int) -> bool:
        """Whether the token is markup: recognised in text only on request, and not shown to users."""
        return self.kinds[token_id] in MARKUP

    def piece_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes that the token stands for; possibly only a part of a character."""
        piece = self.pieces[token_id]
        kind = self.kinds[token_id]
        if kind == TokenKind.BYTE:
            return bytes([int(piece[3:-1], 16)])
        if self.style is PieceStyle.SENTENCEPIECE and kind not in MARKUP:
            return _utf8(piece.replace(WORD_MARK, " "))
        if kind in _LITERAL_KINDS:
            return _utf8(piece)
        return self._bytes_of_byte_level_piece(piece)

    @cached_property
    def _byte_of_character(self) -> dict[str, int]:
        return {character: byte for byte, character in byte_level_alphabet().items()}

    def _bytes_of_byte_level_piece(self, piece: str) -> bytes:
        try:
            return bytes([self._byte_of_character[character] for character in piece])
        except KeyError:  # a piece that was added as plain text, outside the alphabet
            return _utf8(piece)


def _utf8(piece: str) -> bytes:
    return piece.encode("utf-8", "surrogateescape")  # how the reader of GGUF files keeps stray bytes

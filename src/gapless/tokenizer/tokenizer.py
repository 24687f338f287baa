"""The tokenizer of a model: text to ids and back, and what its special tokens mean."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any, Protocol

from gapless.errors import InvalidRequestError, TemplateError
from gapless.tokenizer.chat_template import ChatTemplate
from gapless.tokenizer.guard import ControlTextGuard
from gapless.tokenizer.vocabulary import MARKUP, Vocabulary


class Encoder(Protocol):
    """Turns text into ids; adds nothing."""

    def encode(self, text: str, parse_special: bool, guard: str = "") -> list[int]:
        """Ids of `text`.

        `parse_special`: control tokens in the text become their ids, else they are text. `guard`: a character
        that keeps control tokens from being recognised where it stands inside them, and is itself left out.
        """
        ...


@dataclass(frozen=True)
class FimTokens:
    """Tokens around the parts of a fill-in-the-middle prompt."""

    prefix_id: int
    suffix_id: int
    middle_id: int


@dataclass(frozen=True)
class TokenizerSettings:
    """What a model's files say about its tokens, apart from the vocabulary.

    `eos_token_ids` are all that end a generation. `strips_leading_space`: decoding drops the space that
    SentencePiece puts in front of a text. `closing_token_id` goes after a text that is whole: models for
    embeddings take its state.
    """

    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    add_bos_token: bool = False
    fim_tokens: FimTokens | None = None
    strips_leading_space: bool = False
    closing_token_id: int | None = None


_MAX_KEPT_PIECES = 1 << 15  # 3 MB


class Pieces(dict[int, "str | bytes"]):
    """What `find` gives for tokens, kept: what texts are made of comes again and again."""

    def __init__(self, find: Callable[[int], str | bytes]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, token_id: int) -> str | bytes:
        piece = self._find(token_id)
        if isinstance(piece, bytes):
            with contextlib.suppress(UnicodeDecodeError):
                piece = piece.decode()
        if len(self) >= _MAX_KEPT_PIECES:
            self.clear()
        self[token_id] = piece
        return piece


class Tokenizer:
    """Text to token ids and back.

    Control tokens written in a text are plain text unless `parse_special` is set: text from a user must never
    become markup.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        encoder: Encoder,
        settings: TokenizerSettings,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self.vocabulary = vocabulary
        self.settings = settings
        self.chat_template = chat_template
        self._encoder = encoder

    def __repr__(self) -> str:
        return f"<Tokenizer of {self.vocab_size} tokens, EOS {sorted(self.eos_token_ids)}>"

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    @property
    def bos_token_id(self) -> int | None:
        return self.settings.bos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """All ids that end a generation: the tokenizer's, the configuration's, and end-of-turn tokens."""
        return self.settings.eos_token_ids

    @property
    def add_bos_token(self) -> bool:
        """Whether the model wants BOS at the start of a prompt."""
        return self.settings.add_bos_token

    @property
    def fim_tokens(self) -> FimTokens | None:
        """Tokens for fill-in-the-middle, if the model has them."""
        return self.settings.fim_tokens

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Text and id of every control token."""
        pieces = self.vocabulary.pieces
        return {pieces[token_id]: token_id for token_id in self.vocabulary.ids_of_kind(*MARKUP)}

    def encode(self, text: str, add_special_tokens: bool = False, parse_special: bool = False) -> list[int]:
        """Ids of `text`.

        `add_special_tokens` puts BOS first if the model wants it and it is not there already.
        `parse_special`: control tokens in `text` become their ids; only for text that no user wrote.
        InvalidRequestError if `text` is not a string or not valid Unicode.
        """
        return self._with_bos(self._encoder.encode(_checked_text(text), parse_special), add_special_tokens)

    def encode_whole(self, text: str) -> list[int]:
        """Ids of a text that nothing follows, such as one to embed, between the tokens that the model wants
        at its two ends. Control tokens in it are text. InvalidRequestError as `encode`."""
        ids = self.encode(text, add_special_tokens=True)
        closing = self.settings.closing_token_id
        return ids if closing is None else [*ids, closing]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD.

        `skip_special_tokens` leaves control tokens out. InvalidRequestError if an id is not in the
        vocabulary.
        """
        checked = [self._checked_id(token_id) for token_id in ids]
        pieces = self.pieces(skip_special_tokens)
        text = b"".join(_bytes_of(pieces[token_id]) for token_id in checked)
        if self.settings.strips_leading_space and text.startswith(b" "):
            text = text[1:]
        return text.decode("utf-8", "replace")

    def is_control(self, token_id: int) -> bool:
        """Whether the token is markup, left out of text for users. InvalidRequestError as `decode`."""
        return self.vocabulary.is_control(self._checked_id(token_id))

    def token_to_piece(self, token_id: int) -> bytes:
        """Bytes that a token stands for, maybe a part of a character. InvalidRequestError as `decode`."""
        return _bytes_of(self.pieces()[self._checked_id(token_id)])

    def pieces(self, skip_special_tokens: bool = False) -> Mapping[int, str | bytes]:
        """What tokens stand for, by id: text, or bytes that are only a part of a character.

        `skip_special_tokens`: control tokens stand for nothing. InvalidRequestError as `decode`.
        """
        return self._visible_pieces if skip_special_tokens else self._all_pieces

    def encode_chat(
        self,
        /,  # a variable may have any name, this one too
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Ids of a conversation, as the model's chat template writes it.

        Control tokens come from the template alone; see `ControlTextGuard` for how. TemplateError if there is
        no template or it refuses the messages, InvalidRequestError if a message is malformed.
        """
        if self.chat_template is None:
            raise TemplateError(
                "This model has no chat template, so it cannot chat. Raw completion of a text prompt still "
                "works."
            )
        try:
            guarded = self._guard.protect(
                self.chat_template.prepare(messages, tools, add_generation_prompt, **variables)
            )
        except RecursionError:
            raise InvalidRequestError("The request is nested too deeply.", param="messages") from None
        text = _checked_text(self.chat_template.render_prepared(guarded.value))
        ids = self._encoder.encode(text, parse_special=True, guard=guarded.character)
        return self._with_bos(ids, add_special_tokens=True)

    @cached_property
    def _all_pieces(self) -> Pieces:
        return Pieces(lambda token_id: self.vocabulary.piece_bytes(self._checked_id(token_id)))

    @cached_property
    def _visible_pieces(self) -> Pieces:
        return Pieces(lambda token_id: b"" if self.is_control(token_id) else self._all_pieces[token_id])

    @cached_property
    def _guard(self) -> ControlTextGuard:
        return ControlTextGuard(self.special_tokens)

    def _with_bos(self, ids: list[int], add_special_tokens: bool) -> list[int]:
        bos = self.settings.bos_token_id
        if add_special_tokens and self.settings.add_bos_token and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids

    def _checked_id(self, token_id: int) -> int:
        try:
            checked = index(token_id)
        except TypeError:
            raise InvalidRequestError(
                f"Token id {token_id!r} is not an integer.", param="token_ids"
            ) from None
        if not 0 <= checked < self.vocab_size:
            raise InvalidRequestError(
                f"Token id {checked} is outside the vocabulary of {self.vocab_size} tokens (0 to "
                f"{self.vocab_size - 1}).",
                param="token_ids",
            )
        return checked


def _bytes_of(piece: str | bytes) -> bytes:
    return piece if isinstance(piece, bytes) else piece.encode()


def _checked_text(text: str) -> str:
    if not isinstance(text, str):
        raise InvalidRequestError(f"Text to encode must be str, not {type(text).__name__}.", param="prompt")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"Text to encode has half of a surrogate pair, {text[error.start]!r}, at position {error.start}.",
            param="prompt",
        ) from None
    return text

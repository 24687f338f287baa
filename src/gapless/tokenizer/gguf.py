"""Builds the tokenizer of a GGUF file from its metadata."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gapless.errors import FormatError, UnsupportedModelError
from gapless.tokenizer import well_known
from gapless.tokenizer.byte_level import ByteLevelEncoder
from gapless.tokenizer.chat_template import ChatTemplate
from gapless.tokenizer.encoders import SplittingEncoder, TextEncoder
from gapless.tokenizer.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from gapless.tokenizer.sentencepiece import SentencePieceEncoder
from gapless.tokenizer.tokenizer import FimTokens, Tokenizer, TokenizerSettings
from gapless.tokenizer.vocabulary import MARKUP, PieceStyle, TokenKind, Vocabulary

logger = logging.getLogger(__name__)

_PREFIX = "tokenizer.ggml."
_BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Tokenizer that a GGUF file's key-values describe.

    UnsupportedModelError for a kind of tokenizer that Gapless does not have, FormatError for metadata that
    contradict themselves.
    """
    kind = metadata.get(_PREFIX + "model")
    if kind == "gpt2":
        return _Builder(metadata, PieceStyle.BYTE_LEVEL).byte_level()
    if kind == "llama":
        return _Builder(metadata, PieceStyle.SENTENCEPIECE).sentencepiece()
    if kind is None:
        raise FormatError("The GGUF file has no tokenizer: the key 'tokenizer.ggml.model' is missing.")
    raise UnsupportedModelError(
        f"Tokenizers of kind {kind!r} are not supported; known are 'gpt2' (byte-level BPE) and 'llama' "
        "(SentencePiece)."
    )


class _Builder:
    """Reads the metadata step by step; used once."""

    def __init__(self, metadata: Mapping[str, Any], style: PieceStyle) -> None:
        self.metadata = metadata
        pieces: Sequence[str] = self.required("tokens")
        if not len(pieces):
            raise FormatError(f"The GGUF file's tokenizer has no tokens: '{_PREFIX}tokens' is empty.")
        self.ids = dict(zip(pieces, range(len(pieces)), strict=True))
        self.vocabulary = Vocabulary(pieces, self._kinds(pieces), style)

    def byte_level(self) -> Tokenizer:
        pre_tokenizer = self._pre_tokenizer()
        settings = self._settings(add_bos_token=pre_tokenizer.adds_bos)
        merges: Sequence[str] = self.required("merges")
        markup = [self.vocabulary.pieces[i] for i in self.vocabulary.ids_of_kind(*MARKUP)]
        encoder = ByteLevelEncoder(self._text_ids(), merges, pre_tokenizer, markup)
        return self._tokenizer(encoder, settings)

    def sentencepiece(self) -> Tokenizer:
        add_space_prefix = bool(self.get("add_space_prefix", True))
        settings = self._settings(
            add_bos_token=True, default_bos=1, default_eos=2, strips_leading_space=add_space_prefix
        )
        scores: Sequence[float] = self.required("scores")
        if len(scores) != len(self.vocabulary):
            raise FormatError(
                f"'{_PREFIX}scores' has {len(scores)} values for {len(self.vocabulary)} tokens."
            )
        encoder = SentencePieceEncoder(
            self.vocabulary,
            self._text_ids(),
            scores,
            unknown_id=self._token_id("unknown_token_id", 0),
            add_space_prefix=add_space_prefix,
            remove_extra_whitespaces=bool(self.get("remove_extra_whitespaces", False)),
        )
        return self._tokenizer(encoder, settings, self._tokens_that_eat_whitespace())

    def get(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(_PREFIX + name, default)

    def required(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise FormatError(f"The GGUF file's tokenizer is incomplete: '{_PREFIX}{name}' is missing.")
        return value

    def _tokenizer(
        self, encoder: TextEncoder, settings: TokenizerSettings, eats_whitespace: Collection[str] = ()
    ) -> Tokenizer:
        return Tokenizer(
            self.vocabulary,
            SplittingEncoder(self.vocabulary, encoder, eats_whitespace),
            settings,
            self._chat_template(settings),
        )

    def _kinds(self, pieces: Sequence[str]) -> bytearray:
        stored = self.get("token_type")
        kinds = bytearray([TokenKind.NORMAL]) * len(pieces) if stored is None else _as_bytes(stored)
        if len(kinds) != len(pieces):
            raise FormatError(f"'{_PREFIX}token_type' has {len(kinds)} values for {len(pieces)} tokens.")
        for text in well_known.ALWAYS_CONTROL & self.ids.keys():
            kinds[self.ids[text]] = TokenKind.CONTROL
        token_id = kinds.find(TokenKind.BYTE)
        while token_id >= 0:
            if not _BYTE_PIECE.fullmatch(pieces[token_id]):
                raise FormatError(
                    f"Token {token_id} is of type byte, but is {pieces[token_id]!r}, not '<0x…>'."
                )
            token_id = kinds.find(TokenKind.BYTE, token_id + 1)
        return kinds

    def _text_ids(self) -> dict[str, int]:
        """Ids of the pieces that text may become, without markup. The builder's own table is given away."""
        ids, self.ids = self.ids, {}
        for token_id in self.vocabulary.ids_of_kind(*MARKUP, TokenKind.BYTE):
            ids.pop(self.vocabulary.pieces[token_id], None)
        return ids

    def _pre_tokenizer(self) -> PreTokenizer:
        name = self.get("pre")
        if name in (None, "", "default"):
            logger.warning(
                "The GGUF file does not say how its tokenizer splits text into words; using the common "
                "default. Token ids may differ from the original model's; a newer conversion would fix that."
            )
            name = "default"
        if name not in PRE_TOKENIZERS:
            raise UnsupportedModelError(
                f"Pre-tokenizer {name!r} is not known. Known are: {', '.join(sorted(PRE_TOKENIZERS))}."
            )
        return PRE_TOKENIZERS[name]

    def _settings(
        self,
        *,
        add_bos_token: bool,
        default_bos: int | None = None,
        default_eos: int | None = None,
        strips_leading_space: bool = False,
    ) -> TokenizerSettings:
        ends = {
            self._token_id("eos_token_id", default_eos),
            self._token_id("eot_token_id"),
            self._token_id("eom_token_id"),
        }
        ends |= {self.ids[text] for text in well_known.END_OF_TURN & self.ids.keys()}
        return TokenizerSettings(
            bos_token_id=self._token_id("bos_token_id", default_bos),
            eos_token_ids=frozenset(end for end in ends if end is not None),
            add_bos_token=bool(self.get("add_bos_token", add_bos_token)),
            fim_tokens=self._fim_tokens(),
            strips_leading_space=strips_leading_space,
            closing_token_id=self._token_id("eos_token_id", default_eos)
            if self.get("add_eos_token")
            else None,
        )

    def _token_id(self, name: str, default: int | None = None) -> int | None:
        token_id = self.get(name, default)
        if token_id is None:
            return None
        if isinstance(token_id, int) and 0 <= token_id < len(self.vocabulary):
            return token_id
        logger.warning("Ignoring '%s%s' = %s, which is outside the vocabulary.", _PREFIX, name, token_id)
        return None

    def _fim_tokens(self) -> FimTokens | None:
        found = (
            self._fim_id(("fim_pre_token_id", "prefix_token_id"), well_known.FIM_PREFIX),
            self._fim_id(("fim_suf_token_id", "suffix_token_id"), well_known.FIM_SUFFIX),
            self._fim_id(("fim_mid_token_id", "middle_token_id"), well_known.FIM_MIDDLE),
        )
        prefix, suffix, middle = found
        if prefix is None or suffix is None or middle is None:
            return None
        return FimTokens(prefix, suffix, middle)

    def _fim_id(self, keys: Sequence[str], texts: Sequence[str]) -> int | None:
        stored = (self._token_id(key) for key in keys)
        known = (self.ids.get(text) for text in texts)
        return next((token_id for token_id in (*stored, *known) if token_id is not None), None)

    def _tokens_that_eat_whitespace(self) -> list[str]:
        """Phi-3's markup swallows white space after it; the file format has no place to say so."""
        if self.metadata.get("general.architecture") != "phi3":
            return []
        markup = {self.vocabulary.pieces[i] for i in self.vocabulary.ids_of_kind(TokenKind.CONTROL)}
        return sorted(markup - {"<s>", "<|endoftext|>"})

    def _chat_template(self, settings: TokenizerSettings) -> ChatTemplate | None:
        source = self.metadata.get("tokenizer.chat_template")
        if not isinstance(source, str):
            return None
        ids = {
            "bos_token": settings.bos_token_id,
            "eos_token": self._token_id("eos_token_id"),
            "unk_token": self._token_id("unknown_token_id"),
            "pad_token": self._token_id("padding_token_id"),
        }
        tokens = {name: self.vocabulary.pieces[i] for name, i in ids.items() if i is not None}
        tool_source = self.metadata.get("tokenizer.chat_template.tool_use")
        return ChatTemplate(source, tokens, tool_source if isinstance(tool_source, str) else None)


def _as_bytes(kinds: Any) -> bytearray:
    """One byte per token; the file has 32-bit numbers."""
    try:
        return bytearray(kinds.tolist() if hasattr(kinds, "tolist") else kinds)
    except ValueError:
        raise FormatError(f"'{_PREFIX}token_type' has a value outside 0 to 255.") from None

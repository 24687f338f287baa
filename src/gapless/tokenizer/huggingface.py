"""Builds the tokenizer of a Hugging Face folder: tokenizer.json and the configuration files beside it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapless.errors import FormatError, LoadError, UnsupportedModelError
from gapless.tokenizer import well_known
from gapless.tokenizer.chat_template import ChatTemplate
from gapless.tokenizer.tokenizer import FimTokens, Tokenizer, TokenizerSettings
from gapless.tokenizer.vocabulary import PieceStyle, TokenKind, Vocabulary

if TYPE_CHECKING:
    import tokenizers

_MODEL_CONFIGS = ("config.json", "generation_config.json")
_TEMPLATE_VARIABLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def tokenizer_from_hf(directory: Path) -> Tokenizer:
    """Tokenizer of the files in `directory`.

    LoadError if there is no tokenizer.json, FormatError if a file is malformed, UnsupportedModelError for a
    kind of vocabulary that Gapless cannot decode.
    """
    directory = Path(directory)
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise LoadError(
            f"{directory} has no tokenizer.json, which Gapless needs. Older models have only tokenizer.model "
            "or vocab.json; transformers' AutoTokenizer can save the missing file."
        )
    config = _json_object(directory / "tokenizer_config.json", missing_ok=True)
    encoder = HuggingFaceEncoder(path)
    vocabulary = _vocabulary(encoder, path)
    bos = encoder.find(_token_text(config.get("bos_token")))
    model_configs = [_json_object(directory / name, missing_ok=True) for name in _MODEL_CONFIGS]
    settings = TokenizerSettings(
        bos_token_id=bos,
        eos_token_ids=frozenset(_end_ids(config, model_configs, encoder, vocabulary)),
        add_bos_token=_adds_bos(encoder, config, vocabulary.pieces[bos] if bos is not None else None),
        fim_tokens=_fim_tokens(encoder),
        strips_leading_space=_strips_leading_space(encoder),
        closing_token_id=encoder.find(_closing_token(encoder, config)),
    )
    return Tokenizer(vocabulary, encoder, settings, _chat_template(directory, config))


class HuggingFaceEncoder:
    """An `Encoder` that leaves all to the `tokenizers` library."""

    def __init__(self, path: Path) -> None:
        """FormatError if the library cannot read the file."""
        from tokenizers import Tokenizer

        try:
            self.tokenizer: tokenizers.Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise FormatError(f"{path}: not a tokenizer that can be read: {error}") from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self._match_special_tokens_before_normalization()
        self._normalizer = self.tokenizer.normalizer
        self._lock = threading.Lock()

    def _match_special_tokens_before_normalization(self) -> None:
        """So that a guard, which the normalizer takes out, is still there when they are looked for."""
        from tokenizers import AddedToken

        self.tokenizer.add_special_tokens(
            [
                AddedToken(token.content, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False)
                for token in self.added_tokens.values()
                if token.special and token.normalized
            ]
        )

    def find(self, text: str | None) -> int | None:
        """Id of the token with this text."""
        token_id: int | None = None if text is None else self.tokenizer.token_to_id(text)
        return token_id

    @property
    def added_tokens(self) -> Mapping[int, tokenizers.AddedToken]:
        """Special and user-defined tokens by id."""
        return self.tokenizer.get_added_tokens_decoder()

    @property
    def decoder_parts(self) -> list[Mapping[str, Any]]:
        """The decoder's steps, as tokenizer.json writes them."""
        return list(_parts(_as_json(self.tokenizer.decoder)))

    @property
    def text_templates(self) -> list[list[str | None]]:
        """What the post-processor puts around a text, as text, and None for the text itself."""
        parts = _parts(_as_json(self.tokenizer.post_processor))
        templates = [part.get("single") for part in parts if part.get("type") == "TemplateProcessing"]
        return [
            [piece.get("SpecialToken", {}).get("id") for piece in template]
            for template in templates
            if template
        ]

    def encode(self, text: str, parse_special: bool, guard: str = "") -> list[int]:
        """See `Encoder.encode`."""
        with self._lock:  # the library has these two as state of the tokenizer, not of a call
            self.tokenizer.encode_special_tokens = not parse_special
            self.tokenizer.normalizer = self._without(guard) if guard else self._normalizer
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _without(self, guard: str) -> Any:
        from tokenizers import normalizers

        remove = normalizers.Replace(guard, "")
        return remove if self._normalizer is None else normalizers.Sequence([remove, self._normalizer])


def _json_object(path: Path, missing_ok: bool = False) -> dict[str, Any]:
    if missing_ok and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path}: must hold a JSON object, not {type(value).__name__}.")
    return value


def _vocabulary(encoder: HuggingFaceEncoder, path: Path) -> Vocabulary:
    ids: dict[str, int] = encoder.tokenizer.get_vocab(with_added_tokens=True)
    size = max(ids.values(), default=-1) + 1
    if not 0 < size <= 2 * len(ids) + 65536:  # gaps are filled below, so a huge id must not cost huge memory
        raise FormatError(f"{path}: {len(ids)} tokens with ids up to {size - 1}.")
    pieces = [""] * size
    kinds = bytearray([TokenKind.UNUSED]) * size
    for piece, token_id in ids.items():
        pieces[token_id] = piece
        kinds[token_id] = TokenKind.NORMAL
    style = _piece_style(encoder, path)
    if style is PieceStyle.SENTENCEPIECE:
        for byte in range(256):
            token_id = ids.get(f"<0x{byte:02X}>", -1)
            if token_id >= 0:
                kinds[token_id] = TokenKind.BYTE
    for token_id, token in encoder.added_tokens.items():
        kinds[token_id] = TokenKind.CONTROL if token.special else TokenKind.USER_DEFINED
    return Vocabulary(pieces, kinds, style)


def _piece_style(encoder: HuggingFaceEncoder, path: Path) -> PieceStyle:
    kinds = {part.get("type") for part in encoder.decoder_parts}
    if "ByteLevel" in kinds:
        return PieceStyle.BYTE_LEVEL
    if kinds & {"Metaspace", "ByteFallback", "Replace"}:
        return PieceStyle.SENTENCEPIECE
    raise UnsupportedModelError(
        f"{path}: decoder {', '.join(map(str, kinds)) or 'none'} is not supported; known are ByteLevel, "
        "Metaspace and ByteFallback."
    )


def _strips_leading_space(encoder: HuggingFaceEncoder) -> bool:
    for part in encoder.decoder_parts:
        if part.get("type") == "Strip" and part.get("content") == " " and part.get("start", 0) > 0:
            return True
        if part.get("type") == "Metaspace":
            return bool(
                part.get("prepend_scheme", "always") != "never" and part.get("add_prefix_space", True)
            )
    return False


def _as_json(component: Any) -> Any:
    """A part of the library's tokenizer as tokenizer.json writes it; pickling is its way to say it."""
    return None if component is None else json.loads(component.__getstate__())


def _parts(component: Any) -> Iterator[Mapping[str, Any]]:
    """A normalizer, decoder or the like, and those inside it if it is a sequence."""
    if isinstance(component, Mapping):
        yield component
        for key in ("decoders", "processors", "pretokenizers", "normalizers"):
            for part in component.get(key) or ():
                yield from _parts(part)


def _adds_bos(encoder: HuggingFaceEncoder, config: Mapping[str, Any], bos: str | None) -> bool:
    if bos is None:
        return False
    if isinstance(config.get("add_bos_token"), bool):
        return bool(config["add_bos_token"])
    return bos in (template[0] for template in encoder.text_templates)


def _closing_token(encoder: HuggingFaceEncoder, config: Mapping[str, Any]) -> str | None:
    """Text of the token that the post-processor or the configuration wants after a text."""
    last = next((template[-1] for template in encoder.text_templates if template[-1] is not None), None)
    return last or (_token_text(config.get("eos_token")) if config.get("add_eos_token") is True else None)


def _end_ids(
    config: Mapping[str, Any],
    model_configs: Iterable[Mapping[str, Any]],
    encoder: HuggingFaceEncoder,
    vocabulary: Vocabulary,
) -> Iterator[int]:
    eos = encoder.find(_token_text(config.get("eos_token")))
    if eos is not None:
        yield eos
    for model_config in model_configs:
        stored = model_config.get("eos_token_id", model_config.get("text_config", {}).get("eos_token_id"))
        for token_id in stored if isinstance(stored, list) else [stored]:
            if isinstance(token_id, int) and 0 <= token_id < len(vocabulary):
                yield token_id
    for token_id in map(encoder.find, well_known.END_OF_TURN):
        if token_id is not None and vocabulary.is_control(token_id):
            yield token_id


def _fim_tokens(encoder: HuggingFaceEncoder) -> FimTokens | None:
    parts = (well_known.FIM_PREFIX, well_known.FIM_SUFFIX, well_known.FIM_MIDDLE)
    found = [next((i for i in map(encoder.find, texts) if i is not None), None) for texts in parts]
    prefix, suffix, middle = found
    if prefix is None or suffix is None or middle is None:
        return None
    return FimTokens(prefix, suffix, middle)


def _token_text(token: Any) -> str | None:
    """Text of a special token, which files write as a string or as an object."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _chat_template(directory: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    tokens = {
        name: text for name in _TEMPLATE_VARIABLES if (text := _token_text(config.get(name))) is not None
    }
    file = directory / "chat_template.jinja"
    if file.is_file():
        return ChatTemplate(file.read_text(encoding="utf-8"), tokens)
    stored = config.get("chat_template") or _json_object(
        directory / "chat_template.json", missing_ok=True
    ).get("chat_template")
    if isinstance(stored, str):
        return ChatTemplate(stored, tokens)
    if isinstance(stored, list):
        named = {
            entry["name"]: entry["template"]
            for entry in stored
            if isinstance(entry, Mapping) and isinstance(entry.get("template"), str) and "name" in entry
        }
        if "default" in named:
            return ChatTemplate(named["default"], tokens, named.get("tool_use"))
    return None

"""What the well-known keys of a GGUF file must look like, so that later code can rely on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gapless.errors import FormatError

_INTEGER = frozenset({"u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64"})
_STRING = frozenset({"string"})
_BOOL = frozenset({"bool"})

KEY_TYPES: Mapping[str, frozenset[str]] = {
    "general.architecture": _STRING,
    "general.alignment": frozenset({"u32"}),
    "split.no": _INTEGER,
    "split.count": _INTEGER,
    "split.tensors.count": _INTEGER,
    "tokenizer.ggml.model": _STRING,
    "tokenizer.ggml.pre": _STRING,
    "tokenizer.ggml.tokens": frozenset({"string[]"}),
    "tokenizer.ggml.merges": frozenset({"string[]"}),
    "tokenizer.ggml.scores": frozenset({"f32[]"}),
    "tokenizer.ggml.token_type": frozenset({"i32[]", "u32[]"}),
    "tokenizer.ggml.bos_token_id": _INTEGER,
    "tokenizer.ggml.eos_token_id": _INTEGER,
    "tokenizer.ggml.eot_token_id": _INTEGER,
    "tokenizer.ggml.eom_token_id": _INTEGER,
    "tokenizer.ggml.unknown_token_id": _INTEGER,
    "tokenizer.ggml.padding_token_id": _INTEGER,
    "tokenizer.ggml.add_bos_token": _BOOL,
    "tokenizer.ggml.add_eos_token": _BOOL,
    "tokenizer.ggml.add_space_prefix": _BOOL,
    "tokenizer.chat_template": _STRING,
}

_PER_TOKEN = ("tokenizer.ggml.scores", "tokenizer.ggml.token_type")


def check_metadata(metadata: Mapping[str, Any], kinds: Mapping[str, str], name: str) -> None:
    """FormatError where a well-known key has another type, length or range than it must have."""
    for key, allowed in KEY_TYPES.items():
        if key in kinds and kinds[key] not in allowed:
            expected = " or ".join(sorted(allowed))
            raise FormatError(f"{name}: {key!r} must be {expected}, the file declares {kinds[key]}")
    alignment = metadata.get("general.alignment", 1)
    if alignment == 0 or alignment & (alignment - 1):
        raise FormatError(f"{name}: 'general.alignment' is {alignment}, it must be a power of two")
    tokens = metadata.get("tokenizer.ggml.tokens")
    for key in _PER_TOKEN:
        if key in metadata and (tokens is None or len(metadata[key]) != len(tokens)):
            num_tokens = 0 if tokens is None else len(tokens)
            raise FormatError(f"{name}: {key!r} has {len(metadata[key])} values for {num_tokens} tokens")

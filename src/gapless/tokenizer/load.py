"""Finds the right way to build a checkpoint's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from gapless.errors import LoadError
from gapless.tokenizer.tokenizer import Tokenizer


class Checkpoint(Protocol):
    """What this package needs of `gapless.loading.Checkpoint`."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def directory(self) -> Path | None: ...
    @property
    def kind(self) -> Any: ...


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of an opened checkpoint. LoadError (FormatError, UnsupportedModelError) if that fails."""
    if checkpoint.kind.name == "GGUF":
        return tokenizer_from_gguf(checkpoint.metadata)
    if checkpoint.directory is None:
        raise LoadError("The checkpoint has no folder in which its tokenizer files could be.")
    return tokenizer_from_hf(checkpoint.directory)


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """See `gapless.tokenizer.gguf`."""
    from gapless.tokenizer import gguf

    return gguf.tokenizer_from_gguf(metadata)


def tokenizer_from_hf(directory: Path) -> Tokenizer:
    """See `gapless.tokenizer.huggingface`."""
    from gapless.tokenizer import huggingface

    return huggingface.tokenizer_from_hf(directory)

"""The neutral form of a model on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from gapless.errors import LoadError
from gapless.loading.mapped_file import Bytes, MappedFile
from gapless.loading.tensor_type import TensorType


class CheckpointKind(Enum):
    """Which convention names the tensors and the metadata."""

    GGUF = "gguf"
    HF = "hf"


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is and what its bytes mean."""

    name: str
    type: TensorType
    shape: tuple[int, ...]  # outermost first, as in PyTorch: (out_features, in_features)
    nbytes: int
    offset: int  # from the start of its file
    shard: int = 0  # which of the checkpoint's files

    @property
    def num_values(self) -> int:
        count = 1
        for dimension in self.shape:
            count *= dimension
        return count


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model's tensors and metadata, from one GGUF file or set, or from one Hugging Face folder.

    `metadata` holds GGUF's key-values (plain Python values, numpy arrays, StringArray) or the parsed
    config.json. `directory` is the folder to look for tokenizer files in (HF only). `pooling_config` is what
    sentence-transformers adds to models for embeddings (HF only). Use as a context manager, or call `close`.
    """

    path: Path
    kind: CheckpointKind
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    files: Sequence[MappedFile]
    directory: Path | None = None
    generation_config: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    pooling_config: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path}, {len(self.tensors)} tensors>"

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def total_bytes(self) -> int:
        """Size of all tensors together."""
        return sum(info.nbytes for info in self.tensors.values())

    def raw(self, name: str) -> Bytes:
        """A tensor's bytes, a read-only view [nbytes] of the mapped file; they may start at any address.

        LoadError if the checkpoint has no such tensor.
        """
        info = self._info(name)
        return self.files[info.shard].bytes_at(info.offset, info.nbytes)

    def release(self, name: str) -> None:
        """Take the tensor's pages out of the process's resident memory. Views of it remain valid."""
        info = self._info(name)
        self.files[info.shard].release(info.offset, info.nbytes)

    def close(self) -> None:
        """Drop the files. Views that `raw` gave out remain valid."""
        for file in self.files:
            file.close()

    def _info(self, name: str) -> TensorInfo:
        try:
            return self.tensors[name]
        except KeyError:
            raise LoadError(f"{self.path} has no tensor {name!r}.") from None

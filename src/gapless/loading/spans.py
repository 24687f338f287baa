"""Checks where tensors lie in their file."""

from __future__ import annotations

from collections.abc import Iterable

from gapless.errors import FormatError
from gapless.loading.checkpoint import TensorInfo


def check_spans(tensors: Iterable[TensorInfo], file_bytes: int, name: str) -> list[TensorInfo]:
    """Every tensor must end within the file, and no two may share a byte. Returns them in file order.

    Shared bytes would let a small file ask for any amount of memory once its tensors are packed.
    """
    ordered = sorted(tensors, key=lambda info: (info.offset, info.nbytes))
    end, previous = 0, None
    for info in ordered:
        if info.offset + info.nbytes > file_bytes:
            raise FormatError(
                f"{name}: tensor {info.name!r} ends at byte {info.offset + info.nbytes}, the file has only "
                f"{file_bytes}; it is cut off"
            )
        if previous is not None and info.nbytes and info.offset < end:
            raise FormatError(
                f"{name}: tensors {previous.name!r} and {info.name!r} overlap at byte {info.offset}"
            )
        if info.nbytes:
            end, previous = info.offset + info.nbytes, info
    return ordered

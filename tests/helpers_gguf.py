"""Writes tiny GGUF and safetensors files, well-formed or broken in one chosen place."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

ALIGNMENT = 32


class Kind(IntEnum):
    """GGUF's numbers for the types of metadata values."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


_LAYOUTS = {
    Kind.U8: "<B",
    Kind.I8: "<b",
    Kind.U16: "<H",
    Kind.I16: "<h",
    Kind.U32: "<I",
    Kind.I32: "<i",
    Kind.F32: "<f",
    Kind.BOOL: "<B",
    Kind.U64: "<Q",
    Kind.I64: "<q",
    Kind.F64: "<d",
}


def text(value: str | bytes, length: int | None = None) -> bytes:
    """A GGUF string, with its true length or a false one."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


def scalar(kind: Kind, value: Any) -> bytes:
    return text(value) if kind == Kind.STRING else struct.pack(_LAYOUTS[kind], value)


class GgufBuilder:
    """Collects entries and writes them in order. `num_keys` and `num_tensors` override the true counts."""

    def __init__(
        self,
        version: int = 3,
        alignment: int = ALIGNMENT,
        num_keys: int | None = None,
        num_tensors: int | None = None,
    ) -> None:
        self.version = version
        self.alignment = alignment
        self.num_keys = num_keys
        self.num_tensors = num_tensors
        self.keys: list[bytes] = []
        self.tensors: list[bytes] = []
        self.data = b""

    def raw_key(self, entry: bytes) -> GgufBuilder:
        self.keys.append(entry)
        return self

    def key(self, name: str | bytes, kind: Kind, value: Any) -> GgufBuilder:
        return self.raw_key(text(name) + struct.pack("<I", kind) + scalar(kind, value))

    def array(self, name: str, kind: Kind, values: Sequence[Any], count: int | None = None) -> GgufBuilder:
        head = struct.pack("<IIQ", Kind.ARRAY, kind, len(values) if count is None else count)
        return self.raw_key(text(name) + head + b"".join(scalar(kind, value) for value in values))

    def tensor(
        self,
        name: str | bytes,
        dimensions: Sequence[int],
        kind: int,
        data: bytes,
        offset: int | None = None,
    ) -> GgufBuilder:
        """`dimensions` innermost first, as GGUF has them."""
        self.data += b"\0" * (-len(self.data) % self.alignment)
        entry = text(name) + struct.pack("<I", len(dimensions))
        entry += struct.pack(f"<{len(dimensions)}Q", *dimensions)
        entry += struct.pack("<IQ", kind, len(self.data) if offset is None else offset)
        self.tensors.append(entry)
        self.data += data
        return self

    def build(self) -> bytes:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_keys = len(self.keys) if self.num_keys is None else self.num_keys
        head = b"GGUF" + struct.pack("<IQQ", self.version, num_tensors, num_keys)
        head += b"".join(self.keys) + b"".join(self.tensors)
        if self.tensors:
            head += b"\0" * (-len(head) % self.alignment)
        return head + self.data


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file. `header` is an object or its text; `length` overrides its true length."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data

"""Reads one GGUF file (version 2 or 3, little-endian): metadata and where the tensors are.

The file is not trusted. Every count and length is checked against the bytes that remain before anything is
allocated for it, and every offset against the file; whatever is wrong raises FormatError with the place.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from gapless.errors import FormatError, UnsupportedModelError
from gapless.loading.checkpoint import TensorInfo
from gapless.loading.gguf_keys import check_metadata
from gapless.loading.spans import check_spans
from gapless.loading.strings import LENGTH_BYTES, StringArray
from gapless.loading.tensor_type import TensorType

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 65535
# Far above any real file (a few dozen keys, a few thousand tensors). Python objects are larger than the bytes
# they come from, so without a limit a file of tiny entries would cost many times its size.
MAX_KEYS = 65536
MAX_TENSORS = 65536
MAX_TEXT_BYTES = 64 << 20  # of all string values together; the largest in use is an embedded tokenizer.json

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_TYPE_NAMES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64")

_SMALLEST_KEY_VALUE = LENGTH_BYTES + 1 + 4 + 1  # name of one character, type, one byte
_SMALLEST_TENSOR = LENGTH_BYTES + 1 + 4 + 8 + 4 + 8  # name, n_dims, one dimension, type, offset

# Types that ggml has or had, and Gapless does not: the error can say their name.
_UNSUPPORTED_TYPES = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0",
    35: "TQ2_0", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
_TYPES = {kind.value: kind for kind in TensorType if kind.value >= 0}


@dataclass(frozen=True)
class GgufFile:
    """The contents of one file. `kinds` tells the declared type of each key: "u32", "string", "f32[]"."""

    version: int
    metadata: dict[str, Any]
    kinds: dict[str, str]
    tensors: dict[str, TensorInfo]


def parse_gguf(data: memoryview, name: str, shard: int = 0) -> GgufFile:
    """Read the header of a GGUF file that is in memory or mapped.

    `name` is what errors call the file. FormatError, or UnsupportedModelError for versions and tensor types
    that Gapless does not read.
    """
    reader = _Reader(data, name)
    version = _read_version(reader)
    num_tensors = reader.count("tensors", _SMALLEST_TENSOR, MAX_TENSORS)
    num_keys = reader.count("key-values", _SMALLEST_KEY_VALUE, MAX_KEYS)
    metadata, kinds = _read_metadata(reader, num_keys)
    check_metadata(metadata, kinds, name)
    tensors = _read_tensors(reader, num_tensors, metadata.get("general.alignment", DEFAULT_ALIGNMENT), shard)
    return GgufFile(version, metadata, kinds, tensors)


class _Reader:
    """A position in the file; nothing is read past its end."""

    def __init__(self, data: memoryview, name: str) -> None:
        self.data = data
        self.name = name
        self.position = 0
        self.text_bytes_left = MAX_TEXT_BYTES

    @property
    def remaining(self) -> int:
        return len(self.data) - self.position

    def error(self, problem: str) -> FormatError:
        return FormatError(f"{self.name}: {problem} (at byte {self.position})")

    def advance(self, num_bytes: int, what: str) -> int:
        """Step over `num_bytes` and return where they begin."""
        if num_bytes > self.remaining:
            raise self.error(f"{what} needs {num_bytes} bytes, {self.remaining} remain; the file is cut off")
        start = self.position
        self.position += num_bytes
        return start

    def unpack(self, layout: struct.Struct, what: str) -> Any:
        return layout.unpack_from(self.data, self.advance(layout.size, what))[0]

    def u32(self, what: str) -> int:
        return int(self.unpack(_U32, what))

    def u64(self, what: str) -> int:
        return int(self.unpack(_U64, what))

    def count(self, what: str, smallest_bytes: int, limit: int | None = None) -> int:
        """A u64 count of things that take at least `smallest_bytes` each."""
        count = self.u64(f"the number of {what}")
        if count > self.remaining // smallest_bytes:
            raise self.error(f"{count} {what} cannot fit into the remaining {self.remaining} bytes")
        if limit is not None and count > limit:
            raise self.error(f"{count} {what}, at most {limit} are accepted")
        return count

    def text(self, what: str, most_bytes: int) -> bytes:
        size = self.u64(f"the length of {what}")
        start = self.advance(size, what)
        if size > most_bytes:
            raise self.error(f"{what} of {size} bytes, at most {most_bytes} are accepted")
        return bytes(self.data[start : start + size])

    def identifier(self, what: str) -> str:
        """A key or tensor name: non-empty UTF-8."""
        name = self.text(what, MAX_NAME_BYTES)
        if not name:
            raise self.error(f"{what} is empty")
        try:
            return name.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8: {error}") from None


def _read_version(reader: _Reader) -> int:
    magic = reader.advance(4, "the magic number")
    if bytes(reader.data[magic : magic + 4]) != MAGIC:
        raise reader.error(f"not a GGUF file: it begins with {bytes(reader.data[:4])!r}, not {MAGIC!r}")
    version = reader.u32("the version")
    if version in (2, 3):
        return version
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if swapped in (1, 2, 3):
        raise UnsupportedModelError(f"{reader.name} is a big-endian GGUF file. Get a little-endian one.")
    if version == 1 or 3 < version < 1000:
        raise UnsupportedModelError(
            f"{reader.name} is GGUF version {version}; Gapless reads 2 and 3. Convert the model again."
        )
    raise reader.error(f"version {version} of GGUF does not exist")


def _read_metadata(reader: _Reader, num_keys: int) -> tuple[dict[str, Any], dict[str, str]]:
    metadata: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    for index in range(num_keys):
        key = reader.identifier(f"key {index}")
        if key in metadata:
            raise reader.error(f"key {key!r} appears twice")
        number = reader.u32(f"the type of {key!r}")
        if number == _ARRAY:
            kind, value = _read_array(reader, key)
            kinds[key] = f"{kind}[]"
        else:
            value = _read_scalar(reader, number, key)
            kinds[key] = _TYPE_NAMES[number]
        metadata[key] = value
    return metadata, kinds


def _read_scalar(reader: _Reader, number: int, key: str) -> Any:
    if number == _STRING:
        # For people to read (names, licences, templates): what is not UTF-8 shows as U+FFFD.
        value = reader.text(repr(key), reader.text_bytes_left)
        reader.text_bytes_left -= len(value)
        return value.decode("utf-8", "replace")
    if number not in _SCALARS:
        raise reader.error(f"{key!r} has unknown type {number}")
    value = reader.unpack(_SCALARS[number], repr(key))
    if number != _BOOL:
        return value
    if value > 1:
        raise reader.error(f"{key!r} is a bool of value {value}")
    return bool(value)


def _read_array(reader: _Reader, key: str) -> tuple[str, Any]:
    """The name of the element type, and a read-only numpy array or a StringArray."""
    number = reader.u32(f"the element type of {key!r}")
    if number == _ARRAY:
        raise reader.error(f"{key!r} is an array of arrays, which is not supported")
    if number == _STRING:
        return "string", _read_strings(reader, key)
    if number not in _SCALARS:
        raise reader.error(f"{key!r} has unknown element type {number}")
    dtype = np.dtype(_SCALARS[number].format)
    count = reader.count(f"values of {key!r}", dtype.itemsize)
    start = reader.advance(count * dtype.itemsize, repr(key))
    values = np.frombuffer(reader.data, dtype, count, start)
    if number == _BOOL:
        if count and values.max() > 1:
            raise reader.error(f"{key!r} has a bool of value {values.max()}")
        values = values.astype(np.bool_)
    else:
        values = values.copy()  # aligned, and independent of the file
    values.flags.writeable = False
    return _TYPE_NAMES[number], values


def _read_strings(reader: _Reader, key: str) -> StringArray:
    """Find where the strings begin, in one pass that must stay cheap: a vocabulary has 262k of them."""
    count = reader.count(f"strings of {key!r}", LENGTH_BYTES)
    data, position, end = reader.data, reader.position, len(reader.data)
    starts = array("q", [0]) * (count + 1)
    unpack = _U64.unpack_from
    last_length = end - LENGTH_BYTES
    for index in range(count):
        if position > last_length:
            reader.position = position
            raise reader.error(f"{key!r} is cut off at string {index} of {count}")
        (size,) = unpack(data, position)
        position += LENGTH_BYTES
        starts[index] = position
        if size > end - position:
            reader.position = position
            raise reader.error(f"string {index} of {key!r} needs {size} bytes, {end - position} remain")
        position += size
    starts[count] = position + LENGTH_BYTES
    reader.position = position
    return StringArray(data, np.frombuffer(starts, np.int64))


def _read_tensors(reader: _Reader, num_tensors: int, alignment: int, shard: int) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for index in range(num_tensors):
        info = _read_tensor(reader, index, alignment, shard)
        if info.name in found:
            raise reader.error(f"tensor {info.name!r} appears twice")
        found[info.name] = info
    base = -(-reader.position // alignment) * alignment
    placed = {
        name: TensorInfo(name, info.type, info.shape, info.nbytes, base + info.offset, shard)
        for name, info in found.items()
    }
    check_spans(placed.values(), len(reader.data), reader.name)
    return placed


def _read_tensor(reader: _Reader, index: int, alignment: int, shard: int) -> TensorInfo:
    """One tensor's entry, its offset still relative to the start of the data."""
    name = reader.identifier(f"the name of tensor {index}")
    num_dimensions = reader.u32(f"the number of dimensions of {name!r}")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise reader.error(
            f"tensor {name!r} has {num_dimensions} dimensions, it must be 1 to {MAX_DIMENSIONS}"
        )
    dimensions = [reader.u64(f"dimension {i} of {name!r}") for i in range(num_dimensions)]
    num_values = 1
    for dimension in dimensions:
        if not 1 <= dimension < 1 << 63:
            raise reader.error(f"tensor {name!r} has a dimension of {dimension}, allowed are 1 to 2^63 - 1")
        num_values *= dimension
    if num_values >= 1 << 63:
        raise reader.error(f"tensor {name!r} of dimensions {dimensions} has too many values")
    kind = _tensor_type(reader, name)
    if dimensions[0] % kind.block_size:
        raise reader.error(
            f"tensor {name!r} has rows of {dimensions[0]} values, no multiple of the {kind.block_size} in a "
            f"block of {kind.name}"
        )
    offset = reader.u64(f"the offset of {name!r}")
    if offset % alignment:
        raise reader.error(f"tensor {name!r} is at offset {offset}, no multiple of the alignment {alignment}")
    return TensorInfo(name, kind, tuple(reversed(dimensions)), kind.nbytes(num_values), offset, shard)


def _tensor_type(reader: _Reader, name: str) -> TensorType:
    number = reader.u32(f"the type of {name!r}")
    if number in _TYPES:
        return _TYPES[number]
    if number in _UNSUPPORTED_TYPES:
        raise UnsupportedModelError(
            f"{reader.name}: tensor {name!r} is stored as {_UNSUPPORTED_TYPES[number]}, which Gapless does "
            "not read. Get the model in another quantization, such as Q4_K_M or Q8_0."
        )
    raise reader.error(f"tensor {name!r} has unknown type {number}")

"""Reads the header of one safetensors file: where its tensors are.

A file is a u64 length (little-endian), that many bytes of JSON, then the data. The file is not trusted:
whatever is wrong raises FormatError, one message for each way of being wrong.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

from typing import Any

from gapless.errors import FormatError, UnsupportedModelError
from gapless.loading.checkpoint import TensorInfo
from gapless.loading.json_object import MAX_JSON_BYTES, parse_json_object
from gapless.loading.spans import check_spans
from gapless.loading.tensor_type import TensorType

_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_MAX_DIMENSIONS = 32

_TYPES = {kind.name: kind for kind in TensorType if kind.block_size == 1}
_UNSUPPORTED_TYPES = frozenset(
    {
        "F4", "F6_E2M3", "F6_E3M2", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64",
    }
)  # fmt: skip


def parse_safetensors(data: memoryview, name: str, shard: int = 0) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file that is in memory or mapped; `name` is what errors call the file."""
    if len(data) < _LENGTH_BYTES:
        raise FormatError(f"{name} has {len(data)} bytes, a safetensors file begins with {_LENGTH_BYTES}")
    header_bytes = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if header_bytes > MAX_JSON_BYTES:
        raise FormatError(f"{name}: a header of {header_bytes} bytes, at most {MAX_JSON_BYTES} are accepted")
    base = _LENGTH_BYTES + header_bytes
    if base > len(data):
        raise FormatError(f"{name}: a header of {header_bytes} bytes, longer than the file of {len(data)}")
    header = parse_json_object(bytes(data[_LENGTH_BYTES:base]), f"the header of {name}")
    _check_metadata(header.pop(_METADATA, {}), name)
    tensors = {key: _tensor(key, entry, base, name, shard) for key, entry in header.items()}
    ordered = check_spans(tensors.values(), len(data), name)
    end = base
    for info in ordered:
        if info.nbytes and info.offset != end:
            gap = info.offset - end
            raise FormatError(f"{name}: {gap} bytes in front of tensor {info.name!r} belong to no tensor")
        end += info.nbytes
    if end != len(data):
        raise FormatError(f"{name}: {len(data) - end} bytes at the end belong to no tensor")
    return tensors


def _check_metadata(metadata: Any, name: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{name}: {_METADATA} must map names to strings")


def _tensor(key: str, entry: Any, base: int, name: str, shard: int) -> TensorInfo:
    place = f"{name}: tensor {key!r}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{place} must have dtype, shape and data_offsets, and nothing else")
    kind = _tensor_type(entry["dtype"], place)
    shape, num_values = _shape(entry["shape"], place)
    offsets = entry["data_offsets"]
    if not isinstance(offsets, list) or [type(offset) for offset in offsets] != [int, int]:
        raise FormatError(f"{place} has data_offsets {offsets!r:.100}, they must be two integers")
    begin, end = offsets
    if not 0 <= begin <= end:
        raise FormatError(f"{place} has data_offsets {offsets}, they must be two ascending integers from 0")
    nbytes = kind.nbytes(num_values)
    if end - begin != nbytes:
        span = end - begin
        raise FormatError(
            f"{place} of {kind.name} {list(shape)} has {nbytes} bytes, data_offsets span {span}"
        )
    return TensorInfo(key, kind, shape, nbytes, base + begin, shard)


def _tensor_type(dtype: Any, place: str) -> TensorType:
    if not isinstance(dtype, str):
        raise FormatError(f"{place} has dtype {dtype!r:.100}, it must be a string")
    if dtype in _UNSUPPORTED_TYPES:
        raise UnsupportedModelError(
            f"{place} is stored as {dtype}, which Gapless does not read. Get the model in BF16, F16 or F32."
        )
    if dtype not in _TYPES:
        raise FormatError(f"{place} has unknown dtype {dtype!r:.100}")
    return _TYPES[dtype]


def _shape(shape: Any, place: str) -> tuple[tuple[int, ...], int]:
    if not isinstance(shape, list) or not all(type(dimension) is int for dimension in shape):
        raise FormatError(f"{place} has shape {shape!r:.100}, it must be a list of integers")
    if len(shape) > _MAX_DIMENSIONS:
        raise FormatError(f"{place} has {len(shape)} dimensions, at most {_MAX_DIMENSIONS} are accepted")
    num_values = 1
    for dimension in shape:
        if not 0 <= dimension < 1 << 63:
            raise FormatError(f"{place} has a dimension of {dimension}, allowed are 0 to 2^63 - 1")
        num_values *= dimension
    if num_values >= 1 << 63:
        raise FormatError(f"{place} of shape {shape} has too many values")
    return tuple(shape), num_values

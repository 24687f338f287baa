"""Dequantizes in numpy: the reference that `inspect` and the tests use. Loading has faster ways.

Each function turns blocks [num_blocks, block_bytes] into float32 values [num_blocks, block_size], with the
operations in the order in which ggml's own Python package does them, so that results are equal bit for bit.
Block layouts: ggml-common.h of https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from gapless.errors import UnsupportedModelError
from gapless.loading.tensor_type import TensorType

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
_Array = npt.NDArray[Any]

_BYTES_AT_ONCE = 1 << 22  # keeps the temporaries in the tens of MB

_IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def dequantize(kind: TensorType, raw: Bytes, shape: tuple[int, ...]) -> Floats:
    """The values of a tensor as float32 [*shape], from its bytes.

    ValueError if `raw` is not as long as `shape` needs; UnsupportedModelError for types that are no weights.
    """
    if kind not in _DECODERS:
        raise UnsupportedModelError(f"{kind.name} values are not weights, they cannot be dequantized.")
    num_values = int(np.prod(shape, dtype=object))
    if num_values % kind.block_size or raw.size != kind.nbytes(num_values):
        raise ValueError(f"{raw.size} bytes for {kind.name} of shape {shape}")
    blocks = np.ascontiguousarray(raw).reshape(-1, kind.block_bytes)
    values = np.empty((len(blocks), kind.block_size), np.float32)
    step = max(1, _BYTES_AT_ONCE // kind.block_bytes)
    with np.errstate(all="ignore"):  # infinite and NaN scales are the checkpoint's business
        for start in range(0, len(blocks), step):
            values[start : start + step] = _DECODERS[kind](blocks[start : start + step])
    return values.reshape(shape)


def _half(columns: Bytes) -> Floats:
    """Two bytes of each block as an f16 number: [num_blocks, 1]."""
    return np.ascontiguousarray(columns).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[..., n] bytes to [..., 2n]: all low halves, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _bits(packed: Bytes) -> Bytes:
    """[num_blocks, n] bytes to [num_blocks, 8n] zeros and ones, lowest bit first."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _fields(packed: Bytes, width: int) -> Bytes:
    """[num_blocks, m, n] bytes to [num_blocks, m, 8 // width, n]: a row for each bit field, lowest first."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    fields: Bytes = np.bitwise_and(packed[:, :, None, :] >> shifts, np.uint8((1 << width) - 1))
    return fields


def _with_high_bits(low: Bytes, high: Bytes, position: int) -> Bytes:
    """Values whose bits from `position` upwards are `high`."""
    joined: Bytes = np.bitwise_or(low, np.left_shift(high, np.uint8(position)))
    return joined


def _signed(values: Bytes, zero: int) -> npt.NDArray[np.int8]:
    signed: npt.NDArray[np.int8] = values.astype(np.int8) - np.int8(zero)
    return signed


def _f32(blocks: Bytes) -> _Array:
    return blocks.view("<f4")


def _f16(blocks: Bytes) -> _Array:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> _Array:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(blocks: Bytes) -> _Array:
    return _half(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(blocks: Bytes) -> _Array:
    return _half(blocks[:, :2]) * _signed(_nibbles(blocks[:, 2:]), 8).astype(np.float32)


def _q4_1(blocks: Bytes) -> _Array:
    return _half(blocks[:, :2]) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks[:, 2:4])


def _q5_0(blocks: Bytes) -> _Array:
    quants = _with_high_bits(_nibbles(blocks[:, 6:]), _bits(blocks[:, 2:6]), 4)
    return _half(blocks[:, :2]) * _signed(quants, 16).astype(np.float32)


def _q5_1(blocks: Bytes) -> _Array:
    quants = _with_high_bits(_nibbles(blocks[:, 8:]), _bits(blocks[:, 4:8]), 4)
    return _half(blocks[:, :2]) * quants.astype(np.float32) + _half(blocks[:, 2:4])


def _q2_k(blocks: Bytes) -> _Array:
    # 16 scale/minimum nibbles, 64 bytes of 2-bit values, scale, scale of the minima
    scales, minima = blocks[:, :16] & 15, blocks[:, :16] >> 4
    scale = (_half(blocks[:, 80:82]) * scales.astype(np.float32))[:, :, None]
    minimum = (_half(blocks[:, 82:84]) * minima.astype(np.float32))[:, :, None]
    quants = _fields(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    return (scale * quants.astype(np.float32) - minimum).reshape(-1, 256)


def _q3_k(blocks: Bytes) -> _Array:
    # 32 bytes of inverted third bits, 64 of low 2-bit values, 12 of 16 6-bit scales, scale
    packed = blocks[:, 96:108]
    low = _nibbles(packed[:, :8])
    high = _fields(packed[:, None, 8:], 2).reshape(-1, 16)
    scale = _half(blocks[:, 108:]) * _signed(_with_high_bits(low, high, 4), 32).astype(np.float32)
    low_bits = _fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    high_bit = _fields(blocks[:, None, :32], 1).reshape(-1, 16, 16) ^ 1
    quants = low_bits.astype(np.int8) - (high_bit << 2).astype(np.int8)
    return (scale[:, :, None] * quants.astype(np.float32)).reshape(-1, 256)


def _k_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The 8 six-bit scales and 8 six-bit minima that Q4_K and Q5_K keep in 12 bytes: [num_blocks, 8] each."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=-1)
    return scales, minima


def _scaled_k(blocks: Bytes, quants: Bytes) -> _Array:
    scales, minima = _k_scales(blocks[:, 4:16])
    scale = (_half(blocks[:, :2]) * scales.astype(np.float32))[:, :, None]
    minimum = (_half(blocks[:, 2:4]) * minima.astype(np.float32))[:, :, None]
    return (scale * quants.astype(np.float32) - minimum).reshape(-1, 256)


def _q4_k(blocks: Bytes) -> _Array:
    return _scaled_k(blocks, _fields(blocks[:, 16:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32))


def _q5_k(blocks: Bytes) -> _Array:
    low = _fields(blocks[:, 48:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    high = _fields(blocks[:, None, 16:48], 1).reshape(-1, 8, 32)
    return _scaled_k(blocks, _with_high_bits(low, high, 4))


def _q6_k(blocks: Bytes) -> _Array:
    # 128 bytes of low nibbles, 64 of high bit pairs, 16 signed scales, scale
    scale = _half(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    low = _fields(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 16, 16)
    high = _fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    quants = _signed(_with_high_bits(low, high, 4), 32)
    return (scale[:, :, None] * quants.astype(np.float32)).reshape(-1, 256)


def _iq4_nl(blocks: Bytes) -> _Array:
    return _half(blocks[:, :2]) * _IQ4_LEVELS[_nibbles(blocks[:, 2:])]


def _iq4_xs(blocks: Bytes) -> _Array:
    # scale, 8 high bit pairs of the group scales, their 8 low nibbles, 8 groups of 16 bytes
    low = _fields(blocks[:, 4:8, None], 4).reshape(-1, 8)
    high = _fields(blocks[:, 2:4, None], 2).reshape(-1, 8)
    scale = _half(blocks[:, :2]) * _signed(_with_high_bits(low, high, 4), 32).astype(np.float32)
    levels = _IQ4_LEVELS[_nibbles(blocks[:, 8:].reshape(-1, 8, 16))]
    return (scale[:, :, None] * levels).reshape(-1, 256)


_DECODERS: Mapping[TensorType, Callable[[Bytes], _Array]] = MappingProxyType(
    {
        TensorType.F32: _f32,
        TensorType.F16: _f16,
        TensorType.BF16: _bf16,
        TensorType.Q8_0: _q8_0,
        TensorType.Q4_0: _q4_0,
        TensorType.Q4_1: _q4_1,
        TensorType.Q5_0: _q5_0,
        TensorType.Q5_1: _q5_1,
        TensorType.Q2_K: _q2_k,
        TensorType.Q3_K: _q3_k,
        TensorType.Q4_K: _q4_k,
        TensorType.Q5_K: _q5_k,
        TensorType.Q6_K: _q6_k,
        TensorType.IQ4_NL: _iq4_nl,
        TensorType.IQ4_XS: _iq4_xs,
    }
)

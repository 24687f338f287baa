"""Dequantization equals that of ggml's own Python package, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gapless.errors import UnsupportedModelError
from gapless.loading import TensorType
from gapless.loading.dequantize import dequantize

gguf = pytest.importorskip("gguf")

WEIGHTS = [kind for kind in TensorType if kind.is_weight]
QUANTIZED = [kind for kind in WEIGHTS if kind.is_quantized]

# Where the f16 numbers of a block are (offsets in bytes).
F16_OFFSETS = {
    TensorType.Q4_0: [0],
    TensorType.Q4_1: [0, 2],
    TensorType.Q5_0: [0],
    TensorType.Q5_1: [0, 2],
    TensorType.Q8_0: [0],
    TensorType.Q2_K: [80, 82],
    TensorType.Q3_K: [108],
    TensorType.Q4_K: [0, 2],
    TensorType.Q5_K: [0, 2],
    TensorType.Q6_K: [208],
    TensorType.IQ4_NL: [0],
    TensorType.IQ4_XS: [0],
}
EXTREME_SCALES = [0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 1.0, -1.0, 65504.0, -65504.0, np.inf, -np.inf, np.nan]


def random_blocks(kind: TensorType, num_blocks: int) -> npt.NDArray[np.uint8]:
    generator = np.random.default_rng(kind.value)
    return generator.integers(0, 256, (num_blocks, kind.block_bytes), np.uint8)


def assert_same_bits(kind: TensorType, blocks: npt.NDArray[np.uint8]) -> None:
    ours = dequantize(kind, blocks.reshape(-1), (len(blocks), kind.block_size))
    with np.errstate(all="ignore"):
        theirs: Any = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind.value))
    assert ours.dtype == np.float32
    # The sign of a NaN is not defined by IEEE 754; everything else is.
    nan = np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(ours), nan)
    np.testing.assert_array_equal(ours.view(np.uint32)[~nan], theirs.view(np.uint32)[~nan])


@pytest.mark.parametrize("kind", WEIGHTS)
def test_block_sizes(kind: TensorType) -> None:
    expected = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind.value)]
    assert (kind.block_size, kind.block_bytes) == expected
    assert kind.name == gguf.GGMLQuantizationType(kind.value).name


@pytest.mark.parametrize("kind", WEIGHTS)
def test_random_bytes(kind: TensorType) -> None:
    """Any bytes are a valid block, so these meet every scale and every quant, NaN and infinity included."""
    assert_same_bits(kind, random_blocks(kind, 4096))


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("scale", EXTREME_SCALES)
def test_extreme_scales(kind: TensorType, scale: float) -> None:
    blocks = random_blocks(kind, 64)
    for second in EXTREME_SCALES:
        for value, offset in zip((scale, second), F16_OFFSETS[kind], strict=False):
            blocks[:, offset : offset + 2] = np.array([value], np.float16).view(np.uint8)
        assert_same_bits(kind, blocks)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("byte", [0x00, 0x0F, 0xF0, 0x7F, 0x80, 0xFF])
def test_uniform_bytes(kind: TensorType, byte: int) -> None:
    assert_same_bits(kind, np.full((2, kind.block_bytes), byte, np.uint8))


@pytest.mark.parametrize("kind", WEIGHTS)
def test_shapes_and_chunks(kind: TensorType, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_blocks(kind, 30).reshape(-1)
    whole = dequantize(kind, blocks, (3, 5, 2 * kind.block_size))
    assert whole.shape == (3, 5, 2 * kind.block_size)
    monkeypatch.setattr("gapless.loading.dequantize._BYTES_AT_ONCE", 7 * kind.block_bytes)
    chunked = dequantize(kind, blocks, (30 * kind.block_size,))
    np.testing.assert_array_equal(chunked.view(np.uint32), whole.reshape(-1).view(np.uint32))


@pytest.mark.parametrize("kind", WEIGHTS)
def test_unaligned_read_only_bytes(kind: TensorType) -> None:
    data = b"x" + random_blocks(kind, 3).tobytes()
    unaligned = np.frombuffer(data, np.uint8, offset=1)
    aligned = np.frombuffer(data[1:], np.uint8)
    shape = (3 * kind.block_size,)
    np.testing.assert_array_equal(
        dequantize(kind, unaligned, shape).view(np.uint32), dequantize(kind, aligned, shape).view(np.uint32)
    )


def test_wrong_sizes() -> None:
    for num_bytes, shape in [(33, (32,)), (34, (33,)), (34, (64,)), (34, (2**40, 2**40))]:
        with pytest.raises(ValueError, match="bytes for Q8_0"):
            dequantize(TensorType.Q8_0, np.zeros(num_bytes, np.uint8), shape)
    with pytest.raises(UnsupportedModelError, match="I64"):
        dequantize(TensorType.I64, np.zeros(8, np.uint8), (1,))

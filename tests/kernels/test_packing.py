"""Packed weights: what goes in comes out, bit for bit; InstantQuant's error is what its levels promise."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Ggml

from gapless._native import PackedWeight, linear

BLOCK_TYPES = [
    Ggml.Q4_0, Ggml.Q4_1, Ggml.Q5_0, Ggml.Q5_1, Ggml.Q8_0, Ggml.IQ4_NL,
    Ggml.Q3_K, Ggml.Q4_K, Ggml.Q5_K, Ggml.Q6_K, Ggml.IQ4_XS,
]  # fmt: skip
PACKED_AS = {
    Ggml.Q4_0: "int4", Ggml.Q4_1: "int4", Ggml.Q4_K: "int4",
    Ggml.Q5_0: "int5", Ggml.Q5_1: "int5", Ggml.Q5_K: "int5",
    Ggml.Q3_K: "int6", Ggml.Q6_K: "int6",
    Ggml.Q8_0: "int8", Ggml.IQ4_NL: "int8", Ggml.IQ4_XS: "int8", Ggml.Q2_K: "int8",
}  # fmt: skip
# Where the f16 scales and minimums lie in a block: random bits there would be NaN or huge.
F16_OFFSETS = {
    Ggml.Q4_0: [0], Ggml.Q4_1: [0, 2], Ggml.Q5_0: [0], Ggml.Q5_1: [0, 2], Ggml.Q8_0: [0],
    Ggml.Q2_K: [80, 82], Ggml.Q3_K: [108], Ggml.Q4_K: [0, 2], Ggml.Q5_K: [0, 2], Ggml.Q6_K: [208],
    Ggml.IQ4_NL: [0], Ggml.IQ4_XS: [0],
}  # fmt: skip


def random_blocks(kind: Ggml, rows: int, cols: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Rows of blocks with every bit random except for sensible scales. [rows, row_bytes]"""
    rng = np.random.default_rng(seed)
    block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * cols // block_size, type_size), dtype=np.uint8)
    for offset in F16_OFFSETS[kind]:
        scales = rng.normal(0, 0.01, len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def bits(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """The bits of floats, with -0 as 0: the sign of a zero depends on the order of a sum only."""
    return (x + np.float32(0)).view(np.uint32)


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda k: k.name)
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_gguf_types_dequantize_as_the_gguf_package_does(kind: Ggml, rows: int) -> None:
    cols = 768
    raw = random_blocks(kind, rows, cols)
    weight = PackedWeight.pack(raw.reshape(-1), int(kind), rows, cols)
    assert (weight.rows, weight.cols, weight.type) == (rows, cols, PACKED_AS[kind])
    np.testing.assert_array_equal(bits(weight.dequantize()), bits(gguf.dequantize(raw, kind)))


@pytest.mark.parametrize("kind", [Ggml.Q4_0, Ggml.Q5_1, Ggml.Q8_0], ids=lambda k: k.name)
def test_rows_of_an_odd_number_of_groups(kind: Ggml) -> None:
    raw = random_blocks(kind, 20, 32 * 9)
    weight = PackedWeight.pack(raw.reshape(-1), int(kind), 20, 32 * 9)
    np.testing.assert_array_equal(bits(weight.dequantize()), bits(gguf.dequantize(raw, kind)))


@pytest.mark.parametrize("kind", [Ggml.F32, Ggml.F16, Ggml.BF16], ids=lambda k: k.name)
@pytest.mark.parametrize("cols", [1, 33, 64])
def test_plain_types_are_kept(kind: Ggml, cols: int) -> None:
    values = np.random.default_rng(1).normal(size=(19, cols)).astype(np.float32)
    raw = gguf.quantize(values, kind)
    weight = PackedWeight.pack(np.ascontiguousarray(raw).view(np.uint8).reshape(-1), int(kind), 19, cols)
    assert weight.type == kind.name.lower()
    np.testing.assert_array_equal(weight.dequantize(), gguf.dequantize(raw, kind))


def test_q2_k_becomes_int8_within_half_a_level() -> None:
    raw = random_blocks(Ggml.Q2_K, 16, 512)
    weight = PackedWeight.pack(raw.reshape(-1), int(Ggml.Q2_K), 16, 512)
    expected = gguf.dequantize(raw, Ggml.Q2_K)
    largest = np.abs(expected).reshape(16, -1, 32).max(-1, keepdims=True)
    error = np.abs(weight.dequantize() - expected).reshape(16, -1, 32)
    assert weight.type == "int8"
    # Half a level, plus what rounding the scale to f16 takes from the largest value.
    assert (error <= largest * (0.5 / 127 + 2.0**-11) * 1.01 + 1e-7).all()


@pytest.mark.parametrize("kind", [Ggml.Q4_1, Ggml.F16], ids=lambda k: k.name)
def test_row_map_picks_and_permutes_rows(kind: Ggml) -> None:
    rng = np.random.default_rng(2)
    if kind == Ggml.F16:
        raw = rng.normal(size=(40, 64)).astype(np.float16).view(np.uint8)
    else:
        raw = random_blocks(kind, 40, 64)
    rows = rng.permutation(40)[:23].astype(np.int32)
    picked = PackedWeight.pack(raw.reshape(-1), int(kind), 23, 64, row_map=rows)
    whole = PackedWeight.pack(raw.reshape(-1), int(kind), 40, 64)
    np.testing.assert_array_equal(picked.dequantize(), whole.dequantize()[rows])


def test_row_map_outside_the_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="row_map"):
        PackedWeight.pack(np.zeros(4 * 64, np.uint8), int(Ggml.F32), 1, 16, row_map=np.array([4], np.int32))


def test_packing_does_not_depend_on_threads() -> None:
    raw = random_blocks(Ggml.Q4_K, 200, 512)
    one, two = (PackedWeight.pack(raw.reshape(-1), int(Ggml.Q4_K), 200, 512, num_threads=n) for n in (1, 2))
    np.testing.assert_array_equal(one.dequantize(), two.dequantize())


def test_k_quants_stay_close_to_the_size_of_the_file() -> None:
    limits = {Ggml.Q4_0: 1.0, Ggml.Q4_K: 1.03, Ggml.Q5_K: 1.03, Ggml.Q6_K: 1.0, Ggml.Q8_0: 1.0}
    for kind, more in limits.items():
        raw = random_blocks(kind, 64, 1024)
        assert PackedWeight.pack(raw.reshape(-1), int(kind), 64, 1024).nbytes <= raw.size * more


@pytest.mark.parametrize("source", [np.float32, np.float16])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_instant_quant_error(quant: str, group_size: int, source: type[np.floating]) -> None:
    rows, cols = 33, 160 if group_size == 32 else 384
    values = np.random.default_rng(3).normal(0, 0.02, (rows, cols)).astype(source)
    kind = Ggml.F32 if source is np.float32 else Ggml.F16
    weight = PackedWeight.pack(values.view(np.uint8).reshape(-1), int(kind), rows, cols, quant, group_size)
    assert weight.type == quant
    groups = values.astype(np.float32).reshape(rows, -1, group_size if group_size > 0 else cols)
    error = (weight.dequantize() - values.astype(np.float32)).reshape(groups.shape)
    if quant == "int8":
        level = np.abs(groups).max(-1, keepdims=True) / 127
    else:
        level = (groups.max(-1, keepdims=True) - groups.min(-1, keepdims=True)) / 15
    # Rounding to levels leaves level^2 / 12 on the average; the fit may move single values by more.
    assert np.mean(error**2) <= np.mean(level**2) / 12 * 1.05


def test_instant_quant_of_a_constant_group_is_exact() -> None:
    values = np.full((16, 64), 0.5, np.float32)
    values[3] = 0
    weight = PackedWeight.pack(values.view(np.uint8).reshape(-1), int(Ggml.F32), 16, 64, "int4", 32)
    np.testing.assert_array_equal(weight.dequantize(), values)


@pytest.mark.parametrize(
    ("kind", "cols", "quant", "group_size", "message"),
    [
        (Ggml.Q4_0, 48, "none", 32, "block"),
        (Ggml.Q4_K, 320, "none", 32, "block"),
        (Ggml.F32, 64, "int4", 48, "group_size"),
        (Ggml.Q8_0, 64, "int4", 32, "InstantQuant"),
        (16, 256, "none", 32, "type 16"),
    ],
)
def test_what_cannot_be_packed_is_named(
    kind: int, cols: int, quant: str, group_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PackedWeight.pack(np.zeros(1 << 16, np.uint8), int(kind), 1, cols, quant, group_size)


@pytest.mark.parametrize("activations", ["a8", "a16"])
def test_linear_is_a_matrix_product(activations: str) -> None:
    raw = random_blocks(Ggml.Q6_K, 40, 512)
    weight = PackedWeight.pack(raw.reshape(-1), int(Ggml.Q6_K), 40, 512)
    x = np.random.default_rng(4).normal(size=(7, 512)).astype(np.float32)
    expected = x @ weight.dequantize().T
    norms = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weight.dequantize(), axis=1)
    y = linear(weight, x, activations)
    # a8: each activation is off by at most 1/254 of its group's largest, at random.
    assert (np.abs(y - expected) <= norms * (0.02 if activations == "a8" else 1e-5)).all()
    np.testing.assert_array_equal(y[2:3], linear(weight, x[2:3], activations, num_threads=2))

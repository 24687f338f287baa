"""How the values of a tensor are stored: the block formats of ggml, and the plain types of safetensors."""

from __future__ import annotations

from enum import Enum


class TensorType(Enum):
    """A storage format. The value is ggml's number for it; types that ggml does not have count down from -1.

    A tensor's rows are sequences of blocks: `block_size` values in `block_bytes` bytes.
    """

    block_size: int
    block_bytes: int

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    Q2_K = 10, 256, 84
    Q3_K = 11, 256, 110
    Q4_K = 12, 256, 144
    Q5_K = 13, 256, 176
    Q6_K = 14, 256, 210
    IQ4_NL = 20, 32, 18
    IQ4_XS = 23, 256, 136
    BF16 = 30, 1, 2
    # Types that checkpoints carry beside their weights (masks, positions, indices): listed, never a weight.
    I8 = 24, 1, 1
    I16 = 25, 1, 2
    I32 = 26, 1, 4
    I64 = 27, 1, 8
    F64 = 28, 1, 8
    U8 = -1, 1, 1
    U16 = -2, 1, 2
    U32 = -3, 1, 4
    U64 = -4, 1, 8
    BOOL = -5, 1, 1

    def __new__(cls, number: int, block_size: int = 1, block_bytes: int = 1) -> TensorType:
        member = object.__new__(cls)
        member._value_ = number
        member.block_size = block_size
        member.block_bytes = block_bytes
        return member

    @property
    def is_weight(self) -> bool:
        """Whether Gapless can compute with a weight stored like this."""
        return self not in _NOT_WEIGHTS

    @property
    def is_quantized(self) -> bool:
        """Whether values share a scale, in blocks."""
        return self.block_size > 1

    def nbytes(self, num_values: int) -> int:
        """Size of `num_values` values, which must be a whole number of blocks."""
        assert num_values % self.block_size == 0, (self, num_values)
        return num_values // self.block_size * self.block_bytes


_NOT_WEIGHTS = frozenset(
    {
        TensorType.I8,
        TensorType.I16,
        TensorType.I32,
        TensorType.I64,
        TensorType.F64,
        TensorType.U8,
        TensorType.U16,
        TensorType.U32,
        TensorType.U64,
        TensorType.BOOL,
    }
)

"""The types of the KV cache: which layer gets which, and what they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

_VALUE_BYTES = {"f16": 2, "bf16": 2, "int8": 1}
_INT8_SCALE_BYTES = 4  # for each key head and each value head of a token

# Rounding errors of int8 keys grow with the largest of them, and biases of this size are most of a key. With
# all layers in int8, Qwen2.5-Coder-0.5B is off by up to 6.4 nats; with f16 in its layers of such biases (0,
# 1, 2 and 8 of 24, 66 to 211; the others have at most 35) by up to 0.12, which is less than with bf16.
_LARGEST_INT8_KEY_BIAS = 64.0


def layer_kv_dtypes(
    kv_dtype: str, num_layers: int, key_biases: Mapping[int, npt.NDArray[np.float32]]
) -> tuple[str, ...]:
    """The type of each layer's cache: `kv_dtype`, but f16 instead of int8 where keys are too large for it.

    `key_biases`, by layer, are those of the projections to keys; models without have none.
    """
    if kv_dtype != "int8":
        return (kv_dtype,) * num_layers
    return tuple(
        "f16" if np.abs(key_biases.get(layer, 0)).max() > _LARGEST_INT8_KEY_BIAS else kv_dtype
        for layer in range(num_layers)
    )


def kv_bytes_per_token(dtypes: Sequence[str], num_kv_heads: int, head_dim: int) -> int:
    """Bytes that a token adds to a cache with layers of these types, scales included."""

    def head_bytes(dtype: str) -> int:
        return head_dim * _VALUE_BYTES[dtype] + (_INT8_SCALE_BYTES if dtype == "int8" else 0)

    return sum(2 * num_kv_heads * head_bytes(dtype) for dtype in dtypes)

"""A large array of strings that stays in its file until it is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import overload

import numpy as np
import numpy.typing as npt

LENGTH_BYTES = 8  # the u64 in front of every string


class StringArray(Sequence[str]):
    """The strings of one GGUF array, decoded when asked for (a vocabulary has 262k of them, merges 500k).

    Bytes that are not UTF-8 survive: they are decoded with `surrogateescape`, so
    `text.encode("utf-8", "surrogateescape")`, or `bytes_at`, gives exactly what the file has.
    """

    def __init__(self, data: memoryview, starts: npt.NDArray[np.int64]) -> None:
        """`starts[i]` is where string i begins in `data`; a last entry is where one more would begin."""
        self._data = data
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def bytes_at(self, index: int) -> bytes:
        """The bytes of one string, as the file has them."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"string {index} of {len(self)}")
        index %= len(self)
        return bytes(self._data[self._starts[index] : self._starts[index + 1] - LENGTH_BYTES])

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.bytes_at(index).decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        # One copy of the region, then plain slices of it: twice as fast as slicing the mapping each time.
        first, last = int(self._starts[0]), int(self._starts[-1])
        region = bytes(self._data[first:last])
        starts = (self._starts - first).tolist()
        for start, following in pairwise(starts):
            yield region[start : following - LENGTH_BYTES].decode("utf-8", "surrogateescape")

    def __repr__(self) -> str:
        return f"<StringArray of {len(self)} strings>"

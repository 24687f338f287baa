"""The KV cache's blocks, as numbers: each is free or held by exactly one sequence."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Blocks 0 ... num_blocks - 1. The block freed last is given out first: its memory is already touched."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = bytearray(b"\1" * num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` free blocks; the caller has asked `can_allocate`."""
        assert 0 <= count <= len(self._free)
        if count == 0:
            return []
        blocks = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for block in blocks:
            self._is_free[block] = 0
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Take back blocks that `allocate` gave out."""
        for block in reversed(list(blocks)):
            assert not self._is_free[block], f"block {block} freed twice"
            self._is_free[block] = 1
            self._free.append(block)

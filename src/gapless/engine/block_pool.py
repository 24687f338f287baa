"""The KV cache's blocks, as numbers: free, or held by one sequence or several.

A block whose contents are known may be found again after its last holder has let go (see `prefix_cache`); it
counts as free all the same, and is given out anew when nothing else is left, the one that was let go first
before the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf


class BlockPool:
    """Blocks 0 ... num_blocks - 1. `forget(block)` is told when a kept block is given out for something
    else."""

    def __init__(self, num_blocks: int, forget: Callable[[int], None] = lambda block: None) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._forget = forget
        self._num_holders = [0] * num_blocks
        self._is_kept = bytearray(num_blocks)
        self._free = list(
            range(num_blocks - 1, -1, -1)
        )  # the last one freed is taken first: its memory is touched
        self._kept: dict[int, None] = {}  # free, but with contents; in the order of being let go

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, kept ones included."""
        return len(self._free) + len(self._kept)

    def can_allocate(self, count: int) -> bool:
        return count <= self.num_free

    def num_holders(self, block: int) -> int:
        return self._num_holders[block]

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """How many of these count as free now, but would not if they were shared."""
        return sum(not self._num_holders[block] for block in blocks)

    def allocate(self, count: int) -> list[int]:
        """`count` free blocks with one holder each; the caller has asked `can_allocate`."""
        assert 0 <= count <= self.num_free
        if count == 0:
            return []
        blocks = self._free[: -count - 1 : -1]
        del self._free[-count:]
        while len(blocks) < count:
            block = next(iter(self._kept))
            del self._kept[block]
            self._is_kept[block] = 0
            self._forget(block)
            blocks.append(block)
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One holder more for blocks that are held or kept."""
        for block in blocks:
            if self._num_holders[block] == 0:
                assert self._is_kept[block], f"block {block} has no contents to share"
                del self._kept[block]
            self._num_holders[block] += 1

    def keep(self, block: int) -> None:
        """From now on this held block has contents worth keeping when it is let go."""
        assert self._num_holders[block] > 0
        self._is_kept[block] = 1

    def free(self, blocks: SequenceOf[int]) -> None:
        """One holder less. The last blocks of a sequence will be given out before its first: those are of use
        to more prompts."""
        for block in reversed(blocks):
            assert self._num_holders[block] > 0, f"block {block} freed twice"
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            if self._is_kept[block]:
                self._kept[block] = None
            else:
                self._free.append(block)

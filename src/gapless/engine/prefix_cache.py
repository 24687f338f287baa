"""Finds blocks whose keys and values a new sequence can use, because its tokens begin alike.

A full block is known by the hash of its tokens and of all before them. A hit is taken only when the block's
own tokens are the same too; the ones before have been compared on the way.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from hashlib import blake2b
from typing import NamedTuple

_HASH_BYTES = 16


class _Entry(NamedTuple):
    block: int
    tokens: bytes


def block_tokens(token_ids: SequenceOf[int], index: int, block_size: int) -> bytes:
    """The tokens of full block `index`, as bytes."""
    return array("i", token_ids[index * block_size : (index + 1) * block_size]).tobytes()


def chain_hash(previous: bytes, tokens: bytes) -> bytes:
    """The hash of a block after a block with hash `previous` (empty for the first)."""
    return blake2b(previous + tokens, digest_size=_HASH_BYTES).digest()


class PrefixCache:
    """hash -> block. Which blocks stay alive is the block pool's business."""

    def __init__(self) -> None:
        self._entries: dict[bytes, _Entry] = {}
        self._hash_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, hash_: bytes, tokens: bytes) -> int | None:
        entry = self._entries.get(hash_)
        return entry.block if entry is not None and entry.tokens == tokens else None

    def insert(self, hash_: bytes, tokens: bytes, block: int) -> bool:
        """False if there is a block with these contents already: then this one stays unknown."""
        if hash_ in self._entries:
            return False
        self._entries[hash_] = _Entry(block, tokens)
        self._hash_of[block] = hash_
        return True

    def forget(self, block: int) -> None:
        del self._entries[self._hash_of.pop(block)]

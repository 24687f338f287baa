"""How much memory this process may still take, and how large the KV cache should be."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gapless.errors import InvalidRequestError

GIB = 1 << 30

# The cache's memory is only touched as it fills, so a large one costs nothing by itself; the other half is
# left to everything else on the machine.
_SHARE_OF_FREE_MEMORY = 0.5


@dataclass(frozen=True)
class KVPlan:
    """Size of the KV cache in blocks, and of the longest sequence in tokens."""

    max_model_len: int
    num_blocks: int


def plan_kv(
    *,
    bytes_per_token: int,
    block_size: int,
    context_length: int,
    max_num_seqs: int,
    max_model_len: int | None = None,
    kv_cache_gib: float | None = None,
    free_bytes: int | None = None,
) -> KVPlan:
    """Room for `max_num_seqs` sequences of full length, or for what fits: `kv_cache_gib`, else half the free
    memory.

    Without `max_model_len` sequences may be as long as the model's context, or as long as the cache when that
    is smaller. InvalidRequestError if `max_model_len` is beyond the model's context or does not fit.
    """
    if max_model_len is not None and max_model_len > context_length:
        raise InvalidRequestError(
            f"max_model_len is {max_model_len}, but the model was made for at most {context_length} tokens.",
            param="max_model_len",
        )
    if kv_cache_gib is not None:
        budget = int(kv_cache_gib * GIB)
    else:
        budget = int((free_memory_bytes() if free_bytes is None else free_bytes) * _SHARE_OF_FREE_MEMORY)
    most_blocks = budget // (bytes_per_token * block_size)
    wanted_len = max_model_len or context_length
    blocks_of_one = -(-wanted_len // block_size)
    if most_blocks < blocks_of_one and (max_model_len is not None or most_blocks < 1):
        needed = blocks_of_one * block_size * bytes_per_token / GIB
        raise InvalidRequestError(
            f"A sequence of {wanted_len} tokens needs {needed:.2f} GiB of KV cache, but {budget / GIB:.2f} "
            "GiB are available: lower max_model_len or raise kv_cache_gib.",
            param="max_model_len" if kv_cache_gib is None else "kv_cache_gib",
        )
    num_blocks = min(most_blocks, blocks_of_one * max_num_seqs)
    return KVPlan(min(wanted_len, num_blocks * block_size), num_blocks)


def free_memory_bytes(root: Path = Path("/")) -> int:
    """What the machine has available, or what the cgroup (v1 or v2) and its ancestors still allow."""
    available = [_meminfo(root, "MemAvailable"), *_cgroup_rooms(root)]
    return max(0, min(available, default=0))


def peak_rss_bytes() -> int:
    """The most memory that this process has held so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def rss_bytes() -> int:
    """What this process holds now; the peak where the system does not tell."""
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_rss_bytes()
    return num_pages * resource.getpagesize()


def _meminfo(root: Path, key: str) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return 4 * GIB  # not Linux: a size that nearly every machine has
    for line in lines:
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 4 * GIB


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """Limit minus use of every cgroup above this process with a limit. Cache pages do not count as used."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_name, used_name, cache_key = (
                "sys/fs/cgroup",
                "memory.max",
                "memory.current",
                "inactive_file",
            )
        elif "memory" in controllers.split(","):
            base, limit_name = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            used_name, cache_key = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        top = root / base
        directory = top / path.lstrip("/")
        for group in [directory, *directory.parents]:
            limit, used = _number(group / limit_name), _number(group / used_name)
            if limit is not None and used is not None:
                yield limit - used + _stat(group / "memory.stat", cache_key)
            if group == top:
                break


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _stat(path: Path, key: str) -> int:
    try:
        for line in path.read_text().splitlines():
            if line.startswith(f"{key} "):
                return int(line.split()[1])
    except OSError:
        pass
    return 0

"""Loads the weights of a model, one tensor at a time, so that it is never in memory twice."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from gapless.loading import Checkpoint
from gapless.loading.dequantize import dequantize
from gapless.quantization.policy import LOSSY, Packing
from gapless.quantization.source import TensorSource

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (bytes done, bytes in total)
F32 = npt.NDArray[np.float32]


def load_weights(
    checkpoint: Checkpoint,
    sources: Mapping[str, TensorSource],
    packings: Mapping[str, Packing],
    num_threads: int = 1,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Every weight by neutral name: matrices as `_native.PackedWeight`, vectors as float32 arrays.

    Reads the file from front to back and gives its pages back as it goes. `progress` is called after each
    weight. FormatError if the bytes of a tensor do not make sense.
    """
    from gapless import _native

    _log_lossy(checkpoint, sources)
    remaining = Counter(source.info.name for source in sources.values())
    total = sum(source.nbytes for source in sources.values())
    done = 0
    loaded: dict[str, Any] = {}
    for name, source in sorted(sources.items(), key=lambda item: (item[1].info.shard, item[1].info.offset)):
        packing = packings.get(name)
        if packing is None:
            loaded[name] = read_f32(checkpoint, source)
        else:
            rows, cols = source.weight.shape
            loaded[name] = _native.PackedWeight.pack(
                checkpoint.raw(source.info.name),
                source.info.type.value,
                rows,
                cols,
                quant=packing.quant.name if packing.quant else "none",
                group_size=packing.quant.group_size if packing.quant else 32,
                row_map=source.row_map,
                num_threads=num_threads,
                release_source=True,
            )
        remaining[source.info.name] -= 1
        if not remaining[source.info.name]:
            checkpoint.release(source.info.name)
        done += source.nbytes
        if progress is not None:
            progress(done, total)
    return loaded


def read_f32(checkpoint: Checkpoint, source: TensorSource) -> F32:
    """A weight's values as the network uses them, in f32. For vectors, and for tests."""
    values = dequantize(source.info.type, checkpoint.raw(source.info.name), source.info.shape)
    if source.row_map is not None:
        values = values[source.row_map]
    return np.ascontiguousarray(values + np.float32(source.add) if source.add else values)


def _log_lossy(checkpoint: Checkpoint, sources: Mapping[str, TensorSource]) -> None:
    counts = Counter(source.info.type for source in sources.values() if source.info.type in LOSSY)
    for kind, count in counts.items():
        logger.warning(
            "%s: %d tensors of type %s are converted to int8, which rounds their values slightly.",
            checkpoint.path,
            count,
            kind.name,
        )

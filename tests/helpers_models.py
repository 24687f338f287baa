"""The tiny checked-in models, and ways to run them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gapless.graph.passes import fuse
from gapless.graph.reference import Reference
from gapless.loading import open_checkpoint
from gapless.loading.dequantize import dequantize
from gapless.models import describe
from gapless.quantization import read_f32

Array = npt.NDArray[Any]

TINY = Path(__file__).parent / "data" / "tiny"
NAMES = sorted(path.name for path in TINY.iterdir() if path.is_dir())


def expected(name: str) -> tuple[Array, Array]:
    """The prompt [num_tokens] and its logits [num_tokens, vocab_size] by transformers, f32."""
    saved = np.load(TINY / name / "expected.npz")
    return saved["token_ids"], saved["logits"]


def reference_logits(
    path: Path, steps: Iterable[Array], *, fused: bool = False, cache_type: type = np.float32
) -> Array:
    """Logits of all tokens, by the numpy reference, which gets them in these steps."""
    with open_checkpoint(path) as checkpoint:
        network = describe(checkpoint)
        weights = {name: read_f32(checkpoint, source) for name, source in network.sources.items()}
    graph = fuse(network.graph, set(weights)) if fused else network.graph
    sequence = Reference(graph, weights, cache_type)
    return np.concatenate([sequence.run(step) for step in steps])


def reference_states(path: Path, tokens: Array, cache_type: type = np.float32) -> Array:
    """The final states of all tokens [num_tokens, hidden_size], by the numpy reference."""
    with open_checkpoint(path) as checkpoint:
        network = describe(checkpoint)
        weights = {name: read_f32(checkpoint, source) for name, source in network.sources.items()}
    return Reference(network.graph, weights, cache_type).states(tokens)


def relative_error(found: Array, wanted: Array) -> float:
    """Largest difference, relative to the largest number."""
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def log_softmax(logits: Array) -> Array:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def read_tensors(folder: Path) -> dict[str, Array]:
    """All tensors of a model folder, in f32."""
    with open_checkpoint(folder) as checkpoint:
        return {
            name: np.array(dequantize(info.type, checkpoint.raw(name), info.shape))
            for name, info in checkpoint.tensors.items()
        }

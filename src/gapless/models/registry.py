"""Finds the definition of a network by the names that checkpoints give it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gapless.errors import FormatError, UnsupportedModelError
from gapless.graph.builder import GraphBuilder
from gapless.graph.ir import Graph
from gapless.loading import Checkpoint, CheckpointKind
from gapless.models.config import HARMLESS_HF_KEYS, ModelConfig
from gapless.models.keys import Keys
from gapless.models.pooling import read_pooling
from gapless.models.tensors import TensorTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Architecture:
    """One kind of network: how to read its configuration, what it computes, what its tensors are called.

    `hf_types` are values of `model_type` in config.json, `gguf_types` of `general.architecture`.
    """

    name: str
    hf_types: tuple[str, ...]
    gguf_types: tuple[str, ...]
    from_hf: Callable[[Keys], ModelConfig]
    from_gguf: Callable[[Keys], ModelConfig]
    build: Callable[[GraphBuilder, Any], Graph]
    hf_tensors: TensorTable
    gguf_tensors: TensorTable

    def tensors(self, kind: CheckpointKind) -> TensorTable:
        return self.gguf_tensors if kind is CheckpointKind.GGUF else self.hf_tensors


def architectures() -> tuple[Architecture, ...]:
    """All networks that Gapless knows."""
    from gapless.models import gemma2, gemma3, llama, mistral, phi3, qwen2, qwen3

    modules = (llama, mistral, qwen2, qwen3, gemma2, gemma3, phi3)
    return tuple(module.ARCHITECTURE for module in modules)


def find_architecture(checkpoint: Checkpoint) -> Architecture:
    """The network of a checkpoint. UnsupportedModelError (with the known names) or FormatError."""
    is_gguf = checkpoint.kind is CheckpointKind.GGUF
    key = "general.architecture" if is_gguf else "model_type"
    name = checkpoint.metadata.get(key)
    if not isinstance(name, str):
        raise FormatError(f"{checkpoint.path}: key {key!r} is missing")
    known: list[str] = []
    for architecture in architectures():
        types = architecture.gguf_types if is_gguf else architecture.hf_types
        if name in types:
            _check_task(checkpoint)
            return architecture
        known.extend(types)
    raise UnsupportedModelError(
        f"{checkpoint.path}: {key} is {name!r:.100}, which Gapless does not know. "
        f"Known: {', '.join(sorted(known))}."
    )


def _check_task(checkpoint: Checkpoint) -> None:
    """Refuses classifiers, reward models and the like, which share a model_type with text generators."""
    classes = checkpoint.metadata.get("architectures")
    if checkpoint.kind is CheckpointKind.GGUF or not isinstance(classes, list) or not classes:
        return
    if not any(str(name).endswith(("ForCausalLM", "ForConditionalGeneration")) for name in classes):
        raise UnsupportedModelError(
            f"{checkpoint.path} is a {classes[0]!r:.100}, which does not generate text."
        )


def _check_causal(keys: Keys, is_gguf: bool) -> None:
    """Refuses networks whose tokens see those after them, as some that only embed texts do."""
    name = "attention.causal" if is_gguf else "is_causal"
    if not keys.flag(name, True):
        raise keys.refuse(name, "only causal networks are supported")


def read_config(checkpoint: Checkpoint, architecture: Architecture) -> ModelConfig:
    """The network's configuration. Logs keys that it does not use.

    FormatError if a key is missing or malformed, UnsupportedModelError if it asks for what Gapless lacks.
    """
    keys = Keys.of(checkpoint)
    is_gguf = checkpoint.kind is CheckpointKind.GGUF
    _check_causal(keys, is_gguf)
    config = architecture.from_gguf(keys) if is_gguf else architecture.from_hf(keys)
    config = replace(config, pooling=read_pooling(checkpoint, keys))
    ignored = [name for name in keys.unread() if name not in HARMLESS_HF_KEYS]
    if ignored:
        logger.info("%s: keys that are not used: %s", checkpoint.path, ", ".join(ignored))
    return config

"""What the networks are: configurations, graphs and tensor names, one file per Hugging Face `model_type`."""

from gapless.models.config import ModelConfig
from gapless.models.loader import (
    LoadedModel,
    MemoryEstimate,
    Network,
    describe,
    estimate_memory,
    load_model,
)
from gapless.models.registry import Architecture, architectures

__all__ = [
    "Architecture",
    "LoadedModel",
    "MemoryEstimate",
    "ModelConfig",
    "Network",
    "architectures",
    "describe",
    "estimate_memory",
    "load_model",
]

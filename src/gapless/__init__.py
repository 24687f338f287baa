"""Gapless: LLM inference for CPUs. `LLM` (or `AsyncEngine`) runs a model, `SamplingParams` says how."""

from typing import TYPE_CHECKING, Any

from gapless._version import __version__

if TYPE_CHECKING:
    from gapless.async_engine import AsyncEngine
    from gapless.config import EngineConfig
    from gapless.llm import LLM
    from gapless.sampling import (
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        Pooling,
        RequestOutput,
        SamplingParams,
        StructuredOutputs,
    )


__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "Logprob",
    "Pooling",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]

_MODULES = {"LLM": "gapless.llm", "AsyncEngine": "gapless.async_engine", "EngineConfig": "gapless.config"}


def __getattr__(name: str) -> Any:
    """Imports the public names when they are first used: `import gapless` alone costs next to nothing."""
    if name in __all__:
        from importlib import import_module

        return getattr(import_module(_MODULES.get(name, "gapless.sampling")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

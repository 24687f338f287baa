"""Gapless: LLM inference for CPUs. `LLM` runs a model, `SamplingParams` says how."""

from typing import TYPE_CHECKING, Any

from gapless._version import __version__

if TYPE_CHECKING:
    from gapless.llm import LLM
    from gapless.sampling import CompletionOutput, Logprob, RequestOutput, SamplingParams


__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Imports the public names when they are first used: `import gapless` alone costs next to nothing."""
    if name == "LLM":
        from gapless.llm import LLM

        return LLM
    if name in __all__:
        import gapless.sampling

        return getattr(gapless.sampling, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""What a user asks of a generation or an embedding and what comes back: plain data, without an engine."""

from gapless.sampling.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    StreamChunk,
)
from gapless.sampling.params import SamplingParams
from gapless.sampling.pooling import Pooling
from gapless.sampling.structured import StructuredOutputs

__all__ = [
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "Pooling",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StreamChunk",
    "StructuredOutputs",
]
